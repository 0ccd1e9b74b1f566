"""Times GatedActivation on CUDA beside PyTorch, eager and compiled, and writes JSON and a table.

    python -m bench.kernels.gated_activation OUT [--rounds 30]

writes OUT.json and OUT.md: medians of a CUDA graph's replay between two events, all contenders of a line in turn, with the
L2 cache flushed by reading before each. The floor is input and output moved once at 4.25 TB/s, what an H200 reaches in copies.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from bench.kernels.timing import COPY_BYTES_PER_US, Launches, captured, times

SHAPES = [(1, 2048, 8192), (1, 64, 8192), (1, 2048, 14_336), (1, 64, 14_336), (1, 1, 8192)]  # (B, N, F)


def silu_gate(x):
    return torch.nn.functional.silu(x[:, :, 0]) * x[:, :, 1]


def line(shape, rounds):
    B, N, F = shape
    x = torch.randn(B, N, 2, F, device="cuda", dtype=torch.float16)
    torch.compiler.reset()  # each shape is compiled for itself
    launches = Launches("GatedActivation", {"gate_up": x}, {"activation": "silu"})
    compiled = torch.compile(silu_gate, dynamic=False)
    graphs = {
        "ours": launches.capture(),
        "torch": captured(lambda: silu_gate(x)),
        "torch.compile": captured(lambda: compiled(x)),
    }
    medians = {name: statistics.median(t) for name, t in times(graphs, rounds).items()}
    print(shape, {name: round(t, 2) for name, t in medians.items()}, flush=True)
    return {"shape": shape, "type": "float16", "floor_us": x.numel() * 3 / COPY_BYTES_PER_US, "us": medians}


def table(rows):
    lines = ["| B, N, F | floor µs | ours µs | torch µs | torch.compile µs |", "|---" * 5 + "|"]
    for row in rows:
        cells = [", ".join(map(str, row["shape"])), *(f"{t:.2f}" for t in (row["floor_us"], *row["us"].values()))]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    rows = [line(shape, arguments.rounds) for shape in SHAPES]
    result = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "rows": rows}
    arguments.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    arguments.out.with_suffix(".md").write_text(table(rows))


if __name__ == "__main__":
    main()
