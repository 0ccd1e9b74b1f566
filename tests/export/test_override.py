"""make_session(override=...): unmodified models served by our kernels, node by node, opt-in."""

import sys

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from leanfleet.ort_ops import make_session
from support.ort_models import nodes_that_ran, profiled
from support.rewrite_models import HKV, B, close, feed_of, linear, model_of, normal, qkv, run

LINEAR = "com.microsoft.LinearAttention"
PROVIDERS = ["CPUExecutionProvider"]


def linear_model(declared_columns=HKV):
    inputs, attributes = linear(n=9)
    inputs["decay"] = -np.abs(normal(B, 9, HKV)), [B, 9, declared_columns]
    model = model_of("LinearAttention", "com.microsoft", inputs, ["output", "present_state"], attributes, 21)
    return model, feed_of(inputs)


def operators_of(session, feed):
    outputs = session.run(None, feed)
    return outputs, [op for op, _ in nodes_that_ran(session)]


def options(folder):
    return profiled(onnxruntime.SessionOptions(), folder)


@pytest.mark.parametrize("as_what", ["path", "bytes", "proto"])
def test_our_kernel_serves_the_node(tmp_path, as_what):
    model, feed = linear_model()
    expected = run(model, feed)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    before = path.read_bytes()
    given = {"path": path, "bytes": model.SerializeToString(), "proto": model}[as_what]
    session = make_session(given, PROVIDERS, options(tmp_path), override=(LINEAR,))
    outputs, ran = operators_of(session, feed)
    close(outputs, expected, "CausalLinearDecay")
    assert "CausalLinearDecay" in ran and "LinearAttention" not in ran
    assert path.read_bytes() == before


def test_only_what_was_named(tmp_path):
    """Nothing without override; nothing of another operator with it."""
    model, feed = linear_model()
    for override in ((), ("com.microsoft.GroupQueryAttention",)):
        session = make_session(model, PROVIDERS, options(tmp_path), override=override)
        assert operators_of(session, feed)[1] == ["LinearAttention"]


def test_a_node_that_cannot_be_rewritten_stays_with_onnxruntime(tmp_path):
    model, feed = linear_model(declared_columns="columns")  # decays of heads, or of their key dimensions
    expected = run(model, feed)
    outputs, ran = operators_of(make_session(model, PROVIDERS, options(tmp_path), override=LINEAR), feed)
    assert ran == ["LinearAttention"]
    for found, e in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(found, e)


def test_external_weights_stay_in_their_file(tmp_path):
    arrays = qkv()
    w = normal(arrays["V"].shape[-1], 300)
    graph = helper.make_graph(
        [helper.make_node("Attention", ["Q", "K", "V"], ["Y"], is_causal=1), helper.make_node("MatMul", ["Y", "W"], ["Z"])],
        "g",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, a.shape) for n, a in arrays.items()],
        [helper.make_tensor_value_info("Z", TensorProto.FLOAT, [None] * 4)],
        [onnx.numpy_helper.from_array(w, "W")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    expected = run(model, arrays)
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    session = make_session(tmp_path / "model.onnx", PROVIDERS, options(tmp_path), override=("ai.onnx.Attention",))
    outputs, ran = operators_of(session, arrays)
    close(outputs, expected, "LeanAttention")
    assert "LeanAttention" in ran and "Attention" not in ran


def test_unknown_operator():
    with pytest.raises(
        ValueError, match="operator com.microsoft.Gelu is none that can be rewritten; these are ai.onnx.Attention"
    ):
        make_session(linear_model()[0], override=("com.microsoft.Gelu",))


def test_it_needs_no_torch(tmp_path):
    import subprocess

    onnx.save(linear_model()[0], tmp_path / "model.onnx")
    program = (
        "import sys; from leanfleet.ort_ops import make_session; "
        f"make_session({str(tmp_path / 'model.onnx')!r}, override={LINEAR!r}); assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
