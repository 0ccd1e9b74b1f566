import gc
import os
import subprocess

# Tracing a small model once takes a quarter longer with torch's cache of what operators give than without.
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")
if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores, and threads of OpenMP that wait for a core use up another
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from leanfleet import communicators
from support.cpu_time import (  # noqa: F401
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_runtest_makereport,
    pytest_runtest_protocol,
    slow_if,
)
from support.kernels import instruction_sets, library_held_to
from support.paths import ROOT

# What is imported and collected stays: the collector would walk over it again and again.
gc.disable()
# Numbers drawn without a seed of their own are the same in every run: torch seeds each process anew.
torch.manual_seed(0)


@pytest.fixture(autouse=True)
def same_numbers_in_every_run():
    """And in every choice of tests."""
    torch.manual_seed(0)


def pytest_collection_finish():
    """Tracing makes small objects by the million: with so many modules in memory, a tenth of its time went to the collector."""
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


def pytest_unconfigure():
    """Extension modules whose objects are still there at the end say so in hundreds of lines."""
    gc.unfreeze()


def pytest_generate_tests(metafunc):
    """Tests that use `instruction_set` run on the kernels for every instruction set that the processor has, all but its best in
    the slow tier, but for those marked `everywhere`."""
    chosen = (mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "instruction_set" not in metafunc.fixturenames or any("instruction_set" in names for names in chosen):
        return
    names = instruction_sets()
    alone = metafunc.definition.get_closest_marker("own_instruction_set") is not None
    if metafunc.definition.get_closest_marker("everywhere") is None:
        names = slow_if(names, names[:-1])
    metafunc.parametrize("instruction_set", names[-1:] if alone else names, indirect=True)


@pytest.fixture
def instruction_set(request, monkeypatch):
    """The kernels that libleanfleet.so runs in this test, by name."""
    if request.param != instruction_sets()[-1]:
        monkeypatch.setenv("LEANFLEET_LIBRARY_DIR", str(library_held_to(request.param)))
    return request.param


@pytest.fixture
def world_of_one():
    """For tests of all operators: those that exchange have no other rank."""
    with communicators.create():
        yield


@pytest.fixture
def one_torch_thread():
    """For thousands of calls on small tensors, which torch's threads only slow down: they fight with the kernels' threads."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.fixture(scope="session")
def fake_nccl(tmp_path_factory):
    """The path of a library that stands for NCCL: tests/cpp/fake_nccl.cpp."""
    library = tmp_path_factory.mktemp("nccl") / "libfake_nccl.so"
    source = ROOT / "tests" / "cpp" / "fake_nccl.cpp"
    subprocess.run([os.environ.get("CXX", "c++"), "-std=c++17", "-shared", "-fPIC", source, "-o", library], check=True)
    return str(library)
