"""Plots of whole decoders on the GPU, from the JSON that end_to_end.py and end_to_end_linear.py write.

    python bench/plot_end_to_end.py OUT.svg [--softmax end_to_end.json] [--linear end_to_end_linear.json ...]

For each model with softmax attention: speed-up of a decode step over GroupQueryAttention's by context, a line for each batch,
and joules a token where they were measured. For each linear decoder: seconds of a prompt and milliseconds of a step over its
length. It needs matplotlib.
"""

import argparse
import json
from pathlib import Path

KINDS = "LeanAttention", "GroupQueryAttention"


def step(found):
    return min(found.get("graph_step", found["step"]), found["step"])


def batches(rows):
    return dict.fromkeys((r["batch"], r["lengths"]) for r in rows)


def speed_up(panel, rows, name):
    for batch, lengths in batches(rows):
        points = [(r["context"], step(r[KINDS[1]]) / step(r[KINDS[0]])) for r in rows
                  if (r["batch"], r["lengths"]) == (batch, lengths)]
        panel.plot(*zip(*points), "o-" if lengths == "equal" else "s--", label=f"batch {batch}, {lengths}")
    panel.axhline(1, color="gray", linewidth=0.8)
    panel.set(title=f"{name}: a step, GroupQueryAttention's over ours", xscale="log", xlabel="context")
    panel.legend(fontsize=8)


def energy(panel, rows, name):
    for (batch, lengths), color in zip(batches(rows), ("C0", "C1", "C2", "C3", "C4")):
        if lengths == "ragged":
            continue
        for kind, style in zip(KINDS, ("o-", "s--")):
            points = [(r["context"], r[kind]["joules_a_token"]) for r in rows if (r["batch"], r["lengths"]) == (batch, lengths)]
            panel.plot(*zip(*points), style, color=color, label=f"{kind}, batch {batch}")
    panel.set(title=f"{name}: joules a token", xscale="log", yscale="log", xlabel="context")
    panel.legend(fontsize=8)


def linear(panels, report):
    rows = [r for r in report["rows"] if "prompt_seconds" in r]
    for name in dict.fromkeys(r["implementation"] for r in rows):
        mine = [r for r in rows if r["implementation"] == name]
        for panel, key, factor in zip(panels, ("prompt_seconds", "step_seconds"), (1, 1e3)):
            panel.plot([r["prompt"] for r in mine], [r[key] * factor for r in mine], "o-", label=name)
    title = f"{report['kind']}, {report['layers']} layers"
    panels[0].set(title=f"{title}: seconds of a prompt", xscale="log", yscale="log", xlabel="tokens")
    panels[1].set(title=f"{title}: milliseconds of a step", xscale="log", xlabel="tokens before it", ylim=(0, None))
    for panel in panels:
        panel.legend(fontsize=8)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plot", type=Path)
    parser.add_argument("--softmax", type=Path)
    parser.add_argument("--linear", type=Path, nargs="*", default=[])
    args = parser.parse_args()
    import matplotlib
    matplotlib.use("svg")
    from matplotlib import pyplot

    softmax = json.loads(args.softmax.read_text()) if args.softmax else {"rows": []}
    by_model = {}
    for row in softmax["rows"]:
        if "left_out" not in row:
            by_model.setdefault(row["model"], []).append(row)
    reports = [json.loads(path.read_text()) for path in args.linear]
    lines = len(by_model) + len(reports)
    figure, panels = pyplot.subplots(lines, 2, figsize=(11, 4.2 * lines), layout="constrained", squeeze=False)
    for (name, rows), pair in zip(by_model.items(), panels):
        speed_up(pair[0], rows, name)
        if all("joules_a_token" in r[kind] for r in rows for kind in KINDS):
            energy(pair[1], rows, name)
        else:
            pair[1].set_axis_off()
    for report, pair in zip(reports, panels[len(by_model):], strict=True):
        linear(pair, report)
    for panel in panels.flat:
        panel.grid(True, which="major", alpha=0.3)
    figure.suptitle((softmax["rows"] and softmax or reports[0])["device"])
    figure.savefig(args.plot)


if __name__ == "__main__":
    main()
