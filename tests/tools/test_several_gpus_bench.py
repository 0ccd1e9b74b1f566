"""bench/kernels/context_parallel.py without GPUs: which shapes fit, and what its tables say of them. token_shards.py over shared
memory."""

import json
from types import SimpleNamespace

import pytest

from support.benchmarks import script

BENCH = script("kernels.context_parallel")
H200 = 143771 << 20


def shapes(gpus, *only):
    return BENCH.shapes_of(SimpleNamespace(only=only, seed=3, drawn=12, gpus=gpus), H200)


@pytest.mark.parametrize("gpus, longest", ((2, 512), (4, 1024)))
def test_the_longest_context_of_figure_9_that_fits(gpus, longest):
    assert max(s[-1] for s in shapes(gpus, "figure9")) == longest << 10
    for name, batch, _, heads, size, context in shapes(gpus, *BENCH.SECTIONS):
        # keys, values, and what is gathered of one head in float64
        share = 4 * batch * heads * size * context / gpus
        assert share + 2 * 2 * 8 * size * context < 0.8 * H200, name
        assert context % gpus == 0


def test_sweeps_are_of_one_context():
    assert {s[-1] for s in shapes(4, "heads")} == {256 << 10} and len({s[2] for s in shapes(4, "heads")}) == 6
    assert [s[1] for s in shapes(4, "batches")] == [1, 2, 4, 8, 16, 32]
    assert len(shapes(4, "drawn")) == 12 and shapes(4, "drawn") == shapes(4, "drawn")


def row(name, tokens, **us):
    return {"name": name, "batch": 4, "heads": 8, "kv_heads": 8, "head_size": 64, "context": tokens, "us": us}


def report(gpus, *rows):
    return {"gpus": gpus, "gpu": "G", "seed": 5, "rows": list(rows)}


def test_tables():
    drawn = [row("drawn", 64, torch=t, context=10.0, NCCL=30.0, share=5.0, **{"one GPU": 20.0}) for t in (8.0, 12.0, 18.0)]
    lines = [
        row("figure 9", n << 10, torch=n, context=60.0 + n, NCCL=99.0, share=52.0 + n, **{"one GPU": 100.0 + n}) for n in (4, 8)
    ]
    sweep = row(BENCH.HEADS, 256 << 10, torch=9.0, context=70.0, NCCL=99.0, share=60.0)
    text = BENCH.table(report(2, *lines, sweep, *drawn))
    assert "figure 9, heads" in text and "3 shapes drawn from seed 5" in text and "0.80 to 1.80, below 0.9 for 1;" in text
    rows, cost = BENCH.growth([report(2, *lines, sweep, *drawn), report(4, *lines, sweep, *drawn)])
    assert {r["shape"][0] for r in rows} == {"figure 9"} and cost == {2: 8.0, 4: 8.0, 8: 8.0}


def test_unknown_sections_are_told():
    with pytest.raises(Exception, match="no section is named other; there are llama"):
        BENCH.sections("llama,other")


@pytest.mark.slow
def test_a_text_that_processes_share(tmp_path, monkeypatch):
    shards, stem = script("kernels.token_shards"), tmp_path / "shards"
    sizes = ["--gpus", "2", "--tokens", "1024", "--heads", "2", "--size", "16", "--rounds", "2", "--device", "cpu"]
    monkeypatch.setattr("sys.argv", ["token_shards", str(stem), *sizes])
    shards.main()
    report = json.loads(stem.with_suffix(".json").read_text())
    assert [row["tokens"] for row in report["rows"]] == [1024, 1024, 256, 256]
    assert all(list(row["gpus"]) == ["1", "2"] and row["gpus"]["2"]["ms"] > 0 for row in report["rows"])
    assert shards.table(report) == stem.with_suffix(".md").read_text() and "| 1 GPU | 2 GPUs |" in shards.table(report)
