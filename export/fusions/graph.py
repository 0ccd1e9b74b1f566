"""What the passes share: reading and changing an onnx_ir graph, and functions of com.microsoft's operators."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from leanfleet import spec

MICROSOFT = "com.microsoft"
ROWS = "query", "new_key", "new_value"  # the inputs of LeanAttention that hold new tokens
Op = Callable[..., Any]  # adds a node and returns its output, or a list of them

_ARGUMENTS = [t.name for t in spec.all_specs()["LeanAttention"].inputs]


def argument(node: ir.Node, name: str) -> ir.Value | None:
    """This input of a LeanAttention node, or None."""
    i = _ARGUMENTS.index(name)
    return node.inputs[i] if i < len(node.inputs) else None


def set_arguments(node: ir.Node, **values: ir.Value | None) -> None:
    """Sets inputs of a LeanAttention node by name."""
    places = {_ARGUMENTS.index(name): value for name, value in values.items()}
    node.resize_inputs(max(len(node.inputs), *(i + 1 for i in places)))
    for i, value in places.items():
        node.replace_input_with(i, value)
    node.resize_inputs(1 + max(i for i, value in enumerate(node.inputs) if value is not None))


def layout(node: ir.Node) -> str:
    """The layout of a LeanAttention node."""
    return node.attributes.get_string("layout", "bhnd")


def is_microsoft(node: ir.Node | None, op_type: str) -> bool:
    """Whether a node is this operator of com.microsoft."""
    return node is not None and (node.domain, node.op_type) == (MICROSOFT, op_type)


def producer(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """The standard operator of one of these types that makes a value; None where another does."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type in op_types and node.domain == "" else None


def constant(value: ir.Value | None) -> np.ndarray | None:
    """What a constant holds; None for a value that is not constant, or may be given to the graph."""
    tensor = None if value is None or value.is_graph_input() else ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def narrow(value: ir.Value | None) -> ir.Value | None:
    """What a Cast to float32 widens from 16 bits; the value itself where there is none."""
    cast = producer(value, "Cast")
    inner = cast.inputs[0] if cast is not None and value is not None and value.dtype == ir.DataType.FLOAT else None
    return inner if inner is not None and inner.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16) else value


def new_initializer(
    graph: ir.Graph, old: ir.Value, word: str, array: np.ndarray | ir.LazyTensor, dtype: ir.DataType | None = None
) -> ir.Value:
    """An initializer of a value's type, or of another, and with a name that begins with its."""
    taken = {*graph.initializers, *(output.name for node in graph for output in node.outputs)}
    names = (f"{old.name}_{word}{number or ''}" for number in itertools.count())
    name = next(n for n in names if n not in taken)
    tensor = array if isinstance(array, ir.LazyTensor) else ir.tensor(array, dtype=dtype or old.dtype)
    tensor.name = name
    value = ir.Value(name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()))
    graph.register_initializer(value)
    return value


def read_by(value: ir.Value, *nodes: ir.Node) -> bool:
    """Whether these nodes alone read what a value holds; others may ask for its shape."""
    readers = {use.node for use in value.uses() if use.node.op_type != "Shape"}
    return not value.is_graph_output() and readers <= {*nodes}


def only_reader(value: ir.Value, op_type: str, domain: str = "") -> ir.Node | None:
    """The node of this type, in the graph that makes a value, that alone reads it; else None."""
    uses, maker = list(value.uses()), value.producer()
    node = uses[0].node if len(uses) == 1 and not value.is_graph_output() else None
    if node is None or maker is None or node.graph is not maker.graph:
        return None
    return node if (node.domain, node.op_type) == (domain, op_type) else None


def bias_of(product: ir.Value, width: int) -> tuple[ir.Node, ir.Value] | None:
    """(the Add of a constant vector that alone reads a product of so many columns, the vector); else None."""
    add = only_reader(product, "Add")
    vector = add.inputs[1 if add.inputs[0] is product else 0] if add is not None else None
    array = constant(vector)
    return (add, vector) if add is not None and vector is not None and array is not None and array.shape == (width,) else None


def take_over(old: ir.Value, new: ir.Value) -> None:
    """Gives `new` the name, type, shape and uses of `old`."""
    new.name, new.type, new.shape = old.name, old.type, old.shape
    old.replace_all_uses_with(new, replace_graph_outputs=True)


def replace(graph: ir.Graph, old: ir.Node, new: ir.Node) -> None:
    """Puts a node of one output in another's place."""
    graph.insert_before(old, new)
    take_over(old.outputs[0], new.outputs[0])
    graph.remove(old, safe=True)


def adder(graph: ir.Graph, before: ir.Node) -> Op:
    """op(kind, *inputs, domain="", **attributes) that puts a node of one output before another node and returns the output."""

    def op(kind: str, *inputs: ir.Value, domain: str = "", **attributes: Any) -> ir.Value:
        node = ir.node(kind, inputs, attributes, domain=domain)
        graph.insert_before(before, node)
        return node.outputs[0]

    return op


def named(sizes: Iterable[int | ir.SymbolicDim]) -> bool:
    """Whether all of these sizes are numbers or have names: two that are unknown are equal to Python, and may differ."""
    return all(isinstance(n, int) or n.value is not None for n in sizes)


def columns(value: ir.Value | None) -> tuple[ir.Value, int, int] | None:
    """(x, begin, end) where value is a Slice of x's last axis, whose size is known; else None."""
    node = producer(value, "Slice")
    x = node.inputs[0] if node is not None and len(node.inputs) >= 4 else None
    if node is None or x is None or x.shape is None:
        return None
    width, arrays = x.shape[-1], [constant(i) for i in node.inputs[1:]]
    numbers = [int(array.item()) for array in arrays if array is not None and array.size == 1]
    if not isinstance(width, int) or len(numbers) < len(arrays):
        return None
    start, stop, axis, *steps = numbers
    if axis not in (-1, len(x.shape) - 1) or any(step != 1 for step in steps):
        return None
    begin, end = (min(n + (width if n < 0 else 0), width) for n in (start, stop))
    return x, begin, end


def column_sizes(split: ir.Node | None) -> list[int] | None:
    """The sizes of the parts that a Split makes of the last axis, where they are known; else None."""
    x = split.inputs[0] if split is not None else None
    if split is None or x is None or x.shape is None or "split" in split.attributes:  # of opsets below 13
        return None
    if split.attributes.get_int("axis", 0) not in (-1, len(x.shape) - 1):
        return None
    if len(split.inputs) > 1 and split.inputs[1] is not None:
        sizes = constant(split.inputs[1])
        return None if sizes is None else [int(n) for n in sizes]
    count, width = len(split.outputs), x.shape[-1]
    if not isinstance(width, int):
        return None
    each = -(-width // count)  # the last one may be smaller
    return [each] * (count - 1) + [width - each * (count - 1)]


def swaps_heads(node: ir.Node, rank: int = 4) -> bool:
    """Whether a node swaps heads and tokens of a tensor of this rank, and is no output of the graph."""
    return (
        node.op_type == "Transpose"
        and list(node.attributes.get_ints("perm", [])) == [0, 2, 1, 3][:rank]
        and node.domain == ""
        and not node.outputs[0].is_graph_output()
    )


def set_function(
    model: ir.Model,
    name: str,
    inputs: Sequence[str],
    build: Callable[..., ir.Value | list[ir.Value]],
    attributes: Mapping[str, Any] | None = None,
) -> None:
    """Gives a model a function of com.microsoft.`name` in standard operators, for runtimes without that operator.

    build(op, *values) of the inputs' values returns the output, or a list of them; op(kind, *values, outputs=1, **attributes)
    adds a node. attributes: those of the operator's nodes.
    """
    values, nodes = [ir.Value(name=n) for n in inputs], []

    def op(kind: str, *values: ir.Value, outputs: int = 1, **attributes: Any) -> Any:
        nodes.append(ir.node(kind, values, attributes, num_outputs=outputs))
        return nodes[-1].outputs if outputs > 1 else nodes[-1].outputs[0]

    built = build(op, *values)
    outputs = built if isinstance(built, list) else [built]
    for i, output in enumerate(outputs):
        output.name = f"output{i or ''}"
    graph = ir.Graph(values, outputs, nodes=nodes, opset_imports={"": model.opset_imports[""]}, name=name)
    function = ir.Function(MICROSOFT, name, graph=graph, attributes=ir.convenience.convert_attributes(attributes or {}))
    model.functions[function.identifier()] = function
