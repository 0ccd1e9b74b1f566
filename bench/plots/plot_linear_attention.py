"""Plots of the linear operators' measurements, from the JSON that linear_attention.py writes. They need matplotlib.

    python -m bench.plots.plot_linear_attention bench/results/linear_attention_h200.json FOLDER [--tag h200]

Speed beside flash-linear-attention; time over that of the memory traffic alone; speed beside flash SDPA by length; and the
memory that forward and backward allocate.
"""

import argparse
import json
import math
import re
from pathlib import Path

from leanfleet import plotting

COLORS = plotting.BLUE, plotting.RED
FORWARD, BACKWARD = "forward", "backward"
SECTIONS = {  # of the plot of speed: heading, those of rows with an operator's forwards and backwards
    "CausalLinearDecay, bfloat16": (("forward", FORWARD), ("backward", BACKWARD)),
    "NormalizedLinearAttention, bfloat16": (("normalized", None),),
    "CausalLinearDecay, float32 (the peer in TF32)": (("float32", FORWARD),),
    "NormalizedLinearAttention, float32 (the peer in TF32)": (("normalized32", None),),
}


def rows_of(report, section):
    return [r for r in report["rows"] if r["section"] == section]


def sizes(row):
    """batch, heads, tokens, head size of a case."""
    return tuple(int(n) for n in re.match(r"B(\d+) H(\d+) N(\d+) D(\d+)", row["case"]).groups())


def ours(row):
    return next(iter(row["us"].values()))


def direction(row):
    return row["case"].split()[-1]


def mean(ratios):
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def where(report, what):
    return f"{report['device']}, {report['date']}. {what}"


def peers(report, parts):
    """{sizes: {direction: time of flash-linear-attention over ours}}."""
    found = {}
    for section, way in parts:
        for row in rows_of(report, section):
            if row.get("fla_us"):
                found.setdefault(sizes(row), {})[way or direction(row)] = row["fla_us"] / ours(row)
    return dict(sorted(found.items(), key=lambda item: (item[0][2], item[0])))


def speed(report, out):
    """How much faster than flash-linear-attention?"""
    groups = {
        heading: [
            (f"{plotting.tokens(n)} tokens, batch {b}, {h} heads of {d}", found)
            for (b, h, n, d), found in peers(report, parts).items()
        ]
        for heading, parts in SECTIONS.items()
    }
    groups = {heading: rows for heading, rows in groups.items() if rows}
    ratios = {
        half: [r for heading, rows in groups.items() if half in heading for _, found in rows for r in found.values()]
        for half in ("bfloat16", "float32")
    }
    title = (
        f"In bfloat16, linear attention is {plotting.verdict(mean(ratios['bfloat16']))} flash-linear-attention "
        f"on average ({plotting.span(ratios['bfloat16'])}); in float32 it runs at {plotting.span(ratios['float32'])} the "
        "speed of the peer's TF32"
    )
    note = where(
        report,
        "Time of flash-linear-attention's best kernel over leanfleet's, in one process; the mean is "
        "geometric. The peer's float32 products are TF32 by default; leanfleet's are full float32.",
    )
    with plotting.page(out, title, note, plotting.height_of(groups) + 0.3) as figure:
        axes = figure.subplots()
        plotting.ratio_dots(axes, groups, (FORWARD, BACKWARD), COLORS, worse="flash-linear-attention is faster")


def floor(report, out):
    """How far from the time that the memory traffic alone takes?"""
    series, last = {}, {}
    for name, time in (("leanfleet", ours), ("flash-linear-attention", lambda r: r["fla_us"])):
        for way in (FORWARD, BACKWARD):
            rows = sorted((r for r in rows_of(report, way) if sizes(r)[:2] == (1, 32) and sizes(r)[3] == 128), key=sizes)
            points = [(sizes(r)[2], time(r) / r["floor_us"]) for r in rows]
            series[f"{way}, {name}"] = points
            last[way, name] = points[-1]
    length = plotting.tokens(last[FORWARD, "leanfleet"][0])
    title = (
        f"At {length} tokens the forward pass takes {plotting.times(last[FORWARD, 'leanfleet'][1])} the time that its "
        f"memory traffic takes at least, the backward pass {plotting.times(last[BACKWARD, 'leanfleet'][1])}"
    )
    note = where(
        report,
        "CausalLinearDecay, bfloat16, batch 1, 32 heads of 128. Least time: all inputs and outputs once, at "
        f"the speed of a copy, {report['copy_bytes_per_us'] / 1e6:.2f} TB/s.",
    )
    with plotting.page(out, title, note, 3.2) as figure:
        axes = figure.subplots()
        plotting.lines(axes, series, (plotting.BLUE, plotting.BLUE, plotting.RED, plotting.RED))
        plotting.token_axis(axes, [n for points in series.values() for n, _ in points])
        plotting.ratio_axis(axes.yaxis, [y for points in series.values() for _, y in points])
        axes.set(ylabel="time over the least time", ylim=(0, None))


def crossing(report, out):
    """From which length on is linear attention faster than flash attention?"""
    rows = rows_of(report, "crossing")
    series = {
        name: [(r["tokens"], r["us"][f"flash {way}"] / r["us"][way]) for r in rows]
        for name, way in (("forward", FORWARD), ("backward", BACKWARD))
    }
    first, last = ([points[i] for points in series.values()] for i in (0, -1))
    title = (
        f"Linear attention is {plotting.span([y for _, y in first])} as fast as flash attention at "
        f"{plotting.tokens(first[0][0])} tokens and {plotting.span([y for _, y in last])} at "
        f"{plotting.tokens(last[0][0])}"
    )
    batch, heads, _, dim = sizes(rows[0])
    note = where(
        report,
        f"NormalizedLinearAttention against PyTorch's SDPA with flash attention, causal; bfloat16, batch "
        f"{batch}, {heads} heads of {dim}. Time of SDPA over leanfleet's.",
    )
    with plotting.page(out, title, note, 3) as figure:
        axes = figure.subplots()
        plotting.lines(axes, series, COLORS)
        plotting.token_axis(axes, [r["tokens"] for r in rows])
        plotting.ratio_axis(axes.yaxis, [y for points in series.values() for _, y in points], log=True)
        axes.set_ylabel("speed beside flash attention")


def memory(report, out):
    """How much memory do forward and backward allocate?"""
    rows = rows_of(report, "memory")
    names = {"ours": "leanfleet", "flash": "flash SDPA", "linear_attn": "flash-linear-attention"}
    series = {names[key]: [(r["tokens"], r["bytes"][key] / 2**30) for r in rows] for key in rows[0]["bytes"]}
    last = {key: rows[-1]["bytes"][key] / rows[-1]["bytes"]["ours"] for key in ("flash", "linear_attn")}
    title = (
        f"Forward and backward of flash SDPA allocate {plotting.times(last['flash'])} as much memory as leanfleet's, "
        f"those of flash-linear-attention {plotting.times(last['linear_attn'])}"
    )
    batch, heads, _, dim = sizes(rows[0])
    note = where(
        report,
        f"Allocated by forward and backward of NormalizedLinearAttention, bfloat16, batch {batch}, "
        f"{heads} heads of {dim}, beside the inputs; ratios are those at "
        f"{plotting.tokens(rows[-1]['tokens'])} tokens.",
    )
    with plotting.page(out, title, note, 3) as figure:
        axes = figure.subplots()
        plotting.lines(axes, series, (plotting.BLUE, plotting.RED, plotting.GREEN))
        plotting.token_axis(axes, [r["tokens"] for r in rows])
        plotting.log_axis(axes.yaxis, [y for points in series.values() for _, y in points], " GiB")


PICTURES = {
    "linear_attention": speed,
    "linear_attention_floor": floor,
    "linear_attention_crossing": crossing,
    "linear_attention_memory": memory,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tag", default="h200", help="how the names of the plots end: the machine (default: %(default)s)")
    args = parser.parse_args()
    report = json.loads(args.json.read_text())
    for name, draw in PICTURES.items():
        draw(report, args.folder / f"{name}_{args.tag}.svg")


if __name__ == "__main__":
    main()
