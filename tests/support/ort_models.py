"""ONNX models of a few nodes built from the schema, runs of them in ONNX Runtime on torch tensors, the toy library."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from leanfleet.variants import IR_VERSION, ONNX_TYPES, make_model, make_node, node_model, onnx_type, type_name  # noqa: F401
from support.kernels import DTYPE_NAMES, output_shapes, poisoned
from support.paths import ROOT

TOY_SCHEMA = ROOT / "tests" / "cpp" / "toy_op" / "ops.toml"


def forms_of(inputs):
    """Types of a call's tensors, as node_model and one_node_model take them of those that have types of their own."""
    return {n: DTYPE_NAMES[t.dtype] for n, t in inputs.items() if t is not None and t.dtype in DTYPE_NAMES}


def bind(binding, kind, name, tensor):
    """Binds a contiguous tensor to a session's input or output; kind: "input" or "output"."""
    getattr(binding, f"bind_{kind}")(
        name,
        tensor.device.type,
        tensor.device.index or 0,
        ONNX_TYPES[DTYPE_NAMES[tensor.dtype]],
        tuple(tensor.shape),
        tensor.data_ptr(),
    )


def bound(session, inputs, outputs):
    """An IOBinding of these tensors, by name. Inputs that are None are left out."""
    binding = session.io_binding()
    for name, tensor in inputs.items():
        if tensor is not None:
            bind(binding, "input", name, tensor)
    for name, tensor in outputs.items():
        bind(binding, "output", name, tensor)
    binding.tensors = inputs, outputs  # it knows addresses alone and would not keep them
    return binding


def node_outputs(op, inputs, attrs, in_place=False):
    """Poisoned tensors for a node's outputs; in_place: the input's own where an output may take it."""
    takes = {t.name: t.takes for t in op.outputs if in_place}
    device = next(t for t in inputs.values() if t is not None).device
    outputs = {}
    for name, dtype, shape in output_shapes(op, inputs, attrs):
        taken = inputs.get(takes.get(name))
        outputs[name] = poisoned(shape, dtype, device) if taken is None else taken
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # onnxruntime's stream does not wait for the poison
    return outputs


def run_node(session, op, inputs, attrs=None, in_place=False):
    """Runs a session of a node_model on these tensors; returns its outputs by name."""
    outputs = node_outputs(op, inputs, attrs or {}, in_place)
    session.run_with_iobinding(bound(session, inputs, outputs))
    return outputs


def profiled(options, folder):
    """Switches profiling on in SessionOptions; see nodes_that_ran."""
    options.enable_profiling = True
    options.profile_file_prefix = str(folder / "profile")
    return options


def nodes_that_ran(session):
    """(operator, provider) of every kernel run so far in a profiled session. This ends the profile."""
    events = json.loads(Path(session.end_profiling()).read_text())
    return [
        (e["args"]["op_name"], e["args"]["provider"])
        for e in events
        if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")
    ]


def cache_folder():
    """Where tests keep what takes long to make; see csrc/find_headers.py."""
    told = os.environ.get("LEANFLEET_CACHE_DIR")
    return Path(told) if told else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "leanfleet"


def tool(name):
    """Path of a program of this Python environment, or of the system."""
    path = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    assert path, f"{name} is needed to build the toy operator: pip install 'leanfleet[test]'"
    return path


def build_toy_library():
    """Builds the libraries from the toy operator's schema; returns their folder. Nothing is rebuilt that is current."""
    build = cache_folder() / f"toy-{hashlib.sha256(str(ROOT).encode()).hexdigest()[:12]}"
    cuda = "ON" if torch.cuda.is_available() else "OFF"
    for command in (
        [
            tool("cmake"),
            "-G",
            "Ninja",
            "-S",
            ROOT / "csrc",
            "-B",
            build,
            f"-DLEANFLEET_SCHEMA={TOY_SCHEMA}",
            f"-DLEANFLEET_CUDA={cuda}",
            "-DCMAKE_CXX_FLAGS_RELEASE=-O0",  # half of the time, and the toy has nothing to gain
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
        ],
        [tool("cmake"), "--build", build],
    ):
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert result.returncode == 0, result.stdout
    return build


def run_in_oldest_runtime(version, file):
    """(number of passed tests or 0 if one failed, end of the output) of a test file under this version of onnxruntime."""
    folder = install_oldest_runtime(version)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))  # an empty part is the working folder
    environment = {**os.environ, "PYTHONPATH": path, "PYTEST_ADDOPTS": ""}
    check = f"import onnxruntime; assert onnxruntime.__version__ == '{version}', onnxruntime.__file__"
    subprocess.run([sys.executable, "-P", "-c", check], env=environment, check=True)
    result = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", file],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    passed = re.search(r"(\d+) passed", result.stdout)
    return int(passed[1]) if passed and result.returncode == 0 else 0, result.stdout[-8000:]


def install_oldest_runtime(version):
    """A folder to put on PYTHONPATH that holds this version of onnxruntime: LEANFLEET_ORT_MIN_DIR, or made by pip."""
    told = os.environ.get("LEANFLEET_ORT_MIN_DIR")
    return Path(told) if told else install_package("onnxruntime", version)


def install_package(package, version):
    """A folder to put on PYTHONPATH that holds this version of a package and nothing else, made by pip once."""
    folder = cache_folder() / f"{package}-{version}-py{sys.version_info.major}{sys.version_info.minor}"
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", partial, f"{package}=={version}"]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert result.returncode == 0, result.stdout
        partial.rename(folder)
    return folder
