"""The documents say what is so: their Python runs and prints what they say it prints, README is short, all operators have a
page."""

import importlib.util
import json
import re
import tomllib
from types import SimpleNamespace

import pytest
import yaml

from leanfleet import export, spec
from support.documents import DOCS, printed, python_blocks, run
from support.paths import ROOT

README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", spec.all_specs())
def test_operators_page(name, tmp_path, monkeypatch):
    op = spec.all_specs()[name]
    page = (DOCS / "operators" / f"{op.snake_name}.md").read_text()
    blocks = python_blocks(page)
    assert blocks and op.example + "\n" == blocks[0] and any(printed(line) for line in op.example.splitlines())
    for block in blocks:
        run(block, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", spec.all_specs())
def test_help_says_all_that_the_page_does(name):
    op = spec.all_specs()[name]
    text = getattr(export, op.snake_name).__doc__
    for entry in (*op.inputs, *op.outputs, *(a for a in op.attrs if not a.refuse)):
        assert f"    {entry.name}" in text and entry.doc in text, entry.name
    for part in (
        op.doc,
        op.paper,
        *op.equation.splitlines(),
        *op.example.splitlines(),
        *map(str, op.rules),
        "Raises ValueError",
    ):
        assert part and part in text or not part.strip(), part


def test_readme_is_short_and_its_program_runs(tmp_path, monkeypatch):
    assert len(README.splitlines()) <= 150
    assert re.search(r"^make demo\b.*\n(?:.*\n)?make test\b", README, re.M)
    (program,) = python_blocks(README)
    assert len([line for line in program.splitlines() if line.strip()]) <= 16
    run(program, tmp_path, monkeypatch)
    assert any(tmp_path.glob("*.onnx"))


def test_readme_names_all_operators_and_the_extras():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    install = (DOCS / "how_to" / "install.md").read_text()
    assert not [name for name in spec.all_specs() if not name.endswith("Grad") and name not in README]
    assert not [name for name in extras if name not in ("test", "docs") and f"| `{name}` |" not in install]


def load(path):
    """A Python file of docs/, which is no package."""
    found = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_parameters_of_docstrings_become_lists():
    pytest.importorskip("griffe")
    text = (
        "Does it.\n\nmodel: a path. a, b: numbers: two of\nthem. Returns a dict. Raises ValueError for others.\n\n"
        "    code: stays"
    )
    assert load(DOCS / "docstrings.py").split(text, ["model", "a", "b"]) == (
        "Does it.\n\n- **model**: a path.\n- **a, b**: numbers: two of them.\n\nReturns a dict. Raises ValueError for others."
        "\n\n    code: stays"
    )


def test_examples_of_docstrings_become_code():
    pytest.importorskip("griffe")
    shown = load(DOCS / "docstrings.py").shown
    assert shown("Does it.\n\nExample:\n    a = 1\n\n    if a:\n        do(a)", []) == (
        "Does it.\n\nExample:\n\n```python\na = 1\n\nif a:\n    do(a)\n```"
    )
    assert shown("Does it.\n\na: a number.", ["a"]) == "Does it.\n\n- **a**: a number."


def test_site_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("mkdocs")
    hooks = load(DOCS / "hooks.py")
    config = SimpleNamespace(site_dir=str(tmp_path))
    page = tmp_path / "page.html"
    page.write_text('<a href="https://example.org">a link</a><script src="a.js"></script><img src="b.svg">')
    hooks.on_post_build(config)
    for outside in (
        '<script src="https://example.org/a.js">',
        '<img src="//example.org/a.png">',
        '<link rel="stylesheet" href="http://example.org/a.css">',
    ):
        page.write_text(outside)
        with pytest.raises(Exception, match="example.org.* from elsewhere"):
            hooks.on_post_build(config)


def test_links_of_the_repository_point_into_the_site():
    pytest.importorskip("mkdocs")
    hooks = load(DOCS / "hooks.py")

    def moved(src, text):
        return hooks.on_page_markdown(text, SimpleNamespace(file=SimpleNamespace(src_uri=src)), None, None)

    assert moved("tutorials/x.md", "![a](../../bench/results/decoder_layer.svg)") == "![a](../results/decoder_layer.svg)"
    assert moved("performance.md", "[a](../bench/results/cpu_avx2.md#b)") == "[a](results/cpu_avx2.md#b)"
    assert moved("contributing.md", "[a](docs/how_to/build.md) [b](CHANGELOG.md)") == "[a](how_to/build.md) [b](changelog.md)"
    assert moved("index.md", "[a](https://example.org) [b](#here) [c](../csrc/ops.toml)") == (
        "[a](https://example.org) [b](#here) [c](../csrc/ops.toml)"
    )


def test_support_counts_the_model_types_of_the_zoo():
    zoo = tomllib.loads((ROOT / "tests" / "export" / "zoo.toml").read_text())
    served, refused = len(zoo["served"]), sum(map(len, zoo["refused"].values()))
    version = zoo["transformers"]
    expected = (
        f"{served} model types of transformers {version} (`tests/export/zoo.toml` names them); {refused} others are refused"
    )
    assert expected in (DOCS / "reference" / "support.md").read_text()


def entries(nav):
    for item in nav:
        for value in item.values() if isinstance(item, dict) else [item]:
            yield from entries(value) if isinstance(value, list) else [value]


def test_table_of_versions():
    specification = importlib.util.spec_from_file_location("versions", ROOT / "tests" / "versions.py")
    versions = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(versions)
    _, table, _ = versions.PAGE.read_text().split(versions.MARK)
    assert table == versions.table(json.loads(versions.RESULTS.read_text()))


def test_site_has_every_page():
    class Loader(yaml.SafeLoader):
        """mkdocs.yml names Python functions by tags, which do not matter here."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
    nav = set(entries(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]))
    pages = {str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md")}
    assert pages <= nav, f"not in mkdocs.yml: {sorted(pages - nav)}"
    assert {f"operators/{s.snake_name}.md" for s in spec.all_specs().values()} <= nav


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))], ids=lambda p: str(p.relative_to(ROOT))
)
def test_links_and_named_files_exist(path):
    """Links and files as they stand in the repository; the site's own check is in `make docs`."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        assert target.startswith(("http://", "https://")) or (path.parent / target).exists(), target
    for name in re.findall(r"`((?:csrc|export|ort_ops|trt_plugins|leanfleet|tests|bench|examples|docs)/[\w./*]+)`", text):
        found = list(ROOT.glob(name))
        assert found, name
    for name in re.findall(r'^--8<-- "([^":]+)', path.read_text(), re.M):
        assert (ROOT / name).exists(), name
