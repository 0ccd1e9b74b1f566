"""Trial runs of models with leanfleet nodes: valid random inputs, and how far two results may lie apart.

Needs onnx and numpy.
"""

import ctypes
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from leanfleet import spec

BFLOAT16, FLOAT8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
# Distance of 1 to the next number of the type.
EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}

# How far a node's outputs may be from the judge's, in float32 models and in those with float16 or bfloat16 tensors. The
# unit is the type's epsilon times the output's largest magnitude. Each number is a power of two, 2 to 8 times what the
# plain reference loses at worst against float64 when it computes in float32, or in bfloat16, on inputs of make_inputs
# with up to 130 tokens: two sides that round differently lose twice what one does. tests/tools/test_parity.py measures it.
TOLERANCE = {
    "LeanAttention": (16, 4),
    "CausalLinearDecay": (8, 4),
    "CausalLinearDecayGrad": (32, 8),
    "NormalizedLinearAttention": (16, 4),
    "NormalizedLinearAttentionGrad": (16, 8),
    "SampleTokens": (4, 4),
    "GatedActivation": (4, 2),
    "BlockLinear": (16, 2),
    "Linear": (16, 4),
    "GatedDeltaRule": (16, 4),
    "GatedDeltaRuleGrad": (16, 8),
    "CausalConv": (4, 2),
    "DecayGates": (4, 2),
    "RmsNorm": (4, 4),
    "AllReduce": (0, 0),  # a world of one copies
    "AllGather": (0, 0),
    "MergeAttention": (8, 4),
}

# Sizes of make_inputs for open dimensions that stand for a symbol of ops.toml; any other open dimension is 2.
SIZES = {
    "H": 6,
    "Hq": 2,
    "Hk": 2,
    "Hv": 4,
    "N": 7,
    "Nq": 7,
    "D": 16,
    "R": 16,
    "Dv": 16,
    "S": 64,
    "total": 64,
    "P": 16,
    "block": 16,
    "M": 4,
    "positions": 64,
    "half": 8,
    "V": 130,
    "W": 5,
    "F": 40,
    "C": 24,
    "K": 3,
    "I": 64,
    "G": 2,
    "O": 10,
}


def leanfleet_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """The leanfleet nodes of a model's main graph."""
    return [node for node in model.graph.node if node.domain == spec.DOMAIN]


def all_leanfleet_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Those of its subgraphs too."""
    return _within(model.graph.node)


def _within(nodes):
    """The leanfleet nodes among nodes and in their subgraphs."""
    for node in nodes:
        if node.domain == spec.DOMAIN:
            yield node
        for attribute in node.attribute:
            for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                yield from _within(graph.node)


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}


# Inputs


def make_inputs(
    model: onnx.ModelProto,
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
    symbols: dict[str, int] | None = None,
    edges: bool = False,
) -> OrderedDict[str, np.ndarray]:
    """Random inputs that are valid for a model's leanfleet nodes: an ordered dict of numpy arrays.

    Lengths lie within the caches, page tables and state indices hold valid distinct rows, decays are not positive,
    terms of a denominator are positive, token ids lie in their embedding; other floats are standard normal.
    sizes: of open dimensions by name; the others get those of SIZES, or of `symbols` in its place. edges: values at the ends
    of what the operators take are as likely as others: requests without tokens, rows behind the last request, empty and full
    caches, decays to 0. Raises ValueError for a size of no open dimension, and for inputs of other types than floats and
    integers.

    Example:
        import onnx
        from leanfleet.trial import make_inputs

        inputs = make_inputs(onnx.load("layer.onnx"), {"batch": 2, "tokens": 7})
        print({name: array.shape for name, array in inputs.items()})  # {'hidden': (2, 7, 64)}
    """
    random = np.random.default_rng(seed)
    uses, rows = _uses(model.graph)
    shapes = _shapes(model.graph, sizes or {}, SIZES | (symbols or {}))
    initializers = {i.name for i in model.graph.initializer}
    values = [v for v in model.graph.input if v.name not in initializers]
    made: dict[str, np.ndarray] = {}
    for value in sorted(values, key=lambda v: _turn(uses.get(v.name), edges)):
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        node, argument = uses.get(value.name, (None, None))
        shape = shapes[value.name] if argument is None or argument.type != "C" else spec.in_elements(shapes[value.name], dtype)
        if dtype.kind in "iu":
            array = (
                random.integers(0, rows.get(value.name, 2), shape)
                if node is None
                else _integers(node, argument.name, shape, _dims(node, shapes), made, random, edges)
            )
        elif dtype.kind == "f" or dtype in (BFLOAT16, FLOAT8):
            array = random.standard_normal(shape)
            if dtype == FLOAT8:  # numbers as large as those of int8, within the range
                array = np.clip(64 * array, -448, 448)
            if node is not None:
                array = _meaningful(node, argument.name, array, _dims(node, shapes))
                if edges and argument.name in _ENDS:
                    array = np.where(random.random(shape) < 0.1, random.choice(_ENDS[argument.name], shape), array)
        else:
            raise ValueError(f"input {value.name} has type {dtype}: no values can be made up; give all inputs yourself")
        made[value.name] = array.astype(dtype)
    return OrderedDict((v.name, made[v.name]) for v in values)


def fitted(
    model: onnx.ModelProto, feed: Mapping[str, np.ndarray], seed: int = 0, keep: Collection[str] = ()
) -> OrderedDict[str, np.ndarray]:
    """A feed of the same sizes whose values are made valid for the model's leanfleet nodes, as those of make_inputs are.

    keep: names of inputs that stay as they are, as do those that no leanfleet node takes, directly or through casts and
    reshapes.
    """
    random = np.random.default_rng(seed)
    uses, _ = _uses(model.graph)
    open_sizes = {
        d.dim_param: size
        for v in model.graph.input
        if v.name in feed
        for d, size in zip(v.type.tensor_type.shape.dim, feed[v.name].shape, strict=True)
        if d.dim_param
    }
    shapes = _shapes(model.graph, open_sizes)
    for name, array in feed.items():
        is_cache = name in uses and uses[name][1].type == "C"
        shapes[name] = spec.in_numbers(array.shape, array.dtype) if is_cache else list(array.shape)
    made = {}
    for name in sorted(feed, key=lambda name: name not in uses or uses[name][1].name not in _OFFSETS):
        array, (node, argument) = feed[name], uses.get(name, (None, None))
        if node is not None and name not in keep:
            fit = (
                _meaningful(node, argument.name, array, _dims(node, shapes))
                if argument.type not in "IL"
                else _integers(node, argument.name, array.shape, _dims(node, shapes), made, random)
            )
            array = np.asarray(fit).astype(array.dtype)
        made[name] = array
    return OrderedDict((name, made[name]) for name in feed)


def _origin(graph):
    """A function from a tensor to the one that it is a cast or reshaped form of."""
    makers = {output: node for node in graph.node for output in node.output}

    def origin(name):
        while name in makers and makers[name].op_type in ("Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze"):
            name = makers[name].input[0]
        return name

    return origin


def _uses(graph):
    """({graph input: (leanfleet node, its spec.Tensor)}, {graph input: rows of the table it picks from})."""
    rows = {i.name: i.dims[0] for i in graph.initializer if i.dims}
    origin = _origin(graph)
    uses, picks = {}, {}
    for node in graph.node:
        if node.domain == spec.DOMAIN:
            for argument, name in zip(spec.all_specs()[node.op_type].inputs, node.input, strict=False):
                uses.setdefault(origin(name), (node, argument))
        elif node.op_type == "Gather" and node.input[0] in rows:
            picks[origin(node.input[1])] = rows[node.input[0]]
    return uses, picks


def _axes(node, shapes):
    """(tensor name, spec.Axis of each axis) of a node's inputs whose rank is known."""
    op, attributes = spec.all_specs()[node.op_type], attributes_of(node)
    names = {t.name: name for t, name in zip(op.inputs, node.input, strict=False) if name}
    layout, given = attributes.get("layout", "bhnd"), op.given(names, attributes)
    for t in op.inputs:
        shape = shapes.get(names.get(t.name))
        alternative = None if shape is None else op.shape_of(t, given, len(shape))
        if alternative:
            yield names[t.name], alternative.ordered(layout)


def _dims(node, shapes):
    """Sizes of the schema's symbols in this node, as far as its inputs' shapes tell."""
    pairs = [pair for name, axes in _axes(node, shapes) for pair in zip(axes, shapes[name], strict=True)]
    return spec.sizes_of(pair for pair in pairs if isinstance(pair[1], int))


def _shapes(graph, sizes, usual=SIZES):
    """{tensor: its shape} of inputs, initializers and annotated values; all sizes of inputs are numbers. Those of quantised
    caches count numbers, not elements.

    sizes: of open dimensions by name; usual: of symbols of ops.toml, for the others.
    """

    def size(d):
        return d.dim_value if d.HasField("dim_value") else d.dim_param or None

    nodes = [node for node in graph.node if node.domain == spec.DOMAIN]
    shapes = {
        v.name: [size(d) for d in v.type.tensor_type.shape.dim]
        for v in [*graph.value_info, *graph.input]
        if v.type.tensor_type.HasField("shape")
    }
    shapes |= {i.name: list(i.dims) for i in graph.initializer}
    for value in graph.input:
        if value.name not in shapes:
            raise ValueError(f"input {value.name} has no shape: no values can be made up; give all inputs yourself")
    inputs = {v.name for v in graph.input}
    types = {v.name: onnx.helper.tensor_dtype_to_string(v.type.tensor_type.elem_type).lower() for v in graph.input}
    for node in nodes:
        for argument, name in zip(spec.all_specs()[node.op_type].inputs, node.input, strict=False):
            if argument.type == "C" and name in inputs and isinstance(shapes[name][-1], int):
                shapes[name] = spec.in_numbers(shapes[name], types[name])
    names = list(dict.fromkeys(d for v in graph.input for d in shapes[v.name] if isinstance(d, str)))
    if unknown := set(sizes) - set(names):
        raise ValueError(
            f"size {', '.join(sorted(unknown))}: no such open dimension in the model's inputs, which have "
            f"{', '.join(names) or 'none'}"
        )

    known = dict(sizes)
    for node in nodes:
        for name, axes in _axes(node, shapes):
            for d, axis in zip(shapes[name], axes, strict=True):
                if d in names and not axis.offset and not axis.plus:
                    known.setdefault(d, usual.get(axis.symbol, 2))
    shapes = {name: [known.get(d, d) for d in shape] for name, shape in shapes.items()}
    for node in nodes:
        for name, axes in _axes(node, shapes):
            if name in inputs:
                op = spec.all_specs()[node.op_type]
                dims = dict.fromkeys(op.symbols, 2) | usual | _dims(node, shapes)
                dims = op.equal_sizes(dims, op.given((), attributes_of(node)))
                shapes[name] = [
                    d if isinstance(d, int) else axis.size(dims) for d, axis in zip(shapes[name], axes, strict=True)
                ]
    for name in inputs:
        shapes[name] = [d if isinstance(d, int) else 2 for d in shapes[name]]
    return shapes


# Values of SampleTokens' settings from the magnitudes of standard normal ones.
_SETTINGS = {
    "temperature": lambda x: 0.5 + x / 2,
    "top_p": lambda x: 1 - x % 0.5,
    "min_p": lambda x: x % 0.1,
    "repetition_penalty": lambda x: 1 + x / 4,
}


def _meaningful(node, role, array, dims):
    """Standard normal values made into ones of a node's floating point argument `role`."""
    if role == "log_decay":
        return -np.abs(array) / 8
    if role == "beta":
        return np.abs(array) % 2
    if role in ("key_scale", "value_scale"):  # of bytes that then are about as large as other caches' numbers
        return (0.5 + np.abs(array)) / 100
    if node.op_type.startswith("GatedDeltaRule") and role == "key":  # longer keys make the state grow with every token
        lengths = np.sqrt(np.square(array.astype(np.float32)).sum(-1, keepdims=True))
        return array / np.maximum(lengths, 1e-3).astype(array.dtype)
    if role in ("cos_cache", "sin_cache"):
        return {"cos_cache": np.cos, "sin_cache": np.sin}[role](array)
    if node.op_type == "SampleTokens" and role in _SETTINGS:
        return _SETTINGS[role](np.abs(array))
    if role == "normalizer":  # a sum over up to N tokens
        return (1 + np.abs(array)) * dims.get("N", 1)
    positive = set()
    if node.op_type.startswith("Normalized") or attributes_of(node).get("normalize"):
        positive = {"query", "key", "coefficients", "initial_norm", "initial_key_sum"}  # make up the denominator
    if node.op_type == "NormalizedLinearAttentionGrad":
        positive |= {"value", "grad_output"}  # or else grad_coefficients is a sum that cancels to nearly nothing
    return np.abs(array) if role in positive else array


_OFFSETS = ("cu_seqlens", "cu_query_lens")  # arguments that lengths depend on
# Ends of the ranges of floating point arguments that have some.
_ENDS = {
    "log_decay": (0.0, -np.inf),
    "logits": (np.nan, np.inf, -np.inf),
    "beta": (0.0, 2.0),
    "temperature": (0.0,),
    "top_p": (1.0,),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1.0,),
}
# Ranges of integer arguments that need nothing else to be right.
_INTEGERS = {
    "initial_count": (1, 9),
    "top_k": (0, 40),
    "seed": (-(2**63), 2**63 - 1),
    "position": (0, 10_000),
    "allowed_tokens": (-(2**31), 2**31 - 1),
    "active": (0, 2),
}


def _turn(use, edges):
    """When an input of this use (leanfleet node, its spec.Tensor) or None is made: lengths depend on offsets, and at the edges
    those of caches also on those of new tokens."""
    role = use[1].name if use else None
    if role in _OFFSETS:
        return 0
    return 1 if edges and role == "query_lens" else 2


def _integers(node, role, shape, dims, made, random, edges=False):
    """Values of a node's integer argument `role`; dims: the node's sizes, made: the inputs that have values already."""
    if edges and (found := _integers_at_edges(node, role, shape, dims, made, random)) is not None:
        return found
    if role in _OFFSETS:
        total = dims.get("Nq", 0) if role == "cu_query_lens" else dims.get("total", dims.get("N", 0))
        offsets = np.concatenate([[0], np.sort(random.integers(0, total + 1, shape[0] - 2)), [total]])
        if role == "cu_seqlens":
            return offsets
        counts = np.diff(offsets)  # new tokens are among the keys; rows behind the last request are padding
        return np.concatenate([[0], np.cumsum(np.minimum(counts, _capacity(node, counts.shape, dims, made)))])
    if role in ("block_table", "state_index", "count_index"):
        count, rows = int(np.prod(shape)), dims.get("P", 1)
        return (random.permutation(max(rows, count))[:count] % rows).reshape(shape)
    if role in _INTEGERS:
        return random.integers(*_INTEGERS[role], shape)
    if role in ("key_cache", "value_cache", "weight"):
        return random.integers(-127, 128, shape)
    if role == "token_counts":
        return random.integers(0, 3, shape) + (random.integers(0, 2, shape) << 30)
    if node.op_type in ("CausalConv", "DecayGates"):
        return random.integers(0, dims["N"] + 1, shape)
    query_offsets = _made_for(node, "cu_query_lens", made)
    capacity = _capacity(node, shape, dims, made)
    tokens = np.minimum(dims.get("Nq", 1) if query_offsets is None else np.diff(query_offsets), capacity)
    low, high = (tokens, capacity) if role == "seq_lens" else (np.minimum(1, tokens), tokens)
    return random.integers(low, high + 1)


def _made_for(node, role, made):
    """The values that a node's argument has already, or None."""
    arguments = [t.name for t in spec.all_specs()[node.op_type].inputs]
    return made.get(dict(zip(arguments, node.input, strict=False)).get(role))


def _capacity(node, shape, dims, made):
    """Positions of each request's cache."""
    offsets = _made_for(node, "cu_seqlens", made)
    if offsets is not None:
        return np.diff(offsets)
    return np.full(shape, dims["M"] * dims["block"] if "M" in dims else dims.get("S", 1))


def _integers_at_edges(node, role, shape, dims, made, random):
    """Those of make_inputs' `edges`; None for arguments that have nothing of the kind."""
    has_cache = "Nq" in dims
    if role in _OFFSETS:
        usual = _integers(node, role, shape, dims, made, random)
        counts = np.diff(usual) * random.integers(0, 2, shape[0] - 1) if random.random() < 0.5 else np.diff(usual)
        return np.concatenate([[0], np.cumsum(counts)])
    if role == "state_index":
        usual, offsets = _integers(node, role, shape, dims, made, random), _made_for(node, "cu_seqlens", made)
        # A request without tokens may name no row.
        return usual if offsets is None else np.where((np.diff(offsets) == 0) & (random.random(shape) < 0.5), -1, usual)
    if role in ("query_lens", "seq_lens"):
        low, high = np.zeros(shape, np.int64), np.full(shape, dims["Nq"] if has_cache else dims["N"])
        if has_cache:
            capacity = _capacity(node, shape, dims, made)
            high = np.minimum(high, capacity)
            if role == "seq_lens":
                lens, offsets = (_made_for(node, name, made) for name in ("query_lens", "cu_query_lens"))
                low, high = lens if lens is not None else low if offsets is None else np.diff(offsets), capacity
        return np.choose(random.integers(0, 4, shape), [low, high, random.integers(low, high + 1), np.maximum(low, high - 1)])
    return None


# Runs of whole models, whichever domain their nodes are of

# Places of the arguments that tell how much of a cache is filled, and what else is no plain number.
_ROLES = {
    "GroupQueryAttention": {3: "past", 4: "past", 5: "last", 6: "total"},
    "MultiHeadAttention": {6: "past", 7: "past"},
    "Attention": {4: "past", 5: "past", 6: "lengths"},
    "LinearAttention": {4: "log_decay"},
    "LeanAttention": {1: "past", 2: "past", 3: "seq_lens", 4: "query_lens"},
    "CausalLinearDecay": {3: "log_decay"},
    "GatedDeltaRule": {3: "log_decay", 4: "beta"},
}
_OUR_LENGTHS = {"seq_lens": "seq_lens", "query_lens": "query_lens"}  # inputs of the decoders that leanfleet exports


def cases(model: onnx.ModelProto) -> list[list[tuple[str, dict[str, np.ndarray]]]]:
    """Attempts, to be tried in order, at feeds [(what they stand for, {input: array})], for attention of any domain.

    "a prompt" has nothing before its tokens, "a step" is a single token behind pasts of unequal length. Caches are zero
    behind these, where operators leave different things. The first attempt takes sizes of different names for different,
    the second for equal.
    """
    origin, inputs, ours = _origin(model.graph), {v.name for v in model.graph.input}, leanfleet_nodes(model)
    if ours and all(len(n.input) > 3 and origin(n.input[3]) in inputs for n in ours if attributes_of(n).get("append")):
        return [[("a prompt", _our_case(model, 3, False)), ("a step", _our_case(model, 1, True))]]
    return [[("a prompt", _case(model, 3, False, spread)), ("a step", _case(model, 1, True, spread))] for spread in (2, 0)]


def _our_case(model, tokens, filled, slots=8):
    symbols = {"N": tokens, "Nq": tokens, "S": slots}
    feed = make_inputs(model, seed=int(filled), symbols=symbols)
    origin, shapes = _origin(model.graph), _shapes(model.graph, {}, SIZES | symbols)
    uses = {  # by attention: a hybrid's other nodes take query_lens too
        origin(name): (node, argument)
        for node in leanfleet_nodes(model)
        if attributes_of(node).get("append")
        for argument, name in zip(spec.all_specs()[node.op_type].inputs, node.input, strict=False)
    }
    random = np.random.default_rng(7)
    pasts = {}
    lengths_and_caches = ("seq_lens", "query_lens", "key_cache", "value_cache")
    for name, (node, argument) in uses.items():
        if name in feed and argument.name in lengths_and_caches:
            dims = _dims(node, shapes)
            if "S" not in dims:
                continue
            new, batch = min(dims.get("Nq", tokens), dims["S"]), len(feed[name])
            past = pasts.setdefault(batch, random.integers(0, dims["S"] - new + 1, batch) * filled)
            if argument.name == "query_lens":
                feed[name][:] = new
            elif argument.name == "seq_lens":
                feed[name][:] = past + new
            else:
                _clear(feed[name], past)
    return feed


def _clear(cache, past):
    """Zeros behind the first past[b] positions of a cache [B,Hkv,S,D]."""
    for row, length in zip(cache, past, strict=True):
        row[:, length:] = 0


def _case(model, tokens, filled, spread):
    graph, origin = model.graph, _origin(model.graph)
    roles = {
        origin(node.input[i]): role
        for node in graph.node
        if node.op_type in _ROLES and (node.op_type != "LeanAttention" or attributes_of(node).get("append"))
        for i, role in _ROLES[node.op_type].items()
        if i < len(node.input) and node.input[i]
    }
    _, rows = _uses(graph)
    initializers = {i.name for i in graph.initializer}
    values = [v for v in graph.input if v.name not in initializers]
    roles |= {v.name: _OUR_LENGTHS[v.name] for v in values if v.name in _OUR_LENGTHS}
    lasting = {d.dim_param for v in graph.output for d in v.type.tensor_type.shape.dim if d.dim_param}
    told = any(
        roles.get(v.name) == "last"
        or roles.get(v.name) == "past"
        and any(d.dim_param in lasting for d in list(v.type.tensor_type.shape.dim)[2:])
        for v in values
    )
    # Caches that stay as long as they are need room for the new tokens; others are the past, no more and no less.
    sizes = {"batch": 2, "tokens": tokens, "past": 4 if told or filled else 0}
    names = {}

    def size(d, tensor, axis, rank):
        if d.HasField("dim_value"):
            return d.dim_value
        kind = _kind(d.dim_param, tensor.lower(), roles.get(tensor), axis, rank)
        if "+" in d.dim_param or kind == "total":
            return sizes["past"] + sizes["tokens"]
        if kind == "tokens" and d.dim_param:
            return names.setdefault(d.dim_param, sizes["tokens"] + spread * len(names))
        return sizes.get(kind, 2)

    random, feed = np.random.default_rng(int(filled)), {}
    for v in values:
        tensor = v.type.tensor_type
        if not tensor.HasField("shape"):
            raise ValueError(f"input {v.name} has no shape: no values can be made up")
        shape = [size(d, v.name, i, len(tensor.shape.dim)) for i, d in enumerate(tensor.shape.dim)]
        feed[v.name] = _value(
            onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type),
            shape,
            v.name,
            roles.get(v.name),
            rows.get(v.name, 2),
            random,
        )
    _fill(feed, roles, tokens, filled, random)
    return feed


def _kind(dimension, tensor, role, axis, rank):
    """What an open dimension counts: batch, tokens, past, total or other. By its name, or by its place where it has none."""
    name = dimension.lower()
    for kind, parts in {"total": ("total",), "past": ("past", "cache", "slot", "capacity"), "batch": ("batch",)}.items():
        if any(part in name for part in parts):
            return kind
    if dimension:
        counts = len(name) == 1 and name in "nsq" or any(part in name for part in ("seq", "token", "len"))
        return "batch" if name == "b" else "tokens" if counts else "other"
    if role == "past" or rank == 4:
        return {0: "batch", 2: "past" if role == "past" else "tokens"}.get(axis, "other")
    return {0: "batch", 1: "total" if "mask" in tensor else "tokens"}.get(axis, "other")


def _value(dtype, shape, name, role, rows, random):
    if dtype == np.bool_ or dtype.kind in "iu" and "mask" in name.lower():
        return np.ones(shape, dtype)
    if dtype.kind in "iu":
        return random.integers(0, max(rows, 1), shape).astype(dtype)
    if dtype.kind != "f" and dtype != BFLOAT16:
        raise ValueError(f"input {name} has type {dtype}: no values can be made up")
    array = random.standard_normal(shape)
    return (-np.abs(array) / 8 if role == "log_decay" else array).astype(dtype)


def _fill(feed, roles, tokens, filled, random):
    """Makes lengths and what caches hold agree."""
    caches = [feed[name] for name, role in roles.items() if role == "past" and name in feed and feed[name].ndim == 4]
    lengths = {name: role for name, role in roles.items() if role in ("last", "seq_lens", "query_lens") and name in feed}
    for name, role in roles.items():
        if role == "lengths" and name in feed:
            feed[name][:] = random.integers(1, 4, feed[name].shape)
    if not lengths:
        return
    tokens = next(
        (a.shape[1] for name, a in feed.items() if name not in roles and a.ndim in (2, 3) and "mask" not in name), tokens
    )
    batch, room = feed[next(iter(lengths))].size, min((c.shape[2] for c in caches), default=0)
    past = random.integers(0, max(room - tokens + 1, 1), batch) * filled
    for name, role in lengths.items():
        value = {"last": past + tokens - 1, "seq_lens": past + tokens, "query_lens": 0 * past + tokens}[role]
        feed[name][...] = value.reshape(feed[name].shape)
    for name, role in roles.items():
        if role == "total" and name in feed:
            feed[name][...] = past.max() + tokens
    for cache in caches:
        _clear(cache, past)


# Sessions


_SPECIAL = {BFLOAT16: (onnx.TensorProto.BFLOAT16, np.uint16), FLOAT8: (onnx.TensorProto.FLOAT8E4M3FN, np.uint8)}


def run_session(session: Any, feed: Mapping[str, np.ndarray], widen: bool = True) -> OrderedDict[str, np.ndarray]:
    """Runs an onnxruntime.InferenceSession; an ordered dict of its outputs. widen: bfloat16 and float8 as float32."""
    from onnxruntime import OrtValue

    values = {}
    for name, array in feed.items():
        array = np.ascontiguousarray(array)
        values[name] = (
            OrtValue.ortvalue_from_numpy(array)
            if array.dtype not in _SPECIAL
            else OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(_SPECIAL[array.dtype][1]), _SPECIAL[array.dtype][0])
        )
    outputs = session.run_with_ort_values(None, values)
    return OrderedDict((o.name, _array(value, widen)) for o, value in zip(session.get_outputs(), outputs, strict=True))


def _array(value, widen):
    """An OrtValue on the CPU as a numpy array; onnxruntime does not hand bfloat16 and float8 to numpy."""
    dtype = next((d for d, (kind, _) in _SPECIAL.items() if kind == value.element_type()), None)
    if dtype is None:
        return value.numpy()
    shape = value.shape()
    content = ctypes.string_at(value.data_ptr(), dtype.itemsize * int(np.prod(shape)))
    array = np.frombuffer(content, dtype).reshape(shape)
    return array.astype(np.float32) if widen else array


# Comparison


def tolerances(model: onnx.ModelProto, judge: Mapping[str, np.ndarray]) -> dict[str, float]:
    """{output: absolute tolerance}. An output's is the sum of what the n leanfleet nodes that it depends on may lose.

    Later layers amplify what earlier ones lose. Models in float16 and bfloat16 round most of that away again; in
    float32 the sum counts n times. Seen in SmolLM2-135M, n = 30, between function bodies and CPU kernels over random
    inputs: differences of up to 7 times the plain sum in float32, up to half of it in float16.
    """
    graph = model.graph
    types = {t.data_type for t in graph.initializer}
    types |= {v.type.tensor_type.elem_type for v in [*graph.input, *graph.value_info]}
    dtype = "bfloat16" if onnx.TensorProto.BFLOAT16 in types else "float16" if onnx.TensorProto.FLOAT16 in types else "float32"
    low = dtype != "float32"
    losses = []  # of each leanfleet node, in the units of TOLERANCE
    upstream = {}  # tensor -> the nodes it depends on: bit i stands for losses[i]
    for node in graph.node:
        bits = 0
        for name in node.input:
            bits |= upstream.get(name, 0)
        for ours in _within([node]):
            bits |= 1 << len(losses)
            losses.append(TOLERANCE[ours.op_type][low])
        upstream.update(dict.fromkeys(filter(None, node.output), bits))  # "" is an output left out
    allowed = {}
    for name, array in judge.items():
        # An output of standard operators alone may differ as much as a node of the closest operator that computes.
        own = [loss for i, loss in enumerate(losses) if upstream.get(name, 0) >> i & 1]
        added = own or [min(filter(None, losses), default=1)]
        largest = float(np.abs(array[np.isfinite(array)].astype(np.float64)).max(initial=0.0))
        units = sum(added) * (1 if low else len(added))
        allowed[name] = units * EPSILON[dtype] * largest if array.dtype.kind == "f" else 0.0
    return allowed
