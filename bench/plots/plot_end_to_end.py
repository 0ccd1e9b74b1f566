"""Tables and plots of whole models, from the JSON of end_to_end.py, end_to_end_linear.py, generate.py and serving.py.

    python -m bench.plots.plot_end_to_end FILE.json ... [--table OUT.md] [--plots FOLDER [--tag h200]]

The files are of one machine; a file's keys say which script wrote it. A table for each script that has files, and plots (they
need matplotlib): speed and energy of a decode step beside GroupQueryAttention's; speed and memory of linear decoders beside
PyTorch's; tokens a second and time of the prompt of SmolLM2; speed and energy of continuous batching beside padded batches.
"""

import argparse
import json
import math
from pathlib import Path

from leanfleet import plotting

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
    return [
        (name, [r for r in report["rows"] if r["implementation"] == name])
        for name in dict.fromkeys(r["implementation"] for r in report["rows"])
    ]


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
    yield [
        "model",
        "batch",
        "context",
        "ms a step, ours",
        "GroupQueryAttention",
        "speed-up",
        "J a token, ours",
        "GroupQueryAttention",
    ]
    for name, rows in (item for report in reports for item in by_model(report).items()):
        for batch, lengths in batches(rows):
            found = [r for r in rows if (r["batch"], r["lengths"]) == (batch, lengths)]
            steps = [[step(r[kind]) for r in found] for kind in KINDS]
            joules = [[r[kind].get("joules_a_token") for r in found] for kind in KINDS]
            yield [
                name,
                f"{batch} ragged" if lengths == "ragged" else batch,
                listed((r["context"] for r in found), tokens),
                *(listed(times, lambda t: f"{t * 1e3:.2f}") for times in steps),
                listed((theirs / ours for ours, theirs in zip(*steps)), lambda x: f"{x:.2f}"),
                *map(listed, joules),
            ]


def answers_table(reports):
    yield [
        "model",
        "batch",
        "prompt + answer",
        "s of the prompt, ours",
        "GroupQueryAttention",
        "s of the answer, ours",
        "GroupQueryAttention",
        "tokens of the answer a second, ours",
        "GroupQueryAttention",
        "speed-up",
        "J a token, ours",
        "GroupQueryAttention",
        "GiB beyond weights and caches, ours",
        "GroupQueryAttention",
        "the same tokens before a difference",
    ]
    for r in (row for report in reports for row in report["answers"]):
        if "left_out" in r:
            continue
        ours, theirs = (r[kind] for kind in KINDS)
        cells = [
            form(found[key])
            for key, form in (("prompt_seconds", digits), ("answer_seconds", digits), ("tokens_per_second", digits))
            for found in (ours, theirs)
        ]
        yield [
            r["model"],
            f"{r['batch']} ragged" if r["lengths"] == "ragged" else r["batch"],
            f"{tokens(r['prompt'])} + {r['answer']}",
            *cells,
            f"{ours['tokens_per_second'] / theirs['tokens_per_second']:.2f}",
            *(digits(found["joules_a_token"]) for found in (ours, theirs)),
            *(f"{found['bytes_beyond_weights_and_caches'] / 2**30:.2f}" for found in (ours, theirs)),
            r["tokens_before_a_difference"],
        ]


def linear_table(reports):
    yield ["", "prompts", "ms", "the GPU's kernels alone", "ms a step", "GiB beyond the weights"]
    for report in reports:
        for name, rows in implementations(report):
            columns = [
                [scaled(r.get(key), factor) for r in rows]
                for key, factor in (
                    ("prompt_seconds", 1e3),
                    ("kernel_seconds", 1e3),
                    ("step_seconds", 1e3),
                    ("peak_bytes", 2**-30),
                )
            ]
            yield [f"{decoder_of(report)}: {name}", listed((r["prompt"] for r in rows), tokens), *map(listed, columns)]


def generate_table(reports):
    yield ["", "context", "tokens/s", "ms of the prompt"]
    for report in reports:
        for name in runners(report):
            rows = report["speed"]["rows"]
            yield [
                f"{report['model']}: {name}",
                listed((r["context"] for r in rows), tokens),
                listed(r["tokens_per_second"].get(name) for r in rows),
                listed(scaled(r["prompt_seconds"].get(name), 1e3) for r in rows),
            ]


def correctness(report):
    """Lines on what generate.py compared with transformers, and what is to be known of the run."""
    found = report.get("parity", {})
    if shares := found.get("share_of_steps_with_the_token_of_transformers_float32"):
        yield (
            f"{report['model']}: steps of {found['steps_compared']} with the token of transformers in float32: "
            + ", ".join(f"{name} {share:.4f}" for name, share in shares.items())
            + "."
        )
    elif found:
        yield (
            f"{report['model']}: {len(found['steps_where_the_token_differs'])} of {found['steps_compared']} greedy tokens "
            "differ from those of transformers."
        )
    if found := report.get("perplexity"):
        yield (
            f"{report['model']}: perplexity of {found['tokens_scored']} tokens: "
            + ", ".join(f"{name} {value:.4f}" for name, value in found["perplexity"].items())
            + "."
        )
    if note := report.get("note"):
        yield f"{report['model']}: {note}."


def serving_of(report):
    return f"{report['model']}, {report['dtype']}{', steps in CUDA graphs' if report.get('cuda_graphs') else ''}"


def serving_table(reports):
    yield [
        "model",
        "requests, at a time",
        "mean prompt, answer",
        "tokens/s, padded",
        "continuous",
        "speed-up",
        "J a token, padded",
        "continuous",
        "calls, padded",
        "continuous",
        "the same tokens before a difference",
    ]
    for r in reports:
        yield [
            serving_of(r),
            f"{r['requests']}, {r['batch']}",
            f"{r['mean_prompt']}, {r['mean_answer']}",
            *(f"{r[way]['useful_tokens_per_second']:.0f}" for way in WAYS),
            f"{r['speed_up']:.2f}",
            *(digits(r[way].get("joules_per_useful_token")) for way in WAYS),
            *(r[way]["calls"] for way in WAYS),
            f"{r['tokens_before_a_difference']:.3f}",
        ]


TABLES = {
    "softmax": ("A decode step of decoders with softmax attention", softmax_table),
    "answers": ("Whole answers of decoders with softmax attention", answers_table),
    "linear": ("Linear decoders", linear_table),
    "generate": ("SmolLM2 with its weights", generate_table),
    "serving": ("Continuous batching and padded batches", serving_table),
}


def text(scripts):
    lines = []
    for script, reports in scripts.items():
        title, table = TABLES[script]
        header, *rows = table(reports)
        where = dict.fromkeys(f"{r['date']}, {machine(r)}, onnxruntime {r['onnxruntime']}" for r in reports)
        lines += [
            f"## {title}",
            "",
            "; ".join(where) + ".",
            "",
            f"| {' | '.join(header)} |",
            "|---" * len(header) + "|",
            *(f"| {' | '.join(map(str, row))} |" for row in rows),
            "",
        ]
        for report in reports:
            for line in correctness(report) if script == "generate" else [report["note"]] if "note" in report else []:
                lines += [line, ""]
    return "\n".join(lines)


# Plots

RUNNERS = {  # generate.py's names in words
    "leanfleet_cuda_graph": "leanfleet, CUDA graph",
    "leanfleet": "leanfleet",
    "onnxruntime_group_query_attention_cuda_graph": "GroupQueryAttention, CUDA graph",
    "onnxruntime_group_query_attention": "GroupQueryAttention",
    "transformers_exporter_ort_fusions": "transformers' own export",
    "transformers_eager": "transformers, eager",
    "transformers_sdpa": "transformers, SDPA",
}
MODELS = {
    "phi3-medium": "Phi-3-medium",
    "llama3-8b": "Llama-3-8B",
    "llama-1b": "Llama of 1B",
    "smollm2": "SmolLM2-135M",
    "minimax": "MiniMax",
    "retnet": "RetNet",
}


def where(reports, what):
    days = " and ".join(sorted({r["date"] for r in reports}))
    return f"{machine(reports[0])}, onnxruntime {reports[0]['onnxruntime']}, {days}. {what}"


def mean(ratios):
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def side_by_side(out, title, note, panels, better, worse):
    """Bars of ratios, a panel for each of {heading: groups}."""
    ratios = [r for groups in panels.values() for rows in groups.values() for _, r, _ in rows]
    with plotting.page(out, title, note, max(map(plotting.height_of, panels.values())) + 0.3) as figure:
        found = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, (heading, groups) in zip(found, panels.items()):
            plotting.ratio_bars(axes, groups, better, worse, all_ratios=ratios, count=3)
            axes.set_title(heading, pad=18)
        lowest = max(axes.get_ylim()[0] for axes in found)
        for axes in found:
            axes.set_ylim(bottom=lowest)


def by_batch(rows, ratio):
    """{batch in words: [(tokens, ratio, "")]} of a model's rows."""
    groups = {}
    for r in rows:
        words = f"batch {r['batch']}{', ragged' if r['lengths'] == 'ragged' else ''}"
        groups.setdefault(words, []).append((plotting.tokens(r["context"]), ratio(r), ""))
    return groups


def decode_steps(reports, out):
    """How fast is a decode step of a whole model beside GroupQueryAttention's?"""

    def ratio(row):
        return step(row[KINDS[1]]) / step(row[KINDS[0]])

    panels = {MODELS[name]: by_batch(rows, ratio) for report in reports for name, rows in by_model(report).items()}
    ratios = [r for groups in panels.values() for rows in groups.values() for _, r, _ in rows]
    title = (
        f"A decode step of a whole model is {plotting.span(ratios)} as fast as with ONNX Runtime's GroupQueryAttention, "
        f"{plotting.times(mean(ratios))} on average"
    )
    note = where(
        reports,
        "Float16, ONNX Runtime for both, the faster of run and CUDA graph; rows: tokens in the cache. Most "
        "of a step is matrix products, the same for both.",
    )
    side_by_side(out, title, note, panels, "leanfleet is faster", "slower")


def energy(reports, out):
    """How much energy does a decode step take beside GroupQueryAttention's?"""

    def ratio(row):
        return row[KINDS[1]]["joules_a_token"] / row[KINDS[0]]["joules_a_token"]

    panels = {
        MODELS[name]: by_batch([r for r in rows if all("joules_a_token" in r[kind] for kind in KINDS)], ratio)
        for report in reports
        for name, rows in by_model(report).items()
    }
    ratios = [r for groups in panels.values() for rows in groups.values() for _, r, _ in rows]
    title = (
        f"With GroupQueryAttention a token takes {plotting.span(ratios)} the energy that it takes with leanfleet, "
        f"{plotting.times(mean(ratios))} on average"
    )
    note = where(reports, "Joules a token of a decode step, GroupQueryAttention's over leanfleet's; rows: tokens in the cache.")
    side_by_side(out, title, note, panels, "leanfleet takes less", "more")


def pairs(report, key):
    """[(prompt, ours, PyTorch's)] of a linear decoder."""
    mine, theirs = (
        {r["prompt"]: r[key] for r in rows if key in r}
        for name, rows in implementations(report)
        if name in ("leanfleet", "PyTorch with fla")
    )
    return [(n, mine[n], theirs[n]) for n in mine if n in theirs]


def linear_decoders(reports, out):
    """How fast is a linear decoder beside PyTorch with flash-linear-attention?"""
    groups, spans = {}, {}
    for key, what in (("prompt_seconds", "prompt"), ("step_seconds", "step after")):
        for report in reports:
            found = pairs(report, key)
            groups[f"{MODELS[report['kind']]}, {report['layers']} layers: {what}"] = [
                (f"{plotting.tokens(n)} tokens", b / a, f"{digits(a * 1e3)} ms, PyTorch {digits(b * 1e3)} ms")
                for n, a, b in found
            ]
            spans.setdefault(key, []).extend(b / a for _, a, b in found)
    title = (
        f"Linear decoders in ONNX Runtime: prompts {plotting.span(spans['prompt_seconds'])}, steps "
        f"{plotting.span(spans['step_seconds'])} as fast as PyTorch with flash-linear-attention"
    )
    report = reports[-1]
    kernels = pairs(report, "kernel_seconds")[0]
    note = where(
        reports,
        f"Batch 1. The kernels of {MODELS[report['kind']]}'s {plotting.tokens(kernels[0])} prompt alone take "
        f"{digits(kernels[1] * 1e3)} ms, in PyTorch {digits(kernels[2] * 1e3)} ms: the rest is the host's.",
    )
    with plotting.page(out, title, note, plotting.height_of(groups)) as figure:
        plotting.ratio_bars(figure.subplots(), groups, log=True)


def linear_memory(reports, out):
    """How much memory does a prompt of a linear decoder take?"""
    groups, ratios = {}, []
    for report in reports:
        rows = []
        for n, a, b in pairs(report, "peak_bytes"):
            rows += [(f"{plotting.tokens(n)} tokens, leanfleet", a / 2**30, True), ("PyTorch", b / 2**30, False)]
            ratios.append(a / b)
        groups[f"{MODELS[report['kind']]}, {report['layers']} layers"] = rows
    title = f"A prompt in ONNX Runtime takes {plotting.span(ratios)} the memory that PyTorch with flash-linear-attention takes"
    note = where(reports, "GiB at the peak of a prompt beyond the weights, batch 1; ONNX Runtime without memory patterns.")
    with plotting.page(out, title, note, plotting.height_of(groups)) as figure:
        axes = figure.subplots()
        plotting.value_bars(axes, groups, lambda value: f"{digits(value)} GiB", "GiB")


def by_runner(report, key):
    """{context: {runner: value}} in the order of RUNNERS."""
    return {r["context"]: {n: r[key][n] for n in RUNNERS if n in r[key]} for r in report["speed"]["rows"]}


def fastest_others(found):
    return {n: v for n, v in found.items() if not n.startswith("leanfleet")}


def generation(reports, out):
    """How many tokens a second does a small model with its weights generate?"""
    (report,) = reports
    found = by_runner(report, "tokens_per_second")
    ratios = [
        max(v for n, v in row.items() if n.startswith("leanfleet")) / max(fastest_others(row).values())
        for row in found.values()
    ]
    groups = {
        f"after {plotting.tokens(n)} tokens": [(RUNNERS[k], v, k.startswith("leanfleet")) for k, v in row.items()]
        for n, row in found.items()
    }
    model = report["model"].split("-Instruct")[0]
    title = f"{model} generates {plotting.span(ratios)} as many tokens a second as the fastest other way to run it"
    again = [row["tokens_per_second"]["leanfleet"] for row in report.get("speed_again", {"rows": []})["rows"]]
    note = where(
        reports,
        f"{report['model']}, one request. GroupQueryAttention: the same graph in ONNX Runtime with its "
        "operator." + (f" leanfleet in a second run, minutes later: {', '.join(map(digits, again))}." if again else ""),
    )
    with plotting.page(out, title, note, plotting.height_of(groups)) as figure:
        plotting.value_bars(figure.subplots(), groups, digits, "tokens a second")


def first_token(reports, out):
    """How long does a prompt of a small model take?"""
    (report,) = reports
    found = by_runner(report, "prompt_seconds")
    ratios = [
        min(fastest_others(row).values()) / min(v for n, v in row.items() if n.startswith("leanfleet"))
        for row in found.values()
    ]
    slowest = max(v for row in found.values() for v in row.values())
    factor, unit, label = (1, "s", "seconds") if slowest > 10 else (1e3, "ms", "milliseconds")
    groups = {
        f"prompt of {plotting.tokens(n)} tokens": [(RUNNERS[k], v * factor, k.startswith("leanfleet")) for k, v in row.items()]
        for n, row in found.items()
    }
    model = report["model"].split("-Instruct")[0]
    title = f"{model} answers a prompt {plotting.span(ratios)} as fast as the fastest other way to run it"
    note = where(reports, f"{report['model']}, time to the first token, one request.")
    with plotting.page(out, title, note, plotting.height_of(groups)) as figure:
        plotting.value_bars(figure.subplots(), groups, lambda value: f"{digits(value)} {unit}", label)


def served(reports, key, unit, ratio):
    groups = {}
    for r in sorted(reports, key=lambda r: (r["model"], r["batch"], bool(r.get("cuda_graphs")))):
        heading = f"{MODELS[r['model']]}, {r['batch']} at a time, {r['mean_prompt']} + {r['mean_answer']} tokens"
        ours, theirs = (r[way][key] for way in reversed(WAYS))
        label = "steps in CUDA graphs" if r.get("cuda_graphs") else "without graphs"
        groups.setdefault(heading, []).append((label, ratio(ours, theirs), unit(ours, theirs)))
    return groups


def serving(reports, out):
    """How much does continuous batching gain over padded batches?"""
    groups = served(
        reports,
        "useful_tokens_per_second",
        lambda ours, theirs: f"{ours:,.0f} tokens/s, padded {theirs:,.0f}",
        lambda ours, theirs: ours / theirs,
    )
    ratios = [r for rows in groups.values() for _, r, _ in rows]
    title = f"Continuous batching serves {plotting.span(ratios)} as many tokens a second as padded batches"
    note = where(reports, "Requests of unequal length, float16; headings: mean prompt + mean answer. Tokens of both count.")
    with plotting.page(out, title, note, plotting.height_of(groups)) as figure:
        plotting.ratio_bars(figure.subplots(), groups, "continuous batching is faster", "padded is faster")


def serving_energy(reports, out):
    """How much energy does continuous batching save?"""
    groups = served(
        reports,
        "joules_per_useful_token",
        lambda ours, theirs: f"{ours * 1e3:.0f} mJ, padded {theirs * 1e3:.0f} mJ",
        lambda ours, theirs: theirs / ours,
    )
    ratios = [r for rows in groups.values() for _, r, _ in rows]
    title = f"A token of a padded batch takes {plotting.span(ratios)} the energy of one in a continuous batch"
    note = where(reports, "Requests of unequal length, float16; headings: mean prompt + mean answer. Brackets: mJ a token.")
    with plotting.page(out, title, note, plotting.height_of(groups)) as figure:
        axes = figure.subplots()
        plotting.ratio_bars(axes, groups, "continuous batching takes less", "padded takes less")


PICTURES = {  # file: what script_of calls its reports, and what draws it
    "whole_models": ("softmax", decode_steps),
    "whole_models_energy": ("softmax", energy),
    "linear_decoders": ("linear", linear_decoders),
    "linear_decoders_memory": ("linear", linear_memory),
    "smollm2": ("generate", generation),
    "smollm2_prompt": ("generate", first_token),
    "serving": ("serving", serving),
    "serving_energy": ("serving", serving_energy),
}


def plot(scripts, folder, tag="h200"):
    """Draws every picture whose reports there are; returns the files."""
    made = []
    for name, (script, draw) in PICTURES.items():
        if script in scripts:
            made.append(folder / f"{name}_{tag}.svg")
            draw(scripts[script], made[-1])
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--plots", type=Path, metavar="FOLDER")
    parser.add_argument("--tag", default="h200", help="how the names of the plots end: the machine (default: %(default)s)")
    args = parser.parse_args()
    scripts = by_script([json.loads(path.read_text()) for path in args.files])
    if args.table:
        args.table.write_text(text(scripts))
    else:
        print(text(scripts), end="")
    if args.plots:
        plot(scripts, args.plots, args.tag)


if __name__ == "__main__":
    main()
