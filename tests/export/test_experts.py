"""Mixtures of experts export as ONNX Runtime's MoE node, whatever transformers' form of their weights and activation."""

import warnings

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers

from leanfleet.export import export_decoder
from leanfleet.ort_ops.generation import generate, load_decoder
from support.cpu_time import rest_slow
from support.decoders import judge_logits

SIZES = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=97,
    intermediate_size=24,
    max_position_embeddings=128,
    num_experts_per_tok=2,
    pad_token_id=0,
)
MODELS = {  # weights concatenated, and transposed with biases and a clamped activation; weights of tokens that do not add up to 1
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, sliding_window=None),
    "gpt-oss": lambda: transformers.GptOssConfig(**SIZES, num_local_experts=4, layer_types=["full_attention"] * 2),
    "minimax": lambda: transformers.MiniMaxConfig(
        **SIZES, num_local_experts=4, block_size=16, layer_types=["linear_attention", "full_attention"]
    ),
    "qwen2-moe": lambda: transformers.Qwen2MoeConfig(
        **SIZES, num_experts=4, moe_intermediate_size=24, norm_topk_prob=False, shared_expert_intermediate_size=16
    ),
}


def build(kind):
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(
        MODELS[kind](), attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        for p in model.parameters():  # biases start as zeros, and small weights give nearly equal logits
            p.copy_(torch.randn(p.shape) * (p.shape[-1] ** -0.5 if p.dim() > 1 else 0.1) + (p.dim() == 1))
    return model


PROVIDERS = [p for p in ("CPU", "CUDA") if f"{p}ExecutionProvider" in onnxruntime.get_available_providers()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_float16(kind, tmp_path):
    """Logits lose no more than three times what PyTorch's float16 loses, by ONNX Runtime's kernels and by the node's function."""
    warnings.filterwarnings("ignore")
    model = build(kind)
    ids = torch.randint(3, 97, (1, 40))
    with torch.no_grad():
        judge = model(ids, use_cache=False).logits[0, -1].double()
        plain = model.half()(ids, use_cache=False).logits[0, -1].double()
    export_decoder(model, tmp_path)
    for way in ("MoE node", "its function"):
        if way == "its function":  # under another name there is no kernel
            path = tmp_path / "model.onnx"
            graph = onnx.load(path)
            for node in [n for n in graph.graph.node if n.op_type == "MoE"] + [f for f in graph.functions if f.name == "MoE"]:
                node.domain = "elsewhere"
            graph.opset_import.append(onnx.helper.make_opsetid("elsewhere", 1))
            onnx.save(graph, path)
        for provider in PROVIDERS:
            found = []
            decoder = load_decoder(tmp_path, providers=[f"{provider}ExecutionProvider"])
            generate(decoder, [ids[0].tolist()], 1, stop_tokens=(), on_logits=lambda x: found.append(x.copy()))  # noqa: B023
            error, loses = np.abs(found[0][0] - judge.numpy()).max(), (plain - judge).abs().max().item()
            assert error < 3 * loses + 1e-3, f"{way}, {provider}: {error:.1e} off; PyTorch's float16 is {loses:.1e} off"


@pytest.mark.parametrize("kind", rest_slow(MODELS))
def test_experts_are_one_node_and_give_what_transformers_gives(kind, tmp_path):
    warnings.filterwarnings("ignore")
    model = build(kind)
    before = {name: p.clone() for name, p in model.named_parameters()}
    export_decoder(model, tmp_path)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters()), "the export changed the model"
    assert model.config._experts_implementation == "eager"
    nodes = onnx.load(tmp_path / "model.onnx").graph.node
    assert sum(n.op_type == "MoE" for n in nodes) == SIZES["num_hidden_layers"]

    prompts = [[5, 17, 3, 88, 41, 9, 60], [33], [7, 7, 8, 90]]
    found = []
    decoder = load_decoder(tmp_path, providers=["CPUExecutionProvider"])
    tokens, _ = generate(decoder, prompts, 6, stop_tokens=(), on_logits=lambda x: found.append(x.copy()))
    for row, prompt in enumerate(prompts):
        ids = torch.tensor([prompt + tokens[row][:-1]])
        with torch.no_grad():
            single = model(ids, use_cache=False).logits[0, len(prompt) - 1 :].double()
        judge = judge_logits(model, ids[0])[len(prompt) - 1 :]
        model.float()
        loses = (single - judge).abs().max().item()
        assert loses < 1e-4, "an expert was chosen differently in float32: take another seed"
        error = np.abs(np.stack([x[row] for x in found]) - judge.numpy()).max()
        assert error < 8 * loses, f"{error:.1e} off; PyTorch's float32 is {loses:.1e} off"


@pytest.mark.slow
def test_other_runtimes_get_standard_operators(tmp_path):
    warnings.filterwarnings("ignore")
    export_decoder(build("mixtral"), tmp_path, fuse=False)
    nodes = onnx.load(tmp_path / "model.onnx").graph.node
    assert {n.domain for n in nodes} <= {"", "leanfleet"}
