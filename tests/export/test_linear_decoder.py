"""Decoders with linear attention: one exported graph is right at every length, as a prompt and token by token."""

import sys
import warnings

import numpy as np
import onnx
import pytest
import torch

from leanfleet.export import LinearDecoder, LinearDecoderConfig, export_decoder
from leanfleet.export.reference import causal_linear_decay as decay_reference
from leanfleet.ort_ops.generation import generate, load_decoder
from support import decoders
from support.cpu_time import slow_if
from support.decoders import HYBRIDS, LONGEST, MODELS, VOCABULARY, judge_logits, minimax, ours
from support.splits import splits_by_tables

QUICK = ["normalized", "minimax", "qwen3.5"]


def made(name):
    """The same weights each time."""
    torch.manual_seed(7)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for p in model.parameters():  # random weights as they come give nearly equal logits: spread them
            p.mul_(2 if p.dim() > 1 else 1)
    return model


@pytest.fixture(scope="module", params=slow_if(MODELS, [name for name in MODELS if name not in QUICK]))
def exported(request, tmp_path_factory):
    """(session, token ids [LONGEST], logits of every position in float64, what PyTorch's float32 loses on them, folder)."""
    warnings.filterwarnings("ignore")
    model = made(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    export_decoder(model, folder)
    ids = torch.randint(3, VOCABULARY, (LONGEST,))
    with torch.no_grad():
        single = model(ids.unsqueeze(0), use_cache=False).logits[0].double()
    judge = judge_logits(model, ids)
    loses = (single - judge).abs().max().item()
    assert loses < 1e-3, "an expert was chosen differently in float32: take another seed"
    return load_decoder(folder, providers=["CPUExecutionProvider"]), ids.numpy(), judge.numpy(), loses, folder


class Runner:
    """Steps with caches that live outside the session, as new arrays each time."""

    def __init__(self, decoder, batch, capacity=LONGEST + 4):
        self.session = decoder.session
        # What no token wrote must not matter: NaN in the softmax caches, zeros in the states.
        self.caches = {
            c.name: np.full(
                [{"batch": batch, "capacity": capacity}.get(n, n) for n in c.shape],
                np.nan if "capacity" in c.shape else 0,
                {"tensor(float)": np.float32, "tensor(float16)": np.float16}[c.type],
            )
            for c in decoder.caches
        }
        self.lens = np.zeros(batch, np.int32)

    def step(self, ids, query_lens):
        query_lens = np.asarray(query_lens, np.int32)
        self.lens = self.lens + query_lens
        logits, *presents = self.session.run(
            None, {"input_ids": np.asarray(ids), "seq_lens": self.lens, "query_lens": query_lens, **self.caches}
        )
        self.caches = dict(zip(self.caches, presents, strict=True))
        return logits


def assert_close(found, judge, loses):
    error = np.abs(found - judge).max()
    assert error <= 4 * loses, f"error {error:.1e}; PyTorch in float32 loses {loses:.1e}"


def test_prompts_of_every_length(exported):
    decoder, ids, judge, loses, _ = exported
    for length in range(1, LONGEST + 1):
        assert_close(Runner(decoder, 1).step(ids[None, :length], [length])[0], judge[length - 1], loses)


def test_all_lengths_in_one_ragged_batch(exported):
    """Padding rows leave the states as they are, so the next token is right as well."""
    decoder, ids, judge, loses, _ = exported
    lengths = np.array([1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 100, LONGEST - 1])
    rows = np.zeros((len(lengths), LONGEST), np.int64)
    for row, n in enumerate(lengths):
        rows[row, :n] = ids[:n]
    runner = Runner(decoder, len(lengths))
    assert_close(runner.step(rows, lengths), judge[lengths - 1], loses)
    # A request that takes no part keeps its state.
    part = np.arange(len(lengths)) % 2
    runner.step(ids[lengths][:, None], part)
    rest = runner.step(ids[lengths + part * (lengths + part < LONGEST)][:, None], np.ones(len(lengths)))
    keep = lengths + part < LONGEST
    assert_close(rest[keep], judge[(lengths + part)[keep]], loses)


def test_token_by_token_after_prompts(exported):
    decoder, ids, judge, loses, _ = exported
    starts = np.array([1, 23, 64])
    rows = np.zeros((3, 64), np.int64)
    for row, n in enumerate(starts):
        rows[row, :n] = ids[:n]
    runner = Runner(decoder, 3)
    assert_close(runner.step(rows, starts), judge[starts - 1], loses)
    for step in range(LONGEST - starts.min()):
        at = starts + step
        inside = at < LONGEST
        found = runner.step(ids[np.minimum(at, LONGEST - 1)][:, None], inside.astype(np.int32))
        assert_close(found[inside], judge[at[inside]], loses)


def test_prompt_in_pieces(exported):
    decoder, ids, judge, loses, _ = exported
    runner, at = Runner(decoder, 1), 0
    for piece in (5, 64, 1, 30, 16, 17):
        assert_close(runner.step(ids[None, at : at + piece], [piece])[0], judge[at + piece - 1], loses)
        at += piece


def test_generation_in_place_and_by_the_bodies(exported):
    """Greedy tokens of a ragged batch are those of each prompt alone, with states in place and with new ones each step."""
    decoder, ids, _, _, folder = exported
    asked = [ids[:n].tolist() for n in (1, 40, 17)]
    together, _ = generate(decoder, asked, 12, stop_tokens=[])
    assert together == [generate(decoder, [p], 12, stop_tokens=[])[0][0] for p in asked]
    assert together == generate(load_decoder(folder, library=False), asked, 12, stop_tokens=[])[0]


def test_tokens_are_those_that_transformers_generates(exported):
    """Of hybrids, whose cached steps are other code of transformers than their prompts."""
    decoder, ids, _, _, folder = exported
    if (name := folder.name.rstrip("0")) not in HYBRIDS:
        pytest.skip("no hybrid")
    model, asked = made(name), [ids[:n].tolist() for n in (1, 33, 4, 17)]
    expected = [
        model.generate(torch.tensor([p]), max_new_tokens=16, do_sample=False, eos_token_id=-1, pad_token_id=0)[
            0, len(p) :
        ].tolist()
        for p in asked
    ]
    assert generate(decoder, asked, 16, stop_tokens=[])[0] == expected


@pytest.mark.parametrize("name", ("retnet", "mamba2", "falcon-h1"))
def test_narrow_states(name, tmp_path):
    """States of 16 bits, rounded once a step: prompts, pieces and steps lose what PyTorch loses in that type."""
    model = made(name).half()
    export_decoder(model, tmp_path, narrow_states=True)
    decoder, ids = load_decoder(tmp_path, providers=["CPUExecutionProvider"]), torch.randint(3, VOCABULARY, (LONGEST,))
    types = {c.name.partition(".")[2].rpartition(".")[2]: c.type for c in decoder.caches}
    assert types.pop("recurrent_state") == "tensor(float16)" and types.pop("conv_state", "tensor(float)") == "tensor(float)"
    with torch.no_grad():
        half = model(ids.unsqueeze(0), use_cache=False).logits[0].double()
    judge = judge_logits(model, ids)
    loses = (half - judge).abs().max().item()
    runner, at = Runner(decoder, 1), 0
    for piece in (40, 17, *[1] * 20):
        found = runner.step(ids[None, at : at + piece].numpy(), [piece])[0]
        assert_close(found, judge[at + piece - 1].numpy(), loses)
        at += piece


def test_states_that_cannot_be_narrow(tmp_path):
    for name, dtype, match in (
        ("retnet", torch.float32, "narrow_states keeps states in the model's type, which is torch.float32, not one of 16 bits"),
        ("qwen3.5", torch.float16, "the state of layer 0, of the gated delta rule, is always float32"),
    ):
        with pytest.raises(ValueError, match=match):
            export_decoder(made(name).to(dtype), tmp_path / name, narrow_states=True)
        assert not (tmp_path / name).exists()

    with pytest.raises(ValueError, match="narrow_states is given, and no layer carries a state: leave it out"):
        export_decoder(decoders.make("llama").half(), tmp_path / "llama", narrow_states=True)


def test_states_are_updated_in_place(exported):
    decoder, ids, _, _, _ = exported
    from leanfleet.ort_ops.generation import _Steps

    steps = _Steps(decoder, 1, 32)
    lens = np.array([3], np.int32)
    before = [v.data_ptr() for buffers in steps.buffers for v in buffers]
    steps.run(ids[None, :3], lens, lens)
    assert len(before) == len(decoder.caches)
    for cache, (value,), address in zip(decoder.caches, steps.buffers, before, strict=True):
        assert value.data_ptr() == address
        if "capacity" not in cache.shape:
            assert np.abs(value.numpy()).max() > 0


def test_graph(exported, tmp_path):
    _, _, _, _, folder = exported
    model = onnx.load(folder / "model.onnx")
    onnx.checker.check_model(model)
    names = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    states = [n for n in names if n.endswith("recurrent_state")]
    kinds = [n.op_type for n in model.graph.node]
    sums = [n for n in names if n.endswith(("key_sum", "value_sum"))]
    if sums:
        assert len(states) == kinds.count("NormalizedLinearAttention") == len(sums) / 2 == 2 - kinds.count("LeanAttention")
        assert names[states[0]] == ["batch", 2, 16, 16] and names[sums[0]] == ["batch", 2, 16]
    elif (name := folder.name.rstrip("0")) in HYBRIDS:
        tokens = [n for n in names if n.endswith("conv_state")]
        recurrent, of_delta = (
            {"bamba": 1, "nemotron-h": 1}.get(name, 2),
            "linear_num_key_heads" in HYBRIDS[name][1] or "kimi" in name,
        )
        assert kinds.count("GatedDeltaRule" if of_delta else "CausalLinearDecay") == recurrent
        assert len(states) == kinds.count("CausalConv") == len(tokens) == recurrent
        assert kinds.count("LeanAttention") == {"mamba2": 0, "falcon-h1": 2}.get(name, 1)
        assert "Transpose" not in kinds or "kimi" in name
        assert ("MoE" in kinds) == (name in ("qwen3-next", "kimi-linear", "granite"))
        assert names[states[0]][0] == "batch" and names[tokens[0]][:2] == ["batch", 3]
    else:
        assert len(states) == kinds.count("CausalLinearDecay") == 2
        assert names[states[0]][:2] == ["batch", 6]
    assert not [n for n in model.graph.node if n.op_type in ("Loop", "Scan", "If")]
    # Of parts of unequal sizes ONNX Runtime's CUDA provider copies a table from the host in each run, which graphs do not take.
    assert splits_by_tables(folder / "model.onnx", tmp_path) == []
    shapes = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.value_info}
    parts = [[shapes.get(i, []) for i in n.input] for n in model.graph.node if n.op_type == "Concat"]
    assert all(len({shape[-1] for shape in each}) == 1 for each in parts if all(len(shape) > 2 for shape in each)), parts


@pytest.mark.parametrize("kind", ["retnet", "transnormer"])
def test_blocks_against_their_quadratic_form(kind, monkeypatch):
    """The recurrence with carried states is the papers' parallel form: scores times the matrix of powers of the decay."""
    torch.manual_seed(3)
    model = ours(kind, layers=3).double().eval()
    ids = torch.randint(3, VOCABULARY, (2, 37))

    def parallel(cache, layer, query, key, value, log_decay, scale=1.0):
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        steps = torch.arange(query.shape[2])
        distance = (steps[:, None] - steps).double()
        mask = torch.exp(log_decay.double()[:, None, None] * distance).masked_fill(distance < 0, 0)
        return (scale * (query @ key.transpose(2, 3) * mask) @ value).transpose(1, 2)

    with torch.no_grad():
        carried = model(ids).logits
        monkeypatch.setattr("leanfleet.export.linear_decoder.decayed_attention", parallel)
        assert torch.allclose(carried, model(ids).logits, rtol=1e-11, atol=1e-11)
    decays = torch.tensor(model.layers[1].attention.log_decay, dtype=torch.float64).exp()
    if kind == "retnet":
        assert torch.allclose(decays[:3], torch.tensor([31 / 32, 63 / 64, 127 / 128], dtype=torch.float64), atol=1e-7)
    else:
        assert torch.allclose(decays, torch.exp(-8 * torch.arange(1, 7).double() / 6 * (2 / 3)), atol=1e-7)


def test_minimax_slopes_are_decays():
    """transformers' lightning layer in float64 is CausalLinearDecay with log_decay = -slope_rate, prompt and step."""
    torch.manual_seed(1)
    layer = minimax().model.layers[0].self_attn.double().eval()
    layer.query_decay, layer.key_decay, layer.diagonal_decay = layer.decay_factors(layer.slope_rate)
    x = torch.randn(2, 41, 96, dtype=torch.float64)
    qkv = layer.act_fn(layer.qkv_proj(x)).view(2, 41, 6, 48)
    query, key, value = (t.transpose(1, 2) for t in qkv.split(16, dim=3))
    output, *_ = decay_reference(query, key, value, -layer.slope_rate.flatten(), return_state=True)
    output = torch.sigmoid(layer.output_gate(x)) * layer.norm(output.transpose(1, 2).flatten(2))
    with torch.no_grad():
        expected, _ = layer(x, None, None)
        assert torch.allclose(layer.out_proj(output), expected, rtol=1e-9, atol=1e-9)


def test_errors():
    sizes = dict(vocab_size=11, hidden_size=96, num_hidden_layers=1, num_attention_heads=6, feed_forward_size=8)
    with pytest.raises(ValueError, match="kind is 'mamba'; it can be retnet or transnormer"):
        LinearDecoder(LinearDecoderConfig("mamba", **sizes))
    with pytest.raises(ValueError, match="hidden_size 100 is not an even multiple of num_attention_heads 6"):
        LinearDecoder(LinearDecoderConfig("retnet", **{**sizes, "hidden_size": 100}))


def test_delta_rules_whose_keys_nothing_bounds(tmp_path, monkeypatch):
    """A layer that calls the rule without normalisation."""
    model = made("qwen3.5")
    layer = next(m for m in model.modules() if hasattr(m, "conv1d"))
    kind, name = type(layer), "torch_chunk_gated_delta_rule"
    forward, module = kind.forward, sys.modules[kind.__module__]

    def plain(self, *args, **kwargs):
        rule = getattr(module, name)
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda *a, **k: rule(*a, **k | {"use_qk_l2norm_in_kernel": False}))
            return forward(self, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", plain)
    with pytest.raises(
        ValueError, match=r"layer 0: use_qk_l2norm_in_kernel is False, .* beta \|k\|\^2 is above 2; expected True"
    ):
        export_decoder(model, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
