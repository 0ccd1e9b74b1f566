"""A GGUF file as a transformers model whose quantised matrices stay as they are in the file (leanfleet.export.blocks).

transformers knows which tensor of a file is which parameter and how llama.cpp reordered its rows. It would read the file three
times, a text of the vocabulary at a time, and make float32 of every matrix. Here it is handed the numbers of the rows in the
place of the rows, which says the same of a matrix that nobody has to expand.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from leanfleet import gguf_file, progress
from leanfleet.export import blocks
from leanfleet.files import NO_CODE

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# What transformers reads of the vocabulary it reads by itself.
_VOCABULARY = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.scores", "tokenizer.ggml.token_type")


def load(path: str | Path, dtype: str = "float32", keep: bool = True) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """(transformers model in eval mode, its tokenizer) of a GGUF file.

    keep: matrices of a type that leanfleet.export.blocks knows stay quantised, exactly as they are; others become dtype, as all
    do without keep. Raises OSError for a file that is not there, ValueError for one that is damaged, of an architecture that
    transformers has no model for, or that lacks tensors.
    """
    path = Path(path)
    progress.tell("reading the file")
    file = gguf_file.read(path)
    from transformers import AutoConfig, AutoTokenizer
    from transformers.integrations.gguf import is_gguf_arch_supported

    architecture = _architecture(file)
    with _instead(file, {}):
        if is_gguf_arch_supported(architecture):  # by transformers' new reader, which our rows of numbers do not pass
            return _by_transformers(path, dtype)
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, **NO_CODE)
        model = _empty(config)
    matrices = {t.name: t for t in file.tensors.values() if t.kind in blocks.KINDS and len(t.shape) == 2}
    found = _parameters(file, model, matrices)
    _fill(model, file, found)
    if not keep:
        progress.tell("expanding the weights")
        blocks.release(model, torch.float32)
    if missing := [name for name, p in model.named_parameters() if p.is_meta]:
        raise ValueError(f"{path} lacks the weights of {', '.join(missing[:3])}: it is no whole {type(model).__name__}")
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    model.config.name_or_path = str(path.parent)
    progress.tell("reading the tokenizer")
    with _instead(file, {}):
        return model.eval(), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, **NO_CODE)


def _architecture(file: gguf_file.File) -> str:
    """Raises ValueError for metadata that would make a model of more layers than there are tensors."""
    found = file.metadata.get("general.architecture", (8, b""))[1]
    if not isinstance(found, bytes):
        raise ValueError(f"{file.path} is damaged: general.architecture is no text")
    architecture = found.decode()
    layers = file.metadata.get(f"{architecture}.block_count", (4, 0))[1]
    if not isinstance(layers, int) or layers > len(file.tensors):
        raise ValueError(f"{file.path} is damaged: it has {str(layers)[:40]} layers and {len(file.tensors)} tensors")
    return architecture


def _by_transformers(path: Path, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"gguf_file": path.name, **NO_CODE}
    model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=getattr(torch, dtype), **options)
    return model.eval(), AutoTokenizer.from_pretrained(path.parent, **options)


def described(path: str | Path, model: PreTrainedModel) -> str:
    """A line about what stayed quantised, and what did not and why."""
    file = gguf_file.read(path)
    kept = {m.block_name for m in blocks.holders(model)}
    kinds: dict[bool, dict[str, int]] = {True: {}, False: {}}
    for t in file.tensors.values():
        if gguf_file.TYPES[t.type][1] > 1:
            names = kinds[t.name in kept]
            names[t.kind] = names.get(t.kind, 0) + 1

    def listed(names: dict[str, int]) -> str:
        return ", ".join(f"{count} of {kind}" for kind, count in names.items())

    text = f"matrices that stay as the file has them: {listed(kinds[True]) or 'none'}"
    return text + (f"; expanded to floating point: {listed(kinds[False])}" if kinds[False] else "")


def _empty(config: Any) -> PreTrainedModel:
    """A model of this configuration, its parameters without memory and its buffers as they should be."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with init_empty_weights(include_buffers=False), no_init_weights():
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@contextmanager
def _instead(file: gguf_file.File, rows: dict[str, np.ndarray]) -> Iterator[None]:
    """While this lasts, transformers gets from the package gguf what has been read already, and `rows` in the place of the
    tensors of these names."""
    import gguf

    before = gguf.GGUFReader, gguf.dequantize, gguf.get_tensor_name_map
    content = {id(t.data): (name, t) for name, t in file.tensors.items()}

    def dequantize(data: Any, kind: Any) -> np.ndarray:
        name, tensor = content[id(data)]
        return rows[name] if name in rows else expanded(tensor)

    gguf.GGUFReader = lambda path: _Read(file)  # type: ignore[assignment,misc]
    gguf.dequantize = dequantize  # type: ignore[assignment]
    gguf.get_tensor_name_map = functools.cache(before[2])
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.dequantize, gguf.get_tensor_name_map = before  # type: ignore[misc]


def expanded(tensor: gguf_file.Tensor) -> np.ndarray:
    """A tensor of any type as float32."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    if tensor.kind == "F32":
        return tensor.data.view(np.float32)
    if tensor.kind in blocks.KINDS and len(tensor.shape) == 2:
        return blocks.KINDS[tensor.kind](tensor.data).numbers()
    return dequantize(tensor.data, GGMLQuantizationType(tensor.type))


class _Read:
    """What transformers uses of gguf.GGUFReader, of a file that has been read."""

    def __init__(self, file: gguf_file.File) -> None:
        from gguf import GGMLQuantizationType

        sized = f"{file.metadata.get('general.architecture', (8, b''))[1].decode()}.vocab_size" in file.metadata
        self.fields = {
            key: _field(kind, value)
            for key, (kind, value) in file.metadata.items()
            if key not in _VOCABULARY or (key == _VOCABULARY[0] and not sized)  # their number is all that matters
        }
        self.tensors = [
            SimpleNamespace(name=t.name, data=t.data, tensor_type=GGMLQuantizationType(t.type)) for t in file.tensors.values()
        ]


def _field(kind: int, value: Any) -> SimpleNamespace:
    """A gguf.ReaderField, as far as transformers looks."""
    inner = value.type if isinstance(value, gguf_file.Array) else None
    values = value.values if isinstance(value, gguf_file.Array) else [value]
    parts = [np.frombuffer(v, np.uint8) if isinstance(v, bytes) else np.array([v]) for v in values]
    return SimpleNamespace(types=[kind] if inner is None else [kind, inner], parts=parts, data=range(len(parts)))


def _parameters(
    file: gguf_file.File, model: PreTrainedModel, matrices: dict[str, gguf_file.Tensor]
) -> dict[str, torch.Tensor | tuple[str, np.ndarray]]:
    """{parameter: its value, or (tensor, rows of it) where it is one of `matrices` with its rows in some order}."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.utils import logging

    logging.disable_progress_bar()
    starts, total = {}, 0
    for name, tensor in matrices.items():
        starts[name] = total
        total += tensor.shape[0]
    names, bounds = list(starts), np.array([*starts.values(), total])
    numbers = {name: start + np.arange(matrices[name].shape[0], dtype=np.int64)[:, None] for name, start in starts.items()}

    def given(rows: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
        with _instead(file, rows):
            return load_gguf_checkpoint(str(file.path), return_tensors=True, model_to_load=model)["tensors"]

    try:
        values = given(numbers)
    except (ValueError, IndexError):  # an architecture whose weights are more than reordered
        numbers, values = {}, given({})
    found: dict[str, torch.Tensor | tuple[str, np.ndarray]] = {}
    others = set()
    for name, value in values.items():
        if value.dtype != torch.int64:
            found[name] = value
            continue
        rows = value.numpy().ravel()
        source = names[int(np.searchsorted(bounds, rows[0], "right")) - 1]
        rows = rows - starts[source]
        if value.ndim == 2 and value.shape[1] == 1 and np.array_equal(np.sort(rows), np.arange(matrices[source].shape[0])):
            found[name] = source, rows
        else:
            others.add(name)
    if others:
        values = given({})
        found |= {name: values[name] for name in others}
    return found


def _fill(model: PreTrainedModel, file: gguf_file.File, found: dict[str, torch.Tensor | tuple[str, np.ndarray]]) -> None:
    """Gives a model its weights. Those of Linear and Embedding modules stay blocks where they are."""
    modules = dict(model.named_modules())
    held: dict[str, blocks.Blocks] = {}
    state: dict[str, torch.Tensor] = {}
    for number, (name, value) in enumerate(found.items()):
        progress.tell("taking the weights", number, len(found))
        if isinstance(value, torch.Tensor):
            state[name] = value
            continue
        tensor, rows = value
        module, _, last = name.rpartition(".")
        made = blocks.KINDS[file.tensors[tensor].kind](file.tensors[tensor].data)
        if not np.array_equal(rows, np.arange(len(rows))):
            made = made.rows(rows)
        if last == "weight" and isinstance(modules.get(module), (torch.nn.Linear, torch.nn.Embedding)):
            held[module] = made
            blocks.hold(modules[module], made, tensor)
        else:
            state[name] = torch.from_numpy(made.numbers())
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = model.config.get_text_config(decoder=True).tie_word_embeddings
    model.load_state_dict(state, strict=False, assign=True)
    if tied and isinstance(embedding, blocks.BlockEmbedding) and type(head) is torch.nn.Linear:
        blocks.hold(head, embedding.blocks, embedding.block_name)
    elif tied and head is not None and not isinstance(head, blocks.BlockLinear):
        model.tie_weights()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
