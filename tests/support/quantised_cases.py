"""LeanAttention's calls over quantised caches, and how their results are judged, wherever the kernel runs.

`run` is a kernel: run(inputs, attrs, in_place=False) gives a dict of outputs, as support.kernels.run_kernel does.
"""

import math

import torch

from leanfleet.export import reference
from leanfleet.export.reference import FORMS, numbers_of, quantised, row_scales
from support.attention_cases import DTYPES, FORM_NAMES, NAN, QUANT_PAIRS, VARIANTS, make_case, same_bits, wide

ROWS = ("new_key", "new_value")
CACHES = {"key": "key_cache", "value": "value_cache"}
UNITS = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}

# Steps and prompts: groups of 1 to 16 and more, whole widths and odd multiples of 8, units of 16 to 128 rows and several of them.
CALLS = (
    dict(lens=(1, 63, 200, 0), H=2, Hkv=2, D=64, Dv=64),
    dict(lens=(64, 65, 300), H=6, Hkv=2, D=64, Dv=32, sinks=True, append=True, rotary=16),
    dict(lens=(5, 129), H=8, Hkv=2, D=128, Dv=96, softcap=3.0, append=True, layout="bnhd"),
    dict(lens=(33, 100), H=10, Hkv=2, D=40, Dv=24, append=True, rotary=9, rotary_interleaved=1),
    dict(lens=(140,), H=16, Hkv=1, D=128, Dv=128, scale=-0.3),
    dict(lens=(17, 90), H=5, Hkv=1, D=256, Dv=256, append=True, rotary=128),
    dict(lens=(150, 40), H=7, Hkv=1, D=200, Dv=72, window=40, append=True, layout="bnhd"),
    dict(lens=(70, 3, 0), query_lens=(5, 3, 0), Nq=5, H=8, Hkv=2, D=120, Dv=64, append=True, rotary=60, block=3),
    dict(lens=(99, 40), query_lens=(17, 2), Nq=17, H=3, Hkv=1, D=24, Dv=136, causal=0, sinks=True),
    dict(lens=(90, 160), query_lens=(70, 65), Nq=70, H=6, Hkv=2, D=64, Dv=48, window=20, append=True, rotary=8),
    dict(lens=(50,), Nq=30, H=5, Hkv=1, D=136, Dv=128, softcap=5.0, layout="bnhd"),
    dict(lens=(130, 65), query_lens=(2, 1), Nq=2, H=6, Hkv=2, D=128, Dv=128, window=50, append=True, rotary=64),
    dict(lens=(200, 33, 0, 7), H=8, Hkv=1, D=128, Dv=128, softcap=4.0, sinks=True, append=True, rotary=9, block=5),
    dict(lens=(77, 290), Nq=1, H=14, Hkv=2, D=64, Dv=64, window=70, append=True, layout="bnhd", rotary=32, block=32),
    dict(lens=(140, 3, 260), query_lens=(2, 1, 2), Nq=2, H=12, Hkv=2, D=64, Dv=64, window=90, append=True, rotary=16),
    dict(lens=(210, 66), H=22, Hkv=2, D=128, Dv=128, softcap=5.0, sinks=True, append=True, layout="bnhd", rotary=64, block=16),
    dict(lens=(180, 20), query_lens=(4, 3), Nq=4, H=4, Hkv=2, D=256, Dv=256, window=60, append=True, rotary=64),
    dict(lens=(30, 250, 0), H=6, Hkv=3, D=256, Dv=256, sinks=True, layout="bnhd", block=8),
    dict(lens=(150, 90), query_lens=(2, 1), Nq=2, H=12, Hkv=2, D=256, Dv=256, append=True, rotary=64, block=16),
)


def kind_of(inputs):
    return "paged" if inputs.get("block_table") is not None else "ragged" if inputs.get("cu_seqlens") is not None else "dense"


def without_append(inputs, attrs, outputs):
    """The same call over the caches that it left, whose new rows are in them already."""
    after = inputs | dict.fromkeys(ROWS)
    for name, cache in CACHES.items():
        after[cache] = outputs[f"{cache}_out"]
        if f"{name}_scale_out" in outputs:
            after[f"{name}_scale"] = outputs[f"{name}_scale_out"]
    if attrs.get("packed_qkv"):
        heads = inputs["key_cache"].shape[{"paged": 2, "ragged": 0}.get(kind_of(inputs), 1)]
        axis = -2 if attrs["layout"] == "bnhd" else -3
        query = inputs["query"]
        after["query"] = query.narrow(axis, 0, query.shape[axis] - 2 * heads).contiguous()
    return after, {**attrs, "append": 0, "packed_qkv": 0}


def assert_appended(inputs, attrs, outputs):
    """New rows stand in the caches as the reference quantises them, bit by bit but where they were rotated; what is not new is
    as it was."""
    plain_caches = unquantised(inputs, torch.float64)
    plain = {**attrs, "key_per_token": 0, "value_per_token": 0}
    exact = reference.lean_attention(**{**wide(inputs), **plain_caches}, **plain)
    dtype, unit = inputs["query"].dtype, UNITS[inputs["query"].dtype] + 2.0**-22
    for (name, cache), rows in zip(CACHES.items(), exact[2:], strict=True):
        scale, found = inputs.get(f"{name}_scale"), outputs[f"{cache}_out"]
        is_new = ~rows.isnan().all(-1, keepdim=True)
        assert same_old(found, inputs[cache], is_new), f"{cache}_out: an older row"
        rotated = name == "key" and inputs.get("cos_cache") is not None
        largest = rows.abs().amax(-1, keepdim=True)
        if scale is None:
            allowed = unit * largest if rotated else torch.zeros_like(largest)
            assert ((found.double() - rows).abs() <= allowed)[is_new.expand_as(rows)].all(), f"{cache}_out"
            continue
        if attrs.get(f"{name}_per_token"):
            scale, before = outputs[f"{name}_scale_out"].unsqueeze(-1), inputs[f"{name}_scale"].unsqueeze(-1)
            assert same_bits(scale.masked_fill(is_new, 0), before.masked_fill(is_new, 0)), f"{name}_scale_out: an older one"
            own = row_scales(rows.to(dtype), found.dtype)
            off = (scale.double() - own).abs() > (unit * own if rotated else 0)
            assert not off[is_new].any(), f"{name}_scale_out"
        elif scale.dim() == 3 and kind_of(inputs) == "paged":
            scale = scale.squeeze(1)
        low, high = FORMS[found.dtype]
        numbers = numbers_of(found).double()
        if rotated:  # to the nearest number, of a row within one rounding to the type
            scale = scale.double()
            target = torch.maximum(torch.minimum(rows, high * scale), low * scale)
            step = 0.5 * scale
            if found.dtype == torch.float8_e4m3fn:  # half of what lies between numbers of its size
                step = torch.maximum(2.0**-4 * target.abs(), 2.0**-10 * scale)
            off = (numbers * scale - target).abs() > (1 + 2.0**-11) * step + unit * largest
        else:
            off = numbers != numbers_of(quantised(rows.to(dtype), scale, found.dtype)).double()
        assert not off[is_new.expand_as(rows)].any(), f"{cache}_out"


def unquantised(inputs, dtype):
    """Caches of `dtype` in place of those of the inputs, full of NaN, and no scales."""
    shapes = {n: numbers_of(inputs[n]).shape for n in CACHES.values()}
    return {n: torch.full(shape, NAN, dtype=dtype, device=inputs[n].device) for n, shape in shapes.items()} | {
        "key_scale": None,
        "value_scale": None,
    }


def same_old(found, before, is_new):
    """Whether two caches have the same bits where is_new [...,1] is not."""
    found, before = (t.view(torch.int8) if t.dtype in FORMS else t for t in (found, before))
    return same_bits(found.masked_fill(is_new, 0), before.masked_fill(is_new, 0))


def greatest(found, judge):
    finite = judge.isfinite()
    return (found.double() - judge)[finite].abs().max().item() if finite.any() else 0.0


def assert_near(inputs, attrs, outputs):
    """Twice what a plain implementation in the tensors' own type loses, and one rounding to the type; see
    test_lean_attention_cuda.py. Of lse, what float32 loses, and half precision where 16-bit queries are multiplied by keys'
    scales before the products, and what rows of 15 bits lose where a kernel makes integers of the query. Calls do not append."""
    judge = reference.lean_attention(**wide(inputs), **attrs)
    low = reference.lean_attention(**inputs, **attrs, compute_dtype=inputs["query"].dtype)
    scaled = inputs["query"].element_size() == 2 and inputs.get("key_scale") is not None and inputs["key_scale"].dim() == 3
    scaled = scaled and not attrs.get("key_per_token")
    single = [reference.lean_attention(**inputs, **attrs, compute_dtype=t)[1] for t in (None, torch.float16)[: 1 + scaled]]
    if multiplies_bytes(inputs):
        single.append(reference.lean_attention(**{**wide(inputs), "query": of_15_bits(wide(inputs)["query"])}, **attrs)[1])
    values = largest_value(inputs)
    logit_error = 2.0**-21 * max(attrs.get("softcap", 0.0), 1.0)
    for i, (name, baselines) in enumerate((("output", low[:1]), ("lse", single))):
        found, finite = outputs[name].double(), judge[i].isfinite()
        assert torch.equal(finite, found.isfinite()) and torch.equal(found[~finite], judge[i][~finite]), name
        largest = judge[i][finite].abs().max().item() if finite.any() else 0.0
        own = UNITS[inputs["query"].dtype] * largest + logit_error * values if i == 0 else logit_error * max(largest, 1.0)
        error = greatest(outputs[name], judge[i])
        allowed = 2 * max(greatest(baseline, judge[i]) for baseline in baselines) + own
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def multiplies_bytes(inputs):
    """Whether CUDA may multiply keys as they are by a query of integers (direct_kernel.cuh)."""
    integers = inputs["key_cache"].dtype in (torch.int8, torch.uint8) and inputs.get("value_scale") is not None
    widths = {numbers_of(inputs[name]).shape[-1] for name in CACHES.values()}
    return integers and inputs["query"].element_size() == 2 and len(widths) == 1 and widths <= {64, 128, 256}


def of_15_bits(rows):
    """Rows as integers of 15 bits, of a power of two near each one's largest number."""
    power = torch.exp2(torch.floor(torch.log2(rows.abs().amax(-1, keepdim=True).clamp(min=1e-30)))) / 8192
    return torch.round(rows / power) * power


def largest_value(inputs):
    """A bound of the magnitudes of what value_cache stands for."""
    cache, scale = inputs["value_cache"], inputs.get("value_scale")
    if scale is None:
        return cache.float().nan_to_num(0).abs().max().item()
    return -FORMS[cache.dtype][0] * scale.nan_to_num(0).max().item()


def shifted(inputs, elements):
    """Tensors of T and quantised ones moved away from the alignment that torch gives."""
    dtype, moved = inputs["query"].dtype, dict(inputs)
    for name, t in inputs.items():
        if elements and t is not None and t.dtype in (dtype, *FORMS):
            bits = t.view(torch.int8) if t.dtype in FORMS else t
            moved[name] = torch.cat([bits.new_zeros(elements), bits.flatten()])[elements:].view(t.shape).view(t.dtype)
    return moved


def check(run, inputs, attrs, in_place=False, shift=0):
    """Runs the kernel and judges all that it gives; returns that."""
    before = {n: t.clone() if t is not None else None for n, t in inputs.items()}
    inputs = shifted(inputs, shift)
    outputs = run(inputs, attrs, in_place=in_place)
    if not in_place:
        assert all(t is None or same_bits(t, inputs[n]) for n, t in before.items()), "an input was changed"
    if attrs["append"]:
        assert_appended(before, attrs, outputs)
        before, attrs = without_append(before, attrs, outputs)
    assert_near(before, attrs, outputs)
    return outputs


def draw(source, widths, longest, tokens=(1, 1, 1, 2, 7, 33, 130)):
    """(inputs, attrs) of a call drawn from a random.Random, of contexts up to `longest`."""
    Nq, Hkv = source.choice(tokens), source.choice((1, 2, 3))
    group = source.choice((1, 2, 3, 4, 5, 7, 8, 13, 16, 24))
    lens = [source.choice((0, 1, 31, 32, 64, 65, source.randint(0, longest))) for _ in range(source.choice((1, 1, 3, 5)))]
    lens = [n + Nq for n in (lens[:1] * len(lens) if source.random() < 0.4 else lens)]
    D, causal = source.choice(widths), source.random() < 0.8
    rotary = source.choice((0, 0, D // 2, D // 4, 1))
    return make_case(
        source.randrange(2**20),
        source.choice(VARIANTS),
        source.choice(DTYPES),
        lens,
        query_lens=[source.randint(0, Nq) for _ in lens] if source.random() < 0.5 else None,
        H=Hkv * group,
        Hkv=Hkv,
        Nq=Nq,
        D=D,
        Dv=source.choice((D, D, *widths)),
        block=source.choice((1, 2, 5, 16, 64)),
        sinks=source.random() < 0.3,
        layout=source.choice(("bhnd", "bnhd")),
        append=source.random() < 0.6,
        causal=int(causal),
        window=source.choice((-1, -1, 1, 17, 64)) if causal else -1,
        softcap=source.choice((0.0, 0.0, 5.0)),
        scale=source.choice((0.0, 0.3, -0.5)),
        rotary=rotary,
        rotary_interleaved=int(rotary > 0 and source.random() < 0.3),
        quant=source.choice(QUANT_PAIRS),
    )


# What becomes of rows that are no usual numbers. prepare: brings the inputs of a call to where `run` takes them. form: a name
# of FORM_NAMES.


def step(quant="token", prepare=lambda inputs: inputs, form="int8", **facts):
    kind = f"{quant} {form}"
    inputs, attrs = make_case(3, lens=(40, 30), Nq=2, append=True, quant=(kind, kind), **facts)
    return prepare(inputs), attrs


def check_rows_that_are_not_finite(run, **facts):
    """With a token's own scale its scale is NaN, and so is every result of its request and head that it may count in; with
    another infinities saturate, and NaN becomes 0 in integers."""
    form = FORM_NAMES[facts.get("form", "int8")]
    nothing = NAN if form == torch.float8_e4m3fn else 0.0
    for value in (NAN, math.inf, -math.inf):
        for name in ROWS:
            inputs, attrs = step(**facts)
            clean = run(inputs, attrs)
            inputs[name][1, 0, 1, 3] = value
            found = run(inputs, attrs)
            scale = found[f"{name[4:]}_scale_out"]
            row = numbers_of(found[f"{name[4:]}_cache_out"])[1, 0, 29].float()
            assert scale[1, 0, 29].isnan() and (row.isnan() if form == torch.float8_e4m3fn else row == 0).all()
            assert found["output"][1, :3, 1].isnan().all()
            others = torch.ones(found["output"].shape, dtype=torch.bool, device=scale.device)
            others[1, :3] = False
            assert torch.equal(found["output"][others], clean["output"][others])
            first = found["output"][1, :3, 0]
            assert (first.isnan() | (first == clean["output"][1, :3, 0])).all()
            for kind in ("tensor", "channel"):
                inputs, attrs = step(kind, **facts)
                inputs[name][1, 0, 1, 3] = value
                found = run(inputs, attrs)
                number = numbers_of(found[f"{name[4:]}_cache_out"])[1, 0, 29, 3].item()
                expected = {math.inf: FORMS[form][1], -math.inf: FORMS[form][0]}.get(value, nothing)
                assert number == expected or (math.isnan(number) and math.isnan(expected))
                if math.isnan(number):  # as that of a cache of floats
                    assert found["output"][1, :3, 1].isnan().any(-1).all()
                else:
                    assert_near(*without_append(inputs, attrs, found), found)


def check_rows_of_zeros_and_tiny_numbers(run, **facts):
    inputs, attrs = step(**facts)
    inputs["new_key"][0], inputs["new_value"][:, :, 0] = 0, 1e-38
    inputs["new_value"][0, 0, 1] = 0
    found = check(run, inputs, attrs)
    assert (found["key_scale_out"][0, :, 38:40] == 0).all() and (found["value_scale_out"][0, :, 38] == 0).all()
    assert (numbers_of(found["value_cache_out"])[0, :, 38] == 0).all()


TIES = {  # row / 0.5, and what it becomes
    "int8": ((0.25, 0.75, 1.25, -0.25, -0.75, 1e4, -1e4, 63.75), (0, 2, 2, 0, -2, 127, -128, 127)),
    "int4": ((0.25, 0.75, 1.25, -0.25, -0.75, 1e4, -1e4, 3.25), (0, 2, 2, 0, -2, 7, -8, 6)),
    # 17 and 19 lie between 16, 18 and 20; 464 beyond the last; then thirds and halves of 2^-9, the least
    "fp8": (
        (8.5, 9.5, 232, -1e4, 5 * 2.0**-11, 3 * 2.0**-11, 2.0**-11, 15 * 2.0**-11),
        (16, 20, 448, -448, 2**-8, 2**-8, 0, 2**-6),
    ),
}


def check_ties_round_to_even(run, **facts):
    inputs, attrs = step("tensor", Hkv=2, D=8, Dv=8, **facts)
    inputs["key_scale"].fill_(0.5)
    inputs["value_scale"].fill_(0.5)
    rows, expected = TIES[facts.get("form", "int8")]
    for name in ROWS:
        inputs[name][:] = torch.tensor(rows)
    found = run(inputs, attrs)
    assert numbers_of(found["key_cache_out"])[0, 0, 39].tolist() == list(expected)


def check_every_number(run, form, dtype=torch.float32, prepare=lambda inputs: inputs):
    """Each of the 256 bytes of a form is read as what it is, NaN included: a value that the one key has the weight 1 of."""
    for width in (64, 24):
        facts = dict(lens=(1,) * 16, H=2, Hkv=2, D=width, Dv=width, quant=(None, f"tensor {form}"))
        inputs, attrs = make_case(5, dtype=dtype, **facts)
        cache = inputs["value_cache"].view(torch.uint8)
        cache[..., 0, :] = torch.arange(cache[..., 0, :].numel(), dtype=torch.int32).view(cache.shape[0], 2, -1).to(torch.uint8)
        inputs["value_scale"].fill_(0.5)
        found = run(prepare(inputs), attrs)["output"][:, :, 0].cpu()
        expected = 0.5 * numbers_of(inputs["value_cache"][..., 0, :]).to(found.dtype)
        assert torch.equal(found.nan_to_num(7.7), expected.nan_to_num(7.7))


def check_scales_of_any_size(run, dtype, prepare=lambda inputs: inputs):
    """Keys' scales far from 1, where their products with bytes leave the range of half precision, are powers of two in the
    logits; and values' scales of which later ones are far larger, or smaller, than all before."""
    facts = dict(lens=(200, 70), H=8, Hkv=2, D=64, Dv=64, dtype=dtype)
    for kind in ("tensor", "channel", "token"):
        inputs, attrs = make_case(7, quant=(kind, kind), **facts)
        expected = check(run, prepare(inputs), {**attrs, "scale": 0.1})
        for size in (2.0**-40, 2.0**30):
            scaled = {**inputs, "key_scale": inputs["key_scale"] * size}
            found = run(prepare(scaled), {**attrs, "scale": 0.1 / size})
            assert all(same_bits(found[name], expected[name]) for name in expected), (kind, size)
    for growth in (1.1, 0.9, 1.0):
        inputs, attrs = make_case(8, quant=("tensor", "token"), **facts)
        powers = growth ** torch.arange(inputs["value_scale"].shape[-1])
        inputs["value_scale"] *= powers / powers.max()
        if growth == 1.0:
            inputs["value_scale"][..., 50] = 300.0
        inputs["query"] *= 4
        check(run, prepare(inputs), attrs)


def check_pages_outside_the_pool(run, dtype, prepare=lambda inputs: inputs):
    for Nq, causal in ((1, 1), (4, 0), (30, 1)):
        facts = dict(lens=(100, 40, 65), query_lens=(Nq, 1, min(Nq, 3)), Nq=Nq, H=6, Hkv=2, D=64, Dv=64, causal=causal)
        inputs, attrs = make_case(7, "paged", dtype, append=True, sinks=causal == 1, quant=("token", "channel"), **facts)
        table = inputs["block_table"]
        table[0, 1], table[0, 5], table[1, :], table[2, 2] = -1, 10**6, -5, 2**31 - 1
        assert (check(run, prepare(inputs), attrs)["output"][1] == 0).all()
