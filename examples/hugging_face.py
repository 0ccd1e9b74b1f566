"""A decoder of Hugging Face transformers, exported once, answering prompts of unequal length in one batch.

    python examples/hugging_face.py [FOLDER] [MODEL]

MODEL: a folder or a name on the hub. Left out, a tiny Llama with random weights is made on the spot, so that nothing is
downloaded. Needs the extras export, models and ort.
"""

import torch
from transformers import AutoModelForCausalLM

from common import run_in_folder, tiny_llama
from leanfleet.export import export_decoder
from leanfleet.ort_ops import generate, load_decoder


def main(folder, name=None):
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval() if name else tiny_llama()
    # --8<-- [start:main]
    export_decoder(model, folder)  # a third argument: the tokenizer, to have it beside the model

    decoder = load_decoder(folder, providers=["CPUExecutionProvider"])
    prompts = [[1, 2, 3, 4, 5], [9, 8, 7]]  # token ids
    answers, statistics = generate(decoder, prompts, max_new_tokens=12)
    print(f"{statistics.tokens_per_second:.0f} tokens a second while generating")
    # --8<-- [end:main]

    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        expected = expected[0, len(prompt) :].tolist()
        print(prompt, "->", answer)
        if answer != expected:
            raise SystemExit(f"transformers continues {prompt} with {expected}")
    print("the same greedy tokens as transformers")


if __name__ == "__main__":
    run_in_folder(main)
