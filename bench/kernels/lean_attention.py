"""Times LeanAttention's CUDA kernel beside its peers and writes one JSON file.

    python -m bench.kernels.lean_attention OUT.json [--only decode,paged,...,splits,balance] [--seed HEX]
        [--peers sdpa,cudnn,fa3,flashinfer,xqa]

Every line is a median over rounds of a graph's replay between two events, with all contenders of a line in turn in
every round. Before each replay the L2 cache is flushed by reading 256 MB: a flush that writes leaves dirty lines, and
every byte of cache read then has to write one back first. The floor is the bytes of the caches that must be read over
4.6 TB/s, what an H200 reaches in a pure read; for prompts the peers are the yardstick. `drawn_prompts` and
`drawn_quantised` draw their shapes from --seed, each checked against float64.

`quantised_prompts` are whole prompts over paged caches of these types beside bfloat16 caches.
`quantised` are decode steps over paged caches of int8, fp8 and int4, beside bfloat16 caches and FlashInfer's XQA over fp8
ones; "leanfleet" is int8 with scales per token, and "leanfleet step" rotates and appends too.

`splits` is LeanAttention's table 2, the share of the reduction: the time of units that several multiprocessors share over
that of as many more units, a multiprocessor each, with the same tiles a multiprocessor. `balance` are the tiles of the ranges
and, by ncu, which must be on the path, the multiprocessors' active cycles.
"""

import argparse
import datetime
import json
import math
import random
import statistics
from pathlib import Path

import torch

from bench.kernels.timing import Launches, captured, counted, times
from leanfleet.export.linear_attention import rotary_tables, rotate
from leanfleet.export.reference import FORMS, numbers_of, row_scales
from leanfleet.export.reference import quantised as quantise

READ_BYTES_PER_US = 4.6e6

# (B, H, Hkv, D, context)
DECODE = [
    (4, 32, 32, 64, 1024),
    (4, 32, 32, 64, 8192),
    (4, 32, 32, 64, 65536),
    (6, 48, 48, 64, 65536),
    (1, 32, 8, 128, 1024),
    (1, 32, 8, 128, 8192),
    (1, 32, 8, 128, 131072),
    (4, 32, 8, 128, 8192),
    (16, 32, 8, 128, 8192),
    (64, 32, 8, 128, 4096),
    (1, 40, 10, 128, 16384),
]
# (H, Hkv, D, lengths)
RAGGED = [(32, 8, 128, [131072, 1024, 2048, 4096, 512, 8192, 16384, 700]), (32, 32, 128, [65536] + [2000] * 15)]
# (B, H, Hkv, D, context, block)
PAGED = [
    (1, 32, 8, 128, 131072, 16),
    (1, 32, 8, 128, 131072, 64),
    (16, 32, 8, 128, 8192, 16),
    (16, 32, 8, 128, 8192, 64),
    (16, 32, 8, 128, 8192, 1),
    (4, 32, 32, 64, 8192, 16),
    (4, 32, 32, 64, 8192, 64),
    (1, 32, 8, 128, 8192, 16),
]
# (B, H, Hkv, D, prompt)
PROMPT = [(1, 32, 8, 128, 8192), (1, 32, 32, 64, 8192), (4, 32, 8, 128, 2048), (1, 16, 8, 256, 5000), (4, 4, 1, 256, 2000)]
DRAWN = 30  # prompts from a seed, of 256 to 65,536 tokens in all
DRAWN_QUANTISED = 12  # decode steps from a seed, of 1,024 to 262,144 tokens in all
# (type of keys, of values, kind of scales) by contender; scales per token where none is named
QUANTISED_FORMS = {
    "leanfleet": (torch.int8, torch.int8, "token"),
    "leanfleet per channel": (torch.int8, torch.int8, "channel"),
    "leanfleet per tensor": (torch.int8, torch.int8, "tensor"),
    "leanfleet fp8": (torch.float8_e4m3fn, torch.float8_e4m3fn, "token"),
    "leanfleet fp8 per tensor": (torch.float8_e4m3fn, torch.float8_e4m3fn, "tensor"),
    "leanfleet int8/fp8": (torch.int8, torch.float8_e4m3fn, "token"),
    "leanfleet int4": (torch.uint8, torch.uint8, "token"),
}
# Of prompts, where scales of channels keep the kernel without wgmma
QUANTISED_PROMPT_FORMS = ("leanfleet", "leanfleet per channel", "leanfleet fp8", "leanfleet int8/fp8", "leanfleet int4")
QUANTISED_PROMPTS = [
    (1, 32, 8, 128, 2000),
    (1, 32, 8, 128, 8192),
    (16, 32, 8, 128, 2000),
    (1, 32, 8, 128, 30000),
    (16, 32, 8, 64, 2000),
    (1, 16, 8, 256, 4096),
]
# (B, H, Hkv, D, context)
QUANTISED = [
    (1, 32, 8, 128, 1024),
    (1, 32, 8, 128, 8192),
    (1, 32, 8, 128, 131072),
    (4, 32, 8, 128, 8192),
    (16, 32, 8, 128, 8192),
    (1, 64, 8, 128, 200000),
    (5, 28, 4, 128, 12345),
    (3, 16, 8, 256, 30001),
]
# (B, H, Hkv, D, context)
STEP = [
    (1, 32, 8, 128, 1024),
    (16, 32, 8, 128, 1024),
    (1, 32, 8, 128, 8192),
    (4, 40, 10, 128, 8192),
    (16, 32, 8, 128, 8192),
    (16, 40, 10, 128, 8192),
    (64, 32, 8, 128, 4096),
]
# (B, H, Hkv, D, context, new tokens)
TOKENS = [
    (1, 32, 8, 128, 8192, 4),
    (16, 32, 8, 128, 8192, 2),
    (16, 32, 8, 128, 8192, 4),
    (16, 32, 8, 128, 8192, 8),
    (16, 32, 8, 128, 8192, 16),
]
# (H, Hkv, D, requests with one new token, pieces of prompts): (new tokens, keys with them)
MIXED = [
    (32, 8, 64, [(1, 1000)] * 63, [(1985, 1985)]),
    (32, 8, 64, [(1, 1000)] * 63, [(1985, 8000)]),
    (32, 8, 64, [(1, 500 + 60 * i) for i in range(60)], [(700, 700), (1000, 3000), (288, 288)]),
    (32, 8, 128, [(1, 1000)] * 63, [(1985, 1985)]),
    (32, 8, 128, [(1, 4000)] * 31, [(481, 6000)]),
    (14, 2, 64, [(1, 2000)] * 15, [(500, 500)]),
]


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda", dtype=dtype)


class Node(Launches):
    """One LeanAttention node; it appends in place."""

    def __init__(self, inputs, attrs=None):
        super().__init__("LeanAttention", inputs, attrs or {}, in_place=True)

    def __call__(self):
        return self.run()["output"]


def fa3_calls(q, k, v, *new, **kwargs):
    """FA3's decode with its own choice of splits and with them off, packed heads on: its better mode counts."""
    from fa3_fwd_interface import flash_attn_with_kvcache

    return {
        f"fa3[{splits}]": lambda splits=splits: flash_attn_with_kvcache(
            q, k, v, *new, causal=True, num_splits=splits, pack_gqa=True, **kwargs
        )
        for splits in (0, 1)
    }


def flashinfer_calls(q, k, v, kv_heads, page_table=None):
    """FlashInfer's batch decode over pages, planned once, on CUDA cores and on tensor cores."""
    import flashinfer

    B, H, D = q.shape
    indptr, indices, last, page = page_table
    calls = {}
    for tensor_cores in (False, True):
        buffer = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(buffer, "NHD", use_tensor_cores=tensor_cores)
        try:
            wrapper.plan(indptr, indices, last, H, kv_heads, D, page, q_data_type=q.dtype, kv_data_type=k.dtype)
            wrapper.run(q, (k, v))
        except Exception as error:  # a peer that lacks a shape is left out, and the table says so
            print(f"  flashinfer {'tensor' if tensor_cores else 'cuda'} cores: {type(error).__name__}: {error}"[:160])
            continue
        calls["flashinfer[tensor]" if tensor_cores else "flashinfer[cuda]"] = lambda w=wrapper: w.run(q, (k, v))
    return calls


def measure(label, calls, kv_bytes, rounds, extra=None):
    graphs = {}
    for name, call in calls.items():
        try:
            graphs[name] = captured(call)
        except Exception as error:
            print(f"  {name}: {type(error).__name__}: {error}"[:160])
            torch.cuda.synchronize()
    found = times(graphs, rounds)
    floor = kv_bytes / READ_BYTES_PER_US if kv_bytes else None
    row = {
        "case": label,
        "floor_us": floor,
        **(extra or {}),
        "us": {
            n: {"median": statistics.median(t), "p10": t[len(t) // 10], "p90": t[-1 - len(t) // 10]} for n, t in found.items()
        },
    }
    ours = row["us"]["leanfleet"]["median"]
    peers = {n: t["median"] for n, t in row["us"].items() if not n.startswith("leanfleet")}
    best = min(peers, key=peers.get) if peers else None
    row["speedup_over_best_peer"] = peers[best] / ours if best else None
    text = "  ".join(f"{n} {t['median']:.1f}" for n, t in row["us"].items() if n != "leanfleet")
    floor_text = f"floor {floor:7.1f} ({ours / floor:5.2f}x)" if floor else " " * 22
    print(
        f"{label:44s} {ours:8.1f} us  {floor_text}  {text}  " + (f"best/ours {peers[best] / ours:.2f}" if best else ""),
        flush=True,
    )
    return row


def gate(node, q, k, v):
    """No time is reported for a wrong result: the output against float64 on a few heads."""
    output = node()
    torch.cuda.synchronize()
    group = q.shape[1] // k.shape[1]
    for b, h in ((0, 0), (q.shape[0] - 1, q.shape[1] - 1)):
        keys, values = k[b, h // group].double(), v[b, h // group].double()
        weights = (q[b, h, -1].double() @ keys.T / math.sqrt(q.shape[-1])).softmax(-1)
        error = (output[b, h, -1].double() - weights @ values).abs().max().item()
        scale = values.abs().max().item() * 2**-8
        assert error < scale, f"request {b}, head {h}: error {error:.3g}, allowed {scale:.3g}"


def decode(args):
    for B, H, Hkv, D, N in DECODE:
        q, k, v = normal(B, H, 1, D), normal(B, Hkv, N, D), normal(B, Hkv, N, D)
        lens = torch.full((B,), N, dtype=torch.int32, device="cuda")
        node = Node({"query": q, "key_cache": k, "value_cache": v, "seq_lens": lens})
        gate(node, q, k, v)
        calls = {"leanfleet": node}
        if "sdpa" in args.peers:
            calls["sdpa"] = lambda q=q, k=k, v=v, g=Hkv != H: torch.nn.functional.scaled_dot_product_attention(
                q, k, v, enable_gqa=g
            )
        if "fa3" in args.peers:
            calls.update(fa3_calls(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), cache_seqlens=lens))
        if "flashinfer" in args.peers:
            page = 16
            pages = N // page
            table = (
                torch.arange(0, (B + 1) * pages, pages, dtype=torch.int32, device="cuda"),
                torch.arange(B * pages, dtype=torch.int32, device="cuda"),
                torch.full((B,), page, dtype=torch.int32, device="cuda"),
                page,
            )
            paged = [normal(B * pages, page, Hkv, D) for _ in range(2)]
            calls.update(flashinfer_calls(q[:, :, 0].contiguous(), *paged, Hkv, table))
        yield measure(f"decode B{B} {H}/{Hkv} D{D} ctx {N}", calls, 4 * B * Hkv * N * D, args.rounds)


def ragged(args):
    for H, Hkv, D, lens in RAGGED:
        B, total = len(lens), sum(lens)
        offsets = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
        q, k, v = normal(B, H, 1, D), normal(Hkv, total, D), normal(Hkv, total, D)
        calls = {"leanfleet": Node({"query": q, "key_cache": k, "value_cache": v, "cu_seqlens": offsets})}
        if "fa3" in args.peers:
            S = max(lens)
            dense = [normal(B, S, Hkv, D) for _ in range(2)]
            calls.update(
                fa3_calls(q.transpose(1, 2), *dense, cache_seqlens=torch.tensor(lens, dtype=torch.int32, device="cuda"))
            )
        if "flashinfer" in args.peers:
            page = 16
            pages = [-(-n // page) for n in lens]
            table = (
                torch.tensor([0, *torch.tensor(pages).cumsum(0).tolist()], dtype=torch.int32, device="cuda"),
                torch.arange(sum(pages), dtype=torch.int32, device="cuda"),
                torch.tensor([(n - 1) % page + 1 for n in lens], dtype=torch.int32, device="cuda"),
                page,
            )
            paged = [normal(sum(pages), page, Hkv, D) for _ in range(2)]
            calls.update(flashinfer_calls(q[:, :, 0].contiguous(), *paged, Hkv, table))
        yield measure(f"ragged B{B} {H}/{Hkv} D{D} total {total}", calls, 4 * Hkv * total * D, args.rounds)
        # The same work in requests of one length.
        N = total // B
        q, k, v = normal(B, H, 1, D), normal(B, Hkv, N, D), normal(B, Hkv, N, D)
        node = Node({"query": q, "key_cache": k, "value_cache": v})
        yield measure(f"equal  B{B} {H}/{Hkv} D{D} total {N * B}", {"leanfleet": node}, 4 * B * Hkv * N * D, args.rounds)


def paged(args):
    for B, H, Hkv, D, N, block in PAGED:
        pages = N // block
        q = normal(B, H, 1, D)
        k, v = normal(B * pages, block, Hkv, D), normal(B * pages, block, Hkv, D)
        table = torch.randperm(B * pages, device="cuda").int().view(B, pages)
        calls = {"leanfleet": Node({"query": q, "key_cache": k, "value_cache": v, "block_table": table})}
        yield measure(f"paged{block} B{B} {H}/{Hkv} D{D} ctx {N}", calls, 4 * B * Hkv * N * D, args.rounds)


def step(args):
    """Decode steps as a model runs them: one node rotates the query and the new key and appends new keys and values."""
    for B, H, Hkv, D, N in STEP:
        q, k, v = normal(B, H, 1, D), normal(B, Hkv, N, D), normal(B, Hkv, N, D)
        new_key, new_value = normal(B, Hkv, 1, D), normal(B, Hkv, 1, D)
        lens = torch.full((B,), N, dtype=torch.int32, device="cuda")
        cosines, sines = (t.bfloat16() for t in rotary_tables(torch.arange(N, device="cuda"), D))
        plain = {"query": q, "key_cache": k, "value_cache": v, "seq_lens": lens}
        append = {**plain, "new_key": new_key, "new_value": new_value}
        node = Node({**append, "cos_cache": cosines.float(), "sin_cache": sines.float()}, {"append": 1})
        calls = {"leanfleet": node, "leanfleet append": Node(append, {"append": 1}), "leanfleet attention": Node(plain)}
        rows = [rotate(x, cosines[-1], sines[-1]) for x in (q, new_key)]
        k[:, :, -1:], v[:, :, -1:] = rows[1], new_value
        gate(node, rows[0], k.clone(), v.clone())
        if "fa3" in args.peers:
            calls.update(
                fa3_calls(
                    *(t.transpose(1, 2) for t in (q, k, v, new_key, new_value)),
                    cache_seqlens=lens - 1,
                    rotary_cos=cosines,
                    rotary_sin=sines,
                    rotary_interleaved=False,
                )
            )
        yield measure(f"step B{B} {H}/{Hkv} D{D} ctx {N}", calls, 4 * B * Hkv * N * D, args.rounds)


def tokens(args):
    for B, H, Hkv, D, N, Nq in TOKENS:
        q, k, v = normal(B, H, Nq, D), normal(B, Hkv, N, D), normal(B, Hkv, N, D)
        node = Node({"query": q, "key_cache": k, "value_cache": v})
        gate(node, q, k, v)
        calls = {"leanfleet": node}
        if "fa3" in args.peers:
            calls.update(fa3_calls(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)))
        yield measure(f"tokens Nq{Nq} B{B} {H}/{Hkv} D{D} ctx {N}", calls, 4 * B * Hkv * N * D, args.rounds)


def packed_requests(H, Hkv, D, requests, block=16):
    """A node of packed new tokens, for requests (new tokens, keys with them); it appends and rotates."""
    counts, lens = zip(*requests, strict=True)
    pages = [-(-n // block) for n in lens]
    order, table, at = torch.randperm(sum(pages)), torch.zeros(len(lens), max(pages), dtype=torch.int32), 0
    for b, n in enumerate(pages):
        table[b, :n] = order[at : at + n]
        at += n
    offsets = torch.tensor([sum(counts[:b]) for b in range(len(counts) + 1)], dtype=torch.int32)
    cosines, sines = rotary_tables(torch.arange(max(lens), device="cuda"), D)
    inputs = {
        "query": normal(sum(counts), H + 2 * Hkv, D),
        "key_cache": normal(sum(pages), block, Hkv, D),
        "value_cache": normal(sum(pages), block, Hkv, D),
        "seq_lens": torch.tensor(lens, dtype=torch.int32).cuda(),
        "block_table": table.cuda(),
        "cos_cache": cosines.float(),
        "sin_cache": sines.float(),
        "cu_query_lens": offsets.cuda(),
    }
    return Node(inputs, {"append": 1, "packed_qkv": 1, "layout": "bnhd"})


def spread(node):
    """The same call with each request's tokens in rows of their own, as many as the longest has."""
    inputs, offsets = dict(node.inputs), node.inputs["cu_query_lens"].long()
    counts = offsets.diff()
    rows = torch.arange(int(counts.max()), device="cuda")
    source = (offsets[:-1, None] + rows).clamp(max=int(offsets[-1]) - 1)
    inputs |= {"query": inputs["query"][source], "query_lens": counts.int(), "cu_query_lens": None}
    return Node(inputs, node.attrs), rows < counts[:, None]


def mixed(args):
    """Steps and a piece of a prompt as packed new tokens of one call, beside each alone and beside rows of padding."""
    for H, Hkv, D, steps, piece in MIXED:
        nodes = {
            "leanfleet": packed_requests(H, Hkv, D, steps + piece),
            "leanfleet steps alone": packed_requests(H, Hkv, D, steps),
            "leanfleet piece alone": packed_requests(H, Hkv, D, piece),
        }
        nodes["leanfleet padding"], owned = spread(nodes["leanfleet"])
        rows = nodes["leanfleet padding"]()[owned].float()
        difference = (nodes["leanfleet"]().float() - rows).abs().max().item()
        if difference > 2.0**-6 * rows.abs().max().item():
            raise SystemExit(f"mixed: packed tokens differ from padded ones by {difference}")
        row = measure(f"mixed {H}/{Hkv} D{D} {len(steps)} steps, {piece}", nodes, 0, args.rounds)
        us = {n: t["median"] for n, t in row["us"].items()}
        row["together_over_alone"] = us["leanfleet"] / (us["leanfleet steps alone"] + us["leanfleet piece alone"])
        print(f"  {row['together_over_alone']:.2f} of both alone", flush=True)
        yield row


def prompt_line(args, B, H, Hkv, D, N):
    """Whole prompts, dense, without append and rotation, beside each peer's own kernel for them."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = normal(B, H, N, D), normal(B, Hkv, N, D), normal(B, Hkv, N, D)
    node = Node({"query": q, "key_cache": k, "value_cache": v})
    gate(node, q, k, v)

    def sdpa(backend):
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=Hkv != H)

    calls = {"leanfleet": node}
    if "sdpa" in args.peers:
        calls["sdpa"] = lambda: sdpa(SDPBackend.FLASH_ATTENTION)
    if "cudnn" in args.peers:
        calls["cudnn"] = lambda: sdpa(SDPBackend.CUDNN_ATTENTION)
    if "fa3" in args.peers:
        from fa3_fwd_interface import flash_attn_func

        by_token = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        calls["fa3"] = lambda: flash_attn_func(*by_token, causal=True)
    row = measure(f"prompt B{B} {H}/{Hkv} D{D} N {N}", calls, 0, max(args.rounds // 4, 5))
    row["tflops"] = 2 * B * H * N * N * D / row["us"]["leanfleet"]["median"] / 1e6
    print(f"  {row['tflops']:.0f} TFLOP/s", flush=True)
    return row


def prompt(args):
    for line in PROMPT:
        yield prompt_line(args, *line)


def drawn_prompts(args):
    draw = random.Random(args.seed)
    for _ in range(DRAWN):
        tokens = 2 ** draw.uniform(8, 16)
        B = min(int(2 ** draw.uniform(0, 5)), int(tokens / 200) or 1)
        group, D = draw.choice((1, 2, 3, 4, 5, 7, 8)), draw.choice((64, 64, 80, 96, 128, 128, 192, 256, 256))
        Hkv = draw.randint(1, 32 // group)
        row = prompt_line(args, B, group * Hkv, Hkv, D, int(tokens / B))
        yield {**row, "seed": f"{args.seed:x}"}


def quantised_inputs(caches, forms, kind):
    """(inputs, attributes) that a node over these caches [P,block,Hkv,D], kept in these types, has beside the others, with
    scales of this kind."""
    inputs, attrs = {}, {}
    for (role, cache), form in zip(caches.items(), forms, strict=True):
        scale = row_scales(cache, form)
        if kind == "token":
            inputs[f"{role}_scale"], attrs[f"{role}_per_token"] = scale.squeeze(-1), 1
        else:
            scale = cache.abs().amax((0, 1) if kind == "channel" else ()).float() / FORMS[form][1]
            inputs[f"{role}_scale"] = scale.unsqueeze(1) if kind == "channel" else scale.view(1)
        inputs[f"{role}_cache"] = torch.cat([quantise(part, of, form) for part, of in parts_of(cache, scale, kind)])
    return inputs, attrs


def parts_of(cache, scale, kind):
    """A cache in parts, as quantising makes float32 of it."""
    for first in range(0, len(cache), 4096):
        rows = slice(first, first + 4096)
        yield cache[rows], scale[rows] if kind == "token" else scale


def quantised_gate(node, N):
    """The output against float64 on the bytes and scales themselves, on a few heads."""
    given, output = node.inputs, node()
    torch.cuda.synchronize()
    B, H, _, D = given["query"].shape
    group = H // given["key_cache"].shape[2]
    for b, h in ((0, 0), (B - 1, H - 1)):
        rows = {}
        for role in ("key", "value"):
            pages = given["block_table"][b].long()
            rows[role] = numbers_of(given[f"{role}_cache"][pages, :, h // group]).flatten(0, 1)[:N].double()
            scale = given[f"{role}_scale"]
            if node.attrs.get(f"{role}_per_token"):
                rows[role] *= scale[pages, :, h // group].flatten()[:N, None]
            else:
                rows[role] *= scale if scale.dim() == 1 else scale[h // group]
        weights = (given["query"][b, h, -1].double() @ rows["key"].T / math.sqrt(D)).softmax(-1)
        error = (output[b, h, -1].double() - weights @ rows["value"]).abs().max().item()
        allowed = rows["value"].abs().max().item() * 2**-8
        assert error < allowed, f"request {b}, head {h}: error {error:.3g}, allowed {allowed:.3g}"


def xqa_calls(q, k, v, table, lens, N):
    """FlashInfer's XQA over fp8 caches of the same pages."""
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    caches = tuple(x.to(torch.float8_e4m3fn) for x in (k, v))
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    rows, scale, lens = q[:, :, 0].contiguous(), 1 / math.sqrt(q.shape[-1]), lens.to(torch.uint32)
    return {"xqa fp8": lambda: xqa_batch_decode_with_kv_cache(rows, caches, workspace, table, lens, N, bmm1_scale=scale)}


def paged_inputs(B, H, Hkv, D, N, new, block=64):
    """({"key", "value": rows of 16 bits in pages [P,block,Hkv,D]}, a node's other inputs) of the last `new` of N tokens."""
    pages = -(-N // block)
    caches = {role: normal(B * pages, block, Hkv, D) for role in ("key", "value")}
    lens = torch.full((B,), N, dtype=torch.int32, device="cuda")
    table = torch.randperm(B * pages, device="cuda").int().view(B, pages)
    return caches, {"query": normal(B, H, new, D), "block_table": table, "seq_lens": lens}


def in_16_bits(caches, shared):
    return Node({**shared, **{f"{role}_cache": cache for role, cache in caches.items()}})


def quantised_line(args, B, H, Hkv, D, N, block=64):
    caches, shared = paged_inputs(B, H, Hkv, D, N, 1, block)
    calls = {}
    for name, (*forms, kind) in QUANTISED_FORMS.items():
        inputs, attrs = quantised_inputs(caches, forms, kind)
        node = Node({**shared, **inputs}, attrs)
        quantised_gate(node, N)
        calls[name] = node
        if name == "leanfleet":
            cosines, sines = rotary_tables(torch.arange(N, device="cuda"), D)
            new = {"new_key": normal(B, Hkv, 1, D), "new_value": normal(B, Hkv, 1, D)}
            tables = {"cos_cache": cosines.float(), "sin_cache": sines.float()}
            own = {n: t.clone() for n, t in inputs.items()}  # a step changes them
            calls["leanfleet step"] = Node({**shared, **own, **new, **tables}, {**attrs, "append": 1})
    calls["leanfleet 16 bits"] = in_16_bits(caches, shared)
    if "xqa" in args.peers:
        calls.update(xqa_calls(shared["query"], *caches.values(), shared["block_table"], shared["seq_lens"], N))
    row = measure(f"quantised B{B} {H}/{Hkv} D{D} ctx {N}", calls, 2 * B * Hkv * N * (D + 4), args.rounds)
    us = {n: t["median"] for n, t in row["us"].items()}
    row["speedup_over_16_bits"] = us["leanfleet 16 bits"] / us["leanfleet"]
    print(f"  {row['speedup_over_16_bits']:.2f} times the speed of 16 bits", flush=True)
    return row


def quantised(args):
    for line in QUANTISED:
        yield quantised_line(args, *line)


def drawn_quantised(args):
    draw = random.Random(args.seed)
    for _ in range(DRAWN_QUANTISED):
        tokens, B = 2 ** draw.uniform(10, 18), int(2 ** draw.uniform(0, 5))
        group, D = draw.choice((1, 2, 4, 4, 5, 7, 8, 8, 16)), draw.choice((64, 128, 128, 128, 256))
        Hkv = draw.randint(1, max(32 // group, 1))
        row = quantised_line(args, B, group * Hkv, Hkv, D, max(int(tokens / B), 32), draw.choice((16, 64)))
        yield {**row, "seed": f"{args.seed:x}"}


def quantised_prompts(args):
    """Whole prompts whose keys and values are in pages of quantised caches, beside the same in 16 bits."""
    for B, H, Hkv, D, N in QUANTISED_PROMPTS:
        caches, shared = paged_inputs(B, H, Hkv, D, N, N)
        calls = {}
        for name in QUANTISED_PROMPT_FORMS:
            *forms, kind = QUANTISED_FORMS[name]
            inputs, attrs = quantised_inputs(caches, forms, kind)
            calls[name] = Node({**shared, **inputs}, attrs)
            quantised_gate(calls[name], N)
        calls["leanfleet 16 bits"] = in_16_bits(caches, shared)
        row = measure(f"quantised prompt B{B} {H}/{Hkv} D{D} N {N}", calls, 0, max(args.rounds // 3, 5))
        row["speedup_over_16_bits"] = row["us"]["leanfleet 16 bits"]["median"] / row["us"]["leanfleet"]["median"]
        yield row


def uniform_node(B, Hkv, D, N):
    return Node({"query": normal(B, 4 * Hkv, 1, D), "key_cache": normal(B, Hkv, N, D), "value_cache": normal(B, Hkv, N, D)})


def splits(args):
    """As many multiprocessors busy with as many tiles each, with and without a reduction."""
    D = 128
    for tokens in (512, 2048, 8192):
        for Hkv, parts in ((33, 4), (16, 8), (8, 16), (4, 33)):
            nodes = {"split": uniform_node(1, Hkv, D, parts * tokens), "whole": uniform_node(parts, Hkv, D, tokens)}
            found = {n: statistics.median(t) for n, t in times({n: captured(c) for n, c in nodes.items()}, args.rounds).items()}
            share = 1 - found["whole"] / found["split"]
            print(
                f"splits {parts:2} of {tokens:5} tokens: {found['split']:7.1f} us, whole {found['whole']:7.1f} us: "
                f"reduction {share:6.1%}",
                flush=True,
            )
            yield {"section": "splits", "parts": parts, "kv_heads": Hkv, "tokens_a_part": tokens, "us": found, "share": share}


# (H, Hkv, D, lengths)
BALANCE = {
    "B1 32/8 D128 ctx 131072": (32, 8, 128, [131072]),
    "B16 32/8 D128 ctx 8192": (32, 8, 128, [8192] * 16),
    "B64 32/8 D128 ctx 4096": (32, 8, 128, [4096] * 64),
    "ragged B8 32/8 D128": RAGGED[0],
    "ragged B16 32/32 D128": RAGGED[1],
}


def tiles_of_ranges(lens, kv_heads, key_tile, ranges, overhead=9):
    """The tiles of each range as csrc/lean_attention/schedule.h cuts units of these lengths that are not all equal."""
    units = [-(-n // key_tile) for n in lens for _ in range(kv_heads)]
    work, found, position = sum(u + overhead for u in units), [0] * ranges, 0
    cuts = [r * work // ranges for r in range(ranges + 1)]
    for tiles in units:
        begin, position = position + overhead, position + overhead + tiles
        for r in range(ranges):
            found[r] += max(0, min(position, cuts[r + 1]) - max(begin, cuts[r]))
    return found


def balance(args):
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    for name, (_, Hkv, _, lens) in BALANCE.items():
        units = len(lens) * Hkv
        if len(set(lens)) == 1 and units <= multiprocessors:
            parts, whole = multiprocessors // units, -(-lens[0] // 64)
            tiles = [(p + 1) * whole // parts - p * whole // parts for p in range(parts)] * units
        else:
            tiles = tiles_of_ranges(lens, Hkv, 64, multiprocessors)
        rows, _ = counted("bench.kernels.lean_attention", [f"sm__cycles_active.{n}" for n in ("min", "avg", "max")], name)
        cycles = {r["Metric Name"].split(".")[-1]: r["Metric Value"] for r in rows}
        print(f"balance {name}: tiles of {len(tiles)} ranges {min(tiles)} to {max(tiles)}, cycles {cycles}", flush=True)
        yield {"section": "balance", "case": name, "ranges": len(tiles), "tiles": [min(tiles), max(tiles)], "cycles": cycles}


def once(name):
    """What `balance` has ncu watch."""
    H, Hkv, D, lens = BALANCE[name]
    if len(set(lens)) == 1:
        node = uniform_node(len(lens), Hkv, D, lens[0])
    else:
        offsets = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
        node = Node(
            {
                "query": normal(len(lens), H, 1, D),
                "key_cache": normal(Hkv, sum(lens), D),
                "value_cache": normal(Hkv, sum(lens), D),
                "cu_seqlens": offsets,
            }
        )
    node()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    node()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--only", default="decode,step,ragged,paged,tokens,prompt")
    parser.add_argument("--peers", default="sdpa")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seed", type=lambda text: int(text, 16), default=0, help="of drawn shapes, hexadecimal")
    parser.add_argument("--once", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        return once(args.once)
    args.peers = args.peers.split(",")
    torch.manual_seed(0)
    word = torch.zeros(1, device="cuda")
    empty = statistics.median(times({"empty": captured(lambda: word.zero_())}, args.rounds)["empty"])
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; a graph of one tiny node: {empty:.1f} us")
    result = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "dtype": "bfloat16",
        "rounds": args.rounds,
        "empty_graph_us": empty,
        "read_bytes_per_us": READ_BYTES_PER_US,
        "rows": [],
    }
    for name in args.only.split(","):
        for row in globals()[name](args):
            result["rows"].append(row)
            torch.cuda.empty_cache()
            Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
