"""Exchanges between GPUs over NCCL, and communicators of NCCL where there is none."""

import os
import re

import pytest
import torch

from leanfleet import communicators, native
from support import ranks

GPUS = torch.cuda.device_count()
TWO = pytest.mark.skipif(GPUS < 2, reason=f"needs two CUDA devices; there are {GPUS}")


@TWO
@pytest.mark.parametrize("direct", (False, True))
def test_exchanges(direct, monkeypatch):
    """Every type and sizes around those that fit windows, eager and in CUDA graphs, with windows and by NCCL alone."""
    monkeypatch.setenv("LEANFLEET_DIRECT", str(int(direct)))
    for found in ranks.run_ranks(ranks.exchange_on_gpus, GPUS, GPUS, communicators.unique_id("nccl")):
        assert isinstance(found, tuple) and found[0] == 36, found
        assert (found[1] >= 20) if direct else found[1] == 0


@TWO
@pytest.mark.parametrize("direct", (False, True))
def test_attention_over_the_keys_of_all_gpus(direct, monkeypatch):
    monkeypatch.setenv("LEANFLEET_DIRECT", str(int(direct)))
    given = communicators.unique_id("nccl"), None, None, "cuda", 50
    for found in ranks.run_ranks(ranks.attention_over_ranks, GPUS, GPUS, *given):
        assert isinstance(found, tuple) and found[0] <= 1 and found[1] == 30, found
        assert found[2] == (30 if direct else 0)


@TWO
@pytest.mark.parametrize("direct", (False, True))
def test_linear_attention_over_tokens_of_all_gpus(direct, monkeypatch):
    """Outputs, states behind the text and gradients of CausalLinearDecay and NormalizedLinearAttention, of pieces of unequal
    lengths."""
    monkeypatch.setenv("LEANFLEET_DIRECT", str(int(direct)))
    for found in ranks.run_ranks(ranks.token_shards, GPUS, GPUS, communicators.unique_id("nccl"), 52, "cuda"):
        assert isinstance(found, tuple) and found[0] <= 1 and found[1] == 24, found


@TWO
@pytest.mark.parametrize("graph", (False, True))
def test_a_rank_that_dies(graph):
    found = ranks.run_ranks(ranks.dies_on_gpu, 2, 2, communicators.unique_id("nccl"), graph, dying=(1,))
    text, seconds = found[0]
    assert "communicator 'world', rank 0 of 2: rank 1 (process " in text and text.endswith("has ended"), text
    assert seconds < 20


def test_without_nccl(tmp_path):
    """A path that is no library, and a library that is another."""
    with pytest.raises(native.UnsupportedError, match="NCCL cannot be loaded: .*nothing.so.*nvidia-nccl-cu13"):
        communicators.unique_id("nccl", str(tmp_path / "nothing.so"))
    with pytest.raises(native.UnsupportedError, match="lacks functions of NCCL 2.14 or later"):
        communicators.unique_id("nccl", str(native.library_path("leanfleet")))
    with pytest.raises(ValueError, match="communicator 'world': its id has 16 bytes; expected the 128 of one made for NCCL"):
        communicators.create("world", 0, 2, id=communicators.unique_id(), engine="nccl")


@pytest.mark.parametrize(
    "how, message",
    (
        ("dies", r"rank 0 of 2: rank 1 \(process \d+\) has ended$"),
        ("error", r"rank 0 of 2: an exchange failed in NCCL: remote process exited .* \(connection closed by 10.0.0.7\)$"),
        ("hang", "rank 0 of 2: creating it has waited 1 s for the other ranks$"),
        ("late", "rank 0 of 2: a step has waited 0.5 s for the other ranks$"),
        ("good", None),
    ),
)
def test_how_a_communicator_ends(how, message, fake_nccl, tmp_path, monkeypatch):
    """With a library that stands for NCCL: what is aborted, and what is destroyed."""
    monkeypatch.setenv("FAKE_NCCL_FOLDER", str(tmp_path))
    id, dying = os.urandom(128), (1,) if how == "dies" else ()
    text, seconds, aborts, destroys = ranks.run_ranks(ranks.life_with_nccl, 2, 2, id, fake_nccl, how, dying=dying)[0]
    assert (aborts, destroys) == ((0, 1) if how == "good" else (1, 0)), text
    assert text is None if message is None else re.search("communicator 'world', " + message, text), text
    assert seconds < 20 and not ranks.shared_file_is_there(id)
