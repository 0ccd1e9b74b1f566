"""Continuous batching, the same for every runtime: requests, their pages and states, and what each step has. Needs numpy.

Requests of unequal length join and leave between steps. Their keys and values live in pages of one pool; a step gives every
running request its next token and fills what is left of the step's tokens with pieces of waiting prompts, all in one call.
Pages are taken as tokens come (Kwon et al. 2023, PagedAttention). Requests that begin with the same tokens share the pages of
these. Where no page is left, the last request to come gives its own back and is computed again later. Layers of linear
attention have a state in place of keys and values: a row of a pool for each running request, which begins as a copy of a row of
zeros, or of a snapshot of what a request with the same beginning had there.

A runtime brings the graph and its pools: leanfleet.ort_ops.serving, leanfleet.trt_plugins.serving.
"""

import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from leanfleet import sampling as choice
from leanfleet.decoder_contract import (
    ALLOWED,
    BATCH,
    LOGITS,
    LOGPROB,
    NEXT_TOKENS,
    POSITIONS,
    SAMPLER_FILE,
    SEQ_LENS,
    SERVING,
    VOCABULARY,
    WANTED,
    Adjustments,
    Facts,
    Sampling,
    is_state,
    packed,
    serving_interface,
    words_of,
)
from leanfleet.driver import Device
from leanfleet.exchange import Block, CudaStream, Host
from leanfleet.generation import FolderTokenizer, check_positive, check_prompt, default_new_tokens, stop_set
from leanfleet.lookup import Lookup
from leanfleet.pages import ROOT, PagePool, Snapshots, borders
from leanfleet.sampling import check_adjustments, check_sampling
from leanfleet.step_sampler import Call, StepSampler

TURNS = 2  # a step runs while the next one is made
EMPTY, NO_STATE = 0, -1  # the row of states that stays 0; what is no row
PATIENCE = 1000  # steps of waiting that make up for a priority that is less by one
PIECE_TOKENS = 256  # steps with pieces of prompts have a multiple of it where that matters: step_room, captured steps


class Constraint(Protocol):
    """What a request may say, token by token: an object of its own for each request. leanfleet.grammar has some."""

    def allowed(self) -> bytes | np.ndarray:
        """Which tokens may come next: a bit each, as 32-bit words; bit i mod 32 of word i / 32 is 1 where token i may."""

    def accept(self, token: int) -> None:
        """Takes the token that came."""


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
    step: int = 0  # of the batch when it came
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)  # (token, log-probability), the likeliest first
    constraint: Constraint | None = None
    allowed: np.ndarray | None = None  # what it allows next
    place: int | None = None  # in the sampler, of one with adjustments or a constraint that runs
    shared: int | None = None
    cached: int = 0
    coming: int = 0  # tokens of steps that run, which nobody has read yet
    pages: list[int] = field(default_factory=list)
    state: int = NO_STATE  # its row in the pools of states while it runs
    spare: int = NO_STATE  # another one, which has the state behind `held` tokens while a guess is tried
    held: int = 0
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
    def adjusted(self) -> bool:
        """Whether its tokens are the sampler's to choose."""
        return self.constraint is not None or self.adjustments != Adjustments()

    @property
    def order(self) -> tuple[int, int]:
        """Who comes first, has the least. A greater priority counts as having come earlier, so that nobody waits for ever."""
        return self.step - self.priority * PATIENCE, self.arrival

    def text(self, start: int, end: int) -> list[int]:
        """Tokens of prompt and answer."""
        size = len(self.prompt)
        return self.prompt[start:end] + self.tokens[max(start - size, 0) : max(end - size, 0)]

    def next_tokens(self, count: int, row: int | None) -> list[int]:
        """The first of those that wait, as decoder_contract.packed takes them. row: that of a token that nobody has read."""
        return [-1 - row] if row is not None else self.text(self.cached, self.cached + count)


@dataclass
class Launched:
    """A step that runs: what it gives each request, where its results will be, and how to know that they are there."""

    chosen: list[tuple[Request, bool, list[int]]]  # requests, whether they get a token, and what was guessed to follow
    results: np.ndarray
    mark: int
    top: tuple[np.ndarray, np.ndarray] | None  # the most likely tokens of each row


def step_room(step_tokens: int, answers: int, prompts: int, crowded: bool) -> int:
    """New tokens that a GPU's step takes at most, guesses apart. answers: tokens of answers in the step. prompts: tokens of
    prompts that are still to be read. crowded: at least half of the places have an answer, and requests wait for a place.

    A step of answers alone waits for weights to be read, so that a piece of a prompt comes with it at little cost, while
    answers wait for a long one (Agrawal et al. 2024, Sarathi-Serve, section 4). In a crowd, where a place that becomes free is
    taken at once, the step has room for PIECE_TOKENS of prompts beside the answers, rounded up to a multiple of them all. Else
    half of the prompts comes at once, and four times PIECE_TOKENS at least, or all where less than PIECE_TOKENS would be left:
    requests that come together soon run together. Without answers the room is step_tokens.

    Example:
        from leanfleet.batching import step_room

        print(step_room(2048, 64, 5000, True), step_room(2048, 64, 900, False))  # 512 1280
    """
    if not answers:
        return step_tokens
    piece = PIECE_TOKENS if crowded else max(4 * PIECE_TOKENS, prompts // 2)
    if not crowded and prompts - piece < PIECE_TOKENS:
        piece = max(piece, prompts)
    return min(step_tokens, -(-(answers + piece) // PIECE_TOKENS) * PIECE_TOKENS)


class Over(RuntimeError):
    """A batch cannot go on: the process that it runs in has ended."""


class Leader(Protocol):
    """Of rank 0 of several, whose batches make the same calls: leanfleet.together. over: why they cannot go on, else empty."""

    over: str

    def tell(self, call: str, **arguments: Any) -> None:
        """Tells the others a call that this rank is about to make."""

    def fail(self, error: BaseException) -> None:
        """Tells them that a call has failed here."""

    def check(self) -> None:
        """Raises where an exchange among the ranks has failed."""


@dataclass(frozen=True)
class Limits:
    """Sizes of a batch, and what it may share and guess: see leanfleet.ort_ops.serving.ContinuousBatch. Raises ValueError."""

    pages: int
    max_requests: int = 16
    step_tokens: int = 256
    share: bool = True
    snapshots: int | None = None
    speculate: int = 0

    def __post_init__(self) -> None:
        check_positive("pages", self.pages)
        if self.max_requests < 1:
            raise ValueError(f"max_requests is how many requests run at once, at least one; found {self.max_requests}")
        if self.step_tokens < self.max_requests:
            raise ValueError(
                f"step_tokens {self.step_tokens} is less than max_requests {self.max_requests}: every running request takes "
                "one token a step"
            )
        if self.snapshots is not None and not (isinstance(self.snapshots, int) and self.snapshots >= 0):
            raise ValueError(f"snapshots is {self.snapshots!r}; expected how many states are kept at most, 0 or more")
        if not (isinstance(self.speculate, int) and self.speculate >= 0):
            raise ValueError(f"speculate is {self.speculate!r}; expected how many tokens are guessed at most, 0 or more")

    def kept(self, linear: bool) -> int:
        """How many states are kept for others, in a decoder that has some or not."""
        return (self.max_requests if self.snapshots is None else self.snapshots) if self.share and linear else 0

    @property
    def own_rows(self) -> int:
        """Rows of the pools of states that running requests have: one each, and another one where tokens are guessed."""
        return self.max_requests * (2 if self.speculate else 1)

    def state_rows(self, linear: bool) -> int:
        """Rows of the pools of states: one of zeros, those of requests, and the kept ones."""
        return 1 + self.own_rows + self.kept(linear)

    @property
    def result_rows(self) -> int:
        """Rows of a step's results at most."""
        return min(self.max_requests * (1 + self.speculate), self.step_tokens)


class Admission(ABC):
    """Takes requests, after checks that need no more than the model's sizes and the pool's."""

    vocabulary: int
    stop_tokens: set[int]
    max_positions: int | None
    block: int  # tokens of a page
    paged: bool  # whether a layer has pages

    @property
    @abstractmethod
    def pages(self) -> int:
        """Of the pool."""

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
        constraint: Constraint | None = None,
    ) -> Request:
        """Queues a request of token ids; returns its Request. Greedy by default, else drawn as the operator SampleTokens does.

        max_new_tokens: default 128, or as many as the model's positions and the pool hold if these are fewer. stop_tokens:
        default those of the model. Penalties and biases: as SampleTokens has them; a step in which a request has one runs
        sampler.onnx too. top_logprobs: how many most likely tokens Request.top_logprobs has for each token, up to 20.
        priority: requests of a greater one begin first, and keep their pages longer; one that is greater by 1 counts as 1,000
        steps (PATIENCE) of waiting, so that requests which come all the time do not keep others from their turn for ever.
        constraint: an object that says before each token which ones may come (Constraint; leanfleet.grammar makes them of JSON
        schemas and the like), on one process. The host has to read a token before it can say what may follow: steps with such
        a request are waited for.
        Raises ValueError, and queues nothing, for an empty prompt, token ids outside the vocabulary, wrong options, and
        requests that the pool or the model's positions could never hold.
        """
        prompt = check_prompt(prompt, self.vocabulary)
        sampling = check_sampling(temperature, top_k, top_p, seed, min_p)
        adjustments = check_adjustments(
            self.vocabulary, repetition_penalty, presence_penalty, frequency_penalty, logit_bias, top_logprobs
        )
        stop = stop_set(stop_tokens, self.stop_tokens)
        if max_new_tokens is None:
            max_new_tokens = default_new_tokens(len(prompt), self.max_positions, self.capacity)
        check_positive("max_new_tokens", max_new_tokens)
        self.check_room(len(prompt), max_new_tokens)
        if not isinstance(priority, int):
            raise ValueError(f"priority is {priority!r}; expected a whole number")
        request = Request(prompt, int(max_new_tokens), stop, sampling, adjustments, priority, constraint=constraint)
        self._take_in(request)
        return request

    def allowed_by(self, constraint: Constraint) -> np.ndarray:
        """What a constraint allows next: int32 [W]. Raises ValueError where that is none, or nothing is allowed."""
        given, words = constraint.allowed(), words_of(self.vocabulary)
        found = np.frombuffer(given, np.int32) if isinstance(given, bytes) else np.asarray(given)
        if found.dtype.kind not in "iu" or found.dtype.itemsize != 4 or found.shape != (words,):
            raise ValueError(
                f"constraint: allowed() gives {found.dtype} {list(found.shape)}; expected int32 [{words}], a bit for each of "
                f"{self.vocabulary} tokens"
            )
        bits = found.view(np.int32)
        beyond = (1 << self.vocabulary % 32) - 1 if self.vocabulary % 32 else -1
        if not (bits[:-1].any() or int(bits[-1]) & beyond):
            raise ValueError("constraint: it allows no token; let it allow a stop token where nothing else may follow")
        return bits

    def wake(self) -> None:
        """For another thread, which has something to hand in: a step() that waits returns."""
        return None

    def close(self) -> None:
        """Ends the batch's process, if it has one of its own."""
        return None

    @abstractmethod
    def _take_in(self, request: Request) -> None:
        """Queues a request that has passed the checks above. Raises ValueError for what only the graphs say."""

    def check_room(self, prompt: int, max_new_tokens: int) -> None:
        """Raises ValueError for a request of more tokens than the model's positions or the pool could ever hold."""
        needed = prompt + max_new_tokens
        if self.max_positions and needed > self.max_positions:
            raise ValueError(f"{needed} tokens are more than the {self.max_positions} positions that the model was trained for")
        if self.capacity is not None and needed > self.capacity:
            raise ValueError(
                f"a prompt of {prompt} tokens and {max_new_tokens} new ones need {-(-needed // self.block)} "
                f"pages of {self.block}; the pool has {self.pages}. Make it larger, or ask for fewer tokens"
            )

    @property
    def capacity(self) -> int | None:
        """How many tokens of one request the pages hold; None where no layer has pages."""
        return self.pages * self.block if self.paged else None


class Batch(FolderTokenizer, Admission):
    """The batch of a runtime, which brings what is abstract here, and pools of the sizes that `limits` says.

    path: the file of the graph. caches: names of the graph's inputs that are pools. exchange: what a step's inputs and results
    go through; device: where the graph and its pools are.
    """

    def __init__(
        self, path: Path, facts: Facts, caches: Sequence[str], limits: Limits, exchange: Host | CudaStream, device: Device
    ) -> None:
        self.path, self.folder, self.exchange, self.device = path, path.parent, exchange, device
        self.interface = serving_interface(facts)
        self.block, self.vocabulary, self.stop_tokens = facts["block"], facts["vocabulary"], set(facts["stop_tokens"])
        self.max_positions, self.max_requests, self.step_tokens = (
            facts["max_positions"],
            limits.max_requests,
            limits.step_tokens,
        )
        self.pool_names = list(caches)
        self.paged = any(not is_state(name) for name in caches)  # linear layers alone need no pages
        self.linear = any(is_state(name) for name in caches)
        self.speculate, self.result_rows = limits.speculate, limits.result_rows
        self._check_speculation(limits.speculate)
        # Tokens of an answer in a step, in front of a guess and without one. A state that has seen a wrong guess is given up:
        # what was right of it is read again with the next token, and at most so much that a guess may follow it.
        self.longest_read = 1 + self.speculate if self.linear else 1
        self.longest_answer = self.longest_read + self.speculate if self.linear else 1
        self.paced = device.kind != "cpu"  # whether answers in the making keep pieces of prompts short: step_room
        self.full = False  # whether a request waits for a place, or for pages
        kept = limits.kept(self.linear)
        self.pool = PagePool(limits.pages, self.block, limits.share and (not self.linear or kept > 0))
        self.queue: deque[Request] = deque()  # in their order
        self.running: list[Request] = []
        self.steps = self.processed_tokens = self.shared_tokens = self.preemptions = self.turn = self.arrivals = 0
        self.free_states = list(range(EMPTY + 1, 1 + limits.own_rows))[::-1]
        self.state_rows = limits.state_rows(self.linear)
        self.snapshots = Snapshots(range(1 + limits.own_rows, self.state_rows))
        self.late: list[tuple[Request, int]] = []  # tokens of a step that was read when the next one failed
        self.launched: Launched | None = None  # the step that runs, where tokens are read a step behind
        self.earlier = self.max_requests if self.interface.chooses else 0  # tokens of a step that the next one may need
        self.guessed = self.guessed_right = 0
        self._place_results()
        self.sampler: StepSampler | None = None  # loaded for the first request that needs it
        self.leader: Leader | None = None
        self.said = 0  # a checksum of all tokens so far, by which ranks see that they have the same

    @abstractmethod
    def _run(self, feed: dict[str, np.ndarray], logits: bool = False) -> None:
        """Queues a call, which leaves what it says of each request in `results`, on wish its logits too."""

    @abstractmethod
    def _places(self) -> Iterator[tuple[str, int, int, int]]:
        """(name, address, rows, bytes of a row) of each pool, as it is now."""

    @abstractmethod
    def _sampler_graph(self, path: Path) -> tuple[Call, list[str]]:
        """(what runs sampler.onnx on the exchange's side, names of its inputs)"""

    @property
    @abstractmethod
    def a_step_behind(self) -> bool:
        """Whether a step's tokens are read when the next one is on its way."""

    @cached_property
    def _copier(self) -> Host | CudaStream:
        """What copies rows of pools."""
        return self.exchange if self.exchange.device == self.device.kind else CudaStream(self.device.index)

    def _check_speculation(self, speculate: int) -> None:
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

    def _take_in(self, request: Request) -> None:
        if request.adjustments != Adjustments() or request.constraint is not None:
            self._load_sampler()
        if request.constraint is not None:
            request.allowed = self._first_allowed(request.constraint)
        request.arrival, request.step = self.arrivals + 1, self.steps
        told = {name: getattr(request, name) for name in ("prompt", "max_new_tokens", "priority")}
        choices = asdict(request.sampling) | asdict(request.adjustments)
        with self._told("add", **told, stop_tokens=sorted(request.stop_tokens), **choices):
            self.arrivals += 1
            self._enqueue(request)

    @contextmanager
    def _told(self, call: str, **arguments: Any) -> Iterator[None]:
        """A call that the other ranks make too, if there are any. Where it fails here none goes on."""
        if self.leader is None:
            yield
            return
        self.leader.tell(call, **arguments)
        try:
            yield
        except BaseException as error:
            self.leader.fail(error)
            raise

    @property
    def over(self) -> str:
        """Why the ranks' batches cannot go on; empty while they can, and for one process."""
        return "" if self.leader is None else self.leader.over

    def no_adjustments(self) -> str:
        """Why penalties, logit_bias, top_logprobs and constraints are refused; empty where they are not."""
        if self.interface.chooses and self.path.with_name(SAMPLER_FILE).exists():
            return ""
        return (
            f"{self.path.parent} has no {SAMPLER_FILE}, which penalties, logit_bias, top_logprobs and constraints need: "
            f"export it again with {SERVING.writer}"
        )

    def no_constraints(self) -> str:
        """Why constraints are refused; empty where they are not."""
        if why := self.no_adjustments():
            return why
        path = self.path.with_name(SAMPLER_FILE)
        if ALLOWED in self._sampler_call[1]:
            return ""
        return f"{path} is of an earlier version, which had no constraints: export it again with {SERVING.writer}"

    @cached_property
    def _sampler_call(self) -> tuple[Call, list[str]]:
        """What runs the sampler's graph, and its inputs: without the memory that running it takes."""
        return self._sampler_graph(self.path.with_name(SAMPLER_FILE))

    def _load_sampler(self) -> None:
        if self.sampler is not None:
            return
        if why := self.no_adjustments():
            raise ValueError(why)
        addresses = {name: self.results.address + offset for name, (offset, *_) in self.results.places.items()}
        call, names = self._sampler_call
        self.sampler = StepSampler(call, names, self.exchange, self.vocabulary, self.max_requests, addresses, TURNS)

    def _first_allowed(self, constraint: Constraint) -> np.ndarray:
        """allowed_by of a new request's constraint. Raises ValueError where it is none, or cannot be served."""
        if not (hasattr(constraint, "allowed") and hasattr(constraint, "accept")):
            raise ValueError(
                f"constraint is {str(constraint)[:60]!r}; expected an object with allowed() and accept(): leanfleet.grammar "
                "makes them of JSON schemas, regular expressions and the like"
            )
        if any(r.constraint is constraint for r in (*self.queue, *self.running)):
            raise ValueError("constraint: it is another request's, which has not ended: give each request one of its own")
        if self.leader is not None:
            raise ValueError("constraint: of several ranks only the first would know it; serve the model from one process")
        if why := self.no_constraints():
            raise ValueError(why)
        return self.allowed_by(constraint)

    def _enqueue(self, request: Request) -> None:
        if self.snapshots.count:
            request.borders = borders(request.prompt + request.tokens, self.block)
        place = next((i for i, other in enumerate(self.queue) if other.order > request.order), len(self.queue))
        self.queue.insert(place, request)

    def cancel(self, request: Request) -> None:
        """Ends a request now; its pages go back to the pool."""
        with nullcontext() if request.done or self.over else self._told("cancel", arrival=request.arrival):
            if request in self.queue:
                self.queue.remove(request)
            if request in self.running:
                self.running.remove(request)
            self._release(request)
            request.done = True

    def _release(self, request: Request) -> None:
        self.pool.release(request.pages)
        request.pages, request.chain, request.marks = [], [], {}
        self.free_states += [row for row in (request.spare, request.state) if row != NO_STATE]
        request.state = request.spare = NO_STATE
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
        if self.speculate:
            request.spare = self.free_states.pop()
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
        for name, address, _, size in self._places():
            if is_state(name):
                self._copier.copy(address + target * size, address + source * size, size)
        if self._copier is not self.exchange:
            self._copier.wait(self._copier.mark())

    def _admit(self) -> None:
        """Starts waiting requests in their order while places last, and pages for their texts. One whose next page another
        request is about to fill waits for it."""
        self.full = False
        for request in list(self.queue):
            self.full = len(self.running) == self.max_requests
            if self.full or request.coming:
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
                self.full = True
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
                if self.sampler is not None and request.adjusted:
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
        """[(request, new tokens of it)] of this step: first answers, then prompts, in their order. Takes the pages that these
        need."""
        budget, chosen = self.step_tokens, {}
        if self.paced:
            answers = [r.waiting for r in self.running if r.waiting <= self.longest_answer]
            prompts = sum(r.waiting for r in self.running) - sum(answers)
            budget = step_room(budget, sum(answers), prompts, self.full and 2 * len(answers) >= self.max_requests)
        for request in sorted(self.running, key=lambda r: (r.waiting > self.longest_answer, r.order)):
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
            if request.lookup is not None and not (adjusted or request.marks) and count == request.waiting <= self.longest_read:
                most = min(request.trust, room, request.max_new_tokens - len(request.tokens) - 1)
                guess = request.lookup.guess(most) if most > 0 else []
            while self.paged and len(request.pages) * self.block < request.cached + count + len(guess):
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
        back, and the others go on. Raises RuntimeError where the runtime fails; every request is then as it was before,
        so that step() can be called again, or requests cancelled. Those of the failed call whose states it may have changed
        are computed again. Of several ranks (leanfleet.together) none goes on after a failure.
        """
        with self._told("step", said=self.said):
            given = self._step()
        self.said = zlib.crc32(np.array([(r.arrival, token) for r, token in given], np.int64).tobytes(), self.said)
        return given

    def _read_running(self) -> None:
        """Waits for the step that runs; its tokens are given by the next one."""
        assert self.launched is not None
        behind, self.launched = self.launched, None
        self.late += self._finish(behind)

    def _step(self) -> list[tuple[Request, int]]:
        if self.launched is not None and any(r.constraint is not None for r, given, _ in self.launched.chosen if given):
            self._read_running()  # what may follow depends on it
        self._admit()
        chosen = self._schedule()
        try:
            launched = self._launch(chosen) if chosen else None
        except BaseException:  # an interrupt too: the call may have changed states
            if self.launched is not None:  # the next call cannot go on from its tokens on the device
                self._read_running()
            for request in [r for r, _ in chosen if self.linear and r in self.running]:
                self._preempt(request)
            raise
        if self.a_step_behind and self.interface.chooses and not self.speculate:
            launched, self.launched = self.launched, launched
        late, self.late = self.late, []
        return late + (self._finish(launched) if launched else [])

    def _launch(self, chosen: list[tuple[Request, int]]) -> Launched:
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
        for (request, _), guess in zip(chosen, guesses, strict=True):
            if guess and self.linear:
                self._copy_state(request.state, request.spare)
                request.held = request.cached
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
        launched = Launched(shares, results, self.exchange.mark(), top)
        self.steps += 1
        self.processed_tokens += len(feed[POSITIONS])
        for (request, count), given, guess in zip(chosen, gets, guesses, strict=True):
            request.cached += count + len(guess)
            request.coming += given
            request.marks.pop(request.cached, None)
            if not (guess and self.linear):  # else these tokens may be read again, and nobody writes to a known page
                self._keep_full_pages(request)
        return launched

    def _finish(self, launched: Launched) -> list[tuple[Request, int]]:
        """Waits for a step, and gives its tokens to the requests."""
        self.exchange.wait(launched.mark)
        if self.leader is not None:
            self.leader.check()  # a replayed graph returns, with no error, where a rank is gone
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
        none of it: the next step writes over them. States are those in front of the guess again."""
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
            if request.constraint is not None and not request.done:
                try:
                    request.constraint.accept(token)
                    request.allowed = self.allowed_by(request.constraint)
                except Exception as error:  # its own: nobody else's request ends for it
                    request.error, request.done = error, True
            if request.done or guess[right : right + 1] != [token]:
                break
        if guess:
            if right < len(guess) and self.linear:
                request.state, request.spare, request.cached = request.spare, request.state, request.held
            else:
                request.cached -= len(guess) - right
            needed = -(-request.cached // self.block)
            self.pool.release(request.pages[needed:])
            del request.pages[needed:]
            request.trust = min(2 * request.trust, self.speculate) if right == len(guess) else right + 1
            self.guessed += len(guess)
            self.guessed_right += right

    def _chosen_tokens(self, launched: Launched) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, log-probabilities) of a step's rows. Graphs of older formats leave the choice to the host."""
        rows = sum(1 + len(guess) for *_, guess in launched.chosen)

        def result(name: str) -> np.ndarray:
            return self.results.view(launched.results, name)[:rows]

        if self.interface.chooses:
            return result(NEXT_TOKENS), result(LOGPROB)
        positions = np.array([r.cached for r, *_ in launched.chosen])
        return choice.sample(result(LOGITS), [r.sampling for r, *_ in launched.chosen], positions)

    @property
    def pages(self) -> int:
        """Of the pool."""
        return self.pool.count

    @property
    def pages_in_use(self) -> int:
        """Pages that requests have."""
        return self.pool.in_use

    @property
    def pool_bytes(self) -> int:
        """Of the pools of all layers."""
        return sum(rows * size for _, _, rows, size in self._places())

    @property
    def state_bytes(self) -> int:
        """Of the pools of states among them."""
        return sum(rows * size for name, _, rows, size in self._places() if is_state(name))

    @property
    def counts(self) -> tuple[int, int]:
        """Requests that run, and that wait for a place."""
        return len(self.running), len(self.queue)

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not (self.running or self.queue or self.launched)

    def run(self) -> None:
        """Steps until every request is done."""
        while not self.idle:
            self.step()
