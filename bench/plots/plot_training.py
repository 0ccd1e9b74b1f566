"""Plots of the training runs, from the JSON that train_parity.py and train_scale.py write. They need matplotlib.

python -m bench.plots.plot_training parity bench/results/train_parity_h200.json OUT.svg
python -m bench.plots.plot_training speed bench/results/train_speed_h200.json OUT.svg
python -m bench.plots.plot_training scale SCALE.json OUT.svg              of train_scale train
python -m bench.plots.plot_training scale_speed SPEED.json OUT.svg        of train_scale speed
"""

import argparse
import json
import statistics
from pathlib import Path

from bench.models import train_scale
from leanfleet import plotting

WIDTH = 25  # steps that a point of a curve is the mean of
WARMUP = 100  # steps
BEGIN = 0.1  # of a run's tokens: what comes before it would take the scale
NAMES = {
    "leanfleet": "leanfleet",
    "flash SDPA": "flash SDPA (softmax)",
    "fla": "flash-linear-attention",
    "pytorch": "plain PyTorch, in chunks",
}
WAYS = {  # of train_scale
    "ours": "leanfleet",
    "softmax": "softmax",
    "fla": "flash-linear-attention",
    "fla-unit": "flash-linear-attention, unit rows",
    "ours-gated": "leanfleet, gated",
    "simple-gla": "flash-linear-attention, gated",
    "gla": "gated linear attention (fla)",
    "pytorch": "plain PyTorch, in chunks",
}


def smooth(losses):
    return [statistics.fmean(losses[i : i + WIDTH]) for i in range(0, len(losses) - WIDTH + 1, WIDTH)]


def parity(result, out):
    """Does training with the kernels follow training with PyTorch?"""
    curves = {name: [smooth(c) for c in run["losses"]] for name, run in result["runs"].items()}
    judge = curves["PyTorch float32"]
    steps = [WIDTH * i + WIDTH / 2 for i in range(len(judge[0]))]
    noise = result["agreement"]["noise"]
    largest = {
        name: max(
            abs(a - b) for ours, theirs in zip(found, judge) for a, b in zip(ours[WARMUP // WIDTH :], theirs[WARMUP // WIDTH :])
        )
        for name, found in curves.items()
    }
    title = (
        f"Trained with the kernels in bfloat16, the loss stays within {largest['leanfleet bfloat16']:.4f} of PyTorch's; "
        f"another seed moves it by {noise:.3f}"
    )
    note = (
        f"{result['device']}, {result['date']}. A four-layer model over bytes, {len(judge)} seeds for each of three "
        f"implementations; means of {WIDTH} steps. Differences count from step {WARMUP} on; in float32 they are "
        f"{largest['leanfleet float32']:.6f} at most."
    )
    with plotting.page(out, title, note, 4.6) as figure:
        top, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.25))
        low, high = ([pick(values) for values in zip(*judge)] for pick in (min, max))
        top.fill_between(steps, low, high, color=plotting.GREY, linewidth=0)
        for name, color, style in (("PyTorch float32", plotting.INK, "-"), ("leanfleet bfloat16", plotting.BLUE, "--")):
            top.plot(steps, [statistics.fmean(values) for values in zip(*curves[name])], style, color=color, linewidth=1.6)
        top.axhline(result["bigram_loss"], color=plotting.MUTED, linewidth=1, linestyle=":")
        top.annotate(
            "a bigram model",
            (steps[-1], result["bigram_loss"]),
            (0, 3),
            textcoords="offset points",
            ha="right",
            va="bottom",
            color=plotting.MUTED,
        )
        top.set(title="loss, nats a byte: PyTorch (solid), the kernels in bfloat16 (dashes on it), range of the seeds (grey)")
        below.axhspan(-noise, noise, color=plotting.GRID, linewidth=0)
        below.annotate(
            "standard deviation between seeds",
            (steps[-1], noise),
            (0, -4),
            textcoords="offset points",
            ha="right",
            va="top",
            color=plotting.MUTED,
        )
        for number, (ours, theirs) in enumerate(zip(curves["leanfleet bfloat16"], judge)):
            below.plot(
                steps,
                [a - b for a, b in zip(ours, theirs)],
                plotting.DASHES[number],
                linewidth=1.3,
                color=(plotting.BLUE, plotting.RED, plotting.GREEN)[number % 3],
                label=f"seed {number}",
            )
        below.set(
            title="loss of the kernels in bfloat16 less PyTorch's of the same seed",
            xlabel="step",
            ylim=(-1.25 * noise, 1.25 * noise),
            xlim=(0, result["steps"]),
        )
        figure.legend(loc="outside lower center", ncols=len(judge))


def apart(result):
    """By how much the rounds of a row differ at most, as a share of their median."""
    return max((max(r["rounds"]) - min(r["rounds"])) / r["tokens_per_second"] for r in result["rows"] if "rounds" in r)


def speed(result, out):
    """How fast does a small model train with each attention?"""
    groups, ratios = {}, {}
    for context, mode in dict.fromkeys((r["context"], r.get("mode")) for r in result["rows"]):
        found = {
            r["attention"]: r["tokens_per_second"]
            for r in result["rows"]
            if (r["context"], r.get("mode")) == (context, mode) and "refused" not in r
        }
        heading = f"context of {plotting.tokens(context)} tokens" + (f", each step a {mode}" if mode else "")
        if not found:
            continue
        groups[heading] = [(NAMES[name], value / 1e6, name == "leanfleet") for name, value in found.items()]
        for name, value in found.items():
            if "leanfleet" in found and name != "leanfleet":
                ratios.setdefault(mode, {}).setdefault(name, []).append(found["leanfleet"] / value)

    def compared(mode):
        peers = [(name, ratios[mode][name]) for name in NAMES if name in ratios[mode]][:2]
        first, *more = (f"{plotting.span(found)} the speed of {NAMES[name].split(' (')[0]}" for name, found in peers)
        return " and ".join([first, *(words.replace("the speed", "that") for words in more)])

    title = f"A small model trains at {compared(None)}"
    note = (
        f"{result['device']}, {result['date']}. Four layers, hidden size 256, bfloat16, 16k tokens a step; medians of rounds "
        f"that differ by up to {apart(result):.0%}. In a model this small the host takes most of the time."
    )
    for mode in ratios.keys() - {None}:
        title += f"; with each step a {mode} at {compared(mode)}"
        note = note.replace("the host takes most of the time.", f"the host takes most of the time, but for a {mode}.")
    with plotting.page(out, title, note, plotting.height_of(groups)) as figure:
        plotting.value_bars(figure.subplots(), groups, lambda value: f"{value:.2f}", "million tokens a second")


def measured(result, key="tokens_per_second"):
    return [row for row in result["rows"] if key in row]


def way_name(row):
    return WAYS[row["way"]] + (f" ({train_scale.run_words(row)})" if "run" in row else "")


def scale_title(result, context):
    """What it says of ours beside the others, if it is there."""
    rows = measured(result)
    ours = next((row for row in rows if row["way"] == "ours"), None)
    others = [row for row in rows if row is not ours]
    if ours is None or not others:
        return f"Validation loss by tokens and by time, context {context}"
    speeds = [
        f"{plotting.times(ours['steady_tokens_per_second'] / row['steady_tokens_per_second'])} the speed of {WAYS[row['way']]}"
        for row in others
        if "run" not in row  # another day's clock is another one
    ]
    end = "after the same tokens" if all(row["tokens"] == ours["tokens"] for row in others) else "at the end"
    losses = {WAYS[row["way"]]: row["final_validation"] for row in (ours, *others) if row["final_validation"] is not None}
    trains = f"leanfleet trains at {' and '.join(speeds)}; loss" if speeds else "loss"
    return f"At a context of {context}, {trains} {end}: {', '.join(f'{name} {loss:.3f}' for name, loss in losses.items())}"


def scale(result, out):
    """How fast does the loss fall, by tokens and by the clock?"""
    rows = measured(result)
    tokens = result["batch_tokens"] / 1e6  # millions a step
    first = BEGIN * result["steps_planned"]
    note = (
        f"{result['gpus']} x {result['device']}, {result['date']}, {result['arithmetic']}. {result['shape']}'s shape "
        f"({rows[0]['parameters'] / 1e6:.0f}M parameters) over bytes, {result['batch_tokens']:,} tokens a step; the same "
        "weights at the start, text and order. Points: held-out text. Lines: training. The clock starts with a way's first "
        "step; validation is not on it."
    )
    if any("run" in row for row in rows):
        note += " Ways of another run, named in the legend, are not set beside its clock."
    with plotting.page(out, scale_title(result, plotting.tokens(result["context"])), note, 5.2) as figure:
        by_tokens, by_clock = figure.subplots(2, 1)
        for number, row in enumerate(rows):
            look = {"color": plotting.SERIES[number % len(plotting.SERIES)]}
            style, marker = plotting.DASHES[number % len(plotting.DASHES)], plotting.MARKERS[number % len(plotting.MARKERS)]
            for axes, unit in ((by_tokens, "step"), (by_clock, "seconds"))[: 1 if "run" in row else 2]:
                for kind in ("train", "validation"):
                    series = row[kind]
                    points = [
                        (step * tokens if unit == "step" else second - row["setup_seconds"], loss)
                        for step, second, loss in zip(series["step"], series["seconds"], series["loss"])
                        if step >= first and loss is not None
                    ]
                    if not points:
                        continue
                    if kind == "train":
                        axes.plot(*zip(*points), style, linewidth=0.9, alpha=0.75, **look)
                    else:
                        name = way_name(row) if axes is by_tokens else None
                        axes.plot(*zip(*points), marker, markersize=5, markeredgecolor=plotting.CARD, label=name, **look)
        by_tokens.set(title="loss, nats a byte, by millions of tokens", xlim=(0, None))
        by_clock.set(title="the same by seconds of training", xlabel="seconds", xlim=(0, None))
        for axes in (by_tokens, by_clock):
            axes.set_xticks([tick for tick in axes.get_xticks() if tick <= axes.get_xlim()[1]])
        figure.legend(loc="outside lower center", ncols=len(rows) if len(rows) < 4 else 2, handletextpad=0.1)


def scale_speed(result, out):
    """How many tokens a second do larger shapes train?"""
    groups, ratios = {}, {}
    for row in measured(result):
        context = f"{row['shape']}, context {plotting.tokens(row['context'])}"
        groups.setdefault(context, []).append((WAYS[row["way"]], row["tokens_per_second"] / 1000, row["way"] == "ours"))
    for found in groups.values():
        speeds = {name: value for name, value, _ in found}
        for name, value in speeds.items():
            if WAYS["ours"] in speeds and name != WAYS["ours"]:
                ratios.setdefault(name, []).append(speeds[WAYS["ours"]] / value)
    compared = " and ".join(f"{plotting.span(found)} the speed of {name}" for name, found in ratios.items())
    title = f"leanfleet trains at {compared}" if compared else "Tokens a second in training"
    note = (
        f"{result['gpus']} x {result['device']}, {result['date']}, {result['arithmetic']}. Pythia's shapes over bytes; "
        "thousands of tokens a second of all GPUs together, by the median step."
    )
    with plotting.page(out, title, note, plotting.height_of(groups)) as figure:
        plotting.value_bars(figure.subplots(), groups, lambda value: f"{value:,.0f}", "thousand tokens a second")


PLOTS = {"parity": parity, "speed": speed, "scale": scale, "scale_speed": scale_speed}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=PLOTS)
    parser.add_argument("json", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    PLOTS[args.what](json.loads(args.json.read_text()), args.out)


if __name__ == "__main__":
    main()
