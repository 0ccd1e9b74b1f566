"""A stand-in for TensorRT's runtime: engines that ONNX Runtime's CPU provider runs, on a stream where everything comes late."""

import ctypes
import enum
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime

from leanfleet.exchange import Host
from leanfleet.ort_ops import make_session

FP8 = onnx.TensorProto.FLOAT8E4M3FN
TYPES = {1: "FLOAT", 3: "INT8", 6: "INT32", 7: "INT64", 10: "HALF", FP8: "FP8"}
BOUND = {"FLOAT": np.float32, "INT8": np.int8, "INT32": np.int32, "INT64": np.int64, "HALF": np.float16, "FP8": FP8}


class TensorIOMode(enum.Enum):
    INPUT, OUTPUT = 1, 2


class Stream(Host):
    """What is queued happens when somebody waits for it, or never. Copies from memory that is not pinned read it at once, as
    CUDA's do."""

    device = "cuda"
    streams: dict[int, "Stream"] = {}

    def __init__(self, index=0):
        super().__init__()
        self.index = index
        self.queued, self.done, self.pinned = [], 0, []
        self.address = id(self)
        self.streams[self.address] = self

    def host_bytes(self, size):
        array = super().host_bytes(size)
        self.pinned.append(array)
        return array

    def copy(self, target, source, size):
        if not any(a <= source < a + n for a, n in self._late()):
            held = ctypes.string_at(source, size)
            self.queued.append(lambda: ctypes.memmove(target, held, size))
        else:
            self.queued.append(lambda: ctypes.memmove(target, source, size))

    def _late(self):
        yield from ((a.ctypes.data, a.size) for a in self.pinned)
        yield from ((a, room.size) for a, room in self._arrays.items())

    def mark(self):
        return self.done + len(self.queued)

    def wait(self, mark):
        while self.done < mark:
            self.queued.pop(0)()
            self.done += 1


class Engine:
    """An ICudaEngine of an ONNX file, and its IExecutionContext."""

    def __init__(self, path, profiles):
        graph = onnx.load(path, load_external_data=False).graph
        self.session = make_session(path, providers=["CPUExecutionProvider"])
        self.inputs, values = [v.name for v in graph.input], [*graph.input, *graph.output]
        self.names = [v.name for v in values]
        self.types = {v.name: TYPES[v.type.tensor_type.elem_type] for v in values}
        self.dims = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}
        self.profiles = [profiles] if isinstance(profiles, dict) else profiles
        self.num_io_tensors, self.num_optimization_profiles = len(values), len(self.profiles)
        self.used = set()  # profiles

    def get_tensor_name(self, index):
        return self.names[index]

    def get_tensor_dtype(self, name):
        return SimpleNamespace(name=self.types[name])

    def get_tensor_mode(self, name):
        return TensorIOMode.INPUT if name in self.inputs else TensorIOMode.OUTPUT

    def get_tensor_shape(self, name):
        return tuple(-1 if isinstance(d, str) else d for d in self.dims[name])

    def get_tensor_profile_shape(self, name, profile):
        sizes = self.profiles[profile]
        return [tuple(sizes[d][end] if isinstance(d, str) else d for d in self.dims[name]) for end in range(3)]

    def create_execution_context(self):
        return Context(self)


class Context:
    def __init__(self, engine):
        self.engine, self.profile, self.shapes, self.addresses = engine, 0, {}, {}

    def set_optimization_profile_async(self, index, stream):
        self.profile, self.shapes = index, {}  # shapes are a profile's
        return True

    def set_input_shape(self, name, shape):
        low, _, high = self.engine.get_tensor_profile_shape(name, self.profile)
        self.shapes[name] = shape
        return len(shape) == len(low) and all(a <= n <= b for a, n, b in zip(low, shape, high))

    def set_tensor_address(self, name, address):
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream):
        engine, shapes, addresses = self.engine, dict(self.shapes), dict(self.addresses)
        if set(shapes) != set(engine.inputs) or set(addresses) != set(engine.names):
            return False
        engine.used.add(self.profile)
        sizes = {d: n for name in engine.inputs for d, n in zip(engine.dims[name], shapes[name])}

        def run():
            binding = engine.session.io_binding()
            for name in engine.names:
                bind = binding.bind_input if name in shapes else binding.bind_output
                shape = [sizes.get(d, d) for d in engine.dims[name]]
                bind(name, "cpu", 0, BOUND[engine.types[name]], shape, addresses[name])
            engine.session.run_with_iobinding(binding, onnxruntime.RunOptions())

        Stream.streams[stream].queued.append(run)
        return True


def stand_in(monkeypatch):
    """leanfleet.trt_plugins takes this module for TensorRT, and its batch this stream."""
    from leanfleet import trt_plugins
    from leanfleet.trt_plugins import serving

    module = SimpleNamespace(__name__="tensorrt", __version__="0", TensorIOMode=TensorIOMode)
    monkeypatch.setattr(trt_plugins, "load", lambda trt=None: module)
    monkeypatch.setattr(trt_plugins, "make_logger", lambda trt: SimpleNamespace(errors=[]))
    monkeypatch.setattr(serving, "CudaStream", Stream)
