"""Continuous batching in a process of its own, beside the one that reads requests and writes answers.

Python runs one thread of a process at a time: in one process a step waits while events are written, and they wait for the
step's Python. BatchProcess stands for the batch where the clients are, `main` runs it in the other process. Between them goes a
socket with pickled tuples: to the batch ("add", number, fields of a Request, recipe of its constraint) and ("cancel", number),
from it Sizes once and then a Told for each step.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from leanfleet.batching import Admission, Batch, Request
from leanfleet.decoder_contract import Adjustments

if TYPE_CHECKING:
    from leanfleet.grammar import Grammars

SENT = "prompt", "max_new_tokens", "stop_tokens", "sampling", "adjustments", "priority"  # of a Request
COMMAND = "import sys; from leanfleet import batch_process; batch_process.main(sys.argv[1])"
END_SECONDS = 10.0  # that the process has for its end; a step may still run


@dataclass(frozen=True)
class Sizes:
    """Of a batch, as long as it lives. no_adjustments: why penalties, biases and the like are refused, if they are."""

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


class State(NamedTuple):
    """Of a batch after a step."""

    counts: tuple[int, int] = (0, 0)  # as Batch has them
    pages_in_use: int = 0
    shared_tokens: int = 0
    guessed: int = 0
    guessed_right: int = 0
    preemptions: int = 0


class Told(NamedTuple):
    """What a step gave. Requests by their numbers. begun: with the tokens of the prompt that were in the pool. error: why the
    step failed, and with it all requests that the batch had."""

    state: State
    tokens: list[tuple[int, int, float, list[tuple[int, float]]]] = []  # (request, token, log-probability, likeliest)
    begun: list[tuple[int, int]] = []
    ended: list[tuple[int, Exception | None]] = []
    error: str = ""


class BatchProcess(Admission):
    """A ContinuousBatch that runs in a process of its own until close(), for one thread that calls add, step and cancel.

    folder, options: of leanfleet.ort_ops.serving.open_batch. Steps go on whether step() is called or not; it waits for the next
    one's tokens, or for wake(). A constraint has to be one of leanfleet.grammar's, which is made again over there. Raises what
    opening the folder raises, and RuntimeError where the process ends.

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
        self.state, self.closed, self._why = State(), False, ""
        self.arrivals, self.open = 0, dict[int, Request]()
        self.leaving: set[int] = set()  # cancelled ones that the process has not said to be gone
        self.woken, self.waker = socket.socketpair()
        self.waker.setblocking(False)
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", COMMAND, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self.connection = Connection(ours.detach())
        try:
            self.connection.send((os.fspath(folder), options))
            said = self.connection.recv()
        except (EOFError, OSError):
            raise RuntimeError(self._end()) from None
        if isinstance(said, Exception):
            self.close()
            raise said
        self.sizes: Sizes = said
        self.vocabulary, self.stop_tokens, self.max_positions = said.vocabulary, said.stop_tokens, said.max_positions
        self.block, self.paged, self.linear = said.block, said.paged, said.linear
        self.max_requests, self.state_rows = said.max_requests, said.state_rows
        self.pool_bytes, self.state_bytes = said.pool_bytes, said.state_bytes

    @property
    def over(self) -> str:
        """Why nothing can go on; empty while all is well, and behind close()."""
        if not (self._why or self.closed) and self.process.poll() is not None:
            self._why = self._end()
        return self._why

    @property
    def pages(self) -> int:
        return self.sizes.pages

    pages_in_use = property(lambda self: self.state.pages_in_use)
    shared_tokens = property(lambda self: self.state.shared_tokens)
    guessed = property(lambda self: self.state.guessed)
    guessed_right = property(lambda self: self.state.guessed_right)
    preemptions = property(lambda self: self.state.preemptions)

    @property
    def counts(self) -> tuple[int, int]:
        """Requests that run, and that wait for a place."""
        running = min(self.state.counts[0], len(self.open))
        return running, len(self.open) - running

    @property
    def idle(self) -> bool:
        return not (self.open or self.leaving)

    def _take_in(self, request: Request) -> None:
        if self.closed or self.over:
            raise RuntimeError(self._why or "the batch is closed")
        constraint = None
        if request.adjustments != Adjustments() or request.constraint is not None:
            if self.sizes.no_adjustments:
                raise ValueError(self.sizes.no_adjustments)
            if request.constraint is not None:
                constraint = getattr(request.constraint, "recipe", None)
                if constraint is None:
                    raise ValueError("constraint: for a batch in another process it has to be one of leanfleet.grammar's")
        self.arrivals += 1
        request.arrival = self.arrivals
        self.open[request.arrival] = request
        self._send("add", request.arrival, {name: getattr(request, name) for name in SENT}, constraint)

    def _send(self, *order: Any) -> None:
        with suppress(OSError):  # of a process that has ended: step() says so
            self.connection.send(order)

    def cancel(self, request: Request) -> None:
        """Ends a request now; its pages go back to the pool."""
        request.done = True
        if self.open.pop(request.arrival, None) is not None:
            self.leaving.add(request.arrival)
            self._send("cancel", request.arrival)

    def wake(self) -> None:
        with suppress(BlockingIOError, OSError):  # it is awake, or closed
            self.waker.send(b"\0")

    def step(self) -> list[tuple[Request, int]]:
        """[(request, new token)] of the next step that has ended; nothing where wake() was called before. Raises RuntimeError
        where the runtime failed, which all requests have ended with, and where the process has ended: `over` says why then."""
        try:
            ready = wait([self.connection, self.woken])
            if self.woken in ready:
                self.woken.recv(4096)
            if self.connection not in ready:
                return []
            told: Told = self.connection.recv()
        except (EOFError, OSError):
            self._why = self._why or self._end()
            raise RuntimeError(self._why) from None
        self.state = told.state
        new = []
        for number, shared in told.begun:
            if number in self.open:
                self.open[number].shared = shared
        for number, token, logprob, likeliest in told.tokens:
            request = self.open.get(number)  # none: it was cancelled
            if request is not None:
                request.tokens.append(token)
                request.logprobs.append(logprob)
                if request.adjustments.top_logprobs:
                    request.top_logprobs.append(likeliest)
                new.append((request, token))
        for number, error in told.ended:
            self.leaving.discard(number)
            request = self.open.pop(number, None)
            if request is not None:
                request.done, request.error = True, error
        if told.error:
            raise RuntimeError(told.error)
        return new

    def close(self) -> None:
        """Ends the process."""
        self.closed = True
        self._end()
        for end in (self.woken, self.waker):
            end.close()

    def _end(self) -> str:
        """Ends the process if it has not ended; how it did."""
        self.connection.close()
        try:
            code = self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"the process that computes has ended ({how}); what it wrote says why"


class _Worker:
    """Runs a batch for a BatchProcess at the other end of the connection, which is read in a thread of its own."""

    def __init__(self, batch: Batch, connection: Connection) -> None:
        self.batch, self.connection = batch, connection
        self.changed = threading.Condition()
        self.orders: deque[Callable[[], None]] = deque()
        self.closed = False
        self.open: dict[int, Request] = {}
        self.numbers: dict[int, int] = {}  # by id(request)
        self.told: dict[int, int] = {}  # tokens of a request, by number
        self.ended: list[tuple[int, Exception | None]] = []
        self.grammars: dict[frozenset[int], Grammars] = {}  # by stop tokens

    def read(self) -> None:
        """Orders, until the other end closes."""
        with suppress(EOFError, OSError):
            while True:
                name, number, *given = self.connection.recv()
                order = self._adding(number, *given) if name == "add" else partial(self._cancel, number)
                with self.changed:
                    self.orders.append(order)
                    self.changed.notify()
        with self.changed:
            self.closed = True
            self.changed.notify()

    def _adding(self, number: int, given: dict[str, Any], recipe: tuple[str, Any, frozenset[int]] | None) -> Callable[[], None]:
        """Makes a request's constraint here, in the thread that reads: it may take longer than a step."""
        request = Request(**given)
        try:
            request.constraint = None if recipe is None else self._made(*recipe)
        except Exception as error:
            return partial(self.ended.append, (number, _sendable(error)))
        return partial(self._add, number, request)

    def _made(self, form: str, given: Any, stop_tokens: frozenset[int]) -> Any:
        if stop_tokens not in self.grammars:
            from leanfleet.grammar import Grammars

            self.grammars[stop_tokens] = Grammars(self.batch.tokenizer, self.batch.vocabulary, stop_tokens)
        return getattr(self.grammars[stop_tokens], form)(given)

    def _add(self, number: int, request: Request) -> None:
        try:
            self.batch._take_in(request)
        except Exception as error:
            self.ended.append((number, _sendable(error)))
            return
        self.open[number], self.numbers[id(request)] = request, number

    def _cancel(self, number: int) -> None:
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
        threading.Thread(target=self.read, name="leanfleet-orders", daemon=True).start()
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
        for number in list(self.open):
            self._cancel(number)
        ended, self.ended = self.ended, []
        self.connection.send(Told(self._state(), ended=ended, error=str(error) or type(error).__name__))

    def _tell(self, new: list[tuple[Request, int]]) -> None:
        tokens, begun = [], []
        for request, token in new:
            number = self.numbers.get(id(request))
            if number is None:  # cancelled behind the step
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
        self.connection.send(Told(self._state(), tokens, begun, ended))

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
    names = [f.name for f in fields(Sizes) if f.name != "no_adjustments"]
    return Sizes(**{name: getattr(batch, name) for name in names}, no_adjustments=batch.no_adjustments())


def main(number: str) -> None:
    # A terminal's or a service's signals reach all processes; this one ends when the other end of its socket closes.
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    connection = Connection(int(number))
    folder, options = connection.recv()
    try:
        from leanfleet.ort_ops.serving import open_batch

        batch = open_batch(folder, **options)
    except Exception as error:
        connection.send(_sendable(error))
        return
    connection.send(_sizes(batch))
    with suppress(BrokenPipeError, ConnectionResetError):  # the other process has ended
        _Worker(batch, connection).run()
