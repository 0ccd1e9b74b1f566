"""Decoders from transformers: exported, run in onnxruntime with in-place caches, token for token what transformers gives."""

import json

import numpy as np
import onnx
import pytest
import torch
import transformers
from leanfleet.export import export_decoder
from leanfleet.export.decoder import attention
from leanfleet.ort_ops.generation import Statistics, generate, load_decoder, stream


SIZES = dict(hidden_size=96, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=16, vocab_size=211,
             intermediate_size=128, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0)
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", dict(sliding_window=5)),
    "qwen3": ("Qwen3Config", {}),
    "gemma2": ("Gemma2Config", dict(sliding_window=6, attn_logit_softcapping=20.0, query_pre_attn_scalar=16)),
}


def make(family):
    config, extra = FAMILIES[family]
    torch.manual_seed(5)
    config = getattr(transformers, config)(**{**SIZES, **extra})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # random weights as they come give nearly equal logits: spread them
        for p in model.parameters():
            p.mul_(3 if p.dim() > 1 else 1)
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def exported(request, tmp_path_factory):
    model = make(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    export_decoder(model, folder)
    return model, folder


def prompts(*lengths):
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(3, SIZES["vocab_size"], (n,), generator=generator).tolist() for n in lengths]


def greedy(model, prompt, count):
    """transformers' own greedy tokens, one full forward a token: no cache, no padding."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        if tokens[-1] == SIZES["eos_token_id"]:
            break
    return tokens[len(prompt):]


def test_tokens_equal_transformers_in_one_ragged_batch(exported):
    model, folder = exported
    asked = prompts(1, 9, 4, 17)
    found, statistics = generate(load_decoder(folder, providers=["CPUExecutionProvider"]), asked, 12)
    assert found == [greedy(model, p, 12) for p in asked]
    assert statistics.prefill_tokens == 31 and statistics.decode_tokens == sum(map(len, found)) - 4


def test_without_the_library_the_bodies_give_the_same(exported):
    model, folder = exported
    asked = prompts(6, 2)
    assert generate(load_decoder(folder, library=False), asked, 5)[0] == [greedy(model, p, 5) for p in asked]


def test_graph(exported):
    _, folder = exported
    model = onnx.load(folder / "model.onnx")
    onnx.checker.check_model(model)
    attentions = [n for n in model.graph.node if n.op_type == "LeanAttention"]
    assert len(attentions) == 2
    assert not [n for n in model.graph.node if n.op_type in ("Softmax", "ScatterND", "Trilu")], "an attention mask was built"
    shapes = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    assert shapes["input_ids"] == ["batch", "tokens"] and shapes["past_key_values.1.value"] == ["batch", 2, "capacity", 16]
    assert json.loads((folder / "leanfleet.json").read_text())["stop_tokens"] == [2]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    model = make("llama")
    folder = tmp_path_factory.mktemp("llama")
    export_decoder(model, folder)
    return model, load_decoder(folder, providers=["CPUExecutionProvider"])


def test_logits_at_every_step(llama):
    model, decoder = llama
    (prompt,), seen = prompts(7), []
    (tokens,), _ = generate(decoder, [prompt], 6, stop_tokens=[], on_logits=lambda x: seen.append(x.copy()))
    with torch.no_grad():
        expected = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1:-1].numpy()
    error = np.abs(np.concatenate(seen) - expected).max()
    assert error < 64 * 2.0**-23 * np.abs(expected).max(), error


def test_caches_are_updated_in_place(llama):
    """A buffer bound to an input and to its output is the same afterwards, changed only where tokens were appended."""
    _, decoder = llama
    torch.manual_seed(0)
    caches = [torch.full((1, 2, 32, 16), 7.0) for _ in range(4)]
    binding = decoder.session.io_binding()
    names = ["input_ids", "seq_lens", "query_lens"]
    for name, value in zip(names, (np.array([[3, 4, 5]]), np.array([3], np.int32), np.array([3], np.int32)), strict=True):
        binding.bind_cpu_input(name, value)
    binding.bind_output("logits")
    for i, cache in enumerate(caches):
        part = f"{i // 2}.{'key' if i % 2 == 0 else 'value'}"
        for bind, prefix in ((binding.bind_input, "past_key_values"), (binding.bind_output, "present")):
            bind(f"{prefix}.{part}", "cpu", 0, np.float32, tuple(cache.shape), cache.data_ptr())
    decoder.session.run_with_iobinding(binding)
    for cache in caches:
        assert (cache[:, :, 3:] == 7).all() and (cache[:, :, :3] != 7).all()


def test_stop_tokens_end_a_request_and_not_the_others(llama):
    model, decoder = llama
    asked = prompts(5, 8)
    free, _ = generate(decoder, asked, 10, stop_tokens=[])
    stop = free[0][3]
    found, _ = generate(decoder, asked, 10, stop_tokens=[stop])
    assert found[0] == free[0][:free[0].index(stop) + 1]
    assert found[1] == (free[1][:free[1].index(stop) + 1] if stop in free[1] else free[1])


def test_sampling_is_seeded_and_streams(llama):
    _, decoder = llama
    asked = prompts(5, 8)
    first = [list(step) for step in stream(decoder, asked, 8, temperature=2.0, top_k=40, top_p=0.95, seed=3, stop_tokens=[])]
    again, _ = generate(decoder, asked, 8, temperature=2.0, top_k=40, top_p=0.95, seed=3, stop_tokens=[])
    other, _ = generate(decoder, asked, 8, temperature=2.0, top_k=40, top_p=0.95, seed=4, stop_tokens=[])
    assert [list(row) for row in zip(*first, strict=True)] == again and again != other
    only, _ = generate(decoder, asked, 8, temperature=2.0, top_k=1, seed=9, stop_tokens=[])
    assert only == generate(decoder, asked, 8, stop_tokens=[])[0]


@pytest.mark.parametrize("asked, count, options, message", [
    ([], 4, {}, "a prompt is empty"),
    ([[5], []], 4, {}, "a prompt is empty"),
    ([[5, 6, 7]], 4, dict(capacity=6), r"3 tokens and 4 new ones need 7 cache slots; the caches have 6. Raise capacity"),
    ([[5] * 250], 10, {}, "260 tokens are more than the 256 positions"),
    ([[5, 211]], 4, {}, r"token ids lie in 0 .. 210; found 5 .. 211. Is this the model's own tokenizer"),
])
def test_errors(llama, asked, count, options, message):
    with pytest.raises(ValueError, match=message):
        generate(llama[1], asked, count, **options)


def test_missing_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="model.onnx does not exist; write the folder with leanfleet.export.export_decoder"):
        load_decoder(tmp_path)


def test_unknown_attention_features_name_the_layer():
    module = torch.nn.Module()
    module.layer_idx = 3
    q = torch.zeros(1, 1, 1, 8)
    with pytest.raises(ValueError, match="attention layer 3 .*: it passes alibi"):
        attention(module, q, q, q, None, leanfleet_cache=object(), alibi=torch.zeros(1))
    module.is_causal = False
    with pytest.raises(ValueError, match="attention layer 3 .*: it is not causal"):
        attention(module, q, q, q, None, leanfleet_cache=object())


def test_statistics_start_empty():
    assert Statistics().tokens == [] and np.isnan(Statistics().tokens_per_second)
