"""bench/models/thin.py: decoders whose large weights are the same bytes, over ranks with unequal shares, on the CPU."""

import json

import onnx
import pytest

from leanfleet import ranks
from support.benchmarks import script

pytestmark = pytest.mark.slow
THIN, BENCH = script("models.thin"), script("models.tensor_parallel")
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
    """Two layers of SmolLM2's shape, whose 9 heads over 3 do not divide by two ranks, exported by a process of its own, which
    changes classes of PyTorch."""
    made = tmp_path_factory.mktemp("thin")
    BENCH.in_process("export", "smollm2", made / "serving", 2, "float32", 2, 512, "heads", 1)
    return made


def initializers(path):
    return {t.name: tuple(t.dims) for t in onnx.load(path, load_external_data=False).graph.initializer}


def test_ranks_have_graphs_of_their_own_shares(folder):
    assert not (folder / "serving" / THIN.WEIGHTS).exists()
    for file in ("model", "serving"):
        shapes = [sorted(initializers(folder / "serving" / f"{file}.rank{rank}.onnx").values()) for rank in range(2)]
        assert shapes[0] != shapes[1]
    assert sum(path.stat().st_size for path in (folder / "serving").iterdir()) < 16 << 20


def test_it_runs_once_it_is_complete(folder):
    THIN.complete(folder / "serving")
    made = (folder / "serving" / THIN.WEIGHTS).stat()
    assert made.st_size >= 49152 * 576 * 4
    THIN.complete(folder / "serving")
    assert (folder / "serving" / THIN.WEIGHTS).stat().st_mtime_ns == made.st_mtime_ns
    out = folder / "out.json"
    ranks.launch(ranks.python("-c", RUN, str(folder), str(out)), 2, seconds=60)
    assert [len(tokens) for tokens in json.loads(out.read_text())] == [5, 5]
