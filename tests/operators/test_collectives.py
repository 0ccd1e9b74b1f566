"""AllReduce and AllGather between processes, through every runtime of the CPU; communicators and their errors; MergeAttention
against the float64 reference."""

import math
import socket
import threading
import time

import numpy as np
import pytest
import torch

from leanfleet import communicators, native
from leanfleet.export import all_gather, all_reduce, decay_over_ranks, lean_attention, merge_attention, reference
from support import ort_models, ranks
from support.kernels import run_kernel
from support.linear_cases import OPS, one_node_model, session_of
from support.merging_cases import DTYPES, SIZES, assert_merged, parts_of

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
INF, NAN = math.inf, math.nan


# Exchanges between processes


def wait_for(condition, seconds=5):
    end = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.001)
    return met


@pytest.mark.parametrize("world", (2, 3))
def test_sums_and_gatherings(world):
    """Within one rounding of the exact sum, the same bits on all ranks, each gathering in the order of its communicator."""
    ids = [communicators.unique_id() for _ in range(2)]
    found = ranks.run_ranks(ranks.exchange, world, world, ids)
    for worst, sums in found:
        assert worst <= 0.51 and sums == found[0][1], found
    assert not any(map(ranks.shared_file_is_there, ids))


@pytest.mark.parametrize("world", (2, 3))
def test_attention_over_the_keys_of_all_ranks(world):
    """LeanAttention with `world`: dense shares of unequal lengths and none, sinks, both layouts."""
    given = communicators.unique_id(), None, None, "cpu", 40 + world
    for found in ranks.run_ranks(ranks.attention_over_ranks, world, world, *given):
        assert isinstance(found, tuple) and found[0] <= 1 and found[1] == 30, found


@pytest.mark.parametrize("world", (2, 3))
def test_linear_attention_over_tokens_of_all_ranks(world):
    """Outputs, states behind the text and gradients, of pieces of unequal lengths, both layouts, shared heads."""
    for found in ranks.run_ranks(ranks.token_shards, world, world, communicators.unique_id(), 50 + world):
        assert isinstance(found, tuple) and found[0] <= 1 and found[1] == 24, found


def test_small_gradients_over_a_long_text():
    """Of float16 they are below its range where the operator divides them by sums over thousands of tokens."""
    for found in ranks.run_ranks(ranks.long_token_shards, 2, 2, communicators.unique_id(), 61):
        assert isinstance(found, float) and found <= 1, found


def test_linear_attention_over_tokens_as_nodes(tmp_path):
    for found in ranks.run_ranks(ranks.token_shards_as_nodes, 2, 2, communicators.unique_id(), str(tmp_path)):
        assert isinstance(found, float) and found < 1e-5, found


@pytest.mark.parametrize(
    "changes, message",
    (
        (dict(log_decay=torch.zeros(3)), "CausalLinearDecay: log_decay has shape .3.: axis 0 of .Hv. is 3; expected 2"),
        (dict(key=torch.randn(1, 3, 4, 8)), "CausalLinearDecay: .* Hv is a multiple of Hk|CausalLinearDecay: .*multiple"),
        (
            dict(key=torch.randn(1, 2, 3, 8)),
            "CausalLinearDecay: key has shape .1,2,3,8.: axis 2 of .B,Hk,N,R. is 3; expected 4",
        ),
        (dict(log_decay=torch.zeros(1, 2, 4, 8)), "decay_over_ranks: log_decay has 4 axes; expected .Hv. or one of each token"),
        (
            {n: torch.randn(1, 2, 3 + (n != "key"), 8).half() for n in ("query", "key", "value")},
            "CausalLinearDecay: key has shape .1,2,3,8.: axis 2 of .B,Hk,N,R. is 3; expected 4",
        ),
        (dict(log_decay=torch.ones(2)), "Pass the logarithm, not the decay itself"),
        (dict(world=2), "AllGather: world is 2, but communicator 'world' has 1 ranks"),
        (dict(rank=torch.tensor([0]), key=torch.ones(1, 2, 4, 8, requires_grad=True)), "rank is given, .* no gradients"),
    ),
)
def test_wrong_arguments_of_token_shards(world_of_one, changes, message):
    query, key, value = torch.randn(3, 1, 2, 4, 8)
    with pytest.raises(ValueError, match=message):
        decay_over_ranks(**dict(query=query, key=key, value=value) | changes)


def test_token_shards_without_a_communicator():
    with pytest.raises(ValueError, match="AllGather: there is no communicator 'world'"):
        decay_over_ranks(*torch.randn(3, 1, 2, 4, 8))


@pytest.mark.slow
def test_in_pytorch_and_onnx_runtime():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    first, second = ranks.run_ranks(ranks.runtimes, 2, 2, port)
    assert isinstance(first, dict) and first == second, (first, second)


@pytest.mark.slow
@pytest.mark.parametrize("how", ("killed", "destroyed"))
def test_a_rank_that_ends_is_named(how):
    found = ranks.run_ranks(ranks.dies, 3, 3, communicators.unique_id(), 1, how, dying=(1,) if how == "killed" else ())
    for rank in (0, 2):
        text, seconds = found[rank]
        end = r"has ended" if how == "killed" else "has destroyed its communicator"
        assert text.startswith(f"AllReduce 'layers.3': communicator 'world', rank {rank} of 3: rank "), text
        assert "rank 1 (process " in text and text.endswith(end), text
        assert seconds < 10


@pytest.mark.parametrize(
    "what, parts",
    (
        ("size", ("is at a sum of 11 float32 numbers, this one at a sum of 10 float32 numbers; all ranks must run the same",)),
        ("type", ("is at a sum of 10 float16 numbers, this one at a sum of 10 float32 numbers",)),
        ("kind", ("is at a gathering of 10 float32 numbers, this one at a sum of 10 float32 numbers",)),
        ("late", ("communicator 'world', rank 0 of 2: rank 1 has not come to the same node within 1 s",)),
        ("world", ("rank 1 says that there are 3 ranks; all must say the same",)),
    ),
)
def test_ranks_that_differ(what, parts):
    """Every rank gets an error; one that is late, in its next call."""
    found = ranks.run_ranks(ranks.differs, 2, 2, [communicators.unique_id() for _ in range(2)], what)
    assert all(part in found[0] for part in parts), found
    assert "Error: " in found[1], found


def test_a_rank_that_does_not_come():
    own, seen = communicators.unique_id(), []
    late = threading.Thread(target=lambda: seen.append(wait_for(lambda: ranks.shared_file_is_there(own))))
    late.start()
    with pytest.raises(native.LeanfleetError, match="communicator 'world', rank 0 of 2: rank 1 has not come within 0.5 s"):
        communicators.create("world", 0, 2, id=own, timeout=0.5)
    late.join()
    assert communicators.names() == [] and seen == [True] and not ranks.shared_file_is_there(own)


def test_ids_are_exchanged_through_a_file(tmp_path):
    made = communicators.exchange_id(tmp_path / "id", 0)
    assert communicators.exchange_id(tmp_path / "id", 1) == made
    with pytest.raises(FileExistsError, match="is there already"):
        communicators.exchange_id(tmp_path / "id", 0)
    with pytest.raises(TimeoutError, match="rank 1: rank 0 has not written .* within 0.1 s"):
        communicators.exchange_id(tmp_path / "other", 1, timeout=0.1)


# One process


def test_outside_of_torchrun(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="RANK, .*is not set; start the program with torchrun, or call create with an id"):
        communicators.world_from_torchrun()


def test_a_world_of_one():
    x = torch.randn(2, 3, 4)
    with communicators.create() as world, communicators.create("tp"):
        assert (world.rank, world.world, communicators.names()) == (0, 1, ["tp", "world"])
        world.check()
        world.wait(lambda: True)
        assert torch.equal(all_reduce(x), x) and torch.equal(all_gather(x, communicator="tp"), x)
        assert torch.equal(all_reduce(x.double()), x.double())
        with pytest.raises(ValueError, match="AllGather: world is 2, but communicator 'world' has 1 ranks"):
            all_gather(x, world=2)
        with pytest.raises(ValueError, match="there is a communicator 'world' already; destroy it first"):
            communicators.create()
        for name, library in (("AllReduce", True), ("AllReduce", False), ("AllGather", True), ("AllGather", False)):
            model = one_node_model(name, [], {}, {"input": 3})
            found = ort_models.run_node(session_of(model, library), OPS[name], {"input": x.clone()})
            assert torch.equal(found["output"], x), (name, library)
    assert communicators.names() == []


def test_without_a_communicator():
    message = r"AllReduce.*: there is no communicator 'tp' for tensors of the CPU; create it before the first call: leanfleet.*"
    with pytest.raises(ValueError, match=message):
        all_reduce(torch.ones(3), communicator="tp")
    model = one_node_model("AllReduce", [], {"communicator": "tp"}, {"input": 1})
    with pytest.raises(Exception, match=message):
        ort_models.run_node(session_of(model, True), OPS["AllReduce"], {"input": torch.ones(3)})


@pytest.mark.parametrize(
    "arguments, message",
    (
        (dict(rank=2, world=2), "communicator 'world': rank is 2; expected 0 to world - 1 = 1"),
        (dict(world=65), "world is 65; expected 1 to 64"),
        (dict(world=2), "it has no id; expected the same bytes on all of its 2 ranks"),
        (dict(name=""), "a communicator's name is empty"),
        (dict(timeout=0.0), "the time-out is not above 0 seconds"),
        (dict(engine="mpi"), "engine is 'mpi'; expected 'shared_memory' or 'nccl'"),
    ),
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        communicators.create(**arguments)


def test_a_text_attribute_is_any_but_the_empty_one():
    with pytest.raises(ValueError, match="AllReduce: attribute communicator is ''; expected a text that is not empty"):
        all_reduce(torch.ones(3), communicator="")
    long = "a name much longer than any value of an attribute in the schema, which a node may have"
    with communicators.create(long):
        assert all_reduce(torch.ones(3), communicator=long).tolist() == [1.0] * 3
        model = one_node_model("AllReduce", [], {"communicator": long}, {"input": 1})
        assert ort_models.run_node(session_of(model, True), OPS["AllReduce"], {"input": torch.ones(3)})["output"].sum() == 3


def test_shapes_of_a_gathering_are_inferred():
    """Where the sizes are known; an open one stays open."""
    model = one_node_model("AllGather", [], {"world": 3}, {"input": 2})
    for v, sizes in ((model.graph.input[0], (4, 5)), (model.graph.output[0], ("rows", "columns"))):
        for d, size in zip(v.type.tensor_type.shape.dim, sizes, strict=True):
            d.Clear()
            setattr(d, "dim_value" if isinstance(size, int) else "dim_param", size)
    found = session_of(model, False).run(None, {"input": np.ones((4, 5), np.float32)})
    assert found[0].shape == (12, 5)
    for world, message in (
        (2**60, "output has shape .*; a tensor has at most 2\\^47 elements"),
        (65, "world is 65; expected 1 to 64"),
    ):
        with pytest.raises(ValueError, match=message):
            all_gather(torch.ones(4, 5), world=world)


@pytest.mark.parametrize("layout", ("bhnd", "bnhd"))
@pytest.mark.parametrize("sinks", (False, True))
def test_a_process_alone_takes_all_ranks_keys_to_be_its_own(layout, sinks):
    """The reference and the function body with world: attention over this process's keys, three times, and one sink."""
    swap = (lambda x: x.transpose(1, 2).contiguous()) if layout == "bnhd" else (lambda x: x)
    query, (key, value) = torch.randn(2, 4, 3, 16), torch.randn(2, 2, 2, 8, 16)
    lens = torch.tensor([8, 0], dtype=torch.int32)
    logits = {"sinks": torch.randn(4)} if sinks else {}
    inputs = {"query": swap(query), "key_cache": key, "value_cache": value, "seq_lens": lens, **logits}
    attrs = {"world": 3, "causal": 0, "layout": layout}
    thrice = [torch.cat([x] * 3, 2) for x in (key, value)]
    exact, exact_lse = reference.lean_attention(query, *thrice, 3 * lens, **logits, causal=0, compute_dtype=torch.float64)
    for found in (
        reference.lean_attention(**inputs, **attrs, compute_dtype=torch.float64),
        ort_models.run_node(
            session_of(one_node_model("LeanAttention", ["seq_lens", *logits], attrs)), OPS["LeanAttention"], inputs
        ).values(),
    ):
        output, lse = map(swap, found)
        torch.testing.assert_close(output, exact, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse, exact_lse, atol=1e-5, rtol=1e-5)


# MergeAttention


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merging(dtype, instruction_set):
    for seed, sizes in enumerate(SIZES):
        inputs = parts_of(sizes, dtype, seed)
        assert_merged(run_kernel("MergeAttention", inputs, {}, threads=1 + seed % 3), inputs)


@GPU
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merging_cuda(dtype):
    for seed, sizes in enumerate((*SIZES, (4, 4, 32, 300, 128))):
        inputs = parts_of(sizes, dtype, seed)
        found = run_kernel("MergeAttention", {n: t.cuda() for n, t in inputs.items()}, {})
        assert_merged({n: t.cpu() for n, t in found.items()}, inputs)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_merging_in_onnx_runtime(dtype):
    inputs = parts_of(SIZES[2], dtype)
    model = one_node_model("MergeAttention", [], {}, dtype=str(dtype).removeprefix("torch."))
    for library in (False, True):
        assert_merged(ort_models.run_node(session_of(model, library), OPS["MergeAttention"], inputs), inputs)


@pytest.mark.parametrize("world", (2, 4))
def test_attention_in_shards_is_attention(world):
    """Keys cut into shards, one of them empty for the second request, merged to what attention over all of them gives."""
    query, key, value = torch.randn(2, 4, 3, 32), torch.randn(2, 2, 60, 32), torch.randn(2, 2, 60, 16)
    lens = torch.tensor([60, 13], dtype=torch.int32)
    whole, lse = reference.lean_attention(query.double(), key.double(), value.double(), lens, causal=False)[:2]
    size, outputs, lses = 60 // world, [], []
    for r in range(world):
        shard = slice(r * size, (r + 1) * size)
        own = (lens - r * size).clamp(0, size).int()
        output, own_lse = lean_attention(query, key[:, :, shard], value[:, :, shard], own, causal=False)
        outputs.append(output)
        lses.append(own_lse)
    merged, total = merge_attention(torch.stack(outputs), torch.stack(lses))
    assert (merged - whole).abs().max() < 2e-6 and (total - lse).abs().max() < 2e-6


@pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=GPU)))
def test_values_that_are_not_finite(device):
    """They reach their own row alone, and never give a finite number that is wrong."""
    inputs = {"partial_output": torch.randn(3, 1, 1, 6, 8), "partial_lse": torch.randn(3, 1, 1, 6)}
    inputs["partial_lse"][1, 0, 0, 0] = NAN
    inputs["partial_lse"][:, 0, 0, 1] = torch.tensor([-INF, NAN, -INF])
    inputs["partial_lse"][2, 0, 0, 2] = INF
    inputs["partial_output"][1, 0, 0, 3, 5] = NAN
    found = run_kernel("MergeAttention", {n: t.to(device) for n, t in inputs.items()}, {})
    output, lse = found["output"].cpu()[0, 0], found["lse"].cpu()[0, 0]
    assert not output[:3].isfinite().any() and not lse[:3].isfinite().any()
    assert output[3].isnan().tolist() == [i == 5 for i in range(8)] and output[4:].isfinite().all() and lse[3:].isfinite().all()
