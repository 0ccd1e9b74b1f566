"""The caches of one traced call of a decoder: what its layers carry from call to call, and the operators that use and replace
it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from leanfleet import progress
from leanfleet.decoder_contract import CONV_STATE, KEY, KEY_SCALE, POOL, STATE, STATES, VALUE, VALUE_SCALE, cache_name, is_state
from leanfleet.spec import in_numbers
from leanfleet.export.quantised_caches import CacheType, CalibratedCache
from leanfleet.export.torch_ops import causal_conv, causal_linear_decay, decay_gates, gated_delta_rule, lean_attention


def pool_shape(name: str, shape: tuple[int | str, ...], block: int) -> tuple[Any, ...]:
    """The shape of the pool of a cache, of which cache_shapes says `shape`."""
    return (STATES, *shape[1:]) if is_state(name) else (POOL, block, shape[1], *shape[3:])


class Cache:
    """The caches of one traced call by name ("0.key"); attention replaces them as it appends."""

    now: ClassVar[Cache | None] = None  # the one of the call that runs: models need not hand it from layer to layer
    heads_axis: ClassVar[int] = 1  # of the tensors of softmax layers

    def __init__(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        seq_lens: torch.Tensor,
        query_lens: torch.Tensor,
        form: CacheType | None = None,
    ) -> None:
        """form: the type of keys and values; a CalibratedCache has their scales."""
        self.tensors, self.seq_lens, self.query_lens, self.form = dict(tensors), seq_lens, query_lens, form
        self.updated: set[str] = set()

    @contextmanager
    def in_use(self) -> Iterator[Cache]:
        """While this lasts, attention appends to these caches."""
        before, Cache.now = Cache.now, self
        try:
            yield self
        finally:
            Cache.now = before

    def update(self, name: str, tensor: torch.Tensor) -> None:
        """Puts a tensor in the place of a cache."""
        self.tensors[name] = tensor
        self.updated.add(name)
        progress.tell("tracing the model, caches", len(self.updated), len(self.tensors))

    def shapes(self, layer: int) -> tuple[list[int], list[int]]:
        """Those of a softmax layer's keys and values, in numbers."""
        key, value = (self.tensors[cache_name(layer, part)] for part in (KEY, VALUE))
        return in_numbers(key.shape, key.dtype), in_numbers(value.shape, value.dtype)

    def sizes(self, layer: int) -> tuple[int, int, int]:
        """(heads, columns of a key, columns of a value) of a softmax layer's caches."""
        key, value = self.shapes(layer)
        return key[self.heads_axis], key[3], value[3]

    def of_layer(self, layer: int) -> dict[str, str]:
        """{input of LeanAttention: name of the cache} of a softmax layer, in the order of the operator's outputs."""
        names = {f"{part}_cache": cache_name(layer, part) for part in (KEY, VALUE)}
        scales = {part: cache_name(layer, part) for part in (KEY_SCALE, VALUE_SCALE)}
        return names | {part: name for part, name in scales.items() if name in self.tensors}

    def append(self, layer: int, query: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The output and LSE of LeanAttention with these options, which appends to a layer's caches. seq_lens: by default those
        of the requests."""
        names = self.of_layer(layer)
        per_token = KEY_SCALE in names
        output, lse, *updated = lean_attention(
            query,
            append=True,
            key_per_token=per_token,
            value_per_token=per_token,
            **{part: self.tensors[name] for part, name in names.items()},
            **(self.form.of_layer(layer) if isinstance(self.form, CalibratedCache) else {}),
            **dict(seq_lens=self.seq_lens) | options,
        )
        for name, tensor in zip(names.values(), updated, strict=True):
            self.update(name, tensor)
        return output, lse

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        """Appends the new keys and values [B,Hkv,N,D] to a layer's caches; the attention of query [B,H,N,D] as [B,N,H,D]."""
        output, _ = self.append(layer, query, query_lens=self.query_lens, new_key=key, new_value=value, **options)
        return output.transpose(1, 2).contiguous()  # some models view it as [B,N,H D]

    def decay(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        log_decay: torch.Tensor,
        scale: float,
        beta: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A linear layer over its carried state: query [B,N,Hq,R], key [B,N,Hk,R], value [B,N,Hv,Dv], log_decay float32 [Hv]
        or [B,N,Hv]; beta float32 [B,N,Hv], which comes from gates() together with log_decay."""
        name, rows = cache_name(layer, STATE), self.rows()
        if not rows and beta is None:  # rows past query_lens leave the state as it is
            valid = self.inside(query)
            key = key * valid.unsqueeze(-1).to(key.dtype)
            log_decay = torch.where(valid, log_decay, torch.zeros((), dtype=log_decay.dtype))
        output, state = causal_linear_decay(
            query, key, value, log_decay, self.tensors[name], **rows, beta=beta, return_state=True, scale=scale, layout="bnhd"
        )
        self.update(name, state)
        return output

    def gates(
        self, raw: torch.Tensor, rate: torch.Tensor, bias: torch.Tensor | None, limits: tuple[float, float]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(log_decay, steps) float32 [B,N,H] of raw [B,N,H], with float32 rate and bias [H]; 0 for rows past query_lens."""
        lens = {} if self.rows() else dict(query_lens=self.query_lens)
        low, high = limits
        bounds = dict(step_min=low, step_max=0.0 if high == math.inf else high)
        return decay_gates(raw, rate, bias, **lens, **bounds, return_step=True)

    def inside(self, tokens: torch.Tensor) -> torch.Tensor:
        """Which of tokens [B,N,...] are no padding, bool [B,N,1]."""
        return (torch.arange(tokens.shape[1], device=tokens.device) < self.query_lens.unsqueeze(1)).unsqueeze(-1)

    def convolve(
        self, layer: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
    ) -> torch.Tensor:
        """A layer's causal convolution over the tokens that it carries: x [B,N,C], weight [K+1,C], bias [C]."""
        name = cache_name(layer, CONV_STATE)
        rows = self.rows() or dict(query_lens=self.query_lens)
        output, state = causal_conv(x, weight, bias, self.tensors[name], **rows, activation=activation, return_state=True)
        self.update(name, state)
        return output

    def correct(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor,
    ) -> torch.Tensor:
        """A layer of the gated delta rule over its carried state: query, key [B,N,Hk,D], of any length, value [B,N,Hv,Dv],
        float32 log_decay [B,N,Hv] or [B,N,Hv,D] and beta [B,N,Hv]."""
        name, rows = cache_name(layer, STATE), self.rows()
        if not rows:  # padding leaves the state as it is: it writes no part of its value, and decays nothing
            valid = self.inside(query)
            beta = beta * valid.to(beta.dtype)
            valid = valid if log_decay.dim() == 3 else valid.unsqueeze(-1)
            log_decay = torch.where(valid, log_decay, torch.zeros((), dtype=log_decay.dtype))
        output, state = gated_delta_rule(
            query,
            key,
            value,
            log_decay,
            beta=beta,
            initial_state=self.tensors[name],
            **rows,
            normalize_qk=True,
            return_state=True,
            layout="bnhd",
        )
        self.update(name, state)
        return output

    def rows(self) -> dict[str, torch.Tensor]:
        """What tells the operators where requests that are packed have their tokens and states. Here: rows of a batch."""
        return {}


def decayed_attention(
    cache: Cache,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    scale: float = 1.0,
) -> torch.Tensor:
    """Linear layer `layer` over the state that `cache` carries: query, key [B,N,H,R], value [B,N,H,Dv], log_decay [H]."""
    return cache.decay(layer, query, key, value, log_decay, scale)
