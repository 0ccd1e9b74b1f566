"""leanfleet's operators in TensorRT 10, TensorRT 11 and TensorRT-RTX (1.7 or newer): plugins, engines, running them.

Importing this module needs neither TensorRT nor torch nor a GPU. Building an engine also needs onnx; running one needs a
GPU, and torch or cuda-python for device memory (leanfleet.trt_plugins.running).
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from leanfleet import driver, native, spec
from leanfleet.files import new_file
from leanfleet.trt_plugins.products import take_products, with_branches

if TYPE_CHECKING:
    import onnx

# (least, usual, largest) sizes of open dimensions, or shapes of inputs, by name
Profile = Mapping[str, tuple[Any, Any, Any]]

RUNTIMES = ("tensorrt", "tensorrt_rtx")
OLDEST = {"tensorrt": (10, 3), "tensorrt_rtx": (1, 7)}  # aliased plugin tensors; plugins in the ONNX parser
NAMESPACE = "leanfleet"
# What prepare writes on nodes, beside the operator's own attributes. csrc/trt/trt_common.h explains the last two.
_PLUGIN_ATTRIBUTES = {"plugin_namespace": NAMESPACE, "plugin_version": "1"}

_loaded = {}  # runtime's name -> handle of the plugin library
_loggers = {}


def get_plugin_path() -> str:
    """Path of libleanfleet_trt.so, for trtexec --dynamicPlugins and other tools. One library serves TensorRT 10 and 11 and
    TensorRT-RTX.

    Raises FileNotFoundError where the package was built without it (without nvcc, or without TensorRT's headers).

    Example:
        from leanfleet.trt_plugins import get_plugin_path

        print(f"trtexec --onnx=prepared.onnx --dynamicPlugins={get_plugin_path()}")
    """
    return str(native.library_path("leanfleet_trt"))


def plugin_library_facts() -> dict[str, Any]:
    """What doctor and info show: {"path", "error", "runtimes": {name: version} of those that are installed}."""
    facts: dict[str, Any] = {"path": None, "error": None, "runtimes": {}}
    try:
        facts["path"] = get_plugin_path()
    except FileNotFoundError as error:
        facts["error"] = str(error)
    for name in RUNTIMES:
        if importlib.util.find_spec(name) is not None:
            try:
                facts["runtimes"][name] = importlib.import_module(name).__version__
            except Exception as error:  # an installation without its libraries raises many things
                facts["runtimes"][name] = f"cannot be imported: {error}"
    return facts


def runtime(name: str | None = None) -> ModuleType:
    """The module tensorrt or tensorrt_rtx; name None: the first that is installed, tensorrt before tensorrt_rtx.

    Raises ValueError for another name, ImportError where it is not installed, RuntimeError where it is too old.

    Example:
        from leanfleet import trt_plugins

        trt = trt_plugins.runtime()                         # the module tensorrt, or tensorrt_rtx
        print(trt.__version__)
    """
    if name not in (None, *RUNTIMES):
        raise ValueError(f"runtime is '{name}'; it is one of {', '.join(RUNTIMES)}")
    candidates = [name] if name else [n for n in RUNTIMES if importlib.util.find_spec(n) is not None]
    if not candidates:
        raise ImportError("TensorRT is not installed: pip install 'leanfleet[trt]', or for RTX GPUs pip install tensorrt-rtx")
    trt = importlib.import_module(candidates[0])
    found = tuple(map(int, re.findall(r"\d+", trt.__version__)[:2]))
    if found < (oldest := OLDEST[candidates[0]]):
        raise RuntimeError(f"leanfleet needs {candidates[0]} {'.'.join(map(str, oldest))} or newer; found {trt.__version__}")
    if candidates[0] == "tensorrt_rtx":
        _link_rtx_library()
    return trt


def _link_rtx_library():
    """TensorRT-RTX's ONNX parser opens libtensorrt_rtx.so, a name that its wheel leaves out, and ends the process
    without it."""
    libraries = importlib.util.find_spec("tensorrt_rtx_libs")
    if libraries is None:  # not from the wheel
        return
    folder = Path(libraries.origin).parent
    link, library = folder / "libtensorrt_rtx.so", folder / "libtensorrt_rtx.so.1"
    if link.exists() or not library.exists():
        return
    try:
        link.symlink_to(library.name)
    except FileExistsError:  # another process was faster
        pass
    except OSError as error:
        raise RuntimeError(
            f"TensorRT-RTX's ONNX parser needs {link}, which cannot be made here ({error}): ln -s {library.name} {link}"
        ) from None


def load(trt: ModuleType | None = None) -> ModuleType:
    """Registers the plugins with a runtime (a module; None: see runtime). Loading again changes nothing. Returns the module.

    Raises what runtime and get_plugin_path raise, and RuntimeError where the runtime refuses the library.

    Example:
        from leanfleet import trt_plugins

        trt = trt_plugins.load()
        names = {creator.name for creator in trt.get_plugin_registry().all_creators}
        print("LeanAttention" in names)  # True
    """
    trt = trt or runtime()
    if trt.__name__ not in _loaded:
        make_logger(trt)  # TensorRT reports through the logger of the first builder or runtime that asked for one
        path = get_plugin_path()
        registry = trt.get_plugin_registry()
        present = {creator.name for creator in registry.all_creators if creator.plugin_namespace == NAMESPACE}
        if set(spec.all_specs()) <= present:  # the application registered them itself
            handle = True
        elif not (handle := registry.load_library(path)):
            try:
                ctypes.CDLL(path)
                reason = "; ".join(make_logger(trt).errors) or "no reason given"
            except OSError as error:
                reason = str(error)
            raise RuntimeError(f"{trt.__name__} {trt.__version__} does not load {path}: {reason}")
        _loaded[trt.__name__] = handle
    return trt


def make_logger(trt: ModuleType) -> Any:
    """The logger that this module's builders and runtimes share. It keeps errors in .errors, from where they come in
    exceptions; with .verbose set it also writes everything to stderr."""
    if trt.__name__ not in _loggers:

        class Logger(trt.ILogger):  # type: ignore[name-defined]  # of the runtime that is installed
            def __init__(self) -> None:
                trt.ILogger.__init__(self)
                self.errors, self.verbose = [], False

            def log(self, severity: Any, message: str) -> None:
                if severity <= trt.ILogger.Severity.ERROR:
                    self.errors = [*self.errors[-99:], message]
                if self.verbose:
                    print(f"[{trt.__name__}] {severity.name}: {message}", file=sys.stderr, flush=True)

        _loggers[trt.__name__] = Logger()
    return _loggers[trt.__name__]


def failure(trt: ModuleType, action: str) -> RuntimeError:
    """A RuntimeError with what the log said: leanfleet's own messages first, the rest after them."""
    errors = list(dict.fromkeys(" ".join(e.split()) for e in make_logger(trt).errors))
    names = tuple(f"{name} '" for name in spec.all_specs())
    ours = [e for e in errors if e.startswith(names)]
    return RuntimeError(f"{trt.__name__} {trt.__version__} {action}: " + "; ".join(ours or errors or ["no reason given"]))


# Models


def prepare(model: onnx.ModelProto) -> onnx.ModelProto:
    """Makes an ONNX model's leanfleet nodes into what TensorRT's parser takes. model: onnx.ModelProto, changed in place.

    TensorRT takes no layer input that is absent, wants every output of a layer connected, and prefers the function that an
    exported model carries for a node to the plugin of the same name. So each node gets the names of the inputs and outputs
    that it has as attributes connected_inputs and connected_outputs, loses its empty ones, and says which plugin it is;
    Linear with constant weights becomes TensorRT's own products; leanfleet's functions go, and all others are inlined,
    because the parser takes a node of any domain for the standard operator of its name. The nodes move to the domain
    leanfleet.trt, because ONNX Runtime would read their inputs by position. Returns the model. Preparing it again changes
    nothing. Raises ValueError for an attribute that an operator does not have, for one that does not exist, for more inputs
    than it has, for names that are no UTF-8, and for another version of them, before anything is changed.

    Example:
        import onnx
        from leanfleet.trt_plugins import prepare

        model = prepare(onnx.load("layer.onnx"))
        print(sorted({node.domain for node in model.graph.node}))  # ['', 'leanfleet.trt']
    """
    import onnx
    import onnx.inliner

    _check_nodes(model, onnx)
    take_products(model)
    _prepare_nodes(model.graph.node, onnx)
    for function in [f for f in model.functions if f.domain == spec.DOMAIN]:
        model.functions.remove(function)
    for function in model.functions:
        _prepare_nodes(function.node, onnx)
    domain = f"{spec.DOMAIN}.trt"
    for entry in model.opset_import:
        if entry.domain == spec.DOMAIN:
            entry.domain = domain
    if model.functions:
        weights = list(model.graph.initializer)  # set aside: inlining copies the model
        del model.graph.initializer[:]
        model.CopyFrom(onnx.inliner.inline_local_functions(model))
        model.graph.initializer.extend(weights)
    return model


def _check_nodes(model, onnx):
    try:
        _refuse_nodes(model, onnx)
    except UnicodeDecodeError as error:
        raise ValueError(f"the model is damaged: a name in it is no UTF-8 ({error})") from None


def _refuse_nodes(model, onnx):
    lists = [model.graph.node, *(f.node for f in model.functions if f.domain != spec.DOMAIN)]
    ours = [node for nodes in lists for node in with_branches(nodes) if node.domain == spec.DOMAIN]
    for entry in model.opset_import:
        if ours and entry.domain == spec.DOMAIN:
            spec.check_version(entry.version)
    for nodes in lists:  # of names that are no UTF-8 protobuf raises the single ones, and gives those in lists as bytes
        for node in with_branches(nodes):
            names = (node.op_type, node.name, node.domain, node.overload, *node.input, *node.output)
            for name in names:
                if isinstance(name, bytes):
                    name.decode()
    for node in ours:
        spec.check_attributes(node.op_type, node.name, [a.name for a in node.attribute])
        op = spec.all_specs().get(node.op_type)
        if op is None:
            known = ", ".join(spec.all_specs())
            raise ValueError(f"node '{node.name}': leanfleet has no operator {node.op_type}; it has {known}")
        for kind, names, tensors in (("inputs", node.input, op.inputs), ("outputs", node.output, op.outputs)):
            if len(names) > len(tensors):
                raise ValueError(f"{op.name} '{node.name}' has {len(names)} {kind}; it has at most {len(tensors)}")


def _prepare_nodes(nodes, onnx):
    for node in with_branches(nodes):
        op = spec.all_specs().get(node.op_type)
        if node.domain != spec.DOMAIN or op is None:
            continue
        connected = [("connected_inputs", op.inputs, node.input), ("connected_outputs", op.outputs, node.output)]
        for key, tensors, names in connected:
            present = [(t.name, name) for t, name in zip(tensors, names) if name]
            del names[:]
            names.extend(name for _, name in present)
            node.attribute.append(onnx.helper.make_attribute(key, ",".join(t for t, _ in present)))
        node.attribute.extend(onnx.helper.make_attribute(k, v) for k, v in _PLUGIN_ATTRIBUTES.items())
        node.domain = f"{spec.DOMAIN}.trt"
        node.ClearField("overload")


def _read_model(model):
    """(ModelProto without its external data, path or None) of a path, bytes or a ModelProto."""
    import onnx
    from google.protobuf.message import DecodeError

    if not isinstance(model, (str, os.PathLike, bytes, bytearray)):
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        return copy, None
    path = None if isinstance(model, (bytes, bytearray)) else Path(model)
    if path and not path.is_file():
        raise FileNotFoundError(f"{model} does not exist; give the path of an ONNX file")
    name = path or "the model"
    try:
        proto = onnx.load_model_from_string(path.read_bytes() if path else bytes(model))
    except DecodeError as error:
        raise ValueError(f"{name} is no ONNX model: {error}") from None
    if not proto.graph.node or not proto.graph.output:  # what some files that are something else are read as
        raise ValueError(f"{name} is no ONNX model: it has no nodes or no outputs")
    return proto, str(path.absolute()) if path else None


def prepare_file(model: str | os.PathLike[str], path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Writes a prepared copy of an ONNX file, for trtexec and other tools. Weights in a file of their own stay there, so
    that the copy must lie in the same folder. Returns path. Raises FileNotFoundError, ValueError for another folder or what
    is no ONNX model, OSError for a path that cannot be written.

    Example:
        from leanfleet.trt_plugins import prepare_file

        prepare_file("layer.onnx", "prepared.onnx")         # then trtexec --onnx=prepared.onnx
    """
    proto, source = _read_model(model)
    external = any(t.data_location == t.EXTERNAL for t in proto.graph.initializer)
    if external and Path(path).absolute().parent != Path(source).parent:
        raise ValueError(f"{model} keeps its weights in a file beside it: write the prepared model into {Path(source).parent}")
    with new_file(path) as new:
        new.write_bytes(prepare(proto).SerializeToString())
    return path


# Engines


@dataclass
class Build:
    """An engine and what is known of it. layers: (name, operator) of the plugin layers. gpus: compute capabilities of the
    GPUs that it was built for."""

    engine: bytes
    layers: list[tuple[str, str | None]] = field(default_factory=list)
    seconds: float = 0.0
    runtime: str = ""
    gpus: list[str] = field(default_factory=list)


def build_engine(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    profiles: Profile | Sequence[Profile] | None = None,
    path: str | os.PathLike[str] | None = None,
    *,
    trt: ModuleType | None = None,
    compute_capabilities: Sequence[str] = (),
    in_place: bool = True,
    workspace: int | None = None,
    progress: Callable[[str, int, int], object] | None = None,
    embed_plugins: bool = False,
    configure: Callable[[Any], object] | None = None,
) -> Build:
    """Builds an engine from an ONNX model with leanfleet nodes; they become plugin layers.

    model: path, bytes or onnx.ModelProto. profiles: list of dicts, or one dict, for models with open dimensions: either
    {dimension's name: (min, opt, max)} or {input's name: (min shape, opt shape, max shape)}, every open dimension in each.
    path: where to write the engine. trt: the module to use, see runtime.
    compute_capabilities: of the GPUs to build for, such as ["8.0", "8.9"] (TensorRT-RTX, no GPU needed); default: that of
    the first GPU that is here. in_place: lets TensorRT give an output that may take an input's buffer that buffer; it may still
    insert copies. workspace: limit in bytes. progress: called with (phase, step, number of steps); returning False
    stops the build. embed_plugins: puts the plugin library into the engine, which then is a version-compatible one: for hosts
    such as Triton that only open libraries (the host must allow code in engines). configure: called with the IBuilderConfig.

    Returns a Build. Raises FileNotFoundError, ValueError for what is no model, for profiles that do not fit it and where no
    GPU is named and none is here, OSError where path cannot be written, RuntimeError with the log's reasons where TensorRT
    refuses the model, and KeyboardInterrupt, between two steps of the build, for Ctrl-C.

    Example:
        from leanfleet.trt_plugins import build_engine

        profile = {"batch": (1, 1, 8), "tokens": (1, 128, 2048)}    # least, usual and largest
        built = build_engine("layer.onnx", profile, "layer.engine", compute_capabilities=["8.9"])
        print([operator for _, operator in built.layers])  # ['NormalizedLinearAttention']
    """
    proto, source = _read_model(model)
    trt = load(trt)
    gpus = _gpus(trt, compute_capabilities)
    with new_file(path) if path is not None else nullcontext() as new:
        build = _build(
            trt,
            proto,
            source,
            profiles,
            gpus if compute_capabilities else (),
            in_place,
            workspace,
            progress,
            embed_plugins,
            configure,
        )
        build.gpus = gpus
        if new is not None:
            new.write_bytes(build.engine)
    return build


def _build(trt, proto, source, profiles, gpus, in_place, workspace, progress, embed_plugins, configure):
    """build_engine's Build of a model that was read; gpus: to set, or none for the one that is here."""
    logger = make_logger(trt)
    logger.errors = []
    prepare(proto)
    started = time.perf_counter()
    builder = trt.Builder(logger)
    flags = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)  # TensorRT 11 has no other networks
    network = builder.create_network(0 if flags is None else 1 << int(flags))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(proto.SerializeToString(), source):
        raise failure(trt, "cannot parse the model")
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    build = Build(
        b"",
        [(layer.name, _operator_of(layer, proto)) for layer in layers if layer.type == trt.LayerType.PLUGIN_V3],
        runtime=f"{trt.__name__} {trt.__version__}",
    )
    config = builder.create_builder_config()
    if workspace is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace)
    if in_place:
        config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    monitor = config.progress_monitor = _progress_monitor(trt, progress)
    if embed_plugins:
        if trt.__name__ == "tensorrt_rtx":
            raise ValueError("embed_plugins: TensorRT-RTX has no engines that hold plugins; load them where the engine runs")
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
        config.plugins_to_serialize = [get_plugin_path()]
    if gpus:
        config.num_compute_capabilities = len(gpus)
        for i, gpu in enumerate(gpus):
            config.set_compute_capability(getattr(trt.ComputeCapability, _member(gpu)), i)
    for profile in _profiles(trt, builder, network, proto, profiles):
        config.add_optimization_profile(profile)
    if configure is not None:
        configure(config)
    with _interrupting(monitor):
        serialized = builder.build_serialized_network(network, config)
    if serialized is None:
        raise failure(trt, "cannot build the engine")
    build.engine, build.seconds = bytes(serialized), time.perf_counter() - started
    return build


def _operator_of(layer, proto):
    """The operator of a plugin layer: the parser names layers after nodes."""
    return next((n.op_type for n in proto.graph.node if n.name == layer.name), "")


def _member(capability):
    """Of trt.ComputeCapability."""
    return f"SM{capability.replace('.', '')}"


def _gpus(trt, capabilities):
    """The compute capabilities to build for; none given: that of the first GPU. Raises ValueError for one that the runtime
    cannot build for, and where none is given and no GPU is here."""
    capabilities, others_possible = [str(c) for c in capabilities], hasattr(trt.IBuilderConfig, "set_compute_capability")
    if not capabilities:
        if problem := driver.why_no_gpu():
            others = (
                "say which one to build for with compute_capabilities (--compute-capability), such as 8.9"
                if others_possible
                else f"{trt.__name__} builds on the GPU that the engine is for"
            )
            raise ValueError(f"{problem}: {others}")
        return [driver.gpus()[0].capability]
    if not others_possible:
        raise ValueError(
            f"compute_capabilities are {', '.join(capabilities)}, but {trt.__name__} builds for the GPU that is "
            "here alone; TensorRT-RTX builds for others"
        )
    known = [n for n in trt.ComputeCapability.__members__ if n.startswith("SM")]
    if unknown := [c for c in capabilities if _member(c) not in known]:
        raise ValueError(
            f"compute capability {unknown[0]} is unknown to {trt.__name__} {trt.__version__}; it knows "
            + ", ".join(f"{n[2:-1]}.{n[-1]}" for n in known)
        )
    return capabilities


def _profiles(trt, builder, network, proto, profiles):
    """Optimization profiles; see build_engine."""
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    names = {v.name: [d.dim_param for d in v.type.tensor_type.shape.dim] for v in proto.graph.input}
    open_dims = {d for t in inputs for d, size in zip(names[t.name], t.shape) if size < 0}
    dynamic = any(size < 0 for t in inputs for size in t.shape)
    if not dynamic:
        return
    given = [profiles] if isinstance(profiles, dict) else profiles
    if not given:
        raise ValueError(
            f"the model has open dimensions ({', '.join(sorted(open_dims)) or 'without names'}) and needs "
            "profiles: for each dimension the smallest, the usual and the largest size"
        )
    for entry in given:
        if unknown := set(entry) - open_dims - {t.name for t in inputs}:
            raise ValueError(
                f"profile {', '.join(sorted(unknown))}: no such open dimension or input; the model has the "
                f"dimensions {', '.join(sorted(open_dims))} and the inputs {', '.join(t.name for t in inputs)}"
            )
        profile = builder.create_optimization_profile()
        left_out = {
            d or f"of {t.name}, without a name"
            for t in inputs
            if t.name not in entry
            for d, size in zip(names[t.name], t.shape)
            if size < 0 and d not in entry
        }
        if left_out:
            raise ValueError(
                f"a profile leaves out the open dimension {', '.join(sorted(left_out))}: each needs its smallest, "
                "usual and largest size, such as batch=1:1:8"
            )
        for tensor in inputs:
            shapes = entry.get(tensor.name)
            if shapes is None:
                shapes = [
                    [size if size >= 0 else entry[d][end] for d, size in zip(names[tensor.name], tensor.shape)]
                    for end in range(3)
                ]
            if any(not low <= usual <= high for low, usual, high in zip(*shapes)):
                raise ValueError(f"profile of {tensor.name} is {shapes}: sizes must not fall from the smallest to the largest")
            profile.set_shape(tensor.name, *map(tuple, shapes))
        yield profile


def _progress_monitor(trt, progress):
    """A monitor that tells `progress` (None: nobody) about steps, and stops the build once `going` is false."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps, self.going = {}, True

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.steps[phase_name] = num_steps
            self.tell(phase_name, 0)

        def step_complete(self, phase_name: str, step: int) -> bool:
            self.tell(phase_name, step + 1)
            return self.going

        def phase_finish(self, phase_name: str) -> None:
            self.steps.pop(phase_name, None)

        def tell(self, phase: str, step: int) -> None:
            # An exception cannot pass through TensorRT.
            try:
                if progress is not None and progress(phase, step, self.steps.get(phase, 0)) is False:
                    self.going = False
            except Exception:
                self.going = False

    return Monitor()


@contextmanager
def _interrupting(monitor):
    """Ctrl-C stops the build at its next step and is raised behind it: raised inside a callback of TensorRT's, as Python
    would, it ends the process."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    pressed = False

    def stop(*_):
        nonlocal pressed
        pressed, monitor.going = True, False

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if pressed:
            raise KeyboardInterrupt


def gpu_named(device: str | driver.Device | None) -> driver.Device | None:
    """A GPU by its name, "cuda" or "cuda:1". Raises ValueError for what is none, and for one that is not here."""
    if device is None:
        return None
    found = driver.Device.named(device)
    if found.kind != "cuda":
        raise ValueError(f"device is {found}; TensorRT runs on GPUs: cuda, or cuda:1")
    return found


def deserialize(
    engine: bytes | bytearray | str | os.PathLike[str],
    trt: ModuleType | None = None,
    host_code: bool = False,
    device: str | driver.Device | None = None,
) -> Any:
    """The ICudaEngine of an engine (bytes or path). Needs a GPU that it was built for.

    device: that GPU, "cuda" (the first) or "cuda:1"; None: the current one. host_code: lets an engine that holds code for the
    host, as embed_plugins makes it, run that code in this process, with all that this process may do: for files from somebody
    you trust alone. Raises FileNotFoundError, and RuntimeError where no GPU is here and with the log's reasons where TensorRT
    refuses the engine.

    Example:
        from leanfleet.trt_plugins import deserialize

        engine = deserialize("layer.engine")
        print(engine.num_io_tensors)
    """
    where = gpu_named(device)
    if isinstance(engine, (str, os.PathLike)):
        if not Path(engine).is_file():
            raise FileNotFoundError(f"{engine} does not exist; build it with leanfleet engine build")
        engine = Path(engine).read_bytes()
    trt = load(trt)
    if problem := driver.why_no_gpu():
        raise RuntimeError(f"cannot load the engine: {problem}, and engines are loaded on a GPU that they were built for")
    logger = make_logger(trt)
    logger.errors = []
    with driver.current(where):
        loader = trt.Runtime(logger)
        if host_code and hasattr(loader, "engine_host_code_allowed"):
            loader.engine_host_code_allowed = True
        loaded = loader.deserialize_cuda_engine(engine)
    if loaded is None:
        raise failure(trt, "cannot load the engine")
    return loaded


def inspect(
    engine: bytes | str | os.PathLike[str],
    trt: ModuleType | None = None,
    host_code: bool = False,
    device: str | driver.Device | None = None,
) -> dict[str, Any]:
    """What an engine (bytes or path) holds: {"tensors": [...], "layers": [...]}, as TensorRT's engine inspector tells.
    Needs a GPU that it was built for. host_code, device, and what it raises: see deserialize.

    Example:
        from leanfleet.trt_plugins import inspect

        for tensor in inspect("layer.engine")["tensors"]:
            print(tensor["mode"], tensor["name"], tensor["type"], tensor["shape"])
    """
    import json

    trt = load(trt)
    loaded = deserialize(engine, trt, host_code, device)
    tensors = []
    for i in range(loaded.num_io_tensors):
        name = loaded.get_tensor_name(i)
        tensors.append(
            {
                "name": name,
                "mode": loaded.get_tensor_mode(name).name.lower(),
                "type": loaded.get_tensor_dtype(name).name.lower(),
                "shape": list(loaded.get_tensor_shape(name)),
            }
        )
    text = loaded.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
    return {"tensors": tensors, "profiles": loaded.num_optimization_profiles, "layers": json.loads(text).get("Layers", [])}
