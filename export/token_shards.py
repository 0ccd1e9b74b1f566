"""Linear attention over a text that ranks share by tokens: each has the same heads and a piece of one long text.

What a rank's tokens need of those before is one state a head. Each rank sums up its own tokens into one, all gather these, and
a rank's scan begins with the states of the ranks before it, each decayed over the tokens between: S_r = sum over j < r of
exp(d_(j+1) + ... + d_(r-1)) S_j, d being a rank's sum of log decays. So a rank moves `world` states a head and layer, however
long its piece is. What a piece in 16 bits sums up to comes from a scan of the operator too, without copies in float32. The
parts are CausalLinearDecay or NormalizedLinearAttention, AllGather and a few products, in PyTorch and as nodes.

Source: "LeetDecoding" (2024), equation 4, whose recurrence carries states over blocks as it does over ranks here.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from leanfleet import communicators
from leanfleet.decoder_contract import WORLD
from leanfleet.export.linear_attention import NORMALIZER_EPS, UnitFeatures
from leanfleet.export.reference import UNIT_ROW_EPS
from leanfleet.export.torch_ops import (
    all_gather,
    all_reduce,
    causal_linear_decay,
    normalized_linear_attention,
    normalized_linear_attention_grad,
)

_NARROW = torch.float16, torch.bfloat16
_NO_GRADIENTS = "rank is given, with which there are no gradients: leave it out, or call it under torch.no_grad()"
_AT_ONCE = 8192  # tokens of which gradients between ranks are made at once


class _Gather(torch.autograd.Function):
    """AllGather of a tensor [1,...], with gradients: a rank's is the sum of what all ranks' outputs say of it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, communicator: str, world: int) -> torch.Tensor:
        ctx.communicator = communicator
        gathered: torch.Tensor = all_gather(tensor, communicator=communicator, world=world)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        summed = all_reduce(grads[0].contiguous(), communicator=ctx.communicator)
        return summed[communicators.rank_of(ctx.communicator)].unsqueeze(0), None, None


def decay_over_ranks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor | None = None,
    *,
    communicator: str = WORLD,
    world: int | None = None,
    rank: torch.Tensor | None = None,
    scale: float = 1.0,
    layout: str = "bhnd",
    return_state: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """CausalLinearDecay over a text of which each rank has a piece, in the order of the ranks.

    query T [B,Hq,N,R], key T [B,Hk,N,R], value T [B,Hv,N,Dv], log_decay float32 [Hv] or [B,Hv,N] (tokens before heads where
    layout is "bnhd"), as causal_linear_decay has them, but for decays of each key dimension: this rank's tokens, of which ranks
    may have unequal numbers.
    communicator: the name of the ranks' one. world, rank: for a module that is exported where it does not run: how many ranks
    there will be, and int64 [1], an input by which one graph serves all of them.
    Returns T [B,H,N,Dv], this rank's rows; with return_state also the state behind the whole text, float32 [B,Hv,R,Dv], the
    same on all ranks; states are then summed up in float32. Without `rank` it has gradients; that of a log_decay [Hv], which
    ranks share, is this rank's part of their sum. All ranks call it, forward and backward, in the same order. Raises ValueError
    for gradients with `rank` and for a log_decay of other axes, and what causal_linear_decay and all_gather raise.

    Example:
        import torch
        from leanfleet import communicators
        from leanfleet.export import decay_over_ranks

        q, k, v = torch.randn(3, 1, 2, 8, 16)
        with communicators.create():      # this process alone
            print(decay_over_ranks(q, k, v, torch.tensor([-0.1, -0.2])).shape)  # torch.Size([1, 2, 8, 16])
    """
    options: dict[str, Any] = {"scale": scale, "layout": layout}
    world = world or communicators.world_of(communicator) or 1
    if log_decay is not None and log_decay.dim() not in (1, 3):
        raise ValueError(f"decay_over_ranks: log_decay has {log_decay.dim()} axes; expected [Hv] or one of each token and head")
    if value.dtype in _NARROW and not return_state:
        # CUDA's kernel rounds decayed tokens to 16 bits in this state, as it does in a scan of the whole text.
        _, state = causal_linear_decay(query.detach(), key, value, log_decay, return_state=True, **options)
        each = _each(log_decay, value, layout)
        total = state.new_zeros(state.shape[:2]) if each is None else each.sum(-1)
    else:
        try:
            state, total = _summed(key, value, log_decay, layout)
        except RuntimeError:
            causal_linear_decay(query, key, value, log_decay, **options)  # says which tensor does not fit
            raise
    both = torch.cat([state.flatten(2), total.unsqueeze(-1)], -1)  # one exchange
    gathered = _gathered(both, communicator, world, rank)
    states, totals = gathered[..., :-1].unflatten(-1, state.shape[2:]), gathered[..., -1]
    before = _behind(states, totals, communicators.rank_of(communicator) if rank is None else rank)
    output: torch.Tensor = causal_linear_decay(query, key, value, log_decay, before, **options)
    return (output, _behind(states, totals, world)) if return_state else output


def normalized_over_ranks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    communicator: str = WORLD,
    world: int | None = None,
    rank: torch.Tensor | None = None,
) -> torch.Tensor:
    """NormalizedLinearAttention with normalize_qk over a text of which each rank has a piece, in the order of the ranks.

    query T [B,H,N,D], key T [B,Hkv,N,D], value T [B,Hkv,N,Dv]: this rank's tokens. Returns T [B,H,N,Dv]. Others as in
    decay_over_ranks, gradients too: the operator's within a rank, and a few products with what other ranks sum up. Of float64
    it is decay_over_ranks over rows (1, q), (1, k) and (v, 1), where one state holds all sums.

    Example:
        import torch
        from leanfleet import communicators
        from leanfleet.export import normalized_over_ranks

        q, k, v = torch.randn(3, 1, 2, 8, 16)
        with communicators.create():
            print(normalized_over_ranks(q, k, v).shape)      # torch.Size([1, 2, 8, 16])
    """
    if value.dtype != torch.float64:
        world = world or communicators.world_of(communicator) or 1
        wants_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        if wants_grad and rank is not None:
            raise ValueError(_NO_GRADIENTS)
        if wants_grad:
            trained: torch.Tensor = _Normalized.apply(query, key, value, communicator, world)
            return trained
        return _normalized(query, key, value, communicator, world, rank)[0]
    summed = torch.cat([value, torch.ones_like(value[..., :1])], -1).float()
    rows = UnitFeatures.query(query), UnitFeatures.key(key)
    both = decay_over_ranks(*rows, summed, communicator=communicator, world=world, rank=rank)
    assert isinstance(both, torch.Tensor)
    return (both[..., :-1] / both[..., -1:].clamp(min=NORMALIZER_EPS)).to(value.dtype)


def _normalized(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, communicator: str, world: int, rank: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """(output, normaliser, the state and the key sum of the ranks before, the mean of all values), of operators alone."""
    _, _, *own = normalized_linear_attention(query, key, value, normalize_qk=True, return_state=True)
    flat = [x.flatten(1).float() if x.dim() > 1 else x.unsqueeze(1).float() for x in own]  # [B,...] each
    gathered = _gathered(torch.cat(flat, 1), communicator, world, rank)  # one exchange
    earlier = torch.arange(world, device=key.device) < (communicators.rank_of(communicator) if rank is None else rank)
    sums = torch.where(earlier.view(-1, 1, 1), gathered, torch.zeros((), device=key.device)).sum(0)
    widths = [x.shape[1] for x in flat]
    state, key_sum, value_sum, count = (
        part.reshape(x.shape).to(x.dtype) for part, x in zip(sums.split(widths, 1), own, strict=True)
    )
    *_, all_values, all_tokens = gathered.split(widths, 2)
    mean = (all_values.sum(0) / all_tokens.sum(0).clamp(min=1)).view_as(value_sum)
    output, normalizer, *_ = normalized_linear_attention(
        query,
        key,
        value,
        initial_state=state,
        initial_key_sum=key_sum,
        initial_value_sum=value_sum,
        initial_count=count,
        normalize_qk=True,
    )
    return output, normalizer, state, key_sum, mean


class _Normalized(torch.autograd.Function):
    """_normalized with gradients.

    With unit rows q_i, k_j, w_i = grad_o_i / g_i and any one vector c, a rank's tokens and those of others add to each other's
    gradients by sums of the ranks before, S = sum of k_j (v_j - c)^T and K = sum of k_j, and of those behind, M = sum of
    q_i w_i^T, R = sum of r_i q_i and W = sum of w_i, where r_i = (o_i - c) . w_i:

        grad_q_i += S w_i - r_i K,  grad_k_j += M (v_j - c) - R,  grad_v_j += M^T k_j + W.

    c is the mean of all values: without it the two parts of grad_q and grad_k nearly cancel where values have a mean.

    Source: equations 16 to 21 of "Linear Attention Optimized GPU Kernel Implementation", as in the gradient operator, with
    sums over tokens cut into those of a rank and of the others.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, communicator: str, world: int
    ) -> torch.Tensor:
        output, *sums = _normalized(query, key, value, communicator, world, None)
        ctx.save_for_backward(query, key, value, output, *sums)
        ctx.ranks = communicator, world
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, normalizer, state, key_sum, mean = ctx.saved_tensors
        grad_output = grads[0].contiguous()
        grad_query, grad_key, grad_value = normalized_linear_attention_grad(
            query,
            key,
            value,
            output=output,
            normalizer=normalizer,
            grad_output=grad_output,
            normalize_qk=True,
            grad_coefficients=False,
        )[:3]
        batch, heads = key.shape[:2]
        group = query.shape[1] // heads
        pieces = [slice(i, i + _AT_ONCE) for i in range(0, key.shape[2], _AT_ONCE)]
        kind = torch.float32 if value.dtype == torch.float16 else value.dtype  # weights and sums may be beyond float16's range

        def by_key_head(rows: torch.Tensor) -> torch.Tensor:  # [B,H,n,...] to [B,Hkv,H/Hkv * n,...]
            return rows.reshape(batch, heads, -1, *rows.shape[3:])

        own = [torch.zeros_like(state), torch.zeros_like(key_sum), torch.zeros_like(mean)]
        before = (state - key_sum.unsqueeze(-1) * mean.unsqueeze(2)).to(kind).mT
        query_mean = mean.repeat_interleave(group, 1).unsqueeze(2)
        for piece in pieces:
            unit, norm = _unit_rows(query[:, :, piece], kind)
            divisor = normalizer[:, :, piece].unsqueeze(-1)
            held = divisor.abs() < NORMALIZER_EPS
            divisor = torch.where(held, torch.full_like(divisor, NORMALIZER_EPS).copysign(divisor), divisor)
            weight = _product(grad_output[:, :, piece], divisor.reciprocal(), kind)
            rest = ((output[:, :, piece] - query_mean) * weight).sum(-1, keepdim=True).masked_fill(held, 0)
            units, weights, rests = by_key_head(unit), by_key_head(weight), by_key_head(rest)
            own[0] += units.mT @ weights
            own[1] += (rests.to(kind).mT @ units).squeeze(2)
            own[2] += weights.sum(2, dtype=torch.float32)
            of_query = (weights @ before).addcmul_(rests, key_sum.unsqueeze(2), value=-1)
            _add_projected(grad_query[:, :, piece], of_query.view_as(unit), unit, norm)
        communicator, world = ctx.ranks
        flat = [x.flatten(1) for x in own]
        later = _gathered(torch.cat(flat, 1), communicator, world, None)[communicators.rank_of(communicator) + 1 :].sum(0)
        parts = later.split([x.shape[1] for x in flat], 1)
        products, rests, weights = (part.reshape(x.shape) for part, x in zip(parts, own, strict=True))
        products = products.to(kind)
        for piece in pieces:
            unit, norm = _unit_rows(key[:, :, piece], kind)
            of_key = ((value[:, :, piece] - mean.unsqueeze(2)).to(kind) @ products.mT).sub_(rests.unsqueeze(2))
            _add_projected(grad_key[:, :, piece], of_key, unit, norm)
            grad_value[:, :, piece] += (unit @ products).add_(weights.unsqueeze(2))
        return grad_query, grad_key, grad_value, None, None


def _product(rows: torch.Tensor, by: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """rows times float32 [...,1] as `kind`, without a copy in float32."""
    return torch.mul(rows, by, out=torch.empty(rows.shape, dtype=kind, device=rows.device))


def _unit_rows(rows: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows of unit length as `kind`, what they were divided by in float32 [...,1])."""
    norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float32).clamp(min=UNIT_ROW_EPS)
    return _product(rows, norm.reciprocal(), kind), norm


def _add_projected(to: torch.Tensor, grad: torch.Tensor, unit: torch.Tensor, norm: torch.Tensor) -> None:
    """Adds the gradient of rows x, from that of unit rows made of them: (dy - y (y . dy)) / |x|."""
    along = (grad * unit).sum(-1, keepdim=True, dtype=torch.float32).masked_fill(norm <= UNIT_ROW_EPS, 0)
    to.addcmul_(grad, norm.reciprocal()).addcmul_(unit, along / norm, value=-1)


def _gathered(tensor: torch.Tensor, communicator: str, world: int, rank: torch.Tensor | None) -> torch.Tensor:
    """[W,...] of a rank's tensor [...]."""
    wants_grad = torch.is_grad_enabled() and tensor.requires_grad
    if wants_grad and rank is not None:
        raise ValueError(_NO_GRADIENTS)
    gather = _Gather.apply if wants_grad else functools.partial(all_gather, communicator=communicator, world=world)
    found: torch.Tensor = gather(tensor.unsqueeze(0), *((communicator, world) if wants_grad else ()))
    return found


def _each(log_decay: torch.Tensor | None, value: torch.Tensor, layout: str) -> torch.Tensor | None:
    """Log decays float32 [B,Hv,N] of all tokens, or None."""
    if log_decay is None:
        return None
    if log_decay.dim() == 3:
        return (log_decay.transpose(1, 2) if layout == "bnhd" else log_decay).float()
    tokens = value.shape[1 if layout == "bnhd" else 2]
    return log_decay.float().view(1, -1, 1).expand(value.shape[0], log_decay.shape[0], tokens)


def _summed(
    key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor | None, layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(state float32 [B,Hv,R,Dv] behind these tokens where none was before, sum of their log decays float32 [B,Hv])."""
    each = _each(log_decay, value, layout)
    if layout == "bnhd":
        key, value = key.transpose(1, 2), value.transpose(1, 2)
    batch, heads, tokens, width = value.shape
    keys, values = key.float(), value.float()
    if each is None:
        total = values.new_zeros(batch, heads)
    else:
        # Sums from the end are small where they count. No difference of sums, either of which may be -inf.
        behind = each.flip(-1).cumsum(-1).flip(-1)
        total = behind[..., :1].sum(-1)
        later = torch.cat([behind[..., 1:], torch.zeros_like(behind[..., :1])], -1)
        values = values * torch.exp(later).unsqueeze(-1)
    shared = values.reshape(batch, key.shape[1], heads // key.shape[1], tokens, width)  # the values of each key head
    state = keys.transpose(-1, -2).unsqueeze(2) @ shared
    return state.reshape(batch, heads, key.shape[3], width), total


def _behind(states: torch.Tensor, totals: torch.Tensor, end: int | torch.Tensor) -> torch.Tensor:
    """The state [B,Hv,R,Dv] behind the ranks before `end`, of each rank's own [W,B,Hv,R,Dv] and its log decay [W,B,Hv]."""
    rank = torch.arange(states.shape[0], device=states.device)
    between = (rank > rank.unsqueeze(1)) & (rank < end)  # [W,W]: whether the second decays the first's
    decay = torch.where(between[..., None, None], totals, torch.zeros((), device=totals.device)).sum(1)
    weights = torch.exp(decay) * (rank < end).view(-1, 1, 1)
    return (weights[..., None, None] * states).sum(0)
