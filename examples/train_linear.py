"""Trains a Llama with linear attention for a few seconds, exports it, and generates in ONNX Runtime.

    python examples/train_linear.py [FOLDER]

Needs the extras export, ort and models.
"""

import torch

from common import run_in_folder
from leanfleet.export import export_decoder
from leanfleet.export.linear_attention import register_transformers
from leanfleet.export.running_sums import running_sums_cache
from leanfleet.ort_ops import generate, load_decoder


# --8<-- [start:train]
def train(steps=40):
    """A Llama of two layers that learns to count: each token is the one before plus 1, modulo 16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation=register_transformers(),
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        tokens = (torch.randint(16, (8, 1)) + torch.arange(32)) % 16
        loss = model(tokens, labels=tokens, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model.eval(), losses


# --8<-- [end:train]


def main(folder):
    model, losses = train()
    print(f"loss {losses[0]:.2f} at the first step, {losses[-1]:.2f} at the last")
    prompts = [[3, 4, 5], [9, 10]]
    # --8<-- [start:deploy]
    export_decoder(model, folder)
    decoder = load_decoder(folder, providers=["CPUExecutionProvider"])
    answers, _ = generate(decoder, prompts, max_new_tokens=8)
    # --8<-- [end:deploy]
    for prompt, answer in zip(prompts, answers, strict=True):
        # --8<-- [start:steps]
        cache = running_sums_cache(model.config)  # sums of a fixed size in place of keys and values
        ids = torch.tensor([prompt])
        with torch.no_grad():
            tokens = model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False)
        # --8<-- [end:steps]
        print(prompt, "->", answer)
        if answer != tokens[0, len(prompt) :].tolist():
            raise SystemExit(f"PyTorch chooses other tokens after {prompt}")
    print("the same greedy tokens as PyTorch")


if __name__ == "__main__":
    run_in_folder(main)
