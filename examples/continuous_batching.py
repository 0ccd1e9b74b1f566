"""Continuous batching: requests of unequal length join and leave between steps and share one pool of pages.

    python examples/continuous_batching.py [FOLDER]

A tiny Llama with random weights is made on the spot. Needs the extras export, models and ort.
"""

import torch

from common import run_in_folder, tiny_llama
from leanfleet.export.serving import export_for_serving
from leanfleet.ort_ops.serving import ContinuousBatch


def main(folder):
    model = tiny_llama()
    export_for_serving(model, folder, block=16)

    # --8<-- [start:run]
    # 32 pages of 16 tokens; at most 4 requests at once and 24 new tokens a step. A longer prompt goes
    # in pieces.
    batch = ContinuousBatch(folder, pages=32, max_requests=4, step_tokens=24, providers=["CPUExecutionProvider"])
    requests = [batch.add(list(range(1, 1 + length)), max_new_tokens=new) for length, new in ((40, 6), (3, 12), (10, 3))]
    while not batch.idle:
        for request, token in batch.step():
            print(f"request {requests.index(request)}: token {token}{', done' if request.done else ''}")
        if batch.steps == 4:  # one that comes later
            requests.append(batch.add([7, 7, 7], max_new_tokens=4))
    # --8<-- [end:run]

    for request in requests:
        ids = torch.tensor([request.prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.max_new_tokens, do_sample=False
        )
        if request.tokens != expected[0, len(request.prompt) :].tolist():
            raise SystemExit(f"transformers continues {request.prompt} otherwise")
    print(f"{len(requests)} requests in {batch.steps} steps, each with the tokens that it gets alone in transformers")


if __name__ == "__main__":
    run_in_folder(main)
