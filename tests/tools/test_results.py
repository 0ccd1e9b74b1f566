"""The committed tables and pictures are what the scripts of bench/ make of the committed JSON."""

import html
import io
import json
import re

import pytest

from support.benchmarks import script
from support.paths import ROOT

BENCH = ROOT / "bench"
RESULTS = BENCH / "results"
OVERVIEW = BENCH.parent / "docs" / "pictures" / "overview.svg"


def read(pattern):
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob(pattern))]


def lean_attention():
    return script("plots.plot_lean_attention").table(*read("lean_attention_h200.json"))


def whole_models():
    plot = script("plots.plot_end_to_end")
    reports = [r for pattern in ("end_to_end*_h200.json", "generate_h200.json", "serving_*_h200.json") for r in read(pattern)]
    return plot.text(plot.by_script(reports))


def end_to_end():
    (report,) = read("end_to_end_h200.json")
    return f"{report['date']}. {script('models.end_to_end').text(report, report['rows'])}\n"


def ort_cuda():
    bench = script("kernels.ort_cuda")
    (report,) = read("ort_cuda_h200.json")
    return f"{report['date']}. {bench.text(report, report['rows'])}\n{bench.linear_text(report['linear'])}\n"


def linear_attention():
    return script("kernels.linear_attention").table(*read("linear_attention_h200.json"))


def cpu(isa):
    def made():
        (report,) = read(f"cpu_{isa}.json")
        return f"{report['date']}. {script('kernels.cpu').table(report['machine'], report['rows'])}\n"

    return made


def methods():
    tables = script("kernels.methods_table").tables
    return "\n".join(line for report in read("linear_methods_*_h200.json") for line in tables(report))


def gated_delta_rule():
    return script("kernels.gated_delta_rule").table(*read("gated_delta_rule_h200.json"))


def linearise():
    (report,) = read("linearise_cpu.json")
    return script("models.linearise").table(report)


def quantised_weights():
    (report,) = read("quantised_weights_cpu.json")
    return script("models.quantised_weights").table(report)


def quantised_caches():
    (report,) = read("quantised_caches_cpu.json")
    return script("models.quantised_caches").table(report)


@pytest.mark.parametrize(
    "name, made",
    (
        ("lean_attention_h200", lean_attention),
        ("whole_models_h200", whole_models),
        ("end_to_end_h200", end_to_end),
        ("linear_attention_h200", linear_attention),
        ("linear_methods_h200", methods),
        ("ort_cuda_h200", ort_cuda),
        ("gated_delta_rule_h200", gated_delta_rule),
        ("linearise_cpu", linearise),
        ("quantised_weights_cpu", quantised_weights),
        ("quantised_caches_cpu", quantised_caches),
        ("cpu_avx2", cpu("avx2")),
        ("cpu_avx512", cpu("avx512")),
    ),
)
def test_table_is_made_of_the_committed_json(name, made):
    assert made().strip() == (RESULTS / f"{name}.md").read_text().strip()


def test_the_page_on_quantised_caches_has_their_table():
    rows, _, _ = quantised_caches().partition("\n\n")
    assert rows in (BENCH.parent / "docs" / "how_to" / "quantised_caches.md").read_text()


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
    """The same bytes with the matplotlib that drew it; with another one the same words and numbers."""
    old, new = committed.read_text(), drawn[0][committed.name].read_text()
    assert len(texts(new)) > 10 and texts(new) == texts(old)
    if maker(new) == maker(old):
        assert new == old


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
