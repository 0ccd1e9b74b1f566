"""Low-rank stand-ins for softmax: their features against plain float64, error over rank, whole models in PyTorch and exported."""

import math

import pytest
import torch
import transformers

from leanfleet.export import export_decoder
from leanfleet.export.linear_attention import attention, register_transformers
from leanfleet.export.low_rank import (
    FavorFeatures,
    LaraFeatures,
    QuantisedKeys,
    codebooks,
    hyper_attention,
    linearise,
    lsh_buckets,
    orthogonal_gaussian,
)
from leanfleet.export.running_sums import running_sums_cache
from leanfleet.export.serving import export_for_serving
from leanfleet.ort_ops import generate, load_decoder
from leanfleet.ort_ops.serving import ContinuousBatch
from support.benchmarks import script
from support.cpu_time import rest_slow
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


def test_lara_is_the_papers_equation():
    """One direction a landmark, weighed by the balance heuristic; a row of queries and all keys up to a factor."""
    query, key, _ = inputs(60, 8)
    features = LaraFeatures(query[0].repeat_interleave(2, 0), key[0], 12, 0).double()
    wide = query.repeat_interleave(2, 1)
    found = features.query(wide) @ features.key(key).repeat_interleave(2, 1).mT
    for head in range(4):
        q, k, w = wide[0, head], key[0, head // 2], features.directions[head // 2]
        landmarks = [
            a.mean(0) + b.mean(0) for a, b in zip(query[0, head // 2].tensor_split(12), k.tensor_split(12), strict=True)
        ]

        def density(x, mean=0.0):
            return torch.exp(-(x - mean).square().sum() / 2)

        expected = torch.zeros(60, 60, dtype=torch.float64)
        for direction in w:
            weight = density(direction) / sum(density(direction, mean) for mean in landmarks)
            phi_q, phi_k = (torch.exp(x @ direction - x.square().sum(-1) / 2) for x in (q, k))
            expected += weight * phi_q[:, None] * phi_k
        torch.testing.assert_close(found[0, head] / found[0, head].sum(-1, True), expected / expected.sum(-1, True))


def test_laras_error_falls_with_rank():
    query, key, value = inputs()
    more = inputs(2048)
    expected = softmax_attention(query, key, value)
    errors = []
    for rank in (8, 128, 2048):
        made = (LaraFeatures(more[0][0], more[1][0], rank, seed) for seed in range(5))
        errors.append(sum(relative(by_features(features, query, key, value), expected) for features in made) / 5)
    assert errors[1] < 0.7 * errors[0] and errors[2] < 0.6 * errors[1], errors


def plain_hyper(query, key, value, directions, draw, block, shortest):
    """hyper_attention of one head by lists of pairs: out_i is the mean of values weighed by sums of weight * exp(q_i.k_j)."""
    count = len(query)
    weights = torch.zeros(count, count, dtype=torch.float64)

    def fill(first, last):
        if last - first <= shortest:
            for i in range(first, last):
                weights[i, first : i + 1] += 1
            return
        middle = first + (last - first) // 2
        fill(first, middle)
        fill(middle, last)
        keys = middle - first
        if keys <= block:
            weights[middle:last, first:middle] += 1
            return
        blocks, places = -(-keys // block), []
        for begin, end, x in ((middle, last, query), (first, middle, key)):
            order = sorted(range(begin, end), key=lambda i: (lsh_buckets(x[i], directions).item(), i))  # noqa: B023
            places.append({row: at * blocks // (end - begin) for at, row in enumerate(order)})
        sampled = draw(keys)
        for i in range(middle, last):
            for j in range(first, middle):
                weights[i, j] += places[0][i] == places[1][j]
            for j in sampled:
                weights[i, first + j] += keys / len(sampled) * (places[0][i] != places[1][first + j])

    fill(0, count)
    sums = weights * torch.exp(query @ key.T)
    return sums / sums.sum(-1, keepdim=True) @ value


def test_hyper_attention_is_the_papers_algorithm():
    query, key, value = inputs(75)
    options = dict(block=8, samples=5, projections=4, shortest=6)
    found = hyper_attention(query, key[:, :1], value[:, :1], **options, seed=3)
    for head in range(2):
        generator = torch.Generator().manual_seed(3)
        directions = torch.randn(4, 16, generator=generator)

        def draw(keys, generator=generator):
            return torch.randint(keys, (5,), generator=generator).tolist()

        expected = plain_hyper(query[0, head], key[0, 0], value[0, 0], directions, draw, 8, 6)
        torch.testing.assert_close(found[0, head], expected)


def test_hyper_attentions_error_falls_with_its_sizes():
    query, key, value = inputs(400)
    expected = softmax_attention(query, key, value)

    def error(size):
        options = dict(block=size, samples=size, shortest=8)
        return sum(relative(hyper_attention(query, key, value, **options, seed=s), expected) for s in range(4)) / 4

    errors = [error(size) for size in (4, 16, 64)]
    assert errors[1] < 0.8 * errors[0] and errors[2] < 0.8 * errors[1] and error(400) < 1e-12, errors


def test_later_keys_and_values_change_nothing_before():
    """Queries stay: a query's block depends on the queries beside it."""
    query, key, value = inputs(75)
    options = dict(block=8, samples=5, projections=4, shortest=6)
    found = hyper_attention(query, key, value, **options)
    other_key, other_value = key.clone(), value.clone()
    other_key[:, :, 60:], other_value[:, :, 60:] = 1.0, 7.0
    assert torch.equal(hyper_attention(query, other_key, other_value, **options)[:, :, :56], found[:, :, :56])


def test_buckets_are_where_the_rows_are():
    """Directions are drawn on the CPU, rows may be on a GPU."""
    assert lsh_buckets(torch.empty(3, 5, device="meta"), torch.empty(7, 5)).device.type == "meta"


def test_neighbouring_buckets_differ_in_one_sign():
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 5)
    ordered = signs[lsh_buckets(signs, torch.eye(5)).argsort()]
    assert ((ordered[1:] != ordered[:-1]).sum(1) == 1).all()


@pytest.fixture(params=rest_slow(["favor", "vq", "lara"]))
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


def test_continuous_batching(model, tmp_path):
    """A linearised layer's state among pages of the others: tokens are those of the model alone."""
    export_for_serving(model, tmp_path, block=8)
    batch = ContinuousBatch(tmp_path, pages=14, max_requests=3, step_tokens=16, providers=["CPUExecutionProvider"])
    asked = prompts(3, 30, 9, 1)
    requests = [batch.add(prompt, 8, stop_tokens=()) for prompt in asked]
    batch.run()
    for prompt, request in zip(asked, requests, strict=True):
        tokens = list(prompt)
        for _ in range(8):
            with torch.no_grad():
                tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        assert request.tokens == tokens[len(prompt) :]


def hyper_model(features, family="qwen3", layers=(1,)):
    return linearise(make(family), "hyper", layers, features=features)


def test_a_layer_approximates_its_prompt():
    """Scale, heads and padding, by the attention function alone."""
    model = hyper_model(8)
    module = model.model.layers[1].self_attn
    query, key, value = inputs(75)
    wide = query.repeat_interleave(3, 1)
    found, _ = attention(module, wide, key, value, None, scaling=module.scaling)
    scaled = wide * module.scaling**0.5, key * module.scaling**0.5, value
    plain = hyper_attention(*scaled, block=8, samples=8, shortest=8, seed=1)
    torch.testing.assert_close(found, plain.transpose(1, 2))
    assert relative(plain, softmax_attention(scaled[0], *(t.repeat_interleave(3, 1) for t in scaled[1:]))) > 1e-3
    valid = torch.ones(1, 75, dtype=torch.bool)
    valid[:, :5] = False
    cut, _ = attention(module, wide, key, value, valid, scaling=module.scaling)
    plain = hyper_attention(*(t[:, :, 5:] for t in scaled), block=8, samples=8, shortest=8, seed=1)
    torch.testing.assert_close(cut[:, 5:], plain.transpose(1, 2))
    assert not cut[:, :5].any()


def test_blocks_as_long_as_the_prompt_are_softmax():
    ids = torch.tensor(prompts(30, 30))
    with torch.no_grad():
        expected = make("qwen3").double()(ids).logits
        model = hyper_model(32).double()
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected, rtol=1e-11, atol=1e-11)
        cache = running_sums_cache(model.config)
        pieces = [model(part, past_key_values=cache).logits for part in ids.split([20, 1, 9], 1)]
        torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=1e-11, atol=1e-11)


def test_tokens_after_an_approximated_prompt():
    """Steps equal one call, and left padding changes nothing."""
    model = hyper_model(4).double()
    asked, after = prompts(40, 23), torch.tensor(prompts(9, 9))
    ids, mask = torch.zeros(2, 40, dtype=torch.int64), torch.zeros(2, 49, dtype=torch.int64)
    for row, prompt in enumerate(asked):
        ids[row, 40 - len(prompt) :], mask[row, 40 - len(prompt) :] = torch.tensor(prompt), 1
    with torch.no_grad():
        caches = [running_sums_cache(model.config) for _ in range(3)]
        places = (mask.cumsum(1) - 1).clamp(min=0)
        model(ids, attention_mask=mask[:, :40], position_ids=places[:, :40], past_key_values=caches[0])
        together = model(after, attention_mask=mask, position_ids=places[:, 40:], past_key_values=caches[0]).logits
        for row, prompt in enumerate(asked):
            cache = caches[1 + row]
            model(torch.tensor([prompt]), past_key_values=cache)
            alone = [model(token[None], past_key_values=cache).logits[0] for token in after[row].split(1)]
            torch.testing.assert_close(together[row], torch.cat(alone), rtol=1e-10, atol=1e-10)


def test_scores_after_a_prompt_read_no_future():
    """Of bench/models/linearise.py: neither tokens behind a scored place nor, in its prompt, any but those before it."""
    scores, model = script("models.linearise").scores_after_prompt, hyper_model(4)
    window = torch.tensor(prompts(60)[0])
    losses, likeliest = scores(model, window, 40)
    assert losses.shape == likeliest.shape == (20,)
    changed = window.clone()
    changed[52:] = 5
    others, _ = scores(model, changed, 40)
    torch.testing.assert_close(others[:12], losses[:12], rtol=0, atol=0)
    assert (others[12:] != losses[12:]).all()
    with torch.no_grad():
        plain = model(window[None, :40], use_cache=False).logits[0, -1].log_softmax(-1)
    torch.testing.assert_close(losses[0], -plain[window[40]])


@pytest.mark.parametrize("write", [export_decoder, export_for_serving])
def test_hyper_attention_is_not_exported(write, tmp_path):
    with pytest.raises(ValueError, match="Qwen3ForCausalLM: layers 0, 1 have HyperAttention .*favor, vq and lara are exported"):
        write(hyper_model(8, layers=(0, 1)), tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


@pytest.mark.slow
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
    with pytest.raises(ValueError, match="method is 'nystrom'; it is one of favor, vq, lara, hyper"):
        linearise(model, "nystrom", [0])
    with pytest.raises(ValueError, match="layers are .2.; expected numbers from 0 to 1"):
        linearise(model, "favor", [2])
    with pytest.raises(ValueError, match="give calibration"):
        linearise(model, "vq", [0])
    with pytest.raises(ValueError, match="'lara' looks at a text's keys: give calibration"):
        linearise(model, "lara", [0])
    with pytest.raises(ValueError, match="400 landmarks need as many tokens of calibration; there are 300"):
        linearise(make("llama"), "lara", [0], features=400, calibration=CALIBRATION)
    with pytest.raises(ValueError, match="block 0, samples 0.*each must be 1 or more"):
        linearise(model, "hyper", [0], features=0)
    with pytest.raises(ValueError, match="it asks for sliding_window"):
        hyper_model(8, "mistral")(torch.tensor([[3, 4]]))
    with pytest.raises(ValueError, match="samples 0.*each must be 1 or more"):
        hyper_attention(*torch.zeros(3, 1, 2, 4, 8), samples=0)
    with pytest.raises(ValueError, match="3 query heads are no multiple of 2 key heads"):
        hyper_attention(torch.zeros(1, 3, 4, 8), *torch.zeros(2, 1, 2, 4, 8))
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
