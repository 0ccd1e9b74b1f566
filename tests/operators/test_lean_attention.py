"""LeanAttention's CPU kernel against the float64 reference."""

import os
import random
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leanfleet import native, spec
from leanfleet.export import reference
from support.cpu_time import rest_slow
from support.attention_cases import (
    DTYPES,
    NAN,
    VARIANTS,
    assert_close,
    assert_one_rounding,
    draw_packed_tokens,
    int32,
    make_case,
    one_after_another,
    packed,
    same_bits,
)
from support.kernels import aligned, entry, examples, poisoned, remembered, run_kernel

pytestmark = pytest.mark.usefixtures("one_torch_thread", "instruction_set")


@remembered
def judged(inputs, attrs):
    """(float64 reference, what plain float32 arithmetic and rounding to the type give)."""
    double = {n: t.double() if t is not None and t.is_floating_point() else t for n, t in inputs.items()}
    return reference.lean_attention(**double, **attrs), reference.lean_attention(**inputs, **attrs)


def check(inputs, attrs, threads=(2,), in_place=False):
    """Runs the kernel with each number of threads and compares every output with the reference; returns the last
    outputs."""
    judge, baseline = judged(inputs, attrs)
    values = [
        inputs[n] for n in ("value_cache", "query" if attrs.get("packed_qkv") else "new_value") if inputs.get(n) is not None
    ]
    size = max(v.nan_to_num(0, 0, 0).abs().max().item() for v in values)  # outputs are means of these
    lse_size = 1 + judge[1].nan_to_num(0, 0, 0).abs().max().item()
    for count in threads:
        mine = {n: t.clone() if t is not None else None for n, t in inputs.items()}
        outputs = run_kernel("LeanAttention", mine, attrs, threads=count, in_place=in_place)
        names = list(outputs)
        assert_close("output", outputs["output"], judge[0], baseline[0], size)
        assert_close("lse", outputs["lse"], judge[1], baseline[1], lse_size)
        for name, exact, base in zip(names[2:], judge[2:], baseline[2:], strict=True):
            if name == "key_cache_out" and inputs.get("cos_cache") is not None:
                assert_one_rounding(name, outputs[name], exact)
            else:
                assert same_bits(outputs[name], base), f"{name} differs from the cache with the new rows"
        if not in_place:
            assert all(t is None or same_bits(t, inputs[n]) for n, t in mine.items()), "an input was changed"
    return outputs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_decode_ragged_batch(variant, dtype):
    for group, (D, Dv) in ((1, (64, 64)), (3, (64, 32)), (4, (128, 96)), (5, (40, 24)), (7, (16, 17)), (16, (33, 64))):
        inputs, attrs = make_case(
            group,
            variant,
            dtype,
            (1, 63, 64, 65, 300, 0, 128),
            H=2 * group,
            Hkv=2,
            D=D,
            Dv=Dv,
            append=group % 2 == 0,
            softcap=3.0 if group == 4 else 0.0,
            sinks=group == 3,
        )
        check(inputs, attrs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ("bhnd", "bnhd"))
@pytest.mark.parametrize("variant", VARIANTS)
def test_prompts(variant, layout, dtype):
    for seed, attrs in enumerate(
        (
            {},
            {"causal": 0},
            {"window": 1},
            {"window": 20, "sinks": True, "append": True},
            {"softcap": 5.0, "scale": 0.7, "append": True},
        )
    ):
        inputs, attrs = make_case(
            seed,
            variant,
            dtype,
            (70, 130, 40, 0, 200),
            query_lens=(70, 65, 1, 0, 33),
            Nq=70,
            H=6,
            Hkv=(2, 6)[seed % 2],
            D=(32, 20)[seed % 2],
            Dv=(48, 7)[seed % 2],
            layout=layout,
            **attrs,
        )
        check(inputs, attrs, threads=(3,))


@pytest.mark.parametrize("seed", rest_slow(range(12), quick=4))
def test_packed_new_tokens(seed):
    source = random.Random(seed)
    for _ in range(8):
        inputs, attrs, _ = draw_packed_tokens(source, (8, 17, 32, 64))
        check(inputs, attrs, threads=(source.choice((1, 2, 3, 8)),), in_place=bool(attrs["append"]) and source.random() < 0.5)


@pytest.mark.parametrize(
    "offsets", ((0, 3, 3, 8), (5, 6, 6, 7), (-(2**31), 0, 0, 2**31 - 1), (5, 3, 100, -4), (0, -7, 2**31 - 1, 0))
)
def test_any_offsets_of_packed_new_tokens_stay_in_bounds(offsets):
    """Where offsets do not fall, after the first is taken as 0 and all are clamped, each row is that of its request, and those
    of nobody are 0. Where they fall, nothing is said of rows, and nothing else is touched."""
    inputs, attrs = one_after_another(*make_case(1, lens=(9, 4, 30), query_lens=(2, 1, 5), Nq=5))
    inputs["query"] = torch.nan_to_num(inputs["query"])
    inputs["key_cache"], inputs["value_cache"] = (torch.nan_to_num(inputs[n]) for n in ("key_cache", "value_cache"))
    inputs["cu_query_lens"] = int32(offsets)
    tokens = inputs["query"].shape[1]
    found = run_kernel("LeanAttention", inputs, attrs)["output"]
    clamped = [0, *(min(max(n, 0), tokens) for n in offsets[1:])]
    if clamped == sorted(clamped):
        torch.testing.assert_close(found, reference.lean_attention(**inputs, **attrs)[0])


@pytest.mark.everywhere
@pytest.mark.parametrize("length", (1, 63, 64, 65, 127, 128, 129, 700))
@pytest.mark.parametrize("Nq", (1, 2, 5, 64, 65))
def test_lengths_at_tile_edges(length, Nq):
    inputs, attrs = make_case(length, "paged", torch.float32, (length,), Nq=Nq, H=3, Hkv=1, D=64, Dv=64, append=True)
    check(inputs, attrs, threads=(1, 8))


@pytest.mark.parametrize("block", (1, 3, 16, 256))
def test_page_sizes(block):
    inputs, attrs = make_case(
        1, "paged", torch.bfloat16, (200, 17, 130), query_lens=(2, 9, 0), Nq=9, block=block, D=64, append=True
    )
    check(inputs, attrs)


@pytest.mark.parametrize("variant", VARIANTS)
def test_lengths_left_out(variant):
    """seq_lens absent: the capacity; query_lens absent: Nq, or what the capacity allows."""
    inputs, attrs = make_case(2, variant, lens=(48, 48, 48), spare=0, Nq=3)
    if variant == "paged":
        inputs["block_table"] = inputs["block_table"][:, :3].contiguous()
    check({**inputs, "seq_lens": None}, attrs)
    inputs, attrs = make_case(3, variant, lens=(2, 5, 0), spare=1, Nq=4)
    check(inputs, attrs)


@pytest.mark.parametrize("layout", ("bhnd", "bnhd"))
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_projections_equal_separate_ones(variant, layout, dtype):
    for rotary in (0, 9):
        for Nq, H, Hkv, D, lens in ((1, 6, 2, 24, (1, 63, 64, 65, 0, 300)), (5, 3, 3, 17, (9, 5, 0)), (70, 8, 1, 32, (70, 90))):
            inputs, attrs = make_case(
                Nq,
                variant,
                dtype,
                lens,
                query_lens=[min(n, Nq) for n in lens],
                Nq=Nq,
                H=H,
                Hkv=Hkv,
                D=D,
                Dv=D,
                append=True,
                layout=layout,
                rotary=min(rotary, D // 2),
                sinks=Nq == 5,
            )
            apart = check(inputs, attrs)
            together = check(*packed(inputs, attrs), in_place=True)
            assert all(same_bits(apart[name], together[name]) for name in apart)


@pytest.mark.parametrize(
    "changes, message",
    (
        (
            {},
            r"query has shape \[1,4,1,24\]: axis 1 of \[B,H\+2Hkv,Nq,D\] is 4; expected at least 5, because key_cache gives "
            "Hkv = 2",
        ),
        (dict(query=torch.zeros(1, 7, 1, 24)), "H = 3 is not a multiple of Hkv = 2"),
        (
            dict(query=torch.zeros(1, 8, 1, 24), value_cache=torch.zeros(1, 2, 68, 16)),
            "D = 24 and Dv = 16; with packed_qkv = 1 they must be the same",
        ),
        (
            dict(new_key=torch.zeros(1, 2, 1, 24), new_value=torch.zeros(1, 2, 1, 24)),
            "packed_qkv and new_key are both given; give one of them",
        ),
        (dict(append=0), "packed_qkv = 1 needs append = 1; found append = 0"),
        (dict(packed_qkv=0), "append = 1 needs input new_key, which is missing, or packed_qkv = 1; found packed_qkv = 0"),
    ),
)
def test_packed_projections_that_cannot_be(changes, message):
    inputs, attrs = packed(*make_case(lens=(65,), D=24, Dv=24, append=True))
    inputs["query"] = inputs["query"][:, :4].contiguous()
    inputs |= {n: t for n, t in changes.items() if not isinstance(t, int)}
    attrs |= {n: t for n, t in changes.items() if isinstance(t, int)}
    with pytest.raises(ValueError, match=message):
        run_kernel("LeanAttention", inputs, attrs)
    with pytest.raises(ValueError, match="LeanAttention: "):
        reference.lean_attention(**inputs, **attrs)


ROTARY = (
    dict(D=64, rotary=32),
    dict(D=64, rotary=8),
    dict(D=40, rotary=20, rotary_interleaved=1),
    dict(D=17, rotary=5),
    dict(D=2, rotary=1),
    dict(D=96, rotary=33, rotary_interleaved=1),
)


@pytest.mark.parametrize("append", (False, True))
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary_encoding(variant, append, dtype):
    """At the tokens' own positions in every kind of cache, of all columns and of a part; without new keys the queries
    alone turn."""
    for seed, rotary in enumerate(ROTARY):
        layout, causal = ("bhnd", "bnhd")[seed % 2], int(seed != 2)
        for Nq, lens, counts in ((1, (1, 63, 64, 65, 0, 300), None), (70, (70, 130, 40, 0, 9), (70, 65, 1, 0, 3))):
            inputs, attrs = make_case(
                seed, variant, dtype, lens, query_lens=counts, Nq=Nq, append=append, layout=layout, causal=causal, **rotary
            )
            check(inputs, attrs, in_place=append and seed % 2 == 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary_encoding_equals_one_before_the_operator(dtype):
    """The operator on rows that were turned and rounded beforehand: the same to a rounding of float32."""
    for interleaved in (0, 1):
        inputs, attrs = make_case(
            3, "paged", dtype, (30, 65, 9), query_lens=(5, 5, 2), Nq=5, append=True, rotary=8, rotary_interleaved=interleaved
        )
        first = inputs["seq_lens"] - inputs["query_lens"]
        positions = first.unsqueeze(1) + torch.arange(5)
        tables = inputs["cos_cache"], inputs["sin_cache"]
        before = {n: reference._rotate(inputs[n], positions, *tables, interleaved, torch.float32) for n in ("query", "new_key")}
        plain = {**inputs, **before, "cos_cache": None, "sin_cache": None}
        expected = run_kernel("LeanAttention", plain, {**attrs, "rotary_interleaved": 0})
        found = check(inputs, attrs)
        unit = {torch.float32: 2.0**-20, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[dtype]
        for name in found:
            torch.testing.assert_close(found[name], expected[name], rtol=unit, atol=unit, equal_nan=True)


def test_positions_beyond_the_tables_are_clamped(monkeypatch):
    """They take the last row, and nothing beyond it is read; LEANFLEET_CHECK=1 refuses them."""
    for append in (False, True):
        inputs, attrs = make_case(5, lens=(50, 7, 60), query_lens=(4, 4, 0), Nq=4, append=append, rotary=12, positions=48)
        check(inputs, attrs)
        with monkeypatch.context() as patch:
            patch.setenv("LEANFLEET_CHECK", "1")
            with pytest.raises(
                ValueError,
                match=r"^LeanAttention: the last new token of request 0 stands at position 49; "
                r"cos_cache has 48 rows, expected positions 0 \.\. 47",
            ):
                run_kernel("LeanAttention", inputs, attrs)
            inputs["seq_lens"][0] = 48
            run_kernel("LeanAttention", inputs, attrs)


@pytest.mark.parametrize(
    "changes, message",
    (
        (dict(sin_cache=None), "sin_cache is missing, cos_cache is given; give both or neither"),
        (
            dict(cos_cache=None, sin_cache=None, rotary_interleaved=1),
            "rotary_interleaved = 1 needs input cos_cache, which is missing",
        ),
        (
            dict(cos_cache=torch.zeros(9, 13), sin_cache=torch.zeros(9, 13)),
            r"cos_cache has half = 13, which rotates 26 columns; query has D = 24, expected half <= 12",
        ),
        (dict(sin_cache=torch.zeros(8, 12)), r"sin_cache has shape \[8,12\]: axis 0 of \[positions,half\] is 8; expected 9"),
        (dict(cos_cache=torch.zeros(9, 12, dtype=torch.float16)), "cos_cache has type float16; expected float32"),
    ),
)
def test_wrong_rotary_inputs(changes, message):
    inputs, attrs = make_case(2, lens=(9,), rotary=12)
    attrs["rotary_interleaved"] = changes.get("rotary_interleaved", 0)
    inputs |= {n: t for n, t in changes.items() if n != "rotary_interleaved"}
    with pytest.raises(ValueError, match=f"^LeanAttention: {message}"):
        run_kernel("LeanAttention", inputs, attrs)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place_equals_out_of_place(variant, dtype):
    inputs, attrs = make_case(4, variant, dtype, (90, 5, 33), query_lens=(4, 5, 0), Nq=5, append=True, rotary=4)
    apart = check(inputs, attrs)
    together = check(inputs, attrs, in_place=True)
    assert all(same_bits(apart[name], together[name]) for name in apart)


def test_one_cache_in_place():
    """key_cache_out takes its input's buffer, value_cache_out does not, and the other way round."""
    op = spec.all_specs()["LeanAttention"]
    inputs, attrs = make_case(5, "dense", lens=(40, 30), Nq=2, append=True)
    expected = check(inputs, attrs)
    for taken in ("key_cache", "value_cache"):
        mine = {n: t.clone() if t is not None else None for n, t in inputs.items()}
        outputs = {n: mine[taken] if n == f"{taken}_out" else poisoned(t.shape, t.dtype, t.device) for n, t in expected.items()}
        call = native.Call(
            "LeanAttention",
            [entry(mine.get(t.name)) for t in op.inputs],
            [entry(outputs.get(t.name)) for t in op.outputs],
            attrs,
            threads=2,
        )
        size, _ = call.workspace()
        scratch, at = aligned(size, "cpu", 0xFF)
        call.run(at, size)
        assert all(same_bits(outputs[n], expected[n]) for n in expected)


@pytest.mark.parametrize("threads", (1, 2, 3, 8, 61))
def test_threads(threads):
    """Any number of threads gives the same within rounding, and each the same bits every time."""
    for seed, case in enumerate(
        (
            dict(lens=(3000,), H=3, Hkv=1, D=64, Dv=64),
            dict(lens=(1, 900, 64, 700), H=8, Hkv=2),
            dict(lens=(400, 100), Nq=100, H=4, Hkv=2),
            dict(lens=(0, 0)),
        )
    ):
        inputs, attrs = make_case(seed, **case)
        first = check(inputs, attrs, (threads,))
        for _ in range(5):
            again = run_kernel("LeanAttention", inputs, attrs, threads=threads)
            assert all(same_bits(first[name], again[name]) for name in first)


def test_empty_requests_and_padding():
    for sinks in (False, True):
        inputs, attrs = make_case(6, lens=(0, 9), query_lens=(0, 2), Nq=4, sinks=sinks)
        out = run_kernel("LeanAttention", inputs, attrs)
        assert (out["output"][0] == 0).all() and (out["output"][1, :, 2:] == 0).all()
        assert (out["lse"][0] == -float("inf")).all() and (out["lse"][1, :, 2:] == -float("inf")).all()
        assert out["lse"][1, :, :2].isfinite().all()


def test_pages_outside_the_pool_are_masked_out():
    """Also where none is left: output 0, and the sink alone in lse. Nothing is written to them."""
    for sinks in (False, True):
        for causal in (0, 1):
            inputs, attrs = make_case(
                7, "paged", lens=(100, 40, 33), query_lens=(20, 3, 1), Nq=20, sinks=sinks, append=True, causal=causal
            )
            table = inputs["block_table"]
            table[0, 1], table[0, 5], table[1, :], table[2, 2] = -1, 10**6, -5, 2**31 - 1
            out = check(inputs, attrs)
            assert (out["output"][1] == 0).all()


def garbage(value, like):
    return torch.full_like(like, value)


@pytest.mark.parametrize("value", (-(2**31), -1, 0, 5, 41, 2**31 - 1))
@pytest.mark.parametrize("variant", VARIANTS)
def test_garbage_lengths_are_clamped(variant, value):
    """No index leaves a buffer (AddressSanitizer builds watch), and the clamped meaning is the reference's."""
    inputs, attrs = make_case(8, variant, lens=(30, 40, 20), query_lens=(3, 4, 1), Nq=4, append=True, rotary=4)
    for t in ("key_cache", "value_cache", "new_key", "new_value", "query"):
        inputs[t] = inputs[t].nan_to_num(0.5)
    for name in ("seq_lens", "query_lens", "block_table"):
        if inputs.get(name) is not None:
            check({**inputs, name: garbage(value, inputs[name])}, attrs)


@pytest.mark.parametrize("offsets", ((-5, 10, 2**31 - 1, 20), (50, 40, 30, 20), (-(2**31), -1, 99, 200), (0, 0, 0, 0)))
def test_garbage_offsets_are_clamped(offsets):
    inputs, attrs = make_case(9, "ragged", lens=(30, 40, 20), Nq=4)
    for t in ("key_cache", "value_cache"):
        inputs[t] = inputs[t].nan_to_num(0.5)
    for seq_lens in (None, inputs["seq_lens"]):
        inputs.update(cu_seqlens=int32(offsets), seq_lens=seq_lens)
        inputs["query"] = inputs["query"].nan_to_num(0.5)
        check(inputs, attrs)


def test_shared_pages():
    """Two requests that share the pages of a prefix read them both."""
    inputs, attrs = make_case(10, "paged", lens=(64, 64), Nq=2)
    inputs["block_table"][1, :2] = inputs["block_table"][0, :2]
    check(inputs, attrs)


def test_infinite_and_huge_logits():
    inputs, attrs = make_case(11, lens=(50, 200), D=16, Dv=16, scale=40.0)
    check(inputs, attrs)
    query = inputs["query"].abs() + 0.1
    inputs["key_cache"][:, :, 3] = -float("inf")  # logits of -inf count for nothing
    check({**inputs, "query": query}, {**attrs, "scale": 1.0})
    inputs["key_cache"][:] = -float("inf")
    out = run_kernel("LeanAttention", {**inputs, "query": query}, attrs)
    assert (out["lse"] == -float("inf")).all()
    inputs["key_cache"][:] = NAN
    out = run_kernel("LeanAttention", inputs, attrs)
    assert out["output"].isnan().all() and out["lse"].isnan().all()


def test_sinks_of_any_size():
    inputs, attrs = make_case(12, lens=(20, 300), H=6, Hkv=2, sinks=True)
    inputs["sinks"] = torch.tensor([-float("inf"), -1e4, -3.0, 0.0, 60.0, 1e4])
    check(inputs, attrs)


@pytest.mark.everywhere
@settings(max_examples=examples(400), deadline=None, derandomize=True)
@given(data=st.data())
def test_any_call(data):
    draw = data.draw
    lens = draw(
        st.lists(
            st.one_of(st.integers(0, 200), st.sampled_from((0, 1, 63, 64, 65, 127, 128, 129, 400))), min_size=1, max_size=5
        )
    )
    Nq = draw(st.sampled_from((1, 1, 2, 3, 7, 33)))
    query_lens = draw(st.one_of(st.none(), st.just(tuple(draw(st.integers(0, min(Nq, n))) for n in lens))))
    causal = draw(st.booleans())
    Hkv, group = draw(st.integers(1, 3)), draw(st.sampled_from((1, 2, 3, 4, 5, 6, 7, 8, 13)))
    width = st.sampled_from((1, 5, 8, 15, 16, 17, 32, 48, 64, 80))
    D = draw(width)
    rotary = draw(st.one_of(st.just(0), st.integers(1, D // 2))) if D > 1 else 0
    inputs, attrs = make_case(
        draw(st.integers(0, 2**20)),
        draw(st.sampled_from(VARIANTS)),
        draw(st.sampled_from(DTYPES)),
        lens,
        query_lens,
        H=Hkv * group,
        Hkv=Hkv,
        Nq=Nq,
        D=D,
        Dv=draw(width),
        block=draw(st.sampled_from((1, 2, 16, 64))),
        sinks=draw(st.booleans()),
        layout=draw(st.sampled_from(("bhnd", "bnhd"))),
        append=draw(st.booleans()),
        window=draw(st.sampled_from((-1, 1, 2, 17, 64))) if causal else -1,
        causal=int(causal),
        softcap=draw(st.sampled_from((0.0, 0.0, 2.0, 30.0))),
        scale=draw(st.sampled_from((0.0, 0.3, -0.5))),
        rotary=rotary,
        positions=draw(st.sampled_from((None, 1, 50))),
        rotary_interleaved=int(rotary > 0 and draw(st.booleans())),
    )
    check(inputs, attrs, (draw(st.sampled_from((1, 2, 3, 8))),), draw(st.booleans()) if attrs["append"] else False)


STRICT_ERRORS = [
    ("dense", "seq_lens", (10, 44, 5), r"seq_lens\[1\] is 44; request 1's cache holds 43"),
    ("dense", "seq_lens", (-1, 4, 5), r"seq_lens\[0\] is -1; .* expected 0 \.\. 43"),
    ("dense", "query_lens", (1, 2, 5), r"query_lens\[2\] is 5; query has 4 rows a request, expected 0 \.\. 4"),
    ("dense", "query_lens", (1, -2, 3), r"query_lens\[1\] is -2"),
    ("ragged", "seq_lens", (10, 44, 5), r"seq_lens\[1\] is 44; request 1's cache holds 43"),
    ("ragged", "cu_seqlens", (-1, 33, 76, 99), r"cu_seqlens\[0\] is -1; .* expected 0 \.\. 99"),
    ("ragged", "cu_seqlens", (0, 33, 30, 99), r"cu_seqlens\[2\] is 30, less than cu_seqlens\[1\] = 33"),
    ("ragged", "cu_seqlens", (0, 33, 76, 100), r"cu_seqlens\[3\] is 100; the cache has 99 positions"),
    ("paged", "seq_lens", (10, 65, 5), r"seq_lens\[1\] is 65; request 1's cache holds 64"),
    ("paged", "block_table", 15, r"block_table\[1,2\] is 15; the pool has 15 pages, expected 0 \.\. 14, or -1 for none"),
    ("paged", "block_table", -2, r"block_table\[1,2\] is -2; the pool has 15 pages, expected 0 \.\. 14, or -1 for none"),
]


@pytest.mark.parametrize("variant, name, values, message", STRICT_ERRORS)
def test_strict_checks(monkeypatch, variant, name, values, message):
    inputs, attrs = make_case(13, variant, lens=(30, 40, 20), query_lens=(3, 4, 1), Nq=4, append=True)
    monkeypatch.setenv("LEANFLEET_CHECK", "1")
    run_kernel("LeanAttention", inputs, attrs)
    if name == "block_table":
        inputs["block_table"][1, 2] = values
    else:
        inputs[name] = int32(values)
    caches = {n: inputs[n].clone() for n in ("key_cache", "value_cache")}
    with pytest.raises(ValueError, match=f"^LeanAttention: .*{message}"):
        run_kernel("LeanAttention", inputs, attrs, in_place=True)
    assert all(same_bits(inputs[n], t) for n, t in caches.items()), "a cache was changed by a refused call"
    monkeypatch.setenv("LEANFLEET_CHECK", "0")
    run_kernel("LeanAttention", inputs, attrs)


def test_strict_checks_know_pages_that_are_none(monkeypatch):
    """Of as many requests, for old and for new tokens."""
    monkeypatch.setenv("LEANFLEET_CHECK", "1")
    inputs, attrs = make_case(13, "paged", lens=(30, 40, 20), query_lens=(3, 4, 1), Nq=4, append=True)
    inputs["block_table"][:, 0] = inputs["block_table"][1, 2] = -1
    pages = range(inputs["block_table"].shape[1])
    last = [max(j for j in pages if j * inputs["key_cache"].shape[1] < n) for n in inputs["seq_lens"].tolist()]
    inputs["block_table"][range(3), last] = -1
    check(inputs, attrs)


def test_more_tokens_than_keys_is_refused(monkeypatch):
    inputs, attrs = make_case(14, lens=(2, 9), Nq=4)
    inputs["query_lens"] = int32((3, 4))
    run_kernel("LeanAttention", inputs, attrs)
    monkeypatch.setenv("LEANFLEET_CHECK", "1")
    with pytest.raises(ValueError, match=r"query_lens\[0\] is 3, more than the 2 valid keys of request 0"):
        run_kernel("LeanAttention", inputs, attrs)


@pytest.mark.parametrize(
    "Nq, S, P, message",
    (
        (2**27, 8, 0, r"query has B x Nq = 1073741824 tokens; the kernels take fewer than 2\^30"),
        (2**28, 8, 0, r"query has H x Nq = 1073741824 rows a request; the kernels take fewer than 2\^30"),
        (1, 2**30, 0, r"the cache holds 1073741824 positions a request; .* fewer than 2\^30"),
        (1, 8, 2**30, r"the pool has 1073741824 pages; .* fewer than 2\^30"),
    ),
)
def test_sizes_beyond_the_kernels_are_refused(Nq, S, P, message):
    """Shapes only: nothing is allocated."""
    B = 8 if Nq == 2**27 else 1
    cache = (0, (P, 4, 1, 8) if P else (B, 1, S, 8), "float32")
    table = (0, (B, 2), "int32") if P else None
    call = native.Call("LeanAttention", [(0, (B, 4, Nq, 8), "float32"), cache, cache, *[None] * 5, table], [], {})
    with pytest.raises(native.UnsupportedError, match=f"^LeanAttention: {message}"):
        call.workspace()


def shared_pages_case():
    """Two requests over a pool whose every page is a number: request 0 appends at positions 30 .. 33, request 1 at 17."""
    inputs, attrs = make_case(15, "paged", lens=(34, 18, 40), query_lens=(4, 1, 0), Nq=4, append=True)
    inputs["block_table"] = int32([[0, 1, 2, 9], [0, 3, 9, 9], [0, 1, 2, 9]])
    for name in ("key_cache", "value_cache"):
        inputs[name] = torch.randn(inputs[name].shape)
    return inputs, attrs


def table_with(entry, page):
    def change(inputs):
        inputs["block_table"][entry] = page

    return change


def lengths(seq_lens, query_lens):
    def change(inputs):
        inputs["seq_lens"], inputs["query_lens"] = int32(seq_lens), int32(query_lens)

    return change


SHARED_SLOTS = {
    "two writers": (
        table_with((1, 1), 2),
        r"requests 0 and 1 both write to slot 1 of page 2, which is block_table\[0,2\] and "
        r"block_table\[1,1\]; a slot takes one new token",
    ),
    "two writers that overlap in part": (lengths((38, 23, 0), (4, 3, 0)), None),
    "a reader": (
        table_with((1, 0), 1),
        r"request 1 reads slot 14 of page 1, which is block_table\[1,0\], and request 0 writes it "
        r"in the same call, as block_table\[0,1\]; requests share only what none of them writes",
    ),
    "a reader that appends nothing has no rows": (table_with((2, 2), 2), None),
    "a reader with one more key": (lengths((34, 18, 33), (4, 1, 1)), r"requests 0 and 2 both write to slot 0 of page 2"),
    "a reader behind the writer": (
        lengths((34, 18, 30), (4, 1, 1)),
        r"request 0 reads slot 13 of page 1, which is "
        r"block_table\[0,1\], and request 2 writes it in the same call, as block_table\[2,1\]",
    ),
    "a page twice in one table": (
        table_with((0, 0), 2),
        r"request 0 reads slot 0 of page 2, which is block_table\[0,0\], and "
        r"request 0 writes it in the same call, as block_table\[0,2\]",
    ),
    "one slot for two new tokens": (
        lambda inputs: (lengths((17, 18, 0), (4, 1, 0))(inputs), table_with((0, 1), 0)(inputs)),
        r"request 0 reads slot 0 of page 0, ",
    ),
}


@pytest.mark.parametrize("case", SHARED_SLOTS)
def test_slots_that_several_requests_use(monkeypatch, case):
    """What one request writes no other writes or reads; what nobody writes all may read (page 0 here)."""
    change, message = SHARED_SLOTS[case]
    monkeypatch.setenv("LEANFLEET_CHECK", "1")
    inputs, attrs = shared_pages_case()
    run_kernel("LeanAttention", inputs, attrs)  # a shared prefix is in order
    change(inputs)
    if message is None:
        run_kernel("LeanAttention", inputs, attrs)
        return
    caches = {n: inputs[n].clone() for n in ("key_cache", "value_cache")}
    with pytest.raises(ValueError, match=f"^LeanAttention: {message}"):
        run_kernel("LeanAttention", inputs, attrs, in_place=True)
    assert all(same_bits(inputs[n], t) for n, t in caches.items()), "a cache was changed by a refused call"
    run_kernel("LeanAttention", {**inputs, "new_key": None, "new_value": None}, {**attrs, "append": 0})  # reads are no matter
    monkeypatch.setenv("LEANFLEET_CHECK", "0")
    run_kernel("LeanAttention", inputs, attrs)


def test_slots_before_the_window_may_be_written(monkeypatch):
    """Pages that slid out of a request's window may serve another request."""
    monkeypatch.setenv("LEANFLEET_CHECK", "1")
    inputs, attrs = make_case(16, "paged", lens=(50, 10), query_lens=(1, 1), append=True, window=16)
    inputs["block_table"] = int32([[1, 2, 3, 4], [1, 9, 9, 9]])
    run_kernel("LeanAttention", inputs, attrs)
    inputs["block_table"][1, 0] = 2
    run_kernel("LeanAttention", inputs, attrs)
    inputs["block_table"][1, 0] = 3
    with pytest.raises(
        ValueError, match=r"request 0 reads slot 9 of page 3, which is block_table\[0,2\], and request 1 writes it"
    ):
        run_kernel("LeanAttention", inputs, attrs)


@pytest.mark.own_instruction_set  # the check stands before all kernels
@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_shared_slots(data):
    """The check against a plain search through all slots."""
    draw = data.draw
    block, requests = draw(st.sampled_from((1, 2, 3))), draw(st.integers(1, 4))
    table = [[draw(st.integers(0, 7)) for _ in range(3)] for _ in range(requests)]
    lens = [draw(st.integers(0, 3 * block)) for _ in range(requests)]
    counts = [draw(st.integers(0, min(2, n))) for n in lens]
    window = draw(st.sampled_from((-1, 1, 2)))
    slots = [[(table[b][p // block], p % block) for p in range(n)] for b, n in enumerate(lens)]
    written = [(slot, b, p) for b, n in enumerate(lens) for p, slot in enumerate(slots[b]) if p >= n - counts[b]]
    read = [
        (slot, b, p)
        for b, n in enumerate(lens)
        for p, slot in enumerate(slots[b])
        if counts[b] and (window < 0 or p > n - counts[b] - window)
    ]
    wrong = any(w[0] == r[0] and w[1:] != r[1:] for w in written for r in read + written)
    inputs = dict(
        query=torch.randn(requests, 2, 2, 4),
        key_cache=torch.randn(8, block, 1, 4),
        value_cache=torch.randn(8, block, 1, 4),
        seq_lens=int32(lens),
        query_lens=int32(counts),
        new_key=torch.randn(requests, 1, 2, 4),
        new_value=torch.randn(requests, 1, 2, 4),
        block_table=int32(table),
    )
    os.environ["LEANFLEET_CHECK"] = "1"
    try:
        run_kernel("LeanAttention", inputs, dict(append=1, window=window))
    except ValueError as error:
        assert wrong and re.search(r"requests? \d.* slot \d of page \d", str(error)), error
    else:
        assert not wrong
    finally:
        del os.environ["LEANFLEET_CHECK"]
