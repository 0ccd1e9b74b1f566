"""How far a result may lie from the float64 reference.

A kernel is right where its result is the exact one of a computation whose numbers are all off by a few roundings. So the reference
is run in float64, and again with every number of the inputs, and every result on the way, disturbed by one rounding, up or down
at random (Parker's Monte Carlo arithmetic). What an output moves by, its spread, is u * sqrt(sum of the squares of its terms),
where u is the unit roundoff and terms are the summands that disturbances reach it by. By Cauchy and Schwarz sqrt(n) times that is
at least u * (sum of the n terms' magnitudes), which is what summing n numbers in floating point loses. The bound of an element is

    (STEPS + 2 sqrt(n)) s32 + 4 sT + 2 uT |exact| + m + k M^3

with s32 the spread for float32's roundings, which kernels compute in, sT that of inputs alone for roundings to T, which inputs or
factors may have gone through (0 in float32, where it is the same), and uT that of the output's own type. n is the longest axis of
the inputs, or what the largest input has for each element of an output that is a sum over more. What is below the type's smallest
normal number m may be lost, and on the way what is below k, multiplied by up to three numbers of the inputs, which are at most M or
1: k is m on CUDA, whose tensor cores take numbers of T, and float32's elsewhere. What the plain
reference loses in the call's own types counts as spread too. A spread is taken over a row, the last axis, since a few
disturbances may leave one element where it was by luck. Nothing in it is fitted to what kernels return.

Tensor cores take operands of T: on CUDA sT is also that of every result on the way, disturbed by a rounding to T. There the
gradient of log_decay is a sum over later tokens of q dq - k dk, so that it may be off by a rounding of these sums, also where they
cancel. Kernels of the delta rule solve a triangular system for each chunk of tokens, which loses more than tokens one by one where
keys are nearly parallel: the reference is run both ways, and the larger spread counts.

Tokens are those of the float32 reference, bit for bit, and their log-probabilities, a logit less a logarithm of a sum of V
terms, off by 2 sqrt(V) u + 4 u |exact|. Other integers are exact, those of a quantised cache but for one step where the rounding of
what is appended may tip. What follows from these is judged with the bytes that were found.
"""

import contextlib
import itertools
import math
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from leanfleet import spec
from leanfleet.export import reference
from stress import draw, values
from support import sampling_cases

STEPS = 4  # roundings that an exponential, a hyperbolic tangent and their like may be off by
DISTURBANCES = (
    2,
    6,
)  # of outputs with rows of at least SHORT elements, and of others, which two may leave where they were by luck
SHORT = 16
CHUNK = 32  # tokens, of the delta rule
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


# Results that are among the operands: nothing is rounded, and a largest logit that is not one of them has exponentials overflow.
SELECTIONS = (torch.ops.aten.amax, torch.ops.aten.masked_fill)


class Wrong(AssertionError):
    """A result that is not the operator's."""


def run_reference(op, inputs, attrs):
    """Outputs by name."""
    accepted = {n: v for n, v in attrs.items() if not op.attr(n).refuse}
    found = getattr(reference, op.snake_name)(**inputs, **accepted)
    return dict(zip((t.name for t in op.active_outputs(attrs)), found, strict=True))


def is_real(tensor):
    """Whether it holds floats; quantised caches do not, which are judged number by number."""
    return tensor.is_floating_point() and tensor.dtype not in reference.FORMS


def doubled(inputs):
    return {n: t.double() if is_real(t) else t for n, t in inputs.items()}


def steps_of(cache):
    """The numbers of a quantised cache as integers in their order; NaN is next to the largest."""
    if cache.dtype != torch.float8_e4m3fn:
        return reference.numbers_of(cache).long()
    byte = cache.view(torch.uint8).long()
    return torch.where(byte == 0xFF, 0x7F, torch.where(byte > 0x7F, 0x80 - byte, byte))


def moved(tensor, unit, signs):
    """Each number larger or smaller by half a rounding to a whole one. signs: a random generator."""
    drawn = 2 * torch.rand(tensor.shape, generator=signs, dtype=torch.float64) - 1
    return tensor * (1 + unit / 2 * (drawn.sign() + drawn))


def disturbed(inputs, units, seed):
    """float64 inputs, moved. units: {input: unit roundoff}."""
    signs = torch.Generator().manual_seed(seed)
    return {n: moved(t, units[n], signs) if is_real(t) else t for n, t in inputs.items()}


class Rounding(TorchDispatchMode):
    """Moves the results of all float64 operations that compute by a rounding."""

    def __init__(self, seed, unit=UNIT[torch.float32]):
        super().__init__()
        self.signs, self.unit = torch.Generator().manual_seed(seed), unit

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **kwargs or {})
        if not isinstance(found, torch.Tensor) or found.dtype != torch.float64 or function._schema.returns[0].alias_info:
            return found  # of several results, and of views and changes in place, others are made
        if function.overloadpacket in SELECTIONS:
            return found
        return moved(found, self.unit, self.signs)


def kept_in_range(op, inputs, found):
    """Disturbed inputs where those must not be: parts of a whole."""
    ranges = {"beta": (0, 2), "top_p": (0, 1), "min_p": (0, 1)}
    return {n: t.clamp(*ranges[n]) if n in ranges else t for n, t in found.items()}


def scores(rows, columns, factors):
    """The products of rows [...,N,D] with columns [...,N,D], their terms multiplied by factors [...,N,N,D or 1]."""
    if factors.shape[-1] == 1:
        return rows @ columns.mT * factors.squeeze(-1)
    return (rows.unsqueeze(-2) * columns.unsqueeze(-3) * factors).sum(-1)


def delta_in_chunks(query, key, value, log_decay, beta, state):
    """reference._delta_rule in the chunked form: Gated DeltaNet, arXiv 2412.06464, section 3.3."""
    if not query.shape[-2]:
        return [value.clone()], state.clone()
    outputs = []
    for q, k, v, g, b in zip(*(x.split(CHUNK, -2) for x in (query, key, value, log_decay, beta)), strict=True):
        ones = torch.ones(q.shape[-2], q.shape[-2], dtype=q.dtype)
        one = ones.diag().diag()
        between = g.unsqueeze(-2).where(ones.tril(-1).bool().unsqueeze(-1), 0).cumsum(-3).exp()  # from token j to token i
        before = g.cumsum(-2).exp()
        weights = scores(k, k, between).tril(-1) * b
        inverse = torch.linalg.solve_triangular(weights + one, one, upper=False, unitriangular=True)
        u = inverse @ (b * (v - (k * before) @ state))
        outputs.append((q * before) @ state + scores(q, k, between).tril() @ u)
        state = before[..., -1:, :].mT * state + (k * between[..., -1, :, :]).mT @ u
    return [torch.cat(outputs, -2)], state


def delta_backward_in_chunks(*inputs):
    """reference._delta_backward of the same."""
    *inputs, do, state, ds = inputs
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (*inputs, state)]
        (output,), final = delta_in_chunks(*leaves)
        *grads, ds = torch.autograd.grad((output, final), leaves, (do, ds), materialize_grads=True)
    return grads, ds


def in_chunks():
    """A context in which the reference of the delta rule goes chunk by chunk."""
    return mock.patch.multiple(reference, _delta_rule=delta_in_chunks, _delta_backward=delta_backward_in_chunks)


class Judge:
    """Of one call: what its outputs are, and how far they may be off."""

    def __init__(self, case, clean, poisoned):
        self.op, self.attrs = draw.OPS[case.op], case.attrs
        self.on_gpu = on_gpu = case.runtime in draw.GPU or case.runtime == "trt" and torch.cuda.is_available()
        if self.op.name == "SampleTokens":
            self.exact = self.plain = sampling_cases.expected_outputs(clean, case.attrs)
            terms, unit = clean["logits"].shape[1], UNIT[torch.float32]
            self.largest = 1.0
            self.spread = {name: 2 * math.sqrt(terms) * unit + 4 * unit * x.abs() for name, x in self.exact.items()}
            return
        double = doubled(clean)
        self.exact = run_reference(self.op, double, self.attrs)
        self._check_live()
        numbers = [t.double().nan_to_num(0, 0, 0).abs().max().item() for t in clean.values() if is_real(t)]
        self.largest = max(1.0, *numbers)
        passed_on = run_reference(self.op, doubled(poisoned), self.attrs)
        for t in self.op.active_outputs(self.attrs):
            if t.takes and t.takes in clean:  # rows that nobody names stay as they are
                self.exact[t.name] = passed_on[t.name]
        self.plain = run_reference(self.op, poisoned, self.attrs)
        types = {n: t.dtype for n, t in clean.items()}
        single = UNIT[torch.float32]
        low = UNIT[types[self.op.inputs[0].name]]
        first, short = doubled(poisoned), any(x.dim() == 0 or x.shape[-1] < SHORT for x in self.exact.values())
        fine, coarse = [self._spread(self.plain)], []
        forms = (contextlib.nullcontext, in_chunks) if case.op.startswith("GatedDeltaRule") else (contextlib.nullcontext,)
        for seed, form in itertools.product(range(DISTURBANCES[short]), forms):
            with form(), Rounding(seed):
                fine.append(self._spread(self._disturbed(first, dict.fromkeys(first, single), seed)))
            units = {n: single if dtype == torch.float32 else low for n, dtype in types.items()}
            if low > single:
                with form(), Rounding(seed, low) if on_gpu else contextlib.nullcontext():
                    coarse.append(self._spread(self._disturbed(first, units, seed)))
        longest, most = max(max(t.shape, default=1) for t in clean.values()), max(t.numel() for t in clean.values())
        self.spread = {}
        for name, x in self.exact.items():
            terms = max(longest, most / max(1, x.numel()))
            spread = (STEPS + 2 * math.sqrt(terms)) * torch.stack([s[name] for s in fine]).amax(0)
            self.spread[name] = spread + 4 * torch.stack([s[name] for s in coarse]).amax(0) if coarse else spread
            if on_gpu and name == "grad_log_decay":
                self.spread[name] = self.spread[name] + 4 * low * self._cancelling(double)

    def _disturbed(self, inputs, units, seed):
        """The reference's outputs of disturbed inputs."""
        return run_reference(self.op, kept_in_range(self.op, inputs, disturbed(inputs, units, seed)), self.attrs)

    def _cancelling(self, inputs):
        """The magnitudes of the sums whose difference is the gradient of log_decay, the largest of all heads."""
        exact = self.exact
        if self.attrs.get("normalize_qk"):  # they are sums before the gradients of a row lose what lies along it
            inputs = inputs | {name: reference._delta_unit_rows(inputs[name]) for name in ("query", "key")}
            exact = run_reference(self.op, inputs, {**self.attrs, "normalize_qk": 0})
        tokens = 1 if self.attrs.get("layout") == "bnhd" else 2
        sums = [(inputs[n] * exact[f"grad_{n}"]).nan_to_num(0, 0, 0).abs().sum(-1).sum(tokens) for n in ("query", "key")]
        return max(x.max().item() if x.numel() else 0.0 for x in sums)

    def _check_live(self):
        for name, x in self.exact.items():
            if is_real(x) and x.isnan().any():
                raise Wrong(f"{name}: the reference itself gives NaN")

    def _spread(self, other):
        result = {}
        for name, x in self.exact.items():
            if not is_real(x):
                result[name] = torch.zeros(x.shape, dtype=torch.float64)
                continue
            change = (other[name].double() - x).nan_to_num(0, 0, 0).abs()
            result[name] = change.amax(-1, keepdim=True).expand(x.shape) if change.dim() > 1 and change.numel() else change
        return result

    def check(self, found):
        """Raises Wrong."""
        if found.keys() != self.exact.keys():
            raise Wrong(f"outputs are {', '.join(found)}; expected {', '.join(self.exact)}")
        for t in self.op.active_outputs(self.attrs):
            self._check_output(t.name, found[t.name])

    def _check_output(self, name, found):
        exact = self.exact[name]
        if found.shape != exact.shape:
            raise Wrong(f"{name} has shape {list(found.shape)}; expected {list(exact.shape)}")
        if found.dtype in reference.FORMS:
            off = (steps_of(found) - steps_of(self.plain[name])).abs()
            return self._refuse(name, *(reference.numbers_of(t).float() for t in (found, exact)), off > 1, off)
        if not found.dtype.is_floating_point:
            off = (found.long() - self.plain[name].long()).abs()
            return self._refuse(name, found, exact, off > 0, off)
        info, allowed = torch.finfo(found.dtype), self._allowed(name, found.dtype)
        wide = found.double()
        error = (wide - exact).abs()
        same = (wide == exact) | (wide.isnan() & exact.isnan())
        beyond = wide.isinf() & (wide.sign() == exact.sign()) & (exact.abs() + allowed >= info.max)
        self._refuse(name, wide, exact, ~(same | beyond | (error <= allowed)), allowed)

    def _allowed(self, name, dtype):
        """How far each element of an output may be off."""
        rounding = 2 * UNIT[dtype] * self.exact[name].nan_to_num(0, 0, 0).abs()
        lost = torch.finfo(dtype).smallest_normal
        on_the_way = lost if self.on_gpu else torch.finfo(torch.float32).smallest_normal
        return self.spread[name] + rounding + lost + on_the_way * self.largest**3

    def tolerance(self, name, dtype):
        """The largest of these, NaN aside, which must be NaN in what was found too."""
        return self._allowed(name, dtype).nan_to_num(0).max().item() if dtype in UNIT else 0.0

    def _refuse(self, name, found, exact, wrong, allowed):
        if wrong.any():
            at = tuple(wrong.nonzero()[0].tolist())
            raise Wrong(
                f"{name}{list(at)} is {found[at].item():.9g}, exactly {exact[at].item():.9g}, off by at most "
                f"{allowed[at].item():.3g} where it is right; {int(wrong.sum())} of {wrong.numel()} elements are wrong"
            )


def settled(case, inputs, found):
    """(inputs, attributes) of the same call after what it appended to quantised caches, so that rounding that tips counts once; None
    for any other call."""
    attrs = case.attrs
    if not (attrs.get("append") and any(t.dtype in reference.FORMS for t in inputs.values())):
        return None
    op = draw.OPS[case.op]
    after = {n: t for n, t in inputs.items() if n not in ("new_key", "new_value")}
    after |= {t.takes: found[t.name] for t in op.active_outputs(attrs) if t.takes}
    if attrs.get("packed_qkv"):
        axes = draw.axes_of(op, {n: t.dim() for n, t in inputs.items()}, attrs)
        dims = spec.sizes_of(pair for n, t in inputs.items() for pair in zip(axes[n], values.sizes_of(t), strict=True))
        heads = next(i for i, axis in enumerate(axes["query"]) if axis.plus)
        after["query"] = after["query"].narrow(heads, 0, dims["H"]).contiguous()
    return after, {**attrs, "append": 0, "packed_qkv": 0}
