"""bench/models/train_scale.py on the CPU: a tiny shape, in one process and in two."""

import json
import math
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from support.benchmarks import script
from support.paths import ROOT

STEPS = 8
COMMON = ["--shape", "tiny", "--context", "128", "--batch-tokens", "1024", "--dtype", "float32", "--device", "cpu"]
COMMON += ["--read-every", "1", "--validations", "2", "--validation-windows", "4"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder of files in which some are held out, some doubled, some no text."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(300):
        (folder / f"a{i}.py").write_text("".join(f"def f{i}_{j}(x):\n    return x + {j * i}\n" for j in range(20)))
    (folder / "b").mkdir()
    (folder / "b" / "again.md").write_bytes((folder / "a0.py").read_bytes())
    (folder / "b" / "weights.bin").write_bytes(b"no text")
    (folder / "b" / "large.json").write_bytes(b" " * ((1 << 20) + 1))
    return folder


def train(out, text, *more, tokens=STEPS * 1024):
    """The report of a run in this process."""
    argv = ["train", str(out), *COMMON, "--text", str(text), "--tokens", str(tokens), *map(str, more)]
    threads = torch.get_num_threads()
    try:
        script("models.train_scale").main(argv)
    finally:
        torch.set_num_threads(threads)
    return json.loads(out.read_text())


def in_processes(out, text, count, *more):
    """The same by the command line, in so many processes."""
    argv = ["train", out, *COMMON, "--text", text, "--tokens", STEPS * 1024, "--gpus", count, *more]
    return subprocess.run(
        [sys.executable, "-m", "bench.models.train_scale", *map(str, argv)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text):
    """(folder, report of one process)"""
    folder = tmp_path_factory.mktemp("trained")
    ways = "ours,softmax,pytorch,ours,fla"
    return folder, train(folder / "one.json", text, "--ways", ways, "--checkpoint-to", folder / "weights")


def test_ways_start_alike_and_learn(trained):
    folder, report = trained
    ours, softmax, pytorch, again, fla = report["rows"]
    for row in (ours, softmax, pytorch, again):
        losses = row["train"]["loss"]
        assert row["train"]["step"] == list(range(1, STEPS + 1)) and row["tokens"] == STEPS * 1024
        assert abs(losses[0] - math.log(256)) < 0.3 and losses[-1] < losses[0] - 1
        assert row["validation"]["step"] == [0, STEPS // 2, STEPS] and row["final_validation"] == row["validation"]["loss"][-1]
        assert row["train"]["seconds"] == sorted(row["train"]["seconds"]) and row["setup_seconds"] < row["seconds"]
        assert row["parameters"] == ours["parameters"] == 132864 and row["peak_bytes"] is None and "unfinished" not in row
    assert ours["train"]["loss"] == again["train"]["loss"]
    assert ours["train"]["loss"] == pytest.approx(pytorch["train"]["loss"], abs=1e-4)
    assert ours["train"]["loss"] != softmax["train"]["loss"] == pytest.approx(ours["train"]["loss"], abs=0.1)
    assert "need a GPU" in fla["refused"]
    table = (folder / "one.md").read_text()
    assert report["date"] in table and report["torch"] in table and "need a GPU" in table
    assert report["vocabulary"] == 256 and report["tokens_are"] == "bytes"


def test_two_processes_do_what_one_does(trained, tmp_path, text):
    """The batch is shared out, and in pieces: the losses are the same."""
    done = in_processes(tmp_path / "two.json", text, 2, "--ways", "ours,softmax", "--micro-batch", "2")
    assert done.returncode == 0, done.stderr
    two, one = json.loads((tmp_path / "two.json").read_text()), trained[1]
    assert (
        two["gpus"] == 2 and two["order_sha256"] == one["order_sha256"] and two["text"]["training"] == one["text"]["training"]
    )
    for found, expected in zip(two["rows"], one["rows"]):
        assert found["way"] == expected["way"]
        for series in ("train", "validation"):
            assert found[series]["loss"] == pytest.approx(expected[series]["loss"], abs=1e-4)


def test_a_failing_rank_ends_all(tmp_path, text):
    empty = tmp_path / "empty"
    empty.mkdir()
    done = in_processes(tmp_path / "x.json", empty, 2)
    assert done.returncode == 1 and "too little text" in done.stderr and not (tmp_path / "x.json").exists()
    assert done.stderr.strip().endswith("the other ranks were ended")


def test_text(text):
    train_scale = script("models.train_scale")
    training, validation, facts = train_scale.read_text([text, text / "b"], 1e9)
    assert facts["training"]["files"] + facts["validation"]["files"] == 300 and 0 < facts["validation"]["files"] < 20
    assert len(training) == facts["training"]["bytes"] and len(validation) == facts["validation"]["bytes"]
    assert train_scale.read_text([text, text / "b"], 1e9)[2]["training"] == facts["training"]
    assert len(train_scale.read_text([text], 20000)[0]) < 22000 < len(training)
    assert train_scale.text_roots()


def test_order():
    """Every window once before any comes again; batches hold the bytes of their windows, and the byte after."""
    train_scale = script("models.train_scale")
    order = train_scale.order_of(7, 20, 1)
    assert [sorted(part.tolist()) for part in order[:14].split(7)] == [list(range(7))] * 2 and len(order) == 20
    assert order[:7].tolist() != order[7:14].tolist() and torch.equal(order, train_scale.order_of(7, 20, 1))
    batch = train_scale.batch_of(torch.arange(71, dtype=torch.uint8), torch.tensor([6, 0]), 10)
    assert batch.tolist() == [list(range(60, 71)), list(range(11))]


def test_shapes_have_pythias_weights():
    """Published counts without the vocabulary, twice the width for each of 256 bytes added."""
    train_scale = script("models.train_scale")
    for name, published in (("pythia-160m", 85056000), ("pythia-410m", 302311424), ("pythia-1.4b", 1208602624)):
        shape = train_scale.SHAPES[name]
        with torch.device("meta"):
            model = train_scale.Model(shape, "ours")
        assert sum(p.numel() for p in model.parameters()) == published + 2 * 256 * shape.hidden


def test_time_that_is_up_is_told(tmp_path, text):
    report = train(tmp_path / "a.json", text, "--ways", "ours", "--minutes", "0")
    (row,) = report["rows"]
    assert row["stopped"] == f"the time was up after step 1 of {STEPS}" and row["steps"] == 1
    assert row["stopped"] in (tmp_path / "a.md").read_text()
    report = train(tmp_path / "b.json", text, "--ways", "ours", "--limit-seconds", "0")
    assert report["rows"] == [{"way": "ours", "refused": "not begun: the 0 s for everything were over"}]


def test_a_run_that_is_killed_leaves_figures(tmp_path, monkeypatch, text):
    """Until its last validation."""
    train_scale = script("models.train_scale")
    record, seen = train_scale.record, []

    def killed(series, step, seconds, loss):
        if len(series["step"]) == 3 + STEPS // 2:
            raise KeyboardInterrupt
        record(series, step, seconds, loss)
        seen.append(step)

    monkeypatch.setattr(train_scale, "record", killed)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "a.json", text, "--ways", "ours", "--validations", "4")
    (row,) = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert row["unfinished"] and row["steps"] == 6 == row["validation"]["step"][-1] and row["tokens"] == 6 * 1024
    assert row["tokens_per_second"] > 0 and row["final_validation"] == row["validation"]["loss"][-1]
    assert "(cut off after step 6)" in (tmp_path / "a.md").read_text()
    script("plots.plot_training").scale(json.loads((tmp_path / "a.json").read_text()), tmp_path / "a.svg")


def test_ways_that_were_trained_later(trained, tmp_path, text, capsys):
    """Over the same text in the same order: their rows say which run they are of."""
    train_scale = script("models.train_scale")
    old = tmp_path / "old.json"
    old.write_text(json.dumps({**trained[1], "date": "2026-01-02"}))
    report = train(tmp_path / "more.json", text, "--ways", "ours-gated", "--like", old)
    table = (tmp_path / "more.md").read_text()
    assert "run" not in report["rows"][0] and "CPU, " not in table.split("|", 1)[1]
    train_scale.main(["add", str(old), str(tmp_path / "more.json")])
    both = json.loads(old.read_text())
    assert both["rows"][:-1] == trained[1]["rows"] and both["date"] == "2026-01-02"
    row = both["rows"][-1]
    assert row["run"]["date"] == report["date"] and row["run"]["gpus"] == 1 and row["steps"] == STEPS
    assert f"| ours-gated (1 x CPU, {report['date']}) |" in old.with_suffix(".md").read_text()
    places = [place for place, *_ in script("again").numbers(both)]
    assert len(places) == len(set(places))
    script("plots.plot_training").scale(both, tmp_path / "x.svg")
    svg = (tmp_path / "x.svg").read_text()
    assert f"leanfleet, gated (1 x CPU, {report['date']})" in svg and "the speed of leanfleet, gated" not in svg
    with pytest.raises(SystemExit, match="has ours-gated already"):
        train_scale.main(["add", str(old), str(tmp_path / "more.json")])


def test_ways_of_another_text_or_order_are_not_added(trained, tmp_path, text):
    train_scale = script("models.train_scale")
    for name, value, words in (
        ("order_sha256", "0", "order sha256"),
        ("learning_rate", 1.0, "learning rate 0.003 for 1.0"),
        ("text", {"training": {"bytes": 5, "files": 1}}, "training text of"),
    ):
        (tmp_path / "old.json").write_text(json.dumps({**trained[1], name: value}))
        with pytest.raises(SystemExit, match=words):
            train(tmp_path / "more.json", text, "--ways", "ours", "--like", tmp_path / "old.json")
        (tmp_path / "more.json").write_text(json.dumps(trained[1]))
        with pytest.raises(SystemExit, match=words):
            train_scale.main(["add", str(tmp_path / "old.json"), str(tmp_path / "more.json")])


def test_gated_ways_under_autocast(tmp_path, text):
    """In bfloat16 as they are trained at scale: gates stay float32, and learn."""
    report = train(tmp_path / "a.json", text, "--ways", "ours-gated", "--dtype", "bfloat16")
    (row,) = report["rows"]
    assert row["train"]["loss"][-1] < row["train"]["loss"][0] - 1 and row["parameters"] == 132864 + 2 * (64 * 2 + 2)


@pytest.mark.parametrize(
    "more, words",
    (
        (["--batch-tokens", "1000"], "a batch of 1000 tokens is not a multiple of 128"),
        (["--micro-batch", "3"], "8 sequences a process are not a multiple of --micro-batch 3"),
    ),
)
def test_what_does_not_divide_is_refused(more, words, tmp_path, text):
    with pytest.raises(SystemExit, match=words):
        train(tmp_path / "a.json", text, *more)


def test_unknown_ways_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        script("models.train_scale").main(["train", str(tmp_path / "a.json"), "--ways", "ours,mamba"])
    assert "'mamba' is none of ours, softmax" in capsys.readouterr().err


def test_a_way_that_fails_leaves_the_others(tmp_path, monkeypatch, text):
    train_scale = script("models.train_scale")

    def fails(query, key, value, gate):
        raise MemoryError("no room")

    monkeypatch.setitem(train_scale.WAYS, "softmax", train_scale.Way(fails, "x"))
    report = train(tmp_path / "a.json", text, "--ways", "softmax,ours", tokens=1024)
    assert report["rows"][0]["refused"] == "MemoryError: no room" and report["rows"][1]["steps"] == 1


def test_what_fla_is_given(monkeypatch):
    """Contiguous tokens before heads, as it takes them; with plain PyTorch in its place."""
    train_scale = script("models.train_scale")

    def checked(*tensors):
        assert all(t.shape == (2, 128, 2, 32) and t.is_contiguous() for t in tensors)
        return (t.transpose(1, 2) for t in tensors)

    def chunk_linear_attn(q, k, v, scale, normalize):
        q, k, v = checked(q, k, v)
        scores = (q @ k.mT).tril() * scale
        assert normalize and (way == "fla-unit" or (scores.diagonal(dim1=-2, dim2=-1) > 0).all())
        return (scores / scores.sum(-1, keepdim=True) @ v).transpose(1, 2), None

    def chunk_gla(q, k, v, g):
        assert (g < 0).all() and g.dtype == torch.float32
        q, k, v, g = checked(q, k, v, g)
        decay = g.cumsum(2)
        scores = ((q * decay.exp()) @ (k * (-decay).exp()).mT).tril()
        return (scores @ v).transpose(1, 2), None

    def chunk_simple_gla(q, k, v, g):
        assert (g < 0).all() and g.dtype == torch.float32 and g.shape == q.shape[:3]
        decay = g.transpose(1, 2).cumsum(2)
        q, k, v = checked(q, k, v)
        kept = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).tril().exp().tril()
        return (q @ k.mT * q.shape[-1] ** -0.5 * kept @ v).transpose(1, 2), None

    stubs = {"linear_attn": chunk_linear_attn, "gla": chunk_gla, "simple_gla": chunk_simple_gla}
    for name, function in stubs.items():
        monkeypatch.setitem(sys.modules, f"fla.ops.{name}", SimpleNamespace(**{function.__name__: function}))
    ids = torch.randint(256, (2, 128))
    shape, losses = train_scale.SHAPES["tiny"], {}
    for way in ("ours", "fla", "fla-unit", "gla", "ours-gated", "simple-gla"):
        model = train_scale.Model(shape, way)
        train_scale.initialise(model, shape, 0)
        loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        losses[way] = loss.item(), model.head.weight.clone()
    assert torch.equal(losses["ours"][1], losses["gla"][1])
    assert all(abs(losses[way][0] - losses["ours"][0]) < 0.5 for way in ("fla", "gla"))
    assert losses["ours-gated"][0] == pytest.approx(losses["simple-gla"][0], abs=1e-5) != losses["gla"][0]


def test_layers_computed_again_give_the_same(text, tmp_path, trained):
    report = train(tmp_path / "a.json", text, "--ways", "ours", "--checkpoint")
    assert report["rows"][0]["train"]["loss"] == pytest.approx(trained[1]["rows"][0]["train"]["loss"], abs=1e-4)


def test_speed(tmp_path):
    out = tmp_path / "speed.json"
    argv = "--shapes tiny --contexts 64,128 --ways ours,gla --warm 1 --timed 2 --micro-tokens 256 --device cpu".split()
    threads = torch.get_num_threads()
    script("models.train_scale").main(["speed", str(out), *argv])
    torch.set_num_threads(threads)
    rows = json.loads(out.read_text())["rows"]
    assert [(r["context"], r["way"], r["sequences_a_gpu"]) for r in rows] == [
        (64, "ours", 4),
        (64, "gla", 4),
        (128, "ours", 2),
        (128, "gla", 2),
    ]
    assert all(("refused" in row) == (row["way"] == "gla") and (row.get("tokens_per_second", 1) > 0) for row in rows)
    places = [place for place, *_ in script("again").numbers(json.loads(out.read_text()))]
    assert len(places) == len(set(places))
    script("plots.plot_training").scale_speed(json.loads(out.read_text()), tmp_path / "x.svg")
    assert "tiny, context 64" in (tmp_path / "x.svg").read_text()


def test_trained_model_in_onnx_runtime(trained, capsys):
    import onnx

    folder, before = trained
    train_scale = script("models.train_scale")
    train_scale.main(["validate", str(folder / "weights"), "--windows", "3", "--into", str(folder / "one.json")])
    report = json.loads((folder / "one.json").read_text())
    found = report.pop("onnxruntime")
    assert report == before and found["windows"] == 3 and "onnxruntime CPU" in found["losses"]
    assert max(found["losses"].values()) - min(found["losses"].values()) < 1e-5
    assert max(found["losses"].values()) == pytest.approx(before["rows"][0]["final_validation"], abs=0.3)
    graph = onnx.load(folder / "weights" / "ours.onnx", load_external_data=False).graph
    assert [n.op_type for n in graph.node].count("NormalizedLinearAttention") == 2
    assert "onnxruntime CPU" in (folder / "one.md").read_text()
    with pytest.raises(SystemExit, match="only ours is exported"):
        train_scale.main(["validate", str(folder / "weights"), "--way", "softmax"])
    with pytest.raises(SystemExit, match="nowhere/run.json is missing: train ... --checkpoint-to"):
        train_scale.main(["validate", str(folder / "nowhere")])


def test_plot(trained, tmp_path):
    script("plots.plot_training").scale(trained[1], tmp_path / "x.svg")
    svg = (tmp_path / "x.svg").read_text()
    found = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    assert "leanfleet" in found and "softmax" in found and any("after the same tokens" in t for t in found)
    places = [place for place, *_ in script("again").numbers(trained[1])]
    assert len(places) > 10
