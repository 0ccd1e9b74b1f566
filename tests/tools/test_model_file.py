"""Attributes and versions that our operators do not have, and nodes edited after their function bodies were made."""

import json
import shutil
import subprocess
import sys

import numpy as np
import onnx
import onnx_ir
import pytest
import torch

from leanfleet import model_file, native, parity, spec
from leanfleet.cli import main
from leanfleet.export import function_bodies, rewrite, torch_ops
from leanfleet.ort_ops import make_session
from leanfleet.trt_plugins import prepare
from support import ort_models

ATTENTION = spec.all_specs()["LeanAttention"]
SHAPES = {"query": [1, 2, 3, 8], "key_cache": [1, 1, 9, 8], "value_cache": [1, 1, 9, 8]}


def attention_model(attrs=None, version=1, bodies=True):
    model = ort_models.node_model(ATTENTION, SHAPES, attrs, name="layers.3")
    if bodies:
        model = onnx_ir.to_proto(function_bodies.attach(onnx_ir.from_proto(model)))
    next(o for o in model.opset_import if o.domain == spec.DOMAIN).version = version
    return model


def mistyped():
    model = attention_model()
    model.graph.node[0].attribute.append(onnx.helper.make_attribute("winodw", 4))
    return model


def in_a_branch(model):
    """The same model with its node in the branches of an If."""
    node = onnx.NodeProto()
    node.CopyFrom(model.graph.node[0])
    branch = onnx.helper.make_graph([node], "branch", [], [onnx.helper.make_tensor_value_info(o, 1, None) for o in node.output])
    condition = onnx.helper.make_node("Constant", [], ["condition"], value=onnx.numpy_helper.from_array(np.array(True)))
    del model.graph.node[:]
    model.graph.node.extend(
        [
            condition,
            onnx.helper.make_node(
                "If", ["condition"], [o.name for o in model.graph.output], then_branch=branch, else_branch=branch
            ),
        ]
    )
    return model


def in_a_function(model):
    """The same model with its node in a function of another domain."""
    node = onnx.NodeProto()
    node.CopyFrom(model.graph.node[0])
    opsets = [onnx.helper.make_opsetid(spec.DOMAIN, 1)]
    model.functions.append(onnx.helper.make_function("mine", "Layer", node.input, node.output, [node], opsets))
    call = onnx.helper.make_node("Layer", node.input, node.output, domain="mine")
    del model.graph.node[:]
    model.graph.node.append(call)
    model.opset_import.append(onnx.helper.make_opsetid("mine", 1))
    return model


ATTRIBUTE = (
    r"^LeanAttention 'layers\.3': there is no attribute winodw; did you mean window\? It has scale, causal, window, softcap"
)
VERSION = r"^the model imports version 2 of the domain leanfleet; this leanfleet has version 1"
WRONG = {
    "attribute": (mistyped, ATTRIBUTE),
    "attribute in a branch": (lambda: in_a_branch(mistyped()), ATTRIBUTE),
    "attribute in a function": (lambda: in_a_function(mistyped()), ATTRIBUTE),
    "version": (lambda: attention_model(version=2), VERSION),
}


def saved(model, folder):
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("kind", ("path", "bytes", "proto"))
@pytest.mark.parametrize("case", WRONG)
def test_sessions_refuse(case, kind, tmp_path):
    make, message = WRONG[case]
    model = make()
    given = {"path": lambda: saved(model, tmp_path), "bytes": model.SerializeToString, "proto": lambda: model}[kind]()
    with pytest.raises(ValueError, match=message):
        make_session(given, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("case", WRONG)
def test_tools_refuse(case, tmp_path, capsys):
    """check, rewrite, attach and TensorRT's preparation, each with one line; nothing is written or changed."""
    make, message = WRONG[case]
    path, target = saved(make(), tmp_path), tmp_path / "out.onnx"
    for arguments in (
        ["check", str(path)],
        ["rewrite", str(path), "-o", str(target)],
        ["rewrite", str(path), "-o", str(target), "--to", "standard"],
        ["engine", "prepare", str(path), str(target)],
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and message.lstrip("^").split(";")[0].replace("\\", "") in error, error
        assert not target.exists()
    model = make()
    content = model.SerializeToString()
    with pytest.raises(ValueError, match=message):
        prepare(model)
    assert model.SerializeToString() == content
    with pytest.raises(ValueError, match=message):
        function_bodies.attach(onnx_ir.from_proto(model))
    with pytest.raises(ValueError, match=message):
        rewrite.rewrite(onnx_ir.from_proto(model))


def test_what_is_right_passes(tmp_path):
    for model in (
        attention_model(),
        attention_model(dict(window=4)),
        in_a_branch(attention_model()),
        in_a_function(attention_model()),
    ):
        model_file.check(saved(model, tmp_path))
        model_file.check(model.SerializeToString())
    other = attention_model(bodies=False)
    other.graph.node[0].domain = "somebody.else"
    other.graph.node[0].attribute.append(onnx.helper.make_attribute("winodw", 4))
    model_file.check(other.SerializeToString())


def test_what_is_no_model_is_left_to_onnxruntime(tmp_path):
    content = mistyped().SerializeToString()
    for broken in (b"", b"\xff" * 40, b"hello, world", content[:-7], content[3:], b"\x18\x00\x00\x00ORTM" + content):
        (tmp_path / "broken.onnx").write_bytes(broken)
        model_file.check(broken)
        model_file.check(tmp_path / "broken.onnx")
        with pytest.raises(Exception) as raised:
            make_session(broken, providers=["CPUExecutionProvider"])
        assert "onnxruntime" in type(raised.value).__module__
    model_file.check(tmp_path / "missing.onnx")


def test_weights_are_passed_over(tmp_path):
    """256 MiB of weights before the node, more than is read in the time."""
    model = mistyped()
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((64, 1 << 20), np.float32), "weights"))
    path = saved(model, tmp_path)
    code = (
        "import sys, resource; from leanfleet import model_file\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n    model_file.check(sys.argv[1])\nexcept ValueError as error:\n    print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    message, kilobytes = subprocess.run(
        [sys.executable, "-P", "-c", code, path], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert "winodw" in message and int(kilobytes) < 16 << 10


# Edited nodes


def set_attribute(model, name, value):
    node = next(n for n in model.graph.node if n.domain == spec.DOMAIN)
    for attribute in [a for a in node.attribute if a.name == name]:
        node.attribute.remove(attribute)
    node.attribute.append(onnx.helper.make_attribute(name, value))
    return model


@pytest.mark.parametrize("name, value", (("window", 2), ("causal", 0), ("scale", 0.5), ("softcap", 3.0), ("window", -1)))
@pytest.mark.parametrize("runners", ("body,ort-cpu", "reference,ort-cpu"))
def test_check_finds_an_edited_attribute(name, value, runners, tmp_path, capsys):
    given = dict(window=4) if value == -1 else {}
    path = saved(attention_model(given), tmp_path)
    assert main(["check", str(path), "--runners", runners]) == 0
    capsys.readouterr()
    edited = set_attribute(attention_model(given), name, value)
    path = saved(edited, tmp_path)
    assert main(["check", str(path), "--runners", runners]) == 1
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and out.startswith("MISMATCH LeanAttention 'layers.3' now means '"), out
    assert ("window=4" if given else f"{name}={value}") in out and "attach makes the body anew" in out
    assert main(["check", str(path), "--runners", runners, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is False and "layers.3" in report["edited"]
    mended = saved(onnx_ir.to_proto(function_bodies.attach(onnx_ir.from_proto(edited))), tmp_path)
    assert main(["check", str(mended), "--runners", runners]) == 0


def test_ranks_that_the_file_does_not_tell_are_no_edits():
    op = spec.all_specs()["CausalLinearDecay"]
    shapes = {"query": [1, 2, 5, 4], "key": [1, 1, 5, 4], "value": [1, 1, 5, 3]}
    for log_decay in ([1], [1, 1, 5]):
        model = ort_models.node_model(op, {**shapes, "log_decay": log_decay}, {"scale": 0.25})
        model = function_bodies.attach(onnx_ir.from_proto(model))
        next(v for v in model.graph.inputs if v.name == "log_decay").shape = None
        assert function_bodies.edited_nodes(model) == []
        next(iter(model.graph)).attributes["scale"] = onnx_ir.AttrFloat32("scale", 0.5)
        (line,) = function_bodies.edited_nodes(model)
        assert "scale=0.5" in line and "scale=0.25" in line


def test_edits_of_several_nodes_are_one_line(tmp_path):
    model = attention_model()
    second = onnx.NodeProto()
    second.CopyFrom(model.graph.node[0])
    second.name, second.output[:] = "layers.4", [f"{o}.4" for o in second.output]
    model.graph.node.append(second)
    for node in model.graph.node:
        node.attribute.append(onnx.helper.make_attribute("softcap", 3.0))
    with pytest.raises(parity.EditedNodeError, match=r"^LeanAttention 'layers\.3' now means .* \(1 more nodes likewise\)$"):
        parity.check(saved(model, tmp_path))


# LEANFLEET_CPU


@pytest.fixture
def choose(tmp_path, monkeypatch):
    """Sets LEANFLEET_CPU for libraries of this test's own: each loaded copy reads it once."""

    def choose(value):
        for name in ("leanfleet", "leanfleet_ort"):
            shutil.copy(native.library_path(name), tmp_path)
        monkeypatch.setenv("LEANFLEET_LIBRARY_DIR", str(tmp_path))
        monkeypatch.setenv("LEANFLEET_CPU", value)

    return choose


def call_by_torch():
    """Through ctypes, which looks for the library anew; compiled kernels keep to the import's."""
    x = torch.ones(1, 1, 2, 3)
    return torch_ops._runner(torch_ops._SPECS["CausalLinearDecay"], False, "cpu")(x, x, x)[0]


@pytest.mark.parametrize("value", ("foo", "AVX2", "avx"))
def test_an_unknown_instruction_set_is_refused(value, choose, tmp_path):
    path = saved(attention_model(), tmp_path)
    choose(value)
    expected = f"the environment variable LEANFLEET_CPU is '{value}'; expected baseline, avx2 or avx512"
    with pytest.raises(ValueError, match=f"^CausalLinearDecay: {expected}"):
        call_by_torch()
    session = make_session(path, providers=["CPUExecutionProvider"])
    with pytest.raises(Exception, match=rf"LeanAttention 'layers\.3': {expected}"):
        session.run(None, {i.name: np.ones(i.shape, np.float32) for i in session.get_inputs()})


@pytest.mark.parametrize("value", ("baseline", "avx2", "avx512", ""))
def test_known_instruction_sets_run(value, choose):
    choose(value)
    assert call_by_torch().shape == (1, 1, 2, 3)
