"""The benchmark API: methods by name, the check before the timing, what is refused, tables, files and the command."""

import json
from functools import partial
import re
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from leanfleet import bench, cli, progress
from leanfleet.export import reference

OWN = (
    "auto",
    "causal_dot_product",
    "fleet",
    "lightning",
    "vanilla",
    "block_based",
    "recursion",
    "causal_dot_product_torch",
    "fleet_torch",
    "lightning_torch",
)
SHAPE = bench.Shape(batch=2, heads=6, kv_heads=2, tokens=70, rank=24, dim=40)


@pytest.fixture(autouse=True)
def registry():
    """Every test leaves the methods as it found them."""
    before = dict(bench._methods)
    yield
    bench._methods.clear()
    bench._methods.update(before)


def plain(query, key, value, log_decay):
    """The recurrence of the definition, as a user would write it: right, slow."""
    batch, heads, tokens, _ = query.shape
    key, value = (t.repeat_interleave(heads // t.shape[1], 1).float() for t in (key, value))
    decay = torch.ones(batch, heads, tokens)
    if log_decay is not None:
        per_token = log_decay if log_decay.dim() == 3 else log_decay[:, None].expand(batch, -1, tokens)
        decay = per_token.repeat_interleave(heads // per_token.shape[1], 1).exp()
    state, rows = 0, []
    for i in range(query.shape[2]):
        state = decay[:, :, i, None, None] * state + key[:, :, i, :, None] * value[:, :, i, None, :]
        rows.append((query[:, :, i, None, :].float() @ state).squeeze(2))
    return torch.stack(rows, 2).to(query.dtype)


def by_method(report):
    return {row["method"]: row for row in report["rows"]}


def small(**changes):
    return {"shapes": [SHAPE], "seconds": 0.01, **changes}


# causal_linear_decoder and the registry


@pytest.mark.parametrize("log_decay", bench.DECAYS)
@pytest.mark.parametrize("name", OWN)
def test_decoder_computes_with_every_method(name, log_decay):
    torch.manual_seed(0)
    q, k, v, g = bench.make_inputs("causal_linear_decay", SHAPE, log_decay=log_decay)
    found = bench.causal_linear_decoder(q, k, v, log_decay=g, attn_method=name)
    doubles = [None if t is None else t.double() for t in (q, k, v, g)]
    expected = reference.causal_linear_decay(*doubles)[0]
    assert found.dtype == torch.float32 and found.shape == (2, 6, 70, 40)
    assert (found - expected).norm() / expected.norm() < 2e-6
    assert (plain(q, k, v, g) - expected).norm() / expected.norm() < 2e-6


LISTING_1 = """
from efficient_linear_decoding.test_method import benchmark_method

def attn(q, k, v, gamma):
    # customize the linear attention computation method here.
    {body}

# Example usage of the benchmark_method() function:
# Note: The values below should be replaced with the most suitable values.

benchmark_method(method=attn, device='{device}', dtype='float32', batch_size=16,
                is_weight_decay=True, gamma=gamma)
"""
LISTING_2 = """
from efficient_linear_decoding import causal_linear_decoder

batch_size, heads, seqlen, rank = 1, 32, {seqlen}, 128
dim = 256
B = torch.randn((batch_size, heads, seqlen, rank), device='{device}')
C = torch.randn((batch_size, heads, seqlen, rank), device='{device}')
V = torch.randn((batch_size, heads, seqlen, dim), device='{device}')
gamma = torch.full((heads, 1), 0.9, device='{device}')

# If the user intends to apply a 0-1 causal mask.
output = causal_linear_decoder(B, C, V)
{keep}
# If the user intends to apply an exponentially decaying mask.
output = causal_linear_decoder(B, C, V, is_mask_weight=True, gamma=gamma)
{keep}
# If the user intends to apply a specified method in the library.
output = causal_linear_decoder(B, C, V, attn_method='block-based')
{keep}
"""


def with_our_import(listing, **words):
    """A listing of LeetDecoding's paper (1 and 2) with its import line changed; words: the device, the length, what a reader
    of the paper fills in."""
    lines = listing.strip().format(**words).split("\n")
    assert lines[0].startswith("from efficient_linear_decoding")
    return "\n".join(["from leanfleet.bench import " + lines[0].partition(" import ")[2], *lines[1:]])


def masked(B, C, V, gamma):
    steps = torch.arange(B.shape[2], dtype=torch.float64)
    mask = torch.where(steps[:, None] >= steps, gamma.double().view(-1, 1, 1) ** (steps[:, None] - steps).clamp(min=0), 0)
    return ((B.double() @ C.double().mT) * mask) @ V.double()


def test_listing_1(monkeypatch, capsys):
    """As printed, with a body in the place of `pass`: checked against gamma's mask, and timed beside all methods."""
    reports = []
    monkeypatch.setattr(bench, "benchmark_method", partial(bench.benchmark_method, tokens=20, seconds=0.001))
    for body, status in (
        ("return masked(q, k, v, gamma).float()", "ok"),
        ("return masked(q, k, v, gamma**2).float()", "wrong"),
    ):
        run = bench.run
        monkeypatch.setattr(bench, "run", lambda *a, run=run, **o: reports.append(run(*a, **o)) or reports[-1])
        names = {"gamma": torch.linspace(0.8, 1, 6)[:, None], "masked": masked}
        exec(with_our_import(LISTING_1, body=body, device="cpu"), names)
        monkeypatch.setattr(bench, "run", run)
        rows = by_method(reports[-1])
        assert rows["attn"]["status"] == status and rows["attn"]["shape"]["heads"] == 6
        assert all(rows[name]["status"] == "ok" for name in OWN)
    assert "attn" in capsys.readouterr().out
    exec(with_our_import(LISTING_1, body="pass", device="cpu"), names)  # as it is printed: no output, and a row that says so
    assert "failed" in capsys.readouterr().out


def test_listing_2():
    torch.manual_seed(0)
    found: list = []
    names = {"torch": torch, "found": found}
    exec(with_our_import(LISTING_2, device="cpu", seqlen=70, keep="found.append(output)"), names)
    B, C, V = (names[n] for n in "BCV")
    for output, gamma in zip(found, (torch.ones(32), torch.full((32,), 0.9), torch.ones(32)), strict=True):
        expected = masked(B, C, V, gamma)
        assert (output - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize(
    "name, own",
    [
        ("FleetAttention", "fleet"),
        ("FleetAttention_torch", "fleet_torch"),
        ("FleetAttention_triton", "fleet"),
        ("lightningAttention-2", "lightning"),
        ("lightningAttention2_torch", "lightning_torch"),
        ("causal-dot-product", "causal_dot_product"),
        ("block-based", "block_based"),
        ("blockBased", "block_based"),
        ("recursion", "recursion"),
        ("vanilla", "vanilla"),
    ],
)
def test_leetdecodings_names(name, own):
    B, C, V = torch.randn(3, 1, 2, 40, 8).unbind()
    gamma = torch.tensor([0.5, 0.99])
    expected = bench.causal_linear_decoder(B, C, V, gamma.log(), attn_method=own)
    assert torch.equal(bench.causal_linear_decoder(B, C, V, is_mask_weight=True, gamma=gamma, attn_method=name), expected)


def test_gamma():
    B, C, V = torch.randn(3, 1, 2, 9, 4).unbind()
    decoder = partial(bench.causal_linear_decoder, B, C, V)
    assert torch.equal(decoder(is_mask_weight=True, gamma=0.5), decoder(torch.full((2,), 0.5).log()))
    assert torch.equal(decoder(gamma=0.5), decoder())  # is_mask_weight is the switch
    with pytest.raises(ValueError, match="a decaying mask needs gamma"):
        decoder(is_mask_weight=True)
    with pytest.raises(ValueError, match="gamma has 3 values; expected 1, or one for each of 2 heads"):
        decoder(is_mask_weight=True, gamma=torch.ones(3))
    for wrong in (0.0, 1.1, float("nan")):
        with pytest.raises(ValueError, match="expected 0 < gamma <= 1"):
            decoder(is_mask_weight=True, gamma=wrong)
    with pytest.raises(ValueError, match="give one of them"):
        decoder(torch.zeros(2), is_mask_weight=True, gamma=0.5)
    for options in ({"gamma": 0.5}, {"is_weight_decay": True, "gamma": 0.5, "log_decay": "token"}):
        with pytest.raises(ValueError, match="gamma and is_weight_decay are given together"):
            bench.benchmark_method(plain, **options)


def test_registry():
    assert bench.methods() == list(OWN)
    assert bench.methods("normalized_linear_attention") == ["auto", "lightning_torch"]
    bench.register_method("My-Own", plain)
    assert bench.methods()[-1] == "my_own"
    q, k, v, g = bench.make_inputs("causal_linear_decay", SHAPE)
    assert torch.equal(bench.causal_linear_decoder(q, k, v, g, attn_method="my-own"), plain(q, k, v, g))

    @bench.register_method("decorated", operator="normalized_linear_attention")
    def decorated(q, k, v):
        return v

    assert decorated(1, 2, 3) == 3 and bench.methods("normalized_linear_attention")[-1] == "decorated"
    with pytest.raises(ValueError, match="'nothing' is no registered method of causal_linear_decay; there are auto, "):
        bench.causal_linear_decoder(q, k, v, attn_method="nothing")
    with pytest.raises(ValueError, match="operator is 'attention'; it is one of causal_linear_decay"):
        bench.register_method("x", plain, operator="attention")
    with pytest.raises(ValueError, match="devices has tpu; it takes cpu and cuda"):
        bench.register_method("x", plain, devices=("tpu",))


# The check before the timing


@pytest.mark.parametrize("dtype", bench.DTYPES)
@pytest.mark.parametrize("operator", bench.OPERATORS)
def test_every_own_method_passes(operator, dtype):
    rows = bench.run(**small(), operator=operator, dtype=dtype)["rows"]
    assert [r["method"] for r in rows] == bench.methods(operator)
    for row in rows:
        assert row["status"] == "ok", row
        assert 0 < row["error"] <= row["tolerance"] < {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
        assert row["seconds"] > 0 and row["spread"] >= 0 and row["rounds"] >= bench.SLOW_ROUNDS


@pytest.mark.parametrize("operator", bench.OPERATORS)
def test_gradients(operator):
    rows = bench.run(**small(), operator=operator, grad=True)["rows"]
    assert all(row["status"] == "ok" for row in rows), rows


def test_tolerance():
    """A multiple of what the reference loses, no less than a rounding, and in 16 bits no more than four."""
    assert bench._tolerance("float32", 1e-6) == 16e-6 and bench._tolerance("float32", 0.0) == 2.0**-23
    assert bench._tolerance("bfloat16", 0.005) == 0.01 and bench._tolerance("bfloat16", 0.4) == 4 * 2.0**-7
    assert bench._tolerance("float16", 1e-5) == 2.0**-10 and bench._tolerance("float16", 0.4) == 4 * 2.0**-10


def test_one_s_own_right_method():
    report = bench.benchmark_method(
        plain,
        batch_size=1,
        heads=6,
        kv_heads=2,
        rank=16,
        dim=24,
        tokens=(3, 65),
        others=["lightning"],
        seconds=0.01,
        quiet=True,
    )
    assert [(r["method"], r["shape"]["tokens"], r["status"]) for r in report["rows"]] == [
        ("plain", 3, "ok"),
        ("lightning", 3, "ok"),
        ("plain", 65, "ok"),
        ("lightning", 65, "ok"),
    ]
    assert "plain" not in bench.methods()


WRONG = {
    "no decay": lambda q, k, v, g: plain(q, k, v, None),
    "not causal": lambda q, k, v, g: q @ (k.repeat_interleave(3, 1).mT @ v.repeat_interleave(3, 1)),
    "half a percent": lambda q, k, v, g: plain(q, k, v, g) * 1.005,
    "nan in one place": lambda q, k, v, g: plain(q, k, v, g).index_fill(2, torch.tensor([69]), float("nan")),
    "inputs in bfloat16": lambda q, k, v, g: plain(q.bfloat16(), k.bfloat16(), v.bfloat16(), g).float(),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_method_is_not_timed(name, capsys):
    report = bench.benchmark_method(WRONG[name], name="mine", heads=6, kv_heads=2, tokens=70, seconds=0.01, others=["auto"])
    rows = by_method(report)
    assert rows["auto"]["status"] == "ok"
    assert rows["mine"]["status"] == "wrong" and "seconds" not in rows["mine"]
    assert "are allowed" in rows["mine"]["reason"]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert any(line[:1] == ["mine"] and "wrong:" in line for line in lines)
    json.dumps(report, allow_nan=False)


def test_rtol_replaces_the_tolerance():
    report = bench.benchmark_method(
        WRONG["half a percent"], name="mine", heads=6, kv_heads=2, tokens=70, seconds=0.01, others=[], rtol=6e-3, quiet=True
    )
    assert report["rows"][0]["status"] == "ok" and 4e-3 < report["rows"][0]["error"] < 6e-3


def test_refused_and_failed_methods_stay_in_the_table(capsys):
    def refuses(q, k, v, g):
        raise ValueError("only 16 tokens\nare taken")

    def fails(q, k, v, g):
        return 1 / 0

    def shapeless(q, k, v, g):
        return q

    for function in (refuses, fails, shapeless):
        bench.register_method(function.__name__, function)
    bench.register_method("elsewhere", plain, devices=("cuda",))
    names = ["refuses", "auto", "fails", "shapeless", "elsewhere"]
    rows = by_method(bench.run(**small(), names=names, on_case=bench.print_case))
    assert list(rows) == names
    assert (rows["refuses"]["status"], rows["refuses"]["reason"]) == ("refused", "only 16 tokens are taken")
    assert (rows["fails"]["status"], rows["fails"]["reason"]) == ("failed", "ZeroDivisionError: division by zero")
    assert rows["shapeless"]["reason"] == "RuntimeError: its output has shape [2, 6, 70, 24]; expected [2, 6, 70, 40]"
    assert rows["elsewhere"]["reason"] == "it runs on cuda only"
    out = capsys.readouterr().out
    assert "B2 H6/2 N70 R24 D40" in out and "refused: only 16 tokens are taken" in out and "failed: ZeroDivisionError" in out


def test_too_little_memory_is_refused(monkeypatch):
    monkeypatch.setattr(bench, "_free_memory", lambda device: 1 << 20)
    rows = by_method(bench.run(**small(), names=["vanilla", "recursion"]))
    assert rows["recursion"]["status"] == "ok" and rows["vanilla"]["status"] == "refused"
    assert "GiB beside its inputs; 0.0 GiB are free" in rows["vanilla"]["reason"]


def test_gradients_are_checked():
    class WrongGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, g):
            ctx.shapes = q, k, v
            return plain(q, k, v, g)

        @staticmethod
        def backward(ctx, grad):
            return (*(torch.ones_like(t) for t in ctx.shapes), None)

    bench.register_method("wrong_gradient", WrongGradient.apply)
    bench.register_method("plain", plain)
    bench.register_method("no_gradient", lambda *t: plain(*t).detach())
    names = ["wrong_gradient", "plain", "no_gradient"]
    rows = by_method(bench.run(**small(), names=names, grad=True))
    assert [rows[n]["status"] for n in names] == ["wrong", "ok", "refused"]
    assert rows["no_gradient"]["reason"] == "it has no gradient"
    assert [r["status"] for r in bench.run(**small(), names=names)["rows"]] == ["ok", "ok", "ok"]


# The limit


def test_methods_beyond_the_limit_are_left_out(monkeypatch, capsys):
    """By a clock of the test's own: 2048 tokens take 5 ms along a line, 0.7 s by a square, 84 s by a cube, five calls each."""
    now, calls = [0.0], []
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def method(power):
        def timed(q, k, v, g):
            calls.append((power, q.shape[2]))
            now[0] += 4e-5 * (q.shape[2] / 16) ** power
            return reference.causal_linear_decay(q, k, v, g)[0]

        return timed

    for name, power in (("line", 1), ("square", 2), ("cube", 3)):
        bench.register_method(name, method(power))
    shape, told = bench.Shape(1, 1, 1, 2048, 8, 8), []
    report = bench.run(
        [shape],
        ["line", "square", "cube"],
        seconds=0.01,
        limit=1.5,
        on_case=bench.print_case,
        on_progress=lambda *what: told.append(what),
    )
    rows = by_method(report)
    assert rows["line"]["status"] == "ok" and rows["square"]["status"] == rows["cube"]["status"] == "left out"
    assert (1, 2048) in calls and not {(2, 2048), (3, 2048)} & set(calls)
    assert rows["square"]["reason"] == "about 3 s are expected, the limit is 1.5 s" and "seconds" not in rows["cube"]
    assert "left out: about" in capsys.readouterr().out
    assert told == [(shape, what) for what in ("float64 reference", "line", "square", "cube", "timing")]
    json.dumps(report, allow_nan=False)
    rows = by_method(bench.run([shape], ["square"], seconds=0.01))
    assert rows["square"]["status"] == "ok"


def test_extrapolation():
    assert bench._extrapolated(None, (16, 2.0), 999) == 2.0
    assert bench._extrapolated((16, 1.0), (64, 16.0), 256) == pytest.approx(256.0)
    assert bench._extrapolated((16, 1.0), (64, 64.0), 256) == pytest.approx(1024.0)  # a cube counts as a square
    assert bench._extrapolated((16, 1.0), (64, 1.1), 256) == pytest.approx(1.1 + 192 / 48 * 0.1)
    assert bench._extrapolated((16, 1.0), (64, 0.9), 256) == 0.9


@pytest.mark.parametrize(
    "words", [["--limit", "0"], ["--limit", "nan"], ["--seconds", "-1"], ["--seconds", "soon"], ["--threads", "0"]]
)
def test_numbers_that_are_none(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", *words])
    assert stopped.value.code == 2 and f"argument {words[0]}: '{words[1]}' is not a" in capsys.readouterr().err


# Timing


def test_times_are_medians_of_calls_in_turn():
    order = []

    def slow(q, k, v, g):
        order.append("slow")
        time.sleep(0.04)
        return bench.causal_linear_decoder(q, k, v, g)

    def quick(q, k, v, g):
        order.append("quick")
        return bench.causal_linear_decoder(q, k, v, g)

    bench.register_method("slow", slow)
    bench.register_method("quick", quick)
    rows = by_method(bench.run(**small(seconds=0.2), names=["slow", "quick"]))
    assert rows["slow"]["seconds"] > 0.04 and rows["quick"]["seconds"] < rows["slow"]["seconds"]
    assert rows["slow"]["rounds"] == bench.MIN_ROUNDS <= rows["quick"]["rounds"]
    assert order[4 : 4 + 2 * bench.MIN_ROUNDS] == ["slow", "quick"] * bench.MIN_ROUNDS  # after one check and one warm-up each
    assert bench.run(**small(seconds=1e-6), names=["slow"])["rows"][0]["rounds"] == bench.SLOW_ROUNDS


def test_inputs_cycle_through_more_than_the_cache():
    seen = set()

    def watching(q, k, v, g):
        seen.add(q.data_ptr())
        return bench.causal_linear_decoder(q, k, v, g)

    bench.register_method("watching", watching)
    shape = bench.Shape(1, 8, 8, 2048, 64, 64)
    bench.run([shape], ["watching"], seconds=1.0)
    sets = len(seen)
    size = 3 * 4 * 8 * 2048 * 64
    assert sets * size >= bench.CACHE_BYTES["cpu"] or sets >= bench.MIN_ROUNDS


# Inputs and the command


def test_inputs():
    q, k, v, g = bench.make_inputs("causal_linear_decay", SHAPE, "bfloat16", "token")
    assert (q.shape, k.shape, v.shape, g.shape) == ((2, 6, 70, 24), (2, 2, 70, 24), (2, 2, 70, 40), (2, 2, 70))
    assert q.dtype == v.dtype == torch.bfloat16 and g.dtype == torch.float32
    assert g.max() <= 0 and g.min() >= -0.2
    assert torch.equal(bench.make_inputs("causal_linear_decay", SHAPE, log_decay="head")[3], torch.tensor([-1 / 16, -1 / 256]))
    assert bench.make_inputs("causal_linear_decay", SHAPE, log_decay=-0.5)[3].tolist() == [-0.5, -0.5]
    assert bench.make_inputs("causal_linear_decay", SHAPE, log_decay="none")[3] is None
    assert len(bench.make_inputs("normalized_linear_attention", SHAPE)) == 3
    with pytest.raises(ValueError, match="log_decay is 'steep'; it is one of none, head, token, a number or a tensor"):
        bench.make_inputs("causal_linear_decay", SHAPE, log_decay="steep")


@pytest.mark.parametrize("text", ["", "1x2x3x4", "1x2x3x4x5x6", "1x6/4x9x8x8", "0x1x1x1x1", "1x2xNx4x5"])
def test_shapes_that_are_not(text):
    with pytest.raises(ValueError, match="is not BxHxNxRxD or BxH/HkvxNxRxD"):
        bench.parse_shape(text)


def test_shapes():
    assert bench.parse_shape("2x6/2x70x24x40") == SHAPE
    assert str(SHAPE) == "B2 H6/2 N70 R24 D40" and str(bench.parse_shape("1x8x128x64x32")) == "B1 H8 N128 R64 D32"


def test_command(tmp_path, capsys, monkeypatch):
    stages = []
    monkeypatch.setattr(progress.Stage, "at", lambda self, *what: stages.append(what))
    out, picture = tmp_path / "new" / "times.json", tmp_path / "times.png"
    code = cli.main(
        [
            "bench",
            "--methods",
            "lightning,block-based",
            "--shapes",
            "1x4/2x40x16x8,1x4/2x80x16x8",
            "--seconds",
            "0.01",
            "--dtype",
            "bfloat16",
            "--decay",
            "token",
            "--out",
            str(out),
            "--plot",
            str(picture),
        ]
    )
    assert code == 0
    report = json.loads(out.read_text())
    assert [(r["method"], r["shape"]["tokens"], r["status"]) for r in report["rows"]] == [
        ("lightning", 40, "ok"),
        ("block_based", 40, "ok"),
        ("lightning", 80, "ok"),
        ("block_based", 80, "ok"),
    ]
    assert report["settings"] == {
        "operator": "causal_linear_decay",
        "device": "cpu",
        "dtype": "bfloat16",
        "grad": False,
        "seed": 0,
        "log_decay": "token",
    }
    assert report["machine"]["threads"] == torch.get_num_threads()
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
    text, told = capsys.readouterr()
    assert told == "" and stages == [
        (f"B1 H4/2 N{n} R16 D8: {what}", number, 2)
        for number, n in enumerate((40, 80))
        for what in ("float64 reference", "lightning", "block_based", "timing")
    ]
    assert "B1 H4/2 N40 R16 D8" in text and "B1 H4/2 N80 R16 D8" in text


METHODS = """
from leanfleet.bench import register_method
register_method("from_a_file", lambda q, k, v, g: v)
"""


def test_command_loads_files_and_says_what_is_wrong(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(METHODS)
    assert cli.main(["bench", "--load", str(file), "--list"]) == 0
    assert capsys.readouterr().out.split() == [*OWN, "from_a_file"]
    assert cli.main(["bench", "--methods", "from_a_file", "--shapes", "1x1x9x8x8", "--seconds", "0.01"]) == 1
    assert "wrong: its error against the float64 reference" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--methods", "auto,nothing"], "'nothing' is no registered method of causal_linear_decay; there are auto,"),
        (["--shapes", "1x2"], "shape '1x2' is not BxHxNxRxD"),
        (["--dtype", "float64"], "dtype is 'float64'; it is one of float32, float16, bfloat16"),
        (["--device", "tpu"], "device is 'tpu'; it is cpu"),
        (["--decay", "steep"], "--decay is steep; it is one of none, head, token"),
        (["--operator", "attention"], "operator is 'attention'; it is one of"),
        (["--load", "nowhere.py"], "nowhere.py does not exist; give a Python file"),
    ],
)
def test_command_with_wrong_arguments(arguments, message, capsys):
    assert cli.main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and out == ""


def test_plot_without_matplotlib(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["bench", "--plot", "x.png"]) == 2
    assert "the package matplotlib is missing: pip install 'leanfleet[bench]'" in capsys.readouterr().err


def test_plot_names_its_methods_and_the_fastest(tmp_path):
    shapes = [bench.Shape(1, 2, 1, n, 8, 8) for n in (40, 80)] + [bench.Shape(1, 4, 2, 160, 8, 8)]
    report = bench.run(shapes, ["lightning", "block_based"], seconds=0.01)
    bench.plot(report, tmp_path / "x.svg")
    words = re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "x.svg").read_text())
    fastest = min((r for r in report["rows"] if r["shape"]["tokens"] == 160), key=lambda r: r["seconds"])["method"]
    assert any(w.startswith(f"On B1 H4/2 N160 R8 D8 {fastest} is the fastest: ") for w in words)
    assert words.count("lightning") == words.count("block_based") == 2  # at the ends of their lines, in both panels
    assert {"B1 H2/1 R8 D8", "B1 H4/2 R8 D8", "40", "80", "160"} <= set(words) and not any("10^" in w for w in words)


def test_plot_with_nothing_to_draw(tmp_path):
    bench.register_method("mine", lambda q, k, v, g: v)
    report = bench.run([bench.Shape(1, 1, 1, 9, 8, 8)], ["mine"])
    with pytest.raises(ValueError, match="there is nothing to plot"):
        bench.plot(report, tmp_path / "x.png")
