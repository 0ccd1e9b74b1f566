"""A step's tokens chosen again, for requests with penalties, biases, constraints, or log-probabilities of the likeliest tokens.

Needs numpy. The graph is sampler.onnx of an exported folder (leanfleet.decoder_contract, SAMPLER), which a runtime runs. What a
request has said so far and its biases stay where the graph runs; the host sends settings, and what constraints allow next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import numpy as np

from leanfleet.decoder_contract import (
    ACTIVE,
    ALLOWED,
    BATCH,
    BIAS,
    COUNT_INDEX,
    LOGITS,
    PENALTIES,
    PLACES,
    SAMPLER,
    SEQ_LENS,
    TOKEN_COUNTS,
    TOP,
    TOP_LOGPROBS,
    TOP_TOKENS,
    VOCABULARY,
    WORDS,
    Adjustments,
    Sampling,
    settings,
    words_of,
)
from leanfleet.exchange import Array, Block, CudaStream, Host

IN_PROMPT = 1 << 30  # as SampleTokens has it
Call = Callable[[dict[str, Array], dict[str, Array]], None]  # queues a run of a graph with these inputs and outputs


class Adjusted(Protocol):
    """A request; `place`: of one with adjustments that runs. `allowed`: bits of the tokens that may come next, int32 [W], where
    a constraint says so."""

    prompt: list[int]
    tokens: list[int]
    sampling: Sampling
    adjustments: Adjustments
    place: int | None
    allowed: np.ndarray | None


class StepSampler:
    """The graph on the side of an exchange. call: runs it there. names: its inputs; of earlier versions ALLOWED is none. rows:
    requests of a step at most. results: where the tokens go, {name: address} with LOGITS, from which they are chosen. turns: as
    many steps may be under way."""

    def __init__(
        self,
        call: Call,
        names: Collection[str],
        exchange: Host | CudaStream,
        vocabulary: int,
        rows: int,
        results: dict[str, int],
        turns: int,
    ) -> None:
        self.call, self.exchange, self.rows = call, exchange, rows
        self.vocabulary, self.results, self.words = vocabulary, results, words_of(vocabulary)
        self.takes_constraints = ALLOWED in names
        sizes = {BATCH: rows, VOCABULARY: vocabulary, WORDS: self.words, PLACES: rows, str(TOP): TOP}
        kept = [t for t in SAMPLER.inputs if t.name in (TOKEN_COUNTS, BIAS, ALLOWED)]
        sent = [t for t in SAMPLER.inputs if t not in kept and t.name != LOGITS]
        kept = [t for t in kept if t.name in names]
        self.kept = Block(exchange, {t.name: (t.sizes(sizes), np.dtype(t.type)) for t in kept})
        self.inputs = Block(exchange, {t.name: (t.sizes(sizes), np.dtype(t.type)) for t in sent})
        top = [t for t in SAMPLER.outputs if t.name in (TOP_LOGPROBS, TOP_TOKENS)]
        self.top = Block(exchange, {t.name: (t.sizes(sizes), np.dtype(t.type)) for t in top})
        self.sent = [exchange.host_bytes(self.inputs.size) for _ in range(turns)]
        self.read = [exchange.host_bytes(self.top.size) for _ in range(turns)]
        self.free = list(range(rows))[::-1]
        if self.takes_constraints:
            self.masks = [exchange.host_bytes(4 * rows * self.words).view(np.int32).reshape(rows, -1) for _ in range(turns)]
            for place in self.free:
                self._put(ALLOWED, place, np.full(self.words, -1, np.int32))

    def begin(self, request: Adjusted) -> None:
        """Gives a request a place, with what it has said so far."""
        request.place = self.free.pop()
        counts = np.bincount(np.array(request.tokens, np.int64), minlength=self.vocabulary).astype(np.int32)
        counts[np.unique(np.array(request.prompt))] += IN_PROMPT
        self._put(TOKEN_COUNTS, request.place, counts)
        if request.adjustments.logit_bias:
            bias = np.zeros(self.vocabulary, np.float32)
            for token, value in request.adjustments.logit_bias:
                bias[token] = value
            self._put(BIAS, request.place, bias)

    def end(self, request: Adjusted) -> None:
        """Takes its place back. Places that nobody has add nothing to logits, and allow all tokens."""
        if request.place is None:
            return
        if request.allowed is not None:
            self._put(ALLOWED, request.place, np.full(self.words, -1, np.int32))
        if request.adjustments.logit_bias:
            self._put(BIAS, request.place, np.zeros(self.vocabulary, np.float32))
        self.free.append(request.place)
        request.place = None

    def _put(self, name: str, place: int, row: np.ndarray) -> None:
        address = self.kept.address + self.kept.places[name][0] + place * row.nbytes
        self.exchange.copy(address, row.ctypes.data, row.nbytes)

    def run(self, requests: Sequence[Adjusted], active: Sequence[bool], seq_lens: np.ndarray, turn: int) -> None:
        """Queues the choice of a step's tokens, and that its top log-probabilities are read."""
        rows = len(requests)
        others = iter(self.free)
        given: dict[str, Any] = dict(settings([r.sampling for r in requests]))
        given |= {name: [getattr(r.adjustments, name) for r in requests] for name in PENALTIES}
        given[COUNT_INDEX] = [r.place if r.place is not None else next(others) for r in requests]
        given |= {SEQ_LENS: seq_lens, ACTIVE: active}
        for name, values in given.items():
            self.inputs.view(self.sent[turn], name)[:rows] = values
        self.exchange.copy(self.inputs.address, self.sent[turn].ctypes.data, self.inputs.size)
        for row, request in enumerate(requests):
            if request.allowed is not None and request.place is not None:
                self.masks[turn][row] = request.allowed
                self._put(ALLOWED, request.place, self.masks[turn][row])

        def arrays(block: Block, count: int | None = rows) -> dict[str, Array]:
            return {
                name: (block.address + offset, shape if count is None else [count, *shape[1:]], dtype)
                for name, (offset, shape, dtype) in block.places.items()
            }

        logits: Array = self.results[LOGITS], [rows, self.vocabulary], np.dtype(np.float32)
        kept = arrays(self.kept, None)
        chosen = {t.name: (self.results[t.name], [rows], np.dtype(t.type)) for t in SAMPLER.outputs[:2]}
        self.call(
            {LOGITS: logits, **arrays(self.inputs), **kept},
            {**chosen, **arrays(self.top), f"{TOKEN_COUNTS}_out": kept[TOKEN_COUNTS]},
        )
        self.exchange.copy(self.read[turn].ctypes.data, self.top.address, self.top.size)

    def most_likely(self, turn: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, log-probabilities) of a step that is through, [rows,TOP]."""
        return self.top.view(self.read[turn], TOP_TOKENS), self.top.view(self.read[turn], TOP_LOGPROBS)
