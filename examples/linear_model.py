"""Models with linear attention: a layer that trains, and a RetNet decoder whose state has a fixed size.

    python examples/linear_model.py [FOLDER]

Needs the extras export and ort.
"""

import torch
from torch import nn

from common import run_in_folder
from leanfleet.export import LinearAttention, LinearDecoder, LinearDecoderConfig, export_decoder
from leanfleet.ort_ops import generate, load_decoder


# --8<-- [start:train]
def train(steps=30):
    """Teaches one LinearAttention layer to copy the token before; forward and backward are kernels."""
    torch.manual_seed(0)
    embedding, head = nn.Embedding(16, 64), nn.Linear(64, 16)
    layer = LinearAttention(64, num_heads=4)
    parameters = [*embedding.parameters(), *layer.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(16, (8, 32))
        logits = head(layer(embedding(tokens)))
        loss = nn.functional.cross_entropy(logits[:, 1:].flatten(0, 1), tokens[:, :-1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# --8<-- [end:train]


def main(folder):
    losses = train()
    print(f"LinearAttention trains: loss {losses[0]:.2f} at the first step, {losses[-1]:.2f} at the last")
    if not losses[-1] < losses[0]:
        raise SystemExit("the loss did not fall")

    # Random weights here; load those of your model with decoder.load_state_dict.
    torch.manual_seed(0)
    # --8<-- [start:decoder]
    decoder = LinearDecoder(
        LinearDecoderConfig(
            "retnet", vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, feed_forward_size=128
        )
    ).eval()
    export_decoder(decoder, folder)
    prompts = [[1, 2, 3, 4, 5, 6, 7], [8, 9]]
    exported = load_decoder(folder, providers=["CPUExecutionProvider"])
    answers, _ = generate(exported, prompts, max_new_tokens=10)
    # --8<-- [end:decoder]
    for prompt, answer in zip(prompts, answers, strict=True):
        print(prompt, "->", answer)
        with torch.no_grad():  # each token must be the likeliest one after those before it
            logits = decoder(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        if answer != logits.argmax(-1).tolist():
            raise SystemExit(f"PyTorch chooses other tokens after {prompt}")
    print("the same greedy tokens as PyTorch")


if __name__ == "__main__":
    run_in_folder(main)
