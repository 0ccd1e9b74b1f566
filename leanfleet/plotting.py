"""The look of leanfleet's plots: one palette, plain numbers on axes, the message in the title. Needs matplotlib.

    with page("speed.svg", "Decode is on par with the fastest peer", "NVIDIA H200, bfloat16", height=3) as figure:
        axes = figure.subplots()
        ratio_bars(axes, {"batch 1": [("1k tokens", 1.1, "")]})

Colours are Okabe and Ito's, which colour-blind readers tell apart; shapes, dashes or places tell the same things once more.
An .svg is the same, byte for byte, for the same data and version of matplotlib. It has a light and a dark form; the viewer
takes the one that the system's setting asks for, with its own background, so that it is legible on any page.
"""

import contextlib
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

INK, MUTED, GRID, CARD = "#1f2328", "#59636e", "#d8dee4", "#ffffff"
BLUE, RED, GREEN, PURPLE, AMBER, GREY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#9aa4ae"
OURS = BLUE
SERIES = (BLUE, RED, GREEN, PURPLE, AMBER, GREY)
MARKERS = "os^Dv"
DASHES = ("-", "--", "-.", ":")
DARK = {
    INK: "#e6edf3",
    MUTED: "#9198a1",
    GRID: "#30363d",
    CARD: "#0d1117",
    BLUE: "#4aa8e0",
    RED: "#f0803c",
    GREEN: "#2cc295",
    PURPLE: "#dd9cc0",
    AMBER: "#edb33a",
    GREY: "#6e7681",
}
PALE_BLUE, PALE_AMBER, PALE_GREY = "#dcebf7", "#fbe3b8", "#eef0f2"  # of boxes in diagrams
DARK |= {PALE_BLUE: "#16324a", PALE_AMBER: "#55400f", PALE_GREY: "#21262d"}
FONTS = "'DejaVu Sans', Verdana, sans-serif"  # of one width; text stays text, so that it is found and copied
WIDTH = 8.3  # inches: 830 px of a README at its letters' usual size
ROW = 0.235  # inches of a row of bars or points
TITLE_POINTS, NOTE_POINTS, LABEL_POINTS = 12.5, 9, 9
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": LABEL_POINTS,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": LABEL_POINTS,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": GRID,
    "xtick.labelcolor": INK,
    "ytick.color": GRID,
    "ytick.labelcolor": INK,
    "axes.facecolor": "none",
    "figure.facecolor": CARD,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.8,
    "lines.markersize": 6,
    "svg.fonttype": "none",
    "svg.hashsalt": "leanfleet",
    "savefig.facecolor": CARD,
    "hatch.linewidth": 0.8,
}


@contextlib.contextmanager
def page(path: str | Path, title: str, note: str, height: float, width: float = WIDTH) -> Iterator[Any]:
    """A figure with title and note above it, which is written to a file when the block ends.

    path ends in what matplotlib writes: .svg, .png, .pdf. title: what the plot says; note: what was measured, where.
    height, width: inches; those of the head come on top of height. Raises ImportError without matplotlib.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    title = textwrap.fill(title, int(9.3 * width), break_on_hyphens=False)
    note = textwrap.fill(note, int(14.6 * width), break_on_hyphens=False)
    above = 9 + 1.25 * TITLE_POINTS * (1 + title.count("\n"))
    head = above + 5 + 1.3 * NOTE_POINTS * (1 + note.count("\n")) + 6
    total = 72 * height + head
    with rc_context(STYLE):
        figure = Figure(figsize=(width, total / 72), layout="constrained")
        engine: Any = figure.get_layout_engine()
        engine.set(rect=(0.01, 0.01, 0.98, 72 * height / total - 0.01), w_pad=0.04, h_pad=0.04)
        figure.text(0.014, 1 - 9 / total, title, va="top", size=TITLE_POINTS, weight="bold", linespacing=1.2)
        figure.text(0.014, 1 - (above + 3) / total, note, va="top", size=NOTE_POINTS, color=MUTED, linespacing=1.25)
        figure.labels = []  # (axes, annotation) of names at the ends of lines
        yield figure
        _part_labels(figure)
        _save(figure, Path(path))


def _save(figure, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".svg":
        figure.savefig(path, dpi=150)
        return
    figure.savefig(path, metadata={"Date": None})
    path.write_text(with_dark_form(path.read_text().replace("'DejaVu Sans'", FONTS)))


def with_dark_form(svg: str) -> str:
    """An SVG's text with rules that put DARK's colours in place of the light ones where the system asks for dark."""
    found = [(light, dark) for light, dark in DARK.items() if light in svg]
    rules = "".join(
        f'[style*="{what}: {light}"],[{what}="{light}"]{{{what}:{dark}!important}}'
        for light, dark in found
        for what in ("fill", "stroke")
    )
    style = f"<style>@media (prefers-color-scheme:dark){{{rules}}}</style>"
    return re.sub(r"(<svg [^>]*>)", lambda tag: f"{tag[1]}\n {style}", svg, count=1)


# Numbers in words


def tokens(number: int) -> str:
    """1k for 1024 and 1000, 1.5k, 128k; numbers that are no such multiples in full."""
    for unit in (1024, 1000):
        if number >= unit and number * 2 % unit == 0:
            return f"{number / unit:g}k"
    return f"{number:,}"


def times(ratio: float) -> str:
    """A ratio with two digits after the point, one from 10 on: 1.02x, 14.5x."""
    return f"{ratio:.2f}x" if ratio < 9.995 else f"{ratio:.1f}x"


def span(ratios: Sequence[float]) -> str:
    """The least and the largest: 0.97x to 1.07x."""
    least, most = times(min(ratios)), times(max(ratios))
    return least if least == most else f"{least} to {most}"


def verdict(ratio: float, near: float = 0.05) -> str:
    """What a ratio of speeds says, to stand before the name of the other: on par with, 1.31x as fast as."""
    return "on par with" if abs(ratio - 1) <= near else f"{times(ratio)} as fast as"


# Axes


def plain_axis(axis: Any, ticks: Iterable[float], labels: Iterable[str]) -> None:
    """Exactly these ticks, on an axis of matplotlib, with labels as they are."""
    axis.set_ticks(list(ticks), list(labels))
    axis.set_ticks([], minor=True)


def token_axis(axes: Any, numbers: Iterable[int], label: str = "tokens") -> None:
    """A logarithmic horizontal axis with a tick at each number of tokens, but for those too close to the one before."""
    numbers = sorted(set(numbers))
    apart = (numbers[-1] / numbers[0]) ** 0.06
    for number in numbers[:]:
        if any(other < number <= other * apart for other in numbers[: numbers.index(number)]):
            numbers.remove(number)
    axes.set_xscale("log", base=2)
    axes.set_xlabel(label)
    plain_axis(axes.xaxis, numbers, map(tokens, numbers))


def log_ticks(least: float, most: float) -> list[float]:
    """1, 2 and 5 of each power of ten within bounds, and the ones that enclose them."""
    steps = [m * 10.0**e for e in range(-9, 13) for m in (1, 2, 5)]
    first = max((i for i, s in enumerate(steps) if s <= least), default=0)
    last = min((i for i, s in enumerate(steps) if s >= most), default=len(steps) - 1)
    return steps[first : last + 1]


def _number(value):
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def log_axis(axis: Any, values: Sequence[float], unit: str = "") -> None:
    """A logarithmic axis of matplotlib with plain numbers: 0.5, 1, 2, 5, 10."""
    getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
    ticks = log_ticks(min(values), max(values))
    ticks = ticks if len(ticks) < 9 else [t for t in ticks if f"{t:e}"[0] == "1"]
    plain_axis(axis, ticks, (_number(t) + unit for t in ticks))


def ratio_axis(axis: Any, ratios: Sequence[float], log: bool = False, count: int = 6) -> None:
    """About `count` ticks such as 0.9x, 1x, 1.5x, and a line at 1x. axis: matplotlib's, of x or y."""
    from matplotlib.ticker import MaxNLocator

    bounds = [*ratios, 1]
    if log:
        log_axis(axis, bounds, "x")
    else:
        least, most = min(bounds), max(bounds)
        room = 0.04 * (most - least)
        axis.axes.set(**{f"{axis.axis_name}lim": (least - room if least < 1 else 1, most + room)})
        ticks = MaxNLocator(count, steps=[1, 2, 2.5, 5, 10]).tick_values(least, most)
        plain_axis(
            axis,
            [t for t in ticks if least - room <= t <= most + room and t > 0],
            [f"{round(t, 6):g}x" for t in ticks if least - room <= t <= most + room and t > 0],
        )
    line = axis.axes.axvline if axis.axis_name == "x" else axis.axes.axhline
    line(1, color=INK, linewidth=1.2, zorder=3.5, clip_on=False)


def sides(axes: Any, ratios: Sequence[float], better: str = "leanfleet is faster", worse: str = "peer is faster") -> None:
    """Says above a horizontal axis of ratios what the sides of 1x mean."""
    above = axes.get_xaxis_transform()
    for text, sign, where in ((f"{better} \N{RIGHTWARDS ARROW}", 1, "left"), (f"\N{LEFTWARDS ARROW} {worse}", -1, "right")):
        if any(sign * (r - 1) > 0 for r in ratios):
            axes.annotate(
                text,
                (1, 1),
                (4 * sign, 3),
                xycoords=above,
                textcoords="offset points",
                ha=where,
                va="bottom",
                color=MUTED,
                size=8,
            )


# Rows: a line of text on the left, its numbers on the right


def height_of(groups: Mapping[str, Sequence]) -> float:
    """Inches of an axes with these rows, to give to page."""
    return ROW * (sum(map(len, groups.values())) + sum(map(bool, groups)) + 0.6 * len(groups)) + 0.55


def _rows(axes, groups):
    """Places groups {heading: rows} one below the other; returns [(y, row)]. A row begins with its label."""
    y, ticks, headings, placed = 0.0, [], [], []
    for heading, rows in groups.items():
        if heading:
            headings.append(len(ticks))
            ticks.append((y, heading))
            y += 1
        for row in rows:
            ticks.append((y, row[0]))
            placed.append((y, row))
            y += 1
        y += 0.6
    axes.set_ylim(y - 1.1, -0.6)
    axes.set_yticks(*zip(*ticks, strict=True))
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    for number in headings:
        axes.get_yticklabels()[number].set_weight("bold")
    return placed


def ratio_bars(
    axes: Any,
    groups: Mapping[str, Sequence[tuple]],
    better: str = "leanfleet is faster",
    worse: str = "peer is faster",
    log: bool = False,
    all_ratios: Sequence[float] | None = None,
    count: int = 6,
) -> None:
    """Bars from 1x to ratios of speed. groups: {heading: [(label, ratio, what stands behind it)]}; heading "": none.
    better, worse: what the right and the left side mean; all_ratios: those of all axes that are to have one scale."""
    placed = _rows(axes, groups)
    ratios = [row[1] for _, row in placed]
    for y, (_, ratio, note) in placed:
        axes.barh(y, ratio - 1, 0.66, left=1, color=OURS if ratio >= 1 else RED, zorder=3)
        axes.annotate(
            f"{times(ratio)} ({note})" if note else times(ratio),
            (max(ratio, 1), y),
            (5, 0),
            textcoords="offset points",
            va="center",
            size=8.5,
        )
    ratio_axis(axes.xaxis, all_ratios or ratios, log, count)
    sides(axes, ratios, better, worse)


def value_bars(axes: Any, groups: Mapping[str, Sequence[tuple]], text: Callable[[float], str], label: str) -> None:
    """Bars from 0. groups: {heading: [(label, value, ours)]}; text: what stands behind a value; label: of the axis."""
    for y, (_, value, ours) in _rows(axes, groups):
        axes.barh(y, value, 0.66, color=OURS if ours else GREY, zorder=3)
        axes.annotate(
            text(value),
            (value, y),
            (5, 0),
            textcoords="offset points",
            va="center",
            size=8.5,
            weight="bold" if ours else "normal",
        )
    axes.set_xlabel(label)
    axes.xaxis.set_major_formatter(lambda value, _: _number(round(value, 9)))


def ratio_dots(
    axes: Any,
    groups: Mapping[str, Sequence[tuple]],
    names: Collection[str],
    colors: Iterable[str],
    worse: str = "peer is faster",
) -> None:
    """Ratios of several series a row. groups: {heading: [(label, {name: ratio})]}; names: of series, in order."""
    placed = _rows(axes, groups)
    ratios = [r for _, (_, found) in placed for r in found.values()]
    for y, (_, found) in placed:
        axes.plot((1, *found.values()), [y] * (1 + len(found)), color=GRID, linewidth=1.2, zorder=1, solid_capstyle="round")
    for number, (name, color, marker) in enumerate(zip(names, colors, MARKERS, strict=False)):
        aside = 0.24 * (number - (len(names) - 1) / 2)  # so that equal ratios do not hide each other
        points = [(found[name], y + aside) for y, (_, found) in placed if name in found]
        axes.plot(*zip(*points, strict=True), marker, color=color, markeredgecolor=CARD, markersize=7.5, zorder=4, label=name)
    ratio_axis(axes.xaxis, ratios)
    sides(axes, ratios, worse=worse)
    axes.figure.legend(loc="outside lower center", ncols=len(names), handletextpad=0.1)


# Lines with their names at their ends


def lines(axes: Any, series: Mapping[str, Sequence[tuple[float, float]]], colors: Sequence[str] = SERIES) -> None:
    """series: {name: [(x, y)]}. Names stand behind the last points, apart from each other; a series may be empty."""
    for number, (name, points) in enumerate(series.items()):
        if not points:
            continue
        color = colors[number % len(colors)]
        axes.plot(
            *zip(*points, strict=True),
            marker=MARKERS[number % len(MARKERS)],
            linestyle=DASHES[number % len(DASHES)],
            color=color,
            label=name,
            markeredgecolor=CARD,
            markersize=7,
        )
        label = axes.annotate(name, points[-1], (9, 0), textcoords="offset points", va="center", size=LABEL_POINTS)
        axes.figure.labels.append((axes, label))


def _part_labels(figure, gap=12.5):
    """Moves the labels of each axes up or down until `gap` points lie between them."""
    if not figure.labels:
        return
    figure.draw_without_rendering()
    for axes in dict.fromkeys(a for a, _ in figure.labels):
        found = [(axes.transData.transform(label.xy)[1] * 72 / figure.dpi, label) for of, label in figure.labels if of is axes]
        found.sort(key=lambda item: item[0])
        heights = [y for y, _ in found]
        for _ in range(200):
            for i in range(1, len(heights)):
                if (missing := gap - (heights[i] - heights[i - 1])) > 0:
                    heights[i] += missing / 2
                    heights[i - 1] -= missing / 2
        for (y, label), moved in zip(found, heights, strict=True):
            label.set_position((9, moved - y))
