"""Continuous batching in a process of its own, beside the one that reads requests and writes answers.

Python runs one thread of a process at a time: in one process a step waits while events are written, and they wait for the
step's Python. BatchProcess stands for the batch where the clients are, `main` runs it in the other process. Between them goes a
socket with pickled tuples. To the batch: (folder, options) once, then ("add", number, fields of a Request, recipe of its
constraint) and ("cancel", number). From it: Sizes once, or the exception that opening the folder raised, then a Result for each
step, and for orders that need no step.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from leanfleet import ranks
from leanfleet.batching import Admission, Batch, Over, Request
from leanfleet.decoder_contract import Adjustments

if TYPE_CHECKING:
    from leanfleet.grammar import Grammars

SENT = "prompt", "max_new_tokens", "stop_tokens", "sampling", "adjustments", "priority"  # of a Request
# Until the batch is open signals end the process as they do any other, and without a traceback.
COMMAND = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); from leanfleet import batch_process; "
    "batch_process.main(sys.argv[1])"
)
END_SECONDS = 10.0  # that the process has for its end; a step may still run
SWITCH = 2e-4  # seconds after which a thread that waits for the interpreter gets it; Python's own is 5e-3

Recipe = tuple[Any, str, frozenset[int]]  # of leanfleet.grammar.Grammar


@dataclass(frozen=True)
class Sizes:
    """Of a batch, as long as it lives. no_adjustments, no_constraints: why these are refused, if they are."""

    vocabulary: int
    stop_tokens: set[int]
    max_positions: int | None
    block: int
    paged: bool
    linear: bool
    pages: int
    max_requests: int
    state_rows: int
    pool_bytes: int
    state_bytes: int
    no_adjustments: str
    no_constraints: str


class State(NamedTuple):
    """Of a batch after a step."""

    counts: tuple[int, int] = (0, 0)  # as Batch has them
    pages_in_use: int = 0
    shared_tokens: int = 0
    guessed: int = 0
    guessed_right: int = 0
    preemptions: int = 0


class Result(NamedTuple):
    """What a step gave. Requests by their numbers. begun: with the tokens of the prompt that were in the pool. ended: with what
    ended them, None where all is well or they were cancelled. error: why the step failed; it ended all that the batch had."""

    state: State
    tokens: list[tuple[int, int, float, list[tuple[int, float]]]] = []  # (request, token, log-probability, likeliest)
    begun: list[tuple[int, int]] = []
    ended: list[tuple[int, Exception | None]] = []
    error: str = ""


class BatchProcess(Admission):
    """A ContinuousBatch that runs in a process of its own until close().

    One thread calls add, step and cancel; wake, over and the counts are for any. Steps go on whether step() is called or not.
    folder, options: of leanfleet.ort_ops.serving.open_batch, but for ranks. A constraint has to be one of leanfleet.grammar's,
    which is made again over there. Raises what opening the folder raises, ValueError for options that cannot be sent, and Over
    where the process ends meanwhile.

    Example:
        from leanfleet.batch_process import BatchProcess

        batch = BatchProcess("serving", pages=64, providers=["CPUExecutionProvider"], cuda_graph=False)
        request = batch.add([1, 2, 3], max_new_tokens=4, stop_tokens=())
        while not batch.idle:
            batch.step()
        print(len(request.tokens))                               # 4
        batch.close()
    """

    def __init__(self, folder: str | Path, **options: Any) -> None:
        if options.get("rank") is not None:
            raise ValueError("a rank runs its batch in its own process: leave rank out")
        try:
            opening = pickle.dumps((os.fspath(folder), options))
        except Exception as error:
            raise ValueError(f"the options cannot be sent to another process: {error}") from None
        self.state, self.closed, self._why = State(), False, ""
        self.failed = ""  # why a step failed, which step() has not raised yet
        self.arrivals, self.open = 0, dict[int, Request]()
        self.leaving: set[int] = set()  # cancelled ones that the process has not said to be gone
        self.woken, self.waker = socket.socketpair()
        self.waker.setblocking(False)
        self.process, self.connection = _start()
        try:
            self.sizes = sizes = self._opened(opening)
        except BaseException:  # an interrupt too
            self.process.kill()
            self.close()
            raise
        self.vocabulary, self.stop_tokens, self.max_positions = sizes.vocabulary, sizes.stop_tokens, sizes.max_positions
        self.block, self.paged, self.linear = sizes.block, sizes.paged, sizes.linear
        self.max_requests, self.state_rows = sizes.max_requests, sizes.state_rows
        self.pool_bytes, self.state_bytes = sizes.pool_bytes, sizes.state_bytes

    def _opened(self, opening: bytes) -> Sizes:
        """Waits until the batch is open."""
        try:
            self.connection.send_bytes(opening)
            said = self.connection.recv()
        except (EOFError, OSError):
            raise Over(self._how_it_ended()) from None
        if isinstance(said, Exception):
            raise said
        assert isinstance(said, Sizes)
        return said

    @property
    def over(self) -> str:
        """Why nothing can go on; empty while all is well, and after close()."""
        if not (self._why or self.closed) and self.process.poll() is not None:
            self._why = self._how_it_ended()
        return self._why

    @property
    def pages(self) -> int:
        return self.sizes.pages

    @property
    def pages_in_use(self) -> int:
        return self.state.pages_in_use

    @property
    def shared_tokens(self) -> int:
        return self.state.shared_tokens

    @property
    def guessed(self) -> int:
        return self.state.guessed

    @property
    def guessed_right(self) -> int:
        return self.state.guessed_right

    @property
    def preemptions(self) -> int:
        return self.state.preemptions

    @property
    def counts(self) -> tuple[int, int]:
        """Requests that run, and that wait for a place."""
        running = min(self.state.counts[0], len(self.open))
        return running, len(self.open) - running

    @property
    def idle(self) -> bool:
        return not (self.open or self.leaving or self.failed)

    def _take_in(self, request: Request) -> None:
        recipe = None
        if request.adjustments != Adjustments() or request.constraint is not None:
            if self.sizes.no_adjustments:
                raise ValueError(self.sizes.no_adjustments)
            recipe = self._recipe_of(request)
        self.arrivals += 1
        request.arrival = self.arrivals
        order = pickle.dumps(("add", request.arrival, {name: getattr(request, name) for name in SENT}, recipe))
        if self.closed or self.over:
            raise Over(self._why or "the batch is closed")
        self.open[request.arrival] = request
        self._send(order)

    def _recipe_of(self, request: Request) -> Recipe | None:
        """Of its constraint, if it has one. Raises ValueError where that cannot be served."""
        constraint = request.constraint
        if constraint is None:
            return None
        if self.sizes.no_constraints:
            raise ValueError(self.sizes.no_constraints)
        if (recipe := getattr(constraint, "recipe", None)) is None:
            raise ValueError("constraint: for a batch in another process it has to be one of leanfleet.grammar's")
        self.allowed_by(constraint)
        return recipe

    def _send(self, order: bytes) -> None:
        with suppress(OSError):  # of a process that has ended: step() says so
            self.connection.send_bytes(order)

    def cancel(self, request: Request) -> None:
        """Ends a request now; its pages go back to the pool."""
        request.done = True
        if self.open.pop(request.arrival, None) is not None and not (self.closed or self.over):
            self.leaving.add(request.arrival)
            self._send(pickle.dumps(("cancel", request.arrival)))

    def wake(self) -> None:
        with suppress(BlockingIOError, OSError):  # it is awake, or closed
            self.waker.send(b"\0")

    def step(self) -> list[tuple[Request, int]]:
        """[(request, new token)] of all steps that have ended since, or of the next one; nothing where wake() comes before.

        Raises RuntimeError where the runtime failed: the requests that it had have ended with that as their error. Raises Over
        where the process has ended, and after close().
        """
        if self.closed:
            raise Over("the batch is closed")
        new: list[tuple[Request, int]] = []
        try:
            ready = [] if self.failed else wait([self.connection, self.woken])
            if self.woken in ready:
                self.woken.recv(4096)
            while not self.failed and (self.connection in ready or self.connection.poll()):
                ready = []
                self._take(self.connection.recv(), new)
        except (EOFError, OSError):
            self._why = self._why or self._how_it_ended()
            if not new:
                raise Over(self._why) from None
        if self.failed and not new:  # tokens of steps before are given first
            failed, self.failed = self.failed, ""
            raise RuntimeError(failed)
        return new

    def _take(self, told: Result, new: list[tuple[Request, int]]) -> None:
        """Puts what was told where callers look for it, and the tokens into `new` too."""
        self.state = told.state
        for number, shared in told.begun:
            if number in self.open:
                self.open[number].shared = shared
        for number, token, logprob, likeliest in told.tokens:
            if (request := self.open.get(number)) is not None:  # it was not cancelled
                request.tokens.append(token)
                request.logprobs.append(logprob)
                if request.adjustments.top_logprobs:
                    request.top_logprobs.append(likeliest)
                new.append((request, token))
        for number, error in told.ended:
            self.leaving.discard(number)
            if (request := self.open.pop(number, None)) is not None:
                request.done, request.error = True, error
        self.failed = told.error

    def close(self) -> None:
        """Ends the process. No other thread may be in step()."""
        self.closed = True
        self.connection.close()
        self._how_it_ended()
        for end in (self.woken, self.waker):
            end.close()

    def _how_it_ended(self) -> str:
        """The process, which has some seconds for its end."""
        try:
            code = self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"the process that computes has ended ({how}); what it wrote says why"


def _start() -> tuple[subprocess.Popen[bytes], Connection]:
    """The process, and this end of what connects it."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            ranks.python("-c", COMMAND, str(theirs.fileno())),
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )
    return process, Connection(ours.detach())


class _Worker:
    """Runs a batch for a BatchProcess at the other end of the connection. One thread reads orders, another one makes
    constraints: neither may wait for a step, nor orders for a constraint."""

    def __init__(self, batch: Batch, connection: Connection) -> None:
        self.batch, self.connection = batch, connection
        self.changed = threading.Condition()
        self.orders: deque[Callable[[], None]] = deque()
        self.closed = False
        self.constrained: SimpleQueue[tuple[int, Request, Recipe]] = SimpleQueue()
        self.made: set[int] = set()  # requests whose constraint is being made, until they are cancelled
        self.open: dict[int, Request] = {}
        self.numbers: dict[int, int] = {}  # by id(request)
        self.told: dict[int, int] = {}  # tokens of a request, by number
        self.ended: list[tuple[int, Exception | None]] = []

    def read(self) -> None:
        """Takes orders until the other end closes."""
        try:
            with suppress(EOFError, OSError):
                while True:
                    self._receive(*self.connection.recv())
        finally:
            with self.changed:
                self.closed = True
                self.changed.notify()

    def _receive(self, name: str, number: int, given: dict[str, Any] | None = None, recipe: Recipe | None = None) -> None:
        if given is None:
            self._order(self._cancel, number)
        elif recipe is None:
            self._order(self._add, number, Request(**given))
        else:
            self.made.add(number)
            self.constrained.put((number, Request(**given), recipe))

    def _order(self, do: Callable[..., None], *arguments: Any) -> None:
        with self.changed:
            self.orders.append(partial(do, *arguments))
            self.changed.notify()

    def make_constraints(self) -> None:
        grammars: dict[frozenset[int], Grammars] = {}  # by stop tokens
        while True:
            number, request, (form, given, stop_tokens) = self.constrained.get()
            try:
                if stop_tokens not in grammars:
                    from leanfleet.grammar import Grammars

                    grammars[stop_tokens] = Grammars(self.batch.tokenizer, self.batch.vocabulary, stop_tokens)
                request.constraint = grammars[stop_tokens].made(form, given)
            except Exception as error:
                self._order(self._refuse, number, error)
            else:
                self._order(self._add, number, request)

    def _refuse(self, number: int, error: Exception) -> None:
        self.made.discard(number)
        self.ended.append((number, _sendable(error)))

    def _add(self, number: int, request: Request) -> None:
        if request.constraint is not None and number not in self.made:
            return  # it was cancelled meanwhile
        self.made.discard(number)
        try:
            self.batch._take_in(request)
        except Exception as error:
            self._refuse(number, error)
            return
        self.open[number], self.numbers[id(request)] = request, number

    def _cancel(self, number: int) -> None:
        self.made.discard(number)
        if (request := self._forget(number)) is not None:
            self.batch.cancel(request)
        self.ended.append((number, None))

    def _forget(self, number: int) -> Request | None:
        request = self.open.pop(number, None)
        if request is not None:
            self.numbers.pop(id(request))
            self.told.pop(number, None)
        return request

    def run(self) -> None:
        for work in (self.read, self.make_constraints):
            threading.Thread(target=work, name=f"leanfleet-{work.__name__}", daemon=True).start()
        while True:
            with self.changed:
                while not self.orders and self.batch.idle and not self.closed:
                    self.changed.wait()
                orders = [self.orders.popleft() for _ in range(len(self.orders))]
            if self.closed:
                return
            for do in orders:
                do()
            try:
                new = [] if self.batch.idle else self.batch.step()
            except Exception as error:
                self._fail(error)
                continue
            self._tell(new)

    def _fail(self, error: Exception) -> None:
        """All requests end with an error."""
        for number, request in list(self.open.items()):
            self._forget(number)
            self.batch.cancel(request)
            self.ended.append((number, _sendable(error)))
        ended, self.ended = self.ended, []
        self.connection.send(Result(self._state(), ended=ended, error=str(error) or type(error).__name__))

    def _tell(self, new: list[tuple[Request, int]]) -> None:
        tokens, begun = [], []
        for request, token in new:
            if (number := self.numbers.get(id(request))) is None:  # of a request that an order has cancelled since
                continue
            at = self.told.get(number, 0)
            if not at:
                begun.append((number, request.shared or 0))
            self.told[number] = at + 1
            likeliest = request.top_logprobs[at] if request.top_logprobs else []
            tokens.append((number, token, request.logprobs[at], likeliest))
        for number, request in list(self.open.items()):
            if request.done:
                self._forget(number)
                self.ended.append((number, _sendable(request.error)))
        ended, self.ended = self.ended, []
        self.connection.send(Result(self._state(), tokens, begun, ended))

    def _state(self) -> State:
        return State(*(getattr(self.batch, name) for name in State._fields))


def _sendable(error: Exception | None) -> Exception | None:
    """The error, or where it does not come through pickle, one of the same text."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def _sizes(batch: Batch) -> Sizes:
    called = "no_adjustments", "no_constraints"
    found = {f.name: getattr(batch, f.name) for f in fields(Sizes)}
    return Sizes(**{name: value() if name in called else value for name, value in found.items()})


def _end_with(connection: Connection, opened: threading.Event) -> None:
    """Ends this process where the other one does before the batch is open: nothing else comes until then."""
    while not opened.is_set():
        if wait([connection], 0.2) and not opened.is_set():
            os._exit(1)


def main(number: str) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # steps have the cores
    sys.setswitchinterval(SWITCH)
    connection = Connection(int(number))
    with suppress(EOFError, OSError):  # the other process has ended
        folder, options = connection.recv()
        opened = threading.Event()
        threading.Thread(target=_end_with, args=(connection, opened), daemon=True).start()
        try:
            from leanfleet.ort_ops.serving import open_batch

            batch = open_batch(folder, ahead=True, **options)
        except Exception as error:
            error.add_note(f"In the process of the batch:\n{traceback.format_exc()}")
            connection.send(_sendable(error))
            return
        # A terminal's or a service's signals reach all processes: so that answers can be finished, this one ends when the other
        # end of its socket closes.
        for ignored in (signal.SIGINT, signal.SIGTERM):
            signal.signal(ignored, signal.SIG_IGN)
        sizes = _sizes(batch)
        opened.set()
        connection.send(sizes)
        _Worker(batch, connection).run()
