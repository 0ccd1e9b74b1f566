"""bench/models/decoder_methods.py on the CPU with small shapes."""

import json
import time

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
    assert len(report["rows"]) == 2 * 2 * 5 and "Without figures:" in (tmp_path / "m.md").read_text()
    status = {row["method"]: row["status"] for row in report["rows"]}
    assert status == dict(auto="ok", vanilla="ok", zeros="wrong", refuses="refused", huge="refused")
    for row in report["rows"]:
        assert (row["status"] == "ok") == ("seconds" in row)
        assert row["status"] != "ok" or (row["samples"] == 2 and row["error"] <= row["tolerance"])
    lines = (tmp_path / "m.md").read_text().splitlines()
    assert lines[2] == "## retnet-s, 1 of 9 layers, float32, prompts of 40 tokens"
    assert lines[4] == "| method | s a prompt, batch 1 | s a prompt, batch 2 |"
    assert lines[8:11] == ["| zeros | wrong | wrong |", "| refuses | refused | refused |", "| huge | refused | refused |"]
    assert "- refuses, batch 1 and batch 2: ValueError: not today" in lines
    places = [place for place, *_ in script("again").numbers(report)]
    assert len(places) == len(set(places)) > 2


def measured(names, budget, tokens=20, rounds=3, saved=None):
    """{method: its row}. saved: a list that gets the rows' states at each save."""
    model, prompts = SCRIPT.build("retnet-s", 1, "cpu", "float32"), torch.randint(50, (2, tokens))
    rows = [{"batch": 2, "method": name, "status": "not begun"} for name in names]

    def save():
        if saved is not None:
            saved.append([dict(row) for row in rows])

    SCRIPT.measure(model, prompts, names, "float32", "cpu", budget, rounds, rows, save)
    return dict(zip(names, rows))


def test_a_slow_method_is_timed_once(small, one_more_method):
    def slow(query, key, value, log_decay):
        time.sleep(1.0)  # far from what a busy machine makes of the other's milliseconds
        return bench.causal_linear_decoder(query, key, value, log_decay)

    one_more_method("slow", slow)
    rows = measured(["slow", "auto"], SCRIPT.Budget(limit=2.5))
    assert rows["slow"]["samples"] == 1 and rows["slow"]["seconds"] >= 0.5 and rows["auto"]["samples"] == 3
    assert SCRIPT.cell(rows["slow"], "seconds").endswith("(one call)")


def test_a_method_that_would_take_minutes_is_not_called(small, one_more_method):
    """Its time grows with the tokens: the first hundreds tell."""
    seen = []

    def by_token(query, key, value, log_decay):
        seen.append(query.shape[2])
        time.sleep(query.shape[2] * 5e-3)
        return bench.causal_linear_decoder(query, key, value, log_decay)

    one_more_method("by_token", by_token)
    rows = measured(["by_token", "auto"], SCRIPT.Budget(limit=15.0), tokens=4096)  # far from what a busy machine takes for auto
    assert rows["by_token"]["status"] == "left out" and "s a call are expected" in rows["by_token"]["reason"]
    assert max(seen) < 4096 and rows["auto"]["status"] == "ok"


def test_rows_are_saved_one_by_one_and_a_failure_is_one_row(small, one_more_method):
    def fails(*tensors):
        raise RuntimeError("no such kernel")

    one_more_method("fails", fails)
    saved = []
    rows = measured(["fails", "auto", "vanilla"], SCRIPT.Budget(), saved=saved)
    assert [row["status"] for row in saved[0]] == ["failed", "not begun", "not begun"]
    assert [row["status"] for row in saved[1]] == ["failed", "ok", "not begun"] and saved[1][1]["samples"] == 1
    assert rows["fails"]["reason"] == "RuntimeError: no such kernel" and rows["vanilla"]["samples"] == 3
    assert len(saved) == 3 + 3


def test_each_round_has_its_own_order(small, monkeypatch):
    """auto was the slower for the method before it, in the same kernel."""
    names = ["auto", "lightning", "vanilla", "block_based"]
    called, by_method = [], SCRIPT.by_method
    monkeypatch.setattr(SCRIPT, "by_method", lambda name: called.append(name) or by_method(name))
    rows = measured(names, SCRIPT.Budget(), rounds=5)
    assert all(row["samples"] == 5 for row in rows.values())
    rounds = [tuple(called[len(called) - 20 :][i : i + 4]) for i in range(0, 20, 4)]
    assert all(sorted(names) == sorted(turn) for turn in rounds) and len(set(rounds)) > 2


def test_a_table_tells_spreads_and_threads():
    row = {
        "model": "retnet-1.3b",
        "batch": 1,
        "method": "auto",
        "status": "ok",
        "seconds": 0.75,
        "spread": 0.0123,
        "samples": 3,
    }
    report = {"date": "2026-11-29", "dtype": "float32", "layers": 1, "tokens": 20, "rows": [row]}
    text = SCRIPT.table(report | {"machine": {"device": "a processor", "threads": 2, "torch": "2"}})
    assert text.startswith("2026-11-29, a processor, 2 threads, torch 2.\n") and "| auto | 0.75 ± 0.012 |" in text
    assert SCRIPT.table(report | {"machine": {"device": "a GPU", "torch": "2"}}).startswith("2026-11-29, a GPU, torch 2.\n")


def test_time_that_is_up_is_told(small):
    rows = measured(["auto", "vanilla"], SCRIPT.Budget(total=-1.0))
    assert all(row["status"] == "left out" and "were over" in row["reason"] for row in rows.values())


def test_the_sizes_of_the_7b_model_are_those_of_its_checkpoint():
    """One table of 64,000 words among them, 6.84 billion weights, which are 13.67 GB in 16 bits."""
    sizes = SCRIPT.MODELS["transnormer-7b"]
    hidden, inner = sizes["hidden_size"], sizes["feed_forward_size"]
    assert sizes["layers"] * (5 * hidden**2 + 3 * hidden * inner) + 64000 * hidden == 6_836_715_520
