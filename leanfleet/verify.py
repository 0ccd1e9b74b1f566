"""leanfleet verify: every operator and type, in many variants, in every runtime that is here, against the float64 reference.

A runtime runs in a process of its own, which is told apart from one that hangs by what it writes: a crash or a hang is a
failure that names the call. The command's own process imports neither torch nor a runtime.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import leanfleet
from leanfleet import communicators, doctor, driver, machine, native, ort_library, progress, spec

if TYPE_CHECKING:
    import numpy as np

SILENCE = 120.0  # seconds without a finished call after which a runtime hangs
CRASHES = 5  # after as many a runtime is given up
BUILD_FOR = "8.9"  # compute capability of the engines that are built where there is no GPU
QUICK = 8  # with --quick, one of so many
SECONDS = 0.4  # spent on each side of a timing
RTX_PROVIDER = "onnxruntime-ep-nv-tensorrt-rtx-cu13"
Report = dict[str, Any]


class Absent(Exception):
    """A runtime is not here; `fix`: what would install it, None where nothing would."""

    def __init__(self, why: str, fix: str | None) -> None:
        super().__init__(why)
        self.fix = fix


# The runtimes. Each is opened in its own process; opening raises Absent.


class Runtime:
    """A runtime that is here. version: one line; device: of its timings; built: engines are built and not run."""

    version = ""
    device = "cpu"
    built = False
    int8 = True  # takes caches of int8

    def run(self, case: Case) -> Mapping[str, np.ndarray]:
        """The outputs of a call by name, bfloat16 as float32."""
        raise NotImplementedError

    def timings(self) -> Iterable[tuple[str, dict[str, Callable[[], Any]]]]:
        """What is timed: (case, {whose: call}), the first ours."""
        return ()


def _package(name: str) -> Any:
    """An import of doctor.PACKAGES. Raises Absent where it is not installed."""
    if importlib.util.find_spec(name) is None:
        raise Absent(f"{name} is not installed", doctor.install(name, {n: extra for n, _, extra in doctor.PACKAGES}[name]))
    return importlib.import_module(name)


def _needs_gpu(package: str) -> None:
    """package: what a machine with a GPU needs besides."""
    if problem := driver.why_no_gpu():
        raise Absent(problem, f"an NVIDIA GPU with its driver, and {package}")


class _OnnxRuntime(Runtime):
    provider, library = "CPUExecutionProvider", True

    def __init__(self) -> None:
        _package("onnxruntime")
        self.ort = ort_library.onnxruntime()
        self.ort.set_default_logger_severity(4)
        self.version = f"onnxruntime {self.ort.__version__}"

    def options(self) -> Any:
        options = self.ort.SessionOptions()
        options.log_severity_level = 4
        return options

    def session(self, model: str, options: Any) -> Any:
        if self.library:
            from leanfleet.ort_ops import make_session

            return make_session(model, [self.provider], options)
        return self.ort.InferenceSession(model, options, providers=[self.provider])

    def run(self, case: Case) -> Mapping[str, np.ndarray]:
        from leanfleet import trial

        with tempfile.TemporaryDirectory() as folder:
            options = self.options()
            options.enable_profiling = True
            options.profile_file_prefix = str(Path(folder, "profile"))
            session = self.session(case.model, options)
            found = trial.run_session(session, case.inputs)
            ran = set(ort_library.kernels_in_profile(session.end_profiling()))
        if ran != ({(case.op, self.provider)} if self.library else set()):
            raise RuntimeError(f"leanfleet's kernels that ran are {sorted(ran) or 'none'}, not {case.op} on {self.provider}")
        return found

    def timings(self) -> Iterable[tuple[str, dict[str, Callable[[], Any]]]]:
        from leanfleet.ort_ops import make_session

        for what, operator, model, feed, shared in _models_of_others("float16" if self.device == "cuda" else "float32"):
            calls = {}
            for whose, override in (("leanfleet", [operator]), (f"onnxruntime's {operator.split('.')[-1]}", [])):
                session = make_session(model, [self.provider], self.options(), override=override)
                calls[whose] = _bound(self.ort, session, feed, shared, self.device)
            yield what, calls


class _OnnxRuntimeBodies(_OnnxRuntime):
    library = False

    def options(self) -> Any:
        options = super().options()
        options.intra_op_num_threads = 1  # as in make_cases
        return options

    def timings(self) -> Iterable[tuple[str, dict[str, Callable[[], Any]]]]:
        return ()


class _OnnxRuntimeCuda(_OnnxRuntime):
    provider, device = "CUDAExecutionProvider", "cuda"

    def __init__(self) -> None:
        super().__init__()
        _needs_gpu("pip uninstall -y onnxruntime, then pip install 'onnxruntime-gpu[cuda,cudnn]'")
        if self.provider not in self.ort.get_available_providers():
            raise Absent(
                "onnxruntime has no CUDA provider",
                "pip uninstall -y onnxruntime, then pip install 'onnxruntime-gpu[cuda,cudnn]'",
            )
        _needs_kernels()


class _OnnxRuntimeRtx(_OnnxRuntimeBodies):
    """TensorRT-RTX's provider knows no operators of ours: it runs their function bodies."""

    int8 = False

    def __init__(self) -> None:
        super().__init__()
        try:
            import onnxruntime_ep_nv_tensorrt_rtx as package
        except ImportError:
            raise Absent(f"{RTX_PROVIDER} is not installed", f"pip install {RTX_PROVIDER}") from None
        _needs_gpu(RTX_PROVIDER)
        self.provider = package.get_ep_name()
        self.ort.register_execution_provider_library(self.provider, package.get_library_path())
        self.devices = [d for d in self.ort.get_ep_devices() if d.ep_name == self.provider]
        if not self.devices:
            raise Absent(f"{self.provider} {package.__version__} finds no GPU that it runs on", None)
        self.version += f", {RTX_PROVIDER} {package.__version__}"

    def session(self, model: str, options: Any) -> Any:
        options.add_provider_for_devices(self.devices, {})
        return self.ort.InferenceSession(model, options)


class _TensorRt(Runtime):
    name = "tensorrt"

    def __init__(self) -> None:
        from leanfleet import trt_plugins

        _package(self.name)
        try:
            trt_plugins.get_plugin_path()
        except FileNotFoundError:
            raise Absent(
                "leanfleet was built without its TensorRT plugins",
                "put nvcc on PATH and reinstall: pip install -C cmake.define.LEANFLEET_TRT=ON .",
            ) from None
        self.trt = trt_plugins.load(trt_plugins.runtime(self.name))
        self.version = f"{self.name} {self.trt.__version__}"
        if problem := driver.why_no_gpu():
            if not hasattr(self.trt.IBuilderConfig, "set_compute_capability"):
                raise Absent(f"{problem}, and {self.name} builds no engines without one", None)
            self.built = True

    def run(self, case: Case) -> Mapping[str, np.ndarray]:
        from leanfleet import trt_plugins
        from leanfleet.trt_plugins import running

        shapes = {name: (array.shape,) * 3 for name, array in case.inputs.items()}
        built = trt_plugins.build_engine(
            case.model, shapes, trt=self.trt, compute_capabilities=[BUILD_FOR] if self.built else ()
        )
        if [op for _, op in built.layers] != [case.op]:
            raise RuntimeError(f"the engine's plugin layers are {built.layers}, not one {case.op}")
        if self.built:
            return {}
        engine = running.Engine(built.engine, self.trt)
        return engine.numpy(engine(case.inputs))


class _TensorRtRtx(_TensorRt):
    name = "tensorrt_rtx"


class _Torch(Runtime):
    def __init__(self) -> None:
        self.torch = _package("torch")
        self.version = f"torch {self.torch.__version__}"
        if self.device == "cuda":
            _needs_gpu("a build of torch with CUDA")
            if not self.torch.cuda.is_available():
                raise Absent("this torch has no CUDA, or one that finds no GPU", "pip install torch, a build with CUDA")
            _needs_kernels()
        from leanfleet.export import torch_ops

        self.ops = torch_ops

    def run(self, case: Case) -> Mapping[str, np.ndarray]:
        op, torch = spec.all_specs()[case.op], self.torch
        given = [self._tensor(case.inputs[t.name]) if t.name in case.inputs else None for t in op.inputs]
        kinds = {"bool": bool, "int": int, "float": float, "string": str}
        attrs = {a.name: kinds[a.type](case.attrs[a.name]) for a in op.attrs if a.name in case.attrs}
        found = getattr(torch.ops.leanfleet, op.snake_name).default(*given, **attrs)
        arrays = [found] if isinstance(found, torch.Tensor) else found
        active = op.active_outputs(case.attrs)
        names = [t.name for t in op.outputs] if len(arrays) == len(op.outputs) else [t.name for t in active]
        wide = [t.float() if t.dtype == torch.bfloat16 else t for t in arrays]
        outputs = dict(zip(names, (t.cpu().numpy() for t in wide), strict=True))
        return {t.name: outputs[t.name] for t in active}

    def _tensor(self, array):
        if array.dtype.name == "bfloat16":
            return self.torch.from_numpy(array.view("int16")).view(self.torch.bfloat16).to(self.device)
        return self.torch.from_numpy(array).to(self.device)

    def timings(self) -> Iterable[tuple[str, dict[str, Callable[[], Any]]]]:
        torch, attention = self.torch, self.torch.nn.functional.scaled_dot_product_attention
        dtype = torch.float16 if self.device == "cuda" else torch.float32
        name = str(dtype).removeprefix("torch.")
        for what, batch, tokens, slots in (("a step of decoding", 4, 1, 2048), ("a prompt", 1, 512, 512)):
            query = torch.randn(batch, 16, tokens, 64).to(self.device, dtype)
            key, value = (torch.randn(batch, 4, slots, 64).to(self.device, dtype) for _ in range(2))
            yield (
                f"{what}: attention, batch {batch}, {tokens} new tokens, {slots} keys, 16/4 heads of 64, {name}",
                {
                    "leanfleet": partial(self.ops.lean_attention, query, key, value),
                    "torch's SDPA": partial(attention, query, key, value, is_causal=tokens > 1, enable_gqa=True),
                },
            )


class _TorchCuda(_Torch):
    device = "cuda"


class _Polygraphy(Runtime):
    """Polygraphy's runner of ONNX Runtime, on the CPU provider."""

    def __init__(self) -> None:
        _package("onnxruntime")
        self.version = f"polygraphy {_package('polygraphy').__version__}"

    def run(self, case: Case) -> Mapping[str, np.ndarray]:
        from polygraphy.logger import G_LOGGER

        from leanfleet import parity

        with G_LOGGER.verbosity(G_LOGGER.CRITICAL + 1), parity.make_runner("ort-cpu", case.model) as runner:
            return dict(runner.infer(case.inputs, check_inputs=False))


def _needs_kernels() -> None:
    if "cuda" not in native.build_info():
        raise Absent(
            "leanfleet was built without CUDA kernels",
            "put nvcc on PATH and reinstall: pip install -C cmake.define.LEANFLEET_CUDA=ON .",
        )


RUNTIMES: dict[str, tuple[str, Callable[[], Runtime]]] = {
    "ort-cpu": ("ONNX Runtime, CPU", _OnnxRuntime),
    "ort-body": ("ONNX Runtime, CPU, without the library: function bodies", _OnnxRuntimeBodies),
    "ort-cuda": ("ONNX Runtime, CUDA", _OnnxRuntimeCuda),
    "ort-rtx": ("ONNX Runtime, TensorRT-RTX's provider: function bodies", _OnnxRuntimeRtx),
    "tensorrt": ("TensorRT", _TensorRt),
    "tensorrt_rtx": ("TensorRT-RTX", _TensorRtRtx),
    "torch-cpu": ("PyTorch, CPU", _Torch),
    "torch-cuda": ("PyTorch, CUDA", _TorchCuda),
    "polygraphy": ("Polygraphy's runner of ONNX Runtime", _Polygraphy),
}


# What onnxruntime's users have otherwise


def _models_of_others(dtype):
    """(what it is, operator, model bytes, inputs, {output: input whose buffer it takes}) of onnxruntime's own operators.
    dtype: of all tensors that are not integers."""
    import numpy as np
    from onnx import helper

    random = np.random.default_rng(0)

    def model(operator, inputs, outputs, **attributes):
        infos = [
            [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for name, a in of.items()]
            for of in (inputs, outputs)
        ]
        node = helper.make_node(operator, list(inputs), list(outputs), name="node", domain="com.microsoft", **attributes)
        imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        graph = helper.make_graph([node], "graph", *infos)
        return helper.make_model(graph, opset_imports=imports, ir_version=10).SerializeToString()

    def normal(*shape):
        return random.standard_normal(shape).astype(dtype)

    for what, batch, tokens, slots in (("a step of decoding", 4, 1, 2048), ("a prompt", 1, 512, 512)):
        caches = {name: normal(batch, 4, slots, 64) for name in ("past_key", "past_value")}
        feed = {"query": normal(batch, tokens, 16 * 64), "key": normal(batch, tokens, 4 * 64)}
        feed |= {"value": normal(batch, tokens, 4 * 64), **caches}
        feed |= {"seqlens_k": np.full(batch, slots - 1, np.int32), "total_sequence_length": np.array(slots, np.int32)}
        outputs = {"output": feed["query"], "present_key": caches["past_key"], "present_value": caches["past_value"]}
        yield (
            f"{what}: attention, batch {batch}, {tokens} new tokens, {slots} keys, 16/4 heads of 64, {dtype}",
            "com.microsoft.GroupQueryAttention",
            model("GroupQueryAttention", feed, outputs, num_heads=16, kv_num_heads=4),
            feed,
            {"present_key": "past_key", "present_value": "past_value"},
        )
    for what, batch, tokens in (("a step of decoding", 4, 1), ("a prompt", 1, 512)):
        feed = {name: normal(batch, tokens, 8 * 64) for name in ("query", "key", "value")}
        feed |= {"past_state": normal(batch, 8, 64, 64), "decay": -np.abs(normal(batch, tokens, 8)) / 8}
        outputs = {"output": feed["query"], "present_state": feed["past_state"]}
        heads = {"q_num_heads": 8, "kv_num_heads": 8}
        yield (
            f"{what}: linear attention with decay, batch {batch}, {tokens} new tokens, 8 heads of 64, {dtype}",
            "com.microsoft.LinearAttention",
            model("LinearAttention", feed, outputs, update_rule="gated", scale=1.0, **heads),
            feed,
            {},
        )


def _bound(ort, session, feed, shared, device):
    """A run of a session on buffers that stay where they are."""
    binding = session.io_binding()
    values = {name: ort.OrtValue.ortvalue_from_numpy(array, device) for name, array in feed.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for output in session.get_outputs():
        if output.name in shared:
            binding.bind_ortvalue_output(output.name, values[shared[output.name]])
        else:
            binding.bind_output(output.name, device)
    return lambda: session.run_with_iobinding(binding)


# Calls


@dataclass
class Case:
    """A call: the path of a model of one node, its inputs, the right outputs and how far off each may be."""

    op: str
    dtype: str
    attrs: dict[str, Any]
    given: list[str]  # optional inputs
    int8: bool
    bounds: dict[str, float]
    model: str
    inputs: Mapping[str, np.ndarray]
    expected: Mapping[str, np.ndarray]

    @classmethod
    def load(cls, folder: Path, number: int) -> Case:
        import ml_dtypes
        import numpy as np

        def arrays(kind):
            with np.load(folder / f"{number}.{kind}.npz") as file:  # bfloat16 comes back as two bytes of no type
                return {n: a.view(ml_dtypes.bfloat16) if (a := file[n]).dtype.kind == "V" else a for n in file.files}

        facts = json.loads((folder / f"{number}.json").read_text())
        return cls(**facts, model=str(folder / f"{number}.onnx"), inputs=arrays("in"), expected=arrays("out"))


def label(facts: Mapping[str, Any]) -> str:
    """A call's operator, type and variant. facts: what its file of JSON holds."""
    attrs = ", ".join(f"{name}={value}" for name, value in facts["attrs"].items())
    variant = "; ".join(filter(None, [", ".join(facts["given"]), attrs]))
    return f"{facts['op']} {facts['dtype']} ({variant or 'required inputs alone'})"


def make_cases(folder: str, answer: str, quick: str) -> None:
    """Writes every call, or a part, into a folder. Runs in a process of its own."""
    import numpy as np
    import onnx
    import onnx_ir
    import torch

    from leanfleet import trial, variants
    from leanfleet.export import function_bodies

    def write(number, op, ranks, attrs, dtype):
        model = variants.node_model(op, variants.input_shapes(op, ranks, attrs, 1), attrs, dtype)
        inputs = trial.make_inputs(model, seed=number)
        listed = variants.run_reference(op.name, attrs, [inputs.get(t.name) for t in op.inputs])
        found = {t.name: a for t, a in zip(op.outputs, listed) if t in op.active_outputs(attrs)}
        expected = {name: a.astype(np.float32) if a.dtype == trial.BFLOAT16 else a for name, a in found.items()}
        bounds = trial.tolerances(model, expected)
        if "cos_cache" in ranks:  # a row that is rotated before it is quantised may lie on the other side of a half
            bounds |= {name: 1.0 for name, a in expected.items() if a.dtype == np.int8}
        facts = {
            "op": op.name,
            "dtype": dtype,
            "attrs": attrs,
            "given": [t.name for t in op.inputs if t.optional and t.name in ranks],
            "int8": any(a.dtype == np.int8 for a in inputs.values()),
            "bounds": bounds,
        }
        path = Path(folder, str(number))
        onnx.save(onnx_ir.to_proto(function_bodies.attach(onnx_ir.from_proto(model))), path.with_suffix(".onnx"))
        np.savez(path.with_suffix(".in.npz"), **inputs)  # type: ignore[arg-type]  # its other argument is a bool
        np.savez(path.with_suffix(".out.npz"), **expected)  # type: ignore[arg-type]
        path.with_suffix(".json").write_text(json.dumps(facts))

    torch.set_num_threads(1)  # small tensors: more threads would wait for each other, for long where others use the cores
    number = 0
    with open(answer, "a") as log:
        for op in spec.all_specs().values():
            calls = variants.calls(op)
            if len(calls) > variants.MOST_VARIANTS:  # both ends, and others drawn at random
                drawn = np.random.default_rng(0).choice(np.arange(1, len(calls) - 1), variants.MOST_VARIANTS - 2, replace=False)
                calls = [calls[i] for i in (0, *sorted(drawn), len(calls) - 1)]
            for shift, dtype in enumerate(spec.TYPES["T"]):
                for ranks, attrs in calls[shift % len(calls) :: QUICK] if quick else calls:
                    write(number, op, ranks, attrs, dtype)
                    number += 1
                    _say(log, at=number)
        _say(log, end=number)
    os._exit(0)


def _say(log, **what):
    log.write(json.dumps(what) + "\n")
    log.flush()


def run_cases(folder: str, answer: str, runtime: str, first: str, quick: str) -> None:
    """Runs the calls from number `first` on in a runtime, and says of each what came out, a line of JSON in the file `answer`.
    Runs in a process of its own."""
    with open(answer, "a") as log:
        try:
            opened = RUNTIMES[runtime][1]()
        except Absent as error:
            _say(log, absent=str(error), fix=error.fix)
        except Exception as error:
            _say(log, broken=f"{type(error).__name__}: {error}")
        else:
            count = len(list(Path(folder).glob("*.json")))
            communicators.create()  # a world of one, for operators that exchange
            _say(log, version=opened.version, built=opened.built)
            for number in range(int(first), count):
                _say(log, at=number)
                case = Case.load(Path(folder), number)
                _say(log, done=number, **_outcome(opened, case))
            _say(log, at=None)
            if not opened.built:
                _time(opened, log, quick)
        _say(log, end=True)
    sys.stdout.flush()
    os._exit(0)  # what a runtime does while it is taken down is no call's


def _outcome(opened, case):
    """{"right": {output: error}}, {"wrong": text}, or {"refused": text}."""
    if case.int8 and not opened.int8:
        return {"refused": "caches of int8"}
    try:
        found = opened.run(case)
    except Exception as error:
        return {"wrong": " ".join(f"{type(error).__name__}: {error}".split())[:600]}
    if opened.built:
        return {"right": {}}
    if found.keys() != case.expected.keys():
        return {"wrong": f"the outputs are {', '.join(found)}; expected {', '.join(case.expected)}"}
    errors = {name: error_of(found[name], expected) for name, expected in case.expected.items()}
    wrong = [
        f"{name} is off by {error:.2e}, bound {case.bounds[name]:.2e}" if error is not None else f"{name} has another shape"
        for name, error in errors.items()
        if error is None or not error <= case.bounds[name]
    ]
    floats = {name: error for name, error in errors.items() if case.expected[name].dtype.kind == "f"}
    return {"wrong": "; ".join(wrong)} if wrong else {"right": floats}


def error_of(found: np.ndarray, expected: np.ndarray) -> float | None:
    """The largest absolute difference, equal infinities and NaN in the same places being none; None where shapes differ."""
    import numpy as np

    if found.shape != expected.shape:
        return None
    a, b = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    with np.errstate(invalid="ignore"):
        difference = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    return float(np.nan_to_num(difference, nan=np.inf, posinf=np.inf).max(initial=0.0))


def _time(opened, log, quick):
    import statistics

    from leanfleet import bench

    for what, calls in opened.timings():
        row, kept = {}, {}
        for whose, call in calls.items():
            try:
                call()
                kept[whose] = [call]
            except Exception as error:  # of a runtime's own operator, which may lack this type
                if whose == "leanfleet":
                    _say(log, untimed=what, why=" ".join(f"{type(error).__name__}: {error}".split())[:300])
                row[whose] = None
        samples = bench.time_calls(kept, opened.device, SECONDS / 4 if quick else SECONDS)
        row |= {whose: statistics.median(found) for whose, found in samples.items()}
        _say(log, timing=what, seconds=row)


# The command


def _watch(what, command, folder, limit, on_line):
    """Runs a process that writes lines of JSON, each given to on_line. Returns None where its last was {"end": ...}, or else
    how it ended, in words."""
    answer, seen, ended = folder / "answer", b"", False
    answer.write_bytes(b"")
    with open(folder / "log", "wb") as log, open(answer, "rb") as lines:
        process = subprocess.Popen([*command], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            last = time.monotonic()
            while True:
                code = process.poll()  # before the lines are read: none comes behind
                if more := lines.read():
                    last = time.monotonic()
                    *whole, seen = (seen + more).split(b"\n")
                    for line in map(json.loads, whole):
                        ended |= "end" in line
                        on_line(line)
                if ended:
                    return None
                if code is not None:
                    log_text = (folder / "log").read_text(errors="replace")
                    return f"the process {machine.ending(code, ' '.join(log_text.split()))}"
                if time.monotonic() - last > limit:
                    return f"hangs: nothing for {limit:.0f} s"
                time.sleep(0.02)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def run(
    runtimes: Sequence[str] | None = None, quick: bool = False, limit: float = SILENCE, on_runtime: Callable[..., Any] = print
) -> Report:
    """Verifies what is here; returns a report that JSON can hold.

    runtimes: names of RUNTIMES; None: all. quick: an eighth of the calls, and shorter timings. limit: seconds without a
    finished call after which a runtime hangs. on_runtime: called with (name, its part of the report) when it is done.

    The report: "leanfleet", "python", "date", "machine", "quick", "calls" (their number), "seconds" and "runtimes". Of a
    runtime: "status" is "right"; "built", engines were built and not run; "absent", with "why" and "fix"; or "failed", with
    "failures", lines that name operator, type and variant. "operators" is {operator: {type: right calls}}, "refused" {reason:
    calls}, "worst" the largest error of floats in units of its bound, "timings" a list of {"case", "seconds": {whose: median,
    or None}}.
    Raises ValueError for an unknown runtime, ImportError where what the reference needs is missing, RuntimeError where the
    calls cannot be made.

    Example:
        from leanfleet import verify

        report = verify.run(["torch-cpu"], quick=True, on_runtime=lambda name, part: None)
        print(report["runtimes"]["torch-cpu"]["status"])  # right
    """
    names = list(RUNTIMES) if runtimes is None else list(runtimes)
    if unknown := [name for name in names if name not in RUNTIMES]:
        raise ValueError(f"runtime {unknown[0]} is unknown; there are {', '.join(RUNTIMES)}")
    needed = [n for n in ("torch", "onnx", "onnxscript", "onnx_ir", "numpy") if importlib.util.find_spec(n) is None]
    if needed:
        raise ImportError(f"the float64 reference needs {', '.join(needed)}: pip install 'leanfleet[export]'")
    began = time.monotonic()
    report: Report = {"leanfleet": leanfleet.__version__, "python": platform.python_version()}
    report |= {"date": datetime.date.today().isoformat(), "machine": _machine(), "quick": quick, "runtimes": {}}
    flag = "quick" if quick else ""
    with tempfile.TemporaryDirectory(prefix="leanfleet-") as place:
        folder = Path(place)
        cases = folder / "cases"
        cases.mkdir()
        with progress.stage("making calls and their float64 reference") as stage:
            command = machine.command(__name__, "make_cases", str(cases), str(folder / "answer"), flag)
            silence = max(limit, SILENCE)  # no runtime is asked here, and imports alone take seconds
            if problem := _watch("calls", command, folder, silence, lambda line: stage.at(f"{line.get('at', '')}")):
                raise RuntimeError(f"the calls could not be made: {problem}")
        labels = [json.loads((cases / f"{i}.json").read_text()) for i in range(len(list(cases.glob("*.json"))))]
        report["calls"] = len(labels)
        with progress.stage("verifying") as stage:
            for name in names:
                stage.at(name)
                report["runtimes"][name] = _verify(name, folder, cases, labels, limit, flag, stage)
                on_runtime(name, report["runtimes"][name])
    report["seconds"] = round(time.monotonic() - began, 1)
    return report


def _verify(name, folder, cases, labels, limit, flag, stage):
    """One runtime's part of the report."""
    part: Report = {"status": "right", "version": None, "operators": {}, "refused": {}, "failures": [], "worst": 0.0}
    part |= {"timings": [], "seconds": 0.0}
    at: dict[str, Any] = {"number": 0, "timing": False}

    def fail(text):
        part["status"] = "failed"
        part["failures"].append(text)

    def on_line(line):
        if "absent" in line:
            part.update(status="absent", why=line["absent"], fix=line["fix"])
        elif "broken" in line:
            fail(f"it does not open: {line['broken']}")
        elif "version" in line:
            part["version"] = line["version"]
            if line["built"]:
                part["status"] = "built"
        elif "timing" in line:
            part["timings"].append({"case": line["timing"], "seconds": line["seconds"]})
        elif "untimed" in line:
            fail(f"{line['untimed']}: {line['why']}")
        elif "done" in line:
            facts = labels[line["done"]]
            if "wrong" in line:
                fail(f"{label(facts)}: {line['wrong']}")
            elif "refused" in line:
                part["refused"][line["refused"]] = part["refused"].get(line["refused"], 0) + 1
            else:
                counts = part["operators"].setdefault(facts["op"], dict.fromkeys(spec.TYPES["T"], 0))
                counts[facts["dtype"]] += 1
                shares = (error / facts["bounds"][o] for o, error in line["right"].items() if facts["bounds"][o])
                part["worst"] = max([part["worst"], *shares])
            at["number"] = line["done"] + 1
        elif "at" in line:
            at["timing"] = line["at"] is None
            if not at["timing"]:
                at["number"] = line["at"]
                stage.at(f"{name} {labels[line['at']]['op']}", line["at"], len(labels))

    began = time.monotonic()
    for attempt in range(CRASHES):
        arguments = [str(cases), str(folder / "answer"), name, str(at["number"]), flag]
        problem = _watch(name, machine.command(__name__, "run_cases", *arguments), folder, limit, on_line)
        if problem is None:
            break
        if part["version"] is None:
            fail(f"it does not open: {problem}")
            break
        if at["timing"]:
            fail(f"while it was timed {problem}")
            break
        where = at["number"]
        fail(f"{label(labels[where])}: {problem}")
        at["number"] = where + 1
        if (problem.startswith("hangs") or attempt == CRASHES - 1) and len(labels) > where + 1:
            fail(f"given up: {len(labels) - where - 1} calls were not run")
            break
    part["seconds"] = round(time.monotonic() - began, 1)
    return part


def _machine():
    """The processor, its instruction sets, the GPUs and their driver; no names of hosts and no paths."""
    name, flags = machine.cpu()
    gpu = doctor.gpu_check()
    return {
        "cpu": name,
        "instruction sets": flags,
        "cores": len(os.sched_getaffinity(0)),
        "kernels": native.build_info(),
        "gpu": gpu["detail"] if gpu["status"] == "ok" else None,
        "packages": {n: v for n in ("numpy", "onnx", "onnxruntime", "onnxruntime-gpu", "torch") if (v := _version(n))},
    }


def _version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def failed(report: Report) -> bool:
    """Whether a runtime of a report failed."""
    return any(part["status"] == "failed" for part in report["runtimes"].values())


# Words


def device(report: Report) -> str:
    """What a report ran on, in a few words."""
    facts = report["machine"]
    return facts["gpu"].partition(";")[0] if facts["gpu"] else facts["cpu"]


def outcome(part: Report) -> str:
    """A runtime's part of a report in a few words."""
    if part["status"] == "absent":
        return "not there"
    count = sum(sum(types.values()) for types in part["operators"].values())
    if part["status"] == "failed":
        return f"**{len(part['failures'])} failures**, {count} calls right"
    done = f"{count} engines built, none run" if part["status"] == "built" else f"{count} calls right"
    left = "; ".join(f"{n} with {reason} not taken" for reason, n in part["refused"].items())
    lacking = sorted(set(spec.all_specs()) - set(part["operators"]))
    return "; ".join(filter(None, [done, left, f"none of {', '.join(lacking)}" if lacking else ""]))


def markdown(report: Report) -> str:
    """A report as Markdown, to paste."""
    facts = report["machine"]
    sets = f" ({', '.join(facts['instruction sets'])})" if facts["instruction sets"] else ""
    lines = [
        f"## leanfleet {report['leanfleet']}: {'a quick look' if report['quick'] else 'verified'} on {report['date']}",
        "",
        f"- processor: {facts['cpu']}{sets}, {facts['cores']} cores; kernels: {facts['kernels']}",
        f"- GPU: {facts['gpu'] or 'none'}",
        f"- Python {report['python']}, " + ", ".join(f"{name} {version}" for name, version in facts["packages"].items()),
        f"- {report['calls']} calls of {len(spec.all_specs())} operators against the float64 reference; {report['seconds']} s",
        "",
        "| runtime | version | outcome | largest error, of its bound | s |",
        "|---|---|---|---|---|",
    ]
    for name, part in report["runtimes"].items():
        worst = f"{part['worst']:.2f}" if part["status"] == "right" else ""
        lines.append(
            f"| {name}: {RUNTIMES[name][0]} | {part['version'] or ''} | {outcome(part)} | {worst} | {part['seconds']:.0f} |"
        )
    for title, wanted in (("Failures", "failures"), ("Not there", "why")):
        found = []
        for name, part in report["runtimes"].items():
            if wanted == "failures":
                found += [f"- {name}: {text}" for text in part["failures"]]
            elif part["status"] == "absent":
                found.append(f"- {name}: {part['why']}" + (f"; needs {part['fix']}" if part["fix"] else ""))
        lines += ["", f"{title}:", "", *found] if found else []
    timed = [(name, row) for name, part in report["runtimes"].items() for row in part["timings"]]
    if timed:
        lines += ["", "Medians:", "", "| runtime | case | leanfleet | beside it |", "|---|---|---|---|"]
        for name, row in timed:
            words = {w: "does not run it" if s is None else f"{1e3 * s:.3f} ms" for w, s in row["seconds"].items()}
            others = ", ".join(f"{whose} {text}" for whose, text in words.items() if whose != "leanfleet")
            lines.append(f"| {name} | {row['case']} | {words['leanfleet']} | {others} |")
    return "\n".join(lines) + "\n"


def support_table(reports: Iterable[Report]) -> str:
    """What ran where, in Markdown: a line for each runtime of each report that was not absent.

    Example:
        from leanfleet import verify

        report = verify.run(["torch-cpu"], quick=True, on_runtime=lambda name, part: None)
        print(verify.support_table([report]))
    """
    lines = ["| runtime | version | device | date | outcome |", "|---|---|---|---|---|"]
    for name, (title, _) in RUNTIMES.items():
        for report in sorted(reports, key=lambda r: (r["date"], device(r))):
            part = report["runtimes"].get(name)
            if part and part["status"] != "absent":
                words = [f"{name}: {title}", part["version"] or "", device(report), report["date"], outcome(part)]
                lines.append("| " + " | ".join(words) + " |")
    return "\n".join(lines) + "\n"
