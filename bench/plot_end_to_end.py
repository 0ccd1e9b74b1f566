"""Tables and plots of whole models, from the JSON of end_to_end.py, end_to_end_linear.py, generate.py and serving.py.

    python bench/plot_end_to_end.py FILE.json ... [--table OUT.md] [--plot OUT.svg]

The files are of one machine; a file's keys say which script wrote it. A table for each script that has files, and two panels
(they need matplotlib): of each model with softmax attention the speed-up of a decode step over GroupQueryAttention's by
context, a line for each batch, and joules a token where they were measured; of each linear decoder and of each file of
generate.py prompts and steps by length; of all files of serving.py tokens a second and joules a token.
"""

import argparse
import json
import math
from pathlib import Path

KINDS = "LeanAttention", "GroupQueryAttention"
WAYS = "padded", "continuous"


def script_of(report):
    if "processor" in report:
        return "generate"
    if "padded" in report:
        return "serving"
    return "linear" if "kind" in report else "answers" if "answers" in report else "softmax"


def by_script(reports):
    return {script: found for script in TABLES if (found := [r for r in reports if script_of(r) == script])}


def step(found):
    return min(found.get("graph_step", found["step"]), found["step"])


def by_model(report):
    models = {}
    for row in report["rows"]:
        if "left_out" not in row:
            models.setdefault(row["model"], []).append(row)
    return models


def batches(rows):
    return dict.fromkeys((r["batch"], r["lengths"]) for r in rows)


def decoder_of(report):
    patterns = ", with memory patterns" if report.get("memory_patterns") else ""
    return f"{report['kind']}, {report['layers']} layers{patterns}"


def implementations(report):
    """[(name, rows)] of a linear decoder."""
    return [(name, [r for r in report["rows"] if r["implementation"] == name])
            for name in dict.fromkeys(r["implementation"] for r in report["rows"])]


def runners(report):
    rows = report.get("speed", {"rows": []})["rows"]
    return dict.fromkeys(name for r in rows for name in r["tokens_per_second"])


def machine(report):
    return report.get("device") or report.get("processor") or "CPU"


# Tables


def tokens(number):
    return f"{number >> 10}k" if number % 1024 == 0 else str(number)


def digits(value):
    """Three digits or more."""
    return "-" if value is None else f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def listed(values, form=digits):
    cells = [form(v) for v in values]
    return " / ".join(cells) if set(cells) != {"-"} else "-"


def scaled(value, factor):
    return None if value is None else value * factor


def softmax_table(reports):
    yield ["model", "batch", "context", "ms a step, ours", "GroupQueryAttention", "speed-up", "J a token, ours",
           "GroupQueryAttention"]
    for name, rows in (item for report in reports for item in by_model(report).items()):
        for batch, lengths in batches(rows):
            found = [r for r in rows if (r["batch"], r["lengths"]) == (batch, lengths)]
            steps = [[step(r[kind]) for r in found] for kind in KINDS]
            joules = [[r[kind].get("joules_a_token") for r in found] for kind in KINDS]
            yield [name, f"{batch} ragged" if lengths == "ragged" else batch, listed((r["context"] for r in found), tokens),
                   *(listed(times, lambda t: f"{t * 1e3:.2f}") for times in steps),
                   listed((theirs / ours for ours, theirs in zip(*steps)), lambda x: f"{x:.2f}"), *map(listed, joules)]


def answers_table(reports):
    yield ["model", "batch", "prompt + answer", "s of the prompt, ours", "GroupQueryAttention", "s of the answer, ours",
           "GroupQueryAttention", "tokens of the answer a second, ours", "GroupQueryAttention", "speed-up", "J a token, ours",
           "GroupQueryAttention", "GiB beyond weights and caches, ours", "GroupQueryAttention",
           "the same tokens before a difference"]
    for r in (row for report in reports for row in report["answers"]):
        if "left_out" in r:
            continue
        ours, theirs = (r[kind] for kind in KINDS)
        cells = [form(found[key]) for key, form in (
            ("prompt_seconds", digits), ("answer_seconds", digits), ("tokens_per_second", digits))
            for found in (ours, theirs)]
        yield [r["model"], f"{r['batch']} ragged" if r["lengths"] == "ragged" else r["batch"],
               f"{tokens(r['prompt'])} + {r['answer']}", *cells,
               f"{ours['tokens_per_second'] / theirs['tokens_per_second']:.2f}",
               *(digits(found["joules_a_token"]) for found in (ours, theirs)),
               *(f"{found['bytes_beyond_weights_and_caches'] / 2**30:.2f}" for found in (ours, theirs)),
               r["tokens_before_a_difference"]]


def linear_table(reports):
    yield ["", "prompts", "ms", "the GPU's kernels alone", "ms a step", "GiB beyond the weights"]
    for report in reports:
        for name, rows in implementations(report):
            columns = [[scaled(r.get(key), factor) for r in rows] for key, factor in
                       (("prompt_seconds", 1e3), ("kernel_seconds", 1e3), ("step_seconds", 1e3), ("peak_bytes", 2**-30))]
            yield [f"{decoder_of(report)}: {name}", listed((r["prompt"] for r in rows), tokens), *map(listed, columns)]


def generate_table(reports):
    yield ["", "context", "tokens/s", "ms of the prompt"]
    for report in reports:
        for name in runners(report):
            rows = report["speed"]["rows"]
            yield [f"{report['model']}: {name}", listed((r["context"] for r in rows), tokens),
                   listed(r["tokens_per_second"].get(name) for r in rows),
                   listed(scaled(r["prompt_seconds"].get(name), 1e3) for r in rows)]


def correctness(report):
    """Lines on what generate.py compared with transformers, and what is to be known of the run."""
    found = report.get("parity", {})
    if shares := found.get("share_of_steps_with_the_token_of_transformers_float32"):
        yield (f"{report['model']}: steps of {found['steps_compared']} with the token of transformers in float32: "
               + ", ".join(f"{name} {share:.4f}" for name, share in shares.items()) + ".")
    elif found:
        yield (f"{report['model']}: {len(found['steps_where_the_token_differs'])} of {found['steps_compared']} greedy tokens "
               "differ from those of transformers.")
    if found := report.get("perplexity"):
        yield (f"{report['model']}: perplexity of {found['tokens_scored']} tokens: "
               + ", ".join(f"{name} {value:.4f}" for name, value in found["perplexity"].items()) + ".")
    if note := report.get("note"):
        yield f"{report['model']}: {note}."


def serving_of(report):
    return f"{report['model']}, {report['dtype']}{', steps in CUDA graphs' if report.get('cuda_graphs') else ''}"


def serving_table(reports):
    yield ["model", "requests, at a time", "mean prompt, answer", "tokens/s, padded", "continuous", "speed-up",
           "J a token, padded", "continuous", "calls, padded", "continuous", "the same tokens before a difference"]
    for r in reports:
        yield [serving_of(r), f"{r['requests']}, {r['batch']}", f"{r['mean_prompt']}, {r['mean_answer']}",
               *(f"{r[way]['useful_tokens_per_second']:.0f}" for way in WAYS), f"{r['speed_up']:.2f}",
               *(digits(r[way].get("joules_per_useful_token")) for way in WAYS), *(r[way]["calls"] for way in WAYS),
               f"{r['tokens_before_a_difference']:.3f}"]


TABLES = {"softmax": ("A decode step of decoders with softmax attention", softmax_table),
          "answers": ("Whole answers of decoders with softmax attention", answers_table),
          "linear": ("Linear decoders", linear_table), "generate": ("SmolLM2 with its weights", generate_table),
          "serving": ("Continuous batching and padded batches", serving_table)}


def text(scripts):
    lines = []
    for script, reports in scripts.items():
        title, table = TABLES[script]
        header, *rows = table(reports)
        where = dict.fromkeys(f"{r['date']}, {machine(r)}, onnxruntime {r['onnxruntime']}" for r in reports)
        lines += [f"## {title}", "", "; ".join(where) + ".", "", f"| {' | '.join(header)} |", "|---" * len(header) + "|",
                  *(f"| {' | '.join(map(str, row))} |" for row in rows), ""]
        for report in reports:
            for line in correctness(report) if script == "generate" else [report["note"]] if "note" in report else []:
                lines += [line, ""]
    return "\n".join(lines)


# Plots


def speed_up(panel, rows, name):
    for batch, lengths in batches(rows):
        points = [(r["context"], step(r[KINDS[1]]) / step(r[KINDS[0]])) for r in rows
                  if (r["batch"], r["lengths"]) == (batch, lengths)]
        panel.plot(*zip(*points), "o-" if lengths == "equal" else "s--", label=f"batch {batch}, {lengths}")
    panel.axhline(1, color="gray", linewidth=0.8)
    panel.set(title=f"{name}: a step, GroupQueryAttention's over ours", xscale="log", xlabel="context")
    panel.legend(fontsize=8)


def energy(panel, rows, name):
    if any("joules_a_token" not in r[kind] for r in rows for kind in KINDS):
        panel.set_axis_off()
        return
    for (batch, lengths), color in zip(batches(rows), ("C0", "C1", "C2", "C3", "C4")):
        if lengths == "ragged":
            continue
        for kind, style in zip(KINDS, ("o-", "s--")):
            points = [(r["context"], r[kind]["joules_a_token"]) for r in rows if (r["batch"], r["lengths"]) == (batch, lengths)]
            panel.plot(*zip(*points), style, color=color, label=f"{kind}, batch {batch}")
    panel.set(title=f"{name}: joules a token", xscale="log", yscale="log", xlabel="context")
    panel.legend(fontsize=8)


def softmax_panels(panels, name, rows):
    speed_up(panels[0], rows, name)
    energy(panels[1], rows, name)


def linear_panels(panels, report):
    for name, rows in implementations(report):
        mine = [r for r in rows if "prompt_seconds" in r]
        for panel, key, factor in zip(panels, ("prompt_seconds", "step_seconds"), (1, 1e3)):
            panel.plot([r["prompt"] for r in mine], [r[key] * factor for r in mine], "o-", label=name)
    panels[0].set(title=f"{decoder_of(report)}: seconds of a prompt", xscale="log", yscale="log", xlabel="tokens")
    panels[1].set(title=f"{decoder_of(report)}: milliseconds of a step", xscale="log", xlabel="tokens before it",
                  ylim=(0, None))
    for panel in panels:
        panel.legend(fontsize=8)


def generate_panels(panels, report):
    for panel, key in zip(panels, ("prompt_seconds", "tokens_per_second")):
        for name in runners(report):
            points = [(r["context"], r[key][name]) for r in report["speed"]["rows"] if name in r[key]]
            if points:
                panel.plot(*zip(*points), "o-", label=name)
        panel.legend(fontsize=8)
    panels[0].set(title=f"{report['model']}: seconds of a prompt", xscale="log", yscale="log", xlabel="tokens")
    panels[1].set(title=f"{report['model']}: tokens a second", xscale="log", xlabel="tokens before it", ylim=(0, None))
    contexts = [r["context"] for r in report["speed"]["rows"]]
    for panel in panels:
        panel.set_xticks(contexts, contexts)
        panel.minorticks_off()


def serving_panels(panels, reports):
    names = ["\n".join([r["model"], r["dtype"], *["CUDA graphs"] * r.get("cuda_graphs", False), f"{r['batch']} at a time",
                        f"{r['mean_prompt']} + {r['mean_answer']}"]) for r in reports]
    titles = {"useful_tokens_per_second": "prompt and answer tokens a second", "joules_per_useful_token": "joules a token"}
    for panel, (key, title) in zip(panels, titles.items()):
        if any(key not in r[way] for r in reports for way in WAYS):
            panel.set_axis_off()
            continue
        for i, way in enumerate(WAYS):
            panel.bar([x + 0.4 * i for x in range(len(reports))], [r[way][key] for r in reports], 0.4, label=way)
        panel.set_xticks([x + 0.2 for x in range(len(reports))], names, fontsize=7)
        panel.set(title=f"Requests of unequal length: {title}", axisbelow=True)
        panel.margins(y=0.25)  # room for the legend
        panel.legend(fontsize=8)


def plot(scripts, out):
    import matplotlib
    matplotlib.use("svg")
    from matplotlib import pyplot

    lines = [(softmax_panels, item) for r in scripts.get("softmax", []) for item in by_model(r).items()]
    lines += [(linear_panels, (r,)) for r in scripts.get("linear", [])]
    lines += [(generate_panels, (r,)) for r in scripts.get("generate", []) if "speed" in r]
    lines += [(serving_panels, (scripts["serving"],))] if "serving" in scripts else []
    figure, panels = pyplot.subplots(len(lines), 2, figsize=(11, 4.2 * len(lines)), layout="constrained", squeeze=False)
    for (draw, what), pair in zip(lines, panels, strict=True):
        draw(pair, *what)
    for panel in panels.flat:
        panel.grid(True, which="major", alpha=0.3)
    figure.suptitle(machine(next(iter(scripts.values()))[0]))
    figure.savefig(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    scripts = by_script([json.loads(path.read_text()) for path in args.files])
    if args.table:
        args.table.write_text(text(scripts))
    else:
        print(text(scripts), end="")
    if args.plot:
        plot(scripts, args.plot)


if __name__ == "__main__":
    main()
