"""bench/models/train_parity.py on the CPU: steps of a small model, and what `speed` writes."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

from support.benchmarks import script

SCRIPT = script("models.train_parity")
CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch):
    """Contexts of 128 tokens, two sequences a step, of a text that repeats."""
    text = torch.arange(4000) * 7 % 97
    monkeypatch.setattr(SCRIPT, "corpus", lambda: (text, text[:3000], {}))
    for name, value in (("CONTEXT", 128), ("BATCH", 2), ("LAYERS", 1), ("VALIDATION_WINDOWS", 8)):
        monkeypatch.setattr(SCRIPT, name, value)


def test_steps_that_are_replayed_are_those_that_are_not(small):
    """Warming up for a graph leaves weights and moments as they were; rates reach the optimizer."""
    text, _, _ = SCRIPT.corpus()
    windows = SCRIPT.validation_windows(text)
    plain, graph = (SCRIPT.train_one("pytorch", False, 0, 6, text, windows, CPU, graph=g) for g in (False, True))
    assert graph[1] == pytest.approx(plain[1], rel=1e-5) and len(plain[1]) == 6 and plain[1][-1] < plain[1][0]
    assert graph[2] == pytest.approx(plain[2], rel=1e-5) and graph[3] > 0


def test_speed(small, tmp_path, monkeypatch):
    """All attentions have a line of each mode; one that does not run says why. The GPU's share is of a GPU alone."""
    monkeypatch.setattr(SCRIPT, "BATCH", 2)
    out = tmp_path / "speed.json"
    argv = f"speed --out {out} --device cpu --steps 2 --rounds 1 --contexts 8192 --graph --profile".split()
    monkeypatch.setattr(SCRIPT, "validation_windows", lambda text: text[: 8 * 129].view(8, 129))
    monkeypatch.setattr(
        SCRIPT, "batches_of", lambda train, seed, steps, device: train[: 2 * 129].view(2, 129).expand(steps, 2, -1)
    )
    SCRIPT.main(argv)
    report = json.loads(out.read_text())
    rows = report["rows"]
    assert [(r["attention"], r.get("mode")) for r in rows] == [(a, m) for m in (None, "CUDA graph") for a in SCRIPT.ATTENTIONS]
    for row in rows:
        assert ("refused" in row) == (row["attention"] == "fla") and "gpu_seconds" not in row
    losses = {(r["attention"], r.get("mode")): r["loss"] for r in rows if "loss" in r}
    for name in ("leanfleet", "flash SDPA", "pytorch"):
        assert losses[name, None] == pytest.approx(losses[name, "CUDA graph"], abs=1e-3)
    places = [place for place, *_ in script("again").numbers(report)]
    assert len(places) == len(set(places))
    script("plots.plot_training").speed(report, tmp_path / "x.svg")
    found = " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "x.svg").read_text()))
    assert "context of 8k tokens, each step a CUDA graph" in found and "with each step a CUDA graph at" in found


def test_seconds_of_kernels():
    """Those of the GPU; what the host spent is not among them."""
    gpu, host = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    events = [SimpleNamespace(device_type=d, self_device_time_total=t) for d, t in ((gpu, 3e5), (host, 9e5), (gpu, 2e5))]
    assert SCRIPT.kernel_seconds(events) == 0.5 and SCRIPT.busy_seconds("pytorch", None, CPU) is None
