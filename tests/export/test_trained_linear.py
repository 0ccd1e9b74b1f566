"""transformers models with register_transformers()'s attention: cached steps in PyTorch, and export with the sums as state."""

import numpy as np
import onnx
import pytest
import torch
import transformers

from leanfleet import cli
from leanfleet.export import export_decoder, linear_attention
from leanfleet.export.linear_attention import register_transformers
from leanfleet.export.running_sums import running_sums_cache
from leanfleet.export.serving import export_for_serving
from leanfleet.lookup import Lookup
from leanfleet.ort_ops import generate, load_decoder
from leanfleet.ort_ops.genai import bundle
from leanfleet.ort_ops.serving import ContinuousBatch
from support.cpu_time import rest_slow
from support.decoders import byte_tokenizer, linear, make, prompts

KINDS = {
    "llama": lambda: linear("llama"),
    "qwen2": lambda: linear("qwen2"),
    "llama, mixed": lambda: linear("llama", [1]),
    "mistral, windows": lambda: linear("mistral", [0]),
    "gemma3, windows and all": lambda: linear("gemma3", [1]),
}


@pytest.fixture(params=rest_slow(KINDS))
def model(request):
    return KINDS[request.param]()


def windows(model):
    return getattr(model.config, "sliding_window", None) is not None


def padded(rows, side):
    """(input_ids, attention_mask) of a ragged batch."""
    longest = max(map(len, rows))
    ids, mask = (torch.zeros(len(rows), longest, dtype=torch.int64) for _ in range(2))
    for i, row in enumerate(rows):
        place = slice(longest - len(row), None) if side == "left" else slice(len(row))
        ids[i, place], mask[i, place] = torch.tensor(row), 1
    return ids, mask


def greedy(model, prompt, count):
    """One full forward a token: no cache, no padding."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_pieces_and_steps_equal_the_whole(model):
    model = model.double()
    ids = torch.tensor(prompts(40, 40))
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        keys = [] if windows(model) else [lambda config: transformers.DynamicCache()]  # which linear layers read again
        for make_cache in (running_sums_cache, *keys):
            cache = make_cache(model.config)
            pieces = [model(part, past_key_values=cache).logits for part in ids.split([7, 1, 1, 12, 3, 1, 15], 1)]
            torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-12, atol=1e-12)


def test_a_step_costs_the_same_at_any_length(monkeypatch):
    """The operator gets the new token alone, and the sums do not grow."""
    model, seen = linear(), []
    operator = linear_attention.normalized_linear_attention

    def counting(query, key, *rest, **options):
        seen.append((query.shape[2], key.shape[2]))
        return operator(query, key, *rest, **options)

    monkeypatch.setattr(linear_attention, "normalized_linear_attention", counting)
    cache = running_sums_cache(model.config)
    with torch.no_grad():
        model(torch.tensor(prompts(50)), past_key_values=cache)
        sizes = [[t.shape for t in layer.sums] for layer in cache.layers]
        seen.clear()
        for _ in range(3):
            model(torch.tensor([[5]]), past_key_values=cache)
    assert seen == [(1, 1)] * 6
    assert [[t.shape for t in layer.sums] for layer in cache.layers] == sizes
    assert cache.get_seq_length() == 53 and cache.layers[0].sums[3].tolist() == [53]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches(model, side):
    """Each request's logits are those it has alone: a prompt, a second ragged piece behind it, a step."""
    if windows(model) and side == "right":
        pytest.skip("what follows a row's padding on the right has padding before it")
    model = model.double()
    # transformers' windows count padding between tokens: there is none where the model has some.
    first, second = prompts(3, 11, 6), [[8]] * 3 if windows(model) else prompts(4, 1, 2)
    whole = [a + b + [9] for a, b in zip(first, second, strict=True)]
    with torch.no_grad():
        alone = [model(torch.tensor([row]), use_cache=False).logits[0] for row in whole]
        cache = running_sums_cache(model.config)
        ids, mask = padded(first, side)
        more, more_mask = padded(second, side)
        mask = torch.cat([mask, more_mask, torch.ones(3, 1, dtype=torch.int64)], 1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        found, start = [], 0
        for part in (ids, more, torch.full((3, 1), 9)):
            end = start + part.shape[1]
            options = dict(attention_mask=mask[:, :end], position_ids=positions[:, start:end])
            found.append(model(part, past_key_values=cache, **options).logits)
            start = end
        found = torch.cat(found, 1)
    for row, expected in enumerate(alone):
        torch.testing.assert_close(found[row][mask[row].bool()], expected, rtol=1e-11, atol=1e-11)


def test_generate(model):
    asked = prompts(2, 13, 7)
    ids, mask = padded(asked, "left")
    options = dict(attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None)
    found = model.generate(ids, past_key_values=running_sums_cache(model.config), **options)
    assert [row[13:].tolist() for row in found] == [greedy(model, p, 6) for p in asked]


def test_beam_search_reorders_the_sums():
    model = linear()
    options = dict(num_beams=3, max_new_tokens=8, do_sample=False, pad_token_id=0)
    ids = torch.tensor(prompts(9, 9))
    expected = model.generate(ids, **options)  # over transformers' own cache of keys
    assert torch.equal(model.generate(ids, past_key_values=running_sums_cache(model.config), **options), expected)


def test_export_generates_pytorchs_tokens(model, tmp_path):
    export_decoder(model, tmp_path)
    asked = prompts(1, 9, 4, 17)
    expected = [greedy(model, p, 8) for p in asked]
    for options in ({"providers": ["CPUExecutionProvider"]}, {"library": False}):
        assert generate(load_decoder(tmp_path, **options), asked, 8, stop_tokens=[])[0] == expected
    kinds = [n.op_type for n in onnx.load(tmp_path / "model.onnx", load_external_data=False).graph.node]
    layers = getattr(model.config, "leanfleet_linear_layers", [0, 1])
    assert kinds.count("NormalizedLinearAttention") == len(layers) and kinds.count("LeanAttention") == 2 - len(layers)
    assert "Softmax" not in kinds


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(dtype, tmp_path):
    """The exporter's own check compares every logit with PyTorch's; greedy tokens agree but for near-ties."""
    model = linear("llama", [0]).to(dtype)
    export_decoder(model, tmp_path)
    if dtype == torch.bfloat16:  # onnxruntime has no kernels of it on CPUs: the check ran it in float32
        return
    prompt = prompts(9)[0]
    found = generate(load_decoder(tmp_path, providers=["CPUExecutionProvider"]), [prompt], 8, stop_tokens=[])[0][0]
    with torch.no_grad():
        logits = model.float()(torch.tensor([prompt + found]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    behind = logits.max(-1).values - logits.gather(1, torch.tensor(found)[:, None])[:, 0]
    assert behind.max() < 0.02 * logits.abs().max()


def test_a_trained_model_keeps_its_attention_from_disk_to_tokens(tmp_path):
    """Trained, saved, exported on the command line: transformers saves no implementation, the note in config.json does."""
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), **sizes, eos_token_id=None, leanfleet_linear_layers=[0])
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.set_attn_implementation(register_transformers())
    ids = torch.tensor([tokenizer.encode("the cat sat on the mat and the dog sat on the log ")])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(40):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 1
    model.eval().save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    assert cli.main(["export", str(tmp_path / "saved"), str(tmp_path / "out")]) == 0
    prompt = ids[0, :8].tolist()
    found = generate(load_decoder(tmp_path / "out"), [prompt], 16, stop_tokens=[])[0][0]
    assert found == greedy(model, prompt, 16)
    model.set_attn_implementation("sdpa")
    assert found != greedy(model, prompt, 16), "softmax gives the same: the test shows nothing"


def test_layers_that_are_not_there_are_refused(tmp_path):
    model = linear()
    for chosen in ([2], [-1], 1, ["0"]):
        model.config.leanfleet_linear_layers = chosen
        for function in (lambda: export_decoder(model, tmp_path / "out"), lambda: running_sums_cache(model.config)):
            with pytest.raises(ValueError, match="leanfleet_linear_layers is .*; expected a list of layers from 0 to 1"):
                function()


def test_what_linear_attention_does_not_have_is_refused():
    one = torch.tensor([[5, 6, 7]])
    with pytest.raises(ValueError, match=r"attention layer 0 \(MistralAttention\): it asks for sliding_window"):
        linear("mistral")(one)
    with pytest.raises(ValueError, match="gpt-oss|s_aux"):
        linear("gpt-oss", [1])(one)
    packed = torch.tensor([[0, 1, 0]])
    with pytest.raises(ValueError, match="packed sequences"):
        linear()(one, position_ids=packed, use_cache=False)
    model = linear()
    with pytest.raises(ValueError, match="a static cache has room for tokens to come"):
        model(one, past_key_values=transformers.StaticCache(model.config, max_cache_len=8))
    windowed = linear("mistral", [0])
    cache = transformers.DynamicCache(config=windowed.config)
    with torch.no_grad():
        windowed(one, past_key_values=cache)
        with pytest.raises(ValueError, match=r"past_key_values=running_sums_cache\(model.config\)"):
            windowed(one, past_key_values=cache)


def test_a_cache_of_sums_under_other_attention_is_an_error():
    """Softmax does not add to the sums: the next call says so, before anything is wrong."""
    model = make("llama")
    cache = running_sums_cache(model.config)
    with torch.no_grad():
        model(torch.tensor([[5, 6]]), past_key_values=cache)
        with pytest.raises(ValueError, match="attention layer 0 did not add its tokens"):
            model(torch.tensor([[7]]), past_key_values=cache)
    with pytest.raises(ValueError, match="cannot be cropped"):
        cache.crop(-1)


@pytest.mark.parametrize("speculate", (0, 2))
def test_continuous_batching(model, tmp_path, monkeypatch, speculate):
    """One state in place of the sums: the tokens are those of the model alone, in pieces, beside others, preempted, from shared
    beginnings, with guesses; softmax layers of a mixed model have pages beside it."""
    export_for_serving(model, tmp_path / "serving", block=8)
    batch = ContinuousBatch(
        tmp_path / "serving", pages=9, max_requests=3, step_tokens=16, providers=["CPUExecutionProvider"], speculate=speculate
    )
    states = [n for n in batch.pool_names if n.endswith(".recurrent_state")]
    assert states and not [n for n in batch.pool_names if "sum" in n]
    asked = prompts(1, 30, 9, 25, 17)
    asked.append([*asked[1][:24], *asked[2]])
    monkeypatch.setattr(Lookup, "guess", lambda self, count: [7] * count)
    requests = [batch.add(prompt, 10, stop_tokens=()) for prompt in asked]
    batch.run()
    assert [r.tokens for r in requests] == [greedy(model, prompt, 10) for prompt in asked]
    assert bool(batch.preemptions) == batch.paged and bool(batch.guessed) == bool(speculate)


@pytest.mark.slow
def test_where_the_sums_have_no_place(tmp_path):
    model = linear()
    export_decoder(model, tmp_path / "out")
    byte_tokenizer().save_pretrained(tmp_path / "out")
    with pytest.raises(ValueError, match="layer 0 carries sums of keys and values, which onnxruntime-genai has no place for"):
        bundle(tmp_path / "out", tmp_path / "bundle")


@pytest.mark.slow
def test_steps_of_requests_that_take_no_part(tmp_path):
    """query_lens 0 leaves the sums as they are."""
    export_decoder(linear(), tmp_path)
    decoder = load_decoder(tmp_path, providers=["CPUExecutionProvider"])
    state = {c.name: np.random.default_rng(0).random([2, *c.shape[1:]], np.float32) for c in decoder.caches}
    lens = {"seq_lens": np.array([4, 7], np.int32), "query_lens": np.array([0, 2], np.int32)}
    _, *after = decoder.session.run(None, {"input_ids": np.array([[9, 9], [5, 6]]), **lens, **state})
    for before, new in zip(state.values(), after, strict=True):
        assert np.array_equal(before[0], new[0]) and not np.array_equal(before[1], new[1])
