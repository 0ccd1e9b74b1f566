"""Checkpoints in the released layouts, against plain float64 versions of what the released code computes with them."""

import math

import pytest
import torch
from torch.nn.functional import gelu, silu

from leanfleet.export import export_decoder
from leanfleet.export.released import load_retnet, load_transnormer
from leanfleet.ort_ops import generate, load_decoder

VOCABULARY, E, H, F, V, LAYERS = 61, 48, 3, 40, 72, 3


def weights(shapes, layers=LAYERS, prefix=""):
    torch.manual_seed(4)
    state = {}
    for name, shape in shapes.items():
        for i in range(layers) if "{}" in name else (0,):
            made = torch.randn(shape, dtype=torch.float64) / math.sqrt(shape[-1])
            state[prefix + name.format(i)] = 1 + made if len(shape) == 1 else made
    return state


def retnet_state(prefix="decoder."):
    layer = {f"retention.{n}_proj": (E, E) for n in "qk"} | {f"retention.{n}_proj": (V, E) for n in "vg"}
    layer |= {"retention.out_proj": (E, V), "ffn.fc1": (F, E), "ffn.gate": (F, E), "ffn.fc2": (E, F)}
    layer |= {"retention_layer_norm": (E,), "final_layer_norm": (E,)}
    shapes = {f"layers.{{}}.{name}.weight": shape for name, shape in layer.items()}
    outside = {"embed_tokens.weight": (VOCABULARY, E), "output_projection.weight": (VOCABULARY, E), "layer_norm.weight": (E,)}
    state = weights(shapes | outside, prefix=prefix)
    return state | {f"{prefix}retnet_rel_pos.angle": torch.zeros(E // H), f"{prefix}retnet_rel_pos.decay": torch.zeros(H)}


def rms(x, weight=1.0, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def heads(x):
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


def decayed_scores(query, key, log_decay):
    steps = torch.arange(query.shape[2], dtype=torch.float64)
    distance = (steps[:, None] - steps).clamp(min=0)
    return (query @ key.mT * torch.exp(log_decay[:, None, None] * distance)).tril()


def plain_retnet(state, ids, prefix="decoder."):
    """torchscale's parallel form with activation_fn gelu: neighbours rotate, scores are not normalised."""
    get = lambda name: state[f"{prefix}{name}.weight"]  # noqa: E731
    d = E // H
    angle = (10000.0 ** -torch.linspace(0, 1, d // 2)).double().repeat_interleave(2)
    angles = torch.arange(ids.shape[1])[:, None] * angle

    def shifted(x):
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        return x * angles.cos() + turned * angles.sin()

    log_decay = torch.log(1 - 2.0 ** (-5 - torch.arange(H, dtype=torch.float64)))
    x = get("embed_tokens")[ids]
    for i in range(LAYERS):
        layer = f"layers.{i}."
        y = rms(x, get(f"{layer}retention_layer_norm"))
        q, k, v = (heads(y @ get(f"{layer}retention.{n}_proj").T) for n in "qkv")
        scores = decayed_scores(shifted(q), shifted(k * d**-0.5), log_decay)
        out = rms((scores @ v).transpose(1, 2)).flatten(2)
        x = x + (silu(y @ get(f"{layer}retention.g_proj").T) * out) @ get(f"{layer}retention.out_proj").T
        y = rms(x, get(f"{layer}final_layer_norm"))
        x = x + (gelu(y @ get(f"{layer}ffn.fc1").T) * (y @ get(f"{layer}ffn.gate").T)) @ get(f"{layer}ffn.fc2").T
    return rms(x, get("layer_norm")) @ get("output_projection").T


def transnormer_state():
    layer = {"token_mixer.qkvu_proj": (4 * E, E), "token_mixer.out_proj": (E, E)}
    layer |= {"channel_mixer.l1": (F, E), "channel_mixer.l2": (F, E), "channel_mixer.l3": (E, F)}
    shapes = {f"model.layers.{{}}.{name}.weight": shape for name, shape in layer.items()}
    state = weights(shapes | {"model.embed_tokens.weight": (VOCABULARY, E), "lm_head.weight": (VOCABULARY, E)})
    return state | {"model.layers.0.token_mixer.lrpe.theta": torch.rand(H, 1, E // H, dtype=torch.float64)}


def plain_transnormer(state, ids):
    """The released code in evaluation: LRPE of cos and sin in the first layer, ALiBi's slopes for 3 heads."""
    get = lambda name: state[f"model.{name}.weight"]  # noqa: E731
    slopes = torch.tensor([2.0**-4, 2.0**-8, 2.0**-2], dtype=torch.float64)  # of 2 heads, and the first of 4
    x = get("embed_tokens")[ids] * math.sqrt(E)
    for i in range(LAYERS):
        layer = f"layers.{i}."
        q, k, v, u = (rms(x, eps=0) @ get(f"{layer}token_mixer.qkvu_proj").T).chunk(4, -1)
        q, k, v = heads(silu(q)), heads(silu(k)), heads(v)
        if i == 0:
            theta = state["model.layers.0.token_mixer.lrpe.theta"] * torch.arange(ids.shape[1])[:, None]
            q, k = (torch.cat([t * theta.cos(), t * theta.sin()], -1) for t in (q, k))
        out = decayed_scores(q, k, -slopes * (1 - i / (LAYERS - 1) + 1e-5)) @ v
        x = x + (u * rms(out.transpose(1, 2).flatten(2), eps=0)) @ get(f"{layer}token_mixer.out_proj").T
        y = rms(x, eps=0)
        x = (
            x
            + (y @ get(f"{layer}channel_mixer.l1").T * (y @ get(f"{layer}channel_mixer.l2").T))
            @ get(f"{layer}channel_mixer.l3").T
        )
    return rms(x, eps=0) @ state["lm_head.weight"].T


RETNET = {"decoder_retention_heads": H, "eos_token_id": 2}
TRANSNORMER = {"decoder_attention_heads": H, "no_scale_embedding": False, "eos_token_id": 2}
CASES = {
    "retnet": (load_retnet, retnet_state, RETNET, plain_retnet),
    "transnormer": (load_transnormer, transnormer_state, TRANSNORMER, plain_transnormer),
}


@pytest.mark.parametrize("case", CASES)
def test_against_the_released_form(case):
    load, make, settings, plain = CASES[case]
    state, ids = make(), torch.randint(3, VOCABULARY, (2, 37))
    with torch.no_grad():
        found = load(state, settings)(ids).logits
    expected = plain(state, ids)
    assert found.dtype == torch.float64
    # Angles are float32 in LinearDecoder, as in the released code.
    assert (found - expected).abs().max() < 3e-5 * expected.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_export(case, tmp_path):
    """Greedy tokens of a ragged batch are those of the plain form."""
    load, make, settings, plain = CASES[case]
    state = make()
    export_decoder(load({n: t.float() for n, t in state.items()}, settings), tmp_path)
    asked = [[5, 9, 13], [7, 4, 8, 30, 31, 12, 50, 21, 9]]
    expected = []
    for prompt in asked:
        tokens = list(prompt)
        for _ in range(8):
            tokens.append(int(plain(state, torch.tensor([tokens]))[0, -1].argmax()))
        expected.append(tokens[len(prompt) :])
    assert generate(load_decoder(tmp_path), asked, 8, stop_tokens=[])[0] == expected


def test_a_tied_head_and_no_prefix():
    state = retnet_state("")
    del state["output_projection.weight"]
    model = load_retnet(state, RETNET)
    assert torch.equal(model.head.weight, state["embed_tokens.weight"])


def test_errors():
    state = retnet_state()
    with pytest.raises(ValueError, match="the settings have no decoder_retention_heads"):
        load_retnet(state, {})
    with pytest.raises(ValueError, match="deepnorm is True; LinearDecoder computes False"):
        load_retnet(state, RETNET | {"deepnorm": True})
    with pytest.raises(ValueError, match="layers.1.moe_layer.gate.wg.weight and 0 more"):
        load_retnet(state | {"decoder.layers.1.moe_layer.gate.wg.weight": torch.zeros(1)}, RETNET)
    with pytest.raises(ValueError, match="0 entries that end with embed_tokens.weight"):
        load_retnet({}, RETNET)
    with pytest.raises(ValueError, match=r"layers.2.up.weight is \[39, 48\]; expected \[40, 48\]"):
        load_retnet(state | {"decoder.layers.2.ffn.fc1.weight": torch.zeros(F - 1, E)}, RETNET)
    other = transnormer_state()
    with pytest.raises(ValueError, match="the settings have no no_scale_embedding"):
        load_transnormer(other, {"decoder_attention_heads": H})
    with pytest.raises(ValueError, match="norm_type is 'layernorm'"):
        load_transnormer(other, TRANSNORMER | {"norm_type": "layernorm"})
    with pytest.raises(ValueError, match="has no layers.1.token_mixer.out_proj.weight"):
        load_transnormer({n: t for n, t in other.items() if "layers.1.token_mixer.out" not in n}, TRANSNORMER)
