"""An operator made by following "Add an operator" of CONTRIBUTING.md, in a copy of the tree: the schema's entry, its folder and
a few lines in Python, and it runs in PyTorch, is exported, runs in ONNX Runtime with and without the library, and is checked."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from support import ort_models
from support.paths import ROOT

DOCUMENTED = '''
paper = "none"
equation = "o = alpha x + y"
example = """
import torch
from leanfleet.export import scaled_add

print(scaled_add(torch.ones(1, 1, 1, 2), alpha=3.0))  # tensor([[[[3., 3.]]]])
"""
'''
REFERENCE = '''

def scaled_add(x, y=None, total=None, *, alpha=1.0, accumulate=0, layout="bhnd", compute_dtype=None):
    """output = alpha * x + y; with accumulate also total_out = total + the sum of x over tokens and columns."""
    match, _, compute, float_out = _begin("ScaledAdd", layout, x, compute_dtype)
    match("x", x, "T", "B [H N] D")
    match("y", y, "T", "B [H N] D")
    match("total", total, "F", "B H")
    output = alpha * x.to(compute) + (0 if y is None else y.to(compute))
    if not accumulate:
        return (output.to(x.dtype),)
    sums = _swap(x.to(compute), layout).sum((2, 3))
    return output.to(x.dtype), (total.to(compute) + sums).to(float_out)
'''
BODY = """
def _scaled_add(ops, x, a, ranks):
    output = ops.Mul(ops.float(x.x), a.alpha)
    if x.y is not None:
        output = ops.Add(output, ops.float(x.y))
    output = ops.CastLike(output, x.x)
    if not a.accumulate:
        return [output]
    sums = ops.ReduceSum(ops.float(x.x), [2 if a.layout == "bhnd" else 1, 3], keepdims=0)
    return [output, ops.Add(x.total, sums)]


_BODIES = {
    "ScaledAdd": _scaled_add,
"""
PYTORCH = """scaled_add = _function(_SPECS["ScaledAdd"], False)
scaled_add_ = _function(_SPECS["ScaledAdd"], True)
"""
# Runs where the copy is the package.
USE = """
import itertools, subprocess, sys
from pathlib import Path

import numpy as np
import onnxruntime
import torch

import leanfleet
from leanfleet import cli, ort_ops
from leanfleet.export import export, reference, scaled_add, scaled_add_

folder = Path(sys.argv[1])
assert Path(leanfleet.__file__).is_relative_to(folder), leanfleet.__file__
EPSILON = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def close(found, inputs, attrs, dtype):
    expected = reference.scaled_add(*(t.double() for t in inputs), **attrs)
    assert len(found) == len(expected) == 1 + attrs["accumulate"]
    for a, b in zip(found, expected):
        assert a.shape == b.shape and (a.double() - b).abs().max() <= 2 * EPSILON[dtype] * b.abs().max(), attrs


class Layer(torch.nn.Module):
    def __init__(self, attrs):
        super().__init__()
        self.attrs = attrs

    def forward(self, x, y, total=None):
        return scaled_add(x, y, total, **self.attrs)


for dtype, layout, accumulate in itertools.product(EPSILON, ("bhnd", "bnhd"), (0, 1)):
    torch.manual_seed(0)
    x, y, total = torch.randn(2, 3, 5, 8).to(dtype), torch.randn(2, 3, 5, 8).to(dtype), torch.randn(2, 3 if layout == "bhnd" else 5)
    attrs = dict(alpha=0.7, layout=layout, accumulate=accumulate)
    inputs = (x, y, total)[:2 + accumulate]
    kernel = scaled_add(*inputs, **attrs)
    close(kernel if accumulate else (kernel,), inputs, attrs, dtype)
    if accumulate:
        taken = total.clone()
        output = scaled_add_(x, y, taken, alpha=0.7, layout=layout)
        assert torch.equal(output, kernel[0]) and torch.equal(taken, kernel[1])
    # NumPy has no bfloat16. Of the others each type, layout and number of outputs goes to a file twice.
    if dtype is torch.bfloat16 or (dtype is torch.float16) != ((layout == "bnhd") == bool(accumulate)):
        continue
    path = folder / f"{str(dtype)[6:]}_{layout}_{accumulate}.onnx"
    export(Layer(attrs).eval(), inputs, path)
    plain = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    ours = ort_ops.make_session(path, ["CPUExecutionProvider"])
    for session in (plain, ours):
        feed = {i.name: t.numpy() for i, t in zip(session.get_inputs(), inputs, strict=True)}
        close([torch.from_numpy(a) for a in session.run(None, feed)], inputs, attrs, dtype)
    assert cli.main(["check", str(path)]) == 0, path
print("every call agrees")
"""


def edit(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1, f"{path}: {old!r} stands there {text.count(old)} times"
    path.write_text(text.replace(old, new))


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the tree with ScaledAdd, the tests' own operator, added step by step."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("csrc", "leanfleet", "export", "ort_ops", "trt_plugins", "docs/operators"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    toy = ort_models.TOY_SCHEMA.parent
    # Schema, folder, generated tables
    entry = re.sub(r"^doc = .*\n", lambda m: m[0] + DOCUMENTED.lstrip(), ort_models.TOY_SCHEMA.read_text(), count=1, flags=re.M)
    with (tree / "csrc" / "ops.toml").open("a") as schema:
        schema.write("\n" + entry)
    shutil.copytree(toy / "scaled_add", tree / "csrc" / "scaled_add")
    subprocess.run([sys.executable, tree / "csrc" / "generate.py"], check=True, capture_output=True)
    # Python
    with (tree / "export" / "reference.py").open("a") as file:
        file.write(REFERENCE)
    edit(tree / "export" / "function_bodies.py", "\n_BODIES = {\n", BODY)
    with (tree / "export" / "torch_ops.py").open("a") as file:
        file.write(PYTORCH)
    edit(
        tree / "export" / "__init__.py",
        "_HOMES = {\n",
        '_HOMES = {\n    "scaled_add": "torch_ops",\n    "scaled_add_": "torch_ops",\n',
    )
    edit(tree / "leanfleet" / "trial.py", "TOLERANCE = {\n", 'TOLERANCE = {\n    "ScaledAdd": (8, 4),\n')
    return tree


def run(tree, code, *arguments):
    """In a process for which the copy is leanfleet: -S reads no .pth files, which would bring an editable install first. The
    libraries are those that the tests build of the same folder and entry, and hold this operator alone."""
    environment = {
        **os.environ,
        "LEANFLEET_LIBRARY_DIR": str(ort_models.build_toy_library()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(tree), *filter(None, sys.path)]),
    }
    return subprocess.run(
        [sys.executable, "-S", "-P", "-c", code, *arguments], env=environment, cwd=tree, capture_output=True, text=True
    )


@pytest.mark.slow
def test_an_operator_made_by_the_recipe_runs_everywhere(tree):
    done = run(tree, USE, str(tree))
    assert done.returncode == 0 and "every call agrees" in done.stdout, (done.stdout + done.stderr)[-4000:]


def test_tables_and_page_are_generated(tree):
    tables = (tree / "csrc" / "core" / "op_specs.h").read_text()
    assert '"ScaledAdd"' in tables and '"LeanAttention"' in tables
    assert "| `alpha` | float | `1.0` |" in (tree / "docs" / "operators" / "scaled_add.md").read_text()
    assert subprocess.run([sys.executable, tree / "csrc" / "generate.py", "--check"], capture_output=True).returncode == 0


@pytest.mark.slow
def test_a_body_that_means_something_else_is_found(tree):
    """The check of the check: leanfleet check fails where the operator's body is not its kernel."""
    body = (
        "from leanfleet.export import function_bodies as f\n"
        'body = f._BODIES["ScaledAdd"]\n'
        'f._BODIES["ScaledAdd"] = lambda ops, x, a, ranks: [ops.Mul(o, 2.0) for o in body(ops, x, a, ranks)]\n'
    )
    code = body + (
        "import sys, torch\nfrom leanfleet import cli\nfrom leanfleet.export import export, scaled_add\n"
        "class Layer(torch.nn.Module):\n    def forward(self, x):\n        return scaled_add(x)\n"
        "export(Layer(), (torch.ones(1, 2, 3, 4),), 'wrong.onnx')\n"
        "sys.exit(cli.main(['check', 'wrong.onnx']))\n"
    )
    done = run(tree, code)
    assert done.returncode == 1 and "ScaledAdd" in done.stdout, done.stdout + done.stderr[-2000:]
