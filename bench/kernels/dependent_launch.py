"""What it gains that LeanAttention may begin while the launch before it ends (programmatic dependent launch).

    python -m bench.kernels.dependent_launch OUT [--rounds 30]

writes OUT.json and OUT.md. A CUDA graph holds the chain that LAYERS decoder layers have around their attention: a product for
queries, keys and values, attention over pages that appends and rotates, a product for its output, each layer with weights and
pages of its own. Microseconds a layer, medians of replays; processes with LEANFLEET_DEPENDENT_LAUNCH at 1 and 0 take turns. A
kernel alone between events shows nothing of this.
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

LAYERS, TURNS, PAGE = 30, 3, 64
HEADS = {"32/8 heads of 128": (32, 8, 128), "32/8 heads of 64": (32, 8, 64), "16/8 heads of 256": (16, 8, 256)}
LINES = [(1, 500), (1, 2000), (1, 8000), (16, 500), (16, 2000), (64, 1000)]  # (batch, context)


def chain(heads, batch, context):
    """A call that runs all layers."""
    H, Hkv, D = heads
    pages = -(-(context + 1) // PAGE)
    table = torch.randperm(batch * pages, device="cuda").int().view(batch, pages)
    lens = torch.full((batch,), context + 1, dtype=torch.int32, device="cuda")
    offsets = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    angles = torch.arange(context + 1, device="cuda")[:, None] / 10_000 ** torch.linspace(0, 1, D // 2, device="cuda")
    normal = lambda *shape: torch.randn(shape, device="cuda", dtype=torch.float16)  # noqa: E731
    first, layers = normal(batch, H * D), []
    for _ in range(LAYERS):
        projected = torch.empty(batch, (H + 2 * Hkv) * D, device="cuda", dtype=torch.float16)
        caches = {name: normal(batch * pages, PAGE, Hkv, D) for name in ("key_cache", "value_cache")}
        inputs = {"query": projected.view(batch, H + 2 * Hkv, D), **caches, "seq_lens": lens, "cu_query_lens": offsets}
        inputs |= {"block_table": table, "cos_cache": angles.cos(), "sin_cache": angles.sin()}
        attrs = {"append": 1, "packed_qkv": 1, "layout": "bnhd"}
        weights = normal(H * D, (H + 2 * Hkv) * D) / (H * D) ** 0.5, normal(H * D, H * D) / (H * D) ** 0.5
        layers.append((projected, Launches("LeanAttention", inputs, attrs, in_place=True), weights))

    def run():
        x = first
        for projected, attention, (before, behind) in layers:
            torch.mm(x, before, out=projected)
            x = attention.run()["output"].view(batch, H * D) @ behind
        return x

    return run


def one_process(rounds):
    """Prints {heads: {line: microseconds a layer}}."""
    found = {}
    for name, heads in HEADS.items():
        for batch, context in LINES:
            graph, taken = captured(chain(heads, batch, context)), []
            for _ in range(rounds + 3):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                taken.append(1000 * begin.elapsed_time(end) / LAYERS)
            found.setdefault(name, {})[f"{batch} x {context}"] = statistics.median(taken[3:])
            del graph
            torch.cuda.empty_cache()
    print(json.dumps(found))


def table(report):
    lines = [f"{report['gpu']}, {report['date']}, float16, pages of {PAGE}, {LAYERS} layers in a graph.", ""]
    lines += [
        "| attention | requests x context | one after the other, µs a layer | may begin early | |",
        "|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        off, on = row["us"]["0"], row["us"]["1"]
        lines.append(f"| {row['heads']} | {row['line']} | {off:.2f} | {on:.2f} | {off / on:.3f}x |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=30)
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
        {
            "heads": heads,
            "line": line,
            "us": {wanted: statistics.median(one[heads][line] for one in runs) for wanted, runs in found.items()},
        }
        for heads, lines in found["0"][0].items()
        for line in lines
    ]
    report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "rows": rows}
    arguments.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    arguments.out.with_suffix(".md").write_text(table(report))
    print(table(report))


if __name__ == "__main__":
    main()
