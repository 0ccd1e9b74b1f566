"""An exported decoder in onnxruntime-genai.

    python examples/genai.py [FOLDER]

A tiny Llama with random weights is made on the spot. Needs the extras export, models and ort, and onnxruntime-genai.
"""

from pathlib import Path

import numpy as np
import torch

from common import run_in_folder, tiny_llama
from leanfleet.export import export_decoder
from leanfleet.ort_ops.genai import bundle


def main(folder):
    model = tiny_llama()
    export_decoder(model, Path(folder) / "decoder")
    bundled = bundle(Path(folder) / "decoder", Path(folder) / "genai")  # the same as `leanfleet bundle decoder --genai genai`

    import onnxruntime_genai as og

    prompt = [1, 2, 3, 4, 5]
    parameters = og.GeneratorParams(genai := og.Model(str(bundled)))
    parameters.set_search_options(max_length=len(prompt) + 12)
    generator = og.Generator(genai, parameters)
    generator.append_tokens(np.array([prompt], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    answer = [int(token) for token in generator.get_sequence(0)[len(prompt) :]]

    ids = torch.tensor([prompt])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    expected = expected[0, len(prompt) :].tolist()
    print(prompt, "->", answer)
    if answer != expected:
        raise SystemExit(f"transformers continues with {expected}")
    print("the same greedy tokens as transformers")


if __name__ == "__main__":
    run_in_folder(main)
