"""Benchmark of methods for linear attention: one's own beside ours, each checked before it is timed. Needs torch.

After LeetDecoding's listings 1 and 2: benchmark_method times one's own implementation against all registered ones,
register_method adds one for good, and causal_linear_decoder computes with any of them by name. Both take LeetDecoding's own
arguments too, so that a script written for it runs with its import line changed to `from leanfleet.bench import ...`.

A method of an operator is a function of these tensors on one device that returns output T [B,H,N,Dv]:

    causal_linear_decay             query, key, value, log_decay
    causal_linear_decay_normalized  query, key, value, log_decay: each row divided by the sum of its masked scores
    normalized_linear_attention     query, key, value, with a = b = 1

query T [B,H,N,R], key T [B,Hkv,N,R], value T [B,Hkv,N,Dv]; log_decay float32 [Hkv] or [B,Hkv,N], or None for no decay;
T is float32, float16 or bfloat16. It refuses what it does not do with ValueError or NotImplementedError. To be timed with
its gradients it must be differentiable by PyTorch in query, key and value.
"""

from __future__ import annotations

import datetime
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch

import leanfleet
from leanfleet import machine, native, plotting, spec
from leanfleet.driver import Device
from leanfleet.export import reference, torch_ops
from leanfleet.files import check_file, new_file
from leanfleet.tables import print_table

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DECAYS = ("none", "head", "token")
CACHE_BYTES = {"cpu": 128 << 20, "cuda": 256 << 20}  # more than any last-level cache that this was run on
# The error that a result may have against the float64 reference, in errors of the same reference with all its arithmetic in
# the type of the inputs. That one works block by block; in float32 the same sums token by token have up to 10x its error.
TOLERANCE = {"float32": 16, "float16": 2, "bfloat16": 2}
MIN_ROUNDS, SLOW_ROUNDS = 7, 3  # calls that are timed at least; the second where one call takes longer than `seconds`
PROBE_TOKENS = 16  # of the first call that tells how long a method will take
REFUSALS = (ValueError, NotImplementedError, torch.OutOfMemoryError)


@dataclass(frozen=True)
class Shape:
    """Sizes of a case: B batch, H query heads, Hkv key and value heads, N tokens, R size of query and key, Dv of value."""

    batch: int
    heads: int
    kv_heads: int
    tokens: int
    rank: int
    dim: int

    def __str__(self) -> str:
        heads = f"H{self.heads}" + (f"/{self.kv_heads}" if self.kv_heads != self.heads else "")
        return f"B{self.batch} {heads} N{self.tokens} R{self.rank} D{self.dim}"


Function = Callable[..., torch.Tensor]
Memory = Callable[[Shape], int]
Decay: TypeAlias = "str | float | torch.Tensor | None"
Row = dict[str, Any]


@dataclass(frozen=True)
class Method:
    name: str
    function: Function
    operator: str
    devices: tuple[str, ...]
    memory: Memory | None  # bytes that it needs beside inputs and outputs, or None


OPERATORS = ("causal_linear_decay", "causal_linear_decay_normalized", "normalized_linear_attention")
_methods: dict[tuple[str, str], Method] = {}  # by operator and name
# LeetDecoding's names of methods (its table 2, and its package), where ours are others
_ALIASES = {
    "blockbased": "block_based",
    "linear_attn": "vanilla",
    "fleetattention": "fleet",
    "fleetattention_torch": "fleet_torch",
    "fleetattention_triton": "fleet",
    "lightningattention_2": "lightning",
    "lightningattention_2_torch": "lightning_torch",
    "lightningattention2": "lightning",
    "lightningattention2_torch": "lightning_torch",
}


def _normal(name):
    return name.lower().replace("-", "_")


def register_method(
    name: str,
    function: Function | None = None,
    *,
    operator: str = "causal_linear_decay",
    devices: Sequence[str] = ("cpu", "cuda"),
    memory: Memory | None = None,
) -> Callable[..., Any]:
    """Registers a method for benchmarks and causal_linear_decoder; returns it. Also a decorator.

    name: what tables and attn_method call it; capitals and hyphens count as small letters and underscores. A name that
    is taken is replaced. function: see the head of this module. devices: where it can run. memory: a function of a Shape
    that gives the bytes it needs beside inputs and outputs; a case that does not fit is refused rather than tried.
    Raises ValueError for an unknown operator or device.

    Example:
        from leanfleet.bench import causal_linear_decoder, register_method
        import torch

        @register_method("running_sum")
        def running_sum(query, key, value, log_decay):
            if log_decay is not None:
                raise ValueError("it knows no decay")
            states = torch.einsum("bhnr,bhnd->bhnrd", key, value).cumsum(2)
            return torch.einsum("bhnr,bhnrd->bhnd", query, states)

        query, key, value = torch.randn(3, 1, 2, 20, 8).unbind()
        print(causal_linear_decoder(query, key, value, attn_method="running-sum").shape)  # torch.Size([1, 2, 20, 8])
    """
    if function is None:
        return lambda decorated: register_method(name, decorated, operator=operator, devices=devices, memory=memory)
    if operator not in OPERATORS:
        raise ValueError(f"register_method: operator is {operator!r}; it is one of {', '.join(OPERATORS)}")
    if unknown := set(devices) - {"cpu", "cuda"}:
        raise ValueError(f"register_method: devices has {', '.join(sorted(unknown))}; it takes cpu and cuda")
    _methods[operator, _normal(name)] = Method(_normal(name), function, operator, tuple(devices), memory)
    return function


def methods(operator: str = "causal_linear_decay") -> list[str]:
    """The names of an operator's registered methods, in the order of registration."""
    return [name for of, name in _methods if of == operator]


def _method(name: str, operator: str) -> Method:
    known = _normal(name)
    if (operator, known) not in _methods:  # a method of one's own may have a name of LeetDecoding's
        known = _ALIASES.get(known, known)
    try:
        return _methods[operator, known]
    except KeyError:
        raise ValueError(
            f"{name!r} is no registered method of {operator}; there are {', '.join(methods(operator))}. "
            "register_method adds one"
        ) from None


def _log_of_gamma(caller: str, gamma: float | torch.Tensor | None, heads: int, device: torch.device | str) -> torch.Tensor:
    """ln of LeetDecoding's gamma, float32 [heads]: one number, or one for each head in any shape, such as [heads,1]."""
    if gamma is None:
        raise ValueError(f"{caller}: a decaying mask needs gamma, its base: a number, or one for each of {heads} heads")
    values = torch.as_tensor(gamma, dtype=torch.float32, device=device).flatten()
    if values.numel() not in (1, heads):
        raise ValueError(f"{caller}: gamma has {values.numel()} values; expected 1, or one for each of {heads} heads")
    if not bool(((values > 0) & (values <= 1)).all()):
        raise ValueError(f"{caller}: gamma has values from {values.min():.3g} to {values.max():.3g}; expected 0 < gamma <= 1")
    return values.log().expand(heads).contiguous()


def causal_linear_decoder(
    B: torch.Tensor,
    C: torch.Tensor,
    V: torch.Tensor,
    log_decay: torch.Tensor | None = None,
    attn_method: str = "auto",
    *,
    is_mask_weight: bool = False,
    gamma: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """((B Cᵀ) ⊙ M) V with M_ij = exp of the sum of log_decay over j < t <= i (LeetDecoding, equation 4 and listing 2).

    B T [batch,heads,N,rank], C T [batch,kv_heads,N,rank], V T [batch,kv_heads,N,dim], of one type: float32, float16 or
    bfloat16. log_decay: ln γ <= 0, float32 [kv_heads] or [batch,kv_heads,N]; None is γ = 1.
    is_mask_weight, gamma: LeetDecoding's way to say it. With is_mask_weight M_ij = γ^(i-j), γ being gamma, a number or one for
    each head ([heads] or [heads,1]), 0 < γ <= 1; without, gamma has no effect. (Its package reads gamma as a slope, γ =
    exp(-gamma), in some methods; here it is equation 4's in all.) attn_method: any registered method, in small letters or
    capitals, with hyphens or underscores: vanilla, block_based, recursion, causal_dot_product, fleet, lightning, auto, one's
    own; and LeetDecoding's names, such as FleetAttention and lightningAttention-2.
    Returns T [batch,heads,N,dim]. Raises ValueError for an unknown method, for a gamma that is missing, out of range or of
    another number of heads, for both log_decay and is_mask_weight, and what the method raises.

    Example:
        import torch
        from leanfleet.bench import causal_linear_decoder

        query, key, value = torch.randn(3, 1, 2, 100, 16).unbind()
        log_decay = torch.tensor([-0.1, -0.01])             # one for each head
        output = causal_linear_decoder(query, key, value, log_decay, attn_method="lightning")
        same = causal_linear_decoder(query, key, value, is_mask_weight=True, gamma=log_decay.exp())
    """
    if is_mask_weight:
        if log_decay is not None:
            raise ValueError("causal_linear_decoder: log_decay and is_mask_weight with gamma say the same: give one of them")
        log_decay = _log_of_gamma("causal_linear_decoder", gamma, C.shape[1], B.device)
    return _method(attn_method, "causal_linear_decay").function(B, C, V, log_decay)


# The methods that come with the package


def _vanilla_memory(shape):
    """The masks and scores of N x N that the plain form holds at once, in float32."""
    return 4 * shape.batch * (3 * shape.heads + 2 * shape.kv_heads) * shape.tokens**2


def _register_own():
    def kernel(algorithm, normalize):
        return lambda q, k, v, g: torch_ops.causal_linear_decay(q, k, v, g, algorithm=algorithm, normalize=normalize)

    def plain(algorithm, normalize):
        return lambda q, k, v, g: reference.causal_linear_decay(q, k, v, g, algorithm=algorithm, normalize=normalize)[0]

    choices = spec.all_specs()["CausalLinearDecay"].attr("algorithm")
    kernels = [a for a in choices.values if a not in choices.reference_only]
    for operator, normalize in (("causal_linear_decay", False), ("causal_linear_decay_normalized", True)):
        for algorithm in kernels:
            register_method(algorithm, kernel(algorithm, normalize), operator=operator)
        for algorithm in choices.reference_only:
            register_method(
                algorithm,
                plain(algorithm, normalize),
                operator=operator,
                memory=_vanilla_memory if algorithm == "vanilla" else None,
            )
        for algorithm in kernels[1:]:  # without auto, which is a choice between the others
            register_method(f"{algorithm}_torch", plain(algorithm, normalize), operator=operator)
    register_method(
        "auto", lambda q, k, v: torch_ops.normalized_linear_attention(q, k, v)[0], operator="normalized_linear_attention"
    )
    register_method(
        "lightning_torch",
        lambda q, k, v: reference.normalized_linear_attention(q, k, v)[0],
        operator="normalized_linear_attention",
    )


_register_own()


# Inputs and the check


def make_inputs(
    operator: str, shape: Shape, dtype: str = "float32", log_decay: Decay = "head", device: str = "cpu"
) -> tuple[torch.Tensor | None, ...]:
    """Random inputs of a method, from torch's generator: query, key, value and, where the operator has it, log_decay.

    Scores are of the order of 1; of the normalised operators, query and key are positive, so that no normaliser vanishes.
    log_decay: "none"; "head", lightning attention's slopes, ln γ_h = -2^(-8h/H); "token", between -0.2 and 0 for each token;
    a number; or a tensor.
    """
    b, h, hkv, n, r, d = shape.batch, shape.heads, shape.kv_heads, shape.tokens, shape.rank, shape.dim
    draw = torch.randn if operator == "causal_linear_decay" else torch.rand
    q, k = (draw(b, heads, n, r).div(r**0.25).to(device, DTYPES[dtype]) for heads in (h, hkv))
    v = torch.randn(b, hkv, n, d).to(device, DTYPES[dtype])
    if operator == "normalized_linear_attention":
        return q, k, v
    if isinstance(log_decay, torch.Tensor):
        return q, k, v, log_decay.to(device, torch.float32)
    if log_decay == "head":
        g = -torch.exp2(-8 * torch.arange(1, hkv + 1) / hkv)
    elif log_decay == "token":
        g = -0.2 * torch.rand(b, hkv, n)
    elif log_decay in ("none", None):
        return q, k, v, None
    elif isinstance(log_decay, (int, float)):
        g = torch.full((hkv,), float(log_decay))
    else:
        raise ValueError(f"log_decay is {log_decay!r}; it is one of {', '.join(DECAYS)}, a number or a tensor")
    return q, k, v, g.to(device)


def _judge(operator, inputs, compute_dtype=None):
    """The output by the plain reference; compute_dtype None: in float64."""
    if compute_dtype is None:
        inputs = [None if t is None else t.double() for t in inputs]
    if operator == "normalized_linear_attention":
        return reference.normalized_linear_attention(*inputs, compute_dtype=compute_dtype)[0]
    normalize = operator == "causal_linear_decay_normalized"
    return reference.causal_linear_decay(*inputs, normalize=normalize, compute_dtype=compute_dtype)[0]


def _results(function, inputs, grad_output):
    """[output], and with grad_output also the gradients of query, key and value."""
    if grad_output is None:
        with torch.no_grad():
            return [function(*inputs)]
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]
    output = function(*leaves, *inputs[3:])
    if not output.requires_grad:
        raise NotImplementedError("it has no gradient")
    return [output.detach(), *torch.autograd.grad(output, leaves, grad_output.to(output.dtype))]


def _error(found, expected):
    """The largest over the tensors of |found - expected| / |expected|, in norms; infinite where found is not finite."""
    errors = []
    for a, b in zip(found, expected, strict=True):
        if a.shape != b.shape:
            raise RuntimeError(f"its output has shape {list(a.shape)}; expected {list(b.shape)}")
        error = float((a.double() - b).norm() / b.norm().clamp_min(1e-300))
        errors.append(error if math.isfinite(error) else math.inf)
    return max(errors)


def _tolerance(dtype, plain_error):
    """The error that a method may have, given that of the reference in the type of the inputs."""
    eps = torch.finfo(DTYPES[dtype]).eps
    tolerance = max(TOLERANCE[dtype] * plain_error, eps)
    # Counts and sums over many tokens drown in 16 bits, and the error is no measure then.
    return tolerance if dtype == "float32" else min(tolerance, 4 * eps)


def _free_memory(device):
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


# Timing


class _Clock:
    """Times calls one by one, out of a cold cache.

    On the CPU the caller's input sets do not fit the cache together. On a GPU a buffer larger than its cache is read
    before each call, and a pause before that lets the host run ahead, so that the events around the call measure the
    device and not Python.
    """

    def __init__(self, device):
        self.device = device
        if device == "cuda":
            self.flush = torch.zeros(CACHE_BYTES["cuda"] // 4, device="cuda")
            self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def seconds(self, call):
        if self.device == "cpu":
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        torch.cuda._sleep(2_000_000)
        self.flush.sum()
        self.events[0].record()
        call()
        self.events[1].record()
        torch.cuda.synchronize()
        return self.events[0].elapsed_time(self.events[1]) / 1e3


def time_calls(calls: Mapping[str, Sequence[Callable[[], Any]]], device: str, budget: float) -> dict[str, list[float]]:
    """{name: samples in seconds}. calls: {name: list of calls, one for each input set}; the names take turns. budget: seconds
    for each name."""
    clock, samples, least = _Clock(device), {name: [] for name in calls}, {}
    for name, calls_of in calls.items():
        least[name] = MIN_ROUNDS if clock.seconds(calls_of[0]) <= budget else SLOW_ROUNDS
    active, turn = list(calls), 0
    while active:
        for name in active:
            samples[name].append(clock.seconds(calls[name][turn % len(calls[name])]))
        turn += 1
        active = [n for n in active if len(samples[n]) < least[n] or sum(samples[n]) < budget and len(samples[n]) < 400]
    return samples


def _total(call, budget):
    """Seconds that the check and the timing of a method take, each call of which takes `call` seconds."""
    return 2 * call + max(budget, call * (MIN_ROUNDS if call <= budget else SLOW_ROUNDS))


def _expected(function, inputs, grad_output, device, budget, limit):
    """Seconds that the check and the timing of a method are expected to take; where that is below `limit` for sure, 0.

    Calls it on the first 16, 64, ... tokens until it is clear.
    """
    tokens, before = inputs[0].shape[2], None
    n = PROBE_TOKENS
    while n < tokens:
        cut = [t if t is None or t.dim() == 1 else t[:, :, :n].contiguous() for t in inputs]
        cut_grad = None if grad_output is None else grad_output[:, :, :n].contiguous()
        best = math.inf
        for _ in range(3):  # the first call may load and compile things, any may be held up
            start = time.perf_counter()
            _results(function, cut, cut_grad)
            if device == "cuda":
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
            if (total := _total(_extrapolated(before, (n, best), tokens), budget)) <= limit:
                break
        if total > limit:
            return total
        if _total(best * (tokens / n) ** 2, budget) <= limit:  # no method takes more than the square
            break
        n, before = 4 * n, (n, best)
    return 0.0


def _extrapolated(before, last, tokens):
    """Seconds of a call on so many tokens, extrapolated from two calls (tokens, seconds). Where time grew faster than tokens:
    by that power, at most 2. Where it grew slower, because a fixed cost still shows: by a line. before None: those of last."""
    n, seconds = last
    if before is None:
        return seconds
    power = min(math.log(seconds / before[1]) / math.log(n / before[0]), 2.0)
    if power > 1:
        return seconds * (tokens / n) ** power
    return seconds + max(seconds - before[1], 0.0) / (n - before[0]) * (tokens - n)


# Benchmarks


def run(
    shapes: Iterable[Shape],
    names: Sequence[str] | None = None,
    operator: str = "causal_linear_decay",
    device: str = "cpu",
    dtype: str = "float32",
    log_decay: Decay = "head",
    grad: bool = False,
    seconds: float = 0.5,
    rtol: float | None = None,
    seed: int = 0,
    on_case: Callable[[list[Row]], object] | None = None,
    limit: float | None = None,
    on_progress: Callable[[Shape, str], object] | None = None,
) -> dict[str, Any]:
    """Checks and times methods on shapes; returns a report, which write_json and plot take.

    shapes: of Shape. names: of registered methods; None: all of the operator's. device: "cpu", "cuda" or "cuda:1". dtype: a key
    of DTYPES. log_decay: see make_inputs. grad: time forward and backward together, and check the gradients too. seconds: spent
    on timing each method of each shape, for MIN_ROUNDS calls or more. rtol: the largest allowed error; None: TOLERANCE times
    that of the reference in the inputs' own type. on_case: called with each finished list of rows. limit: seconds; a method
    that is expected to keep a shape busy for longer, the check included, is left out (None: none is); that is told from calls
    on a few tokens. on_progress: called with (shape, what comes next) before each step that may take long.

    The report is a dict: "machine", "settings" and "rows". A row is a method on a shape: "status" is "ok", "wrong" (its
    error, relative and in norms, is above "tolerance"), "refused" (with "reason"), "left out" (beyond `limit`) or "failed"
    (it raised something else); only ok ones have "seconds" (the median), "spread" (half the distance of the quartiles,
    seconds) and "rounds".
    Raises ValueError for an unknown name, device, type or operator.
    """
    if operator not in OPERATORS:
        raise ValueError(f"operator is {operator!r}; it is one of {', '.join(OPERATORS)}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it is one of {', '.join(DTYPES)}")
    where = Device.named(device)
    if where.kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device!r}; it is cpu: torch finds no CUDA device here")
    chosen = [_method(name, operator) for name in (methods(operator) if names is None else names)]
    rows = []
    for shape in shapes:
        tell = partial(on_progress, shape) if on_progress else lambda what: None
        with torch.cuda.device(where.index) if where.kind == "cuda" else nullcontext():  # all of it is made on the current one
            case = _run_case(shape, chosen, operator, where.kind, dtype, log_decay, grad, seconds, rtol, seed, limit, tell)
        rows += case
        if on_case:
            on_case(case)
    decay = f"a tensor {list(log_decay.shape)}" if isinstance(log_decay, torch.Tensor) else str(log_decay)
    settings = {"operator": operator, "device": device, "dtype": dtype, "grad": grad, "seed": seed, "log_decay": decay}
    return {"date": datetime.date.today().isoformat(), "machine": _machine(where), "settings": settings, "rows": rows}


def _machine(device):
    facts = {"leanfleet": leanfleet.__version__, "kernels": native.build_info(), "torch": torch.__version__}
    if device.kind == "cuda":
        return facts | {"device": torch.cuda.get_device_name(device.index)}
    return facts | {"device": machine.cpu()[0], "threads": torch.get_num_threads()}


def _run_case(shape, chosen, operator, device, dtype, log_decay, grad, seconds, rtol, seed, limit, tell):
    torch.manual_seed(seed)
    inputs = make_inputs(operator, shape, dtype, log_decay, device)
    size = sum(t.nbytes for t in inputs if t is not None)
    copies = max(2, min(64, -(-CACHE_BYTES["cpu"] // size))) if device == "cpu" else 1
    sets = [inputs] + [tuple(None if t is None else t.clone() for t in inputs) for _ in range(copies - 1)]
    grad_output = torch.randn(*inputs[0].shape[:-1], shape.dim).to(inputs[0]) if grad else None

    tell("float64 reference")
    expected = _results(lambda *t: _judge(operator, t), [None if t is None else t.double() for t in inputs], grad_output)
    if rtol is None:
        plain = _results(lambda *t: _judge(operator, t, inputs[0].dtype), inputs, grad_output)
        tolerance = _tolerance(dtype, _error(plain, expected))
    else:
        tolerance = rtol
    rows, calls = [], {}
    for method in chosen:
        row = {"method": method.name, "shape": asdict(shape), "status": "ok", "error": None, "tolerance": tolerance}
        rows.append(row)
        tell(method.name)
        try:
            if device not in method.devices:
                raise NotImplementedError(f"it runs on {' and '.join(method.devices)} only")
            needed, free = method.memory(shape) * (3 if grad else 1) if method.memory else 0, _free_memory(device)
            if needed > free / 2:
                raise ValueError(f"it needs {needed / 2**30:.1f} GiB beside its inputs; {free / 2**30:.1f} GiB are free")
            if limit is not None and (total := _expected(method.function, inputs, grad_output, device, seconds, limit)) > limit:
                row["status"], row["reason"] = "left out", f"about {total:.0f} s are expected, the limit is {limit:g} s"
                continue
            row["error"] = _error(_results(method.function, inputs, grad_output), expected)
        except Exception as error:
            row["status"] = "refused" if isinstance(error, REFUSALS) else "failed"
            text = " ".join(str(error).split()) or type(error).__name__
            row["reason"] = text if row["status"] == "refused" else f"{type(error).__name__}: {text}"
            continue
        if not row["error"] <= tolerance:
            row["status"] = "wrong"
            row["error"] = row["error"] if math.isfinite(row["error"]) else None
            row["reason"] = f"its error against the float64 reference is {_number(row['error'])}, {tolerance:.1e} are allowed"
            continue
        calls[method.name] = [lambda f=method.function, s=s: _results(f, s, grad_output) for s in sets]
    if calls:
        tell("timing")
    samples = time_calls(calls, device, seconds)
    for row in rows:
        if row["method"] in samples:
            times = samples[row["method"]]
            quartiles = statistics.quantiles(times, n=4)
            row |= {"seconds": statistics.median(times), "spread": (quartiles[2] - quartiles[0]) / 2, "rounds": len(times)}
    return rows


def _number(error):
    return "not finite" if error is None else f"{error:.1e}"


def _of_gamma(method: Function, gamma: float | torch.Tensor | None, device: str) -> Function:
    """A function of (query, key, value, log_decay) from one of LeetDecoding's, of (query, key, value, gamma)."""
    moved = gamma.to(device) if isinstance(gamma, torch.Tensor) else gamma
    return lambda query, key, value, log_decay: method(query, key, value, moved)


def benchmark_method(
    method: Function,
    *,
    name: str | None = None,
    operator: str = "causal_linear_decay",
    device: str = "cpu",
    dtype: str = "float32",
    batch_size: int = 1,
    heads: int | None = None,
    kv_heads: int | None = None,
    rank: int = 64,
    dim: int = 64,
    tokens: int | Sequence[int] = (128, 512, 2048),
    log_decay: Decay = "head",
    grad: bool = False,
    others: Sequence[str] | None = None,
    seconds: float = 0.5,
    rtol: float | None = None,
    quiet: bool = False,
    is_weight_decay: bool | None = None,
    gamma: float | torch.Tensor | None = None,
) -> dict[str, Any]:
    """Checks and times one's own method beside the registered ones (LeetDecoding, listing 1); returns run's report.

    method: a function of (query, key, value, log_decay), see the head of this module. name: in the table; default: the
    function's own. batch_size, heads (None: as many as gamma has values, else 8), kv_heads (None: heads), rank, dim: B, H, Hkv,
    R, Dv. tokens: N, or several. others: names to compare with; None: all of the operator's. quiet: print nothing. The rest as
    in run. The method is not registered for good; register_method does that.
    is_weight_decay: LeetDecoding's way to choose the mask, in place of log_decay. The method is then a function of (query, key,
    value, gamma) and gets gamma as it is given, on the device; without decay None. See causal_linear_decoder for gamma.
    Raises ValueError for gamma without is_weight_decay, for is_weight_decay beside log_decay or with another operator.

    Example:
        import torch
        from leanfleet.bench import benchmark_method

        def masked_scores(query, key, value, log_decay):
            return (query @ key.mT).tril() @ value

        benchmark_method(masked_scores, log_decay="none", tokens=64, others=["auto"], seconds=0.05)
    """
    name = name or str(getattr(method, "__name__", "method"))
    values = gamma.numel() if isinstance(gamma, torch.Tensor) else 1
    heads = heads or (values if values > 1 else 8)
    if is_weight_decay is not None or gamma is not None:
        if is_weight_decay is None or operator != "causal_linear_decay" or log_decay != "head":
            raise ValueError(
                "benchmark_method: gamma and is_weight_decay are given together, for causal_linear_decay, in place of log_decay"
            )
        log_decay = _log_of_gamma("benchmark_method", gamma, kv_heads or heads, "cpu") if is_weight_decay else "none"
        method = _of_gamma(method, gamma if is_weight_decay else None, device)
    key = operator, _normal(name)
    before = _methods.get(key)
    register_method(name, method, operator=operator)
    shapes = [
        Shape(batch_size, heads, kv_heads or heads, n, rank, dim) for n in ([tokens] if isinstance(tokens, int) else tokens)
    ]
    names = [name, *(n for n in (methods(operator) if others is None else others) if _normal(n) != key[1])]
    try:
        return run(
            shapes, names, operator, device, dtype, log_decay, grad, seconds, rtol, on_case=None if quiet else print_case
        )
    finally:
        if before is None:
            del _methods[key]
        else:
            _methods[key] = before


# Output


def print_case(rows: list[Row]) -> None:
    """Prints the rows of one shape: milliseconds (median and spread), times the fastest, and the error."""
    print(f"\n{Shape(**rows[0]['shape'])}")
    best = min((r["seconds"] for r in rows if r["status"] == "ok"), default=None)
    table = [("method", "ms", "+-", "x best", "error", "")]
    for row in rows:
        numbers = ("", "", "", _number(row["error"]) if row["status"] == "wrong" else "")
        if row["status"] == "ok":
            numbers = (
                f"{row['seconds'] * 1e3:.3f}",
                f"{row['spread'] * 1e3:.3f}",
                f"{row['seconds'] / best:.2f}",
                f"{row['error']:.1e}",
            )
        table.append((row["method"], *numbers, "" if row["status"] == "ok" else f"{row['status']}: {row['reason']}"))
    print_table(table, right=(1, 2, 3, 4))


def write_json(report: dict[str, Any], path: str | Path) -> None:
    """Writes run's report to a file. Raises OSError where that cannot be."""
    with new_file(path) as new:
        new.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")


def check_plot(path: str | Path) -> None:
    """Raises ImportError without matplotlib, ValueError for a kind of picture that it does not write, and OSError for a path
    that cannot be written."""
    import matplotlib  # noqa: F401
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if Path(path).suffix[1:].lower() not in kinds:
        raise ValueError(f"{path} is no kind of picture; matplotlib writes .{', .'.join(kinds)}")
    check_file(path)


def plot(report: dict[str, Any], path: str | Path) -> None:
    """Draws run's report: milliseconds over tokens, both logarithmic, a line for each method, a panel for each set of the
    other sizes. path ends in what matplotlib writes: .png, .pdf, .svg. Raises what check_plot raises, and ValueError where
    nothing was timed.
    """
    check_plot(path)
    timed = [row for row in report["rows"] if row["status"] == "ok"]
    if not timed:
        raise ValueError("there is nothing to plot: no method was timed")
    panels: dict[tuple[int, ...], list[Row]] = {}
    for row in timed:
        sizes = {key: n for key, n in row["shape"].items() if key != "tokens"}
        panels.setdefault(tuple(sizes.values()), []).append(row)
    names = list(dict.fromkeys(row["method"] for row in timed))
    settings = report["settings"]
    largest = max(timed, key=lambda row: math.prod(row["shape"].values()))["shape"]
    first = min((row for row in timed if row["shape"] == largest), key=lambda row: row["seconds"])
    title = f"On {Shape(**largest)} {first['method']} is the fastest: {first['seconds'] * 1e3:.3g} ms"
    note = (
        f"{settings['operator']}, {settings['dtype']}, {'forward and backward' if settings['grad'] else 'forward'}, "
        f"{report['machine']['device']}; bars: spread of the samples."
    )
    with new_file(path) as new, plotting.page(new, title, note, len(panels) * max(3, 0.2 * len(names) + 1)) as figure:
        for axes, rows in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels.values(), strict=True):
            _panel(axes, rows, names)


def _panel(axes, rows, names):
    """Draws the rows of one set of sizes; names: all methods of the report, so that each looks the same in every panel."""
    series = {
        name: sorted((r["shape"]["tokens"], r["seconds"] * 1e3, r["spread"] * 1e3) for r in rows if r["method"] == name)
        for name in names
    }
    for points in series.values():
        for x, y, spread in points:
            axes.errorbar(x, y, yerr=min(spread, 0.9 * y), color=plotting.MUTED, linewidth=1)
    plotting.lines(axes, {name: [point[:2] for point in points] for name, points in series.items()})
    plotting.token_axis(axes, [row["shape"]["tokens"] for row in rows])
    plotting.log_axis(axes.yaxis, [y for points in series.values() for _, y, _ in points], " ms")
    axes.set_title(str(Shape(**{**rows[0]["shape"], "tokens": 0})).replace(" N0", ""))


def parse_shape(text: str) -> Shape:
    """Shape of BxHxNxRxD or BxH/HkvxNxRxD, such as 1x32/8x4096x128x128. Raises ValueError."""
    parts = text.split("x")
    try:
        heads, _, kv_heads = parts[1].partition("/")
        batch, tokens, rank, dim = (int(parts[i]) for i in (0, 2, 3, 4))
        shape = Shape(batch, int(heads), int(kv_heads or heads), tokens, rank, dim)
        good = len(parts) == 5 and min(asdict(shape).values()) > 0 and shape.heads % shape.kv_heads == 0
    except (IndexError, ValueError):
        good = False
    if not good:
        raise ValueError(
            f"shape {text!r} is not BxHxNxRxD or BxH/HkvxNxRxD, such as 1x32/8x4096x128x128, with positive "
            "numbers and H a multiple of Hkv"
        )
    return shape


def load_file(path: str | Path) -> ModuleType:
    """Runs a Python file that registers methods. Raises FileNotFoundError, ValueError for another file, and what the file
    raises."""
    import importlib.util

    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist; give a Python file that calls leanfleet.bench.register_method")
    found = importlib.util.spec_from_file_location(Path(path).stem, path)
    if found is None or found.loader is None:
        raise ValueError(f"{path} is no Python file: its name does not end in .py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module
