"""Low-rank stand-ins for softmax: their features against plain float64, error over rank, whole models in PyTorch and exported."""

import math

import pytest
import torch
import transformers

from leanfleet.export import export_decoder
from leanfleet.export.linear_attention import register_transformers
from leanfleet.export.low_rank import FavorFeatures, QuantisedKeys, codebooks, linearise, orthogonal_gaussian
from leanfleet.export.running_sums import running_sums_cache
from leanfleet.ort_ops import generate, load_decoder
from support.decoders import make, prompts

CALIBRATION = torch.tensor(prompts(300))


def softmax_attention(query, key, value):
    scores = query @ key.mT
    steps = torch.arange(scores.shape[-1])
    return scores.masked_fill(steps[:, None] < steps, -math.inf).softmax(-1) @ value


def by_features(features, query, key, value):
    scores = (features.query(query) @ features.key(key).mT).tril()
    return scores / scores.sum(-1, keepdim=True) @ value


def inputs(tokens=60, size=16):
    torch.manual_seed(1)
    query, key, value = torch.randn(3, 1, 2, tokens, size, dtype=torch.float64).unbind()
    return query * size**-0.25, key * size**-0.25, value


def relative(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def test_orthogonal_rows():
    rows = orthogonal_gaussian(40, 16, 0).double()
    for block in rows.split(16):
        gram = block @ block.T
        assert (gram - gram.diagonal().diag()).abs().max() < 1e-4
    lengths = torch.cat([orthogonal_gaussian(16, 16, seed).square().sum(1) for seed in range(40)])
    assert abs(lengths.mean() - 16) < 1  # those of Gaussian vectors: chi-squared of 16
    assert torch.equal(orthogonal_gaussian(40, 16, 3), orthogonal_gaussian(40, 16, 3))


def test_favor_is_the_papers_equation():
    """phi(x) = exp(w.x - |x|^2 / 2) / sqrt(R), a row of queries up to a factor of its own."""
    query, key, _ = inputs()
    features = FavorFeatures(16, 50, 0)
    w = features.directions.double()

    def plain(x):
        return torch.stack([torch.exp(x @ row - (x * x).sum(-1) / 2) for row in w], -1) / math.sqrt(50)

    torch.testing.assert_close(features.key(key), plain(key))
    ratio = features.query(query) / plain(query)
    torch.testing.assert_close(ratio, ratio[..., :1].expand_as(ratio))


def test_favors_error_falls_with_rank():
    query, key, value = inputs()
    tensors = query / 2, key / 2, value  # rows as long as those of the first test have an error with a long tail
    expected = softmax_attention(*tensors)
    errors = []
    for rank in (16, 256, 4096):
        errors.append(sum(relative(by_features(FavorFeatures(16, rank, s), *tensors), expected) for s in range(5)) / 5)
    assert errors[1] < 0.5 * errors[0] and errors[2] < 0.5 * errors[1] and errors[2] < 0.1


def test_quantised_keys_are_softmax_over_codewords():
    query, key, value = inputs()
    features = QuantisedKeys(codebooks(key[0], 12, 0))
    nearest = torch.cdist(key[0], features.codebook).argmin(-1)
    codewords = torch.stack([features.codebook[h][nearest[h]] for h in range(2)])[None]
    torch.testing.assert_close(by_features(features, query, key, value), softmax_attention(query, codewords, value))


def test_quantised_keys_error_falls_with_codes():
    query, key, value = inputs()
    expected = softmax_attention(query, key, value)
    errors = [
        relative(by_features(QuantisedKeys(codebooks(key[0], codes, 0)), query, key, value), expected) for codes in (2, 15, 60)
    ]
    assert errors[1] < 0.85 * errors[0] and errors[2] < 1e-12  # a codeword for each key: exact


@pytest.fixture(params=["favor", "vq"])
def model(request):
    return linearise(make("qwen3"), request.param, [1], features=24, calibration=CALIBRATION)


def test_steps_equal_the_whole_and_look_back_alone(model):
    model = model.double()
    ids = torch.tensor(prompts(30, 30))
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        cache = running_sums_cache(model.config)
        pieces = [model(part, past_key_values=cache).logits for part in ids.split([7, 1, 12, 1, 9], 1)]
        torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-11, atol=1e-11)
        other = ids.clone()
        other[:, 20:] = 5  # what comes later changes nothing before
        torch.testing.assert_close(model(other, use_cache=False).logits[:, :20], whole[:, :20], rtol=1e-12, atol=1e-12)
    assert [t.shape for t in cache.layers[1].sums] == [(2, 2, 24, 17)]


def test_left_padded_batches(model):
    asked = prompts(2, 9, 5)
    ids, mask = torch.zeros(3, 9, dtype=torch.int64), torch.zeros(3, 9, dtype=torch.int64)
    for i, row in enumerate(asked):
        ids[i, 9 - len(row) :], mask[i, 9 - len(row) :] = torch.tensor(row), 1
    options = dict(max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None)
    found = model.generate(ids, attention_mask=mask, past_key_values=running_sums_cache(model.config), **options)
    for row, prompt in zip(found, asked, strict=True):
        alone = model.generate(torch.tensor([prompt]), past_key_values=running_sums_cache(model.config), **options)
        assert row[9:].tolist() == alone[0, len(prompt) :].tolist()


def test_export(model, tmp_path):
    export_decoder(model, tmp_path)
    asked, expected = prompts(3, 9, 6), []
    for prompt in asked:
        tokens = list(prompt)
        for _ in range(8):
            with torch.no_grad():
                tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        expected.append(tokens[len(prompt) :])
    decoder = load_decoder(tmp_path, providers=["CPUExecutionProvider"])
    assert generate(decoder, asked, 8, stop_tokens=[])[0] == expected
    assert generate(load_decoder(tmp_path, library=False), asked, 8, stop_tokens=[])[0] == expected
    shapes = {c.name: c.shape for c in decoder.caches}
    assert shapes["past_key_values.1.recurrent_state"] == ["batch", 2, 24, 17] and len(shapes) == 3


def test_errors(tmp_path):
    model = make("llama")
    with pytest.raises(ValueError, match="method is 'nystrom'; it is one of favor, vq"):
        linearise(model, "nystrom", [0])
    with pytest.raises(ValueError, match="layers are .2.; expected numbers from 0 to 1"):
        linearise(model, "favor", [2])
    with pytest.raises(ValueError, match="give calibration"):
        linearise(model, "vq", [0])
    with pytest.raises(ValueError, match="400 codes need as many tokens of calibration; there are 300"):
        linearise(make("llama"), "vq", [0], features=400, calibration=CALIBRATION)
    assert model.config._attn_implementation == "sdpa" and not hasattr(model.config, "leanfleet_linear_layers")
    linearise(model, "favor", [0], features=8)
    with pytest.raises(ValueError, match="has linear attention already"):
        linearise(model, "favor", [1])
    model(torch.tensor([[3, 4]]))
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=register_transformers())
    with pytest.raises(ValueError, match=r"leanfleet_low_rank = 'favor', and the layer has no features"):
        loaded(torch.tensor([[3, 4]]))
