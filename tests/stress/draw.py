"""Draws calls from the schema alone: a new operator needs nothing here.

A Case says all about a call but the numbers in its tensors, which stress.values makes of its seed. It goes over a pipe and
into a command line as JSON.
"""

import dataclasses
import json
import math
import random

from leanfleet import spec

OPS = spec.all_specs()
# How a case runs. Those that a machine lacks are skipped there, so that SEED:INDEX means the same call everywhere.
RUNTIMES = ("baseline", "avx2", "avx512", "avx512_bf16", "torch", "ort", "body", "trt", "cuda", "torch_cuda", "ort_cuda")
GPU = ("cuda", "torch_cuda", "ort_cuda")  # the C interface, PyTorch and ONNX Runtime there
REFUSING = ("baseline", "avx2", "avx512", "avx512_bf16", "torch", "ort", "cuda")  # where wrong calls are tried

TOKENS = (1, 1, 2, 3, 5, 16, 17, 31, 61, 63, 64, 65, 96, 127, 128, 129, 191, 257, 300)
WIDTHS = (1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 80, 96, 127, 128, 129)
SOME = (1, 1, 2, 3, 4, 5, 7)
# Sizes of symbols; any other gets one of SOME.
SIZES = {
    **dict.fromkeys(("N", "Nq"), (*TOKENS, 1, 1, 1, 1)),  # steps have kernels of their own
    **dict.fromkeys(("S", "total", "positions"), TOKENS),
    **dict.fromkeys(("D", "R", "Dv", "F", "C", "half"), WIDTHS),
    "block": (1, 2, 7, 8, 16, 31, 64),
    "I": (*WIDTHS, *(32, 64, 96, 160, 192, 320) * 3),
    "O": WIDTHS,
    "V": (1, 2, 31, 32, 33, 64, 127, 128, 129, 1000, 1023, 4099),
}
# On a GPU caches long enough to be cut over SMs, and mostly widths that its kernels take.
LONG = dict.fromkeys(("S", "total"), (*TOKENS, 500, 1024, 1500, 3000, 6000))
GPU_WIDTHS = dict.fromkeys(("D", "R", "Dv"), (*WIDTHS, *(8, 16, 32, 64, 72, 96, 128, 192, 256) * 8))
MOST_ELEMENTS = 120_000  # of a call's largest tensor: the reference, which loops over tokens, stays quick
MOST_ON_A_GPU = 500_000  # of caches, whose reference is one product
OTHER_NAME = "another name, for an attribute that is any text"
FILLS = ("nan", "inf", "-inf", "huge", "zero")  # what nothing may read is full of


@dataclasses.dataclass(frozen=True)
class Case:
    """ranks: of the present inputs. sizes: of symbols. exponents: {input: power of two that its numbers are multiplied by}.
    forms: types of quantised caches, where they are not int8, and of states, where they are not float32. strided: inputs are
    not contiguous (PyTorch). checked: LEANFLEET_CHECK=1. holes: block tables name no page at some places within requests.
    wrong: calls with one thing wrong, drawn with this number, in place of a valid one."""

    op: str
    runtime: str
    dtype: str
    ranks: dict
    attrs: dict
    sizes: dict
    seed: int
    threads: int = 2
    in_place: bool = False
    strided: bool = False
    checked: bool = False
    edges: bool = False
    holes: bool = False
    fill: str = "zero"
    exponents: dict = dataclasses.field(default_factory=dict)
    forms: dict = dataclasses.field(default_factory=dict)
    wrong: int | None = None

    def to_json(self):
        """Without what has its default."""
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        return json.dumps({k: v for k, v in dataclasses.asdict(self).items() if v not in (defaults[k], {})})

    @staticmethod
    def from_json(text):
        return Case(**{"ranks": {}, "attrs": {}, "sizes": {}, **json.loads(text)})


def is_name(attr):
    """Whether an attribute is any text: a communicator's name."""
    return attr.type == "string" and not attr.values


def exchanges(op, attrs=None):
    """Whether calls of an operator need a communicator. Of those with keys of several ranks, worlds of one are drawn."""
    alone = any(a.name == "world" for a in op.attrs) and not any(t.repeats == "world" for t in op.outputs)
    return any(map(is_name, op.attrs)) and (not alone or (attrs or {}).get("world", 1) > 1)


def names(case):
    """Those of the communicators that a call takes."""
    if not exchanges(OPS[case.op], case.attrs):
        return set()
    return {case.attrs.get(a.name, a.default) for a in OPS[case.op].attrs if is_name(a)} - {""}


def place(index):
    """(operator, runtime) of the case with this index: all of them in turn."""
    return list(OPS)[index % len(OPS)], RUNTIMES[index // len(OPS) % len(RUNTIMES)]


def draw(seed, index):
    """Case SEED:INDEX: the rest at random."""
    source = random.Random(f"{seed}:{index}")
    op, runtime = place(index)
    while (case := _drawn(source, OPS[op], runtime)) is None:
        pass
    return case


def _drawn(source, op, runtime):
    """A case, or None where the choices do not go together."""
    optional = [t.name for t in op.inputs if t.optional]
    chance = source.choice((0.2, 0.5, 0.8))
    present = {name for name in optional if source.random() < chance}
    attrs = {a.name: draw_attribute(source, a) for a in op.attrs if not a.refuse and source.random() < 0.6}
    attrs |= {"world": 1} if "world" in attrs else {}  # communicators are worlds of one
    if not repair(source, op, present, attrs):
        return None
    present |= {t.name for t in op.inputs if not t.optional}
    given = op.given(present, attrs)
    ranks = {}
    for t in op.inputs:
        if t.name in present:
            alternatives = op.alternatives(t, given)
            if not alternatives:
                return None
            ranks[t.name] = len(source.choice(alternatives).axes)
    if ranks.get("log_decay") == 4 and attrs.get("algorithm") in ("fleet", "lightning"):  # not for decays of key dimensions
        del attrs["algorithm"]
    sizes = draw_sizes(source, op, ranks, attrs, runtime in GPU)
    fit_attributes(attrs, sizes)
    plain = [t.name for t in op.inputs if t.name in ranks and t.type == "T" and not op.name.startswith("GatedDeltaRule")]
    exponents = {}
    dtype = source.choice(spec.TYPES["T"])
    shapes = shapes_of(op, ranks, attrs, sizes)
    forms = {t.name: source.choice(spec.TYPES["C"]) for t in op.inputs if is_quantised(t, ranks)}
    states = [t.name for t in op.inputs if t.type == "S" and t.name in ranks and dtype != "float32"]
    forms |= {name: dtype for name in states if source.random() < 0.5}
    if plain and source.random() < 0.15:
        exponents[source.choice(plain)] = source.choice((-6, 5) if dtype == "float16" else (-40, -12, 12, 20))
    case = Case(
        op.name,
        runtime,
        dtype,
        ranks,
        attrs,
        sizes,
        source.randrange(2**20),
        threads=source.choice((1, 2, 3, 4, 8)),
        in_place=bool(op.mutating and attrs.get(op.mutating)) and source.random() < 0.4,
        strided=source.random() < 0.5,
        checked=source.random() < 0.5,
        edges=source.random() < 0.7,
        fill=source.choice(FILLS),
        exponents=exponents,
        forms=fitting(forms, shapes),
        holes="block_table" in ranks and source.random() < 0.3,
    )
    wrong = source.randrange(2**20)
    if runtime in REFUSING and source.random() < 0.2:
        case = dataclasses.replace(case, wrong=wrong, in_place=False, exponents={}, holes=False)
    return case


def is_quantised(tensor, ranks):
    """Whether an input of type C has scales in a call with these inputs."""
    return tensor.type == "C" and tensor.name in ranks and tensor.name.replace("_cache", "_scale") in ranks


def fitting(forms, shapes):
    """Without int8, and without what has no room for whole elements."""
    return {n: word for n, word in forms.items() if word != "int8" and shapes[n][-1] % spec.numbers_each(word) == 0}


def draw_attribute(source, attr):
    """A value in the attribute's documented range."""
    if attr.type == "bool":
        return source.randrange(2)
    if is_name(attr):
        return source.choice((attr.default, OTHER_NAME))
    if attr.type == "string":
        return source.choice([v for v in attr.values if v not in attr.reference_only])
    if attr.type == "int":
        least = attr.min if attr.min is not None else 0
        return int(source.choice((attr.default, least, least + 1, least + source.choice((2, 4, 16, 62, 63, 64, 127)))))
    if attr.min is None:
        return source.choice((attr.default, 1.0, -0.3, 10 ** source.uniform(-1.5, 0.5)))
    return source.choice((attr.default, attr.min + 10 ** source.uniform(-3, 1.5)))


# Rules of the schema


def is_on(op, name, present, attrs):
    """Whether an input is given, or an attribute switched on."""
    if any(t.name == name for t in op.inputs):
        return name in present
    attr = op.attr(name)
    return attrs.get(name, attr.default) != (0 if attr.off is None else attr.off)


def broken_rule(op, present, attrs):
    """The first rule about inputs and attributes that does not hold, or None."""

    def on(name):
        return is_on(op, name, present, attrs)

    for rule in op.rules:
        if rule.kind not in ("together", "exclusive", "needs") or (rule.condition and not on(rule.condition)):
            continue
        states = [on(name) for name in rule.args]
        if (
            (rule.kind == "together" and any(states) and not all(states))
            or (rule.kind == "exclusive" and all(states))
            or (rule.kind == "needs" and states[0] and not any(states[1:]))
        ):
            return rule
    return None


def repair(source, op, present, attrs):
    """Changes inputs and attributes until all rules hold; False where that takes too long."""

    def switch(name, value):
        if any(t.name == name for t in op.inputs):
            present.add(name) if value else present.discard(name)
        else:
            attr = op.attr(name)
            attrs[name] = (attr.off or 0) if not value else 1 if attr.type == "bool" else attr.min

    for _ in range(40):
        rule = broken_rule(op, present, attrs)
        if rule is None:
            return True
        if rule.kind == "together":
            value = source.random() < 0.5
            for name in rule.args:
                switch(name, value)
        elif rule.kind == "exclusive":
            switch(source.choice(rule.args), False)
        elif source.random() < 0.5:
            switch(rule.args[0], False)
        else:
            switch(source.choice(rule.args[1:]), True)
    return False


# Sizes


def axes_of(op, ranks, attrs):
    """{present input: its axes, in the order of the call's layout}."""
    given, layout = op.given(ranks, attrs), attrs.get("layout", "bhnd")
    return {t.name: op.shape_of(t, given, ranks[t.name]).ordered(layout) for t in op.inputs if t.name in ranks}


def shapes_of(op, ranks, attrs, sizes):
    """{present input: the sizes of its axes, in numbers}."""
    return {name: [axis.size(sizes) for axis in axes] for name, axes in axes_of(op, ranks, attrs).items()}


def draw_sizes(source, op, ranks, attrs, gpu=False):
    """{symbol: size} that the rules permit, with no tensor beyond so many elements. gpu: caches may be longer."""
    choices = SIZES | LONG | GPU_WIDTHS if gpu else SIZES
    most = MOST_ON_A_GPU if gpu and {"S", "total"} & set(op.symbols) else MOST_ELEMENTS
    sizes = {symbol: source.choice(choices.get(symbol, SOME)) for symbol in op.symbols if symbol not in attrs}
    sizes = fitted(op, ranks, attrs, sizes)
    while True:
        shapes = shapes_of(op, ranks, attrs, sizes)
        large = [name for name, shape in shapes.items() if math.prod(shape) > most]
        scores = math.prod(sizes.get(s, 1) for s in ("B", "H", "Nq")) * max(sizes.get("S", 1), sizes.get("total", 1))
        if not large and scores <= 10 * most:
            return used_sizes(op, ranks, attrs, sizes)
        axes = axes_of(op, ranks, attrs)
        symbols = {s for name in large or axes for axis in axes[name] for s in (axis.symbol, axis.plus) if s and sizes[s] > 1}
        symbol = source.choice(sorted(symbols))
        sizes = fitted(op, ranks, attrs, sizes | {symbol: sizes[symbol] // 2})


def used_sizes(op, ranks, attrs, sizes):
    """Those of symbols that the present inputs have."""
    used = {s for axes in axes_of(op, ranks, attrs).values() for axis in axes for s in (axis.symbol, axis.plus)}
    return {symbol: size for symbol, size in sizes.items() if symbol in used}


def fitted(op, ranks, attrs, sizes):
    """sizes changed so that the rules about sizes hold, and what roles ask of them: room in caches and pools for what is
    written, words for all tokens, columns for rotations."""
    sizes, given = dict(sizes), op.given(ranks, attrs)
    for rule in op.rules:
        if rule.kind == "fixed" and (rule.condition is None or is_on(op, rule.condition, ranks, attrs)):
            sizes[rule.args[0]] = int(rule.args[1])
    sizes = op.equal_sizes(sizes, given)
    base = {a for r in op.rules if r.kind == "multiple" for a in r.args[1:]}
    for rule in (r for r in op.rules if r.kind == "multiple"):
        first, second = rule.args
        sizes[second] = min(sizes[second], 4) if second in base else sizes[second]
        sizes[first] = max(1, sizes[first] // sizes[second]) * sizes[second]
    if "Hq" in sizes and max(sizes["Hq"], sizes["Hv"]) % min(sizes["Hq"], sizes["Hv"]):
        sizes["Hq"] = sizes["Hv"]
    if "cu_seqlens" in ranks and "total" in sizes:
        sizes["total"] = max(sizes["total"], sizes["Nq"])
    if "block_table" in ranks:
        sizes["M"] = max(sizes["M"], -(-sizes["Nq"] // sizes["block"]))
        if attrs.get("append"):
            sizes["P"] = max(sizes["P"], sizes["B"] * sizes["M"])
    if "S" in sizes:
        sizes["S"] = max(sizes["S"], sizes["Nq"])
    if "state_index" in ranks:
        sizes["P"] = max(sizes["P"], sizes["Q"] if "cu_seqlens" in ranks else sizes["B"])
    if "count_index" in ranks:
        sizes["P"] = max(sizes["P"], sizes["B"])
    if "cos_cache" in ranks:
        sizes["D"] = max(sizes["D"], 2)
        sizes["half"] = min(sizes["half"], sizes["D"] // 2)
        sizes = op.equal_sizes(sizes, given)
    if "V" in sizes:
        sizes["W"] = -(-sizes["V"] // 32)
    return sizes


def fit_attributes(attrs, sizes):
    """No more log-probabilities than tokens; parts that channels are split into are all of them, and columns
    that are asked for are there."""
    if "num_logprobs" in attrs:
        attrs["num_logprobs"] = min(attrs["num_logprobs"], sizes["V"], 128)
    if attrs.get("split"):
        sizes["C"] = max(sizes["C"], 3)
        attrs["first"] = min(max(attrs.get("first", 1), 1), sizes["C"] - 2)
        attrs["second"] = min(max(attrs.get("second", 1), 1), sizes["C"] - attrs["first"] - 1)
        attrs["third"] = sizes["C"] - attrs["first"] - attrs["second"]
    if attrs.get("columns"):
        if "W" in sizes:
            wide = {"W": ("C" if "C" in sizes else "F", "first_column")}
        elif "H" in sizes:  # DecayGates
            wide = {"F": ("H", "first_column"), "C": ("H", "first_beta_column")}
        else:  # RmsNorm
            wide = {"F": ("C", "first_column")}
        for axis in wide.keys() & sizes.keys():  # DecayGates' C is of an optional input
            columns, first = wide[axis]
            sizes[axis] = max(sizes[axis], sizes[columns] + attrs.get(first, 0))
    if attrs.get("gate_columns"):
        sizes["I"] = max(sizes["I"], sizes["C"] + attrs.get("first_gate_column", 0))
    if attrs.get("group"):
        attrs["group"] = next(n for n in range(min(attrs["group"], sizes["C"]), 0, -1) if sizes["C"] % n == 0)
        if attrs.get("normed"):
            attrs["normed"] = max(1, min(attrs["normed"], sizes["C"]) // attrs["group"]) * attrs["group"]


# Simpler calls

SIMPLEST = {
    "checked": False,
    "strided": False,
    "in_place": False,
    "edges": False,
    "holes": False,
    "fill": "zero",
    "exponents": {},
    "forms": {},
    "threads": 1,
}


def complexity(case):
    """What a simpler case has less of."""
    plain = sum(getattr(case, name) != value for name, value in SIMPLEST.items()) + (case.dtype != "float32")
    return len(case.ranks) + len(case.attrs) + plain, sum(case.sizes.values())


def simpler(case):
    """Valid cases that are a step simpler, the largest steps first."""
    op = OPS[case.op]
    tries = [
        {"ranks": {n: r for n, r in case.ranks.items() if n != t.name}}
        for t in op.inputs
        if t.optional and t.name in case.ranks
    ]
    tries += [{"attrs": {n: v for n, v in case.attrs.items() if n != name}} for name in case.attrs]
    pairs = [r.args for r in op.rules if r.kind in ("together", "needs")]  # what may only leave in company
    for names in pairs:
        gone = {
            "ranks": {n: r for n, r in case.ranks.items() if n not in names or not op.input(n).optional},
            "attrs": {n: v for n, v in case.attrs.items() if n not in names},
        }
        tries.append(gone)
    tries += [{name: value} for name, value in SIMPLEST.items() if getattr(case, name) != value]
    tries += [{"dtype": "float32"}] if case.dtype != "float32" else []
    for symbol, size in case.sizes.items():
        tries += [
            {"sizes": case.sizes | {symbol: less}}
            for less in dict.fromkeys((1, size // 4, size // 2, size - 1))
            if 0 < less < size
        ]
    for changes in tries:
        found = refitted(dataclasses.replace(case, **changes))
        if found is not None and complexity(found) < complexity(case):
            yield found


def refitted(case):
    """The case with ranks and sizes that its inputs and attributes permit, or None where they break a rule."""
    op = OPS[case.op]
    if broken_rule(op, set(case.ranks), case.attrs):
        return None
    given, ranks = op.given(case.ranks, case.attrs), {}
    for name, rank in case.ranks.items():
        possible = [len(s.axes) for s in op.alternatives(op.input(name), given)]
        if not possible:
            return None
        ranks[name] = rank if rank in possible else possible[0]
    attrs = dict(case.attrs)
    sizes = fitted(op, ranks, attrs, dict.fromkeys(op.symbols, 1) | case.sizes)
    sizes = used_sizes(op, ranks, attrs, sizes)
    fit_attributes(attrs, sizes)
    in_place = case.in_place and bool(op.mutating and attrs.get(op.mutating))
    exponents = {n: e for n, e in case.exponents.items() if n in ranks}
    given = [(op.input(name), word) for name, word in case.forms.items() if name in ranks]
    forms = {t.name: word for t, word in given if is_quantised(t, ranks) or (t.type == "S" and word == case.dtype != "float32")}
    forms = fitting(forms, shapes_of(op, ranks, attrs, sizes))
    return dataclasses.replace(case, ranks=ranks, attrs=attrs, sizes=sizes, in_place=in_place, exponents=exponents, forms=forms)
