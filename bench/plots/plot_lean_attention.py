"""Table and plots of LeanAttention's measurements, from the JSON that lean_attention.py writes.

    python -m bench.plots.plot_lean_attention bench/results/lean_attention_h200.json [--table OUT.md] [--plots FOLDER]

Of `--only quantised` and `drawn_quantised`'s JSON it makes a table of those alone. The table has every line's time, floor and
ratio to the fastest peer, losses included, and the geometric means over the lines that have peers. The plots (they need
matplotlib) show the speed beside each peer: of decode attention, of whole decode steps, of prompts.
"""

import argparse
import json
import math
import re
from pathlib import Path

from leanfleet import plotting

NAMES = {"sdpa": "PyTorch SDPA", "fa3": "FlashAttention 3", "flashinfer": "FlashInfer"}
PEERS = tuple(NAMES)


def best(row, peer):
    """The median of a peer's better mode in µs, or None."""
    found = [t["median"] for name, t in row["us"].items() if name.split("[")[0] == peer]
    return min(found) if found else None


def geometric_mean(ratios):
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def table(data):
    lines = [
        f"{data['device']}, {data['dtype']}, torch {data['torch']}, CUDA {data['cuda']}; medians of {data['rounds']} "
        f"graph replays in µs, L2 flushed by reading; a graph of one tiny node takes {data['empty_graph_us']:.1f}.",
        "",
        "| case | leanfleet | floor | sdpa | FA3 | FlashInfer | fastest peer / leanfleet |",
        "|---|---|---|---|---|---|---|",
    ]
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
        cells = [
            f"{ours:.1f}",
            *("-" if t is None else f"{t:.1f}" for t in (row["floor_us"], *peers)),
            "-" if ratio is None else f"{ratio:.2f}",
        ]
        lines.append(f"| {row['case']}{marks.get(row.get('note'), '')} | " + " | ".join(cells) + " |")
    for note, mark in marks.items():
        lines += ["", mark.replace("*", "\\*") + f" {note}"]
    over_fa3 = [r for r in over_fa3 if not math.isnan(r)]
    lines += [
        "",
        f"Geometric mean over the decode and ragged lines: {geometric_mean(over_best):.2f} times the fastest peer"
        + (f", {geometric_mean(over_fa3):.2f} times FA3." if over_fa3 else "."),
    ]
    return "\n".join(lines + more_tables(data)) + "\n"


# By what the JSON calls a contender; scales are per token where a column does not say otherwise.
QUANTISED_COLUMNS = {
    "leanfleet": "int8",
    "leanfleet per channel": "int8 per channel",
    "leanfleet per tensor": "int8 per tensor",
    "leanfleet step": "int8 with append, RoPE",
    "leanfleet fp8": "fp8",
    "leanfleet fp8 per tensor": "fp8 per tensor",
    "leanfleet int8/fp8": "int8/fp8",
    "leanfleet int4": "int4",
    "leanfleet 16 bits": "16 bits",
    "xqa fp8": "XQA fp8",
}
# (heading, one contender, another): the time of the first over that of the second
QUANTISED_RATIOS = (
    ("XQA / int8", "xqa fp8", "leanfleet"),
    ("XQA / fp8 per tensor", "xqa fp8", "leanfleet fp8 per tensor"),
    ("16 bits / int8", "leanfleet 16 bits", "leanfleet"),
    ("int4 / int8", "leanfleet int4", "leanfleet"),
)


def quantised_table(data):
    """Decode steps over paged quantised caches by type and kind of scales, beside bfloat16 caches and FlashInfer's XQA."""
    headings = [*QUANTISED_COLUMNS.values(), *(heading for heading, _, _ in QUANTISED_RATIOS)]
    lines = [
        f"{data['device']}, {data['date']}, queries in {data['dtype']}; medians of {data['rounds']} graph replays in µs, "
        "L2 flushed by reading. Scales are per token where a column does not say otherwise. The floor is the bytes of int8 "
        "caches and their scales over 4.6 TB/s.",
        "",
        "| case | floor | " + " | ".join(headings) + " |",
        "|---" * (len(headings) + 2) + "|",
    ]
    seen = {heading: [] for heading, _, _ in QUANTISED_RATIOS}
    for row in data["rows"]:
        us = {name: row["us"].get(name, {}).get("median") for name in QUANTISED_COLUMNS}
        cells = [f"{row['floor_us']:.1f}", *("-" if t is None else f"{t:.1f}" for t in us.values())]
        for heading, one, other in QUANTISED_RATIOS:
            ratio = us[one] / us[other] if us[one] and us[other] else None
            seen[heading] += [ratio] if ratio else []
            cells.append("-" if ratio is None else f"{ratio:.2f}")
        drawn = " (drawn)" if "seed" in row else ""
        lines.append(f"| {row['case'].removeprefix('quantised ')}{drawn} | " + " | ".join(cells) + " |")
    means = ", ".join(f"{heading} {geometric_mean(ratios):.2f}" for heading, ratios in seen.items() if ratios)
    return "\n".join([*lines, "", f"Geometric means: {means}."]) + "\n"


PROMPT_COLUMNS = {
    "leanfleet": "int8",
    "leanfleet fp8": "fp8",
    "leanfleet int8/fp8": "int8/fp8",
    "leanfleet int4": "int4",
    "leanfleet per channel": "int8 per channel",
    "leanfleet 16 bits": "16 bits",
}


def quantised_prompts_table(data):
    """Whole prompts over paged quantised caches, by type, beside bfloat16 caches."""
    headings = [*PROMPT_COLUMNS.values(), "16 bits / int8"]
    lines = [
        f"{data['device']}, {data['date']}, queries in {data['dtype']}; medians of graph replays in µs, "
        "L2 flushed by reading. Scales are per token where a column does not say otherwise; all keys and values are in the "
        "caches.",
        "",
        "| case | " + " | ".join(headings) + " |",
        "|---" * (len(headings) + 1) + "|",
    ]
    for row in data["rows"]:
        us = [row["us"][name]["median"] for name in PROMPT_COLUMNS]
        cells = [*(f"{t:.0f}" for t in us), f"{row['speedup_over_16_bits']:.2f}"]
        lines.append(f"| {row['case'].removeprefix('quantised prompt ')} | " + " | ".join(cells) + " |")
    mean = geometric_mean([row["speedup_over_16_bits"] for row in data["rows"]])
    return "\n".join([*lines, "", f"Geometric mean of 16 bits / int8: {mean:.2f}."]) + "\n"


def lines_of(data):
    return [r for r in data["rows"] if "section" not in r]


def more_tables(data):
    """The reduction's share as LeanAttention's table 2 has it, and the balance of the multiprocessors."""
    splits = [r for r in data["rows"] if r.get("section") == "splits"]
    balance = [r for r in data["rows"] if r.get("section") == "balance"]
    steps = [r for r in lines_of(data) if r["case"].startswith("step ")]
    lines = []
    if steps:
        lines += [
            "",
            "Decode steps as models run them, by parts: attention over caches that hold the new token, with new keys "
            "and values appended in place, with the rotary encoding too; FA3 does all three.",
            "",
            "| case | attention | and append | and rotary encoding | FA3 |",
            "|---" * 5 + "|",
        ]
        for r in steps:
            cells = [r["us"][f"leanfleet{part}"]["median"] for part in (" attention", " append", "")] + [best(r, "fa3")]
            lines.append(f"| {r['case']} | " + " | ".join("-" if t is None else f"{t:.1f}" for t in cells) + " |")
    if splits:
        tokens = list(dict.fromkeys(r["tokens_a_part"] for r in splits))
        lines += [
            "",
            "Share of the reduction: units shared by so many multiprocessors against as many more whole units with "
            "the same tiles a multiprocessor (4 query heads for each of the caches', D128; µs of both in brackets).",
            "",
            "| parts of a unit | " + " | ".join(f"{n} tokens a part" for n in tokens) + " |",
            "|---" * (len(tokens) + 1) + "|",
        ]
        for parts in dict.fromkeys(r["parts"] for r in splits):
            of_parts = {r["tokens_a_part"]: r for r in splits if r["parts"] == parts}
            lines.append(
                f"| {parts} | "
                + " | ".join(
                    f"{of_parts[n]['share']:.1%} ({of_parts[n]['us']['split']:.1f}, {of_parts[n]['us']['whole']:.1f})"
                    for n in tokens
                )
                + " |"
            )
    if balance:
        lines += [
            "",
            "Balance: tiles of 64 keys of the ranges, and active cycles of the multiprocessors (ncu).",
            "",
            "| case | ranges | tiles, least and most | cycles, least, mean, most | mean over most |",
            "|---|---|---|---|---|",
        ]
        for r in balance:
            c = r["cycles"]
            lines.append(
                f"| {r['case']} | {r['ranges']} | {r['tiles'][0]}, {r['tiles'][1]} | {c['min']:.0f}, {c['avg']:.0f}, "
                f"{c['max']:.0f} | {c['avg'] / c['max']:.3f} |"
            )
    return lines


def fastest(row):
    """The fastest peer's time over ours, or None."""
    found = [t for t in (best(row, peer) for peer in PEERS) if t is not None]
    return min(found) / ours(row) if found else None


def ours(row):
    return row["us"]["leanfleet"]["median"]


def where(data, what):
    return f"{data['device']}, {data['dtype']}, {data['date']}. {what}"


def shape(row):
    """A case's heads, tokens and rest in words, from its name; and its tokens, the mean of ragged ones."""
    name = row["case"]
    batch, heads, kv_heads, dim = (int(n) for n in re.search(r"B(\d+) (\d+)/(\d+) D(\d+)", name).groups())
    total = re.search(r"total (\d+)", name)
    length = int(total.group(1)) // batch if total else int(re.search(r"(?:ctx|N) (\d+)", name).group(1))
    words = f"{plotting.tokens(length)}, " if not total else f"{round(length, -3) // 1000}k on average, ragged, "
    return f"{words}batch {batch}, {heads}/{kv_heads} heads of {dim}", length


def cases(data, *kinds):
    """[(words, tokens, row)] of the cases of these kinds that have peers, by tokens."""
    found = [(*shape(r), r) for r in lines_of(data) if r["case"].split()[0] in kinds and fastest(r)]
    return sorted(found, key=lambda case: case[1])


def decode(data, out):
    """How fast is the attention of a decode step beside its peers?"""
    found = cases(data, "decode", "ragged")
    limit = 4096
    long, short = ([fastest(r) for _, n, r in found if (n >= limit) == above] for above in (True, False))
    title = (
        f"From {plotting.tokens(limit)} tokens on, decode attention is {plotting.verdict(geometric_mean(long))} the "
        f"fastest peer ({plotting.span(long)}); at {plotting.tokens(min(n for _, n, _ in found))}: {plotting.span(short)}"
    )
    rows = {
        "tokens in the cache": [(words, {NAMES[p]: best(r, p) / ours(r) for p in PEERS if best(r, p)}) for words, _, r in found]
    }
    note = where(
        data,
        "Time of a peer over leanfleet's for one new token a request: medians of CUDA graph replays out of a "
        "cold L2; FlashAttention 3 and FlashInfer in the better of their two modes.",
    )
    with plotting.page(out, title, note, plotting.height_of(rows) + 0.3) as figure:
        plotting.ratio_dots(figure.subplots(), rows, NAMES.values(), (plotting.RED, plotting.GREEN, plotting.PURPLE))


def steps(data, out):
    """How fast is a decode step as models run it: attention, append and rotary encoding?"""
    found = cases(data, "step")
    ratios = [fastest(r) for *_, r in found]
    rows = {
        "tokens in the cache": [
            (words, fastest(r), f"{ours(r):.0f} µs, FlashAttention 3 {best(r, 'fa3'):.0f} µs") for words, _, r in found
        ]
    }
    title = (
        f"With rotary encoding and append to the cache, a decode step is {plotting.span(ratios)} as fast as FlashAttention 3"
    )
    note = where(
        data,
        "One call that turns query and key, appends key and value in place and attends; medians of CUDA graph "
        "replays out of a cold L2.",
    )
    with plotting.page(out, title, note, plotting.height_of(rows)) as figure:
        plotting.ratio_bars(figure.subplots(), rows)


def prompts(data, out):
    """How fast are several new tokens at once, up to whole prompts?"""
    rows, ratios = {}, {}
    for kind, heading, peer in (
        ("tokens", "a few new tokens, FlashAttention 3 beside it", "fa3"),
        ("prompt", "whole prompts, SDPA beside it", "sdpa"),
    ):
        found = cases(data, kind)
        ratios[kind] = [fastest(r) for *_, r in found]
        rows[heading] = [
            (few(r) + words, fastest(r), f"{ours(r):.0f} µs against {best(r, peer):.0f} µs") for words, _, r in found
        ]
    title = (
        f"Whole prompts run at {plotting.span(ratios['prompt'])} the speed of PyTorch's SDPA, 2 to 16 new tokens at "
        f"{plotting.span(ratios['tokens'])} that of FlashAttention 3"
    )
    note = where(data, "Time of the peer over leanfleet's, then the two times: medians of CUDA graph replays out of a cold L2.")
    with plotting.page(out, title, note, plotting.height_of(rows)) as figure:
        plotting.ratio_bars(figure.subplots(), rows)


def few(row):
    found = re.search(r"Nq(\d+)", row["case"])
    return f"{found.group(1)} after " if found else ""


PICTURES = {"lean_attention": decode, "lean_attention_steps": steps, "lean_attention_prompts": prompts}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json")
    parser.add_argument("--table")
    parser.add_argument("--plots", type=Path, metavar="FOLDER")
    parser.add_argument("--tag", default="h200", help="how the names of the plots end: the machine (default: %(default)s)")
    args = parser.parse_args()
    data = json.loads(Path(args.json).read_text())
    quantised = all(row["case"].startswith("quantised ") for row in lines_of(data))
    text = quantised_table(data) if quantised else table(data)
    if args.table:
        Path(args.table).write_text(text)
    else:
        print(text, end="")
    if args.plots:
        for name, draw in PICTURES.items():
            draw(data, args.plots / f"{name}_{args.tag}.svg")


if __name__ == "__main__":
    main()
