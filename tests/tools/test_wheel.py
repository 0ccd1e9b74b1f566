"""The wheel: one py3-none platform file with the libraries inside, that works in a fresh environment with no compiler."""

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

from support.packages import share
from support.paths import ROOT

pytestmark = pytest.mark.slow  # a wheel takes a build of its own

# Runs in the fresh environment: one decode step of LeanAttention through the C interface, on plain memory.
SCRIPT = """
import array, ctypes, math, sys
from leanfleet import native
assert "torch" not in sys.modules and "numpy" not in sys.modules
buffers = [array.array("f", [float(i % 3) for i in range(n)]) for n in (8, 40, 40)]
query, keys, values = [(b.buffer_info()[0], s, "float32") for b, s in zip(buffers, ((1, 2, 1, 4), (1, 1, 10, 4), (1, 1, 10, 4)))]
output, lse = array.array("f", [math.nan] * 8), array.array("f", [math.nan] * 2)
call = native.Call("LeanAttention", [query, keys, values],
                   [(output.buffer_info()[0], (1, 2, 1, 4), "float32"), (lse.buffer_info()[0], (1, 2, 1), "float32")], {})
scratch_bytes, sync_bytes = call.workspace()
scratch = ctypes.create_string_buffer(scratch_bytes + 256)
call.run((ctypes.addressof(scratch) + 255) // 256 * 256, scratch_bytes, 0, 0)
q, k, v = buffers
for h in range(2):
    logits = [sum(q[4 * h + d] * k[4 * j + d] for d in range(4)) / 2 for j in range(10)]
    total = sum(map(math.exp, logits))
    assert abs(lse[h] - math.log(total)) < 1e-5, (lse[h], math.log(total))
    for d in range(4):
        expected = sum(math.exp(x) * v[4 * j + d] for j, x in enumerate(logits)) / total
        assert abs(output[4 * h + d] - expected) < 1e-5
print(native.build_info())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, ROOT], check=True
    )
    (path,) = folder.glob("*.whl")
    return path


def test_name_and_contents(wheel):
    assert re.fullmatch(r"leanfleet-[\d.]+-py3-none-\w*linux\w*\.whl", wheel.name), wheel.name
    names = set(zipfile.ZipFile(wheel).namelist())
    for needed in (
        "leanfleet/__init__.py",
        "leanfleet/ops.toml",
        "leanfleet/lib/libleanfleet.so",
        "leanfleet/cli.py",
        "leanfleet/lib/libleanfleet_ort.so",
        "leanfleet/ort_ops/__init__.py",
        "leanfleet/export/__init__.py",
    ):
        assert needed in names, needed
    # autograd.cpp is compiled for the PyTorch that is installed.
    sources = [n for n in names if n.endswith((".cpp", ".o", ".cu", "CMakeLists.txt"))]
    assert sources == ["leanfleet/lib/autograd.cpp"]


def test_base_install_needs_nothing(wheel):
    """No torch, no onnxruntime, no numpy: extras bring them."""
    archive = zipfile.ZipFile(wheel)
    metadata = archive.read(next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))).decode()
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert required == []


class Fresh:
    """A new virtual environment with the wheel and nothing else, and a PATH without a compiler."""

    def __init__(self, wheel, folder):
        subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
        self.folder, self.bin = folder, folder / "env" / "bin"
        self.env = {"PATH": str(self.bin), "HOME": str(folder)}
        assert not [tool for tool in ("cc", "g++", "c++", "cmake", "nvcc") if shutil.which(tool, path=self.env["PATH"])]
        pip = {k: v for k, v in os.environ.items() if k.startswith("PIP_")}
        subprocess.run(
            [self.bin / "python", "-m", "pip", "install", "-q", "--no-index", wheel],
            check=True,
            env={**self.env, **pip},
            cwd=folder,
        )
        (self.site,) = (folder / "env" / "lib").glob("python*/site-packages")

    def run(self, program, *arguments):
        return subprocess.run([self.bin / program, *arguments], capture_output=True, text=True, env=self.env, cwd=self.folder)


@pytest.fixture(scope="module")
def fresh(wheel, tmp_path_factory):
    return Fresh(wheel, tmp_path_factory.mktemp("fresh"))


def test_works_in_a_fresh_environment_without_a_compiler(fresh):
    run = fresh.run("python", "-c", SCRIPT)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("cpu ")
    command = fresh.run("leanfleet", "info")
    assert command.returncode == 0 and "LeanAttention" in command.stdout, command.stderr
    command = fresh.run("leanfleet", "doctor")
    assert command.returncode == 0 and "everything that is installed works" in command.stdout, command.stdout
    command = fresh.run("leanfleet", "bench")
    assert (command.returncode, command.stderr) == (
        2,
        "leanfleet bench: the package torch is missing: pip install 'leanfleet[bench]'\n",
    )
    command = fresh.run("python", "-c", "from leanfleet.ort_ops import make_session; make_session('x.onnx')")
    assert "pip install 'leanfleet[ort]', or for NVIDIA GPUs pip install leanfleet onnxruntime-gpu" in command.stderr


def test_extras(wheel):
    """The extras that docs/how_to/install.md names, each with the packages that make it work."""
    archive = zipfile.ZipFile(wheel)
    metadata = archive.read(next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))).decode()
    extras = {}
    for package, extra in re.findall(r'^Requires-Dist: ([\w-]+).*extra == [\'"](\w+)[\'"]', metadata, re.M):
        extras.setdefault(extra, set()).add(package)
    assert extras["ort"] == {"onnxruntime", "numpy"}
    assert extras["trt"] >= {"tensorrt", "polygraphy"} and extras["export"] >= {"torch", "onnx", "onnxscript"}
    assert extras["polygraphy"] >= {"polygraphy", "onnxruntime"} and extras["bench"] == {"torch", "numpy", "matplotlib"}
    assert not [e for e, packages in extras.items() if "onnxruntime-gpu" in packages]


# Runs in the fresh environment with onnxruntime beside the wheel: the library is registered and one node runs.
SESSION = """
import sys
import numpy as np
import onnxruntime
from leanfleet import doctor, ort_ops
case = doctor.Case()
options = onnxruntime.SessionOptions()
options.register_custom_ops_library(ort_ops.get_library_path())
session = onnxruntime.InferenceSession(doctor.one_node_model(case), options, providers=["CPUExecutionProvider"])
feed = {name: np.frombuffer(case.inputs[name], np.float32).reshape(shape) for name, shape in case.shapes.items()}
output, lse = session.run(None, feed)
case.compare({"output": output.ravel().tolist(), "lse": lse.ravel().tolist()})
assert not {"torch", "onnx", "polygraphy"} & set(sys.modules)
for name in ("torch", "onnx"):
    try:
        __import__(name)
    except ImportError:
        continue
    raise AssertionError(name)
"""


def test_works_with_onnxruntime_alone(wheel, tmp_path):
    """As test_works_in_a_fresh_environment, with onnxruntime and what that needs, from this environment's own wheels."""
    fresh = Fresh(wheel, tmp_path)
    share(fresh.site, "onnxruntime", "numpy", "protobuf", "flatbuffers", "packaging")
    run = fresh.run("python", "-c", SESSION)
    assert run.returncode == 0, run.stderr
    command = fresh.run("leanfleet", "doctor", "--json")
    checks = {check["name"]: check for check in json.loads(command.stdout)["checks"]}
    assert command.returncode == 0 and checks["torch"]["status"] == "missing"
    ran = checks["libleanfleet_ort.so in onnxruntime, CPUExecutionProvider"]
    assert ran["status"] == "ok" and "ran LeanAttention on CPUExecutionProvider, right" in ran["detail"]


# Runs in the fresh environment: a CUDA call where there is no driver, or no CUDA kernel, ends in an error that says so.
NO_DRIVER = """
from leanfleet import native
call = native.Call("LeanAttention", [(256, (1, 1, 1, 64), "float32"), (256, (1, 1, 8, 64), "float32"), (256, (1, 1, 8, 64), "float32")],
                   [(256, (1, 1, 1, 64), "float32"), (256, (1, 1, 1), "float32")], {}, device="cuda")
try:
    call.workspace()
    call.run(0, 0, 0, 0)
except native.LeanfleetError as error:
    print(type(error).__name__, error)
"""


def test_libraries_need_no_cuda(wheel, fresh, tmp_path):
    """With CUDA kernels or without, they link the C and C++ runtimes alone, and load where there is no driver."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    libraries = sorted((tmp_path / "leanfleet" / "lib").glob("*.so"))
    assert len(libraries) >= 2
    for library in libraries:
        dynamic = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
        needed = re.findall(r"\(NEEDED\).*\[(.*?)\]", dynamic)
        allowed = r"lib(c|m|stdc\+\+|pthread|dl|rt|gcc_s)\.so\.\d+|ld-linux.*"
        assert needed and not [name for name in needed if not re.fullmatch(allowed, name)], (library.name, needed)
    try:
        ctypes.CDLL("libcuda.so.1")
        driver = True
    except OSError:
        driver = False
    run = fresh.run("python", "-c", NO_DRIVER)
    assert run.returncode == 0, run.stderr
    if not driver:
        has_cuda = "cuda" in fresh.run("python", "-c", "from leanfleet import native; print(native.build_info())").stdout
        assert run.stdout.startswith("LeanfleetError" if has_cuda else "UnsupportedError"), run.stdout
        assert ("driver" in run.stdout or "no CUDA-capable device" in run.stdout) if has_cuda else "CUDA" in run.stdout
