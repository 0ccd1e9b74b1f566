"""Weights that stay quantised, as a GGUF file has them: as BlockLinear, MatMulNBits and GatherBlockQuantized.

A row of weights is cut into blocks. Weight k of row n is scale[n, b] * (q[n, k] - centre) + shift[n, b] with b its block:
Q4_0 and Q8_0 are so by themselves, without a shift, and go to MatMulNBits; other types once q is counted from the centre of
what its bits hold, and go to BlockLinear where they have a shift then.

The numbers stay in the file as they were: a scale that GGUF has as a float16 times an integer is two arrays and a Mul, which
ONNX Runtime computes once, while it loads the file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from leanfleet import spec
from leanfleet.export import function_bodies
from leanfleet.export.fusions import MICROSOFT
from leanfleet.export.fusions.graph import Op, adder, is_microsoft, take_over

DOMAIN = "leanfleet.blocks"  # of the nodes that stand in a traced graph until expand() is done
# accuracy_level of MatMulNBits: activations as 8-bit integers, block by block, as llama.cpp takes them; or as they are, slowly.
ROUNDED, EXACT = 4, 1


@dataclass(frozen=True)
class Factors:
    """A number a block: the product of `coarse` [N, nb / m], float16, and `fine` [N, nb], integers, or `coarse` alone."""

    coarse: np.ndarray
    fine: np.ndarray | None = None

    def numbers(self, dtype: Any = np.float32) -> np.ndarray:
        """[N, nb]"""
        coarse = self.coarse.astype(dtype)
        if self.fine is None:
            return coarse
        return np.repeat(coarse, self.fine.shape[1] // coarse.shape[1], axis=1) * self.fine.astype(dtype)

    def rows(self, index: Any) -> Factors:
        return Factors(self.coarse[index], None if self.fine is None else self.fine[index])


@dataclass(frozen=True)
class Blocks:
    """A matrix [N, K]: w = scale (q - centre) + least + above * scale.

    packed: uint8 [N, nb, bytes of a block], as MatMulNBits has it. centre: 8 for 4 bits, 128 for 8. least: a number a block, or
    None for none; above: what q = 0 of the GGUF's type lies below the centre, where there is a least.
    """

    bits: int
    packed: np.ndarray
    scale: Factors
    least: Factors | None = None
    negative: bool = False  # the least number is taken off
    above: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        rows, count, size = self.packed.shape
        return rows, count * size * 8 // self.bits

    @property
    def size(self) -> int:
        """Weights a block."""
        return self.packed.shape[2] * 8 // self.bits

    def rows(self, index: Any) -> Blocks:
        """These rows alone, in this order."""
        least = None if self.least is None else self.least.rows(index)
        return Blocks(self.bits, self.packed[index], self.scale.rows(index), least, self.negative, self.above)

    def shift(self, dtype: Any = np.float32) -> np.ndarray | None:
        """[N, nb]: what is added to each weight of a block."""
        if self.least is None:
            return None
        least = self.least.numbers(dtype)
        return (-least if self.negative else least) + self.scale.numbers(dtype) * dtype(self.above)

    def numbers(self, dtype: Any = np.float32) -> np.ndarray:
        """The weights [N, K]."""
        q = (
            self.packed
            if self.bits == 8
            else np.stack([self.packed & 15, self.packed >> 4], -1).reshape(*self.packed.shape[:2], -1)
        )
        below = (8 if self.bits == 4 else 128) - (0 if self.least is None else self.above)
        found = q.astype(dtype)
        found -= dtype(below)
        found *= self.scale.numbers(dtype)[..., None]
        if self.least is not None:
            least = self.least.numbers(dtype)[..., None]
            found += -least if self.negative else least
        return found.reshape(self.shape)


def _parts(data: np.ndarray, width: int, *sizes: int) -> list[np.ndarray]:
    """Rows of bytes [N, bytes] as blocks of `width` bytes, cut into parts [N, nb, size]."""
    blocks = data.reshape(data.shape[0], -1, width)
    return np.split(blocks, np.cumsum(sizes)[:-1], axis=2)


def _halves(part: np.ndarray) -> np.ndarray:
    """float16 [N, nb] of parts of two bytes."""
    return np.ascontiguousarray(part).view(np.float16)[..., 0]


def _nibbles(q: np.ndarray) -> np.ndarray:
    """Two weights of up to 15 a byte, the first in the low half."""
    return q[..., 0::2] | (q[..., 1::2] << 4)


def _low_high(qs: np.ndarray) -> np.ndarray:
    """Bytes [..., n] as 4-bit numbers [..., 2n]: all low halves, then all high ones."""
    return np.concatenate([qs & 15, qs >> 4], -1)


def _q4_0(data: np.ndarray) -> Blocks:
    d, qs = _parts(data, 18, 2, 16)
    return Blocks(4, _nibbles(_low_high(qs)), Factors(_halves(d)))


def _q4_1(data: np.ndarray) -> Blocks:
    d, m, qs = _parts(data, 20, 2, 2, 16)
    return Blocks(4, _nibbles(_low_high(qs)), Factors(_halves(d)), Factors(_halves(m)), above=8)


def _five_bits(qh: np.ndarray, qs: np.ndarray) -> np.ndarray:
    return _low_high(qs) | (np.unpackbits(qh, axis=-1, bitorder="little") << 4)


def _q5_0(data: np.ndarray) -> Blocks:
    d, qh, qs = _parts(data, 22, 2, 4, 16)
    return Blocks(8, _five_bits(qh, qs) + np.uint8(128 - 16), Factors(_halves(d)))


def _q5_1(data: np.ndarray) -> Blocks:
    d, m, qh, qs = _parts(data, 24, 2, 2, 4, 16)
    return Blocks(8, _five_bits(qh, qs) + np.uint8(128 - 16), Factors(_halves(d)), Factors(_halves(m)), above=16)


def _q8_0(data: np.ndarray) -> Blocks:
    d, qs = _parts(data, 34, 2, 32)
    return Blocks(8, qs ^ np.uint8(128), Factors(_halves(d)))


def _k_scales(scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """12 bytes of Q4_K and Q5_K [N, nb, 12] as 6-bit scales and least numbers, both [N, 8 nb]."""
    a, b, c = (scales[..., i : i + 4] for i in (0, 4, 8))
    scale = np.concatenate([a & 63, (c & 15) | (a >> 6 << 4)], -1)
    least = np.concatenate([b & 63, (c >> 4) | (b >> 6 << 4)], -1)
    return scale.reshape(len(scales), -1), least.reshape(len(scales), -1)


def _k_quants(qs: np.ndarray) -> np.ndarray:
    """128 bytes a block of Q4_K and Q5_K as 4-bit numbers [N, 8 nb, 32]."""
    return _low_high(qs.reshape(*qs.shape[:2], 4, 32)).reshape(len(qs), -1, 32)


def _q4_k(data: np.ndarray) -> Blocks:
    d, dmin, scales, qs = _parts(data, 144, 2, 2, 12, 128)
    scale, least = _k_scales(scales)
    return Blocks(4, _nibbles(_k_quants(qs)), Factors(_halves(d), scale), Factors(_halves(dmin), least), True, 8)


def _q5_k(data: np.ndarray) -> Blocks:
    d, dmin, scales, qh, qs = _parts(data, 176, 2, 2, 12, 32, 128)
    scale, least = _k_scales(scales)
    high = np.stack([qh >> i & 1 for i in range(8)], 2).reshape(len(qs), -1, 32)
    q = _k_quants(qs) | high << 4
    return Blocks(8, q + np.uint8(128 - 16), Factors(_halves(d), scale), Factors(_halves(dmin), least), True, 16)


def _q6_k(data: np.ndarray) -> Blocks:
    ql, qh, scales, d = _parts(data, 210, 128, 64, 16, 2)
    low = _low_high(ql.reshape(*ql.shape[:2], 2, 64)).reshape(*ql.shape[:2], 2, 4, 32)
    wide = qh.reshape(*qh.shape[:2], 2, 32)
    high = np.stack([wide >> shift & 3 for shift in (0, 2, 4, 6)], 3)
    q = (low | high << 4).reshape(len(ql), -1, 16) + np.uint8(128 - 32)
    return Blocks(8, q, Factors(_halves(d), scales.view(np.int8).reshape(len(ql), -1)))


KINDS: dict[str, Callable[[np.ndarray], Blocks]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


_tracing = False


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """While this lasts, matrices of blocks are nodes of DOMAIN in what PyTorch traces."""
    global _tracing
    _tracing, before = True, _tracing
    try:
        yield
    finally:
        _tracing = before


def _node(module: Any, kind: str, inputs: tuple[torch.Tensor | None, ...], shape: Sequence[Any]) -> torch.Tensor:
    return torch.onnx.ops.symbolic(
        f"{DOMAIN}::{kind}", inputs, {"weight": module.block_name}, dtype=module.weight.dtype, shape=shape, version=1
    )


def _tensor(blocks: Blocks, dtype: torch.dtype) -> torch.Tensor:
    """The weights: in float64 without any rounding."""
    numbers = blocks.numbers(np.float64 if dtype == torch.float64 else np.float32)
    return torch.from_numpy(numbers).to(dtype)


class BlockLinear(torch.nn.Linear):
    """A Linear whose weights are Blocks: `blocks`, and `block_name`, their name. Its `weight` is empty."""

    blocks: Blocks
    block_name: str

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if _tracing:
            return _node(self, "Linear", (input, self.bias), (*input.shape[:-1], self.blocks.shape[0]))
        return torch.nn.functional.linear(input, _tensor(self.blocks, input.dtype), self.bias)


class BlockEmbedding(torch.nn.Embedding):
    """An Embedding whose weights are Blocks, as BlockLinear."""

    blocks: Blocks
    block_name: str

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if _tracing:
            return _node(self, "Embedding", (input,), (*input.shape, self.blocks.shape[1]))
        wanted, place = torch.unique(input, return_inverse=True)
        dtype = torch.float64 if _wide(self) else self.weight.dtype
        return _tensor(self.blocks.rows(wanted.numpy()), dtype)[place]


def _wide(module: torch.nn.Module) -> bool:
    return module.weight.dtype == torch.float64


def hold(module: torch.nn.Module, blocks: Blocks, name: str) -> None:
    """Makes a Linear or an Embedding, also one of a class of its own, hold blocks. name: theirs; tied modules share it."""
    base = BlockLinear if isinstance(module, torch.nn.Linear) else BlockEmbedding
    dtype = module.weight.dtype
    plain = type(module) in (torch.nn.Linear, torch.nn.Embedding)
    module.__class__ = base if plain else type(f"Block{type(module).__name__}", (type(module), base), {})
    module.weight = torch.nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
    module.blocks, module.block_name = blocks, name


def holders(model: torch.nn.Module) -> list[Any]:
    """The modules of a model that hold blocks."""
    return [m for m in model.modules() if isinstance(m, (BlockLinear, BlockEmbedding))]


def release(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Gives the modules that hold blocks ordinary weights of this type; those that shared blocks share them."""
    made: dict[str, torch.nn.Parameter] = {}
    for module in holders(model):
        if module.block_name not in made:
            made[module.block_name] = torch.nn.Parameter(_tensor(module.blocks, dtype), requires_grad=False)
        bases = type(module).__bases__
        base = torch.nn.Linear if isinstance(module, BlockLinear) else torch.nn.Embedding
        module.__class__ = base if type(module) in (BlockLinear, BlockEmbedding) else bases[0]
        module.weight = made[module.block_name]
        del module.blocks, module.block_name


class _Writer:
    """Puts blocks into a graph: arrays as initialisers, each once, and what ONNX Runtime computes of them while it loads."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph, self.made = graph, {}

    def array(self, name: str, array: np.ndarray) -> ir.Value:
        if name not in self.made:
            tensor = ir.tensor(np.ascontiguousarray(array), name=name)
            value = ir.Value(name=name, const_value=tensor)
            value.dtype, value.shape = tensor.dtype, ir.Shape(array.shape)
            self.graph.register_initializer(value)
            self.made[name] = value
        return self.made[name]

    def factors(self, op: Op, name: str, factors: Factors, dtype: Any, shape: Sequence[int]) -> ir.Value:
        """The number a block, in this shape."""
        coarse = op("Cast", self.array(f"{name}.coarse", factors.coarse), to=dtype)
        if factors.fine is not None:
            rows, count = factors.fine.shape
            parts = factors.coarse.shape[1]
            fine = op("Cast", self.array(f"{name}.fine", factors.fine.reshape(rows, parts, count // parts)), to=dtype)
            coarse = op("Mul", op("Unsqueeze", coarse, op("Constant", value_ints=[2])), fine)
        return op("Reshape", coarse, op("Constant", value_ints=list(shape)))

    def shift(self, op: Op, name: str, blocks: Blocks, dtype: Any) -> ir.Value:
        """[N, nb]"""
        shape = blocks.packed.shape[:2]
        assert blocks.least is not None
        scale = self.factors(op, f"{name}.scale", blocks.scale, dtype, shape)
        least = self.factors(op, f"{name}.least", blocks.least, dtype, shape)
        above = op("Cast", op("Constant", value_float=float(blocks.above)), to=dtype)
        return op("Sub" if blocks.negative else "Add", *((op("Mul", scale, above), least)))

    def product(self, before: ir.Node, x: Any, bias: np.ndarray | None, name: str, blocks: Blocks) -> ir.Value:
        """x [..., K] times the matrix."""
        op, dtype, (rows, width) = adder(self.graph, before), x.dtype, blocks.shape
        count = blocks.packed.shape[1]
        shifted = blocks.least is not None
        of_factors = ir.DataType.FLOAT if shifted else dtype  # MatMulNBits wants scales of x's type
        scale = self.factors(op, f"{name}.scale", blocks.scale, of_factors, (rows, count))
        of_bias = None if bias is None else self.array(f"{name}.bias", bias)
        if not shifted:
            inputs = [x, self.array(f"{name}.q", blocks.packed), scale, *([] if of_bias is None else [None, None, of_bias])]
            sizes = {"K": width, "N": rows, "bits": blocks.bits, "block_size": blocks.size}
            return op("MatMulNBits", *inputs, domain=MICROSOFT, **sizes, accuracy_level=ROUNDED)
        weight = self.numbers(op, name, blocks)
        inputs = [x, weight, scale, self.shift(op, name, blocks, of_factors), *([] if of_bias is None else [of_bias])]
        return op("BlockLinear", *inputs, domain=spec.DOMAIN, round_input=1)

    def numbers(self, op: Op, name: str, blocks: Blocks) -> ir.Value:
        """BlockLinear's weight: int4 as MatMulNBits has them, 8 bits counted from 0. Made of the array of an embedding that
        shares the matrix, while the file is loaded."""
        rows = blocks.shape[0]
        if f"{name}.q" not in self.made:
            flat = blocks.packed.reshape(rows, -1)
            return self.array(f"{name}.numbers", flat if blocks.bits == 4 else (flat ^ np.uint8(128)).view(np.int8))
        made = op("Reshape", self.made[f"{name}.q"], op("Constant", value_ints=[rows, -1]))
        made.dtype = ir.DataType.UINT8
        if blocks.bits == 8:
            centre = op("Cast", op("Constant", value_int=128), to=ir.DataType.INT16)
            made = op("Cast", op("Sub", op("Cast", made, to=ir.DataType.INT16), centre), to=ir.DataType.INT8)
            made.dtype = ir.DataType.INT8
        return made

    def lookup(self, before: ir.Node, tokens: Any, name: str, blocks: Blocks, dtype: Any) -> ir.Value:
        """Rows of the matrix."""
        op, (rows, count) = adder(self.graph, before), blocks.packed.shape[:2]
        made = op(
            "GatherBlockQuantized",
            self.array(f"{name}.q", blocks.packed),
            tokens,
            self.factors(op, f"{name}.scale", blocks.scale, dtype, (rows, count, 1)),
            domain=MICROSOFT,
            gather_axis=0,
            quantize_axis=2,
            block_size=blocks.size,
            bits=blocks.bits,
        )
        if blocks.least is not None:
            shift = op("Gather", self.shift(op, name, blocks, dtype), tokens, axis=0)
            made = op("Add", made, op("Unsqueeze", shift, op("Constant", value_ints=[-1])))
        return op("Reshape", made, op("Constant", value_ints=[0] * len(tokens.shape) + [blocks.shape[1]]))


def multiply_exactly(model: ir.Model) -> bool:
    """Has a model's products with blocks take activations as they are. Returns whether there is one."""
    nodes = [node for node in model.graph if is_microsoft(node, "MatMulNBits")]
    for node in nodes:
        node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", EXACT)
    own = [node for node in model.graph if (node.domain, node.op_type) == (spec.DOMAIN, "BlockLinear")]
    for node in own:
        node.attributes["round_input"] = ir.AttrInt64("round_input", 0)
    if own:
        function_bodies.attach(model)
    return bool(nodes or own)


def _alike(blocks: Blocks) -> tuple:
    """What blocks of one product must have in common."""
    factors = [(f is None, f is not None and f.fine is None) for f in (blocks.scale, blocks.least)]
    return blocks.bits, blocks.size, blocks.negative, blocks.above, *factors


def _joined(parts: Sequence[Blocks]) -> Blocks:
    """The rows of all."""

    def together(factors: list[Factors]) -> Factors:
        fines = [f.fine for f in factors if f.fine is not None]
        return Factors(np.concatenate([f.coarse for f in factors]), np.concatenate(fines) if fines else None)

    first = parts[0]
    packed = np.concatenate([p.packed for p in parts])
    scale, leasts = together([p.scale for p in parts]), [p.least for p in parts if p.least is not None]
    return Blocks(first.bits, packed, scale, together(leasts) if leasts else None, first.negative, first.above)


def expand(model: ir.Model, matrices: Mapping[str, Blocks]) -> int:
    """Writes the nodes of DOMAIN as ONNX Runtime's. Products of one value whose blocks are of one kind become one product and a
    Split. matrices: by the names that the nodes have. Returns the number of nodes that held matrices."""
    graph, writer = model.graph, _Writer(model.graph)
    groups: dict[tuple, list[tuple[ir.Node, Blocks, str]]] = {}
    count = 0
    for node in list(graph):
        if node.domain != DOMAIN:
            continue
        count += 1
        name = node.attributes.get_string("weight")
        blocks = matrices[name]
        if node.op_type == "Embedding":
            take_over(node.outputs[0], writer.lookup(node, node.inputs[0], name, blocks, node.outputs[0].dtype))
            graph.remove(node, safe=True)
        else:
            groups.setdefault((node.inputs[0], _alike(blocks)), []).append((node, blocks, name))
    for group in groups.values():
        _write_products(graph, writer, group)
    model.opset_imports.pop(DOMAIN, None)
    if count:
        model.opset_imports.setdefault(MICROSOFT, 1)
    return count


def _write_products(graph: ir.Graph, writer: _Writer, group: list[tuple[ir.Node, Blocks, str]]) -> None:
    nodes = [node for node, _, _ in group]
    first, name = nodes[0], "+".join(name for _, _, name in group)
    widths = [blocks.shape[0] for _, blocks, _ in group]
    biases = [
        ir.convenience.get_const_tensor(n.inputs[1]) if len(n.inputs) > 1 and n.inputs[1] is not None else None for n in nodes
    ]
    bias = None
    if known := [b.numpy() for b in biases if b is not None]:
        zeros = [np.zeros(width, known[0].dtype) for width in widths]
        bias = np.concatenate([z if b is None else b.numpy() for b, z in zip(biases, zeros, strict=True)])
    blocks = group[0][1] if len(group) == 1 else _joined([blocks for _, blocks, _ in group])
    made: Any = writer.product(first, first.inputs[0], bias, name, blocks)
    old = first.outputs[0]
    outputs = [made]
    if len(group) > 1:
        made.type, made.shape = old.type, old.shape and ir.Shape([*old.shape[:-1], sum(widths)])
        sizes = adder(graph, first)("Constant", value_ints=widths)
        split = ir.node("Split", [made, sizes], {"axis": -1}, num_outputs=len(group))
        graph.insert_before(first, split)
        outputs = list(split.outputs)
    for node, new in zip(nodes, outputs, strict=True):
        take_over(node.outputs[0], new)
        graph.remove(node, safe=True)
