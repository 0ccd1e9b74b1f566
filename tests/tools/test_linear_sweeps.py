"""The sweeps of bench/kernels/linear_attention.py on the CPU, with small shapes and clocks of the test's own, and what is made
of a made-up report."""

import json
import math
import re
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch

from support.benchmarks import script

BENCH = script("kernels.linear_attention")
PLOTS = script("plots.plot_linear_attention")
OURS = [n for n in BENCH.CONTENDERS if BENCH.is_ours(n)]
FLA = [n for n in BENCH.CONTENDERS if BENCH.is_fla(n)]


@pytest.fixture
def on_the_cpu(monkeypatch):
    """What a sweep needs of a GPU, replaced: a graph is its call, and the n-th of a turn takes n µs."""
    turns = []

    def times(graphs, rounds):
        turns.append((list(graphs), rounds))
        for call in graphs.values():
            call()
        return {key: [float(at)] * rounds for at, key in enumerate(graphs, 1)}

    monkeypatch.setattr(BENCH, "DEVICE", "cpu")
    monkeypatch.setattr(BENCH, "captured", lambda call: call)
    monkeypatch.setattr(BENCH, "times", times)
    monkeypatch.setattr(BENCH, "peak", lambda call: 4096)
    torch.manual_seed(0)
    return turns


@pytest.fixture
def fla(monkeypatch):
    """Stands in for fla's kernels: their arguments, their order of axes, and no more."""

    def kernel(q, k, v, g=None, *, scale, g_gamma=None, normalize=False):
        assert scale == 1.0 and (g is None or g.shape == q.shape and g.is_contiguous())
        decays = g_gamma if g is None else g[0, 0, :, 0]
        form = f"x{' normalised' * normalize}{' decayed' * (decays is not None)}"
        heads = [t.transpose(1, 2).float() for t in (q, k, v)]
        output = BENCH.expected(form, *heads, None if decays is None else decays.float()[:, None, None])
        return output.transpose(1, 2).to(q.dtype), None

    for module, function in (("gla", "chunk_gla"), ("linear_attn", "chunk_linear_attn"), ("simple_gla", "chunk_simple_gla")):
        made = ModuleType(f"fla.ops.{module}")
        setattr(made, function, kernel)
        monkeypatch.setitem(sys.modules, made.__name__, made)


@pytest.mark.parametrize("kind", BENCH.SWEPT_TYPES)
def test_all_contenders_are_right_and_in_turn(kind, on_the_cpu, fla):
    row = BENCH.sweep_line("heads", (2, 3, 70, 16), kind, True, 5)
    names = [n for n in BENCH.CONTENDERS if n != "flash SDPA" or kind == "bfloat16"]
    assert list(row["us"]) == names and row["missing"] == {}
    assert all(set(us) == {"forward", "both"} for us in row["us"].values())
    assert on_the_cpu[-1] == ([(n, way) for n in names for way in ("forward", "both")], 5) == (on_the_cpu[-1][0], row["rounds"])
    errors = [e for ways in row["errors"].values() for e in ways.values()]
    assert 0 < max(errors) < {"bfloat16": 0.02, "float32": 3e-6}[kind]


def test_large_tensors_are_alone_and_long_heads_compared_in_part(on_the_cpu, monkeypatch):
    monkeypatch.setattr(BENCH, "TOGETHER", 0)
    monkeypatch.setattr(BENCH, "CHECKED", 32)
    row = BENCH.sweep_line("lengths", (1, 2, 200, 16), "float32", False, 5)
    assert list(row["us"]) == OURS and row["missing"] == {}
    assert all(len(keys) == 1 for keys, _ in on_the_cpu)


def test_what_is_wrong_or_fails_has_a_reason_and_no_time(on_the_cpu, monkeypatch):
    function_of = BENCH.function_of

    def some(name, log_decay, gate):
        right = function_of(name, log_decay, gate)

        def fails(q, k, v):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much")

        without = function_of("CausalLinearDecay", log_decay, gate)
        return {"CausalLinearDecay": fails, "CausalLinearDecay, decay": without}.get(name, right)

    monkeypatch.setattr(BENCH, "function_of", some)
    row = BENCH.sweep_line("heads", (1, 2, 300, 16), "bfloat16", "the sweep's seconds were up", 5)
    assert list(row["us"]) == ["NormalizedLinearAttention", "NormalizedLinearAttention, unit rows", "flash SDPA"]
    assert row["missing"]["CausalLinearDecay"] == {"forward": "out of memory", "both": "out of memory"}
    assert all("off float64" in why for why in row["missing"]["CausalLinearDecay, decay"].values())
    assert all(row["missing"][n] == {"both": "the sweep's seconds were up"} for n in FLA)


def test_fla_is_left_out_when_the_seconds_are_up(monkeypatch):
    told = []
    monkeypatch.setattr(BENCH, "sweep_line", lambda section, shape, kind, fla, rounds: told.append((shape, kind, fla)) or {})
    monkeypatch.setattr(BENCH, "quick_tuning", lambda wanted: pytest.MonkeyPatch.context())
    now = iter(range(100))
    monkeypatch.setattr(BENCH, "time", SimpleNamespace(monotonic=lambda: float(next(now))))
    args = SimpleNamespace(fla=True, full_tuning=False, rounds=5, seconds=3, sizes=None)
    assert len(list(BENCH.heads(args))) == len(told) == 14
    assert [fla is True for *_, fla in told] == [True, True] + [False] * 12
    assert {(shape[3], kind) for shape, kind, _ in told} == {
        (D, kind) for D in (32, 64, 96, 128, 160, 192, 256) for kind in ("bfloat16", "float32")
    }
    told.clear()
    args.fla = False
    assert len(list(BENCH.lengths(args))) == 20 and not any(fla for *_, fla in told)
    assert sorted({shape[2] for shape, *_ in told}) == [1024 << i for i in range(10)]
    told.clear()
    args.sizes = {64, 256, 4096}
    assert len(list(BENCH.heads(args))) == 4 and {shape[3] for shape, *_ in told} == {64, 256}


def test_short_prompts(on_the_cpu, monkeypatch):
    """Beside both softmax kernels; the table sets ours beside the faster one."""
    plain = torch.nn.functional.scaled_dot_product_attention
    for name in BENCH.SDPA:
        monkeypatch.setitem(BENCH.SDPA, name, lambda q, k, v: plain(q, k, v, is_causal=True))
    monkeypatch.setattr(BENCH, "SHORT", [(1, 2, 50, D) for D in (8, 16)])
    rows = list(BENCH.short(SimpleNamespace(rounds=5)))
    wanted = [(n, way) for n in BENCH.SHORT_BESIDE for way in ("forward", "both")]
    assert on_the_cpu == [(wanted, rounds) for _ in rows for rounds in (1, 5)] and not any(r["missing"] for r in rows)
    rows[1]["us"]["cuDNN SDPA"], rows[1]["missing"] = {}, {"cuDNN SDPA": {"both": "none of it"}}
    lines = list(BENCH.short_table(rows))
    assert lines[2].endswith("| flash SDPA | cuDNN SDPA | fastest peer over NormalizedLinearAttention |")
    assert lines[4:6] == ["| B1 H2 N50 D8 | 1.0 | 3.0 | 5.0 | 7.0 | 5.00 |", "| B1 H2 N50 D16 | 1.0 | 3.0 | 5.0 |  | 5.00 |"]
    assert lines[11:13] == ["| B1 H2 N50 D8 | 1.0 | 1.0 | 1.0 | 1.0 | 1.00 |", "| B1 H2 N50 D16 | 1.0 | 1.0 | 1.0 |  | 1.00 |"]
    assert lines[-1] == "- cuDNN SDPA: B1 H2 N50 D16 (none of it)"


def test_what_is_measured_is_kept(on_the_cpu, monkeypatch, tmp_path):
    """After each line, and with --add beside the sections that were there."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(
        BENCH, "SWEPT", {"heads": [(1, 2, 40, D) for D in (16, 8)], "lengths": [(1, 2, N, 8) for N in (20, 30)]}
    )

    def main(*words):
        monkeypatch.setattr(sys, "argv", ["linear_attention", str(tmp_path / "x"), "--no-fla", *words])
        BENCH.main()

    def told():
        return [(r["section"], r["case"], r["dtype"]) for r in json.loads((tmp_path / "x.json").read_text())["rows"]]

    main("--only", "heads")
    heads = [("heads", f"B1 H2 N40 D{D}", kind) for D in (16, 8) for kind in BENCH.SWEPT_TYPES]
    assert told() == heads
    sweep_line, calls = BENCH.sweep_line, []

    def ends(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return sweep_line(*args)

    monkeypatch.setattr(BENCH, "sweep_line", ends)
    with pytest.raises(KeyboardInterrupt):
        main("--only", "lengths", "--add")
    assert told() == [*heads, ("lengths", "B1 H2 N20 D8", "bfloat16")]
    assert "Not measured: B1 H2 N30 D8." in (tmp_path / "x.md").read_text()


def test_reports_of_parts_of_a_sweep_are_joined(report, monkeypatch, tmp_path):
    sections = {section: [r for r in report["rows"] if r["section"] == section] for section in ("lengths", "heads", "moved")}
    parts = [
        sections["moved"] + [r for r in sections["heads"] if r["head_size"] < 128],
        sections["lengths"],
        [r for r in sections["heads"] if r["head_size"] >= 128],
    ]
    paths = [tmp_path / f"{i}.json" for i in range(3)]
    for path, rows in zip(paths, parts, strict=True):
        path.write_text(json.dumps({**report, "rows": rows}))

    def join(*files):
        monkeypatch.setattr(sys, "argv", ["linear_attention", str(tmp_path / "all"), "--join", *map(str, files)])
        BENCH.main()

    join(*paths)
    assert json.loads((tmp_path / "all.json").read_text()) == {
        **report,
        "rows": sections["heads"] + sections["lengths"] + sections["moved"],
    }
    assert (tmp_path / "all.md").read_text() == BENCH.table(json.loads((tmp_path / "all.json").read_text()))
    with pytest.raises(SystemExit, match="there twice: heads B4 H16 N4096 D128 bfloat16; heads B4"):
        join(*paths, paths[2])
    paths[1].write_text(json.dumps({**report, "device": "another", "rows": []}))
    with pytest.raises(SystemExit, match="do not belong together: device 'another' for 'NVIDIA H100"):
        join(*paths)


def test_quick_tuning_leaves_the_tuners_as_they_were(monkeypatch):
    """Tuners without kernels; those that are not fla's stay as they are."""
    autotuner = pytest.importorskip("triton.runtime.autotuner")
    for module in ("fla", "fla.ops", "fla.ops.gla", "fla.ops.linear_attn", "fla.ops.simple_gla"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
        sys.modules[module].__spec__ = ModuleSpec(module, None)
    configs = [autotuner.Config({}, num_warps=w, num_stages=s) for w in (2, 4, 8) for s in (2, 3, 4)]

    def tuner(module, configs):
        made = object.__new__(autotuner.Autotuner)
        vars(made).update(configs=configs, cache={"key": configs[0]}, base_fn=SimpleNamespace(__module__=module))
        return made

    fla, odd, other = tuner("fla.ops.x", configs), tuner("fla.ops.y", configs[:1]), tuner("elsewhere", configs)
    with BENCH.quick_tuning():
        assert [(c.num_warps, c.num_stages) for c in fla.configs] == [(4, 2), (4, 3)]
        assert odd.configs == configs[:1] and other.configs is configs and "do_bench" not in vars(other)
    assert fla.configs is configs and fla.cache == {} and "prune_configs" not in vars(fla) and "do_bench" not in vars(fla)
    assert other.cache


def test_bytes_of_calls_are_told_apart_by_marks():
    def kernel(number, name, *values):
        return [{"ID": number, "Kernel Name": name, "Metric Value": v, "Metric Unit": unit} for v, unit in values]

    mark = "at::cuda::<unnamed>::spin_kernel(long)"
    rows = [
        *kernel("0", "one", (2.0, "Mbyte"), (3.0, "Kbyte")),
        *kernel("1", "two", (1.0, "Gbyte"), (0.0, "byte")),
        *kernel("2", mark, (64.0, "byte"), (0.0, "byte")),
        *kernel("3", "one", (5.0, "byte"), (6.0, "byte")),
        *kernel("4", mark, (64.0, "byte"), (0.0, "byte")),
    ]
    assert BENCH.sums_before_marks(rows) == [1_002_003_000, 11]


def test_moved_asks_for_each_contender_once(monkeypatch):
    def counted(module, metrics, name):
        asked.append(name)
        if name == "chunk_gla":
            raise BENCH.subprocess.CalledProcessError(1, "ncu", "==ERROR== no permission\n", "")
        factor = 1 + BENCH.MOVED_BY.index(name)
        rows = []
        for i in range(6):
            rows.append({"ID": str(2 * i), "Kernel Name": "k", "Metric Value": factor * (i + 1.0), "Metric Unit": "byte"})
            rows.append({"ID": str(2 * i + 1), "Kernel Name": "spin_kernel", "Metric Value": 9.0, "Metric Unit": "byte"})
        return rows, [f"io_bytes {i + 1}" for i in range(6)]

    asked = []
    monkeypatch.setattr(BENCH, "counted", counted)
    rows = list(BENCH.moved(SimpleNamespace(fla=True)))
    assert asked == BENCH.MOVED_BY
    assert [r["io_bytes"] for r in rows] == [
        {"forward": 1, "backward": 2},
        {"forward": 3, "backward": 4},
        {"forward": 5, "backward": 6},
    ]
    assert all(r["dram_bytes"] == r["io_bytes"] for r in rows) and rows[2]["peers"]["flash SDPA"] == {
        "forward": 30,
        "backward": 36,
    }
    lines = list(BENCH.moved_table(rows))
    assert "| 1.00 | 1.00 | 2.00 | 2.00 | 3.00 | 3.00 | 4.00 | 4.00 | 6.00 | 6.00 |" in lines[4]
    assert lines[-1].startswith("- chunk_gla: B4 H16 N2048 D128, ") and lines[-1].endswith("(==ERROR== no permission)")
    asked.clear()
    assert list(BENCH.moved(SimpleNamespace(fla=False))) and not any(map(BENCH.is_fla, asked))


# A made-up report

FACTORS = dict(zip(BENCH.CONTENDERS, (1.0, 1.1, 0.9, 0.95, 4.0, 2.0, 2.5, 5.0, 3.0), strict=True))
MEMORY = dict(zip(BENCH.CONTENDERS, (4.1, 4.2, 4.0, 4.0, 15, 12, 12, 22, 8), strict=True))


def sweep_row(section, shape, kind):
    B, H, N, D = shape
    size = math.prod(shape) * (2 if kind == "bfloat16" else 4)
    row = {"section": section, "case": BENCH.title_of(*shape), "dtype": kind, "tokens": N, "head_size": D}
    row |= {"tensor_bytes": size, "us": {}, "bytes": {}, "errors": {}, "missing": {}, "rounds": 7}
    for name, factor in FACTORS.items():
        if name == "flash SDPA" and (kind == "float32" or N > BENCH.FLASH_TOKENS):
            continue
        us = (20 + size * D / 3e8) * factor * (N / 8192 if name == "flash SDPA" else 1)
        if size * MEMORY[name] > 8e10:
            row["us"][name], row["missing"][name] = {"forward": us}, {"both": "out of memory"}
        else:
            row["us"][name], row["bytes"][name] = {"forward": us, "both": 4 * us}, {"both": round(size * MEMORY[name])}
    return row


@pytest.fixture(scope="module")
def report():
    rows = [
        sweep_row(section, s, kind) for section, shapes in BENCH.SWEPT.items() for s in shapes for kind in BENCH.SWEPT_TYPES
    ]
    rows = [r for r in rows if r["case"] != "B4 H16 N4096 D96"]
    for B, H, N, D in BENCH.MOVED:
        size = 2 * B * H * N * D
        peers = {n: {"forward": size * MEMORY[n], "backward": 3 * size * MEMORY[n]} for n in BENCH.MOVED_BY[1:]}
        row = {"section": "moved", "case": BENCH.title_of(B, H, N, D), "tokens": N, "peers": peers, "missing": {}}
        ours = {
            "dram_bytes": {"forward": 5 * size, "backward": 15 * size},
            "io_bytes": {"forward": 4 * size, "backward": 8 * size},
        }
        rows.append(row | ours)
    facts = {"date": "2026-01-01", "device": "NVIDIA H100 80GB HBM3", "torch": "2", "cuda": "13"}
    facts |= {"fla_float32_products": "tf32", "fla_tuning_of_sweeps": "few configurations"}
    return facts | {"rounds": 20, "empty_graph_us": 3.0, "copy_bytes_per_us": BENCH.COPY_BYTES_PER_US, "rows": rows}


def test_table_of_the_sweeps(report):
    lines = BENCH.table(report).splitlines()
    assert "Medians of 7 to 20 graph replays" in lines[0] and "floor" not in lines[0]
    assert lines[2] == "In the sweeps fla's kernels are tuned over few configurations; their float32 products are tf32."
    at = lines.index("## heads: B4 H16 N4096, bfloat16, backward")
    assert lines[at + 2] == "| head size | " + " | ".join(BENCH.CONTENDERS) + " |"
    sizes = [int(line.split("|")[1]) for line in lines[at + 4 : at + 10]]
    assert sizes == [32, 64, 128, 160, 192, 256] and lines[at + 10] == ""
    row = sweep_row("heads", (4, 16, 4096, 128), "bfloat16")
    cells = [f"{us['both'] - us['forward']:.1f}" for us in row["us"].values()]
    assert lines[at + 6] == f"| 128 | {' | '.join(cells)} |"
    assert "chunk_gla / CausalLinearDecay, decay 5.26 to 5.26" in lines[at + 11]
    assert lines.count("Not measured: B4 H16 N4096 D96.") == 2
    at = lines.index("## lengths: B1 H32 D128, float32, forward")
    assert [int(line.split("|")[1]) for line in lines[at + 4 : at + 14]] == [1024 << i for i in range(10)]
    assert "- chunk_gla: 262144, 524288 (out of memory)" in lines
    at = lines.index("## lengths: B1 H32 D128, float32, allocated by forward and backward, in tensors of [B,H,N,D]")
    assert lines[at + 13] == "| 524288 | 4.10 | 4.20 | 4.00 | 4.00 |  |  |  |  |"
    assert not re.search("\n\n\n", "\n".join(lines))


def test_places_of_its_figures_are_unique(report):
    places = [place for place, *_ in script("again").numbers(report)]
    assert len(places) == len(set(places)) > 500


def test_plots_of_the_sweeps(report, tmp_path):
    from leanfleet import plotting

    made = PLOTS.draw(report, tmp_path, "h100")
    assert [path.name for path in made] == [f"{name}_h100.svg" for name in PLOTS.SWEEPS]
    texts = {}
    for path in made:
        svg = path.read_text()
        texts[path.name] = " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", svg))
        used = set(re.findall(r"#[0-9a-f]{6}\b", re.sub(r"<style>@media.*?</style>", "", svg)))
        assert used <= set(plotting.DARK)
        assert "fla chunk_gla" in texts[path.name] and "NVIDIA H100" in texts[path.name]
    words = (
        "NormalizedLinearAttention 4.00x that of fla chunk_linear_attn; CausalLinearDecay 2.63x that of fla chunk_simple_gla"
    )
    assert words in texts["linear_heads_h100.svg"] and "batch 4, 16 heads" in texts["linear_heads_h100.svg"]
    assert "512k" in texts["linear_lengths_h100.svg"] and "float32" in texts["linear_lengths_h100.svg"]
    assert "At 64k tokens NormalizedLinearAttention is 24.0x as fast" in texts["linear_over_flash_h100.svg"]
    assert "flash SDPA 1.60x" in texts["linear_moved_h100.svg"] and "32k tokens" in texts["linear_moved_h100.svg"]
    assert "fla chunk_linear_attn 3.66x" in texts["linear_sweeps_memory_h100.svg"]


def test_plots_are_of_what_is_there(report, tmp_path, monkeypatch):
    drawn = []
    kept = {name: (lambda r, path: drawn.append(path.stem), there) for name, (_, there) in PLOTS.SWEEPS.items()}
    monkeypatch.setattr(PLOTS, "SWEEPS", kept)
    monkeypatch.setattr(PLOTS, "PICTURES", {"old": lambda r, path: drawn.append(path.stem)})
    some = {**report, "rows": [r for r in report["rows"] if r["section"] == "heads"] + [{"section": "short"}]}
    PLOTS.draw(some, tmp_path, "x")
    assert drawn == ["linear_heads_x"]
    drawn.clear()
    old = [{"section": "forward", "case": ""}, {"section": "moved", "case": "", "dram_bytes": {}, "io_bytes": {}}]
    PLOTS.draw({**report, "rows": old}, tmp_path, "x")
    assert drawn == ["old_x"]


def test_plots_of_ours_alone(report, tmp_path):
    """As --no-fla leaves a report, and without flash attention."""
    rows = [
        {
            **r,
            "us": {n: t for n, t in r["us"].items() if n in OURS},
            "bytes": {n: t for n, t in r["bytes"].items() if n in OURS},
        }
        for r in report["rows"]
        if r["section"] != "moved"
    ]
    made = PLOTS.draw({**report, "rows": rows}, tmp_path, "x")
    assert [path.stem for path in made] == ["linear_heads_x", "linear_lengths_x", "linear_sweeps_memory_x"]
    assert "Times of peers" not in BENCH.table({**report, "rows": rows})
