"""What the rewriter knows of nodes and values, and how it emits the nodes that take their place.

A function that rewrites a node takes (ops, node, options): an Emitter, the old node, {"opset", ...} of the model and what the
user asked for. It returns the name of the operator and the values for the old node's outputs, or raises Refused.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import onnx_ir as ir

from leanfleet import spec
from leanfleet.export import function_bodies

MICROSOFT = "com.microsoft"
TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
Inputs = dict[str, Any]  # ir.Value by name, None where absent


class Refused(Exception):
    """Why a node stays."""


class Emitter(function_bodies._Ops):
    """Emits the nodes that take one node's place, under names that begin with its own. taken: the names of all of the
    model's values and nodes, which grows."""

    def __init__(self, node: ir.Node, taken: set[str]) -> None:
        super().__init__()
        self.old, self.prefix, self.notes, self._taken = node, label(node), [], taken

    def _name(self):
        while (name := f"{self.prefix}/leanfleet_{next(self._numbers)}") in self._taken:
            pass
        self._taken.add(name)
        return name

    def foreign(
        self, domain: str, op_type: str, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any], outputs: int = 1
    ) -> list[ir.Value]:
        """The outputs, a list, of a node of any domain."""
        values = list(self.op_multi_out(op_type, inputs, attributes, num_outputs=outputs, domain=domain))
        for value in values:
            value.name = self._name()
        return values

    def ours(self, name: str, attributes: Mapping[str, Any], **inputs: ir.Value | None) -> dict[str, ir.Value]:
        """{output name: value} of a leanfleet node. Attributes at their default are left out."""
        op = spec.all_specs()[name]
        arguments = [inputs.get(t.name) for t in op.inputs]
        while arguments[-1] is None:
            arguments.pop()
        attributes = {
            a.name: cast(type, type(a.default))(attributes[a.name])
            for a in op.attrs
            if a.name in attributes and attributes[a.name] != a.default
        }
        active = op.active_outputs(attributes)
        places = op.outputs[: 1 + max(i for i, t in enumerate(op.outputs) if t in active)]
        plain = {n: int(v) if isinstance(v, bool) else v for n, v in attributes.items()}
        values = self.foreign(spec.DOMAIN, name, arguments, plain, len(places))
        self.nodes[-1].name = self.prefix
        return dict(zip((t.name for t in places), values, strict=True))

    def split_heads(self, x: ir.Value, heads: int) -> ir.Value:
        """[B,N,heads*W] as [B,N,heads,W]."""
        width = dim(x, -1)
        if isinstance(width, int) and width % heads:
            raise Refused(f"{x.name} has {width} columns, which are not the same number for each of {heads} heads")
        return self.Reshape(x, [0, 0, heads, width // heads if isinstance(width, int) else -1])

    def join_heads(self, x: ir.Value, width: int | None) -> ir.Value:
        """[B,N,heads,W] as [B,N,heads*W]; `width` is that product where known."""
        return self.Reshape(x, [0, 0, width if isinstance(width, int) else -1])

    def to_cache(self, x: ir.Value, heads: int) -> ir.Value:
        """[B,N,Hkv*W] as [B,Hkv,N,W]."""
        return self.Transpose(self.split_heads(x, heads), perm=[0, 2, 1, 3])

    def int32(self, x: ir.Value | int) -> ir.Value:
        return self.Cast(x, to=ir.DataType.INT32)


# What is known of values


def dims(value: ir.Value | None) -> list[int | str | None] | None:
    """The sizes of a value: numbers, names, or None where unknown; None where not even the rank is known."""
    if value is None or value.shape is None:
        return None
    return [d if isinstance(d, int) else d.value for d in value.shape]


def dim(value: ir.Value | None, axis: int) -> int | str | None:
    sizes = dims(value)
    return sizes[axis] if sizes and -len(sizes) <= axis < len(sizes) else None


def rank(value: ir.Value | None, name: str, *allowed: int) -> int:
    """The rank of an input; one of `allowed` where these are given."""
    if value is None:
        raise Refused(f"its input {name} is missing")
    if value.shape is None:
        raise Refused(f"the rank of {name} is unknown: run shape inference on the model first, or declare it")
    check_rank(value, name, *allowed)
    return len(value.shape)


def check_rank(value: ir.Value | None, name: str, *allowed: int) -> None:
    """Refuses another rank than these, where it is known."""
    if allowed and value is not None and value.shape is not None and len(value.shape) not in allowed:
        raise Refused(f"{name} has rank {len(value.shape)}; expected {' or '.join(map(str, allowed))}")


def check_ranks(inputs: Inputs, rank: int, required: Iterable[str], *optional: str) -> None:
    """Refuses where one of the inputs `required`, a list of names, is missing, or one of all named has another rank."""
    for name in required:
        if inputs.get(name) is None:
            raise Refused(f"its input {name} is missing")
    for name in (*required, *optional):
        check_rank(inputs.get(name), name, rank)


_KINDS = {  # of the attributes that the nodes of other domains have
    ir.AttributeType.INT: (
        "is_causal",
        "q_num_heads",
        "kv_num_heads",
        "num_heads",
        "left_window_size",
        "right_window_size",
        "softmax_precision",
        "causal",
        "local_window_size",
        "do_rotary",
        "rotary_interleaved",
        "qk_output",
        "sliding_window_cache",
        "smooth_softmax",
        "unidirectional",
        "state_window",
        "state_update_capacity",
        "qk_l2_norm",
        "rotary_offset",
        "v_head_size",
    ),
    ir.AttributeType.FLOAT: ("scale", "softcap"),
    ir.AttributeType.STRING: (
        "k_quant_type",
        "v_quant_type",
        "k_cache_dtype",
        "v_cache_dtype",
        "kv_cache_layout",
        "update_rule",
        "gate_activation",
        "beta_activation",
    ),
}
_FLAGS = (
    "is_causal",
    "causal",
    "unidirectional",
    "do_rotary",
    "rotary_interleaved",
    "qk_output",
    "sliding_window_cache",
    "qk_l2_norm",
)
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}
_OURS = {
    "bool": ir.AttributeType.INT,
    "int": ir.AttributeType.INT,
    "float": ir.AttributeType.FLOAT,
    "string": ir.AttributeType.STRING,
}


def attributes(node: ir.Node) -> dict[str, Any]:
    """{name: value} of a node's attributes."""
    op = spec.all_specs().get(node.op_type) if node.domain == spec.DOMAIN else None
    kinds = {a.name: _OURS[a.type] for a in op.attrs} if op else _KIND_OF
    flags = [a.name for a in op.attrs if a.type == "bool"] if op else _FLAGS
    values = {}
    for a in node.attributes.values():
        if a.is_ref():
            raise Refused(f"attribute {a.name} refers to an attribute of a function")
        if a.type != kinds.get(a.name, a.type):
            raise Refused(f"attribute {a.name} is of type {a.type.name}; expected {kinds[a.name].name}")
        if a.name in flags and a.value not in (0, 1):
            raise Refused(f"attribute {a.name} is {a.value}; expected 0 or 1")
        values[a.name] = a.value
    return values


def heads(attributes: Mapping[str, Any], *names: str) -> tuple[int, int]:
    """The numbers of heads that these attributes tell; the first must be a multiple of the last."""
    for name in names:
        if attributes.get(name, 0) < 1:
            raise Refused(f"attribute {name} is {attributes.get(name, 'missing')}; expected 1 or more")
    heads, kv_heads = attributes[names[0]], attributes[names[-1]]
    if heads % kv_heads:
        raise Refused(f"{heads} query heads over {kv_heads} key/value heads; expected a multiple")
    return heads, kv_heads


def inputs(node: ir.Node, names: Sequence[str]) -> Inputs:
    """{name: value or None} of a node's inputs."""
    values = list(node.inputs) + [None] * (len(names) - len(node.inputs))
    return dict(zip(names, values, strict=False))


def is_read(node: ir.Node, index: int) -> bool:
    """Whether an output of a node exists and anything takes it."""
    if index >= len(node.outputs) or not node.outputs[index].name:
        return False
    return bool(node.outputs[index].uses()) or node.outputs[index].is_graph_output()


def check_types(inputs: Inputs, *names: str) -> None:
    found = {value.dtype for value in map(inputs.get, names) if value is not None}
    types = {dtype for dtype in found if dtype is not None}
    if wrong := types - set(TYPES):
        raise Refused(
            f"its type is {min(wrong, key=str).name.lower()}; leanfleet's operators take float32, float16 and bfloat16"
        )
    if len(types) > 1:
        raise Refused(f"{', '.join(names)} have types {', '.join(sorted(t.name.lower() for t in types))}; they must agree")


def refuse_inputs(inputs: Inputs, reasons: Mapping[str, str]) -> None:
    for name, reason in reasons.items():
        if inputs.get(name) is not None:
            raise Refused(f"it has {name}: {reason}")


def scale(attributes: Mapping[str, Any]) -> float:
    """Our scale; theirs is 1/sqrt(D) when absent, which is what 0 says in ours."""
    scale = attributes.get("scale")
    if scale == 0:
        raise Refused("scale is 0, which makes all logits equal; LeanAttention reads 0 as 1/sqrt(D)")
    return 0.0 if scale is None else scale


def softcap(attributes: Mapping[str, Any]) -> float:
    softcap = attributes.get("softcap", 0.0)
    if softcap < 0:
        raise Refused(f"softcap is {softcap}; LeanAttention takes 0 (off) or more")
    return softcap


def show(size: int | str | None) -> str:
    return "an unknown number of" if size is None else f"{size}"


def check_lengths(tokens: int | str | None, keys: int | str | None, causal: bool) -> None:
    """Refuses where queries and new keys may differ in number: LeanAttention puts the last query at the last key
    (bottom-right), and takes queries beyond the keys for padding. Without causality fewer queries than keys do."""
    if (
        tokens is not None
        and tokens == keys
        or not causal
        and (tokens == 1 or isinstance(tokens, int) and isinstance(keys, int) and tokens <= keys)
    ):
        return
    why = (
        "LeanAttention aligns the last of both, the other operator the first"
        if causal
        else "LeanAttention's rows beyond the keys are padding"
    )
    raise Refused(f"{show(tokens)} queries and {show(keys)} keys are not shown to be equally many: {why}")


def known(value: ir.Value, like: ir.Value, dims: Iterable[int | str | None]) -> ir.Value:
    """Tells the type, that of `like`, and sizes of a value: onnx infers nothing behind nodes of other domains."""
    if like.dtype is not None:
        value.dtype = like.dtype
    value.shape = ir.Shape(dims)
    return value


def label(node: ir.Node) -> str:
    """A node's name, or that of its first output."""
    return node.name or next((v.name for v in node.outputs if v.name), node.op_type)
