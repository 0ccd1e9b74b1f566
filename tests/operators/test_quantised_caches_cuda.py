"""LeanAttention's CUDA kernels on quantised caches: against the float64 reference on the very bytes and scales of the caches."""

import random
from functools import partial

import pytest
import torch

from leanfleet import native
from support import quantised_cases
from support.attention_cases import (
    DTYPES,
    FORM_NAMES,
    QUANT_PAIRS,
    VARIANTS,
    draw_lone_tokens,
    draw_packed_tokens,
    make_case,
    packed,
    same_bits,
)
from support.kernels import Launches, run_kernel
from support.quantised_cases import CALLS, check, draw

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

HALF = (torch.float16, torch.bfloat16)
WIDTHS = (8, 24, 40, 64, 64, 72, 128, 128, 136, 200, 256)
run = partial(run_kernel, "LeanAttention")


def to_cuda(inputs):
    return {n: t.cuda() if t is not None else None for n, t in inputs.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("quant", QUANT_PAIRS, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_and_prompts(variant, quant, dtype):
    for seed, facts in enumerate(CALLS):
        for longer in (0, 1500):
            lens = [n + longer for n in facts["lens"]]
            inputs, attrs = make_case(seed, variant, dtype, **{**facts, "lens": lens}, quant=quant)
            check(run, to_cuda(inputs), attrs, in_place=bool(attrs["append"]) and seed % 2 == 0)


@pytest.mark.parametrize("seed", range(40))
def test_any_call(seed):
    source = random.Random(seed)
    for _ in range(8):
        inputs, attrs = draw(source, WIDTHS, 2000)
        in_place = bool(attrs["append"]) and source.random() < 0.5
        check(run, to_cuda(inputs), attrs, in_place=in_place, shift=source.choice((0, 0, 0, 1)))


@pytest.mark.parametrize("seed", range(40))
def test_packed_new_tokens(seed):
    source = random.Random(seed)
    for _ in range(6):
        inputs, attrs, words = draw_packed_tokens(source, WIDTHS, quant=QUANT_PAIRS)
        print(words)
        in_place = bool(attrs["append"]) and source.random() < 0.5
        check(run, to_cuda(inputs), attrs, in_place=in_place, shift=source.choice((0, 0, 0, 1)))


@pytest.mark.parametrize("seed", range(20))
def test_no_more_packed_tokens_than_requests(seed):
    source = random.Random(seed)
    for _ in range(5):
        inputs, attrs, words = draw_lone_tokens(source, WIDTHS, most_keys=5000, quant=QUANT_PAIRS)
        print(words)
        in_place = bool(attrs["append"]) and source.random() < 0.5
        check(run, to_cuda(inputs), attrs, in_place=in_place, shift=source.choice((0, 0, 0, 1)))


@pytest.mark.parametrize("quant", QUANT_PAIRS, ids=str)
def test_packed_projections_equal_separate_ones(quant):
    for Nq, variant, dtype in ((1, "dense", HALF[0]), (5, "paged", HALF[1]), (70, "ragged", HALF[0])):
        lens, counts = (70, 390), (min(Nq, 9), Nq)
        inputs, attrs = make_case(Nq, variant, dtype, lens, counts, Nq=Nq, D=24, Dv=24, append=True, rotary=9, quant=quant)
        apart = check(run, to_cuda(inputs), attrs)
        inputs, attrs = packed(inputs, attrs)
        together = check(run, to_cuda(inputs), attrs, in_place=True)
        assert all(same_bits(apart[name], together[name]) for name in apart)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranges", (1, 2, 7, 131, 264))
def test_number_of_ranges(monkeypatch, ranges, dtype):
    """Any number of shares, in which units begin and end anywhere; the same bits each time."""
    monkeypatch.setenv("LEANFLEET_RANGES", str(ranges))
    for seed, facts in enumerate(
        (
            dict(lens=(9000,), H=3, Hkv=1, D=64, Dv=64),
            dict(lens=(1, 900, 64, 700), H=8, Hkv=2, D=40, Dv=72),
            dict(lens=(4000, 5, 900), H=10, Hkv=2, D=128, Dv=128, variant="paged"),
            dict(lens=(700, 4000, 33), H=24, Hkv=2, D=128, Dv=128, variant="ragged"),
            dict(lens=(3000, 40, 900), H=6, Hkv=2, D=256, Dv=256, variant="paged"),
            dict(lens=(400, 100), Nq=100, H=4, Hkv=2, D=128, Dv=128),
            dict(lens=(0, 0)),
        )
    ):
        for quant in (("token", "token"), ("channel", None), (None, "tensor"), ("token fp8", "token int4")):
            inputs, attrs = make_case(seed, dtype=dtype, quant=quant, **facts)
            inputs = to_cuda(inputs)
            first = check(run, inputs, attrs)
            again = run(inputs, attrs)
            assert all(same_bits(first[name], again[name]) for name in first)


@pytest.mark.parametrize("quant", QUANT_PAIRS, ids=str)
@pytest.mark.parametrize("way", (-1, 0, 5, 6, 7, 9))
def test_ways_of_short_contexts(monkeypatch, way, quant):
    """LEANFLEET_ONE_SEGMENT: a way of one_segment.h, of which some have clusters, or none of them."""
    monkeypatch.setenv("LEANFLEET_ONE_SEGMENT", str(way))
    for seed, facts in enumerate(CALLS):
        if facts["D"] == facts["Dv"] and facts["D"] in (64, 128, 256):
            inputs, attrs = make_case(seed, VARIANTS[(seed + way) % 3], HALF[seed % 2], **facts, quant=quant)
            check(run, to_cuda(inputs), attrs, in_place=bool(attrs["append"]))


# Prompts and pieces of more than 16 rows a head, of equal widths: on Hopper tiles become numbers of the query's type.
PROMPTS = (
    dict(lens=(300, 77), query_lens=(70, 65), Nq=70, H=6, Hkv=2, D=64, Dv=64, append=True, rotary=32),
    dict(lens=(513,), Nq=200, H=4, Hkv=2, D=128, Dv=128, append=True, rotary=64, layout="bnhd"),
    dict(lens=(260, 40, 3), query_lens=(40, 40, 0), Nq=40, H=7, Hkv=1, D=128, Dv=128, window=90, sinks=True, block=16),
    dict(lens=(150, 65), Nq=33, H=4, Hkv=2, D=256, Dv=256, softcap=5.0, scale=-0.2, append=True, block=64),
    dict(lens=(900, 1), query_lens=(20, 1), Nq=20, H=8, Hkv=2, D=64, Dv=64, causal=0, block=5),
)


@pytest.mark.parametrize("quant", QUANT_PAIRS, ids=str)
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_prompts(monkeypatch, variant, dtype, quant):
    """LEANFLEET_RANGES: few CTAs, which have several units and many tiles. LEANFLEET_CONVERT=0: the kernel of other GPUs and calls."""
    for seed, facts in enumerate(PROMPTS):
        inputs, attrs = make_case(seed, variant, dtype, **facts, quant=quant)
        inputs = to_cuda(inputs)
        first = check(run, inputs, attrs, in_place=False)
        again = run(inputs, attrs)
        assert all(same_bits(first[name], again[name]) for name in first)
        for name, value in (("LEANFLEET_RANGES", "1"), ("LEANFLEET_RANGES", "3"), ("LEANFLEET_CONVERT", "0")):
            with monkeypatch.context() as forced:
                forced.setenv(name, value)
                check(run, inputs, attrs)


def test_values_beyond_half_precision():
    """They are no business of rows that do not see them."""
    inputs, attrs = make_case(3, "dense", torch.float16, lens=(140,), Nq=140, H=4, Hkv=2, D=64, Dv=64, quant=("token", "token"))
    inputs["value_scale"][..., 100] = 1e4
    inputs = to_cuda(inputs)
    found = run(inputs, attrs)["output"][..., :100, :]
    inputs["value_scale"][..., 100] = 1.0
    assert found.isfinite().all() and same_bits(found, run(inputs, attrs)["output"][..., :100, :])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORM_NAMES)
def test_rows_that_are_no_usual_numbers(form, dtype):
    facts = dict(dtype=dtype, prepare=to_cuda, form=form)
    quantised_cases.check_rows_that_are_not_finite(run, **facts)
    quantised_cases.check_rows_of_zeros_and_tiny_numbers(run, **facts)
    quantised_cases.check_ties_round_to_even(run, **facts)
    quantised_cases.check_every_number(run, form, dtype, to_cuda)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scales_and_pages(dtype):
    quantised_cases.check_scales_of_any_size(run, dtype, to_cuda)
    quantised_cases.check_pages_outside_the_pool(run, dtype, to_cuda)


@pytest.mark.parametrize("D, way", ((128, -1), (128, 0), (128, 6), (128, 9), (256, -1), (256, 5)))
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_graph_takes_any_lengths(monkeypatch, variant, D, way):
    """A captured step that appends in place, with lengths that change between replays, and repeated. way: as above."""
    monkeypatch.setenv("LEANFLEET_ONE_SEGMENT", str(way))
    S, facts = 1108, dict(spare=0, H=8, Hkv=2, D=D, Dv=D, append=True, rotary=64, quant=("token", "token"))
    inputs, attrs = make_case(1, variant, torch.bfloat16, (S, S, S), **facts)
    inputs = {n: t.nan_to_num(0.01) if t is not None and t.is_floating_point() else t for n, t in inputs.items()}
    node = Launches("LeanAttention", to_cuda(inputs), attrs, in_place=True)
    node.run()
    graph = node.capture()
    # Heads begin amid a sector of 8 scales: a new token's scale is then in one with scales of the tile before.
    for lens in ((S, S, S), (1, 700, 3), (64, 64, 64), (33, 65, 97), (S, 0, 900)):
        node.inputs["seq_lens"].copy_(torch.tensor(lens))
        given = {n: t.clone() if t is not None else None for n, t in node.inputs.items()}
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        expected = check(run, given, attrs)
        assert all(same_bits(node.outputs[name], t) for name, t in expected.items())


def test_other_widths_are_refused():
    inputs, attrs = make_case(0, dtype=torch.float16, D=264, Dv=64, quant=("token", "token"))
    with pytest.raises(native.UnsupportedError, match="LeanAttention: D = 264; the CUDA kernels take"):
        run(to_cuda(inputs), attrs)
