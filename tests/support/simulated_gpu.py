"""CUDA kernels without a GPU: libleanfleet.so of some operators in which g++ compiled the kernels, and host threads run them.

tests/cpp/simulated_gpu says how. It takes kernels that live on shuffles, barriers, shared memory, mma.sync, ldmatrix and
cp.async, and of Hopper's instructions on mbarriers, tensor copies and wgmma. What it finds:
wrong results, barriers that not all threads reach, and results that depend on the order of threads. It says nothing about
speed, nor about how the compiler of a GPU rounds, and Hopper's copies and products are done at once, so that a missing wait for
them does not show.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

from leanfleet import spec
from support.kernels import run_kernel
from support.paths import ROOT

CSRC, DEVICE = ROOT / "csrc", ROOT / "tests" / "cpp" / "simulated_gpu"
LAUNCH = re.compile(r"([A-Za-z_]\w*(?:<[^;(){}]*?>)?)\s*<<<(.*?)>>>\s*\(", re.DOTALL)
INSTRUCTIONS = set(re.findall(r"\bptx_\w+", (DEVICE / "device.h").read_text()))
PLACES = {"threadIdx": "thread", "blockIdx": "block", "blockDim": "threads", "gridDim": "blocks"}
PLACE = re.compile(rf"(?<![.\w])({'|'.join(PLACES)})\b")
ASM = re.compile(r"\basm(?:\s+volatile)?\s*\(")
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
    """CUDA as C++: launches, dynamic shared memory, and inline PTX as a call of the function of device.h that is named after
    the instruction, with its operands in their order."""
    text = LAUNCH.sub(r"simulated::launch(\1, \2)(", text)
    text = PLACE.sub(lambda found: f"(simulated::place().{PLACES[found[1]]})", text)
    text = SHARED.sub(r"\1* const \2 = static_cast<\1*>(simulated::dynamic_shared());", text)
    parts, end = [], 0
    for found in ASM.finditer(text):
        close = _closing(text, found.end())
        parts += [text[end : found.start()], _call(text[found.end() : close])]
        end = close + 1
    return "".join([*parts, text[end:]])


def _closing(text, start):
    """Where the parenthesis closes that was opened before `start`."""
    depth, quoted, i = 1, False, start
    while True:
        c = text[i]
        if c == '"' and text[i - 1] != "\\":
            quoted = not quoted
        depth += 0 if quoted else (c == "(") - (c == ")")
        if depth == 0:
            return i
        i += 1


def _call(statement):
    """`"ex2.f32 %0, %1;" : "=f"(y) : "f"(x)` as `ptx_ex2_f32(y, x)`."""
    code = re.match(r'\s*((?:"[^"]*"\s*)+)', statement)
    if code is None:  # a macro makes the text
        return "simulated::unsupported()"
    text = "".join(re.findall(r'"([^"]*)"', code[1])).replace("\\n", " ").replace("\\t", " ")
    instructions = [x for x in text.split(";") if x.strip()]
    if not instructions:
        return "static_cast<void>(0)"
    if len(instructions) != 1:
        return "simulated::unsupported()"
    rest, operands = statement[code.end() :], []
    while found := re.search(r'"[=+]?\w"\s*\(', rest):
        close = _closing(rest, found.end())
        operands.append(rest[found.end() : close])
        rest = rest[close + 1 :]
    name, _, given = instructions[0].strip().partition(" ")
    given = [x.strip() for x in re.sub(r"[][{}]", "", given).split(",") if x.strip()]
    given = [operands[int(x[1:])] if x.startswith("%") else x for x in given]
    function = f"ptx_{re.sub(r'[.:]+', '_', name)}"
    return f"simulated::{function}({', '.join(given)})" if function in INSTRUCTIONS else "simulated::unsupported()"


def build(folder, operators, others=(), instances=()):
    """libleanfleet.so with these operators of ops.toml in `folder`. Raises RuntimeError with the compiler's errors.

    others: CUDA sources outside the operators' folders, by their paths in csrc. instances: (template, {name: value}) of templates
    that CMake fills in.
    """
    (folder / "core").mkdir(parents=True)
    (folder / "ops.toml").write_text("\n".join(_entry(name) for name in operators))
    subprocess.run([sys.executable, CSRC / "generate.py", folder / "ops.toml", folder / "core" / "op_specs.h"], check=True)
    # Files that alone know of an instruction set.
    kernels = [CSRC / "core" / "sum_parts.cpp", CSRC / "core" / "merge_parts.cpp"]
    sources = [p for p in sorted((CSRC / "core").glob("*.cpp")) if p not in kernels]
    sources += sorted((CSRC / "capi").glob("*.cpp"))
    sources += [CSRC / "core" / "merge_parts.cu", CSRC / "core" / "peers.cu"]
    for home in dict.fromkeys(spec.all_specs()[name].folder for name in operators):
        kernels += [kernel for kernel in [CSRC / home / "cpu_kernel.cpp"] if kernel.exists()]
        sources += [CSRC / home / "op.cpp", *sorted((CSRC / home).glob("*.cu"))]
        sources += DEVICE.glob(f"{home}.cu")  # in place of kernels that are not simulated
    for kernel in kernels:
        source = folder / f"{kernel.parent.name}_{kernel.name}"
        source.write_text(f'#define LEANFLEET_ISA baseline\n#include "{kernel.relative_to(CSRC)}"\n')
        sources.append(source)
    sources += [CSRC / other for other in others]
    (folder / "instances").mkdir()
    for template, values in instances:
        text = (CSRC / template).read_text()
        for name, value in values.items():
            text = text.replace(f"@{name}@", value)
        source = folder / "instances" / "_".join([Path(template).name.removesuffix(".cu.in"), *values.values()])
        source = source.with_suffix(".cu")
        source.write_text(text)
        sources.append(source)
    # Inline variables are one for all libraries of a process, unless they are not unique.
    shared = ["-fPIC", "-shared", "-fno-gnu-unique", "-Wl,-Bsymbolic"]
    given = ["-DLEANFLEET_CUDA", "-DLEANFLEET_WINDOW_BYTES=131072", "-DLEANFLEET_PEER_LINES=4096"]
    return compile_files(folder, sources, "libleanfleet.so", *shared, *given)


def compile_files(folder, sources, output, *options):
    """Compiles C++ and CUDA sources and the simulated GPU into folder/output."""
    for header in CSRC.glob("*/*.cuh"):
        copy = folder / header.relative_to(CSRC)
        copy.parent.mkdir(exist_ok=True)
        own = DEVICE / header.name  # one whose instructions are simulated as functions
        text = own.read_text() if own.exists() else translated(header.read_text())
        copy.write_text(f'#line 1 "{own if own.exists() else header}"\n' + text)
    files = [DEVICE / "device.cpp"]
    for source in sources:
        if source.suffix == ".cu":
            copy = folder / f"{source.parent.name}_{source.stem}_cu.cpp"
            copy.write_text(f'#include "device.h"\n#line 1 "{source}"\n' + translated(source.read_text()))
            source = copy
        files.append(source)
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-w", f"-I{folder}", f"-I{CSRC}", f"-I{DEVICE}"]
    command += ["-isystem", cuda_include(), *options]
    objects = [folder / f"{i}.o" for i in range(len(files))]
    for source, object in zip(files, objects, strict=True):
        # What runs on the simulated GPU is five times as fast with -O1; the host's code is sooner compiled without.
        simulated = source == DEVICE / "device.cpp" or source.name.endswith("_cu.cpp")
        _run([*command, "-O1" if simulated else "-O0", "-c", source, "-o", object])
    _run([*command, "-o", folder / output, *objects, "-lpthread", "-ldl", "-Wl,-z,defs"])
    return folder


def _run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])


def _entry(name):
    """The operator's part of ops.toml."""
    text = (CSRC / "ops.toml").read_text()
    start = text.index(f"\n[{name}]\n") + 1
    end = re.compile(r"\n\[[A-Z]\w*\]\n").search(text, start + 1)
    return text[start : end.start() + 1 if end else len(text)]


def run_simulated(folder, op_name, inputs, attrs=None, seed=0, major=9, sms=132, **options):
    """support.kernels.run_kernel with the library of build(), whose CUDA kernels take the host's tensors. major, sms: of the
    GPU's generation and its multiprocessors, which a copy of the library asks for once."""
    told = {"SEED": str(seed), "MAJOR": str(major), "SMS": str(sms)}
    told = {f"LEANFLEET_SIMULATED_{name}": value for name, value in told.items()}
    with mock.patch.dict(os.environ, LEANFLEET_LIBRARY_DIR=str(folder), **told):
        return run_kernel(op_name, inputs, attrs, simulated=True, **options)
