"""Linear with constant weights as TensorRT's own products, which need no cuBLAS beside the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import count
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

    graph = model.graph
    outside = {x.name for x in (*graph.input, *graph.output)}
    constants = {t.name: t for t in graph.initializer if t.name not in outside}
    readers = Counter(name for node in with_branches(graph.node) for name in node.input)
    taken_names = {name for node in with_branches(graph.node) for name in (*node.input, *node.output)} | {*constants, *outside}
    nodes, taken = [], 0
    for node in graph.node:
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        held = [constants.get(name) for name in node.input[1:] if name]
        linear = (node.domain, node.op_type) == (spec.DOMAIN, LINEAR) and attributes.get("constant_weight", 0)
        gated = bool(attributes.get("gated", 0))
        shared = any(t is not None and readers[t.name] > 1 for t in held)
        if not linear or None in held or (gated and shared):
            nodes.append(node)
            continue
        nodes += _steps(graph, node, held, attributes.get("activation", b"silu").decode() if gated else "", taken_names, helper)
        taken += 1
    if taken:
        del graph.node[:]
        graph.node.extend(nodes)
    return taken


def with_branches(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """All nodes, each behind those of its branches.

    Example:
        import onnx
        from leanfleet.trt_plugins.products import with_branches

        model = onnx.load("decoder/model.onnx")
        print({node.op_type for node in with_branches(model.graph.node)})
    """
    for node in nodes:
        for attribute in node.attribute:
            for graph in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                yield from with_branches(graph.node)
        yield node


def _steps(graph, node, constants, activation, taken_names, helper):
    """The nodes in a node's place."""
    output, columns = node.output[0], constants[0].dims[-1]
    stem = node.name or output

    def free(word):
        name = next(n for i in count() if (n := f"{output}_{word}{i or ''}") not in taken_names)
        taken_names.add(name)
        return name

    kinds = ["MatMul"] + ["Add"] * (len(constants) > 1)
    if activation:
        names = {t.name for t in constants}
        kept = [v for v in graph.value_info if v.name not in names]  # they tell the old shapes
        del graph.value_info[:]
        graph.value_info.extend(kept)
        for t in constants:
            shape = [*t.dims[:-2], 2 * columns]
            del t.dims[:]
            t.dims.extend(shape)
    made, x = [], node.input[0]
    for kind, t in zip(kinds, constants, strict=True):
        y = output if not activation and kind == kinds[-1] else free(kind)
        made.append(helper.make_node(kind, [x, t.name], [y], name=f"{stem}_{kind}"))
        x = y
    if activation:
        shape, seen = free("halves"), free("seen")
        graph.initializer.append(helper.make_tensor(shape, 7, [4], [0, 0, 2, columns]))  # int64
        made.append(helper.make_node("Reshape", [x, shape], [seen], name=f"{stem}_Reshape"))
        named = dict(name=f"{stem}_{ACTIVATION}", domain=spec.DOMAIN, activation=activation)
        made.append(helper.make_node(ACTIVATION, [seen], [output], **named))
    return made
