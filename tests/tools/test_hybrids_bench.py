"""bench/models/hybrids.py on the CPU with a small shape."""

import json

import numpy as np
import onnx
import pytest

from bench.models import serving
from support.benchmarks import script

SCRIPT = script("models.hybrids")


def run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["hybrids", *map(str, arguments)])
    SCRIPT.main()


@pytest.mark.slow
def test_both_graphs(tmp_path, monkeypatch):
    sizes = dict(model_type="qwen3_5_text", vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=4)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=32, linear_num_key_heads=2, linear_num_value_heads=2)
    sizes["initializer_range"] = 0.1
    monkeypatch.setitem(serving.SHAPES, "qwen3.5-0.8b", sizes)
    monkeypatch.setattr(SCRIPT, "STEPS", 2)
    run(monkeypatch, "export", tmp_path / "a")
    names = [
        {n.op_type for n in onnx.load(tmp_path / "a" / side / "model.onnx").graph.node} for side in (SCRIPT.OURS, SCRIPT.THEIRS)
    ]
    assert "GatedDeltaRule" in names[0] and names[1] - names[0] >= {"LinearAttention"} and "GatedDeltaRule" not in names[1]
    out = tmp_path / "found.json"
    run(monkeypatch, "run", tmp_path / "a", out, "--device", "cpu", "--prompts", "20", "--batches", "1,3", "--context", "9")
    report = json.loads(out.read_text())
    assert [(r["kind"], r["batch"], r["context"]) for r in report["rows"]] == [
        ("prompt", 1, 20),
        ("step", 1, 9),
        ("step", 3, 9),
    ]
    assert all(r["ratio"] == r["theirs"] / r["ours"] and 0 < r["error"] < 1e-4 for r in report["rows"])
    assert "| step | 3 | 9 |" in out.with_suffix(".md").read_text()

    out.unlink()
    path = tmp_path / "a" / SCRIPT.THEIRS / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    node = next(n for n in model.graph.node if n.op_type == "LinearAttention")
    node.input[0], node.input[1] = node.input[1], node.input[0]
    onnx.save(model, path)
    with pytest.raises(SystemExit, match="logits differ by .* of the largest; 1e-03 is allowed"):
        run(monkeypatch, "run", tmp_path / "a", out, "--device", "cpu", "--prompts", "20", "--batches", "")
    assert not out.exists()


def test_rows_of_different_logits():
    logits = {SCRIPT.OURS: np.array([[1.0, 2.0]]), SCRIPT.THEIRS: np.array([[1.0, 2.05]])}
    seconds = {SCRIPT.OURS: [1.0, 3.0, 2.0], SCRIPT.THEIRS: [5.0, 3.0, 4.0]}
    with pytest.raises(SystemExit, match="differ by 2.5e-02"):
        SCRIPT.row_of({"kind": "step"}, seconds, logits, "float32")
    assert SCRIPT.row_of({"kind": "step"}, seconds, logits, "bfloat16")["ratio"] == 2.0
