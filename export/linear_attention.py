"""NormalizedLinearAttention as a module that replaces softmax attention, and as an attention of transformers."""

from typing import Any

import torch
from torch import nn

from leanfleet.export.support import LINEAR as TRANSFORMERS_NAME
from leanfleet.export.support import REMEMBERED
from leanfleet.export.torch_ops import normalized_linear_attention


def rotary_tables(
    positions: torch.Tensor, width: int, base: float = 10000.0, layout: str = "bhnd"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, float32, by which `rotate` rotates heads of `width` columns, an even number, in a layout.

    positions: int [N] or [B,N].
    """
    half = width // 2
    frequencies = base ** (-torch.arange(half, device=positions.device, dtype=torch.float32) / half)
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
    if layout == "bnhd":
        angles = angles.unsqueeze(-2)
    elif positions.dim() == 2:
        angles = angles.unsqueeze(1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x, of any float type, with the columns i and half + i of each head rotated by its token's angles; x's type."""
    half = x.shape[-1] // 2
    first, second = x[..., :half].float(), x[..., half:].float()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def rotary(x: torch.Tensor, positions: torch.Tensor, base: float = 10000.0, layout: str = "bhnd") -> torch.Tensor:
    """Rotary position encoding (Su et al. 2023, eq. 34), pairs half a head apart.

    x: [B,H,N,D], or [B,N,H,D] with layout "bnhd", D even, any float type; positions: int [N] or [B,N]. Returns x's type;
    angles are float32.
    """
    return rotate(x, *rotary_tables(positions, x.shape[-1], base, layout))


def one_type(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The three in one type: autocast's where it is on, else the value's (what a linear layer gave)."""
    device = value.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    return query.to(dtype), key.to(dtype), value.to(dtype)


class LinearAttention(nn.Module):
    """Multi-head attention with NormalizedLinearAttention in place of the softmax; O(N) in time ("Linear Attention
    Optimized GPU Kernel Implementation", equations 4 and 22).

    Rows of query and key get unit length, so that a score 1 + q.k is never negative and the normaliser stays positive.
    Differentiable through the analytical backward; works under autocast, torch.compile and in ONNX export.

    hidden_size: E. num_heads: H; num_kv_heads: Hkv, a divisor of H (default H). head_dim: D (default E / H).
    rotary_base: base of the rotary encoding of query and key; None: no positions. learn_coefficients: a and b become
    parameters. bias: of the four projections. eps: what the normaliser is held at, or more. Parameters are of `dtype` on
    `device`. Raises ValueError for sizes that do not divide.

    Example:
        import torch
        from leanfleet.export import LinearAttention

        layer = LinearAttention(hidden_size=64, num_heads=4, num_kv_heads=2)
        hidden = torch.randn(1, 10, 64)
        output = layer(hidden)                              # [1,10,64]

        # The same, token after token:
        state = layer.empty_state(batch=1)
        for token in hidden.split(1, dim=1):
            step, state = layer(token, state)               # [1,1,64]
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        rotary_base: float | None = 10000.0,
        normalize_qk: bool = True,
        learn_coefficients: bool = False,
        causal: bool = True,
        bias: bool = False,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_kv_heads or num_heads
        if num_heads % num_kv_heads:
            raise ValueError(f"LinearAttention: num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}")
        if head_dim is None and hidden_size % num_heads:
            raise ValueError(
                f"LinearAttention: hidden_size {hidden_size} is not a multiple of num_heads {num_heads}; give head_dim"
            )
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim or hidden_size // num_heads
        if rotary_base is not None and self.head_dim % 2:
            raise ValueError(f"LinearAttention: rotary encoding needs an even head_dim; it is {self.head_dim}")
        self.rotary_base, self.normalize_qk, self.causal, self.eps = rotary_base, normalize_qk, causal, eps
        options = {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, **options)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, **options)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, **options)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, **options)
        self.coefficients = nn.Parameter(torch.ones(2, device=device)) if learn_coefficients else None

    def empty_state(
        self, batch: int, device: torch.device | str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The state before the first token: (sum of k^T v [B,Hkv,D,D], of k [B,Hkv,D], of v [B,Hkv,D], tokens int32 [B])."""
        h, d = self.num_kv_heads, self.head_dim
        device = device or self.q_proj.weight.device
        return (
            torch.zeros(batch, h, d, d, device=device),
            torch.zeros(batch, h, d, device=device),
            torch.zeros(batch, h, d, device=device),
            torch.zeros(batch, dtype=torch.int32, device=device),
        )

    def forward(
        self,
        hidden: torch.Tensor,
        state: tuple[torch.Tensor, ...] | None = None,
        positions: torch.Tensor | None = None,
        valid: torch.Tensor | None = None,
    ) -> Any:
        """hidden: [B,N,E]. state: see empty_state; with it returns (output, new state), else the output, [B,N,E].

        positions: int [N] or [B,N]; default: 0 .. N-1 after the tokens that the state has seen. valid: bool [B,N], False
        for padding behind a row's tokens, which then leaves the state as it is. A state is for inference: it carries no
        gradient.
        """
        # Heads stay beside their tokens, as projections give and take them: no copy before or after the operator.
        query, key, value = (p(hidden).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.rotary_base is not None:
            if positions is None:
                positions = torch.arange(hidden.shape[1], device=hidden.device)
                positions = positions if state is None else state[3].unsqueeze(1) + positions
            tables = rotary_tables(positions, self.head_dim, self.rotary_base, "bnhd")
            query, key = rotate(query, *tables), rotate(key, *tables)
        query, key, value = one_type(query, key, value)
        if valid is not None:
            key, value = (t * valid[:, :, None, None].to(t.dtype) for t in (key, value))
        carried = (
            {}
            if state is None
            else dict(zip(("initial_state", "initial_key_sum", "initial_value_sum", "initial_count"), state), return_state=True)
        )
        output, _, *state = normalized_linear_attention(
            query,
            key,
            value,
            self.coefficients,
            causal=self.causal,
            eps=self.eps,
            normalize_qk=self.normalize_qk,
            layout="bnhd",
            **carried,
        )
        output = self.o_proj(output.flatten(2))
        if not carried:
            return output
        sums, count = state[:3], state[3]
        if valid is not None:
            count = carried["initial_count"] + valid.sum(1, dtype=torch.int32)
        return output, (*sums, count)


def _remember(module):
    """Notes in a model's configuration that it runs with linear attention: config.json keeps the note, and export reads it."""
    config = getattr(module, "config", None)
    if config is not None and not torch.compiler.is_compiling() and getattr(config, REMEMBERED, None) != TRANSFORMERS_NAME:
        setattr(config, REMEMBERED, TRANSFORMERS_NAME)


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query [B,H,Nq,D], key and value [B,Hkv,N,D], the newest Nq of N tokens.

    Raises ValueError for a mask (padding) and for what has no counterpart in linear attention.
    """
    layer = f"attention layer {getattr(module, 'layer_idx', '?')} ({type(module).__name__})"
    if attention_mask is not None:
        raise ValueError(f"{layer}: {TRANSFORMERS_NAME} takes no attention mask; pad on the right and leave the mask out")
    for name in ("sliding_window", "softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{layer}: it asks for {name}, which linear attention does not have")
    if kwargs.get("dropout"):
        raise ValueError(
            f"{layer}: it asks for dropout {kwargs['dropout']} of attention weights, which linear attention does "
            "not form; set attention_dropout to 0"
        )
    _remember(module)
    query, key, value = one_type(query, key, value)
    older = key.shape[2] - query.shape[2]
    if older:  # a cached step: rows of zeros stand for the tokens whose output is known
        query = torch.cat([query.new_zeros(*query.shape[:2], older, query.shape[3]), query], 2)
    causal = getattr(module, "is_causal", True)
    # Heads beside their tokens, as projections give them: nothing is copied.
    if not older and query.transpose(1, 2).is_contiguous():
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        return normalized_linear_attention(query, key, value, causal=causal, normalize_qk=True, layout="bnhd")[0], None
    output = normalized_linear_attention(query, key, value, causal=causal, normalize_qk=True)[0]
    return output[:, :, older:].transpose(1, 2).contiguous(), None


def register_transformers(name: str = TRANSFORMERS_NAME) -> str:
    """Makes NormalizedLinearAttention an attention of transformers: model.set_attn_implementation(name).

    Rows of query and key get unit length. Returns the name. Raises ImportError without transformers. transformers saves no
    implementation's name: a saved model must be loaded with attn_implementation=name again. A forward pass therefore notes
    it in the configuration, as leanfleet_attention, so that export does not take the model for one of softmax attention.

    Example:
        import torch
        from transformers import AutoModelForCausalLM
        from leanfleet.export.linear_attention import register_transformers

        model = AutoModelForCausalLM.from_pretrained("llama", attn_implementation=register_transformers())
        logits = model(torch.tensor([[1, 2, 3]])).logits
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    def no_mask(*args, attention_mask=None, **kwargs):
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError(
                f"{name}: a padded batch needs a mask, which linear attention does not take; pad on the right and "
                "leave the mask out"
            )
        return None

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, no_mask)
    return name
