"""Decoders with linear attention, written from their papers' equations: RetNet and TransNormerLLM.

For a model of these families in a training framework of its own: give the weights to LinearDecoder and export it with
export_decoder. Every layer's attention is CausalLinearDecay with a carried state, so that prompts of any length and decode
steps run in one graph.
"""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.functional import gelu, relu, silu

from leanfleet.decoder_contract import BATCH, STATE, cache_name
from leanfleet.export.cache import Cache, decayed_attention
from leanfleet.export.linear_attention import rotary, rotate


@dataclass
class LinearDecoderConfig:
    """kind: "retnet" or "transnormer". Sizes: hidden_size E, a multiple of the heads H; keys have E / H channels, values
    as many in TransNormerLLM and twice as many in RetNet. feed_forward_size: inner width. eos_token_id: an id, or a list.

    released: as the code that was released with the weights computes, where it differs from the paper's equations; see
    leanfleet.export.released, which makes such configurations of checkpoints. The fields behind it are for that: value_size,
    all
    channels of RetNet's values; activation of its feed-forward layer; scale_embedding; rotated_layers, those of
    TransNormerLLM with LRPE."""

    kind: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    feed_forward_size: int
    eos_token_id: int | list | None = None
    max_position_embeddings: int | None = None
    eps: float = 1e-5
    released: bool = False
    value_size: int | None = None
    activation: str = "gelu"
    scale_embedding: bool = False
    rotated_layers: tuple[int, ...] = (0,)

    def all_values(self) -> int:
        """Channels of the values of all heads."""
        return self.value_size or (2 if self.kind == "retnet" else 1) * self.hidden_size

    def all_keys(self, layer: int) -> int:
        """Channels of the keys of all heads, as they enter a layer's state: LRPE of the released code has twice as many."""
        lrpe = self.kind == "transnormer" and self.released and layer in self.rotated_layers
        return (2 if lrpe else 1) * self.hidden_size


def per_head_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """GroupNorm with a group a head and no weights: x [B,N,H,D], each head's row to mean 0 and variance 1."""
    return nn.functional.layer_norm(x, x.shape[-1:], eps=eps)


def per_head_rms_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x [B,N,H,D] with each head's row divided by the root of its mean square: the released RetNet's norm of heads."""
    return nn.functional.rms_norm(x, x.shape[-1:], eps=eps)


def full_norm(config: LinearDecoderConfig) -> nn.Module:
    """RetNet's norm of whole rows: LayerNorm in the paper, RMSNorm in the released code."""
    return (nn.RMSNorm if config.released else nn.LayerNorm)(config.hidden_size, config.eps)


class Retention(nn.Module):
    """Multi-scale retention of RetNet (Sun et al. 2023, arXiv 2307.08621), equations 5, 6 and 8.

    S_n = gamma S_{n-1} + K_n^T V_n, Retention(X_n) = Q_n S_n, with rotated Q and K (eq. 5: exp(i n theta)) and
    gamma_h = 1 - 2^(-5 - h); Y = GroupNorm of the heads, output (swish(X W_G) * Y) W_O. Keys are divided by sqrt(d).
    The paper's row normalisations of the scores are left out: GroupNorm takes any factor of a row away. The released code
    has angles theta_i = 10000^(-i / (d/2 - 1)) and heads' rows divided by the root of their mean square.
    """

    def __init__(self, config: LinearDecoderConfig, layer: int) -> None:
        super().__init__()
        size, self.heads, self.layer, self.eps = config.hidden_size, config.num_attention_heads, layer, config.eps
        self.query, self.key = nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False)
        values = config.all_values()
        self.value, self.gate = nn.Linear(size, values, bias=False), nn.Linear(size, values, bias=False)
        self.out = nn.Linear(values, size, bias=False)
        self.normalize_heads = per_head_rms_norm if config.released else per_head_norm
        half = size // self.heads // 2
        self.angles = (10000.0 ** -torch.linspace(0, 1, half)).tolist() if config.released else None  # no buffer either
        exponents = 5.0 + torch.arange(self.heads, dtype=torch.float64)
        self.log_decay = torch.log1p(-(2.0**-exponents)).tolist()  # no buffer: half() would round gamma to 1

    def forward(self, x: torch.Tensor, positions: torch.Tensor, cache: Cache) -> torch.Tensor:
        query, key, value = (p(x).unflatten(-1, (self.heads, -1)) for p in (self.query, self.key, self.value))
        if self.angles is None:
            query, key = rotary(query, positions, layout="bnhd"), rotary(key, positions, layout="bnhd")
        else:
            angles = positions.float()[..., None, None] * torch.tensor(self.angles, device=x.device)
            query, key = (rotate(t, angles.cos(), angles.sin()) for t in (query, key))
        output = decayed_attention(
            cache, self.layer, query, key, value, torch.tensor(self.log_decay, device=x.device), scale=query.shape[-1] ** -0.5
        )
        output = self.normalize_heads(output, self.eps).flatten(2)
        return self.out(silu(self.gate(x)) * output)


class RetNetLayer(nn.Module):
    """Equation 9: Y = MSR(LN(X)) + X, then FFN(LN(Y)) + Y with FFN(X) = gelu(X W_1) W_2.

    The released code has FFN(X) = (gelu(X W_1) * X W_g) W_2.
    """

    def __init__(self, config: LinearDecoderConfig, layer: int) -> None:
        super().__init__()
        self.attention = Retention(config, layer)
        self.attention_norm, self.feed_forward_norm = full_norm(config), full_norm(config)
        self.activation = {"gelu": gelu, "swish": silu, "relu": relu}[config.activation]
        self.up = nn.Linear(config.hidden_size, config.feed_forward_size, bias=False)
        self.down = nn.Linear(config.feed_forward_size, config.hidden_size, bias=False)
        self.gate = nn.Linear(config.hidden_size, config.feed_forward_size, bias=False) if config.released else None

    def forward(self, x: torch.Tensor, positions: torch.Tensor, cache: Cache) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), positions, cache)
        normed = self.feed_forward_norm(x)
        inner = self.activation(self.up(normed))
        return x + self.down(inner if self.gate is None else inner * self.gate(normed))


class SimpleRMSNorm(nn.Module):
    """TransNormerLLM's SRMSNorm(x) = x / (|x|_2 / sqrt(d)): no weights."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def alibi_slopes(heads: int) -> list[float]:
    """Slopes of heads (Press et al. 2022, section 3): 2^(-8 h / H) for a power of two H, else those of the next smaller power
    and every other one of the next larger."""
    power = 2 ** (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * h / power) for h in range(1, power + 1)]
    return slopes + alibi_slopes(2 * power)[::2][: heads - power] if power < heads else slopes


class GatedLinearAttention(nn.Module):
    """TransNormerLLM's GLA (Qin et al. 2023, arXiv 2307.14995, section 3.1): O = Norm(Q K^T V) * U.

    Q = swish(X W_q), K = swish(X W_k), V = X W_v, U = X W_u. Scores are a_st = q_s k_t lambda^(s-t) exp(i theta (s-t))
    (LRPE-d): rotation in the first layer alone, lambda = exp(-8 h / H (1 - l / L)) for head h = 1 .. H of layer
    l = 0 .. L-1, so that deeper layers look further back. The released code has learned angles for every channel instead of
    rotated pairs, a_st = sum_i q_si k_ti cos(theta_i (s-t)) lambda^(s-t), and lambda = exp(-slope_h (1 - l / (L-1) + 1e-5))
    with ALiBi's slopes.
    """

    def __init__(self, config: LinearDecoderConfig, layer: int) -> None:
        super().__init__()
        size, self.heads, self.layer = config.hidden_size, config.num_attention_heads, layer
        self.query, self.key, self.value, self.gate, self.out = (nn.Linear(size, size, bias=False) for _ in range(5))
        self.norm = SimpleRMSNorm(config.eps)
        head = torch.arange(1, self.heads + 1, dtype=torch.float64)
        self.log_decay = (-8 * head / self.heads * (1 - layer / config.num_hidden_layers)).tolist()  # no buffer: half() rounds
        self.rotated = layer in config.rotated_layers
        self.theta = None
        if config.released:
            part = 1 - layer / (config.num_hidden_layers - 1) + 1e-5
            self.log_decay = [-slope * part for slope in alibi_slopes(self.heads)]
            self.theta = nn.Parameter(torch.zeros(self.heads, size // self.heads)) if self.rotated else None

    def _positioned(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Query or key [B,N,H,D] with positions in it; LRPE doubles D."""
        if self.theta is None:
            return rotary(x, positions, layout="bnhd")
        angles = positions.float()[..., None, None] * self.theta.float()
        return torch.cat([x * angles.cos(), x * angles.sin()], -1).to(x.dtype)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, cache: Cache) -> torch.Tensor:
        query, key, value = (t.unflatten(-1, (self.heads, -1)) for t in (silu(self.query(x)), silu(self.key(x)), self.value(x)))
        if self.rotated:
            query, key = self._positioned(query, positions), self._positioned(key, positions)
        output = decayed_attention(cache, self.layer, query, key, value, torch.tensor(self.log_decay, device=x.device))
        return self.out(self.norm(output.flatten(2)) * self.gate(x))


class TransNormerLayer(nn.Module):
    """X = X + GLA(Norm(X)), then X + SGLU(Norm(X)) with SGLU(X) = (X W_v * X W_u) W_o."""

    def __init__(self, config: LinearDecoderConfig, layer: int) -> None:
        super().__init__()
        self.attention = GatedLinearAttention(config, layer)
        self.norm = SimpleRMSNorm(config.eps)
        self.value = nn.Linear(config.hidden_size, config.feed_forward_size, bias=False)
        self.gate = nn.Linear(config.hidden_size, config.feed_forward_size, bias=False)
        self.out = nn.Linear(config.feed_forward_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, cache: Cache) -> torch.Tensor:
        x = x + self.attention(self.norm(x), positions, cache)
        x_normed = self.norm(x)
        return x + self.out(self.value(x_normed) * self.gate(x_normed))


class LinearDecoder(nn.Module):
    """A causal language model of RetNet or TransNormerLLM layers. config: LinearDecoderConfig.

    forward(input_ids int64 [B,N]) gives an object with logits [B,N,vocabulary], in the weights' type, of whole sequences.
    export_decoder makes the graph that carries states. Raises ValueError for a kind it does not know and for sizes that do not
    divide.

    Example:
        from leanfleet.export import LinearDecoder, LinearDecoderConfig, export_decoder

        config = LinearDecoderConfig("retnet", vocab_size=1000, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                                     feed_forward_size=128)
        model = LinearDecoder(config)                       # load_state_dict gives it weights
        export_decoder(model, "retnet")                     # the folder of model.onnx and leanfleet.json
    """

    def __init__(self, config: LinearDecoderConfig) -> None:
        super().__init__()
        layers = {"retnet": RetNetLayer, "transnormer": TransNormerLayer}
        if config.kind not in layers:
            raise ValueError(f"LinearDecoder: kind is '{config.kind}'; it can be retnet or transnormer")
        if config.released and config.kind == "transnormer" and config.num_hidden_layers < 2:
            raise ValueError(
                "LinearDecoder: the released TransNormerLLM divides by its number of layers less one: it has 2 or more"
            )
        if config.hidden_size % (2 * config.num_attention_heads):
            raise ValueError(
                f"LinearDecoder: hidden_size {config.hidden_size} is not an even multiple of num_attention_heads "
                f"{config.num_attention_heads}"
            )
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layers[config.kind](config, i) for i in range(config.num_hidden_layers))
        self.norm = full_norm(config) if config.kind == "retnet" else SimpleRMSNorm(config.eps)
        scaled = config.scale_embedding if config.released else config.kind == "retnet"
        self.embedding_scale = math.sqrt(config.hidden_size) if scaled else 1.0
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def get_output_embeddings(self) -> nn.Linear:
        """The head, as transformers' models name it."""
        return self.head

    def cache_shapes(self) -> dict[str, tuple[torch.dtype, tuple[str | int, ...]]]:
        """{name: (dtype, shape)} of the carried states [batch,H,D,Dv]; see leanfleet.export.decoder.cache_shapes."""
        config, heads = self.config, self.config.num_attention_heads
        return {
            cache_name(i, STATE): (torch.float32, (BATCH, heads, config.all_keys(i) // heads, config.all_values() // heads))
            for i in range(len(self.layers))
        }

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        leanfleet_cache: Cache | None = None,
        use_cache: bool = False,
    ) -> SimpleNamespace:
        batch, tokens = input_ids.shape
        if leanfleet_cache is None:
            wide = torch.float64 if self.head.weight.dtype == torch.float64 else torch.float32
            device = input_ids.device
            states = {
                name: torch.zeros(batch, *shape[1:], dtype=wide, device=device)
                for name, (_, shape) in self.cache_shapes().items()
            }
            lens = torch.full((batch,), tokens, dtype=torch.int32, device=device)
            leanfleet_cache = Cache(states.items(), lens, lens)
        if position_ids is None:
            position_ids = torch.arange(tokens, device=input_ids.device).expand(batch, tokens)
        x = self.embedding(input_ids) * self.embedding_scale
        for layer in self.layers:
            x = layer(x, position_ids, leanfleet_cache)
        return SimpleNamespace(logits=self.head(self.norm(x)))
