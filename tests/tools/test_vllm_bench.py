"""bench/models/vllm.py without a GPU: requests that come at a rate, over ContinuousBatch on the CPU and over an engine whose times
are known."""

import time

import numpy as np
import pytest
import torch
import transformers

from leanfleet.export.serving import export_for_serving
from leanfleet.ort_ops.serving import ContinuousBatch
from support import decoders
from support.benchmarks import script

BENCH = script("models.vllm")


class Slow:
    """Every call takes 10 ms and gives a token to each request that runs, two at most."""

    def __init__(self):
        self.left, self.most, self.ended = {}, 0, False

    def add(self, name, prompt, count):
        self.left[name] = count

    def step(self):
        time.sleep(0.01)
        running = list(self.left)[:2]
        self.most = max(self.most, len(self.left))
        for name in running:
            self.left[name] -= 1
            if self.left[name] == 0:
                del self.left[name]
        return running

    def end(self):
        self.ended = True


def test_times_of_an_engine_that_is_known():
    work = [([1, 2], 6)] * 8
    engine = Slow()
    spreads, tokens = BENCH.at_rate(engine, work, rate=1000, seed=0)  # all at once, nearly: pairs follow each other
    assert engine.ended and engine.most >= 6
    assert spreads["next"]["median"] >= 10 and spreads["first"]["p99"] > spreads["first"]["median"] > 50
    assert 20 < tokens <= 2 / 0.01
    comes = np.cumsum(np.random.default_rng(0).exponential(1 / 4, 2))
    spreads, tokens = BENCH.at_rate(Slow(), work[:2], rate=4, seed=0)  # each alone
    assert spreads["first"]["median"] < 100 and tokens < 12 / comes[-1]


def test_a_request_that_ends_early_is_told():
    class Ends(Slow):
        def step(self):
            if not self.left:
                raise RuntimeError("ended before its tokens")
            self.left.popitem()
            return []

    with pytest.raises(RuntimeError, match="ended before"):
        BENCH.at_rate(Ends(), [([1], 3)], rate=1000, seed=0)


def test_our_side_answers_as_without_a_rate(tmp_path):
    torch.manual_seed(0)
    config = {**decoders.SIZES, "num_hidden_layers": 1, "vocab_size": 60}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()
    export_for_serving(model, tmp_path / "serving", block=4, verify=False)
    engine = object.__new__(BENCH.Ours)
    engine.names = {}
    engine.batch = ContinuousBatch(tmp_path / "serving", pages=60, max_requests=3, step_tokens=12, device="cpu")
    random = np.random.default_rng(1)
    work = [(random.integers(3, 60, n).tolist(), m) for n, m in ((1, 5), (9, 3), (20, 8), (4, 1), (13, 6))]
    asked, add = [], engine.batch.add
    engine.batch.add = lambda *args, **more: asked.append(add(*args, **more)) or asked[-1]
    spreads, tokens = BENCH.at_rate(engine, work, rate=500, seed=3)
    assert tokens > 0 and all(0 < s["median"] <= s["p99"] for s in spreads.values())
    assert engine.batch.idle and engine.names == {} and [len(r.tokens) for r in asked] == [m for _, m in work]
    alone = [add(prompt, m, stop_tokens=()) for prompt, m in work]
    engine.batch.run()
    assert [r.tokens for r in asked] == [r.tokens for r in alone]
