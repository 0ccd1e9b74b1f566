"""The plugin library's entry points, driven by a program that stands in for TensorRT (trt_driver.cpp)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from leanfleet import trt_plugins
from support import trt_cases
from support.paths import ROOT

try:
    LIBRARY = trt_plugins.get_plugin_path()
except FileNotFoundError as error:
    pytest.skip(str(error), allow_module_level=True)
HAS_GPU = torch.cuda.is_available()


def cuda_root():
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
    roots = [Path(nvcc).resolve().parents[1]] if nvcc else []
    roots += [Path(p) for p in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if p]
    return next(root for root in roots if (root / "include" / "cuda_runtime_api.h").exists())


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    program = tmp_path_factory.mktemp("driver") / "trt_driver"
    found = subprocess.run([sys.executable, str(ROOT / "csrc" / "find_headers.py"), "tensorrt"], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    root = cuda_root()
    libraries = next(p for p in (root / "lib64", root / "lib") if (p / "libcudart_static.a").exists())
    subprocess.run(
        [
            os.environ.get("CXX", "c++"),
            "-std=c++17",
            "-O2",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-rdynamic",
            "-isystem",
            found.stdout.strip(),
            "-isystem",
            str(root / "include"),
            str(ROOT / "tests" / "runtimes" / "trt_driver.cpp"),
            "-o",
            str(program),
            "-L",
            str(libraries),
            "-lcudart_static",
            "-ldl",
            "-lrt",
            "-lpthread",
        ],
        check=True,
    )
    return program


def test_every_entry_point(driver, tmp_path):
    """Types, shapes, formats, fields, serialization and damaged fields of every variant; with a GPU also launches on two
    streams, in place and in a captured graph."""
    cases = tmp_path / "cases"
    # The float64 references of all variants take minutes: with a GPU one in five, 5 having no factor in common with types
    # times layouts.
    count = trt_cases.write_cases(cases, with_data=HAS_GPU, every=5 if HAS_GPU else 1)
    command = [driver, LIBRARY, cases, *(["--launch"] if HAS_GPU else [])]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    last = result.stdout.splitlines()[-1]
    assert result.returncode == 0 and last.startswith(f"{count} cases"), result.stdout[-4000:]


def test_the_driver_notices(driver, tmp_path):
    """A wrong shape of an output makes it fail."""
    cases = tmp_path / "cases"
    trt_cases.write_cases(cases, dtypes=["float32"], layouts=["bhnd"], with_data=False)
    text = cases.read_bytes().replace(b"\nlse 0 - 0.0 3 3 6 5\n", b"\nlse 0 - 0.0 3 3 6 4\n")
    assert text != cases.read_bytes()
    cases.write_bytes(text)
    result = subprocess.run([driver, LIBRARY, cases], capture_output=True, text=True)
    assert result.returncode == 1 and "shape of lse" in result.stdout
