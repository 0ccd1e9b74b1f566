"""Products with constant weights in 16 bits, their biases and gates -> Linear."""

import onnx_ir as ir

from leanfleet import spec
from leanfleet.export.fusions.graph import adder, bias_of, constant, named, new_initializer, only_reader, take_over

_TYPES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def _weight(node: ir.Node) -> ir.Value | None:
    """The weight [I,O] of a product of rows [B,N,I], where it is a constant in 16 bits; else None."""
    if node.domain != "" or node.op_type != "MatMul":
        return None
    x, weight = node.inputs
    tensor = None if weight is None or weight.is_graph_input() else ir.convenience.get_const_tensor(weight)
    if x is None or weight is None or tensor is None or tensor.dtype not in _TYPES or len(tensor.shape) != 2:
        return None
    fits = x.shape is not None and len(x.shape) == 3 and x.dtype == tensor.dtype
    return weight if fits else None


def _gate(product: ir.Value, columns: int) -> tuple[ir.Node, ir.Node] | None:
    """(the Reshape to [B,N,2,columns / 2] that alone reads a product, the GatedActivation that alone reads that); else None."""
    seen = only_reader(product, "Reshape")
    gate = only_reader(seen.outputs[0], "GatedActivation", spec.DOMAIN) if seen is not None else None
    if seen is None or gate is None or seen.inputs[0] is not product or columns % 2 != 0:
        return None
    shape = constant(seen.inputs[1])
    rows, seen_rows = product.shape, gate.outputs[0].shape
    if rows is None or seen_rows is None or len(rows) != 3 or not named(rows) or [*seen_rows[:2]] != [*rows[:2]]:
        return None  # other rows than the product's
    alone = all(x is None for x in gate.inputs[1:]) and gate.attributes.get_int("columns", 0) == 0
    whole = shape is not None and len(shape) == 4 and [*shape[2:]] == [2, columns // 2]
    return (seen, gate) if alone and whole else None


def _in_halves(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """A constant [...,2 O] as [...,2,O]; it is read when it is written."""
    tensor = ir.convenience.get_const_tensor(value)
    assert tensor is not None
    shape = [*tensor.shape.numpy()]
    halves = ir.Shape([*shape[:-1], 2, shape[-1] // 2])

    def seen() -> ir.Tensor:
        return ir.Tensor(tensor.numpy().reshape(halves.numpy()), dtype=tensor.dtype)

    return new_initializer(graph, value, "halves", ir.LazyTensor(seen, tensor.dtype, halves))


def _fuse(graph: ir.Graph, node: ir.Node, weight: ir.Value) -> None:
    tensor = ir.convenience.get_const_tensor(weight)
    assert tensor is not None
    columns, chain = tensor.shape.numpy()[1], [node]
    attributes: dict[str, int | str] = {"constant_weight": 1}
    constants = [weight]
    if (bias := bias_of(node.outputs[0], columns)) is not None:
        chain.append(bias[0])
        constants.append(bias[1])
    gate = _gate(chain[-1].outputs[0], columns)
    if gate is not None and all(
        len(list(value.uses())) == 1 and not value.is_graph_output() for value in constants
    ):  # else they would be stored twice
        chain += gate
        attributes |= {"gated": 1, "activation": gate[1].attributes.get_string("activation", "silu")}
        constants = [_in_halves(graph, value) for value in constants]
    new = adder(graph, chain[-1])("Linear", node.inputs[0], *constants, domain=spec.DOMAIN, **attributes)
    take_over(chain[-1].outputs[0], new)
    for old in reversed(chain):
        graph.remove(old, safe=True)


def fuse_linear(model: ir.Model, positions: int | None = None) -> int:
    """A product in 16 bits with a constant weight becomes Linear, with the bias and the gated activation that alone read it.
    After all passes that look for products. Returns how many.
    """
    graph, count = model.graph, 0
    for node in list(graph):
        weight = _weight(node)
        if weight is not None:
            _fuse(graph, node, weight)
            count += 1
    if count:
        model.opset_imports.setdefault(spec.DOMAIN, 1)
    return count
