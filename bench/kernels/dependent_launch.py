"""What it gains that attention begins while new tokens are appended (programmatic dependent launch).

    python -m bench.kernels.dependent_launch OUT [--rounds 20]

writes OUT.json and OUT.md. A CUDA graph holds the chain that LAYERS layers of Llama-3-8B's shape have: a product for queries,
keys and values, attention of one new token a request over pages, which appends and rotates, and the three other products. Each
layer has weights and pages of its own, so that what a kernel reads first is in no cache, as in a model. Microseconds a layer,
medians of replays; processes with LEANFLEET_DEPENDENT_LAUNCH at 1 and 0 take turns. A kernel alone between events shows nothing
of this.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from bench.kernels.timing import Launches, captured

LAYERS, TURNS, PAGE = 30, 2, 64
HEADS, KV_HEADS, WIDTH = 32, 8, 128
HIDDEN, INTERMEDIATE = 4096, 14336
TABLE, POSITIONS = 512, 32768  # pages of a request's table; rows of the rotary tables
LINES = [(1, 2000), (1, 30_000), (16, 2000), (64, 1000)]  # (batch, context)


def pages_of(context):
    """Of a request with a new token behind so many."""
    return -(-(context + 1) // PAGE)


def step_inputs(batch, context):
    """What attention of one new token a request over pages takes in all layers alike."""
    pages = pages_of(context)
    table = torch.full((batch, TABLE), -1, dtype=torch.int32, device="cuda")
    table[:, :pages] = torch.randperm(batch * pages, device="cuda").int().view(batch, pages)
    angles = torch.arange(POSITIONS, device="cuda")[:, None] / 10_000 ** torch.linspace(0, 1, WIDTH // 2, device="cuda")
    return {
        "seq_lens": torch.full((batch,), context + 1, dtype=torch.int32, device="cuda"),
        "cu_query_lens": torch.arange(batch + 1, dtype=torch.int32, device="cuda"),
        "block_table": table,
        "cos_cache": angles.cos(),
        "sin_cache": angles.sin(),
    }


def chain(batch, context):
    """A call that runs all layers."""
    pages, heads, shared = pages_of(context), HEADS + 2 * KV_HEADS, step_inputs(batch, context)
    normal = lambda *shape: torch.randn(shape, device="cuda", dtype=torch.float16)  # noqa: E731
    first, layers = normal(batch, HIDDEN), []
    for _ in range(LAYERS):
        projected = torch.empty(batch, heads * WIDTH, device="cuda", dtype=torch.float16)
        caches = {name: normal(batch * pages, PAGE, KV_HEADS, WIDTH) for name in ("key_cache", "value_cache")}
        inputs = {"query": projected.view(batch, heads, WIDTH), **caches, **shared}
        attention = Launches("LeanAttention", inputs, {"append": 1, "packed_qkv": 1, "layout": "bnhd"}, in_place=True)
        sizes = ((HIDDEN, heads * WIDTH), (HIDDEN, HIDDEN), (HIDDEN, 2 * INTERMEDIATE), (INTERMEDIATE, HIDDEN))
        layers.append((projected, attention, [normal(*size) / size[0] ** 0.5 for size in sizes]))

    def run():
        x = first
        for projected, attention, (qkv, out, up, down) in layers:
            torch.mm(x, qkv, out=projected)
            x = attention.run()["output"].view(batch, HIDDEN) @ out
            x = (x @ up)[:, :INTERMEDIATE] @ down
        return x

    return run


def one_process(rounds):
    """Prints {line: microseconds a layer}."""
    found = {}
    for batch, context in LINES:
        graph, taken = captured(chain(batch, context)), []
        for _ in range(rounds + 5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            taken.append(1000 * begin.elapsed_time(end) / LAYERS)
        found[f"{batch} x {context}"] = statistics.median(taken[5:])
        del graph
        torch.cuda.empty_cache()
    print(json.dumps(found))


def table(report):
    lines = [
        f"{report['gpu']}, {report['date']}, float16, pages of {PAGE}, {LAYERS} layers of Llama-3-8B's shape in a graph.",
        "",
    ]
    lines += ["| requests x context | one after the other, µs a layer | overlapped | |", "|---|---|---|---|"]
    for row in report["rows"]:
        off, on = row["us"]["0"], row["us"]["1"]
        lines.append(f"| {row['line']} | {off:.1f} | {on:.1f} | {off / on:.3f}x |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        return one_process(arguments.rounds)
    found = {"0": [], "1": []}
    for turn in range(TURNS):
        for wanted in ("0", "1") if turn % 2 == 0 else ("1", "0"):
            command = [sys.executable, "-m", "bench.kernels.dependent_launch", "-", "--rounds", str(arguments.rounds), "--one"]
            environment = os.environ | {"LEANFLEET_DEPENDENT_LAUNCH": wanted}
            told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
            found[wanted].append(json.loads(told.splitlines()[-1]))
    rows = [
        {"line": line, "us": {wanted: statistics.median(one[line] for one in runs) for wanted, runs in found.items()}}
        for line in found["0"][0]
    ]
    report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "rows": rows}
    arguments.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    arguments.out.with_suffix(".md").write_text(table(report))
    print(table(report))


if __name__ == "__main__":
    main()
