"""LeanAttention's random calls, and how results are compared."""

import torch

from leanfleet.export.reference import FORMS, quantised, row_scales

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NAN = float("nan")
BLOCK = 16


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def make_case(
    seed=0,
    variant="dense",
    dtype=torch.float32,
    lens=(65,),
    query_lens=None,
    H=6,
    Hkv=2,
    Nq=1,
    D=24,
    Dv=16,
    block=BLOCK,
    spare=3,
    sinks=False,
    layout="bhnd",
    append=False,
    window=-1,
    rotary=0,
    positions=None,
    quant=(None, None),
    **attrs,
):
    """(inputs, attrs) of a call. Everything that no query sees is NaN: unused cache positions, padding rows, unused
    pages, positions that `append` fills, keys before all windows. Unused page table entries point nowhere.

    lens: valid keys of each request, new ones included. spare: positions or pages beyond those. rotary: pairs of
    columns that turn. positions: rows of the tables; None: as many as are needed. quant: of keys and values None, or the
    scales of a quantised cache, one of QUANT, and its form if that is not int8, a name of FORM_NAMES; int4 of an odd width is
    fp8. Instead of NaN a cache of integers holds the least, and the scales of tokens are NaN there.
    """
    randn = torch.Generator().manual_seed(seed)
    B, counts = len(lens), [min(Nq, n) for n in lens] if query_lens is None else list(query_lens)

    def normal(*shape):
        return torch.randn(shape, generator=randn).to(dtype)

    inputs = {"seq_lens": int32(lens), "query_lens": None if query_lens is None else int32(query_lens)}

    def by_token(heads, width):
        rows = normal(B, Nq, heads, width)
        for b, n in enumerate(counts):
            rows[b, n:] = NAN
        return rows if layout == "bnhd" else rows.transpose(1, 2).contiguous()

    inputs["query"] = by_token(H, D)
    if append:
        inputs["new_key"], inputs["new_value"] = by_token(Hkv, D), by_token(Hkv, Dv)

    if variant == "dense":
        S = max(max(lens) + spare, 1)
        slots = [torch.arange(b * S, b * S + n) for b, n in enumerate(lens)]
        total = B * S
    elif variant == "ragged":
        offsets = [0]
        for n in lens:
            offsets.append(offsets[-1] + n + spare)
        slots = [torch.arange(begin, begin + n) for begin, n in zip(offsets[:-1], lens, strict=True)]
        total = max(offsets[-1], 1)
        inputs["cu_seqlens"] = int32([min(n, total) for n in offsets])
    else:
        M = max(-(-n // block) for n in lens) + 1
        pages = torch.randperm(B * M + spare, generator=randn)
        table = pages[: B * M].reshape(B, M)
        slots = [(table[b].unsqueeze(-1) * block + torch.arange(block)).flatten()[:n] for b, n in enumerate(lens)]
        total = len(pages) * block
        for b, n in enumerate(lens):
            table[b, -(-n // block) :] = torch.tensor([-1, 10**9, -(2**31)])[b % 3]
        inputs["block_table"] = table.int()

    for name, width in (("key_cache", D), ("value_cache", Dv)):
        cache = torch.full((total, Hkv, width), NAN, dtype=dtype)
        for where, n in zip(slots, counts, strict=True):
            seen = where[max(0, len(where) - n - window + 1) :] if window > 0 else where
            seen = seen[: len(seen) - n] if append else seen
            cache[seen] = normal(len(seen), Hkv, width)
        if variant == "dense":
            cache = cache.reshape(B, S, Hkv, width).transpose(1, 2).contiguous()
        elif variant == "ragged":
            cache = cache.transpose(0, 1).contiguous()
        else:
            cache = cache.reshape(-1, block, Hkv, width)
        inputs[name] = cache
    for kind, name, width in zip(quant, ("key", "value"), (D, Dv), strict=True):
        if kind is None:
            continue
        cache = inputs[f"{name}_cache"]
        kind, form = form_of(kind, width)
        unit = 127 / FORMS[form][1]
        scale = {
            "tensor": torch.tensor([0.025 * unit]),
            "channel": unit * (0.01 + 0.02 * torch.rand(Hkv, 1, width, generator=randn)),
        }.get(kind)
        if kind == "token":
            scale = row_scales(cache, form)
            inputs[f"{name}_scale"], attrs[f"{name}_per_token"] = scale.squeeze(-1), 1
        else:
            inputs[f"{name}_scale"] = scale
        by_head = scale.squeeze(1) if kind == "channel" and variant == "paged" else scale
        inputs[f"{name}_cache"] = quantised(cache.nan_to_num(0), by_head.nan_to_num(1), form)
        numbers = inputs[f"{name}_cache"].view(torch.uint8)  # PyTorch has no masks of fp8
        numbers[cache[..., :: width // numbers.shape[-1]].isnan()] = {torch.int8: 0x80, torch.uint8: 0}.get(form, 0x7F)
    if sinks:
        inputs["sinks"] = torch.randn(H, generator=randn) + 2
    if rotary:
        angles = 7 * torch.rand(positions or max(*lens, 1), rotary, generator=randn)
        inputs["cos_cache"], inputs["sin_cache"] = angles.cos(), angles.sin()
    return inputs, {"layout": layout, "append": int(append), "window": window, **attrs}


QUANT = ("tensor", "channel", "token")
FORM_NAMES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}
QUANT_PAIRS = (
    *((kind, kind) for kind in QUANT),
    ("channel", "token"),
    ("token", None),
    (None, "tensor"),
    ("token fp8", "token fp8"),
    ("token int4", "token int4"),
    ("channel int4", "tensor fp8"),
    ("tensor fp8", "channel int4"),
    ("token", "token fp8"),
    ("channel fp8", None),
    (None, "tensor int4"),
)


def form_of(kind, width):
    """(one of QUANT, the type) of what make_case's `quant` says of a cache."""
    kind, _, name = kind.partition(" ")
    return kind, FORM_NAMES["fp8" if name == "int4" and width % 2 else name or "int8"]


def wide(inputs):
    """Inputs in float64, but for integers and quantised caches."""
    keep = (None, *FORMS)
    return {n: t.double() if t is not None and t.dtype not in keep and t.is_floating_point() else t for n, t in inputs.items()}


def same_bits(a, b):
    integer = {4: torch.int32, 2: torch.int16, 1: torch.int8}[a.element_size()]
    return torch.equal(a.view(integer), b.view(integer))


def assert_close(name, found, judge, baseline, size):
    """Root mean square error at most twice the baseline's, greatest error (luck, among so many) four times, besides
    one rounding to the type and four of float32 in numbers of this size."""
    unit = {torch.float32: 0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[found.dtype]
    found, finite = found.double(), judge.isfinite()
    assert torch.equal(found[~finite], judge[~finite]), f"{name} is not infinite where the reference is"
    if not finite.any():
        return
    found, judge, baseline = found[finite], judge[finite], baseline.double()[finite]
    assert found.isfinite().all(), f"{name} is not finite where the reference is"
    rounding = 2.0**-22 * size + unit * judge.abs().max().item()
    errors, plain = found - judge, baseline - judge
    for word, measure, factor in (("rms", lambda t: t.norm() / t.numel() ** 0.5, 2), ("greatest", lambda t: t.abs().max(), 4)):
        error, bound = measure(errors).item(), factor * measure(plain).item() + rounding
        assert error <= bound, f"{name}: {word} error {error:.3g}, allowed {bound:.3g}"


def assert_one_rounding(name, found, judge):
    """Equal to the judge but for a rounding to the type, besides two of float32; NaN where it is NaN."""
    unit = {torch.float32: 0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[found.dtype]
    found, known = found.double(), ~judge.isnan()
    assert torch.equal(found.isnan(), judge.isnan()), f"{name}: another element is NaN"
    allowed = unit * judge.abs() + 2.0**-23 * judge[known].abs().max() if known.any() else judge
    assert ((found - judge).abs() <= allowed)[known].all(), f"{name} is not the reference's, rounded"


VARIANTS = ("dense", "ragged", "paged")


def one_after_another(inputs, attrs, spare=0):
    """The same call with packed new tokens: those of all requests one after the other, and `spare` rows of NaN behind them."""
    axis = 0 if attrs["layout"] == "bnhd" else 1
    rows = inputs["query"].shape[axis + 1]
    counts = [rows] * len(inputs["query"]) if inputs.get("query_lens") is None else inputs["query_lens"].tolist()
    joined = {}
    for name in ("query", "new_key", "new_value"):
        if inputs.get(name) is not None:
            tokens = [request.narrow(axis, 0, n) for request, n in zip(inputs[name], counts, strict=True)]
            shape = list(tokens[0].shape)
            shape[axis] = max(spare, 0 if sum(counts) else 1)  # a tensor is never empty
            joined[name] = torch.cat([*tokens, torch.full(shape, NAN, dtype=inputs[name].dtype)], axis)
    offsets = [sum(counts[:b]) for b in range(len(counts) + 1)]
    return {**inputs, **joined, "query_lens": None, "cu_query_lens": int32(offsets)}, attrs


def packed(inputs, attrs):
    """The same call with queries, new keys and new values as one tensor."""
    rows = [inputs[n] for n in ("query", "new_key", "new_value")]
    query = torch.cat(rows, -2 if attrs["layout"] == "bnhd" else -3)
    return {**inputs, "query": query, "new_key": None, "new_value": None}, {**attrs, "packed_qkv": 1}


def draw_packed_tokens(source, widths, groups=((1, 1), (2, 3), (1, 8), (2, 16), (1, 100), (2, 7)), dtypes=DTYPES, quant=()):
    """(inputs, attrs, words that describe them) of a call with packed new tokens, steps and pieces of prompts in one, drawn
    from a random.Random. widths: of D and Dv. groups: (Hkv, query heads of each). quant: the caches
    are some of these (pairs)."""
    Hkv, group = source.choice(groups)
    together = source.random() < 0.4
    D = source.choice(widths)
    Dv = D if together else source.choice(widths)
    most = source.choice((1, 1, 3, 20, 70, 300))
    counts = [source.choice((0, 1, 1, 1, source.randint(0, most))) for _ in range(source.choice((1, 2, 5, 9, 40)))]
    append, causal = together or source.random() < 0.6, source.random() < 0.75
    facts = dict(
        variant=source.choice(VARIANTS),
        dtype=source.choice(dtypes),
        lens=[n + source.choice((0, 1, 64, 200, 900)) for n in counts],
        query_lens=counts,
        Nq=most,
        H=Hkv * group,
        Hkv=Hkv,
        D=D,
        Dv=Dv,
        layout=source.choice(("bhnd", "bnhd")),
        append=append,
        causal=int(causal),
        window=source.choice((-1, -1, 20)) if causal else -1,
        softcap=source.choice((0.0, 0.0, 5.0)),
        sinks=source.random() < 0.3,
        rotary=source.choice((0, D // 2, D // 4)),
    )
    return drawn_case(source, facts, together, quant, (0, 0, 1, 5, 150))


def drawn_case(source, facts, together, quant, spares):
    """The case of these facts with its tokens one after the other, and with `together` as one tensor. spares: how many rows
    may stand behind them."""
    if quant:
        facts["quant"] = source.choice(quant)
    inputs, attrs = one_after_another(*make_case(source.randrange(2**20), **facts), spare=source.choice(spares))
    inputs, attrs = packed(inputs, attrs) if together else (inputs, attrs)
    return inputs, attrs, ", ".join(f"{k} {v}" for k, v in facts.items())


def draw_lone_tokens(
    source, widths, most_keys=900, dtypes=DTYPES[1:], quant=(), groups=((1, 1), (2, 3), (1, 8), (2, 16), (2, 7))
):
    """The same of no more tokens than requests: mostly one each, but some have up to 45 and others none."""
    Hkv, group = source.choice(groups)
    together = source.random() < 0.4
    D = source.choice(widths)
    Dv = D if together else source.choice(widths)
    B = source.choice((1, 2, 5, 9, 33, 45))
    counts = [1] * B
    for _ in range(source.choice((0, 0, 1, 2))):
        taken, given = source.randrange(B), source.randrange(B)
        many = min(source.choice((1, 2, 9, 20, 40)), B - 1)
        for other in source.sample([b for b in range(B) if b != given], many):
            counts[given] += counts[other]
            counts[other] = 0
        if source.random() < 0.5:
            counts[taken] = 0
    append = together or source.random() < 0.8
    facts = dict(
        variant=source.choice((*VARIANTS, "paged")),
        dtype=source.choice(dtypes),
        lens=[n + source.choice((0, 1, 64, 200, most_keys)) for n in counts],
        query_lens=counts,
        Nq=max(1, *counts),
        H=Hkv * group,
        Hkv=Hkv,
        D=D,
        Dv=Dv,
        layout=source.choice(("bhnd", "bnhd")),
        append=append,
        window=source.choice((-1, -1, 5, 20)),
        softcap=source.choice((0.0, 0.0, 5.0)),
        sinks=source.random() < 0.3,
        rotary=source.choice((0, D // 2, D // 4)),
    )
    return drawn_case(source, facts, together, quant, (0, 0, B - sum(counts)))


def draw_packed_prompts(source, widths=(64, 64, 128, 128, 192, 256)):
    """The same of prompts in 16 bits, of so many pieces that CUDA deals them out whole, on 132 SMs; few requests have one token."""
    Hkv, group, D = source.choice((8, 16)), source.choice((1, 2, 4)), source.choice(widths)
    tokens = (192 if D == 64 else 128) // group  # of a piece
    counts = []
    while Hkv * sum(-(-n // tokens) for n in counts) < 300:
        counts.append(source.choice((1, source.randint(2, 200), source.randint(200, 1500), source.randint(200, 1500))))
    causal = source.random() < 0.8
    facts = dict(
        variant=source.choice(VARIANTS),
        dtype=source.choice((torch.float16, torch.bfloat16)),
        lens=[n + source.choice((0, 0, 64, 900)) for n in counts],
        query_lens=counts,
        Nq=max(counts),
        H=Hkv * group,
        Hkv=Hkv,
        D=D,
        Dv=D,
        layout=source.choice(("bhnd", "bnhd")),
        append=source.random() < 0.5,
        causal=int(causal),
        window=source.choice((-1, -1, 200)) if causal else -1,
        softcap=source.choice((0.0, 0.0, 5.0)),
        rotary=source.choice((0, D // 2)),
    )
    inputs, attrs = one_after_another(*make_case(source.randrange(2**20), **facts), spare=source.choice((0, 0, 150)))
    return inputs, attrs, ", ".join(f"{k} {v}" for k, v in facts.items())
