"""The operators' schema, read from ops.toml. Standard library only.

Everything in Python that needs an operator's inputs, types, attributes or shapes asks here; the C++ tables come
from the same file through csrc/generate.py.
"""

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

DOMAIN = "leanfleet"
OPSET_VERSION = 1
TYPES = {
    "T": ("float32", "float16", "bfloat16"),
    "F": ("float32",),
    "I": ("int32",),
    "L": ("int64",),
    "C": ("int8", "float8e4m3fn", "uint8"),
    "S": ("float32",),
}
"""The types that a type variable stands for; C and S also for what T is."""
OWN = "C", "S"
"""The type variables of tensors that have a type of their own, whichever of these: not all tensors of a node the same."""


def numbers_each(dtype: Any) -> int:
    """How many numbers an element of a type (its name, or that of a library) holds: uint8 has two int4, along the last axis."""
    return 2 if str(dtype).rpartition(".")[2] == "uint8" else 1


def in_numbers(shape: Iterable[int], dtype: Any) -> list[int]:
    """The sizes of a tensor's axes as the schema counts them: the last one in numbers."""
    *rest, last = shape
    return [*rest, last * numbers_each(dtype)]


def in_elements(shape: Iterable[int], dtype: Any) -> list[int]:
    """The inverse of in_numbers. The last size of a tensor of uint8 is even."""
    *rest, last = shape
    return [*rest, last // numbers_each(dtype)]


@dataclass(frozen=True)
class Axis:
    """One axis: `symbol` + `offset` + `times` x `plus`, or the constant `offset` where symbol is "". `times` 0 with a `plus`:
    the larger of the two symbols, which tells neither of them."""

    symbol: str
    offset: int = 0
    plus: str = ""
    times: int = 0

    def size(self, dims: Mapping[str, int]) -> int:
        """The axis's size for sizes of symbols {symbol: size}. Raises KeyError where one is missing."""
        size = dims[self.symbol] + self.offset if self.symbol else self.offset
        if self.plus and not self.times:
            return max(size, dims[self.plus])
        return size + self.times * dims[self.plus] if self.plus else size

    def __str__(self):
        if not self.symbol:
            return str(self.offset)
        if self.plus and not self.times:
            return f"max({self.symbol},{self.plus})"
        more = f"+{self.times}{self.plus}" if self.plus else ""
        return self.symbol + (f"+{self.offset}" if self.offset else "") + more


def sizes_of(pairs: Iterable[tuple[Axis, int]]) -> dict[str, int]:
    """{symbol: size} from pairs (Axis, size of that axis); of several sizes of a symbol the first.

    An axis that is a sum of two symbols gives the first of them, once other axes give the second; the larger of two gives
    neither.
    """
    dims = {}
    for axis, size in sorted(pairs, key=lambda pair: bool(pair[0].plus)):
        if axis.symbol and (not axis.plus or (axis.times and axis.plus in dims)):
            dims.setdefault(axis.symbol, size - axis.size({**dims, axis.symbol: 0}))
    return dims


@dataclass(frozen=True)
class Shape:
    """One alternative of a tensor's shape. `swap` is the first of the two axes that `layout` = bnhd exchanges.
    `conditions`: the optional inputs and bool attributes that must all be given or on."""

    axes: tuple[Axis, ...]
    swap: int | None
    conditions: tuple[str, ...]

    def ordered(self, layout: str) -> tuple[Axis, ...]:
        """The axes in the order that `layout` ("bhnd" or "bnhd") gives."""
        axes = list(self.axes)
        if layout == "bnhd" and self.swap is not None:
            i = self.swap
            axes[i], axes[i + 1] = axes[i + 1], axes[i]
        return tuple(axes)

    def __str__(self):
        words = [str(axis) for axis in self.axes]
        return "[" + ",".join(words) + "]" + (f" with {' and '.join(self.conditions)}" if self.conditions else "")


@dataclass(frozen=True)
class Tensor:
    """An input or output. `like`: the input whose shape an output copies; `repeats`: the int attribute by which its first axis
    is multiplied. `takes`: the input whose buffer it may take."""

    name: str
    type: str
    shapes: tuple[Shape, ...]
    doc: str
    optional: bool = False
    when: tuple[str, ...] = ()
    like: str | None = None
    takes: str | None = None
    repeats: str | None = None

    def dtype(self, t: Any, others: Mapping[str, Any], input_types: Mapping[str, Any]) -> Any:
        """Its type in a call, in the caller's terms: t is T's, others has those of F, I and L, input_types those of the
        inputs by name. An output of type C or S has that of the input that it takes; without it C is T and S is F."""
        if self.type in OWN:
            return input_types.get(self.takes or self.name, t if self.type == "C" else others["F"])
        return t if self.type == "T" else others[self.type]


@dataclass(frozen=True)
class Attr:
    """An attribute. `type` is bool, int, float or string; ONNX and TensorRT see bool as int. A string without `values` is any
    text but the empty one."""

    name: str
    type: str
    default: object
    doc: str
    off: float | None = None
    min: float | None = None
    values: tuple[str, ...] = ()
    reference_only: tuple[str, ...] = ()
    refuse: str | None = None


@dataclass(frozen=True)
class Rule:
    """kind: multiple, fixed, equal, together, exclusive or needs (the first any of the others); `condition` names the
    optional input or attribute."""

    kind: str
    args: tuple[str, ...]
    condition: str | None = None

    def __str__(self):
        first, *others = self.args
        text = {
            "multiple": f"{first} is a multiple of {''.join(others)}",
            "fixed": f"{first} is {''.join(others)}",
            "equal": f"{first} and {''.join(others)} are equal",
            "together": f"{', '.join(self.args[:-1])} and {self.args[-1]} come together or not at all",
            "exclusive": f"{first} and {''.join(others)} exclude each other",
            "needs": f"{first} needs {' or '.join(others)}",
        }[self.kind]
        return text + (f" where {self.condition} is given" if self.condition else "")


@dataclass(frozen=True)
class OpSpec:
    """One operator. `paper`, `equation` and `example` (a Python program) are texts for people."""

    name: str
    version: int
    folder: str
    doc: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    attrs: tuple[Attr, ...]
    rules: tuple[Rule, ...]
    mutating: str | None
    paper: str = ""
    equation: str = ""
    example: str = ""

    @property
    def snake_name(self) -> str:
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", self.name).lower()

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        """Axis symbols in order of first use."""
        shapes = (shape for tensor in self.inputs + self.outputs for shape in tensor.shapes)
        return tuple(dict.fromkeys(s for shape in shapes for a in shape.axes for s in (a.symbol, a.plus) if s))

    def input(self, name: str) -> Tensor:
        return next(t for t in self.inputs if t.name == name)

    def attr(self, name: str) -> Attr:
        return next(a for a in self.attrs if a.name == name)

    def active_outputs(self, attrs: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """The outputs that exist for these attribute values (a mapping; missing ones take their default)."""
        values = {a.name: attrs.get(a.name, a.default) for a in self.attrs}
        return tuple(t for t in self.outputs if all(values[w] for w in t.when))

    def given(self, inputs: Iterable[str], attrs: Mapping[str, Any]) -> set[str]:
        """What conditions of shapes may name: the present inputs, and the boolean attributes that are on."""
        return set(inputs) | {a.name for a in self.attrs if a.type == "bool" and attrs.get(a.name, a.default)}

    def attr_sizes(self, attrs: Mapping[str, Any]) -> dict[str, int]:
        """{symbol: size} of the outputs' axes that have the value of an attribute (a mapping; missing ones take their
        default)."""
        return {a.name: int(attrs.get(a.name, a.default)) for a in self.attrs if a.name in self.symbols}

    def equal_sizes(self, dims: dict[str, int], given: set[str]) -> dict[str, int]:
        """dims {symbol: size} with those made the same that must be so for the names that `given` returns: as the first."""
        rules = [r for r in self.rules if r.kind == "equal" and (r.condition is None or r.condition in given)]
        return dims | {second: dims[first] for first, second in (r.args for r in rules)}

    def alternatives(self, tensor: Tensor, given: set[str]) -> list[Shape]:
        """The shapes of `tensor` that count for the names that `given` returns: of those whose conditions all hold, the ones
        with the most of them."""
        holding = [s for s in tensor.shapes if given.issuperset(s.conditions)]
        most = max((len(s.conditions) for s in holding), default=0)
        return [s for s in holding if len(s.conditions) == most]

    def shape_of(self, tensor: Tensor, given: set[str], rank: int | None = None) -> Shape | None:
        """The first of these alternatives that has this rank, where it is known; None if none has."""
        return next((s for s in self.alternatives(tensor, given) if rank in (None, len(s.axes))), None)


def _axis(word):
    if larger := re.fullmatch(r"max\(([A-Za-z]\w*),([A-Za-z]\w*)\)", word):
        return Axis(larger[1], plus=larger[2])
    match = re.fullmatch(r"([A-Za-z]\w*)(?:\+(\d+)([A-Za-z]\w*)?)?|(\d+)", word)
    if not match:
        raise ValueError(
            f"ops.toml: axis '{word}' is not SYMBOL, SYMBOL+NUMBER, SYMBOL+NUMBER SYMBOL (one word), "
            "max(SYMBOL,SYMBOL) or NUMBER"
        )
    symbol, number, plus, constant = match.groups()
    if not symbol:
        return Axis("", int(constant))
    return Axis(symbol, plus=plus, times=int(number)) if plus else Axis(symbol, int(number or 0))


def _shapes(text):
    shapes = []
    for alternative in text.split("|"):
        body, _, conditions = alternative.partition(" if ")
        words = body.split()
        swap = next((i for i, word in enumerate(words) if word.startswith("[")), None)
        shapes.append(Shape(tuple(_axis(w.strip("[]")) for w in words), swap, tuple(conditions.replace(" and ", " ").split())))
    return tuple(shapes)


def _rule(text):
    body, _, condition = text.partition(" if ")
    words = body.split()
    if words[0] in ("together", "exclusive"):
        kind, args = words[0], words[1:]
    else:
        kind = {"%": "multiple", "==": "fixed" if words[2].isdigit() else "equal", "needs": "needs"}[words[1]]
        args = [words[0], *words[2::2]]  # A needs B or C
    return Rule(kind, tuple(args), condition.strip() or None)


def _tensor(entry):
    entry = dict(entry)
    shape = entry.pop("shape", "")
    entry["when"] = tuple(entry.get("when", ()))
    return Tensor(shapes=_shapes(shape) if shape else (), **entry)


def _attr(entry):
    lists = {key: tuple(entry[key]) for key in ("values", "reference_only") if key in entry}
    return Attr(**{**entry, **lists})


def parse(path: str | Path) -> tuple[OpSpec, ...]:
    """Reads one schema file; returns its operators in order. Raises ValueError where the file is inconsistent.

    Example:
        from leanfleet.spec import parse, schema_path

        print(parse(schema_path())[0].name)  # LeanAttention
    """
    specs = []
    for name, entry in tomllib.loads(Path(path).read_text()).items():
        spec = OpSpec(
            name,
            entry["version"],
            entry["folder"],
            entry["doc"],
            tuple(map(_tensor, entry["inputs"])),
            tuple(map(_tensor, entry["outputs"])),
            tuple(map(_attr, entry["attrs"])),
            tuple(map(_rule, entry.get("rules", ()))),
            entry.get("mutating"),
            *(entry.get(text, "").strip("\n") for text in ("paper", "equation", "example")),
        )
        optional_inputs = {t.name for t in spec.inputs if t.optional}
        names = {t.name for t in spec.inputs} | {a.name for a in spec.attrs} | set(spec.symbols)
        conditions = [c for t in spec.inputs + spec.outputs for s in t.shapes for c in s.conditions]
        if unknown := set(conditions) - optional_inputs - {a.name for a in spec.attrs if a.type == "bool"}:
            raise ValueError(f"ops.toml: {name}: shape conditions {sorted(unknown)} are no optional inputs or bool attributes")
        if untold := [t.type for t in spec.outputs if t.type in OWN and t.takes is None]:
            raise ValueError(f"ops.toml: {name}: an output of type {untold[0]} takes no input, which would tell its type")
        if any(a.plus and a.times for t in spec.outputs for s in t.shapes for a in s.axes):
            raise ValueError(f"ops.toml: {name}: an output's axis is a sum of two symbols")
        if any(a.symbol in (x.name for x in spec.attrs) for t in spec.inputs for s in t.shapes for a in s.axes):
            raise ValueError(
                f"ops.toml: {name}: an input's axis has the name of an attribute, which only tells sizes of outputs"
            )
        told = [{a.symbol for a in s.axes if not a.plus} for t in spec.inputs if not t.optional for s in t.shapes]
        for axis in (a for t in spec.inputs for s in t.shapes for a in s.axes if a.plus):
            for symbol in (axis.plus,) if axis.times else (axis.symbol, axis.plus):
                if not any(symbol in symbols for symbols in told):
                    raise ValueError(f"ops.toml: {name}: axis {axis}: no required input tells {symbol}")
        used = {n for r in spec.rules for n in r.args if not n.isdigit()} | {w for t in spec.outputs for w in t.when}
        used |= {r.condition for r in spec.rules if r.condition} | {t.takes for t in spec.outputs if t.takes}
        used |= {name for t in spec.outputs for name in (t.like, t.repeats) if name}
        if any(t.repeats and not t.like for t in spec.outputs):
            raise ValueError(f"ops.toml: {name}: an output repeats the first axis of no input: it has no `like`")
        if unknown := used - names:
            raise ValueError(f"ops.toml: {name}: {sorted(unknown)} is no input, attribute or symbol")
        specs.append(spec)
    return tuple(specs)


def check_version(version: int) -> None:
    """Raises ValueError where a model imports another version of the domain than there is."""
    if version != OPSET_VERSION:
        raise ValueError(
            f"the model imports version {version} of the domain {DOMAIN}; this leanfleet has version {OPSET_VERSION}"
        )


def check_attributes(op_name: str, node: str, names: Iterable[str]) -> None:
    """Raises ValueError for the first of a node's attributes `names` that its operator does not have. Operators that there
    are not have any: the runtime refuses them."""
    op = all_specs().get(op_name)
    known = [a.name for a in op.attrs] if op else names
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}? It" if near else "it"
            raise ValueError(f"{op_name} '{node}': there is no attribute {name}; {hint} has {', '.join(known)}")


def schema_path() -> Path:
    """Path of ops.toml: beside this file in an installed package, in csrc/ in a source tree."""
    here = Path(__file__).resolve().parent
    installed = here / "ops.toml"
    return installed if installed.exists() else here.parent / "csrc" / "ops.toml"


@cache
def all_specs() -> dict[str, OpSpec]:
    """All operators by name, in the order of ops.toml.

    Example:
        from leanfleet.spec import all_specs

        op = all_specs()["LeanAttention"]
        print(op.inputs[0].name, *op.inputs[0].shapes)
        print(op.attr("causal").default)
    """
    return {spec.name: spec for spec in parse(schema_path())}
