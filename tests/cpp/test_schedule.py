"""The stream-K schedule, exhaustively: schedule_test.cpp walks it as the kernels do."""

import os
import subprocess

import pytest

from support.paths import ROOT


@pytest.mark.slow
def test_every_tile_is_visited_once(tmp_path):
    program = tmp_path / "schedule_test"
    compiler = os.environ.get("CXX", "c++")
    subprocess.run(
        [
            compiler,
            "-std=c++17",
            "-O2",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-fsanitize=undefined",
            "-fno-sanitize-recover=undefined",
            "-I",
            str(ROOT / "csrc"),
            "-o",
            str(program),
            str(ROOT / "tests" / "cpp" / "schedule_test.cpp"),
        ],
        check=True,
    )
    result = subprocess.run([program], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert int(result.stdout.split()[0]) > 10_000
