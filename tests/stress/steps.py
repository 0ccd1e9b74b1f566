"""Steps of ContinuousBatch by the hundred thousand, with requests that come and go, each compared with the slow path.

    PYTHONPATH=.:tests python -m stress.steps [--base llama] [--steps 100000] [--speculate 0] [--seed N] [--out F.json]

Requests come at random: prompts that begin alike or not, greedy ones and ones that draw, stop tokens, priorities. Some are
cancelled, and the pool is too small for those that run, so that some are preempted. On a GPU steps are CUDA graphs. The slow path
is the decoder of the same folder, whose logits come to the host and whose tokens the host chooses. A token may differ where
logits changed by LOGITS of their size would give either, since batches of other sizes add up in another order; what comes behind
it in that answer is not compared. Ends with an error at any other difference, where more than PARTED of the answers part so, and
where pages are left when all have ended.
"""

import argparse
import json
import random
import tempfile
import time

import numpy as np
import onnxruntime
import torch
import transformers

from leanfleet import native
from leanfleet.export import export_decoder
from leanfleet.export.serving import add_serving
from leanfleet.generation import Statistics, _by_logits
from leanfleet.ort_ops.generation import load_decoder
from leanfleet.ort_ops.serving import ContinuousBatch
from leanfleet.sampling import sample
from support import decoders

VOCABULARY, LONGEST, MOST_NEW = 211, 160, 60
BLOCK, PAGES, RUNNING, STEP_TOKENS = 8, 80, 8, 64
LOGITS, TRIES = 1e-5, 32
PARTED = 0.01
TOGETHER = 64  # requests that the slow path answers at once


def llama():
    torch.manual_seed(5)
    sizes = dict(hidden_size=384, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=64)
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, intermediate_size=128, max_position_embeddings=512, **sizes)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2 if p.dim() > 1 else 1)  # or most tokens would be near ties
    return model


def made(base, folder):
    """Both graphs of a model in one folder; the number of its tokens."""
    model = llama() if base == "llama" else decoders.hybrid(base).eval()
    export_decoder(model, folder)
    add_serving(model, folder, block=BLOCK)
    return model.config.vocab_size


def draw(source, vocabulary, beginnings):
    """(prompt, options of ContinuousBatch.add)"""
    prompt = list(source.choice(beginnings)[: source.randint(0, 60)])
    prompt += [source.randrange(vocabulary) for _ in range(source.randint(1, LONGEST - 60))]
    options = {
        "max_new_tokens": source.randint(1, MOST_NEW),
        "stop_tokens": source.sample(range(vocabulary), source.choice((0, 0, 1, 3))),
        "priority": source.choice((0, 0, 0, 1)),
    }
    if source.random() < 0.5:
        drawn = {"temperature": source.uniform(0.2, 1.5), "seed": source.randrange(2**40)}
        options |= drawn | source.choice(
            ({}, {"top_k": source.randint(1, 50)}, {"top_p": source.uniform(0.3, 1)}, {"min_p": 0.05})
        )
    return prompt, options


class Slow:
    """The answers that the slow path gives."""

    def __init__(self, folder, providers):
        self.decoder, self.parted, self.checked, self.tokens = load_decoder(folder, providers=providers), 0, 0, 0

    def check(self, requests):
        """Compares what requests got. Raises AssertionError with the request that got something else."""
        seen, choices = [], [request.sampling for request in requests]
        longest = max(len(r.prompt) + r.max_new_tokens for r in requests)
        steps, statistics = self.decoder.steps(len(requests), longest), Statistics()
        statistics.tokens = [[] for _ in requests]
        most = max(len(r.tokens) for r in requests)
        for _ in _by_logits(
            steps, [r.prompt for r in requests], most, choices, set(), statistics, lambda logits: seen.append(logits.copy())
        ):
            pass
        for row, (request, right) in enumerate(zip(requests, statistics.tokens, strict=True)):
            self.compare(request, right, [logits[row] for logits in seen])
        self.checked += len(requests)

    def compare(self, request, right, logits):
        place = next((i for i, (a, b) in enumerate(zip(request.tokens, right)) if a != b), None)
        self.tokens += len(request.tokens) if place is None else place
        if place is not None:
            position = np.full(TRIES, len(request.prompt) + place, np.int32)
            noise = np.random.default_rng(place).standard_normal((TRIES, len(logits[place]))).astype(np.float32)
            near = logits[place] + LOGITS * np.abs(logits[place]).max() * noise
            possible = set(sample(near, [request.sampling] * TRIES, position)[0].tolist())
            told = f"{request.prompt} {request.sampling}: token {place} is {request.tokens[place]}, expected {right[place]}"
            assert request.tokens[place] in possible, told
            self.parted += 1
        elif len(request.tokens) < request.max_new_tokens:
            assert request.tokens[-1] in request.stop_tokens, f"{request.prompt}: ended without a stop token"
        early = request.tokens[:-1]
        assert not request.stop_tokens & set(early), f"{request.prompt}: went on behind a stop token"


def run(folder, vocabulary, steps, seed, speculate=0, provider="cpu", told=print):
    """So many steps; what came of them."""
    source, cuda = random.Random(seed), provider == "cuda"
    providers = [("CUDAExecutionProvider", {"use_tf32": "0"})] if cuda else ["CPUExecutionProvider"]
    limits = dict(pages=PAGES, max_requests=RUNNING, step_tokens=STEP_TOKENS, speculate=speculate)
    batch, slow = ContinuousBatch(folder, providers=providers, cuda_graph=cuda, **limits), Slow(folder, providers)
    rows = len(batch.free_states)
    beginnings = [[source.randrange(vocabulary) for _ in range(60)] for _ in range(6)]
    open_requests, ended, cancelled, seconds = [], [], 0, 0.0
    while batch.steps < steps or not batch.idle:
        if batch.steps < steps and len(open_requests) < 2 * RUNNING and source.random() < 0.3:
            prompt, options = draw(source, vocabulary, beginnings)
            open_requests.append(batch.add(prompt, **options))
        if open_requests and source.random() < 0.005:
            batch.cancel(open_requests.pop(source.randrange(len(open_requests))))
            cancelled += 1
        begun = time.perf_counter()
        if not batch.idle:
            batch.step()
        seconds += time.perf_counter() - begun
        for request in [r for r in open_requests if r.done]:
            assert request.error is None, request.error
            open_requests.remove(request)
            ended.append(request)
        if len(ended) >= TOGETHER or (batch.idle and batch.steps >= steps and ended):
            slow.check(ended[:TOGETHER])
            del ended[:TOGETHER]
            if slow.checked % (64 * TOGETHER) == 0:
                told(f"{batch.steps} steps, {slow.checked} answers, {slow.parted} with a near tie", flush=True)
    while ended:
        slow.check(ended[:TOGETHER])
        del ended[:TOGETHER]
    assert slow.parted <= PARTED * slow.checked, f"{slow.parted} of {slow.checked} answers part from the slow path's"
    assert not batch.pool.in_use, f"{batch.pool.in_use} pages are in use after the last request"
    assert len(batch.free_states) == rows, f"{rows - len(batch.free_states)} states are in use after the last request"
    found = {"steps": batch.steps, "answers": slow.checked, "tokens compared": slow.tokens, "near ties": slow.parted}
    graphs = {"graphs": len(batch.captured)} if cuda else {}
    return found | {"cancelled": cancelled, "preempted": batch.preemptions, "seconds of steps": round(seconds, 1)} | graphs


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", choices=("llama", *decoders.HYBRIDS), default="llama")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--speculate", type=int, default=0, help="guessed tokens a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    cuda = "CUDAExecutionProvider" in onnxruntime.get_available_providers()
    facts = {"date": time.strftime("%Y-%m-%d"), "device": torch.cuda.get_device_name() if cuda else native.build_info()}
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = made(arguments.base, folder)
        chosen = {name: getattr(arguments, name) for name in ("base", "speculate", "seed")}
        found = run(folder, vocabulary, arguments.steps, arguments.seed, arguments.speculate, "cuda" if cuda else "cpu")
    found = facts | chosen | found
    print(json.dumps(found, indent=1))
    if arguments.out:
        with open(arguments.out, "w") as file:
            json.dump(found, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
