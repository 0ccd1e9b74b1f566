"""Runs engines: one call, text generation. Needs a GPU that the engine was built for, and torch or
cuda-python (cuda.bindings) for device memory; generation needs torch."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from leanfleet import driver, generation, trt_plugins
from leanfleet.decoder_contract import (
    BATCH,
    CAPACITY,
    DECODER,
    KEY,
    KEY_SCALE,
    LOGITS,
    TOKENS,
    VALUE,
    VALUE_SCALE,
    check_caches_for_tensorrt,
    is_part,
    read_facts,
)

if TYPE_CHECKING:
    import torch


_ML_DTYPES = {"BF16": "bfloat16", "FP8": "float8_e4m3fn"}  # types that numpy has from ml_dtypes, by TensorRT's names


class _TorchMemory:
    """Device memory and a stream of torch's; tensors on the GPU go in and come out as they are."""

    def __init__(self, index: int | None):
        import torch

        self.torch = torch
        if not torch.cuda.is_available():
            raise RuntimeError("this torch has no CUDA, or no GPU is here: install torch's CUDA build, or cuda-python")
        self.device = f"cuda:{torch.cuda.current_device() if index is None else index}"
        self.stream = torch.cuda.Stream(self.device)
        self.dtypes = {
            "FLOAT": torch.float32,
            "HALF": torch.float16,
            "BF16": torch.bfloat16,
            "INT8": torch.int8,
            "FP8": torch.float8_e4m3fn,
            "INT32": torch.int32,
            "INT64": torch.int64,
            "BOOL": torch.bool,
        }

    @property
    def stream_address(self):
        return self.stream.cuda_stream

    def put(self, value, dtype):
        """A tensor on the GPU with the value of a tensor or array, in the engine's type."""
        if isinstance(value, np.ndarray):
            value = self.torch.from_numpy(
                np.ascontiguousarray(value.astype(np.float32) if value.dtype.name in _ML_DTYPES.values() else value)
            )
        return value.to(self.device, self.dtypes[dtype]).contiguous()

    def empty(self, shape, dtype):
        return self.torch.empty(shape, dtype=self.dtypes[dtype], device=self.device)

    def address(self, tensor):
        return tensor.data_ptr()

    def before(self):
        self.stream.wait_stream(self.torch.cuda.current_stream(self.device))

    def after(self):
        self.torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def numpy(self, tensor):
        no_numpy = tensor.dtype in (self.torch.bfloat16, self.torch.float8_e4m3fn)
        return (tensor.float() if no_numpy else tensor).cpu().numpy()


class _CudaPythonMemory:
    """The same with cuda-python alone, on the current GPU; values are numpy arrays (bfloat16 and float8 ones ml_dtypes')."""

    class Buffer:
        def __init__(self, runtime, shape, dtype):
            self.runtime, self.shape, self.dtype = runtime, tuple(shape), dtype
            self.bytes = int(np.prod(self.shape)) * dtype.itemsize
            self.pointer = _checked(runtime.cudaMalloc(max(self.bytes, 1)))

        def __del__(self):
            self.runtime.cudaFree(self.pointer)

    def __init__(self):
        from cuda.bindings import runtime

        self.runtime = runtime
        self.stream_address = int(_checked(runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)))
        self.dtypes = {
            "FLOAT": np.dtype(np.float32),
            "HALF": np.dtype(np.float16),
            "INT8": np.dtype(np.int8),
            "INT32": np.dtype(np.int32),
            "INT64": np.dtype(np.int64),
            "BOOL": np.dtype(bool),
        }

    def dtype(self, name):
        if name in _ML_DTYPES:
            import ml_dtypes

            return np.dtype(getattr(ml_dtypes, _ML_DTYPES[name]))
        return self.dtypes[name]

    def empty(self, shape, dtype):
        return self.Buffer(self.runtime, shape, self.dtype(dtype))

    def put(self, value, dtype):
        array = np.ascontiguousarray(np.asarray(value).astype(self.dtype(dtype)))
        buffer = self.empty(array.shape, dtype)
        _checked(
            self.runtime.cudaMemcpy(
                buffer.pointer, array.ctypes.data, buffer.bytes, self.runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
            )
        )
        return buffer

    def address(self, buffer):
        return int(buffer.pointer)

    def before(self):
        pass

    def after(self):
        _checked(self.runtime.cudaStreamSynchronize(self.stream_address))

    def numpy(self, buffer):
        array = np.empty(buffer.shape, buffer.dtype)
        _checked(
            self.runtime.cudaMemcpy(
                array.ctypes.data, buffer.pointer, buffer.bytes, self.runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
            )
        )
        return array.astype(np.float32) if buffer.dtype.name in _ML_DTYPES.values() else array


def _checked(answer: tuple[Any, ...]) -> Any:
    """The value of a cuda-python call. Raises RuntimeError."""
    error, *values = answer
    if int(error) != 0:
        raise RuntimeError(f"CUDA: {error.name}")
    return values[0] if values else None


def _memory(name: str | None, index: int | None) -> Any:
    if name not in (None, "torch", "cuda-python"):
        raise ValueError(f"memory is '{name}'; it is 'torch' or 'cuda-python'")
    if name != "cuda-python":
        try:
            return _TorchMemory(index)
        except (ImportError, RuntimeError):
            if name == "torch":
                raise
    try:
        return _CudaPythonMemory()
    except ImportError:
        raise ImportError(
            "running an engine needs device memory from torch with CUDA, or from cuda-python: pip install cuda-python"
        ) from None


class Engine:
    """An engine with one execution context.

    engine: bytes, path or trt.ICudaEngine. memory: "torch" or "cuda-python"; None: torch where it has CUDA. host_code: see
    trt_plugins.deserialize. device: the GPU, "cuda" (the first) or "cuda:1"; None: the current one. An ICudaEngine is on
    the one that was current when it was made. Raises what trt_plugins.deserialize raises, ValueError for a device that is no
    GPU here, and ImportError without either package.

    Example:
        import numpy as np
        from leanfleet.trt_plugins.running import Engine

        engine = Engine("layer.engine")
        outputs = engine.numpy(engine({engine.inputs[0]: np.zeros((1, 10, 64), np.float32)}))
    """

    def __init__(
        self,
        engine: Any,
        trt: ModuleType | None = None,
        memory: str | None = None,
        host_code: bool = False,
        device: str | driver.Device | None = None,
    ) -> None:
        self.trt, self.device = trt_plugins.load(trt), trt_plugins.gpu_named(device)
        self.engine = (
            trt_plugins.deserialize(engine, self.trt, host_code, self.device)
            if isinstance(engine, (bytes, bytearray, str, os.PathLike))
            else engine
        )
        with driver.current(self.device):
            self.memory = _memory(memory, None if self.device is None else self.device.index)
            trt_plugins.make_logger(self.trt).errors = []
            self.context = self.engine.create_execution_context()
        if self.context is None:
            raise trt_plugins.failure(self.trt, "cannot make an execution context")
        names = [self.engine.get_tensor_name(i) for i in range(self.engine.num_io_tensors)]
        self.dtypes = {name: self.engine.get_tensor_dtype(name).name for name in names}
        self.inputs = [n for n in names if self.engine.get_tensor_mode(n) == self.trt.TensorIOMode.INPUT]
        self.outputs = [n for n in names if n not in self.inputs]

    def use_profile(self, index: int) -> None:
        """Switches to another optimization profile. Raises ValueError for one that the engine has not."""
        self._check_profile(index)
        with driver.current(self.device):
            if not self.context.set_optimization_profile_async(index, self.memory.stream_address):
                raise trt_plugins.failure(self.trt, f"cannot use profile {index}")
            self.memory.after()

    def _check_profile(self, index: int) -> None:
        if not 0 <= index < self.engine.num_optimization_profiles:
            raise ValueError(f"profile is {index}; the engine has {self.engine.num_optimization_profiles}, the first is 0")

    def bind(self, name: str, tensor: Any) -> None:
        """Gives a tensor of the engine an address, and an input its shape. The caller keeps the tensor."""
        if name in self.inputs and not self.context.set_input_shape(name, tuple(tensor.shape)):
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, which the current profile does not allow: "
                f"{self.engine.get_tensor_profile_shape(name, self.context.active_optimization_profile)}"
            )
        self.context.set_tensor_address(name, self.memory.address(tensor))

    def enqueue(self, stream: int | None = None) -> None:
        """Runs what is bound on a stream's address (None: this engine's own)."""
        trt_plugins.make_logger(self.trt).errors = []
        with driver.current(self.device):
            if not self.context.execute_async_v3(self.memory.stream_address if stream is None else stream):
                raise trt_plugins.failure(self.trt, "failed to run the engine")

    def __call__(self, feed: Mapping[str, Any], in_place: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Runs once. feed: {input: array or tensor}. in_place: {output: input} pairs that share a buffer.

        Returns {output: tensor} in the memory's own form; see numpy().
        """
        if missing := set(self.inputs) - set(feed):
            raise ValueError(f"inputs {', '.join(sorted(missing))} are missing; the engine takes {', '.join(self.inputs)}")
        with driver.current(self.device):
            return self._run(feed, in_place or {})

    def _run(self, feed: Mapping[str, Any], in_place: Mapping[str, str]) -> dict[str, Any]:
        bound = {name: self.memory.put(feed[name], self.dtypes[name]) for name in self.inputs}
        for name, tensor in bound.items():
            self.bind(name, tensor)
        found = {}
        for name in self.outputs:
            shared = in_place.get(name)
            found[name] = (
                bound[shared] if shared else self.memory.empty(tuple(self.context.get_tensor_shape(name)), self.dtypes[name])
            )
            self.bind(name, found[name])
        self.memory.before()
        self.enqueue()
        self.memory.after()
        return found

    def made_up_inputs(self, profile: int = 0) -> dict[str, np.ndarray]:
        """Ones in the usual sizes of a profile, by name. Raises ValueError for one that the engine has not."""
        self._check_profile(profile)
        types = {
            "FLOAT": "f4",
            "HALF": "f2",
            "BF16": "f4",
            "INT8": "i1",
            "FP8": "f4",
            "INT32": "i4",
            "INT64": "i8",
            "BOOL": "?",
        }
        return {
            name: np.ones(tuple(self.engine.get_tensor_profile_shape(name, profile)[1]), types[self.dtypes[name]])
            for name in self.inputs
        }

    def timed(self, feed: Mapping[str, Any], profile: int = 0, runs: int = 20) -> tuple[dict[str, np.ndarray], float]:
        """(outputs as numpy arrays, median of the milliseconds of a run with its copies from and to the host).
        runs: 1 or more."""
        self.use_profile(profile)
        outputs, seconds = self.numpy(self(feed)), []
        for _ in range(runs):
            start = time.perf_counter()
            outputs = self.numpy(self(feed))
            seconds.append(time.perf_counter() - start)
        return outputs, 1e3 * sorted(seconds)[len(seconds) // 2]

    def numpy(self, outputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Outputs as numpy arrays on the host; bfloat16 and float8 as float32."""
        with driver.current(self.device):
            return {name: self.memory.numpy(tensor) for name, tensor in outputs.items()}


# Generation


@dataclass
class Decoder(generation.FolderTokenizer):
    """An engine of a decoder that leanfleet.export.export_decoder wrote: a leanfleet.generation.Decoder."""

    engine: Engine
    folder: Path
    caches: list[str]
    vocabulary: int
    stop_tokens: list[int]
    max_positions: int | None
    cuda_graph: bool = True
    kept: dict[tuple[int, int], _Steps] = field(default_factory=dict)

    def steps(self, batch: int, capacity: int) -> _Steps:
        """The steps of a batch; those of the batch before where it had the same size."""
        key = batch, capacity
        if key not in self.kept:
            self.kept.clear()  # the engine's context has one set of addresses
            self.kept[key] = _Steps(self, batch, capacity)
        self.kept[key].reset()
        return self.kept[key]


def load_decoder(
    folder: str | Path,
    engine: bytes | str | os.PathLike[str],
    trt: ModuleType | None = None,
    cuda_graph: bool = True,
    host_code: bool = False,
    device: str | driver.Device | None = None,
) -> Decoder:
    """A Decoder of an engine (bytes or path) built from folder/model.onnx with decoder_profiles. Needs torch with CUDA.

    cuda_graph: captures the decode step of each batch once and replays it. host_code, device: see Engine.
    Raises what leanfleet.decoder_contract.read_facts and Engine raise.

    Example:
        from leanfleet.generation import generate
        from leanfleet.trt_plugins.running import load_decoder

        decoder = load_decoder("decoder", "decoder.engine")
        answers, statistics = generate(decoder, ["Good morning"], max_new_tokens=8)
    """
    facts = read_facts(folder, DECODER)
    check_caches_for_tensorrt(folder, facts)
    loaded = Engine(engine, trt, memory="torch", host_code=host_code, device=device)
    return Decoder(
        loaded,
        Path(folder),
        [n for n in loaded.inputs if DECODER.is_cache(n)],
        facts["vocabulary"],
        facts["stop_tokens"],
        facts["max_positions"],
        cuda_graph,
    )


Sizes = tuple[int, int, int]  # least, usual and largest, of a dimension in a profile


def decoder_profiles(
    batch: Sizes = (1, 1, 8), tokens: Sizes = (1, 128, 2048), capacity: Sizes | None = (16, 2048, 8192)
) -> list[dict[str, Sizes]]:
    """Profiles of an exported decoder: 0 for prompts, 1 for steps of one token. capacity: None for a decoder whose layers all
    carry states, such as RetNet's and Mamba-2's: it has no caches.

    Example:
        from leanfleet.trt_plugins.running import decoder_profiles

        prompts, steps = decoder_profiles(batch=(1, 1, 4), capacity=(16, 1024, 4096))
        print(steps["tokens"])  # (1, 1, 1)
    """
    prompts = {BATCH: batch, TOKENS: tokens} | ({CAPACITY: capacity} if capacity else {})
    return [prompts, prompts | {TOKENS: (1, 1, 1)}]


class _Steps:
    """The buffers of one batch. Caches are bound to the graph's inputs and outputs alike and updated in place."""

    def __init__(self, decoder: Decoder, batch: int, capacity: int) -> None:
        import torch

        self.torch, self.decoder, self.engine = torch, decoder, decoder.engine
        where = self.engine.memory.device
        self.graph: Any = None  # True where a step is bound, but not captured
        self.caches: dict[str, torch.Tensor] = {}
        for name in decoder.caches:
            shape = self.engine.engine.get_tensor_shape(name)
            # [batch, Hkv, capacity, D] caches, [batch, Hkv, R, Dv] states: open dimensions in this order
            sizes = iter((batch, capacity))
            self.caches[name] = self.engine.memory.empty([next(sizes) if n < 0 else n for n in shape], self.engine.dtypes[name])
        self.step_inputs = {
            t.name: torch.ones(t.sizes({BATCH: batch, TOKENS: 1}), dtype=getattr(torch, t.type), device=where)
            for t in DECODER.inputs
        }
        self.logits = torch.empty(batch, decoder.vocabulary, device=where)

    def reset(self) -> None:
        for cache in self.caches.values():
            cache.zero_()

    def run(self, input_ids: np.ndarray, seq_lens: np.ndarray, query_lens: np.ndarray, capture: bool = False) -> np.ndarray:
        """One step; returns the logits, float32 [B,vocabulary]. capture: a decode step, input_ids [B,1]."""
        feed = DECODER.feed(input_ids, seq_lens, query_lens)
        stream = self.engine.memory.stream
        if not capture:
            inputs = {name: self.engine.memory.put(array, self.engine.dtypes[name]) for name, array in feed.items()}
            self._bind(0, inputs)
            self.graph = None  # its shapes are no longer the context's
        else:
            for name, array in feed.items():
                self.step_inputs[name].copy_(self.torch.from_numpy(array))
        self.engine.memory.before()
        if capture and self.graph is None:
            with self.torch.cuda.device(self.engine.memory.device):
                self._capture()
        if capture and self.decoder.cuda_graph:
            with self.torch.cuda.stream(stream):
                self.graph.replay()
        else:
            self.engine.enqueue()
        stream.synchronize()
        return self.logits.float().cpu().numpy()

    def _bind(self, profile: int, inputs: dict[str, torch.Tensor]) -> None:
        self.engine.use_profile(min(profile, self.engine.engine.num_optimization_profiles - 1))
        for name, tensor in (inputs | self.caches).items():
            self.engine.bind(name, tensor)
        for name, tensor in self.caches.items():
            self.engine.bind(DECODER.output_of(name), tensor)
        self.engine.bind(LOGITS, self.logits)

    def _capture(self) -> None:
        """Captures a decode step. TensorRT wants one run of the new shapes before; it works on copies of the states, which
        a run changes for good (a token appended twice to a cache does no harm)."""
        self._bind(1, self.step_inputs)
        self.graph = True
        if not self.decoder.cuda_graph:
            return
        by_token = KEY, VALUE, KEY_SCALE, VALUE_SCALE
        states = {
            name: tensor.clone() for name, tensor in self.caches.items() if not any(is_part(name, part) for part in by_token)
        }
        self.torch.cuda.synchronize()
        self.engine.enqueue()
        self.engine.memory.stream.synchronize()
        for name, kept in states.items():
            self.caches[name].copy_(kept)
        self.torch.cuda.synchronize()
        self.graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(self.graph, stream=self.engine.memory.stream):
            self.engine.enqueue(self.engine.memory.stream_address)


def generate(
    decoder: Decoder, prompts: Sequence[str | Sequence[int]], max_new_tokens: int | None = None, **options: Any
) -> tuple[list[list[int]], generation.Statistics]:
    """(list of token lists, Statistics); prompts and options are those of leanfleet.generation.stream.

    Example:
        from leanfleet.trt_plugins.running import generate, load_decoder

        decoder = load_decoder("decoder", "decoder.engine")
        answers, statistics = generate(decoder, ["Good morning"], max_new_tokens=8)
    """
    return generation.generate(decoder, prompts, max_new_tokens, **options)
