"""Continuous batching over a decoder that leanfleet.export.serving wrote. Needs onnxruntime and numpy.

Requests of unequal length join and leave between steps. Their keys and values live in pages of one pool; a step gives every
running request its next token and fills what is left of the step's tokens with pieces of waiting prompts, all in one call.
Pages are taken as tokens come (Kwon et al. 2023, PagedAttention). Requests that begin with the same tokens share the pages of
these. Where no page is left, the last request to come gives its own back and is computed again later. Layers of linear
attention have a state in place of keys and values: a row of a pool for each running request, which begins as a copy of a row of
zeros, or of a snapshot of what a request with the same beginning had there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from leanfleet import sampling as choice
from leanfleet.decoder_contract import (
    BATCH,
    BLOCK_TABLE,
    ENDS,
    KNOWN,
    LAST,
    LOGITS,
    LOGPROB,
    NEXT_TOKENS,
    OFFSETS,
    PADDED_SERVING,
    POSITIONS,
    ROWS,
    SAMPLER_FILE,
    SEQ_LENS,
    SERVING,
    SESSION_TYPES,
    SLOTS,
    STATE_INDEX,
    TABLE,
    TOKENS,
    TOP_P,
    VOCABULARY,
    WANTED,
    Adjustments,
    Sampling,
    check_interface,
    is_state,
    model_file,
    packed,
    read_facts,
    serving_interface,
)
from leanfleet.generation import check_positive, check_prompt, default_new_tokens, stop_set
from leanfleet.lookup import Lookup
from leanfleet.ort_ops.exchange import Block, CudaStream, Host
from leanfleet.ort_ops.sampler import StepSampler, check_adjustments
from leanfleet.driver import Device
from leanfleet.ort_ops.sessions import CUDA, Providers, cuda_options, device_of, on_device, onnxruntime_errors, open_exported
from leanfleet.pages import ROOT, PagePool, Snapshots, borders
from leanfleet.sampling import check_sampling

if TYPE_CHECKING:
    from onnxruntime import IOBinding, OrtValue, SessionOptions

PIECE_TOKENS = 256  # new tokens of captured steps with pieces of prompts are a multiple of it
TURNS = 2  # a step runs while the next one is made
EMPTY, NO_STATE = 0, -1  # the row of states that stays 0; what is no row
PADDING = {STATE_INDEX: NO_STATE, TOP_P: 1}  # what captured steps have where there is no request; else 0

# numpy's and ONNX's types by onnxruntime's names
_NUMPY_TYPES = {SESSION_TYPES[name]: np.dtype(name) for name in ("float32", "float16", "int8", "uint8")}
_NUMPY_TYPES[SESSION_TYPES["float8e4m3fn"]] = np.dtype(np.uint8)  # numpy has none: their bytes
_BYTES = {1: 4, 2: 1, 3: 1, 10: 2, 16: 2, 17: 1}  # of ONNX's types
_ONNX_TYPES = {
    SESSION_TYPES[name]: number
    for name, number in (("float32", 1), ("uint8", 2), ("int8", 3), ("float16", 10), ("bfloat16", 16), ("float8e4m3fn", 17))
}


@dataclass(eq=False)
class Request:
    """One request. `tokens` grows until `done`, `logprobs` with it; `cached` of prompt + tokens are in the pool, or will be
    after the steps that run. `shared`: how many of the prompt's tokens were there already when it began, None before. `error`:
    the exception that ended it, None while all is well."""

    prompt: list[int]
    max_new_tokens: int
    stop_tokens: set[int]
    sampling: Sampling = Sampling()
    adjustments: Adjustments = Adjustments()
    priority: int = 0
    arrival: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)  # (token, log-probability), the likeliest first
    place: int | None = None  # in the sampler, of one with adjustments that runs
    shared: int | None = None
    cached: int = 0
    coming: int = 0  # tokens of steps that run, which nobody has read yet
    pages: list[int] = field(default_factory=list)
    state: int = NO_STATE  # its row in the pools of states while it runs
    borders: list[bytes] = field(default_factory=list)  # of its text, where states may be shared
    marks: dict[int, bytes] = field(default_factory=dict)  # {tokens: name} of the borders at which its state will be kept
    chain: list[int] = field(default_factory=list)  # numbers of the pages that are known: the first ones
    lookup: Lookup | None = None  # of its text, where tokens are guessed
    trust: int = 0  # how many tokens the next guess may have
    done: bool = False
    error: Exception | None = None

    @property
    def waiting(self) -> int:
        """Tokens that no step has put into the pool yet: the rest of the prompt, or the newest token. None once all answers'
        tokens are on their way."""
        made = len(self.tokens) + self.coming
        return len(self.prompt) + made - self.cached if made < self.max_new_tokens else 0

    @property
    def order(self) -> tuple[int, int]:
        """Who comes first, has the least."""
        return -self.priority, self.arrival

    def text(self, start: int, end: int) -> list[int]:
        """Tokens of prompt and answer."""
        size = len(self.prompt)
        return self.prompt[start:end] + self.tokens[max(start - size, 0) : max(end - size, 0)]

    def next_tokens(self, count: int, row: int | None) -> list[int]:
        """The first of those that wait, as decoder_contract.packed takes them. row: that of a token that nobody has read."""
        return [-1 - row] if row is not None else self.text(self.cached, self.cached + count)


@dataclass
class _Launched:
    """A step that runs: what it gives each request, where its results will be, and how to know that they are there."""

    chosen: list[tuple[Request, bool, list[int]]]  # requests, whether they get a token, and what was guessed to follow
    results: np.ndarray
    mark: int
    top: tuple[np.ndarray, np.ndarray] | None  # the most likely tokens of each row


class _Captured:
    """A captured step of `batch`, the session's CUDA graph `identity`: up to `tokens` new tokens of up to `rows` requests, with
    tables of up to `table` pages, and `wanted` rows of results. Inputs and results keep their addresses. Rows without a request
    have no new tokens. ONNX Runtime runs a step several times while it captures; appending a token twice to the same place of a
    page does no harm. A state must not take it twice: graphs with states are captured by a step without requests."""

    def __init__(self, batch: ContinuousBatch, tokens: int, rows: int, wanted: int, table: int, identity: int) -> None:
        import onnxruntime

        self.exchange, self.session, self.path = batch.exchange, batch.session, batch.path
        self.earlier = batch.earlier
        if batch.interface is PADDED_SERVING:
            start = packed([[0]] * rows, [0] * rows, [[0] * table] * rows, PADDED_SERVING)
            shapes = {name: list(array.shape) for name, array in start.items()}
        else:
            sizes = {TOKENS: tokens, BATCH: rows, WANTED: wanted, ENDS: rows + 1, TABLE: table, KNOWN: batch.earlier + tokens}
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
        if batch.linear:
            self._capture(batch.results.address, {t.name: np.zeros([0] * len(t.shape), t.type) for t in batch.interface.inputs})

    def _capture(self, earlier: int, nothing: dict[str, np.ndarray]) -> None:
        """Runs a step without requests. The tokens that the step before has left at `earlier` stay."""
        kept, size = self.exchange.allocate(8 * self.earlier), 8 * self.earlier
        self.exchange.copy(kept, earlier, size)
        self._send(nothing, 0, 0)
        self._call()
        self.exchange.copy(earlier, kept, size)
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


def _bytes(pool: OrtValue) -> int:
    return int(np.prod(pool.shape())) * _BYTES[pool.element_type()]


class ContinuousBatch:
    """Continuous batching: a queue of requests, a pool of pages that they share, and step(), which runs one call.

    folder: written by `leanfleet export` or leanfleet.export.serving. pages: size of the pool; a request has
    ceil(tokens so far / block) of them while it runs, and begins where a known beginning of its prompt ends (share=False:
    always at its start). snapshots: so many states are kept for that at most where layers are linear (default: max_requests).
    Where pages run out, the request with the least priority, the last to come among equals, gives its
    pages back and is computed again once there is room: it gets the same tokens, in half precision up to near-ties. A decoder
    whose layers are all linear attention needs no pages; each of its running requests has a state of fixed size.
    max_requests: at most so many run at once. step_tokens: at most so many new tokens a step, prompts being cut to fit.
    speculate: so many tokens are guessed at most behind each request's next one, from what followed in its own text where it
    said the same before. A step then gives a request the guesses that are right, and its tokens are the same as without; steps
    are waited for. Steps with a request that has penalties, biases or top_logprobs go without guesses.
    library: False runs the function bodies.
    cuda_graph: on the CUDA provider, steps are captured once for each power of two of requests and of pages in the longest
    table, and for each multiple of PIECE_TOKENS new tokens where pieces of prompts are among them, and replayed; of providers
    the CUDA provider's options count then. The host makes a step while the one before runs, and reads tokens a step behind.
    (Of folders that earlier versions wrote, steps with pieces of prompts are not captured, and each step is waited for.)
    device: "cpu", "cuda" or "cuda:1", as make_session takes it.
    Raises FileNotFoundError or ValueError for a folder that is not one, ValueError for max_requests below 1 or above
    step_tokens and for cuda_graph without the library, and what make_session raises.

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
        pages: int,
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
    ) -> None:
        import onnxruntime

        check_positive("pages", pages)
        if max_requests < 1:
            raise ValueError(f"max_requests is how many requests run at once, at least one; found {max_requests}")
        if step_tokens < max_requests:
            raise ValueError(
                f"step_tokens {step_tokens} is less than max_requests {max_requests}: every running request takes "
                "one token a step"
            )
        if snapshots is not None and not (isinstance(snapshots, int) and snapshots >= 0):
            raise ValueError(f"snapshots is {snapshots!r}; expected how many states are kept at most, 0 or more")
        if not (isinstance(speculate, int) and speculate >= 0):
            raise ValueError(f"speculate is {speculate!r}; expected how many tokens are guessed at most, 0 or more")
        if cuda_graph and not library:
            raise ValueError("cuda_graph needs the library: function bodies write new pools, which a graph cannot hold")
        exchange: Host | CudaStream = Host()
        if cuda_graph:
            providers = on_device([(CUDA, cuda_options(providers))], device)
            exchange = CudaStream(int(cuda_options(providers).get("device_id", 0)))
            settings = {"enable_cuda_graph": "1", "user_compute_stream": str(exchange.address)}
            providers = [(CUDA, cuda_options(providers) | settings)]
        providers = on_device(providers, device)
        folder = Path(folder)
        facts = read_facts(folder, SERVING)
        self.interface = serving_interface(facts)
        self.session = open_exported(folder, providers, session_options, library, model_file(facts))
        self.exchange = exchange
        self.path = folder / model_file(facts)
        check_interface(self.session, self.path, self.interface, facts["vocabulary"])
        self.block, self.vocabulary, self.stop_tokens = facts["block"], facts["vocabulary"], set(facts["stop_tokens"])
        self.max_positions, self.max_requests, self.step_tokens = facts["max_positions"], max_requests, step_tokens
        caches = [i for i in self.session.get_inputs() if SERVING.is_cache(i.name)]
        self.paged = any(not is_state(i.name) for i in caches)  # linear layers alone need no pages
        self.linear = any(is_state(i.name) for i in caches)
        self._check_speculation(speculate)
        kept = (max_requests if snapshots is None else snapshots) if share and self.linear else 0
        self.pool = PagePool(pages, self.block, share and (not self.linear or kept > 0))
        self.queue: deque[Request] = deque()  # in their order
        self.running: list[Request] = []
        self.steps = self.processed_tokens = self.shared_tokens = self.preemptions = self.turn = self.arrivals = 0
        self.device = device_of(self.session)
        self.in_place = library
        self.pool_names = [i.name for i in caches]
        self.state_rows = 1 + max_requests + kept
        self.free_states = list(range(EMPTY + 1, 1 + max_requests))[::-1]
        self.snapshots = Snapshots(range(1 + max_requests, self.state_rows))
        allocate = onnxruntime.OrtValue.ortvalue_from_shape_and_type
        rows = [self.state_rows if is_state(i.name) else pages for i in caches]
        self.pools = [
            allocate([n, *i.shape[1:]], _ONNX_TYPES[i.type], self.device.kind, self.device.index)
            for n, i in zip(rows, caches, strict=True)
        ]
        for i, pool in zip(caches, self.pools, strict=True):
            if is_state(i.name) or not library:  # a body reads whole pools: give it numbers
                pool.update_inplace(np.zeros(pool.shape(), _NUMPY_TYPES[i.type]))
        by_host = exchange.device == self.device.kind or not self.linear
        self.copier = exchange if by_host else CudaStream(self.device.index)  # of states
        self.captured: dict[tuple[int, ...], _Captured] | None = {} if cuda_graph else None  # by (tokens, rows, wanted, pages)
        self.late: list[tuple[Request, int]] = []  # tokens of a step that was read when the next one failed
        self.launched: _Launched | None = None  # the step that runs, where tokens are read a step behind
        self.earlier = max_requests if self.interface.chooses else 0  # tokens of a step that the next one may need
        self.speculate, self.result_rows = speculate, min(max_requests * (1 + speculate), step_tokens)
        self.guessed = self.guessed_right = 0
        self._place_results()
        self.options = onnxruntime.RunOptions()
        if cuda_graph:
            self.options.add_run_config_entry("gpu_graph_id", "-1")  # other steps are not captured
        self.binding = self.session.io_binding()
        self.bind_pools(self.binding)
        self.sampler: StepSampler | None = None  # loaded for the first request that needs it

    def _check_speculation(self, speculate: int) -> None:
        if speculate and self.linear:
            raise ValueError(
                f"speculate is {speculate}, and {self.path} has layers with linear attention, whose states cannot give a wrong "
                "guess back: leave it at 0"
            )
        if speculate and not self.interface.of_any_row:
            raise ValueError(
                f"speculate is {speculate}, and {self.path} gives one token of a request a step, as earlier versions wrote it: "
                f"export it again with {SERVING.writer}"
            )

    def _place_results(self) -> None:
        """Where a step's results are: those that the host reads, in front of the others."""
        read = (NEXT_TOKENS, LOGPROB) if self.interface.chooses else (LOGITS,)
        sizes = {BATCH: self.max_requests, WANTED: self.result_rows, VOCABULARY: self.vocabulary}
        outputs = sorted(self.interface.outputs, key=lambda t: t.name not in read)
        outputs = sorted(outputs, key=lambda t: t.name != NEXT_TOKENS)
        self.results = Block(self.exchange, {t.name: (t.sizes(sizes), np.dtype(t.type)) for t in outputs})
        self.read_bytes = max(self.results.end(name) for name in read)
        self.read = [self.exchange.host_bytes(self.read_bytes) for _ in range(TURNS)]

    def bind_results(self, binding: IOBinding, rows: int, logits: bool = False) -> None:
        """Binds outputs of so many rows. logits: they are read, wherever they are made."""
        for name, (offset, shape, dtype) in self.results.places.items():
            if offset >= self.read_bytes and self.exchange.device != self.device.kind and not logits:
                binding.bind_output(name, self.device.kind, self.device.index)  # nobody reads it
                continue
            address = self.results.address + offset
            binding.bind_output(name, self.exchange.device, self.exchange.index, dtype.type, [rows, *shape[1:]], address)

    def add(
        self,
        prompt: Iterable[int],
        max_new_tokens: int | None = None,
        stop_tokens: Iterable[int] | None = None,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: dict[int, float] | None = None,
        top_logprobs: int = 0,
        priority: int = 0,
    ) -> Request:
        """Queues a request of token ids; returns its Request. Greedy by default, else drawn as the operator SampleTokens does.

        max_new_tokens: default 128, or as many as the model's positions and the pool hold if these are fewer. stop_tokens:
        default those of the model. Penalties and biases: as SampleTokens has them; a step in which a request has one runs
        sampler.onnx too. top_logprobs: how many most likely tokens Request.top_logprobs has for each token, up to 20.
        priority: requests of a greater one begin first, and keep their pages longer.
        Raises ValueError, and queues nothing, for an empty prompt, token ids outside the vocabulary, wrong options, and
        requests that the pool or the model's positions could never hold.
        """
        prompt = check_prompt(prompt, self.vocabulary)
        sampling = check_sampling(temperature, top_k, top_p, seed, min_p)
        adjustments = check_adjustments(
            self.vocabulary, repetition_penalty, presence_penalty, frequency_penalty, logit_bias, top_logprobs
        )
        if adjustments != Adjustments():
            self._load_sampler()
        stop = stop_set(stop_tokens, self.stop_tokens)
        if max_new_tokens is None:
            max_new_tokens = default_new_tokens(len(prompt), self.max_positions, self.capacity)
        check_positive("max_new_tokens", max_new_tokens)
        needed = len(prompt) + max_new_tokens
        if self.max_positions and needed > self.max_positions:
            raise ValueError(f"{needed} tokens are more than the {self.max_positions} positions that the model was trained for")
        if self.capacity is not None and needed > self.capacity:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and {max_new_tokens} new ones need {-(-needed // self.block)} "
                f"pages of {self.block}; the pool has {self.pool.count}. Make it larger, or ask for fewer tokens"
            )
        if not isinstance(priority, int):
            raise ValueError(f"priority is {priority!r}; expected a whole number")
        self.arrivals += 1
        request = Request(prompt, max_new_tokens, stop, sampling, adjustments, priority, self.arrivals)
        self._enqueue(request)
        return request

    def _load_sampler(self) -> None:
        if self.sampler is not None:
            return
        path = self.path.with_name(SAMPLER_FILE)
        if not self.interface.chooses or not path.exists():
            raise ValueError(
                f"{self.path.parent} has no {SAMPLER_FILE}, which penalties, logit_bias and top_logprobs need: export it again "
                f"with {SERVING.writer}"
            )
        addresses = {name: self.results.address + offset for name, (offset, *_) in self.results.places.items()}
        self.sampler = StepSampler(path, self.exchange, self.vocabulary, self.max_requests, addresses, TURNS)

    def _enqueue(self, request: Request) -> None:
        if self.snapshots.count:
            request.borders = borders(request.prompt + request.tokens, self.block)
        place = next((i for i, other in enumerate(self.queue) if other.order > request.order), len(self.queue))
        self.queue.insert(place, request)

    def cancel(self, request: Request) -> None:
        """Ends a request now; its pages go back to the pool."""
        if request in self.queue:
            self.queue.remove(request)
        if request in self.running:
            self.running.remove(request)
        self._release(request)
        request.done = True

    def _release(self, request: Request) -> None:
        self.pool.release(request.pages)
        request.pages, request.chain, request.marks = [], [], {}
        if request.state != NO_STATE:
            self.free_states.append(request.state)
            request.state = NO_STATE
        if self.sampler is not None:
            self.sampler.end(request)

    def _preempt(self, request: Request) -> None:
        """A running request gives its pages and its state back, and waits."""
        self.running.remove(request)
        self._release(request)
        request.cached = 0
        self._enqueue(request)

    def _begin_state(self, request: Request, snapshot: int | None, blocks: int) -> None:
        """Gives a request a row in the pools of states. Whatever it held, the request begins with zeros, or with a snapshot of
        so many blocks."""
        self._copy_state(EMPTY if snapshot is None else snapshot, self.free_states[-1])
        request.state = self.free_states.pop()
        if self.snapshots.count:
            worth_it = self.snapshots.worth_it(request.borders, blocks)
            request.marks = {n * self.block: request.borders[n - 1] for n in worth_it}

    def _keep_state(self, request: Request, name: bytes) -> None:
        """Copies the state of a request for others that begin with the same text."""
        row = self.snapshots.room()
        self._copy_state(request.state, row)
        self.snapshots.keep(name, row)

    def _copy_state(self, source: int, target: int) -> None:
        """Copies a row in all pools of states, behind the steps that are queued."""
        for name, pool in zip(self.pool_names, self.pools, strict=True):
            if is_state(name):
                size = _bytes(pool) // pool.shape()[0]
                self.copier.copy(pool.data_ptr() + target * size, pool.data_ptr() + source * size, size)
        if self.copier is not self.exchange:
            self.copier.wait(self.copier.mark())

    def _admit(self) -> None:
        """Starts waiting requests in their order while places last, and pages for their texts. One whose next page another
        request is about to fill waits for it."""
        for request in list(self.queue):
            if len(self.running) == self.max_requests or request.coming:
                return
            size = len(request.prompt) + len(request.tokens)
            text = request.text(0, size)
            pages, chain = self.pool.match(text)
            snapshot = None
            if self.linear:  # it goes on where a state is known, and the pages before
                blocks, snapshot = self.snapshots.find(request.borders[: len(pages)] if self.paged else request.borders)
                self.pool.release(pages[blocks:])
                pages, chain = pages[:blocks], chain[:blocks]
            else:
                blocks = len(pages)
            start = blocks * self.block
            need = size // self.block + 1 - len(pages) + (self.pool.count // 100 if self.running else 0) if self.paged else 0
            if self._is_being_kept(request.borders[blocks:]) or (
                not self.linear and size > start + self.block and self._is_being_filled(text[: start + self.block])
            ):
                self.pool.release(pages)
            elif need > self.pool.available:
                self.pool.release(pages)
                return
            else:
                try:
                    if self.linear:
                        self._begin_state(request, snapshot, blocks)
                except BaseException:
                    self.pool.release(pages)
                    raise
                request.pages, request.chain, request.cached = pages, chain, start
                if request.shared is None:
                    request.shared = start
                    self.shared_tokens += start
                if self.sampler is not None and request.adjustments != Adjustments():
                    self.sampler.begin(request)
                if self.speculate and request.lookup is None:
                    request.lookup, request.trust = Lookup(text), self.speculate
                self.queue.remove(request)
                self.running.append(request)

    def _is_being_filled(self, text: list[int]) -> bool:
        """Whether a running request is about to fill the page that ends this text."""
        size = len(text)
        return self.pool.share and any(r.cached < size <= len(r.prompt) and r.prompt[:size] == text for r in self.running)

    def _is_being_kept(self, names: list[bytes]) -> bool:
        """Whether a running request is about to leave a snapshot of one of these beginnings."""
        coming = {name for r in self.running for name in r.marks.values()}
        return not coming.isdisjoint(names)

    def _schedule(self) -> list[tuple[Request, int]]:
        """[(request, new tokens of it)] of this step: first who waits for one token, then prompts, in their order. Takes the
        pages that these need."""
        budget, chosen = self.step_tokens, {}
        for request in sorted(self.running, key=lambda r: (r.waiting > 1, r.order)):
            count = min(request.waiting, budget) if request in self.running else 0
            if request.marks:  # no further than where its state is kept
                count = min(count, min(request.marks) - request.cached)
            while self.paged and count and len(request.pages) * self.block < request.cached + count:
                page = self.pool.take()
                if page is not None:
                    request.pages.append(page)
                    continue
                last = max(self.running, key=lambda r: r.order)
                if last is request:  # it goes on as far as its pages reach
                    count = len(request.pages) * self.block - request.cached
                    break
                budget += chosen.pop(last, 0)
                self.preemptions += 1
                self._preempt(last)
            if count:
                chosen[request] = count
                budget -= count
        return list(chosen.items())

    def _guess(self, chosen: list[tuple[Request, int]]) -> list[list[int]]:
        """What may follow behind the next token of each request, as far as the step's tokens and the pool's pages reach."""
        room = self.step_tokens - sum(count for _, count in chosen)
        adjusted = any(r.place is not None for r, _ in chosen)
        guesses: list[list[int]] = []
        for request, count in chosen:
            guess: list[int] = []
            if request.lookup is not None and not adjusted and count == request.waiting == 1:
                most = min(request.trust, room, request.max_new_tokens - len(request.tokens) - 1)
                guess = request.lookup.guess(most) if most > 0 else []
            while len(request.pages) * self.block < request.cached + count + len(guess):
                page = self.pool.take(empty=True)  # what is known is worth more than a guess
                if page is None:
                    del guess[len(request.pages) * self.block - request.cached - count :]
                else:
                    request.pages.append(page)
            room -= len(guess)
            guesses.append(guess)
        return guesses

    def _keep_full_pages(self, request: Request) -> None:
        """Makes those pages known that are full of tokens which have been read."""
        known = min(request.cached, len(request.prompt) + len(request.tokens)) if self.paged else 0
        while (end := (len(request.chain) + 1) * self.block) <= known:
            before = request.chain[-1] if request.chain else ROOT
            page = request.pages[len(request.chain)]
            request.chain.append(self.pool.keep(page, before, request.text(end - self.block, end)))

    def step(self) -> list[tuple[Request, int]]:
        """Runs one call; returns [(request, new token)] of those that got one: none while a prompt is not through, several
        where guesses were right. With CUDA graphs the call is queued, and those of the call before are returned.

        A request whose token cannot be chosen (its logits are not finite) is done: the exception is its `error`, its pages go
        back, and the others go on. Raises RuntimeError where onnxruntime fails; every request is then as it was before,
        so that step() can be called again, or requests cancelled. Those of the failed call whose states it may have changed
        are computed again.
        """
        self._admit()
        chosen = self._schedule()
        try:
            launched = self._launch(chosen) if chosen else None
        except BaseException:  # an interrupt too: the call may have changed states
            if self.launched is not None:  # the next call cannot go on from its tokens on the device
                behind, self.launched = self.launched, None
                self.late += self._finish(behind)
            for request in [r for r, _ in chosen if self.linear and r in self.running]:
                self._preempt(request)
            raise
        if self.captured is not None and self.interface.chooses and not self.speculate:
            launched, self.launched = self.launched, launched
        late, self.late = self.late, []
        return late + (self._finish(launched) if launched else [])

    def _launch(self, chosen: list[tuple[Request, int]]) -> _Launched:
        """Queues a step. Nothing can fail once a request changes: they do so all or not at all."""
        before = {id(r): row for row, (r, given, _) in enumerate(self.launched.chosen) if given} if self.launched else {}
        guesses = self._guess(chosen) if self.speculate else [[] for _ in chosen]
        feed = packed(
            [
                r.next_tokens(count, before[id(r)] if r.coming else None) + guess
                for (r, count), guess in zip(chosen, guesses, strict=True)
            ],
            [r.cached for r, _ in chosen],
            [r.pages for r, _ in chosen],
            self.interface,
            [r.sampling for r, _ in chosen],
            self.earlier,
            [r.state for r, _ in chosen],
            [1 + len(guess) for guess in guesses],
        )
        self.turn = (self.turn + 1) % TURNS
        gets, top = [r.waiting == count for r, count in chosen], None
        adjusted = any(r.place is not None for r, _ in chosen)
        self._run(feed, adjusted)
        if self.sampler is not None and adjusted:
            self.sampler.run([r for r, _ in chosen], gets, feed[SEQ_LENS], self.turn)
            top = self.sampler.most_likely(self.turn)
        for request, count in chosen:
            if request.cached + count in request.marks:
                self._keep_state(request, request.marks[request.cached + count])
        results = self.read[self.turn]
        self.exchange.copy(results.ctypes.data, self.results.address, self.read_bytes)
        shares = [(r, given, guess) for (r, _), given, guess in zip(chosen, gets, guesses, strict=True)]
        launched = _Launched(shares, results, self.exchange.mark(), top)
        self.steps += 1
        self.processed_tokens += len(feed[POSITIONS])
        for (request, count), given, guess in zip(chosen, gets, guesses, strict=True):
            request.cached += count + len(guess)
            request.coming += given
            request.marks.pop(request.cached, None)
            self._keep_full_pages(request)
        return launched

    def _finish(self, launched: _Launched) -> list[tuple[Request, int]]:
        """Waits for a step, and gives its tokens to the requests."""
        self.exchange.wait(launched.mark)
        tokens, logprobs = (array.tolist() for array in self._chosen_tokens(launched))
        results, end = [], 0
        for request, given, guess in launched.chosen:
            first, end = end, end + 1 + len(guess)
            if not given or request.done:  # done: it stopped in the step before, while this one was on its way
                continue
            request.coming -= 1
            had = len(request.tokens)
            self._take(request, guess, tokens[first:end], logprobs[first:end])
            results += [(request, token) for token in request.tokens[had:]]
            if len(request.tokens) > had and launched.top is not None and request.adjustments.top_logprobs:
                ids, values = (array[first, : request.adjustments.top_logprobs].tolist() for array in launched.top)
                request.top_logprobs.append(list(zip(ids, values, strict=True)))
            self._keep_full_pages(request)
            if request.done:
                (self.running if request in self.running else self.queue).remove(request)
                self._release(request)
        return results

    def _take(self, request: Request, guess: list[int], tokens: list[int], logprobs: list[float]) -> None:
        """Gives a request its next token, and the one behind each guess that was right. Keys and values behind a wrong one are
        none of it: the next step writes over them."""
        right = -1
        for token, logprob in zip(tokens, logprobs, strict=True):
            right += 1
            request.error = choice.problem(logprob)
            if request.error is None:
                request.tokens.append(token)
                request.logprobs.append(logprob)
                if request.lookup is not None:
                    request.lookup.extend([token])
            request.done = (
                request.error is not None or token in request.stop_tokens or len(request.tokens) == request.max_new_tokens
            )
            if request.done or guess[right : right + 1] != [token]:
                break
        if guess:
            request.cached -= len(guess) - right
            needed = -(-request.cached // self.block)
            self.pool.release(request.pages[needed:])
            del request.pages[needed:]
            request.trust = min(2 * request.trust, self.speculate) if right == len(guess) else right + 1
            self.guessed += len(guess)
            self.guessed_right += right

    def _chosen_tokens(self, launched: _Launched) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, log-probabilities) of a step's rows. Graphs of older formats leave the choice to the host."""
        rows = sum(1 + len(guess) for *_, guess in launched.chosen)

        def result(name: str) -> np.ndarray:
            return self.results.view(launched.results, name)[:rows]

        if self.interface.chooses:
            return result(NEXT_TOKENS), result(LOGPROB)
        positions = np.array([r.cached for r, *_ in launched.chosen])
        return choice.sample(result(LOGITS), [r.sampling for r, *_ in launched.chosen], positions)

    def bind_pools(self, binding: IOBinding) -> None:
        """Binds the pools as inputs and outputs of the graph."""
        for name, pool in zip(self.pool_names, self.pools, strict=True):
            binding.bind_ortvalue_input(name, pool)
            if self.in_place:
                binding.bind_ortvalue_output(SERVING.output_of(name), pool)
            else:
                binding.bind_output(SERVING.output_of(name))

    def _captured_step(
        self, captured: dict[tuple[int, ...], _Captured], tokens: int, rows: int, wanted: int, table: int
    ) -> _Captured:
        """That for steps of so many new tokens, requests and wanted rows with tables of so many pages, at least. Steps with
        pieces of prompts have room for all requests and a multiple of PIECE_TOKENS, so that there are few of them; those with
        guesses for as many as their requests may have."""

        def rounded(number: int, most: int) -> int:
            return min(1 << (number - 1).bit_length(), most)

        if tokens == wanted > rows:  # guesses alone: a result of every token
            rows = rounded(rows, self.max_requests)
            tokens = wanted = min(rows * (1 + self.speculate), self.result_rows)
        elif tokens > rows:
            wanted = self.result_rows if wanted > rows else self.max_requests
            rows, tokens = self.max_requests, min(-(-tokens // PIECE_TOKENS) * PIECE_TOKENS, self.step_tokens)
        else:
            rows = tokens = wanted = rounded(rows, self.max_requests)
        key = tokens, rows, wanted, rounded(table, self.pool.count)
        if key not in captured:
            captured[key] = _Captured(self, *key, 1 + len(captured))
        return captured[key]

    def _run(self, feed: dict[str, np.ndarray], logits: bool = False) -> None:
        """A call, which leaves what it says of each request in `results`, on wish its logits too."""
        wanted, rows, tokens = len(feed[LAST]), len(feed[SEQ_LENS]), len(feed[POSITIONS])
        if self.captured is not None and (self.interface is not PADDED_SERVING or tokens == rows):
            step = self._captured_step(self.captured, tokens, rows, wanted, feed[BLOCK_TABLE].shape[1])
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

    @property
    def capacity(self) -> int | None:
        """How many tokens of one request the pages hold; None where no layer has pages."""
        return self.pool.count * self.block if self.paged else None

    @property
    def pool_bytes(self) -> int:
        """Of the pools of all layers."""
        return sum(map(_bytes, self.pools))

    @property
    def state_bytes(self) -> int:
        """Of the pools of states among them."""
        return sum(_bytes(pool) for name, pool in zip(self.pool_names, self.pools, strict=True) if is_state(name))

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not (self.running or self.queue or self.launched)

    def run(self) -> None:
        """Steps until every request is done."""
        while not self.idle:
            self.step()
