"""Decoders with quantised caches: exported, verified, and run; the tokens are those of PyTorch's emulation of such caches."""

import json
from contextlib import nullcontext

import onnx
import onnx_ir
import pytest
import torch
import transformers

from leanfleet import cli, decoder_contract, variants
from leanfleet.export import calibrate, export_decoder, function_bodies, quantised_caches, tensor_parallel
from leanfleet.export.serving import add_serving, export_for_serving
from leanfleet.export.verification import VerificationError
from leanfleet.ort_ops import genai
from leanfleet.ort_ops.generation import generate, load_decoder
from leanfleet.ort_ops.serving import ContinuousBatch
from leanfleet.trt_plugins import running
from support import decoders, ort_models, ort_nodes
from support.cpu_time import rest_slow

CPU = ["CPUExecutionProvider"]
NEW = 8


def emulated(model, cache, prompt):
    """The greedy tokens behind a prompt."""
    tokens = list(prompt)
    with quantised_caches.emulated(model, cache), torch.no_grad():
        for _ in range(NEW):
            tokens.append(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax().item())
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    "family, cache",
    rest_slow(
        (
            ("llama", "int8"),
            ("gpt-oss", "int4"),
            ("gemma2", "int8"),
            ("gpt-oss", "int8"),
            ("gemma2", "fp8"),
            ("llama", "int8/fp8"),
        ),
        quick=1,
    ),
)
def test_tokens(family, cache, tmp_path):
    """Windows, softcap, sinks and experts too; with the library and without it; in a batch, and continuously."""
    model, prompts = decoders.make(family), decoders.prompts(5, 17, 1)
    expected = [emulated(model, cache, prompt) for prompt in prompts]
    with pytest.warns(UserWarning, match="cache is 'int4'") if cache == "int4" else nullcontext():
        export_decoder(model, tmp_path, cache=cache)
        add_serving(model, tmp_path, block=8, cache=cache)
    facts = json.loads((tmp_path / "leanfleet.json").read_text())
    assert facts["cache"] == cache == facts["serving"]["cache"]
    assert facts["verified"]["largest_difference"] <= facts["verified"]["bound"]
    types = {i.name: i.type.tensor_type.elem_type for i in onnx.load(tmp_path / "model.onnx").graph.input}
    expected_types = [variants.ONNX_TYPES[word] for word in decoder_contract.cache_forms(cache)]
    assert [types["past_key_values.0.key"], types["past_key_values.1.value"]] == expected_types
    assert types["past_key_values.0.key_scale"] == onnx.TensorProto.FLOAT
    for library in (True, False):
        decoder = load_decoder(tmp_path, CPU, library=library)
        answers, _ = generate(decoder, prompts, max_new_tokens=NEW, stop_tokens=[])
        assert answers == expected, f"library={library}"
    batch = ContinuousBatch(tmp_path, pages=40, max_requests=3, step_tokens=16, providers=CPU)
    requests = [batch.add(prompt, NEW, stop_tokens=[]) for prompt in prompts]
    batch.run()
    assert [r.tokens for r in requests] == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, form, kind",
    (
        ("llama", "int8", "channel"),
        ("gemma2", "fp8", "tensor"),
        ("gpt-oss", "int8/fp8", "channel"),
        ("llama", "int4", "channel"),
    ),
)
def test_calibrated_tokens(family, form, kind, tmp_path):
    """Scales are constants: the graph's caches are a quarter or an eighth of float32 and have none beside them."""
    model, prompts = decoders.make(family), decoders.prompts(5, 17, 1)
    cache = calibrate(model, decoders.prompts(40, 23), form, kind)
    expected = [emulated(model, cache, prompt) for prompt in prompts]
    with pytest.warns(UserWarning, match="cache is 'int4'") if form == "int4" else nullcontext():
        export_decoder(model, tmp_path, cache=cache)
        add_serving(model, tmp_path, block=8, cache=cache)
    facts = json.loads((tmp_path / "leanfleet.json").read_text())
    for found in (facts, facts["serving"]):
        assert (found["cache"], found["cache_scales"]) == (form, kind)
        assert found["verified"]["largest_difference"] <= found["verified"]["bound"]
    graph = onnx.load(tmp_path / "model.onnx").graph
    assert not [i.name for i in graph.input if "scale" in i.name]
    for library in (True, False):
        decoder = load_decoder(tmp_path, CPU, library=library)
        answers, _ = generate(decoder, prompts, max_new_tokens=NEW, stop_tokens=[])
        assert answers == expected, f"library={library}"
    batch = ContinuousBatch(tmp_path, pages=40, max_requests=3, step_tokens=16, providers=CPU)
    requests = [batch.add(prompt, NEW, stop_tokens=[]) for prompt in prompts]
    batch.run()
    assert [r.tokens for r in requests] == expected
    config = model.config
    numbers = 2 * config.num_hidden_layers * 40 * 8 * config.num_key_value_heads * 16
    assert batch.pool_bytes == numbers // (2 if form == "int4" else 1)


@pytest.mark.slow
def test_serving_with_other_scales_than_the_decoder(tmp_path):
    model = decoders.make("llama")
    export_decoder(model, tmp_path, cache=calibrate(model, decoders.prompts(9), "int8"), verify=False)
    add_serving(model, tmp_path, block=8, cache="int8", verify=False)
    facts = decoder_contract.read_facts(tmp_path, decoder_contract.SERVING)
    assert facts["cache"] == "int8" and facts["cache_scales"] is None


def test_scales_that_calibration_finds():
    """Those of the keys and values in transformers' own cache."""
    model, rows = decoders.make("llama"), decoders.prompts(30, 12)
    with torch.no_grad():
        seen = [model(input_ids=torch.tensor([row]), use_cache=True).past_key_values.layers for row in rows]
    for kind, axes in (("channel", (0, 2)), ("tensor", (0, 1, 2, 3))):
        found = calibrate(model, rows, "int8/fp8", kind)
        for layer in range(2):
            scales = found.of_layer(layer)
            for name, limit in (("key", 127), ("value", 448)):
                largest = torch.stack([getattr(layers[layer], f"{name}s").abs().amax(axes) for layers in seen]).amax(0)
                expected = largest.unsqueeze(1) / limit if kind == "channel" else largest.reshape(1) / limit
                torch.testing.assert_close(scales[f"{name}_scale"], expected, rtol=1e-5, atol=0)


def test_calibration_of_channels_that_are_0():
    model = decoders.make("llama")
    with torch.no_grad():
        value = model.model.layers[0].self_attn.v_proj.weight
        value[3] = 0  # a column of head 0
        value[16:] = 0  # head 1
    scales = calibrate(model, decoders.prompts(9), "int8").of_layer(0)["value_scale"]
    assert scales[0, 0, 3] == scales[0].max() and scales[0].min() > 0 and (scales[1] == 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("form, kind, world", [("int8/fp8", "channel", 2), ("int8", "tensor", 2), ("int8", "channel", 4)])
def test_calibrated_scales_are_shared_out(form, kind, world, tmp_path):
    """Two heads of keys and values on one rank and one on the other, or a head on two of four: what the ranks compute together
    is the model's."""
    torch.manual_seed(7)
    sizes = dict(num_attention_heads=6, num_key_value_heads=3, num_hidden_layers=1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**decoders.SIZES | sizes)).eval()
    cache = calibrate(model, [list(range(3, 60))], form, kind)
    export_decoder(model, tmp_path, cache=cache, tensor_parallel=world)
    add_serving(model, tmp_path, cache=cache)
    facts = json.loads((tmp_path / "leanfleet.json").read_text())
    for of in (facts, facts["serving"]):
        assert of["cache"] == form and of["cache_scales"] == kind
        assert of["verified"]["largest_difference"] <= of["verified"]["bound"]


@pytest.mark.slow
def test_scales_of_other_heads_are_found(tmp_path, monkeypatch):
    model = decoders.make("llama")
    cache = calibrate(model, [list(range(3, 60))], "int8", "channel")
    mine = tensor_parallel.share_of_cache
    monkeypatch.setattr(tensor_parallel, "share_of_cache", lambda cache, rank, world: mine(cache, 1 - rank, world))
    with pytest.raises(VerificationError):
        export_decoder(model, tmp_path / "out", cache=cache, tensor_parallel=2)
    assert not (tmp_path / "out").exists()


def test_calibration_that_cannot_be():
    model = decoders.make("llama")
    for rows in ([], [[]], [[1], []]):
        with pytest.raises(ValueError, match="tokens has a row without tokens, or no row"):
            calibrate(model, rows, "int8")
    with pytest.raises(ValueError, match="scales is 'token'; expected channel or tensor"):
        calibrate(model, [[1]], "int8", "token")
    with pytest.raises(ValueError, match="cache is 'int2'"):
        calibrate(model, [[1]], "int2")
    with pytest.raises(ValueError, match="token 211 is outside the vocabulary of 211 tokens; is it the model's tokenizer"):
        calibrate(model, [[1, 211]], "int8")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = torch.inf
    with pytest.raises(ValueError, match=r"1.key of LlamaForCausalLM is not finite on this text"):
        calibrate(model, [[1, 2]], "int8")


def test_command_calibrates(tmp_path, capsys):
    model = decoders.make("llama")
    model.save_pretrained(tmp_path / "saved")
    decoders.byte_tokenizer().save_pretrained(tmp_path / "saved")
    (tmp_path / "text").write_text("WhatTheModelWillRead." * 20)
    export = ["export", str(tmp_path / "saved"), str(tmp_path / "out")]
    assert cli.main([*export, "--cache", "fp8", "--calibrate", str(tmp_path / "text"), "--scales", "tensor", "--serve"]) == 0
    assert "calibrating fp8 caches on 420 tokens" in capsys.readouterr().err
    for kind in (decoder_contract.DECODER, decoder_contract.SERVING):
        assert decoder_contract.read_facts(tmp_path / "out", kind)["cache_scales"] == "tensor"
    (tmp_path / "empty").write_text("")
    (tmp_path / "spaces").write_text("a b")  # the tokenizer has more tokens than the model
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for options, words in (
        (["--calibrate", "x"], "--calibrate finds scales of quantised caches: say which, such as --cache fp8"),
        (["--cache", "fp8", "--scales", "tensor"], "--scales goes with --calibrate FILE"),
        (["--page", "16"], "--page is the size of pages for serving: it goes with --serve"),
        (["--serve", "--page", "0"], "--page is 0; a page has 1 token or more"),
        (["--cache", "fp8", "--calibrate", str(tmp_path / "none")], "there is no such file"),
        (["--cache", "fp8", "--calibrate", str(tmp_path / "spaces")], "is outside the vocabulary of 211 tokens"),
        (["--cache", "fp8", "--calibrate", str(tmp_path / "empty")], "has no token to calibrate on"),
        (["--cache", "fp8", "--calibrate", str(tmp_path / "bytes")], "is no text in UTF-8"),
    ):
        assert cli.main([*export, *options]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.slow
def test_sizes_of_pools(tmp_path):
    """A quarter or an eighth of float32, and a scale for each token and head."""
    model = decoders.make("llama")
    pools = []
    for cache in (None, "int8", "int4", "fp8"):
        export_for_serving(model, tmp_path / str(cache), block=8, cache=cache, verify=False)
        pools.append(ContinuousBatch(tmp_path / str(cache), pages=10, providers=CPU).pool_bytes)
    width = model.config.hidden_size // model.config.num_attention_heads
    assert pools[1] * 4 * width == pools[0] * (width + 4) and pools[3] == pools[1]
    assert pools[2] * 4 * width == pools[0] * (width // 2 + 4)


def test_what_cannot_be(tmp_path):
    with pytest.raises(
        ValueError, match="cache is 'int2'; expected None, the model's own type, or one of int8, fp8, int4, or two"
    ):
        export_decoder(decoders.make("llama"), tmp_path / "a", cache="int2")
    with pytest.raises(ValueError, match="cache is 'int8', and no layer has keys and values"):
        export_decoder(decoders.ours("retnet"), tmp_path / "a", cache="int8")
    export_decoder(decoders.make("llama"), tmp_path / "a", cache="int8/fp8", verify=False)
    with pytest.raises(
        ValueError, match="int8/fp8 caches, and onnxruntime-genai has caches of one type.* --cache int8 --calib"
    ):
        genai.bundle(tmp_path / "a", tmp_path / "b")
    with pytest.raises(ValueError, match="int8/fp8 caches, of which TensorRT builds no engines: run it in ONNX Runtime"):
        running.load_decoder(tmp_path / "a", tmp_path / "none.engine")
    facts = decoder_contract.read_facts(tmp_path / "a", decoder_contract.DECODER)
    decoder_contract.write_facts(tmp_path / "a", {**facts, "cache": "int2"})
    with pytest.raises(ValueError, match='cache is "int2"; this version knows int8, fp8, int4, .*: update leanfleet'):
        load_decoder(tmp_path / "a", CPU)
    decoder_contract.write_facts(tmp_path / "a", {**facts, "cache_scales": "row"})
    with pytest.raises(ValueError, match='cache_scales is "row"; this version knows channel, tensor: update leanfleet'):
        load_decoder(tmp_path / "a", CPU)


@pytest.mark.parametrize("number", (15, 18, 19))
def test_leanfleet_check_makes_caches_and_scales_up(number, tmp_path, capsys):
    op, inputs, attrs = ort_nodes.variant("LeanAttention", number, "float32")
    model = ort_models.node_model(op, ort_nodes.shapes_of(inputs), attrs, forms=ort_models.forms_of(inputs))
    onnx.save(onnx_ir.to_proto(function_bodies.attach(onnx_ir.from_proto(model))), tmp_path / "model.onnx")
    assert cli.main(["check", str(tmp_path / "model.onnx")]) == 0
    assert "key_cache_out" in capsys.readouterr().out
