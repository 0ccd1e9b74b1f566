"""Tensor parallel exports: shares that sum up to the model, and files whose ranks, a process each, give one process's tokens."""

import copy
import threading

import pytest
import torch
import transformers

from leanfleet.export import LinearDecoder, tensor_parallel
from support.decoders import FAMILIES, HYBRIDS, SIZES, make, minimax, ours

MORE = {
    "gpt-neox": ("GPTNeoXConfig", dict(num_key_value_heads=None, head_dim=None, rotary_pct=0.5)),
    "phi": ("PhiConfig", dict(head_dim=None, partial_rotary_factor=0.5)),
    "qwen3-moe": ("Qwen3MoeConfig", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)),
    "starcoder2": ("Starcoder2Config", dict(head_dim=None, sliding_window=None)),
    # SmolLM2-135M's heads: two ranks have two groups and one
    "uneven": (
        "LlamaConfig",
        dict(num_attention_heads=9, num_key_value_heads=3, hidden_size=144, attention_bias=True, mlp_bias=True),
    ),
    # The gated delta rule: 2 key heads, and 3 of which a rank has two
    "qwen3-next": HYBRIDS["qwen3-next"],
    "qwen3.5": HYBRIDS["qwen3.5"],
    # Scans beside attention: heads of one group, of which a rank has two and one, and groups with a norm of their own
    "falcon-h1": (HYBRIDS["falcon-h1"][0], HYBRIDS["falcon-h1"][1] | dict(mamba_n_heads=3, mamba_d_ssm=72)),
    "falcon-h1-groups": (HYBRIDS["falcon-h1"][0], HYBRIDS["falcon-h1"][1] | dict(mamba_n_groups=2, mamba_rms_norm=True)),
    "falcon-h1-norm": (HYBRIDS["falcon-h1"][0], HYBRIDS["falcon-h1"][1] | dict(mamba_rms_norm=True)),  # in front of its gate
    "bamba": HYBRIDS["bamba"],
    "bamba-groups": (HYBRIDS["bamba"][0], HYBRIDS["bamba"][1] | dict(mamba_n_groups=2)),
    "granite": (HYBRIDS["granite"][0], HYBRIDS["granite"][1] | dict(num_local_experts=0)),
    "granite-experts": HYBRIDS["granite"],
    "mamba2": HYBRIDS["mamba2"],
    "olmo-hybrid": HYBRIDS["olmo-hybrid"],
    "olmo2": ("Olmo2Config", {}),
    "qwen3.5-uneven": (HYBRIDS["qwen3.5"][0], HYBRIDS["qwen3.5"][1] | dict(linear_num_key_heads=3, linear_num_value_heads=6)),
}


# More ranks than heads of keys and values (or key heads, or groups of a scan): a head is on several ranks.
COPIES = [
    ("uneven", 4),
    ("uneven", 6),
    ("llama", 3),
    ("phi3", 4),
    ("gpt-oss", 4),
    ("minimax", 4),
    ("qwen3-next", 3),
    ("qwen3.5", 4),
    ("mamba2", 4),
    ("bamba-groups", 3),
    ("falcon-h1-groups", 4),
    ("falcon-h1-norm", 3),
    ("olmo2", 4),
]
# Whose norms over all heads transformers computes in float32.
FLOAT32_NORMS = "minimax", "minimax-uneven", "bamba", "granite", "granite-experts", "olmo2", "olmo-hybrid", "falcon-h1-norm"
# The same of norms of a group that ranks share, and of the gated delta rule of a head's share of values.
FLOAT32_SHARES = "mamba2", "bamba-groups", "falcon-h1-groups", "qwen3-next", "qwen3.5"
UNEVEN_MINIMAX = dict(hidden_size=144, num_attention_heads=9, num_key_value_heads=3)
OURS = {
    "minimax": minimax,
    "minimax-uneven": lambda: minimax(**UNEVEN_MINIMAX),
    "retnet": lambda: ours("retnet"),
    "retnet-released": lambda: ours("retnet", released=True, value_size=144, activation="swish"),
    "transnormer": lambda: ours("transnormer"),
    "transnormer-released": lambda: ours("transnormer", released=True, num_attention_heads=3),
}


def small(family):
    if family in FAMILIES:
        return make(family)
    if family in OURS:
        torch.manual_seed(5)
        return OURS[family]().eval()
    name, extra = MORE[family]
    sizes = {key: value for key, value in {**SIZES, **extra}.items() if value is not None}
    torch.manual_seed(5)
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**sizes)).eval()


class Ring:
    """AllReduce between threads of this process, one a rank."""

    def __init__(self, world):
        self.barrier, self.parts, self.local = threading.Barrier(world), [None] * world, threading.local()

    def __call__(self, x, communicator):
        self.parts[self.local.rank] = x
        self.barrier.wait(60)
        total = sum(self.parts[1:], self.parts[0])
        self.barrier.wait(60)
        return total


def plain(model):
    return {} if isinstance(model, LinearDecoder) else {"use_cache": False}


def logits_of_ranks(model, ids, world, monkeypatch, **how):
    """Logits of each rank, in float64 and by eager attention."""
    ring, found = Ring(world), [None] * world
    monkeypatch.setattr(tensor_parallel, "all_reduce", ring)

    def run(rank):
        own, ring.local.rank = copy.deepcopy(model), rank
        with tensor_parallel.shard(own, rank, world, **how), torch.no_grad():
            found[rank] = own(input_ids=ids, **plain(model)).logits

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    return found


@pytest.mark.parametrize("family, world", [*((family, 2) for family in [*FAMILIES, *MORE, *OURS]), *COPIES])
def test_shares_sum_up_to_the_model(family, world, monkeypatch):
    model = small(family).double()
    if not isinstance(model, LinearDecoder):
        model.set_attn_implementation("eager")
        if model._can_set_experts_implementation():
            model.set_experts_implementation("eager")
    with torch.no_grad():  # biases that are zero would hide one that is added on every rank
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.normal_()
    ids = torch.randint(3, SIZES["vocab_size"], (2, 11))
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    with torch.no_grad():
        expected = model(input_ids=ids, **plain(model)).logits
    rounded = family in FLOAT32_NORMS or (family in FLOAT32_SHARES and world > 2)
    most = 3e-6 * float(expected.abs().max()) if rounded else 1e-9
    for found in logits_of_ranks(model, ids, world, monkeypatch):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=most)
    config = vars(model.config).copy()
    with tensor_parallel.shard(model, 1, world):
        held = sum(p.numel() for p in model.parameters())
    assert held < 0.9 * sum(p.numel() for p in model.parameters())
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before and vars(model.config) == config


@pytest.mark.parametrize("family, world", [("qwen3-moe", 2), ("gpt-oss", 3), ("granite-experts", 3), ("minimax", 4)])
@pytest.mark.parametrize("form", ["eager", "batched_mm"])
def test_whole_experts_sum_up_to_the_model(family, world, form, monkeypatch):
    """Of four experts, of which a token has two: on three ranks 2, 1 and 1."""
    model = small(family).double()
    model.set_attn_implementation("eager")
    model.set_experts_implementation(form)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) / 8)
    ids = torch.randint(3, SIZES["vocab_size"], (2, 11))
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
    most = 3e-6 * float(expected.abs().max()) if family in FLOAT32_NORMS else 1e-9
    for found in logits_of_ranks(model, ids, world, monkeypatch, whole_experts=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=most)
    experts = next(m for m in model.modules() if tensor_parallel._is_experts(m))
    before = vars(experts).copy()
    with tensor_parallel.shard(model, 0, world, whole_experts=True):
        assert len(experts.down_proj) == experts.num_experts == -(-4 // world)
    assert vars(experts) == before and experts.down_proj.shape[0] == 4


@pytest.mark.parametrize("count, world", [(3, 2), (8, 4), (7, 3), (2, 2), (1, 2)])
def test_shares(count, world):
    found = tensor_parallel.shares(count, world)
    assert [i for r in found for i in r] == list(range(count)) and len(found) == world
    assert max(map(len, found)) - min(map(len, found)) <= 1


@pytest.mark.parametrize(
    "heads, kv_heads, world", [(9, 3, 2), (9, 3, 3), (9, 3, 4), (9, 3, 6), (8, 2, 5), (4, 1, 3), (4, 4, 3)]
)
def test_heads_over_ranks(heads, kv_heads, world):
    """Every query head is on one rank, which has just the heads of keys that its queries read, as many of them for each."""
    found = [tensor_parallel.HeadShare(heads, kv_heads, rank, world) for rank in range(world)]
    assert [head for share in found for head in share.own] == list(range(heads))
    assert [head for share in found if share.first for head in share.keys] == list(range(kv_heads))
    for share in found:
        readers = [head // (heads // kv_heads) for head in share.own]
        assert sorted(set(readers)) == list(share.keys) and len({readers.count(head) for head in share.keys}) == 1
    assert max(len(share.keys) for share in found) == -(-kv_heads // world)


def test_columns_are_shared_out_in_tiles():
    assert [len(r) for r in tensor_parallel.columns(1536, 2)] == [768, 768]
    assert [len(r) for r in tensor_parallel.columns(320, 2)] == [192, 128]
    assert [len(r) for r in tensor_parallel.columns(128, 4)] == [32] * 4
    assert [i for r in tensor_parallel.columns(37, 4) for i in r] == list(range(37))
