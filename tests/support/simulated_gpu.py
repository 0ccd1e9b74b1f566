"""CUDA kernels without a GPU: libleanfleet.so of some operators in which g++ compiled the kernels, and host threads run them.

tests/cpp/simulated_gpu says how. It takes kernels without inline PTX: those that live on shuffles, barriers and shared memory.
What it finds: wrong results, barriers that not all threads reach, and results that depend on the order of threads. It says
nothing about speed, nor about how the compiler of a GPU rounds.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path
from unittest import mock

from leanfleet import spec
from support.kernels import run_kernel
from support.paths import ROOT

CSRC, DEVICE = ROOT / "csrc", ROOT / "tests" / "cpp" / "simulated_gpu"
LAUNCH = re.compile(r"([A-Za-z_]\w*(?:<[^;(){}]*?>)?)\s*<<<(.*?)>>>\s*\(", re.DOTALL)
SHARED = re.compile(r"extern __shared__\s+(?:(?:alignas|__align__)\(\d+\)\s+)?([\w ]+?)\s+(\w+)\[\];")


def cuda_include():
    """The folder of cuda_runtime.h, or None without nvcc."""
    compiler = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if compiler is None:
        return None
    told = subprocess.run(
        [compiler, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull], capture_output=True, text=True
    )
    top = re.search(r"^#\$ TOP=(.*)$", told.stderr, re.MULTILINE)
    places = Path(top[1]).glob("targets/*/include/cuda_runtime.h") if top else ()
    return next((path.parent for path in places), None)


def translated(text):
    """A .cu file as C++: launches and dynamic shared memory are CUDA's syntax alone."""
    text = LAUNCH.sub(r"simulated::launch(\1, \2)(", text)
    return SHARED.sub(r"\1* const \2 = static_cast<\1*>(simulated::dynamic_shared());", text)


def build(folder, operators, sanitize=""):
    """libleanfleet.so with these operators of ops.toml in `folder`. Raises RuntimeError with the compiler's errors."""
    schema = "\n".join(_entry(name) for name in operators)
    (folder / "core").mkdir(parents=True)
    (folder / "ops.toml").write_text(schema)
    subprocess.run(["python3", CSRC / "generate.py", folder / "ops.toml", folder / "core" / "op_specs.h"], check=True)
    sources = [*sorted((CSRC / "core").glob("*.cpp")), CSRC / "capi" / "capi.cpp", DEVICE / "device.cpp"]
    for home in dict.fromkeys(spec.all_specs()[name].folder for name in operators):
        sources += sorted((CSRC / home).glob("*.cpp"))
        for kernel in (CSRC / home).glob("*.cu"):
            copy = folder / f"{home}_{kernel.stem}.cpp"
            copy.write_text(f'#include "device.h"\n#line 1 "{kernel}"\n' + translated(kernel.read_text()))
            sources.append(copy)
    command = ["c++", "-std=c++17", "-O1", "-g", "-w", "-fPIC", "-shared", "-DLEANFLEET_CUDA", "-DLEANFLEET_ISA=baseline"]
    command += [f"-I{folder}", f"-I{CSRC}", f"-I{DEVICE}", "-isystem", cuda_include()]
    command += [f"-fsanitize={sanitize}"] * bool(sanitize)
    done = subprocess.run(
        [*command, "-o", folder / "libleanfleet.so", *sources, "-lpthread", "-Wl,-z,defs"], capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return folder


def _entry(name):
    """The operator's part of ops.toml."""
    text = (CSRC / "ops.toml").read_text()
    start = text.index(f"\n[{name}]\n") + 1
    end = re.compile(r"\n\[[A-Z]\w*\]\n").search(text, start + 1)
    return text[start : end.start() + 1 if end else len(text)]


def run_simulated(folder, op_name, inputs, attrs=None, seed=0, **options):
    """support.kernels.run_kernel with the library of build(), whose CUDA kernels take the host's tensors."""
    with mock.patch.dict(os.environ, LEANFLEET_LIBRARY_DIR=str(folder), LEANFLEET_SIMULATED_SEED=str(seed)):
        return run_kernel(op_name, inputs, attrs, simulated=True, **options)
