"""The contract about values that are not finite (csrc/ops.toml), checked on any implementation of an operator.

A result depends on an element of an input where the float64 reference gives another value once the element is another
finite number. What belongs to the element's request and key/value head follows from the axes of the schema.
"""

import torch

from leanfleet import spec
from leanfleet.export import reference
from support.kernels import remembered

NAN, INF = float("nan"), float("inf")


# How far a result may be from itself without the value, where another row of its tile changes what is rounded when.
ROUNDING = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def doubled(inputs):
    """For the reference: in float64, on the CPU."""
    return {
        n: t.cpu().double() if t is not None and t.is_floating_point() else t if t is None else t.cpu()
        for n, t in inputs.items()
    }


def largest(x):
    return x.nan_to_num(0, 0, 0).abs().max().item() if x.numel() else 0.0


def run_reference(op_name, inputs, attrs):
    """The reference's outputs by name."""
    op = spec.all_specs()[op_name]
    outputs = getattr(reference, op.snake_name)(**inputs, **attrs)
    return dict(zip((t.name for t in op.active_outputs(attrs)), outputs, strict=True))


@remembered
def judge(op_name, inputs, attrs):
    """The float64 reference's outputs; tests ask for the same ones for every value and every instruction set."""
    return run_reference(op_name, inputs, attrs)


def labels(op, tensor, inputs, attrs):
    """(request, key/value head) that each element of a tensor of the schema belongs to, as int tensors that broadcast to its
    shape; -1: to none in particular."""
    present = {n for n, t in inputs.items() if t is not None}
    given, layout = op.given(present, attrs), attrs.get("layout", "bhnd")
    dims = spec.sizes_of(
        pair
        for t in op.inputs
        if t.name in present
        for pair in zip(op.shape_of(t, given, inputs[t.name].dim()).ordered(layout), inputs[t.name].shape)
    )
    axes = op.shape_of(tensor, given, inputs[tensor.name].dim() if tensor.name in present else None).ordered(layout)
    offsets = inputs["cu_seqlens"].tolist() if "cu_seqlens" in present else None
    none = torch.full([1] * len(axes), -1)
    found = {"request": none, "head": none}
    for i, axis in enumerate(axes):
        values, kind = None, "request"
        size = axis.size(dims)
        if axis.symbol in ("H", "Hq", "Hk", "Hv", "Hkv"):
            values, kind = torch.arange(size) // (size // dims["Hk" if "Hk" in dims else "Hkv"]), "head"
        elif axis.symbol == "Q" or (axis.symbol == "B" and (offsets is None or "total" in dims)):
            values = torch.arange(size)
        elif axis.symbol in ("N", "total") and offsets is not None:
            values = torch.full((size,), -2)  # of no request
            for b, (begin, end) in enumerate(zip(offsets, offsets[1:])):
                values[begin:end] = b
        elif axis.symbol == "P":
            values = torch.full((size,), -2)
            rows = inputs["block_table"] if "block_table" in present else inputs["state_index"].unsqueeze(1)
            for b, row in enumerate(rows.tolist()):
                values[[r for r in row if 0 <= r < size]] = b
        if values is not None:
            found[kind] = values.view([-1 if k == i else 1 for k in range(len(axes))])
    return found["request"], found["head"]


def check(op_name, inputs, attrs, name, at, value, run, clean, before, labels_of):
    """Asserts the contract for `value` at one element of an input.

    run: inputs -> outputs by name. clean: its outputs without the value; before: the float64 reference's. labels_of: {tensor:
    its labels}.
    """
    op, double = spec.all_specs()[op_name], doubled(inputs)
    double[name] = double[name].clone()
    kept = double[name][at].clone()
    double[name][at] = -0.7 * kept - (0.0 if name == "log_decay" else 0.3)
    other = judge(op_name, double, attrs)
    dependent = {n: before[n] != other[n] for n in before}
    double[name][at] = value
    exact = judge(op_name, double, attrs)
    changed = {**inputs, name: inputs[name].clone()}
    changed[name][at] = value
    found = run(changed)
    own = [label.expand(inputs[name].shape)[at].item() for label in labels_of[name]]
    for t in op.active_outputs(attrs):
        if t.type in "IL":
            continue
        words = f"{op_name}: {value} in {name}{list(at)}: {t.name}"
        a, b, d, e = (x[t.name].cpu() for x in (clean, found, dependent, exact))
        if value == value:
            d = d | ((e != before[t.name]) & ~e.isnan())  # the only key that a row sees counts once it is infinite
        else:
            assert not b[d].isfinite().any(), f"{words} is finite where it depends on a NaN"
        finite = d & b.isfinite()
        # Besides what the type loses without it: sums of coefficients' gradients cancel to little.
        lost = largest((a.double() - before[t.name]).where(a.isfinite(), 0))
        wrong = ~((b.double() - e).abs() <= 0.02 + 0.05 * largest(e) + 2 * lost) & finite
        assert not wrong.any(), f"{words} is finite and wrong: {b[wrong][:4]}, not {e[wrong][:4]}"
        same = (a == b) | (a.isnan() & b.isnan())
        near = (a.double() - b.double()).abs() <= ROUNDING[inputs["query"].dtype] * (1 + largest(a))
        assert (same | near | d | b.isnan()).all(), f"{words} is finite and wrong where it does not depend on it"
        if t.like:  # gradients of an input
            continue
        far = torch.zeros(b.shape, dtype=torch.bool)
        for mine, label in zip(own, labels_of[t.name]):
            far |= ((label != mine) & (label != -1) & (mine >= 0)).expand(b.shape)
        assert (same | ~far).all(), f"{words} reached another request or head"


def sweep(op_name, inputs, attrs, run, skip=(), count=3, seed=0):
    """Checks some elements of every input of type T or F that is given, with NaN and both infinities."""
    op, random = spec.all_specs()[op_name], torch.Generator().manual_seed(seed)
    before, clean = judge(op_name, doubled(inputs), attrs), run(inputs)
    outputs = [t for t in op.active_outputs(attrs) if not t.like]
    tensors = [*(t for t in op.inputs if inputs.get(t.name) is not None and t.type in "TFCS"), *outputs]
    labels_of = {t.name: labels(op, t, inputs, attrs) for t in tensors}
    for t in op.inputs:
        tensor = inputs.get(t.name)
        if tensor is None or t.type in "IL" or t.name in skip:
            continue
        places = tensor.cpu().isfinite().nonzero()  # what belongs to nobody is NaN already
        for row in torch.randperm(len(places), generator=random)[:count].tolist():
            for value in (NAN, INF, -INF):
                check(op_name, inputs, attrs, t.name, tuple(places[row].tolist()), value, run, clean, before, labels_of)
