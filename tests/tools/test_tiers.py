"""What keeps `make test` quick: tests that take long are marked, and all tests are in one of the two runs."""

import os
import re
import subprocess
import sys
from functools import partial

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


def run_tests(folder, work, *options, **environment):
    """What pytest says of the tests `work` in a project of their own that has cpu_time's options."""
    (folder / "conftest.py").write_text("from support.cpu_time import *\n")
    (folder / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT / 'tests'}\nmarkers = slow\n")
    (folder / "test_work.py").write_text(work)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n", "1")], ids=["alone", "xdist"])
def test_what_works_too_long_without_the_mark_fails_the_run(workers, tmp_path):
    run = partial(run_tests, tmp_path, WORK, *workers)

    done = run("--most-cpu-seconds", "0.15")
    told = re.findall(r"^FAILED test_work.py::(\w+) takes", done.stdout, re.M)
    assert (done.returncode, told) == (1, ["test_in_a_process"]), done.stdout
    assert "3 passed" in done.stdout
    if not workers:
        assert run("--most-cpu-seconds", "0.15", "-m", "slow").returncode == 0


def test_each_test_has_its_day(tmp_path):
    """In so many days, and no other."""
    work = (
        "import pytest\n\n@pytest.mark.slow\n@pytest.mark.parametrize('n', range(40))\ndef test_one(n):\n    pass\n\n"
        "def test_quick():\n    pass\n"
    )
    found = []
    for day in range(6):
        done = run_tests(tmp_path, work, "-v", "-m", "slow", "--days", "3", LEANFLEET_TEST_DAY=f"{739000 + day}")
        found.append(set(re.findall(r"test_one\[(\d+)\] PASSED", done.stdout)))
    assert all(found) and sum(map(len, found[:3])) == len(set.union(*found[:3])) == 40 and found[:3] == found[3:]
    done = run_tests(tmp_path, work, "--days", "0")
    assert done.returncode == 4 and "--days is 0; expected 1 or more" in done.stderr


def test_the_two_runs_have_all_tests():
    makefile = (ROOT / "Makefile").read_text()
    quick = re.search(r"^test: setup\n((?:\t.*\n)+)", makefile, re.M)[1]
    rest = re.search(r"^test-all: test\n((?:\t.*\n)+)", makefile, re.M)[1]
    assert re.findall(r"\$\(PYTEST\) (.*)", quick) == ['-m "not slow"']
    assert re.findall(r"\$\(PYTEST\) (.*)", rest) == ["-m slow --days $(DAYS)"]
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith("exec make test-all")
