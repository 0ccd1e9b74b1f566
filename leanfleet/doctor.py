"""leanfleet doctor: what is installed, what of it works with leanfleet, and the fix for what does not.

Every import and every library is tried in a process of its own, because a damaged library can crash the process that
loads it. A library counts as usable only once it has computed a small LeanAttention correctly. Standard library only.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import leanfleet
from leanfleet import driver, machine, native, ort_library, spec
from leanfleet.decoder_contract import FORMS
from leanfleet.tables import print_table

SECONDS = 180  # that one probe may take
# What can be installed: name of the import, distributions that bring it, extra of leanfleet that asks for it.
PACKAGES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("numpy", ("numpy",), "ort"),
    ("onnxruntime", ("onnxruntime", "onnxruntime-gpu"), "ort"),
    ("torch", ("torch",), "export"),
    ("onnx", ("onnx",), "export"),
    ("onnxscript", ("onnxscript",), "export"),
    ("onnx_ir", ("onnx-ir",), "export"),
    ("polygraphy", ("polygraphy",), "polygraphy"),
    ("tensorrt", ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"), "trt"),
    (
        "tensorrt_rtx",
        ("tensorrt-rtx", "tensorrt-rtx-cu13", "tensorrt-rtx-cu12", "tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu12-bindings"),
        "trt",
    ),
    ("transformers", ("transformers",), "models"),
    ("matplotlib", ("matplotlib",), "bench"),
    ("triton", ("triton",), "bench"),
)
BOTH_RUNTIMES = "pip uninstall -y onnxruntime onnxruntime-gpu, then pip install the one wanted"
Check = dict[str, Any]  # "part", "name", "status", "detail", "fix"; see diagnose
REINSTALL = "reinstall leanfleet: pip install --force-reinstall --no-deps with its folder or wheel"


def diagnose() -> dict[str, Any]:
    """What `leanfleet doctor` shows, as a dict that JSON can hold.

    "checks" is a list of {"part", "name", "status", "detail", "fix"}. part: package, machine or library.
    status: "ok"; "missing", which is not there and need not be; "broken", which is there and cannot be used. fix: one
    line that says how to mend or get it, None where there is nothing to do. "usable" is true without a broken one.
    """
    minimums = _minimums()
    packages = [_package_check(*entry, minimums) for entry in PACKAGES]
    gpu = gpu_check()
    checks = [*packages, gpu, _nvcc_check(), *_library_checks({c["name"]: c["status"] for c in packages}, gpu)]
    return {
        "version": leanfleet.__version__,
        "python": platform.python_version(),
        "checks": checks,
        "usable": all(c["status"] != "broken" for c in checks),
    }


def _check(part: str, name: str, status: str, detail: object, fix: str | None = None) -> Check:
    return {"part": part, "name": name, "status": status, "detail": " ".join(str(detail).split()), "fix": fix}


# Packages and machine


def _minimums() -> dict[str, str]:
    """{distribution: oldest version} that leanfleet's installed metadata asks for; empty in a source tree."""
    try:
        lines = metadata.requires("leanfleet") or ()
    except metadata.PackageNotFoundError:
        return {}
    found = (re.match(r"([\w.-]+)\s*>=\s*([\d.]+)", line) for line in lines)
    return {_normal(match[1]): match[2] for match in found if match}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _numbers(version: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", version.partition("+")[0])]


def _versions(distributions: Iterable[str]) -> dict[str, str]:
    """{distribution: version} of those installed."""
    found = {}
    for name in distributions:
        try:
            found[name] = metadata.version(name) or ""
        except metadata.PackageNotFoundError:
            continue
        except Exception:  # metadata that an interrupted installation left half written
            found[name] = ""
    return found


def _package_check(name: str, distributions: tuple[str, ...], extra: str, minimums: Mapping[str, str]) -> Check:
    installed = _versions(distributions)
    try:
        there = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        there = False
    text = ", ".join(f"{d} {v}" for d, v in installed.items()) or name
    if len(installed) > 1 and name == "onnxruntime":
        return _check("package", name, "broken", f"{text}: both write the same files, so neither works reliably", BOTH_RUNTIMES)
    if not installed and not there:
        return _check("package", name, "missing", "not installed", install(name, extra))
    first = next(iter(installed), distributions[0])
    again = f"pip install --force-reinstall --no-deps {first}"
    if not there:
        return _check("package", name, "broken", f"{text} is listed as installed, its files are missing", again)
    good, answer = _probe("package", name)
    if not good:
        return _check("package", name, "broken", f"{text} cannot be imported: {answer}", again)
    version = installed.get(first) or answer
    oldest = minimums.get(_normal(first), minimums.get(distributions[0]))
    if oldest and version and _numbers(version) < _numbers(oldest):
        return _check(
            "package",
            name,
            "broken",
            f"{first} {version}; leanfleet needs {oldest} or newer",
            f"pip install -U '{first}>={oldest}'",
        )
    return _check("package", name, "ok", text or version or "version unknown")


def install(name: str, extra: str) -> str:
    """What installs a package of PACKAGES."""
    if name == "onnxruntime":
        return "pip install 'leanfleet[ort]', or for NVIDIA GPUs pip install onnxruntime-gpu"
    return f"pip install 'leanfleet[{extra}]'" if extra != "trt" else f"pip install {name.replace('_', '-')}"


def gpu_check() -> Check:
    """The GPUs and their driver."""
    good, answer = _probe("gpu")
    if good:
        return _check("machine", "gpu", "ok", answer)
    if "libcuda.so.1: cannot open shared object file" in answer:
        return _check("machine", "gpu", "missing", "no NVIDIA driver", None)
    return _check("machine", "gpu", "broken", answer, "mend the NVIDIA driver: nvidia-smi must list a GPU")


def _nvcc_check() -> Check:
    told = os.environ.get("CUDACXX")
    nvcc = told or shutil.which("nvcc") or next(filter(os.path.exists, ["/usr/local/cuda/bin/nvcc"]), None)
    if not nvcc:
        return _check(
            "machine", "nvcc", "missing", "not found; only building CUDA kernels needs it", "put nvcc on PATH or set CUDACXX"
        )
    try:
        run = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=SECONDS)
        release = re.search(r"release ([\d.]+)", run.stdout)
        if run.returncode == 0 and release:
            return _check("machine", "nvcc", "ok", f"{release[1]}, {nvcc}")
        problem = run.stderr or run.stdout or f"exit code {run.returncode}"
    except (OSError, subprocess.SubprocessError) as error:
        problem = str(error)
    return _check(
        "machine",
        "nvcc",
        "broken",
        f"{nvcc} --version fails: {problem}",
        "set CUDACXX to an nvcc that works" if told else "mend the CUDA toolkit, or take nvcc off PATH",
    )


# Libraries


def _library_checks(packages: Mapping[str, str], gpu: Check) -> list[Check]:
    """One check for each library in each runtime. packages: {import name: status}."""
    checks = []

    def check(
        library: str, runtime: str, probe: str, *arguments: str, absent: tuple[str, str | None] | None = None
    ) -> str | None:
        """Adds a check and returns what the probe saw. absent: (why there is nothing to try, the fix), or None."""
        name = f"lib{library}.so in {runtime}" if library else runtime
        if absent:
            checks.append(_check("library", name, "missing", *absent))
            return None
        good, answer = _probe(probe, *arguments)
        checks.append(_check("library", name, "ok" if good else "broken", answer, None if good else _library_fix(answer)))
        return answer if good else None

    def without(package: str) -> tuple[str, str | None] | None:
        if packages[package] == "ok":
            return None
        if packages[package] == "broken":
            return f"{package} is broken", f"mend {package}, see above"
        return f"{package} is not installed", install(package, {name: extra for name, _, extra in PACKAGES}[package])

    info = check("leanfleet", "ctypes", "library") or ""
    no_gpu = None if gpu["status"] == "ok" else ("no NVIDIA GPU here", None)
    no_kernels = (
        None
        if "cuda" in info
        else ("built without CUDA kernels", "put nvcc on PATH and reinstall: pip install -C cmake.define.LEANFLEET_CUDA=ON .")
    )
    check("", "quantised caches, CPU", "caches")
    if not no_gpu:
        check("leanfleet", "CUDA", "cuda", absent=no_kernels)
        check("", "quantised caches, CUDA", "caches on cuda", absent=no_kernels)
    check("leanfleet", "torch", "torch", absent=without("torch"))
    providers = check(
        "leanfleet_ort",
        "onnxruntime, CPUExecutionProvider",
        "onnxruntime",
        "CPUExecutionProvider",
        absent=without("onnxruntime"),
    )
    if providers and "CUDAExecutionProvider" in providers:
        check(
            "leanfleet_ort",
            "onnxruntime, CUDAExecutionProvider",
            "onnxruntime",
            "CUDAExecutionProvider",
            absent=no_gpu or no_kernels,
        )
    checks += _trt_checks(packages)
    if packages["polygraphy"] == "ok":
        good, answer = _probe("polygraphy")
        checks.append(
            _check("library", "plugin of polygraphy run", "ok" if good else "broken", answer, None if good else REINSTALL)
        )
    return checks


def _trt_checks(packages: Mapping[str, str]) -> list[Check]:
    library, name = "leanfleet_trt", "libleanfleet_trt.so"
    try:
        native.library_path(library)
    except FileNotFoundError:
        return [
            _check(
                "library",
                name,
                "missing",
                "not built: this installation has no TensorRT plugins",
                "put nvcc on PATH and reinstall: pip install -C cmake.define.LEANFLEET_TRT=ON .",
            )
        ]
    runtimes = [runtime for runtime in ("tensorrt", "tensorrt_rtx") if packages[runtime] == "ok"]
    if not runtimes:
        good, answer = _probe("plain", library)
        fix = None if good else _library_fix(answer)
        return [_check("library", f"{name} in ctypes", "ok" if good else "broken", answer, fix)]
    checks = []
    for runtime in runtimes:
        good, answer = _probe("plugins", runtime)
        checks.append(
            _check(
                "library", f"{name} in {runtime}", "ok" if good else "broken", answer, None if good else _library_fix(answer)
            )
        )
    return checks


def _library_fix(error: str) -> str:
    """One line on how to mend a library or runtime, from what it answered."""
    told = os.environ.get("LEANFLEET_LIBRARY_DIR")
    if "pip install" in error and "does not exist" not in error:
        return error[error.index("pip install") :].rstrip(")")
    if "symbol" in error and "undefined" in error or "GLIBC" in error:
        return "build it on this machine: pip install --force-reinstall --no-deps with leanfleet's folder"
    if "unsupported toolchain" in error or "UnsupportedPtxVersion" in error or "driver version is insufficient" in error:
        return "update the driver, or build with an nvcc no newer than the driver (docs/how_to/build.md, 'CUDA 12 drivers')"
    if "no kernel image" in error or "NoKernelImage" in error:
        return "build for this GPU: pip install -C cmake.define.LEANFLEET_CUDA_ARCHS=... . (docs/how_to/build.md)"
    if outdated := re.search(r"needs (tensorrt\w*) .* or newer; found", error):
        return f"pip install -U {outdated[1].replace('_', '-')}"
    if "did not start" in error:
        return "install what onnxruntime-gpu needs: pip install 'onnxruntime-gpu[cuda,cudnn]'"
    if "libnvinfer" in error:
        return "install TensorRT: pip install 'leanfleet[trt]'"
    if told:
        return f"LEANFLEET_LIBRARY_DIR is {told}: unset it, or build the libraries there"
    return REINSTALL


# Probes: each runs in a process of its own and returns one line on what it saw, or raises


def _probe(name: str, *arguments: str) -> tuple[bool, str]:
    """(True, what the probe returned) or (False, why it failed)."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer")
        try:
            done = subprocess.run(
                machine.command(__name__, "run_probe", str(answer), name, *arguments),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=SECONDS,
            )
        except (OSError, subprocess.SubprocessError) as error:
            late = isinstance(error, subprocess.TimeoutExpired)
            return False, f"no answer within {SECONDS} s" if late else str(error)
        log = done.stderr.decode(errors="replace")
        if not answer.exists():
            return False, f"the process that tried it {machine.ending(done.returncode, log)}"
        good, text = json.loads(answer.read_text())
        missing = re.search(r"\S+: cannot open shared object file", log)
        if not good and missing and missing[0] not in text:
            text = f"{missing[0]}; {text}"
        return good, " ".join(text.split())


def run_probe(answer: str, name: str, *arguments: str) -> None:
    """Runs a probe and writes [good, text] to the file `answer`."""
    try:
        result = [True, PROBES[name](*arguments)]
    except Exception as error:
        result = [False, f"{type(error).__name__}: {error}"]
    Path(answer).write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # a runtime that fails while it is taken down was usable


def _import_package(name: str) -> str:
    return str(getattr(importlib.import_module(name), "__version__", ""))


def _look_at_gpu() -> str:
    """Name, compute capability and driver of every GPU, from the driver alone."""
    cuda, version = driver.load(), ctypes.c_int()
    driver.call(cuda, "cuDriverGetVersion", ctypes.byref(version))
    gpus = [f"{gpu.name} (sm_{gpu.capability.replace('.', '')})" for gpu in driver.gpus(cuda)]
    text = f"{', '.join(gpus)}; driver for CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    module = Path("/proc/driver/nvidia/version")
    release = re.search(r"\d+\.\d+[\d.]*", module.read_text()) if module.exists() else None
    return text + (f", release {release[0]}" if release else "")


class Case:
    """A small LeanAttention: query [1,2,1,D] in float32, caches [1,1,S,D], and the right output and lse. form: of
    decoder_contract.FORMS, what the caches are then made of, of few whole numbers with a scale of SCALE."""

    SCALE = 0.5
    BYTES: Mapping[str, Callable[[int], int]] = {
        "int8": lambda number: number & 255,
        "fp8": lambda number: {0: 0, 1: 0x38, 2: 0x40}[abs(number)] | (128 if number < 0 else 0),
        "int4": lambda number: number + 8,
    }

    def __init__(self, heads: int = 2, slots: int = 10, size: int = 64, form: str | None = None) -> None:
        cache = 1, 1, slots, size
        self.shapes: dict[str, tuple[int, ...]] = {"query": (1, heads, 1, size), "key_cache": cache, "value_cache": cache}
        self.outputs: dict[str, tuple[int, ...]] = {"output": (1, heads, 1, size), "lse": (1, heads, 1)}
        self.types = dict.fromkeys(self.shapes, "float32")
        self.inputs = {
            name: array("f", (math.sin(i + 1) for i in range(math.prod(shape)))) for name, shape in self.shapes.items()
        }
        if form is not None:
            self._quantise(form)
        q, k, v = (self.inputs[name] for name in ("query", "key_cache", "value_cache"))
        self.expected: dict[str, list[float]] = {"output": [], "lse": []}
        for h in range(heads):
            logits = [sum(q[h * size + d] * k[j * size + d] for d in range(size)) / math.sqrt(size) for j in range(slots)]
            total = sum(map(math.exp, logits))
            self.expected["lse"].append(math.log(total))
            self.expected["output"] += [
                sum(math.exp(x) * v[j * size + d] for j, x in enumerate(logits)) / total for d in range(size)
            ]
        if form is not None:
            self.inputs |= self.held

    def _quantise(self, form: str) -> None:
        self.held: dict[str, array[Any]] = {}
        for name, step in (("key_cache", 3), ("value_cache", 7)):
            numbers = [i * step % 5 - 2 for i in range(math.prod(self.shapes[name]))]
            held = [self.BYTES[form](number) for number in numbers]
            if form == "int4":
                held = [low | high << 4 for low, high in zip(held[::2], held[1::2], strict=True)]
                self.shapes[name] = (*self.shapes[name][:-1], self.shapes[name][-1] // 2)
            self.inputs[name] = array("f", (number * self.SCALE for number in numbers))
            self.held[name], self.types[name] = array("B", held), FORMS[form]
        for name in ("key_scale", "value_scale"):
            self.shapes[name], self.types[name], self.held[name] = (1,), "float32", array("f", [self.SCALE])

    def entries(self, place: Callable[[str], int]) -> list[native.Entry | None]:
        """The operator's inputs in its order. place: the address of an input, by its name."""
        names = [tensor.name for tensor in spec.all_specs()["LeanAttention"].inputs]
        return [(place(name), self.shapes[name], self.types[name]) if name in self.shapes else None for name in names]

    def compare(self, found: Mapping[str, Iterable[float]]) -> None:
        """found: {output: flat list}. Raises RuntimeError where a value is wrong."""
        for name, expected in self.expected.items():
            worst = max(abs(a - b) if a == a else math.inf for a, b in zip(found[name], expected, strict=True))
            if worst > 1e-4:
                raise RuntimeError(f"LeanAttention's {name} is wrong by {worst:.1e}")


def _run_on_cpu(case: Case) -> None:
    found = {name: array("f", [math.nan] * math.prod(shape)) for name, shape in case.outputs.items()}
    call = native.Call(
        "LeanAttention",
        case.entries(lambda name: case.inputs[name].buffer_info()[0]),
        [(found[n].buffer_info()[0], s, "float32") for n, s in case.outputs.items()],
        {},
    )
    scratch_bytes, _ = call.workspace()
    scratch = ctypes.create_string_buffer(scratch_bytes + 256)
    call.run((ctypes.addressof(scratch) + 255) // 256 * 256, scratch_bytes)
    case.compare(found)


def _try_library() -> str:
    operators = set(native.op_names())
    if missing := set(spec.all_specs()) - operators:
        raise RuntimeError(f"the library is of another version: it has no {', '.join(sorted(missing))}")
    _run_on_cpu(Case())
    return f"{native.build_info()}; {len(operators)} operators; LeanAttention right"


def _try_caches() -> str:
    for form in FORMS:
        _run_on_cpu(Case(form=form))
    kernels = native.build_info().partition(",")[0].removeprefix("cpu ")
    return f"{', '.join(FORMS)} right; the kernels of {kernels}, which LEANFLEET_CPU can lower"


def _run_on_cuda(cuda: ctypes.CDLL, case: Case) -> None:
    """On the current context's GPU, in memory of the driver's."""

    def allocate(size: int) -> ctypes.c_uint64:
        address = ctypes.c_uint64()
        driver.call(cuda, "cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(size, 4)))
        driver.call(cuda, "cuMemsetD8_v2", address, 0, ctypes.c_size_t(max(size, 4)))
        return address

    def copied(name: str) -> int:
        content = case.inputs[name].tobytes()
        address = allocate(len(content))
        driver.call(cuda, "cuMemcpyHtoD_v2", address, content, ctypes.c_size_t(len(content)))
        return address.value

    outputs = {name: allocate(4 * math.prod(shape)) for name, shape in case.outputs.items()}
    told: list[native.Entry | None] = [(outputs[n].value, s, "float32") for n, s in case.outputs.items()]
    call = native.Call("LeanAttention", case.entries(copied), told, {}, device="cuda")
    scratch_bytes, sync_bytes = call.workspace()
    call.run(allocate(scratch_bytes).value, scratch_bytes, allocate(sync_bytes).value, sync_bytes)
    driver.call(cuda, "cuCtxSynchronize")
    found = {}
    for name, shape in case.outputs.items():
        copy = ctypes.create_string_buffer(4 * math.prod(shape))
        driver.call(cuda, "cuMemcpyDtoH_v2", copy, outputs[name], ctypes.c_size_t(len(copy)))
        found[name] = array("f", copy.raw)
    case.compare(found)


def _with_context() -> ctypes.CDLL:
    """The driver, with the first GPU's context current."""
    cuda, context = driver.load(), ctypes.c_void_p()
    driver.call(cuda, "cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    driver.call(cuda, "cuCtxSetCurrent", context)
    return cuda


def _try_cuda() -> str:
    _run_on_cuda(_with_context(), Case())
    return "LeanAttention right on the GPU"


def _try_caches_on_cuda() -> str:
    cuda = _with_context()
    for form in FORMS:
        _run_on_cuda(cuda, Case(form=form))
    capability = driver.gpus(cuda)[0].capability
    how = "the GPU's own conversion" if float(capability) >= 8.9 else "arithmetic, since conversions begin with sm_89"
    return f"{', '.join(FORMS)} right on the GPU; fp8 by {how}; steps with D = Dv = 64 or 128 by the kernel for registers"


def _try_torch() -> str:
    import torch

    from leanfleet.export import lean_attention, torch_ops

    case, devices = Case(), ["cpu"]
    if torch.cuda.is_available() and "cuda" in native.build_info():
        devices.append("cuda")
    for device in devices:
        tensors = [torch.tensor(case.inputs[n].tolist(), device=device).reshape(s) for n, s in case.shapes.items()]
        found = lean_attention(*tensors)
        case.compare({n: t.flatten().tolist() for n, t in zip(case.outputs, found)})
    kernels = {"compiled": "compiled, autograd in C++", "stable": "compiled, autograd in Python", "ctypes": "by ctypes"}
    return f"torch.ops.leanfleet on {' and '.join(devices)}, {kernels[torch_ops.way()]}; LeanAttention right"


def _try_onnxruntime(provider: str) -> str:
    """A model of one LeanAttention node. Says which provider ran it, from the session's profile."""
    import numpy as np

    from leanfleet.ort_ops import make_session

    case, ort = Case(), ort_library.onnxruntime()
    with tempfile.TemporaryDirectory() as folder:
        options = ort.SessionOptions()
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder, "profile"))
        session = make_session(one_node_model(case), providers=[provider], session_options=options)
        feed = {n: np.frombuffer(case.inputs[n], np.float32).reshape(s) for n, s in case.shapes.items()}
        found = session.run(list(case.outputs), feed)
        ran = {provider for _, provider in ort_library.kernels_in_profile(session.end_profiling())}
    case.compare({n: value.ravel().tolist() for n, value in zip(case.outputs, found)})
    if ran != {provider}:
        raise RuntimeError(f"the node ran on {', '.join(sorted(ran)) or 'no provider of ours'}, not on {provider}")
    return (
        f"onnxruntime {ort.__version__} ran LeanAttention on {provider}, right; its providers: "
        f"{', '.join(ort.get_available_providers())}"
    )


def one_node_model(case: Case) -> bytes:
    """The bytes of an ONNX model of one LeanAttention node, written without the onnx package."""

    def varint(number: int) -> bytes:
        low, number = number & 127, number >> 7
        return bytes([low | 128]) + varint(number) if number else bytes([low])

    def field(number: int, value: int | str | bytes) -> bytes:
        """A field of a protocol buffer: an integer, or the bytes of a string or message."""
        if isinstance(value, int):
            return varint(number << 3) + varint(value)
        value = value.encode() if isinstance(value, str) else value
        return varint(number << 3 | 2) + varint(len(value)) + value

    def value_info(name: str, shape: Iterable[int]) -> bytes:
        dims = b"".join(field(1, field(1, size)) for size in shape)
        return field(1, name) + field(2, field(1, field(1, 1) + field(2, dims)))  # element type 1: float32

    node = b"".join(field(1, n) for n in case.shapes) + b"".join(field(2, n) for n in case.outputs)
    node += field(3, "probe") + field(4, "LeanAttention") + field(7, spec.DOMAIN)
    graph = field(1, node) + field(2, "doctor")
    graph += b"".join(field(11, value_info(*item)) for item in case.shapes.items())
    graph += b"".join(field(12, value_info(*item)) for item in case.outputs.items())
    opsets = field(8, field(1, "") + field(2, 17)) + field(8, field(1, spec.DOMAIN) + field(2, spec.OPSET_VERSION))
    return field(1, 8) + field(7, graph) + opsets  # IR version 8


def _load_plain(library: str) -> str:
    ctypes.CDLL(str(native.library_path(library)))
    return "loads; neither tensorrt nor tensorrt_rtx is installed to try its plugins"


def _try_plugins(runtime: str) -> str:
    """Loads the plugins into TensorRT's registry and looks for every operator there."""
    from leanfleet import trt_plugins

    trt = trt_plugins.load(trt_plugins.runtime(runtime))
    found = {c.name for c in trt.get_plugin_registry().all_creators if c.plugin_namespace == trt_plugins.NAMESPACE}
    if missing := set(spec.all_specs()) - found:
        raise RuntimeError(f"{runtime} {trt.__version__} has no plugin for {', '.join(sorted(missing))} after loading")
    return f"{runtime} {trt.__version__} has the plugins {', '.join(sorted(found))}"


def _try_polygraphy() -> str:
    import leanfleet.polygraphy_plugin  # noqa: F401

    known = {point.name for point in metadata.entry_points(group="polygraphy.run.plugins")}
    return (
        "polygraphy run finds it"
        if "leanfleet" in known
        else ("imports; polygraphy run does not find it, because leanfleet is not installed as a package")
    )


PROBES: dict[str, Callable[..., Any]] = {
    "package": _import_package,
    "gpu": _look_at_gpu,
    "library": _try_library,
    "caches": _try_caches,
    "cuda": _try_cuda,
    "caches on cuda": _try_caches_on_cuda,
    "torch": _try_torch,
    "onnxruntime": _try_onnxruntime,
    "plain": _load_plain,
    "plugins": _try_plugins,
    "polygraphy": _try_polygraphy,
}


def print_diagnosis(diagnosis: dict[str, Any]) -> None:
    """Prints what diagnose returned: a line for each check, then the fixes."""
    print(f"leanfleet {diagnosis['version']}, Python {diagnosis['python']}")
    marks = {"ok": "ok", "missing": "-", "broken": "BROKEN"}
    for part, title in (("package", "packages"), ("machine", "machine"), ("library", "libraries")):
        print(f"\n{title}")
        print_table([(marks[c["status"]], c["name"], c["detail"]) for c in diagnosis["checks"] if c["part"] == part])
    broken = [c for c in diagnosis["checks"] if c["status"] == "broken"]
    print("\neverything that is installed works" if diagnosis["usable"] else f"\n{len(broken)} to fix")
    for check in broken:
        print(f"  {check['name']}: {check['fix']}")
