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
from torch.nn.functional import gelu, silu

from leanfleet.decoder_contract import BATCH, STATE, cache_name
from leanfleet.export.decoder import Cache, decayed_attention
from leanfleet.export.linear_attention import rotary


@dataclass
class LinearDecoderConfig:
    """kind: "retnet" or "transnormer". Sizes: hidden_size E, a multiple of the heads H; keys have E / H channels, values
    as many in TransNormerLLM and twice as many in RetNet. feed_forward_size: inner width. eos_token_id: an id, or a list."""

    kind: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    feed_forward_size: int
    eos_token_id: int | list | None = None
    max_position_embeddings: int | None = None
    eps: float = 1e-5


def per_head_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """GroupNorm with a group a head and no weights: x [B,N,H,D], each head's row to mean 0 and variance 1."""
    return nn.functional.layer_norm(x, x.shape[-1:], eps=eps)


class Retention(nn.Module):
    """Multi-scale retention of RetNet (Sun et al. 2023, arXiv 2307.08621), equations 5, 6 and 8.

    S_n = gamma S_{n-1} + K_n^T V_n, Retention(X_n) = Q_n S_n, with rotated Q and K (eq. 5: exp(i n theta)) and
    gamma_h = 1 - 2^(-5 - h); Y = GroupNorm of the heads, output (swish(X W_G) * Y) W_O. Keys are divided by sqrt(d).
    The paper's row normalisations of the scores are left out: GroupNorm takes any factor of a row away.
    """

    def __init__(self, config: LinearDecoderConfig, layer: int) -> None:
        super().__init__()
        size, self.heads, self.layer, self.eps = config.hidden_size, config.num_attention_heads, layer, config.eps
        self.query, self.key = nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False)
        self.value, self.gate = nn.Linear(size, 2 * size, bias=False), nn.Linear(size, 2 * size, bias=False)
        self.out = nn.Linear(2 * size, size, bias=False)
        exponents = 5.0 + torch.arange(self.heads, dtype=torch.float64)
        self.log_decay = torch.log1p(-(2.0**-exponents)).tolist()  # no buffer: half() would round gamma to 1

    def forward(self, x: torch.Tensor, positions: torch.Tensor, cache: Cache) -> torch.Tensor:
        query, key, value = (p(x).unflatten(-1, (self.heads, -1)) for p in (self.query, self.key, self.value))
        query, key = rotary(query, positions, layout="bnhd"), rotary(key, positions, layout="bnhd")
        output = decayed_attention(
            cache, self.layer, query, key, value, torch.tensor(self.log_decay, device=x.device), scale=query.shape[-1] ** -0.5
        )
        output = per_head_norm(output, self.eps).flatten(2)
        return self.out(silu(self.gate(x)) * output)


class RetNetLayer(nn.Module):
    """Equation 9: Y = MSR(LN(X)) + X, then FFN(LN(Y)) + Y with FFN(X) = gelu(X W_1) W_2."""

    def __init__(self, config: LinearDecoderConfig, layer: int) -> None:
        super().__init__()
        self.attention = Retention(config, layer)
        self.attention_norm = nn.LayerNorm(config.hidden_size, config.eps)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, config.eps)
        self.up = nn.Linear(config.hidden_size, config.feed_forward_size, bias=False)
        self.down = nn.Linear(config.feed_forward_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, cache: Cache) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), positions, cache)
        return x + self.down(gelu(self.up(self.feed_forward_norm(x))))


class SimpleRMSNorm(nn.Module):
    """TransNormerLLM's SRMSNorm(x) = x / (|x|_2 / sqrt(d)): no weights."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class GatedLinearAttention(nn.Module):
    """TransNormerLLM's GLA (Qin et al. 2023, arXiv 2307.14995, section 3.1): O = Norm(Q K^T V) * U.

    Q = swish(X W_q), K = swish(X W_k), V = X W_v, U = X W_u. Scores are a_st = q_s k_t lambda^(s-t) exp(i theta (s-t))
    (LRPE-d): rotation in the first layer alone, lambda = exp(-8 h / H (1 - l / L)) for head h = 1 .. H of layer
    l = 0 .. L-1, so that deeper layers look further back.
    """

    def __init__(self, config: LinearDecoderConfig, layer: int) -> None:
        super().__init__()
        size, self.heads, self.layer = config.hidden_size, config.num_attention_heads, layer
        self.query, self.key, self.value, self.gate, self.out = (nn.Linear(size, size, bias=False) for _ in range(5))
        self.norm = SimpleRMSNorm(config.eps)
        head = torch.arange(1, self.heads + 1, dtype=torch.float64)
        self.log_decay = (-8 * head / self.heads * (1 - layer / config.num_hidden_layers)).tolist()  # no buffer: half() rounds

    def forward(self, x: torch.Tensor, positions: torch.Tensor, cache: Cache) -> torch.Tensor:
        query, key, value = (t.unflatten(-1, (self.heads, -1)) for t in (silu(self.query(x)), silu(self.key(x)), self.value(x)))
        if self.layer == 0:
            query, key = rotary(query, positions, layout="bnhd"), rotary(key, positions, layout="bnhd")
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
        if config.hidden_size % (2 * config.num_attention_heads):
            raise ValueError(
                f"LinearDecoder: hidden_size {config.hidden_size} is not an even multiple of num_attention_heads "
                f"{config.num_attention_heads}"
            )
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layers[config.kind](config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, config.eps) if config.kind == "retnet" else SimpleRMSNorm(config.eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def get_output_embeddings(self) -> nn.Linear:
        """The head, as transformers' models name it."""
        return self.head

    def cache_shapes(self) -> dict[str, tuple[torch.dtype, tuple[str | int, ...]]]:
        """{name: (dtype, shape)} of the carried states [batch,H,E/H,Dv]; see leanfleet.export.decoder.cache_shapes."""
        heads = self.config.num_attention_heads
        keys = self.config.hidden_size // heads
        values = 2 * keys if self.config.kind == "retnet" else keys
        return {cache_name(i, STATE): (torch.float32, (BATCH, heads, keys, values)) for i in range(len(self.layers))}

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
        x = self.embedding(input_ids) * (math.sqrt(self.config.hidden_size) if self.config.kind == "retnet" else 1.0)
        for layer in self.layers:
            x = layer(x, position_ids, leanfleet_cache)
        return SimpleNamespace(logits=self.head(self.norm(x)))
