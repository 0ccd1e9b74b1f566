"""bench/kernels/triton_baselines.py under Triton's interpreter, on the CPU, against the float64 reference.

The interpreter must be chosen before Triton is imported, which torch.compile may have done in this process; so the cases
run in a process of their own, one for all of them, and each is a test here. bfloat16 is for GPUs alone: the interpreter
computes with its bits as if they were integers.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from support.paths import ROOT

FILE = ROOT / "bench" / "kernels" / "triton_baselines.py"
# name: (function, operator, B, H, Hkv, N, R, Dv, type, decay)
CASES = {
    "lightning": ("lightning", "causal_linear_decay", 2, 4, 2, 70, 24, 40, "float32", "head"),
    "lightning without decay": ("lightning", "causal_linear_decay", 1, 3, 1, 65, 16, 16, "float32", "none"),
    "lightning of one token": ("lightning", "causal_linear_decay", 1, 5, 5, 1, 8, 3, "float32", "head"),
    "lightning of whole blocks": ("lightning", "causal_linear_decay", 1, 1, 1, 64, 16, 80, "float32", "head"),
    "lightning that forgets at once": ("lightning", "causal_linear_decay", 1, 2, 2, 40, 16, 16, "float32", float("-inf")),
    "lightning in float16": ("lightning", "causal_linear_decay", 1, 3, 1, 130, 32, 16, "float16", "head"),
    "fleet": ("fleet", "causal_linear_decay", 1, 4, 2, 70, 3, 20, "float32", "head"),
    "fleet without decay": ("fleet", "causal_linear_decay", 2, 1, 1, 129, 2, 16, "float32", "none"),
    "fleet that forgets at once": ("fleet", "causal_linear_decay", 1, 2, 2, 66, 2, 8, "float32", float("-inf")),
    "fleet, normalised": ("fleet normalised", "causal_linear_decay_normalized", 1, 2, 1, 100, 3, 40, "float32", "head"),
    "fleet, normalised, without decay": (
        "fleet normalised",
        "causal_linear_decay_normalized",
        1,
        2,
        2,
        63,
        3,
        24,
        "float32",
        "none",
    ),
    "normalized": ("normalized", "normalized_linear_attention", 2, 6, 2, 70, 24, 40, "float32", None),
    "normalized of one token": ("normalized", "normalized_linear_attention", 1, 1, 1, 1, 3, 5, "float32", None),
    "normalized in float16": ("normalized", "normalized_linear_attention", 1, 5, 1, 65, 16, 33, "float16", None),
}
SCRIPT = """
import importlib.util, json, sys
import torch
from leanfleet import bench
cases, file = json.loads(sys.argv[1]), sys.argv[2]
baselines = bench.load_file(file)
assert not [n for n in bench.methods() if "triton" in n] or torch.cuda.is_available()
functions = {"lightning": baselines.lightning, "fleet": baselines.fleet, "normalized": baselines.normalized,
             "fleet normalised": lambda *t: baselines.fleet(*t, normalize=True)}
for name, (function, operator, b, h, hkv, n, r, d, dtype, decay) in cases.items():
    torch.manual_seed(1)
    inputs = bench.make_inputs(operator, bench.Shape(b, h, hkv, n, r, d), dtype, decay)
    grad = torch.randn(b, h, n, d).to(inputs[0].dtype) if "fleet" not in function else None
    doubles = [None if t is None else t.double() for t in inputs]
    expected = bench._results(lambda *t: bench._judge(operator, t), doubles, grad)
    plain = bench._results(lambda *t: bench._judge(operator, t, inputs[0].dtype), inputs, grad)
    found = bench._results(functions[function], inputs, grad)
    for what, e, p, f in zip(("output", "dq", "dk", "dv"), expected, plain, found, strict=False):
        print(json.dumps([name, what, bench._error([f], [e]), bench._error([p], [e])]))
try:
    baselines.lightning(*bench.make_inputs("causal_linear_decay", bench.Shape(1, 1, 1, 8, 4, 4), log_decay="token"))
except ValueError as error:
    print(json.dumps(["refusal", str(error)]))
"""


@pytest.fixture(scope="module")
def lines():
    assert importlib.util.find_spec("triton"), "the tests need triton: pip install triton"
    run = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, json.dumps(CASES), str(FILE)],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_against_the_reference(lines, name):
    """Forward, and gradients where the paper has them: no more than 4 times what the reference loses in the inputs' type.

    float32 sums that are taken token by token (fleet) lose up to 10 times that; see leanfleet.bench.TOLERANCE.
    """
    found = {what: (error, plain) for case, what, error, plain in (line for line in lines if len(line) == 4) if case == name}
    fleet, dtype = CASES[name][0].startswith("fleet"), CASES[name][8]
    assert list(found) == (["output"] if fleet else ["output", "dq", "dk", "dv"])
    floor = {"float32": 2.0**-23, "float16": 2.0**-10}[dtype]
    for what, (error, plain) in found.items():
        assert error <= max((16 if fleet else 4) * plain, floor), (what, error, plain)


@pytest.mark.slow
def test_refusal(lines):
    assert lines[-1] == ["refusal", "log_decay has shape [1, 1, 8]; the papers' methods take one decay for each head"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "operator, grad",
    [
        ("causal_linear_decay", False),
        ("causal_linear_decay", True),
        ("causal_linear_decay_normalized", False),
        ("normalized_linear_attention", True),
    ],
)
def test_on_a_gpu(operator, grad, dtype):
    """Compiled, at sizes that are not the tiles', through the benchmark's own check."""
    from leanfleet import bench

    bench.load_file(FILE)
    names = [n for n in bench.methods(operator) if n.startswith("triton") and not (grad and "fleet" in n)]
    assert names
    shapes = [
        bench.Shape(2, 6, 2, 333, 64, 128),
        bench.Shape(1, 3, 3, 130, 24, 40),
        bench.Shape(1, 2, 2, 1000, 128, 64),
        bench.Shape(1, 1, 1, 70, 256, 200),
    ]
    rows = bench.run(shapes, names, operator, "cuda", dtype, "head", grad, seconds=0.0)["rows"]
    assert len(rows) == len(names) * len(shapes) and [r for r in rows if r["status"] != "ok"] == []
