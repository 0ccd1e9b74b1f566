"""Exported decoders of any size that take a folder little room and no memory: all large weights are the same bytes of one file.

A step's time does not depend on what the weights say. Folders can be made on one machine and timed on another: without their
weights, which complete() makes, they are some megabytes.
"""

import contextlib
from collections import Counter
from pathlib import Path
from unittest import mock

import onnx

WEIGHTS = "weights.data"
LARGE = 1 << 16  # bytes; smaller weights stay in the graph
ALIGNMENT = 4096  # of weights in their file, where each has a place of its own
DRAWN = 1 << 21  # bytes that are drawn; the file repeats them, so that experts of as many bytes or twice, ... are the same


def replaced(*members):
    """A context in which members of modules and classes, (owner, name, replacement) each, are other things."""
    with contextlib.ExitStack() as patches:
        for member in members:
            patches.enter_context(mock.patch.object(*member))
        return patches.pop_all()


class Thin:
    """Stands in for what export_decoder and add_serving write with, while a `with` block lasts."""

    def __init__(self):
        self._graphs = {}

    def __enter__(self):
        from leanfleet.export import decoder, experts, serving, tensor_parallel

        self._made = decoder.made
        self._replaced = replaced(
            (decoder, "made", self.made),
            (serving, "made", self.made),
            (decoder, "save", save),
            (serving, "_take_weights", lambda model, folder, file, part: outside(model, folder)),
            (tensor_parallel, "_part", part),
            (experts, "interleave", lambda weights: weights),
        )
        return self

    def __exit__(self, *error):
        self._replaced.close()

    def made(self, module, *arguments):
        """Ranks whose shares have equal shapes have equal graphs, traced once."""
        shapes = tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
        key = type(module).__name__, shapes
        if key not in self._graphs:
            self._graphs[key] = self._made(module, *arguments)
        return self._graphs[key]


def part(parameter, index):
    """A rank's share of a weight, of which nobody reads a large one."""
    import torch

    shape = torch.empty(parameter.shape, device="meta")[index].shape
    share = torch.empty(shape, dtype=parameter.dtype)
    return torch.nn.Parameter(parameter.detach()[index] if share.nbytes < LARGE else share, requires_grad=False)


def outside(model, folder):
    """Has the large weights of a graph in the folder's file. Returns those that it left: none."""
    import onnx_ir

    for v in model.graph.initializers.values():
        old = v.const_value
        if old.nbytes >= LARGE:
            v.const_value = onnx_ir.ExternalTensor(
                WEIGHTS, 0, old.nbytes, old.dtype, shape=old.shape, name=v.name, base_dir=folder
            )
    return []


def save(model, path):
    import onnx_ir

    outside(model, path.parent)
    onnx_ir.save(model, path)


def untouched(config, dtype):
    """A model of a configuration whose large weights are memory that nobody has written yet, and so takes none."""
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedModel

    with replaced(
        (torch.nn.Linear, "reset_parameters", lambda self: None),
        (torch.nn.Embedding, "reset_parameters", lambda self: None),
        (PreTrainedModel, "init_weights", lambda self: self.tie_weights()),
    ):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    for layer in (m for m in model.modules() if isinstance(m, (torch.nn.Linear, torch.nn.Embedding))):
        if layer.weight.nbytes < LARGE:
            torch.nn.init.normal_(layer.weight, std=0.02)
        if getattr(layer, "bias", None) is not None:
            torch.nn.init.zeros_(layer.bias)
    return model


def _large(model):
    """(initializer, bytes) of a graph's weights in the folder's file."""
    for t in model.graph.initializer:
        place = {e.key: e.value for e in t.external_data}
        if place.get("location") == WEIGHTS:
            yield t, int(place["length"])


def complete_apart(folder):
    """Makes the folder's weights, unless they are there: each in a place of its own with numbers of its own, drawn from a
    normal distribution of deviation 0.02. They take what a model of these shapes takes."""
    import torch

    folder = Path(folder)
    if (folder / WEIGHTS).exists():
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    random, new, graphs = torch.Generator(device).manual_seed(0), folder / f"{WEIGHTS}.part", {}
    with open(new, "wb") as file:
        for path in sorted(folder.glob("*.onnx")):
            graphs[path] = model = onnx.load(path, load_external_data=False)
            for t, size in _large(model):
                number = getattr(torch, onnx.TensorProto.DataType.Name(t.data_type).lower())
                drawn = torch.randn(size // number.itemsize, dtype=number, generator=random, device=device).mul_(0.02)
                file.seek(-file.tell() % ALIGNMENT, 1)
                place = {"location": WEIGHTS, "offset": file.tell(), "length": size}
                del t.external_data[:]
                t.external_data.extend(onnx.StringStringEntryProto(key=k, value=str(v)) for k, v in place.items())
                file.write(drawn.view(torch.uint8).cpu().numpy())
    for path, model in graphs.items():
        path.write_bytes(model.SerializeToString())
    new.rename(folder / WEIGHTS)


def complete(folder):
    """Makes the folder's weights, unless they are there: as many bytes as its largest has, drawn from a normal distribution of
    deviation 0.02 in the weights' type."""
    import torch

    folder, most, types = Path(folder), 0, Counter()
    if (folder / WEIGHTS).exists():
        return
    for path in folder.glob("*.onnx"):
        for t, size in _large(onnx.load(path, load_external_data=False)):
            most = max(most, size)
            types[t.data_type] += 1
    if not most:
        return
    # The type of most of them: a float32 table of 16-bit numbers has numbers near 0, the other way round there are NaNs.
    number = getattr(torch, onnx.TensorProto.DataType.Name(types.most_common(1)[0][0]).lower())
    some = 0.02 * torch.randn(DRAWN // number.itemsize, dtype=number, generator=torch.Generator().manual_seed(0))
    new = folder / f"{WEIGHTS}.part"
    with open(new, "wb") as file:
        for _ in range(-(-most // DRAWN)):
            file.write(some.view(torch.uint8).numpy())
    new.rename(folder / WEIGHTS)
