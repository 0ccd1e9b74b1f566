"""Plots of the linear operators' measurements, from the JSON that linear_attention.py writes. They need matplotlib.

    python -m bench.plots.plot_linear_attention bench/results/linear_attention_h200.json FOLDER [--tag h200]

Speed beside flash-linear-attention; time over that of the memory traffic alone; speed beside flash SDPA by length; and the
memory that forward and backward allocate. Of the sweeps, in the form of the papers' figures: time by head size and by length,
memory by both (004, figures 2 and 3), speed over flash attention by length (003, figure 2), and bytes moved (004, figure 4).
Only those are drawn whose sections the JSON has.
"""

import argparse
import json
import math
import re
from pathlib import Path

from bench.kernels import linear_attention
from bench.kernels.linear_attention import part
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


# The sweeps

# {contender: (its name in a plot, colour)}; the tables have more of them
CONTENDERS = {
    "NormalizedLinearAttention": ("NormalizedLinearAttention", plotting.BLUE),
    "CausalLinearDecay, decay": ("CausalLinearDecay", plotting.GREEN),
    "chunk_linear_attn": ("fla chunk_linear_attn", plotting.RED),
    "chunk_simple_gla, decay": ("fla chunk_simple_gla", plotting.AMBER),
    "chunk_gla": ("fla chunk_gla", plotting.PURPLE),
    "flash SDPA": ("flash SDPA", plotting.GREY),
    "NormalizedLinearAttention, unit rows": ("NormalizedLinearAttention, unit rows", plotting.INK),
}
# (ours, the fla kernel that computes the like) of these
PAIRS = [pair for pair in linear_attention.PAIRS if CONTENDERS.keys() >= {*pair} and pair[1] != "flash SDPA"]
SIZES = {"heads": "head_size", "lengths": "tokens"}


def sweep(report, section, kind="bfloat16"):
    return sorted((r for r in rows_of(report, section) if r["dtype"] == kind), key=lambda r: r[SIZES[section]])


def contender_lines(axes, rows, number, title):
    """A line for each contender over head sizes or tokens. number: of a row and a contender, or None. Returns the numbers."""
    size, values = SIZES[rows[0]["section"]], []
    for at, (name, (label, color)) in enumerate(CONTENDERS.items()):
        points = [(row[size], y) for row in rows if (y := number(row, name)) is not None and y > 0]
        if points:
            marker, dashes = plotting.MARKERS[at % len(plotting.MARKERS)], plotting.DASHES[at % len(plotting.DASHES)]
            axes.plot(*zip(*points), dashes, marker=marker, color=color, label=label, markeredgecolor=plotting.CARD)
            values += [y for _, y in points]
    axes.set_title(title)
    ticks = [row[size] for row in rows]
    plotting.token_axis(axes, ticks if len(ticks) < 9 else ticks[::-2], size.replace("_", " "))
    return values


def legend(figure):
    """One for all axes, below them."""
    found = {}
    for axes in figure.axes:
        found |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels())}
    labels = [label for label, _ in CONTENDERS.values() if label in found]
    figure.legend([found[label] for label in labels], labels, loc="outside lower center", ncols=3)


def beside_fla(rows):
    """What a sweep says of speed, forward and backward, in a sentence."""
    said = {}
    for ours, peer in PAIRS:
        times = [(part(r, peer, way), part(r, ours, way)) for r in rows for way in (FORWARD, BACKWARD)]
        ratios = [other / own for other, own in times if other and own]
        if ratios:
            said.setdefault(CONTENDERS[ours][0], []).append(f"{plotting.span(ratios)} that of {CONTENDERS[peer][0]}")
    if not said:
        return "Time of forward and backward"
    return "Speed in bfloat16: " + "; ".join(f"{name} {', '.join(ratios)}" for name, ratios in said.items())


def sweep_times(report, out, section, what):
    kinds = [kind for kind in ("bfloat16", "float32") if sweep(report, section, kind)]
    title = beside_fla(sweep(report, section))
    note = where(report, f"{what}. fla: float32 products in TF32; tuned over {report['fla_tuning_of_sweeps']}.")
    with plotting.page(out, title, note, 2.6 * len(kinds) + 0.6) as figure:
        for line, kind in zip(figure.subplots(len(kinds), 2, squeeze=False), kinds):
            for axes, way in zip(line, (FORWARD, BACKWARD)):
                rows = sweep(report, section, kind)

                def milliseconds(row, name, way=way):
                    us = part(row, name, way)
                    return us and us / 1e3

                plotting.log_axis(axes.yaxis, contender_lines(axes, rows, milliseconds, f"{way}, {kind}"), " ms")
        legend(figure)


def heads(report, out):
    """How does time grow with the head size?"""
    batch, number, tokens, _ = sizes(rows_of(report, "heads")[0])
    sweep_times(report, out, "heads", f"{tokens} tokens, batch {batch}, {number} heads")


def lengths(report, out):
    """How does time grow with the length?"""
    batch, number, _, dim = sizes(rows_of(report, "lengths")[0])
    sweep_times(
        report,
        out,
        "lengths",
        f"Batch {batch}, {number} heads of {dim}; lines end where memory ran out or nothing was measured",
    )


def beside_flash(report):
    return [r for r in sweep(report, "lengths") if part(r, "flash SDPA", BACKWARD)]


def over_flash(report, out):
    """From which length on are linear operators faster than flash attention, and by how much?"""
    rows = beside_flash(report)
    batch, number, _, dim = sizes(rows[0])
    last = [part(rows[-1], "flash SDPA", way) / part(rows[-1], "NormalizedLinearAttention", way) for way in (FORWARD, BACKWARD)]
    title = (
        f"At {plotting.tokens(rows[-1]['tokens'])} tokens NormalizedLinearAttention is {plotting.span(last)} as fast as flash "
        "attention"
    )
    what = f"Batch {batch}, {number} heads of {dim}, bfloat16, causal. Time of PyTorch's flash SDPA over each"
    with plotting.page(out, title, where(report, f"{what}."), 3.2) as figure:
        for axes, way in zip(figure.subplots(1, 2), (FORWARD, BACKWARD)):

            def ratio(row, name, way=way):
                own, flash = part(row, name, way), part(row, "flash SDPA", way)
                return flash / own if own and flash and name != "flash SDPA" else None

            plotting.ratio_axis(axes.yaxis, contender_lines(axes, rows, ratio, way), log=True)
        legend(figure)


def sweep_memory(report, out):
    """How much memory do forward and backward allocate, by length and by head size?"""
    found = {section: sweep(report, section) for section in ("lengths", "heads")}
    found = {section: rows for section, rows in found.items() if rows}

    def gigabytes(row, name):
        taken = row["bytes"].get(name, {}).get("both")
        return taken and taken / 2**30

    ratios = {
        peer: [
            gigabytes(r, peer) / gigabytes(r, "NormalizedLinearAttention")
            for rows in found.values()
            for r in rows
            if gigabytes(r, peer) and gigabytes(r, "NormalizedLinearAttention")
        ]
        for peer in ("chunk_linear_attn", "chunk_gla", "flash SDPA")
    }
    said = [f"{CONTENDERS[peer][0]} {plotting.span(r)}" for peer, r in ratios.items() if r]
    title = f"Memory over NormalizedLinearAttention's: {', '.join(said)}" if said else "Memory of forward and backward"
    shapes = {section: sizes(rows[0]) for section, rows in found.items()}
    words = {
        "lengths": lambda b, h, n, d: f"batch {b}, {h} heads of {d}",
        "heads": lambda b, h, n, d: f"batch {b}, {h} heads, {plotting.tokens(n)} tokens",
    }
    note = where(report, "Allocated by forward and backward beside their inputs, bfloat16, by PyTorch's count.")
    with plotting.page(out, title, note, 3.2) as figure:
        for axes, (section, rows) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items()):
            values = contender_lines(axes, rows, gigabytes, words[section](*shapes[section]))
            plotting.log_axis(axes.yaxis, values, " GiB")
        legend(figure)


def moved(report, out):
    """How many bytes of device memory do calls move?"""
    rows = rows_of(report, "moved")
    ours = "NormalizedLinearAttention"

    def groups(way):
        return {
            f"{plotting.tokens(r['tokens'])} tokens": [
                (CONTENDERS[name][0], found[way] / 1e9, name in (ours, "CausalLinearDecay, decay"))
                for name in CONTENDERS
                if (found := r["dram_bytes"] if name == ours else r["peers"].get(name))
            ]
            for r in rows
        }

    times = {
        name: [r["peers"][name][w] / r["dram_bytes"][w] for r in rows if name in r["peers"] for w in (FORWARD, BACKWARD)]
        for name in ("chunk_linear_attn", "chunk_gla", "flash SDPA")
    }
    said = [f"{CONTENDERS[name][0]} {plotting.span(t)}" for name, t in times.items() if t]
    title = f"Bytes moved over NormalizedLinearAttention's: {', '.join(said)}"
    batch, heads, _, dim = sizes(rows[0])
    note = where(
        report, f"Device memory read and written by a call, counted by ncu; bfloat16, batch {batch}, {heads} heads of {dim}."
    )
    with plotting.page(out, title, note, plotting.height_of(groups(FORWARD)) + 0.3) as figure:
        for axes, way in zip(figure.subplots(1, 2), (FORWARD, BACKWARD)):
            plotting.value_bars(axes, groups(way), lambda value: f"{value:.2f}", "GB")
            axes.set_title(way)
            axes.margins(x=0.16)
            axes.tick_params(axis="y", labelleft=way == FORWARD)


# {name: (what draws it, whether a report has what it needs)}
SWEEPS = {
    "linear_heads": (heads, lambda report: rows_of(report, "heads")),
    "linear_lengths": (lengths, lambda report: rows_of(report, "lengths")),
    "linear_over_flash": (over_flash, beside_flash),
    "linear_sweeps_memory": (sweep_memory, lambda report: rows_of(report, "lengths")),
    "linear_moved": (moved, lambda report: any(r.get("peers") for r in rows_of(report, "moved"))),
}
PICTURES = {
    "linear_attention": speed,
    "linear_attention_floor": floor,
    "linear_attention_crossing": crossing,
    "linear_attention_memory": memory,
}


def draw(report, folder, tag):
    """Draws what the report has the sections for; returns the files."""
    sections = {r["section"] for r in report["rows"]}
    wanted = {} if sections <= {"heads", "lengths", "moved", "short"} else dict(PICTURES)
    wanted |= {name: make for name, (make, there) in SWEEPS.items() if there(report)}
    files = {folder / f"{name}_{tag}.svg": make for name, make in wanted.items()}
    for path, make in files.items():
        make(report, path)
    return list(files)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tag", default="h200", help="how the names of the plots end: the machine (default: %(default)s)")
    args = parser.parse_args()
    draw(json.loads(args.json.read_text()), args.folder, args.tag)


if __name__ == "__main__":
    main()
