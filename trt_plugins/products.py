"""Linear with constant weights as TensorRT's own products, which need no cuBLAS beside the engine."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from leanfleet import spec

if TYPE_CHECKING:
    import onnx

LINEAR, ACTIVATION = "Linear", "GatedActivation"


def take_products(model: onnx.ModelProto) -> int:
    """Nodes of Linear that promise a constant weight, and whose weight and bias are a model's own, become MatMul, Add and, with
    a gate, GatedActivation. model: changed in place; so are the shapes of gates' weights, from [I,2,O] to [I,2 O]. Returns how
    many.

    Example:
        import onnx
        from leanfleet.trt_plugins.products import take_products

        model = onnx.load("decoder/model.onnx")
        print(take_products(model))  # 4 for each layer of a Llama in float16
    """
    from onnx import helper

    constants = {t.name: t for t in model.graph.initializer}
    readers = Counter(name for node in model.graph.node for name in node.input)
    nodes, taken = [], 0
    for node in model.graph.node:
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        held = [constants.get(name) for name in node.input[1:] if name]
        linear = (node.domain, node.op_type) == (spec.DOMAIN, LINEAR) and attributes.get("constant_weight", 0)
        gated = bool(attributes.get("gated", 0))
        shared = any(t is not None and readers[t.name] > 1 for t in held)
        if not linear or None in held or (gated and shared):
            nodes.append(node)
            continue
        nodes += _steps(model, node, held, attributes.get("activation", b"silu").decode() if gated else "", helper)
        taken += 1
    if taken:
        del model.graph.node[:]
        model.graph.node.extend(nodes)
    return taken


def _steps(model, node, constants, activation, helper):
    """The nodes in a node's place."""
    output, columns = node.output[0], constants[0].dims[-1]
    stem = node.name or output
    kinds = ["MatMul"] + ["Add"] * (len(constants) > 1)
    if activation:
        for t in constants:
            shape = [*t.dims[:-2], 2 * columns]
            del t.dims[:]
            t.dims.extend(shape)
    made, x = [], node.input[0]
    for kind, t in zip(kinds, constants, strict=True):
        y = output if not activation and kind == kinds[-1] else f"{output}_{kind}"
        made.append(helper.make_node(kind, [x, t.name], [y], name=f"{stem}_{kind}"))
        x = y
    if activation:
        shape, seen = f"{output}_halves", f"{output}_seen"
        model.graph.initializer.append(helper.make_tensor(shape, 7, [4], [0, 0, 2, columns]))  # int64
        made.append(helper.make_node("Reshape", [x, shape], [seen], name=f"{stem}_Reshape"))
        named = dict(name=f"{stem}_{ACTIVATION}", domain=spec.DOMAIN, activation=activation)
        made.append(helper.make_node(ACTIVATION, [seen], [output], **named))
    return made
