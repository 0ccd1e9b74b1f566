"""What keeps `make test` quick: tests that take long are marked, and all tests are in one of the two runs."""

import os
import re
import subprocess
import sys

import pytest

from support.paths import ROOT

WORK = """
import os, subprocess, sys, time
import pytest

BUSY = "import time\\nwhile time.process_time() < 0.6: pass"

def test_waits():
    time.sleep(0.8)

def test_in_a_process():
    subprocess.run([sys.executable, "-c", BUSY])

@pytest.mark.slow
def test_marked():
    exec(BUSY, {})
    subprocess.run([sys.executable, "-c", BUSY])
"""


@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n", "1")], ids=["alone", "xdist"])
def test_what_works_too_long_without_the_mark_fails_the_run(workers, tmp_path):
    (tmp_path / "conftest.py").write_text("from support.cpu_time import *\n")
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT / 'tests'}\nmarkers = slow\n")
    (tmp_path / "test_work.py").write_text(WORK)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *workers]

    def run(*options):
        environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        return subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, env=environment)

    done = run("--most-cpu-seconds", "0.15")
    told = re.findall(r"^FAILED test_work.py::(\w+) takes", done.stdout, re.M)
    assert (done.returncode, told) == (1, ["test_in_a_process"]), done.stdout
    assert "3 passed" in done.stdout
    if not workers:
        assert run("--most-cpu-seconds", "0.15", "-m", "slow").returncode == 0


def test_the_two_runs_have_all_tests():
    makefile = (ROOT / "Makefile").read_text()
    quick = re.search(r"^test: setup\n((?:\t.*\n)+)", makefile, re.M)[1]
    rest = re.search(r"^test-all: test\n((?:\t.*\n)+)", makefile, re.M)[1]
    assert re.findall(r"\$\(PYTEST\) (.*)", quick) == ['-m "not slow"']
    assert re.findall(r"\$\(PYTEST\) (.*)", rest) == ["-m slow"]
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith("exec make test-all")
