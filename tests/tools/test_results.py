"""The committed tables and pictures are what the scripts of bench/ make of the committed JSON."""

import argparse
import html
import io
import json
import re
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.benchmarks import script
from support.paths import ROOT

BENCH = ROOT / "bench"
RESULTS = BENCH / "results"
OVERVIEW = BENCH.parent / "docs" / "pictures" / "overview.svg"


def read(pattern):
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob(pattern))]


FIGURES = script("figures")


@pytest.mark.parametrize("name", FIGURES.TABLES)
def test_table_is_made_of_the_committed_json(name):
    assert FIGURES.table(name) == (RESULTS / f"{name}.md").read_text()


def test_every_committed_table_is_made_by_a_script():
    assert {path.stem for path in RESULTS.glob("*.md")} == set(FIGURES.TABLES)


def test_one_command_makes_all_tables_and_plots(tmp_path, capsys, monkeypatch):
    """The plots themselves are compared below; here none is drawn."""
    monkeypatch.setattr(script("plots.pictures"), "draw", lambda folder: [folder / "plots.svg"])
    monkeypatch.setattr("sys.argv", ["bench", "figures", str(tmp_path)])
    assert script("__main__").main() == 0
    told = {Path(line).name for line in capsys.readouterr().out.splitlines()}
    assert told == {f"{name}.md" for name in FIGURES.TABLES} | {"plots.svg", OVERVIEW.name}
    for path in tmp_path.iterdir():
        committed = OVERVIEW if path.name == OVERVIEW.name else RESULTS / path.name
        assert path.read_text() == committed.read_text()


def pictures():
    return sorted(path for path in RESULTS.glob("*.svg") if path.name != "decoder_layer.svg")  # that one needs a model


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """{file name: path} of all plots, drawn again; and {file name: what their texts do that they must not}."""
    from leanfleet import plotting

    folder, faults = tmp_path_factory.mktemp("pictures"), {}
    save = plotting._save

    def checked(figure, path):
        save(figure, path)
        faults[path.name] = list(collisions(figure, html.unescape(path.read_text())))

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(plotting, "_save", checked)
        made = script("plots.pictures").draw(folder)
    return {path.name: path for path in made}, faults


def collisions(figure, svg):
    """Texts that run into each other or over the page's edge."""
    from matplotlib.backends.backend_svg import RendererSVG
    from matplotlib.text import Text

    figure.set_dpi(72)  # as it is laid out for an SVG
    renderer = RendererSVG(figure.bbox.width, figure.bbox.height, io.StringIO())
    words = set(texts(svg))  # not those of ticks beyond an axis' limits
    shown = [t for t in dict.fromkeys(figure.findobj(Text)) if t.get_text() and words.issuperset(t.get_text().split("\n"))]
    boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in shown]
    assert len(boxes) > 10
    page = figure.bbox
    for text, box in boxes:
        if box.x0 < 0 or box.x1 > page.x1 or box.y0 < 0 or box.y1 > page.y1:
            yield f"{text!r} leaves the page"
    for i, (text, box) in enumerate(boxes):
        for other, place in boxes[:i]:
            width = min(box.x1, place.x1) - max(box.x0, place.x0)
            height = min(box.y1, place.y1) - max(box.y0, place.y0)
            if width > 1 and height > 1:
                yield f"{text!r} runs into {other!r}"


def texts(svg):
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def maker(svg):
    return re.search(r"<dc:title>(.*?)</dc:title>", svg).group(1)


def test_every_committed_plot_is_drawn_by_a_script(drawn):
    assert {path.name for path in pictures()} == set(drawn[0])


@pytest.mark.parametrize("committed", pictures(), ids=lambda path: path.stem)
def test_plot_is_made_of_the_committed_json(committed, drawn):
    """The same with the matplotlib that drew it, but for the last digit of a coordinate, which processors round differently; with
    another one the same words and numbers."""
    old, new = committed.read_text(), drawn[0][committed.name].read_text()
    assert len(texts(new)) > 10 and texts(new) == texts(old)
    if maker(new) == maker(old):
        coordinate = re.compile(r"-?[0-9]+\.[0-9]+")
        assert coordinate.split(new) == coordinate.split(old)
        pairs = zip(map(float, coordinate.findall(new)), map(float, coordinate.findall(old)), strict=True)
        assert all(abs(x - y) < 1e-5 for x, y in pairs)


@pytest.mark.parametrize("name", [path.name for path in pictures()])
def test_texts_of_plots_keep_clear_of_each_other(name, drawn):
    assert drawn[1][name] == []


@pytest.mark.parametrize("picture", [*pictures(), RESULTS / "decoder_layer.svg", OVERVIEW], ids=lambda path: path.stem)
def test_pictures_are_legible_in_light_and_dark(picture):
    """Every colour has a dark form, and words stand out from the background in both."""
    from leanfleet import plotting

    svg = picture.read_text()
    body = re.sub(r"<style>@media.*?</style>", "", svg)
    used = set(re.findall(r"#[0-9a-f]{6}\b", body))
    assert plotting.CARD in used and used <= set(plotting.DARK)
    for color in used:
        assert f"{plotting.DARK[color]}!important" in svg
    for color in (plotting.INK, plotting.MUTED):
        assert contrast(color, plotting.CARD) > 4.5 < contrast(plotting.DARK[color], plotting.DARK[plotting.CARD])


def contrast(one, other):
    """WCAG's contrast of two colours."""

    def luminance(color):
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def test_overview_is_what_its_script_draws():
    assert script("plots.draw_overview").draw() == OVERVIEW.read_text()


def test_a_plot_shows_what_changes_in_the_json(tmp_path):
    plot = script("plots.plot_lean_attention")
    (report,) = read("lean_attention_h200.json")
    row = next(r for r in report["rows"] if r["case"] == "prompt B1 32/8 D128 N 8192")
    row["us"]["leanfleet"]["median"] = best = plot.best(row, "sdpa") / 3
    plot.prompts(report, tmp_path / "x.svg")
    assert any(t.startswith(f"3.00x ({best:.0f} µs") for t in texts((tmp_path / "x.svg").read_text()))


# README


def ratio(row, peer, own="leanfleet", times="us"):
    """How many times a peer's better mode takes our median."""
    found = [t["median"] for name, t in row[times].items() if name.split("[")[0] == peer]
    return min(found) / row[times][own]["median"]


def rows_of(name, key="rows"):
    return read(f"{name}.json")[0][key]


def case(name, text):
    (row,) = (r for r in rows_of(name) if r.get("case") == text)
    return row


def span(values):
    return [min(values), max(values)]


def linear(section, words=""):
    """Of each row of a section, fla's time over ours."""
    rows = [r for r in rows_of("linear_attention_h200") if r["section"] == section and words in r["case"]]
    return {r["case"]: r["fla_us"] / r["us"].get("auto", r["us"].get("ours")) for r in rows}


def decoders(key):
    big = [r for r in rows_of("end_to_end_h200") if r["model"] in ("phi3-medium", "llama3-8b") and "LeanAttention" in r]
    found = [r for r in big if r["LeanAttention"].get(key) and r["GroupQueryAttention"].get(key)]
    return [r["GroupQueryAttention"][key] / r["LeanAttention"][key] for r in found]


def long_prompts():
    rows = [r for r in rows_of("end_to_end_answers_h200", "answers") if "LeanAttention" in r]
    times = [(r, r["GroupQueryAttention"]["prompt_seconds"] / r["LeanAttention"]["prompt_seconds"]) for r in rows]
    return [t for r, t in times if r["batch"] * r["prompt"] == 32768 and r["batch"] == 1]


def genai(kind):
    return [line["genai_ratio"] for line in rows_of("genai_h200", "lines") if line["kind"] == kind]


def on_the_cpu(line, file="cpu_avx512"):
    """The fastest peer over the faster of ours."""
    found = {r["implementation"]: r["seconds"] for r in rows_of(file) if r["line"] == line}
    ours = [found.pop(name) for name in ("leanfleet in PyTorch", "leanfleet in ORT")]
    return min(found.values()) / min(ours)


def on_both_cpus(line):
    return [on_the_cpu(line, file) for file in ("cpu_avx512", "cpu_avx512_epyc")]


ATTENTION, PROMPTS = "lean_attention_h200", "lean_attention_prompts_h200"
# {the beginning of a row of README's table: its figures}
QUOTED = {
    "decode step with append and RoPE": lambda: [
        ratio(case(ATTENTION, f"step B{b} 32/8 D128 ctx {n}"), "fa3") for b, n in ((1, 8192), (16, 8192), (64, 4096))
    ],
    "decode, attention alone, batch 1:": lambda: [
        case(ATTENTION, f"decode B1 32/8 D128 ctx {n}")["speedup_over_best_peer"] for n in (1024, 8192, 131072)
    ],
    "decode, attention alone, batch 16": lambda: [case(ATTENTION, "decode B16 32/8 D128 ctx 8192")["speedup_over_best_peer"]],
    "8 or 16 new tokens": lambda: [ratio(case(ATTENTION, f"tokens Nq{n} B16 32/8 D128 ctx 8192"), "fa3") for n in (8, 16)],
    "prompt of 8k tokens": lambda: [
        *(case(PROMPTS, f"prompt B1 {heads} N 8192")["speedup_over_best_peer"] for heads in ("32/8 D128", "32/32 D64")),
        statistics.geometric_mean(r["speedup_over_best_peer"] for r in rows_of(PROMPTS) if "seed" in r),
    ],
    "one node in ONNX Runtime": lambda: [
        n
        for key in ("run", "graph run")
        for n in span([r["GroupQueryAttention"][key] / r["leanfleet"][key] for r in rows_of("ort_cuda_h200")])
    ],
    "whole decoders": lambda: span(decoders("graph_step")),
    "the same, prompts of 32k": long_prompts,
    "continuous batching": lambda: span([r["speed_up"] for r in read("serving_*_h200.json")]),
    "Llama-3.2-1B's shape: a step; 256": lambda: [*span(genai("step")), *genai("serving")],
    "CausalLinearDecay forward, bfloat16": lambda: [
        *span([t for name, t in linear("forward").items() if name != "B16 H32 N2048 D64"]),
        linear("forward")["B16 H32 N2048 D64"],
    ],
    "CausalLinearDecay forward, float32": lambda: [
        n for s in ("float32, fla in full float32", "float32") for n in span(linear(s).values())
    ],
    "NormalizedLinearAttention forward": lambda: [
        n for words in ("forward", "backward") for n in span(linear("normalized", words).values())
    ],
    "CPU, 2 cores: SmolLM2-135M": lambda: [
        row["times_faster_than"]["onnxruntime_group_query_attention"]
        for row in read("generate_cpu.json")[0]["speed"]["rows"]
        if row["context"] in (128, 2048, 8000)
    ],
    "CPU, 2 threads of a Xeon; of an EPYC: decode over 8k": lambda: on_both_cpus("decode B1 32/8x128 8192"),
    "the same, decode over 64k": lambda: on_both_cpus("decode B1 1/1x64 65536"),
    "CPU, 2 threads of a Xeon: gated delta rule": lambda: [
        on_the_cpu(line) for line in ("delta B1 H16 N1024 128x128", "delta step B8 H32 128x128")
    ],
}


def quoted(text):
    """{the first cell of a row of its table of speeds: (the figures in its last cell, whether it is bold)}"""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if re.search(r"^\|.*\dx\**[ |;/]", line)]
    return {row[0]: re.findall(r"\d+\.\d+", row[-1]) for row in rows}


def test_readme_quotes_what_the_files_say():
    text = (BENCH.parent / "README.md").read_text()
    found = quoted(text)
    for label, figures in found.items():
        made = [made for begin, made in QUOTED.items() if label.startswith(begin)]
        assert len(made) == 1, f"README has a row {label!r} that QUOTED does not say where its figures come from"
        assert figures == [f"{n:.2f}" for n in made[0]()], label
    assert len(found) == len(QUOTED)
    outside = re.sub(r"^\|.*$", "", text, flags=re.M)
    assert not re.search(r"\d\.\d+x\b", outside), "a figure outside of the table"


# bench again


def test_every_committed_file_is_measured_again_or_has_a_reason():
    again = script("again")
    names = [m.name for m in again.MEASUREMENTS]
    assert sorted([*names, *again.LEFT]) == sorted(path.stem for path in RESULTS.glob("*.json"))


class Parsed(Exception):
    pass


def command_lines():
    again = script("again")
    return [(m.name, line) for m in again.MEASUREMENTS for line in again.lines_of(m, Path("again"))]


@pytest.mark.parametrize("line", [line for _, line in command_lines()], ids=lambda line: " ".join(line[2:]))
def test_scripts_take_the_arguments_that_measure_again(line, monkeypatch):
    module = script(line[2].removeprefix("bench."))
    parse = argparse.ArgumentParser.parse_args

    def parsed(self, *args, **kwargs):
        parse(self, *args, **kwargs)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    monkeypatch.setattr("sys.argv", [line[2], *line[3:]])
    with pytest.raises(Parsed):
        module.main()


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_places_of_figures_are_unique(path):
    places = [place for place, *_ in script("again").numbers(json.loads(path.read_text()))]
    assert len(places) == len(set(places)) > 2


def two(was, now):
    return script("again").compared({"rows": [was]}, {"rows": [now]})


def moved(was, now):
    report = two({"case": "a", **was}, {"case": "a", **now})
    assert report.compared == 1 and not report.gone and not report.new
    return len(report.moved)


def percentiles(median, p10, p90):
    return {"us": {"leanfleet": {"median": median, "p10": p10, "p90": p90}}}


@pytest.mark.parametrize(
    "was, now, expected",
    (
        (percentiles(10, 9, 11), percentiles(11.9, 11, 12), 0),
        (percentiles(10, 9, 11), percentiles(12.5, 11.5, 13), 1),
        (percentiles(10, 9.9, 10.1), percentiles(9.7, 9.6, 9.8), 1),
        ({"seconds": 1.0, "spread": 0.1}, {"seconds": 1.15, "spread": 0.1}, 0),
        ({"seconds": 1.0, "spread": 0.01}, {"seconds": 1.15, "spread": 0.1}, 1),
        ({"graph_step": 1.0, "graph_spread": 0.1}, {"graph_step": 1.3, "graph_spread": 0.1}, 1),
        ({"us": {"ours": 10.0}}, {"us": {"ours": 10.4}}, 0),
        ({"us": {"ours": 10.0}}, {"us": {"ours": 10.6}}, 1),
        ({"us": {"ours": 10.0}}, {"us": {"ours": float("nan")}}, 1),
        ({"us": {"ours": 0.0}}, {"us": {"ours": 0.1}}, 1),
        ({"floor_us": 10.0, "us": {"ours": 10.0}}, {"floor_us": 99.0, "us": {"ours": 10.0}}, 0),
    ),
)
def test_what_moves_by_more_than_its_spread(was, now, expected):
    assert moved(was, now) == expected == moved(now, was)


def test_rows_are_found_by_their_labels():
    again = script("again")
    rows = [{"batch": b, "shape": [1, b], "us": float(b)} for b in (1, 2, 3)]
    report = again.compared({"rows": rows}, {"rows": [rows[2], rows[0], {**rows[1], "us": 4.0}]})
    assert report.compared == 3 and [m.place for m in report.moved] == ["/rows[batch=2 shape=[1,2]]/us"] and not report.same
    report = again.compared({"rows": rows}, {"rows": [*rows[:2], {"batch": 4, "shape": [1, 4], "us": 3.0}]})
    assert report.gone == ["/rows[batch=3 shape=[1,3]]/us"] and report.new == ["/rows[batch=4 shape=[1,4]]/us"]
    assert not report.same and not report.moved


def bench(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["bench", *map(str, arguments)])
    return script("__main__").main(), *capsys.readouterr()


def test_compare_tells_what_moved(tmp_path, monkeypatch, capsys):
    committed = RESULTS / "lean_attention_h200.json"
    report = json.loads(committed.read_text())
    other = tmp_path / "again.json"
    other.write_text(json.dumps(report))
    code, out, _ = bench(monkeypatch, capsys, "compare", committed, other)
    assert code == 0 and "0 moved" in out
    times = report["rows"][0]["us"]["leanfleet"]
    report["rows"][0]["us"]["leanfleet"] = {name: 2 * t for name, t in times.items()}
    other.write_text(json.dumps(report))
    code, out, _ = bench(monkeypatch, capsys, "compare", committed, other)
    assert code == 1 and "1 moved" in out and "+100.0%" in out and report["rows"][0]["case"] in out


@pytest.mark.parametrize("content, words", (("{", "holds no JSON"), ("{}", "no figure in common"), (None, "No such file")))
def test_compare_refuses_what_is_no_result(content, words, tmp_path, monkeypatch, capsys):
    if content is not None:
        (tmp_path / "x.json").write_text(content)
    code, out, err = bench(monkeypatch, capsys, "compare", RESULTS / "cpu_avx2.json", tmp_path / "x.json")
    assert code == 2 and out == "" and err.count("\n") == 1 and words in err


def test_again_without_a_gpu(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, out, err = bench(monkeypatch, capsys, "again", "--out", tmp_path / "out")
    assert code == 2 and err.count("\n") == 1 and "there is no CUDA GPU here" in err and not (tmp_path / "out").exists()
    code, out, err = bench(monkeypatch, capsys, "again", "--only", "vllm")
    assert code == 2 and "needs vLLM" in err
    assert bench(monkeypatch, capsys, "again", "--list", "--only", "causal_conv")[0] == 0


def test_again_measures_and_compares(monkeypatch, capsys, tmp_path):
    """With a script in the place of the real one, which finds a figure moved; one that fails ends it all."""
    again = script("again")

    def measured(line):
        report = json.loads((RESULTS / "causal_conv_h200.json").read_text())
        report["rows"][0]["us"]["ours"] *= 1.5
        Path(f"{line[3]}.json").write_text(json.dumps(report))
        return SimpleNamespace(returncode=codes.pop())

    monkeypatch.setattr(again.subprocess, "run", measured)
    monkeypatch.setattr(again, "refuse_without_gpu", lambda: None)
    codes = [0]
    code, out, err = bench(monkeypatch, capsys, "again", "--only", "causal_conv", "--out", tmp_path)
    assert code == 1 and "+50.0%" in out and "81 figures, 1 moved" in out
    codes = [3]
    code, out, err = bench(monkeypatch, capsys, "again", "--only", "causal_conv", "--out", tmp_path)
    assert code == 2 and "ended with 3" in err


@pytest.mark.parametrize(
    "number, words",
    ((512, "512"), (1000, "1k"), (1024, "1k"), (1536, "1.5k"), (100_000, "100k"), (131_072, "128k"), (1100, "1,100")),
)
def test_tokens_in_words(number, words):
    from leanfleet import plotting

    assert plotting.tokens(number) == words


def test_titles_say_what_ratios_mean():
    from leanfleet import plotting

    assert plotting.verdict(1.02) == "on par with" and plotting.verdict(1.31) == "1.31x as fast as"
    assert plotting.verdict(0.8) == "0.80x as fast as"
    assert plotting.span([1.2, 0.97, 14.52]) == "0.97x to 14.5x" and plotting.span([1, 1]) == "1.00x"
