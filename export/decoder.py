"""Exports a decoder as one ONNX graph that serves prompts and decode steps.

Softmax attention becomes a LeanAttention node that appends to a cache of fixed capacity and attends over it; decayed
linear attention becomes a CausalLinearDecay node that carries its state, and recurrent layers of hybrid models a CausalConv
node and a GatedDeltaRule or CausalLinearDecay node, both with states; attention of register_transformers() becomes a
NormalizedLinearAttention node that carries its sums. leanfleet.decoder_contract has the graph's inputs and outputs.
"""

from __future__ import annotations

import inspect
import io
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import torch

from leanfleet import files, progress
from leanfleet.decoder_contract import (
    BATCH,
    CAPACITY,
    CONTEXT,
    CONTEXT_BLOCK,
    DECODER,
    KEY,
    KEY_SUM,
    LOSSY,
    MODEL_FILE,
    OPTIONAL_FILES,
    POOL,
    STATE,
    TABLE,
    TOKENS,
    VALUE,
    VALUE_SUM,
    Facts,
    Interface,
    cache_forms,
    cache_name,
    context_table,
    is_part,
    rank_file,
    write_facts,
)
from leanfleet.export import blocks, shortcuts, verification
from leanfleet.export import context_parallel as sharing
from leanfleet.export.cache import Cache, pool_shape, decayed_attention
from leanfleet.export.experts import add_function, as_one_node
from leanfleet.export.function_bodies import ExportWarning
from leanfleet.export.fusions import fuse_for_onnxruntime
from leanfleet.export.hybrid_layers import carried, hybrid_layers, over_caches
from leanfleet.export.onnx_export import export
from leanfleet.export.linear_attention import NORMALIZER_EPS, UnitFeatures, featured, features_of, refuse_options
from leanfleet.export.quantised_caches import CacheType, CalibratedCache, cache_facts, form_of
from leanfleet.export.reference import FORM_TYPES
from leanfleet.export.support import (
    ELSEWHERE,
    EXPANDED_LATENT,
    FEATURES,
    LIGHTNING,
    check_supported,
    fixed_rotary,
    implementation,
    linear_layers_of,
    most_positions,
)
from leanfleet.export.tensor_parallel import check_shardable, check_world, share_of_rank
from leanfleet.export.torch_ops import normalized_linear_attention
from leanfleet.spec import numbers_each

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Shapes = dict[str, tuple[torch.dtype, tuple[int | str, ...]]]  # of caches, by name

INSIDE = 1 << 24  # bytes of weights that a model's file itself may hold
IMPLEMENTATION = "leanfleet"  # the name under which transformers knows our attention
_HANDLED = {
    "dropout",
    "is_causal",
    "position_ids",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "position_embeddings",
    "past_key_values",
    "logits_to_keep",
}


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query [B,H,N,D], key and value [B,Hkv,N,D] of the new tokens.

    Raises ValueError where the model asks for something that LeanAttention does not do, naming the layer.
    """
    index, cache = getattr(module, "layer_idx", None), Cache.now
    layer = f"attention layer {'?' if index is None else index} ({type(module).__name__})"
    if cache is None:
        raise ValueError(f"{layer}: the '{IMPLEMENTATION}' attention runs inside leanfleet.export.export_decoder only")
    if getattr(module, "is_causal", True) is False:
        raise ValueError(
            f"{layer}: it is not causal (an encoder's or cross attention); LeanAttention with a cache serves "
            f"causal decoders. {ELSEWHERE}"
        )
    unknown = sorted(name for name in kwargs.keys() - _HANDLED if kwargs[name] is not None and kwargs[name] is not False)
    if attention_mask is not None:
        unknown.insert(0, "an attention mask of its own (as for ALiBi or relative biases)")
    if unknown:
        raise ValueError(f"{layer}: it passes {', '.join(unknown)}, which LeanAttention has no counterpart for. {ELSEWHERE}")
    if cache_name(index, STATE) in cache.tensors and (features := features_of(module, layer)) is not None:
        refuse_options(layer, ("softcap", "s_aux"), {"softcap": softcap, "s_aux": s_aux})
        query, key = (t * (1.0 if scaling is None else scaling) ** 0.5 for t in (query, key))
        return featured_attention(cache, index, features, query, key, value), None
    if cache_name(index, KEY_SUM) in cache.tensors:
        refuse_options(layer, ("softcap", "s_aux"), {"softcap": softcap, "s_aux": s_aux})
        return normalized_attention(cache, index, query, key, value), None
    state = cache.tensors.get(cache_name(index, STATE))
    if cache_name(index, KEY) not in cache.tensors and state is not None and state.shape[-1] == value.shape[-1] + 1:
        refuse_options(layer, ("softcap", "s_aux"), {"softcap": softcap, "s_aux": s_aux})
        return featured_attention(cache, index, UnitFeatures, query, key, value, NORMALIZER_EPS), None
    _check_call(cache, layer, index, key, value)
    output = cache.attend(
        index,
        query,
        key,
        value,
        sinks=None if s_aux is None else s_aux.float(),
        scale=0.0 if scaling is None else scaling,
        window=-1 if sliding_window is None else sliding_window,
        softcap=0.0 if softcap is None else softcap,
    )
    return output, None


def _check_call(cache: Cache, layer: str, index: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Raises ValueError, naming the layer, for keys and values that the layer's caches have no place for."""
    if cache_name(index, KEY) not in cache.tensors:
        raise ValueError(
            f"{layer}: leanfleet.export_decoder has no caches for it: the model's configuration counts no softmax "
            f"layer of that number. {ELSEWHERE}"
        )
    if cache_name(index, KEY) in cache.updated:
        raise ValueError(f"{layer}: it attends twice in a call, and each call would need caches of its own. {ELSEWHERE}")
    found, planned = (key.shape[1], key.shape[3], value.shape[3]), tuple(cache.sizes(index))
    if key.shape[2] != value.shape[2] or any(isinstance(n, int) and n != m for n, m in zip(found, planned, strict=True)):
        raise ValueError(
            f"{layer}: it has {found[0]} heads of keys of {found[1]} and values of {found[2]} columns, where the "
            f"model's configuration says {planned[0]}, {planned[1]} and {planned[2]}. {ELSEWHERE}"
        )


def normalized_attention(cache: Cache, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Layer `layer` of register_transformers()'s attention over its carried sums: query [B,H,N,D], key, value [B,Hkv,N,D];
    returns [B,N,H,D].

    The number of tokens before follows from the lengths, so that it is no state. Rows past query_lens leave the sums as they
    are: their keys and values are zero, and they stand behind the tokens.
    """
    names = [cache_name(layer, part) for part in (STATE, KEY_SUM, VALUE_SUM)]
    valid = torch.arange(query.shape[2], device=query.device) < cache.query_lens.unsqueeze(1)
    valid = valid.unsqueeze(1).unsqueeze(-1).to(key.dtype)
    output, _, *sums = normalized_linear_attention(
        query,
        key * valid,
        value * valid,
        None,
        *(cache.tensors[name] for name in names),
        cache.seq_lens - cache.query_lens,
        normalize_qk=True,
        return_state=True,
    )
    for name, tensor in zip(names, sums, strict=False):  # without the count
        cache.update(name, tensor)
    return output.transpose(1, 2).contiguous()


def featured_attention(
    cache: Cache,
    layer: int,
    features: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    least: float = torch.finfo(torch.float32).tiny,
) -> torch.Tensor:
    """Layer `layer` by features of low_rank.linearise, or UnitFeatures, over its carried state: shapes as in
    normalized_attention. least: what a denominator is at least."""
    name, rows = cache_name(layer, STATE), cache.rows()
    inside: torch.Tensor | bool = False  # packed rows are all tokens
    if not rows:
        valid = torch.arange(query.shape[2], device=query.device) < cache.query_lens.unsqueeze(1)
        inside = valid.unsqueeze(1).unsqueeze(-1).to(torch.float32)
    output, state = featured(features, query, key, value, inside, (cache.tensors[name],), rows, least)
    cache.update(name, state)
    return output.transpose(1, 2).contiguous()


def _lightning_forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """MiniMaxLightningAttention.forward over CausalLinearDecay: S = exp(-slope) S + k^T v, o = q S."""
    batch, tokens, _ = hidden_states.shape
    heads = self.act_fn(self.qkv_proj(hidden_states)).view(batch, tokens, self.num_attention_heads, 3 * self.head_dim)
    query, key, value = heads.split(self.head_dim, dim=3)
    output = decayed_attention(Cache.now, self.layer_idx, query, key, value, -self.slope_rate.float().flatten())
    output = self.norm(output.reshape(batch, tokens, -1))
    return self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * output), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """transformers' mask function: lengths say everything, so there is no mask."""
    return None


@contextmanager
def traceable(model: Any, fuse: bool, rope: str = "short") -> Iterator[None]:
    """A transformers model whose layers run our operators and whose experts can be traced; fuse: for ONNX Runtime alone.

    rope: see support.most_positions.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
    # A loop over the experts that were hit cannot be traced.
    experts = model.get_experts_implementation() if model._can_set_experts_implementation() else None
    lightning = [m for m in model.modules() if type(m).__name__ == LIGHTNING]
    try:
        if experts is not None:
            model.set_experts_implementation("batched_mm")
        for module in lightning:
            module.forward = types.MethodType(_lightning_forward, module)
        with (
            implementation(model, IMPLEMENTATION),
            fixed_rotary(model, rope),
            as_one_node(model) if experts is not None and fuse else nullcontext(),
            over_caches(model, lambda: Cache.now),
        ):
            yield
    finally:
        for module in lightning:
            vars(module).pop("forward", None)
        if experts is not None:
            model.set_experts_implementation(experts)


def cache_shapes(model: Any, cache: CacheType | None = None, narrow_states: bool = False) -> Shapes:
    """{name: (dtype, shape)} of the caches, layer by layer; shape has "batch" and "capacity" where they stand.

    cache: None: keys and values are of the model's type; one of decoder_contract.CACHES: of that type, and each token and head
    has a scale; a CalibratedCache: of its type, without scales. narrow_states: states are of the model's type, of 16 bits.
    Raises ValueError for another cache, and, naming the layer, for a kind of layer that our operators do not serve and for one
    whose state cannot be narrow.
    """
    if narrow_states:
        return _narrow_states(model, cache_shapes(model, cache))
    if cache is not None:
        return _quantised_shapes(model, cache)
    if hasattr(model, "cache_shapes"):
        return model.cache_shapes()
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    configs = getattr(config, "per_layer_config", None) or [config] * len(kinds)
    lightning = {m.layer_idx: m for m in model.modules() if type(m).__name__ == LIGHTNING}
    latent = {m.layer_idx: m for m in model.modules() if type(m).__name__ == EXPANDED_LATENT}
    normalized, hybrids = linear_layers_of(model), hybrid_layers(model)
    ranks = {m.layer_idx: getattr(m, FEATURES).features for m in model.modules() if hasattr(m, FEATURES)}
    shapes: Shapes = {}
    for layer, kind in enumerate(kinds):
        own = configs[layer]
        if layer in hybrids:
            shapes |= {cache_name(layer, part): (torch.float32, shape) for part, shape in carried(hybrids[layer]).items()}
            if kind != "hybrid":  # which attends beside its recurrence
                continue
        if hybrids and kind in ("mlp", "moe"):  # layers of their own that carry nothing
            continue
        heads = own.num_attention_heads
        head_size = getattr(own, "head_dim", None) or own.hidden_size // heads
        if layer in lightning:
            own_heads = lightning[layer].num_attention_heads
            shapes[cache_name(layer, STATE)] = (torch.float32, (BATCH, own_heads, head_size, head_size))
        elif layer in normalized:
            sizes = BATCH, getattr(own, "num_key_value_heads", None) or heads, head_size
            if (rank := ranks.get(layer)) is not None:
                shapes[cache_name(layer, STATE)] = (torch.float32, (*sizes[:2], rank, head_size + 1))
                continue
            shapes[cache_name(layer, STATE)] = (torch.float32, (*sizes, head_size))
            shapes[cache_name(layer, KEY_SUM)] = shapes[cache_name(layer, VALUE_SUM)] = (torch.float32, sizes)
        elif layer in latent:
            for part, size in ((KEY, latent[layer].qk_head_dim), (VALUE, latent[layer].v_head_dim)):
                shapes[cache_name(layer, part)] = (model.dtype, (BATCH, heads, CAPACITY, size))
        elif kind in ("full_attention", "sliding_attention") or layer in hybrids:
            kv_heads = getattr(own, "num_key_value_heads", None) or heads
            for part in (KEY, VALUE):
                shapes[cache_name(layer, part)] = (model.dtype, (BATCH, kv_heads, CAPACITY, head_size))
        else:
            raise ValueError(
                f"{type(model).__name__}: layer {layer} is of kind {kind}; export_decoder serves full_attention, "
                f"sliding_attention, MiniMax's linear_attention and the recurrent layers of some hybrids. {ELSEWHERE}"
            )
    return shapes


def _narrow_states(model: Any, shapes: Shapes) -> Shapes:
    """These shapes with states of the model's type."""
    name, dtype = type(model).__name__, next(model.parameters()).dtype
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"{name}: narrow_states keeps states in the model's type, which is {dtype}, not one of 16 bits")
    states = [key for key in shapes if is_part(key, STATE)]
    if not states:
        raise ValueError(f"{name}: narrow_states is given, and no layer carries a state: leave it out")
    always_wide = {
        layer: "the gated delta rule" for layer, m in hybrid_layers(model).items() if not hasattr(m, "ssm_state_size")
    }
    if not hasattr(model, "cache_shapes"):
        always_wide |= dict.fromkeys(linear_layers_of(model), "normalised attention")
    for key in states:
        layer = int(key.partition(".")[0])
        if layer in always_wide:
            raise ValueError(
                f"{name}: narrow_states is given, and the state of layer {layer}, of {always_wide[layer]}, is always float32: "
                "only those of Mamba-2 and of linear attention with decay may have 16 bits"
            )
    return shapes | {key: (dtype, shapes[key][1]) for key in states}


def _quantised_shapes(model: Any, of: CacheType) -> Shapes:
    cache = form_of(of)
    forms = dict(zip((KEY, VALUE), cache_forms(cache), strict=True))
    _warn_of_loss(cache)
    shapes: Shapes = {}
    for name, (dtype, shape) in cache_shapes(model).items():
        form = next((form for part, form in forms.items() if is_part(name, part)), None)
        if form is None:
            shapes[name] = dtype, shape
            continue
        if int(shape[-1]) % numbers_each(form):
            raise ValueError(
                f"{type(model).__name__}: cache is {cache!r}, which holds pairs of columns; {name} has {shape[-1]}"
            )
        shapes[name] = FORM_TYPES[form], (*shape[:-1], int(shape[-1]) // numbers_each(form))
        if not isinstance(of, CalibratedCache):
            shapes[f"{name}_scale"] = torch.float32, shape[:-1]
    if not any(is_part(name, KEY) for name in shapes):
        raise ValueError(f"{type(model).__name__}: cache is {cache!r}, and no layer has keys and values: leave it out")
    return shapes


def run(
    model: Any, cache: Cache, keep_last: Callable[[torch.Tensor], torch.Tensor] | None, **inputs: torch.Tensor
) -> torch.Tensor:
    """Logits of a model over these caches. keep_last: of the hidden states, those that logits are wanted of; or None.

    Raises ValueError, naming the layer, where a cache was not appended to.
    """

    def keep(head: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        assert keep_last is not None
        return (keep_last(arguments[0]),)

    hook = None if keep_last is None else model.get_output_embeddings().register_forward_pre_hook(keep)
    extra = {"leanfleet_cache": cache} if hasattr(model, "cache_shapes") else {}
    if "position_ids" not in inspect.signature(model.forward).parameters:  # of recurrent layers alone
        inputs.pop("position_ids")
    try:
        with cache.in_use():
            logits = model(**inputs, use_cache=False, **extra).logits
    finally:
        if hook is not None:
            hook.remove()
    if left := [name for name in cache.tensors if name not in cache.updated]:
        layer = left[0].partition(".")[0]
        raise ValueError(
            f"{type(model).__name__}: attention layer {layer} does not go through transformers' AttentionInterface. {ELSEWHERE}"
        )
    return logits.float()


class Decoder(torch.nn.Module):
    """A causal LM with the inputs and outputs of this module's graph."""

    def __init__(
        self, model: torch.nn.Module, names: Iterable[str], all_logits: bool = False, cache: CacheType | None = None
    ) -> None:
        super().__init__()
        self.model, self.names, self.all_logits, self.cache = model, list(names), all_logits, cache

    def forward(
        self, input_ids: torch.Tensor, seq_lens: torch.Tensor, query_lens: torch.Tensor, caches: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """caches: tensors in the order of names; returns (logits, *caches)."""
        cache = Cache(zip(self.names, caches, strict=True), seq_lens, query_lens, self.cache)
        return self.over(cache, input_ids)

    def over(self, cache: Cache, input_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """forward over the tensors of a Cache."""
        seq_lens, query_lens = cache.seq_lens, cache.query_lens
        steps = torch.arange(input_ids.shape[1], device=input_ids.device)
        positions = (seq_lens - query_lens).unsqueeze(1).to(torch.int64) + steps
        last = (query_lens.to(torch.int64) - 1).clamp(min=0)

        def keep_last(hidden: torch.Tensor) -> torch.Tensor:
            return hidden.gather(1, last.view(-1, 1, 1).expand(-1, 1, hidden.shape[-1]))

        logits = run(self.model, cache, None if self.all_logits else keep_last, input_ids=input_ids, position_ids=positions)
        return (logits if self.all_logits else logits.squeeze(1), *(cache.tensors[n] for n in self.names))


class SharingDecoder(Decoder):
    """A causal LM with the inputs and outputs of a CONTEXT graph, for so many ranks."""

    def __init__(self, *arguments: Any, world: int) -> None:
        super().__init__(*arguments)
        self.world = world

    def forward(  # type: ignore[override]  # it has more inputs
        self,
        input_ids: torch.Tensor,
        seq_lens: torch.Tensor,
        query_lens: torch.Tensor,
        block_table: torch.Tensor,
        rank: torch.Tensor,
        caches: list[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """caches: pools in the order of names; returns (logits, *pools)."""
        named = zip(self.names, caches, strict=True)
        orders = sharing.Orders(seq_lens, query_lens, block_table, rank, self.world, CONTEXT_BLOCK)
        return self.over(sharing.Shares(named, orders, self.cache), input_ids)


EXAMPLE = {BATCH: 2, TOKENS: 3, CAPACITY: 16}


def example_inputs(caches: Shapes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Decoder.forward's arguments for tracing."""
    lens = torch.full((EXAMPLE[BATCH],), EXAMPLE[TOKENS], dtype=torch.int32)
    tensors = [
        torch.zeros([n if isinstance(n, int) else EXAMPLE[n] for n in shape], dtype=dtype) for dtype, shape in caches.values()
    ]
    return torch.ones(EXAMPLE[BATCH], EXAMPLE[TOKENS], dtype=torch.int64), lens, lens.clone(), tensors


def export_decoder(
    model: torch.nn.Module,
    folder: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    all_logits: bool = False,
    fuse: bool = True,
    verify: bool = True,
    rope: str = "short",
    cache: CacheType | None = None,
    tensor_parallel: int | None = None,
    context_parallel: int | None = None,
    narrow_states: bool = False,
    whole_experts: bool = False,
    **options: Any,
) -> torch.onnx.ONNXProgram:
    """Writes model.onnx, leanfleet.json and, with a tokenizer, its files to `folder`; returns the ONNXProgram.

    model: a leanfleet.export.LinearDecoder, or a transformers causal LM with softmax attention that goes through
    AttentionInterface (tests/export/zoo.toml lists the families), beside recurrent layers in hybrid models, or with
    register_transformers()'s linear attention in its place, in all layers or in some. all_logits: logits of every new token,
    [B,N,vocabulary], in
    place of the last one's (for scoring). fuse: write norms, rotary encodings and experts so that ONNX Runtime runs each as
    one kernel (leanfleet.export.fusions and experts); False leaves standard operators and ours alone, for runtimes that do not
    take functions of a model for what they do not know. verify: run the file and compare it with the model before it gets its
    place (leanfleet.export.verification), where memory allows. rope: for models with longrope, "short": right up to
    original_max_position_embeddings, which leanfleet.json then gives as max_positions; "long": long factors at every position,
    which is what transformers computes for requests longer than that. cache: None: keys and values are cached in the model's
    own type; "int8", "fp8" (float8e4m3fn) or "int4": in that, with a scale for each token and head, for ONNX Runtime;
    "int8/fp8": keys and values each in its own; what leanfleet.export.calibrate returns: with scales that are constants of the
    graph. tensor_parallel: None, or a number of ranks, processes with a GPU each: the
    folder then has, in place of model.onnx, a graph for each rank with its share of heads, of feed-forward layers and experts
    (leanfleet.export.tensor_parallel); the ONNXProgram is rank 0's. whole_experts: with tensor_parallel, a rank has some of a
    mixture's experts, whole, in place of some columns of each. context_parallel: None, or a number of ranks, each of which
    computes the whole model over its share of the tokens in the caches (leanfleet.export.context_parallel); model.onnx is for
    all of them. narrow_states: states of Mamba-2 and of linear attention with decay are of the model's type, 16 bits, in place
    of float32: half their memory and a step's traffic, and rounded once a step. leanfleet.json holds what
    leanfleet.ort_ops.generate needs to know, under "fusions" how often each fusion applied, and under "verified" the largest
    difference found. options go to leanfleet.export.export.

    Raises ValueError, naming the layer, for attention that our operators do not do and for layers that cannot be shared out,
    and for tensor_parallel together with context_parallel, VerificationError for a file that is not right, OSError for a folder
    that cannot be written. In each of these cases `folder` is as it was.

    Example:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from leanfleet.export import export_decoder

        model = AutoModelForCausalLM.from_pretrained("llama")   # a folder, or a name on the Hugging Face hub
        export_decoder(model, "exported", AutoTokenizer.from_pretrained("llama"))
    """
    model = model.eval()
    ours = hasattr(model, "cache_shapes")
    if not ours:
        check_supported(model)
    facts: Facts = {"kind": DECODER.kind}
    facts |= cache_facts(cache)
    facts |= {"narrow_states": True} if narrow_states else {}
    if tensor_parallel is not None and context_parallel is not None:
        raise ValueError(
            f"{type(model).__name__}: tensor_parallel shares out heads, context_parallel the tokens in the caches: give one of "
            "the two"
        )
    if whole_experts and tensor_parallel is None:
        raise ValueError(f"{type(model).__name__}: whole_experts says how tensor_parallel shares a mixture out: give both")
    if tensor_parallel is not None:
        facts |= {"whole_experts": True} if whole_experts else {}
        return _write_ranks(
            model,
            folder,
            facts,
            tokenizer,
            world=check_world(tensor_parallel),
            all_logits=all_logits,
            fuse=fuse,
            verify=verify,
            rope=rope,
            cache=cache,
            narrow_states=narrow_states,
            options=options,
        )
    if context_parallel is not None:
        world = sharing.check_world(context_parallel)
        facts["context_parallel"] = {"world": world, "block": CONTEXT_BLOCK}
        module, arguments, shapes, names = _traced_shares(model, all_logits, cache, narrow_states, world)
    else:
        module, arguments, shapes, names = _traced(model, all_logits, cache, narrow_states)
    return write(module, arguments, shapes, folder, facts, tokenizer, fuse, verify, rope, names | options)


def _traced_shares(
    model: Any, all_logits: bool, cache: CacheType | None, narrow_states: bool, world: int
) -> tuple[Decoder, tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """As _traced, of its CONTEXT graph."""
    caches = cache_shapes(model, cache, narrow_states)
    sharing.check_shareable(model, list(caches))
    pages = 4  # of an example's request, other than its tokens: no two dimensions of an example are the same by chance
    table = torch.from_numpy(context_table(EXAMPLE[BATCH], pages, EXAMPLE[TOKENS], CONTEXT_BLOCK))
    ids, ends, counts, _ = example_inputs({})
    pools = [
        torch.zeros(EXAMPLE[BATCH] * pages, *pool_shape(name, shape, CONTEXT_BLOCK)[1:], dtype=dtype)
        for name, (dtype, shape) in caches.items()
    ]
    dims = {name: torch.export.Dim(name, min=1) for name in (BATCH, TOKENS, TABLE, POOL)}
    shapes = _open_dimensions(CONTEXT, dims)
    shapes["caches"] = [{0: dims[POOL]} for _ in pools]
    names = {"input_names": CONTEXT.input_names(caches), "output_names": CONTEXT.output_names(caches)}
    module = SharingDecoder(model, caches, all_logits, cache, world=world).eval()
    return module, (ids, ends, counts, table, torch.zeros(1, dtype=torch.int32), pools), shapes, names


def _open_dimensions(interface: Interface, dims: Mapping[str, Any]) -> dict[str, Any]:
    """{input: {axis: dimension}} of an interface's inputs beside caches, as torch.export takes it."""
    return {t.name: {axis: dims[n] for axis, n in enumerate(t.shape) if n in dims} for t in interface.inputs}


def _traced(
    model: Any, all_logits: bool, cache: CacheType | None, narrow_states: bool
) -> tuple[Decoder, tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """(module, example inputs, dynamic shapes, names of inputs and outputs) of a model's DECODER graph."""
    caches = cache_shapes(model, cache, narrow_states)
    dims = {name: torch.export.Dim(name, min=1) for name in EXAMPLE}
    shapes = _open_dimensions(DECODER, dims)
    shapes["caches"] = [{axis: dims[n] for axis, n in enumerate(shape) if n in dims} for _, shape in caches.values()]
    names = {"input_names": DECODER.input_names(caches), "output_names": DECODER.output_names(caches)}
    return Decoder(model, caches, all_logits, cache).eval(), example_inputs(caches), shapes, names


def _write_ranks(
    model: Any,
    folder: str | Path,
    facts: Facts,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    world: int,
    all_logits: bool,
    fuse: bool,
    verify: bool,
    rope: str,
    cache: CacheType | None,
    narrow_states: bool,
    options: Mapping[str, Any],
) -> torch.onnx.ONNXProgram:
    """As write, of a tensor parallel folder: one rank's share after the other, so that each is traced like a model."""
    whole_experts = facts.get("whole_experts", False)
    check_shardable(model, world, list(cache_shapes(model, cache, narrow_states)), whole_experts)
    first: torch.onnx.ONNXProgram | None = None
    with files.new_folder(folder, OPTIONAL_FILES) as new:
        paths = [new / rank_file(rank) for rank in range(world)]
        for rank, path in enumerate(paths):
            with share_of_rank(model, cache, rank, world, whole_experts) as own:
                module, arguments, shapes, names = _traced(model, all_logits, own, narrow_states)
                program, found = made(module, arguments, shapes, fuse, verify, rope, names | dict(options))
            facts |= found
            save(program.model, path)
            first = first or program
        facts["tensor_parallel"] = {"world": world, "files": [path.name for path in paths]}
        if verify:
            progress.tell("running the files and the model, to compare them")
            facts["verified"] = verification.verify_ranks(model, paths, facts, rope, cache)
        write_facts(new, facts)
        if tokenizer is not None:
            tokenizer.save_pretrained(new)
    assert first is not None
    return first


def _warn_of_loss(cache: str) -> None:
    """Warns of types of keys that cost models much."""
    if cache.partition("/")[0] == LOSSY:
        warnings.warn(
            f"cache is {cache!r}: keys of {LOSSY} change what a model says by much more than int8 and fp8 do "
            "(docs/how_to/quantised_caches.md has perplexities): measure yours",
            ExportWarning,
            stacklevel=4,
        )


def write(
    decoder: Any,
    arguments: tuple[Any, ...],
    shapes: Mapping[str, Any],
    folder: str | Path,
    facts: Facts,
    tokenizer: PreTrainedTokenizerBase | None,
    fuse: bool,
    verify: bool,
    rope: str,
    options: Mapping[str, Any],
) -> torch.onnx.ONNXProgram:
    """Exports a decoder module whose `model` is the PyTorch model, checks the file, and puts all files into `folder`.

    facts: what leanfleet.json says beside what it says of every model. Returns the ONNXProgram.
    """
    model = decoder.model
    with files.new_folder(folder, OPTIONAL_FILES) as new:
        program, found = made(decoder, arguments, shapes, fuse, verify, rope, options)
        facts = facts | found
        save(program.model, new / MODEL_FILE)
        if verify:
            progress.tell("running the file and the model, to compare them")
            facts["verified"] = _compared(model, new / MODEL_FILE, facts, rope, decoder.cache)
        write_facts(new, facts)
        if tokenizer is not None:
            tokenizer.save_pretrained(new)
    return program


def _compared(model: Any, path: Path, facts: Facts, rope: str, cache: CacheType | None) -> dict[str, Any]:
    """What leanfleet.json says of a file that was compared with its model."""
    if (shares := facts.get("context_parallel")) is not None:
        return verification.verify_ranks(model, [path] * shares["world"], facts, rope, cache)
    return verification.verify(model, path, facts, rope, cache)


def made(
    decoder: Any,
    arguments: tuple[Any, ...],
    shapes: Mapping[str, Any],
    fuse: bool,
    verify: bool,
    rope: str,
    options: Mapping[str, Any],
) -> tuple[torch.onnx.ONNXProgram, Facts]:
    """(the ONNXProgram of a decoder module, fused, what leanfleet.json says of it)."""
    model = decoder.model
    ours = hasattr(model, "cache_shapes")
    config = model.config if ours else model.config.get_text_config(decoder=True)
    positions = getattr(config, "max_position_embeddings", None) if ours else most_positions(model, rope)
    matrices = {m.block_name: m.blocks for m in blocks.holders(model)}
    if matrices and not fuse:
        raise ValueError(f"{type(model).__name__}: weights that stay quantised need ONNX Runtime's own operators, so fuse=True")
    with nullcontext() if ours else traceable(model, fuse, rope), blocks.traced(), torch.no_grad():
        if verify:  # which runs the model anyhow: what keeps it from running is told before minutes of tracing
            call(decoder, arguments)
        program = _trace(decoder, arguments, shapes, options)
    facts: Facts = {"vocabulary": config.vocab_size, "stop_tokens": _stop_tokens(model), "max_positions": positions}
    if fuse:
        progress.tell("fusing")
        blocks.expand(program.model, matrices)
        add_function(program.model)
        facts["fusions"] = fuse_for_onnxruntime(program.model, positions)
    return program, facts


def _in_rows(tensor: Any) -> Any:
    """A tensor that is written with its rows one after the other: NumPy writes a transposed array element by element, a fifth
    as fast as PyTorch brings it in order and that is written."""
    array = tensor.raw if isinstance(tensor, ir.Tensor) else None
    lazy = isinstance(tensor, ir.LazyTensor)
    if not lazy and (not isinstance(array, np.ndarray) or array.flags.c_contiguous or min(array.strides) < 0):
        return tensor

    def ordered() -> ir.Tensor:
        array = tensor.numpy()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nothing is written to it
            bits = torch.from_numpy(array.view(f"i{array.itemsize}"))  # bfloat16 is none of PyTorch's NumPy types
        rows = bits.contiguous().numpy()
        return ir.Tensor(rows.view(array.dtype), dtype=tensor.dtype, shape=tensor.shape, name=tensor.name)

    return ir.LazyTensor(ordered, tensor.dtype, tensor.shape, name=tensor.name)


def save(model: ir.Model, path: Path) -> None:
    """Writes a model, its weights to a file beside it unless they are few: one after the other is copied, to be written."""
    size = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
    for value in model.graph.initializers.values():
        value.const_value = _in_rows(value.const_value)

    def tell(tensor: Any, info: Any) -> None:
        progress.tell("writing weights", info.index + 1, info.total)

    ir.save(model, path, external_data=f"{path.name}.data" if size > INSIDE else None, callback=tell)


def call(decoder: Any, arguments: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Calls a decoder module. Raises ValueError, naming the model, for what keeps it from running."""
    name = type(decoder.model).__name__
    try:
        return decoder(*arguments)
    except ValueError as error:
        raise error if name in str(error) else ValueError(f"{name}: {error}") from error
    except Exception as error:
        raise ValueError(f"{name}: it does not run over leanfleet's caches: {_first_line(error)}. {ELSEWHERE}") from error


def _trace(
    decoder: Any, arguments: tuple[Any, ...], shapes: Mapping[str, Any], options: Mapping[str, Any]
) -> torch.onnx.ONNXProgram:
    """The ONNXProgram of a decoder module. Raises ValueError, with the first line of the reason, where it cannot be traced."""
    printed = io.StringIO()
    try:
        with redirect_stderr(printed), shortcuts.one_way():
            program = export(decoder, arguments, dynamic_shapes=shapes, **options)
        sys.stderr.write(printed.getvalue())
        return program
    except Exception as error:  # PyTorch prints hundreds of lines of the graph: the one that counts is in the error
        call(decoder, arguments)  # tracing buries an error of the model's under its own
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ValueError(
            f"{type(decoder.model).__name__}: PyTorch's exporter cannot trace it: {_first_line(cause)}. {ELSEWHERE}"
        ) from error


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}".rstrip(".") if lines else type(error).__name__


def _stop_tokens(model: Any) -> list[int]:
    stop = getattr(getattr(model, "generation_config", model.config), "eos_token_id", None)
    return [] if stop is None else stop if isinstance(stop, list) else [stop]
