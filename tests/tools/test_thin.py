"""bench/models/thin.py: decoders whose large weights are made where they run: the same bytes for all, over ranks with unequal
shares, or each with numbers of its own, on the CPU."""

import argparse
import json

import numpy as np
import onnx
import pytest
import torch

from leanfleet import ranks
from leanfleet.ort_ops.serving import ContinuousBatch
from support.benchmarks import script

THIN, BENCH, SERVING = script("models.thin"), script("models.tensor_parallel"), script("models.serving")
SIZES = dict(
    vocab_size=2000, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)
RUN = """
import json, sys
from pathlib import Path
from bench.models import vllm

folder, out = map(Path, sys.argv[1:])
engine = vllm.OursOverRanks(folder, 20, "cpu")
engine.open(2, 16)
if engine.leads:
    asked = [engine.batch.add(list(range(3, 3 + n)), 5, stop_tokens=()) for n in (4, 20)]
    engine.batch.run()
    out.write_text(json.dumps([list(map(int, r.tokens)) for r in asked]))
engine.close()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two layers of SmolLM2's shape, whose 9 heads over 3 do not divide by two ranks, exported by a process of its own."""
    made = tmp_path_factory.mktemp("thin")
    BENCH.in_process("export", "smollm2", made / "serving", 2, "float32", 2, 512, "heads", 1)
    return made


def initializers(path):
    return {t.name: tuple(t.dims) for t in onnx.load(path, load_external_data=False).graph.initializer}


@pytest.mark.slow
def test_ranks_have_graphs_of_their_own_shares(folder):
    assert not (folder / "serving" / THIN.WEIGHTS).exists()
    for file in ("model", "serving"):
        shapes = [sorted(initializers(folder / "serving" / f"{file}.rank{rank}.onnx").values()) for rank in range(2)]
        assert shapes[0] != shapes[1]
    assert sum(path.stat().st_size for path in (folder / "serving").iterdir()) < 16 << 20


@pytest.mark.slow
def test_it_runs_once_it_is_complete(folder):
    THIN.complete(folder / "serving")
    made = (folder / "serving" / THIN.WEIGHTS).stat()
    assert made.st_size >= 49152 * 576 * 4
    THIN.complete(folder / "serving")
    assert (folder / "serving" / THIN.WEIGHTS).stat().st_mtime_ns == made.st_mtime_ns
    out = folder / "out.json"
    ranks.launch(ranks.python("-c", RUN, str(folder), str(out)), 2, seconds=60)
    assert [len(tokens) for tokens in json.loads(out.read_text())] == [5, 5]


def test_weights_of_their_own(tmp_path, monkeypatch):
    """Each weight has a place of its own and numbers that no other has, and the folder runs."""
    monkeypatch.setitem(SERVING.SHAPES, "tiny", SIZES)
    sizes = dict(shape="tiny", layers=None, dtype="float32", gpus=1, narrow_states=False, cache=None)
    SERVING.export_thin(argparse.Namespace(folder=tmp_path, **sizes))
    torch.manual_seed(0)
    assert 0.2 < torch.nn.Linear(8, 64).weight.abs().max() < 0.36, "layers made later have weights as PyTorch draws them"
    folder = tmp_path / "serving"
    assert not (folder / THIN.WEIGHTS).exists()
    assert json.loads((folder.parent / "bench.json").read_text())["parameters"] > 1_000_000
    THIN.complete_apart(folder)
    places, rows = [], set()
    for t, size in THIN._large(onnx.load(folder / "model.onnx", load_external_data=False)):
        place = {e.key: e.value for e in t.external_data}
        begin = int(place["offset"])
        assert begin % THIN.ALIGNMENT == 0
        places.append((begin, begin + size))
        numbers = np.fromfile(folder / THIN.WEIGHTS, np.float32, size // 4, offset=begin)
        assert 0.019 < numbers.std() < 0.021 and abs(numbers.mean()) < 1e-3
        rows.add(numbers[:16].tobytes())
    places.sort()
    assert len(rows) == len(places) >= 8
    assert all(end <= begin for (_, end), (begin, _) in zip(places, places[1:], strict=False))
    before = (folder / THIN.WEIGHTS).stat().st_mtime_ns
    THIN.complete_apart(folder)
    assert (folder / THIN.WEIGHTS).stat().st_mtime_ns == before
    batch = ContinuousBatch(folder, 20, 2, 64, ["CPUExecutionProvider"])
    request = batch.add([5, 6, 7], 4, stop_tokens=())
    batch.run()
    assert len(request.tokens) == 4
