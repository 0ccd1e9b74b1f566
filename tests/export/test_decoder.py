"""Decoders from transformers: exported, run in onnxruntime with in-place caches, token for token what transformers gives."""

import copy
import functools
import json

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers

from leanfleet.export import decoder as decoder_module
from leanfleet.export import export_decoder
from leanfleet.export.cache import Cache
from leanfleet.export.decoder import attention
from leanfleet.export.linear_attention import register_transformers
from leanfleet.export.serving import export_for_serving
from leanfleet.export.support import check_implementation, check_supported
from leanfleet.export.verification import VerificationError
from leanfleet.ort_ops import make_session
from leanfleet.ort_ops.generation import Statistics, generate, load_decoder, stream
from support.cpu_time import rest_slow
from support.decoders import FAMILIES, SIZES, make, prompts
from support.splits import splits_by_tables


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


@pytest.fixture(scope="module", params=rest_slow(FAMILIES, quick=2))
def exported(request, models):
    return models(request.param)


def greedy(model, prompt, count):
    """transformers' own greedy tokens, one full forward a token: no cache, no padding."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        if tokens[-1] == SIZES["eos_token_id"]:
            break
    return tokens[len(prompt) :]


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


def test_graph(exported, tmp_path):
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
    assert splits_by_tables(folder / "model.onnx", tmp_path) == []


@pytest.fixture(scope="module")
def llama(models):
    model, folder = models("llama")
    return model, load_decoder(folder, providers=["CPUExecutionProvider"])


def test_logits_at_every_step(llama):
    model, decoder = llama
    (prompt,), seen = prompts(7), []
    (tokens,), _ = generate(decoder, [prompt], 6, stop_tokens=[], on_logits=lambda x: seen.append(x.copy()))
    with torch.no_grad():
        expected = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].numpy()
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
    assert found[0] == free[0][: free[0].index(stop) + 1]
    assert found[1] == (free[1][: free[1].index(stop) + 1] if stop in free[1] else free[1])


def test_sampling_is_seeded_and_streams(llama):
    _, decoder = llama
    asked = prompts(5, 8)
    first = [list(step) for step in stream(decoder, asked, 8, temperature=2.0, top_k=40, top_p=0.95, seed=3, stop_tokens=[])]
    again, _ = generate(decoder, asked, 8, temperature=2.0, top_k=40, top_p=0.95, seed=3, stop_tokens=[])
    other, _ = generate(decoder, asked, 8, temperature=2.0, top_k=40, top_p=0.95, seed=4, stop_tokens=[])
    assert [list(row) for row in zip(*first, strict=True)] == again and again != other
    only, _ = generate(decoder, asked, 8, temperature=2.0, top_k=1, seed=9, stop_tokens=[])
    assert only == generate(decoder, asked, 8, stop_tokens=[])[0]


@pytest.mark.parametrize(
    "asked, count, options, message",
    [
        ([], 4, {}, "there is no prompt; give a list with one or more"),
        ([[5], []], 4, {}, "a prompt is empty"),
        ([[5, 6, 7]], 4, dict(capacity=6), r"3 tokens and 4 new ones need 7 cache slots; the caches have 6. Raise capacity"),
        ([[5] * 250], 10, {}, "260 tokens, 250 of them a prompt's, are more than the 256 positions"),
        ([[5, 211]], 4, {}, r"token ids lie in 0 .. 210; found 5 .. 211. Is this the model's own tokenizer"),
    ],
)
def test_errors(llama, asked, count, options, message):
    with pytest.raises(ValueError, match=message):
        generate(llama[1], asked, count, **options)


def test_missing_folder(tmp_path):
    with pytest.raises(
        FileNotFoundError, match="model.onnx does not exist; write the folder with leanfleet.export.export_decoder"
    ):
        load_decoder(tmp_path)


SMALL = dict(hidden_size=96, num_hidden_layers=2, num_attention_heads=6, vocab_size=211)
REFUSED = {
    "alibi": (
        "BloomConfig",
        dict(n_layer=2, n_head=6),
        r"attention layer transformer.h.0.self_attention \(BloomAttention\).*ALiBi",
    ),
    "alibi of mpt": (
        "MptConfig",
        dict(d_model=96, n_layers=2, n_heads=6),
        r"attention layer transformer.blocks.0.attn .*ALiBi",
    ),
    "cross attention": (
        "BartConfig",
        dict(
            d_model=96,
            decoder_layers=1,
            decoder_attention_heads=6,
            is_decoder=True,
            is_encoder_decoder=False,
            add_cross_attention=True,
        ),
        "have cross attention",
    ),
    "chunked": (
        "Llama4TextConfig",
        dict(attention_chunk_size=8, num_local_experts=2, intermediate_size=64, intermediate_size_mlp=64, head_dim=16),
        "layer 0 is of kind chunked_attention",
    ),
    "selective scan": ("MambaConfig", {}, r"layer backbone.layers.0.mixer \(MambaMixer\) carries a state"),
    "shared caches": (
        "Gemma3nTextConfig",
        dict(num_kv_shared_layers=1, intermediate_size=64, head_dim=16, vocab_size_per_layer_input=211),
        "its last 1 layers attend over other layers' caches",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_are_refused(name, tmp_path):
    config, sizes, message = REFUSED[name]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**{**SMALL, **sizes}))
    with pytest.raises(ValueError, match=message) as error:
        export_decoder(model, tmp_path)
    assert "transformers' own exporter" in str(error.value) and not list(tmp_path.iterdir())


class FakeCache(Cache):
    """Of one layer, number 3, that appends nothing."""

    def __init__(self):
        super().__init__({f"3.{part}": torch.zeros(1, 1, 1, 8) for part in ("key", "value")}, None, None)

    def attend(self, *arguments, **options):
        return None


@pytest.mark.parametrize(
    "extra, mask, message",
    [
        (dict(position_bias=torch.zeros(1)), None, "it passes position_bias"),
        (dict(alibi=torch.zeros(2, 2)), None, "it passes alibi"),
        (dict(output_router_logits=False, cross=None), None, None),  # off: nothing to refuse
        ({}, torch.zeros(1, 1, 1, 1), "it passes an attention mask of its own"),
    ],
)
def test_unknown_attention_features_name_the_layer(extra, mask, message):
    module = torch.nn.Module()
    module.layer_idx = 3
    q = torch.zeros(1, 1, 1, 8)
    with FakeCache().in_use():
        if message is None:
            attention(module, q, q, q, mask, **extra)
            return
        with pytest.raises(ValueError, match=rf"attention layer 3 \(Module\): {message}.*transformers' own exporter"):
            attention(module, q, q, q, mask, **extra)


def test_attention_that_is_not_causal_names_the_layer():
    module = torch.nn.Module()
    module.layer_idx, module.is_causal = 3, False
    q = torch.zeros(1, 1, 1, 8)
    with FakeCache().in_use(), pytest.raises(ValueError, match="attention layer 3 .*: it is not causal"):
        attention(module, q, q, q, None)
    with pytest.raises(ValueError, match="inside leanfleet.export.export_decoder only"):
        attention(module, q, q, q, None)


@pytest.mark.parametrize(
    "index, size, message",
    [
        (4, 8, "the model's configuration counts no softmax layer of that number"),
        (3, 16, "1 heads of keys of 16 and values of 16 columns, where the model's configuration says 1, 8 and 8"),
    ],
)
def test_attention_that_the_caches_have_no_place_for(index, size, message):
    module = torch.nn.Module()
    module.layer_idx = index
    q = torch.zeros(1, 1, 1, size)
    with FakeCache().in_use(), pytest.raises(ValueError, match=rf"attention layer {index} \(Module\): .*{message}"):
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


@pytest.mark.slow
def test_all_logits(models, tmp_path):
    """With all_logits the graph gives every new token's logits, piece by piece over the caches; generation refuses it."""
    model, _ = models("qwen2")
    export_decoder(model, tmp_path, all_logits=True)
    session = make_session(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (prompt,), found = prompts(20), []
    caches = {i.name: np.full((1, 2, 24, 16), np.nan, np.float32) for i in session.get_inputs()[3:]}
    for start, end in ((0, 7), (7, 20)):
        lens = np.array([end], np.int32), np.array([end - start], np.int32)
        logits, *presents = session.run(
            None, {"input_ids": np.array([prompt[start:end]]), "seq_lens": lens[0], "query_lens": lens[1], **caches}
        )
        caches = dict(zip(caches, presents, strict=True))
        found.append(logits[0])
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0].numpy()
    assert np.abs(np.concatenate(found) - expected).max() < 64 * 2.0**-23 * np.abs(expected).max()
    with pytest.raises(ValueError, match="was exported with all_logits, for scoring"):
        load_decoder(tmp_path)


def test_statistics_start_empty():
    assert Statistics().tokens == [] and np.isnan(Statistics().tokens_per_second)


def tiny(config="LlamaConfig", **extra):
    """A decoder of one layer, in one of transformers' families."""
    torch.manual_seed(5)
    sizes = dict(
        hidden_size=32,
        num_attention_heads=4,
        num_hidden_layers=1,
        intermediate_size=48,
        vocab_size=67,
        max_position_embeddings=64,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**{**sizes, **extra})).eval()


def no_softmax(module, query, key, value, attention_mask, **kwargs):
    return value.transpose(1, 2).contiguous(), None


@pytest.fixture
def registered():
    """Registers functions of attention with transformers for one test."""
    mapping = transformers.AttentionInterface._global_mapping
    before = dict(mapping)
    yield transformers.AttentionInterface.register
    mapping.clear()
    mapping.update(before)


@pytest.mark.parametrize("exporter", (export_decoder, export_for_serving))
def test_attention_other_than_softmax_is_refused(exporter, registered, tmp_path):
    """Whoever registered it, under whatever name, for the model or for a part of it."""
    model = tiny()
    registered("mine", no_softmax)
    model.set_attn_implementation("mine")
    with pytest.raises(
        ValueError,
        match=r"LlamaForCausalLM: Llama\w+ attends by 'mine', which export would write as softmax"
        r".*model.set_attn_implementation\('sdpa'\) first",
    ):
        exporter(model, tmp_path / "out")
    model.set_attn_implementation("sdpa")
    for name in ("mine", register_transformers()):
        model.model.layers[0].self_attn.config = copy.deepcopy(model.config)  # one layer alone
        model.model.layers[0].self_attn.config._attn_implementation = name
        with pytest.raises(ValueError, match=f"LlamaAttention attends by '{name}'"):
            exporter(model, tmp_path / "out")
    model = tiny()
    registered("sdpa", no_softmax)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="attends by 'sdpa', which export would write as softmax"):
        exporter(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    [
        "eager",
        "sdpa",
        "flex_attention",
        "flash_attention_2",
        "flash_attention_3",
        "flash_attention_4",
        "paged|eager",
        "paged|sdpa",
        "paged|flash_attention_2",
    ],
)
def test_softmax_by_any_implementation_is_taken(name):
    model = tiny()
    model.config._attn_implementation_internal = name  # set_attn_implementation wants its package
    check_implementation(model)


def test_a_saved_model_remembers_linear_attention(tmp_path):
    """config.json holds no name of an implementation: our attention leaves a note of its own when it runs."""
    model = tiny()
    model.set_attn_implementation(register_transformers())
    model(torch.tensor([[3, 4, 5]]), use_cache=False)
    model.save_pretrained(tmp_path / "saved")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert loaded.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="its configuration says leanfleet_attention = 'leanfleet_linear'"):
        export_decoder(loaded, tmp_path / "out")
    del loaded.config.leanfleet_attention
    check_supported(loaded)


def test_implementations_are_as_before_for_each_configuration(tmp_path):
    model = tiny()
    inner = model.model.layers[0].self_attn.config = copy.deepcopy(model.config)
    model.config._attn_implementation_internal, inner._attn_implementation_internal = "sdpa", "eager"
    with pytest.raises(ValueError, match="attention layer 0 does not go through"):  # its configuration is its own
        export_decoder(model, tmp_path)
    assert (model.config._attn_implementation, inner._attn_implementation) == ("sdpa", "eager")


def longrope(original=24, most=64):
    half = 32 // 4 // 2
    return tiny(
        "Phi3Config",
        max_position_embeddings=most,
        original_max_position_embeddings=original,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "long_factor": [3.0 + 2 * i for i in range(half)],
            "short_factor": [1.0 + i / 4 for i in range(half)],
            "original_max_position_embeddings": original,
        },
    )


def test_longrope_by_short_factors_is_right_up_to_its_original_length(tmp_path):
    """Each length that the export takes is right, beside any neighbours, and longer ones are refused."""
    model = longrope()
    model(torch.ones(1, 40, dtype=torch.int64))  # leaves the long factors in its buffer
    export_decoder(model, tmp_path)
    decoder = load_decoder(tmp_path, providers=["CPUExecutionProvider"])
    assert decoder.max_positions == 24
    asked = [[t % 67 for t in p] for p in prompts(3, 15, 8)]
    assert generate(decoder, asked, 9, stop_tokens=[])[0] == [greedy(model, p, 9) for p in asked]
    with pytest.raises(ValueError, match="25 tokens, 15 of them a prompt's, are more than the 24 positions"):
        generate(decoder, [asked[1]], 10)


def test_longrope_by_long_factors_is_what_longer_requests_get(tmp_path):
    model = longrope()
    export_decoder(model, tmp_path, rope="long")
    decoder = load_decoder(tmp_path, providers=["CPUExecutionProvider"])
    assert decoder.max_positions == 64
    asked = [[t % 67 for t in p] for p in prompts(25, 40, 2)]
    found, _ = generate(decoder, asked, 12, stop_tokens=[])
    assert found[:2] == [greedy(model, p, 12) for p in asked[:2]]  # transformers turns all of these by long factors
    assert generate(decoder, asked[2:], 12, stop_tokens=[])[0] == found[2:]  # and here neighbours change nothing
    assert model.model.rotary_emb.rope_type == "longrope"
    with pytest.raises(ValueError, match="rope 'long' is for models of rope_type longrope"):
        export_decoder(tiny(), tmp_path / "other", rope="long")
    with pytest.raises(ValueError, match="rope is 'wide'; it can be short or long"):
        export_decoder(tiny(), tmp_path / "other", rope="wide")


def test_dynamic_rotary_encodings_are_refused(tmp_path):
    model = tiny(rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    with pytest.raises(
        ValueError,
        match=r"LlamaForCausalLM: its rotary encoding model.rotary_emb \(LlamaRotaryEmbedding\) is of "
        "rope_type dynamic.*Load the model with another rope_type",
    ):
        export_decoder(model, tmp_path)


@pytest.mark.parametrize(
    "auto, name", [("AutoModel", "LlamaModel"), ("AutoModelForSequenceClassification", "LlamaForSequenceClassification")]
)
def test_models_without_a_head_are_refused(auto, name, tmp_path):
    model = getattr(transformers, auto).from_config(tiny().config)
    with pytest.raises(ValueError, match=f"{name} has no language model head.*load the model with AutoModelForCausalLM"):
        export_decoder(model, tmp_path)


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Linear is no model of transformers: give a causal language model"):
        export_decoder(torch.nn.Linear(2, 2), tmp_path)


def test_encoders_are_refused(tmp_path):
    model = transformers.BertLMHeadModel(
        transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=67, intermediate_size=48)
    ).eval()
    with pytest.raises(ValueError, match=r"BertLMHeadModel: attention layer 0 \(Bert\w+\): it is not causal"):
        export_decoder(model, tmp_path)


def spoil(monkeypatch):
    """Exports from here on have one weight that is a little off."""

    def wrong(model):
        from onnx_ir import tensor

        value = next(
            v for name, v in sorted(model.graph.initializers.items()) if "down_proj" in name or v.const_value.size > 1000
        )
        value.const_value = tensor(value.const_value.numpy() * np.float32(1.01), name=value.name)

    monkeypatch.setattr(decoder_module, "add_function", wrong)


@pytest.mark.parametrize("exporter", rest_slow((export_decoder, export_for_serving)))
def test_a_wrong_file_is_an_error_and_leaves_what_was_there(exporter, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.onnx").write_text("an earlier one")
    spoil(monkeypatch)
    with pytest.raises(
        VerificationError,
        match=r"LlamaForCausalLM: the exported file is wrong, and nothing was written: .*logits "
        r"differ from PyTorch's by \S+, where the model's own error in its type allows",
    ):
        exporter(tiny(), tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["model.onnx"]
    assert (tmp_path / "out" / "model.onnx").read_text() == "an earlier one"
    exporter(tiny(), tmp_path / "new", verify=False)
    facts = json.loads((tmp_path / "new" / "leanfleet.json").read_text())
    assert "verified" not in facts and (tmp_path / "new" / "model.onnx").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "out"]


def test_a_model_that_is_not_finite_is_told_from_a_wrong_file(tmp_path):
    model = tiny()
    with torch.no_grad():
        model.lm_head.weight[3, 2] = torch.nan
    with pytest.raises(
        VerificationError, match="nothing was written, as the PyTorch model itself gives logits that are not finite"
    ):
        export_decoder(model, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_verification_finds_what_decode_steps_do_wrong(tmp_path, monkeypatch):
    """Layers that attend twice over one cache: prompts are right, steps are not."""
    model = tiny("DiffLlamaConfig", num_key_value_heads=2)
    with pytest.raises(
        ValueError, match=r"DiffLlamaForCausalLM: attention layer 0 \(DiffLlamaAttention\): it attends twice in a call"
    ):
        export_decoder(model, tmp_path)
    monkeypatch.setattr(decoder_module, "_check_call", lambda *arguments: None)
    with pytest.raises(VerificationError, match="DiffLlamaForCausalLM: the exported file is wrong"):
        export_decoder(model, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_half_types_are_verified(dtype, tmp_path, monkeypatch):
    """A bfloat16 file, which no CPU runs, is checked as float32."""
    export_decoder(tiny().to(dtype), tmp_path / "out")
    verified = json.loads((tmp_path / "out" / "leanfleet.json").read_text())["verified"]
    assert 0 < verified["largest_difference"] < verified["bound"] < 0.8
    weights = {t.data_type for t in onnx.load(tmp_path / "out" / "model.onnx").graph.initializer}
    assert (onnx.TensorProto.BFLOAT16 if dtype == torch.bfloat16 else onnx.TensorProto.FLOAT16) in weights


def test_models_that_do_not_fit_are_not_verified(tmp_path, monkeypatch):
    monkeypatch.setattr("leanfleet.export.verification._free_memory", lambda: 1000)
    export_decoder(tiny(), tmp_path)
    verified = json.loads((tmp_path / "leanfleet.json").read_text())["verified"]
    assert "running the file and the model needs 0.0 GB of memory" in verified["skipped"]


def test_folders_are_checked_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for folder, message in (
        (tmp_path / "file", "file is a file; give the path of a folder to write"),
        (tmp_path / "file" / "below", "below cannot be written: .*file is a file"),
    ):
        with pytest.raises(NotADirectoryError, match=message):
            export_decoder(tiny(), folder)

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(decoder_module, "export", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export_decoder(tiny(), tmp_path / "new" / "below")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_new_files_take_the_places_of_old_ones(tmp_path):
    for name in ("model.onnx", "model.onnx.data", "notes.txt"):
        (tmp_path / name).write_text("old")
    export_decoder(tiny(), tmp_path)
    assert onnx.load(tmp_path / "model.onnx").graph.node and (tmp_path / "notes.txt").read_text() == "old"
    assert {p.name for p in tmp_path.iterdir()} == {"model.onnx", "notes.txt", "leanfleet.json"}
