"""libleanfleet_ort.so in ONNX Runtime: kernels, shape inference, buffers taken in place, errors, registration.

The file runs twice: in the installed onnxruntime, and in the oldest that is supported (test_oldest_runtime).
"""

import ctypes
import re
import subprocess
import sys
import threading

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from leanfleet import ort_ops, spec
from support import ort_models
from support.kernels import run_kernel
from support.ort_nodes import (
    CASES,
    DTYPES,
    OPS,
    PROVIDERS,
    TOY,
    VARIANTS,
    check_variant,
    make_session,
    same_bits,
    shapes_of,
    variant,
)

OLDEST = "1.20.1"
RUNTIME = tuple(map(int, re.findall(r"\d+", onnxruntime.__version__)[:2]))
INFERS_SHAPES = RUNTIME >= (1, 28)  # see csrc/ort/ort_library.cpp
SCALED_ADD = TOY["ScaledAdd"]
TOY_SHAPES = {"x": ["b", "h", "n", "d"], "total": ["b", "h"]}
FLOAT = TensorProto.FLOAT


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    """Each device that there is; a machine with a GPU must have an onnxruntime that uses it."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        assert PROVIDERS["cuda"] in onnxruntime.get_available_providers(), "install onnxruntime-gpu to test on this GPU"
    return request.param


@pytest.fixture(scope="session")
def toy_folder():
    return ort_models.build_toy_library()


@pytest.fixture
def toy(toy_folder, monkeypatch):
    """The toy operator's library in place of the project's."""
    monkeypatch.setenv("LEANFLEET_LIBRARY_DIR", str(toy_folder))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(5)


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("name, index, dtype", CASES)
def test_kernel_through_onnxruntime(name, index, dtype, tmp_path, request):
    if name in TOY:
        request.getfixturevalue("toy")
    check_variant(name, index, dtype, tmp_path, "cpu")


@pytest.mark.parametrize("index", range(len(VARIANTS["ScaledAdd"])))
@pytest.mark.parametrize("dtype", DTYPES)
def test_toy_kernel_on_each_device(toy, device, index, dtype, tmp_path):
    check_variant("ScaledAdd", index, dtype, tmp_path, device)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_cover_the_schema(name):
    op, variants = OPS[name], VARIANTS[name]
    given = [{e.split()[-1] for e in extra} for extra, _, _ in variants]
    for t in op.inputs:
        if t.optional:
            assert any(t.name in g for g in given) and any(t.name not in g for g in given), t.name
    for a in op.attrs:
        assert a.refuse or any(a.name in attrs for _, attrs, _ in variants), a.name
    for t in op.outputs:
        assert any(t in op.active_outputs(attrs) for _, attrs, _ in variants), t.name
    assert set(VARIANTS) == set(OPS)


# ---- Shape inference


@pytest.mark.parametrize("name, index, dtype", CASES[::3])
def test_symbolic_shapes_of_outputs(name, index, dtype, request):
    """Every dimension of every output has the name, or the size, that the inputs give it; in old runtimes none has."""
    if name in TOY:
        request.getfixturevalue("toy")
    op, inputs, attrs = variant(name, index, dtype)
    layout, forms = attrs.get("layout", "bhnd"), ort_models.forms_of(inputs)
    present = {n for n, t in inputs.items() if t is not None}
    shapes = {}
    for t in op.inputs:
        if t.name in present:
            axes = op.shape_of(t, op.given(present, attrs), inputs[t.name].dim()).ordered(layout)
            # Head sizes are numbers in real models. A name cannot say "plus one".
            shapes[t.name] = [
                18 // spec.numbers_each(forms.get(t.name))
                if a.symbol in ("D", "R", "Dv")
                else a.symbol
                if a.symbol and not a.offset and not a.plus
                else None
                if a.symbol
                else a.offset
                for a in axes
            ]
    session = make_session(ort_models.node_model(op, shapes, attrs, dtype, forms=forms))
    if not INFERS_SHAPES:
        assert all(found.shape == [] for found in session.get_outputs())
        return
    known = {d for shape in shapes.values() for d in shape if isinstance(d, str)}
    for t, found in zip(op.active_outputs(attrs), session.get_outputs(), strict=True):
        if t.like:
            assert found.shape == shapes[t.like], t.name
            continue
        for axis, dim in zip(op.shape_of(t, op.given(present, attrs)).ordered(layout), found.shape, strict=True):
            if axis.symbol in ("D", "R", "Dv") or not axis.symbol:
                assert dim == (18 // spec.numbers_each(forms.get(t.takes)) if axis.symbol else axis.offset), (
                    t.name,
                    found.shape,
                )
            elif axis.symbol in op.attr_sizes(attrs):
                assert dim == attrs[axis.symbol], (t.name, found.shape)
            elif axis.symbol in known and not axis.plus:
                assert dim == axis.symbol, (t.name, found.shape)
            else:
                assert dim.startswith("leanfleet_unknown_"), (t.name, found.shape)


@pytest.mark.skipif(not INFERS_SHAPES, reason="this onnxruntime infers no shapes of our outputs")
def test_inference_from_what_is_known(toy):
    def inferred(shapes, attrs=None, outputs=None):
        model = ort_models.node_model(SCALED_ADD, shapes, attrs, outputs=outputs)
        return [o.shape for o in make_session(model).get_outputs()]

    # A size that only y gives; a size is worth more than a name; the rank is known even if no size is.
    assert inferred({"x": ["b", "h", "n", "d"], "y": ["b", 6, "n", "d"]}) == [["b", 6, "n", "d"]]
    assert inferred({"x": None, "y": ["b", 6, "n", 8]}) == [["b", 6, "n", 8]]
    (unknown,) = inferred({"x": None})
    assert len(set(unknown)) == 4 and all(d.startswith("leanfleet_unknown_") for d in unknown)
    # An unknown size has one name in all outputs, and the size of an output that is declared stays.
    first, second = inferred({"x": [None, None, "n", "d"], "total": None}, {"accumulate": 1})
    assert first[:2] == second and first[2:] == ["n", "d"]
    # An output that the node leaves out is no reason to fall over.
    assert inferred(TOY_SHAPES, {"accumulate": 1}, ["output"]) == [["b", "h", "n", "d"]]


def test_declared_shapes_are_kept(toy):
    """Also where the runtime infers nothing."""
    node = ort_models.make_node(SCALED_ADD, {"x"})
    shape = ["batch", 3, "seq", "width"]
    model = ort_models.make_model([node], [("x", FLOAT, shape)], [("output", FLOAT, shape)])
    assert make_session(model).get_outputs()[0].shape == shape


# ---- Buffers that an output may take


def accumulate_model(total="computed", second_use=False):
    """total -> ScaledAdd, which may update it in place -> Add -> end; that is 2 * total + 2 * sum of x.

    total: "computed" by a node as 2 * start, the graph's "input" start, or an "initializer" 0 .. 5 of shape [2,3].
    second_use: the total from before is read again afterwards and takes the place of one of the two.
    """
    name = {"computed": "total", "input": "start", "initializer": "constant"}[total]
    nodes = [helper.make_node("Add", ["start", "start"], ["total"])] if total == "computed" else []
    rename = {"total": name, "total_out": "updated"}
    nodes.append(ort_models.make_node(SCALED_ADD, {"x", "total"}, {"accumulate": 1}, rename=rename))
    nodes.append(helper.make_node("Add", ["updated", name if second_use else "updated"], ["end"]))
    inputs = [("x", FLOAT, ["b", "h", "n", "d"])] + ([] if total == "initializer" else [("start", FLOAT, ["b", "h"])])
    constant = numpy_helper.from_array(np.arange(6, dtype=np.float32).reshape(2, 3), "constant")
    # Buffers are only shared between tensors known to have the same size, which old runtimes must be told.
    shape = [2, 3] if total == "initializer" else ["b", "h"]
    infos = [(n, FLOAT, shape) for n in {name, "updated"} - {"start", "constant"}]
    initializers = [constant] if total == "initializer" else []
    return ort_models.make_model(nodes, inputs, [("end", FLOAT, None)], initializers, infos)


def test_second_consumer_sees_the_old_value(toy, device):
    session = make_session(accumulate_model(second_use=True), device)
    x, start = np.ones((2, 3, 4, 5), np.float32), np.arange(6, dtype=np.float32).reshape(2, 3)
    (end,) = session.run(["end"], {"x": x, "start": start})
    np.testing.assert_array_equal(end, 4 * start + 20)


def test_callers_input_is_not_written(toy, device):
    session = make_session(accumulate_model("input"), device)
    x, start = np.ones((2, 3, 4, 5), np.float32), np.arange(6, dtype=np.float32).reshape(2, 3)
    for _ in range(3):
        (end,) = session.run(["end"], {"x": x, "start": start})
        np.testing.assert_array_equal(start, np.arange(6).reshape(2, 3))
        np.testing.assert_array_equal(end, 2 * start + 40)


def test_initializer_is_not_written(toy, device):
    session = make_session(accumulate_model("initializer"), device)
    for _ in range(3):
        (end,) = session.run(["end"], {"x": np.ones((2, 3, 4, 5), np.float32)})
        np.testing.assert_array_equal(end, 2 * np.arange(6).reshape(2, 3) + 40)


def test_one_buffer_bound_to_input_and_output_is_updated(toy, device):
    model = ort_models.node_model(SCALED_ADD, {"x": [2, 3, 4, 5], "total": [2, 3]}, {"accumulate": 1})
    session = make_session(model, device)
    x, total, output = (torch.zeros(shape, device=device) for shape in ((2, 3, 4, 5), (2, 3), (2, 3, 4, 5)))
    x += 1
    binding = ort_models.bound(session, {"x": x, "total": total}, {"output": output, "total_out": total})
    for run in range(1, 4):
        session.run_with_iobinding(binding)
        assert (total == 20 * run).all() and (output == 1).all()


PEAK = """
import re, sys
from pathlib import Path
import numpy as np, onnxruntime
from leanfleet import ort_ops
options = onnxruntime.SessionOptions()
options.enable_cpu_mem_arena = options.enable_mem_pattern = False
session = ort_ops.make_session(sys.argv[1], ["CPUExecutionProvider"], options)
def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
feeds = {"x": np.ones((8, 1 << 19, 1, 1), np.float32), "start": np.ones((8, 1 << 19), np.float32)}
before = peak()
session.run(["end"], feeds)
print(peak() - before)
"""


def test_intermediate_is_updated_in_place(toy, tmp_path, monkeypatch):
    """The peak of memory is one tensor of 16 MiB lower than in a graph where the total from before is needed later."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1000000")  # what is freed goes back to the system
    peaks = []
    for second_use in (False, True):
        path = tmp_path / f"{second_use}.onnx"
        path.write_bytes(accumulate_model(second_use=second_use).SerializeToString())
        result = subprocess.run([sys.executable, "-P", "-c", PEAK, path], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        peaks.append(int(result.stdout) / 1024)
    assert 12 < peaks[1] - peaks[0] < 20, peaks


def test_nothing_is_written_after_an_error(toy, device):
    model = ort_models.node_model(SCALED_ADD, {"x": ["b", "h", "n", "d"], "total": ["c", "k"]}, {"accumulate": 1})
    session = make_session(model, device)
    x, total, output = (torch.full(shape, 7.0, device=device) for shape in ((2, 3, 4, 5), (2, 4), (2, 3, 4, 5)))
    message = r"ScaledAdd 'node': total has shape \[2,4\]: axis 1 of \[B,H\] is 4; expected 3"
    with pytest.raises(Exception, match=message):
        session.run_with_iobinding(ort_models.bound(session, {"x": x, "total": total}, {"output": output, "total_out": total}))
    assert (total == 7).all() and (output == 7).all()


# ---- Outputs, threads, memory


def test_output_that_nobody_reads(toy, device):
    """The attributes ask for total_out and the kernel writes it, but the node ends before it."""
    shapes = {"x": [2, 3, 4, 5], "total": [2, 3]}
    model = ort_models.node_model(SCALED_ADD, shapes, {"accumulate": 1}, outputs=["output"])
    x = np.ones((2, 3, 4, 5), np.float32)
    (found,) = make_session(model, device).run(None, {"x": x, "total": np.zeros((2, 3), np.float32)})
    np.testing.assert_array_equal(found, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gaps_between_outputs(dtype):
    """A node may leave out any outputs that its attributes ask for."""
    op, inputs, attrs = variant("NormalizedLinearAttention", 2, dtype)
    connected = ["output", "normalizer", "", "final_key_sum", "", "final_count"]
    session = make_session(ort_models.node_model(op, shapes_of(inputs), attrs, dtype, connected))
    expected = run_kernel(op.name, inputs, attrs, threads=0)
    found = {name: t for name, t in ort_models.node_outputs(op, inputs, attrs).items() if name in connected}
    session.run_with_iobinding(ort_models.bound(session, inputs, found))
    assert len(found) == 4 and all(same_bits(found[name], expected[name]) for name in found)


@pytest.mark.parametrize(
    "setting",
    [
        {"intra_op_num_threads": 1},
        {"intra_op_num_threads": 3},
        {"enable_cpu_mem_arena": False},
        {"execution_mode": onnxruntime.ExecutionMode.ORT_PARALLEL},
    ],
)
def test_session_options(toy, setting):
    options = onnxruntime.SessionOptions()
    for name, value in setting.items():
        setattr(options, name, value)
    op, inputs, attrs = variant("ScaledAdd", 2, "float16")
    model = ort_models.node_model(op, shapes_of(inputs), attrs, "float16")
    session = make_session(model, options=options)
    expected = run_kernel("ScaledAdd", inputs, attrs, threads=0, ops=TOY)
    found = ort_models.run_node(session, op, inputs, attrs)
    assert all(same_bits(found[key], expected[key]) for key in expected)


def run_in_threads(session, count, runs):
    """Runs one session on different inputs from several threads at once; returns the wrong results."""
    wrong = []

    def work(seed):
        generator = np.random.default_rng(seed)
        for _ in range(runs):
            x = generator.integers(-8, 8, (2, 3, 40, 5)).astype(np.float32)
            total = generator.integers(-8, 8, (2, 3)).astype(np.float32)
            output, total_out = session.run(["output", "total_out"], {"x": x, "total": total})
            if not (np.array_equal(output, x) and np.array_equal(total_out, total + x.sum((2, 3)))):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def test_runs_from_several_threads_at_once(toy, device):
    model = ort_models.node_model(SCALED_ADD, TOY_SHAPES, {"accumulate": 1})
    assert not run_in_threads(make_session(model, device), 4, 100)


def test_shapes_that_grow(toy, device):
    """Each run needs more scratch and may need more sync words than the one before."""
    session = make_session(ort_models.node_model(SCALED_ADD, TOY_SHAPES, {"accumulate": 1}), device)
    for batch in range(1, 40):
        x, total = np.ones((batch, 7, 33, 5), np.float32), np.full((batch, 7), 2, np.float32)
        output, total_out = session.run(["output", "total_out"], {"x": x, "total": total})
        assert (output == 1).all() and (total_out == 2 + 33 * 5).all()


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_cuda_graph(toy, device):
    """Captured once; replays follow the values in the bound buffers, and one of them is updated in place."""
    model = ort_models.node_model(SCALED_ADD, {"x": [2, 3, 4, 5], "total": [2, 3]}, {"accumulate": 1})
    session = make_session(model, device, enable_cuda_graph="1")
    x, total, output = (torch.ones(shape, device=device) for shape in ((2, 3, 4, 5), (2, 3), (2, 3, 4, 5)))
    binding = ort_models.bound(session, {"x": x, "total": total}, {"output": output, "total_out": total})
    session.run_with_iobinding(binding)  # runs several times: before the capture, and in it
    for scale in (1, 2, 3):
        x.fill_(scale)
        total.zero_()
        torch.cuda.synchronize()
        session.run_with_iobinding(binding)
        assert (total == 20 * scale).all() and (output == scale).all()


# ---- Errors


@pytest.mark.parametrize(
    "attrs, message",
    [
        ({"alpha": 1, "accumulate": 1}, "attribute alpha is an integer; expected a float"),
        ({"alpha": "1", "accumulate": 1}, "attribute alpha is a string; expected a float"),
        ({"alpha": [1.0, 2.0], "accumulate": 1}, "attribute alpha is a list; expected a single value"),
        ({"alpha": [1, 2], "accumulate": 1}, "attribute alpha is a list; expected a single value"),
        ({"alpha": float("nan"), "accumulate": 1}, "attribute alpha is nan; expected a finite number"),
        ({"accumulate": 1.0}, "attribute accumulate is a float; expected a bool"),
        ({"accumulate": 2}, "attribute accumulate is 2; expected 0 or 1"),
        ({"accumulate": 1, "layout": 1}, "attribute layout is an integer; expected a string"),
        ({"accumulate": 1, "layout": "hbnd"}, "attribute layout is 'hbnd'; expected one of bhnd, bnhd"),
        ({"accumulate": 1, "layout": "h" * 300}, "attribute layout is 'hhh"),
    ],
)
def test_wrong_attribute(toy, attrs, message):
    model = ort_models.node_model(SCALED_ADD, TOY_SHAPES, attrs, outputs=["output"], name="layers.3")
    with pytest.raises(Exception, match=re.escape("ScaledAdd 'layers.3': " + message)):
        make_session(model)


def test_output_that_the_attributes_do_not_ask_for(toy):
    model = ort_models.node_model(SCALED_ADD, {"x": ["b", "h", "n", "d"]}, {}, outputs=["output", "total_out"])
    message = "ScaledAdd 'node': output total_out is connected, but exists only with accumulate = 1"
    with pytest.raises(Exception, match=message):
        make_session(model)


@pytest.mark.parametrize(
    "shape, message",
    [
        ((2, 3), r"x has shape \[2,3\], rank 2; expected \[B,H,N,D\]"),
        ((), r"x has shape \[\], rank 0; expected \[B,H,N,D\]"),
        ((1, 2, 3, 4, 5), "x has rank 5; no input of an operator has more than 4"),
        ((2, 3, 0, 5), r"x has shape \[2,3,0,5\]: axis 2 of \[B,H,N,D\] is 0; it is empty, expected at least 1"),
    ],
)
def test_wrong_shape(toy, shape, message):
    session = make_session(ort_models.node_model(SCALED_ADD, {"x": None}))
    with pytest.raises(Exception, match="ScaledAdd 'node': " + message):
        session.run(None, {"x": np.zeros(shape, np.float32)})


def test_broken_rule(toy):
    session = make_session(ort_models.node_model(SCALED_ADD, TOY_SHAPES))
    with pytest.raises(Exception, match="input total needs accumulate = 1; found accumulate = 0") as raised:
        session.run(None, {"x": np.zeros((1, 2, 3, 4), np.float32), "total": np.zeros((1, 2), np.float32)})
    assert type(raised.value).__name__ == "InvalidArgument"


@pytest.mark.parametrize(
    "attrs, kind, message",
    [
        ({"algorithm": "recursion"}, "NotImplemented|RuntimeException", "which only the PyTorch reference has"),
        ({"algorithm": "flash"}, "InvalidArgument|RuntimeException", "expected one of auto, causal_dot_product"),
    ],
)
def test_refused_attribute_of_a_real_operator(attrs, kind, message):
    op, inputs, _ = variant("CausalLinearDecay", 0, "float32")
    with pytest.raises(Exception, match="CausalLinearDecay 'node': attribute algorithm is.*" + message) as raised:
        make_session(ort_models.node_model(op, shapes_of(inputs), attrs))
    assert re.fullmatch(kind, type(raised.value).__name__)


@pytest.mark.parametrize(
    "name, found",
    [
        ("query", TensorProto.DOUBLE),
        ("key", TensorProto.FLOAT16),
        ("log_decay", TensorProto.FLOAT16),
        ("cu_seqlens", TensorProto.INT64),
    ],
)
def test_wrong_type(name, found):
    op, inputs, attrs = variant("CausalLinearDecay", 5, "float32")
    model = ort_models.node_model(op, shapes_of(inputs), attrs)
    next(i for i in model.graph.input if i.name == name).type.tensor_type.elem_type = found
    with pytest.raises(
        Exception,
        match=r"CausalLinearDecay(.|\n)*CausalLinearDecay takes query T, .*log_decay F.*"
        r"cu_seqlens I.*; T is float32, float16 or bfloat16, the same",
    ):
        make_session(model)


# ---- Registration and sessions


def test_registering_twice_and_two_sessions(toy):
    options = onnxruntime.SessionOptions()
    assert ort_ops.register(options) is options and ort_ops.register(options) is options
    model = ort_models.node_model(SCALED_ADD, {"x": [1, 2, 3, 4]})
    x = np.ones((1, 2, 3, 4), np.float32)
    for _ in range(2):
        (found,) = ort_ops.make_session(model, session_options=options).run(None, {"x": x})
        np.testing.assert_array_equal(found, x)
    assert onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, {"x": x})


def test_default_providers(toy):
    expected = ["CPUExecutionProvider"]
    if PROVIDERS["cuda"] in onnxruntime.get_available_providers() and torch.cuda.is_available():
        expected = [PROVIDERS["cuda"], *expected]
    assert ort_ops.make_session(ort_models.node_model(SCALED_ADD, TOY_SHAPES)).get_providers() == expected


def test_model_as_path_bytes_or_proto(toy, tmp_path):
    model = ort_models.node_model(SCALED_ADD, {"x": [1, 2, 3, 4]})
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    for form in (model, model.SerializeToString(), path, str(path)):
        assert make_session(form).get_providers() == ["CPUExecutionProvider"]


def test_provider_that_is_not_there(toy):
    model = ort_models.node_model(SCALED_ADD, {"x": [1, 2, 3, 4]})
    with pytest.raises(ValueError, match="ROCMExecutionProvider is not in the installed onnxruntime .*CPUExecution"):
        ort_ops.make_session(model, [("ROCMExecutionProvider", {}), "CPUExecutionProvider"])


def test_provider_that_does_not_start(toy, monkeypatch):
    """As onnxruntime-gpu behaves on a machine without a GPU: it warns and goes on without."""
    model = ort_models.node_model(SCALED_ADD, {"x": [1, 2, 3, 4]})
    available = onnxruntime.get_available_providers()
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [*available, "TestExecutionProvider"])
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="provider TestExecutionProvider did not start"):
        ort_ops.make_session(model, ["TestExecutionProvider", "CPUExecutionProvider"])


def test_runtime_that_is_too_old(monkeypatch):
    monkeypatch.setattr(onnxruntime, "__version__", "1.17.3")
    with pytest.raises(RuntimeError, match=r"needs onnxruntime 1\.18 or newer; found 1\.17\.3"):
        ort_ops.register(onnxruntime.SessionOptions())


def test_library_refuses_a_runtime_that_is_too_old(toy):
    """RegisterCustomOps itself, with an OrtApiBase of a runtime that has API 1 and no API 18."""
    messages = []

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)
    def create_status(code, message):
        messages.append(message.decode())
        return 1

    api = (ctypes.c_void_p * 4)(ctypes.cast(create_status, ctypes.c_void_p))  # CreateStatus is the first entry

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)
    def get_api(version):
        return ctypes.addressof(api) if version == 1 else None

    text = ctypes.create_string_buffer(b"1.17.3")
    get_version = ctypes.CFUNCTYPE(ctypes.c_void_p)(lambda: ctypes.addressof(text))
    base = (ctypes.c_void_p * 2)(ctypes.cast(get_api, ctypes.c_void_p), ctypes.cast(get_version, ctypes.c_void_p))
    library = ctypes.CDLL(ort_ops.get_library_path())
    library.RegisterCustomOps.restype = ctypes.c_void_p
    assert library.RegisterCustomOps(None, base) == 1
    assert messages == ["leanfleet needs onnxruntime 1.18 or newer; this is 1.17.3. Install a newer onnxruntime"]


def test_missing_library(tmp_path, monkeypatch):
    monkeypatch.setenv("LEANFLEET_LIBRARY_DIR", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="libleanfleet_ort.so does not exist"):
        ort_ops.register(onnxruntime.SessionOptions())


def test_missing_onnxruntime():
    code = """
import sys
sys.modules["onnxruntime"] = None
from leanfleet import ort_ops
try:
    ort_ops.register(None)
except ImportError as error:
    assert "pip install 'leanfleet[ort]'" in str(error) and "onnxruntime-gpu" in str(error), error
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


# ---- The oldest runtime


@pytest.mark.slow
@pytest.mark.skipif(RUNTIME == (1, 20), reason="this is the run in the oldest runtime")
def test_oldest_runtime():
    """Everything above, once more."""
    passed, text = ort_models.run_in_oldest_runtime(OLDEST, __file__)
    assert passed > len(CASES), text
