"""Times GatedDeltaRule on CUDA, prompts and steps, and writes JSON and a table.

    python -m bench.kernels.gated_delta_rule OUT [--rounds 30]

writes OUT.json and OUT.md: medians of a CUDA graph's replay between two events, with the L2 cache flushed by reading before
each. The floor is inputs, outputs and states moved once at 4.25 TB/s, what an H200 reaches in copies. Heads are 16 of queries
and keys and 48 of values, 128 wide.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from bench.kernels.timing import Launches, times

COPY_BYTES_PER_US = 4.25e6
# Requests, tokens, type, and what else is special: "key" is a decay of each key dimension, "v_first" the order of the state.
CASES = [
    (1, 2048, "bfloat16", ""),
    (1, 8192, "bfloat16", ""),
    (4, 2048, "bfloat16", ""),
    (1, 8192, "float16", ""),
    (1, 2048, "float32", ""),
    (1, 2048, "bfloat16", "key"),
    (1, 1, "bfloat16", ""),
    (1, 1, "bfloat16", "v_first"),
    (43, 1, "bfloat16", ""),
    (43, 1, "bfloat16", "v_first"),
    (43, 1, "bfloat16", "key"),
    (43, 4, "bfloat16", ""),
]
Q_HEADS, V_HEADS, WIDTH = 16, 48, 128


def launches_of(requests, tokens, dtype, special):
    kind = getattr(torch, dtype)

    def tensor(heads, *width):
        return torch.randn(requests, heads, tokens, *width, device="cuda")

    inputs = {"query": tensor(Q_HEADS, WIDTH).to(kind), "key": tensor(Q_HEADS, WIDTH).to(kind)}
    inputs |= {"value": tensor(V_HEADS, WIDTH).to(kind)}
    inputs["log_decay"] = -tensor(V_HEADS, *[WIDTH] * (special == "key")).abs() / 8
    inputs["beta"] = torch.rand(requests, V_HEADS, tokens, device="cuda")
    inputs["initial_state"] = torch.randn(requests, V_HEADS, WIDTH, WIDTH, device="cuda")
    attributes = {"normalize_qk": 1, "return_state": 1, "state_v_first": int(special == "v_first")}
    launches = Launches("GatedDeltaRule", inputs, attributes, in_place=True)
    moved = [*inputs.values(), *launches.outputs.values()]
    return launches, sum(t.numel() * t.element_size() for t in moved)


def line(case, rounds):
    launches, moved = launches_of(*case)
    median = statistics.median(times({"ours": launches.capture()}, rounds)["ours"])
    print(case, round(median, 2), flush=True)
    return {"case": case, "floor_us": moved / COPY_BYTES_PER_US, "us": median}


def table(rows):
    lines = ["| requests | tokens | type | | floor µs | ours µs |", "|---" * 6 + "|"]
    for row in rows:
        cells = [*map(str, row["case"]), f"{row['floor_us']:.2f}", f"{row['us']:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    rows = [line(case, arguments.rounds) for case in CASES]
    result = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "rows": rows}
    arguments.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    arguments.out.with_suffix(".md").write_text(table(rows))


if __name__ == "__main__":
    main()
