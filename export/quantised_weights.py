"""Weights of 4 or 8 bits for a model in floating point, as most decoders for ONNX Runtime have them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from leanfleet import progress
from leanfleet.export import blocks

BITS = (4, 8)
BLOCK = 32  # weights that share a scale; the size for which ONNX Runtime's kernels of 4 bits are fastest
ROUTERS = ("gate", "router")  # a mixture's choice of experts: small, and near ties change what it chooses


@dataclass(frozen=True)
class Quantised:
    """How many matrices have so many bits, and which Linear and Embedding modules are as they were."""

    matrices: dict[int, int]
    left: list[str]

    def __str__(self) -> str:
        counts = ", ".join(f"{count} of {bits} bits" for bits, count in sorted(self.matrices.items())) or "none"
        others = f"; as they were: {', '.join(self.left[:3])}" + (", ..." if len(self.left) > 3 else "") if self.left else ""
        return f"quantised matrices: {counts}{others}"


def quantise(model: torch.nn.Module, bits: int = 4) -> Quantised:
    """Rounds the weights of a transformers model's Linear and Embedding modules to 4 or 8 bits, in place, by ONNX Runtime's own
    quantiser: symmetric, a scale for each 32 weights of a row. Exported, they are com.microsoft.MatMulNBits and
    GatherBlockQuantized.

    model: float32, float16 or bfloat16. bits: 4 or 8; with 4, the embedding and the head have 8, as llama.cpp's writers have
    it. Left as they are: rows of a length that is no multiple of 32, the routers of mixtures, and experts, which are no Linear
    modules. The model itself computes with the rounded weights from then on.

    Raises ValueError for other bits and for weights that are not finite, ImportError without onnxruntime.

    Example:
        from transformers import AutoModelForCausalLM

        from leanfleet.export import export_decoder, quantise

        model = AutoModelForCausalLM.from_pretrained("llama").eval()
        print(quantise(model, bits=4))
        export_decoder(model, "exported")
    """
    if bits not in BITS:
        raise ValueError(f"quantise: bits is {bits!r}; expected 4 or 8")
    outer = [model.get_input_embeddings(), model.get_output_embeddings()] if hasattr(model, "get_input_embeddings") else []
    modules = [
        (name, m)
        for name, m in model.named_modules()
        if isinstance(m, (torch.nn.Linear, torch.nn.Embedding))
        and not isinstance(m, (blocks.BlockLinear, blocks.BlockEmbedding))
        and (isinstance(m, torch.nn.Linear) or any(m is o for o in outer))
    ]
    for name, module in modules:
        if not torch.isfinite(module.weight).all():
            raise ValueError(f"quantise: the weights of {name} are not finite; nothing was changed")
    made: dict[int, tuple[str, blocks.Blocks]] = {}  # by the weight, which tied modules share
    matrices: dict[int, int] = {}
    left, weights = [], []
    for number, (name, module) in enumerate(modules):
        progress.tell("quantising the weights", number, len(modules))
        weight = module.weight
        if weight.shape[1] % BLOCK or name.rpartition(".")[2] in ROUTERS:
            left.append(name)
            continue
        if id(weight) not in made:
            own = 8 if any(module is o for o in outer) else bits
            made[id(weight)] = f"{name}.weight", _blocks(weight.detach(), own)
            weights.append(weight)  # else another one may get its address
            matrices[own] = matrices.get(own, 0) + 1
        blocks.hold(module, made[id(weight)][1], made[id(weight)][0])
    return Quantised(matrices, left)


@contextmanager
def _root_logger_kept() -> Iterator[None]:
    """As it was before."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def _blocks(weight: torch.Tensor, bits: int) -> blocks.Blocks:
    with _root_logger_kept():  # the module sets it to tell everything
        from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, DefaultWeightOnlyQuantizer

    values = np.ascontiguousarray(weight.float().cpu().numpy().T)
    config = DefaultWeightOnlyQuantConfig(BLOCK, is_symmetric=True, bits=bits)
    packed, scales, _ = DefaultWeightOnlyQuantizer(config).qbits_block_quant(values)
    return blocks.Blocks(bits, packed, blocks.Factors(_narrow(scales.reshape(packed.shape[:2]))))


def _narrow(scales: np.ndarray) -> np.ndarray:
    """As float16, where that loses no more than 2^-11 of any."""
    narrow: Any = scales.astype(np.float16)
    sizes = np.abs(narrow[scales != 0])
    return narrow if np.isfinite(sizes).all() and (sizes >= np.finfo(np.float16).smallest_normal).all() else scales
