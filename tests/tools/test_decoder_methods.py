"""bench/models/decoder_methods.py on the CPU with small shapes."""

import json

import pytest
import torch

from leanfleet import bench
from leanfleet.export import linear_decoder
from support.benchmarks import script

SCRIPT = script("models.decoder_methods")


@pytest.fixture
def small(monkeypatch):
    sizes = dict(hidden_size=64, num_attention_heads=2, feed_forward_size=96)
    monkeypatch.setattr(
        SCRIPT, "MODELS", {name: sizes | {"layers": layers} for name, layers in (("retnet-s", 9), ("transnormer-s", 7))}
    )
    monkeypatch.setattr(SCRIPT, "VOCABULARY", 50)


@pytest.fixture
def one_more_method():
    """register(name, function), for the length of a test."""
    before = dict(bench._methods)
    yield bench.register_method
    bench._methods.clear()
    bench._methods.update(before)


def test_a_model_with_a_method_is_the_model(small):
    """A method in the place of attention changes nothing, and is gone afterwards."""
    for name in SCRIPT.MODELS:
        model = SCRIPT.build(name, 2, "cpu", "float32")
        prompts = torch.randint(50, (2, 30))
        with torch.no_grad():
            expected, wide = (m(prompts).logits[:, -1] for m in (model, SCRIPT.build(name, 2, "cpu", "float32").double()))
        found = SCRIPT.logits(model, prompts, SCRIPT.by_method("block_based"))
        assert SCRIPT.error_of(found, wide) < 8 * SCRIPT.error_of(expected, wide)
        with torch.no_grad():
            assert torch.equal(model(prompts).logits[:, -1], expected)
    assert linear_decoder.decayed_attention.__module__ == "leanfleet.export.cache"


def test_measured_methods(small, one_more_method, monkeypatch, tmp_path):
    def refuses(*tensors):
        raise ValueError("not today")

    one_more_method("zeros", lambda q, k, v, g: torch.zeros_like(v))
    one_more_method("refuses", refuses)
    one_more_method("huge", lambda q, k, v, g: v, memory=lambda shape: 1 << 60)
    arguments = "--device cpu --layers 1 --tokens 40 --rounds 2 --models retnet-s,transnormer-s --out".split()
    names = "auto,vanilla,zeros,refuses,huge"
    monkeypatch.setattr("sys.argv", ["decoder_methods", *arguments, str(tmp_path / "m.json"), "--methods", names])
    SCRIPT.main()
    report = json.loads((tmp_path / "m.json").read_text())
    assert len(report["rows"]) == 2 * 2 * 5
    status = {row["method"]: row["status"] for row in report["rows"]}
    assert status == dict(auto="ok", vanilla="ok", zeros="wrong", refuses="refused", huge="refused")
    for row in report["rows"]:
        assert (row["status"] == "ok") == ("seconds" in row)
        assert row["status"] != "ok" or (row["samples"] == 2 and row["error"] <= row["tolerance"])
    lines = (tmp_path / "m.md").read_text().splitlines()
    assert lines[2] == "## retnet-s, 1 of 9 layers, float32, prompts of 40 tokens"
    assert lines[4] == "| method | s a prompt, batch 1 | s a prompt, batch 2 |"
    assert lines[-3:] == ["| zeros | wrong | wrong |", "| refuses | refused | refused |", "| huge | refused | refused |"]


def test_a_slow_method_is_timed_once(small):
    model, prompts = SCRIPT.build("retnet-s", 1, "cpu", "float32"), torch.randint(50, (2, 20))
    (row,) = SCRIPT.measure(model, prompts, ["auto"], "float32", "cpu", limit=0.0, rounds=3)
    assert row["samples"] == 1 and row["seconds"] == row["first_seconds"] / 2
    assert SCRIPT.cell(row, "seconds").endswith("(one call)")
