"""The kernels' own threads: after a fork, and where the system gives none or few."""

import os
import subprocess
import sys

import pytest

from support.paths import ROOT

# Calls without torch, whose own threads and locks a fork would bring into play.
CALL = """
import array, os, resource, signal, sys, threading
from leanfleet import native

def call(threads):
    numbers = lambda count: array.array("f", [0.5] * count)
    q, k, v, out, lse = numbers(8 * 64), numbers(8 * 640), numbers(8 * 640), numbers(8 * 64), numbers(8)
    entry = lambda tensor, *shape: (tensor.buffer_info()[0], shape, "float32")
    call = native.Call("LeanAttention", [entry(q, 1, 8, 1, 64), entry(k, 1, 8, 10, 64), entry(v, 1, 8, 10, 64)],
                       [entry(out, 1, 8, 1, 64), entry(lse, 1, 8, 1)], {}, threads=threads)
    size, _ = call.workspace()
    scratch = array.array("B", bytes(size + 256))
    out[:] = array.array("f", [float("nan")] * len(out))
    call.run((scratch.buffer_info()[0] + 255) // 256 * 256, size)
    assert all(abs(x - 0.5) < 1e-6 for x in out)
"""
FORK = (
    CALL
    + """
call(2)
for _ in range(2 if sys.argv[1] == "busy" else 0):  # calls are under way, pools made and left, at every fork
    threading.Thread(target=lambda: [(call(2), call(3)) for _ in iter(int, 1)], daemon=True).start()
for i in range(50):
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        for threads in (2, 3, 1):
            call(threads)
        if i % 10 == 0:  # and so in a child's child
            grandchild = os.fork()
            call(2)
            if grandchild == 0:
                os._exit(0)
            assert os.waitpid(grandchild, 0)[1] == 0
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status == 0, f"child {i} ended with status {status}"
call(2)
print("done", flush=True)
os._exit(0)
"""
)
DATA_LOADER = """
import multiprocessing
call(2)
with multiprocessing.get_context("fork").Pool(2) as pool:
    pool.map_async(call, [2] * 8).get(30)
print("done")
"""


def run(code, *arguments, limit=None):
    command = [sys.executable, "-P", "-c", code, *arguments]
    if limit:
        command = ["bash", "-c", f'ulimit -s {limit} && exec "$@"', "bash", *command]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and result.stdout.endswith("done\n"), result.stdout + result.stderr[-2000:]


@pytest.mark.parametrize("parent", ("idle", "busy"))
def test_forked_children_run(parent):
    run(FORK, parent)


def test_workers_of_a_forking_pool_run():
    run(CALL + DATA_LOADER)


def test_without_any_other_thread():
    """No thread can be made: a stack of 64 TiB, the default under this limit, fits nowhere."""
    run(CALL + "\nfor threads in (4, 2, 1, 4):\n    call(threads)\nprint('done')\n", limit=1 << 36)


def test_with_fewer_threads_than_wanted(tmp_path):
    program = tmp_path / "thread_pool_test"
    csrc = ROOT / "csrc"
    subprocess.run(
        [
            os.environ.get("CXX", "c++"),
            "-std=c++17",
            "-O1",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-I",
            str(csrc),
            "-o",
            str(program),
            str(ROOT / "tests" / "cpp" / "thread_pool_test.cpp"),
            str(csrc / "core" / "thread_pool.cpp"),
            "-pthread",
            "-ldl",
        ],
        check=True,
    )
    result = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, f"{result.returncode}: {result.stdout}{result.stderr}"
    assert result.stdout.split() == ["0", "1", "2", "3"]  # threads beside the caller's that there were
