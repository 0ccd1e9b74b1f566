"""Every operator in every variant: models of one node, the sizes of their inputs, and the float64 reference of what is right.

Needs onnx and numpy; the reference also torch.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from leanfleet import native, spec

# Smallest, usual and largest size of open dimensions; the others are fixed.
OPEN = {
    "B": (1, 3, 4),
    "N": (1, 65, 130),
    "Nq": (1, 5, 130),
    "S": (64, 130, 1030),
    "P": (4, 9, 40),
    "M": (1, 2, 9),
    "total": (1, 65, 1030),
    "Q": (1, 3, 4),
}
FIXED = {"H": 6, "Hkv": 2, "Hq": 2, "Hk": 2, "Hv": 4, "D": 32, "R": 32, "Dv": 16, "block": 16, "positions": 1100, "half": 12}
FIXED |= {"V": 130, "W": 5, "F": 24, "C": 24, "K": 3, "I": 64, "G": 2, "O": 10}
STEP = {"N": (1, 1, 1), "Nq": (1, 1, 1)}  # a second profile, for decode steps
MOST_VARIANTS = 64  # tried of an operator that has more combinations: both ends, and others drawn at random
Forms = Mapping[str, str] | None  # types of caches with scales by name, where they are not int8
OF_QUANTISED_CACHES = ("key_scale", "value_scale", "key_per_token", "value_per_token")
SETTINGS: dict[str, Any] = {"window": 5, "softcap": 8.0, "scale": 0.3}  # beside their defaults, of attributes that are numbers
Ranks = Mapping[str, int | None]  # of the present inputs; None: the first that the schema has
ONNX_TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
    "int8": TensorProto.INT8,
    "float8e4m3fn": TensorProto.FLOAT8E4M3FN,
    "uint8": TensorProto.UINT8,
}
IR_VERSION = 10  # the newest that onnxruntime 1.20 reads


def type_name(tensor: spec.Tensor, dtype: str, present: Iterable[str] = (), forms: Forms = None) -> str:
    """The type of a schema tensor in a node whose T is `dtype`. present: the node's inputs. forms: types by name of inputs that
    have types of their own; without it a cache with scales is of int8, one without is T, and a state float32."""
    name = tensor.takes or tensor.name
    if forms and tensor.type in spec.OWN and name in forms:
        return forms[name]
    if tensor.type == "C" and name.replace("_cache", "_scale") in present:
        return "int8"
    return tensor.dtype(dtype, {"F": "float32", "I": "int32", "L": "int64"}, {})


def onnx_type(tensor: spec.Tensor, dtype: str, present: Iterable[str] = (), forms: Forms = None) -> int:
    return ONNX_TYPES[type_name(tensor, dtype, present, forms)]


def make_node(
    op: spec.OpSpec,
    present: Iterable[str],
    attrs: Mapping[str, Any] | None = None,
    name: str = "node",
    outputs: Iterable[str] | None = None,
    rename: Mapping[str, str] | None = None,
) -> onnx.NodeProto:
    """A node with the inputs named in `present`. outputs: the connected ones, "" for a gap; None: all that exist.

    rename: tensor names of the graph for names of the schema, where they differ.
    """
    rename = rename or {}
    active = op.active_outputs(attrs or {})
    inputs = [t.name if t.name in present else "" for t in op.inputs]
    outputs = [t.name if t in active else "" for t in op.outputs] if outputs is None else list(outputs)
    for names in (inputs, outputs):  # positions count: what is left out between others has an empty name
        while names and not names[-1]:
            names.pop()
    return helper.make_node(
        op.name,
        [rename.get(n, n) for n in inputs],
        [rename.get(n, n) for n in outputs],
        name=name,
        domain=spec.DOMAIN,
        **(attrs or {}),
    )


def make_model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Iterable[tuple[str, int, Any]],
    outputs: Iterable[tuple[str, int, Any]],
    initializers: Sequence[onnx.TensorProto] = (),
    value_info: Iterable[tuple[str, int, Any]] = (),
) -> onnx.ModelProto:
    """A model of these nodes. inputs, outputs, value_info: (name, ONNX type, shape); shapes may hold names."""
    infos = [[helper.make_tensor_value_info(*entry) for entry in entries] for entries in (inputs, outputs, value_info)]
    graph = helper.make_graph(nodes, "graph", infos[0], infos[1], initializers, value_info=infos[2])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(spec.DOMAIN, spec.OPSET_VERSION)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)


def node_model(
    op: spec.OpSpec,
    shapes: Mapping[str, Any],
    attrs: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    outputs: Iterable[str] | None = None,
    name: str = "node",
    forms: Forms = None,
) -> onnx.ModelProto:
    """A model of one node whose inputs and outputs are the graph's. shapes: of the present inputs, by name."""
    node = make_node(op, shapes, attrs, name, outputs)
    types = {t.name: onnx_type(t, dtype, shapes, forms) for t in op.outputs}
    inputs = [(t.name, onnx_type(t, dtype, shapes, forms), shapes[t.name]) for t in op.inputs if t.name in shapes]
    return make_model([node], inputs, [(o, types[o], None) for o in node.output if o])


def input_shape(
    op: spec.OpSpec, tensor: spec.Tensor, present: Iterable[str], attrs: Mapping[str, Any], rank: int | None, kind: int | str
) -> list[Any] | None:
    """Sizes of an input; kind: 0 smallest, 1 usual, 2 largest, "open": names in place of open sizes. present: the names of
    all present inputs. None where no variant of the operator gives the input this rank."""
    given = op.given(present, attrs)
    shape, fixed = op.shape_of(tensor, given, rank), op.equal_sizes(FIXED, given)
    if shape is None:
        return None
    sizes: list[Any] = []
    for axis in shape.ordered(attrs.get("layout", "bhnd")):
        if axis.symbol == "B" and "cu_seqlens" in present and "Q" in op.symbols:
            sizes.append(1)
        elif axis.symbol in FIXED or not axis.symbol:
            sizes.append(axis.size(fixed))
        else:
            sizes.append(OPEN[axis.symbol][kind] + axis.offset if isinstance(kind, int) else str(axis))
    return sizes


def input_shapes(op: spec.OpSpec, ranks: Ranks, attrs: Mapping[str, Any], kind: int | str) -> dict[str, Any]:
    """{input: shape} for ranks, {input: rank or None}."""
    return {t.name: input_shape(op, t, ranks, attrs, ranks[t.name], kind) for t in op.inputs if t.name in ranks}


def profiles(op: spec.OpSpec) -> list[dict[str, tuple[int, ...]]]:
    """Two profiles by dimension name: whole prompts, and steps of one token."""
    whole: dict[str, tuple[int, ...]] = {symbol: sizes for symbol, sizes in OPEN.items() if symbol in op.symbols}
    result = []
    for entry in (whole, whole | {symbol: sizes for symbol, sizes in STEP.items() if symbol in whole}):
        axes = {axis for t in op.inputs for shape in t.shapes for axis in shape.axes if axis.offset and axis.symbol in entry}
        result.append(entry | {str(a): tuple(size + a.offset for size in entry[a.symbol]) for a in axes})
    return result


def _combinations(choices, first):
    """Of one of each of the lists, as (of the first lists, of the others); a part of them where there are very many."""
    every = math.prod(map(len, choices))
    if every <= 4096:
        drawn = itertools.product(*choices)
    else:
        random = np.random.default_rng(0)
        drawn = [[c[0] for c in choices], [c[-1] for c in choices]]
        drawn += [[c[random.integers(len(c))] for c in choices] for _ in range(20 * MOST_VARIANTS)]
    for combination in drawn:
        yield tuple(combination[:first]), tuple(combination[first:])


def variants(op: spec.OpSpec) -> Iterator[tuple[dict[str, int | None], dict[str, Any]]]:
    """({input: rank or None}, attributes) of every combination of optional inputs, their ranks and boolean attributes that
    are off by default which the operator takes; the C interface says which those are. Attributes that ask for outputs
    by their number are 3. Without quantised caches, for which see scaled_variants."""
    required = {t.name: None for t in op.inputs if not t.optional}
    optional = [t for t in op.inputs if t.optional and t.name not in OF_QUANTISED_CACHES]
    choices = [[None, *sorted({len(s.axes) for s in t.shapes})] for t in optional]
    switches = [a.name for a in op.attrs if a.type == "bool" and not a.refuse and not a.default]
    switches = [name for name in switches if name not in OF_QUANTISED_CACHES]
    counts = {a.name for a in op.attrs if a.type == "int"} & {name for t in op.outputs for name in t.when}
    switches += sorted(counts)
    found = 0
    for choice, on in _combinations([*choices, *[(0, 1)] * len(switches)], len(choices)):
        ranks = required | {t.name: rank for t, rank in zip(optional, choice) if rank}
        attrs = {name: 3 if name in counts else 1 for name, value in zip(switches, on) if value}
        if not taken(op, ranks, attrs):
            continue
        yield ranks, attrs
        found += 1
        if found == MOST_VARIANTS and len(optional) > 12:
            return


def taken(op: spec.OpSpec, ranks: Ranks, attrs: Mapping[str, Any]) -> bool:
    """Whether the operator takes these inputs and attributes."""
    shapes = input_shapes(op, ranks, attrs, 1)
    if None in shapes.values():
        return False
    entries = [(0, shapes[t.name], type_name(t, "float32", ranks)) if t.name in shapes else None for t in op.inputs]
    try:
        native.Call(op.name, entries, [], attrs).workspace()
    except ValueError:
        return False
    return True


def scaled_variants(op: spec.OpSpec) -> list[tuple[dict[str, int | None], dict[str, Any]]]:
    """The variants with scales of their caches besides, the forms of which take turns."""
    return _with_scales(op, list(variants(op)))


def _with_scales(op, found):
    scales = [t for t in op.inputs if t.name in OF_QUANTISED_CACHES]
    switches = [a.name for a in op.attrs if a.name in OF_QUANTISED_CACHES]
    forms = [[None, *sorted({len(s.axes) for s in t.shapes})] for t in scales] + [[0, 1]] * len(switches)
    every = [form for form in itertools.product(*forms) if any(form[: len(scales)])]
    result = []
    for number, (ranks, attrs) in enumerate(found):
        for form in every[number % len(every) :] + every[: number % len(every)] if every else ():
            more = {t.name: rank for t, rank in zip(scales, form) if rank}
            on = {name: 1 for name, value in zip(switches, form[len(scales) :]) if value}
            if taken(op, ranks | more, attrs | on):
                result.append((ranks | more, attrs | on))
                break
    return result


def calls(op: spec.OpSpec) -> list[tuple[dict[str, int | None], dict[str, Any]]]:
    """The variants, also with int8 caches, in which the other attributes take turns with their values: layouts, algorithms,
    activations, and SETTINGS."""
    words = {a.name: [v for v in a.values if v not in a.reference_only] for a in op.attrs if a.values}
    numbers = {a.name: [a.default, SETTINGS[a.name]] for a in op.attrs if a.name in SETTINGS}
    found = list(variants(op))
    found += _with_scales(op, found)
    result = []
    for number in range(max(len(found), math.prod(map(len, words.values())))):
        ranks, attrs = found[number % len(found)]
        more: dict[str, Any] = {}
        for names in (words | numbers, words, {}):  # some refuse a setting or an algorithm that others take
            more, rest = {}, number
            for name, choices in names.items():
                more[name] = choices[rest % len(choices)]
                rest //= len(choices)
            if taken(op, ranks, attrs | more):
                break
        defaults = {a.name: a.default for a in op.attrs}
        result.append((ranks, attrs | {name: value for name, value in more.items() if value != defaults[name]}))
    return result


def layouts_of(op: spec.OpSpec, layouts: Iterable[str]) -> list[dict[str, str]]:
    """The attribute for each of the layouts, or none where the operator has no such attribute."""
    return [{"layout": layout} for layout in layouts] if any(a.name == "layout" for a in op.attrs) else [{}]


def run_reference(op_type: str, attributes: Mapping[str, Any], inputs: Sequence[Any]) -> list[np.ndarray]:
    """The PyTorch reference on numpy arrays (None for absent ones): a list of numpy arrays.

    Computes in float64 and returns T outputs in the inputs' type, F outputs in float32. Raises ValueError for
    arguments that the reference refuses.

    Example:
        import numpy as np
        from leanfleet.parity import run_reference

        query, key, value = np.random.standard_normal((3, 1, 2, 5, 8)).astype(np.float32)   # [B,H,N,D] each
        output, normalizer = run_reference("NormalizedLinearAttention", {"normalize_qk": 1}, [query, key, value])
        print(output.shape, normalizer.shape)  # (1, 2, 5, 8) (1, 2, 5)
    """
    import torch

    from leanfleet.export import reference

    op = spec.all_specs()[op_type]
    attrs = {a.name: attributes.get(a.name, a.default) for a in op.attrs if not a.refuse}
    tensors = {}
    for t, array in zip(op.inputs, inputs, strict=False):  # a node may leave trailing inputs out
        if array is not None:
            narrow = {"int8": torch.int8, "uint8": torch.uint8, "float8_e4m3fn": torch.float8_e4m3fn}.get(str(array.dtype))
            if narrow is not None:
                tensors[t.name] = torch.from_numpy(np.array(array).view(np.uint8)).view(narrow)
                continue
            exact = np.int64 if t.type in "IL" else np.float64
            tensors[t.name] = torch.from_numpy(np.array(array, dtype=exact))
    outputs = getattr(reference, op.snake_name)(**tensors, **attrs)
    others = {"F": np.float32, "I": np.int32, "L": np.int64}
    input_types = {t.name: array.dtype for t, array in zip(op.inputs, inputs, strict=False) if array is not None}
    active = dict(zip((t.name for t in op.active_outputs(attrs)), outputs, strict=True))
    listed = op.outputs[: 1 + max(i for i, t in enumerate(op.outputs) if t.name in active)]
    empty = torch.zeros(0)  # outputs are positional: it stands for one before the last that is not asked for
    return [_array(active.get(t.name, empty)).astype(t.dtype(inputs[0].dtype, others, input_types)) for t in listed]


def _array(tensor):
    """A tensor as a numpy array; float8, which numpy has not, as float32."""
    return (tensor.float() if str(tensor.dtype) == "torch.float8_e4m3fn" else tensor).numpy()
