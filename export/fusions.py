"""Rewrites of an exported decoder's graph into forms that ONNX Runtime has one kernel for. Each computes what it replaces."""

from itertools import accumulate

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedNodesPass

from leanfleet import spec
from leanfleet.export import function_bodies

MICROSOFT = "com.microsoft"
ROTARY_TYPES = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16  # of com.microsoft.RotaryEmbedding
MOST_POSITIONS = 2**18  # rows of a rotary table that is worth its place in the file: 128 MB for cosines and sines of 64 angles


_ARGUMENTS = [t.name for t in spec.all_specs()["LeanAttention"].inputs]
_ROWS = "query", "new_key", "new_value"


def _argument(node, name):
    """This input of a LeanAttention node, or None."""
    i = _ARGUMENTS.index(name)
    return node.inputs[i] if i < len(node.inputs) else None


def _set_arguments(node, **values):
    places = {_ARGUMENTS.index(name): value for name, value in values.items()}
    node.resize_inputs(max(len(node.inputs), *(i + 1 for i in places)))
    for i, value in places.items():
        node.replace_input_with(i, value)
    node.resize_inputs(1 + max(i for i, value in enumerate(node.inputs) if value is not None))


def _producer(value, *op_types):
    """The standard operator of one of these types that makes a value; None where another does."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type in op_types and node.domain == "" else None


def _constant(value):
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return None if tensor is None else tensor.numpy()


def _replace(graph, old_node, new_node):
    """Puts a node of one output in another's place."""
    old, new = old_node.outputs[0], new_node.outputs[0]
    new.name, new.type, new.shape = old.name, old.type, old.shape
    graph.insert_before(old_node, new_node)
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove(old_node, safe=True)


def _adder(graph, before):
    """op(kind, *inputs, domain="", **attributes) that puts a node of one output before another node and returns the output."""

    def op(kind, *inputs, domain="", **attributes):
        node = ir.node(kind, inputs, attributes, domain=domain)
        graph.insert_before(before, node)
        return node.outputs[0]

    return op


def divide_by_roots(model):
    """Writes x * (1 / sqrt(y)) as x / sqrt(y), which ONNX Runtime recognises as an RMS norm. Returns the number of places."""
    count = 0
    for node in list(model.graph):
        for i in (0, 1) if node.op_type == "Mul" and node.domain == "" else ():
            reciprocal = _producer(node.inputs[i], "Reciprocal")
            root = reciprocal and _producer(reciprocal.inputs[0], "Sqrt")
            if root:
                _replace(model.graph, node, ir.node("Div", [node.inputs[1 - i], root.outputs[0]], name=node.name))
                count += 1
                break
    return count


def _half(value):
    """How to get the first half of a value [..., 2h] whose halves are equal, as (x [..., h], the nodes after x); else None."""
    steps = []
    while True:
        concat = _producer(value, "Concat")
        if concat:
            same = len(concat.inputs) == 2 and concat.inputs[0] is concat.inputs[1]
            return (concat.inputs[0], steps[::-1]) if same and concat.attributes.get_int("axis") == -1 else None
        node = _producer(value, "Cos", "Sin", "Cast", "Mul")
        if node is None:
            return None
        if node.op_type == "Mul":
            factor = next((i for i in (0, 1) if (c := _constant(node.inputs[i])) is not None and c.size == 1), None)
            if factor is None:
                return None
            value = node.inputs[1 - factor]
        else:
            value = node.inputs[0]
        steps.append(node)


def _named(sizes):
    """Whether all of these sizes are numbers or have names: two that are unknown are equal to Python, and may differ."""
    return all(isinstance(n, int) or n.value is not None for n in sizes)


def _columns(value):
    """(x, begin, end) where value is a Slice of x's last axis, whose size is known; else None."""
    node = _producer(value, "Slice")
    if node is None or node.inputs[0].shape is None or len(node.inputs) < 4:
        return None
    x = node.inputs[0]
    width = x.shape[-1]
    starts, ends, axes, *steps = (_constant(i) for i in node.inputs[1:])
    if not isinstance(width, int) or any(c is None or c.size != 1 for c in (starts, ends, axes, *steps)):
        return None
    if axes.item() not in (-1, len(x.shape) - 1) or any(step.item() != 1 for step in steps):
        return None
    return x, *(min(int(c.item()) + (width if c.item() < 0 else 0), width) for c in (starts, ends))


def _halves(value):
    """x where value is the concatenation of -x2 and x1, the halves of x's last axis; else None."""
    concat = _producer(value, "Concat")
    two = concat and len(concat.inputs) == 2 and concat.attributes.get_int("axis") == -1
    negation = two and _producer(concat.inputs[0], "Neg")
    if not negation:
        return None
    second, first = _columns(negation.inputs[0]), _columns(concat.inputs[1])
    if None in (first, second) or first[0] is not second[0]:
        return None
    x = first[0]
    width = x.shape[-1]
    return x if width % 2 == 0 and (first[1:], second[1:]) == ((0, width // 2), (width // 2, width)) else None


def set_function(model, name, inputs, build, attributes=None):
    """Gives a model a function of com.microsoft.`name` in standard operators, for runtimes without that operator.

    build(op, *values) of the inputs' values returns the output, or a list of them; op(kind, *values, outputs=1, **attributes)
    adds a node. attributes: those of the operator's nodes.
    """
    inputs, nodes = [ir.Value(name=n) for n in inputs], []

    def op(kind, *values, outputs=1, **attributes):
        nodes.append(ir.node(kind, values, attributes, num_outputs=outputs))
        return nodes[-1].outputs if outputs > 1 else nodes[-1].outputs[0]

    outputs = build(op, *inputs)
    outputs = outputs if isinstance(outputs, list) else [outputs]
    for i, output in enumerate(outputs):
        output.name = f"output{i or ''}"
    graph = ir.Graph(inputs, outputs, nodes=nodes, opset_imports={"": model.opset_imports[""]}, name=name)
    function = ir.Function(MICROSOFT, name, graph=graph, attributes=ir.convenience.convert_attributes(attributes or {}))
    model.functions[function.identifier()] = function


def _rotate(op, x, positions, cos, sin, heads):
    """x with a last axis of 2h channels, and an axis of heads at `heads`, turned by rows [B,N,h] of the tables."""
    axis = op("Constant", value_ints=[heads])
    cos, sin = (op("Unsqueeze", op("Gather", rows, positions), axis) for rows in (cos, sin))
    first, second = op("Split", x, outputs=2, axis=-1, num_outputs=2)
    return op("Concat", op("Sub", op("Mul", first, cos), op("Mul", second, sin)),
              op("Add", op("Mul", second, cos), op("Mul", first, sin)), axis=-1)


def _rotate_heads_first(op, x, positions, cos, sin):
    return _rotate(op, x, positions, cos, sin, 1)


def _rotate_flat(op, x, positions, cos, sin):
    """x: [B,N,H*2h]."""
    width = op("Mul", op("Shape", cos, start=1), op("Constant", value_ints=[2]))
    heads = op("Concat", op("Constant", value_ints=[0, 0, -1]), width, axis=0)
    return op("Reshape", _rotate(op, op("Reshape", x, heads), positions, cos, sin, 2), op("Shape", x))


def _row_numbers(op, value):
    """b N + i for each token (b, i) of a value [B,N,...], int64 [B,N]: the rows of tables that tokens have to themselves."""
    size = op("Shape", value, start=0, end=2)
    zero, one = (op("Constant", value_int=n) for n in (0, 1))
    return op("Reshape", op("Range", zero, op("ReduceProd", size, keepdims=0), one), size)


def fuse_rotary(model):
    """Rotary position encodings (x cos + rotate_half(x) sin) become com.microsoft.RotaryEmbedding nodes, with a function of
    that name in standard operators for other runtimes. Returns the number of places.

    Each pair of cos and sin [B,N,2h] with equal halves becomes tables [B N,h] that token (b, i) reads at row b N + i.
    """
    graph, tables, count = model.graph, {}, 0

    def table(cos, sin, before):
        """(positions, cos table, sin table) of a pair, made before the node that uses them first; None: not of that form."""
        if (cos, sin) in tables:
            return tables[cos, sin]
        found = _half(cos), _half(sin)
        if None in found or found[0][0] is not found[1][0] or cos.shape is None or not isinstance(cos.shape[-1], int):
            tables[cos, sin] = None
            return None

        op, rows = _adder(graph, before), []
        for x, steps in found:
            value = x
            for step in steps:
                inputs = [value if _constant(i) is None else i for i in step.inputs]
                value = op(step.op_type, *inputs, **{a.name: a.value for a in step.attributes.values()})
            rows.append(op("Reshape", value, op("Constant", value_ints=[-1, cos.shape[-1] // 2])))
        tables[cos, sin] = _row_numbers(op, found[0][0]), *rows
        return tables[cos, sin]

    for node in list(graph):
        if node.op_type != "Add" or node.domain != "":
            continue
        products = [_producer(value, "Mul") for value in node.inputs]
        for straight, turned in (products, products[::-1]) if None not in products else ():
            for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
                x = _halves(turned.inputs[i])
                if x is None or straight.inputs[j] is not x or x.shape is None or len(x.shape) != 4:
                    continue
                spread = [_producer(value, "Unsqueeze") for value in (straight.inputs[1 - j], turned.inputs[1 - i])]
                if None in spread or any((axes := _constant(s.inputs[1])) is None or axes.tolist() != [1] for s in spread):
                    continue
                rows = table(spread[0].inputs[0], spread[1].inputs[0], spread[0])
                if rows is None:
                    continue
                _replace(graph, node, ir.node("RotaryEmbedding", [x, *rows], domain=MICROSOFT, name=node.name))
                count += 1
                break
            else:
                continue
            break
    if count:
        graph.sort()
        model.opset_imports.setdefault(MICROSOFT, 1)
        _set_rotary(model, _rotate_heads_first)
    return count


def _rotated_halves(concat):
    """(x, angles, cosines, sines) where a Concat node makes x1 cos - x2 sin and x2 cos + x1 sin of the halves of x's last axis;
    else None. Halves may be cast first."""
    if len(concat.inputs) != 2 or concat.attributes.get_int("axis") not in (-1, 3):
        return None
    difference, total = _producer(concat.inputs[0], "Sub"), _producer(concat.inputs[1], "Add")
    products = [_producer(value, "Mul") for node in (difference, total) if node for value in node.inputs]
    if len(products) != 4 or None in products:
        return None
    factors = []
    for product in products:
        table = next((i for i in (0, 1) if _producer(product.inputs[i], "Cos", "Sin")), None)
        if table is None:
            return None
        half = product.inputs[1 - table]
        cast = _producer(half, "Cast")
        factors.append((_columns(cast.inputs[0] if cast else half), product.inputs[table]))
    (first, cos), (second, sin), *rest = factors
    if None in (first, second) or rest not in ([(second, cos), (first, sin)], [(first, sin), (second, cos)]):
        return None
    angles, width = cos.producer().inputs[0], first[0].shape[-1]
    if (cos.producer().op_type, sin.producer().op_type) != ("Cos", "Sin") or sin.producer().inputs[0] is not angles:
        return None
    whole = first[0] is second[0] and (first[1:], second[1:]) == ((0, width // 2), (width // 2, width))
    return (first[0], angles, cos, sin) if whole and width % 2 == 0 else None


def fuse_rotated_halves(model):
    """Rotary position encodings as leanfleet.export.linear_attention.rotary writes them, of projections [B,N,H*2h] by angles
    [B,N,1,h], become RotaryEmbedding nodes as in fuse_rotary, with tables in the projections' type. A factor [B,N,1,1] that
    only the turned heads are multiplied with, such as 0 for padding, goes into the tables. Returns the number of places. Not
    for a model that has nodes of fuse_rotary: its function is another.
    """
    graph, tables, count = model.graph, {}, 0

    def factor_of(value):
        """(the node that multiplies a value with such a factor, the factor), or (None, None)."""
        users = [use.node for use in value.uses()]
        alone = len(users) == 1 and users[0].graph is graph and not value.is_graph_output()
        node = _producer(users[0].outputs[0], "Mul") if alone else None
        factor = next((i for i in node.inputs if i is not value), None) if node else None
        if factor is None or factor.shape is None or list(factor.shape) != [*value.shape[:2], 1, 1]:
            return None, None
        return node, factor

    for node in list(graph):
        found = _rotated_halves(node) if node.op_type == "Concat" and node.domain == "" else None
        if found is None:
            continue
        x, angles, cos, sin = found
        reshape, half = _producer(x, "Reshape"), x.shape[-1] // 2
        flat = reshape.inputs[0] if reshape else None
        if flat is None or flat.shape is None or len(flat.shape) != 3 or len(x.shape) != 4 or angles.shape is None or (
                list(angles.shape) != [*x.shape[:2], 1, half] or list(flat.shape[:2]) != list(x.shape[:2])
                or not _named(x.shape[:2]) or x.dtype not in ROTARY_TYPES):
            continue
        users = [use.node for use in node.outputs[0].uses()]
        cast = _producer(users[0].outputs[0], "Cast") if len(users) == 1 and users[0].graph is graph else None
        last = cast if cast and cast.outputs[0].dtype == x.dtype else node
        if last.outputs[0].dtype != x.dtype:
            continue

        if (cos, sin, x.dtype) not in tables:
            op = _adder(graph, node)
            rows = [op("Cast", op("Reshape", t, op("Constant", value_ints=[-1, half])), to=x.dtype) for t in (cos, sin)]
            tables[cos, sin, x.dtype] = _row_numbers(op, flat), *rows
        last.outputs[0].shape = x.shape
        product, factor = factor_of(last.outputs[0])
        if product and (cos, sin, factor) not in tables:
            op, (positions, *rows) = _adder(graph, product), tables[cos, sin, x.dtype]
            each = op("Reshape", factor, op("Constant", value_ints=[-1, 1]))
            tables[cos, sin, factor] = positions, *(op("Mul", t, each) for t in rows)
        turned = ir.node("RotaryEmbedding", [flat, *tables[cos, sin, factor if product else x.dtype]], domain=MICROSOFT,
                         name=node.name)
        last = product or last
        graph.insert_before(last, turned)
        turned.outputs[0].type, turned.outputs[0].shape = flat.type, flat.shape
        _replace(graph, last, ir.node("Reshape", [turned.outputs[0], reshape.inputs[1]]))
        count += 1
    if count:
        RemoveUnusedNodesPass()(model)
        graph.sort()
        model.opset_imports.setdefault(MICROSOFT, 1)
        _set_rotary(model, _rotate_flat)
    return count


def _turned(value):
    """(x, node) where value is x [B,H,N,D] after a RotaryEmbedding node of all its columns or of the first ones; else None."""
    node = None if value is None else value.producer()
    concat = _producer(value, "Concat")
    first = None
    if concat and len(concat.inputs) == 2 and concat.attributes.get_int("axis") in (-1, 3):
        first, rest = concat.inputs[0].producer(), _columns(concat.inputs[1])
        node = first
    if node is None or (node.domain, node.op_type) != (MICROSOFT, "RotaryEmbedding") or node.attributes:
        return None
    if first is None:
        return node.inputs[0], node
    turned = _columns(node.inputs[0])
    if None in (turned, rest) or turned[0] is not rest[0] or turned[1] != 0 or (turned[2], turned[0].shape[-1]) != rest[1:]:
        return None
    return turned[0], node


def _evaluator(graph, outputs, sizes, lens):
    """evaluate(batch, tokens, *lens) -> numpy values of `outputs`, where these follow from the values `lens`, of one axis, and
    from the sizes of other inputs of the graph alone; else None. sizes: (name of the axis of requests, of tokens)."""
    bounds, pending, seen = list(lens), [(value, None) for value in outputs], set()
    while pending:
        value, reader = pending.pop()
        node = None if value is None else value.producer()
        if value is None or value in bounds and node is not None or value.const_value is not None:
            continue
        if node is None:
            if value not in lens and (reader is None or reader.op_type != "Shape" or value.shape is None):
                return None
            if value not in bounds:
                bounds.append(value)
        elif node not in seen:
            if node.domain != "" or any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
                                        for a in node.attributes.values()):
                return None
            seen.add(node)
            pending += [(x, node) for x in node.inputs]
    used = [v for v in bounds if v not in lens or v.is_graph_input() or any(use.node in seen for use in v.uses())]
    model = ir.Model(ir.convenience.extract(graph, used, outputs), ir_version=10)
    model.graph.opset_imports.update(graph.opset_imports)
    run = ReferenceEvaluator(ir.to_proto(model)).run

    def evaluate(batch, tokens, *values):
        known = dict(zip(sizes, (batch, tokens), strict=True))
        feeds = {v.name: np.array(x, v.dtype.numpy()) for v, x in zip(lens, values, strict=True)}
        for v in used[len(lens):]:
            dims = [d if isinstance(d, int) else known.get(d.value, 1) for d in v.shape]
            feeds[v.name] = np.zeros(dims, v.dtype.numpy())
        return run(None, feeds)

    return evaluate


def _tables(node, rotary, positions):
    """The tables of a RotaryEmbedding node before a LeanAttention node as float32 arrays of `positions` rows, where row p
    is what a token at position p turns by, seq_lens - query_lens being the position of a request's first; else None."""
    query, lens = _argument(node, "query"), (_argument(node, "seq_lens"), _argument(node, "query_lens"))
    tokens = 1 if node.attributes.get_string("layout", "bhnd") == "bnhd" else 2
    if query.shape is None or any(isinstance(query.shape[axis], int) for axis in (0, tokens)):
        return None
    names = query.shape[0].value, query.shape[tokens].value
    evaluate = _evaluator(node.graph, rotary.inputs[1:4], names, lens)
    if evaluate is None:
        return None
    try:
        rows, *tables = evaluate(1, positions, [positions], [positions])
        if any(len(t) != positions for t in tables):
            return None
        # That rows follow from positions alone is tested: prompts and steps, short and long, of one request and of two.
        for tokens, ends, counts in ((1, [1], [1]), (3, [3], [3]), (3, [positions, 7], [1, 3]), (2, [9, positions], [2, 2])):
            ends = [min(n, positions) for n in ends]
            counts = [min(n, end) for n, end in zip(counts, ends, strict=True)]
            rows, *found = evaluate(len(ends), tokens, ends, counts)
            for b, (end, count) in enumerate(zip(ends, counts, strict=True)):
                for t, f in zip(tables, found, strict=True):
                    if not np.allclose(f[rows[b, :count]], t[end - count:end], rtol=1e-5, atol=1e-6):
                        return None
    except Exception:  # sizes of other names than the query's, an operator that only runtimes know
        return None
    return [t.astype(np.float32) for t in tables]


def _packed_tables(rotary, numbers, positions):
    """_tables for a node of packed tokens, whose positions are the graph's input `numbers` [T]."""
    evaluate = _evaluator(rotary.graph, rotary.inputs[1:4], ("", numbers.shape[0].value), [numbers])
    if evaluate is None:
        return None
    try:
        rows, *tables = evaluate(1, positions, range(positions))
        tables = [t[rows[0]] for t in tables]
        # That they follow from each token's position alone is tested, of short requests and of long ones.
        for some in ([0], list(range(min(3, positions))), [positions - 1, 0, min(3, positions - 1)]):
            rows, *found = evaluate(1, len(some), some)
            if not all(np.allclose(f[rows[0]], t[some], rtol=1e-5, atol=1e-6) for f, t in zip(found, tables, strict=True)):
                return None
    except Exception:  # an operator that only runtimes know
        return None
    return [t.astype(np.float32) for t in tables]


def _rotary_constants(graph, number, arrays):
    """Initializers of rotary tables, cosines and sines."""
    values = [ir.Value(name=f"rotary_{name}_{number}", const_value=ir.tensor(array))
              for name, array in zip(("cos", "sin"), arrays, strict=True)]
    for value in values:
        value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), value.const_value.shape
        graph.register_initializer(value)
    return values


def rotate_inside(model, positions):
    """LeanAttention nodes take in the rotary encodings of their queries and new keys, where angles follow from the tokens'
    positions alone: the tables become constants of `positions` rows, MOST_POSITIONS at most. After fuse_rotary. Returns the
    number of attentions.
    """
    graph, tables, count = model.graph, {}, 0
    if positions > MOST_POSITIONS:
        return 0
    for node in graph:
        if node.op_type != "LeanAttention" or _argument(node, "cos_cache") is not None:
            continue
        lens = _argument(node, "seq_lens"), _argument(node, "query_lens")
        if None in (*lens, _argument(node, "new_value")):
            continue
        query, key = _turned(_argument(node, "query")), _turned(_argument(node, "new_key"))
        if None in (query, key) or query[1].inputs[1:4] != key[1].inputs[1:4]:
            continue
        place = (*query[1].inputs[1:4], *lens)
        if place not in tables:
            arrays = _tables(node, query[1], positions)
            tables[place] = arrays and _rotary_constants(graph, len(tables), arrays)
        if tables[place] is None:
            continue
        cosines, sines = tables[place]
        _set_arguments(node, query=query[0], new_key=key[0], cos_cache=cosines, sin_cache=sines)
        count += 1
    return count


def _set_rotary(model, build):
    set_function(model, "RotaryEmbedding", ("input", "position_ids", "cos_cache", "sin_cache"), build)


def _bias(product, width):
    """(node, vector) of the Add of a constant vector that alone reads a product of so many columns; else None."""
    uses = list(product.uses())
    add = uses[0].node if len(uses) == 1 and not product.is_graph_output() else None
    if add is None or add.op_type != "Add" or add.domain != "" or add.graph is not product.producer().graph:
        return None
    vector = _constant(add.inputs[1 - uses[0].idx])
    return (add, vector) if vector is not None and vector.shape == (width,) else None


def _joined(before, kind, value, arrays, dtype):
    """The output of a `kind` node of value and all arrays side by side, put before the node of the first of them."""
    array, old = np.concatenate(arrays, axis=-1), before.outputs[0]
    constant = ir.Value(name=f"{old.name}_packed_{kind}", const_value=ir.tensor(array, dtype=dtype))
    constant.dtype, constant.shape = dtype, ir.Shape(array.shape)
    before.graph.register_initializer(constant)
    new = _adder(before.graph, before)(kind, value, constant)
    new.type, new.shape = old.type, old.shape and ir.Shape([*old.shape[:-1], array.shape[-1]])
    return new


def pack_projections(model):
    """Products of one value with several constant matrices become one product and a Split: fewer, larger kernels. So do their
    sums with constant vectors, where there are any. Returns the number of products saved. (A Split of another axis
    than the last, such as of heads, costs ONNX Runtime's CUDA provider four copies to the device where sizes differ.)
    """
    groups = {}
    for node in model.graph:
        if node.op_type == "MatMul" and node.domain == "":
            tensor = ir.convenience.get_const_tensor(node.inputs[1])
            if tensor is not None and len(tensor.shape) == 2:
                groups.setdefault((node.inputs[0], tensor.dtype), []).append((node, tensor))
    saved = 0
    for (x, _), group in groups.items():
        if len(group) < 2:
            continue
        first = group[0][0]
        widths = [tensor.shape[1] for _, tensor in group]
        biases = [_bias(node.outputs[0], width) for (node, _), width in zip(group, widths, strict=True)]
        product = _joined(first, "MatMul", x, [tensor.numpy() for _, tensor in group], group[0][1].dtype)
        if types := [bias[1].dtype for bias in biases if bias]:
            vectors = [bias[1] if bias else np.zeros(width, types[0]) for bias, width in zip(biases, widths, strict=True)]
            product = _joined(first, "Add", product, vectors, group[0][1].dtype)
        sizes = _adder(model.graph, first)("Constant", value_ints=widths)
        split = ir.node("Split", [product, sizes], {"axis": -1}, num_outputs=len(group))
        model.graph.insert_before(first, split)
        for (node, _), bias, new in zip(group, biases, split.outputs, strict=True):
            last = bias[0] if bias else node
            old = last.outputs[0]
            new.name, new.type, new.shape = old.name, old.type, old.shape
            old.replace_all_uses_with(new, replace_graph_outputs=True)
            for done in dict.fromkeys((last, node)):
                model.graph.remove(done, safe=True)
        saved += len(group) - 1
    return saved


def _rms_norm(product):
    """(x, weight [E], eps) where a Mul node is the RMS norm of x's last axis, computed in float32 or in x's type; else None."""
    for weight, normed in (product.inputs, product.inputs[::-1]):
        if weight is None or weight.shape is None or len(weight.shape) != 1 or _constant(weight) is None:
            continue
        cast = _producer(normed, "Cast")
        quotient = _producer(cast.inputs[0] if cast else normed, "Div")
        root = quotient and _producer(quotient.inputs[1], "Sqrt")
        total = root and _producer(root.inputs[0], "Add")
        if not total:
            continue
        wide = quotient.inputs[0]
        widened = _producer(wide, "Cast") if cast else None
        for mean, eps in (total.inputs, total.inputs[::-1]):
            mean, eps = _producer(mean, "ReduceMean"), _constant(eps)
            square = mean and _producer(mean.inputs[0], "Pow", "Mul")
            if not square or eps is None or eps.size != 1 or (cast and not widened):
                continue
            axes = _constant(mean.inputs[1]) if len(mean.inputs) > 1 else None
            last = axes is not None and axes.tolist() in ([-1], [len(wide.shape or ()) - 1]) and mean.attributes.get_int(
                "keepdims", 1)
            exponent = _constant(square.inputs[1])
            squared = square.inputs[0] is wide and (square.inputs[1] is wide if square.op_type == "Mul" else
                                                    exponent is not None and exponent.tolist() in (2, [2]))
            x = widened.inputs[0] if cast else wide
            if last and squared and x.dtype == weight.dtype == product.outputs[0].dtype:
                return x, weight, float(eps.item())
    return None


def fuse_residuals(model):
    """A sum and the norm that reads it become one node, com.microsoft.SkipSimplifiedLayerNormalization or
    SkipLayerNormalization, which gives the sum too; with functions of these names for other runtimes. In float32 and float16,
    and for norms of the first one's epsilon and number of parameters alone: a name has one function. Returns the number of
    places.

    ONNX Runtime does so by itself only where nothing else reads the sum. Its CUDA kernels add up in float32 since 2026.
    """
    graph, epsilons, lengths, count = model.graph, {}, {}, 0
    for node in list(graph):
        if node.domain != "" or node.op_type not in ("Mul", "LayerNormalization"):
            continue
        if node.op_type == "Mul":
            found = _rms_norm(node)
            x, name = found[0] if found else None, "SkipSimplifiedLayerNormalization"
            parameters, eps = ([found[1]], found[2]) if found else (None, None)
        else:
            x, name, parameters = node.inputs[0], "SkipLayerNormalization", node.inputs[1:]
            eps = node.attributes.get_float("epsilon", 1e-5)
            if node.attributes.get_int("axis", -1) not in (-1, 2) or len([o for o in node.outputs if o.name]) > 1 or any(
                    _constant(p) is None or p.shape is None or len(p.shape) != 1 or p.dtype != x.dtype for p in parameters):
                x = None
        total = _producer(x, "Add")
        if total is None or x.shape is None or len(x.shape) != 3 or not _named(x.shape) or x.is_graph_output() or any(
                value.shape is None or list(value.shape) != list(x.shape) for value in (*total.inputs, node.outputs[0])):
            continue
        if x.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16) or any(list(p.shape) != [x.shape[2]] for p in parameters):
            continue
        if epsilons.setdefault(name, eps) != eps or lengths.setdefault(name, len(parameters)) != len(parameters):
            continue
        fused = ir.node(name, [*total.inputs, *parameters], {"epsilon": eps}, domain=MICROSOFT, num_outputs=4, name=node.name)
        normed, *unused, both = fused.outputs
        for output in unused:
            output.name = ""
        graph.insert_before(total, fused)
        for old, new in ((node.outputs[0], normed), (x, both)):
            new.name, new.type, new.shape = old.name, old.type, old.shape
            old.replace_all_uses_with(new, replace_graph_outputs=True)
        graph.remove(node, safe=True)
        count += 1
    if count:
        RemoveUnusedNodesPass()(model)
        graph.sort()
        model.opset_imports.setdefault(MICROSOFT, 1)

    def simplified(op, x, skip, weight):
        both, last = op("Add", x, skip), op("Constant", value_ints=[-1])
        wide = op("Cast", both, to=ir.DataType.FLOAT)
        root = op("Sqrt", op("Add", op("ReduceMean", op("Mul", wide, wide), last), op(
            "Constant", value_float=epsilons["SkipSimplifiedLayerNormalization"])))
        normed = op("Mul", op("CastLike", op("Div", wide, root), both), weight)
        return [normed, op("ReduceMean", wide, last), op("Reciprocal", root), both]

    def centred(op, x, skip, *parameters):
        both = op("Add", x, skip)
        normed = op("LayerNormalization", both, *parameters, outputs=3, epsilon=epsilons["SkipLayerNormalization"])
        return [*normed, both]

    for name, build in (("SkipSimplifiedLayerNormalization", simplified), ("SkipLayerNormalization", centred)):
        if name in epsilons:
            inputs = ("input", "skip", "gamma", "beta")[:2 + lengths[name]]
            set_function(model, name, inputs, build, {"epsilon": epsilons[name]})
    return count


def _swaps_heads(node):
    """Whether a node swaps heads and tokens, and is no output of the graph."""
    return (node.op_type == "Transpose" and list(node.attributes.get_ints("perm", [])) == [0, 2, 1, 3]
            and node.domain == "" and not node.outputs[0].is_graph_output())


def drop_transposes(model):
    """LeanAttention and RotaryEmbedding read projections as they come, token after token, in place of heads first. Done
    where it can be for all of the model's rotary encodings, which share one function. Returns the number of attentions.
    """
    graph, plan, rotaries = model.graph, [], set()

    def transposed(value):
        """What a value is the transpose (heads and tokens) of; None: it is not one, or its shape is unknown."""
        node = value.producer() if value is not None else None
        if node is None or not _swaps_heads(node):
            return None
        return node.inputs[0] if node.inputs[0].shape is not None and isinstance(value.shape[3], int) else None

    for node in graph:
        if node.op_type != "LeanAttention" or node.attributes.get_string("layout", "bhnd") != "bhnd":
            continue
        reads = []
        for name in _ROWS:
            value, rotary = _argument(node, name), None
            made = value.producer() if value is not None else None
            if made and (made.domain, made.op_type) == (MICROSOFT, "RotaryEmbedding"):
                if len(value.uses()) != 1:
                    break
                rotary, value = made, made.inputs[0]
            source = transposed(value)
            if source is None:
                break
            reads.append((name, source, rotary))
        users = [use.node for use in node.outputs[0].uses()]
        if len(reads) == 3 and len(users) == 1 and _swaps_heads(users[0]):
            plan.append((node, reads, users[0]))
            rotaries |= {rotary for _, _, rotary in reads if rotary}
    everywhere = {n for n in graph if (n.domain, n.op_type) == (MICROSOFT, "RotaryEmbedding")}
    if not plan or rotaries and rotaries != everywhere:
        return 0

    for node, reads, after in plan:
        for name, source, rotary in reads:
            value, old = source, _argument(node, name)
            if rotary:
                reshape = _producer(source, "Reshape")
                flat = reshape.inputs[0] if reshape else None
                op = _adder(graph, rotary)
                if flat is None or flat.shape is None or len(flat.shape) != 3:
                    flat = op("Reshape", source, op("Constant", value_ints=[0, 0, -1]))
                turned = op("RotaryEmbedding", flat, *rotary.inputs[1:], domain=MICROSOFT)
                turned.type, turned.shape = old.type, flat.shape
                value = op("Reshape", turned, op("Constant", value_ints=[0, 0, -1, source.shape[3]]))
            value.type = old.type
            value.shape = source.shape
            _set_arguments(node, **{name: value})
        node.attributes["layout"] = ir.AttrString("layout", "bnhd")
        output, moved = node.outputs[0], after.outputs[0]
        output.shape = moved.shape
        moved.replace_all_uses_with(output)
    if rotaries:
        _set_rotary(model, _rotate_flat)
    return len(plan)


def _spread(value):
    """(x [1,heads,T,D], slots [B,N]) where value [B,N,heads,D] is x's tokens taken by slots, as leanfleet.export.serving
    spreads them; else None."""
    reshape = _producer(value, "Reshape")
    taken = _producer(reshape.inputs[0], "Gather") if reshape else None
    flat = _producer(taken.inputs[1], "Reshape") if taken and taken.attributes.get_int("axis", 0) == 0 else None
    tokens_first = _producer(taken.inputs[0], "Transpose") if flat else None
    request = _producer(tokens_first.inputs[0], "Gather") if tokens_first else None
    if not request or list(tokens_first.attributes.get_ints("perm", ())) != [1, 0, 2]:
        return None
    which, x, slots = _constant(request.inputs[1]), request.inputs[0], flat.inputs[0]
    if which is None or which.ndim != 0 or which.item() != 0 or request.attributes.get_int("axis", 0) != 0:
        return None
    known = x.shape is not None and len(x.shape) == 4 and x.shape[0] == 1 and isinstance(x.shape[3], int)
    return (x, slots) if known and slots.shape is not None and len(slots.shape) == 2 else None


def _side_by_side(heads):
    """The value [..., width] whose last axis holds, from its begin to its end, what reshaped makes each of `heads`
    [..., heads, D], of known sizes, by one Split or a Slice each; else None."""
    widths = [x.shape[2] * x.shape[3] for x in heads]
    parts = [_producer(value, "Reshape") for value in heads]
    if None in parts:
        return None
    parts = [reshape.inputs[0] for reshape in parts]
    # A Reshape may have split up tokens of [B N,width] too: the leading axes must be those of the heads.
    if any(p.shape is None or len(p.shape) != 3 or not _named(p.shape) or [*p.shape] != [*x.shape[:2], width]
           for p, x, width in zip(parts, heads, widths, strict=True)):
        return None
    split = _producer(parts[0], "Split")
    if split:
        whole = list(split.outputs) == parts and split.attributes.get_int("axis", 0) in (-1, 2)
        return split.inputs[0] if whole else None
    slices, ends = [_columns(value) for value in parts], list(accumulate(widths))
    if None in slices or slices[0][0].shape[-1] != ends[-1]:
        return None
    expected = [(slices[0][0], end - width, end) for end, width in zip(ends, widths, strict=True)]
    return slices[0][0] if slices == expected else None


def spread_packed(model, positions):
    """Tokens packed for leanfleet.export.serving are spread to a row a request before their projection is split to heads, by
    one Gather an attention, or three where queries, keys and values are made apart; and rotary encodings go into LeanAttention,
    for up to `positions` positions: token i of request b stands at seq_lens[b] - query_lens[b] + i, which is what the input
    `positions` says of it. After fuse_rotary. Returns the number of attentions.
    """
    graph, tables, spreads, count = model.graph, {}, {}, 0
    numbers = next((value for value in graph.inputs if value.name == "positions"), None)
    for node in list(graph):
        if node.op_type != "LeanAttention" or numbers is None or _argument(node, "block_table") is None or any(
                _argument(node, name) is not None for name in ("sinks", "cos_cache")):
            continue
        found = [_spread(_argument(node, name)) for name in _ROWS]
        if None in found or len({slots for _, slots in found}) != 1:
            continue
        slots, sources, rotary = found[0][1], [x for x, _ in found], None
        turned = [_turned(x) for x in sources[:2]]
        if None not in turned and turned[0][1].inputs[1:4] == turned[1][1].inputs[1:4] and positions <= MOST_POSITIONS:
            place = tuple(turned[0][1].inputs[1:4])
            if place not in tables:
                arrays = _packed_tables(turned[0][1], numbers, positions)
                tables[place] = arrays and _rotary_constants(graph, len(tables), arrays)
            if tables[place] is not None:
                sources[:2], rotary = [x for x, _ in turned], tables[place]
        before = [x.producer() for x in sources]
        if any(t is None or not _swaps_heads(t) for t in before):
            continue
        heads = [t.inputs[0] for t in before]  # [1,T,heads,D]
        if any(x.shape is None or len(x.shape) != 4 or not all(isinstance(n, int) for n in x.shape[2:]) for x in heads):
            continue
        if rotary:
            _set_arguments(node, cos_cache=rotary[0], sin_cache=rotary[1])
        widths = [value.shape[2] * value.shape[3] for value in heads]
        op, together = _adder(graph, node), _side_by_side(heads)
        wholes = [(together, sum(widths))] if together is not None else list(zip(heads, widths, strict=True))
        for value, width in wholes:
            if (value, slots) not in spreads:
                rows = op("Reshape", value, op("Constant", value_ints=[-1, width]))
                spreads[value, slots] = op("Gather", rows, slots, axis=0)
        parts = [spreads[value, slots] for value, _ in wholes]
        if together is not None:
            sizes = op("Constant", value_ints=widths)
            new = ir.node("Split", [parts[0], sizes], {"axis": -1}, num_outputs=len(heads))
            graph.insert_before(node, new)
            parts = new.outputs
        for name, value, part, width in zip(_ROWS, heads, parts, widths, strict=True):
            old = _argument(node, name)
            part.type, part.shape = old.type, ir.Shape([*old.shape[:2], width])
            rows = op("Reshape", part, op("Constant", value_ints=[0, 0, *value.shape[2:]]))
            rows.type, rows.shape = old.type, old.shape
            _set_arguments(node, **{name: rows})
        count += 1
    return count


def pack_heads(model):
    """LeanAttention nodes take queries, new keys and new values as the one tensor that a Split, or a Slice each, made them of:
    a kernel fewer. After drop_transposes and spread_packed. Returns the number of attentions.
    """
    graph, count = model.graph, 0
    for node in list(graph):
        if node.op_type != "LeanAttention" or node.attributes.get_string("layout", "bhnd") != "bnhd":
            continue
        rows = [_argument(node, name) for name in _ROWS]
        if any(x is None or x.shape is None or len(x.shape) != 4 or not all(isinstance(n, int) for n in x.shape[2:])
               for x in rows) or len({x.shape[3] for x in rows}) != 1:
            continue
        together = _side_by_side(rows)
        if together is None:
            continue
        op, old, heads = _adder(graph, node), rows[0], sum(x.shape[2] for x in rows)
        packed = op("Reshape", together, op("Constant", value_ints=[0, 0, heads, old.shape[3]]))
        packed.type, packed.shape = old.type, ir.Shape([*old.shape[:2], heads, old.shape[3]])
        _set_arguments(node, query=packed, new_key=None, new_value=None)
        node.attributes["packed_qkv"] = ir.AttrInt64("packed_qkv", 1)
        count += 1
    return count


def fuse_for_onnxruntime(model, positions=None):
    """All of this module's rewrites, and what they left unused removed. model: onnx_ir.Model, changed in place. positions:
    how many a request may have; None leaves rotary encodings outside LeanAttention, which have no such bound."""
    divide_by_roots(model)
    pack_projections(model)
    fuse_residuals(model)
    if not fuse_rotary(model):
        fuse_rotated_halves(model)
    elif positions:
        rotate_inside(model, positions)
    RemoveUnusedNodesPass()(model)
    drop_transposes(model)
    RemoveUnusedNodesPass()(model)
    if positions:
        spread_packed(model, positions)
    pack_heads(model)
    RemoveUnusedNodesPass()(model)
    if not any(node.domain == MICROSOFT for node in model.graph):
        model.opset_imports.pop(MICROSOFT, None)
    function_bodies.attach(model)  # another layout is another function
    RemoveUnusedFunctionsPass()(model)
