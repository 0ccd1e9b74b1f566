"""bench/models/vllm.py without a GPU: requests that come at a rate, over ContinuousBatch on the CPU and over an engine whose times
are known."""

import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from leanfleet import ranks
from leanfleet.export import export_decoder
from leanfleet.export.serving import add_serving, export_for_serving
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


OVER_RANKS = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
from bench.models import vllm

folder, out = map(Path, sys.argv[1:])
vllm.STEPS, vllm.config_of = 6, lambda model: SimpleNamespace(vocab_size=60)
lines = [(1, 5, "2 GPUs"), (3, 9, "2 GPUs")]
vllm.SERVING = dict(requests=5, prompt=7, answer=3, running=2, step_tokens=8)
engine = vllm.OursOverRanks(folder, vllm.most_pages(lines, True), "cpu")
rows = []
for row in vllm.timings(engine, "m", lines, True):
    rows.append(row)
engine.close()
if engine.leads:
    out.write_text(json.dumps(rows))
"""


@pytest.mark.slow
def test_our_side_over_ranks(tmp_path):
    """All ranks go through the same lines, each with batches of its own, and one tells what came out."""
    torch.manual_seed(0)
    config = {**decoders.SIZES, "num_hidden_layers": 1, "vocab_size": 60}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()
    export_decoder(model, tmp_path / "serving", tensor_parallel=2, verify=False)
    add_serving(model, tmp_path / "serving", block=BENCH.BLOCK, verify=False)
    out = tmp_path / "out.json"
    ranks.launch(ranks.python("-c", OVER_RANKS, str(tmp_path), str(out)), 2, seconds=60)
    rows = json.loads(out.read_text())
    assert [(r["kind"], r["batch"], r["section"]) for r in rows] == [
        ("step", 1, "2 GPUs"),
        ("prompt", 1, "2 GPUs"),
        ("step", 3, "2 GPUs"),
        ("prompt", 3, "2 GPUs"),
        ("serving", 2, "2 GPUs"),
    ]
    assert all(r["value"] > 0 for r in rows if r["kind"] != "step")


class Events:
    """onnxruntime-genai's engine as it tells what came: tokens of up to two requests a step, each with its last one."""

    def __init__(self, flags):
        self.flags, self.waiting, self.closed = flags, [], []

    def create_request(self):
        request = Asked(self)
        self.waiting.append(request)
        return request

    def run(self, buffer):
        found = []
        for request in self.waiting[:2]:
            request.left -= 1
            ended = request.left == 0
            told = int(self.flags.TOKEN) | (int(self.flags.TURN_FINISHED) if ended else 0)
            found.append(SimpleNamespace(request=request, flags=told, token=1, error_code=None))
            if ended:
                self.waiting.remove(request)
        return found


class Asked:
    def __init__(self, engine):
        self.engine = engine

    def begin_turn(self, tokens, turn):
        self.left = turn.count

    def close(self):
        self.engine.closed.append(self)


def test_the_other_engines_events(monkeypatch):
    """Each token of each request is told, and requests that have ended give their pages back."""
    import onnxruntime_genai

    class Turn:
        def __init__(self, request):
            pass

        set_do_sample = set_min_generated_tokens = lambda self, value: None

        def set_max_generated_tokens(self, count):
            self.count = count

    monkeypatch.setattr(onnxruntime_genai, "TurnOptions", Turn)
    module = script("models.genai_engine")
    engine = object.__new__(module.Genai)
    engine.engine, engine.events, engine.names = Events(onnxruntime_genai.EngineEventFlags), None, {}
    told, step = [], engine.step
    monkeypatch.setattr(engine, "step", lambda: told.extend(step()))
    engine.run([[1, 2], [3], [4, 5, 6]], [3, 1, 4])
    assert sorted(told) == [0] * 3 + [1] + [2] * 4 and len(engine.engine.closed) == 3 and engine.names == {}


def test_a_table_of_two_peers(tmp_path):
    """Lines that one peer has are there without the other, and each has its means."""
    place = {"model": "m", "batch": 1, "context": 8, "section": "shapes"}
    sides = {
        "ours": [("step", 2.0), ("prompt", 10.0), ("serving", 300.0)],
        "vllm": [("step", 3.0), ("serving", 150.0)],
        "genai": [("prompt", 5.0), ("serving", 100.0)],
    }
    versions = {"ours": "onnxruntime", "vllm": "vllm", "genai": "onnxruntime_genai"}
    for side, rows in sides.items():
        made = {
            "seed": "0",
            "device": "D",
            "date": "d",
            versions[side]: "1",
            "rows": [{"kind": k, **place, "value": v} for k, v in rows],
        }
        (tmp_path / f"{side}.json").write_text(json.dumps(made))
    BENCH.table(SimpleNamespace(out=tmp_path / "out", **{side: [tmp_path / f"{side}.json"] for side in sides}))
    report = json.loads((tmp_path / "out.json").read_text())
    found = {line["kind"]: (line.get("ratio"), line.get("genai_ratio")) for line in report["lines"]}
    assert found == {"step": (1.5, None), "prompt": (None, 0.5), "serving": (2.0, 3.0)}
    assert report["geometric_means"] == pytest.approx({"step": 1.5, "serving": 2.0})
    assert report["genai_geometric_means"] == pytest.approx({"prompt": 0.5, "serving": 3.0})
    assert "| prompt | m | 1 | 8 | shapes | 10.00 |  |  | 5.00 | 0.50 |" in (tmp_path / "out.md").read_text()
