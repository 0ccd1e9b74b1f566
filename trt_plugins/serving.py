"""Continuous batching over engines. Needs numpy, and a GPU that the engines were built for; neither torch nor cuda-python.

leanfleet.batching says what each step has; here are the engine's execution context, its pools, and what it is called with. The
graph is the one that ONNX Runtime runs, exported by leanfleet.export.serving.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from leanfleet import trt_plugins
from leanfleet.batching import TURNS, Batch, Limits
from leanfleet.batching import Request as Request
from leanfleet.decoder_contract import (
    ALLOWED,
    BATCH,
    ENDS,
    KNOWN,
    LOGITS,
    MODEL_FILE,
    PLACES,
    POOL,
    SAMPLER,
    SERVING,
    SERVING_FILE,
    STATES,
    TABLE,
    TOKENS,
    VOCABULARY,
    WANTED,
    WORDS,
    check_caches_for_tensorrt,
    is_state,
    model_file,
    read_facts,
    serving_interface,
    words_of,
)
from leanfleet.driver import Device
from leanfleet.exchange import Array, Block, CudaStream
from leanfleet.step_sampler import Call

Sizes = tuple[int, int, int]  # least, usual and largest, of a dimension in a profile

_BYTES = {"FLOAT": 4, "HALF": 2, "BF16": 2, "INT8": 1, "FP8": 1, "INT32": 4, "INT64": 8}
_TYPES = {"FLOAT": "float32", "INT32": "int32", "INT64": "int64"}  # of what is no pool


def _sizes(limits: Limits, linear: bool) -> dict[str, Sizes]:
    """Of the open dimensions of a SERVING graph, in steps within these limits."""
    requests, tokens, rows = limits.max_requests, limits.step_tokens, limits.result_rows
    states = limits.state_rows(linear)
    return {
        KNOWN: (1 + requests, 2 * requests, requests + tokens),
        TOKENS: (1, requests, tokens),
        BATCH: (1, requests, requests),
        ENDS: (2, 1 + requests, 1 + requests),
        TABLE: (1, max(1, limits.pages // requests), limits.pages),
        WANTED: (1, requests, rows),
        POOL: (limits.pages,) * 3,
        STATES: (states,) * 3,
    }


def serving_profiles(
    folder: str | Path,
    pages: int,
    max_requests: int = 16,
    step_tokens: int = 256,
    share: bool = True,
    snapshots: int | None = None,
    speculate: int = 0,
) -> list[dict[str, Sizes]]:
    """Profiles for build_engine of the serving graph in a folder: 0 for pieces of prompts, 1 for steps of one token a request.
    Needs onnx.

    Options are those that the engine's ContinuousBatch will get. The file is `serving.onnx` of a folder of `leanfleet export
    --serve`, or `model.onnx` of one that leanfleet.export.serving wrote. Raises what ContinuousBatch raises for wrong ones.

    Example:
        from leanfleet.trt_plugins import build_engine
        from leanfleet.trt_plugins.serving import sampler_profile, serving_profiles

        profiles = serving_profiles("serving", pages=64, max_requests=4, step_tokens=32)
        build_engine("serving/model.onnx", profiles, "serving.engine", compute_capabilities=["8.9"])
        build_engine("serving/sampler.onnx", sampler_profile(max_requests=4), "sampler.engine", compute_capabilities=["8.9"])
    """
    import onnx

    limits = Limits(pages, max_requests, step_tokens, share, snapshots, speculate)
    facts = _facts(Path(folder))
    graph = onnx.load(Path(folder) / model_file(facts), load_external_data=False).graph
    linear = any(SERVING.is_cache(v.name) and is_state(v.name) for v in graph.input)
    dims = {d.dim_param for v in graph.input for d in v.type.tensor_type.shape.dim}
    pieces = {name: sizes for name, sizes in _sizes(limits, linear).items() if name in dims}
    one = 1, max_requests, max_requests
    steps = {TOKENS: one, WANTED: one, KNOWN: (1 + max_requests, 2 * max_requests, 2 * max_requests)}
    return [pieces, pieces | steps]


def sampler_profile(max_requests: int = 16) -> dict[str, Sizes]:
    """The profile for build_engine of a folder's sampler.onnx. See serving_profiles.

    Example:
        from leanfleet.trt_plugins.serving import sampler_profile

        print(sampler_profile(max_requests=4)["batch"])     # (1, 4, 4)
    """
    return {BATCH: (1, max_requests, max_requests), PLACES: (max_requests,) * 3}


def _facts(folder: Path) -> Any:
    facts = read_facts(folder, SERVING)
    check_caches_for_tensorrt(folder, facts)
    if serving_interface(facts) is not SERVING:
        raise ValueError(f"{folder} has format {facts.get('format', 1)}: export it again with {SERVING.writer}")
    return facts


class _Graph:
    """An engine with one execution context, called with what stands at addresses of the exchange's side.

    Each call takes the last profile that its shapes fit: those for few sizes come last, and their kernels are the better ones.
    """

    def __init__(self, engine: Any, trt: ModuleType | None, host_code: bool, exchange: CudaStream) -> None:
        self.trt, self.exchange = trt_plugins.load(trt), exchange
        loaded = isinstance(engine, (bytes, bytearray, str, os.PathLike))
        self.engine = trt_plugins.deserialize(engine, self.trt, host_code, Device("cuda", exchange.index)) if loaded else engine
        trt_plugins.make_logger(self.trt).errors = []
        exchange.make_current()
        self.context = self.engine.create_execution_context()
        if self.context is None:
            raise trt_plugins.failure(self.trt, "cannot make an execution context")
        names = [self.engine.get_tensor_name(i) for i in range(self.engine.num_io_tensors)]
        self.types = {name: self.engine.get_tensor_dtype(name).name for name in names}
        self.inputs = [n for n in names if self.engine.get_tensor_mode(n) == self.trt.TensorIOMode.INPUT]
        self.outputs = [n for n in names if n not in self.inputs]
        self.profiles = [
            {name: self.engine.get_tensor_profile_shape(name, index) for name in self.inputs}
            for index in range(self.engine.num_optimization_profiles)
        ]
        self.profile = 0

    def why_not(self, shapes: dict[str, list[int]]) -> str | None:
        """What of these shapes no profile takes; None where one takes all."""
        if self._profile(shapes) is not None:
            return None
        name = next((n for n in shapes if self._profile({n: shapes[n]}) is None), next(iter(shapes)))
        allowed = " or ".join(f"{list(p[name][0])} to {list(p[name][2])}" for p in self.profiles)
        return f"{name} of {shapes[name]}, where its profiles take {allowed}"

    def _profile(self, shapes: dict[str, list[int]]) -> int | None:
        def fits(profile: dict[str, Any]) -> bool:
            return all(
                len(shape) == len(profile[name][0])
                and all(low <= n <= high for low, n, high in zip(profile[name][0], shape, profile[name][2], strict=True))
                for name, shape in shapes.items()
            )

        return next((i for i in reversed(range(len(self.profiles))) if fits(self.profiles[i])), None)

    def __call__(self, inputs: dict[str, Array], outputs: dict[str, Array]) -> None:
        """Queues a run. Raises RuntimeError with what the log says."""
        trt_plugins.make_logger(self.trt).errors = []
        self.exchange.make_current()
        shapes = {name: inputs[name][1] for name in self.inputs}
        profile = self._profile(shapes)
        if profile is None:
            raise RuntimeError(f"the engine does not take {self.why_not(shapes)}")
        if profile != self.profile:
            if not self.context.set_optimization_profile_async(profile, self.exchange.address):
                raise trt_plugins.failure(self.trt, f"cannot use profile {profile}")
            self.profile = profile
        for name in self.inputs:
            if not self.context.set_input_shape(name, tuple(shapes[name])):
                raise trt_plugins.failure(self.trt, f"does not take {name} of {shapes[name]}")
        for name in (*self.inputs, *self.outputs):
            self.context.set_tensor_address(name, (inputs if name in shapes else outputs)[name][0])
        if not self.context.execute_async_v3(self.exchange.address):
            raise trt_plugins.failure(self.trt, "failed to run the engine")


class ContinuousBatch(Batch):
    """Continuous batching over an engine: a queue of requests, a pool of pages that they share, and step(), a call each.

    folder: the exported one, whose leanfleet.json is read. engine: bytes, path or trt.ICudaEngine, built of its serving graph
    with serving_profiles and the same limits. sampler: the same of sampler.onnx with sampler_profile; requests with penalties,
    biases or top_logprobs need it. device: the GPU, "cuda" (the first) or "cuda:1". trt, host_code: see
    trt_plugins.deserialize. The rest is as in leanfleet.ort_ops.serving.ContinuousBatch, and so are tokens, requests and
    step(), but that steps are not captured as CUDA graphs. A step is made while the one before runs, and its tokens are read a
    step behind.
    Raises FileNotFoundError and ValueError for a folder that is not one, ValueError for wrong limits, for caches that TensorRT
    does not take and for an engine whose profiles do not take the limits, and RuntimeError where no GPU is here or TensorRT
    refuses the engine.

    Example:
        from leanfleet.trt_plugins.serving import ContinuousBatch

        batch = ContinuousBatch("serving", "serving.engine", pages=64, max_requests=4, step_tokens=32)
        request = batch.add([1, 2, 3], max_new_tokens=8)
        batch.run()
        print(request.tokens)
    """

    def __init__(
        self,
        folder: str | Path,
        engine: Any,
        pages: int,
        max_requests: int = 16,
        step_tokens: int = 256,
        *,
        sampler: Any = None,
        trt: ModuleType | None = None,
        host_code: bool = False,
        share: bool = True,
        snapshots: int | None = None,
        speculate: int = 0,
        device: str | Device | None = None,
    ) -> None:
        limits = Limits(pages, max_requests, step_tokens, share, snapshots, speculate)
        folder = Path(folder)
        facts = _facts(folder)
        gpu = trt_plugins.gpu_named(device) or Device("cuda")
        self._gpu = exchange = CudaStream(gpu.index)
        self._engine = engine if isinstance(engine, (str, os.PathLike)) else "the engine"
        self._sampler_engine, self._loading = sampler, (trt, host_code)
        self.graph = _Graph(engine, trt, host_code, exchange)
        missing = {t.name for t in SERVING.outputs} - set(self.graph.outputs)
        caches = [name for name in self.graph.inputs if SERVING.is_cache(name)]
        if missing or not caches:
            raise ValueError(
                f"{self._engine} is no engine of a serving graph, {SERVING_FILE} or the {MODEL_FILE} of {SERVING.writer}: "
                f"its outputs are {', '.join(self.graph.outputs[:4])}"
            )
        super().__init__(folder / model_file(facts), facts, caches, limits, exchange, gpu)
        self._check_engine(limits)
        self.pools: dict[str, tuple[int, int, int]] = {}  # address, rows, bytes of a row
        self._arrays: dict[str, Array] = {}  # of pools, as inputs and as outputs
        for name in caches:
            _, *row = self.graph.engine.get_tensor_shape(name)
            rows = limits.state_rows(self.linear) if is_state(name) else pages
            size = int(np.prod(row)) * _BYTES[self.graph.types[name]]
            address = exchange.allocate(rows * size)
            self.pools[name] = address, rows, size
            self._arrays[name] = self._arrays[SERVING.output_of(name)] = address, [rows, *row], np.dtype(np.uint8)
        most = {name: sizes[2] for name, sizes in _sizes(limits, self.linear).items()}
        sent = {t.name: (t.sizes(most), np.dtype(t.type)) for t in SERVING.inputs}
        self.inputs = Block(exchange, sent)
        self.sent = [exchange.host_bytes(self.inputs.size) for _ in range(TURNS)]

    def _check_engine(self, limits: Limits) -> None:
        """Raises ValueError where a step within the limits would find no profile."""
        sizes = _sizes(limits, self.linear)
        shapes: dict[str, tuple[str, ...]] = {t.name: t.shape for t in SERVING.inputs if t.name in self.graph.inputs}
        for end in (0, 2):
            made = {name: [sizes[d][end] for d in shape] for name, shape in shapes.items()}
            for name in self.pool_names:
                rows = sizes[STATES if is_state(name) else POOL][end]
                made[name] = [rows, *self.graph.engine.get_tensor_shape(name)[1:]]
            if problem := self.graph.why_not(made):
                raise ValueError(
                    f"{self._engine} does not take {problem}: build it with serving_profiles of the same pages, max_requests, "
                    "step_tokens, share, snapshots and speculate"
                )
        wrong = [t.name for t in SERVING.outputs if _TYPES.get(self.graph.types[t.name]) != t.type]
        if wrong or self.graph.engine.get_tensor_shape(SERVING.outputs[0].name)[-1] != self.vocabulary:
            raise ValueError(f"{self._engine} was not built of {self.path}: its {(wrong or [LOGITS])[0]} differ")

    @property
    def a_step_behind(self) -> bool:
        return True

    def _places(self) -> Iterator[tuple[str, int, int, int]]:
        for name, place in self.pools.items():
            yield name, *place

    def _sampler_graph(self, path: Path) -> tuple[Call, list[str]]:
        if self._sampler_engine is None:
            raise ValueError(
                f"penalties, logit_bias, top_logprobs and constraints need an engine of {path} too: build it with "
                "sampler_profile, and give it as `sampler`"
            )
        graph = _Graph(self._sampler_engine, *self._loading, self._gpu)
        words = words_of(self.vocabulary)
        sizes = {BATCH: self.max_requests, PLACES: self.max_requests, VOCABULARY: self.vocabulary, WORDS: words}
        shapes = {t.name: t.sizes(sizes) for t in SAMPLER.inputs if t.name != ALLOWED or ALLOWED in graph.inputs}
        problem = graph.why_not(shapes) if set(shapes) == set(graph.inputs) else f"{', '.join(shapes)} as inputs"
        if problem:
            raise ValueError(
                f"the sampler's engine does not take {problem}: build it of {path} with sampler_profile({self.max_requests})"
            )
        return graph, list(shapes)

    def _run(self, feed: dict[str, np.ndarray], logits: bool = False) -> None:
        host, block = self.sent[self.turn], self.inputs
        inputs = dict(self._arrays)
        for name, array in feed.items():
            offset, _, dtype = block.places[name]
            host[offset : offset + array.nbytes].view(dtype)[:] = array.ravel()
            inputs[name] = block.address + offset, list(array.shape), dtype
            self.exchange.copy(block.address + offset, host.ctypes.data + offset, array.nbytes)
        self.exchange.copy(block.address, self.results.address, 8 * self.earlier)  # the tokens of the step before
        rows = inputs[next(t.name for t in SERVING.inputs if t.shape == (WANTED,))][1][0]
        outputs = dict(self._arrays)
        for name, (offset, shape, dtype) in self.results.places.items():
            outputs[name] = self.results.address + offset, [rows, *shape[1:]], dtype
        self.graph(inputs, outputs)
