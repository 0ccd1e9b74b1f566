"""Context parallel exports: a rank's share of keys is exact for any prompt, step and window, and what is refused."""

import json

import numpy as np
import pytest
import torch
import transformers

from leanfleet.decoder_contract import context_pages, context_table
from leanfleet.export import calibrate, export_decoder, lean_attention, merge_attention
from leanfleet.export.context_parallel import order_of_pages
from support.decoders import SIZES

HEADS, KV_HEADS, SIZE = 4, 2, 16


class Ranks:
    """LeanAttention over pools of so many ranks, which are empty at first, and over a whole cache beside them."""

    def __init__(self, batch, capacity, world, block):
        self.world, self.block, self.batch = world, block, batch
        self.pages = context_pages(capacity, world, block)
        shape = batch * self.pages, block, KV_HEADS, SIZE
        self.pools = [[torch.full(shape, torch.nan) for _ in range(2)] for _ in range(world)]  # nothing unwritten may be read
        self.whole = [torch.full((batch, KV_HEADS, capacity, SIZE), torch.nan) for _ in range(2)]
        self.seen = np.zeros(batch, np.int32)

    def call(self, counts, **options):
        """(attention of the ranks together, that of the whole cache, how many keys each rank read at most)."""
        self.seen += np.array(counts, np.int32)
        ends, new = torch.from_numpy(self.seen.copy()), torch.tensor(counts, dtype=torch.int32)
        q, k, v = (torch.randn(self.batch, n, max(counts), SIZE) for n in (HEADS, KV_HEADS, KV_HEADS))
        rows = {"query_lens": new, "new_key": k, "new_value": v, "append": True}
        expected, lse, *self.whole = lean_attention(q, *self.whole, ends, **rows, **options)
        table = torch.from_numpy(context_table(self.batch, self.pages, max(counts), self.block))
        parts, reads = [], []
        for rank in range(self.world):
            number = torch.tensor([rank], dtype=torch.int32)
            own, pages = order_of_pages(ends, new, table, number, self.world, self.block, options.get("window", -1))
            assert own.dtype == pages.dtype == torch.int32 and own.max() <= pages.shape[1] * self.block
            output, part, *self.pools[rank] = lean_attention(q, *self.pools[rank], own, block_table=pages, **rows, **options)
            parts.append((output, part))
            reads.append(int(own.max()))
        merged = merge_attention(*(torch.stack(each) for each in zip(*parts, strict=True)))
        return merged, (expected, lse), reads


@pytest.mark.parametrize("world, block", [(2, 4), (3, 4), (2, 1), (5, 3), (4, 16)])
@pytest.mark.parametrize("options", [{}, {"window": 1}, {"window": 5}, {"window": 9, "softcap": 4.0}], ids=str)
def test_shares_of_keys_are_exact(world, block, options):
    """Prompts in pieces of any length, steps over borders of blocks, requests that pause: a ragged batch of four."""
    torch.manual_seed(world * block)
    random = np.random.default_rng(world + block)
    ranks = Ranks(4, 40, world, block)
    calls = [[0, 1, block, 2 * block + 1], [1, 3, 0, block - 1], *random.integers(0, 2, (9, 4)).tolist(), [4, 1, 0, 3], [1] * 4]
    for counts in calls:
        if not any(counts) or (ranks.seen + counts).max() > 40:
            continue
        found, expected, _ = ranks.call(counts, **options)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)
    assert ranks.seen.min() >= 3


def test_a_step_reads_a_share_of_the_context():
    """And no more than one block in vain."""
    ranks = Ranks(1, 2000, 4, 16)
    ranks.call([1600])
    for _ in range(40):
        _, _, reads = ranks.call([1])
        assert max(reads) <= ranks.seen[0] / 4 + 2 * 16


def test_pages_of_a_request():
    assert [context_pages(n, 2, 64) for n in (1, 64, 65, 128, 129, 256)] == [1, 1, 1, 1, 2, 2]
    table = context_table(2, 3, 1, 64)
    assert table.tolist() == [[0, 1, 2, -1, -1], [3, 4, 5, -1, -1]] and table.dtype == np.int32
    assert context_table(1, 1, 66, 64).shape == (1, 5)


@pytest.mark.slow
@pytest.mark.parametrize("calibrated", [False, True])
def test_quantised_caches_are_shared_out(calibrated, tmp_path):
    """With a scale for each token, which stands in a pool beside the tokens', and with scales that are constants."""
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 1})).eval()
    cache = calibrate(model, [list(range(3, 60))], "int8") if calibrated else "int8/fp8"
    export_decoder(model, tmp_path, context_parallel=2, cache=cache)
    facts = json.loads((tmp_path / "leanfleet.json").read_text())
    assert facts["context_parallel"] == {"world": 2, "block": 64} and facts["cache"] == ("int8" if calibrated else "int8/fp8")
    assert facts["verified"]["largest_difference"] <= facts["verified"]["bound"]
