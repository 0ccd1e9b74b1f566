"""Plots of the linear operators' measurements, from the JSON that linear_attention.py writes.

    python bench/plot_linear_attention.py bench/results/linear_attention_h200.json OUT.svg

Of the sections that it has: time over tokens of ours, flash-linear-attention and the floor, forward and backward;
NormalizedLinearAttention beside flash SDPA; and the memory that forward and backward allocate. It needs matplotlib.
"""

import argparse
import json
import re
from pathlib import Path


def tokens(row):
    return int(re.search(r"N(\d+)", row["case"]).group(1))


def times(panel, rows, title):
    rows = sorted((r for r in rows if r["case"].startswith("B1 H32") and "D128" in r["case"]), key=tokens)
    lines = {"leanfleet": lambda r: next(iter(r["us"].values())), "flash-linear-attention": lambda r: r.get("fla_us"),
             "floor": lambda r: r["floor_us"]}
    for (name, of), style in zip(lines.items(), ("o-", "s--", ":")):
        points = [(tokens(r), of(r) / 1e3) for r in rows if of(r)]
        if points:
            panel.plot(*zip(*points), style, label=name)
    panel.set(title=title, xscale="log", yscale="log", xlabel="tokens", ylabel="ms")
    panel.legend(fontsize=8)


def crossing(panel, rows):
    for name, style in (("forward", "o-"), ("backward", "s-"), ("flash forward", "o--"), ("flash backward", "s--")):
        panel.plot([r["tokens"] for r in rows], [r["us"][name] / 1e3 for r in rows], style, label=name)
    panel.set(title="NormalizedLinearAttention and flash SDPA, " + re.sub(r" N\d+", "", rows[0]["case"]), xscale="log",
              yscale="log", xlabel="tokens", ylabel="ms")
    panel.legend(fontsize=8)


def memory(panel, rows):
    for name, marker in zip(rows[0]["bytes"], "osv", strict=False):
        panel.plot([r["tokens"] for r in rows], [r["bytes"][name] / 2**20 for r in rows], marker + "-", label=name)
    panel.set(title="allocated by forward and backward", xscale="log", yscale="log", xlabel="tokens", ylabel="MiB")
    panel.legend(fontsize=8)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json")
    parser.add_argument("plot")
    args = parser.parse_args()
    import matplotlib
    matplotlib.use("svg")
    from matplotlib import pyplot

    report = json.loads(Path(args.json).read_text())
    sections = {}
    for row in report["rows"]:
        sections.setdefault(row["section"], []).append(row)
    draw = {"forward": lambda panel, rows: times(panel, rows, "CausalLinearDecay forward, B1 H32 D128, bfloat16"),
            "backward": lambda panel, rows: times(panel, rows, "CausalLinearDecayGrad, B1 H32 D128, bfloat16"),
            "crossing": crossing, "memory": memory}
    present = [name for name in draw if name in sections]
    figure, panels = pyplot.subplots(1, len(present), figsize=(5.5 * len(present), 4.5), layout="constrained", squeeze=False)
    for panel, name in zip(panels[0], present, strict=True):
        draw[name](panel, sections[name])
    for panel in panels.flat:
        panel.grid(True, which="major", alpha=0.3)
    figure.suptitle(report["device"])
    figure.savefig(args.plot)


if __name__ == "__main__":
    main()
