"""LeanAttention's CPU kernel on quantised caches: against the float64 reference on the very bytes and scales of the caches."""

import math
import random
from functools import partial

import pytest
import torch

from leanfleet import export, native, spec
from leanfleet.export import reference
from leanfleet.export.reference import numbers_of, quantised, row_scales
from support import quantised_cases
from support.cpu_time import rest_slow
from support.attention_cases import (
    DTYPES,
    FORM_NAMES,
    NAN,
    QUANT_PAIRS,
    VARIANTS,
    assert_close,
    draw_packed_tokens,
    make_case,
    packed,
    same_bits,
    wide,
)
from support.kernels import entry, examples, run_kernel
from support.quantised_cases import CACHES, ROWS, kind_of, largest_value, same_old, step, unquantised

pytestmark = pytest.mark.usefixtures("one_torch_thread", "instruction_set")


def appended(inputs, attrs, outputs, threads):
    """Checks the caches and scales that a call returned: new rows stand in them as the reference makes them of the rows that
    the kernel without scales appends, everything else is as it was. Returns the inputs of the same call without appending."""
    plain = {**attrs, "key_per_token": 0, "value_per_token": 0}
    rows = run_kernel("LeanAttention", {**inputs, **unquantised(inputs, inputs["query"].dtype)}, plain, threads=threads)
    after = dict(inputs)
    for name, cache in CACHES.items():
        new, scale = rows[f"{cache}_out"], inputs.get(f"{name}_scale")
        is_new = ~new.isnan().all(-1, keepdim=True)
        found = after[cache] = outputs[f"{cache}_out"]
        if scale is None:
            assert same_bits(found, new.where(is_new, inputs[cache]))
            continue
        if attrs.get(f"{name}_per_token"):
            scale = row_scales(new, found.dtype)
            expected = scale.where(is_new, inputs[f"{name}_scale"].unsqueeze(-1)).squeeze(-1)
            after[f"{name}_scale"] = outputs[f"{name}_scale_out"]
            assert same_bits(after[f"{name}_scale"], expected), f"{name}_scale_out"
        elif scale.dim() == 3 and "block_table" in inputs:
            scale = scale.squeeze(1)
        expected = numbers_of(quantised(new, scale, found.dtype)).float().nan_to_num(7.7)
        assert torch.equal(numbers_of(found).float().nan_to_num(7.7).where(is_new, expected), expected), f"{cache}_out"
        assert same_old(found, inputs[cache], is_new), f"{cache}_out"
    after |= dict.fromkeys(ROWS)
    if attrs.get("packed_qkv"):
        heads = inputs["key_cache"].shape[{"paged": 2, "ragged": 0}.get(kind_of(inputs), 1)]
        axis = -2 if attrs["layout"] == "bnhd" else -3
        query = inputs["query"]
        after["query"] = query.narrow(axis, 0, query.shape[axis] - 2 * heads).contiguous()
    return after, {**attrs, "append": 0, "packed_qkv": 0}


def judged(inputs, attrs):
    return reference.lean_attention(**wide(inputs), **attrs), reference.lean_attention(**inputs, **attrs)


def check(inputs, attrs, threads=2, in_place=False):
    before = {n: t.clone() if t is not None else None for n, t in inputs.items()}
    outputs = run_kernel("LeanAttention", inputs, attrs, threads=threads, in_place=in_place)
    if not in_place:
        assert all(t is None or same_bits(t, inputs[n]) for n, t in before.items()), "an input was changed"
    inputs = before
    if attrs["append"]:
        if inputs.get("cos_cache") is None:  # exactly what the reference's own append gives
            names = [t.name for t in spec.all_specs()["LeanAttention"].active_outputs(attrs)]
            for name, expected in list(zip(names, reference.lean_attention(**inputs, **attrs), strict=True))[2:]:
                assert same_bits(outputs[name], expected), name
        inputs, attrs = appended(inputs, attrs, outputs, threads)
    judge, baseline = judged(inputs, attrs)
    assert_close("output", outputs["output"], judge[0], baseline[0], largest_value(inputs))
    assert_close("lse", outputs["lse"], judge[1], baseline[1], 1 + judge[1].nan_to_num(0, 0, 0).abs().max().item())
    return outputs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("quant", QUANT_PAIRS, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_decode(variant, quant, dtype):
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
            window=40 if group == 7 else -1,
            quant=quant,
        )
        check(inputs, attrs, in_place=group == 4)


@pytest.mark.parametrize("layout", ("bhnd", "bnhd"))
@pytest.mark.parametrize("quant", QUANT_PAIRS, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_prompts(variant, quant, layout):
    for seed, attrs in enumerate(
        (
            {"causal": 0},
            {"window": 20, "sinks": True, "append": True, "rotary": 10},
            {"softcap": 5.0, "scale": 0.7, "append": True, "rotary": 4, "rotary_interleaved": 1},
        )
    ):
        inputs, attrs = make_case(
            seed,
            variant,
            DTYPES[seed],
            (70, 130, 40, 0, 200),
            query_lens=(70, 65, 1, 0, 33),
            Nq=70,
            Hkv=(2, 6)[seed % 2],
            D=(32, 20)[seed % 2],
            Dv=(48, 7)[seed % 2],
            layout=layout,
            quant=quant,
            **attrs,
        )
        check(inputs, attrs, threads=3)


@pytest.mark.parametrize("seed", rest_slow(range(12), quick=4))
def test_packed_new_tokens(seed):
    source = random.Random(seed)
    for _ in range(8):
        inputs, attrs, _ = draw_packed_tokens(source, (8, 17, 32, 64), quant=QUANT_PAIRS)
        check(inputs, attrs, source.choice((1, 2, 3, 8)), in_place=bool(attrs["append"]) and source.random() < 0.5)


@pytest.mark.parametrize("quant", QUANT_PAIRS, ids=str)
def test_packed_projections_equal_separate_ones(quant):
    for Nq, variant in ((1, "dense"), (5, "paged"), (70, "ragged")):
        inputs, attrs = make_case(
            Nq, variant, lens=(70, 90), query_lens=(min(Nq, 9), Nq), Nq=Nq, D=24, Dv=24, append=True, rotary=9, quant=quant
        )
        apart = check(inputs, attrs)
        together = check(*packed(inputs, attrs), in_place=True)
        assert all(same_bits(apart[name], together[name]) for name in apart)


@pytest.mark.everywhere
@pytest.mark.parametrize("seed", range(examples(6)))
def test_any_call(seed):
    source = random.Random(100 + seed)
    for _ in range(6):
        Nq, Hkv, group = source.choice((1, 1, 2, 7, 40, 130)), source.choice((1, 2)), source.choice((1, 2, 3, 4, 7, 16))
        lens = [source.choice((0, 1, 40, 128, 129, 500)) for _ in range(source.choice((1, 3)))]
        inputs, attrs = make_case(
            source.randrange(2**20),
            source.choice(VARIANTS),
            source.choice(DTYPES),
            lens,
            query_lens=[min(n, source.randint(0, Nq)) for n in lens],
            Nq=Nq,
            H=Hkv * group,
            Hkv=Hkv,
            D=source.choice((8, 24, 64, 128)),
            Dv=source.choice((8, 17, 64, 128)),
            append=source.random() < 0.6,
            sinks=source.random() < 0.3,
            softcap=source.choice((0.0, 4.0)),
            rotary=source.choice((0, 4)),
            window=source.choice((-1, 30)),
            layout=source.choice(("bhnd", "bnhd")),
            quant=source.choice(QUANT_PAIRS),
        )
        check(inputs, attrs, source.choice((1, 2, 5)), in_place=bool(attrs["append"]))


@pytest.mark.parametrize("form", FORM_NAMES)
def test_rows_that_are_no_usual_numbers(form):
    run = partial(run_kernel, "LeanAttention")
    quantised_cases.check_rows_that_are_not_finite(run, form=form)
    quantised_cases.check_rows_of_zeros_and_tiny_numbers(run, form=form)
    quantised_cases.check_ties_round_to_even(run, form=form)
    quantised_cases.check_every_number(run, form)


@pytest.mark.parametrize(
    "changes, message",
    (
        (dict(key_scale=None), "key_cache is int8 and key_scale is missing; give the scales"),
        (dict(value_scale=None, value_per_token=0), "value_cache is int8 and value_scale is missing"),
        (dict(key_scale=None, key_per_token=1), "key_per_token = 1 needs input key_scale, which is missing"),
        (
            dict(key_cache=torch.zeros(2, 2, 43, 24)),
            "key_scale is given and key_cache is float32; scales go with a cache of int8, float8e4m3fn or uint8",
        ),
        (
            dict(key_cache=torch.zeros(2, 2, 43, 24, dtype=torch.float16)),
            "key_cache has type float16; expected float32, the type of query, or int8",
        ),
        (dict(key_cache=torch.zeros(2, 2, 43, 24, dtype=torch.int32)), "key_cache has type int32; expected float32"),
        (
            dict(key_cache=torch.zeros(2, 2, 43, 24, dtype=torch.uint8)),
            r"key_cache has shape \[2,2,43,24\]: axis 3 of \[B,Hkv,S,D\] is 24 bytes of two int4; expected 12, because query",
        ),
        (
            dict(query=torch.zeros(2, 6, 2, 25), key_cache=torch.zeros(2, 2, 43, 12, dtype=torch.uint8)),
            "query gives D = 25, an odd number, and key_cache is uint8, whose bytes hold two int4 each; give it another type",
        ),
        (
            dict(value_cache=torch.zeros(2, 2, 43, 16, dtype=torch.float8_e4m3fn), value_scale=None),
            "value_cache is float8e4m3fn and value_scale is missing",
        ),
        (dict(query=torch.zeros(2, 6, 2, 24, dtype=torch.int8)), "query has type int8; expected float32, float16 or bfloat16"),
        (dict(new_key=torch.zeros(2, 2, 2, 24, dtype=torch.int8)), "new_key has type int8"),
        (dict(key_scale=torch.zeros(1, dtype=torch.float16)), "key_scale has type float16; expected float32"),
        (dict(key_scale=torch.zeros(2)), r"key_scale has shape \[2\]: axis 0 of \[1\] is 2; expected 1"),
        (dict(key_scale=torch.zeros(2, 24)), r"key_scale has shape \[2,24\], rank 2; expected \[Hkv,1,D\] or \[1\]"),
        (dict(key_scale=torch.zeros(2, 1, 23)), r"key_scale has shape \[2,1,23\]: axis 2 of \[Hkv,1,D\] is 23; expected 24"),
        (dict(key_scale=torch.zeros(2, 2, 42), key_per_token=1), r"key_scale has shape \[2,2,42\]: axis 2 of \[B,Hkv,S\]"),
        (dict(key_per_token=1), r"key_scale has shape \[1\], rank 1; expected \[B,Hkv,S\]"),
    ),
)
@pytest.mark.own_instruction_set
def test_wrong_scales(changes, message):
    inputs, attrs = step("tensor")
    attrs |= {n: changes[n] for n in changes if n.endswith("per_token")}
    inputs |= {n: t for n, t in changes.items() if not n.endswith("per_token")}
    entries = [entry(inputs.get(t.name)) for t in spec.all_specs()["LeanAttention"].inputs]
    with pytest.raises(ValueError, match=f"^LeanAttention: {message}"):
        native.Call("LeanAttention", entries, [], attrs).workspace()
    with pytest.raises(ValueError, match="LeanAttention: "):
        reference.lean_attention(**inputs, **attrs)


@pytest.mark.own_instruction_set
def test_scales_that_are_no_positive_numbers(monkeypatch):
    """They are taken as they are; LEANFLEET_CHECK=1 refuses them."""
    monkeypatch.setenv("LEANFLEET_CHECK", "0")
    for kind, place, where in (("tensor", (0,), "0"), ("channel", (1, 0, 5), "1,0,5")):
        for value in (0.0, -0.5, NAN, math.inf):
            inputs, attrs = step(kind)
            inputs["value_scale"][place] = value
            run_kernel("LeanAttention", inputs, attrs)
            monkeypatch.setenv("LEANFLEET_CHECK", "1")
            with pytest.raises(
                ValueError, match=rf"^LeanAttention: value_scale\[{where}\] is .*; a scale is a positive number"
            ):
                run_kernel("LeanAttention", inputs, attrs)
            monkeypatch.setenv("LEANFLEET_CHECK", "0")


@pytest.mark.own_instruction_set
def test_pytorch_operators():
    """Both forms, the reference for float64, and fakes of the same types and shapes."""
    for quant in (("token", "token"), ("channel", None), ("token fp8", "channel int4"), ("token int4", "tensor fp8")):
        inputs, attrs = make_case(3, lens=(40, 30), Nq=2, append=True, quant=quant)
        expected = run_kernel("LeanAttention", inputs, attrs)
        for found, (name, tensor) in zip(export.lean_attention(**inputs, **attrs), expected.items(), strict=True):
            assert same_bits(found, tensor), name
        with torch._subclasses.FakeTensorMode() as mode:
            fakes = export.lean_attention(**{n: t if t is None else mode.from_tensor(t) for n, t in inputs.items()}, **attrs)
        assert [(f.dtype, f.shape) for f in fakes] == [(t.dtype, t.shape) for t in expected.values()]
        exact = export.lean_attention(**wide(inputs), **attrs)
        assert same_bits(exact[2], expected["key_cache_out"]) and exact[0].dtype == torch.float64
        attrs.pop("append")
        export.lean_attention_(**inputs, **attrs)
        for name in ("key_cache", "value_cache", "key_scale", "value_scale"):
            if f"{name}_out" in expected:
                assert same_bits(inputs[name], expected[f"{name}_out"]), name
