"""The reference against loops over rows and tokens, torch's own attention, autograd and differences."""

import inspect
import itertools
import math
from functools import cache, partial

import pytest
import torch
from torch.autograd import gradcheck
from torch.nn.functional import scaled_dot_product_attention

from leanfleet.export import reference
from support.cpu_time import rest_slow

attention = reference.lean_attention
decayed, decay_grad = reference.causal_linear_decay, reference.causal_linear_decay_grad
normalized = reference.normalized_linear_attention
normalized_grad = reference.normalized_linear_attention_grad
F64 = torch.float64
INF, NAN = math.inf, math.nan
ALGORITHMS = ("vanilla", "block_based", "recursion", "causal_dot_product", "fleet", "lightning")
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 130)


@pytest.fixture
def randn():
    generator = torch.Generator().manual_seed(7)

    def make(*shape, dtype=F64):
        return torch.randn(*shape, generator=generator, dtype=F64).to(dtype)

    return make


def close(actual, expected, tolerance=1e-11):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


# CausalLinearDecay

DECAYS = {
    "0": 0.0,
    "0.01": 0.01,
    "0.5": 0.5,
    "0.999": 0.999,
    "1": 1.0,
    "mixed": (0.9, 0.0),
    "absent": None,
    "per_token": "per_token",
}


def make_decay(kind, heads, tokens, batch=2):
    """log_decay of a row of DECAYS; per token it has zeros of γ in it, two of them next to each other."""
    gamma = DECAYS[kind]
    if gamma is None:
        return None
    if gamma == "per_token":
        values = torch.rand(batch, heads, tokens, generator=torch.Generator().manual_seed(3), dtype=F64)
        values[..., 5::11] = 0
        values[:1, :1, 6::11] = 0
        return values.log()
    gamma = gamma if isinstance(gamma, tuple) else (gamma,) * heads
    return torch.tensor(gamma, dtype=F64).log()


def decay_token_loop(query, key, value, log_decay, state, norm, scale, eps=None):
    """What the operator means, token by token; eps: divide by the normaliser held at eps."""
    group, tokens = query.shape[1] // key.shape[1], query.shape[2]
    key, value, state, norm = (x.repeat_interleave(group, 1) for x in (key, value, state, norm))
    gamma = torch.ones(key.shape[:3], dtype=F64)
    if log_decay is not None:
        rows = log_decay if log_decay.dim() == 3 else log_decay[None, :, None].expand(len(key), -1, tokens)
        gamma = rows.exp().repeat_interleave(group, 1)
    output = []
    for i in range(tokens):
        g, q, k, v = gamma[:, :, i, None], query[:, :, i], key[:, :, i], value[:, :, i]
        state = g[..., None] * state + k[..., :, None] * v[..., None, :]
        norm = g * norm + k
        o, d = scale * torch.einsum("bhr,bhrd->bhd", q, state), scale * (q * norm).sum(-1, keepdim=True)
        output.append(o if eps is None else o / torch.where(d < 0, d.clamp(max=-eps), d.clamp(min=eps)))
    return torch.stack(output, 2), state[:, ::group], norm[:, ::group]


@cache
def decay_cases(kind):
    """(arguments, attributes, expected) over LENGTHS, without and with the normaliser."""
    generator, cases = torch.Generator().manual_seed(11), []
    for tokens in LENGTHS:

        def randn(*shape):
            return torch.randn(*shape, generator=generator, dtype=F64)

        q, k, v = randn(2, 6, tokens, 5), randn(2, 2, tokens, 5), randn(2, 2, tokens, 3)
        state, norm, decay = randn(2, 2, 5, 3), randn(2, 2, 5), make_decay(kind, 2, tokens)
        cases.append(
            ((q, k, v, decay, state), dict(scale=0.7, return_state=1), decay_token_loop(q, k, v, decay, state, norm, 0.7)[:2])
        )
        cases.append(
            (
                (q.abs(), k.abs(), v, decay, state, norm.abs()),
                dict(scale=0.7, return_state=True, normalize=1, eps=0.5),
                decay_token_loop(q.abs(), k.abs(), v, decay, state, norm.abs(), 0.7, 0.5),
            )
        )
    return cases


@pytest.mark.parametrize("algorithm", (*ALGORITHMS, "auto"))
@pytest.mark.parametrize("kind", rest_slow(DECAYS, quick=3))
def test_algorithms_agree_with_token_loop(kind, algorithm):
    for arguments, attributes, expected in decay_cases(kind):
        close(decayed(*arguments, algorithm=algorithm, **attributes), expected)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_algorithm_gradients_agree(algorithm):
    """Autograd through every algorithm, across its blocks, against autograd through the token loop."""
    (q, k, v, decay, state, norm), attributes, _ = decay_cases("per_token")[2 * LENGTHS.index(65) + 1]
    inputs = [x.clone().requires_grad_() for x in (q, k, v, decay, state, norm)]
    weights = [torch.linspace(-1, 1, n, dtype=F64) for n in (2 * 6 * 65 * 3, 2 * 2 * 5 * 3, 2 * 2 * 5)]

    def loss(outputs):
        return sum((x.flatten() * w).sum() for x, w in zip(outputs, weights, strict=True))

    actual = torch.autograd.grad(loss(decayed(*inputs, algorithm=algorithm, **attributes)), inputs)
    expected = torch.autograd.grad(loss(decay_token_loop(*inputs, 0.7, 0.5)), inputs)
    close(actual, expected)
    assert (actual[3][decay == -INF] == 0).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_extreme_decay_and_scores_stay_finite(randn, algorithm):
    """A decay far below float32's range and scores that overflow above the diagonal must not make NaN."""
    q, k, v = (randn(1, 1, 200, 4, dtype=torch.float32) for _ in range(3))
    (output,) = decayed(q, k, v, torch.tensor([-60.0]), algorithm=algorithm)
    close(output, (q * k).sum(-1, keepdim=True) * v, 1e-5)
    q[:, :, 0], k[:, :, 1:] = 1e30, 1e30  # row 0 against every later key: infinite, and masked
    (output,) = decayed(q, k, v * 1e-30, torch.tensor([-0.1]), algorithm=algorithm)
    assert output.isfinite().all()


@pytest.mark.parametrize("normalize", (0, 1))
@pytest.mark.parametrize("kind", ("0.999", "per_token"))
def test_split_and_carry_equals_one_call(randn, kind, normalize):
    q, k, v, decay = randn(2, 6, 131, 4), randn(2, 2, 131, 4), randn(2, 2, 131, 7), make_decay(kind, 2, 131)
    attributes = dict(normalize=normalize, return_state=1, eps=1e-3)
    whole = decayed(q, k, v, decay, **attributes)
    parts, carried = [], ()
    for start, stop in ((0, 1), (1, 66), (66, 66), (66, 130), (130, 131)):
        own = decay[..., start:stop] if decay.dim() == 3 else decay
        out, *carried = decayed(q[:, :, start:stop], k[:, :, start:stop], v[:, :, start:stop], own, *carried, **attributes)
        parts.append(out)
    close((torch.cat(parts, 2), *carried), whole, 1e-9)


@pytest.mark.parametrize("kind", ("mixed", "per_token"))
@pytest.mark.parametrize("layout", ("bhnd", "bnhd"))
def test_packed_requests_and_pool(randn, kind, layout):
    """Packed equals separate; the pool is read and written at the request's row and elsewhere left alone."""
    q, k, v, decay = randn(1, 6, 90, 4), randn(1, 2, 90, 4), randn(1, 2, 90, 3), make_decay(kind, 2, 90, 1)
    pool, norms = randn(7, 2, 4, 3), randn(7, 2, 4)
    offsets, rows, padding = (2, 2, 67, 68, 85), (4, 0, -1, 6), (0, 1, 85, 86, 87, 88, 89)

    def swap(x):
        return x.transpose(1, 2) if layout == "bnhd" else x

    def one_request(start, stop, *state, **attributes):
        own = decay[:, :, start:stop] if kind == "per_token" else decay
        return decayed(*(x[:, :, start:stop] for x in (q, k, v)), own, *state, **attributes)

    arguments = (*map(swap, (q, k, v)), swap(decay) if kind == "per_token" else decay)
    attributes = dict(normalize=1, eps=0.2, return_state=1)
    output, states, sums = decayed(*arguments, pool, norms, int32(*offsets), int32(*rows), layout=layout, **attributes)
    output = swap(output)
    assert (output[:, :, padding] == 0).all()
    expected_pool, expected_norms = pool.clone(), norms.clone()
    for start, stop, row in zip(offsets[:-1], offsets[1:], rows, strict=True):
        given = (pool[row : row + 1], norms[row : row + 1]) if row >= 0 else ()
        out, state, norm = one_request(start, stop, *given, **attributes)
        close(output[:, :, start:stop], out)
        if row >= 0:
            expected_pool[row], expected_norms[row] = state[0], norm[0]
    close((states, sums), (expected_pool, expected_norms))
    _, states = decayed(*arguments, pool[:4], None, int32(*offsets), layout=layout, return_state=1)
    assert states.shape == (4, 2, 4, 3)
    close(states[1], one_request(2, 67, pool[1:2], return_state=1)[1][0])


def test_garbage_offsets_and_rows_stay_inside(randn):
    q, k, v, pool = randn(1, 2, 9, 4), randn(1, 2, 9, 4), randn(1, 2, 9, 3), randn(3, 2, 4, 3)
    for offsets in ((-5, 4, 99), (8, 3, 2**31 - 1), (50, 60, 70), (-9, -9, -9)):
        output, states = decayed(q, k, v, None, pool, None, int32(*offsets), int32(3, 2**31 - 1), return_state=1)
        assert output.isfinite().all()
        close(states, pool)


def test_empty_batches_tokens_and_requests(randn):
    state = randn(2, 2, 4, 3)
    for batch, tokens in ((2, 0), (0, 5), (0, 0)):
        q, k, v = randn(batch, 6, tokens, 4), randn(batch, 2, tokens, 4), randn(batch, 2, tokens, 3)
        out, final = decayed(q, k, v, None, state[:batch], return_state=1)
        assert out.shape == (batch, 6, tokens, 3)
        close(final, state[:batch])
        grads = decay_grad(q, k, v, torch.zeros(2), None, randn(batch, 6, tokens, 3), state[:batch], grad_decay=1, grad_state=1)
        assert [x.shape for x in grads] == [q.shape, k.shape, v.shape, (2,), (batch, 2, 4, 3)]
        out = normalized(q, k, v, return_state=1)
        assert out[0].shape == (batch, 6, tokens, 3) and out[5].tolist() == [tokens] * batch
        out, lse = attention(q, randn(batch, 2, 8, 4), randn(batch, 2, 8, 3))
        assert out.shape == (batch, 6, tokens, 3) and lse.shape == (batch, 6, tokens)
    out, final = decayed(randn(1, 2, 5, 4), randn(1, 2, 5, 4), randn(1, 2, 5, 3), cu_seqlens=int32(0), return_state=1)
    assert (out == 0).all() and final.shape == (0, 2, 4, 3)


def leaves(*tensors):
    return [x.clone().requires_grad_() for x in tensors]


@pytest.mark.slow
def test_decay_gradcheck(randn):
    q, k, v, state, norm = leaves(randn(2, 2, 5, 2), randn(2, 1, 5, 2), randn(2, 1, 5, 3), randn(2, 1, 2, 3), randn(2, 1, 2))
    for decay in (randn(1), randn(2, 1, 5)):
        decay = (-decay.abs() - 0.1).requires_grad_()
        for algorithm in ALGORITHMS:
            assert gradcheck(
                partial(decayed, algorithm=algorithm, return_state=1, normalize=1, eps=1e-2, scale=0.6),
                (q, k, v, decay, state, norm),
            )


@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("layout", ("bhnd", "bnhd"))
@pytest.mark.parametrize("kind", DECAYS)
def test_decay_grad_equals_autograd(randn, kind, layout, packed):
    """Across blocks; with a decay of 0 its gradient is exactly 0 and all others are right."""
    batch, requests, offsets = (1, 3, int32(1, 70, 71, 150)) if packed else (2, 2, None)
    swap = (lambda x: x.transpose(1, 2)) if layout == "bnhd" else (lambda x: x)
    q, k, v, state = leaves(
        swap(randn(batch, 6, 150, 4)), swap(randn(batch, 2, 150, 4)), swap(randn(batch, 2, 150, 3)), randn(requests, 2, 4, 3)
    )
    decay = make_decay(kind, 2, 150, batch)
    per_token = decay is not None and decay.dim() == 3
    if decay is not None:
        decay = (swap(decay) if per_token else decay).clone().requires_grad_()
    do, ds = swap(randn(batch, 6, 150, 3)), randn(requests, 2, 4, 3)
    given = [q, k, v, state] + ([decay] if decay is not None else [])
    for final in (ds, None):
        outputs = decayed(q, k, v, decay, state, None, offsets, scale=0.3, layout=layout, return_state=final is not None)
        expected = torch.autograd.grad(outputs, given, (do,) if final is None else (do, final))
        with torch.no_grad():
            dq, dk, dv, *dg, dstate = decay_grad(
                q,
                k,
                v,
                decay,
                state,
                do,
                final,
                offsets,
                scale=0.3,
                layout=layout,
                grad_decay=int(decay is not None),
                grad_state=1,
            )
        close([dq, dk, dv, dstate, *dg], list(expected))
    if decay is not None:
        assert (dg[0][decay == -INF] == 0).all() and dg[0].shape == decay.shape


def test_decay_grad_is_not_autograd(randn):
    q, k, v = leaves(randn(1, 2, 3, 2), randn(1, 2, 3, 2), randn(1, 2, 3, 2))
    with torch.no_grad():
        grads = decay_grad(q, k, v, grad_output=randn(1, 2, 3, 2), grad_state=1)
    assert len(grads) == 4 and grads[3].shape == (1, 2, 2, 2) and grads[0].abs().sum() > 0


# NormalizedLinearAttention


def normalized_row_loop(query, key, value, a, b, causal, unit, eps):
    """Row by row over explicit scores."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    if unit:
        query, key = (x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12) for x in (query, key))
    outputs, normalizers = [], []
    for i in range(query.shape[2]):
        stop = i + 1 if causal else query.shape[2]
        scores = a + b * torch.einsum("bhd,bhnd->bhn", query[:, :, i], key[:, :, :stop])
        g = scores.sum(-1, keepdim=True)
        held = torch.where(g < 0, g.clamp(max=-eps), g.clamp(min=eps))
        outputs.append(torch.einsum("bhn,bhnd->bhd", scores, value[:, :, :stop]) / held)
        normalizers.append(g.squeeze(-1))
    return torch.stack(outputs, 2), torch.stack(normalizers, 2)


@pytest.mark.parametrize("unit", (0, 1))
@pytest.mark.parametrize("causal", (0, 1))
def test_normalized_equals_row_loop(randn, causal, unit):
    held = 0
    for tokens in (1, 15, 64, 65, 130):
        q, k, v = randn(2, 6, tokens, 4), randn(2, 2, tokens, 4), randn(2, 2, tokens, 3)
        q[0, 0, 0], k[0, 1, tokens // 2] = 0, 0
        for coefficients in (None, torch.tensor([0.3, -1.7], dtype=F64)):
            a, b = (1, 1) if coefficients is None else coefficients
            attributes = dict(causal=causal, normalize_qk=unit, eps=0.4)
            expected = normalized_row_loop(q, k, v, a, b, causal, unit, 0.4)
            actual = normalized(q, k, v, coefficients, **attributes)
            close(actual, expected, 1e-10)
            held += (expected[1].abs() < 0.4).sum()
            swapped = normalized(*(x.transpose(1, 2) for x in (q, k, v)), coefficients, layout="bnhd", **attributes)
            close(tuple(x.transpose(1, 2) for x in swapped), actual, 1e-14)
    assert held


def test_normalized_split_and_carry(randn):
    q, k, v = randn(2, 6, 70, 4), randn(2, 2, 70, 4), randn(2, 2, 70, 3)
    c = torch.tensor([2.0, 0.3], dtype=F64)
    whole = normalized(q, k, v, c, return_state=1, normalize_qk=1)
    parts, carried = [], ()
    for start, stop in ((0, 3), (3, 3), (3, 69), (69, 70)):
        out, g, *carried = normalized(*(x[:, :, start:stop] for x in (q, k, v)), c, *carried, return_state=1, normalize_qk=1)
        parts.append((out, g))
    close((*(torch.cat(x, 2) for x in zip(*parts, strict=True)), *carried), whole)
    assert carried[3].dtype == torch.int32 and carried[3].tolist() == [70, 70]


@pytest.mark.parametrize("unit", (0, 1))
@pytest.mark.parametrize("causal", (0, 1))
def test_normalized_gradients(randn, causal, unit):
    """Closed form against autograd through the reference: no row held at eps, and half of them."""
    for layout, quantile in (("bhnd", 0), ("bnhd", 0.5)):
        swap = (lambda x: x.transpose(1, 2)) if layout == "bnhd" else (lambda x: x)
        q, k, v, c, ones = leaves(
            *map(swap, (randn(2, 6, 70, 4), randn(2, 2, 70, 4), randn(2, 2, 70, 3))),
            torch.tensor([0.5, -0.2], dtype=F64),
            torch.ones(2, dtype=F64),
        )
        do, attributes = swap(randn(2, 6, 70, 3)), dict(causal=causal, normalize_qk=unit, layout=layout)
        for coefficients in (c, ones):
            g = normalized(q, k, v, coefficients, **attributes)[1].detach()
            eps = g.abs().quantile(quantile).item()
            output, g = normalized(q, k, v, coefficients, eps=eps, **attributes)
            expected = torch.autograd.grad(output, (q, k, v, coefficients), do)
            with torch.no_grad():
                actual = normalized_grad(q, k, v, c if coefficients is c else None, output, g, do, eps=eps, **attributes)
            close(actual, expected, 1e-9)


def test_normalized_gradient_of_zero_rows(randn):
    """normalize_qk of a row of zeros or nearly: the gradient of a division by 1e-12, both ways."""
    q, k, v, do = randn(1, 1, 6, 3), randn(1, 1, 6, 3), randn(1, 1, 6, 2), randn(1, 1, 6, 2)
    q[0, 0, 2], k[0, 0, 3], k[0, 0, 4] = 0, 0, 2e-13
    q, k, v, c = leaves(q, k, v, torch.tensor([4.0, 1.0], dtype=F64))
    output, g = normalized(q, k, v, c, normalize_qk=1)
    expected = torch.autograd.grad(output, (q, k, v, c), do)
    actual = normalized_grad(q, k, v, c, output, g, do, normalize_qk=1)
    assert output.isfinite().all() and actual[0][0, 0, 2].abs().max() > 1e6
    close(actual, expected, 1e-10)


def test_normalized_gradcheck(randn):
    q, k, v, state, key_sum, value_sum, c = leaves(
        randn(2, 2, 4, 2),
        randn(2, 1, 4, 2),
        randn(2, 1, 4, 3),
        randn(2, 1, 2, 3),
        randn(2, 1, 2),
        randn(2, 1, 3),
        torch.tensor([3.0, 0.4], dtype=F64),
    )

    def carried(*inputs, normalize_qk):
        return normalized(*inputs, int32(3, 9), normalize_qk=normalize_qk, return_state=1)[:5]

    for unit in (0, 1):
        assert gradcheck(partial(carried, normalize_qk=unit), (q, k, v, c, state, key_sum, value_sum))
        assert gradcheck(partial(normalized, normalize_qk=unit, causal=0), (q, k, v, c))


# LeanAttention

BLOCK = 4


def attention_row_loop(query, keys, values, lengths, counts, masked, sinks, scale, causal, window, softcap):
    """One row of one head at a time; keys[b] is [Hkv,capacity,D], masked[b] the positions no page holds."""
    batch, heads, tokens, _ = query.shape
    output = torch.zeros(batch, heads, tokens, values[0].shape[-1], dtype=F64)
    lse = torch.full((batch, heads, tokens), -INF, dtype=F64)
    group = heads // keys[0].shape[0]
    for b in range(batch):
        for h in range(heads):
            for i in range(counts[b]):
                p = lengths[b] - counts[b] + i
                seen = [
                    j
                    for j in range(lengths[b])
                    if (not causal or j <= p) and (window < 0 or j > p - window) and j not in masked[b]
                ]
                logits = [float(scale * query[b, h, i] @ keys[b][h // group, j]) for j in seen]
                if softcap:
                    logits = [softcap * math.tanh(x / softcap) for x in logits]
                terms = logits + ([float(sinks[h])] if sinks is not None else [])
                if terms:
                    total = math.fsum(math.exp(x) for x in terms)
                    lse[b, h, i] = math.log(total)
                    for x, j in zip(logits, seen, strict=True):
                        output[b, h, i] += math.exp(x) / total * values[b][h // group, j]
    return output, lse


def pack_cache(variant, rows, lengths, capacities, width):
    """Per-request rows [Hkv,capacity,D] as a cache with NaN in every slot past lengths, and its table."""
    rows = [torch.where(torch.arange(x.shape[1])[:, None] < n, x, NAN) for x, n in zip(rows, lengths, strict=True)]
    if variant == "dense":
        return torch.stack(rows), {}
    if variant == "ragged":
        slack = torch.full((rows[0].shape[0], 3, width), NAN, dtype=F64)
        offsets = [3 + sum(capacities[:b]) for b in range(len(rows) + 1)]
        return torch.cat([slack, *rows, slack], 1), {"cu_seqlens": int32(*offsets)}
    blocks = [c // BLOCK for c in capacities]
    pages = torch.randperm(sum(blocks) + 2, generator=torch.Generator().manual_seed(1)).int()
    pool = torch.full((len(pages), BLOCK, rows[0].shape[0], width), NAN, dtype=F64)
    table = torch.full((len(rows), max(blocks)), -1, dtype=torch.int32)
    for b, x in enumerate(rows):
        table[b, : blocks[b]] = pages[sum(blocks[:b]) : sum(blocks[: b + 1])]
        pool[table[b, : blocks[b]].long()] = x.transpose(0, 1).unflatten(0, (-1, BLOCK))
    return pool, {"block_table": table}


OPTIONS = {
    "plain": {},
    "non_causal": dict(causal=0),
    "scale": dict(scale=0.9),
    "window1": dict(window=1),
    "window5": dict(window=5),
    "wide_window": dict(window=1000),
    "softcap": dict(softcap=1.5),
    "sinks": dict(sinks=True),
    "append": dict(append=1),
    "layout": dict(layout="bnhd"),
    "non_causal_sinks": dict(causal=False, sinks=True),
    "all": dict(append=1, sinks=True, softcap=2.0, window=6, scale=1.1, layout="bnhd"),
}


@pytest.mark.parametrize("variant", ("dense", "ragged", "paged"))
@pytest.mark.parametrize("option", OPTIONS)
def test_attention_equals_row_loop(randn, variant, option):
    """Requests empty, of one token, partly filled and full; new tokens none to more than there are."""
    attributes = dict(OPTIONS[option])
    capacities = [16] * 6 if variant == "dense" else [0, 8, 12, 16, 4, 12]
    seq_lens, query_lens = (0, 5, 1, 99, 4, -3), (2, 3, 7, 99, -1, 1)
    if option in ("append", "scale"):
        seq_lens, query_lens = (-1, 0, 11, 16, 4, 2), (1, 0, 4, 3, 4, 3)
    lengths = [min(max(n, 0), c) for n, c in zip(seq_lens, capacities, strict=True)]
    counts = [min(max(n, 0), 4, length) for n, length in zip(query_lens, lengths, strict=True)]
    heads, kv_heads, width, value_width = 6, 2, 5, 3
    keys = [randn(kv_heads, c, width) for c in capacities]
    values = [randn(kv_heads, c, value_width) for c in capacities]
    query = randn(6, heads, 4, width)
    for b, n in enumerate(counts):
        query[b, :, n:] = NAN
    sinks = randn(heads) if attributes.pop("sinks", False) else None
    swap = (lambda x: x.transpose(1, 2)) if attributes.get("layout") == "bnhd" else (lambda x: x)

    given, cached = {}, lengths
    if attributes.get("append"):
        cached = [n - c for n, c in zip(lengths, counts, strict=True)]
        new_key, new_value = (torch.full((6, kv_heads, 4, n), NAN, dtype=F64) for n in (width, value_width))
        for b, (start, n) in enumerate(zip(cached, counts, strict=True)):
            new_key[b, :, :n], new_value[b, :, :n] = (x[b][:, start : start + n] for x in (keys, values))
        given = dict(new_key=swap(new_key), new_value=swap(new_value))
    key_cache, table = pack_cache(variant, keys, cached, capacities, width)
    value_cache, _ = pack_cache(variant, values, cached, capacities, value_width)
    actual = attention(
        swap(query), key_cache, value_cache, int32(*seq_lens), int32(*query_lens), sinks=sinks, **given, **table, **attributes
    )
    expected = attention_row_loop(
        query,
        keys,
        values,
        lengths,
        counts,
        [()] * 6,
        sinks,
        attributes.get("scale", 1 / math.sqrt(width)),
        attributes.get("causal", 1),
        attributes.get("window", -1),
        attributes.get("softcap", 0),
    )
    close(tuple(map(swap, actual[:2])), expected)
    if attributes.get("append"):
        expected = (
            pack_cache(variant, keys, lengths, capacities, width)[0],
            pack_cache(variant, values, lengths, capacities, value_width)[0],
        )
        torch.testing.assert_close(actual[2:], expected, rtol=0, atol=0, equal_nan=True)
    else:
        assert len(actual) == 2


@pytest.mark.parametrize("append", (0, 1))
@pytest.mark.parametrize("interleaved", (0, 1))
def test_rotary_encoding_is_a_product_of_complex_numbers(randn, interleaved, append):
    """Pair j of a token at position p is (a + b i) times cos + sin i of row p; the other columns stay."""
    half, width, lens, counts = 3, 8, (9, 4, 2), (3, 1, 2)
    query, new_key, new_value = randn(3, 4, 3, width), randn(3, 2, 3, width), randn(3, 2, 3, 5)
    key_cache, value_cache = randn(3, 2, 9, width), randn(3, 2, 9, 5)
    tables = randn(6, half), randn(6, half)  # rows 6 to 8 are missing: those tokens take row 5

    def turned(x):
        x = x.clone()
        for b, i, j in itertools.product(range(3), range(3), range(half)):
            p = min(lens[b] - counts[b] + i, 5)
            at = (2 * j, 2 * j + 1) if interleaved else (j, half + j)
            pair = torch.complex(x[b, :, i, at[0]], x[b, :, i, at[1]]) * torch.complex(tables[0][p, j], tables[1][p, j])
            x[b, :, i, at[0]], x[b, :, i, at[1]] = pair.real, pair.imag
        return x

    new = dict(new_key=new_key, new_value=new_value) if append else {}
    found = attention(
        query,
        key_cache,
        value_cache,
        int32(*lens),
        int32(*counts),
        **new,
        append=append,
        cos_cache=tables[0],
        sin_cache=tables[1],
        rotary_interleaved=interleaved,
    )
    new |= {"new_key": turned(new_key)} if append else {}
    close(found, attention(turned(query), key_cache, value_cache, int32(*lens), int32(*counts), **new, append=append))


@pytest.mark.parametrize("group", (1, 3, 5, 7))
def test_attention_equals_torch(randn, group):
    for tokens, size in ((1, 64), (65, 65), (63, 127)):
        q, k, v = randn(2, 2 * group, tokens, 8), randn(2, 2, size, 8), randn(2, 2, size, 6)
        mask = torch.ones(tokens, size, dtype=torch.bool).tril(size - tokens)
        for causal in (1, 0):
            expected = scaled_dot_product_attention(q, k, v, mask if causal else None, enable_gqa=True)
            output, lse = attention(q, k, v, causal=causal)
            close(output, expected)
            logits = q @ k.repeat_interleave(group, 1).mT / math.sqrt(8)
            close(lse, (logits.masked_fill(~mask, -INF) if causal else logits).logsumexp(-1))


def test_attention_masks_bad_pages(randn):
    """Page ids outside the pool hide their positions from reading and swallow what is appended to them."""
    pool, values = randn(3, BLOCK, 1, 4), randn(3, BLOCK, 1, 4)
    query, new = randn(1, 2, 3, 4), randn(1, 1, 3, 4)
    table = torch.tensor([[2, -1, 1, 3, 2**31 - 1]], dtype=torch.int32)
    keys = [torch.cat([pool[2], pool[0], pool[1], pool[0], pool[0]]).transpose(0, 1)]
    masked = [(*range(4, 8), *range(12, 20))]
    for length in (3, 6, 12, 14, 20):
        actual = attention(query, pool, pool, int32(length), block_table=table)
        close(actual, attention_row_loop(query, keys, keys, [length], [3], masked, None, 0.5, 1, -1, 0))
    output, lse, key_out, value_out = attention(
        query, pool, values, int32(13), block_table=table, append=1, new_key=new, new_value=2 * new
    )
    expected, expected_values = pool.clone(), values.clone()
    expected[1, 2:], expected_values[1, 2:] = new[0, :, :2].transpose(0, 1), 2 * new[0, :, :2].transpose(0, 1)
    close((key_out, value_out), (expected, expected_values))
    for held in (pool, pool[:0]):
        output, lse = attention(query, held, held, block_table=table[:, 3:])
        assert (output == 0).all() and (lse == -INF).all()
    # Rows 0 and 1 see nothing, row 2 sees one key.
    output, lse = attention(query, pool, pool, int32(5), block_table=table.flip(1)[:, 1:4])
    assert (output[:, :, :2] == 0).all() and (lse[:, :, :2] == -INF).all()
    close(output[:, :, 2], pool[1, 0].expand(1, 2, 4))
    sinks = torch.tensor([0.25, -3.0], dtype=F64)
    output, lse = attention(query, pool, pool, block_table=table[:, 3:], sinks=sinks)
    assert (output == 0).all()
    close(lse, sinks.view(1, 2, 1).expand(1, 2, 3))


def test_attention_garbage_offsets_stay_inside(randn):
    query, cache, new = randn(2, 2, 3, 4), randn(1, 7, 4), randn(2, 1, 3, 4)
    for offsets in ((-9, 3, 99), (6, 1, 7), (2**31 - 1, -(2**31), 5), (99, 99, 99), (0, 0, 8)):
        for lens in ((2**31 - 1, -1), (3, 2), (-(2**31), 2**31 - 1)):
            output, lse, *caches = attention(
                query, cache, cache, int32(*lens), int32(*lens), new, new, int32(*offsets), append=1
            )
            assert output.isfinite().all() and not lse.isnan().any()
            assert [x.shape for x in caches] == [cache.shape] * 2


def test_attention_window_hides_overwritten_keys(randn):
    """Valid positions that no row of the request sees any more may have been overwritten with anything."""
    query, keys = randn(1, 2, 2, 4), randn(1, 1, 12, 4)
    expected = attention(query, keys, keys, window=3)
    keys[:, :, :8] = NAN
    close(attention(query, keys, keys, window=3), expected)


def test_attention_large_logits(randn):
    query, keys = 100 * randn(1, 1, 2, 8), 100 * randn(1, 1, 9, 8)
    expected = scaled_dot_product_attention(query, keys, keys)
    output, lse = attention(query, keys, keys, causal=0, sinks=torch.tensor([-INF]))
    close(output, expected)
    assert lse.isfinite().all() and lse.abs().max() > 5000


def test_attention_gradcheck(randn):
    (sinks,) = leaves(randn(2))
    query, new_key, new_value, *tables = leaves(
        randn(2, 2, 2, 3), randn(2, 1, 2, 3), randn(2, 1, 2, 2), randn(5, 1), randn(5, 1)
    )
    lens, counts = int32(5, 4), int32(1, 2)  # in the paged request 1 row 0 sees nothing, row 1 its own key
    caches = {
        "dense": ((2, 1, 6), {}),
        "ragged": ((1, 11), dict(cu_seqlens=int32(0, 6, 11))),
        "paged": ((4, 3, 1), dict(block_table=torch.tensor([[2, 0], [9, 3]], dtype=torch.int32))),
    }

    def run(query, key_cache, value_cache, new_key, new_value, sinks, cos_cache, sin_cache, table):
        output, lse, *caches = attention(
            query,
            key_cache,
            value_cache,
            lens,
            counts,
            new_key,
            new_value,
            sinks=sinks,
            append=1,
            window=4,
            softcap=2.0,
            cos_cache=cos_cache,
            sin_cache=sin_cache,
            **table,
        )
        return output, lse.masked_fill(lse == -INF, 0), *caches

    for shape, table in caches.values():
        key_cache, value_cache = leaves(randn(*shape, 3), randn(*shape, 2))
        inputs = (query, key_cache, value_cache, new_key, new_value, sinks, *tables)
        assert gradcheck(partial(run, table=table), inputs)


# All operators


def example_calls(randn, dtype=F64, state_dtype=F64):
    """(function, tensors by name, attributes) that use every input of every operator but block_table."""

    def t(*shape):
        return randn(*shape, dtype=dtype)

    def f(*shape):
        return randn(*shape, dtype=state_dtype)

    q, k, v, do = t(1, 6, 9, 4), t(1, 2, 9, 4), t(1, 2, 9, 3), t(1, 6, 9, 3)
    decay, offsets = -f(1, 2, 9).abs(), int32(0, 4, 9)
    return [
        (
            attention,
            dict(
                query=t(2, 6, 3, 4),
                key_cache=t(2, 2, 8, 4),
                value_cache=t(2, 2, 8, 3),
                seq_lens=int32(8, 5),
                query_lens=int32(3, 0),
                new_key=t(2, 2, 3, 4),
                new_value=t(2, 2, 3, 3),
                sinks=f(6),
                cos_cache=f(7, 2),
                sin_cache=f(7, 2),
            ),
            dict(append=1, rotary_interleaved=1),
        ),
        (
            decayed,
            dict(
                query=q,
                key=k,
                value=v,
                log_decay=decay,
                initial_state=f(5, 2, 4, 3),
                initial_norm=f(5, 2, 4),
                cu_seqlens=offsets,
                state_index=int32(3, 1),
                beta=f(1, 2, 9).abs(),
            ),
            dict(normalize=1, return_state=1),
        ),
        (
            decay_grad,
            dict(
                query=q,
                key=k,
                value=v,
                log_decay=decay,
                initial_state=f(2, 2, 4, 3),
                grad_output=do,
                grad_final_state=f(2, 2, 4, 3),
                cu_seqlens=offsets,
            ),
            dict(grad_decay=1, grad_state=1),
        ),
        (
            normalized,
            dict(
                query=q,
                key=k,
                value=v,
                coefficients=f(2),
                initial_state=f(1, 2, 4, 3),
                initial_key_sum=f(1, 2, 4),
                initial_value_sum=f(1, 2, 3),
                initial_count=int32(4),
            ),
            dict(return_state=1, normalize_qk=1),
        ),
        (
            normalized_grad,
            dict(query=q, key=k, value=v, coefficients=f(2), output=do, normalizer=f(1, 6, 9), grad_output=do),
            dict(normalize_qk=1),
        ),
    ]


OUTPUT_TYPES = {
    "lean_attention": "TFTT",
    "causal_linear_decay": "TFF",
    "causal_linear_decay_grad": "TTTFF",
    "normalized_linear_attention": "TFFFFI",
    "normalized_linear_attention_grad": "TTTF",
}


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16, F64))
def test_types_and_purity(randn, dtype):
    """Output types; inputs stay as they were; no output shares memory with an input or another output."""
    for function, tensors, attributes in example_calls(randn, dtype, F64 if dtype == F64 else torch.float32):
        before = {name: x.clone() for name, x in tensors.items()}
        outputs = function(**tensors, **attributes)
        types = {"T": dtype, "F": F64 if dtype == F64 else torch.float32, "I": torch.int32}
        assert [x.dtype for x in outputs] == [types[kind] for kind in OUTPUT_TYPES[function.__name__]]
        assert all(torch.equal(x, before[name]) for name, x in tensors.items())
        memory = [x.untyped_storage().data_ptr() for x in (*tensors.values(), *outputs)]
        assert len(set(memory[-len(outputs) :])) == len(outputs)
        assert not set(memory[: len(tensors)]) & set(memory[-len(outputs) :])


def test_outputs_of_single_elements_share_no_memory(randn):
    one, f = randn(1, 1, 1, 1, dtype=torch.float32), randn(1, 1, 1, dtype=torch.float32)
    none = one[:, :, :0]
    for outputs in (
        attention(one, one, one, new_key=one, new_value=one, append=1),
        decayed(one, one, one, None, one, f, normalize=1, return_state=1),
        decayed(none, none, none, None, one, f, normalize=1, return_state=1),
        decayed(none, none, none, None, one, return_state=1),
        decay_grad(none, none, none, f[0, 0], one, none, one, grad_decay=1, grad_state=1),
        normalized(none, none, none, None, one, f, f, int32(1), return_state=1),
        decay_grad(one, one, one, f[0, 0], one, one, one, grad_decay=1, grad_state=1),
    ):
        memory = [x.untyped_storage().data_ptr() for x in (*outputs, one, f) if x.numel()]
        assert len(set(memory)) == len(memory)


def test_compute_dtype(randn):
    """float64 on demand rounds once, at the output; float32 is the same to its own rounding. Rotary encodings aside: turned
    rows are rounded to the type."""
    for function, tensors, attributes in example_calls(randn, torch.bfloat16, torch.float32):
        tensors = {n: x for n, x in tensors.items() if n not in ("cos_cache", "sin_cache")}
        attributes = {n: x for n, x in attributes.items() if n != "rotary_interleaved"}
        double = {n: x.double() if x.is_floating_point() else x for n, x in tensors.items()}
        exact = function(**double, **attributes)
        asked = function(**tensors, **attributes, compute_dtype=F64)
        for got, single, judge in zip(asked, function(**tensors, **attributes), exact, strict=True):
            assert got.dtype == single.dtype
            torch.testing.assert_close(got, judge.to(got.dtype), rtol=0, atol=0)
            rounding = 2**-7 if got.dtype == torch.bfloat16 else 2e-5
            torch.testing.assert_close(single.double(), judge.double(), rtol=rounding, atol=1e-5)


def test_parameter_order():
    """Tensors come first, in the operator's order; attributes are keyword-only."""
    for function, tensors, attributes in example_calls(lambda *shape, dtype: torch.ones(shape, dtype=dtype)):
        parameters = inspect.signature(function).parameters.values()
        positional = [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
        variants = "cu_seqlens", "block_table", "cu_query_lens", "key_scale", "value_scale"
        assert [n for n in positional if n not in variants] == [n for n in tensors if n not in variants]
        assert set(attributes) <= {p.name for p in parameters if p.kind == p.KEYWORD_ONLY}


ERRORS = [
    (0, dict(layout="bdnh"), "layout is 'bdnh'"),
    (0, dict(query=torch.ones(6, 3, 4, dtype=F64)), r"query has shape \[6, 3, 4\]; expected \[B, H, Nq, D\]"),
    (0, dict(query=torch.ones(2, 5, 3, 4, dtype=F64)), "H=5 .* multiple"),
    (0, dict(query=torch.ones(2, 6, 3, 4)), "key_cache has type torch.float64; expected torch.float32"),
    (0, dict(query=torch.ones(2, 6, 3, 4).int()), "query has type torch.int32; expected a floating point"),
    (0, dict(value_cache=torch.ones(2, 2, 7, 3, dtype=F64)), r"value_cache .* \[B=2, Hkv=2, S=8, Dv"),
    (0, dict(seq_lens=int32(1, 2, 3)), r"seq_lens has shape \[3\]; expected \[B=2\]"),
    (0, dict(seq_lens=torch.ones(2)), "seq_lens has type torch.float32; expected torch.int32"),
    (0, dict(new_value=None), "new_value is absent and append is 1"),
    (0, dict(append=0), "new_key is given and append is 0"),
    (0, dict(new_key=None, new_value=None), "new_key is absent and append is 1"),
    (0, dict(cu_seqlens=int32(0, 4, 8), block_table=torch.zeros(2, 2).int()), "both given"),
    (0, dict(cu_seqlens=int32(0, 4, 8)), r"key_cache has shape \[2, 2, 8, 4\]; expected \[Hkv, total, D=4\]"),
    (0, dict(sinks=torch.ones(2)), r"sinks has shape \[2\]; expected \[H=6\]"),
    (0, dict(sin_cache=None), r"sin_cache is missing; cos_cache and sin_cache go together"),
    (0, dict(cos_cache=None, sin_cache=None), r"rotary_interleaved is 1 without cos_cache"),
    (0, dict(cos_cache=torch.ones(7, 3), sin_cache=torch.ones(7, 3)), r"cos_cache turns 6 columns; query has D=4"),
    (0, dict(window=-2), "window is -2"),
    (0, dict(window=0), "window is 0; expected -1 .* or 1 or more"),
    (0, dict(softcap=-1.0), "softcap is -1.0"),
    (1, dict(eps=-1e-6), "eps is -1e-06"),
    (3, dict(eps=-1.0), "eps is -1.0"),
    (4, dict(eps=-1.0), "eps is -1.0"),
    (0, dict(window=4, causal=0), "window needs causal=1"),
    (1, dict(algorithm="flash"), "algorithm is 'flash'; expected one of auto"),
    (1, dict(key=torch.ones(1, 2, 9, 5, dtype=F64)), r"key has shape .* \[B=1, Hk, N=9, R=4\]"),
    (
        1,
        dict(key=torch.ones(1, 4, 9, 4, dtype=F64), value=torch.ones(1, 4, 9, 3, dtype=F64)),
        "Hq = 6 is not a multiple of Hk = 4",
    ),
    (1, dict(log_decay=torch.ones(6)), r"log_decay has shape \[6\]; expected \[Hv=2\]"),
    (1, dict(log_decay=torch.ones(1, 9, 2)), r"log_decay has shape .* \[B=1, Hv=2, N=9\]"),
    (1, dict(initial_state=torch.ones(5, 2, 4, 3).half()), "initial_state has type torch.float16; .*float32"),
    (1, dict(normalize=0), "initial_norm is given and normalize is 0"),
    (1, dict(initial_state=None), "state_index is given and initial_state is absent"),
    (1, dict(initial_norm=None), "one of initial_state and initial_norm is absent"),
    (1, dict(initial_state=None, state_index=None, initial_norm=torch.ones(2, 2, 4)), "one of initial_state"),
    (1, dict(state_index=None), r"initial_state has shape \[5, 2, 4, 3\]; expected \[Q=2"),
    (
        1,
        dict(
            query=torch.ones(2, 6, 9, 4, dtype=F64),
            key=torch.ones(2, 2, 9, 4, dtype=F64),
            value=torch.ones(2, 2, 9, 3, dtype=F64),
        ),
        "B=2 and cu_seqlens has 3 entries",
    ),
    (2, dict(log_decay=None), "grad_decay is 1 and log_decay is absent"),
    (2, dict(grad_output=None), "grad_output is absent"),
    (2, dict(grad_output=torch.ones(1, 6, 9, 4, dtype=F64)), r"grad_output .* Dv=3\]"),
    (2, dict(grad_final_state=torch.ones(1, 2, 4, 3)), r"grad_final_state .* \[Q=2"),
    (3, dict(initial_count=None), "initial_count absent"),
    (3, dict(initial_state=None, initial_key_sum=None), "initial_state, initial_key_sum absent"),
    (3, dict(causal=0), "causal is 0"),
    (3, dict(causal=0, initial_state=None, initial_key_sum=None, initial_value_sum=None, initial_count=None), "causal is 0"),
    (3, dict(coefficients=torch.ones(3)), r"coefficients has shape \[3\]; expected \[2\]"),
    (3, dict(initial_count=torch.ones(1)), "initial_count has type"),
    (4, dict(output=None), "output is absent"),
    (4, dict(normalizer=torch.ones(1, 9, 6)), r"normalizer .* \[B=1, H=6, N=9\]"),
]


@pytest.mark.parametrize("call, change, message", ERRORS)
def test_errors(randn, call, change, message):
    function, tensors, attributes = example_calls(randn)[call]
    function(**tensors, **attributes)
    operator = "".join(word.capitalize() for word in function.__name__.split("_"))
    with pytest.raises(ValueError, match=f"^{operator}: .*{message}"):
        function(**{**tensors, **attributes, **change})
