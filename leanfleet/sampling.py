"""How a request's next token is chosen, and the choice from logits on the host: SampleTokens' CPU kernel. Needs numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from leanfleet import native, spec
from leanfleet.decoder_contract import TOP, Adjustments, Sampling, settings

_ALIGNMENT = 256  # bytes, of workspaces


def check_sampling(temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0, min_p: float = 0.0) -> Sampling:
    """The settings as Sampling. Raises ValueError, naming the option, where one is out of range."""

    def whole(value: object, most: int) -> bool:
        return isinstance(value, (int, np.integer)) and bool(0 <= value <= most)

    def real(value: object) -> bool:
        return isinstance(value, (int, float, np.number)) and math.isfinite(value)

    for name, value, good, expected in (
        ("temperature", temperature, real(temperature) and temperature >= 0, "0 (the likeliest) or a positive number"),
        ("top_k", top_k, whole(top_k, 2**31 - 1), "0 (all tokens) or a positive whole number"),
        ("top_p", top_p, real(top_p) and 0 < top_p <= 1, "a number above 0 and up to 1 (all tokens)"),
        ("min_p", min_p, real(min_p) and 0 <= min_p <= 1, "a number from 0 (all tokens) to 1"),
        ("seed", seed, whole(seed, 2**63 - 1), "a whole number from 0 on, below 2^63"),
    ):
        if not good:
            raise ValueError(f"{name} is {value!r}; expected {expected}")
    return Sampling(float(temperature), int(top_k), float(top_p), float(min_p), int(seed))


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


def sample(logits: np.ndarray, requests: Sequence[Sampling], positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One token a row of logits, float32 [B,vocabulary]: (tokens int64 [B], their log-probabilities float32 [B]).

    positions: int [B], another one for each token of a request: how many tokens it has so far. The same settings, logits and
    positions give the same tokens as in an exported graph. The log-probability is NaN where a row's logits are not finite, the
    token then -1 where none is possible.
    """
    logits = np.ascontiguousarray(logits, np.float32)
    given: dict[str, np.ndarray] = settings(requests) | {"position": positions.astype(np.int32)}
    if not given["temperature"].any():
        given = {}
    tokens, logprobs = np.empty(len(logits), np.int64), np.empty(len(logits), np.float32)

    def entry(array: Any) -> native.Entry | None:
        return None if array is None else (array.ctypes.data, array.shape, array.dtype.name)

    op, made = spec.all_specs()["SampleTokens"], {"tokens": tokens, "logprob": logprobs}
    given["logits"] = logits
    inputs = [entry(given.get(t.name)) for t in op.inputs]
    call = native.Call(op.name, inputs, [entry(made.get(t.name)) for t in op.outputs], {"logprob": True})
    scratch, sync = (np.zeros(size + _ALIGNMENT, np.uint8) for size in call.workspace())
    call.run(*(n for a in (scratch, sync) for n in (-(-a.ctypes.data // _ALIGNMENT) * _ALIGNMENT, a.size - _ALIGNMENT)))
    return tokens, logprobs


def problem(logprob: float) -> ValueError | None:
    """The error of a request whose token has this log-probability; None where all is well."""
    if math.isfinite(logprob):
        return None
    return ValueError("this model's logits are not finite: its weights are damaged, or its numbers overflow their type")
