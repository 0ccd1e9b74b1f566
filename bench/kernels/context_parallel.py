"""Attention of one token over keys that are spread over GPUs of one host, beside one GPU and beside torch.

    python -m bench.kernels.context_parallel STEM [--gpus 2] [--only llama,figure9,drawn] [--seed 0] [--drawn 40] [--rounds 20]

starts a process a GPU and writes STEM.json and STEM.md, after each line too. Lines, where they fit:

- llama: Llama-3-8B's and 70B's attention from 32k to 1M tokens of context;
- figure9: the shapes of LeanAttention's figure 9a, 256 heads of 64, batch 4, from 1k to 1M: 275 GB of keys and values at 1M,
  which four H200s hold;
- heads, batches: its figures 9b and 9c: 32 to 512 heads over 256k tokens, batches of 1 to 32 of 256 heads over 64k;
- drawn: `drawn` shapes drawn from the seed.

Ways:

- one GPU: LeanAttention over all keys, where they fit into 3/4 of its memory;
- context: every rank has a share of the keys; LeanAttention with `world`, which merges what the ranks have;
- NCCL: the same with a communicator that goes through NCCL alone;
- heads: every rank has a share of the heads; LeanAttention and AllGather of outputs, where the key/value heads divide;
- torch: flash SDPA over the same share of the keys, torch.distributed's all_gather of both, MergeAttention.

Each is a CUDA graph of one call in float16, timed by events on all ranks behind a read of 256 MB and an exchange that
lines the ranks up, once all of it is queued; the median over rounds of the slowest rank, µs. Results are checked: errors in
one key/value head against float64 may be twice those of torch's way. `share` is LeanAttention over one rank's share without any
exchange.
"""

import argparse
import datetime
import itertools
import json
import math
import os
import random
import statistics
import tempfile
from pathlib import Path

import torch

from bench.kernels.timing import captured
from leanfleet import communicators
from leanfleet.export import all_gather, lean_attention, merge_attention

HEADS, BATCHES, DRAWN = "figure 9, heads", "figure 9, batches", "drawn"  # names of shapes
SECTIONS = {
    "llama": (
        *(("Llama-3-8B", 1, 32, 8, 128, n << 10) for n in (32, 128, 256, 512, 1024)),
        *(("Llama-3-8B", 16, 32, 8, 128, n << 10) for n in (8, 32, 64)),
        *(("Llama-3-70B", 1, 64, 8, 128, n << 10) for n in (32, 128, 256, 512, 1024)),
    ),
    "figure9": tuple(("figure 9", 4, 256, 256, 64, n << 10) for n in (1, 4, 16, 64, 128, 256, 512, 1024)),
    "heads": tuple((HEADS, 4, n, n, 64, 256 << 10) for n in (32, 64, 128, 160, 256, 512)),
    "batches": tuple((BATCHES, n, 256, 256, 64, 64 << 10) for n in (1, 2, 4, 8, 16, 32)),
    "drawn": (),  # of the seed
}
USUAL = ("llama", "figure9", "drawn")
BYTES = 2  # of a number
WARM = 10  # replays before those that are timed
AHEAD, MOST_AHEAD = 1 << 21, 1 << 26  # cycles that a GPU waits for a round's launches: about 1 ms at first, and at most
SHARE = 0.75  # of a GPU's memory that keys and values may take


def drawn(seed, count, world, memory):
    """Shapes (name, batch, query heads, key/value heads, head size, context) that fit a rank's memory."""
    numbers, found = random.Random(seed), []
    while len(found) < count:
        heads, group = numbers.choice((1, 2, 4, 8, 16, 32)), numbers.choice((1, 2, 3, 4, 7, 8))
        batch, size = numbers.choice((1, 1, 2, 4, 8, 16)), numbers.choice((64, 80, 96, 128, 256))
        context = int(2 ** numbers.uniform(15, 20)) // (64 * world) * 64 * world
        if keys(batch, heads, size, context) / world < min(SHARE * memory, 20e9):
            found.append((DRAWN, batch, heads * group, heads, size, context))
    return found


def shapes_of(arguments, memory):
    """Of the sections that are asked for, those of which a GPU with so much memory holds a share."""
    found = []
    for section in arguments.only:
        shapes = SECTIONS[section] if section != "drawn" else drawn(arguments.seed, arguments.drawn, arguments.gpus, memory)
        found += [s for s in shapes if keys(s[1], s[3], s[4], s[5]) / arguments.gpus < SHARE * memory]
    return found


def keys(batch, heads, size, context):
    """Bytes of keys and values."""
    return 2 * BYTES * batch * heads * size * context


class Clock:
    """Times of a captured call, µs: in each round the slowest rank's, and of the rounds the median."""

    def __init__(self, rounds):
        self.rounds, self.flush = rounds, torch.ones(64 << 20, device="cuda")
        self.one = torch.ones(1, device="cuda")

    def us(self, graph, together=True):
        for _ in range(WARM):
            graph.replay()
        ahead = AHEAD
        while ahead <= MOST_AHEAD:
            times, late = self._timed(graph, together, ahead)
            if not late:
                return statistics.median(times)
            ahead *= 2
        raise RuntimeError(f"launches of a round take the host longer than {MOST_AHEAD} cycles: is the machine busy?")

    def _timed(self, graph, together, ahead):
        """(each round's µs, whether a launch of a round may have come late), the same on all ranks."""
        found, late = [], False
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(self.rounds):
            # With rounds queued behind one another, a rank's host may fall behind its GPU, and more so the more launches a call
            # takes: the GPU then waits for a launch between the events, and the others for this rank in their exchange.
            torch.cuda.synchronize()
            torch.cuda._sleep(ahead)
            self.flush.sum()
            if together:
                torch.distributed.all_reduce(self.one)
                self.one.fill_(1)
            begin.record()
            graph.replay()
            end.record()
            late |= begin.query()  # the GPU was there before all was queued
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) * 1000)
        if not together:
            return found, late
        slowest = torch.tensor([*found, float(late)], device="cuda")
        torch.distributed.all_reduce(slowest, op=torch.distributed.ReduceOp.MAX)
        *found, late = slowest.tolist()
        return found, bool(late)


def flash(query, key, value):
    """(output, lse) of one token by torch's flash attention; query heads of a group are its rows."""
    b, hq, _, d = query.shape
    rows = query.view(b, key.shape[1], -1, d)
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention(rows, key, value, 0.0, False)[:2]
    return output.reshape(b, hq, 1, d), lse.reshape(b, hq, 1)


def ways(world, query, key, value):
    """{name: function} of a rank's share of the keys."""
    both = torch.distributed.all_gather_into_tensor

    def context(communicator="world"):
        return lean_attention(query, key, value, causal=False, world=world, communicator=communicator)[0]

    def by_torch():
        output, lse = flash(query, key, value)
        outputs, lses = (torch.empty(world, *t.shape, dtype=t.dtype, device="cuda") for t in (output, lse))
        both(outputs, output[None].contiguous())
        both(lses, lse[None].contiguous())
        return merge_attention(outputs, lses)[0]

    found = {"context": context, "NCCL": lambda: context("nccl")}
    if query.shape[-1] <= 256:
        found["torch"] = by_torch
    return found


def exact(world, query, key, value):
    """float64 outputs of the first request's first key/value head, over all ranks' keys."""
    group = query.shape[1] // key.shape[1]
    parts = []
    for t in (key, value):
        own = t[0, 0].contiguous()
        whole = torch.empty(world * own.shape[0], own.shape[1], dtype=own.dtype, device="cuda")
        torch.distributed.all_gather_into_tensor(whole, own)
        parts.append(whole.double())
    q = query[0, :group, 0].double()
    return ((q @ parts[0].T) / math.sqrt(q.shape[1])).softmax(-1) @ parts[1]


def line(rank, world, clock, shape):
    """One shape's line of the report."""
    name, batch, hq, hkv, size, context = shape
    torch.manual_seed(17)  # the query is the same on all ranks
    query = torch.randn(batch, hq, 1, size, dtype=torch.float16, device="cuda")
    torch.manual_seed(100 + rank)
    share = [torch.randn(batch, hkv, context // world, size, dtype=torch.float16, device="cuda") for _ in range(2)]
    us, errors = {}, {}
    truth = exact(world, query, *share)
    for way, function in ways(world, query, *share).items():
        outputs = []
        graph = captured(lambda function=function, outputs=outputs: outputs.append(function()))
        output = outputs[-1]  # the graph's own, which a replay writes
        us[way] = clock.us(graph)
        errors[way] = float((output[0, : hq // hkv, 0].double() - truth).abs().max())
        del graph, output, outputs
    graph = captured(lambda share=share: lean_attention(query, *share, causal=False)[0])
    us["share"] = clock.us(graph)
    del graph
    if hkv % world == 0:
        # the same bytes as whole contexts of a share of the heads
        k, v = (t.view(batch, hkv // world, context, size) for t in share)
        q = query[:, : hq // world].contiguous()
        graph = captured(lambda: all_gather(lean_attention(q, k, v, causal=False)[0], world=world))
        us["heads"] = clock.us(graph)
        del graph, k, v
    assert max(errors["context"], errors["NCCL"]) <= 2 * errors["torch"] + 1e-5, (shape, errors)
    del share, function  # the last way has the keys too
    torch.cuda.empty_cache()
    if keys(batch, hkv, size, context) < SHARE * torch.cuda.get_device_properties(rank).total_memory:
        if rank == 0:
            k, v = (torch.randn(batch, hkv, context, size, dtype=torch.float16, device="cuda") for _ in range(2))
            graph = captured(lambda: lean_attention(query, k, v, causal=False)[0])
            us["one GPU"] = clock.us(graph, together=False)
            del graph, k, v
            torch.cuda.empty_cache()
        torch.distributed.barrier()
    row = {"name": name, "batch": batch, "heads": hq, "kv_heads": hkv, "head_size": size, "context": context, "us": us}
    if rank == 0:
        print({**row, "us": {way: round(t, 1) for way, t in us.items()}}, flush=True)
    return row


def work(rank, world, folder, arguments):
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world, device_id=torch.device("cuda", rank)
    )
    id = communicators.exchange_id(Path(folder, "id"), rank, "nccl")
    one = communicators.create("world", rank, world, id=id, engine="nccl", device=rank)
    os.environ["LEANFLEET_DIRECT"] = "0"
    id = communicators.exchange_id(Path(folder, "nccl"), rank, "nccl")
    slow = communicators.create("nccl", rank, world, id=id, engine="nccl", device=rank)
    clock, rows = Clock(arguments.rounds), []
    report = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "gpus": world,
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "seed": arguments.seed,
        "rows": rows,
    }
    for shape in shapes_of(arguments, torch.cuda.get_device_properties(rank).total_memory):
        rows.append(line(rank, world, clock, shape))
        if rank == 0:
            write(report, arguments.stem)
    torch.distributed.barrier()
    torch.cuda.synchronize()
    assert one.direct > 0 and slow.direct == 0
    slow.close()
    one.close()
    torch.distributed.destroy_process_group()


def write(report, stem):
    Path(f"{stem}.json").write_text(json.dumps(report, indent=1) + "\n")
    Path(f"{stem}.md").write_text(table(report))


def geometric(values):
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def table(report):
    """Of the fixed shapes, and a sentence on the drawn ones."""
    names = ("one GPU", "heads", "context", "NCCL", "share", "torch")
    lines = [
        f"Attention of one token on {report['gpus']} x {report['gpu']}, float16, µs. Best: one GPU's time over the better of "
        "heads and context.",
        "",
        f"| shape | batch | heads | context | {' | '.join(names)} | best | torch / context |",
        "|---" * (6 + len(names)) + "|",
    ]
    for row in report["rows"]:
        us = row["us"]
        if row["name"] == DRAWN:
            continue
        best = us["one GPU"] / min(us.get("heads", math.inf), us["context"]) if "one GPU" in us else None
        cells = [row["name"], row["batch"], f"{row['heads']}/{row['kv_heads']}x{row['head_size']}", f"{row['context'] >> 10}k"]
        cells += [f"{us[n]:.1f}" if n in us else "" for n in names]
        cells += ["" if best is None else f"{best:.2f}", f"{us['torch'] / us['context']:.2f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    us = [row["us"] for row in report["rows"] if row["name"] == DRAWN]
    ratios = sorted(u["torch"] / u["context"] for u in us)
    if ratios:
        gains = [u["one GPU"] / u["context"] for u in us if "one GPU" in u]
        slow = sum(ratio < 0.9 for ratio in ratios)
        lines += [
            "",
            f"{len(ratios)} shapes drawn from seed {report['seed']}: torch's time over ours is {geometric(ratios):.2f} in "
            f"geometric mean, {ratios[0]:.2f} to {ratios[-1]:.2f}, below 0.9 for {slow or 'none'}; one GPU's time over ours "
            f"{geometric(gains):.2f}.",
        ]
    return "\n".join(lines) + "\n"


def shape_of(row):
    return row["name"], row["batch"], row["heads"], row["kv_heads"], row["head_size"]


def alone_us(rows, context):
    """Of one GPU over a context, between the measured ones: time is nearly a line in it."""
    known = sorted((r["context"], r["us"]["one GPU"]) for r in rows if "one GPU" in r["us"])
    if context < known[0][0] or context > known[-1][0]:
        return None
    (x, a), (y, b) = next(pair for pair in itertools.pairwise(known) if pair[0][0] <= context <= pair[1][0])
    return a + (b - a) * (context - x) / (y - x)


def growth(reports, predicted=8):
    """Rows {"shape", "context", "us": {GPUs: µs}, "model_us": {GPUs: µs}} of the fixed shapes, from reports of 2 and of 4 GPUs.

    The model: a rank's share takes what one GPU takes over so many keys; the exchange takes e(W) = a + b (W - 1), by the
    medians of context - share on 2 and on 4. model_us has W = 2, 4 and `predicted`, where one GPU was measured over such a
    share.
    """
    left = (HEADS, BATCHES, DRAWN)  # of one context each
    fixed = {r["gpus"]: [row for row in r["rows"] if row["name"] not in left] for r in reports}
    cost = {
        gpus: statistics.median(r["us"]["context"] - r["us"]["share"] for r in rows if r["us"]["share"] > 50)
        for gpus, rows in fixed.items()
    }
    few, many = sorted(cost)
    slope = (cost[many] - cost[few]) / (many - few)
    cost |= {predicted: cost[many] + slope * (predicted - many)}
    shapes, found = dict.fromkeys(map(shape_of, fixed[many])), []
    for shape in shapes:
        rows = {gpus: [r for r in of if shape_of(r) == shape] for gpus, of in fixed.items()}
        for row in rows[many]:
            us = {gpus: r["us"]["context"] for gpus in rows for r in rows[gpus] if r["context"] == row["context"]}
            if "one GPU" in row["us"]:
                us = {1: row["us"]["one GPU"]} | us
            model = {gpus: alone_us(rows[many], row["context"] / gpus) for gpus in cost}
            model = {gpus: us_of + cost[gpus] for gpus, us_of in model.items() if us_of is not None}
            found.append({"shape": shape, "context": row["context"], "us": us, "model_us": model})
    return found, cost


def growth_table(reports, predicted=8):
    rows, cost = growth(reports, predicted)
    few, many, _ = sorted(cost)
    gpu = reports[-1]["gpu"]
    lines = [
        f"Attention of one token over keys that GPUs share, {gpu}, float16, µs, and what {predicted} would take: a rank's "
        "share takes what one GPU takes over as many keys, and the exchange "
        + ", ".join(f"{us:.1f} µs on {gpus}" for gpus, us in cost.items())
        + f" (a line through those of {few} and {many}).",
        "",
        f"| shape | batch | context | 1 | {few} | {many} | model for {few} | for {many} | for {predicted} | {predicted} / 1 |",
        "|---" * 10 + "|",
    ]
    for row in rows:
        name, batch, heads, kv_heads, size = row["shape"]
        us, model = row["us"], row["model_us"]
        speed = f"{us[1] / model[predicted]:.2f}" if 1 in us and predicted in model else ""
        cells = [name, batch, f"{row['context'] >> 10}k"]
        cells += [f"{us[n]:.1f}" if n in us else "" for n in (1, few, many)]
        cells += [f"{model[n]:.1f}" if n in model else "" for n in (few, many, predicted)]
        lines.append("| " + " | ".join(map(str, [*cells, speed])) + " |")
    return "\n".join(lines) + "\n"


def sections(text):
    if unknown := set(found := text.split(",")) - set(SECTIONS):
        raise argparse.ArgumentTypeError(f"no section is named {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stem", metavar="STEM")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument(
        "--only", type=sections, default=list(USUAL), help=f"of {','.join(SECTIONS)} (default: {','.join(USUAL)})"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drawn", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    if (there := torch.cuda.device_count()) < arguments.gpus:
        parser.error(f"--gpus is {arguments.gpus}; this machine has {there}")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (arguments.gpus, folder, arguments), nprocs=arguments.gpus)
    print(table(json.loads(Path(f"{arguments.stem}.json").read_text())), end="")


if __name__ == "__main__":
    main()
