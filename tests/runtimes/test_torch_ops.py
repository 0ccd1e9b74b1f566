"""torch.ops.leanfleet: agreement with the reference, autograd, fakes, torch.compile, errors."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from leanfleet import native
from leanfleet.export import reference, torch_ops
from support.paths import ROOT

D = torch.float64


def randn(*shape, dtype=torch.float32, grad=False):
    return torch.randn(*shape, dtype=D).to(dtype).requires_grad_(grad)


def decay_inputs(dtype=torch.float32, grad=False, tokens=9):
    """query [2,6,N,4], key [2,2,N,4], value [2,2,N,5], log_decay [2], initial_state [2,2,4,5]."""
    wide = D if dtype == D else torch.float32
    return [
        randn(2, 6, tokens, 4, dtype=dtype, grad=grad),
        randn(2, 2, tokens, 4, dtype=dtype, grad=grad),
        randn(2, 2, tokens, 5, dtype=dtype, grad=grad),
        (-torch.rand(2, dtype=D)).to(wide).requires_grad_(grad),
        randn(2, 2, 4, 5, dtype=wide, grad=grad),
    ]


def attention_inputs(dtype=torch.float32):
    """One call with append: two requests of 3 and 2 new tokens over caches of 11 slots."""
    return dict(
        query=randn(2, 6, 3, 8, dtype=dtype),
        key_cache=randn(2, 2, 11, 8, dtype=dtype),
        value_cache=randn(2, 2, 11, 4, dtype=dtype),
        seq_lens=torch.tensor([9, 5], dtype=torch.int32),
        query_lens=torch.tensor([3, 2], dtype=torch.int32),
        new_key=randn(2, 2, 3, 8, dtype=dtype),
        new_value=randn(2, 2, 3, 4, dtype=dtype),
    )


def close(found, expected, factor=8.0):
    scale = expected[torch.isfinite(expected)].abs().max()
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=factor * torch.finfo(torch.float32).eps * scale)


def doubled(tensors):
    return [t.detach().double() if t is not None and t.is_floating_point() else t for t in tensors]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(7)


def test_functional_and_mutating_forms_agree_with_the_reference():
    inputs = attention_inputs()
    before = {name: t.clone() for name, t in inputs.items()}
    expected = reference.lean_attention(
        *doubled(
            [inputs.get(n) for n in ("query", "key_cache", "value_cache", "seq_lens", "query_lens", "new_key", "new_value")]
        ),
        append=True,
    )
    found = torch_ops.lean_attention(**inputs, append=True)
    assert len(found) == 4 and len(torch_ops.lean_attention(inputs["query"], inputs["key_cache"], inputs["value_cache"])) == 2
    for f, e in zip(found, expected, strict=True):
        close(f, e)
    assert all(torch.equal(t, before[name]) for name, t in inputs.items()), "the functional form changed an input"
    in_place = torch_ops.lean_attention_(**inputs)
    assert len(in_place) == 2 and torch.equal(in_place[0], found[0])
    assert torch.equal(inputs["key_cache"], found[2]) and torch.equal(inputs["value_cache"], found[3])


def test_state_updated_in_place():
    q, k, v, decay, state = decay_inputs()
    kept = state.clone()
    output, final = torch_ops.causal_linear_decay(q, k, v, decay, state, return_state=True)
    assert torch.equal(state, kept)
    in_place = torch_ops.causal_linear_decay_(q, k, v, decay, state)
    assert torch.equal(in_place, output) and torch.equal(state, final)


@pytest.mark.parametrize("heads", [9, 27])
def test_large_states_are_the_same_in_place_and_not(heads):
    """8.8 MB of states: one token's new states go past the cache where they stand apart from the old."""
    q, k, v = randn(2, heads, 1, 256).abs(), randn(2, 9, 1, 256).abs(), randn(2, 9, 1, 480)
    decay, state = -torch.rand(9), randn(2, 9, 256, 480)
    output, final = torch_ops.causal_linear_decay(q, k, v, decay, state, return_state=True)
    sums = state.abs(), randn(2, 9, 256).abs(), randn(2, 9, 480), torch.tensor([5, 9], dtype=torch.int32)
    normalized = torch_ops.normalized_linear_attention(q, k, v, None, *sums, return_state=True)
    assert torch.equal(torch_ops.causal_linear_decay_(q, k, v, decay, state), output) and torch.equal(state, final)
    in_place = torch_ops.normalized_linear_attention_(q, k, v, None, *sums)
    assert all(torch.equal(a, b) for a, b in zip((*in_place, *sums), normalized, strict=True))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
def test_causal_linear_decay_gradcheck(normalize, per_token):
    """One request, two query heads over one, 3 tokens, R 2, Dv 1: small, because finite differences try every element."""
    q, k = (torch.rand(1, h, 3, 2, dtype=D).requires_grad_() for h in (2, 1))
    v, state = randn(1, 1, 3, 1, dtype=D, grad=True), randn(1, 1, 2, 1, dtype=D, grad=True)
    decay = (-torch.rand(*((1, 1, 3) if per_token else (1,)), dtype=D)).requires_grad_()
    norm = torch.rand(1, 1, 2, dtype=D).requires_grad_() if normalize else None
    assert torch.autograd.gradcheck(
        lambda *a: torch_ops.causal_linear_decay(
            *a[:5], a[5] if normalize else None, normalize=normalize, return_state=True, scale=0.7
        ),
        (q, k, v, decay, state) + ((norm,) if normalize else ()),
    )


@pytest.mark.parametrize("queries", [1, 2, 4])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_gradients_with_beta(normalize, layout, queries):
    """Keys that two states share, each with a beta of its own, and fewer queries, as many or more: finite differences, and
    float32 beside float64."""
    swap = (lambda x: x) if layout == "bhnd" else (lambda x: x.transpose(1, 2).contiguous())

    def run(*a):
        *a, beta = a
        return torch_ops.causal_linear_decay(*a, beta=beta, normalize=normalize, return_state=True, scale=0.7, layout=layout)

    def inputs(n, dtype):
        g = torch.Generator().manual_seed(n)
        drawn = [swap(torch.rand(1, heads, n, width, generator=g, dtype=D)) for heads, width in ((queries, 2), (1, 2), (2, 3))]
        drawn += [-torch.rand(2, generator=g, dtype=D), torch.rand(1, 2, 2, 3, generator=g, dtype=D)]
        if normalize:
            drawn.append(torch.rand(1, 2, 2, generator=g, dtype=D))
        drawn.append(swap(torch.rand(1, 2, n, 1, generator=g, dtype=D)).squeeze(-1))
        return [x.to(dtype).requires_grad_() for x in drawn]

    assert torch.autograd.gradcheck(run, inputs(3, D))
    results = []
    for dtype in (torch.float32, D):
        leaves = inputs(70, dtype)
        results.append(torch.autograd.grad(sum(o.square().sum() for o in run(*leaves)), leaves))
    for found, expected in zip(*results, strict=True):
        close(found, expected, factor=64.0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("normalize_qk", [False, True])
def test_normalized_linear_attention_gradcheck(causal, normalize_qk):
    q, k, v = (randn(1, h, 3, 2, dtype=D, grad=True) for h in (2, 1, 1))
    ab = torch.tensor([9.0, 0.6], dtype=D, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *a: torch_ops.normalized_linear_attention(*a, causal=causal, normalize_qk=normalize_qk)[0], (q, k, v, ab)
    )


def test_a_single_output_is_a_tensor():
    """Several are a tuple, also where the attributes alone say how many."""
    q, k, v, decay, state = decay_inputs()
    output = torch_ops.causal_linear_decay(q, k, v, decay)
    pair = torch_ops.causal_linear_decay(q, k, v, decay, return_state=True)
    assert torch.is_tensor(output) and isinstance(pair, tuple) and len(pair) == 2 and torch.equal(output, pair[0])
    in_place = torch_ops.causal_linear_decay_(q, k, v, decay, state)
    assert torch.is_tensor(in_place) and in_place.shape == output.shape
    assert len(torch_ops.lean_attention(q, k, v)) == 2
    compiled = torch.compile(lambda *x: torch_ops.causal_linear_decay(*x), backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v, decay), output)


@pytest.mark.parametrize("normalize", [False, True])
def test_kernel_gradients_agree_with_float64(normalize):
    q, k, v, decay, state = decay_inputs(tokens=70)
    q, k = q.abs(), k.abs()
    norm = torch.rand(2, 2, 4) if normalize else None
    given = [t for t in (q, k, v, decay, state, norm) if t is not None]
    results = []
    for dtype in (torch.float32, D):
        leaves = [t.detach().to(dtype).requires_grad_() for t in given]
        output, final = torch_ops.causal_linear_decay(*leaves, normalize=normalize, return_state=True)[:2]
        (output.square().sum() + final.sum()).backward()
        results.append([leaf.grad for leaf in leaves])
    for found, expected in zip(*results, strict=True):
        close(found, expected, factor=64.0)


def samples():
    """(operator, inputs, attributes) for opcheck, gradients asked for where there are any."""
    ops = torch.ops.leanfleet
    q, k, v, decay, state = decay_inputs(grad=True)
    plain = [t.detach() for t in (q, k, v, decay, state)]
    attention = list(attention_inputs().values())
    grad = randn(2, 6, 9, 5)
    nq, nk, nv = randn(1, 4, 5, 4, grad=True), randn(1, 2, 5, 4, grad=True), randn(1, 2, 5, 3, grad=True)
    output, normalizer = torch_ops.normalized_linear_attention(nq.detach(), nk.detach(), nv.detach())
    sampling = [randn(2, 40), torch.ones(2), *[None] * 3, torch.tensor([1, 2]), torch.tensor([0, 1], dtype=torch.int32)]
    sampling.append(torch.zeros(2, 40, dtype=torch.int32))
    delta = [randn(2, 2, 9, 4), randn(2, 2, 9, 4), randn(2, 4, 9, 5), -torch.rand(2, 4, 9), torch.rand(2, 4, 9)]
    delta.append(randn(2, 4, 4, 5))
    lens = torch.tensor([9, 4], dtype=torch.int32)
    conv = [randn(2, 9, 6), randn(4, 6), None, randn(2, 3, 6), lens]
    blocks = [randn(2, 3, 64), torch.randint(-8, 8, (5, 64), dtype=torch.int8), randn(5, 2)]
    return {
        "lean_attention": (ops.lean_attention.default, attention[:3], {}),
        "lean_attention append": (ops.lean_attention.default, attention, {"append": True}),
        "lean_attention rotary": (
            ops.lean_attention.default,
            [*attention, None, None, None, *torch.rand(2, 9, 4)],
            {"append": True, "rotary_interleaved": True},
        ),
        "lean_attention_": (ops.lean_attention_.default, attention, {}),
        "causal_linear_decay": (ops.causal_linear_decay.default, [q, k, v, decay, state], {"return_state": True}),
        "causal_linear_decay no state": (ops.causal_linear_decay.default, [q, k, v], {"layout": "bhnd"}),
        "causal_linear_decay beta": (ops.causal_linear_decay.default, [q, k, v, decay, *[None] * 4, torch.rand(2, 2, 9)], {}),
        "causal_linear_decay narrow": (
            ops.causal_linear_decay.default,
            [*(t.half() for t in (q, k, v)), decay, state.half()],
            {"return_state": True},
        ),
        "causal_linear_decay_": (ops.causal_linear_decay_.default, plain, {}),
        "causal_linear_decay_grad": (
            ops.causal_linear_decay_grad.default,
            plain + [grad],
            {"grad_decay": True, "grad_state": True},
        ),
        "normalized_linear_attention": (ops.normalized_linear_attention.default, [nq, nk, nv], {}),
        "normalized_linear_attention state": (
            ops.normalized_linear_attention.default,
            [t.detach() for t in (nq, nk, nv)],
            {"return_state": True},
        ),
        "normalized_linear_attention_grad": (
            ops.normalized_linear_attention_grad.default,
            [nq.detach(), nk.detach(), nv.detach(), None, output, normalizer, randn(*output.shape)],
            {},
        ),
        "normalized_linear_attention_grad alone": (
            ops.normalized_linear_attention_grad.default,
            [nq.detach(), nk.detach(), nv.detach(), None, output, normalizer, randn(*output.shape)],
            {"grad_coefficients": False},
        ),
        "sample_tokens": (ops.sample_tokens.default, sampling[:1], {}),
        "sample_tokens counts": (
            ops.sample_tokens.default,
            sampling,
            {"count_tokens": True, "logprob": True, "num_logprobs": 3},
        ),
        "sample_tokens_": (ops.sample_tokens_.default, sampling, {"num_logprobs": 2}),
        "gated_activation": (ops.gated_activation.default, [randn(2, 3, 2, 8)], {"activation": "gelu"}),
        "block_linear": (ops.block_linear.default, blocks, {}),
        "block_linear rounded": (ops.block_linear.default, [*blocks, randn(5, 2), randn(5)], {"round_input": True}),
        "decay_gates": (ops.decay_gates.default, [randn(2, 5, 3), -torch.ones(3)], {}),
        "decay_gates all": (
            ops.decay_gates.default,
            [randn(2, 9, 3, 4), -torch.ones(3), randn(3, 4), randn(2, 9, 3), lens],
            {"per_key": True, "return_step": True, "return_beta": True},
        ),
        "rms_norm": (ops.rms_norm.default, [randn(2, 3, 6), torch.ones(6)], {}),
        "rms_norm all": (
            ops.rms_norm.default,
            [randn(2, 3, 9), torch.ones(6), randn(2, 3, 6), randn(2, 3, 8)],
            {"return_sum": True, "columns": True, "gate_columns": True, "first_gate_column": 1, "group": 3},
        ),
        "linear": (ops.linear.default, [randn(2, 3, 6), randn(6, 5), randn(5)], {}),
        "linear gated": (ops.linear.default, [randn(2, 3, 6), randn(6, 2, 5)], {"gated": True, "activation": "relu"}),
        "all_reduce": (ops.all_reduce.default, [randn(2, 3)], {}),
        "all_gather": (ops.all_gather.default, [randn(2, 3)], {"world": 1}),
        "merge_attention": (ops.merge_attention.default, [randn(2, 1, 3, 4, 8), randn(2, 1, 3, 4)], {}),
        "gated_delta_rule": (ops.gated_delta_rule.default, delta, {"return_state": True, "normalize_qk": True}),
        "gated_delta_rule no state": (ops.gated_delta_rule.default, [*delta[:3], None, delta[4]], {}),
        "gated_delta_rule_": (ops.gated_delta_rule_.default, delta, {}),
        "gated_delta_rule_grad": (
            ops.gated_delta_rule_grad.default,
            [*delta[:6], randn(*delta[2].shape)],
            {"grad_decay": True, "grad_state": True},
        ),
        "causal_conv": (ops.causal_conv.default, conv, {"return_state": True, "activation": "silu"}),
        "causal_conv split": (ops.causal_conv.default, conv[:2], {"split": True, "first": 1, "second": 2, "third": 3}),
        "causal_conv no state": (ops.causal_conv.default, [*conv[:2], randn(6)], {}),
        "causal_conv_": (ops.causal_conv_.default, conv, {}),
    }


@pytest.mark.parametrize(
    "name",
    [
        "lean_attention",
        "lean_attention append",
        "lean_attention rotary",
        "lean_attention_",
        "causal_linear_decay",
        "causal_linear_decay no state",
        "causal_linear_decay beta",
        "causal_linear_decay_",
        "causal_linear_decay_grad",
        "normalized_linear_attention",
        "normalized_linear_attention state",
        "normalized_linear_attention_grad",
        "normalized_linear_attention_grad alone",
        "sample_tokens",
        "sample_tokens counts",
        "sample_tokens_",
        "gated_activation",
        "block_linear",
        "block_linear rounded",
        "decay_gates",
        "decay_gates all",
        "rms_norm",
        "rms_norm all",
        "linear",
        "linear gated",
        "all_reduce",
        "all_gather",
        "merge_attention",
        "gated_delta_rule",
        "gated_delta_rule no state",
        "gated_delta_rule_",
        "gated_delta_rule_grad",
        "causal_conv",
        "causal_conv split",
        "causal_conv no state",
        "causal_conv_",
    ],
)
@pytest.mark.usefixtures("world_of_one")
def test_opcheck(name):
    op, inputs, attrs = samples()[name]
    torch.library.opcheck(op, tuple(inputs), attrs)


def test_inputs_behind_a_required_one_are_given_by_name():
    """By its place such an input would land one further on."""
    query, key, value, grad, state = (
        randn(1, 2, 3, 4),
        randn(1, 2, 3, 4),
        randn(1, 2, 3, 5),
        randn(1, 2, 3, 5),
        randn(1, 2, 4, 5),
    )
    with pytest.raises(TypeError, match="positional"):
        torch_ops.causal_linear_decay_grad(query, key, value, None, None, state, grad_output=grad)
    with pytest.raises(TypeError, match="positional"):
        torch_ops.gated_delta_rule(query, key, value, None, state, beta=torch.rand(1, 2, 3))


def test_every_operator_is_in_the_samples():
    covered = {name.split()[0] for name in samples()}
    assert covered == {n for n in torch_ops.__dict__ if n.rstrip("_") in {s.snake_name for s in torch_ops._SPECS.values()}} - {
        "normalized_linear_attention_"
    }


def test_compiles_without_graph_breaks():
    def layer(q, k, v, decay, cache_k, cache_v):
        mixed = torch_ops.causal_linear_decay(q, k, value=v, log_decay=decay, scale=0.5)
        attended = torch_ops.lean_attention(mixed + 1, cache_k, cache_v)[0]
        return torch_ops.normalized_linear_attention(attended * 2, k, v, causal=False)[0].sum()

    q, k, v, decay = randn(1, 4, 6, 8, grad=True), randn(1, 2, 6, 8), randn(1, 2, 6, 8), torch.tensor([-0.1, -0.5])
    caches = randn(1, 2, 10, 8), randn(1, 2, 10, 8)
    with torch.no_grad():
        expected = layer(q, k, v, decay, *caches)
        found = torch.compile(layer, fullgraph=True, backend="aot_eager")(q, k, v, decay, *caches)
    assert torch.equal(found, expected)

    def trained(q):
        return torch_ops.causal_linear_decay(q, k, v, decay).square().sum()

    trained(q).backward()
    eager, q.grad = q.grad, None
    torch.compile(trained, fullgraph=True, backend="aot_eager")(q).backward()
    assert torch.equal(q.grad, eager)


def test_non_contiguous_inputs_are_right_and_in_place_ones_refused():
    q, k, v, decay, state = decay_inputs()
    transposed = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    assert torch.equal(torch_ops.causal_linear_decay(*transposed, decay), torch_ops.causal_linear_decay(q, k, v, decay))
    strided = state.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ValueError, match="initial_state has strides .* it must be contiguous"):
        torch_ops.causal_linear_decay_(q, k, v, decay, strided)


def test_a_planned_call_is_not_taken_for_another():
    """Repeated calls reuse a plan; another attribute, type, stride or set of inputs must not find it."""
    for dtype in (torch.float32, torch.float16, torch.float32):
        inputs = list(attention_inputs(dtype).values())[:3] + [torch.tensor([9, 5], dtype=torch.int32)]
        strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs[:3]] + inputs[3:]
        tables = {"cos_cache": torch.rand(9, 2), "sin_cache": torch.rand(9, 2)}
        for attrs in (
            {},
            {"scale": 0.5},
            {"window": 3},
            {"causal": False},
            {"softcap": 1.0},
            tables,
            {**tables, "rotary_interleaved": True},
            {},
        ):
            expected = reference.lean_attention(*doubled(inputs), **attrs)[0]
            factor = 8.0 if dtype == torch.float32 else 8192.0
            found = torch_ops.lean_attention(*inputs, **attrs)[0]
            assert found.dtype == dtype
            close(found, expected, factor)
            assert torch.equal(torch_ops.lean_attention(*strided, **attrs)[0], found)
        unmasked = torch_ops.lean_attention(*inputs[:3])[0]
        close(unmasked, reference.lean_attention(*doubled(inputs[:3]))[0], factor)
        assert not torch.equal(unmasked, torch_ops.lean_attention(*inputs)[0])


def test_results_of_equal_calls_do_not_share_memory():
    q, k, v, decay, state = decay_inputs()
    first = torch_ops.causal_linear_decay(q, k, v, decay, state, return_state=True)
    kept = [t.clone() for t in first]
    torch_ops.causal_linear_decay(q + 1, k, v, decay, state + 1, return_state=True)
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))


def test_threads_may_call_at_once():
    """The same shapes from four threads, each with its own numbers."""
    inputs = [decay_inputs(tokens=40) for _ in range(4)]
    expected = [torch_ops.causal_linear_decay(*i) for i in inputs]

    def work(i):
        return all(torch.equal(torch_ops.causal_linear_decay(*inputs[i]), expected[i]) for _ in range(50))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_an_error_is_raised_again_and_leaves_later_calls_alone(monkeypatch):
    q, k, v, decay, _ = decay_inputs()
    right = torch_ops.causal_linear_decay(q, k, v, decay)
    for _ in range(2):  # log_decay's values are looked at in every call, its plan made or not
        with pytest.raises(ValueError, match="log_decay"):
            torch_ops.causal_linear_decay(q, k, v, -decay)
    assert torch.equal(torch_ops.causal_linear_decay(q, k, v, decay), right)
    monkeypatch.setattr(torch_ops, "_MAX_PLANS", 1)
    called = by_ctypes("CausalLinearDecay")
    assert torch.equal(called(q, k, v, decay, scale=2.0)[0], 2 * right)
    assert len(torch_ops._plans.by_key) == 1
    assert torch.equal(called(q, k, v, decay)[0], right)


@pytest.mark.parametrize(
    "args, kwargs, message",
    [
        (3, {"query": 0}, "multiple values for argument 'query'"),
        (2, {}, "missing a required argument: 'value'"),
        (3, {"window": 1}, "unexpected keyword argument 'window'"),
        (10, {}, "too many positional arguments"),
    ],
)
def test_wrong_signatures_are_type_errors(args, kwargs, message):
    tensors = [randn(1, 1, 2, 4)] * args
    with pytest.raises(TypeError, match=message):
        torch_ops.causal_linear_decay(*tensors, **kwargs)
    with pytest.raises(TypeError, match="missing a required argument: 'grad_output'"):
        torch_ops.causal_linear_decay_grad(*[randn(1, 1, 2, 4)] * 3)


def test_modes_see_both_passes():
    """The forward operator calls its kernel past the dispatcher only where nobody listens in between."""
    seen = []

    class Listener(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **kwargs or {})

    ops = torch.ops.leanfleet
    for public, names in (
        (torch_ops.causal_linear_decay, ("causal_linear_decay", "causal_linear_decay_grad")),
        (torch_ops.normalized_linear_attention, ("normalized_linear_attention", "normalized_linear_attention_grad")),
    ):
        inputs = [randn(1, 2, 5, 4, grad=True) for _ in range(3)]
        alone = torch.autograd.grad(public(*inputs)[0].square().sum(), inputs)
        seen.clear()
        with Listener():
            found = torch.autograd.grad(public(*inputs)[0].square().sum(), inputs)
        assert [f for f in seen if f.namespace == "leanfleet"] == [getattr(ops, name).default for name in names]
        assert all(torch.equal(a, b) for a, b in zip(alone, found, strict=True))


def test_a_call_in_inference_mode_leaves_training_alone():
    """Both use one plan."""
    q, k, v = (randn(1, 2, 6, 4, grad=True) for _ in range(3))
    for public in (torch_ops.causal_linear_decay, torch_ops.normalized_linear_attention):
        with torch.inference_mode():
            expected = public(q, k, v)[0]
        output = public(q, k, v)[0]
        assert torch.equal(output, expected) and not output.is_inference()
        output.sum().backward()


def test_gradients_are_not_differentiable():
    for public in (torch_ops.causal_linear_decay, torch_ops.normalized_linear_attention):
        q, k, v = (randn(1, 2, 5, 4, grad=True) for _ in range(3))
        (first,) = torch.autograd.grad(public(q, k, v)[0].sum(), q, create_graph=True)
        with pytest.raises(NotImplementedError, match="Grad has no backward"):
            first.sum().backward()


@pytest.mark.parametrize("dtype", (torch.float32, D), ids=str)
@pytest.mark.parametrize(
    "function",
    (
        torch_ops.lean_attention,
        torch_ops.causal_linear_decay,
        torch_ops.normalized_linear_attention,
        lambda q, k, v: torch_ops.lean_attention_(q, k, v, new_key=k[:, :, :5].clone(), new_value=v[:, :, :5].clone()),
    ),
)
def test_forward_mode_is_refused(function, dtype):
    query, key, value, direction = (torch.rand(1, 2, 5, 4, dtype=D).to(dtype) for _ in range(4))

    def of_query(x):
        return function(x, key, value)[0]

    with pytest.raises(NotImplementedError, match=r"has no forward-mode derivative .* reverse mode"):
        torch.func.jvp(of_query, (query,), (direction,))
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
            of_query(forward_ad.make_dual(query, direction))
        assert torch.equal(of_query(query), of_query(query))  # without tangents calls go on


def test_float64_runs_the_reference():
    q, k, v, decay, state = decay_inputs(D)
    found = torch_ops.causal_linear_decay(q, k, v, decay, state, return_state=True)
    for f, e in zip(found, reference.causal_linear_decay(q, k, v, decay, state, return_state=True), strict=True):
        assert f.dtype == D and torch.equal(f, e)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(seq_lens=torch.tensor([9, 5])), "LeanAttention: seq_lens has type int64; expected int32"),
        (dict(query=randn(2, 5, 3, 8)), r"LeanAttention: H = 5 is not a multiple of Hkv = 2"),
        (dict(new_value=None), "LeanAttention: new_value is missing, new_key is given; give both or neither"),
        (
            dict(new_key=None, new_value=None, packed_qkv=True, query=randn(2, 3, 3, 8)),
            r"query has shape \[2,3,3,8\]: axis 1 of \[B,H\+2Hkv,Nq,D\] is 3; expected at least 5, because key_cache gives Hkv = 2",
        ),
        (dict(append=False), r"LeanAttention: input new_key needs append = 1; found append = 0"),
        (dict(window=0), "LeanAttention: attribute window is 0; expected 1 or more, or -1 for off"),
        (dict(layout="nhd"), "LeanAttention: attribute layout is 'nhd'; expected one of bhnd, bnhd"),
        (
            dict(value_cache=randn(2, 2, 12, 4)),
            r"value_cache has shape \[2,2,12,4\].*expected 11, because key_cache gives S = 11",
        ),
    ],
)
def test_wrong_arguments_name_themselves(change, message):
    inputs = {**attention_inputs(), "append": True, **change}
    cache = inputs["key_cache"].clone()
    with pytest.raises(ValueError, match=message):
        torch_ops.lean_attention(**inputs)
    assert torch.equal(inputs["key_cache"], cache)


def test_reference_only_algorithm_and_missing_backward():
    q, k, v, _, _ = decay_inputs()
    with pytest.raises(native.UnsupportedError, match="'vanilla', which only the PyTorch reference has; the kernels have auto"):
        torch_ops.causal_linear_decay(q, k, v, algorithm="vanilla")
    query = randn(1, 2, 1, 8, grad=True)
    with pytest.raises(NotImplementedError, match="LeanAttention has no backward"):
        torch_ops.lean_attention(query, randn(1, 2, 4, 8), randn(1, 2, 4, 8))[0].sum().backward()
    output = torch_ops.causal_linear_decay_(*decay_inputs(grad=True)[:3], initial_state=torch.zeros(2, 2, 4, 5))
    with pytest.raises(NotImplementedError, match="causal_linear_decay_ has no backward"):
        output.sum().backward()


def test_workspace_is_poisoned_and_threads_do_not_change_who_is_right(monkeypatch):
    """Scratch may hold anything at entry: the same call gives the same bits whatever torch.empty returned."""
    q, k, v, decay, state = decay_inputs(tokens=200)
    results = []
    for fill in (0x00, 0xFF, 0x7F):

        def filled(size, device, fill=fill):
            buffer = torch.full((size + 256,), fill, dtype=torch.uint8, device=device)
            return buffer, (buffer.data_ptr() + 255) // 256 * 256

        monkeypatch.setattr(torch_ops, "_scratch", filled)
        results.append(
            by_ctypes("CausalLinearDecay")(q, k, v, decay, state, return_state=True)[:2]
            + by_ctypes("LeanAttention")(*attention_inputs_fixed().values(), append=True)[:4]
        )
    torch.use_deterministic_algorithms(True)  # PyTorch fills what it allocates with NaN and 255
    try:
        results.append(
            torch_ops.causal_linear_decay(q, k, v, decay, state, return_state=True)
            + torch_ops.lean_attention(**attention_inputs_fixed(), append=True)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def by_ctypes(name):
    """The kernel of the functional form without PyTorch's dispatcher."""
    return torch_ops._runner(torch_ops._SPECS[name], False, "cpu")


def test_compiled_kernels_are_registered():
    """Unless others are asked for: PyTorch here is new enough for them."""
    assert torch_ops._COMPILED == (os.environ.get("LEANFLEET_TORCH") != "ctypes")


DEFAULT_KERNELS = pytest.mark.skipif("LEANFLEET_TORCH" in os.environ, reason="these are the other kernels")


def assert_this_file_passes(**environment):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.slow
@DEFAULT_KERNELS
@pytest.mark.parametrize("way", ("ctypes", "stable"))
def test_other_kernels(way):
    assert_this_file_passes(LEANFLEET_TORCH=way)


@pytest.mark.slow
@DEFAULT_KERNELS
def test_autograd_in_cpp(tmp_path):
    """It compiles for the PyTorch that is installed, and this file passes with it."""
    libraries = native.library_path("leanfleet").parent
    for name in ("libleanfleet.so", "libleanfleet_ort.so", "libleanfleet_trt.so", "autograd.cpp"):
        if (libraries / name).exists():
            (tmp_path / name).symlink_to(libraries / name)
    there = {"LEANFLEET_LIBRARY_DIR": str(tmp_path), "LEANFLEET_TORCH": "compiled"}

    def python(*words):
        command = [sys.executable, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **there}, cwd=ROOT).stdout

    python("-m", "leanfleet.export.torch_autograd")
    assert len(list(tmp_path.glob("libleanfleet_autograd_*.so"))) == 1
    assert python("-c", "from leanfleet.export import torch_ops; print(torch_ops.way())") == "compiled\n"
    assert_this_file_passes(**there)


@pytest.mark.slow
def test_another_word_for_the_way_to_the_kernels():
    done = subprocess.run(
        [sys.executable, "-c", "import leanfleet.export.torch_ops"],
        capture_output=True,
        text=True,
        env={**os.environ, "LEANFLEET_TORCH": "fast"},
        cwd=ROOT,
    )
    assert "LEANFLEET_TORCH is 'fast'; expected compiled, stable or ctypes" in done.stderr


@pytest.mark.parametrize(
    "change, kind, message",
    [
        (dict(query=None), ValueError, "input query is missing"),
        (dict(key=None), ValueError, "input key is missing"),
        (
            dict(key=torch.zeros(2, 2, 9, 4, dtype=torch.bool)),
            ValueError,
            "key has type bool; expected float32, float16 or bfloat16",
        ),
        (dict(value=torch.zeros(1, 1, 2, 2, 9, 4)), ValueError, "value has rank 6|value has shape .*expected"),
        (dict(algorithm="vanilla"), native.UnsupportedError, "which only the PyTorch reference has"),
        (dict(query=torch.zeros(2, 6, 9, 4, dtype=D)), ValueError, "key has type torch.float32; expected torch.float64"),
    ],
)
def test_compiled_kernels_refuse_as_ctypes_does(change, kind, message):
    query, key, value, *_ = decay_inputs()
    given = {"query": query, "key": key, "value": value, **change}
    with pytest.raises(kind, match=message) as found:
        torch_ops.causal_linear_decay(**given)
    inputs = [given.pop(name) for name in ("query", "key", "value")]
    with pytest.raises(kind) as expected:
        by_ctypes("CausalLinearDecay")(*inputs, **given)
    assert str(found.value) == str(expected.value)


def test_compiled_and_python_autograd_agree():
    """leanfleet_python has Python's: the same kernels, so the same bits; also where only some inputs want gradients."""
    q, k, v, decay, state = decay_inputs()
    norm = torch.rand(2, 2, 4)
    beta = torch.rand(2, 6, 9)
    delta = (randn(2, 6, 9, 4), randn(2, 6, 9, 4), randn(2, 6, 9, 5), None, beta)
    cases = [
        ("causal_linear_decay", [q, k, v], {}),
        ("causal_linear_decay", [q, k, v, decay, state], {"return_state": True}),
        ("causal_linear_decay", [q.abs(), k.abs(), v, decay, state, norm], {"return_state": True, "normalize": True}),
        ("causal_linear_decay", [q, k, v, decay, state, None, None, None, torch.rand(2, 2, 9)], {}),
        ("normalized_linear_attention", [q, k, v], {"causal": False}),
        ("normalized_linear_attention", [q, k, v, torch.tensor([9.0, 0.6])], {"normalize_qk": True}),
        ("gated_delta_rule", list(delta), {"scale": 0.5}),
    ]
    for name, inputs, attrs in cases:
        for chosen in ([0, 1, 2], [2], [len(inputs) - 1]):
            results = []
            for space in (torch.ops.leanfleet, torch.ops.leanfleet_python):
                leaves = [None if t is None else t.clone().requires_grad_(i in chosen) for i, t in enumerate(inputs)]
                outputs = getattr(space, name)(*leaves, **attrs)
                outputs = [o for o in outputs if o.requires_grad and o.dim() > 1]
                results.append(
                    torch.autograd.grad([o.square().sum() for o in outputs], [leaves[i] for i in chosen], allow_unused=True)
                )
            for a, b in zip(*results, strict=True):
                assert (a is None and b is None) or torch.equal(a, b), (name, chosen)


def test_saved_tensors_changed_in_place_are_noticed():
    q, k, v = (randn(1, 2, 5, 4, grad=True) for _ in range(3))
    changed = k * 1
    output = torch_ops.causal_linear_decay(q, changed, v)
    changed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
    output = torch_ops.normalized_linear_attention(q, k, v)[0]
    output.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        output.sum().backward()


def attention_inputs_fixed():
    torch.manual_seed(3)
    return attention_inputs()
