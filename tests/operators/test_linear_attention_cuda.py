"""The CUDA kernels of CausalLinearDecay, NormalizedLinearAttention and their gradients against the float64 reference."""

import functools
import gc
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leanfleet import spec
from leanfleet.export import reference
from support import non_finite
from support.kernels import Launches, run_kernel
from support.linear_cases import LINEAR, PACKED_CASES, SHARED_HEADS, coefficient_terms, fill

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ALGORITHMS = ("causal_dot_product", "fleet", "lightning", "auto")
KEY_ALGORITHMS = ("causal_dot_product", "auto")  # with decays of key dimensions
STEP = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
EDGES = (1, 2, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 130)


def same_bits(a, b):
    views = {4: torch.int32, 2: torch.int16}
    return torch.equal(a.contiguous().view(views[a.element_size()]), b.contiguous().view(views[b.element_size()]))


def relative(found, judge, least=0.0):
    """Distance of all elements relative to the judge's size, or to `least` a element where that is more.

    Infinite where one is finite and the other not.
    """
    found, judge = found.double(), judge.double()
    finite = judge.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return math.inf
    size = judge[finite].norm().item() if finite.any() else 0.0
    size = max(size, least * finite.sum().item() ** 0.5)
    return (found - judge)[finite].norm().item() / size if size else found[finite].abs().max().item() if finite.any() else 0.0


def judged(op_name, inputs, attrs):
    """(float64 reference, errors of a straightforward implementation in the tensors' own type), by output.

    float32: the plain loop over tokens, or the chunked form for the operators that have none. 16 bits: the chunked form with
    everything, the states too, rounded to the type.
    """
    function = getattr(reference, spec.all_specs()[op_name].snake_name)
    double = {n: t.double() if t is not None and t.is_floating_point() else t for n, t in inputs.items()}
    own = dict(attrs, algorithm="lightning") if op_name == "CausalLinearDecay" else attrs
    judge = [t for t in function(**double, **own) if t is not None]
    dtype = inputs["query"].dtype
    if dtype == torch.float32 and op_name == "CausalLinearDecay":
        own = dict(attrs, algorithm="recursion")
    plain = [t for t in function(**inputs, **own, compute_dtype=dtype) if t is not None]
    return judge, [relative(p, j, least(op_name, inputs)) if p.is_floating_point() else 0.0 for p, j in zip(plain, judge)]


def least(op_name, inputs):
    """What a gradient's elements are at least taken to be: sums that cancel are as exact as their terms are."""
    if not op_name.endswith("Grad"):
        return 0.0
    tokens = inputs["query"].numel() / inputs["query"].shape[0] / inputs["query"].shape[-1]
    return 1.0 if op_name == "CausalLinearDecayGrad" else 0.1 / tokens


def summed_terms(inputs, attrs, judge):
    """The root mean square size of the sums that a gradient of log_decay is made of, [its elements].

    It is a sum over tokens of t (q_t · dq_t - k_t · dk_t) or, for each token, over the later ones without t: terms that may
    be hundreds of times as large as the sum, each as exact as the type.
    """

    def rows(x):
        return x.double() if attrs["layout"] == "bhnd" else x.double().transpose(1, 2)

    states = rows(inputs["value"]).shape[1]
    q, dq = (x.repeat_interleave(max(1, states // x.shape[1]), 1) for x in (rows(inputs["query"]), rows(judge[0])))
    k, dk = (x.repeat_interleave(states // x.shape[1], 1) for x in (rows(inputs["key"]), rows(judge[1])))
    group = q.shape[1] // k.shape[1]
    squares = (q * dq).sum(-1).square().unflatten(1, (-1, group)).sum(2) + (k * dk).sum(-1).square()  # [B,Hkv,N]
    if inputs["log_decay"].dim() == 1:
        t = torch.arange(1, k.shape[2] + 1, device=k.device)
        return (squares * t**2).sum((0, 2)).sqrt()
    return squares.flip(2).cumsum(2).sqrt()


def cancelling_parts(inputs, attrs):
    """Norms of b rho_i sum of k and b sum of rho_i q_i, which gradients of NormalizedLinearAttention's query and key subtract:
    of a request of one token all that there is, as its output does not depend on query and key."""

    def rows(name):
        x = inputs[name].double()
        return x if attrs["layout"] == "bhnd" else x.transpose(1, 2)

    q, k, output, g, grad = (rows(n) for n in ("query", "key", "output", "normalizer", "grad_output"))
    sizes = [x.norm(dim=-1, keepdim=True).clamp_min(attrs["eps"]) if attrs["normalize_qk"] else 1.0 for x in (q, k)]
    b = 1.0 if inputs["coefficients"] is None else inputs["coefficients"][1].item()
    group = q.shape[1] // k.shape[1]
    rho = ((output * grad).sum(-1) / g).unsqueeze(-1)
    keys, queries = (k / sizes[1]).repeat_interleave(group, 1), rho * q / sizes[0]
    if attrs["causal"]:
        keys, queries = keys.cumsum(2), queries.flip(2).cumsum(2)
    else:
        keys, queries = (x.sum(2, keepdim=True).expand_as(x) for x in (keys, queries))
    parts = rho * keys / sizes[0], queries.flip(2).unflatten(1, (-1, group)).sum(2) / sizes[1]
    return {n: abs(b) * x.norm().item() for n, x in zip(("grad_query", "grad_key"), parts, strict=True)}


def check(op_name, inputs, attrs, in_place=False):
    """Runs the kernel and compares every output; returns the outputs."""
    judge, baseline = judged(op_name, inputs, attrs)
    before = {n: t.clone() if t is not None else None for n, t in inputs.items()}
    found = run_kernel(
        op_name,
        inputs if not in_place else {n: t.clone() if t is not None else None for n, t in inputs.items()},
        attrs,
        in_place=in_place,
    )
    step = STEP[inputs["query"].dtype]
    for (name, value), exact, error in zip(found.items(), judge, baseline, strict=True):
        if not value.is_floating_point():
            assert torch.equal(value, exact.to(value.dtype)), name
            continue
        # The plain implementation may itself overflow; then only what is right counts: a few roundings.
        allowed = 2 * min(error, 0.1) + 4 * step
        found_error = relative(value, exact, least(op_name, inputs))
        # Gradients of decays and coefficients are few numbers, each a sum of many terms that cancel.
        if name == "grad_coefficients":
            allowed += 8 * step * coefficient_terms(inputs, attrs) / max(exact.norm().item(), least(op_name, inputs))
        if name == "grad_log_decay":
            size = max(exact[exact.isfinite()].norm().item(), least(op_name, inputs) * exact.numel() ** 0.5)
            allowed += 2 * step * summed_terms(inputs, attrs, judge).norm().item() / size
        if op_name == "NormalizedLinearAttentionGrad" and name in ("grad_query", "grad_key"):
            size = max(exact[exact.isfinite()].norm().item(), least(op_name, inputs) * exact.numel() ** 0.5)
            allowed += 4 * step * max(0.0, cancelling_parts(inputs, attrs)[name] / size - 1)
        assert found_error <= allowed, (
            f"{op_name} {name}: error {found_error:.2e}, allowed {allowed:.2e}, "
            f"{attrs}, " + ", ".join(f"{n}{list(t.shape)}" for n, t in inputs.items() if t is not None)
        )
    if not in_place:
        assert all(t is None or same_bits(t, inputs[n]) for n, t in before.items()), "an input was changed"
    return found


def decay_case(
    seed,
    dtype=torch.float32,
    B=2,
    H=4,
    Hkv=2,
    N=65,
    R=32,
    Dv=64,
    layout="bhnd",
    decay="head",
    state=True,
    normalize=False,
    packed=(),
    pool=0,
    grad=False,
    heads=None,
    beta=False,
    **attrs,
):
    """(inputs, attrs) of CausalLinearDecay or its Grad. packed: lengths of the requests; pool: rows beyond those in use; heads: Hq,
    Hk, Hv in place of H and Hkv."""
    g = torch.Generator(device="cuda").manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=g, device="cuda")

    def rows(heads, width):
        return random(B, heads, N, width) if layout == "bhnd" else random(B, N, heads, width)

    if packed:
        B, N = 1, sum(packed)
    queries, keys, Hkv = heads or (H, Hkv, Hkv)
    H = max(queries, Hkv)
    query, key, value = rows(queries, R), rows(keys, R) / R**0.5, rows(Hkv, Dv)
    if normalize:  # positive scores keep the divisor away from 0
        query, key = query.abs() + 0.1, key.abs() + 0.1
    inputs = {
        "query": query.to(dtype),
        "key": key.to(dtype),
        "value": value.to(dtype),
        "log_decay": None,
        "initial_state": None,
        "cu_seqlens": None,
    }
    token_shape = (B, Hkv, N) if layout == "bhnd" else (B, N, Hkv)
    if decay == "head":
        inputs["log_decay"] = -torch.rand(Hkv, generator=g, device="cuda") * 0.3
    elif decay == "token":
        inputs["log_decay"] = -(torch.rand(token_shape, generator=g, device="cuda") ** 3)
    elif decay == "wild":  # none, tiny, and complete forgetting
        kinds = torch.tensor([0.0, -1e-5, -0.5, -40.0, -1e4, -math.inf], device="cuda")
        inputs["log_decay"] = kinds[torch.randint(0, 6, token_shape, generator=g, device="cuda")]
    requests = len(packed) or B
    if packed:
        inputs["cu_seqlens"] = torch.tensor([0, *packed]).cumsum(0).int().cuda()
    if state:
        inputs["initial_state"] = random(requests + pool, Hkv, R, Dv)
    if not grad:
        inputs |= {"initial_norm": None, "state_index": None}
        if normalize and state:
            inputs["initial_norm"] = random(requests + pool, Hkv, R).abs()
        if pool and state:
            inputs["state_index"] = torch.randperm(requests + pool, generator=g, device="cuda")[:requests].int()
        if beta:
            inputs["beta"] = 2 * torch.rand(token_shape, generator=g, device="cuda")
        attrs = {"return_state": 1, "normalize": int(normalize), "eps": 1e-6, "layout": layout, **attrs}
    else:
        inputs |= {"grad_output": rows(H, Dv).to(dtype), "grad_final_state": random(requests, Hkv, R, Dv) if state else None}
        attrs = {"grad_decay": int(decay != "none"), "grad_state": int(state), "layout": layout, **attrs}
    return inputs, attrs


def normalized_case(
    seed,
    dtype=torch.float32,
    B=2,
    H=4,
    Hkv=2,
    N=65,
    D=64,
    Dv=64,
    layout="bhnd",
    causal=1,
    state=False,
    coefficients=False,
    normalize_qk=1,
    grad=False,
    grad_coefficients=True,
):
    g = torch.Generator(device="cuda").manual_seed(seed)

    def rows(heads, width):
        shape = (B, heads, N, width) if layout == "bhnd" else (B, N, heads, width)
        return torch.randn(shape, generator=g, device="cuda")

    query, key, value = rows(H, D), rows(Hkv, D), rows(Hkv, Dv)
    if not normalize_qk:
        query, key = query.abs() / D**0.5, key.abs() / D**0.5
    inputs = {
        "query": query.to(dtype),
        "key": key.to(dtype),
        "value": value.to(dtype),
        "coefficients": torch.tensor([1.3, 0.8], device="cuda") if coefficients else None,
    }
    attrs = {"causal": causal, "normalize_qk": normalize_qk, "layout": layout, "eps": 1e-6}
    if grad:
        output, normalizer = run_kernel("NormalizedLinearAttention", inputs, attrs).values()
        inputs |= {"output": output, "normalizer": normalizer, "grad_output": rows(H, Dv).to(dtype)}
        return inputs, attrs | {"grad_coefficients": int(grad_coefficients)}
    names = ("initial_state", "initial_key_sum", "initial_value_sum", "initial_count")
    inputs |= dict.fromkeys(names)
    if state:
        shapes = ((B, Hkv, D, Dv), (B, Hkv, D), (B, Hkv, Dv))
        inputs |= {n: torch.rand(s, generator=g, device="cuda") for n, s in zip(names, shapes)}
        inputs["initial_count"] = torch.arange(7, 7 + B, dtype=torch.int32, device="cuda")
        attrs["return_state"] = 1
    return inputs, attrs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_lengths(algorithm, dtype):
    for N in EDGES:
        inputs, attrs = decay_case(N, dtype, N=N, algorithm=algorithm, decay=("head", "token", "none")[N % 3])
        check("CausalLinearDecay", inputs, attrs, in_place=N % 2 == 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_beta(algorithm, dtype):
    """Steps, few and many tokens, ranks of every kernel, packed requests of a pool, normalised, keys that states share."""
    for N, R, decay in (
        (1, 64, "token"),
        (7, 40, "head"),
        (83, 8, "none"),
        (300, 64, "token"),
        (1100, 128, "token"),
        (40, 192, "wild"),
    ):
        inputs, attrs = decay_case(
            N, dtype, N=N, R=R, Dv=64, decay=decay, algorithm=algorithm, beta=True, heads=(4, 2, 8), layout="bnhd"
        )
        check("CausalLinearDecay", inputs, attrs, in_place=N % 2 == 1)
        check("CausalLinearDecay", *decay_case(N, dtype, N=N, R=R, decay=decay, algorithm=algorithm, beta=True, normalize=True))
    check("CausalLinearDecay", *decay_case(3, dtype, packed=(1, 70, 0, 9), pool=2, algorithm=algorithm, beta=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "R, Dv",
    (
        (1, 8),
        (4, 16),
        (8, 128),
        (16, 20),
        (32, 96),
        (33, 7),
        (64, 64),
        (96, 256),
        (128, 128),
        (192, 64),
        (256, 96),
        (300, 24),
        (512, 32),
    ),
)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_widths(algorithm, R, Dv, dtype):
    inputs, attrs = decay_case(R + Dv, dtype, N=83, R=R, Dv=Dv, algorithm=algorithm, layout="bnhd")
    check("CausalLinearDecay", inputs, attrs)
    inputs, attrs = decay_case(R + Dv, dtype, N=83, R=R, Dv=Dv, algorithm=algorithm, normalize=True, H=6)
    if algorithm == "lightning" and R > 256:
        with pytest.raises(NotImplementedError, match="R = .* normalize is 1; on CUDA lightning takes R up to 256.*Use auto"):
            run_kernel("CausalLinearDecay", inputs, attrs)
    else:
        check("CausalLinearDecay", inputs, attrs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("R, Dv", ((136, 72), (192, 128), (256, 512), (500, 40)))
def test_wide_keys_of_several_segments(R, Dv, dtype):
    """Keys in parts whose outputs add up, over tokens in segments; states in place, and of packed requests in a pool."""
    inputs, attrs = decay_case(R, dtype, B=1, H=2, Hkv=1, N=1100, R=R, Dv=Dv, algorithm="lightning", layout="bnhd")
    check("CausalLinearDecay", inputs, attrs)
    first = check("CausalLinearDecay", inputs, attrs, in_place=True)
    again = run_kernel("CausalLinearDecay", inputs, attrs)
    assert all(same_bits(first[n], t) for n, t in again.items())
    inputs, attrs = decay_case(R, dtype, H=2, Hkv=2, packed=(600, 3, 700), pool=2, R=R, Dv=Dv, algorithm="lightning")
    inputs["cu_seqlens"][0], inputs["cu_seqlens"][3] = 7, 1290  # tokens of no request
    check("CausalLinearDecay", inputs, attrs)
    for decay in ("head", "none"):  # with and without grad_decay
        check("CausalLinearDecayGrad", *decay_case(R, dtype, B=1, H=2, Hkv=2, N=1100, R=R, Dv=Dv, grad=True, decay=decay))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("R, Dv", ((136, 72), (200, 256), (255, 64), (256, 192)))
def test_row_sums_of_wide_keys(R, Dv, dtype):
    """They are found before the halves of the keys are scanned: states in place, shared heads, of one or many segments."""
    for N, H, Hkv, unit in ((5, 2, 2, 1), (65, 4, 2, 0), (1100, 2, 2, 1), (3000, 6, 2, 1), (9000, 2, 1, 1)):
        for state in (False, True):
            case = dict(N=N, H=H, Hkv=Hkv, D=R, Dv=Dv, coefficients=True, normalize_qk=unit, layout=("bhnd", "bnhd")[N % 2])
            inputs, attrs = normalized_case(N, dtype, state=state, **case)
            first = check("NormalizedLinearAttention", inputs, attrs, in_place=state)
            again = run_kernel("NormalizedLinearAttention", inputs, attrs)
            assert all(same_bits(first[n], t) for n, t in again.items())
            check("NormalizedLinearAttentionGrad", *normalized_case(N, dtype, grad=True, grad_coefficients=state, **case))
    if dtype == torch.float32:
        return
    # Signed scores whose halves cancel are not split: the first token's output is its value.
    inputs, attrs = decay_case(1, dtype, N=70, R=R, Dv=Dv, algorithm="lightning", decay="none", state=False)
    inputs |= {n: torch.randn_like(inputs[n]) for n in ("query", "key")}
    first = run_kernel("CausalLinearDecay", inputs, {**attrs, "normalize": 1, "eps": 1e-6})["output"][:, :, 0]
    values = inputs["value"][:, :, 0].repeat_interleave(2, 1)
    torch.testing.assert_close(first, values, rtol=4 * STEP[dtype], atol=0)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_more_heads_than_multiprocessors(dtype):
    """Those of 64 columns then share multiprocessors."""
    B = torch.cuda.get_device_properties(0).multi_processor_count // 4 + 1
    for N, R, decay in ((1, 64, "head"), (64, 64, "none"), (130, 64, "token"), (200, 64, "wild"), (300, 40, "head")):
        for Hkv in (2, 4):
            case = dict(B=B, N=N, Hkv=Hkv, R=R, decay=decay)
            check("CausalLinearDecay", *decay_case(N, dtype, algorithm="lightning", **case))
            check("CausalLinearDecayGrad", *decay_case(N, dtype, grad=True, **case))
    for decay in ("head", "token"):
        case = dict(packed=(5, 0, 64, 1, 130), H=4 * B, Hkv=2 * B, R=64, decay=decay)
        check("CausalLinearDecay", *decay_case(5, dtype, pool=3, algorithm="lightning", **case))
        check("CausalLinearDecayGrad", *decay_case(5, dtype, grad=True, **case))
    inputs, attrs = decay_case(7, dtype, B=B, N=200, R=64, algorithm="lightning", state=False)
    clean = run_kernel("CausalLinearDecay", inputs, attrs)["output"]
    inputs["value"][0, 0, 100, 5] = math.inf  # reaches its own column, from its token on
    found = run_kernel("CausalLinearDecay", inputs, attrs)["output"]
    seen = torch.zeros(found.shape, dtype=torch.bool, device="cuda")
    seen[0, :2, 100:, 5] = True
    assert torch.equal(found[~seen], clean[~seen]) and not found[seen].isfinite().any()


def test_gradient_of_very_wide_keys():
    for R, Dv in ((2816, 8), (1100, 1024)):
        check("CausalLinearDecayGrad", *decay_case(1, B=1, H=1, Hkv=1, N=70, R=R, Dv=Dv, grad=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_decays(algorithm, dtype):
    """Every kind of decay in one request, per head from 1 to 0, and spans that overflow naive code."""
    check("CausalLinearDecay", *decay_case(1, dtype, N=300, decay="wild", algorithm=algorithm))
    for log_decay in (0.0, -1e-7, -0.01, -0.7, -5.0, -87.0, -200.0, -1e30, -math.inf):
        inputs, attrs = decay_case(2, dtype, N=150, algorithm=algorithm)
        inputs["log_decay"] = torch.tensor([log_decay, -0.1], device="cuda")
        check("CausalLinearDecay", inputs, attrs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_packed_requests_and_pools(algorithm, dtype):
    for packed in ((5, 0, 64, 1, 130), (0, 0, 3), (1,) * 9, (257,)):
        for pool in (0, 3):
            inputs, attrs = decay_case(len(packed), dtype, packed=packed, pool=pool, algorithm=algorithm)
            check("CausalLinearDecay", inputs, attrs)
            check("CausalLinearDecay", inputs, attrs, in_place=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", SHARED_HEADS, ids=str)
def test_shared_heads(heads, dtype):
    """Every kernel and its segments, for keys and queries that states share, and gradients of these."""
    for R, Dv in ((128, 64), (64, 128), (16, 64), (8, 20), (40, 33), (200, 64)):
        for N in (1, 3, 65, 1100):
            for algorithm in ALGORITHMS:
                layout = ("bhnd", "bnhd")[N % 2]
                inputs, attrs = decay_case(
                    N, dtype, 1, N=N, R=R, Dv=Dv, decay="token", layout=layout, heads=heads, algorithm=algorithm
                )
                check("CausalLinearDecay", inputs, attrs, in_place=N != 65)
            inputs, attrs = decay_case(
                N, dtype, 1, N=N, R=R, Dv=Dv, decay="token", state=True, layout=layout, heads=heads, grad=True
            )
            check("CausalLinearDecayGrad", inputs, attrs)
    for packed in ((5, 0, 64, 1, 130), (1,) * 9):
        for algorithm in ALGORITHMS:
            inputs, attrs = decay_case(7, dtype, packed=packed, pool=3, normalize=True, heads=heads, algorithm=algorithm)
            check("CausalLinearDecay", inputs, attrs)
        inputs, attrs = decay_case(7, dtype, packed=packed, state=True, decay="head", heads=heads, grad=True)
        check("CausalLinearDecayGrad", inputs, attrs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("algorithm", ("causal_dot_product", "lightning"))
def test_shared_heads_are_those_repeated(algorithm, dtype):
    """Mamba-2's shape, to the bit."""
    for N in (1, 4, 700):
        inputs, attrs = decay_case(N, dtype, 1, N=N, R=128, Dv=64, decay="token", heads=(8, 8, 128), algorithm=algorithm)
        wide = inputs | {name: inputs[name].repeat_interleave(16, 1) for name in ("query", "key")}
        ours, theirs = (run_kernel("CausalLinearDecay", x, attrs) for x in (inputs, wide))
        assert all(same_bits(ours[name], theirs[name]) for name in ours), N


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_offsets_that_leave_tokens_out_or_are_garbage(algorithm):
    for offsets in ((3, 20, 50), (-7, 20, 1000), (50, 20, 65), (2**31 - 1, -(2**31), 5)):
        inputs, attrs = decay_case(1, packed=(30, 35), algorithm=algorithm)
        inputs["cu_seqlens"] = torch.tensor(offsets, dtype=torch.int32, device="cuda")
        if all(a <= b for a, b in zip(offsets, offsets[1:])):
            check("CausalLinearDecay", inputs, attrs)
        else:  # overlapping requests have no meaning; nothing outside may be touched
            run_kernel("CausalLinearDecay", inputs, attrs)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rows_outside_the_pool(algorithm):
    inputs, attrs = decay_case(1, B=3, pool=2, algorithm=algorithm)
    inputs["state_index"] = torch.tensor([4, -1, 5], dtype=torch.int32, device="cuda")
    check("CausalLinearDecay", inputs, attrs)
    check("CausalLinearDecay", inputs, attrs, in_place=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_split_and_carry_equals_one_call(algorithm, dtype):
    for cuts in ((1,), (64,), (16, 17, 90), (130,), (199,)):
        inputs, attrs = decay_case(4, dtype, N=200, algorithm=algorithm, state=False, decay="token")
        whole = check("CausalLinearDecay", inputs, attrs)
        state, outputs = None, []
        for a, b in zip((0, *cuts), (*cuts, 200)):
            piece = {
                n: t[:, :, a:b].contiguous() if n in ("query", "key", "value", "log_decay") else t for n, t in inputs.items()
            }
            part = run_kernel("CausalLinearDecay", {**piece, "initial_state": state}, attrs)
            state = part["final_state"]
            outputs.append(part["output"])
        exact = judged("CausalLinearDecay", inputs, attrs)[0]
        assert relative(torch.cat(outputs, 2), exact[0]) <= 2 * relative(whole["output"], exact[0]) + STEP[dtype]
        assert relative(state, exact[1]) <= 2 * relative(whole["final_state"], exact[1]) + STEP[dtype]


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("algorithm", ("lightning", "causal_dot_product", "fleet"))
def test_accuracy_of_16_bit_types(algorithm, dtype):
    """At most 1.2 times the error of chunks whose products take rounded factors and whose state stays in float32."""
    for N, log_decay in ((2048, -0.001), (2048, -0.1), (1000, 0.0)):
        inputs, attrs = decay_case(7, dtype, B=1, N=N, R=128, Dv=128, state=False, algorithm=algorithm)
        inputs["log_decay"] = torch.full((2,), log_decay, device="cuda")
        exact = judged("CausalLinearDecay", inputs, attrs)[0][0]
        q, k, v = (inputs[n].repeat_interleave(4 // inputs[n].shape[1], 1).float() for n in ("query", "key", "value"))
        state, outputs, chunk = torch.zeros(1, 4, 128, 128, device="cuda"), [], 64
        for a in range(0, N, chunk):
            qc, kc, vc = (t[:, :, a : a + chunk] for t in (q, k, v))
            m = qc.shape[2]
            at = torch.arange(m, device="cuda", dtype=torch.float32)
            mask = ((at[:, None] - at) * log_decay).exp().tril()
            scores = (qc @ kc.mT * mask).to(dtype).float()
            outputs.append(scores @ vc + ((at + 1) * log_decay).exp()[:, None] * (qc @ state.to(dtype).float()))
            weighted = (vc * ((m - 1 - at) * log_decay).exp()[:, None]).to(dtype).float()
            state = math.exp(m * log_decay) * state + kc.mT @ weighted
        baseline = relative(torch.cat(outputs, 2).to(dtype), exact)
        found = run_kernel("CausalLinearDecay", inputs, attrs)
        assert relative(found["output"], exact) <= 1.2 * baseline, (relative(found["output"], exact), baseline)


@pytest.mark.parametrize("algorithm", ("lightning", "causal_dot_product", "fleet"))
def test_accuracy_of_float32(algorithm):
    """At most twice the error of the sequential loop."""
    for N, log_decay in ((4096, -0.001), (1000, -0.1), (2000, 0.0)):
        inputs, attrs = decay_case(7, B=1, N=N, R=64, Dv=64, state=False, algorithm=algorithm)
        inputs["log_decay"] = torch.full((2,), log_decay, device="cuda")
        judge, plain = judged("CausalLinearDecay", inputs, attrs)
        found = run_kernel("CausalLinearDecay", inputs, attrs)
        for value, exact, baseline in zip(found.values(), judge, plain):
            assert relative(value, exact) <= 2 * baseline, (N, log_decay, relative(value, exact), baseline)


@settings(max_examples=250, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_call(data):
    draw = data.draw
    Hkv, group = draw(st.integers(1, 3)), draw(st.sampled_from((1, 2, 3, 5, 7)))
    width = st.one_of(st.sampled_from((8, 16, 32, 64, 96, 128, 192, 256)), st.integers(1, 260))
    packed = draw(st.one_of(st.just(()), st.lists(st.integers(0, 200), min_size=1, max_size=6).filter(sum)))
    state = draw(st.booleans())
    inputs, attrs = decay_case(
        draw(st.integers(0, 2**20)),
        draw(st.sampled_from(DTYPES)),
        draw(st.integers(1, 3)),
        Hkv * group,
        Hkv,
        draw(st.one_of(st.integers(1, 700), st.sampled_from(EDGES))),
        draw(width),
        draw(width),
        draw(st.sampled_from(("bhnd", "bnhd"))),
        draw(st.sampled_from(("none", "head", "token", "wild"))),
        state,
        draw(st.booleans()),
        tuple(packed),
        draw(st.sampled_from((0, 2))) if state else 0,
        algorithm=draw(st.sampled_from(ALGORITHMS)),
        scale=draw(st.sampled_from((1.0, 0.3))),
    )
    check("CausalLinearDecay", inputs, attrs, draw(st.booleans()))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_gradient(data):
    draw = data.draw
    Hkv, group = draw(st.integers(1, 3)), draw(st.sampled_from((1, 2, 3, 5)))
    width = st.one_of(st.sampled_from((8, 16, 32, 64, 96, 128, 192, 256)), st.integers(1, 260))
    packed = draw(st.one_of(st.just(()), st.lists(st.integers(0, 200), min_size=1, max_size=6).filter(sum)))
    inputs, attrs = decay_case(
        draw(st.integers(0, 2**20)),
        draw(st.sampled_from(DTYPES)),
        draw(st.integers(1, 3)),
        Hkv * group,
        Hkv,
        draw(st.one_of(st.integers(1, 700), st.sampled_from(EDGES))),
        draw(width),
        draw(width),
        draw(st.sampled_from(("bhnd", "bnhd"))),
        draw(st.sampled_from(("none", "head", "token", "wild"))),
        draw(st.booleans()),
        False,
        tuple(packed),
        grad=True,
        scale=draw(st.sampled_from((1.0, 0.3))),
    )
    check("CausalLinearDecayGrad", inputs, attrs)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_normalized(data):
    draw = data.draw
    Hkv, group = draw(st.integers(1, 3)), draw(st.sampled_from((1, 2, 3, 5)))
    # From 2: rows of one element, made unit rows, are +-1, and normalisers 1 - 1, which is nothing but roundings.
    width = st.one_of(st.sampled_from((8, 32, 64, 96, 128, 192, 256)), st.integers(2, 256))
    causal, grad = draw(st.integers(0, 1)), draw(st.booleans())
    inputs, attrs = normalized_case(
        draw(st.integers(0, 2**20)),
        draw(st.sampled_from(DTYPES)),
        draw(st.integers(1, 3)),
        Hkv * group,
        Hkv,
        draw(st.one_of(st.integers(1, 700), st.sampled_from(EDGES))),
        draw(width),
        draw(width),
        draw(st.sampled_from(("bhnd", "bnhd"))),
        causal,
        bool(causal) and not grad and draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(0, 1)),
        grad,
        draw(st.booleans()),
    )
    check("NormalizedLinearAttention" + "Grad" * grad, inputs, attrs)


@pytest.mark.parametrize("causal", (0, 1))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_chunks_a_block(dtype, causal):
    """More heads than multiprocessors: a block walks through all chunks of its head, and through its buffers many times."""
    check("NormalizedLinearAttention", *normalized_case(8, dtype, B=17, H=8, Hkv=8, N=900, D=128, Dv=128, causal=causal))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_normalized_prompt_and_then_token_by_token(dtype):
    inputs, attrs = normalized_case(3, dtype, N=100, D=128, Dv=64, state=True)
    whole = check("NormalizedLinearAttention", inputs, attrs)
    exact = judged("NormalizedLinearAttention", inputs, attrs)[0][0]
    names = ("state", "key_sum", "value_sum", "count")
    sums, outputs = {n: inputs[f"initial_{n}"].clone() for n in names}, []
    for a, b in ((0, 70), *((i, i + 1) for i in range(70, 100))):
        piece = {n: inputs[n][:, :, a:b].contiguous() for n in ("query", "key", "value")}
        found = run_kernel(
            "NormalizedLinearAttention",
            {**inputs, **piece, **{f"initial_{n}": t for n, t in sums.items()}},
            attrs,
            in_place=b - a == 1,
        )
        outputs.append(found["output"])
        sums = {n: found[f"final_{n}"] for n in names}
    assert relative(torch.cat(outputs, 2), exact) <= 2 * relative(whole["output"], exact) + STEP[dtype]
    assert torch.equal(sums["count"], inputs["initial_count"] + 100)


def every_node():
    yield from (
        (f"CausalLinearDecay {a}", "CausalLinearDecay", *decay_case(1, torch.bfloat16, N=300, R=64, algorithm=a, pool=1))
        for a in ALGORITHMS
    )
    yield "CausalLinearDecay step", "CausalLinearDecay", *decay_case(2, torch.bfloat16, B=9, N=1, R=128, normalize=True)
    yield (
        "CausalLinearDecayGrad",
        "CausalLinearDecayGrad",
        *decay_case(3, torch.bfloat16, N=300, R=64, grad=True, decay="token"),
    )
    yield "NormalizedLinearAttention", "NormalizedLinearAttention", *normalized_case(4, torch.bfloat16, N=300, state=True)
    yield "NormalizedLinearAttention step", "NormalizedLinearAttention", *normalized_case(5, torch.bfloat16, N=1, state=True)
    for wanted in (True, False):
        yield (
            f"NormalizedLinearAttentionGrad {wanted}",
            "NormalizedLinearAttentionGrad",
            *normalized_case(6, torch.bfloat16, N=300, grad=True, grad_coefficients=wanted),
        )


def test_same_bits_each_time():
    for title, name, inputs, attrs in every_node():
        first = run_kernel(name, inputs, attrs)
        for _ in range(5):
            assert all(same_bits(t, first[n]) for n, t in run_kernel(name, inputs, attrs).items()), title


def test_graphs_and_two_streams():
    """Captured launches give the same bits again and again, two nodes at the same time."""
    nodes = list(every_node())
    for title, name, inputs, attrs in nodes:
        expected = run_kernel(name, inputs, attrs)
        pair = [Launches(name, inputs, attrs) for _ in range(2)]
        for node in pair:
            node.run()
        gc.collect()
        graphs = [(torch.cuda.Stream(), node.capture()) for node in pair]
        torch.cuda.synchronize()
        for _ in range(20):
            for stream, graph in graphs:
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()
        for node in pair:
            assert all(same_bits(node.outputs[n], t) for n, t in expected.items()), title
            assert not node.buffers[1].any(), f"{title}: sync words"


def test_long_sequences():
    """A million tokens, and offsets beyond 32 bits."""
    N = 1 << 20
    inputs, attrs = decay_case(1, torch.bfloat16, B=1, H=2, Hkv=2, N=N, R=64, Dv=64, state=False)
    whole = run_kernel("CausalLinearDecay", inputs, attrs)
    head = {n: t[:, :, -20000:].contiguous() if t is not None and t.dim() == 4 else t for n, t in inputs.items()}
    inputs["log_decay"].clamp_(max=-0.01)
    exact = judged("CausalLinearDecay", head, attrs)[0][0][:, :, -64:]
    whole = run_kernel("CausalLinearDecay", inputs, attrs)["output"][:, :, -64:]
    assert relative(whole, exact) < 0.02
    del whole, head
    heads = 34  # 34 heads of a million tokens of 64: more than 2^31 elements
    shape = (1, heads, N, 64)
    query = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    query[:, -1:] = inputs["query"][:, :1]
    key, value = (torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    key[:, -1:], value[:, -1:] = inputs["key"][:, :1], inputs["value"][:, :1]
    big = {"query": query, "key": key, "value": value, "log_decay": inputs["log_decay"][:1].repeat(heads).contiguous()}
    found = run_kernel("CausalLinearDecay", big, {"algorithm": "lightning"})["output"]
    one = {n: inputs[n][:, :1].contiguous() for n in ("query", "key", "value")} | {
        "log_decay": inputs["log_decay"][:1].contiguous()
    }
    expected = run_kernel("CausalLinearDecay", one, {"algorithm": "lightning"})["output"]
    assert relative(found[:, -1, -1000:], expected[:, 0, -1000:]) < 0.01
    assert not found[:, :-1].any()


# Values that are not finite

REFUSED = ("log_decay", "coefficients")  # LEANFLEET_CHECK=1 refuses such values, and CPU kernels always


def non_finite_inputs(case, size, dtype):
    """(operator, inputs on the GPU, attributes) of a case of support/linear_cases.py."""
    name, present, attrs, rank = {**LINEAR, **PACKED_CASES}[case]
    offsets = (0, size[3] // 2, size[3] // 2, size[3] - 3) if "cu_seqlens" in present else None
    if offsets:
        size = (1, *size[1:])
    inputs = fill(name, present, size, attrs, rank, dtype=dtype, offsets=offsets)
    if offsets and "log_decay" in inputs:
        inputs["log_decay"] = inputs["log_decay"].nan_to_num(-0.5, neginf=float("-inf"))
    return name, {n: t.cuda() for n, t in inputs.items()}, attrs


NON_FINITE_SIZES = ((2, 4, 2, 1, 64, 64), (2, 4, 2, 73, 16, 16), (1, 4, 2, 200, 64, 64), (1, 2, 1, 150, 128, 128))


@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
@pytest.mark.parametrize("size", NON_FINITE_SIZES, ids=str)
@pytest.mark.parametrize("case", [*LINEAR, *PACKED_CASES])
def test_values_that_are_not_finite(case, size, dtype):
    """The contract of csrc/ops.toml, for elements of every input and every algorithm."""
    if size[3] == 1 and case in PACKED_CASES:
        return
    name, inputs, attrs = non_finite_inputs(case, size, dtype)
    per_key = "log_decay" in inputs and inputs["log_decay"].dim() == 4
    for algorithm in (None,) if name != "CausalLinearDecay" else KEY_ALGORITHMS if per_key else ALGORITHMS:
        own = {**attrs, "algorithm": algorithm} if algorithm else attrs
        non_finite.sweep(name, inputs, own, functools.partial(run_kernel, name, attrs=own), skip=REFUSED, count=2)


@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
@pytest.mark.parametrize("case", [c for c in (*LINEAR, *PACKED_CASES) if "pool" in c or c in PACKED_CASES])
def test_what_belongs_to_nobody_reaches_nothing(case, dtype):
    """Tokens outside all requests are NaN in fill(); pool rows that no request names hold anything too."""
    name, inputs, attrs = non_finite_inputs(case, (1, 4, 2, 150, 64, 64), dtype)
    results = []
    for value in (math.nan, math.inf, 0.25):
        changed = {n: t.masked_fill(t.isnan(), value) if t.is_floating_point() else t for n, t in inputs.items()}
        unused = []
        if "state_index" in inputs:
            unused = [r for r in range(len(inputs["initial_state"])) if r not in inputs["state_index"].tolist()]
            for n in ("initial_state", "initial_norm"):
                if n in inputs:
                    changed[n] = changed[n].clone()
                    changed[n][unused] = value
        found = run_kernel(name, changed, attrs)
        for n in found:
            if n.startswith("final") and unused:
                found[n][unused] = 0
        results.append(found)
        assert all(same_bits(results[0][n], found[n]) for n in found), value
    assert all(t.isfinite().all() for t in results[0].values())


def test_a_key_of_zeros_and_nan_in_unit_rows():
    """Its norm is NaN, not 0: all of it is."""
    for width in (64, 136):
        inputs = {n: torch.rand(1, 1, 9, width).cuda() for n in ("query", "key", "value")}
        inputs["key"][0, 0, 4] = 0
        inputs["key"][0, 0, 4, 3] = math.nan
        found = run_kernel("NormalizedLinearAttention", inputs, dict(normalize_qk=1, return_state=1))
        assert not found["output"][0, 0, 4:].isfinite().any() and not found["final_state"].isfinite().any()
