"""LinearAttention, the module, and its registration with transformers."""

from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
import torch

from leanfleet import ort_ops
from leanfleet.export import LinearAttention, export, reference
from leanfleet.export.linear_attention import attention, register_transformers, rotary
from support.decoders import make, prompts


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(3)


def expected(module, hidden):
    """The module's output by the float64 reference."""
    module = module.double()
    hidden = hidden.double()
    q, k, v = (
        p(hidden).unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for p in (module.q_proj, module.k_proj, module.v_proj)
    )
    if module.rotary_base is not None:
        n = torch.arange(hidden.shape[1])
        angles = n[:, None] * module.rotary_base ** (
            -torch.arange(0, module.head_dim, 2, dtype=torch.float64) / module.head_dim
        )
        turn = torch.polar(torch.ones_like(angles), angles)

        def rotated(x):
            half = module.head_dim // 2
            z = torch.complex(x[..., :half], x[..., half:]) * turn
            return torch.cat([z.real, z.imag], -1)

        q, k = rotated(q), rotated(k)
    out = reference.normalized_linear_attention(
        q, k, v, module.coefficients, causal=module.causal, normalize_qk=module.normalize_qk
    )[0]
    return module.o_proj(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_kv_heads": 2, "learn_coefficients": True},
        {"rotary_base": None, "causal": False},
        {"head_dim": 10, "bias": True},
    ],
)
@pytest.mark.parametrize("tokens", (1, 65))
def test_output_and_gradients(options, tokens):
    module = LinearAttention(48, 6, **options)
    hidden = torch.randn(2, tokens, 48, requires_grad=True)
    found = module(hidden)
    weights = torch.randn_like(found)
    (found * weights).sum().backward()
    gradients = {n: p.grad.clone() for n, p in module.named_parameters()} | {"hidden": hidden.grad.clone()}
    module.zero_grad()
    double = hidden.detach().double().requires_grad_()
    judge = expected(module, double)
    (judge * weights.double()).sum().backward()
    assert (found - judge).abs().max() < 2e-6 * judge.abs().max()
    for name, gradient in gradients.items():
        exact = double.grad if name == "hidden" else dict(module.named_parameters())[name].grad
        assert (gradient - exact).norm() <= 1e-5 * exact.norm() + 1e-6 * module.o_proj.weight.grad.norm(), name


def test_a_prompt_and_then_token_by_token():
    module = LinearAttention(48, 6, 3)
    hidden = torch.randn(2, 70, 48)
    whole = module(hidden)
    state = module.empty_state(2)
    parts = []
    for piece in (hidden[:, :33], *hidden[:, 33:].split(1, dim=1)):
        output, state = module(piece, state)
        parts.append(output)
    assert (torch.cat(parts, 1) - whole).abs().max() < 1e-5
    assert state[3].tolist() == [70, 70]


def test_padding_leaves_the_state_alone():
    module = LinearAttention(48, 6, 3)
    hidden, lengths = torch.randn(3, 20, 48), (20, 7, 0)
    _, state = module(torch.randn(3, 4, 48), module.empty_state(3))
    valid = torch.arange(20) < torch.tensor(lengths).unsqueeze(1)
    output, padded = module(hidden, state, valid=valid)
    for row, length in enumerate(lengths):
        own = tuple(t[row : row + 1] for t in state)
        if length:
            expected, own = module(hidden[row : row + 1, :length], own)
            assert (output[row, :length] - expected[0]).abs().max() < 1e-5
        for found, wanted in zip(padded, own):
            assert torch.allclose(found[row : row + 1], wanted, atol=1e-5)


def test_autocast_and_compile():
    module = LinearAttention(64, 4, 2)
    hidden = torch.randn(2, 40, 64)
    exact = module(hidden)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = module(hidden)
        low.sum().backward()
    assert low.dtype == torch.bfloat16
    assert (low - exact).abs().max() < 0.03 * exact.abs().max()
    assert all(p.grad is not None for p in module.parameters())
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(hidden), exact, atol=1e-6)


def test_export_of_a_step_with_its_state(tmp_path):
    module = LinearAttention(48, 6, 3).eval()

    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = module

        def forward(self, hidden, *state):
            output, state = self.attention(hidden, state)
            return (output, *state)

    hidden, state = torch.randn(2, 5, 48), module.empty_state(2)
    _, state = module(hidden, state)
    names = ["hidden", "s", "k", "v", "count"]
    export(
        Step().eval(),
        (hidden, *state),
        tmp_path / "step.onnx",
        input_names=names,
        output_names=["out", "s2", "k2", "v2", "count2"],
    )
    feed = {n: t.detach().numpy() for n, t in zip(names, (hidden, *state))}
    wanted, wanted_state = module(hidden, state)
    for session in (
        ort_ops.make_session(tmp_path / "step.onnx", ["CPUExecutionProvider"]),
        onnxruntime.InferenceSession(tmp_path / "step.onnx", providers=["CPUExecutionProvider"]),
    ):
        found = session.run(None, feed)
        for a, b in zip(found, (wanted, *wanted_state)):
            np.testing.assert_allclose(a, b.detach().numpy(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((48, 6, 4), "num_heads 6 is not a multiple of num_kv_heads 4"),
        ((50, 6), "hidden_size 50.*give head_dim"),
        ((42, 6), "even head_dim; it is 7"),
    ],
)
def test_wrong_sizes(arguments, message):
    with pytest.raises(ValueError, match=message):
        LinearAttention(*arguments)


def tiny_pythia():
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=128,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    return GPTNeoXForCausalLM(config)


def test_transformers_model_trains_and_generates():
    model = tiny_pythia()
    model.set_attn_implementation(register_transformers())
    ids = torch.randint(0, 50, (2, 33))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(15):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    model.eval()
    with torch.no_grad():
        prompt = ids[:1, :7]
        found = model.generate(prompt, max_new_tokens=6, do_sample=False)
        whole = prompt
        for _ in range(6):  # without a cache
            whole = torch.cat([whole, model(whole, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, whole)


def test_transformers_calls_the_operator():
    model = tiny_pythia().eval()
    model.set_attn_implementation(register_transformers())
    with torch.no_grad(), torch.profiler.profile() as profile:
        model(torch.randint(0, 50, (1, 9)))
    assert sum(e.count for e in profile.key_averages() if "normalized_linear_attention" in e.key) == 2


@pytest.mark.parametrize("heads", (1, 3))
def test_transformers_cached_step_gives_its_own_tokens(heads):
    query, key, value = (torch.randn(2, heads, 8, 16) for _ in range(3))
    whole, _ = attention(SimpleNamespace(layer_idx=0), query, key, value, None)
    step, _ = attention(SimpleNamespace(layer_idx=0), query[:, :, 5:], key, value, None)
    assert step.shape == (2, 3, heads, 16)
    torch.testing.assert_close(step, whole[:, 5:])


def test_transformers_refusals():
    q = torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match=r"attention mask of shape \[1, 3, 3\]"):
        attention(torch.nn.Module(), q, q, q, torch.zeros(1, 3, 3))
    with pytest.raises(ValueError, match="sliding_window"):
        attention(torch.nn.Module(), q, q, q, None, sliding_window=4)
    with pytest.raises(ValueError, match="attention_dropout to 0"):
        attention(torch.nn.Module(), q, q, q, None, dropout=0.1)


def test_rotary_of_batched_positions():
    x = torch.randn(2, 3, 4, 8)
    offsets = torch.tensor([5, 9])
    batched = rotary(x, offsets[:, None] + torch.arange(4))
    for b in range(2):
        assert torch.allclose(batched[b], rotary(x[b : b + 1], offsets[b] + torch.arange(4))[0], atol=1e-6)


def test_a_transformers_model_trains_under_autocast_and_with_activations_computed_again():
    """Rotary encoding leaves queries and keys in float32 there, and values in bfloat16."""
    model = make("llama").train()
    model.set_attn_implementation(register_transformers())
    tokens = torch.tensor(prompts(20, 20))

    def gradients():
        model.zero_grad()
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}

    exact, wanted = gradients()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low, found = gradients()
    assert abs(low - exact) < 0.01 * exact
    errors = {name: ((found[name] - wanted[name]).norm() / wanted[name].norm()).item() for name in wanted}
    assert max(errors.values()) < 0.1, errors
    model.gradient_checkpointing_enable()
    again, found = gradients()
    assert again == exact
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
