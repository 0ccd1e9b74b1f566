"""bench/models/thin.py: folders for serving whose weights are made where they run."""

import argparse
import json

import numpy as np
import onnx
import pytest

from leanfleet.ort_ops.serving import ContinuousBatch
from support.benchmarks import script

thin, serving = script("models.thin"), script("models.serving")
SIZES = dict(
    vocab_size=2000, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setitem(serving.SHAPES, "tiny", SIZES)
    arguments = argparse.Namespace(folder=tmp_path, shape="tiny", layers=None, dtype="float32", gpus=1, narrow_states=False)
    arguments.cache = None
    serving.export_thin(arguments)
    return tmp_path / "serving"


def test_weights_of_their_own(folder):
    """Each weight has a place of its own and numbers that no other has, and the folder runs."""
    assert not (folder / thin.WEIGHTS).exists()
    assert json.loads((folder.parent / "bench.json").read_text())["parameters"] > 1_000_000
    thin.complete_apart(folder)
    places, rows = [], set()
    for t, size in thin._large(onnx.load(folder / "model.onnx", load_external_data=False)):
        place = {e.key: e.value for e in t.external_data}
        begin = int(place["offset"])
        assert begin % thin.ALIGNMENT == 0
        places.append((begin, begin + size))
        numbers = np.fromfile(folder / thin.WEIGHTS, np.float32, size // 4, offset=begin)
        assert 0.019 < numbers.std() < 0.021 and abs(numbers.mean()) < 1e-3
        rows.add(numbers[:16].tobytes())
    places.sort()
    assert len(rows) == len(places) >= 8
    assert all(end <= begin for (_, end), (begin, _) in zip(places, places[1:], strict=False))
    before = (folder / thin.WEIGHTS).stat().st_mtime_ns
    thin.complete_apart(folder)
    assert (folder / thin.WEIGHTS).stat().st_mtime_ns == before
    batch = ContinuousBatch(folder, 20, 2, 64, ["CPUExecutionProvider"])
    request = batch.add([5, 6, 7], 4, stop_tokens=())
    batch.run()
    assert len(request.tokens) == 4
