"""Weights of 4 and 8 bits: what rounding costs, which matrices get them, and exported models."""

import json
import logging

import numpy as np
import onnx
import pytest
import torch
import transformers

from leanfleet import cli
from leanfleet.export import blocks, export_decoder, quantise, quantised_weights
from leanfleet.export.serving import add_serving
from leanfleet.ort_ops.generation import generate, load_decoder
from leanfleet.ort_ops.serving import ContinuousBatch
from support.cpu_time import rest_slow
from support.decoders import byte_tokenizer, make, minimax, prompts


@pytest.mark.parametrize("bits", (4, 8))
def test_rounded_to_the_nearest(bits):
    """Off by half a step at most, or by one where the largest weight's sign leaves the other side a step fewer."""
    torch.manual_seed(0)
    linear = torch.nn.Sequential(torch.nn.Linear(256, 48))
    weight = linear[0].weight
    with torch.no_grad():
        weight *= 10.0 ** torch.linspace(-4, 2, 48)[:, None]
        weight[3, :64] = 0
    wanted = weight.detach().double().numpy()
    assert quantise(linear, bits).matrices == {bits: 1}
    found, scale = linear[0].blocks.numbers(np.float64), np.abs(linear[0].blocks.scale.numbers(np.float64))
    steps = (np.abs(found - wanted).reshape(48, 8, 32) / np.maximum(scale, 1e-30)[..., None]).ravel()
    assert steps.max() <= 1.01 and np.quantile(steps, 0.95) <= 0.5 and steps.max() > 0.4
    assert (found[3, :64] == 0).all() and len(np.unique(found[5])) > bits
    largest = np.abs(wanted.reshape(48, 8, 32)).max(-1)
    assert np.allclose(scale, largest / (8 if bits == 4 else 128), rtol=2**-6)  # float16, and 127 or 128 steps


@pytest.mark.parametrize("family", rest_slow(("llama", "qwen2", "gemma2")))
@pytest.mark.parametrize("bits", rest_slow((4, 8)))
def test_models(family, bits, tmp_path):
    """Exports that are checked with activations as they are; serving.onnx takes the same weights."""
    model = make(family)
    head, tied = model.get_output_embeddings(), model.config.tie_word_embeddings
    linears = sum(isinstance(m, torch.nn.Linear) for m in model.modules())
    plain = sum(p.numel() for p in model.parameters())
    report = quantise(model, bits)
    assert sum(report.matrices.values()) == linears + (not tied) and not report.left
    assert head.blocks.bits == 8 and model.get_input_embeddings().blocks.bits == 8
    assert (head.blocks is model.get_input_embeddings().blocks) == tied
    export_decoder(model, tmp_path, byte_tokenizer())
    add_serving(model, tmp_path)
    assert "largest_difference" in json.loads((tmp_path / "leanfleet.json").read_text())["verified"]
    nodes = onnx.load(tmp_path / "model.onnx", load_external_data=False).graph.node
    assert {n.op_type for n in nodes} >= {"MatMulNBits", "GatherBlockQuantized"}
    assert not any(n.op_type in ("MatMul", "Gemm") for n in nodes)
    data = sum(f.stat().st_size for f in tmp_path.glob("*.data")) or (tmp_path / "model.onnx").stat().st_size
    assert data < (8 + 0.5 + 3) / 8 * plain + 300_000  # bytes: 8 bits and half a one for scales, and the graph
    decoder = load_decoder(tmp_path, providers=["CPUExecutionProvider"])
    wanted, _ = generate(decoder, prompts(5, 11), 12, stop_tokens=())
    batch = ContinuousBatch(tmp_path, pages=20, providers=["CPUExecutionProvider"])
    requests = [batch.add(p, 12, stop_tokens=()) for p in prompts(5, 11)]
    batch.run()
    assert [r.tokens for r in requests] == wanted


def test_the_model_is_the_rounded_one():
    """In PyTorch too: released, its weights are those numbers."""
    model = make("llama")
    ids = torch.tensor([prompts(9)[0]])
    with torch.no_grad():
        before = model(ids).logits
        quantise(model, 4)
        rounded = model(ids).logits
        blocks.release(model, torch.float32)
        assert torch.allclose(model(ids).logits, rounded, atol=1e-4)
    assert 1e-3 < ((rounded - before).norm() / before.norm()).item() < 0.5


@pytest.mark.slow
def test_what_is_left(tmp_path):
    """Routers of mixtures, experts, and rows that are no whole blocks."""
    model = minimax().eval()
    report = quantise(model, 8)
    assert (
        all(name.endswith("gate") for name in report.left)
        and model.model.layers[0].mlp.experts.gate_up_proj.is_floating_point()
    )
    export_decoder(model, tmp_path, verify=False)
    model = torch.nn.Sequential(torch.nn.Linear(40, 8), torch.nn.Linear(64, 8), torch.nn.Embedding(5, 64))
    report = quantise(model, 4)
    assert report.left == ["0"] and report.matrices == {4: 1}
    assert str(report) == "quantised matrices: 1 of 4 bits; as they were: 0"
    assert quantise(model, 4).matrices == {}  # what is quantised stays as it is


def test_refused(tmp_path, capsys):
    with pytest.raises(ValueError, match="bits is 3; expected 4 or 8"):
        quantise(make("llama"), 3)
    model = make("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"the weights of model.layers.1.mlp.up_proj are not finite"):
        quantise(model)
    assert not blocks.holders(model)
    assert cli.main(["export", "any", str(tmp_path / "out"), "--weights", "int4", "--no-fuse"]) == 2
    assert "--weights int4 needs ONNX Runtime's own operators" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", rest_slow(("float16", "float32")))
def test_the_command(tmp_path, capsys, dtype):
    make("llama").save_pretrained(tmp_path / "llama")
    byte_tokenizer().save_pretrained(tmp_path / "llama")
    given = [str(tmp_path / "llama"), str(tmp_path / "out"), "--weights", "int4", "--dtype", dtype]
    assert cli.main(["export", *given]) == 0
    said = capsys.readouterr().err
    assert "quantised matrices: 14 of 4 bits, 2 of 8 bits" in said and "verified: logits" in said
    assert cli.main(["generate", str(tmp_path / "out"), "abc", "--max-tokens", "3", "--raw", "--provider", "cpu"]) == 0
    sizes = [f.stat().st_size for f in (tmp_path / "out").glob("model.onnx*")]
    assert sum(sizes) < transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "llama").num_parameters() * 1.5 + 300_000


def test_the_root_logger_stays_as_it_was():
    """onnxruntime's quantiser has it tell everything."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    with quantised_weights._root_logger_kept():
        root.handlers.clear()
        logging.basicConfig(level=logging.DEBUG)
    assert (root.handlers, root.level) == before
