"""Recurrent layers of transformers' hybrid models over our operators: the gated delta rule and Mamba-2's selective scan, each
behind a short convolution.

The layers stay transformers' own: projections, gates and norms are traced as they are. What is replaced while a model is traced
are the functions of its module that convolve and that run the recurrence, by ones that carry states from call to call.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from leanfleet.decoder_contract import BATCH, CONV_STATE, STATE
from leanfleet.export.cache import Cache
from leanfleet.export.support import HYBRID_LAYERS


def hybrid_layers(model: torch.nn.Module) -> dict[int, Any]:
    """{number of the layer: its recurrent module}."""
    return {m.layer_idx: m for m in model.modules() if type(m).__name__ in HYBRID_LAYERS}


def carried(module: Any) -> dict[str, tuple[int | str, ...]]:
    """{part: shape} of what a recurrent module carries, all of it float32."""
    channels, _, taps = module.conv1d.weight.shape
    if hasattr(module, "num_v_heads"):
        state = module.num_v_heads, module.head_k_dim, module.head_v_dim
    elif hasattr(module, "ssm_state_size"):
        state = module.num_heads, module.ssm_state_size, module.head_dim
    else:  # keys and values alike
        state = module.num_heads, module.head_dim, module.head_dim
    return {STATE: (BATCH, *state), CONV_STATE: (BATCH, taps - 1, channels)}


def _rotary_of_text(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [B,N,2h] of position_ids [3,B,N], the three grids of positions that images have. Those of text are
    equal: the model's own selection among them would hide that angles follow from a position alone."""
    frequencies = position_ids[0, ..., None].float() * self.inv_freq.float()
    angles = torch.cat((frequencies, frequencies), dim=-1)
    return tuple((t * self.attention_scaling).to(x.dtype) for t in (angles.cos(), angles.sin()))


def not_above_0(log_decay: torch.Tensor) -> torch.Tensor:
    """log_decay, with 0 for NaN, which the operators refuse. A request that is not finite must not fail the others' call; its
    values and what it writes are NaN as well, so that its own results are not finite."""
    return torch.where(log_decay <= 0, log_decay, torch.zeros((), dtype=log_decay.dtype))


@contextmanager
def over_caches(model: torch.nn.Module, current: Callable[[], Cache | None]) -> Iterator[None]:
    """A transformers model whose recurrent layers run our operators over what they carry.

    current: gives the caches of the call that runs, or None outside of one, where models of the same file run as ever.
    """
    layers = hybrid_layers(model)
    running: list[int] = [0]  # the layer that runs

    def note(module: Any, arguments: Any) -> None:
        running[0] = module.layer_idx

    def convolve(
        cache: Cache,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Of hidden_states [B,C,N] and weight [C,K+1]."""
        if activation not in (None, "silu", "swish"):
            raise ValueError(f"layer {running[0]}: its convolution's activation is {activation}; CausalConv has silu")
        by_token = hidden_states.transpose(1, 2)
        output = cache.convolve(running[0], by_token, weight.t(), bias, "none" if activation is None else "silu")
        return output.transpose(1, 2)

    def delta(
        cache: Cache,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Of query, key [B,N,Hk,D], value [B,N,Hv,Dv], g [B,N,Hv] or [B,N,Hv,D] and beta [B,N,Hv]."""
        if not use_qk_l2norm_in_kernel:
            raise ValueError(
                f"layer {running[0]}: use_qk_l2norm_in_kernel is False, so that nothing bounds its keys, and states grow "
                "without end where beta |k|^2 is above 2; expected True, which leaves keys of unit length as they are"
            )
        return cache.correct(running[0], query, key, value, not_above_0(g.float()), beta.float()), None

    def scan(
        cache: Cache,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        chunk_size: int,
        D: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **kwargs: Any,
    ) -> torch.Tensor:
        """Of hidden_states [B,N,H,P], dt [B,N,H], B and C [B,N,G,S], A, D and dt_bias [H]; float32, as transformers' is.

        S_t = exp(A dt_t) S_(t-1) + B_t^T dt_t x_t, y_t = C_t S_t + D x_t: CausalLinearDecay with C for queries, B for keys and
        dt for beta.
        """
        value, bias, step = hidden_states.to(C.dtype), None if dt_bias is None else dt_bias.float(), None
        if dt_softplus:
            log_decay, step = cache.gates(dt, A.float(), bias, dt_limit)
        else:
            steps = (dt.float() if bias is None else dt.float() + bias).clamp(*dt_limit)
            value, log_decay = (hidden_states.float() * steps.unsqueeze(-1)).to(C.dtype), not_above_0(A.float() * steps)
        output = cache.decay(running[0], C, B, value, log_decay, 1.0, beta=step).float()
        return output if D is None else output + D.float().unsqueeze(-1) * hidden_states.float()

    ours: dict[str, Callable[..., Any]] = {
        "causal_conv1d_fn": convolve,
        "torch_chunk_gated_delta_rule": delta,
        "chunk_kimi_delta_attention": delta,
        "mamba2_chunk_scan": scan,
    }

    def in_place_of(theirs: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            cache = current()
            return theirs(*arguments, **options) if cache is None else function(cache, *arguments, **options)

        return call

    files = {type(module).__module__ for module in layers.values()}
    grids = [m for m in model.modules() if type(m).__module__ in files and hasattr(m, "recomposition_frequencies")]
    hooks = [module.register_forward_pre_hook(note) for module in layers.values()]
    before = []
    try:
        for module in grids:
            module.forward = types.MethodType(_rotary_of_text, module)
        for file in files:
            for name, function in ours.items():
                if (theirs := getattr(sys.modules[file], name, None)) is not None:
                    before.append((sys.modules[file], name, theirs))
                    setattr(sys.modules[file], name, in_place_of(theirs, function))
        yield
    finally:
        for module, name, theirs in before:
            setattr(module, name, theirs)
        for grid in grids:
            vars(grid).pop("forward", None)
        for hook in hooks:
            hook.remove()
