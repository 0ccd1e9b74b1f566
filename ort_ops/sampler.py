"""A step's tokens chosen again, for requests with penalties, biases, or log-probabilities of the most likely tokens.

Needs onnxruntime and numpy. The graph is sampler.onnx of an exported folder (leanfleet.decoder_contract, SAMPLER). What a
request has said so far and its biases stay where the session runs; the host sends settings alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from leanfleet.decoder_contract import (
    ACTIVE,
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
    Adjustments,
    Sampling,
    settings,
)
from leanfleet.ort_ops.exchange import Block, CudaStream, Host
from leanfleet.ort_ops.sessions import CUDA, make_session, onnxruntime_errors

IN_PROMPT = 1 << 30  # as SampleTokens has it


class Adjusted(Protocol):
    """A request; `place`: of one with adjustments that runs."""

    prompt: list[int]
    tokens: list[int]
    sampling: Sampling
    adjustments: Adjustments
    place: int | None


class StepSampler:
    """sampler.onnx on the side of an exchange. rows: requests of a step at most. results: where the tokens go, {name: address}
    with LOGITS, from which they are chosen. turns: as many steps may be under way."""

    def __init__(
        self, path: Path, exchange: Host | CudaStream, vocabulary: int, rows: int, results: dict[str, int], turns: int
    ) -> None:
        import onnxruntime

        providers: Any = ["CPUExecutionProvider"]
        if isinstance(exchange, CudaStream):
            providers = [(CUDA, {"user_compute_stream": str(exchange.address), "device_id": str(exchange.index)})]
        self.session, self.exchange, self.path, self.rows = make_session(str(path), providers), exchange, path, rows
        self.vocabulary, self.results = vocabulary, results
        sizes = {BATCH: rows, VOCABULARY: vocabulary, PLACES: rows, str(TOP): TOP}
        kept = [t for t in SAMPLER.inputs if t.name in (TOKEN_COUNTS, BIAS)]
        sent = [t for t in SAMPLER.inputs if t not in kept and t.name != LOGITS]
        self.kept = Block(exchange, {t.name: (t.sizes(sizes), np.dtype(t.type)) for t in kept})
        self.inputs = Block(exchange, {t.name: (t.sizes(sizes), np.dtype(t.type)) for t in sent})
        top = [t for t in SAMPLER.outputs if t.name in (TOP_LOGPROBS, TOP_TOKENS)]
        self.top = Block(exchange, {t.name: (t.sizes(sizes), np.dtype(t.type)) for t in top})
        self.sent = [exchange.host_bytes(self.inputs.size) for _ in range(turns)]
        self.read = [exchange.host_bytes(self.top.size) for _ in range(turns)]
        self.free = list(range(rows))[::-1]
        self.options = onnxruntime.RunOptions()
        if exchange.device == "cuda":
            self.options.add_run_config_entry("disable_synchronize_execution_providers", "1")

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
        """Takes its place back. Places that nobody has add nothing to logits."""
        if request.place is None:
            return
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
        binding, device, index = self.session.io_binding(), self.exchange.device, self.exchange.index
        for block, bind in (
            (self.inputs, binding.bind_input),
            (self.kept, binding.bind_input),
            (self.top, binding.bind_output),
        ):
            for name, (offset, shape, dtype) in block.places.items():
                size = shape if block is self.kept else [rows, *shape[1:]]
                bind(name, device, index, dtype.type, size, block.address + offset)
        binding.bind_input(LOGITS, device, index, np.float32, [rows, self.vocabulary], self.results[LOGITS])
        for t in SAMPLER.outputs[:2]:
            binding.bind_output(t.name, device, index, np.dtype(t.type).type, [rows], self.results[t.name])
        offset, shape, dtype = self.kept.places[TOKEN_COUNTS]
        binding.bind_output(f"{TOKEN_COUNTS}_out", device, index, dtype.type, shape, self.kept.address + offset)
        with onnxruntime_errors(f"run {self.path}"):
            self.session.run_with_iobinding(binding, self.options)
        self.exchange.copy(self.read[turn].ctypes.data, self.top.address, self.top.size)

    def most_likely(self, turn: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, log-probabilities) of a step that is through, [rows,TOP]."""
        return self.top.view(self.read[turn], TOP_TOKENS), self.top.view(self.read[turn], TOP_LOGPROBS)


def check_adjustments(
    vocabulary: int,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: dict[int, float] | None = None,
    top_logprobs: int = 0,
) -> Adjustments:
    """The options as Adjustments. Raises ValueError, naming the option, where one is out of range."""

    def real(value: object) -> bool:
        return isinstance(value, (int, float, np.number)) and bool(np.isfinite(value))

    bias = {} if logit_bias is None else logit_bias
    for name, value, good, expected in (
        (
            "repetition_penalty",
            repetition_penalty,
            real(repetition_penalty) and repetition_penalty > 0,
            "a number above 0; 1: off",
        ),
        ("presence_penalty", presence_penalty, real(presence_penalty), "a number; 0: off"),
        ("frequency_penalty", frequency_penalty, real(frequency_penalty), "a number; 0: off"),
        (
            "logit_bias",
            logit_bias,
            isinstance(bias, dict)
            and all(isinstance(t, (int, np.integer)) and 0 <= t < vocabulary and real(b) for t, b in bias.items()),
            f"{{token id in 0 .. {vocabulary - 1}: number}}",
        ),
        (
            "top_logprobs",
            top_logprobs,
            isinstance(top_logprobs, (int, np.integer)) and 0 <= top_logprobs <= TOP,
            f"a whole number from 0 to {TOP}",
        ),
    ):
        if not good:
            raise ValueError(f"{name} is {str(value)[:60]}; expected {expected}")
    pairs = tuple(sorted((int(t), float(b)) for t, b in bias.items()))
    return Adjustments(float(repetition_penalty), float(presence_penalty), float(frequency_penalty), pairs, int(top_logprobs))
