"""The tensors of a case: numbers by role from leanfleet.trial, what nothing may read filled with poison, wrong calls."""

import functools
import random

import numpy as np
import torch

from leanfleet import spec, trial
from leanfleet.export.reference import FORMS
from stress import draw
from support import ort_models
from support.kernels import TORCH_DTYPES

NO_PAGE = -1  # in a block table: keys that count for nothing, new tokens that are not written
INT_POISON = (-1, 10**9, -(2**31))  # page ids behind a request's last page


def make(case):
    """(clean, poisoned) inputs by name: the same but for what nothing may read, which is zeros in the first."""
    op = draw.OPS[case.op]
    shapes = draw.shapes_of(op, case.ranks, case.attrs, case.sizes)
    shapes = {name: spec.in_elements(shape, case.forms.get(name)) for name, shape in shapes.items()}
    model = ort_models.node_model(op, shapes, case.attrs, case.dtype, forms=case.forms)
    clean = {name: to_torch(array) for name, array in trial.make_inputs(model, seed=case.seed, edges=case.edges).items()}
    if case.holes and "block_table" in clean:
        drawn = torch.rand(clean["block_table"].shape, generator=torch.Generator().manual_seed(case.seed))
        clean["block_table"][drawn < 0.3] = NO_PAGE
    for name, exponent in case.exponents.items():
        if name in clean and clean[name].is_floating_point():
            clean[name] = (clean[name].double() * 2.0**exponent).to(clean[name].dtype)
    if case.edges and case.seed % 2 and any(a.name == "eps" for a in op.attrs):
        clean["query"] = -clean["query"]  # made-up denominators are positive
    poisoned = {name: t.clone() for name, t in clean.items()}
    for name, mask in unread(op, clean, case.attrs).items():
        fill_in(clean[name], mask, 0)
        fill_in(poisoned[name], mask, poison(clean[name].dtype, case.fill))
    return clean, poisoned


def to_torch(array):
    if array.dtype == trial.BFLOAT16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    if array.dtype == trial.FLOAT8:
        return torch.from_numpy(array.view(np.uint8).copy()).view(torch.float8_e4m3fn)
    return torch.from_numpy(np.ascontiguousarray(array).copy())


def fill_in(tensor, mask, value):
    """Sets elements, of quantised caches their bytes."""
    bits = tensor.view(torch.uint8) if tensor.dtype in FORMS else tensor
    bits[mask] = value


def poison(dtype, fill):
    if fill == "zero":
        return 0
    if dtype in FORMS:
        return {torch.int8: 0x80, torch.uint8: 0xFF}.get(dtype, 0x7E if fill == "huge" else 0x7F)
    if not dtype.is_floating_point:
        return INT_POISON[len(fill) % len(INT_POISON)]
    return torch.finfo(dtype).max if fill == "huge" else float(fill)


def sizes_of(tensor):
    """Of its axes, in numbers."""
    return spec.in_numbers(tensor.shape, tensor.dtype) if tensor.dim() else []


# What nothing may read


def unread(op, inputs, attrs):
    """{input: mask} of elements that csrc/ops.toml says no result depends on."""
    ranks = {name: t.dim() for name, t in inputs.items()}
    axes = draw.axes_of(op, ranks, attrs)
    dims = spec.sizes_of(pair for name in inputs for pair in zip(axes[name], sizes_of(inputs[name]), strict=True))
    masks = {}
    for name, tensor in inputs.items():
        symbols = [axis.symbol for axis in axes[name]]
        masks[name] = torch.zeros(tensor.shape, dtype=torch.bool)
        for places, mask in _unread_places(op, inputs, dims, attrs, name, symbols):
            order = [symbols.index(s) for s in places]
            view = masks[name].permute(*order, *(i for i in range(len(symbols)) if i not in order))
            view[mask] = True  # of this tensor: views share memory
    return {name: mask for name, mask in masks.items() if mask.any()}


def _unread_places(op, inputs, dims, attrs, name, symbols):
    """(symbols, mask over their axes) of each reason why elements of an input are not read."""
    tokens = next((s for s in ("Nq", "N") if s in symbols), None)
    for offsets, symbol in (("cu_query_lens", "Nq"), ("cu_seqlens", "N")):
        if offsets in inputs and tokens == symbol:
            yield [symbol], torch.arange(dims[symbol]) >= inputs[offsets][-1]
    if "query_lens" in inputs and tokens and "B" in symbols:
        yield ["B", tokens], torch.arange(dims[tokens]) >= inputs["query_lens"].unsqueeze(1)
    if "state_index" in inputs and "P" in symbols:
        yield ["P"], ~torch.isin(torch.arange(dims["P"]), inputs["state_index"])
    if "active" in inputs and "B" in symbols and inputs[name].is_floating_point():
        yield ["B"], inputs["active"] == 0
    if "key_cache" in inputs:
        yield from _unread_of_caches(inputs, dims, attrs, name, symbols)


def _unread_of_caches(inputs, dims, attrs, name, symbols):
    requests = list(_requests(inputs, dims))
    if name == "block_table":
        block = dims["block"]
        yield ["B", "M"], torch.stack([torch.arange(dims["M"]) >= -(-r["length"] // block) for r in requests])
    if name in ("cos_cache", "sin_cache"):
        used = torch.zeros(dims["positions"], dtype=torch.bool)
        for r in requests:
            used[torch.arange(r["length"] - r["count"], r["length"]).clamp(max=dims["positions"] - 1)] = True
        yield ["positions"], ~used
    places = next((p for p in (["B", "S"], ["total"], ["P", "block"]) if set(p) <= set(symbols)), None)
    if places is None:
        return
    read = torch.zeros([dims[s] for s in places], dtype=torch.bool).flatten()
    for r in requests:
        read[_held(r["slots"][_first_seen(r, attrs) : r["length"] - (r["count"] if attrs.get("append") else 0)])] = True
    for r in requests:
        if attrs.get("append"):  # also where another request's page, which is shared, has the place
            read[_held(r["slots"][r["length"] - r["count"] : r["length"]])] = False
    yield places, ~read.view([dims[s] for s in places])


def _held(slots):
    """Those that have a page."""
    return slots[slots >= 0]


def _first_seen(request, attrs):
    if request["count"] == 0:
        return request["length"]
    window = attrs.get("window", -1)
    return max(0, request["length"] - request["count"] - window + 1) if window > 0 else 0


def _requests(inputs, dims):
    """length (valid keys), count (new tokens) and slots (place of each position in the flat cache, below 0 without a page) of each
    request."""
    for b in range(dims["B"]):
        if "cu_seqlens" in inputs:
            slots = torch.arange(*inputs["cu_seqlens"][b : b + 2].tolist())
        elif "block_table" in inputs:
            slots = (inputs["block_table"][b].long().unsqueeze(1) * dims["block"] + torch.arange(dims["block"])).flatten()
        else:
            slots = torch.arange(b * dims["S"], (b + 1) * dims["S"])
        length = int(inputs["seq_lens"][b]) if "seq_lens" in inputs else len(slots)
        count = dims["Nq"]
        if "query_lens" in inputs:
            count = int(inputs["query_lens"][b])
        elif "cu_query_lens" in inputs:
            count = int(inputs["cu_query_lens"][b + 1] - inputs["cu_query_lens"][b])
        yield {"length": length, "count": min(count, length), "slots": slots}


# Inputs that are not contiguous


def strided(tensor, number):
    """The same numbers with other strides: every second of a wider tensor, or axes in another order in memory."""
    if tensor.dim() == 0:
        return tensor
    if number % 2 and tensor.dim() > 1:
        return tensor.movedim(0, -1).contiguous().movedim(-1, 0)
    wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), 113, dtype=tensor.dtype, device=tensor.device)
    view = wide[..., ::2]
    return view.copy_(tensor)


# Calls with one thing wrong


def wrong_calls(case, inputs):
    """(words, inputs, attributes, names of which the error must have one, whether only LEANFLEET_CHECK=1 finds it) of calls with
    one thing wrong, a call for each kind of thing."""
    op = draw.OPS[case.op]
    makers = [_wrong_type, _wrong_rank, _wrong_size, _wrong_sizes, _empty_axis, _wrong_attribute, _missing_input, _broken_rule]
    makers += [functools.partial(_wrong_value, name) for name in WRONG_VALUES if name in inputs]
    for number, maker in enumerate(makers):
        found = maker(random.Random(f"{case.wrong}:{number}"), op, dict(inputs), dict(case.attrs))
        if found is not None and not (case.runtime == "torch" and _is_nothing_for_torch(op, *found[1:3])):
            yield found


def _is_nothing_for_torch(op, inputs, attrs):
    """Calls that never reach this package's code: PyTorch's dispatcher makes bools of numbers, and wants a tensor."""
    return not inputs or any(a.type == "bool" and attrs.get(a.name, 0) not in (0, 1) for a in op.attrs)


def _wrong_type(source, op, inputs, attrs):
    t = op.input(source.choice(list(inputs)))
    fine = {inputs[t.name].dtype}
    if t.name == op.inputs[0].name:  # another type of T would be one for all
        fine |= {TORCH_DTYPES[name] for name in spec.TYPES["T"]}
    if t.type == "S" or (t.type == "C" and not t.name.endswith("_cache")):  # caches with scales are not of T
        fine |= {torch.float32 if t.type == "S" else torch.int8, inputs[op.inputs[0].name].dtype}
    if fine & set(FORMS):  # which are all right, if sizes allow it
        fine |= set(FORMS)
    choices = [d for d in TORCH_DTYPES.values() if d not in fine]
    dtype = source.choice(choices)
    tensor = inputs[t.name].float() if inputs[t.name].dtype in FORMS else inputs[t.name]
    inputs[t.name] = tensor.nan_to_num(0, 0, 0).to(dtype)
    scale = t.name.replace("_cache", "_scale") if t.type == "C" else t.name
    sizes = (
        [f"{t.shapes[0].axes[-1].symbol} = "] if torch.uint8 in (dtype, *fine) else []
    )  # those of int4 caches change with the type
    return f"{t.name} of {dtype}", inputs, attrs, [t.name, scale, *sizes], False


def _wrong_rank(source, op, inputs, attrs):
    name = source.choice(list(inputs))
    t = inputs[name]
    changed = t.unsqueeze(0) if source.random() < 0.5 else t.flatten() if t.dim() > 1 else t.unsqueeze(-1)
    given = op.given(inputs, attrs)
    if any(len(s.axes) == changed.dim() for s in op.alternatives(op.input(name), given)):
        return None
    inputs[name] = changed.contiguous()
    return f"{name} of rank {changed.dim()}", inputs, attrs, [name], False


def _resized(tensor, axis, size):
    """Cut, or with zeros behind."""
    shape = list(tensor.shape)
    shape[axis] = size
    changed = torch.zeros(shape, dtype=tensor.dtype)
    kept = min(size, tensor.shape[axis])
    changed.narrow(axis, 0, kept).copy_(tensor.narrow(axis, 0, kept))
    return changed


def _wrong_size(source, op, inputs, attrs):
    """An axis one longer, where another input tells its size too."""
    axes = draw.axes_of(op, {n: t.dim() for n, t in inputs.items()}, attrs)
    told = {}
    for name, of_name in axes.items():
        for axis in of_name:
            if axis.symbol and not axis.plus:
                told.setdefault(axis.symbol, set()).add(name)
    places = [
        (name, i)
        for name, of_name in axes.items()
        for i, axis in enumerate(of_name)
        if not axis.plus and (not axis.symbol or len(told[axis.symbol]) > 1)
    ]
    if not places:
        return None
    name, axis = source.choice(places)
    symbol = axes[name][axis].symbol
    inputs[name] = _resized(inputs[name], axis, inputs[name].shape[axis] + 1)
    return f"{name} with one more of axis {axis}", inputs, attrs, [name, *told.get(symbol, ())], False


def _wrong_sizes(source, op, inputs, attrs):
    """A symbol one larger everywhere, against a rule about sizes."""
    given, ranks = op.given(inputs, attrs), {n: t.dim() for n, t in inputs.items()}
    rules = [r for r in op.rules if r.kind in ("multiple", "fixed", "equal") and (r.condition is None or r.condition in given)]
    if not rules:
        return None
    rule, axes = source.choice(rules), draw.axes_of(op, ranks, attrs)
    symbol = rule.args[0]
    sizes = spec.sizes_of(pair for name, of_name in axes.items() for pair in zip(of_name, sizes_of(inputs[name]), strict=True))
    if symbol not in sizes or (rule.kind == "multiple" and sizes.get(rule.args[1], 1) == 1):
        return None
    larger = sizes | {symbol: sizes[symbol] + 1}
    for name, of_name in axes.items():
        for i, axis in enumerate(of_name):
            if symbol in (axis.symbol, axis.plus):
                each = spec.numbers_each(inputs[name].dtype) if i == len(of_name) - 1 else 1
                inputs[name] = _resized(inputs[name], i, axis.size(larger) // each)
    return f"{symbol} = {sizes[symbol] + 1} against '{rule}'", inputs, attrs, [f"{symbol} = "], False


def _empty_axis(source, op, inputs, attrs):
    name = source.choice(list(inputs))
    axis = source.randrange(inputs[name].dim())
    inputs[name] = _resized(inputs[name], axis, 0)
    symbol = draw.axes_of(op, {n: t.dim() for n, t in inputs.items()}, attrs)[name][axis].symbol
    told = [
        n
        for n, axes in draw.axes_of(op, {n: t.dim() for n, t in inputs.items()}, attrs).items()
        if symbol and symbol in [a.symbol for a in axes]
    ]
    return f"{name} with nothing in axis {axis}", inputs, attrs, [name, *told], False


def _wrong_attribute(source, op, inputs, attrs):
    attr = source.choice(op.attrs) if op.attrs else None
    if attr is None:
        return None
    wrong = {"bool": [2, -1], "string": ["", "bnh", 1], "int": [], "float": [float("nan"), float("inf")]}[attr.type]
    if attr.type == "string" and not attr.values:
        wrong = [""]
    if attr.min is not None:
        below = attr.min - 1
        wrong = [*wrong, type(attr.default)(below)] if below != attr.off else [*wrong, type(attr.default)(below - 1)]
    if attr.refuse:
        wrong = [1]
    if not wrong:
        return None
    attrs[attr.name] = source.choice(wrong)
    return f"{attr.name} = {attrs[attr.name]}", inputs, attrs, [attr.name], False


def _missing_input(source, op, inputs, attrs):
    name = source.choice([t.name for t in op.inputs if not t.optional])
    del inputs[name]
    return f"without {name}", inputs, attrs, [name], False


def _broken_rule(source, op, inputs, attrs):
    """An input left out whose partner is there, or an attribute switched on without what it needs."""
    choices = []
    for t in op.inputs:
        if t.optional and t.name in inputs and (rule := draw.broken_rule(op, set(inputs) - {t.name}, attrs)):
            choices.append((t.name, None, rule))
    for a in op.attrs:
        if a.type == "bool" and not a.refuse and not attrs.get(a.name, a.default):
            if rule := draw.broken_rule(op, set(inputs), attrs | {a.name: 1}):
                choices.append((None, a.name, rule))
    if not choices:
        return None
    name, attr, rule = source.choice(choices)
    if name:
        del inputs[name]
    else:
        attrs[attr] = 1
    # Leaving one out may break several rules.
    return f"without {name}" if name else f"with {attr} = 1", inputs, attrs, [*rule.args, *filter(None, [name, attr])], False


# Wrong values of an input by its role, some of which only LEANFLEET_CHECK=1 looks at. "twin": the first one's again. "few": one
# key less than there are new tokens.
WRONG_VALUES = {
    "seq_lens": (-1, 10**6, "few"),
    "query_lens": (-1, 10**6),
    "cu_query_lens": (-1, 10**6),
    "cu_seqlens": (-1, 10**6),
    "state_index": (-2, 10**6, "twin"),
    "count_index": (-1, 10**6, "twin"),
    "log_decay": (0.5, float("nan")),
    "beta": (-0.5, 2.5, float("nan")),
    "initial_count": (-1,),
    "top_k": (-1,),
    "position": (-1,),
    "temperature": (-0.5, float("nan")),
    "top_p": (0.0, 1.5, float("nan")),
    "min_p": (-0.1, 1.5),
    "repetition_penalty": (0.0, float("inf")),
    "presence_penalty": (float("inf"),),
    "frequency_penalty": (float("nan"),),
    "coefficients": (float("nan"),),
}


def _wrong_value(name, source, op, inputs, attrs):
    of_tokens = name in ("log_decay", "beta") and "cu_seqlens" in inputs  # a wrong one may stand where no request has a token
    steps = name == "beta" and op.name == "CausalLinearDecay"  # of any size
    if steps or of_tokens or "cos_cache" in inputs:  # with that positions may be refused first: see check.is_checkable
        return None
    inputs[name] = changed = inputs[name].clone()
    flat = changed.view(-1)
    places = range(len(flat)) if "active" not in inputs else inputs["active"].nonzero().flatten().tolist()
    if not places:
        return None
    at, value = source.choice(places), source.choice(WRONG_VALUES[name])
    if value == "twin":
        at, value = len(flat) - 1, int(flat[0])
        value = value if at > 0 and value >= 0 else WRONG_VALUES[name][0]
    elif value == "few":
        value = int(inputs["query_lens"][at]) - 1 if "query_lens" in inputs else -1
    flat[at] = value
    return f"a {name} of {value}", inputs, attrs, [name, *(["query_lens"] if name == "seq_lens" else [])], True
