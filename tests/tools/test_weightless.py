"""bench/models/weightless.py: graphs that lose their weights and get them back."""

import onnx
import onnx.numpy_helper
import pytest
import torch
import transformers

from leanfleet.export import LinearDecoder, LinearDecoderConfig, export_decoder
from support.cpu_time import rest_slow
from support.benchmarks import script

weightless = script("models.weightless")

SIZES = dict(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
)
MODELS = {
    "tied": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)).half(),
    "experts": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=4)).bfloat16(),
    "sorted columns": lambda: transformers.Qwen3_5ForCausalLM(
        transformers.Qwen3_5TextConfig(
            **SIZES,
            head_dim=32,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            layer_types=["linear_attention", "full_attention"],
        )
    ).half(),
    "retnet": lambda: LinearDecoder(
        LinearDecoderConfig("retnet", 500, num_hidden_layers=2, hidden_size=128, num_attention_heads=4, feed_forward_size=256)
    ),
}


def initializers(folder):
    return {
        t.name: (t.data_type, onnx.numpy_helper.to_array(t).tobytes())
        for t in onnx.load(folder / "model.onnx").graph.initializer
    }


@pytest.mark.parametrize("kind", rest_slow(MODELS))
def test_filled_as_exported(kind, tmp_path):
    torch.manual_seed(0)
    model = MODELS[kind]().eval()
    export_decoder(model, tmp_path)
    exported = initializers(tmp_path)
    assert weightless.strip(tmp_path, weightless.parameters_of(model)) >= 8 and not (tmp_path / weightless.DATA).exists()
    assert (tmp_path / "model.onnx").stat().st_size < 620_000
    weightless.fill(tmp_path, weightless.parameters_of(model))
    assert initializers(tmp_path) == exported
