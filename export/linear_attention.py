"""NormalizedLinearAttention as a module that replaces softmax attention, and as an attention of transformers."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from leanfleet import spec
from leanfleet.export.support import FEATURES, LAYERS, METHOD, REMEMBERED, SUMS, keeps_keys
from leanfleet.export.support import LINEAR as TRANSFORMERS_NAME
from leanfleet.export.reference import UNIT_ROW_EPS
from leanfleet.export.torch_ops import causal_linear_decay, normalized_linear_attention

NORMALIZER_EPS: Any = spec.all_specs()["NormalizedLinearAttention"].attr("eps").default  # a denominator is at least so much
_CARRIED = "initial_state", "initial_key_sum", "initial_value_sum", "initial_count"


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
        carried = {} if state is None else dict(zip(_CARRIED, state), return_state=True)
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


def _in_front(valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(order that puts each row's valid tokens before its padding, each kind in its order; the order back)."""
    order = torch.argsort(valid.logical_not().to(torch.uint8), dim=1, stable=True)
    return order, torch.argsort(order, dim=1)


def _reordered(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """x [B,H,N,D] with the tokens of each row in an order [B,N]."""
    return x.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def _valid_keys(mask: torch.Tensor | None, new: int, keys: int) -> torch.Tensor | None:
    """Which of the newest `keys` tokens are no padding, bool [B,keys], or None: all.

    mask: bool [B,N] as register_transformers makes it, or [B,1,new,N] of a softmax layer, causal or with a window.
    """
    if mask is None or mask.dim() == 2:
        return None if mask is None else mask[:, -keys:]
    if mask.dtype != torch.bool:
        mask = mask == 0  # what is added to scores: 0 where a token is seen
    if keys > new:
        return mask[:, 0, -1, -keys:]
    return mask[:, 0].diagonal(mask.shape[-1] - new, 1, 2)


def _empty_sums(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The sums before the first token, in float32, or float64 where the model computes in it."""
    batch, heads, _, size = key.shape
    columns = value.shape[-1]
    wide = {"dtype": torch.promote_types(key.dtype, torch.float32), "device": key.device}
    shapes = (batch, heads, size, columns), (batch, heads, size), (batch, heads, columns)
    return *(torch.zeros(s, **wide) for s in shapes), torch.zeros(batch, dtype=torch.int32, device=key.device)


class UnitFeatures:
    """Those of NormalizedLinearAttention with normalize_qk, whose kernel 1 + q.k is a product of rows (1, q) and (1, k)."""

    @staticmethod
    def query(rows: torch.Tensor) -> torch.Tensor:
        """(1, q / |q|) float32 [...,D+1] of rows [...,D]."""
        unit = torch.nn.functional.normalize(rows.float(), dim=-1, eps=UNIT_ROW_EPS)
        return torch.cat([torch.ones_like(unit[..., :1]), unit], -1)

    key = query


def featured(
    features: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    inside: torch.Tensor | bool,
    before: Sequence[torch.Tensor],
    rows: Mapping[str, torch.Tensor] = MappingProxyType({}),
    least: float = torch.finfo(torch.float32).tiny,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output [B,H,N,Dv] in the value's type, the state with the new tokens [B,Hkv,R,Dv+1]) by a module of low_rank.

    inside: 0 where a row [B,1,N,1] is padding, or False for none. before: the state, or nothing. rows: of requests that are
    packed, with B = 1, as Cache.rows has them. least: what the denominator is at least.
    """
    phi_q, phi_k = features.query(query), features.key(key)
    if inside is not False:
        phi_k = phi_k * inside
    summed = torch.cat([value.to(phi_k.dtype), torch.ones_like(value[..., :1], dtype=phi_k.dtype)], -1)
    output, state = causal_linear_decay(phi_q, phi_k, summed, None, *before, **rows, return_state=True)
    # Where no feature of a query meets one of a key, in exact arithmetic or by underflow, the output is 0.
    output = output[..., :-1] / output[..., -1:].clamp(min=least)
    return output.to(value.dtype), state


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    valid: torch.Tensor | None,
    causal: bool,
    sums: Any,
    features: Any,
) -> torch.Tensor:
    """The operator's output [B,H,N,D] over query [B,H,N,D] and key and value [B,Hkv,N,D], with padding and carried sums."""
    back = None
    if valid is not None:
        # The operator counts every row, so that padding goes behind the tokens, where it is seen by padding alone.
        order, back = _in_front(valid)
        query, key, value = (_reordered(t, order) for t in (query, key, value))
        inside = valid.gather(1, order)[:, None, :, None].to(key.dtype)
        key, value = key * inside, value * inside
    if features is not None:
        output, state = featured(features, query, key, value, valid is not None and inside, sums.sums if sums else ())
        if sums is not None:
            sums.replace((state,))
        return output if back is None else _reordered(output, back)
    before = () if sums is None else sums.sums or _empty_sums(key, value)
    carried = dict(zip(_CARRIED, before, strict=True), return_state=True) if before else {}
    output, _, *after = normalized_linear_attention(query, key, value, causal=causal, normalize_qk=True, **carried)
    if sums is not None:
        count = after[3] if valid is None else before[3] + valid.sum(1, dtype=torch.int32)
        sums.replace((*after[:3], count))
    return output if back is None else _reordered(output, back)


def _softmax_attention(module: nn.Module, layer: str, *tensors: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """A softmax layer of a mixed model, by transformers' SDPA attention."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{layer}: it is a softmax layer with {name}, which '{TRANSFORMERS_NAME}' does not mix with")
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, *tensors, **kwargs)


def _approximated_prompt(
    features: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, valid: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Output [B,N,H,Dv] of prompts that came whole, by a module of low_rank; valid: bool [B,N], or None: all. Rows of padding
    are 0."""
    query, key, value = one_type(query * scale**0.5, key * scale**0.5, value)
    if valid is None:
        return features(query, key, value).transpose(1, 2).contiguous()
    output = value.new_zeros(*query.shape[:3], value.shape[3])
    for row, tokens in enumerate(valid):  # each alone, so that its answer does not depend on the padding beside it
        output[row, :, tokens] = features(*(t[row : row + 1, :, tokens] for t in (query, key, value)))[0]
    return output.transpose(1, 2).contiguous()


def features_of(module: nn.Module, layer: str) -> nn.Module | None:
    """The features that low_rank.linearise gave an attention layer, or None. Raises ValueError where they were lost."""
    features = getattr(module, FEATURES, None)
    if features is None and (method := getattr(getattr(module, "config", None), METHOD, None)) is not None:
        raise ValueError(
            f"{layer}: the configuration says {METHOD} = '{method}', and the layer has no features: load the model without "
            f"{METHOD} and {LAYERS}, and call leanfleet.export.low_rank.linearise again"
        )
    return features


def refuse_options(layer: str, names: tuple[str, ...], kwargs: dict[str, Any]) -> None:
    """Raises ValueError for an option of softmax attention among kwargs that linear attention has no counterpart for."""
    for name in names:
        if kwargs.get(name) is not None:
            raise ValueError(f"{layer}: it asks for {name}, which linear attention does not have")
    if kwargs.get("dropout"):
        raise ValueError(
            f"{layer}: it asks for dropout {kwargs['dropout']} of attention weights, which linear attention does "
            "not form; set attention_dropout to 0"
        )


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query [B,H,Nq,D], key and value [B,Hkv,N,D], the newest Nq of N tokens.

    Keys of a running_sums_cache are the new ones alone, and bring the sums over the tokens before. A layer that the
    configuration's leanfleet_linear_layers leaves out attends by softmax, and so do tokens over the cache of a layer that
    approximates prompts alone. Raises ValueError for a mask of another form than register_transformers makes, and for what has
    no counterpart in linear attention.
    """
    index = getattr(module, "layer_idx", "?")
    layer = f"attention layer {index} ({type(module).__name__})"
    chosen = getattr(getattr(module, "config", None), LAYERS, None)
    if chosen is not None and index not in chosen:
        return _softmax_attention(module, layer, query, key, value, attention_mask, **kwargs)
    # A layer that is named is linear over all tokens, whatever window its softmax had.
    refuse_options(layer, ("softcap", "s_aux", "position_bias", *(("sliding_window",) if chosen is None else ())), kwargs)
    sums = getattr(key, SUMS, None)
    new, keys = query.shape[2], key.shape[2]
    if keys > new and kwargs.get("sliding_window") is not None:
        raise ValueError(
            f"{layer}: its cache keeps a window of the tokens, and linear attention sums over all: give the model "
            "past_key_values=running_sums_cache(model.config)"
        )
    if attention_mask is not None and attention_mask.dim() not in (2, 4):
        raise ValueError(f"{layer}: an attention mask of shape {list(attention_mask.shape)}; expected [B,N] or [B,1,Nq,N]")
    _remember(module)
    features = features_of(module, layer)
    if features is not None and keeps_keys(module.config):
        refuse_options(layer, ("sliding_window",), kwargs)
        if keys > new:
            return _softmax_attention(module, layer, query, key, value, attention_mask, **kwargs)
        valid = _valid_keys(attention_mask, new, keys)
        return _approximated_prompt(features, query, key, value, valid, kwargs["scaling"]), None
    if features is not None:
        query, key = (t * kwargs["scaling"] ** 0.5 for t in (query, key))
    query, key, value = one_type(query, key, value)
    causal = getattr(module, "is_causal", True)
    valid = _valid_keys(attention_mask, new, keys)
    if features is None and sums is None and valid is None and keys == new and query.transpose(1, 2).is_contiguous():
        # Heads beside their tokens, as projections give them: nothing is copied.
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        return normalized_linear_attention(query, key, value, causal=causal, normalize_qk=True, layout="bnhd")[0], None
    if keys > new:  # a cache of keys: rows of zeros stand for the tokens whose output is known
        query = torch.cat([query.new_zeros(*query.shape[:2], keys - new, query.shape[3]), query], 2)
    output = _attend(query, key, value, valid, causal, sums, features)
    return output[:, :, keys - new :].transpose(1, 2).contiguous(), None


def _mask(name: str) -> Any:
    """The mask function of an attention of this name: bool [B,N], or None where there is no padding; for models that also have
    softmax layers, what SDPA takes."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

    plain = causal_mask_function, bidirectional_mask_function

    def mask(
        *args: Any, mask_function: Any = None, attention_mask: torch.Tensor | None = None, local_size: Any = None, **kwargs: Any
    ) -> torch.Tensor | None:
        if mask_function is causal_mask_function and kwargs["kv_length"] > kwargs["q_offset"] + kwargs["q_length"]:
            raise ValueError(f"{name}: a static cache has room for tokens to come, which linear attention would sum as tokens")
        config = kwargs.get("config")
        if local_size is None and mask_function is not None and mask_function not in plain:
            raise ValueError(f"{name}: packed sequences or a mask of the model's own, which linear attention cannot apply")
        if config is not None and getattr(config, LAYERS, None) is not None:
            given = dict(mask_function=mask_function, attention_mask=attention_mask, local_size=local_size)
            return sdpa_mask(*args, **{n: v for n, v in given.items() if v is not None}, **kwargs)
        return None if attention_mask is None or bool(attention_mask.all()) else attention_mask.bool()

    return mask


def register_transformers(name: str = TRANSFORMERS_NAME) -> str:
    """Makes NormalizedLinearAttention an attention of transformers: model.set_attn_implementation(name).

    Rows of query and key get unit length ("Linear Attention Optimized GPU Kernel Implementation", equations 4 and 22).
    Returns the name. Batches may be padded on either side, with the model's attention_mask. running_sums_cache(model.config)
    (leanfleet.export.running_sums), given as past_key_values, makes each decode step cost the same; over transformers' own
    caches a step reads all keys again, with the same result. export_decoder and `leanfleet export` keep this attention.

    config.leanfleet_linear_layers = [0, 2] makes these layers linear, over all tokens, and leaves softmax to the others, with
    the windows that they have; config.json keeps the entry. Without it all layers are linear.

    transformers saves no implementation's name: a saved model must be loaded with attn_implementation=name again. A forward
    pass therefore notes it in the configuration, as leanfleet_attention, which `leanfleet export` follows.

    Raises ImportError without transformers. The attention raises ValueError, naming the layer, for what linear attention does
    not have: windows (of layers that are not named), softcaps, sinks, dropout; and for packed sequences.

    Example:
        import torch
        from transformers import AutoModelForCausalLM
        from leanfleet.export.linear_attention import register_transformers

        model = AutoModelForCausalLM.from_pretrained("llama", attn_implementation=register_transformers())
        logits = model(torch.tensor([[1, 2, 3]])).logits
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, _mask(name))
    return name
