"""Runs a case's tensors on one runtime: outputs by name, poisoned before."""

import contextlib
import functools
import os
import re
import subprocess
import tempfile
from pathlib import Path
from unittest import mock

import onnx_ir
import onnxruntime
import torch

from leanfleet import communicators, native, ort_ops, spec, trial
from leanfleet.export import function_bodies, torch_ops
from leanfleet.export.reference import FORMS
from leanfleet.ort_ops.sessions import CUDA
from stress import draw, judge, values
from support import ort_models, trt_cases
from support.kernels import (
    DTYPE_NAMES,
    INSTRUCTION_SETS,
    aligned,
    entry,
    instruction_sets,
    library_held_to,
    output_shapes,
    poisoned,
    run_kernel,
)


# What errors say about sizes that the CUDA kernels do not take.
LEFT_TO_THE_CPU = r"the CUDA kernels (take|do not)|run on the CPU"


def available():
    """The runtimes that this machine has."""
    gpu = torch.cuda.is_available()
    others = {
        "trt": has_plugins(),
        "cuda": gpu,
        "torch_cuda": gpu,
        "ort_cuda": gpu and CUDA in onnxruntime.get_available_providers(),
    }
    return [*instruction_sets(), "torch", "ort", "body", *(name for name, there in others.items() if there)]


@functools.cache
def has_plugins():
    """Whether there are the plugin library and what its driver is compiled with."""
    try:
        library = native.library_path("leanfleet_trt").exists()
        return library and trt_cases.cuda_root().exists() and trt_cases.headers()[0] is not None
    except (FileNotFoundError, StopIteration):
        return False


@contextlib.contextmanager
def settings(case, checked):
    """The environment of a call, and its instruction set's library."""
    changes = {"LEANFLEET_CHECK": "1" if checked else "0"}
    if case.runtime in instruction_sets()[:-1]:
        changes["LEANFLEET_LIBRARY_DIR"] = str(library_held_to(case.runtime))
    with mock.patch.dict(os.environ, changes), contextlib.ExitStack() as stack:
        for name in draw.names(case):
            stack.enter_context(communicators.create(name))
        yield


def run(case, inputs, attrs, threads, in_place=False, checked=False):
    """Runs it; inputs change where in_place lets outputs take them."""
    with settings(case, checked):
        if case.runtime in INSTRUCTION_SETS:
            return run_kernel(case.op, inputs, attrs, threads, in_place)
        if case.runtime in draw.GPU:
            return run_on_gpu(case, inputs, attrs, threads, in_place)
        return THROUGH[case.runtime](case, inputs, attrs, threads, in_place)


def run_on_gpu(case, inputs, attrs, threads, in_place):
    """Of copies there, which must stay as they are, but in place."""
    there = {name: t.cuda() for name, t in inputs.items()}
    if case.runtime == "cuda":
        found = run_kernel(case.op, there, attrs, 0, in_place)
    else:
        torch.cuda.synchronize()  # ONNX Runtime has a stream of its own
        found = THROUGH[case.runtime.removesuffix("_cuda")](case, there, attrs, threads, in_place)
    if not in_place:
        for name, t in inputs.items():
            if not bits(t).equal(bits(there[name])):
                raise judge.Wrong(f"an input changed: {name}")
    return {name: t.cpu() for name, t in found.items()}


def typed(op, attrs):
    """Attributes as PyTorch's schema has them; wrong ones as they are."""
    kinds = {"bool": bool, "int": int, "float": float, "string": str}
    known = {a.name: kinds[a.type] for a in op.attrs}
    return {name: known[name](v) if known[name] is not bool or v in (0, 1) else v for name, v in attrs.items()}


def torch_form(op, mutating=False):
    assert torch_ops  # whose import registers them
    return getattr(torch.ops.leanfleet, op.snake_name + ("_" if mutating else "")).default


@contextlib.contextmanager
def poisoned_memory():
    """torch.empty gives NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def run_torch(case, inputs, attrs, threads, in_place):
    op = draw.OPS[case.op]
    active = op.active_outputs(attrs)
    taken = {t.takes: t.name for t in active if in_place and t.takes}
    given = {}
    for i, t in enumerate(op.inputs):
        tensor = inputs.get(t.name)
        movable = case.strided and tensor is not None and t.name not in taken
        given[t.name] = values.strided(tensor, case.seed + i) if movable else tensor
    in_place = in_place and all(inputs.get(name) is not None for name in taken)
    form = torch_form(op, in_place)
    attrs = typed(op, {n: v for n, v in attrs.items() if not (in_place and n == op.mutating)})
    torch.set_num_threads(threads)
    with poisoned_memory():
        found = form(*given.values(), **attrs)
    returned = [t.name for t in op.outputs if not (in_place and t.takes)]
    outputs = dict(zip(returned, [found] if isinstance(found, torch.Tensor) else found, strict=True))
    outputs |= {name: inputs[source] for source, name in taken.items() if in_place}
    return {t.name: outputs[t.name] for t in active}


def _session(case, inputs, attrs, threads, library, outputs=None):
    op = draw.OPS[case.op]
    ranks = {name: t.dim() for name, t in inputs.items()}
    shapes = {name: list(t.shape) for name, t in inputs.items()}
    if case.seed % 2:  # sizes that the model leaves open
        shapes = {name: [str(axis) for axis in axes] for name, axes in draw.axes_of(op, ranks, attrs).items()}
        for name, shape in shapes.items():
            if spec.numbers_each(inputs[name].dtype) > 1:
                shape[-1] += " / 2"
    model = ort_models.node_model(op, shapes, attrs, case.dtype, outputs, forms=ort_models.forms_of(inputs))
    if not library:
        model = onnx_ir.to_proto(function_bodies.attach(onnx_ir.from_proto(model)))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.enable_cpu_mem_arena = case.seed % 4 > 1  # without one, who writes behind its memory damages the heap
    if library:
        ort_ops.register(options)
    providers = ["CPUExecutionProvider"]
    if case.runtime == "ort_cuda":
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")  # it is our node's CUDA kernel that runs
        providers = [CUDA]
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=providers)


def run_ort(case, inputs, attrs, threads, in_place):
    op = draw.OPS[case.op]
    found = ort_models.run_node(_session(case, inputs, attrs, threads, True), op, inputs, attrs, in_place)
    optional = [t.name for t in op.active_outputs(attrs) if t.when]
    if optional and not in_place:
        unread = optional[case.seed % len(optional) :]  # which this model leaves out
        read = {name: tensor for name, tensor in found.items() if name not in unread}
        outputs = ort_models.node_outputs(op, inputs, attrs)
        session = _session(case, inputs, attrs, threads, True, [t.name if t.name in read else "" for t in op.outputs])
        session.run_with_iobinding(ort_models.bound(session, inputs, {name: outputs[name] for name in read}))
        for name, tensor in read.items():
            if not bits(tensor).equal(bits(outputs[name])):
                raise judge.Wrong(f"{name} has other bits where nobody reads {', '.join(unread)}")
    return found


def run_body(case, inputs, attrs, threads, in_place):
    session = _session(case, inputs, attrs, threads, False)
    return ort_models.run_node(session, draw.OPS[case.op], inputs, attrs)


THROUGH = {"torch": run_torch, "ort": run_ort, "body": run_body}


# TensorRT plugins


@functools.cache
def plugin_driver():
    """(folder, program that stands in for TensorRT in it)."""
    folder = tempfile.TemporaryDirectory(prefix="leanfleet-")
    trt_cases.build_driver(Path(folder.name) / "driver")
    return folder, Path(folder.name) / "driver"


def drive_plugin(case, clean, inputs):
    """Takes the call through all of a plugin's entry points, with a GPU also through launches of it; raises judge.Wrong."""
    if any(t.dtype in FORMS for t in inputs.values()):
        return  # these layers take no quantised caches yet
    op, (folder, program) = draw.OPS[case.op], plugin_driver()
    launches = torch.cuda.is_available()
    expected = {name: torch.zeros(shape, dtype=dtype) for name, dtype, shape in output_shapes(op, inputs, case.attrs)}
    tolerances = dict.fromkeys(expected, 0.0)
    if launches:
        judged = judge.Judge(case, clean, inputs)
        tolerances = {name: judged.tolerance(name, t.dtype) for name, t in expected.items()}
        expected = {name: judged.exact[name].to(t.dtype) for name, t in expected.items()}
    with open(Path(folder.name) / "cases", "wb") as file:
        trt_cases.write_call(
            file,
            op,
            case.attrs,
            {name: to_numpy(t) for name, t in inputs.items()},
            {name: to_numpy(t) for name, t in expected.items()},
            tolerances,
            {name: [*t.shape, *t.shape] for name, t in inputs.items()},
            launches,
        )
    command = [program, native.library_path("leanfleet_trt"), file.name, *(["--launch"] if launches else [])]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode < 0 or result.returncode and not re.search(LEFT_TO_THE_CPU, result.stdout):
        raise judge.Wrong(f"the plugin's driver ends with {result.returncode}: {result.stdout[-2000:]}")


def to_numpy(tensor):
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(trial.BFLOAT16)
    return tensor.contiguous().numpy()


# Wrong calls


def refusal(case, inputs, attrs, checked):
    """The text of the error of a wrong call; None where there was none. Raises AssertionError where it wrote something."""
    op = draw.OPS[case.op]
    before = {name: t.clone() for name, t in inputs.items()}
    with settings(case, checked):
        if case.runtime in ("torch", "ort"):
            text = _refused_by_a_runtime(case, op, inputs, attrs)
        else:
            text = _refused_by_the_library(case, op, inputs, attrs)
    for name, t in before.items():
        assert bits(t).equal(bits(inputs[name])), f"the refused call changed {name}"
    return text


def bits(tensor):
    """Its bytes."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8) if flat.numel() else flat


def _refused_by_a_runtime(case, op, inputs, attrs):
    try:
        if case.runtime == "torch":
            form = torch_form(op)
            form(*[inputs.get(t.name) for t in op.inputs], **typed(op, attrs))
        else:
            feed = {name: ort_value(t) for name, t in inputs.items()}
            _wrong_session(case, op, inputs, attrs).run_with_ort_values(None, feed)
    except Exception as error:  # each runtime has exceptions of its own
        return str(error)
    return None


def _wrong_session(case, op, inputs, attrs):
    """Of a model whose inputs have these tensors' types, whatever the schema says; their sizes are open."""
    model = ort_models.node_model(op, {name: [None] * t.dim() for name, t in inputs.items()}, attrs, case.dtype)
    source = {t.name: t.takes if t.type in spec.OWN else t.name for t in op.outputs}
    for value in [*model.graph.input, *model.graph.output]:
        if (name := source.get(value.name, value.name)) in inputs:
            value.type.tensor_type.elem_type = ort_models.ONNX_TYPES[DTYPE_NAMES[inputs[name].dtype]]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    ort_ops.register(options)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def ort_value(tensor):
    kind = ort_models.ONNX_TYPES[DTYPE_NAMES[tensor.dtype]]
    if tensor.dtype == torch.bfloat16:
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(tensor.view(torch.int16).numpy().view("uint16"), kind)
    if tensor.dtype == torch.float8_e4m3fn:
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(tensor.view(torch.uint8).numpy(), kind)
    return onnxruntime.OrtValue.ortvalue_from_numpy(tensor.numpy())


def _refused_by_the_library(case, op, inputs, attrs):
    """By the question for the workspace and by the run alike, with poisoned outputs of the right sizes."""
    device = "cuda" if case.runtime == "cuda" else "cpu"
    inputs = {name: t.to(device).contiguous() for name, t in inputs.items()}
    try:
        shapes = output_shapes(op, inputs, attrs)
    except Exception:  # these inputs tell no sizes: the library must refuse them before it looks at outputs
        shapes = []
    outputs = {name: poisoned(shape, dtype, device) for name, dtype, shape in shapes if min(shape, default=1) >= 0}
    before = {name: t.clone() for name, t in outputs.items()}
    entries = [[entry(tensors.get(t.name)) for t in of_op] for tensors, of_op in ((inputs, op.inputs), (outputs, op.outputs))]
    call = native.Call(op.name, *entries, attrs, device, case.threads)
    texts, sizes = [], (0, 0)
    try:
        sizes = call.workspace()
    except (ValueError, native.UnsupportedError) as error:
        texts.append(str(error))
    buffers = [aligned(size, device, fill) for size, fill in zip(sizes, (0xFF, 0), strict=True)]
    try:
        call.run(buffers[0][1], sizes[0], buffers[1][1], sizes[1])
    except (ValueError, native.UnsupportedError) as error:
        texts.append(str(error))
    else:
        return None
    assert len(set(texts)) == 1, f"the question for the workspace and the run are refused with other words: {texts}"
    for name, t in before.items():
        assert bits(t).equal(bits(outputs[name])), f"the refused call wrote {name}"
    return texts[0]
