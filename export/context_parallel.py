"""Decoders whose caches are shared out to ranks by position, for context parallel exports (Sanovar et al., "LeanAttention",
2024, section 6): all ranks compute all layers, each attends over its share of the keys, and partial outputs are merged.

Positions are cut into blocks, and block g is rank g % W's: shares stay equal while a context grows. Since keys are cached with
their rotary encoding, attention does not care in which order they stand, but for its causal mask and its window. So a rank
hands LeanAttention pages in this order: first its own blocks that every new token of the request sees whole (or, with a window,
not at all), one behind the other, then all blocks from there on, its own and, as pages that are none, the others'. Keys on such
pages count for nothing, and new tokens that belong there are not written. Behind the border tokens stand as far apart as their
positions, which makes masks exact for prompts and steps alike; a step reads its rank's share and no more than a block in vain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from leanfleet.decoder_contract import MOST_RANKS, WORLD
from leanfleet.export.cache import Cache
from leanfleet.export.quantised_caches import CacheType
from leanfleet.export.support import check_shared_layers, check_supported


def check_world(world: object) -> int:
    """Raises ValueError for what is no number of ranks."""
    if not isinstance(world, int) or isinstance(world, bool) or not 2 <= world <= MOST_RANKS:
        raise ValueError(f"context_parallel is {world!r}; expected a number of ranks, 2 or more, at most {MOST_RANKS}")
    return world


def check_shareable(model: Any, layers: Sequence[str]) -> None:
    """Raises ValueError, naming the layer, for a model whose caches cannot be shared out so. layers: names of its caches."""
    if not hasattr(model, "cache_shapes"):
        check_supported(model)
    check_shared_layers(model, layers, "context_parallel")


def order_of_pages(
    seq_lens: torch.Tensor,
    query_lens: torch.Tensor,
    block_table: torch.Tensor,
    rank: torch.Tensor,
    world: int,
    block: int,
    window: int = -1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(seq_lens, block_table), as LeanAttention takes them, for a rank's share of the keys.

    seq_lens, query_lens int32 [B]: of whole requests. block_table int32 [B,M], rank int32 [1]: see decoder_contract.CONTEXT.
    window: tokens that a token sees, itself included; -1: all. Returns int32 [B] and int32 [B,M'], M' being M and, with a
    window, the blocks that it reaches back over.

    Example:
        import torch
        from leanfleet.decoder_contract import context_table
        from leanfleet.export.context_parallel import order_of_pages

        # Rank 1 of 2, blocks of 4 tokens, the 11th token of a request: the rank has block 1, and block 2 is the other's.
        ends, one = torch.tensor([11], dtype=torch.int32), torch.ones(1, dtype=torch.int32)
        table = torch.from_numpy(context_table(batch=1, pages=2, tokens=1, block=4))
        seq_lens, pages = order_of_pages(ends, one, table, rank=one, world=2, block=4)
        print(seq_lens.tolist(), pages.tolist())  # [7] [[0, -1, 1, -1]]
    """
    if window > 1:  # as many more columns as the window reaches back
        behind = block_table.new_full((1, (window + block - 2) // block), -1).expand(block_table.shape[0], -1)
        block_table = torch.cat([block_table, behind], 1)
    # In float64, in which quotients of lengths are exact: ONNX's exporter makes eight nodes of a division of integers.
    seen = (seq_lens - query_lens).unsqueeze(1).to(torch.float64)  # tokens that all new ones see
    if window > 1:
        seen = (seen - (window - 1)).clamp(min=0)
    number = rank.to(torch.float64)
    border = torch.floor(seen / block)  # the first block that has to stand in its place
    own = torch.ceil((border - number) / world)  # those of the rank before it
    skipped = border - own
    column = torch.arange(block_table.shape[1], device=block_table.device).to(torch.float64)
    # Among the rank's blocks; a fraction where it is another's.
    place = torch.where(column < own, column, (column + (skipped - number)) / world)
    index = torch.ceil(place)
    page = block_table.gather(1, index.to(torch.int64))
    ends = seq_lens - (skipped.squeeze(1) * block).to(torch.int32)
    return ends, torch.where(index == place, page, -1)


class Orders:
    """The orders of pages of one traced call, of which layers with the same window have the same. See order_of_pages."""

    def __init__(
        self,
        seq_lens: torch.Tensor,
        query_lens: torch.Tensor,
        block_table: torch.Tensor,
        rank: torch.Tensor,
        world: int,
        block: int,
    ) -> None:
        self.seq_lens, self.query_lens, self.block_table = seq_lens, query_lens, block_table
        self.rank, self.world, self.block = rank, world, block
        self._found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by window

    def options(self, window: int) -> dict[str, Any]:
        """LeanAttention's arguments for this rank's share. A process that runs a decoder in PyTorch has no other ranks: its
        share is all that counts there."""
        if window not in self._found:
            self._found[window] = order_of_pages(
                self.seq_lens, self.query_lens, self.block_table, self.rank, self.world, self.block, window
            )
        seq_lens, block_table = self._found[window]
        over = dict(world=self.world, communicator=WORLD) if torch.compiler.is_exporting() else {}
        return dict(seq_lens=seq_lens, block_table=block_table, **over)


class Shares(Cache):
    """One rank's pools of one traced call, by name ("0.key")."""

    heads_axis = 2

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]], orders: Orders, form: CacheType | None) -> None:
        super().__init__(tensors, orders.seq_lens, orders.query_lens, form)
        self.orders = orders

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        """As Cache.attend: appends the new tokens that are this rank's; attention over the shares of all ranks."""
        return super().attend(layer, query, key, value, **options | self.orders.options(options.get("window", -1)))


def served_table(block_table: torch.Tensor, tokens: int, block: int) -> torch.Tensor:
    """The table of Orders of a SERVING graph, whose calls have so many new tokens, int32 [B,M]: pages of the requests, each of
    which is a block on every rank, and behind them -1 as often as context_table has it."""
    behind = block_table.new_full((1, (tokens + block - 2) // block + 2), -1)
    return torch.cat([block_table, behind.expand(block_table.shape[0], -1)], 1)
