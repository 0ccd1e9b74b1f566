"""The cost model behind CausalLinearDecay's `auto` on CUDA, judged by measured times: choose_test.cpp prints what it takes."""

import json
import math
import os
import subprocess

import pytest

from leanfleet import spec
from support.paths import ROOT

ALGORITHM = next(a for a in spec.all_specs()["CausalLinearDecay"].attrs if a.name == "algorithm")


@pytest.fixture(scope="module")
def choose(tmp_path_factory):
    """From (sm_count, element bytes, B, H, Hkv, N, R, Dv, normalize) tuples to the names of algorithms."""
    program = tmp_path_factory.mktemp("choose") / "choose_test"
    subprocess.run(
        [
            os.environ.get("CXX", "c++"),
            "-std=c++17",
            "-O2",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-fsanitize=undefined,float-cast-overflow",
            "-fno-sanitize-recover=all",
            "-I",
            str(ROOT / "csrc"),
            "-o",
            str(program),
            str(ROOT / "tests" / "cpp" / "choose_test.cpp"),
        ],
        check=True,
    )

    def run(shapes):
        text = "\n".join(" ".join(map(str, shape)) for shape in shapes)
        result = subprocess.run([program], input=text, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
        chosen = [ALGORITHM.values[int(line)] for line in result.stdout.split()]
        assert len(chosen) == len(shapes)
        return chosen

    return run


def test_every_shape_has_a_kernel(choose):
    shapes = [
        (sms, element, b, h, kv, n, r, v, normalize)
        for sms in (1, 80, 132)
        for element in (2, 4)
        for b, h, kv in ((1, 1, 1), (0, 4, 4), (1, 64, 1), (4096, 128, 128))
        for n in (0, 1, 2, 16, 64, 8192, 1 << 20)
        for r in (1, 8, 128, 512, 513, 4096)
        for v in (1, 64, 4096)
        for normalize in (0, 1)
    ]
    for shape, algorithm in zip(shapes, choose(shapes), strict=True):
        assert algorithm in ("causal_dot_product", "fleet", "lightning"), shape
        assert algorithm == "lightning" or shape[6] <= 512 or shape[8], shape


def test_what_the_papers_expect(choose):
    """A step is a recurrence, wide heads of long sequences are chunks."""
    step, chunks = choose([(132, 2, 16, 32, 32, 1, 128, 128, 0), (132, 2, 1, 32, 32, 8192, 128, 128, 0)])
    assert step == "causal_dot_product" and chunks == "lightning"


def test_close_to_the_fastest(choose):
    """At most 5% over the fastest of the three in geometric mean and 15% at worst, on 200 random shapes timed on an H200. The two
    recurrences are one kernel, timed twice: the faster time counts."""
    report = json.loads((ROOT / "bench" / "results" / "linear_attention_auto_h200.json").read_text())
    rows = [r for r in report["rows"] if r["section"] == "auto"]
    assert len(rows) == 200
    shapes = [(132, 4 if dtype == "float32" else 2, *sizes, 0) for *sizes, dtype in (r["shape"] for r in rows)]
    over = []
    for row, algorithm in zip(rows, choose(shapes), strict=True):
        recurrence = min(row["us"]["causal_dot_product"], row["us"]["fleet"])
        taken = row["us"]["lightning"] if algorithm == "lightning" else recurrence
        over.append((taken / min(row["us"].values()), row["shape"], algorithm, row["us"]))
    over.sort(reverse=True, key=lambda item: item[0])
    mean = math.exp(sum(math.log(x) for x, *_ in over) / len(over))
    assert mean <= 1.05, f"geometric mean {mean:.3f}; worst {over[:5]}"
    assert over[0][0] <= 1.15, over[:5]
