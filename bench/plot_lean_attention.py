"""Table and plot of LeanAttention's measurements, from the JSON that lean_attention.py writes.

    python bench/plot_lean_attention.py bench/results/lean_attention_h200.json [--table OUT.md] [--plot OUT.svg]

The table has every line's time, floor and ratio to the fastest peer, losses included, and the geometric means over the
lines that have peers. The plot (it needs matplotlib) shows the speed-up over each peer against context, heads and batch.
"""

import argparse
import json
import math
import re
from pathlib import Path

PEERS = ("sdpa", "fa3", "flashinfer")


def best(row, peer):
    """The median of a peer's better mode in µs, or None."""
    found = [t["median"] for name, t in row["us"].items() if name.split("[")[0] == peer]
    return min(found) if found else None


def geometric_mean(ratios):
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def table(data):
    lines = [f"{data['device']}, {data['dtype']}, torch {data['torch']}, CUDA {data['cuda']}; medians of {data['rounds']} "
             f"graph replays in µs, L2 flushed by reading; a graph of one tiny node takes {data['empty_graph_us']:.1f}.",
             "",
             "| case | leanfleet | floor | sdpa | FA3 | FlashInfer | fastest peer / leanfleet |",
             "|---|---|---|---|---|---|---|"]
    notes = list(dict.fromkeys(r["note"] for r in lines_of(data) if "note" in r))
    marks = {note: "*" * (i + 1) for i, note in enumerate(notes)}
    over_best, over_fa3 = [], []
    for row in lines_of(data):
        ours = row["us"]["leanfleet"]["median"]
        peers = [best(row, peer) for peer in PEERS]
        present = [t for t in peers if t is not None]
        ratio = min(present) / ours if present else None
        if ratio and row["case"].startswith(("decode", "ragged")):
            over_best.append(ratio)
            over_fa3.append(peers[1] / ours if peers[1] else math.nan)
        cells = [f"{ours:.1f}", *("-" if t is None else f"{t:.1f}" for t in (row["floor_us"], *peers)),
                 "-" if ratio is None else f"{ratio:.2f}"]
        lines.append(f"| {row['case']}{marks.get(row.get('note'), '')} | " + " | ".join(cells) + " |")
    for note, mark in marks.items():
        lines += ["", mark.replace("*", "\\*") + f" {note}"]
    over_fa3 = [r for r in over_fa3 if not math.isnan(r)]
    lines += ["", f"Geometric mean over the decode and ragged lines: {geometric_mean(over_best):.2f} times the fastest peer"
              + (f", {geometric_mean(over_fa3):.2f} times FA3." if over_fa3 else ".")]
    return "\n".join(lines + more_tables(data)) + "\n"


def lines_of(data):
    return [r for r in data["rows"] if "section" not in r]


def more_tables(data):
    """The reduction's share as LeanAttention's table 2 has it, and the balance of the multiprocessors."""
    splits = [r for r in data["rows"] if r.get("section") == "splits"]
    balance = [r for r in data["rows"] if r.get("section") == "balance"]
    steps = [r for r in lines_of(data) if r["case"].startswith("step ")]
    lines = []
    if steps:
        lines += ["", "Decode steps as models run them, by parts: attention over caches that hold the new token, with new keys "
                  "and values appended in place, with the rotary encoding too; FA3 does all three.", "",
                  "| case | attention | and append | and rotary encoding | FA3 |", "|---" * 5 + "|"]
        for r in steps:
            cells = [r["us"][f"leanfleet{part}"]["median"] for part in (" attention", " append", "")] + [best(r, "fa3")]
            lines.append(f"| {r['case']} | " + " | ".join("-" if t is None else f"{t:.1f}" for t in cells) + " |")
    if splits:
        tokens = list(dict.fromkeys(r["tokens_a_part"] for r in splits))
        lines += ["", "Share of the reduction: units shared by so many multiprocessors against as many more whole units with "
                  "the same tiles a multiprocessor (4 query heads for each of the caches', D128; µs of both in brackets).", "",
                  "| parts of a unit | " + " | ".join(f"{n} tokens a part" for n in tokens) + " |",
                  "|---" * (len(tokens) + 1) + "|"]
        for parts in dict.fromkeys(r["parts"] for r in splits):
            of_parts = {r["tokens_a_part"]: r for r in splits if r["parts"] == parts}
            lines.append(f"| {parts} | " + " | ".join(
                f"{of_parts[n]['share']:.1%} ({of_parts[n]['us']['split']:.1f}, {of_parts[n]['us']['whole']:.1f})"
                for n in tokens) + " |")
    if balance:
        lines += ["", "Balance: tiles of 64 keys of the ranges, and active cycles of the multiprocessors (ncu).", "",
                  "| case | ranges | tiles, least and most | cycles, least, mean, most | mean over most |",
                  "|---|---|---|---|---|"]
        for r in balance:
            c = r["cycles"]
            lines.append(f"| {r['case']} | {r['ranges']} | {r['tiles'][0]}, {r['tiles'][1]} | {c['min']:.0f}, {c['avg']:.0f}, "
                         f"{c['max']:.0f} | {c['avg'] / c['max']:.3f} |")
    return lines


def plot(data, out):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    points = []
    for row in lines_of(data):
        shape = re.fullmatch(r"decode B(\d+) (\d+)/(\d+) D(\d+) ctx (\d+)", row["case"])
        if shape:
            points.append(([int(x) for x in shape.groups()], row))
    figure, panels = pyplot.subplots(1, 3, figsize=(13, 4), sharey=True)
    for panel, (label, axis) in zip(panels, (("context (tokens)", 4), ("query heads", 1), ("batch", 0)), strict=True):
        for peer, marker in zip(PEERS, "osv", strict=True):
            xy = [(shape[axis], best(row, peer) / row["us"]["leanfleet"]["median"])
                  for shape, row in points if best(row, peer)]
            panel.scatter(*zip(*xy, strict=True), marker=marker, label=peer, alpha=0.8)
        panel.axhline(1, color="grey", linewidth=0.8)
        panel.set(xlabel=label, xscale="log", yscale="log")
    panels[0].set_ylabel("speed-up of leanfleet")
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(out, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json")
    parser.add_argument("--table")
    parser.add_argument("--plot")
    args = parser.parse_args()
    data = json.loads(Path(args.json).read_text())
    text = table(data)
    if args.table:
        Path(args.table).write_text(text)
    else:
        print(text, end="")
    if args.plot:
        plot(data, args.plot)


if __name__ == "__main__":
    main()
