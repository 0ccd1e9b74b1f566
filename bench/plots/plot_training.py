"""Plots of the training runs, from the JSON that train_parity.py writes. They need matplotlib.

python -m bench.plots.plot_training parity bench/results/train_parity_h200.json OUT.svg
python -m bench.plots.plot_training speed bench/results/train_speed_h200.json OUT.svg
"""

import argparse
import json
import statistics
from pathlib import Path

from leanfleet import plotting

WIDTH = 25  # steps that a point of a curve is the mean of
WARMUP = 100  # steps
NAMES = {
    "leanfleet": "leanfleet",
    "flash SDPA": "flash SDPA (softmax)",
    "fla": "flash-linear-attention",
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


def speed(result, out):
    """How fast does a small model train with each attention?"""
    groups, ratios = {}, {}
    for context in dict.fromkeys(r["context"] for r in result["rows"]):
        found = {
            r["attention"]: r["tokens_per_second"] for r in result["rows"] if r["context"] == context and "refused" not in r
        }
        groups[f"context of {plotting.tokens(context)} tokens"] = [
            (NAMES[name], value / 1e6, name == "leanfleet") for name, value in found.items()
        ]
        for name, value in found.items():
            ratios.setdefault(name, []).append(found["leanfleet"] / value)
    title = (
        f"A small model trains at {plotting.span(ratios['flash SDPA'])} the speed of flash SDPA and "
        f"{plotting.span(ratios['fla'])} that of flash-linear-attention"
    )
    note = (
        f"{result['device']}, {result['date']}. Four layers, hidden size 256, bfloat16, 16k tokens a step; medians. In a "
        "model this small the host takes most of the time."
    )
    with plotting.page(out, title, note, plotting.height_of(groups)) as figure:
        plotting.value_bars(figure.subplots(), groups, lambda value: f"{value:.2f}", "million tokens a second")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("parity", "speed"))
    parser.add_argument("json", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    {"parity": parity, "speed": speed}[args.what](json.loads(args.json.read_text()), args.out)


if __name__ == "__main__":
    main()
