"""Judges LeanAttention's decode on shapes that nobody chose: drawn from a seed, beside each peer that takes them.

    python -m bench.kernels.attention_drawn OUT --seed HEX [--shapes 150] [--rounds 15] [--seconds S]

writes OUT.json, a line a shape, and OUT.md: the geometric mean, the tenth percentile and the worst of the fastest peer's time
over ours, in all and by region. A shape is a batch of 1 to 256, a group of 1 to 16 or 71 query heads for each of 1 to 32 key
heads, keys of 64 to 256 columns (192 with values of 128 as multi-head latent attention has them), contexts of 64 to 500,000
keys that are equal, lognormal or one long among short ones, dense or in pages of 16 or 64, and 1 to 16 new tokens. One that
needs more than 12 GB is drawn again.

Every output, ours and each peer's, is compared with float64 in some rows before it is timed. A shape that ours refuses or gets
wrong counts 0.5; a peer that refuses or is wrong is left out of the line, which says why. Times are medians of CUDA graphs'
replays, all of a line in turn, behind a read that flushes the L2 cache. Nothing appends or rotates here. Peers: torch's SDPA
with its flash, cuDNN and memory-efficient kernels where lengths are equal, FlashAttention-3 with its own splits and without,
and FlashInfer's fa2 kernels over pages, planned, with tensor cores and without. --compile has FlashInfer compile its kernels
and ends. --seconds: no shape is begun after so many; the table says how many there are.

The floor is the bytes of the keys and values over 4.6 TB/s, what an H200 reaches in a pure read.
"""

import argparse
import itertools
import json
import math
import random
import statistics
import time
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from bench.kernels.lean_attention import READ_BYTES_PER_US, Node, normal
from bench.kernels.timing import captured, times

MOST_BYTES = 12e9  # of dense keys and values, padding included
LOST = 0.5  # what a shape counts that ours refuses or gets wrong
NEAR_FLOOR = 1.08  # a peer within this of the floor leaves nothing to win
GROUPS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 71)
HEADS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256))
NEW_TOKENS = (1, 1, 1, 2, 4, 8, 16)
FLASHINFER_HEADS = (64, 128, 256)


def lengths_of(draw, batch, context, kind):
    """So many lengths whose mean is about `context`."""
    if kind == "equal" or batch == 1:
        return [context] * batch
    if kind == "lognormal":
        drawn = [draw.lognormvariate(0, 1) for _ in range(batch)]
    else:
        drawn = [1.0] * (batch - 1) + [batch * 2.0]
    scale = context * batch / sum(drawn)
    return [min(max(int(n * scale), 64), 500_000) for n in drawn]


def drawn(seed):
    """Shapes without end."""
    draw = random.Random(seed)
    while True:
        batch, context = round(2 ** draw.uniform(0, 8)), round(2 ** draw.uniform(6, math.log2(500_000)))
        group, kv_heads, (D, Dv) = draw.choice(GROUPS), round(2 ** draw.uniform(0, 5)), draw.choice(HEADS)
        lens = lengths_of(draw, batch, context, kind := draw.choice(("equal", "lognormal", "one long")))
        new, block = draw.choice(NEW_TOKENS), draw.choice((0, 0, 16, 64))
        if batch * max(lens) * kv_heads * (D + Dv) * 2 <= MOST_BYTES and group * kv_heads <= 256:
            shape = {"batch": batch, "group": group, "kv_heads": kv_heads, "key_width": D, "value_width": Dv}
            yield shape | {"lengths": "equal" if batch == 1 else kind, "lens": lens, "block": block, "new": new}


class Case:
    """A shape's tensors: pages where it has them, else dense keys and values [B,Hkv,S,D]."""

    def __init__(self, shape, seed):
        self.shape, self.lens = shape, shape["lens"]
        self.B, self.Hkv, self.H = shape["batch"], shape["kv_heads"], shape["kv_heads"] * shape["group"]
        self.D, self.Dv, self.new, self.block = (shape[n] for n in ("key_width", "value_width", "new", "block"))
        torch.manual_seed(seed)
        self.query = normal(self.B, self.H, self.new, self.D)
        # Dense caches that are full say their lengths themselves, to SDPA and to the others.
        full = not self.block and len(set(self.lens)) == 1
        self.seq_lens = None if full else torch.tensor(self.lens, dtype=torch.int32, device="cuda")
        if self.block:
            self.tables(self.block)
            count = len(self.indices)
            self.keys, self.values = (normal(count, self.block, self.Hkv, n) for n in (self.D, self.Dv))
        else:
            self.keys, self.values = (normal(self.B, self.Hkv, max(self.lens), n) for n in (self.D, self.Dv))

    def tables(self, block):
        """Pages in a random order: those of all requests one after the other, where each request's begin, and a row each."""
        pages = [-(-n // block) for n in self.lens]
        self.indices = torch.randperm(sum(pages), device="cuda").int()
        self.offsets = torch.tensor([0, *itertools.accumulate(pages)], dtype=torch.int32)
        self.table = torch.zeros(self.B, max(pages), dtype=torch.int32, device="cuda")
        for b, begin in enumerate(self.offsets[:-1].tolist()):
            self.table[b, : pages[b]] = self.indices[begin : begin + pages[b]]

    def rows(self, b, head):
        """Keys and values of a request and key head in float64."""
        n = self.lens[b]
        if not self.block:
            return self.keys[b, head, :n].double(), self.values[b, head, :n].double()
        own = self.indices[self.offsets[b] : self.offsets[b + 1]].long()
        return tuple(x[own, :, head].flatten(0, 1)[:n].double() for x in (self.keys, self.values))

    def check(self, output):
        """None, or what is wrong with an output [B,H,new,Dv]: rows of the first, last and longest request."""
        for b in {0, self.B - 1, self.lens.index(max(self.lens))}:
            for head in {0, self.H - 1}:
                keys, values = self.rows(b, head // self.shape["group"])
                seen = (
                    torch.arange(len(keys), device="cuda")
                    <= torch.arange(len(keys) - self.new, len(keys), device="cuda")[:, None]
                )
                logits = (self.query[b, head].double() @ keys.T / math.sqrt(self.D)).masked_fill(~seen, -math.inf)
                error = (output[b, head].double() - logits.softmax(-1) @ values).abs().max().item()
                allowed = values.abs().max().item() * 2**-8
                if not error <= allowed:
                    return f"request {b}, head {head}: error {error:.3g}, allowed {allowed:.3g}"
        return None

    def ours(self):
        inputs = {"query": self.query, "key_cache": self.keys, "value_cache": self.values, "seq_lens": self.seq_lens}
        return Node(inputs | ({"block_table": self.table} if self.block else {}))

    def peers(self):
        """{name: how to make its call}: a call's result is [B,H,new,Dv]."""
        found = {f"fa3 splits={n}": lambda n=n: self.fa3(n) for n in (0, 1)}
        if not self.block and len(set(self.lens)) == 1:
            for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
                found[f"sdpa {backend.lower().removesuffix('_attention')}"] = lambda b=backend: self.sdpa(b)
        if self.D == self.Dv and self.D in FLASHINFER_HEADS and (self.block or len(set(self.lens)) == 1):
            for tensor_cores in (True,) if self.new > 1 else (True, False):
                name = "flashinfer tensor cores" if tensor_cores else "flashinfer"
                found[name] = lambda t=tensor_cores: self.flashinfer(t)
        return found

    def fa3(self, splits):
        from fa3_fwd_interface import flash_attn_with_kvcache

        q = self.query.transpose(1, 2)
        if self.block:
            given, paged = (self.keys, self.values), {"page_table": self.table}
        else:
            given, paged = (self.keys.transpose(1, 2), self.values.transpose(1, 2)), {}

        def call():
            out = flash_attn_with_kvcache(
                q, *given, cache_seqlens=self.seq_lens, causal=True, num_splits=splits, pack_gqa=True, **paged
            )
            return out.transpose(1, 2)

        return call

    def sdpa(self, backend):
        mask = causal_lower_right(self.new, self.lens[0]) if self.new > 1 else None

        def call():
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return torch.nn.functional.scaled_dot_product_attention(
                    self.query, self.keys, self.values, attn_mask=mask, enable_gqa=self.H != self.Hkv
                )

        return call

    def flashinfer(self, tensor_cores):
        """Over the shape's pages, or where it has none over pages of 64 of the same keys."""
        block, keys, values, indices, offsets = self.block, self.keys, self.values, getattr(self, "indices", None), None
        if block:
            offsets = self.offsets
        else:
            block, pages = 64, -(-self.lens[0] // 64)
            pad = (0, 0, 0, 0, 0, pages * block - self.lens[0])
            keys, values = (
                torch.nn.functional.pad(x.transpose(1, 2), pad).reshape(self.B * pages, block, self.Hkv, -1)
                for x in (keys, values)
            )
            indices = torch.arange(self.B * pages, dtype=torch.int32, device="cuda")
            offsets = torch.arange(0, (self.B + 1) * pages, pages, dtype=torch.int32)
        last = torch.tensor([(n - 1) % block + 1 for n in self.lens], dtype=torch.int32)
        return flashinfer_call(self.query, keys, values, (indices, offsets, last, block), tensor_cores)


def flashinfer_call(query, keys, values, pages, tensor_cores):
    """A planned call over pages [P,block,Hkv,D]."""
    import flashinfer

    B, H, new, D = query.shape
    indices, offsets, last, block = pages
    space = torch.zeros(512 << 20, dtype=torch.uint8, device="cuda")
    types = {"q_data_type": query.dtype, "kv_data_type": keys.dtype}
    if new == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "NHD", use_tensor_cores=tensor_cores)
        wrapper.plan(offsets, indices, last, H, keys.shape[2], D, block, **types)
        rows = query[:, :, 0].contiguous()
        return lambda: wrapper.run(rows, (keys, values))[:, :, None]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend="fa2")
    starts = torch.arange(0, (B + 1) * new, new, dtype=torch.int32)
    wrapper.plan(starts, offsets, indices, last, H, keys.shape[2], D, block, causal=True, **types)
    rows = query.transpose(1, 2).flatten(0, 1).contiguous()
    return lambda: wrapper.run(rows, (keys, values)).view(B, new, H, D).transpose(1, 2)


def compile_flashinfer():
    for D in FLASHINFER_HEADS:
        pages = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.tensor([0, 1]).int(), torch.tensor([64]).int(), 64
        for new, tensor_cores in ((1, False), (1, True), (2, True)):
            begin = time.perf_counter()
            flashinfer_call(normal(1, 4, new, D), *(normal(1, 64, 2, D) for _ in range(2)), pages, tensor_cores)()
            print(
                f"flashinfer, {D} columns, {new} new, tensor cores {tensor_cores}: {time.perf_counter() - begin:.0f} s",
                flush=True,
            )


def line(shape, rounds, seed):
    """A shape's row of the report."""
    case, left_out, graphs, calls = Case(shape, seed), {}, {}, {}  # calls: what graphs read and write lives with them
    for name, make in {"ours": case.ours, **case.peers()}.items():
        try:
            calls[name] = make()
            wrong = case.check(calls[name]())
            torch.cuda.synchronize()
            if not wrong:
                graphs[name] = captured(calls[name])
        except Exception as error:  # a contender that lacks a shape is left out, and the line says so
            wrong = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        if wrong:
            left_out[name] = wrong
    us = {name: statistics.median(t) for name, t in times(graphs, rounds).items()}
    bytes_read = 2 * sum(shape["lens"]) * shape["kv_heads"] * (shape["key_width"] + shape["value_width"])
    row = {**{k: v for k, v in shape.items() if k != "lens"}, "keys": sum(shape["lens"]), "longest": max(shape["lens"])}
    row |= {"floor_us": bytes_read / READ_BYTES_PER_US, "us": us, "left_out": left_out}
    peers = {name: t for name, t in us.items() if name != "ours"}
    if not peers:
        return {**row, "fastest": None, "ratio": None}
    fastest = min(peers, key=peers.get)
    return {**row, "fastest": fastest, "ratio": peers[fastest] / us["ours"] if "ours" in us else LOST}


REGIONS = {
    "batch": {"1": (1, 1), "2 to 8": (2, 8), "9 to 64": (9, 64), "65 to 256": (65, 256)},
    "megabytes": {"below 8": (0, 8), "8 to 64": (8, 64), "64 to 512": (64, 512), "512 and more": (512, math.inf)},
    "group": {"1": (1, 1), "2 to 5": (2, 5), "7 to 16": (7, 16), "71": (71, 71)},
    "key columns": {"64": (64, 64), "80, 96": (80, 96), "128": (128, 128), "192": (192, 192), "256": (256, 256)},
    "lengths": {"equal": "equal", "lognormal": "lognormal", "one long": "one long"},
    "cache": {"dense": (0, 0), "pages": (16, 64)},
    "new tokens": {"1": (1, 1), "2 to 4": (2, 4), "8, 16": (8, 16)},
}


def place_of(row, kind):
    names = {"key columns": "key_width", "cache": "block", "new tokens": "new"}
    return row["floor_us"] * READ_BYTES_PER_US / 1e6 if kind == "megabytes" else row[names.get(kind, kind)]


def summary(rows):
    """Cells of a region: shapes, geometric mean, tenth percentile, worst, shapes whose fastest peer is at the floor."""
    ratios = sorted(row["ratio"] for row in rows)
    near = sum(row["us"][row["fastest"]] <= NEAR_FLOOR * row["floor_us"] for row in rows)
    values = statistics.geometric_mean(ratios), ratios[len(ratios) // 10], ratios[0]
    return [str(len(rows)), *(f"{x:.2f}" for x in values), str(sum(r < 0.95 for r in ratios)), str(near)]


def table(report):
    rows = [row for row in report["rows"] if row["ratio"] is not None]
    left_out = counts(name for row in report["rows"] for name in row["left_out"])
    lines = [
        "# LeanAttention's decode on drawn shapes\n",
        f"{report['device']}, {report['date']}, bfloat16, seed {report['seed']}, {len(rows)} shapes. The fastest peer's time "
        "over ours: above 1, ours is faster.\n",
        f"Fastest peers: {counts(row['fastest'] for row in rows)}. Tried, but wrong or not able to: {left_out}.\n",
        "| region | | shapes | geometric mean | tenth percentile | worst | below 0.95 | peer within 8% of the floor |",
        "|---" * 8 + "|",
        "| " + " | ".join(["all", "", *summary(rows)]) + " |",
    ]
    for kind, parts in REGIONS.items():
        for name, part in parts.items():
            own = [r for r in rows if inside(place_of(r, kind), part)]
            if own:
                lines.append("| " + " | ".join([kind, name, *summary(own)]) + " |")
    lines += [
        "\nThe twenty worst, µs:\n",
        "| B, H/Hkv, D, keys, cache, new | floor | ours | fastest | ratio |",
        "|---" * 5 + "|",
    ]
    for row in sorted(rows, key=lambda r: r["ratio"])[:20]:
        times_of = f"{row['us'].get('ours', math.nan):.1f} | {row['us'][row['fastest']]:.1f} {row['fastest']}"
        lines.append(f"| {title(row)} | {row['floor_us']:.1f} | {times_of} | {row['ratio']:.2f} |")
    return "\n".join(lines) + "\n"


def inside(value, part):
    return value == part if isinstance(part, str) else part[0] <= value <= part[1]


def counts(names):
    found = {}
    for name in names:
        found[name] = found.get(name, 0) + 1
    return ", ".join(f"{name} {n}" for name, n in sorted(found.items(), key=lambda item: -item[1])) or "none"


def title(row):
    heads, width = row["group"] * row["kv_heads"], row["key_width"]
    values = "" if row["value_width"] == width else f"/{row['value_width']}"
    cache = f"pages of {row['block']}" if row["block"] else "dense"
    lengths = f"{row['keys']} {row['lengths']}"
    return f"{row['batch']}, {heads}/{row['kv_heads']}, {width}{values}, {lengths}, {cache}, {row['new']}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=lambda text: int(text, 16), default=0, help="hexadecimal")
    parser.add_argument("--shapes", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--compile", action="store_true", help="FlashInfer's kernels, and nothing else")
    arguments = parser.parse_args()
    if arguments.compile:
        return compile_flashinfer()
    begin = time.perf_counter()
    facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    report = facts | {"seed": f"{arguments.seed:x}", "rounds": arguments.rounds, "rows": []}
    for i, shape in enumerate(itertools.islice(drawn(arguments.seed), arguments.shapes)):
        if time.perf_counter() - begin > arguments.seconds:
            print(f"{i} of {arguments.shapes} shapes in {arguments.seconds:g} s", flush=True)
            break
        row = line(shape, arguments.rounds, i)
        torch.cuda.empty_cache()
        report["rows"].append(row)
        us = ", ".join(f"{name} {t:.1f}" for name, t in row["us"].items())
        print(f"{row['ratio'] or 0:.2f}  {title(row)}: floor {row['floor_us']:.1f}, {us}; {row['left_out'] or ''}", flush=True)
        arguments.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        if any(r["ratio"] is not None for r in report["rows"]):
            arguments.out.with_suffix(".md").write_text(table(report))


if __name__ == "__main__":
    main()
