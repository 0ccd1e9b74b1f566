"""From PyTorch to onnxruntime: exported models pass the checker, keep symbolic shapes, and run with the library and without."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from leanfleet import communicators, demo, parity, spec
from leanfleet.export import causal_linear_decay, causal_linear_decay_grad, export, lean_attention, normalized_linear_attention
from support import ort_models


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """(path, module, example inputs) of the demo's module with all operators."""
    path = tmp_path_factory.mktemp("all") / "all_operators.onnx"
    module, inputs = demo.all_operators_module()
    batch, tokens, slots = (torch.export.Dim(n) for n in ("batch", "tokens", "slots"))
    export(module, inputs, path, dynamic_shapes=({0: batch, 1: tokens}, {0: batch, 2: slots}, {0: batch, 2: slots}, {0: batch}))
    with communicators.create():  # of this process alone
        yield path, module, inputs


def test_every_operator_is_exported_with_its_function(everything):
    model = onnx.load(everything[0])
    onnx.checker.check_model(model)
    nodes = {n.op_type: n for n in model.graph.node if n.domain == spec.DOMAIN}
    assert set(nodes) == set(spec.all_specs())
    functions = {(f.name, f.overload) for f in model.functions if f.domain == spec.DOMAIN}
    assert functions == {(n.op_type, n.overload) for n in nodes.values()} and len(functions) == len(spec.all_specs())
    for node in nodes.values():  # no output that the attributes do not ask for, and no refused attribute
        attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        assert len(node.output) == len(spec.all_specs()[node.op_type].active_outputs(attrs))
        assert not [a for a in spec.all_specs()[node.op_type].attrs if a.refuse and a.name in attrs]


def test_dimensions_stay_symbolic(everything):
    for make in (body_session, kernel_session):
        session = make(everything[0])
        shapes = {o.name: o.shape for o in session.get_outputs()}
        first, lse, keys = list(shapes.values())[:3]
        assert first == ["batch", 4, "tokens", 16] and lse == ["batch", 4, "tokens"] and keys == ["batch", 2, "slots", 16]


def body_session(path):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def kernel_session(path):
    from leanfleet.ort_ops import make_session

    return make_session(path, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("b, n, slots", [(1, 1, 8), (3, 7, 40), (2, 70, 200)])
def test_kernels_and_bodies_agree_with_pytorch_in_float64(everything, b, n, slots):
    path, module, _ = everything
    torch.manual_seed(b)
    lens = torch.randint(n, slots + 1, (b,), dtype=torch.int32)
    inputs = (torch.randn(b, n, 64), torch.randn(b, 2, slots, 16), torch.randn(b, 2, slots, 16), lens)
    with torch.no_grad():
        expected = module.double()(*[t.double() if t.is_floating_point() else t for t in inputs])
        plain = module.float()(*inputs)
    for session in (body_session(path), kernel_session(path)):
        names = [i.name for i in session.get_inputs()]
        found = session.run(None, dict(zip(names, (t.numpy() for t in inputs), strict=True)))
        for f, e, p in zip(found, expected, plain, strict=True):
            error, baseline = np.abs(f - e.numpy()).max(), float((p - e).abs().max())
            assert error <= 4 * baseline + 32 * 2.0**-23 * float(e.abs().max()), (error, baseline)


def test_the_kernels_really_run_and_without_the_library_the_bodies_do(everything):
    path, _, inputs = everything
    names = [i.name for i in onnx.load(path).graph.input]
    rows, kernels = parity.check(path, ("body", "ort-cpu"), inputs=dict(zip(names, (t.numpy() for t in inputs), strict=True)))
    assert all(r["passed"] for r in rows)
    assert kernels["body"] == {}
    assert {op for op, provider in kernels["ort-cpu"]} == set(spec.all_specs())
    assert {provider for _, provider in kernels["ort-cpu"]} == {"CPUExecutionProvider"}


def test_optional_inputs_in_the_middle_are_left_out(tmp_path):
    class Layer(torch.nn.Module):
        def forward(self, q, k, v, sinks):
            return lean_attention(q, k, v, sinks=sinks)[0], causal_linear_decay(q, k, v, initial_state=q.new_zeros(1, 2, 8, 8))

    q, k, v = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8)
    path = tmp_path / "optional.onnx"
    export(Layer(), (q, k, v, torch.randn(4)), path)
    nodes = {n.op_type: n for n in onnx.load(path).graph.node if n.domain == spec.DOMAIN}
    assert list(nodes["LeanAttention"].input[3:9]) == [""] * 6 and nodes["LeanAttention"].input[9]
    assert nodes["CausalLinearDecay"].input[3] == "" and len(nodes["CausalLinearDecay"].input) == 5
    kernel_session(path)


def test_an_output_in_the_middle_that_is_not_asked_for(tmp_path):
    """grad_initial_state without grad_log_decay: the fourth output of five is an empty name."""

    class Layer(torch.nn.Module):
        def forward(self, q, k, v, decay):
            return causal_linear_decay_grad(q, k, v, decay, grad_output=v.repeat(1, 2, 1, 1), grad_state=True)

    inputs = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8), -torch.rand(2)
    path = tmp_path / "middle.onnx"
    export(Layer(), inputs, path)
    (node,) = [n for n in onnx.load(path).graph.node if n.domain == spec.DOMAIN]
    assert len(node.output) == 5 and node.output[3] == "" and node.output[4]
    for session in (body_session(path), kernel_session(path)):
        found = session.run(None, dict(zip([i.name for i in session.get_inputs()], (t.numpy() for t in inputs), strict=True)))
        for f, e in zip(found, Layer()(*inputs), strict=True):
            assert f.shape == tuple(e.shape) and np.abs(f - e.numpy()).max() < 1e-5


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_layouts_and_half_precision(tmp_path, layout):
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return normalized_linear_attention(q, k, v, layout=layout, return_state=True)

    shape = (1, 6, 4, 8) if layout == "bnhd" else (1, 4, 6, 8)
    inputs = [torch.rand(shape).half() for _ in range(3)]
    path = tmp_path / "half.onnx"
    tokens = torch.export.Dim("tokens")
    export(Layer(), tuple(inputs), path, dynamic_shapes=({1 if layout == "bnhd" else 2: tokens},) * 3)
    expected = [t.numpy() for t in Layer()(*inputs)]
    for session in (body_session(path), kernel_session(path)):
        names = [i.name for i in session.get_inputs()]
        for f, e in zip(session.run(None, dict(zip(names, (t.numpy() for t in inputs), strict=True))), expected, strict=True):
            assert f.dtype == e.dtype and np.abs(f.astype(float) - e).max() <= 2.0**-9 * max(1, np.abs(e).max())


@pytest.mark.slow
def test_the_readmes_quickstart_says_nothing_and_names_its_outputs(tmp_path):
    """In a process of its own: what is said once is not said again."""
    text = (ort_models.ROOT / "README.md").read_text()
    code = text[text.index("import torch\nfrom leanfleet.export import export, lean_attention") :].partition("```")[0]
    code += "print([o.name for o in session.get_outputs()], output.shape)\n"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ort_models.ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['output'] (1, 8, 16, 64)\n" and done.stderr == ""


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, q, k, v, normalizer):
        first = lean_attention(q, k, v)
        return *first, self.drop(first[0]), causal_linear_decay(q, k, v), normalized_linear_attention(q.abs(), k.abs(), v)[1]


def test_names_of_outputs_and_modes(tmp_path):
    """Two outputs called "output" and one called as an input are named by their place; modes are as they were."""
    inputs = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1)
    module = Two()
    program = export(module, inputs, tmp_path / "names.onnx")
    names = ["output_0", "lse", "output_2", "output_3", "output_4"]
    assert [o.name for o in program.model.graph.outputs] == names
    assert module.training and module.drop.training
    onnx.checker.check_model(tmp_path / "names.onnx")
    assert [o.name for o in kernel_session(tmp_path / "names.onnx").get_outputs()] == names
    given = export(module, inputs, output_names=["a", "b", "c", "d", "e"])
    assert [o.name for o in given.model.graph.outputs] == ["a", "b", "c", "d", "e"]


def test_lazy_names_are_complete_and_typed():
    """What an editor sees, __all__ and what is really there are the same names; the package says that it is typed."""
    import leanfleet
    import leanfleet.export
    import leanfleet.ort_ops

    assert (Path(leanfleet.__file__).parent / "py.typed").is_file()
    for package in (leanfleet.export, leanfleet.ort_ops):
        tree = ast.parse(Path(package.__file__).read_text())
        typed = next(n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
        seen = {(n.module.rpartition(".")[2], alias.asname or alias.name) for n in typed.body for alias in n.names}
        assert {name for _, name in seen} == set(package._HOMES)
        assert {(home, name) for name, home in package._HOMES.items()} == seen
        assert set(package._HOMES) <= set(package.__all__) <= set(dir(package))
        assert all(alias.asname == alias.name for n in typed.body for alias in n.names)  # else a type checker hides them
        for name in package.__all__:
            assert callable(getattr(package, name))
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            package.nothing  # noqa: B018


def test_length_independent_where_an_unrolled_loop_is_not(tmp_path):
    """Traced at 11 tokens, right at every length: nothing of the sequence is unrolled into the graph."""

    class Layer(torch.nn.Module):
        def forward(self, q, k, v, slope):
            return causal_linear_decay(q, k, v, -slope)

    make = [lambda n, h=h: torch.randn(1, h, n, 8) for h in (4, 4, 4)]
    slope = torch.rand(4)
    path = tmp_path / "length.onnx"
    tokens = torch.export.Dim("tokens")
    export(Layer(), (*[m(11) for m in make], slope), path, dynamic_shapes=({2: tokens}, {2: tokens}, {2: tokens}, {}))
    sessions = body_session(path), kernel_session(path)
    for n in (1, 2, 3, 7, 15, 40, 63, 64, 65, 128, 129, 200):
        inputs = [*[m(n) for m in make], slope]
        expected = Layer()(*[t.double() for t in inputs])
        for session in sessions:
            names = [i.name for i in session.get_inputs()]
            (found,) = session.run(None, dict(zip(names, (t.numpy() for t in inputs), strict=True)))
            assert np.abs(found - expected.numpy()).max() < 2e-5, n
