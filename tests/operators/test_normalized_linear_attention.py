"""CPU kernels of NormalizedLinearAttention and its gradient against the float64 reference.

The tolerance is what a plain loop over tokens in float32 loses on the same inputs, times 2, plus what rounding the
exact result to the output's type loses, times 1.2; both as root mean squares over the tensor.
"""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leanfleet import native, spec
from leanfleet.export import reference
from support.cpu_time import rest_slow
from support.kernels import DTYPE_NAMES, examples, remembered, run_kernel

FORWARD, BACKWARD = "NormalizedLinearAttention", "NormalizedLinearAttentionGrad"
F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
DTYPES = (F32, F16, BF16)
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 130)
SIZES = ((4, 20), (37, 64), (64, 37), (128, 50), (16, 128))  # D, Dv
HEADS = ((2, 2), (3, 1), (5, 1), (6, 2), (1, 1))  # H, Hkv
COEFFICIENTS = (None, (0.7, 1.3), (1.0, 0.0), (0.5, -0.05), (0.0, 1.0))
STATES = ("initial_state", "initial_key_sum", "initial_value_sum", "initial_count")
ROUNDING = {F32: 2.0**-24, F16: 2.0**-11, BF16: 2.0**-8}
pytestmark = pytest.mark.usefixtures("one_torch_thread", "instruction_set")


def swap(x, layout):
    return x if layout == "bhnd" else x.transpose(1, 2).contiguous()


def cases():
    """Every length, type, causal and normalize_qk, with the other choices in turn (their counts are coprime)."""
    result = []
    for i, (tokens, dtype, causal, unit) in enumerate(product(LENGTHS, DTYPES, (1, 0), (0, 1))):
        result.append(
            pytest.param(
                dict(
                    tokens=tokens,
                    dtype=dtype,
                    size=SIZES[i % 5],
                    heads=HEADS[i // 2 % 5],
                    batch=1 + i // 3 % 2,
                    coefficients=COEFFICIENTS[i // 4 % 5],
                    threads=(1, 2, 5)[i % 3],
                    seed=i,
                ),
                dict(causal=causal, normalize_qk=unit, layout=("bhnd", "bnhd")[i // 7 % 2]),
                id=f"{tokens}-{DTYPE_NAMES[dtype]}-{'causal' if causal else 'all'}-{'unit' if unit else 'plain'}",
            )
        )
    return result


def make(tokens, dtype=F32, size=(16, 16), heads=(1, 1), batch=1, coefficients=None, seed=0, layout="bhnd", **_):
    """query, key, value, coefficients, with scores that keep g away from 0."""
    generator = torch.Generator().manual_seed(seed)

    def rand(heads, width, signed):
        x = torch.rand(batch, heads, tokens, width, generator=generator, dtype=F64)
        noise = torch.randn(x.shape, generator=generator, dtype=F64)
        return swap((noise if signed else (x + 0.2 * noise) / width**0.5).to(dtype), layout)

    return dict(
        query=rand(heads[0], size[0], False),
        key=rand(heads[1], size[0], False),
        value=rand(heads[1], size[1], True),
        coefficients=None if coefficients is None else torch.tensor(coefficients),
    )


def make_states(inputs, seed=0, layout="bhnd"):
    """States after 5 tokens of which nothing else is known."""
    generator = torch.Generator().manual_seed(seed)
    k, v = swap(inputs["key"], layout), swap(inputs["value"], layout)
    batch, heads = k.shape[:2]
    k, v = (torch.rand(batch, heads, 5, x.shape[-1], generator=generator) / 4 for x in (k, v))
    return dict(zip(STATES, (k.mT @ v, k.sum(2), v.sum(2), torch.full((batch,), 5, dtype=torch.int32)), strict=True))


def double(inputs):
    return {name: x.double() if x is not None and x.dtype.is_floating_point else x for name, x in inputs.items()}


@remembered
def judge(inputs, attrs):
    names = [t.name for t in spec.all_specs()[FORWARD].active_outputs(attrs)]
    return dict(zip(names, reference.normalized_linear_attention(**double(inputs), **attrs), strict=True))


@remembered
def judge_grad(inputs, attrs):
    names = [t.name for t in spec.all_specs()[BACKWARD].active_outputs(attrs)]
    return dict(zip(names, reference.normalized_linear_attention_grad(**double(inputs), **attrs), strict=True))


def unit_rows(x, on):
    norm = x.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    return (x / norm, norm) if on else (x, None)


def held(g, eps):
    return torch.where(g.abs() >= eps, g, torch.where(g < 0, -eps, eps))


def loop_inputs(inputs, attrs):
    """q [B,Hkv,G,N,D], k and v [B,Hkv,1,N,..] in float32, the norms of q and k, and a, b."""
    layout = attrs.get("layout", "bhnd")
    q, k, v = (swap(inputs[name], layout).float() for name in ("query", "key", "value"))
    a, b = (1.0, 1.0) if inputs.get("coefficients") is None else inputs["coefficients"].tolist()
    q, k, v = q.unflatten(1, (k.shape[1], -1)), k.unsqueeze(2), v.unsqueeze(2)
    return *unit_rows(q, attrs.get("normalize_qk")), *unit_rows(k, attrs.get("normalize_qk")), v, a, b


@remembered
def loop(inputs, attrs):
    """The forward token by token in float32."""
    layout, eps, causal = attrs.get("layout", "bhnd"), attrs.get("eps", 1e-6), attrs.get("causal", 1)
    q, _, k, _, v, a, b = loop_inputs(inputs, attrs)
    tokens = q.shape[3]
    state, key_sum, value_sum = k.new_zeros(*k.shape[:3], k.shape[-1], v.shape[-1]), 0 * k[..., 0, :], 0 * v[..., 0, :]
    count = torch.zeros(q.shape[0], dtype=torch.int32)
    if inputs.get("initial_count") is not None:
        state, key_sum, value_sum = (inputs[name].clone().unsqueeze(2) for name in STATES[:3])
        count = inputs["initial_count"]
    count = count.float().view(-1, 1, 1)
    f, g = q.new_empty(*q.shape[:4], v.shape[-1]), q.new_empty(q.shape[:4])
    for i in range(tokens):
        state = state + k[..., i, :, None] * v[..., i, None, :]
        key_sum, value_sum, count = key_sum + k[..., i, :], value_sum + v[..., i, :], count + 1
        for n in [i] if causal else range(tokens) if i == tokens - 1 else []:
            f[..., n, :] = a * value_sum + b * (q[..., n, None, :] @ state).squeeze(-2)
            g[..., n] = a * count + b * (q[..., n, :] * key_sum).sum(-1)
    output = (f / held(g, eps).unsqueeze(-1)).flatten(1, 2)
    return dict(
        output=swap(output, layout),
        normalizer=swap(g.flatten(1, 2), layout),
        final_state=state.squeeze(2),
        final_key_sum=key_sum.squeeze(2),
        final_value_sum=value_sum.squeeze(2),
    )


@remembered
def loop_grad(inputs, attrs):
    """The gradients token by token and head by head in float32, and the size of the terms that cancel in them."""
    layout, eps, causal = attrs.get("layout", "bhnd"), attrs.get("eps", 1e-6), attrs.get("causal", 1)
    q, q_norm, k, k_norm, v, a, b = loop_inputs(inputs, attrs)
    o, do = (swap(inputs[name], layout).float().unflatten(1, q.shape[1:3]) for name in ("output", "grad_output"))
    g = swap(inputs["normalizer"], layout).unflatten(1, q.shape[1:3]).unsqueeze(-1)
    w = do / held(g, eps)
    r = torch.where(g.abs() < eps, 0, (o * w).sum(-1, keepdim=True))
    tokens = q.shape[3]
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dq_size, dk_size = torch.empty_like(q), torch.empty_like(k)
    da = db = size = 0

    def sums(order, terms, result):
        total = None
        for step, i in enumerate(order):
            for term in terms(i):
                total = [x + y for x, y in zip(total, term, strict=True)] if total else term
            for n in [i] if causal else order if step == tokens - 1 else []:
                result(n, total)

    def key_side(i):
        return [[v[..., i, :, None] * k[..., i, None, :], k[..., i, :], v[..., i, :], torch.ones(())]]

    def query_grad(i, total):
        nonlocal da, db, size
        state, key_sum, value_sum, count = total
        first, second = (w[..., i, None, :] @ state).squeeze(-2), r[..., i, :] * key_sum
        dq[..., i, :], dq_size[..., i, :] = first - second, first.abs() + second.abs()
        da = da + ((w[..., i, :] * value_sum).sum(-1) - count * r[..., i, 0]).sum()
        db = db + (q[..., i, :] * dq[..., i, :]).sum()
        size += ((w[..., i, :] * value_sum).abs().sum() + (count * r[..., i, :]).abs().sum()).item()
        size += (q[..., i, :] * dq[..., i, :]).abs().sum().item()

    def query_side(i):
        for qi, wi, ri in zip(*(x[..., i, :].split(1, 2) for x in (q, w, r)), strict=True):
            yield [qi.unsqueeze(-1) * wi.unsqueeze(-2), ri * qi, wi]

    def key_grad(i, total):
        pairs, weighted, weights = total
        first = (pairs @ v[..., i, :, None]).squeeze(-1)
        dk[..., i, :], dk_size[..., i, :] = b * (first - weighted), first.abs() + weighted.abs()
        dv[..., i, :] = a * weights + b * (k[..., i, None, :] @ pairs).squeeze(-2)

    sums(range(tokens), key_side, query_grad)
    sums(range(tokens - 1, -1, -1), query_side, key_grad)
    dq = b * dq
    if attrs.get("normalize_qk"):
        dq, dk = ((dy - y * (y * dy).sum(-1, keepdim=True)) / norm for dy, y, norm in ((dq, q, q_norm), (dk, k, k_norm)))
        dq_size, dk_size = dq_size / q_norm, dk_size / k_norm
    grads = dict(grad_query=dq.flatten(1, 2), grad_key=dk.squeeze(2), grad_value=dv.squeeze(2))
    grads = {name: swap(x, layout) for name, x in grads.items()} | dict(grad_coefficients=torch.stack([da, db]))
    return grads, dict(grad_query=abs(b) * rms(dq_size), grad_key=abs(b) * rms(dk_size), grad_coefficients=size)


def rms(x):
    return x.double().square().mean().sqrt().item()


def check(actual, exact, plain, sizes=None, luck=0):
    """actual, exact, plain: dicts of kernel, float64 and float32 loop outputs; sizes: of terms that cancel in some.

    The rounding of such terms is added to the tolerance: it is luck how much of it remains in their difference. luck: so
    many times the tolerance, and roundings of the largest element, for calls so small that the loop may well be exact.
    """
    assert list(actual) == list(exact)
    for name, x in actual.items():
        if x.dtype == torch.int32:
            assert torch.equal(x, exact[name].int()), name
            continue
        assert x.shape == exact[name].shape and torch.isfinite(x).all(), name
        error = rms(x - exact[name])
        allowed = 2 * rms(plain[name] - exact[name]) + 1.2 * rms(exact[name].to(x.dtype) - exact[name])
        allowed += 1.2 * ROUNDING[F32] * (sizes or {}).get(name, 0)
        if luck:
            allowed = luck * (allowed + ROUNDING[F32] * exact[name].abs().max().item())
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def grad_inputs(inputs, attrs, exact, seed=0):
    """What the Grad operator takes; its output and normalizer are the exact ones, rounded to their types."""
    dtype = inputs["query"].dtype
    output = exact["output"].to(dtype)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)
    return inputs | dict(output=output, normalizer=exact["normalizer"].float(), grad_output=grad)


def check_grad(inputs, attrs, threads, luck=0):
    actual = run_kernel(BACKWARD, inputs, attrs, threads=threads)
    check(actual, judge_grad(inputs, attrs), *loop_grad(inputs, attrs), luck)


@pytest.mark.parametrize(("case", "attrs"), cases())
def test_lengths(case, attrs):
    inputs = make(**case, layout=attrs["layout"])
    exact = judge(inputs, attrs)
    check(run_kernel(FORWARD, inputs, attrs, threads=case["threads"]), exact, loop(inputs, attrs))
    check_grad(grad_inputs(inputs, attrs, exact, case["seed"]), attrs, case["threads"])


@pytest.mark.parametrize("threads", rest_slow((5, 1, 2, 16)))
@pytest.mark.parametrize(("causal", "unit", "size"), [(1, 0, (16, 16)), (1, 1, (20, 40)), (0, 0, (16, 16)), (0, 1, (4, 7))])
def test_few_heads_many_threads(causal, unit, size, threads):
    """One head and one block of columns: the threads share the tokens, in ragged segments."""
    attrs = dict(causal=causal, normalize_qk=unit)
    inputs = make(1003, size=size, heads=(2, 1), coefficients=(0.7, 1.3), seed=threads)
    exact = judge(inputs, attrs)
    check(run_kernel(FORWARD, inputs, attrs, threads=threads), exact, loop(inputs, attrs))
    check_grad(grad_inputs(inputs, attrs, exact), attrs, threads)
    if causal:
        inputs |= make_states(inputs)
        attrs["return_state"] = 1
        check(run_kernel(FORWARD, inputs, attrs, threads=threads), judge(inputs, attrs), loop(inputs, attrs))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("layout", "unit", "heads", "size", "batch", "threads"),
    [
        ("bhnd", 0, (3, 1), (37, 50), 2, 2),
        ("bnhd", 1, (5, 1), (64, 128), 1, 5),
        ("bhnd", 1, (2, 2), (128, 20), 3, 1),
        ("bnhd", 0, (1, 1), (4, 4), 1, 2),
    ],
)
@pytest.mark.parametrize("pieces", ((130,), (1,), (1, 1, 1), (64, 1, 1, 15, 49), (16, 17, 97)))
def test_carried_states(dtype, layout, unit, heads, size, batch, threads, pieces):
    """A sequence in pieces, in place and not, gives what one call over all of it gives, and what the loop gives."""
    tokens = sum(pieces)
    attrs = dict(normalize_qk=unit, layout=layout, return_state=1)
    inputs = make(tokens, dtype, size, heads, batch, (0.7, 1.3), seed=tokens, layout=layout)
    states = make_states(inputs, layout=layout)
    exact, plain = judge(inputs | states, attrs), loop(inputs | states, attrs)
    axis = 2 if layout == "bhnd" else 1
    for in_place in (False, True):
        carried = {name: x.clone() for name, x in states.items()}
        outputs, first = [], 0
        for piece in pieces:
            part = {
                name: None if x is None else x if name == "coefficients" else x.narrow(axis, first, piece).contiguous()
                for name, x in inputs.items()
            }
            result = run_kernel(FORWARD, part | carried, attrs, threads=threads, in_place=in_place)
            outputs.append(result)
            carried = {name: result[name.replace("initial", "final")] for name in STATES}
            first += piece
        together = {
            name: torch.cat([x[name] for x in outputs], axis) if name in ("output", "normalizer") else outputs[-1][name]
            for name in result
        }
        check(together, exact, plain)


def check_carried(inputs, attrs, threads=2):
    inputs = inputs | make_states(inputs, layout=attrs.get("layout", "bhnd"))
    attrs = attrs | dict(return_state=1)
    check(run_kernel(FORWARD, inputs, attrs, threads=threads), judge(inputs, attrs), loop(inputs, attrs), luck=8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_decode_step_of_any_width(dtype):
    """Whatever number of columns is left over by the vectors and tiles of an instruction set."""
    for width in (*range(1, 66), 127, 129):
        check_carried(make(1, dtype, (5, width), (2, 1)), {})


@pytest.mark.parametrize("tokens", (33, 65, 97))
def test_a_last_block_of_one_token(tokens):
    for width in (4, 7, 12, 20, 28, 44, 60):
        check_carried(make(tokens, size=(5, width)), {})


@pytest.mark.everywhere
@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(data=st.data())
def test_any_call(data):
    """A call of the forward and of the gradient with anything that may vary; a few tokens and, often, a state. D is 4 or more: unit
    rows of few columns may well be opposite, and g is then 0."""
    draw = data.draw
    kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from((1, 1, 2, 3, 7)))
    attrs = dict(
        normalize_qk=draw(st.integers(0, 1)),
        layout=draw(st.sampled_from(("bhnd", "bnhd"))),
        causal=draw(st.sampled_from((1, 1, 0))),
    )
    width, threads = st.integers(1, 70), draw(st.sampled_from((1, 2, 3, 8)))
    inputs = make(
        draw(st.sampled_from((1, 1, 2, 3, 8, 17, 32, 33, 40, 65))),
        draw(st.sampled_from(DTYPES)),
        (draw(st.integers(4, 70)), draw(width)),
        (kv_heads * group, kv_heads),
        draw(st.integers(1, 2)),
        draw(st.sampled_from((None, (0.7, 1.3)))),
        draw(st.integers(0, 2**20)),
        attrs["layout"],
    )
    if attrs["causal"] and draw(st.booleans()):
        return check_carried(inputs, attrs, threads)
    exact = judge(inputs, attrs)
    check(run_kernel(FORWARD, inputs, attrs, threads=threads), exact, loop(inputs, attrs), luck=8)
    check_grad(grad_inputs(inputs, attrs, exact), attrs, threads, luck=8)


@pytest.mark.parametrize("threads", (1, 2, 5))
@pytest.mark.parametrize("tokens", (1, 33, 700))
@pytest.mark.parametrize("heads", ((1, 1), (3, 1), (5, 5)))
def test_in_place_is_the_same(threads, tokens, heads):
    inputs = make(tokens, size=(20, 100), heads=heads)
    inputs |= make_states(inputs)
    apart = run_kernel(FORWARD, inputs, dict(return_state=1), threads=threads)
    copies = {name: None if x is None else x.clone() for name, x in inputs.items()}
    taken = run_kernel(FORWARD, copies, dict(return_state=1), threads=threads, in_place=True)
    for name in STATES:
        assert taken[name.replace("initial", "final")].data_ptr() == copies[name].data_ptr()
    for name, x in apart.items():
        assert torch.equal(x, taken[name]), name


def test_states_from_nothing():
    """return_state without initial values: the sums of this call alone."""
    inputs = make(70, size=(16, 20), heads=(3, 1), batch=2)
    check(
        run_kernel(FORWARD, inputs, dict(return_state=1)),
        judge(inputs, dict(return_state=1)),
        loop(inputs, dict(return_state=1)),
    )


@pytest.mark.parametrize("causal", (1, 0))
def test_gradients_are_those_of_the_forward(causal):
    """Kernel gradients at the kernel's own output, against autograd through the reference in float64."""
    attrs = dict(causal=causal, normalize_qk=1)
    inputs = make(90, size=(20, 12), heads=(3, 1), batch=2, coefficients=(0.7, 1.3))
    result = run_kernel(FORWARD, inputs, attrs)
    grad = torch.randn(result["output"].shape, generator=torch.Generator().manual_seed(1))
    actual = run_kernel(BACKWARD, inputs | result | dict(grad_output=grad), attrs)
    leaves = {name: x.double().requires_grad_() for name, x in inputs.items()}
    output, _ = reference.normalized_linear_attention(**leaves, **attrs)
    expected = torch.autograd.grad(output, list(leaves.values()), grad.double())
    for (name, x), y in zip(actual.items(), expected, strict=True):
        assert rms(x - y) <= 2e-6 * max(rms(y), 1), name


@pytest.mark.parametrize("normalize_qk", (0, 1))
@pytest.mark.parametrize("tokens", (1, 64, 65))
def test_gradients_without_those_of_the_coefficients(tokens, normalize_qk):
    attrs = dict(normalize_qk=normalize_qk)
    inputs = make(tokens, size=(20, 12), heads=(3, 1), batch=2, coefficients=(0.7, 1.3))
    inputs = grad_inputs(inputs, attrs, judge(inputs, attrs))
    whole = run_kernel(BACKWARD, inputs, attrs)
    found = run_kernel(BACKWARD, inputs, attrs | dict(grad_coefficients=0))
    assert [*found] == ["grad_query", "grad_key", "grad_value"]
    assert all(torch.equal(x, whole[name]) for name, x in found.items())


@pytest.mark.parametrize("sign", (1, -1))
def test_guard_is_exact(sign):
    """q = -k, nearly: g_i = sign * (i + 1) / 2**18 exactly, held at 2**-16 for the first three tokens."""
    attrs = dict(eps=2.0**-16)
    query, key = torch.zeros(1, 1, 15, 4), torch.zeros(1, 1, 15, 4)
    key[..., 0], query[..., 0] = 1, -1 + sign * 2.0**-18
    value = torch.randint(-2, 3, (1, 1, 15, 8), generator=torch.Generator().manual_seed(0)).float()
    inputs = dict(query=query, key=key, value=value)
    exact, actual = judge(inputs, attrs), run_kernel(FORWARD, inputs, attrs)
    assert torch.equal(actual["normalizer"].double(), exact["normalizer"])
    assert (exact["normalizer"].flatten() * sign > 0).all()
    assert (actual["normalizer"].abs() < attrs["eps"]).sum() == 3
    torch.testing.assert_close(actual["output"].double(), exact["output"], rtol=2.0**-23, atol=0)
    inputs = grad_inputs(inputs, attrs, exact)
    multiples = torch.randint(-2, 3, value.shape, generator=torch.Generator().manual_seed(1))
    inputs["grad_output"] = multiples * torch.arange(1.0, 16.0).view(-1, 1)  # so that w is exact too
    grads, expected = run_kernel(BACKWARD, inputs, attrs), judge_grad(inputs, attrs)
    for name, x in grads.items():
        torch.testing.assert_close(x.double(), expected[name], rtol=1e-5, atol=1e-5 * expected[name].abs().max().item())
    unguarded = judge_grad(inputs, dict(eps=0.0))
    assert rms(unguarded["grad_query"] - expected["grad_query"]) > 0.1 * rms(expected["grad_query"])


def test_zero_normalizer():
    """g = 0 exactly: the output is 0 / eps and the gradient is that of a constant denominator."""
    key = torch.zeros(1, 1, 9, 4)
    key[..., 0] = 1
    value = torch.ones(1, 1, 9, 3)
    inputs = dict(query=-key, key=key, value=value)
    actual = run_kernel(FORWARD, inputs, {})
    assert (actual["normalizer"] == 0).all() and (actual["output"] == 0).all()
    inputs |= actual | dict(grad_output=value)
    expected = judge_grad(inputs, {})
    for name, x in run_kernel(BACKWARD, inputs, {}).items():
        torch.testing.assert_close(x.double(), expected[name], rtol=1e-5, atol=1e-5 * expected[name].abs().max().item())


def test_normalizer_crosses_zero():
    """q = -k of unit length on average: rows count by how well their own division is conditioned."""
    inputs = make(130, size=(64, 37), heads=(2, 2))
    key = torch.randn(1, 2, 130, 64, generator=torch.Generator().manual_seed(3)) / 8
    inputs |= dict(key=key, query=-key, coefficients=torch.tensor([0.1, 1.0]))
    exact, actual, plain = judge(inputs, {}), run_kernel(FORWARD, inputs, {}), loop(inputs, {})
    g = exact["normalizer"]
    assert (g < 0).any() and (g > 0).any()
    weight = (g.abs() / (1 + g.abs()) / (1 + exact["output"].abs().amax(-1))).unsqueeze(-1)
    for x in (actual, exact, plain):
        x["output"] = (x["output"] * weight).float() if x is actual else x["output"] * weight
    check(actual, exact, plain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", (1, 0))
def test_zero_rows(dtype, causal):
    """Rows shorter than 1e-12 are divided by that: zero rows stay zero, and no gradient is projected out."""
    attrs = dict(causal=causal, normalize_qk=1)
    inputs = make(20, dtype, size=(37, 20), heads=(3, 1))
    inputs["query"][:, 1, 4] = 0
    inputs["key"][:, 0, 7] = 0
    inputs["query"][:, 2, 5] *= 1e-12  # 0 in float16
    inputs["key"][:, 0, 9] *= 1e-12
    exact = judge(inputs, attrs)
    check(run_kernel(FORWARD, inputs, attrs), exact, loop(inputs, attrs))
    inputs = grad_inputs(inputs, attrs, exact)
    inputs["grad_output"] = inputs["grad_output"] * 2.0**-14  # so that float16 has room for 1e12 times as much
    actual, exact = run_kernel(BACKWARD, inputs, attrs), judge_grad(inputs, attrs)
    plain, sizes = loop_grad(inputs, attrs)
    for name, at in (("grad_query", (0, 1, 4)), ("grad_query", (0, 2, 5)), ("grad_key", (0, 0, 7)), ("grad_key", (0, 0, 9))):
        expected = exact[name][at].to(dtype)
        assert expected.abs().max() > 1e4
        torch.testing.assert_close(actual[name][at], expected, rtol=4 * ROUNDING[dtype] + 1e-4, atol=0)
        for x in (actual, exact, plain):
            x[name][at] = 0
    sizes = dict(grad_coefficients=sizes["grad_coefficients"])
    check(actual, exact, plain, sizes)


@pytest.mark.parametrize("threads", (2, 5))
@pytest.mark.parametrize(("causal", "unit"), ((1, 0), (0, 1)))
def test_repeatable(threads, causal, unit):
    attrs = dict(causal=causal, normalize_qk=unit)
    inputs = make(700, size=(37, 50), heads=(6, 2), batch=3)
    first = run_kernel(FORWARD, inputs, attrs, threads=threads)
    inputs |= first | dict(grad_output=torch.rand(first["output"].shape))
    grads = run_kernel(BACKWARD, inputs, attrs, threads=threads)
    forward = {name: inputs[name] for name in ("query", "key", "value")}
    for _ in range(3):
        again = run_kernel(FORWARD, forward, attrs, threads=threads)
        again |= run_kernel(BACKWARD, inputs, attrs, threads=threads)
        for name, x in (first | grads).items():
            assert torch.equal(x, again[name]), name


@pytest.mark.own_instruction_set
def test_a_million_tokens():
    """Against running sums in float64; the plain evaluation is the same running sums in float32."""
    tokens, (a, b) = 1 << 20, (0.7, 1.3)
    inputs = make(tokens, size=(2, 3), coefficients=(a, b))
    exact = {}
    for dtype in (np.float64, np.float32):
        q, k, v = (inputs[name][0, 0].numpy().astype(dtype) for name in ("query", "key", "value"))
        state = np.cumsum(k[:, :, None] * v[:, None, :], 0, dtype)
        count = np.arange(1, tokens + 1, dtype=dtype)
        g = dtype(a) * count + dtype(b) * (q * np.cumsum(k, 0, dtype)).sum(-1)
        f = dtype(a) * np.cumsum(v, 0, dtype) + dtype(b) * (q[:, :, None] * state).sum(1)
        exact[dtype] = dict(output=torch.from_numpy(f / g[:, None])[None, None], normalizer=torch.from_numpy(g)[None, None])
    for threads in (1, 5):
        check(run_kernel(FORWARD, inputs, threads=threads), exact[np.float64], exact[np.float32])


def scratch_bytes(op_name, tokens, dim, value_dim, attrs, threads):
    op = spec.all_specs()[op_name]
    dims = dict(B=1, H=4, Hkv=2, N=tokens, D=dim, Dv=value_dim)
    entries = [
        (0, tuple(dims[a.symbol] for a in op.shape_of(t, set()).ordered("bhnd")), "float32") if not t.optional else None
        for t in op.inputs
    ]
    for i, t in enumerate(op.inputs):
        if t.type == "T":
            entries[i] = (*entries[i][:2], "bfloat16")
    return native.Call(op_name, entries, [None] * len(op.outputs), attrs, threads=threads).workspace()[0]


@pytest.mark.parametrize("op_name", (FORWARD, BACKWARD))
@pytest.mark.parametrize("causal", (1, 0))
def test_scratch_does_not_grow_with_tokens(op_name, causal):
    """A few states a thread, however many tokens there are."""
    for threads in (1, 2, 16):
        sizes = [scratch_bytes(op_name, tokens, 64, 128, dict(causal=causal), threads) for tokens in (1 << 14, 1 << 20)]
        assert sizes[0] == sizes[1] <= threads * 8 * 5 * 64 * 128 * 4


@pytest.mark.parametrize("op_name", (FORWARD, BACKWARD))
@pytest.mark.parametrize(("value", "which"), ((float("nan"), 0), (float("inf"), 1), (float("-inf"), 0)))
def test_coefficients_must_be_finite(op_name, value, which):
    inputs = make(5, coefficients=(1.0, 1.0))
    if op_name == BACKWARD:
        inputs = grad_inputs(inputs, {}, judge(inputs, {}))
    inputs["coefficients"][which] = value
    with pytest.raises(ValueError, match=rf"{op_name}.*coefficients holds .*{value} for {'ab'[which]}; .*finite"):
        run_kernel(op_name, inputs)


def test_negative_counts(monkeypatch):
    inputs = make(3, batch=2)
    inputs |= make_states(inputs)
    inputs["initial_count"][1] = -2
    exact, plain = (f(inputs, dict(return_state=1)) for f in (judge, loop))
    check(run_kernel(FORWARD, inputs, dict(return_state=1)), exact, plain)
    monkeypatch.setenv("LEANFLEET_CHECK", "1")
    with pytest.raises(ValueError, match=rf"{FORWARD}.*initial_count holds -2 for request 1; .*at least 0"):
        run_kernel(FORWARD, inputs, dict(return_state=1))


def test_counts_stay_at_their_end(monkeypatch):
    """final_count is held at 2^31 - 1; LEANFLEET_CHECK=1 refuses a count that would pass it, where it is asked for."""
    last = 2**31 - 1
    inputs = make(3, batch=3)
    inputs |= make_states(inputs)
    inputs["initial_count"][:] = torch.tensor([last - 3, last - 2, last])
    for in_place in (False, True):
        mine = {name: None if x is None else x.clone() for name, x in inputs.items()}
        found = run_kernel(FORWARD, mine, dict(return_state=1), in_place=in_place)
        check(found, judge(inputs, dict(return_state=1)), loop(inputs, dict(return_state=1)))
        assert found["final_count"].tolist() == [last] * 3
    monkeypatch.setenv("LEANFLEET_CHECK", "1")
    run_kernel(FORWARD, inputs, {})
    with pytest.raises(
        ValueError,
        match=rf"{FORWARD}.*initial_count holds {last - 2} for request 1; with N = 3 more expected at "
        rf"most {last - 3}, because final_count ends at 2\^31 - 1",
    ):
        run_kernel(FORWARD, inputs, dict(return_state=1))
