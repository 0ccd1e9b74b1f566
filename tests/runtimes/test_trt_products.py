"""Linear with constant weights as TensorRT's own products: the same numbers, in ONNX Runtime."""

import warnings

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import numpy_helper

from leanfleet import spec
from leanfleet.export import export, fusions
from leanfleet.ort_ops import make_session
from leanfleet.trt_plugins import prepare
from leanfleet.trt_plugins.products import take_products

WIDTH = 48


class FeedForward(torch.nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH, bias=bias), torch.nn.Linear(WIDTH, WIDTH, bias=bias)

    def forward(self, x):
        gate, values = self.up(x).chunk(2, -1)
        return self.down(torch.nn.functional.gelu(gate, approximate="tanh") * values)


def exported(bias):
    warnings.filterwarnings("ignore")
    torch.manual_seed(3)
    tokens = torch.export.Dim("tokens")
    model = export(
        FeedForward(bias).half().eval(), (torch.randn(2, 5, WIDTH).half(),), dynamic_shapes=({0: 2, 1: tokens},)
    ).model
    fusions.fuse_for_onnxruntime(model)
    return ir.to_proto(model)


def result(model, x):
    session = make_session(model, ["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x})[0]


@pytest.mark.parametrize("bias", (False, True))
def test_products(bias):
    model, x = exported(bias), np.random.default_rng(0).standard_normal((2, 7, WIDTH)).astype(np.float16)
    expected = result(model, x)
    assert [node.op_type for node in model.graph.node] == ["Linear", "Linear"]
    assert take_products(model) == 2
    kinds = [node.op_type for node in model.graph.node]
    adds = ["Add"] * bias
    assert kinds == ["MatMul", *adds, "Reshape", "GatedActivation", "MatMul", *adds]
    del model.functions[:]  # GatedActivation has none here
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    np.testing.assert_allclose(result(model, x), expected, rtol=4e-3, atol=4e-3)
    assert take_products(model) == 0


def test_in_prepared_models():
    model = prepare(exported(True))
    ours = [node.op_type for node in model.graph.node if node.domain == f"{spec.DOMAIN}.trt"]
    assert ours == ["GatedActivation"]


def test_weights_that_are_no_constants_stay():
    """Such as inputs, those of nodes that promise nothing, and a gate's that others read."""
    model = exported(False)
    model.graph.node[1].attribute[0].i = 0
    assert [a.name for a in model.graph.node[1].attribute] == ["constant_weight"]
    weight = model.graph.node[0].input[1]
    model.graph.node.append(onnx.helper.make_node("Shape", [weight], ["sizes"]))
    assert take_products(model) == 0
    shape = next(t for t in model.graph.initializer if t.name == weight)
    assert numpy_helper.to_array(shape).shape == (WIDTH, 2, WIDTH)


@pytest.mark.parametrize("place", ("input", "output", "branch"))
def test_weights_that_others_see_stay(place):
    model = exported(False)
    weight = model.graph.node[0].input[1]
    value = onnx.helper.make_tensor_value_info(weight, onnx.TensorProto.FLOAT16, [WIDTH, 2, WIDTH])
    if place == "branch":
        read = onnx.helper.make_node("Identity", [weight], ["same"])
        branch = onnx.helper.make_graph([read], "branch", [], [onnx.helper.make_empty_tensor_value_info("same")])
        model.graph.node.append(onnx.helper.make_node("If", ["wanted"], ["w"], then_branch=branch, else_branch=branch))
    else:
        getattr(model.graph, place).append(value)
    assert take_products(model) == 1  # the other product's
    assert [node.op_type for node in model.graph.node][:2] == ["Linear", "MatMul"]


def test_names_that_are_taken():
    model = exported(True)
    output = model.graph.node[0].output[0]
    model.graph.node.append(onnx.helper.make_node("Identity", [output], [f"{output}_MatMul"]))
    assert take_products(model) == 2
    names = [name for node in model.graph.node for name in node.output]
    assert len(names) == len({*names})
