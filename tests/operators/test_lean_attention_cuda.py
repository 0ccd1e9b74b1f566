"""LeanAttention's CUDA kernels against the float64 reference."""

import gc
import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leanfleet import native, spec
from leanfleet.export import reference
from support import non_finite
from support.attention_cases import (
    BLOCK,
    DTYPES,
    NAN,
    VARIANTS,
    assert_one_rounding,
    draw_lone_tokens,
    draw_packed_prompts,
    draw_packed_tokens,
    int32,
    make_case,
    one_after_another,
    packed,
    same_bits,
)
from support.kernels import ALIGNMENT, entry, output_shapes, poisoned, run_kernel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

HALF = (torch.float16, torch.bfloat16)


def to_cuda(inputs):
    return {n: t.cuda() if t is not None else None for n, t in inputs.items()}


def judged(inputs, attrs):
    """(float64 reference, the error of a plain implementation in the tensors' own type).

    The plain implementation rounds logits, weights and the output to the type, as PyTorch operators one after the
    other do; its lse is that of float32 arithmetic, and so is its output where logits leave the type's range. Errors are
    greatest absolute ones, of output and lse.
    """
    double = {n: t.double() if t is not None and t.is_floating_point() else t for n, t in inputs.items()}
    judge = reference.lean_attention(**double, **attrs)
    plain = reference.lean_attention(**inputs, **attrs, compute_dtype=inputs["query"].dtype)
    single = reference.lean_attention(**inputs, **attrs)
    output = plain[0] if plain[0].isfinite().equal(judge[0].isfinite()) else single[0]
    return judge, (greatest_error(output, judge[0]), greatest_error(single[1], judge[1]))


def greatest_error(found, judge):
    finite = judge.isfinite()
    return (found.double() - judge)[finite].abs().max().item() if finite.any() else 0.0


def assert_close(name, found, judge, allowed):
    found = found.double()
    finite = judge.isfinite()
    assert torch.equal(finite, found.isfinite()), f"{name}: finite where the reference is not, or the other way"
    assert torch.equal(found[~finite].nan_to_num(7.0), judge[~finite].nan_to_num(7.0)), name
    error = greatest_error(found, judge)
    assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def check(inputs, attrs, in_place=False, shift=0, roundings=1):
    """Runs the kernel and compares every output with the reference; returns the outputs, on the device.

    shift: elements by which the T inputs are moved away from the alignment that torch gives. roundings: of the output to its type.
    """
    device_inputs = to_cuda(inputs)
    judge, (output_error, lse_error) = judged(device_inputs, attrs)
    for name, t in device_inputs.items():
        if shift and t is not None and t.dtype == inputs["query"].dtype:
            device_inputs[name] = torch.cat([t.new_full((shift,), NAN), t.flatten()])[shift:].view(t.shape)
    before = {n: t.clone() if t is not None else None for n, t in device_inputs.items()}
    outputs = run_kernel("LeanAttention", device_inputs, attrs, in_place=in_place)
    names = list(outputs)
    values = inputs["value_cache"].nan_to_num().abs().max().item()
    logit_error = 2.0**-21 * max(attrs.get("softcap", 0.0), 1.0)  # the exponentials' own, and that of tanh
    step = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[inputs["query"].dtype]
    for i, (name, error) in enumerate(zip(names[:2], (output_error, lse_error), strict=True)):
        largest = judge[i][judge[i].isfinite()].abs().max().item() if judge[i].isfinite().any() else 0.0
        # Twice what the plain implementation loses, roundings to the type, and what weights lose to `logit_error`.
        own = roundings * step * largest + logit_error * values if name == "output" else logit_error * max(largest, 1.0)
        assert_close(name, outputs[name], judge[i], 2 * error + own)
    if attrs.get("append"):
        caches = reference.lean_attention(**to_cuda(inputs), **attrs)[2:]
        for name, exact, cache in zip(names[2:], judge[2:], caches, strict=True):
            if name == "key_cache_out" and inputs.get("cos_cache") is not None:
                assert_one_rounding(name, outputs[name], exact)
            else:
                assert same_bits(outputs[name], cache), f"{name} differs from the cache with the new rows"
    if not in_place:
        assert all(t is None or same_bits(t, device_inputs[n]) for n, t in before.items()), "an input was changed"
    return outputs


class Launches:
    """One node: its outputs, its own workspace, and launches that a graph can capture."""

    def __init__(self, inputs, attrs, in_place=False):
        op = spec.all_specs()["LeanAttention"]
        self.inputs, self.attrs = inputs, attrs
        shapes = output_shapes(op, inputs, attrs)
        self.outputs = {name: poisoned(shape, dtype, "cuda") for name, dtype, shape in shapes[:2]}
        if attrs.get("append"):
            for name in ("key_cache", "value_cache"):
                self.outputs[f"{name}_out"] = inputs[name] if in_place else torch.empty_like(inputs[name])
        self.entries = ([entry(inputs.get(t.name)) for t in op.inputs], [entry(self.outputs.get(t.name)) for t in op.outputs])
        call = native.Call("LeanAttention", *self.entries, attrs, "cuda")
        scratch_bytes, sync_bytes = call.workspace()
        self.scratch = torch.full((scratch_bytes + ALIGNMENT,), 0xFF, dtype=torch.uint8, device="cuda")
        self.sync = torch.zeros(sync_bytes + ALIGNMENT, dtype=torch.uint8, device="cuda")
        self.workspace = []
        for buffer, size in ((self.scratch, scratch_bytes), (self.sync, sync_bytes)):
            self.workspace += [-(-buffer.data_ptr() // ALIGNMENT) * ALIGNMENT, size]

    def run(self):
        """On torch's current stream."""
        stream = torch.cuda.current_stream().cuda_stream
        native.Call("LeanAttention", *self.entries, self.attrs, "cuda", stream=stream).run(*self.workspace)

    def capture(self):
        gc.collect()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        return graph


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_decode_ragged_batch(variant, dtype):
    for group, (D, Dv) in (
        (1, (64, 64)),
        (3, (64, 32)),
        (4, (128, 96)),
        (5, (40, 24)),
        (6, (256, 256)),
        (7, (16, 8)),
        (8, (128, 128)),
        (9, (192, 128)),
        (16, (80, 80)),
        (40, (64, 64)),
    ):
        inputs, attrs = make_case(
            group,
            variant,
            dtype,
            (1, 63, 64, 65, 1300, 0, 128, 129),
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
            (70, 330, 40, 0, 200),
            query_lens=(70, 265, 1, 0, 33),
            Nq=300,
            H=6,
            Hkv=(2, 6)[seed % 2],
            D=(32, 128)[seed % 2],
            Dv=(64, 128, 256)[seed % 3],
            layout=layout,
            **attrs,
        )
        check(inputs, attrs)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("D", (64, 128, 192, 256))
def test_17_to_200_rows(variant, D, dtype):
    """Some new tokens on a long cache: units of 128 rows, of which few or all are used, and splits of the context."""
    for seed, (group, Nq, attrs) in enumerate(
        (
            (1, 17, {}),
            (4, 8, {"sinks": True}),
            (3, 21, {"causal": 0}),
            (4, 16, {"softcap": 5.0}),
            (1, 65, {"scale": -0.3}),
            (3, 40, {"window": 100}),
            (8, 16, {"window": 700, "sinks": True, "append": True}),
            (1, 129, {"block": 64}),
            (5, 40, {"block": 8, "append": True}),
            (1, 200, {"softcap": 2.0, "window": 130, "block": 256}),
        )
    ):
        lens = (1500, 129, 0, 256, 1, 127, 3000)
        inputs, attrs = make_case(
            seed,
            variant,
            dtype,
            lens,
            query_lens=tuple(min(Nq, n) for n in lens[:-1]) + (3,),
            Nq=Nq,
            H=2 * group,
            Hkv=2,
            D=D,
            Dv=(D, 64)[seed % 2],
            **attrs,
        )
        check(inputs, attrs)


def test_values_that_no_row_sees_do_not_matter():
    """Infinities and NaN in the rest of a tile, where a tile of an earlier request has left such values too."""
    for variant in VARIANTS:
        for n, (D, Dv) in itertools.product((1, 63, 100, 127, 128, 129, 300), ((64, 128), (192, 128), (256, 256))):
            inputs, attrs = make_case(
                n, variant, torch.bfloat16, (n, 900, n), (min(n, 40), 40, 1), Nq=40, H=4, Hkv=1, D=D, Dv=Dv, spare=200
            )
            out = check(inputs, attrs)
            cache = inputs["value_cache"]
            inputs["value_cache"] = torch.where(cache.isnan(), torch.full_like(cache, float("inf")), cache)
            again = run_kernel("LeanAttention", to_cuda(inputs), attrs)
            assert all(same_bits(out[name], again[name]) for name in again)


# Widths of the three kernels, whole and partial encodings, an odd number of pairs.
ROTARY = (
    dict(D=64, rotary=32),
    dict(D=128, rotary=64),
    dict(D=256, rotary=20),
    dict(D=80, rotary=40, rotary_interleaved=1),
    dict(D=128, rotary=16, rotary_interleaved=1),
    dict(D=24, rotary=5),
    dict(D=8, rotary=1),
)


@pytest.mark.parametrize("append", (False, True))
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary_encoding(variant, dtype, append):
    """Up to 8, 16 and more packed rows: kernels turn rows as they read them, or get them turned."""
    for seed, rotary in enumerate(ROTARY):
        layout = ("bhnd", "bnhd")[seed % 2]
        for Nq, H, lens, counts in (
            (1, 6, (1, 63, 64, 65, 0, 700), None),
            (4, 6, (4, 66, 129, 2, 0), (4, 3, 1, 2, 0)),
            (70, 4, (70, 330, 40, 0, 9), (70, 65, 1, 0, 3)),
        ):
            inputs, attrs = make_case(
                seed,
                variant,
                dtype,
                lens,
                query_lens=counts,
                Nq=Nq,
                H=H,
                Dv=64,
                append=append,
                layout=layout,
                causal=int(seed != 2),
                **rotary,
            )
            check(inputs, attrs, in_place=append and seed % 2 == 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary_encoding_of_unaligned_tensors(dtype):
    for Nq in (1, 50):
        for rotary in (32, 5):
            inputs, attrs = make_case(3, "paged", dtype, (300, 70), Nq=Nq, H=6, Hkv=2, D=64, Dv=32, append=True, rotary=rotary)
            check(inputs, attrs, shift=1)


def test_positions_beyond_the_tables_are_clamped(monkeypatch):
    for dtype in DTYPES:
        for Nq in (4, 40):
            for append in (False, True):
                inputs, attrs = make_case(
                    5, dtype=dtype, lens=(50, 7, 60), query_lens=(4, 4, 0), Nq=Nq, append=append, rotary=12, positions=48
                )
                check(inputs, attrs)
    monkeypatch.setenv("LEANFLEET_CHECK", "1")
    with pytest.raises(
        ValueError, match=r"^LeanAttention: the last new token of request 0 stands at position 49; cos_cache has"
    ):
        run_kernel("LeanAttention", to_cuda(inputs), attrs)


@pytest.mark.parametrize("layout", ("bhnd", "bnhd"))
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_projections_equal_separate_ones(variant, layout, dtype):
    """In each kernel: short contexts and long ones, some tokens and prompts whose appends are launches of their own."""
    for rotary in (0, 32, 9):
        for Nq, H, Hkv, D, lens in (
            (1, 8, 2, 128, (1, 63, 64, 65, 0, 3000)),
            (1, 6, 2, 64, (100, 7)),
            (1, 4, 4, 256, (700, 0)),
            (5, 15, 5, 80, (9, 5, 0, 900)),
            (70, 8, 2, 64, (70, 300, 9)),
            (130, 4, 1, 128, (130, 999)),
        ):
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
                rotary=rotary,
                sinks=Nq == 5,
            )
            apart = check(inputs, attrs)
            together = check(*packed(inputs, attrs), in_place=Nq != 5)
            assert all(same_bits(apart[name], together[name]) for name in apart)


@pytest.mark.parametrize("seed", range(40))
def test_packed_new_tokens(seed):
    source = random.Random(seed)
    for _ in range(5):
        inputs, attrs, words = draw_packed_tokens(source, (8, 48, 64, 64, 128, 128, 192, 256))
        print(words)
        check(inputs, attrs, in_place=bool(attrs["append"]) and source.random() < 0.5, shift=source.choice((0, 0, 0, 1)))


@pytest.mark.parametrize("seed", range(30))
def test_no_more_packed_tokens_than_requests(seed):
    """Kernels work out by themselves which tokens are whose, also where some requests have more than one and others none."""
    source = random.Random(seed)
    for _ in range(5):
        inputs, attrs, words = draw_lone_tokens(source, (8, 48, 64, 64, 80, 128, 128, 192, 256), most_keys=9000)
        print(words)
        check(inputs, attrs, in_place=bool(attrs["append"]) and source.random() < 0.5, shift=source.choice((0, 0, 0, 1)))


def calls_of_one_token(lens, quant, D, packed_tokens):
    """[inputs] and attributes of three calls of equal shapes, of 12 requests."""
    source = random.Random(3)
    facts = dict(variant="paged", dtype=HALF[0], H=8, Hkv=2, D=D, Dv=D, append=True, rotary=D // 2, positions=lens)
    facts |= dict(query_lens=[1] * 12, Nq=1) | ({"quant": quant} if quant else {})
    cases = []
    for _ in range(3):
        each = [source.randint(1, lens) for _ in range(11)] + [lens]
        case = make_case(source.randrange(2**20), lens=each, **facts)
        cases.append(one_after_another(*case) if packed_tokens else case)
    return [inputs for inputs, _ in cases], cases[0][1]


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9, reason="needs a GPU from 9.0 on")
@pytest.mark.parametrize("packed_tokens", (False, True))
@pytest.mark.parametrize("D, lens", ((128, 4096), (64, 900), (64, 90)))
@pytest.mark.parametrize("quant", (None, ("token int8", "token int8")), ids=str)
def test_calls_behind_kernels_that_write_late(quant, D, lens, packed_tokens):
    """Attention begins while the append runs, and the append waits for what came before it."""
    from support.late_writer import check_behind_late_writes

    cases, attrs = calls_of_one_token(lens, quant, D, packed_tokens)
    check_behind_late_writes("LeanAttention", cases, attrs, constant=("cos_cache", "sin_cache"))


def test_missing_pages_beside_appended_ones():
    """Page 0 is read in place of a missing one, while another request's new token goes into it."""
    inputs, attrs = make_case(
        5, "paged", HALF[0], lens=[700, 200], query_lens=[1, 1], Nq=1, H=8, Hkv=2, D=128, Dv=128, append=True, rotary=64
    )
    table, last = inputs["block_table"], (200 - 1) // inputs["key_cache"].shape[1]
    table[table == 0] = table[1, last].item()  # whoever had page 0
    table[1, last], table[0, 1] = 0, -1
    inputs, attrs = one_after_another(inputs, attrs)
    for in_place in (False, True):
        check(inputs, attrs, in_place=in_place)


@pytest.mark.parametrize("seed", range(12))
def test_packed_prompts_dealt_out_whole(seed):
    inputs, attrs, words = draw_packed_prompts(random.Random(seed))
    print(words)
    check(inputs, attrs, in_place=bool(attrs["append"]))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_graph_of_packed_new_tokens_takes_any_requests(dtype):
    """Captured for 64 tokens of up to 8 requests; offsets, lengths and pages change between replays."""
    B, tokens = 8, 64
    facts = dict(variant="paged", dtype=dtype, H=8, Hkv=2, D=64, Dv=64, append=True, rotary=32, layout="bnhd", positions=400)
    source, graph, launches = random.Random(0), None, None
    for _ in range(12):
        cuts = sorted(source.randint(0, tokens) for _ in range(B))
        counts = [b - a for a, b in zip([0, *cuts], cuts, strict=False)]
        lens = [*(n + source.choice((0, 3, 200)) for n in counts[:-1]), 340]  # the last makes every table equally wide
        case = make_case(source.randrange(2**20), lens=lens, query_lens=counts, Nq=tokens, **facts)
        inputs, attrs = one_after_another(*case, spare=tokens - sum(counts))
        judge, (error, _) = judged(to_cuda(inputs), attrs)
        if graph is None:
            launches = Launches(to_cuda(inputs), attrs)
            launches.run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                launches.run()
        for name, t in inputs.items():
            if t is not None:
                launches.inputs[name].copy_(t)
        launches.outputs["output"].fill_(NAN)
        graph.replay()
        torch.cuda.synchronize()
        assert_close("output", launches.outputs["output"], judge[0], 2 * error + 2.0**-8)


@pytest.mark.parametrize("D", (8, 24, 64, 80, 96, 128, 192, 256))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_widths(dtype, D):
    for Nq, Dv in ((1, D), (3, 264 - D), (20, D)):
        for variant in VARIANTS:
            inputs, attrs = make_case(D, variant, dtype, (200, 77), Nq=Nq, H=8, Hkv=2, D=D, Dv=Dv)
            check(inputs, attrs)


@pytest.mark.parametrize("Nq", (1, 2, 5, 16, 65))
def test_lengths_at_tile_edges(Nq):
    for length in (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 700):
        for variant, D in (("paged", 128), ("dense", 64), ("ragged", 256)):
            inputs, attrs = make_case(
                length, variant, torch.bfloat16, (length,), Nq=Nq, H=3, Hkv=1, D=D, Dv=D, append=variant == "paged"
            )
            check(inputs, attrs)


@pytest.mark.parametrize("window", (1, 2, 63, 64, 65, 500))
@pytest.mark.parametrize("Nq", (1, 6, 100))
def test_windows(Nq, window):
    """Keys before all windows are NaN, and in a paged cache the window may begin in the middle of a tile."""
    for variant in VARIANTS:
        inputs, attrs = make_case(
            Nq, variant, torch.float16, (600, 129, 100), Nq=Nq, H=4, Hkv=2, D=64, Dv=64, window=window, append=Nq == 6
        )
        check(inputs, attrs)


@pytest.mark.parametrize("block", (1, 3, 8, 16, 32, 48, 64, 256))
@pytest.mark.parametrize("D", (64, 128))
def test_page_sizes(block, D):
    for append in (False, True):
        for Nq in (1, 9, 40):
            inputs, attrs = make_case(
                1, "paged", torch.bfloat16, (1200, 17, 130), Nq=Nq, query_lens=(Nq, 1, 0), block=block, D=D, Dv=D, append=append
            )
            check(inputs, attrs)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place_equals_out_of_place(variant, dtype):
    inputs, attrs = make_case(4, variant, dtype, (90, 5, 33), query_lens=(4, 5, 0), Nq=5, append=True)
    apart = check(inputs, attrs)
    together = check(inputs, attrs, in_place=True)
    assert all(same_bits(apart[name], together[name]) for name in apart)


@pytest.mark.parametrize("variant", VARIANTS)
def test_lengths_left_out(variant):
    inputs, attrs = make_case(2, variant, torch.bfloat16, lens=(48, 48, 48), spare=0, Nq=3)
    if variant == "paged":
        inputs["block_table"] = inputs["block_table"][:, :3].contiguous()
    check({**inputs, "seq_lens": None}, attrs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unaligned_tensors(dtype):
    for variant in VARIANTS:
        for Nq in (1, 50):
            inputs, attrs = make_case(3, variant, dtype, (300, 70), Nq=Nq, H=6, Hkv=2, D=64, Dv=32, append=Nq == 50)
            check(inputs, attrs, shift=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranges", (1, 2, 7, 131, 264))
@pytest.mark.parametrize("apart", (False, True))
def test_number_of_ranges(monkeypatch, apart, ranges, dtype):
    """Any number of shares, more than there are multiprocessors too: nobody waits for another block."""
    monkeypatch.setenv("LEANFLEET_RANGES", str(ranges))
    monkeypatch.setenv("LEANFLEET_MERGE_APART", str(int(apart)))
    for seed, case in enumerate(
        (
            dict(lens=(9000,), H=3, Hkv=1, D=64, Dv=64),
            dict(lens=(1, 900, 64, 700), H=8, Hkv=2),
            dict(lens=(4000, 5, 900), H=10, Hkv=2, D=128, Dv=128, variant="paged"),
            dict(lens=(400, 100), Nq=100, H=4, Hkv=2, D=128, Dv=128),
            dict(lens=(0, 0)),
        )
    ):
        inputs, attrs = make_case(seed, dtype=dtype, **case)
        first = check(inputs, attrs)
        for _ in range(3):
            again = run_kernel("LeanAttention", to_cuda(inputs), attrs)
            assert all(same_bits(first[name], again[name]) for name in first)


# D, Dv, heads, new tokens, lengths: units of 8 and of 16 rows, one and several of a head; some contexts longer than a round of reads.
SHORT = (
    (64, 64, (8, 4), 1, (1, 700, 65)),
    (56, 40, (12, 2), 2, (370, 9)),
    (96, 96, (5, 1), 8, (130, 0, 40, 900)),
    (128, 128, (8, 2), 6, (600, 33)),
    (192, 128, (3, 1), 1, (390, 17)),
    (256, 256, (6, 2), 7, (350,)),
    (128, 128, (16, 1), 8, (515, 64)),
)


@pytest.mark.parametrize("way", range(-1, 10))
@pytest.mark.parametrize("append", (False, True))
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_every_way_of_short_contexts(monkeypatch, dtype, append, way):
    """LEANFLEET_ONE_SEGMENT: a way of one_segment.h, of which some have clusters, or none of them."""
    monkeypatch.setenv("LEANFLEET_ONE_SEGMENT", str(way))
    for seed, (D, Dv, (H, Hkv), Nq, lens) in enumerate(SHORT):
        facts = dict(H=H, Hkv=Hkv, Nq=Nq, D=D, Dv=Dv, append=append, rotary=D // 4 * append)
        options = dict(query_lens=tuple(min(Nq, n) for n in lens), window=50 if seed % 3 == 2 else -1, sinks=seed % 2 == 1)
        inputs, attrs = make_case(seed, VARIANTS[seed % 3], dtype, lens, **facts, **options)
        first = check(inputs, attrs)
        again = run_kernel("LeanAttention", to_cuda(inputs), attrs)
        assert all(same_bits(first[name], again[name]) for name in first)


# Many rows and parts: a launch of its own merges the units, those of few parts and those of many.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D, H, Nq", ((256, 32, 8), (192, 16, 1), (128, 12, 16), (96, 71, 2), (64, 16, 1)))
def test_units_merged_by_a_launch_of_its_own(monkeypatch, dtype, D, H, Nq):
    monkeypatch.setenv("LEANFLEET_MERGE_APART", "1")
    monkeypatch.setenv("LEANFLEET_ONE_SEGMENT", "-1")
    for seed, lens in enumerate(((14000, 64, 1), (5000,), (900, 0, 3000, 17, 64, 200))):
        query_lens = tuple(min(Nq, n) for n in lens)
        options = dict(softcap=30.0) if seed == 1 else dict(sinks=True)
        inputs, attrs = make_case(
            seed, VARIANTS[seed], dtype, lens, H=H, Hkv=1, Nq=Nq, D=D, Dv=D, query_lens=query_lens, **options
        )
        first = check(inputs, attrs)
        again = run_kernel("LeanAttention", to_cuda(inputs), attrs)
        assert all(same_bits(first[name], again[name]) for name in first)


# Units that a device of 132 multiprocessors cuts into 2, 4, 8, 12, 13, 16 and 33 parts, if they are equal. Clusters are as large
# as all fit at once: of 2, 4 and 8 on an H200.
@pytest.mark.parametrize("B, Hkv", ((4, 16), (4, 8), (1, 16), (1, 11), (2, 5), (1, 8), (1, 4)))
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_few_units_of_equal_and_of_other_lengths(dtype, B, Hkv):
    """Equal units are merged within a cluster where they fit into one; the same launch has to merge others too."""
    shapes = (dict(D=128, Dv=128), dict(D=64, Dv=32), dict(D=256, Dv=256), dict(D=96, Dv=24, sinks=True))
    for seed, length in enumerate((0, 1, 64, 130, 1000, 2500)):
        lens = (length,) * B
        group, Nq = ((4, 1), (1, 1), (3, 2), (4, 3), (5, 3), (8, 1))[seed]
        if group * Nq > 8 and shapes[seed % 4]["D"] == 256:
            Nq = 1
        case = dict(Nq=Nq, H=Hkv * group, Hkv=Hkv, window=700 if seed == 5 and B == 1 else -1, **shapes[seed % 4])
        inputs, attrs = make_case(
            seed, VARIANTS[seed % 3], dtype, lens, query_lens=tuple(min(Nq, n) for n in lens), append=seed == 3, **case
        )
        first = check(inputs, attrs)
        for _ in range(3):
            again = run_kernel("LeanAttention", to_cuda(inputs), attrs)
            assert all(same_bits(first[name], again[name]) for name in first)
        lens = (*lens[:-1], length // 3)
        inputs, attrs = make_case(seed, VARIANTS[seed % 3], dtype, lens, query_lens=tuple(min(Nq, n) for n in lens), **case)
        check(inputs, attrs)


def check_replays(inputs, attrs, lengths, replays, always, every, judged):
    """A captured launch, replayed with seq_lens changed on the device from one of `lengths` [L,B] to the next, gives what calls
    of their own give: bit by bit in the first `always` replays and each `every`th. `judged` of these are compared with the
    reference."""
    device_inputs = to_cuda(inputs)
    node = Launches(device_inputs, attrs)
    node.run()
    graph = node.capture()
    on_device = lengths.cuda()
    expected = [run_kernel("LeanAttention", {**device_inputs, "seq_lens": lens.clone()}, attrs) for lens in on_device]
    for i in range(replays):
        which = i % len(lengths)
        device_inputs["seq_lens"].copy_(on_device[which])
        graph.replay()
        if i < always or i % every == 0:
            for name, t in expected[which].items():
                assert same_bits(node.outputs[name], t), f"replay {i}, {name}"
    torch.cuda.synchronize()
    assert not node.sync.any()
    for lens, found in zip(on_device[:judged], expected[:judged], strict=True):
        judge = reference.lean_attention(
            **{
                n: t.double() if t is not None and t.is_floating_point() else t
                for n, t in {**device_inputs, "seq_lens": lens}.items()
            },
            **attrs,
        )
        assert greatest_error(found["output"], judge[0]) < 0.02


@pytest.mark.parametrize("B, Hkv", ((4, 16), (4, 8), (1, 8)))
def test_graph_replays_with_equal_and_other_lengths(B, Hkv):
    S = 1100
    inputs, attrs = make_case(1, "dense", torch.bfloat16, (S,) * B, spare=0, H=4 * Hkv, Hkv=Hkv, D=128, Dv=128)
    lengths = [(S,) * B, (700,) * B, (S,) * (B - 1) + (3,), (129,) * B, (0,) * B, (5,) * (B - 1) + (S,)]
    check_replays(inputs, attrs, int32(lengths), 3000, always=24, every=97, judged=6)


@pytest.mark.parametrize(
    "shape", (dict(Nq=20), dict(Nq=3, H=4, Hkv=2, D=64, Dv=64), dict(Nq=4, H=2, Hkv=1, D=128, Dv=128)), ids=str
)
def test_pages_outside_the_pool_are_masked_out(shape):
    for dtype in DTYPES:
        for block in (1, 8, BLOCK):
            for causal in (0, 1):
                inputs, attrs = make_case(
                    7,
                    "paged",
                    dtype,
                    lens=(100, 40, 33),
                    query_lens=(shape["Nq"], 3, 1),
                    block=block,
                    sinks=causal == 1,
                    append=True,
                    causal=causal,
                    **shape,
                )
                table = inputs["block_table"]
                table[0, 1], table[0, 5], table[1, :], table[2, 2] = -1, 10**6, -5, 2**31 - 1
                out = check(inputs, attrs)
                assert (out["output"][1] == 0).all()


@pytest.mark.parametrize("value", (-(2**31), -1, 0, 5, 41, 2**31 - 1))
@pytest.mark.parametrize("variant", VARIANTS)
def test_garbage_lengths_are_clamped(variant, value):
    for dtype in DTYPES:
        inputs, attrs = make_case(8, variant, dtype, lens=(30, 40, 20), query_lens=(3, 4, 1), Nq=4, rotary=4)
        for t in ("key_cache", "value_cache", "query"):
            inputs[t] = inputs[t].nan_to_num(0.5)
        for name in ("seq_lens", "query_lens", "block_table"):
            if inputs.get(name) is not None:
                check({**inputs, name: torch.full_like(inputs[name], value)}, attrs)


@pytest.mark.parametrize("offsets", ((-5, 10, 2**31 - 1, 20), (50, 40, 30, 20), (-(2**31), -1, 99, 200), (0, 0, 0, 0)))
def test_garbage_offsets_are_clamped(offsets):
    inputs, attrs = make_case(9, "ragged", torch.float16, lens=(30, 40, 20), Nq=4)
    for t in ("key_cache", "value_cache", "query"):
        inputs[t] = inputs[t].nan_to_num(0.5)
    for seq_lens in (None, inputs["seq_lens"]):
        check({**inputs, "cu_seqlens": int32(offsets), "seq_lens": seq_lens}, attrs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinite_and_huge_logits(dtype):
    inputs, attrs = make_case(11, dtype=dtype, lens=(50, 200), D=16, Dv=16, scale=40.0)
    check(inputs, attrs)
    query = inputs["query"].abs() + 0.1
    inputs["key_cache"][:, :, 3] = -float("inf")
    check({**inputs, "query": query}, {**attrs, "scale": 1.0})
    inputs["key_cache"][:] = -float("inf")
    out = run_kernel("LeanAttention", to_cuda({**inputs, "query": query}), attrs)
    assert (out["lse"] == -float("inf")).all() and (out["output"] == 0).all()
    inputs["key_cache"][:] = NAN
    out = run_kernel("LeanAttention", to_cuda(inputs), attrs)
    assert out["output"].isnan().all() and out["lse"].isnan().all()


@pytest.mark.parametrize("D", (64, 128, 256))
@pytest.mark.parametrize("Nq", (1, 5, 100))
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_logit_just_above_the_maximum(dtype, Nq, D):
    """One unit in the last place, in a later tile, where 8 more is half-way between two numbers: 2^27 + 16 and 2^27 + 32."""
    inputs, attrs = make_case(0, dtype=dtype, lens=(1000,), Nq=Nq, H=2, Hkv=2, D=D, Dv=D, scale=0.69, causal=0)
    query, keys = inputs["query"], inputs["key_cache"]
    query.zero_()[..., :2] = torch.tensor([2.0**14, 4.0])
    keys.zero_()[..., 0] = -1.0
    keys[:, :, 10, :2], keys[:, :, 700, :2] = torch.tensor([2.0**13, 4.0]), torch.tensor([2.0**13, 8.0])
    check(inputs, attrs, roundings=2)


@pytest.mark.parametrize("D", (64, 128, 192, 256))
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_prompts_of_logits_far_from_zero(dtype, D):
    """Logits of one product, exact in float32: what is wrong then is what scaling and subtracting the maximum round."""
    for power, sign in itertools.product((10, 18, 24, 25, 26, 27, 30, 33, 60, 120), (1, -1)):
        for facts in (dict(lens=(300, 150), Nq=150, H=4, Hkv=2), dict(lens=(3000,), Nq=40, H=4, Hkv=1)):
            inputs, attrs = make_case(power, dtype=dtype, D=D, Dv=D, scale=0.7 * 2.0**power, **facts)
            inputs["query"][..., 1:] *= 0
            if sign < 0:  # no logit above 0
                inputs["query"], inputs["key_cache"] = -inputs["query"].abs(), inputs["key_cache"].abs()
            check(inputs, attrs, roundings=2)  # the only weight that counts is rounded like the output


def test_sinks_of_any_size():
    for dtype in DTYPES:
        inputs, attrs = make_case(12, dtype=dtype, lens=(20, 300), H=6, Hkv=2, sinks=True)
        inputs["sinks"] = torch.tensor([-float("inf"), -1e4, -3.0, 0.0, 60.0, 1e4])
        check(inputs, attrs)


@pytest.mark.parametrize("D, Dv", ((264, 64), (64, 264), (20, 64), (64, 20)))
def test_other_widths_are_refused(D, Dv):
    inputs, attrs = make_case(0, dtype=torch.float16, D=D, Dv=Dv)
    with pytest.raises(native.UnsupportedError, match=r"LeanAttention: Dv? = (264|20); the CUDA kernels take"):
        run_kernel("LeanAttention", to_cuda(inputs), attrs)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_large_ragged_batches(dtype):
    """Lengths of a lognormal distribution, batches of 1 to 512."""
    generator = torch.Generator().manual_seed(3)
    for B in (1, 31, 33, 200, 512):
        lens = (torch.randn(B, generator=generator) * 1.2 + 4).exp().int().clamp(0, 900).tolist()
        inputs, attrs = make_case(B, "paged", dtype, lens, H=4, Hkv=2, D=64, Dv=64, append=True)
        check(inputs, attrs)


# Several units for each CTA, whole ones of up to 64 rows among them, which groups of warps take in turn.
@pytest.mark.parametrize("D, Dv", ((64, 64), (80, 96), (128, 128), (192, 192), (192, 128), (136, 72), (256, 256)))
@pytest.mark.parametrize(
    "variant, B, H, Hkv, Nq, options",
    (
        ("paged", 260, 71, 1, 4, {}),
        ("dense", 150, 28, 4, 7, {"window": 300}),
        ("ragged", 150, 28, 4, 7, {"append": True}),
        ("paged", 280, 6, 2, 9, {"sinks": True, "append": True}),
        ("dense", 280, 6, 2, 9, {"causal": 0, "softcap": 20.0}),
        ("ragged", 280, 6, 2, 9, {"scale": -0.3}),
        ("dense", 160, 9, 3, 50, {}),
        ("dense", 160, 12, 3, 58, {"append": True}),
        ("paged", 160, 8, 2, 73, {}),
    ),
)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_many_units_of_unlike_lengths(dtype, variant, B, H, Hkv, Nq, options, D, Dv):
    generator = torch.Generator().manual_seed(B + D)
    lens = (torch.randn(B, generator=generator) * 1.2 + 5).exp().int().clamp(0, 1500).tolist()
    lens[7], lens[40] = 0, 1
    query_lens = [min(n, Nq - b % 2) for b, n in enumerate(lens)]
    sizes = dict(H=H, Hkv=Hkv, Nq=Nq, D=D, Dv=Dv)
    inputs, attrs = make_case(D, variant, dtype, lens, query_lens=query_lens, **sizes, **options)
    check(inputs, attrs)


# Cut units of up to 64 rows between whole ones.
@pytest.mark.parametrize("apart", (False, True))
@pytest.mark.parametrize("ranges", (1, 7, 50))
def test_whole_and_cut_units_of_one_group(monkeypatch, ranges, apart):
    monkeypatch.setenv("LEANFLEET_RANGES", str(ranges))
    monkeypatch.setenv("LEANFLEET_MERGE_APART", str(int(apart)))
    monkeypatch.setenv("LEANFLEET_ONE_SEGMENT", "-1")
    for seed, (D, group, Nq) in enumerate(((64, 6, 9), (128, 3, 20), (256, 4, 8), (192, 2, 50))):
        lens = [(70 * b * b) % 1999 for b in range(24)]
        sizes = dict(H=2 * group, Hkv=2, Nq=Nq, D=D, Dv=min(D, 128))
        query_lens = [min(n, Nq) for n in lens]
        inputs, attrs = make_case(seed, VARIANTS[seed % 3], torch.bfloat16, lens, query_lens=query_lens, **sizes)
        check(inputs, attrs)


def any_call(draw, D, Dv, Nqs, groups):
    """Draws a call and checks it."""
    lens = draw(
        st.lists(
            st.one_of(st.integers(0, 900), st.sampled_from((0, 1, 63, 64, 65, 127, 128, 129, 2000))), min_size=1, max_size=6
        )
    )
    if draw(st.booleans()):
        lens = lens[:1] * len(lens)
    Nq = draw(st.sampled_from(Nqs))
    query_lens = draw(st.one_of(st.none(), st.just(tuple(draw(st.integers(0, min(Nq, n))) for n in lens))))
    causal = draw(st.booleans())
    Hkv, group = draw(st.integers(1, 3)), draw(st.sampled_from(groups))
    rotary = draw(st.one_of(st.just(0), st.integers(1, D // 2)))
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
        Dv=Dv,
        block=draw(st.sampled_from((1, 2, 5, 16, 64))),
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
    if inputs.get("block_table") is not None and draw(st.booleans()):
        lost = torch.rand(inputs["block_table"].shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) < 0.2
        inputs["block_table"][lost] = draw(st.sampled_from((-1, 10**6)))
    check(inputs, attrs, draw(st.booleans()) if attrs["append"] else False)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_call(data):
    width = st.sampled_from((8, 16, 32, 48, 64, 80, 128, 192, 256))
    any_call(data.draw, data.draw(width), data.draw(width), (1, 1, 2, 3, 7, 33, 130), (1, 2, 3, 4, 5, 6, 7, 8, 13))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_step_of_few_rows(data):
    """The widths of most models in steps of up to 8 packed rows, for which pages and short contexts have a kernel of their own."""
    width = data.draw(st.sampled_from((64, 128, 256, 200)))
    Nq = data.draw(st.sampled_from((1, 1, 2, 3, 8)))
    any_call(data.draw, width, width, (Nq,), [g for g in (1, 2, 3, 4, 5, 7, 8) if g * Nq <= 8])


@pytest.mark.parametrize("replays", (100_000,))
def test_graph_replays_with_lengths_changed_on_the_device(replays):
    """A captured launch schedules what the lengths say at each replay, and leaves its sync words zero each time."""
    S, B = 2048, 3
    inputs, attrs = make_case(1, "dense", torch.bfloat16, (S,) * B, spare=0, H=8, Hkv=2, D=64, Dv=64)
    lengths = (torch.rand(64, B, generator=torch.Generator().manual_seed(5)) ** 3 * (S + 1)).int()
    check_replays(inputs, attrs, lengths, replays, always=64, every=997, judged=1)


def test_two_streams():
    """Two nodes, a workspace each, at the same time."""
    nodes = []
    for seed in range(2):
        inputs, attrs = make_case(seed, "paged", torch.bfloat16, (3000, 10, 700), H=8, Hkv=2, D=128, Dv=128)
        expected = check(inputs, attrs)
        nodes.append((torch.cuda.Stream(), Launches(to_cuda(inputs), attrs), expected))
    torch.cuda.synchronize()
    for _ in range(300):
        for stream, node, _ in nodes:
            with torch.cuda.stream(stream):
                node.run()
    torch.cuda.synchronize()
    for _, node, expected in nodes:
        assert all(same_bits(node.outputs[name], t) for name, t in expected.items())
        assert not node.sync.any()


def test_a_repeated_step_changes_nothing():
    """A runtime may run a step several times before it captures it: with the cache updated in place too."""
    for variant in VARIANTS:
        inputs, attrs = make_case(
            2,
            variant,
            torch.bfloat16,
            (500, 64, 3),
            query_lens=(3, 1, 3),
            Nq=3,
            H=8,
            Hkv=2,
            D=64,
            Dv=64,
            append=True,
            rotary=32,
        )
        expected = check(inputs, attrs)
        node = Launches(to_cuda(inputs), attrs, in_place=True)
        for _ in range(3):
            node.run()
        graph = node.capture()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert all(same_bits(node.outputs[name], t) for name, t in expected.items())


def test_positions_beyond_32_bits():
    """A cache of more than 2^32 elements."""
    if torch.cuda.get_device_properties(0).total_memory < 40e9:
        pytest.skip("needs a device with 40 GB")
    B, Hkv, S, D = 33, 8, 131072, 128
    generator = torch.Generator(device="cuda").manual_seed(0)
    key = torch.zeros(B, Hkv, S, D, dtype=torch.bfloat16, device="cuda")
    value = torch.zeros_like(key)
    assert key.numel() > 2**32
    last = B - 1
    for cache in (key, value):
        cache[last, :, -300:] = torch.randn(Hkv, 300, D, generator=generator, device="cuda").bfloat16()
    query = torch.randn(B, Hkv, 1, D, generator=generator, device="cuda").bfloat16()
    inputs = {
        "query": query,
        "key_cache": key,
        "value_cache": value,
        "seq_lens": torch.tensor([1] * last + [S], dtype=torch.int32, device="cuda"),
    }
    out = run_kernel("LeanAttention", inputs, {"window": 300})
    judge = reference.lean_attention(
        query[last:].double(), key[last:, :, -300:].double(), value[last:, :, -300:].double(), window=300
    )
    assert greatest_error(out["output"][last:], judge[0]) < 0.01
    assert greatest_error(out["lse"][last:], judge[1]) < 1e-4


def test_many_requests_that_share_long_pages():
    """More tiles in all than 32 bits hold ranges of, in a cache of 1 GB: all requests have the same pages."""
    B, H, S, D, block = 1024, 8, 131072, 256, 64
    generator = torch.Generator(device="cuda").manual_seed(0)
    key, value = (
        torch.randn(S // block, block, H, D, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    query = torch.randn(B, H, 1, D, generator=generator, device="cuda", dtype=torch.bfloat16)
    table = torch.arange(S // block, dtype=torch.int32, device="cuda").repeat(B, 1)
    lens = torch.full((B,), S, dtype=torch.int32, device="cuda")
    cache = {"key_cache": key, "value_cache": value}
    found = run_kernel("LeanAttention", {"query": query, **cache, "block_table": table, "seq_lens": lens}, {})
    for b in (0, 600, B - 1):
        of_one = {"query": query[b : b + 1], **cache, "block_table": table[:1], "seq_lens": lens[:1]}
        alone = run_kernel("LeanAttention", of_one, {})
        assert greatest_error(found["output"][b : b + 1], alone["output"].double()) <= 2**-12
        assert greatest_error(found["lse"][b : b + 1], alone["lse"].double()) <= 1e-4


# Values that are not finite; the sizes reach every kernel: few rows, 8 to 64 rows, prompts, float32.

NON_FINITE = {
    "decode": dict(lens=(5, 200), sinks=True, D=64, Dv=64),
    "append": dict(variant="paged", lens=(40, 70), query_lens=(9, 3), Nq=9, append=True, rotary=8, D=64, Dv=64),
    "window": dict(variant="ragged", lens=(60, 33), Nq=20, window=7, append=True, layout="bnhd", D=32, Dv=64),
    "softcap": dict(lens=(20, 140), Nq=20, softcap=3.0, sinks=True, D=64, Dv=32),
    "softcap decode": dict(lens=(20, 140), softcap=3.0, D=64, Dv=64),
    "not causal": dict(variant="paged", lens=(20, 33), Nq=6, causal=0, D=128, Dv=128),
    "prompt": dict(lens=(37, 300), Nq=200, query_lens=(37, 200), D=128, Dv=128),
    "prompt softcap": dict(variant="paged", lens=(200, 300), Nq=200, softcap=20.0, append=True, D=128, Dv=64),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", NON_FINITE)
def test_values_that_are_not_finite(case, dtype):
    """The contract of csrc/ops.toml, for elements of every input."""
    options = {"H": 4, "Hkv": 2, **NON_FINITE[case]}
    inputs, attrs = make_case(0, options.pop("variant", "dense"), dtype, **options)
    inputs = to_cuda(inputs)
    non_finite.sweep("LeanAttention", inputs, attrs, lambda changed: run_kernel("LeanAttention", changed, attrs), count=6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", NON_FINITE)
def test_what_belongs_to_nobody_reaches_nothing(case, dtype):
    """Padding rows, unused cache positions and pages, keys before all windows: they are NaN in make_case."""
    options = {"H": 4, "Hkv": 2, **NON_FINITE[case]}
    inputs, attrs = make_case(0, options.pop("variant", "dense"), dtype, **options)
    inputs, results = to_cuda(inputs), []
    for value in (NAN, float("inf"), -float("inf"), 0.25):
        changed = {
            n: t.masked_fill(t.isnan(), value) if t is not None and t.is_floating_point() else t for n, t in inputs.items()
        }
        results.append(run_kernel("LeanAttention", changed, attrs))
        assert all(same_bits(results[0][n], results[-1][n]) for n in ("output", "lse")), value
    assert results[0]["output"].isfinite().all()


def test_slots_that_two_requests_write_are_refused(monkeypatch):
    monkeypatch.setenv("LEANFLEET_CHECK", "1")
    inputs, attrs = make_case(15, "paged", torch.float16, lens=(34, 18), query_lens=(4, 1), Nq=4, append=True, D=64, Dv=64)
    inputs = to_cuda(inputs)
    run_kernel("LeanAttention", inputs, attrs)
    inputs["block_table"][1, 1] = inputs["block_table"][0, 2]
    with pytest.raises(ValueError, match=r"^LeanAttention: requests 0 and 1 both write to slot 1 of page \d+"):
        run_kernel("LeanAttention", inputs, attrs)
