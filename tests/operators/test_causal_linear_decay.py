"""CPU kernels of CausalLinearDecay and its gradient against the float64 reference.

The tolerance is what a plain loop over tokens in float32 loses on the same inputs, times 2, plus what rounding the
exact result to the output's type loses, times 1.2; both as root mean squares over the tensor. A float32 rounding of the
largest element is added, for inputs on which the loop is exact.
"""

import math
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leanfleet import native, spec
from leanfleet.export import reference
from support.cpu_time import rest_slow
from support.kernels import examples, remembered, run_kernel
from support.linear_cases import SHARED_HEADS

FORWARD, GRAD = "CausalLinearDecay", "CausalLinearDecayGrad"
I32 = torch.int32
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DECAYS = {"none": None, "one": 0.0, "slow": math.log(0.999), "half": math.log(0.5), "tiny": -60.0, "zero": float("-inf")}
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 130)
TOKENS = ("query", "key", "value", "grad_output", "log_decay")
pytestmark = pytest.mark.usefixtures("one_torch_thread", "instruction_set")


def swap(x, layout="bnhd"):
    return x if layout == "bhnd" else x.transpose(1, 2).contiguous()


def make(
    n,
    b=2,
    group=3,
    kv=2,
    r=5,
    dv=7,
    layout="bhnd",
    dtype="float32",
    decay="slow",
    per_token=False,
    state=False,
    norm=False,
    packed=False,
    pool=False,
    grad=False,
    heads=None,
    beta=False,
    seed=0,
):
    """Inputs by name. packed: four requests of unequal length, one of them empty, in one row; or their offsets. heads: Hq, Hk, Hv
    in place of group and kv."""
    g = torch.Generator().manual_seed(seed + n)
    offsets = None
    if packed:
        offsets = [0, n // 3, n // 3, n - n // 4, n] if packed is True else packed
        b = 1
    requests = len(offsets) - 1 if packed else b

    def tensor(heads, width, positive=False):
        x = torch.randn(b, heads, n, width, generator=g) / width**0.25
        return swap((x.abs() if positive else x).to(DTYPES[dtype]), layout)

    queries, keys, kv = heads or (group * kv, kv, kv)
    inputs = {"query": tensor(queries, r, norm), "key": tensor(keys, r, norm), "value": tensor(kv, dv)}
    if DECAYS[decay] is not None:
        inputs["log_decay"] = torch.full((kv,), DECAYS[decay]) * (1 + torch.arange(kv) / 7)
        if DECAYS[decay] == 0:
            inputs["log_decay"] = torch.zeros(kv)
        if per_token:
            values = torch.where(torch.isinf(inputs["log_decay"]), -0.5, inputs["log_decay"]).view(1, kv, 1)
            values = values * torch.rand(b, kv, n, generator=g)
            values.view(-1)[3::11] = float("-inf")
            inputs["log_decay"] = swap(values, layout).contiguous()
    rows = requests + 3 if pool else requests
    if state or pool:
        inputs["initial_state"] = torch.randn(rows, kv, r, dv, generator=g)
        if norm:
            inputs["initial_norm"] = torch.rand(rows, kv, r, generator=g)
    if grad:
        inputs["grad_output"] = tensor(max(queries, kv), dv)
        if state:
            inputs["grad_final_state"] = torch.randn(requests, kv, r, dv, generator=g)
    if packed:
        inputs["cu_seqlens"] = torch.tensor(offsets, dtype=I32)
    if pool:
        inputs["state_index"] = torch.randperm(rows, generator=g)[:requests].to(I32)
    if beta:
        values = 2 * torch.rand(b, kv, n, generator=g)
        values.view(-1)[1::5] = 0.0
        inputs["beta"] = swap(values, layout).contiguous()
    return inputs


@remembered
def judge(op_name, inputs, attrs):
    """The outputs by name, exactly."""
    op = spec.all_specs()[op_name]
    tensors = [inputs.get(t.name) for t in op.inputs]
    tensors = [t.double() if t is not None and t.is_floating_point() else t for t in tensors]
    names = [t.name for t in op.active_outputs(attrs)]
    return dict(zip(names, getattr(reference, op.snake_name)(*tensors, **attrs), strict=True))


def requests_of(inputs, layout):
    """(batch row, first token, last token + 1) of every request."""
    tokens = swap(inputs["key"], layout).shape[2]
    if inputs.get("cu_seqlens") is None:
        return [(b, 0, tokens) for b in range(inputs["key"].shape[0])]
    return [(0, start, stop) for start, stop in pairwise(inputs["cu_seqlens"].tolist())]


def plain(inputs, layout):
    """q [B,Hv,G,N,R], k, v [B,Hv,N,..] and gamma [B,Hv,N] in float32, heads that are shared repeated."""
    q, k, v = (swap(inputs[name], layout).float() for name in ("query", "key", "value"))
    k = k.repeat_interleave(v.shape[1] // k.shape[1], 1)
    q = q.repeat_interleave(max(1, v.shape[1] // q.shape[1]), 1)
    log_decay = inputs.get("log_decay")
    if log_decay is None:
        gamma = k.new_ones(k.shape[:3])
    elif log_decay.dim() == 1:
        gamma = log_decay.exp().view(1, -1, 1).expand(k.shape[:3])
    else:
        gamma = swap(log_decay, layout).exp()
    if inputs.get("beta") is not None:
        k = k * swap(inputs["beta"], layout).unsqueeze(-1)
    return q.unflatten(1, (k.shape[1], -1)), k, v, gamma


@remembered
def loop(inputs, attrs):
    """The forward token by token in float32; states by request, of a pool too."""
    layout, scale, normalize = attrs.get("layout", "bhnd"), attrs.get("scale", 1.0), attrs.get("normalize", 0)
    q, k, v, gamma = plain(inputs, layout)
    output, states, norms = q.new_zeros(*q.shape[:4], v.shape[-1]), [], []
    for request, (b, start, stop) in enumerate(requests_of(inputs, layout)):
        row = request if inputs.get("state_index") is None else inputs["state_index"][request]
        state, norm = k.new_zeros(k.shape[1], k.shape[-1], v.shape[-1]), k.new_zeros(k.shape[1], k.shape[-1])
        if inputs.get("initial_state") is not None:
            state = inputs["initial_state"][row]
        if inputs.get("initial_norm") is not None:
            norm = inputs["initial_norm"][row]
        for i in range(start, stop):
            state = gamma[b, :, i, None, None] * state + k[b, :, i, :, None] * v[b, :, i, None, :]
            norm = gamma[b, :, i, None] * norm + k[b, :, i]
            out = scale * (q[b, :, :, i] @ state)
            if normalize:
                d, eps = scale * (q[b, :, :, i] @ norm.unsqueeze(-1)), attrs.get("eps", 1e-6)
                out = out / torch.where(d.abs() >= eps, d, torch.where(d < 0, -eps, eps))
            output[b, :, :, i] = out
        states.append(state)
        norms.append(norm)
    return dict(output=swap(output.flatten(1, 2), layout), final_state=torch.stack(states), final_norm=torch.stack(norms))


@remembered
def loop_grad(inputs, attrs):
    """The gradients token by token in float32, that of the decay as <G_i, gamma_i S_{i-1}>, of whose terms decay_terms is
    the norm for each head."""
    layout, scale = attrs.get("layout", "bhnd"), attrs.get("scale", 1.0)
    q, k, v, gamma = plain(inputs, layout)
    do = swap(inputs["grad_output"], layout).float().unflatten(1, q.shape[1:3])
    dq, dk, dv, dg, squares = (torch.zeros_like(x) for x in (q, k, v, gamma, gamma))
    grads = []
    for request, (b, start, stop) in enumerate(requests_of(inputs, layout)):
        state = grad = k.new_zeros(k.shape[1], k.shape[-1], v.shape[-1])
        if inputs.get("initial_state") is not None:
            state = inputs["initial_state"][request]
        if inputs.get("grad_final_state") is not None:
            grad = inputs["grad_final_state"][request]
        before = []
        for i in range(start, stop):
            before.append(gamma[b, :, i, None, None] * state)
            state = before[-1] + k[b, :, i, :, None] * v[b, :, i, None, :]
            dq[b, :, :, i] = scale * (do[b, :, :, i] @ state.mT)
        for i in range(stop - 1, start - 1, -1):
            grad = grad + scale * (q[b, :, :, i].mT @ do[b, :, :, i])
            dk[b, :, i] = (grad @ v[b, :, i, :, None]).squeeze(-1)
            dv[b, :, i] = (k[b, :, i, None, :] @ grad).squeeze(-2)
            terms = grad * before.pop()
            dg[b, :, i], squares[b, :, i] = terms.sum((-2, -1)), terms.square().sum((-2, -1))
            grad = gamma[b, :, i, None, None] * grad
        grads.append(grad)
    per_token = inputs.get("log_decay") is not None and inputs["log_decay"].dim() == 3
    dq, dk = (
        x.unflatten(1, (inputs[name].shape[1 if layout == "bhnd" else 2], -1)).sum(2)
        for name, x in (("query", dq.flatten(1, 2)), ("key", dk))
    )
    return dict(
        grad_query=swap(dq, layout),
        grad_key=swap(dk, layout),
        grad_value=swap(dv, layout),
        grad_log_decay=swap(dg, layout) if per_token else dg.sum((0, 2)),
        grad_initial_state=torch.stack(grads),
        decay_terms=squares.sum((0, 2)).sqrt(),
    )


def rms(x):
    return x.double().square().mean().sqrt().item()


def check(op_name, inputs, attrs, found=None, baseline=None, luck=1, **options):
    """Runs the kernel unless `found` is given; checks and returns its outputs. luck: a factor of the tolerance for calls so
    small that the loop may well round to the exact result."""
    if found is None:
        found = run_kernel(op_name, {k: x.clone() for k, x in inputs.items()}, attrs, **options)
    exact = judge(op_name, inputs, attrs)
    baseline = baseline or (loop if op_name == FORWARD else loop_grad)(inputs, attrs)
    assert list(found) == list(exact)
    for name, x in found.items():
        e, p = exact[name], baseline[name]
        if name in ("final_state", "final_norm") and inputs.get("state_index") is not None:
            named = inputs["state_index"].long()
            others = [row for row in range(len(x)) if row not in named.tolist()]
            assert torch.equal(x[others], inputs[name.replace("final", "initial")][others]), name
            x, e = x[named], e[named]
        assert x.shape == e.shape == p.shape and torch.isfinite(x).all(), name
        allowed = 2 * rms(p - e) + 1.2 * rms(e.to(x.dtype) - e) + 2.0**-24 * e.abs().max().item()
        allowed += 2.0**-124  # numbers below 2^-126 count as 0
        if name == "grad_log_decay" and x.dim() == 1:  # a few long sums: it is luck what the loop's roundings sum up to
            allowed += 16 * 2.0**-24 * rms(baseline["decay_terms"])
        error, allowed = rms(x - e), luck * allowed
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"
    return found


def check_both(forward_attrs=None, grad_attrs=None, threads=2, **case):
    """Forward and gradients of one case of make(), with states."""
    layout = dict(layout=case.get("layout", "bhnd"))
    check(FORWARD, make(state=True, **case), dict(return_state=1, **layout) | (forward_attrs or {}), threads=threads)
    attrs = dict(grad_decay=int(case.get("decay") != "none"), grad_state=1, **layout) | (grad_attrs or {})
    check(GRAD, make(state=True, grad=True, **case), attrs, threads=threads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", LENGTHS)
def test_lengths(n, dtype):
    for i, (layout, per_token) in enumerate(product(("bhnd", "bnhd"), (False, True))):
        r, dv = ((5, 7), (37, 64), (64, 20), (8, 33))[(i + n) % 4]
        check_both(
            dict(scale=0.5),
            dict(scale=0.5),
            n=n,
            group=(1, 3, 5, 2)[i],
            kv=(2, 1)[i % 2],
            r=r,
            dv=dv,
            layout=layout,
            dtype=dtype,
            per_token=per_token,
            threads=(1, 2, 5)[n % 3],
        )


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
def test_decays(decay, per_token):
    """From no decay to gamma = 0, which forgets at once; nothing overflows."""
    inputs = make(97, decay=decay, per_token=per_token, state=True)
    check(FORWARD, inputs, dict(return_state=1))
    grads = make(97, decay=decay, per_token=per_token, state=True, grad=True)
    found = check(GRAD, grads, dict(grad_decay=int("log_decay" in grads), grad_state=1))
    if "log_decay" in grads:
        assert (found["grad_log_decay"][torch.isinf(grads["log_decay"])] == 0).all()


@pytest.mark.everywhere
@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(data=st.data())
def test_any_call(data):
    """Anything that may vary in a call of the forward or of the gradient."""
    draw = data.draw
    width, group = st.integers(1, 70), draw(st.sampled_from((1, 1, 2, 3, 5, 9)))
    heads = draw(st.one_of(st.none(), st.sampled_from(SHARED_HEADS)))
    grad, layout = draw(st.booleans()), draw(st.sampled_from(("bhnd", "bnhd")))
    norm, beta = not grad and draw(st.booleans()), not grad and draw(st.booleans())
    decay = draw(st.sampled_from([*DECAYS]))
    case = dict(
        b=draw(st.integers(1, 2)),
        group=group,
        kv=draw(st.integers(1, 3)),
        r=draw(width),
        dv=draw(width),
        layout=layout,
        dtype=draw(st.sampled_from([*DTYPES])),
        decay=decay,
        per_token=decay != "none" and draw(st.booleans()),
        state=draw(st.booleans()),
        norm=norm,
        packed=draw(st.booleans()),
        pool=not grad and draw(st.booleans()),
        grad=grad,
        heads=heads,
        beta=beta,
        seed=draw(st.integers(0, 2**20)),
    )
    n, threads = draw(st.sampled_from((1, 1, 2, 3, 15, 16, 17, 33, 50))), draw(st.sampled_from((1, 2, 3, 8)))
    if grad:
        attrs = dict(grad_decay=int(decay != "none"), grad_state=1)
    else:
        attrs = dict(return_state=1, normalize=int(norm))
    check(
        GRAD if grad else FORWARD,
        make(n, **case),
        attrs | dict(layout=layout, scale=draw(st.sampled_from((1.0, 0.3)))),
        luck=8,
        threads=threads,
    )


@pytest.mark.parametrize("step", (-87.0, -103.0, -3e38, -1e-30))
def test_extreme_decays(step):
    """Sums of ln gamma beyond the range of float32, and gamma that rounds to 1."""
    inputs = make(40, per_token=True, state=True, grad=True)
    inputs["log_decay"].fill_(step)
    check(FORWARD, {k: x for k, x in inputs.items() if not k.startswith("grad")}, dict(return_state=1))
    check(GRAD, inputs, dict(grad_decay=1, grad_state=1))


def test_a_reset_forgets_everything():
    """gamma = 0 at token 20: what follows does not depend on what was before, to the bit."""
    inputs = make(50, state=True, per_token=True)
    inputs["log_decay"][:, :, 20] = float("-inf")
    first = run_kernel(FORWARD, inputs, dict(return_state=1))
    for name in ("key", "value"):
        inputs[name][:, :, :20] *= 7
    inputs["initial_state"] *= -3
    second = run_kernel(FORWARD, inputs, dict(return_state=1))
    assert torch.equal(first["output"][:, :, 20:], second["output"][:, :, 20:])
    assert torch.equal(first["final_state"], second["final_state"])


@pytest.mark.parametrize("r, dv", [(1, 1), (1, 64), (4, 33), (8, 8), (37, 20), (64, 130), (128, 16), (512, 3), (3, 300)])
@pytest.mark.parametrize("group", [1, 3, 4, 7])
def test_widths_and_groups(r, dv, group):
    check_both(n=21, b=1, r=r, dv=dv, group=group)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, packed, threads", ((1, False, 2), (17, True, 5), (130, False, 1), (600, False, 16)))
@pytest.mark.parametrize("heads", SHARED_HEADS, ids=str)
def test_shared_heads(heads, n, packed, threads, dtype):
    """Few keys and queries for many states: steps, packed requests, requests in pieces, normalised, and gradients."""
    layout = ("bhnd", "bnhd")[heads[0] % 2]
    case = dict(heads=heads, r=20, dv=40, packed=packed, layout=layout, dtype=dtype, per_token=n != 17)
    check_both(dict(scale=0.5), dict(scale=0.5), n=n, threads=threads, **case)
    attrs = dict(return_state=1, layout=layout)
    inputs = make(n, pool=True, norm=True, **case)
    check(FORWARD, inputs, attrs | dict(normalize=1, scale=0.3), threads=threads)
    given = {name: x.clone() for name, x in inputs.items() if name != "initial_norm"}
    apart = run_kernel(FORWARD, given, attrs, threads=threads)
    taken = run_kernel(FORWARD, given, attrs, threads=threads, in_place=True)
    assert all(torch.equal(apart[name], taken[name]) for name in apart)


@pytest.mark.parametrize("heads", ((2, 2, 6), (1, 1, 8), (4, 2, 8), (4, 1, 2)), ids=str)
@pytest.mark.parametrize("threads", (1, 16))
def test_shared_heads_are_those_repeated(heads, threads):
    """To the bit in the forward; gradients of what is shared are the sums, of float32 numbers, in 16 bits too."""
    queries, keys, values = heads
    inputs = make(70, heads=heads, r=24, dv=32, state=True, grad=True, per_token=True)
    repeats = {"query": max(1, values // queries), "key": values // keys}
    wide = {name: x.repeat_interleave(repeats.get(name, 1), 1) for name, x in inputs.items()}

    def run(name, given, attrs, **options):
        known = {t.name for t in spec.all_specs()[name].inputs}
        return run_kernel(name, {n: x for n, x in given.items() if n in known}, attrs, threads=threads, **options)

    ours, theirs = (run(FORWARD, x, dict(return_state=1)) for x in (inputs, wide))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    ours, theirs = (run(GRAD, x, dict(grad_decay=1, grad_state=1)) for x in (inputs, wide))
    for name, x in ours.items():
        of = name.removeprefix("grad_")
        if repeats.get(of, 1) == 1:
            assert torch.equal(x, theirs[name]), name
        else:
            summed = theirs[name].double().unflatten(1, (-1, repeats[of])).sum(2)
            assert (x - summed).abs().max() <= 2**-20 * theirs[name].abs().max(), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, packed, threads", ((1, False, 2), (17, True, 5), (600, False, 16)))
def test_beta_multiplies_the_keys(n, packed, threads, dtype):
    """Steps, packed requests, requests in pieces, normalised, of shared keys; and a token of 0 leaves the state as it is."""
    for layout, heads, decay in (("bhnd", None, "none"), ("bnhd", (4, 2, 8), "slow")):
        case = dict(heads=heads, r=20, dv=40, packed=packed, layout=layout, dtype=dtype, decay=decay, beta=True)
        check(FORWARD, make(n, state=True, **case), dict(return_state=1, layout=layout, scale=0.5), threads=threads)
        attrs = dict(return_state=1, layout=layout, normalize=1)
        check(FORWARD, make(n, pool=True, norm=True, **case), attrs, threads=threads, in_place=True)
    inputs = make(n, state=True, r=20, dv=40, packed=packed, dtype=dtype, decay="none", beta=True)
    inputs["beta"].zero_()
    found = run_kernel(FORWARD, inputs, dict(return_state=1), threads=threads)
    assert torch.equal(found["final_state"], inputs["initial_state"])


def test_groups_that_do_not_divide_are_refused():
    def refused(message, heads, op_name=FORWARD, **inputs):
        given = make(4, heads=heads, grad=op_name == GRAD) | inputs
        with pytest.raises(ValueError, match=f"{op_name}: {message}"):
            run_kernel(op_name, given, {})

    for op_name in (FORWARD, GRAD):
        refused("Hv = 3 is not a multiple of Hk = 2", (2, 2, 3), op_name)
        refused("Hq = 3 is not a multiple of Hk = 2", (3, 2, 2), op_name)
        refused("Hq = 4 and Hv = 6; one of the two must be a multiple of the other", (4, 2, 6), op_name)
    message = (
        r"grad_output has shape \[2,4,4,7\]: axis 1 of \[B,max\(Hq,Hv\),N,Dv\] is 4; expected 6, because query gives Hq = 2 "
    )
    refused(message + "and value gives Hv = 6", (2, 2, 6), GRAD, grad_output=torch.zeros(2, 4, 4, 7))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("n, r, dv, threads", [(1, 16, 130, 2), (4, 5, 7, 5), (40, 37, 20, 1), (40, 4, 100, 16)])
def test_normalised_form(n, r, dv, threads, packed, layout, dtype):
    inputs = make(n, r=r, dv=dv, norm=True, state=True, packed=packed, layout=layout, dtype=dtype, per_token=True)
    check(FORWARD, inputs, dict(normalize=1, return_state=1, layout=layout, scale=0.3), threads=threads)
    del inputs["initial_state"], inputs["initial_norm"]
    inputs["log_decay"].clamp_(min=-1)
    check(FORWARD, inputs, dict(normalize=1, return_state=1, layout=layout), threads=threads)


@pytest.mark.parametrize("n", (1, 9))
def test_denominators_near_zero_are_held(n):
    inputs = make(n, norm=True)
    inputs["query"][:, 0] = 0
    inputs["query"][:, 1] *= -1
    inputs["query"][:, 2] *= -1e-3
    found = check(FORWARD, inputs, dict(normalize=1, eps=0.25))
    assert (found["output"][:, 0] == 0).all()
    held = run_kernel(FORWARD, inputs, {})["output"][:, 2] / -0.25
    torch.testing.assert_close(found["output"][:, 2], held)


@pytest.mark.parametrize("n", (5, 64, 130))
@pytest.mark.parametrize("per_token", [False, True])
def test_packed_requests_equal_separate_ones(n, per_token):
    inputs = make(n, packed=True, state=True, per_token=per_token)
    found = check(FORWARD, inputs, dict(return_state=1))
    for q, (begin, end) in enumerate(pairwise(inputs["cu_seqlens"].tolist())):
        if end == begin:
            assert torch.equal(found["final_state"][q], inputs["initial_state"][q])
            continue
        alone = {k: inputs[k][:, :, begin:end].contiguous() for k in ("query", "key", "value")}
        decay = inputs["log_decay"]
        alone["log_decay"] = decay[:, :, begin:end].contiguous() if per_token else decay
        alone["initial_state"] = inputs["initial_state"][q : q + 1].contiguous()
        single = run_kernel(FORWARD, alone, dict(return_state=1))
        torch.testing.assert_close(found["output"][:, :, begin:end], single["output"], rtol=1e-5, atol=1e-6)
    check(GRAD, make(n, packed=True, state=True, per_token=per_token, grad=True), dict(grad_decay=1, grad_state=1))


def test_tokens_of_no_request_are_zero():
    for layout in ("bhnd", "bnhd"):
        inputs = make(30, packed=[4, 9, 20], per_token=True, layout=layout, state=True, grad=True)
        forward = {k: x for k, x in inputs.items() if not k.startswith("grad")}
        found = check(FORWARD, forward, dict(return_state=1, layout=layout))
        found |= check(GRAD, inputs, dict(grad_decay=1, grad_state=1, layout=layout))
        for name in ("output", "grad_query", "grad_key", "grad_value", "grad_log_decay"):
            x = swap(found[name], layout)
            assert (x[:, :, :4] == 0).all() and (x[:, :, 20:] == 0).all() and (x[:, :, 4:20] != 0).any(), name


@pytest.mark.parametrize("threads", rest_slow((5, 1, 2, 16)))
@pytest.mark.parametrize("packed", [False, [0, 5, 1000, 1003], [0, 700, 700, 1003]])
def test_few_heads_many_threads(threads, packed):
    """One head and one block of columns: the threads share the tokens of a request, in ragged pieces."""
    for per_token, dtype in ((False, "float32"), (True, "bfloat16")):
        check_both(n=1003, b=1, kv=1, group=2, r=6, dv=9, packed=packed, per_token=per_token, dtype=dtype, threads=threads)
    inputs = make(1003, b=1, kv=1, norm=True, pool=True, packed=packed)
    check(FORWARD, inputs, dict(normalize=1, return_state=1), threads=threads, in_place=True)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("normalize", [0, 1])
@pytest.mark.parametrize("n, dv, packed", [(1, 7, False), (1, 64, False), (12, 100, False), (12, 7, True)])
def test_pool_rows_not_named_stay(in_place, normalize, n, dv, packed):
    inputs = make(n, dv=dv, pool=True, norm=bool(normalize), packed=packed)
    copy = {k: x.clone() for k, x in inputs.items()}
    found = run_kernel(FORWARD, copy, dict(return_state=1, normalize=normalize), in_place=in_place)
    check(FORWARD, inputs, dict(return_state=1, normalize=normalize), found)
    assert in_place == (found["final_state"].data_ptr() == copy["initial_state"].data_ptr())
    assert in_place or torch.equal(copy["initial_state"], inputs["initial_state"])


def narrow(inputs):
    """That call with states of 16 bits."""
    return inputs | {"initial_state": inputs["initial_state"].to(inputs["query"].dtype)}


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("normalize", [0, 1])
@pytest.mark.parametrize(
    "n, dv, packed, pool", ((1, 64, False, False), (1, 7, False, True), (40, 33, True, True), (600, 64, False, True))
)
def test_narrow_states(n, dv, packed, pool, normalize, in_place, dtype):
    """Read and rounded once, whatever the call: prompts in pieces among several threads, steps, pools."""
    case = dict(dv=dv, group=2, kv=1, state=True, norm=bool(normalize), packed=packed, pool=pool, dtype=dtype)
    inputs = narrow(make(n, **case, b=1, per_token=True))
    attrs = dict(return_state=1, normalize=normalize)
    for threads in (1, 16):
        copy = {k: x.clone() for k, x in inputs.items()}
        found = run_kernel(FORWARD, copy, attrs, in_place=in_place, threads=threads)
        assert found["final_state"].dtype == DTYPES[dtype]
        check(FORWARD, inputs, attrs, found)
        assert in_place == (found["final_state"].data_ptr() == copy["initial_state"].data_ptr())
        assert in_place or torch.equal(copy["initial_state"], inputs["initial_state"])
        only_read = run_kernel(FORWARD, {k: x.clone() for k, x in inputs.items()}, attrs | {"return_state": 0}, threads=threads)
        assert torch.equal(only_read["output"], found["output"])


def test_types_of_states():
    inputs = make(3, state=True, dtype="float16")
    with pytest.raises(ValueError, match="initial_state has type bfloat16; expected float32, or float16, the type of query"):
        run_kernel(FORWARD, inputs | {"initial_state": inputs["initial_state"].bfloat16()}, {"return_state": 1})
    single = make(3, state=True)
    with pytest.raises(ValueError, match="initial_state has type float16; expected float32$"):
        run_kernel(FORWARD, single | {"initial_state": single["initial_state"].half()}, {"return_state": 1})
    given = {k: x for k, x in inputs.items() if k != "initial_state"}
    assert run_kernel(FORWARD, given, {"return_state": 1})["final_state"].dtype == torch.float32


@pytest.mark.parametrize("n", (1, 3, 70, 700))
@pytest.mark.parametrize("group, dv", ((1, 7), (3, 100), (5, 64)))
def test_in_place_equals_out_of_place(n, group, dv):
    inputs = make(n, state=True, norm=True, group=group, dv=dv, kv=1, b=1)
    for threads in (1, 2, 5):
        apart = run_kernel(FORWARD, inputs, dict(return_state=1, normalize=1), threads=threads)
        same = run_kernel(
            FORWARD,
            {k: t.clone() for k, t in inputs.items()},
            dict(return_state=1, normalize=1),
            threads=threads,
            in_place=True,
        )
        assert all(torch.equal(apart[k], same[k]) for k in apart)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout, r, dv", [("bhnd", 5, 7), ("bnhd", 37, 64), ("bnhd", 64, 144)])
@pytest.mark.parametrize("pieces", ((130,), (1, 1, 1), (64, 1, 1, 15, 49), (16, 17, 97)))
def test_splitting_and_carrying_the_state_equals_one_call(pieces, layout, r, dv, dtype):
    inputs = make(sum(pieces), r=r, dv=dv, state=True, norm=True, per_token=True, layout=layout, dtype=dtype)
    attrs = dict(return_state=1, normalize=1, layout=layout)
    axis = 2 if layout == "bhnd" else 1
    for in_place in (False, True):
        carried = {k: inputs[k].clone() for k in ("initial_state", "initial_norm")}
        outputs, first = [], 0
        for piece in pieces:
            part = {k: inputs[k].narrow(axis, first, piece).contiguous() for k in ("query", "key", "value", "log_decay")}
            found = run_kernel(FORWARD, part | carried, attrs, in_place=in_place)
            carried = {k: found[k.replace("initial", "final")] for k in carried}
            outputs.append(found["output"])
            first += piece
        check(FORWARD, inputs, attrs, found | dict(output=torch.cat(outputs, axis)))


def test_states_and_gradients_from_nothing():
    """Without initial values and decay: sums of this call alone."""
    check(FORWARD, make(70, decay="none"), dict(return_state=1))
    check(FORWARD, make(70, decay="none", norm=True), dict(return_state=1, normalize=1))
    check(GRAD, make(70, decay="none", grad=True), dict(grad_state=1))
    check(GRAD, make(70, grad=True), {})


@pytest.mark.parametrize("algorithm", ["auto", "causal_dot_product", "fleet", "lightning"])
def test_named_algorithms(algorithm):
    check(FORWARD, make(33), dict(algorithm=algorithm))


def test_kernel_gradients_are_those_of_the_forward():
    """Against autograd through the reference in float64."""
    inputs = make(90, state=True, grad=True, group=3)
    found = run_kernel(GRAD, inputs, dict(grad_decay=1, grad_state=1, scale=0.5))
    names = ("query", "key", "value", "log_decay", "initial_state")
    leaves = [inputs[k].double().requires_grad_() for k in names]
    output, state = reference.causal_linear_decay(*leaves, scale=0.5, return_state=1)
    expected = torch.autograd.grad([output, state], leaves, [inputs[k].double() for k in ("grad_output", "grad_final_state")])
    for (name, x), y in zip(found.items(), expected, strict=True):
        assert rms(x - y) <= 2e-6 * rms(y), name


@pytest.mark.parametrize("per_token", [False, True])
def test_long_sequences(per_token):
    """A thousand times the length that a decay of 0.999 remembers less than: no rounding of it adds up."""
    n = 8192
    inputs = make(n, b=1, group=1, kv=1, r=8, dv=8, per_token=per_token, state=True, grad=True)
    inputs["log_decay"].clamp_(min=math.log(0.999)) if not per_token else inputs["log_decay"].fill_(math.log(0.999))
    forward = {k: x for k, x in inputs.items() if not k.startswith("grad")}
    for op, ins, attrs in ((FORWARD, forward, dict(return_state=1)), (GRAD, inputs, dict(grad_decay=1, grad_state=1))):
        exact = judge(op, ins, attrs)
        for threads in (1, 16):
            for name, x in run_kernel(op, ins, attrs, threads=threads).items():
                assert rms(x - exact[name]) <= 2e-6 * rms(exact[name]), name


@pytest.mark.slow
@pytest.mark.own_instruction_set
def test_a_million_tokens():
    inputs = make(1 << 20, b=1, group=1, kv=1, r=2, dv=3)
    exact = judge(FORWARD, inputs, dict(return_state=1))
    for name, x in run_kernel(FORWARD, inputs, dict(return_state=1), threads=5).items():
        assert rms(x - exact[name]) <= 2e-6 * rms(exact[name]), name


@pytest.mark.parametrize("threads", (1, 2, 5))
def test_repeatable(threads):
    for op, inputs, attrs in (
        (FORWARD, make(777, state=True, norm=True), dict(return_state=1, normalize=1)),
        (GRAD, make(777, kv=1, b=1, grad=True), dict(grad_decay=1)),
    ):
        first = run_kernel(op, inputs, attrs, threads=threads)
        for _ in range(3):
            again = run_kernel(op, inputs, attrs, threads=threads)
            assert all(torch.equal(first[k], again[k]) for k in first)


@pytest.mark.parametrize("offsets", [(-5, 3, 99, 2, 7), (9, 1, 0, -(2**31), 2**31 - 1), (7, 7, 7, 7, 7), (0, 900, 0, 900, 0)])
@pytest.mark.parametrize("n", (9, 900))
def test_garbage_offsets_stay_inside(offsets, n):
    for threads in (1, 16):
        inputs = make(n, packed=list(offsets), state=True, norm=True, kv=1)
        found = run_kernel(FORWARD, inputs, dict(return_state=1, normalize=1), threads=threads)
        assert all(torch.isfinite(x).all() for x in found.values())
        inputs = make(n, packed=list(offsets), state=True, grad=True, kv=1, per_token=True)
        found = run_kernel(GRAD, inputs, dict(grad_decay=1, grad_state=1), threads=threads)
        assert all(torch.isfinite(x).all() for x in found.values())


@pytest.mark.parametrize("index", [(-1, 2), (2**31 - 1, -(2**31)), (5, 0), (3, 3)])
@pytest.mark.parametrize("n", (1, 4))
def test_garbage_pool_rows_read_zeros_and_write_nothing(index, n):
    inputs = make(n, pool=True)
    inputs["state_index"] = torch.tensor(index, dtype=I32)
    before = inputs["initial_state"].clone()
    plain = {k: v for k, v in inputs.items() if k not in ("initial_state", "state_index")}
    zero = run_kernel(FORWARD, plain, {})
    outside = [b for b, i in enumerate(index) if not 0 <= i < 5]
    untouched = [i for i in range(5) if i not in index]
    for in_place in (False, True):
        found = run_kernel(FORWARD, inputs, dict(return_state=1), in_place=in_place)
        assert torch.equal(found["output"][outside], zero["output"][outside])
        assert torch.equal(found["final_state"][untouched], before[untouched])
        assert torch.isfinite(found["final_state"]).all()


@pytest.mark.parametrize("later", (float("nan"), float("inf")))
def test_later_tokens_leave_earlier_outputs_alone(later):
    inputs = make(40, dv=40)
    clean = run_kernel(FORWARD, inputs, {})["output"]
    for name in ("query", "key", "value"):
        inputs[name][:, :, 21:] = later
    assert torch.equal(run_kernel(FORWARD, inputs, {})["output"][:, :, :21], clean[:, :, :21])


@pytest.mark.parametrize("op_name", (FORWARD, GRAD))
@pytest.mark.parametrize("value", (0.25, float("nan"), float("inf")))
def test_decays_must_not_grow(op_name, value):
    inputs = make(7, kv=2, layout="bnhd", per_token=True, grad=op_name == GRAD)
    inputs["log_decay"][1, 4, 1] = value
    with pytest.raises(ValueError, match=rf"{op_name}.*log_decay\[1,4,1\] is -?{value}.*\[-inf, 0\]"):
        run_kernel(op_name, inputs, dict(layout="bnhd"))


def test_checks_of_pool_rows_and_offsets(monkeypatch):
    monkeypatch.setenv("LEANFLEET_CHECK", "1")
    inputs = make(6, packed=True, pool=True)
    run_kernel(FORWARD, inputs, dict(return_state=1))
    for name, values, message in (
        ("cu_seqlens", (1, 2, 2, 5, 6), r"cu_seqlens\[0\] is 1;.*0"),
        ("cu_seqlens", (0, 2, 1, 5, 6), r"cu_seqlens\[2\] is 1.*2"),
        ("cu_seqlens", (0, 2, 2, 4, 7), r"cu_seqlens\[4\] is 7;.*N = 6"),
        ("state_index", (0, 1, 7, 2), r"state_index\[2\] is 7;.*0 \.\. 6"),
        ("state_index", (-1, 1, 3, 2), r"state_index\[0\] is -1;.*0 \.\. 6"),
        ("state_index", (0, 1, 2, 1), r"state_index\[3\] is 1.*state_index\[1\]"),
    ):
        with pytest.raises(ValueError, match=rf"{FORWARD}.*{message}"):
            run_kernel(FORWARD, inputs | {name: torch.tensor(values, dtype=I32)}, dict(return_state=1))


def scratch_bytes(op_name, tokens, threads, packed=False, heads=(4, 2, 2)):
    op = spec.all_specs()[op_name]
    given = ["cu_seqlens"] if packed else []
    dims = dict(B=1, Hq=heads[0], Hk=heads[1], Hv=heads[2], N=tokens, R=64, Dv=128, Q=3)
    dtypes = dict(T="bfloat16", F="float32", I="int32")
    entries = [
        (0, tuple(a.size(dims) for a in op.shape_of(t, set(given)).ordered("bhnd")), dtypes[t.type])
        if not t.optional or t.name in given
        else None
        for t in op.inputs
    ]
    return native.Call(op_name, entries, [None] * len(op.outputs), {}, threads=threads).workspace()[0]


@pytest.mark.parametrize("threads", (1, 2, 16))
@pytest.mark.parametrize("packed", (False, True))
def test_scratch_stays_small(threads, packed):
    """Forward: a few states a thread, however many tokens. Gradients: the square root of the tokens in states."""
    state = 64 * 128 * 4
    sizes = [scratch_bytes(FORWARD, tokens, threads, packed) for tokens in (1 << 14, 1 << 20)]
    assert max(sizes) <= threads * 16 * state
    tokens = 1 << 20
    assert scratch_bytes(GRAD, tokens, threads, packed) <= threads * 3 * (tokens / 16) ** 0.5 * state + threads * 16 * state
    # Heads of keys that many states share: sums for a part of the states at a time.
    few, many = (scratch_bytes(GRAD, 2048, threads, packed, heads) for heads in ((8, 8, 8), (8, 8, 128)))
    expanded = 2048 * 64 * 4 * 128
    assert many - few <= 2 * expanded * max(8, 4 * threads) / 128 + threads * 16 * state
