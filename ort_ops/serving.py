"""Continuous batching in ONNX Runtime, over a decoder that leanfleet.export.serving wrote. Needs onnxruntime and numpy.

leanfleet.batching says what each step has; here are the session, its pools, and steps as CUDA graphs.
"""

from __future__ import annotations

import gc
import itertools
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from leanfleet import driver
from leanfleet.batching import NO_STATE, PIECE_TOKENS, TURNS, Batch, Limits
from leanfleet.batching import Request as Request
from leanfleet.decoder_contract import (
    BATCH,
    BLOCK_TABLE,
    CONTEXT_SERVING,
    ENDS,
    FACTS_FILE,
    KNOWN,
    LAST,
    OFFSETS,
    ONE,
    PADDED_SERVING,
    POSITIONS,
    RANK,
    ROWS,
    SEQ_LENS,
    SERVING,
    SESSION_TYPES,
    SLOTS,
    STATE_INDEX,
    TABLE,
    TOKENS,
    TOP_P,
    WANTED,
    Facts,
    check_interface,
    file_of_rank,
    is_state,
    packed,
    read_facts,
    serving_interface,
)
from leanfleet.driver import Device, free_memory
from leanfleet.exchange import Array, Block, CudaStream, Host
from leanfleet.ort_ops.sessions import (
    CUDA,
    Providers,
    cuda_options,
    device_of,
    make_session,
    new_options,
    on_device,
    onnxruntime_errors,
    open_exported,
)
from leanfleet.step_sampler import Call

if TYPE_CHECKING:
    from onnxruntime import IOBinding, NodeArg, OrtValue, SessionOptions

POOL_SHARE = 0.75  # of a GPU's memory beside the weights, which pools take by default: the rest is for steps and their graphs
DEFAULT_TOKENS = 4096  # of each request in the pool by default where its size does not come from a GPU's memory
LEAST_TABLE, MIXED_TABLE = 16, 256  # pages of a request in a captured step at least, and in one with pieces of prompts
MOST_AHEAD = 2048  # new tokens of steps that are captured before there are requests
PADDING = {STATE_INDEX: NO_STATE, TOP_P: 1}  # what captured steps have where there is no request; else 0

# numpy's and ONNX's types by onnxruntime's names
_NUMPY_TYPES = {SESSION_TYPES[name]: np.dtype(name) for name in ("float32", "float16", "int8", "uint8")}
_NUMPY_TYPES[SESSION_TYPES["float8e4m3fn"]] = np.dtype(np.uint8)  # numpy has none: their bytes
_BYTES = {1: 4, 2: 1, 3: 1, 10: 2, 16: 2, 17: 1}  # of ONNX's types
_ONNX_TYPES = {
    SESSION_TYPES[name]: number
    for name, number in (("float32", 1), ("uint8", 2), ("int8", 3), ("float16", 10), ("bfloat16", 16), ("float8e4m3fn", 17))
}
# As bindings take ONNX's types by address; others, which numpy lacks, by their numbers.
_BOUND_TYPES = {_ONNX_TYPES[SESSION_TYPES[name]]: np.dtype(name).type for name in ("float32", "float16", "int8", "uint8")}


@dataclass(frozen=True)
class _Pool:
    """Memory of a GPU, with what is asked of an OrtValue. type: ONNX's number."""

    address: int
    sizes: tuple[int, ...]
    type: int

    def shape(self) -> list[int]:
        return list(self.sizes)

    def data_ptr(self) -> int:
        return self.address

    def element_type(self) -> int:
        return self.type


class _Captured:
    """A captured step of `batch`, the session's CUDA graph `identity`: up to `tokens` new tokens of up to `rows` requests, with
    tables of up to `table` pages, and `wanted` rows of results. Inputs and results keep their addresses. Rows without a request
    have no new tokens. ONNX Runtime runs a step several times while it captures; appending a token twice to the same place of a
    page does no harm. A state must not take it twice: graphs with states are captured by a step without requests, as all are
    that are captured `ahead` of any."""

    def __init__(
        self, batch: ContinuousBatch, tokens: int, rows: int, wanted: int, table: int, identity: int, ahead: bool = False
    ) -> None:
        import onnxruntime

        self.exchange, self.session, self.path = batch.exchange, batch.session, batch.path
        self.earlier, self.kept = batch.earlier, batch.kept_tokens
        if batch.interface is PADDED_SERVING:
            start = packed([[0]] * rows, [0] * rows, [[0] * table] * rows, PADDED_SERVING)
            shapes = {name: list(array.shape) for name, array in start.items()}
        else:
            sizes = {TOKENS: tokens, BATCH: rows, WANTED: wanted, ENDS: rows + 1, TABLE: table, KNOWN: batch.earlier + tokens}
            sizes[ONE] = 1
            shapes = {t.name: t.sizes(sizes) for t in batch.interface.inputs}
            start = {}
        self.inputs = Block(batch.exchange, {t.name: (shapes[t.name], np.dtype(t.type)) for t in batch.interface.inputs})
        self.sent = [batch.exchange.host_bytes(self.inputs.size) for _ in range(TURNS)]
        self.fixed = [n for n in (SLOTS, ROWS, LAST) if n in start]  # the same in all such steps
        for host in self.sent:
            for name in self.fixed:
                self.inputs.view(host, name)[...] = start[name]
        self.binding, self.options = batch.session.io_binding(), onnxruntime.RunOptions()
        self.options.add_run_config_entry("gpu_graph_id", str(identity))
        if batch.exchange.device == "cuda":
            self.options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        for name, (offset, shape, dtype) in self.inputs.places.items():
            self.binding.bind_input(
                name, batch.exchange.device, batch.exchange.index, dtype.type, shape, self.inputs.address + offset
            )
        batch.bind_pools(self.binding)
        batch.bind_results(self.binding, wanted)
        if batch.linear or ahead:
            nothing = {t.name: np.zeros([0] * len(t.shape), t.type) for t in batch.interface.inputs}
            self._capture(batch.results.address, nothing | batch.of_rank)

    def _capture(self, earlier: int, nothing: dict[str, np.ndarray]) -> None:
        """Runs a step without requests. The tokens that the step before has left at `earlier` stay."""
        size = 8 * self.earlier
        self.exchange.copy(self.kept, earlier, size)
        self._send(nothing, 0, 0)
        self._call()
        self.exchange.copy(earlier, self.kept, size)
        self.exchange.wait(self.exchange.mark())  # the host's bytes are written again soon

    def run(self, feed: dict[str, np.ndarray], turn: int, earlier: int) -> None:
        """Queues a step of at most so many tokens, requests and pages. earlier: the address of the tokens that the step before
        gives."""
        self._send(feed, turn, earlier)
        self._call()

    def _send(self, feed: dict[str, np.ndarray], turn: int, earlier: int) -> None:
        host = self.sent[turn]
        for name, array in feed.items():
            if name in self.fixed:
                continue
            whole = self.inputs.view(host, name)
            whole[...] = PADDING.get(name, 0)
            whole[tuple(map(slice, array.shape))] = array
            if name == OFFSETS and len(array):
                whole[len(array) :] = array[-1]
        known = 8 * self.earlier if earlier else 0  # bytes of input_ids, the first of all, that the host does not know
        if known:
            self.exchange.copy(self.inputs.address, earlier, known)
        self.exchange.copy(self.inputs.address + known, host.ctypes.data + known, self.inputs.size - known)

    def _call(self) -> None:
        with onnxruntime_errors(f"run {self.path}"):
            self.session.run_with_iobinding(self.binding, self.options)


def open_batch(folder: str | Path, *, cuda_graph: bool | None = None, ahead: bool = False, **options: Any) -> ContinuousBatch:
    """A ContinuousBatch, of options as it takes them. cuda_graph: None: with CUDA graphs if a short answer, which is tried, can
    be had of them, or where it fails, as with nodes of onnxruntime's that wait for the host, without them. ahead: in the thread
    that will call step(): capture_steps() too, as part of what is tried.

    Example:
        from leanfleet.ort_ops.serving import open_batch

        batch = open_batch("serving", pages=64, providers=["CPUExecutionProvider"], cuda_graph=False)
    """
    if cuda_graph is not None:
        batch = ContinuousBatch(folder, **options, cuda_graph=cuda_graph)
        if ahead:
            batch.capture_steps()
        return batch
    batch = ContinuousBatch(folder, **options, cuda_graph=True)
    try:
        batch.try_capture()
        if ahead:
            batch.capture_steps()
        return batch
    except RuntimeError as error:
        warnings.warn(f"steps are not captured as CUDA graphs: {error}", RuntimeWarning, stacklevel=2)
    options["pages"] = batch.pool.count
    del batch  # the next one needs its memory
    gc.collect()
    return ContinuousBatch(folder, **options, cuda_graph=False)


def _graph(path: Path, exchange: Host | CudaStream) -> tuple[Call, list[str]]:
    """(what runs a graph over memory of an exchange, names of its inputs)"""
    import onnxruntime

    providers: Providers = ["CPUExecutionProvider"]
    options = onnxruntime.RunOptions()
    if isinstance(exchange, CudaStream):
        providers = [(CUDA, {"user_compute_stream": str(exchange.address), "device_id": str(exchange.index)})]
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    settings = new_options(providers)
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")  # the step's session has the cores next
    session = make_session(str(path), providers, settings)

    def call(inputs: dict[str, Array], outputs: dict[str, Array]) -> None:
        binding = session.io_binding()
        for bind, arrays in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
            for name, (address, shape, dtype) in arrays.items():
                bind(name, exchange.device, exchange.index, dtype.type, shape, address)
        with onnxruntime_errors(f"run {path}"):
            session.run_with_iobinding(binding, options)

    return call, [i.name for i in session.get_inputs()]


def _default_pages(caches: list[NodeArg], facts: Facts, limits: Limits, device: Device, ranks: bool) -> int:
    """On a GPU as many as fit in POOL_SHARE of its free memory, and at most what all requests need at their full length. On
    CPUs, and for ranks, whose pools have to be equal: what requests of DEFAULT_TOKENS need."""
    block, positions = facts["block"], facts["max_positions"] or 0
    usual = limits.max_requests * -(-min(DEFAULT_TOKENS, positions or DEFAULT_TOKENS) // block)
    if device.kind == "cpu" or ranks:
        return usual
    bytes_of = {i.name: int(np.prod(i.shape[1:])) * _BYTES[_ONNX_TYPES[i.type]] for i in caches}
    page = sum(size for name, size in bytes_of.items() if not is_state(name))
    states = limits.state_rows(True) * sum(size for name, size in bytes_of.items() if is_state(name))
    free = free_memory(device)
    room = int(POOL_SHARE * free) - states
    if room < page or room < 0:
        wanted = [f"pages of {page / 1e6:.2f} MB"] * bool(page)
        wanted += [f"{states / 1e9:.2f} GB of states: fewer max_requests and snapshots need less"] * bool(states)
        left = f"{device} has {free / 1e9:.2f} GB left beside the weights"
        raise ValueError(f"{left}: no room in {POOL_SHARE:.0%} of it for {' and '.join(wanted)}")
    if not page:
        return usual
    pages = room // page
    return min(pages, limits.max_requests * -(-positions // block)) if positions else pages


def _check_blocks(path: Path, facts: Facts, caches: list[NodeArg]) -> None:
    """Raises ValueError where ranks' blocks, as the graph has them, are no pages of what leanfleet.json says."""
    world = facts["context_parallel"]["world"]
    if other := next((cache for cache in caches if cache.shape[1] * world != facts["block"]), None):
        raise ValueError(
            f"{path} is damaged or another model's: its input {other.name} has blocks of {other.shape[1]} tokens on each of "
            f"{world} ranks, where {FACTS_FILE} has pages of {facts['block']}: export the model again with {SERVING.writer}"
        )


class ContinuousBatch(Batch):
    """Continuous batching: a queue of requests, a pool of pages that they share, and step(), which runs one call.

    folder: written by `leanfleet export` or leanfleet.export.serving. pages: size of the pool (default: three quarters of the
    memory that a GPU has free beside the weights, states included, and at most what max_requests need at their full length; on
    a CPU, or over ranks, 4096 tokens, or the model's positions, for each of max_requests); a request has
    ceil(tokens so far / block) of them while it runs, and begins where a known beginning of its prompt ends (share=False:
    always at its start). snapshots: so many states are kept for that at most where layers are linear (default: max_requests).
    Where pages run out, the request with the least priority, the last to come among equals, gives its
    pages back and is computed again once there is room: it gets the same tokens, in half precision up to near-ties. A decoder
    whose layers are all linear attention needs no pages; each of its running requests has a state of fixed size.
    max_requests: at most so many run at once. step_tokens: at most so many new tokens a step, prompts being cut to fit; on a
    GPU fewer while others are being answered (leanfleet.batching.step_room).
    speculate: so many tokens are guessed at most behind each request's next one, from what followed in its own text where it
    said the same before. A step then gives a request the guesses that are right, and its tokens are the same as without; steps
    are waited for. Steps with a request that has penalties, biases or top_logprobs go without guesses. Where layers are linear,
    each of max_requests has a second state.
    library: False runs the function bodies.
    cuda_graph: on the CUDA provider, steps are captured once for each power of two of requests and of pages in the longest
    table, and for each multiple of PIECE_TOKENS new tokens where pieces of prompts are among them, and replayed; of providers
    the CUDA provider's options count then. capture_steps() captures the usual ones before there are requests. The host makes a
    step while the one before runs, and reads tokens a step behind. Call step() in one thread: each captures for itself.
    (Of folders that earlier versions wrote, steps with pieces of prompts are not captured, and each step is waited for.)
    device: "cpu", "cuda" or "cuda:1", as make_session takes it.
    rank: of a folder for several ranks, whose share this process runs, with all others: see leanfleet.together. Of a context
    parallel folder all ranks have all pages, each its block of their tokens.
    Raises FileNotFoundError or ValueError for a folder that is not one, ValueError for max_requests below 1 or above
    step_tokens, for cuda_graph without the library and where a GPU has no room for a page, and what make_session raises.

    Example:
        from leanfleet.ort_ops.serving import ContinuousBatch

        batch = ContinuousBatch("serving", pages=64, providers=["CPUExecutionProvider"])
        first = batch.add([1, 2, 3], max_new_tokens=8)
        batch.step()
        second = batch.add([4, 5], max_new_tokens=4)        # joins while the first one runs
        batch.run()
        print(first.done, len(second.tokens) <= 4)  # True True
    """

    def __init__(
        self,
        folder: str | Path,
        pages: int | None = None,
        max_requests: int = 16,
        step_tokens: int = 256,
        providers: Providers | None = None,
        session_options: SessionOptions | None = None,
        library: bool = True,
        cuda_graph: bool = False,
        share: bool = True,
        snapshots: int | None = None,
        speculate: int = 0,
        device: str | Device | None = None,
        rank: int | None = None,
    ) -> None:
        import onnxruntime

        limits = Limits(1 if pages is None else pages, max_requests, step_tokens, share, snapshots, speculate)
        if cuda_graph and not library:
            raise ValueError("cuda_graph needs the library: function bodies write new pools, which a graph cannot hold")
        if cuda_graph and (problem := driver.why_no_gpu()):
            raise ValueError(f"cuda_graph needs a GPU, and {problem}")
        exchange: Host | CudaStream = Host()
        if cuda_graph:
            providers = on_device([(CUDA, cuda_options(providers))], device)
            exchange = CudaStream(int(cuda_options(providers).get("device_id", 0)))
            settings = {"enable_cuda_graph": "1", "user_compute_stream": str(exchange.address)}
            providers = [(CUDA, cuda_options(providers) | settings)]
        providers = on_device(providers, device)
        folder = Path(folder)
        facts = read_facts(folder, SERVING, parallel=rank is not None)
        path = folder / file_of_rank(folder, facts, SERVING, rank, library)
        self.session = open_exported(folder, providers, session_options, library, path.name)
        check_interface(self.session, path, serving_interface(facts), facts["vocabulary"])
        caches = [i for i in self.session.get_inputs() if SERVING.is_cache(i.name)]
        here = device_of(self.session)
        if pages is None:
            limits = replace(limits, pages=_default_pages(caches, facts, limits, here, rank is not None))
        super().__init__(path, facts, [i.name for i in caches], limits, exchange, here)
        self.of_rank: dict[str, np.ndarray] = {}  # what a step of a context parallel folder takes more
        if self.interface is CONTEXT_SERVING:
            self.of_rank[RANK] = np.array([rank], np.int32)
            _check_blocks(path, facts, caches)
        self.in_place = library
        rows = [limits.state_rows(self.linear) if is_state(i.name) else limits.pages for i in caches]
        self.pools = [self._make_pool([n, *i.shape[1:]], i) for n, i in zip(rows, caches, strict=True)]
        self.captured: dict[tuple[int, ...], _Captured] | None = {} if cuda_graph else None  # by (tokens, rows, wanted, pages)
        self.thread = threading.local()  # captured: those that this thread has captured
        self.identities = itertools.count(1)  # of the session's graphs
        self.options = onnxruntime.RunOptions()
        if cuda_graph:
            self.options.add_run_config_entry("gpu_graph_id", "-1")  # other steps are not captured
        self.binding = self.session.io_binding()
        self.bind_pools(self.binding)

    @property
    def a_step_behind(self) -> bool:
        return self.captured is not None

    def _make_pool(self, shape: list[int], cache: NodeArg) -> OrtValue | _Pool:
        """States and what a body reads as a whole begin with zeros."""
        import onnxruntime

        number = _ONNX_TYPES[cache.type]
        if self.device.kind == "cpu":
            value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, number, "cpu", 0)
            if is_state(cache.name) or not self.in_place:
                value.update_inplace(np.zeros(shape, _NUMPY_TYPES[cache.type]))
            return value
        size = int(np.prod(shape)) * _BYTES[number]
        try:  # from the driver: ONNX Runtime's arena would take more than that, and keep it when the batch is gone
            return _Pool(self._copier.allocate(size), tuple(shape), number)
        except RuntimeError as error:
            left, pools = free_memory(self.device), len(self.pool_names)
            raise RuntimeError(
                f"{self.device} has {left / 1e9:.2f} GB left where {cache.name}, one of {pools} pools, needs {size / 1e9:.2f} "
                f"({error}): fewer pages or max_requests need less"
            ) from None

    def _places(self) -> Iterator[tuple[str, int, int, int]]:
        for name, pool in zip(self.pool_names, self.pools, strict=True):
            rows, *row = pool.shape()
            yield name, pool.data_ptr(), rows, int(np.prod(row)) * _BYTES[pool.element_type()]

    @cached_property
    def kept_tokens(self) -> int:
        """Memory for the tokens that a step has left, while another one is captured."""
        return self.exchange.allocate(8 * max(self.earlier, 1))

    def _sampler_graph(self, path: Path) -> tuple[Call, list[str]]:
        return _graph(path, self.exchange)

    def bind_results(self, binding: IOBinding, rows: int, logits: bool = False) -> None:
        """Binds outputs of so many rows. logits: they are read, wherever they are made."""
        for name, (offset, shape, dtype) in self.results.places.items():
            if offset >= self.read_bytes and self.exchange.device != self.device.kind and not logits:
                binding.bind_output(name, self.device.kind, self.device.index)  # nobody reads it
                continue
            address = self.results.address + offset
            binding.bind_output(name, self.exchange.device, self.exchange.index, dtype.type, [rows, *shape[1:]], address)

    def bind_pools(self, binding: IOBinding) -> None:
        """Binds the pools as inputs and outputs of the graph."""
        for name, pool in zip(self.pool_names, self.pools, strict=True):
            place: Any = None
            if isinstance(pool, _Pool):
                bound_type = _BOUND_TYPES.get(pool.type, pool.type)
                place = self.device.kind, self.device.index, bound_type, list(pool.sizes), pool.address
                binding.bind_input(name, *place)
            else:
                binding.bind_ortvalue_input(name, pool)
            if not self.in_place:
                binding.bind_output(SERVING.output_of(name))
            elif place:
                binding.bind_output(SERVING.output_of(name), *place)
            else:
                binding.bind_ortvalue_output(SERVING.output_of(name), pool)

    def try_capture(self) -> None:
        """Runs a short answer, to see whether steps can be captured. Raises RuntimeError."""
        self.add([0, 0, 0], 3, stop_tokens=())
        self.run()

    def capture_steps(self, longest: int = DEFAULT_TOKENS) -> int:
        """Captures the steps of requests of up to `longest` tokens, so that none of them waits for that later; in the thread
        that will call step(), and over ranks on all of them, before leanfleet.together. Steps beyond MOST_AHEAD new tokens
        are captured as they come. Returns how many steps there are; 0 without cuda_graph, where tokens are guessed, and for
        folders whose format gives one token of a request a step. Each step runs a few times, without requests. Raises
        RuntimeError where one cannot be captured.

        Example:
            from leanfleet.ort_ops.serving import ContinuousBatch

            batch = ContinuousBatch("serving", pages=64, providers=["CPUExecutionProvider"])
            print(batch.capture_steps())  # 0: cuda_graph is off
        """
        if self.captured is None or self.speculate or self.interface is PADDED_SERVING:
            return 0
        if self.leader is not None:
            raise RuntimeError("capture_steps() is for all ranks, before leanfleet.together has them wait for this one's calls")
        captured, keys = self._captured_here(), self._usual_keys(longest)
        for key in sorted(keys - captured.keys(), reverse=True):  # the largest first: others find room in its memory
            try:
                captured[key] = _Captured(self, *key, next(self.identities), ahead=True)
            except RuntimeError as error:
                raise RuntimeError(
                    f"a step of {key[0]} tokens of {key[1]} requests cannot be captured: {error}. Fewer step_tokens, "
                    "max_requests or pages need less memory; cuda_graph=False (leanfleet serve --no-cuda-graph) captures none"
                ) from error
        return len(keys)

    def _usual_keys(self, longest: int) -> set[tuple[int, int, int, int]]:
        """Of the steps that capture_steps() captures."""
        longest = min(longest, self.max_positions or longest, self.capacity or longest)
        tables = [1]
        while self.paged and tables[-1] < -(-longest // self.block):
            tables.append(2 * tables[-1])
        few = [*(1 << i for i in range(self.max_requests.bit_length())), self.max_requests]
        most = min(self.step_tokens, MOST_AHEAD)
        pieces = [min(n, most) for n in range(PIECE_TOKENS, most + PIECE_TOKENS, PIECE_TOKENS)]
        shapes = [(n, n, n) for n in few] + [(n, 1, 1) for n in pieces if n > 1]
        return {self._step_key(*shape, table) for shape in shapes for table in tables}

    def _captured_here(self) -> dict[tuple[int, ...], _Captured]:
        """The steps that this thread has captured. ONNX Runtime keeps graphs for the thread that ran them: another would run a
        step several times, to capture it, and states would take it as often."""
        own: dict[tuple[int, ...], _Captured] | None = getattr(self.thread, "captured", None)
        if own is None or own is not self.captured:
            own = self.captured = self.thread.captured = {}
        return own

    def _step_key(self, tokens: int, rows: int, wanted: int, table: int) -> tuple[int, int, int, int]:
        """(tokens, rows, wanted, pages) of the captured step for so many new tokens, requests and wanted rows with tables of so
        many pages, at least. Steps with pieces of prompts have room for all requests, a multiple of PIECE_TOKENS and tables of
        MIXED_TABLE pages, so that there are few of them; those of answers with guesses for as many tokens as these may have."""
        few = min(1 << (rows - 1).bit_length(), self.max_requests)
        most = few * max(self.longest_answer, 1 + self.speculate)
        if tokens == rows:
            rows = tokens = wanted = few
        elif tokens <= most:
            rows, tokens, wanted = few, min(most, self.step_tokens), min(few * (1 + self.speculate), self.result_rows)
        else:
            wanted = self.result_rows if wanted > rows else self.max_requests
            rows, tokens = self.max_requests, min(-(-tokens // PIECE_TOKENS) * PIECE_TOKENS, self.step_tokens)
            table = max(table, MIXED_TABLE)
        pages = max(LEAST_TABLE, 1 << (table - 1).bit_length())
        return tokens, rows, wanted, min(pages, self.pool.count)

    def _captured_step(self, tokens: int, rows: int, wanted: int, table: int) -> _Captured:
        key, captured = self._step_key(tokens, rows, wanted, table), self._captured_here()
        if key not in captured:
            captured[key] = _Captured(self, *key, next(self.identities))
        return captured[key]

    def _run(self, feed: dict[str, np.ndarray], logits: bool = False) -> None:
        wanted, rows, tokens = len(feed[LAST]), len(feed[SEQ_LENS]), len(feed[POSITIONS])
        feed = feed | self.of_rank
        if self.captured is not None and (self.interface is not PADDED_SERVING or tokens == rows):
            step = self._captured_step(tokens, rows, wanted, feed[BLOCK_TABLE].shape[1])
            step.run(feed, self.turn, self.results.address)
            return
        for name, array in feed.items():
            self.binding.bind_cpu_input(name, array)
        self.bind_results(self.binding, wanted, logits)
        with onnxruntime_errors(f"run {self.path}"):
            self.session.run_with_iobinding(self.binding, self.options)
        if not self.in_place:
            self.pools = self.binding.get_outputs()[: len(self.pools)]  # in the order in which they were bound first
            self.bind_pools(self.binding)
