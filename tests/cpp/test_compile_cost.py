"""What CUDA costs to compile: later changes keep below these caps.

The number of kernels says the same on every machine and is the cap that growth meets. Seconds do not: the same 1,228 kernels took
968 "on quiet cores" here and 1,030 there, as the yardstick feels less of a machine's neighbours than nvcc does; 1,388, another day, 785.
"""

import json
import re
import subprocess

import pytest

from support.cpu_time import time_compile
from support.paths import ROOT

MOST_KERNELS = 1480  # names of all instances of __global__ functions, two for each
MOST_SECONDS = 1400  # CPU seconds of all CUDA files on quiet cores, sm_90a and the PTX of sm_80: 12 minutes on CI's two cores
MOST_OF_A_FILE = 100  # so that no file is waited for


def compiled_log():
    """That of the build whose CUDA files were compiled last."""
    logs = [path for path in ROOT.glob("build/*/compile_times.jsonl") if time_compile().read(path, "CUDA")]
    if not logs:
        pytest.skip("nothing was compiled with nvcc here")
    return max(logs, key=lambda path: path.stat().st_mtime)


def test_cuda_compiles_within_its_caps():
    tool = time_compile()
    files = tool.read(compiled_log(), "CUDA")
    seconds = {name: tool.quiet_seconds(line) for name, line in files.items()}
    assert sum(seconds.values()) <= MOST_SECONDS
    slow = {name: taken for name, taken in seconds.items() if taken > MOST_OF_A_FILE}
    assert not slow, f"split the instances of {slow}"


def test_no_wgmma_waits_for_the_one_before():
    log = compiled_log()
    if log.parent.name.startswith("quick-"):
        pytest.skip("kernels are compiled without the optimisations that they ship with")
    files = time_compile().read(log, "CUDA")
    assert all("serialised" in line for line in files.values()), "compiled before this was noted: compile again"
    assert not {name: line["serialised"] for name, line in files.items() if line["serialised"]}


def test_no_kernel_is_compiled_in_two_files():
    """As happens where a function of a header that is no template calls what a file makes an instance of. Few are compiled."""
    folder, homes = compiled_log().parent, {}
    for name in re.findall(r"^build (\S+\.cu\.o):", (folder / "build.ninja").read_text(), re.MULTILINE):
        symbols = subprocess.run(["nm", folder / name], capture_output=True, text=True, check=True).stdout
        for kernel in set(re.findall(r" _Z\w*?__device_stub__(\w+)", symbols)):
            homes.setdefault(kernel, []).append(name)
    assert 100 < len(homes) <= MOST_KERNELS
    assert not {kernel: names for kernel, names in homes.items() if len(names) > 1}


def test_the_last_line_of_a_file_counts_and_failures_are_not_noted(tmp_path, capsys):
    log, tool = tmp_path / "log", time_compile()
    for seconds in (7.0, 3.0):
        with open(log, "a") as file:
            file.write(
                json.dumps(
                    {
                        "object": "a/x.cu.o",
                        "language": "CUDA",
                        "cpu_seconds": seconds,
                        "wall_seconds": 1,
                        "yardstick": 2 * tool.YARDSTICK,
                    }
                )
                + "\n"
            )
    assert tool.compile_timed(log, "CUDA", "bad", ["false"]) == 1
    assert tool.compile_timed(log, "CXX", "good", ["true"]) == 0
    said = "ptxas info : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient"
    assert tool.compile_timed(log, "wgmma", "slow", ["sh", "-c", f"echo fine; echo '{said}' >&2"]) == 0
    assert tool.read(log, "wgmma")["slow"]["serialised"] == [said] and not tool.read(log, "CXX")["good"]["serialised"]
    assert capsys.readouterr().out == f"fine\n{said}\n"
    assert {name: line["cpu_seconds"] for name, line in tool.read(log, "CUDA").items()} == {"a/x.cu.o": 3.0}
    assert list(tool.read(log, "CXX")) == ["good"]
    tool.report(log)
    assert capsys.readouterr().out == "CUDA: 1 files, 3 CPU seconds (2 on quiet cores); the longest: x 3 s\n"
