"""Continuous batching over engines: built by TensorRT, run by a stand-in for its runtime."""

import ctypes

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from leanfleet import trt_plugins
from leanfleet.decoder_contract import is_state
from leanfleet.export.serving import export_for_serving
from leanfleet.ort_ops.serving import ContinuousBatch as OrtBatch
from leanfleet.trt_plugins.serving import ContinuousBatch, sampler_profile, serving_profiles
from support import decoders
from support.cpu_time import rest_slow
from support.sampling_cases import Rule
from support.trt_standin import Engine, Stream, stand_in

BLOCK = 8
LIMITS = dict(pages=17, max_requests=5, step_tokens=20)


@pytest.fixture(scope="module", params=rest_slow(["llama", "minimax", "llama, fp8"]))
def folder(request, tmp_path_factory):
    torch.manual_seed(0)
    if request.param == "minimax":
        model = decoders.minimax(97)
    else:
        sizes = dict(vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6)
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=256)).eval()
    folder = tmp_path_factory.mktemp(request.param[:7])
    cache = request.param.partition(", ")[2] or None
    export_for_serving(model, folder, block=BLOCK, verify=False, cache=cache)
    return folder


def engines(folder, **limits):
    limits = LIMITS | limits
    profiles = serving_profiles(folder, **limits)
    return Engine(folder / "model.onnx", profiles), Engine(folder / "sampler.onnx", sampler_profile(limits["max_requests"]))


def poisoned(batch):
    """The batch, with NaN in every page and every row of states but the one that stays 0."""
    for name, address, rows, size in batch._places():
        first = is_state(name)
        ctypes.memset(address + first * size, 0xFF, (rows - first) * size)
    return batch


def drawn(seed):
    """[(prompt, options)]: some begin alike, some are drawn, some have penalties, some a constraint."""
    random = np.random.default_rng(seed)
    common = random.integers(0, 97, 19).tolist()
    for i in range(14):
        prompt = common[: random.integers(0, 20)] + random.integers(0, 97, random.integers(1, 30)).tolist()
        options = dict(max_new_tokens=int(random.integers(1, 25)), stop_tokens=[5])
        if i % 3 == 1:
            options |= dict(temperature=0.8, top_k=20, seed=i)
        if i % 5 == 2:
            options |= dict(repetition_penalty=1.3, logit_bias={7: 2.0}, top_logprobs=3)
        if i % 4 == 3:
            options |= dict(constraint=Rule(i))
        yield prompt, options


@pytest.mark.parametrize("speculate", (0, 3))
def test_tokens_are_onnxruntime_s(folder, monkeypatch, speculate):
    """Requests that come and go in a pool too small for them, some cancelled, over memory that held NaN: the same tokens and
    log-probabilities, and all pages and states come back."""
    stand_in(monkeypatch)
    options = LIMITS | dict(speculate=speculate)
    engine, sampler = engines(folder, speculate=speculate)
    requests = []
    for batch in (
        poisoned(ContinuousBatch(folder, engine, sampler=sampler, **options)),
        OrtBatch(folder, providers=["CPUExecutionProvider"], **LIMITS),
    ):
        random, own = np.random.default_rng(3), []
        for prompt, asked in drawn(speculate):
            own.append(batch.add(prompt, **asked))
            for _ in range(random.integers(0, 3)):
                batch.step()
            if random.random() < 0.15:
                batch.cancel(own[random.integers(len(own))])
        batch.run()
        assert batch.idle and batch.pool.in_use == 0 and len(batch.free_states) == 5 * (1 + bool(batch.speculate))
        requests.append(own)
    cancelled = 0
    for ours, theirs in zip(*requests):
        whole = len(ours.tokens) == ours.max_new_tokens or ours.tokens[-1:] == [5]
        cancelled += not whole
        size = min(len(ours.tokens), len(theirs.tokens))  # a cancelled one stops elsewhere: its steps are one behind
        assert ours.tokens[:size] == theirs.tokens[:size] and (not whole or size == len(ours.tokens))
        np.testing.assert_allclose(ours.logprobs[:size], theirs.logprobs[:size], rtol=1e-4, atol=1e-5)
        assert [[t for t, _ in top] for top in ours.top_logprobs[:size]] == [
            [t for t, _ in top] for top in theirs.top_logprobs[:size]
        ]
    assert cancelled < 7 and engine.used == {0, 1} and sampler.used == {0}


def test_engines_that_do_not_fit(folder, monkeypatch):
    stand_in(monkeypatch)
    engine, _ = engines(folder)
    for wrong, words in (
        (dict(pages=18), r"does not take pages\.\d\.key of \[18, 8, 2, \d+\], where its profiles take \[17, "),
        (dict(max_requests=6), r"does not take (input_ids of \[26\]|pages\.0\.recurrent_state of \[13, )"),
        (dict(step_tokens=21), r"does not take input_ids of \[26\], where its profiles take \[6\] to \[25\]"),
    ):
        with pytest.raises(ValueError, match=words) as found:
            ContinuousBatch(folder, engine, **LIMITS | wrong)
        assert "build it with serving_profiles of the same pages" in str(found.value)
    with pytest.raises(ValueError, match="is no engine of a serving graph"):
        ContinuousBatch(folder, engines(folder)[1], **LIMITS)
    batch = ContinuousBatch(folder, engine, **LIMITS)
    with pytest.raises(ValueError, match="need an engine of .*sampler.onnx too: build it with sampler_profile"):
        batch.add([1], top_logprobs=2)
    small = Engine(folder / "sampler.onnx", sampler_profile(4))
    batch = ContinuousBatch(folder, engine, sampler=small, **LIMITS)
    with pytest.raises(ValueError, match=r"does not take .* build it of .*sampler.onnx with sampler_profile\(5\)"):
        batch.add([1], top_logprobs=2)
    assert batch.idle and all(isinstance(s, Stream) for s in Stream.streams.values())


def test_tensorrt_builds_them(folder):
    """Both graphs become engines; every attention layer, linear layer and the choice of tokens are plugins."""
    try:
        trt_plugins.get_plugin_path()
        gpus = ["8.9"] if trt_plugins.runtime().__name__ == "tensorrt_rtx" else []
    except (ImportError, FileNotFoundError) as error:
        pytest.skip(str(error))
    if not gpus:
        pytest.skip("TensorRT-RTX alone builds without a GPU")
    profiles = serving_profiles(folder, **LIMITS)
    built = trt_plugins.build_engine(folder / "model.onnx", profiles, compute_capabilities=gpus)
    layers = [op for _, op in built.layers]
    assert layers[-1] == "SampleTokens" and "LeanAttention" in layers and len(built.engine) > 10_000
    assert ("CausalLinearDecay" in layers) == any(is_state(name) for name in Engine(folder / "model.onnx", profiles).inputs)
    built = trt_plugins.build_engine(folder / "sampler.onnx", sampler_profile(5), compute_capabilities=gpus)
    assert [op for _, op in built.layers] == ["SampleTokens"]
