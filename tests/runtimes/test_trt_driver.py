"""The plugin library's entry points, driven by a program that stands in for TensorRT (trt_driver.cpp)."""

import os
import subprocess

import pytest
import torch

from leanfleet import trt_plugins
from support import trt_cases

try:
    LIBRARY = trt_plugins.get_plugin_path()
except FileNotFoundError as error:
    pytest.skip(str(error), allow_module_level=True)
HAS_GPU = torch.cuda.is_available()


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    program = tmp_path_factory.mktemp("driver") / "trt_driver"
    trt_cases.build_driver(program)
    return program


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_driver_notices(driver, tmp_path):
    """A wrong shape of an output makes it fail."""
    cases = tmp_path / "cases"
    trt_cases.write_cases(cases, dtypes=["float32"], layouts=["bhnd"], with_data=False)
    text = cases.read_bytes().replace(b"\nlse 0 - 0.0 3 3 6 5\n", b"\nlse 0 - 0.0 3 3 6 4\n")
    assert text != cases.read_bytes()
    cases.write_bytes(text)
    without_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # the cases have no numbers to launch with
    result = subprocess.run([driver, LIBRARY, cases], env=without_gpu, capture_output=True, text=True)
    assert result.returncode == 1 and "shape of lse" in result.stdout
