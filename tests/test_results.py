"""The committed tables are what the scripts of bench/ make of the committed JSON."""

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"
RESULTS = BENCH / "results"


def script(name, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    return importlib.import_module(name)


def read(pattern):
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob(pattern))]


def lean_attention(monkeypatch):
    return script("plot_lean_attention", monkeypatch).table(*read("lean_attention_h200.json"))


def whole_models(monkeypatch):
    plot = script("plot_end_to_end", monkeypatch)
    reports = [r for pattern in ("end_to_end*_h200.json", "generate_h200.json", "serving_*_h200.json") for r in read(pattern)]
    return plot.text(plot.by_script(reports))


def end_to_end(monkeypatch):
    (report,) = read("end_to_end_h200.json")
    return f"{report['date']}. {script('end_to_end', monkeypatch).text(report, report['rows'])}\n"


def ort_cuda(monkeypatch):
    bench = script("ort_cuda", monkeypatch)
    (report,) = read("ort_cuda_h200.json")
    return f"{report['date']}. {bench.text(report, report['rows'])}\n{bench.linear_text(report['linear'])}\n"


def linear_attention(monkeypatch):
    return script("linear_attention", monkeypatch).table(*read("linear_attention_h200.json"))


def cpu(isa):
    def made(monkeypatch):
        (report,) = read(f"cpu_{isa}.json")
        return f"{report['date']}. {script('cpu', monkeypatch).table(report['machine'], report['rows'])}\n"

    return made


def methods(monkeypatch):
    tables = script("methods_table", monkeypatch).tables
    return "\n".join(line for report in read("linear_methods_*_h200.json") for line in tables(report))


@pytest.mark.parametrize("name, made", (
    ("lean_attention_h200", lean_attention), ("whole_models_h200", whole_models), ("end_to_end_h200", end_to_end),
    ("linear_attention_h200", linear_attention), ("linear_methods_h200", methods), ("ort_cuda_h200", ort_cuda),
    ("cpu_avx2", cpu("avx2")), ("cpu_avx512", cpu("avx512"))))
def test_table_is_made_of_the_committed_json(name, made, monkeypatch):
    assert made(monkeypatch).strip() == (RESULTS / f"{name}.md").read_text().strip()
