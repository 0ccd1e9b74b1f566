"""Linear attention over a text that ranks share by tokens: each has the same heads and a piece of one long text.

What a rank's tokens need of those before is one state a head. Each rank sums up its own tokens into one, all gather these, and
a rank's scan begins with the states of the ranks before it, each decayed over the tokens between: S_r = sum over j < r of
exp(d_(j+1) + ... + d_(r-1)) S_j, d being a rank's sum of log decays. So a rank moves `world` states a head and layer, however
long its piece is, and scans its piece once. The parts are CausalLinearDecay, AllGather and a few products, in PyTorch and as
nodes.

Source: "LeetDecoding" (2024), equation 4, whose recurrence carries states over blocks as it does over ranks here.
"""

from __future__ import annotations

from typing import Any

import torch

from leanfleet.decoder_contract import MOST_RANKS, WORLD
from leanfleet.export.linear_attention import UnitFeatures
from leanfleet.export.torch_ops import all_gather, all_reduce, causal_linear_decay


class _Gather(torch.autograd.Function):
    """AllGather of a tensor [1,...], with gradients: a rank's is the sum of what all ranks' outputs say of it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, communicator: str, world: int, rank: int) -> torch.Tensor:
        ctx.communicator, ctx.rank = communicator, rank
        gathered: torch.Tensor = all_gather(tensor, communicator=communicator, world=world)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        summed = all_reduce(grads[0].contiguous(), communicator=ctx.communicator)
        return summed[ctx.rank : ctx.rank + 1], None, None, None


def decay_over_ranks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor | None = None,
    *,
    rank: int | torch.Tensor,
    world: int,
    communicator: str = WORLD,
    scale: float = 1.0,
    layout: str = "bhnd",
    return_state: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """CausalLinearDecay over a text of which each rank has a piece, in the order of the ranks.

    query T [B,Hq,N,R], key T [B,Hk,N,R], value T [B,Hv,N,Dv], log_decay float32 [Hv] or [B,Hv,N] (tokens before heads where
    layout is "bnhd"), as causal_linear_decay has them: this rank's tokens, of which ranks may have unequal numbers. rank: this
    process's, or in an exported graph, which serves all ranks, int64 [1]. world: how many ranks communicator has.
    Returns T [B,H,N,Dv], this rank's rows; with return_state also the state behind the whole text, float32 [B,Hv,R,Dv], the
    same on all ranks. With an int rank it has gradients; that of a log_decay [Hv], which ranks share, is this rank's part of
    their sum. All ranks call it, forward and backward, in the same order. Raises ValueError for a rank or world that is none,
    and what causal_linear_decay and all_gather raise.

    Example:
        import torch
        from leanfleet import communicators
        from leanfleet.export import decay_over_ranks

        q, k, v = torch.randn(3, 1, 2, 8, 16)
        with communicators.create("world", rank=0, world=1):      # this process alone
            print(decay_over_ranks(q, k, v, torch.tensor([-0.1, -0.2]), rank=0, world=1).shape)  # torch.Size([1, 2, 8, 16])
    """
    _check_ranks(rank, world)
    state, total = _summed(key, value, log_decay, layout)
    both = torch.cat([state.flatten(2), total.unsqueeze(-1)], -1)  # one exchange
    gathered = _gathered(both, communicator, world, rank)
    states = gathered[..., :-1].unflatten(-1, state.shape[2:])  # [W,B,Hv,R,Dv]
    ends = gathered[..., -1].cumsum(0)  # [W,B,Hv]: log decays behind each rank, from the text's beginning
    first = torch.zeros_like(ends[:1])
    numbers = torch.arange(world, device=ends.device)
    own = rank if isinstance(rank, torch.Tensor) else torch.tensor([rank], device=ends.device)
    begin = torch.cat([first, ends]).index_select(0, own)
    weights = torch.exp((begin - ends).clamp(max=0.0)) * (numbers < own).view(-1, 1, 1).to(ends.dtype)
    before = (weights[..., None, None] * states).sum(0)
    output = causal_linear_decay(query, key, value, log_decay, before, scale=scale, layout=layout)
    output = output if isinstance(output, torch.Tensor) else output[0]
    if not return_state:
        return output
    weights = torch.exp(ends[-1:] - ends)
    return output, (weights[..., None, None] * states).sum(0)


def normalized_over_ranks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    rank: int | torch.Tensor,
    world: int,
    communicator: str = WORLD,
    eps: float = 1e-6,
) -> torch.Tensor:
    """NormalizedLinearAttention with normalize_qk over a text of which each rank has a piece, in the order of the ranks.

    query T [B,H,N,D], key T [B,Hkv,N,D], value T [B,Hkv,N,Dv]: this rank's tokens. Returns T [B,H,N,Dv]. Others as in
    decay_over_ranks, gradients too. It is decay_over_ranks over rows (1, q), (1, k) and (v, 1) in float32, where one state
    holds all sums; the operator itself, which is faster, takes carried sums but has no gradients for them.

    Example:
        import torch
        from leanfleet import communicators
        from leanfleet.export import normalized_over_ranks

        q, k, v = torch.randn(3, 1, 2, 8, 16)
        with communicators.create("world", rank=0, world=1):
            print(normalized_over_ranks(q, k, v, rank=0, world=1).shape)      # torch.Size([1, 2, 8, 16])
    """
    summed = torch.cat([value.float(), torch.ones_like(value[..., :1], dtype=torch.float32)], -1)
    rows = UnitFeatures.query(query), UnitFeatures.key(key)
    both = decay_over_ranks(*rows, summed, rank=rank, world=world, communicator=communicator)
    assert isinstance(both, torch.Tensor)
    return (both[..., :-1] / both[..., -1:].clamp(min=eps)).to(value.dtype)


def _check_ranks(rank: int | torch.Tensor, world: int) -> None:
    if not isinstance(world, int) or isinstance(world, bool) or not 1 <= world <= MOST_RANKS:
        raise ValueError(f"world is {world!r}; expected a number of ranks, 1 to {MOST_RANKS}")
    if isinstance(rank, torch.Tensor):
        if rank.shape != (1,) or rank.dtype != torch.int64:
            raise ValueError(f"rank is {rank.dtype} {list(rank.shape)}; expected int64 [1], or an int")
    elif not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < world:
        raise ValueError(f"rank is {rank!r}; expected 0 to {world - 1}")


def _gathered(tensor: torch.Tensor, communicator: str, world: int, rank: int | torch.Tensor) -> torch.Tensor:
    """[W,...] of a rank's tensor [...]."""
    alone = tensor.unsqueeze(0)
    if isinstance(rank, int) and torch.is_grad_enabled() and tensor.requires_grad:
        applied: torch.Tensor = _Gather.apply(alone, communicator, world, rank)
        return applied
    if torch.is_grad_enabled() and tensor.requires_grad:
        raise ValueError("gradients need the rank as an int")
    gathered: torch.Tensor = all_gather(alone, communicator=communicator, world=world)
    return gathered


def _summed(
    key: torch.Tensor, value: torch.Tensor, log_decay: torch.Tensor | None, layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(state float32 [B,Hv,R,Dv] behind these tokens where none was before, sum of their log decays float32 [B,Hv])."""
    if layout == "bnhd":
        key, value = key.transpose(1, 2), value.transpose(1, 2)
        log_decay = log_decay if log_decay is None or log_decay.dim() == 1 else log_decay.transpose(1, 2)
    batch, heads, tokens, width = value.shape
    keys, values = key.float(), value.float()
    if log_decay is None:
        total = values.new_zeros(batch, heads)
    else:
        each = log_decay.view(1, -1, 1).expand(batch, heads, tokens) if log_decay.dim() == 1 else log_decay
        seen = each.float().cumsum(-1)
        total = seen[..., -1]
        values = values * torch.exp(total.unsqueeze(-1) - seen).unsqueeze(-1)
    shared = values.reshape(batch, key.shape[1], -1, tokens, width)  # the values of each key head
    state = keys.transpose(-1, -2).unsqueeze(2) @ shared
    return state.reshape(batch, heads, key.shape[3], width), total
