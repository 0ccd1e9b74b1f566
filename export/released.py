"""Checkpoints of RetNet and TransNormerLLM, in the layout of the code that their papers' authors released.

Both differ from their papers' equations: see the docstrings. What a checkpoint has beyond that is refused by name.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch

from leanfleet.export.linear_decoder import LinearDecoder, LinearDecoderConfig

State = Mapping[str, torch.Tensor]


def load_retnet(state: State, args: Mapping[str, Any]) -> LinearDecoder:
    """The LinearDecoder of a RetNetDecoder of torchscale (github.com/microsoft/torchscale, the code that goes with arXiv
    2307.08621).

    state: its state_dict, also with a prefix such as "decoder."; tensors embed_tokens.weight [vocabulary,E],
    layers.L.retention.{q,k,v,g,out}_proj.weight, layers.L.ffn.{fc1,gate,fc2}.weight,
    layers.L.{retention,final}_layer_norm.weight, layer_norm.weight and, unless it is embed_tokens, output_projection.weight,
    of any float type, which the model keeps.
    args: RetNetConfig's values by their names: decoder_retention_heads, which is needed; activation_fn ("gelu"), layernorm_eps
    (1e-6), no_scale_embedding (True), eos_token_id, max_position_embeddings. Unlike the paper's equations the released code
    has RMSNorm for LayerNorm and for GroupNorm, a gated feed-forward layer, angles 10000^(-i / (d/2 - 1)), and rotates
    neighbours:
    query and key rows are put in LinearDecoder's order here. Its normalisations of scores are left out, as they are in
    LinearDecoder: a norm of each head follows, which they change by its eps alone.

    Raises ValueError for an entry that is missing or left over (experts, deepnorm's and sub-layer norms, biases), and for a
    setting that LinearDecoder does not have.

    Example:
        import torch
        from leanfleet.export.released import load_retnet

        e, f, v = 16, 24, 32                                # E, feed-forward and value widths
        layer = {f"retention.{n}_proj": (e, e) for n in "qk"} | {f"retention.{n}_proj": (v, e) for n in "vg"}
        layer |= {"retention.out_proj": (e, v), "ffn.fc1": (f, e), "ffn.gate": (f, e), "ffn.fc2": (e, f)}
        layer |= {"retention_layer_norm": (e,), "final_layer_norm": (e,)}
        state = {f"layers.0.{name}.weight": torch.randn(shape) for name, shape in layer.items()}
        state |= {"embed_tokens.weight": torch.randn(50, e), "layer_norm.weight": torch.ones(e)}
        model = load_retnet(state, {"decoder_retention_heads": 2})
        print(model(torch.tensor([[1, 2, 3]])).logits.shape)  # torch.Size([1, 3, 50])
    """
    for name in ("deepnorm", "layernorm_embedding", "multiway", "subln"):
        _refuse("load_retnet", name, args.get(name, False), False)
    _refuse("load_retnet", "decoder_normalize_before", args.get("decoder_normalize_before", True), True)
    state = _without_prefix("load_retnet", state, "embed_tokens.weight")
    heads = _needed("load_retnet", args, "decoder_retention_heads")
    activation = args.get("activation_fn", "gelu")
    if activation not in ("gelu", "swish", "relu"):
        raise ValueError(f"load_retnet: activation_fn is {activation!r}; it can be gelu, swish or relu")
    found = {"embedding.weight": _take(state, "embed_tokens.weight"), "norm.weight": _take(state, "layer_norm.weight")}
    found["head.weight"] = state.pop("output_projection.weight", found["embedding.weight"])
    layers = _count(state)
    names = {"k_proj": "key", "v_proj": "value", "g_proj": "gate", "out_proj": "out", "q_proj": "query"}
    for i in range(layers):
        ours, theirs = f"layers.{i}.", f"layers.{i}."
        for name, own in names.items():
            weight = _take(state, f"{theirs}retention.{name}.weight")
            found[f"{ours}attention.{own}.weight"] = _halves(weight, heads) if name in ("q_proj", "k_proj") else weight
        others = {"ffn.fc1": "up", "ffn.fc2": "down", "ffn.gate": "gate"}
        others |= {"retention_layer_norm": "attention_norm", "final_layer_norm": "feed_forward_norm"}
        for name, own in others.items():
            found[f"{ours}{own}.weight"] = _take(state, f"{theirs}{name}.weight")
    vocabulary, size = found["embedding.weight"].shape
    config = LinearDecoderConfig(
        "retnet",
        vocabulary,
        size,
        layers,
        heads,
        feed_forward_size=found["layers.0.up.weight"].shape[0],
        eos_token_id=args.get("eos_token_id"),
        max_position_embeddings=args.get("max_position_embeddings"),
        eps=args.get("layernorm_eps", 1e-6),
        released=True,
        value_size=found["layers.0.attention.value.weight"].shape[0],
        activation=activation,
        scale_embedding=not args.get("no_scale_embedding", True),
    )
    return _filled("load_retnet", config, found, state)


def load_transnormer(state: State, config: Mapping[str, Any]) -> LinearDecoder:
    """The LinearDecoder of a TransnormerForCausalLM (github.com/OpenNLPLab/TransnormerLLM and its models on the Hugging Face
    hub, the code that goes with arXiv 2307.14995).

    state: its state_dict: model.embed_tokens.weight [vocabulary,E], model.layers.L.token_mixer.qkvu_proj.weight [4E,E],
    .token_mixer.out_proj.weight, .token_mixer.lrpe.theta [H,1,E/H] in layers with LRPE, .channel_mixer.{l1,l2,l3}.weight,
    lm_head.weight, of any float type, which the model keeps. config: config.json's values by their names:
    decoder_attention_heads and no_scale_embedding, which are needed; linear_act_fun ("silu"), norm_type ("simplermsnorm"),
    eos_token_id, max_position_embeddings. Unlike the paper's equations the released code has learned angles for every channel
    in
    place of rotations (LRPE: query and key times cos and sin, side by side), and ALiBi's slopes times 1 - l / (L-1) + 1e-5.

    Raises ValueError for an entry that is missing or left over (biases), and for a setting that LinearDecoder does not have.

    Example:
        import torch
        from leanfleet.export.released import load_transnormer

        e, f = 16, 24                                       # E and the feed-forward layer's width
        layer = {"token_mixer.qkvu_proj": (4 * e, e), "token_mixer.out_proj": (e, e)}
        layer |= {"channel_mixer.l1": (f, e), "channel_mixer.l2": (f, e), "channel_mixer.l3": (e, f)}
        state = {f"model.layers.{i}.{n}.weight": torch.randn(shape) for i in range(2) for n, shape in layer.items()}
        state |= {"model.embed_tokens.weight": torch.randn(50, e), "lm_head.weight": torch.randn(50, e)}
        state["model.layers.0.token_mixer.lrpe.theta"] = torch.rand(2, 1, 8)
        model = load_transnormer(state, {"decoder_attention_heads": 2, "no_scale_embedding": True})
        print(model(torch.tensor([[1, 2, 3]])).logits.shape)  # torch.Size([1, 3, 50])
    """
    _refuse("load_transnormer", "norm_type", config.get("norm_type", "simplermsnorm"), "simplermsnorm")
    if config.get("linear_act_fun", "silu") not in ("silu", "swish"):
        raise ValueError(f"load_transnormer: linear_act_fun is {config['linear_act_fun']!r}; it can be silu or swish")
    heads = _needed("load_transnormer", config, "decoder_attention_heads")
    scaled = not _needed("load_transnormer", config, "no_scale_embedding")
    state = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    found = {"embedding.weight": _take(state, "embed_tokens.weight")}
    found["head.weight"] = state.pop("lm_head.weight", found["embedding.weight"])
    layers, rotated = _count(state), []
    for i in range(layers):
        name = f"layers.{i}."
        parts = _take(state, f"{name}token_mixer.qkvu_proj.weight").chunk(4)
        for own, weight in zip(("query", "key", "value", "gate"), parts, strict=True):
            found[f"{name}attention.{own}.weight"] = weight
        found[f"{name}attention.out.weight"] = _take(state, f"{name}token_mixer.out_proj.weight")
        for theirs, own in (("l1", "value"), ("l2", "gate"), ("l3", "out")):
            found[f"{name}{own}.weight"] = _take(state, f"{name}channel_mixer.{theirs}.weight")
        if (theta := state.pop(f"{name}token_mixer.lrpe.theta", None)) is not None:
            found[f"{name}attention.theta"] = theta.reshape(heads, -1)
            rotated.append(i)
    vocabulary, size = found["embedding.weight"].shape
    ours = LinearDecoderConfig(
        "transnormer",
        vocabulary,
        size,
        layers,
        heads,
        feed_forward_size=found["layers.0.value.weight"].shape[0],
        eos_token_id=config.get("eos_token_id"),
        max_position_embeddings=config.get("max_position_embeddings"),
        eps=1e-7,  # the released norm has next to none, but the exporter takes a sum with 1e-8 or less for one with 0
        released=True,
        scale_embedding=scaled,
        rotated_layers=tuple(rotated),
    )
    return _filled("load_transnormer", ours, found, state)


def _refuse(caller: str, name: str, found: object, served: object) -> None:
    if found != served:
        raise ValueError(f"{caller}: {name} is {found!r}; LinearDecoder computes {served!r}")


def _needed(caller: str, settings: Mapping[str, Any], name: str) -> Any:
    if name not in settings:
        raise ValueError(f"{caller}: the settings have no {name}, which the tensors do not tell")
    return settings[name]


def _without_prefix(caller: str, state: State, name: str) -> dict[str, torch.Tensor]:
    """A state_dict whose entry `name` has that name."""
    prefixes = [found.removesuffix(name) for found in state if found.endswith(name)]
    if len(prefixes) != 1:
        raise ValueError(f"{caller}: the checkpoint has {len(prefixes)} entries that end with {name}; expected one")
    return {n.removeprefix(prefixes[0]): t for n, t in state.items()}


def _take(state: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in state:
        raise ValueError(f"the checkpoint has no {name}")
    return state.pop(name)


def _count(state: State) -> int:
    """The number of layers."""
    numbers = [int(found[1]) for name in state if (found := re.match(r"layers\.(\d+)\.", name))]
    if not numbers:
        raise ValueError("the checkpoint has no layers.0")
    return 1 + max(numbers)


def _halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a projection [H D,E] whose heads rotate neighbours (2i, 2i+1), ordered so that they rotate (i, D/2 + i). Scores
    are the same, since query and key change alike."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape)


def _filled(
    caller: str, config: LinearDecoderConfig, found: dict[str, torch.Tensor], rest: dict[str, torch.Tensor]
) -> LinearDecoder:
    """A LinearDecoder with these tensors, in their type. rest: what the checkpoint has beside them."""
    # What the released modules save beside weights: angles and decays that follow from sizes.
    left = [n for n in rest if not n.startswith("retnet_rel_pos.") and not n.endswith((".version", ".index"))]
    if left:
        raise ValueError(
            f"{caller}: the checkpoint has {left[0]} and {len(left) - 1} more entries that LinearDecoder does not have"
        )
    model = LinearDecoder(config).to(found["embedding.weight"].dtype)
    wanted = model.state_dict()
    for name, tensor in found.items():
        if tensor.shape != wanted[name].shape:
            raise ValueError(f"{caller}: {name} is {list(tensor.shape)}; expected {list(wanted[name].shape)}")
    model.load_state_dict(found)
    return model.eval()
