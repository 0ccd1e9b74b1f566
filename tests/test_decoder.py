"""Decoders from transformers: exported, run in onnxruntime with in-place caches, token for token what transformers gives."""

import functools
import json

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers
from leanfleet.export import export_decoder
from leanfleet.export.decoder import attention
from leanfleet.ort_ops import make_session
from leanfleet.ort_ops.generation import Statistics, generate, load_decoder, stream


SIZES = dict(hidden_size=96, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=16, vocab_size=211,
             intermediate_size=128, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0)
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", dict(sliding_window=5)),
    "phi3": ("Phi3Config", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "gemma2": ("Gemma2Config", dict(sliding_window=6, attn_logit_softcapping=20.0, query_pre_attn_scalar=16)),
    # local layers with a rotary base of their own beside global ones
    "gemma3": ("Gemma3TextConfig", dict(sliding_window=6, query_pre_attn_scalar=16,
                                        layer_types=["sliding_attention", "full_attention"])),
    # attention sinks, experts
    "gpt-oss": ("GptOssConfig", dict(sliding_window=5, num_local_experts=4, num_experts_per_tok=2)),
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


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """family -> (model, folder of its export), exported once."""
    @functools.cache
    def get(family):
        model = make(family)
        folder = tmp_path_factory.mktemp(family)
        export_decoder(model, folder)
        return model, folder
    return get


@pytest.fixture(scope="module", params=FAMILIES)
def exported(request, models):
    return models(request.param)


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
    pytorch, folder = exported
    model = onnx.load(folder / "model.onnx")
    onnx.checker.check_model(model)
    attentions = [n for n in model.graph.node if n.op_type == "LeanAttention"]
    assert len(attentions) == 2
    routers = 2 if hasattr(pytorch.config, "num_local_experts") else 0  # choose experts by a softmax
    kinds = [n.op_type for n in model.graph.node]
    assert kinds.count("Softmax") == routers and not {"ScatterND", "Trilu"} & set(kinds), "an attention mask was built"
    shapes = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    assert shapes["input_ids"] == ["batch", "tokens"] and shapes["past_key_values.1.value"] == ["batch", 2, "capacity", 16]
    assert json.loads((folder / "leanfleet.json").read_text())["stop_tokens"] == [2]


@pytest.fixture(scope="module")
def llama(models):
    model, folder = models("llama")
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


SMALL = dict(hidden_size=96, num_hidden_layers=2, num_attention_heads=6, vocab_size=211)
REFUSED = {
    "alibi": ("BloomConfig", dict(n_layer=2, n_head=6), r"attention layer transformer.h.0.self_attention \(BloomAttention\).*ALiBi"),
    "alibi of mpt": ("MptConfig", dict(d_model=96, n_layers=2, n_heads=6), r"attention layer transformer.blocks.0.attn .*ALiBi"),
    "cross attention": ("BartConfig", dict(d_model=96, decoder_layers=1, decoder_attention_heads=6, is_decoder=True,
                                           is_encoder_decoder=False, add_cross_attention=True), "have cross attention"),
    "chunked": ("Llama4TextConfig", dict(attention_chunk_size=8, num_local_experts=2, intermediate_size=64,
                                         intermediate_size_mlp=64, head_dim=16), "layer 0 is of kind chunked_attention"),
    "gated delta rule": ("Qwen3NextConfig", dict(head_dim=16, intermediate_size=64, moe_intermediate_size=16, num_experts=2,
                                                 layer_types=["full_attention", "linear_attention"]),
                         "layer 1 is of kind linear_attention"),
    "shared caches": ("Gemma3nTextConfig", dict(num_kv_shared_layers=1, intermediate_size=64, head_dim=16,
                                                vocab_size_per_layer_input=211),
                      "its last 1 layers attend over other layers' caches"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_are_refused(name, tmp_path):
    config, sizes, message = REFUSED[name]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**{**SMALL, **sizes}))
    with pytest.raises(ValueError, match=message) as error:
        export_decoder(model, tmp_path)
    assert "transformers' own exporter" in str(error.value) and not list(tmp_path.iterdir())


class FakeCache:
    def attend(self, *arguments, **options):
        return None


@pytest.mark.parametrize("extra, mask, message", [
    (dict(position_bias=torch.zeros(1)), None, "it passes position_bias"),
    (dict(alibi=torch.zeros(2, 2)), None, "it passes alibi"),
    (dict(output_router_logits=False, cross=None), None, None),  # off: nothing to refuse
    ({}, torch.zeros(1, 1, 1, 1), "it passes an attention mask of its own"),
])
def test_unknown_attention_features_name_the_layer(extra, mask, message):
    module = torch.nn.Module()
    module.layer_idx = 3
    q = torch.zeros(1, 1, 1, 8)
    if message is None:
        attention(module, q, q, q, mask, leanfleet_cache=FakeCache(), **extra)
        return
    with pytest.raises(ValueError, match=rf"attention layer 3 \(Module\): {message}.*transformers' own exporter"):
        attention(module, q, q, q, mask, leanfleet_cache=FakeCache(), **extra)


def test_attention_that_is_not_causal_names_the_layer():
    module = torch.nn.Module()
    module.layer_idx, module.is_causal = 3, False
    q = torch.zeros(1, 1, 1, 8)
    with pytest.raises(ValueError, match="attention layer 3 .*: it is not causal"):
        attention(module, q, q, q, None, leanfleet_cache=FakeCache())
    with pytest.raises(ValueError, match="inside leanfleet.export.export_decoder only"):
        attention(module, q, q, q, None)


def test_export_leaves_the_model_as_it_was(models):
    """The implementations of attention and experts, and the forwards of layers, are those from before."""
    model, _ = models("gpt-oss")
    assert model.config._attn_implementation != "leanfleet" and model.config._experts_implementation == "grouped_mm"
    assert not any("forward" in vars(m) for m in model.modules())
    greedy(model, [5, 6], 2)


def test_normalisations_reach_onnxruntimes_fused_kernel(models):
    """RMS norms are written x / sqrt(mean + eps), the form that onnxruntime recognises."""
    _, folder = models("llama")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    load_decoder(folder, providers=["CPUExecutionProvider"], session_options=options)
    kinds = [n.op_type for n in onnx.load(folder / "optimized.onnx").graph.node]
    norms = sum("SimplifiedLayerNormalization" in kind for kind in kinds)
    assert norms == 5 and "ReduceMean" not in kinds, kinds


def test_all_logits(models, tmp_path):
    """With all_logits the graph gives every new token's logits, piece by piece over the caches; generation refuses it."""
    model, _ = models("qwen2")
    export_decoder(model, tmp_path, all_logits=True)
    session = make_session(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (prompt,), found = prompts(20), []
    caches = {i.name: np.full((1, 2, 24, 16), np.nan, np.float32) for i in session.get_inputs()[3:]}
    for start, end in ((0, 7), (7, 20)):
        lens = np.array([end], np.int32), np.array([end - start], np.int32)
        logits, *presents = session.run(None, {"input_ids": np.array([prompt[start:end]]), "seq_lens": lens[0],
                                               "query_lens": lens[1], **caches})
        caches = dict(zip(caches, presents, strict=True))
        found.append(logits[0])
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0].numpy()
    assert np.abs(np.concatenate(found) - expected).max() < 64 * 2.0**-23 * np.abs(expected).max()
    with pytest.raises(ValueError, match="was exported with all_logits, for scoring"):
        load_decoder(tmp_path)


def test_statistics_start_empty():
    assert Statistics().tokens == [] and np.isnan(Statistics().tokens_per_second)
