"""Decoders with quantised caches: exported, verified, and run; the tokens are those of PyTorch's emulation of such caches."""

import json
from contextlib import nullcontext

import onnx
import onnx_ir
import pytest
import torch

from leanfleet import cli, decoder_contract, variants
from leanfleet.export import export_decoder, function_bodies, verification
from leanfleet.export.serving import add_serving, export_for_serving
from leanfleet.ort_ops import genai
from leanfleet.ort_ops.generation import generate, load_decoder
from leanfleet.ort_ops.serving import ContinuousBatch
from support import decoders, ort_models, ort_nodes

CPU = ["CPUExecutionProvider"]
NEW = 8


def emulated(model, cache, prompt):
    """The greedy tokens behind a prompt."""
    tokens = list(prompt)
    with verification.emulated(model, cache), torch.no_grad():
        for _ in range(NEW):
            tokens.append(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax().item())
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    "family, cache",
    (("llama", "int8"), ("gemma2", "int8"), ("gpt-oss", "int8"), ("gemma2", "fp8"), ("gpt-oss", "int4"), ("llama", "int8/fp8")),
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
        ValueError, match="was exported with int8/fp8 caches, which onnxruntime-genai does not take yet: run it in"
    ):
        genai.bundle(tmp_path / "a", tmp_path / "b")
    facts = decoder_contract.read_facts(tmp_path / "a", decoder_contract.DECODER)
    decoder_contract.write_facts(tmp_path / "a", {**facts, "cache": "int2"})
    with pytest.raises(ValueError, match='cache is "int2"; this version knows int8, fp8, int4, .*: update leanfleet'):
        load_decoder(tmp_path / "a", CPU)


@pytest.mark.parametrize("number", (15, 18, 19))
def test_leanfleet_check_makes_caches_and_scales_up(number, tmp_path, capsys):
    op, inputs, attrs = ort_nodes.variant("LeanAttention", number, "float32")
    model = ort_models.node_model(op, ort_nodes.shapes_of(inputs), attrs, forms=ort_models.forms_of(inputs))
    onnx.save(onnx_ir.to_proto(function_bodies.attach(onnx_ir.from_proto(model))), tmp_path / "model.onnx")
    assert cli.main(["check", str(tmp_path / "model.onnx")]) == 0
    assert "key_cache_out" in capsys.readouterr().out
