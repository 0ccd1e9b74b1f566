"""Runs an operator's kernel on torch tensors through the C interface, with poisoned outputs and scratch."""

import functools
import math
import os
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import torch

from leanfleet import native, spec

TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int32": torch.int32,
    "int64": torch.int64,
    "int8": torch.int8,
    "float8e4m3fn": torch.float8_e4m3fn,
    "uint8": torch.uint8,
}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
ALIGNMENT = 256


INSTRUCTION_SETS = ("baseline", "avx2", "avx512", "avx512_bf16")  # each can do what the ones before it can


def instruction_sets():
    """Those whose kernels this processor runs; the last is the one that the library takes by itself."""
    own = native.build_info().removeprefix("cpu ").partition(",")[0]
    return INSTRUCTION_SETS[: INSTRUCTION_SETS.index(own) + 1]


@functools.cache
def _copies():
    """A folder for this process's copies of the library."""
    return tempfile.TemporaryDirectory(prefix="leanfleet-")


@functools.cache
def library_held_to(instructions):
    """A folder with a copy of libleanfleet.so that runs these kernels in this process: LEANFLEET_CPU is read once by each
    loaded copy, in its first call."""
    folder = Path(_copies().name) / instructions
    folder.mkdir()
    shutil.copy(native.library_path("leanfleet"), folder)
    with mock.patch.dict(os.environ, LEANFLEET_CPU=instructions, LEANFLEET_LIBRARY_DIR=str(folder)):
        assert native.build_info().partition(",")[0] == f"cpu {instructions}"
    return folder


def examples(count):
    """How many examples of a random test are drawn: all, or the share that LEANFLEET_TEST_SHARE asks for."""
    return math.ceil(count * float(os.environ.get("LEANFLEET_TEST_SHARE", 1)))


def remembered(function):
    """Keeps what a reference gives for the same tensors and attributes: tests on every instruction set need it again.

    Arguments are dicts of tensors and attributes, or plain values. Callers get copies of the tensors."""
    results = {}

    def key_of(x):
        if isinstance(x, dict):
            return tuple((name, key_of(value)) for name, value in x.items())
        if isinstance(x, torch.Tensor):
            bits = x.detach().contiguous().view(-1).view(torch.uint8) if x.numel() else x.view(-1)
            return x.dtype, tuple(x.shape), bytes(bits.numpy())
        return repr(x)

    def copy_of(x):
        if isinstance(x, dict):
            return {name: copy_of(value) for name, value in x.items()}
        if isinstance(x, (tuple, list)):
            return type(x)(map(copy_of, x))
        return x.clone() if isinstance(x, torch.Tensor) else x

    @functools.wraps(function)
    def wrapper(*arguments):
        test = os.environ.get("PYTEST_CURRENT_TEST", "").partition("[")[0]
        if results.get("test") != test:  # one test's at a time
            results.clear()
            results["test"] = test
        key = hash(key_of(dict(enumerate(arguments))))
        if key not in results:
            results[key] = function(*arguments)
        return copy_of(results[key])

    return wrapper


def entry(tensor):
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr(), tuple(tensor.shape), DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))


def aligned(size, device, fill):
    """(keep-alive, address) of `size` bytes of `fill`, aligned to 256."""
    buffer = torch.full((size + ALIGNMENT,), fill, dtype=torch.uint8, device=device)
    return buffer, (buffer.data_ptr() + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def poisoned(shape, dtype, device):
    """NaN, or a huge negative number for integers: an element that no kernel wrote shows."""
    return torch.full(shape, float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min, dtype=dtype, device=device)


def output_shapes(op, inputs, attrs):
    """(name, dtype, shape) of each output for these inputs (a dict), worked out from ops.toml."""
    layout = attrs.get("layout", "bhnd")
    present = {name: tensor for name, tensor in inputs.items() if tensor is not None}
    given = op.given(present, attrs)
    dims = spec.sizes_of(
        pair
        for t in op.inputs
        if t.name in present
        for pair in zip(
            op.shape_of(t, given, present[t.name].dim()).ordered(layout),
            spec.in_numbers(present[t.name].shape, present[t.name].dtype),
        )
    )
    dims |= op.attr_sizes(attrs)
    result = []
    types = {"F": torch.float32, "I": torch.int32, "L": torch.int64}
    for t in op.active_outputs(attrs):
        dtype = t.dtype(inputs[op.inputs[0].name].dtype, types, {name: tensor.dtype for name, tensor in present.items()})
        if t.like:
            shape = tuple(inputs[t.like].shape)
        else:
            shape = tuple(spec.in_elements((axis.size(dims) for axis in op.shape_of(t, given).ordered(layout)), dtype))
        result.append((t.name, dtype, shape))
    return result


def run_kernel(op_name, inputs, attrs=None, threads=2, in_place=False, ops=None, simulated=False):
    """Runs the kernel; returns a dict of its outputs. inputs: dict of contiguous tensors or None, all on one device.

    Outputs and scratch are poisoned first, sync words are zero and must be zero afterwards. in_place: outputs that
    may take an input's buffer get it (the input tensors are then changed). simulated: the library's CUDA kernels take the
    host's tensors (support.simulated_gpu).
    """
    attrs = attrs or {}
    op = (ops or spec.all_specs())[op_name]
    device = next(t for t in inputs.values() if t is not None).device
    outputs = {}
    active = {t.name: t for t in op.active_outputs(attrs)}
    for name, dtype, shape in output_shapes(op, inputs, attrs):
        takes = active[name].takes
        taken = inputs.get(takes) if in_place and takes else None
        outputs[name] = taken if taken is not None else poisoned(shape, dtype, device)
    cuda = device.type == "cuda"
    call = native.Call(
        op_name,
        [entry(inputs.get(t.name)) for t in op.inputs],
        [entry(outputs.get(t.name)) for t in op.outputs],
        attrs,
        "cuda" if simulated else device.type,
        threads,
        torch.cuda.current_stream(device).cuda_stream if cuda else 0,
    )
    scratch_bytes, sync_bytes = call.workspace()
    scratch, scratch_at = aligned(scratch_bytes, device, 0xFF)
    sync, sync_at = aligned(sync_bytes, device, 0)
    call.run(scratch_at, scratch_bytes, sync_at, sync_bytes)
    if cuda:
        torch.cuda.synchronize(device)
    assert not sync.any(), "the kernel left its sync words set"
    before, after = scratch_at - scratch.data_ptr(), scratch_at - scratch.data_ptr() + scratch_bytes
    assert (scratch[:before] == 0xFF).all() and (scratch[after:] == 0xFF).all(), "it wrote outside its scratch"
    return outputs


class Launches:
    """One node on the GPU: its outputs, a workspace of its own, and launches that a CUDA graph can capture."""

    def __init__(self, op_name, inputs, attrs, in_place=False):
        op = spec.all_specs()[op_name]
        self.op_name, self.attrs, self.inputs = op_name, attrs, inputs
        takes = {t.name: t.takes for t in op.outputs if in_place}
        self.outputs = {}
        for name, dtype, shape in output_shapes(op, inputs, attrs):
            taken = inputs.get(takes.get(name))
            self.outputs[name] = poisoned(shape, dtype, "cuda") if taken is None else taken
        self.entries = [entry(inputs.get(t.name)) for t in op.inputs], [entry(self.outputs.get(t.name)) for t in op.outputs]
        sizes = native.Call(op_name, *self.entries, attrs, "cuda").workspace()
        self.buffers, self.workspace = [], []
        for size, fill in zip(sizes, (0xFF, 0)):
            buffer, address = aligned(size, "cuda", fill)
            self.buffers.append(buffer)
            self.workspace += [address, size]

    def run(self):
        """On torch's current stream."""
        stream = torch.cuda.current_stream().cuda_stream
        native.Call(self.op_name, *self.entries, self.attrs, "cuda", stream=stream).run(*self.workspace)

    def capture(self):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        return graph


def run_untouched(op_name, inputs, attrs, **options):
    """run_kernel of an operator that writes none of its inputs, and did not."""
    before = {name: x.clone() for name, x in inputs.items()}
    found = run_kernel(op_name, inputs, attrs, **options)
    assert all(torch.equal(x.nan_to_num(7.0), before[name].nan_to_num(7.0)) for name, x in inputs.items())
    return found
