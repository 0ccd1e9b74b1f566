"""The layers of the package, as pyproject.toml lists them for import-linter."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").exists())


def lint(folder):
    """lint-imports on the tree of this folder: (exit code, what it says). Without site (-S), whose hook for editable installs
    would find the tree that is installed."""
    command = [
        sys.executable,
        "-S",
        "-c",
        "from importlinter.cli import lint_imports_command; lint_imports_command()",
        "--no-cache",
        "--no-logo",
    ]
    path = os.pathsep.join([str(folder), *sys.path])
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env={"COLUMNS": "200", "PYTHONPATH": path})
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def tree(tmp_path):
    """A copy of the package's Python files."""
    shutil.copytree(ROOT / "leanfleet", tmp_path / "leanfleet", ignore=shutil.ignore_patterns("__pycache__", "lib"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "file,line,said",
    [
        ("leanfleet/tables.py", "def f():\n    from leanfleet import cli", "leanfleet.tables -> leanfleet.cli"),
        (
            "leanfleet/ort_ops/sessions.py",
            "from leanfleet.trt_plugins import running",
            "leanfleet.ort_ops.sessions -> leanfleet.trt_plugins",
        ),
        (
            "leanfleet/export/verification.py",
            "def f():\n    from leanfleet.ort_ops import make_session",
            "leanfleet.export.verification -> leanfleet.ort_ops",
        ),
        (
            "leanfleet/export/support.py",
            "def f():\n    from leanfleet.export import verification",
            "No circles inside a folder BROKEN",
        ),
        (
            "leanfleet/ort_ops/sessions.py",
            "from leanfleet.ort_ops import load_decoder",
            "Files do not import their folder BROKEN",
        ),
    ],
)
def test_an_arrow_up_or_in_a_circle_is_found(tree, file, line, said):
    with open(tree / file, "a") as out:
        out.write(f"\n\n{line}\n")
    code, told = lint(tree)
    assert code == 1 and said in told, told


def test_a_new_module_must_be_given_a_layer(tree):
    assert lint(tree)[0] == 0
    (tree / "leanfleet" / "new.py").write_text("")
    code, told = lint(tree)
    assert code == 1 and "leanfleet.new" in told


def test_no_files_import_in_a_circle():
    """Also through a folder's __init__.py, which import-linter takes for the folder."""
    graph = grimp.build_graph("leanfleet", cache_dir=None)
    left = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    while leaves := [module for module, imported in left.items() if not imported & left.keys()]:
        for module in leaves:
            del left[module]
    assert not left, f"these import each other, or what does: {sorted(left)}"
