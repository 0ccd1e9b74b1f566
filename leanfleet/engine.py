"""A thread that runs continuous batching for callers in other threads. Needs onnxruntime and numpy.

Callers hand in prompts of tokens and get pieces of text as they come. Everything that touches the batch happens in the thread,
between two steps.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from leanfleet.generation import StopStrings, TextStream, add_each

if TYPE_CHECKING:
    from leanfleet.batch_process import BatchProcess
    from leanfleet.batching import Batch, Request

RECOVERY = 10.0  # seconds after a failed call in which the engine counts as not working, where no call has succeeded since
STOP, LENGTH, CANCELLED, FAILED = "stop", "length", "cancelled", "error"  # how an answer ended


class Full(Exception):
    """As many requests wait as may wait."""


class Closed(Exception):
    """The engine takes no requests any more."""


class Piece(NamedTuple):
    """What a step gave an answer: text, and its tokens' log-probabilities. reason: how the answer ended, in its last piece;
    message: with FAILED, why.

    Example:
        from leanfleet.engine import Piece

        print(Piece("Hello", (15496,)).reason)                   # None
    """

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    likeliest: tuple[tuple[tuple[int, float], ...], ...] = ()  # (token, log-probability) of each token's likeliest ones
    reason: str | None = None
    message: str = ""


@dataclass(eq=False)
class Answer:
    """One request of a caller. on_pieces is called in the engine's thread."""

    prompt: list[int]
    options: dict[str, Any]  # of ContinuousBatch.add
    stop: StopStrings
    text: TextStream
    on_pieces: Callable[[Piece], None]
    accepted: Future[None] = field(default_factory=Future)
    request: Request | None = None
    reason: str | None = None
    told: int = 0  # tokens
    asked: float = field(default_factory=time.monotonic)

    def stops_at(self, token: int) -> bool:
        """Whether the token ends it, and is no part of its text."""
        return self.request is not None and token in self.request.stop_tokens


class Engine:
    """Runs `batch` in a thread of its own until close().

    tokenizer: decodes tokens, in that thread alone. max_waiting: how many requests may wait for a place in the batch.
    observe: called as observe(name, seconds) with "first_token", "next_token" and "request".

    Example:
        import queue
        from leanfleet.engine import Engine
        from leanfleet.ort_ops.generation import load_tokenizer
        from leanfleet.ort_ops.serving import ContinuousBatch

        batch = ContinuousBatch("serving", pages=64, providers=["CPUExecutionProvider"])
        engine, pieces = Engine(batch, load_tokenizer("serving")), queue.Queue()
        engine.submit([1, 2, 3], pieces.put, max_new_tokens=4)
        while (piece := pieces.get()).reason is None:
            print(piece.text, end="")
        engine.close()
        print(piece.reason in ("stop", "length"))                # True
    """

    def __init__(
        self,
        batch: Batch | BatchProcess,
        tokenizer: Any,
        max_waiting: int = 256,
        observe: Callable[[str, float], object] = lambda name, seconds: None,
    ) -> None:
        self.batch, self.tokenizer, self.max_waiting, self.observe = batch, tokenizer, max_waiting, observe
        self.failure: Exception | None = None  # of the newest call, while calls fail
        self.failed = self._deadline = 0.0
        self._orders: deque[Callable[[], None]] = deque()
        self._answers: dict[int, Answer] = {}  # by id(request)
        self._times: dict[int, float] = {}  # when the newest token came
        self._changed = threading.Condition()
        self._closing = False
        self._submitted = 0  # answers that the thread has not looked at yet
        self._thread = threading.Thread(target=self._run, name="leanfleet-engine", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Requests that have no place in the batch yet."""
        return self._submitted + self.batch.counts[1]

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return self.batch.counts[0]

    def submit(self, prompt: list[int], on_pieces: Callable[[Piece], None], stop: Sequence[str] = (), **options: Any) -> Answer:
        """Hands in a prompt of tokens. Returns at once; `accepted` of the Answer is done when the batch has taken it, or has
        the batch's ValueError. on_pieces: called with every Piece, in the engine's thread. stop: texts that end the answer and
        are no part of it. options: of ContinuousBatch.add. Raises Full and Closed."""
        answer = Answer(prompt, options, StopStrings(stop), TextStream(self.tokenizer), on_pieces)
        with self._changed:
            if self._closing:
                raise Closed
            if self.waiting >= self.max_waiting:
                raise Full
            self._submitted += 1
            self._orders.append(lambda: self._take(answer))
            self._changed.notify()
        self.batch.wake()
        return answer

    def cancel(self, answer: Answer) -> None:
        """Ends an answer; its pages go back. Nothing happens to one that has ended."""
        with self._changed:
            self._orders.append(lambda: self._end(answer, CANCELLED))
            self._changed.notify()
        self.batch.wake()

    def close(self, seconds: float = 0.0) -> None:
        """Takes no requests any more, goes on for so many seconds at most, and then ends those that are left."""
        with self._changed:
            self._closing, self._deadline = True, time.monotonic() + seconds
            self._changed.notify()
        self.batch.wake()
        self._thread.join()

    @property
    def works(self) -> bool:
        """Whether requests can be answered, as far as is known: the thread runs, and no call has failed lately."""
        failed_lately = self.failure is not None and time.monotonic() - self.failed < RECOVERY
        return self._thread.is_alive() and not failed_lately and not self.batch.over

    def _take(self, answer: Answer) -> None:
        with self._changed:
            self._submitted -= 1
        if answer.reason is not None or not answer.accepted.set_running_or_notify_cancel():  # it was cancelled before
            answer.accepted.cancel()
            answer.reason = CANCELLED
            return
        try:
            answer.request = self.batch.add(answer.prompt, **answer.options)
        except Exception as error:
            answer.reason = FAILED
            answer.accepted.set_exception(error)
        else:
            self._answers[id(answer.request)] = answer
            answer.accepted.set_result(None)

    def _end(self, answer: Answer, reason: str, piece: Piece | None = None) -> None:
        """The last piece of an answer, or one without text."""
        if answer.reason is not None:
            return
        answer.reason = reason
        if answer.request is not None:
            self.batch.cancel(answer.request)
            self._answers.pop(id(answer.request), None)
            self._times.pop(id(answer.request), None)
        self.observe("request", time.monotonic() - answer.asked)
        with suppress(Exception):  # whoever listened is gone
            answer.on_pieces(piece or Piece("", reason=reason))

    def _fail(self, error: Exception) -> None:
        """Ends all answers with an error."""
        self.failure, self.failed = error, time.monotonic()
        for answer in list(self._answers.values()):
            self._end(answer, FAILED, Piece("", reason=FAILED, message=str(error)))

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:  # nothing of this process may wait for a thread that is gone
            self._fail(error)
        with self._changed:
            self._closing = True
            orders, self._orders = self._orders, deque()
        for do in orders:
            do()
        for answer in list(self._answers.values()):
            self._end(answer, CANCELLED)

    def _turn(self) -> bool:
        """Does what was asked for and a step. Returns whether there is more to come."""
        with self._changed:
            while not self._orders and self.batch.idle and not self._closing:
                self._changed.wait()
            orders = [self._orders.popleft() for _ in range(len(self._orders))]
        for do in orders:
            do()
        if self._closing and (self.batch.idle or time.monotonic() > self._deadline):
            return False
        if not self.batch.idle:
            self._step()
        if self.batch.over:  # one of several ranks has failed, or the batch's own process has ended
            self._fail(RuntimeError(self.batch.over))
            return False
        return True

    def _step(self) -> None:
        try:
            new = self.batch.step()
        except Exception as error:  # of the runtime: nobody's tokens can be made
            self._fail(error)
            return
        if new:  # else it may only have been woken
            self.failure = None
        now = time.monotonic()
        for some in one_each(new):
            self._tell(some, now)
        for each in list(self._answers.values()):
            if each.request is not None and each.request.error is not None:
                self._end(each, FAILED, Piece("", reason=FAILED, message=str(each.request.error)))

    def _tell(self, new: Sequence[tuple[Request, int]], now: float) -> None:
        """Gives some answers a token each. An answer ends where its tokenizer, or who listens to it, raises."""
        told = [(answer, token) for request, token in new if (answer := self._answers.get(id(request)))]
        added = [(answer, token) for answer, token in told if not answer.stops_at(token)]
        texts: dict[int, str] = {}
        with suppress(Exception):  # of one of them: each is asked alone then
            found = add_each([answer.text for answer, _ in added], [token for _, token in added])
            texts = {id(answer): text for (answer, _), text in zip(added, found, strict=True)}
        for answer, token in told:
            before = self._times.get(id(answer.request))
            self.observe("first_token" if before is None else "next_token", now - (before or answer.asked))
            self._times[id(answer.request)] = now
            try:
                text = "" if answer.stops_at(token) else texts[id(answer)] if texts else answer.text.add(token)
                self._give(answer, token, text)
            except Exception as error:
                self._end(answer, FAILED, Piece("", reason=FAILED, message=str(error)))

    def _give(self, answer: Answer, token: int, text: str) -> None:
        """A token, and the text that it completes."""
        request = answer.request
        assert request is not None
        at, answer.told = answer.told, answer.told + 1  # a step may give several
        stopped = answer.stops_at(token)
        text = answer.stop.add(text)
        reason = STOP if stopped or answer.stop.found else LENGTH if answer.told == request.max_new_tokens else None
        if reason and not answer.stop.found:
            text += answer.stop.add(answer.text.finish()) + answer.stop.finish()
        likeliest = tuple(request.top_logprobs[at]) if request.top_logprobs else ()
        piece = Piece(text, (token,), (request.logprobs[at],), (likeliest,), reason)
        if reason:
            self._end(answer, reason, piece)
        else:
            answer.on_pieces(piece)


def one_each(new: Sequence[tuple[Request, int]]) -> Iterator[list[tuple[Request, int]]]:
    """Parts of a step's tokens in which each request has one: guesses that are right give it several."""
    part: list[tuple[Request, int]] = []
    seen: set[int] = set()
    for request, token in new:
        if id(request) in seen:
            yield part
            part, seen = [], set()
        part.append((request, token))
        seen.add(id(request))
    yield part
