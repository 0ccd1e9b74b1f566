"""Continuous batching over a decoder that leanfleet.export.serving wrote. Needs onnxruntime and numpy.

Requests of unequal length join and leave between steps. Their keys and values live in pages of one pool; a step gives every
running request its next token and fills what is left of the step's tokens with pieces of waiting prompts, all in one call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from leanfleet.decoder_contract import (
    BATCH,
    BLOCK_TABLE,
    ENDS,
    INPUT_IDS,
    LAST,
    LOGITS,
    LOGPROB,
    MODEL_FILE,
    NEXT_TOKENS,
    OFFSETS,
    PADDED_SERVING,
    ROWS,
    SERVING,
    SESSION_TYPES,
    SLOTS,
    TABLE,
    TOKENS,
    VOCABULARY,
    Interface,
    Tensor,
    check_interface,
    packed,
    read_facts,
    serving_interface,
)
from leanfleet.generation import check_positive, check_prompt, check_sampling, choose, default_new_tokens, stop_set
from leanfleet.ort_ops.sessions import Providers, onnxruntime_errors, open_exported

if TYPE_CHECKING:
    from onnxruntime import IOBinding, SessionOptions

PIECE_TOKENS = 256  # new tokens of captured steps with pieces of prompts are a multiple of it

# numpy's and ONNX's types by onnxruntime's names
_NUMPY_TYPES = {SESSION_TYPES["float32"]: np.float32, SESSION_TYPES["float16"]: np.float16}
_ONNX_TYPES = {SESSION_TYPES["float32"]: 1, SESSION_TYPES["float16"]: 10, SESSION_TYPES["bfloat16"]: 16}


@dataclass(eq=False)
class Request:
    """One request. `tokens` grows until `done`; `cached` of prompt + tokens are in the pool. `error`: the exception that
    ended it, None while all is well."""

    prompt: list[int]
    max_new_tokens: int
    stop_tokens: set[int]
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    pages: list[int] = field(default_factory=list)
    done: bool = False
    error: Exception | None = None

    @property
    def waiting(self) -> int:
        """Tokens that are not in the pool yet: the rest of the prompt, or the newest token."""
        return len(self.prompt) + len(self.tokens) - self.cached


class _Captured:
    """A captured step of `batch`, the session's CUDA graph `identity`: up to `tokens` new tokens of up to `rows` requests, with
    tables of up to `table` pages. Inputs and results keep their addresses. Rows without a request have no new tokens. ONNX
    Runtime runs a step several times while it captures; appending a token twice to the same place of a page does no harm."""

    def __init__(self, batch: ContinuousBatch, tokens: int, rows: int, table: int, identity: int) -> None:
        import onnxruntime

        self.fixed: tuple[str, ...] = ()  # inputs that are the same in all such steps
        if batch.interface is SERVING:
            sizes = {TOKENS: tokens, BATCH: rows, ENDS: rows + 1, TABLE: table}
            feed = {t.name: np.zeros(t.sizes(sizes), t.type) for t in SERVING.inputs}
        else:
            feed = packed([[0]] * rows, [0] * rows, [[0] * table] * rows, PADDED_SERVING)
            self.fixed = SLOTS, ROWS, LAST
        self.session, self.path = batch.session, batch.path
        self.inputs = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array, batch.device, 0) for name, array in feed.items()}
        self.binding, self.options = batch.session.io_binding(), onnxruntime.RunOptions()
        self.options.add_run_config_entry("gpu_graph_id", str(identity))
        for name, value in self.inputs.items():
            self.binding.bind_ortvalue_input(name, value)
        batch.bind_pools(self.binding)
        batch.results.bind(self.binding, rows)  # steps follow one another: they share the room

    def run(self, feed: dict[str, np.ndarray]) -> None:
        """A step of at most so many tokens, requests and pages."""
        for name, array in feed.items():
            if name in self.fixed:
                continue
            whole = np.zeros(self.inputs[name].shape(), array.dtype)
            whole[tuple(map(slice, array.shape))] = array
            if name == OFFSETS:
                whole[len(array) :] = array[-1]
            self.inputs[name].update_inplace(whole)
        with onnxruntime_errors(f"run {self.path}"):
            self.session.run_with_iobinding(self.binding, self.options)
        self.binding.synchronize_outputs()


class _Results:
    """Where the session writes what a step says of up to `rows` requests: numpy arrays, or on a GPU memory of its own, from
    which little more than the tokens is copied."""

    def __init__(self, interface: Interface, rows: int, vocabulary: int, device: str) -> None:
        import onnxruntime

        self.device, self.outputs, self.vocabulary = device, interface.outputs, vocabulary
        self.room: dict[str, Any] = {}
        for t in self.outputs:
            shape, dtype = self._shape(t, rows), np.dtype(t.type).type
            if device == "cpu":
                self.room[t.name] = np.empty(shape, dtype)
            else:
                self.room[t.name] = onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, dtype, device, 0)

    def _shape(self, output: Tensor, rows: int) -> list[int]:
        return output.sizes({BATCH: rows, VOCABULARY: self.vocabulary})

    def bind(self, binding: IOBinding, rows: int) -> None:
        """Binds outputs of so many rows."""
        for t in self.outputs:
            room = self.room[t.name]
            pointer = room.ctypes.data if self.device == "cpu" else room.data_ptr()
            binding.bind_output(t.name, self.device, 0, np.dtype(t.type).type, self._shape(t, rows), pointer)

    def read(self, name: str, rows: int) -> np.ndarray:
        """An output's first rows."""
        room = self.room[name]
        return (room if self.device == "cpu" else room.numpy())[:rows]


class ContinuousBatch:
    """Continuous batching: a queue of requests, a pool of pages that they share, and step(), which runs one call.

    folder: written by leanfleet.export.serving.export_for_serving. pages: size of the pool; one request needs
    ceil((prompt + max_new_tokens) / block) of them for as long as it runs. max_requests: at most so many run at once.
    step_tokens: at most so many new tokens a step, prompts being cut to fit. library: False runs the function bodies.
    cuda_graph: on the CUDA provider, steps are captured once for each power of two of requests and of pages in the longest
    table, and for each multiple of PIECE_TOKENS new tokens where pieces of prompts are among them, and replayed; providers are
    ignored then. (Of folders that earlier versions wrote, steps with pieces of prompts are not captured.)
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
        if cuda_graph and not library:
            raise ValueError("cuda_graph needs the library: function bodies write new pools, which a graph cannot hold")
        if cuda_graph:
            providers = [("CUDAExecutionProvider", {"enable_cuda_graph": "1"})]
        folder = Path(folder)
        facts = read_facts(folder, SERVING)
        self.interface = serving_interface(facts)
        self.session = open_exported(folder, providers, session_options, library)
        self.path = folder / MODEL_FILE
        check_interface(self.session, self.path, self.interface, facts["vocabulary"])
        self.block, self.vocabulary, self.stop_tokens = facts["block"], facts["vocabulary"], set(facts["stop_tokens"])
        self.max_positions, self.max_requests, self.step_tokens = facts["max_positions"], max_requests, step_tokens
        self.pages, self.free_pages = pages, list(range(pages))[::-1]
        self.queue: deque[Request] = deque()
        self.running: list[Request] = []
        self.steps = self.processed_tokens = 0
        self.device = "cuda" if self.session.get_providers()[0] == "CUDAExecutionProvider" else "cpu"
        self.in_place = library
        pools = [i for i in self.session.get_inputs() if SERVING.is_cache(i.name)]
        self.pool_names = [i.name for i in pools]
        allocate = onnxruntime.OrtValue.ortvalue_from_shape_and_type
        self.pools = [allocate([pages, *i.shape[1:]], _ONNX_TYPES[i.type], self.device, 0) for i in pools]
        if not library:  # the body reads whole pools: give it numbers
            for i, pool in zip(pools, self.pools):
                pool.update_inplace(np.zeros(pool.shape(), _NUMPY_TYPES[i.type]))
        self.captured: dict[tuple[int, int, int], _Captured] | None = {} if cuda_graph else None  # by (tokens, rows, pages)
        self.results = _Results(self.interface, max_requests, self.vocabulary, self.device)
        self.options = onnxruntime.RunOptions()
        if cuda_graph:
            self.options.add_run_config_entry("gpu_graph_id", "-1")  # other steps are not captured
        self.binding = self.session.io_binding()
        self.bind_pools(self.binding)

    def add(
        self,
        prompt: Iterable[int],
        max_new_tokens: int | None = None,
        stop_tokens: Iterable[int] | None = None,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Request:
        """Queues a request of token ids; returns its Request. Greedy by default.

        max_new_tokens: default 128, or as many as the model's positions and the pool hold if these are fewer. stop_tokens:
        default those of the model. Raises ValueError, and queues nothing, for an empty prompt, token ids outside the
        vocabulary, wrong sampling options, and requests that the pool or the model's positions could never hold.
        """
        prompt = check_prompt(prompt, self.vocabulary)
        check_sampling(temperature, top_k, top_p, seed)
        stop = stop_set(stop_tokens, self.stop_tokens)
        if max_new_tokens is None:
            max_new_tokens = default_new_tokens(len(prompt), self.max_positions, self.pages * self.block)
        check_positive("max_new_tokens", max_new_tokens)
        needed = len(prompt) + max_new_tokens
        if self.max_positions and needed > self.max_positions:
            raise ValueError(f"{needed} tokens are more than the {self.max_positions} positions that the model was trained for")
        if -(-needed // self.block) > self.pages:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and {max_new_tokens} new ones need {-(-needed // self.block)} "
                f"pages of {self.block}; the pool has {self.pages}. Make it larger, or ask for fewer tokens"
            )
        request = Request(prompt, max_new_tokens, stop, temperature, top_k, top_p, seed)
        self.queue.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Ends a request now; its pages go back to the pool."""
        if request in self.queue:
            self.queue.remove(request)
        if request in self.running:
            self.running.remove(request)
            self._release(request)
        request.done = True

    def _release(self, request: Request) -> None:
        self.free_pages += request.pages[::-1]
        request.pages = []

    def _admit(self) -> None:
        """Starts waiting requests in their order while pages and places last. A request gets all its pages at once, so that
        it never has to wait for pages while it runs."""
        while self.queue and len(self.running) < self.max_requests:
            request = self.queue[0]
            count = -(-(len(request.prompt) + request.max_new_tokens) // self.block)
            if count > len(self.free_pages):
                return
            request.pages = [self.free_pages.pop() for _ in range(count)]
            self.running.append(self.queue.popleft())

    def _schedule(self) -> list[tuple[Request, int]]:
        """[(request, new tokens of it)] of this step: first who waits for one token, then prompts, in their order."""
        budget, chosen = self.step_tokens, []
        for request in sorted(self.running, key=lambda r: r.waiting > 1):
            count = min(request.waiting, budget)
            if count:
                chosen.append((request, count))
                budget -= count
        return chosen

    def step(self) -> list[tuple[Request, int]]:
        """Runs one call; returns [(request, new token)] of those that got one: none while a prompt is not through.

        A request whose token cannot be chosen (its logits are not finite) is done: the exception is its `error`, its pages go
        back, and the others go on. Raises RuntimeError where onnxruntime fails; every request is then as it was before,
        so that step() can be called again, or requests cancelled.
        """
        self._admit()
        chosen = self._schedule()
        if not chosen:
            return []
        feed = packed(
            [r.tokens[-1:] or r.prompt[r.cached : r.cached + count] for r, count in chosen],
            [r.cached for r, _ in chosen],
            [r.pages for r, _ in chosen],
            self.interface,
        )
        self._run(feed)
        tokens = self._next_tokens(chosen)
        # Nothing of what follows can fail: a request changes with all others or not at all.
        self.steps += 1
        self.processed_tokens += sum(count for _, count in chosen)
        results = []
        for (request, count), token in zip(chosen, tokens, strict=True):
            request.cached += count
            if isinstance(token, Exception):
                request.error, request.done = token, True
            elif token is not None:
                request.tokens.append(token)
                results.append((request, token))
                request.done = token in request.stop_tokens or len(request.tokens) == request.max_new_tokens
            if request.done:
                self.running.remove(request)
                self._release(request)
        return results

    def _next_tokens(self, chosen: list[tuple[Request, int]]) -> list[int | Exception | None]:
        """What _next_token says of each request. Logits are read where a request samples, or where something is wrong."""
        if self.interface is SERVING and not any(r.temperature for r, _ in chosen):
            tokens, logprob = (self.results.read(name, len(chosen)) for name in (NEXT_TOKENS, LOGPROB))
            if np.isfinite(logprob).all():
                return [None if r.waiting > count else int(token) for (r, count), token in zip(chosen, tokens, strict=True)]
        logits = self.results.read(LOGITS, len(chosen))
        return [self._next_token(*of, row) for of, row in zip(chosen, logits, strict=True)]

    @staticmethod
    def _next_token(request: Request, count: int, logits: np.ndarray) -> int | Exception | None:
        """A request's new token from a row of logits, None while its prompt is not through, or what it raised."""
        if request.waiting > count:
            return None
        try:
            random = np.random.default_rng((request.seed, len(request.tokens))) if request.temperature else None
            return int(choose(logits[None], request.temperature, request.top_k, request.top_p, random)[0])
        except Exception as error:  # whatever it is, it is this request's alone
            return error

    def bind_pools(self, binding: IOBinding) -> None:
        """Binds the pools as inputs and outputs of the graph."""
        for name, pool in zip(self.pool_names, self.pools, strict=True):
            binding.bind_ortvalue_input(name, pool)
            if self.in_place:
                binding.bind_ortvalue_output(SERVING.output_of(name), pool)
            else:
                binding.bind_output(SERVING.output_of(name))

    def _captured_step(self, captured: dict[tuple[int, int, int], _Captured], tokens: int, rows: int, table: int) -> _Captured:
        """That for steps of so many new tokens and requests with tables of so many pages, at least. Steps with pieces of
        prompts have room for all requests and a multiple of PIECE_TOKENS, so that there are few of them."""

        def rounded(number: int, most: int) -> int:
            return min(1 << (number - 1).bit_length(), most)

        if tokens > rows:
            rows, tokens = self.max_requests, min(-(-tokens // PIECE_TOKENS) * PIECE_TOKENS, self.step_tokens)
        else:
            rows = tokens = rounded(rows, self.max_requests)
        key = tokens, rows, rounded(table, self.pages)
        if key not in captured:
            captured[key] = _Captured(self, *key, 1 + len(captured))
        return captured[key]

    def _run(self, feed: dict[str, np.ndarray]) -> None:
        """A call, which leaves what it says of each request in `results`."""
        rows, tokens = len(feed[LAST]), len(feed[INPUT_IDS])
        if self.captured is not None and (self.interface is SERVING or tokens == rows):
            self._captured_step(self.captured, tokens, *feed[BLOCK_TABLE].shape).run(feed)
            return
        for name, array in feed.items():
            self.binding.bind_cpu_input(name, array)
        self.results.bind(self.binding, rows)
        with onnxruntime_errors(f"run {self.path}"):
            self.session.run_with_iobinding(self.binding, self.options)
        if not self.in_place:
            self.pools = self.binding.get_outputs()[: len(self.pools)]  # in the order in which they were bound first
            self.bind_pools(self.binding)

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not (self.running or self.queue)

    def run(self) -> None:
        """Steps until every request is done."""
        while not self.idle:
            self.step()
