"""Which transformers models can be exported. Every refusal of export_decoder and export_for_serving that follows from the model
alone is here: one line that names the model's class and the layer, and says what to do."""

import functools
import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from leanfleet.decoder_contract import KEY

if TYPE_CHECKING:
    from torch.nn import Module
    from transformers import PreTrainedConfig, PreTrainedModel

ELSEWHERE = "Export this model with transformers' own exporter (transformers.exporters.exporter_onnx) instead"
LINEAR = "leanfleet_linear"  # see linear_attention.register_transformers
REMEMBERED = "leanfleet_attention"  # the configuration's entry that says so; transformers saves no name of an implementation
LAYERS = "leanfleet_linear_layers"  # the configuration's entry that names the layers it is for; without: all
FEATURES = "leanfleet_features"  # submodule of attention layers that low_rank.linearise changed
METHOD = "leanfleet_low_rank"  # the configuration's entry that says so: from_pretrained knows no such submodule
PROMPTS = ("hyper",)  # values of METHOD of layers that approximate prompts and keep keys and values for what follows
SUMS = "leanfleet_sums"  # attribute of the keys of a running_sums_cache: attention gets tensors alone, not the cache
_SOFTMAX = re.compile(r"(paged\|)?(eager|sdpa|flex_attention|flash_attention_\d+|kernels-community/[\w.-]*flash-attn[\w.@-]*)")
LIGHTNING = "MiniMaxLightningAttention"
# Recurrent layers of hybrid models that export.hybrid_layers serves, by their classes' names.
HYBRID_LAYERS = (
    "Qwen3NextGatedDeltaNet",
    "Qwen3_5GatedDeltaNet",
    "Qwen3_5MoeGatedDeltaNet",
    "LaraMiniGatedDeltaNet",
    "OlmoHybridGatedDeltaNet",
    "KimiLinearDeltaAttention",
    "Mamba2Mixer",
    "BambaMixer",
    "FalconH1Mixer",
    "NemotronHMamba2Mixer",
    "GraniteMoeHybridMambaLayer",
)
# Classes of layers that carry a state, by their names: Mamba's mixers, short convolutions, delta rules, LSTMs.
_STATE = re.compile(
    r"\w*(Mixer|Mamba2?|RwkvSelfAttention|xLSTMLayer|RecurrentBlock|DeltaNet|DeltaAttention|ShortConv"
    r"|ShortConvolution|LightningAttention|LinearAttention)"
)
EXPANDED_LATENT = "KimiLinearAttention"  # multi-head latent attention whose keys and values are served as each head's own


def check_supported(model: object) -> None:
    """Raises ValueError for a model that the exporters cannot give a right graph for."""
    from transformers import PreTrainedModel

    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"{name} is no model of transformers: give a causal language model (AutoModelForCausalLM) or a "
            "leanfleet.export.LinearDecoder"
        )
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise ValueError(
            f"{name}: its decoder layers have cross attention; LeanAttention with a cache serves self attention. {ELSEWHERE}"
        )
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"{name} has no language model head, so it gives no logits of a next token: load the model with "
            "AutoModelForCausalLM (base models and classifiers are not exported)"
        )
    _check_layers(model, config)
    if "position_ids" not in inspect.signature(model.forward).parameters and not _recurrent_alone(model):
        raise ValueError(
            f"{name}: it takes no position_ids, so it cannot be told where a request's new tokens stand. {ELSEWHERE}"
        )
    if getattr(config, "num_kv_shared_layers", 0):
        raise ValueError(
            f"{name}: its last {config.num_kv_shared_layers} layers attend over other layers' caches; "
            f"leanfleet.export_decoder gives each layer its own. {ELSEWHERE}"
        )
    check_implementation(model)
    if keeps_keys(config):
        raise ValueError(
            f"{name}: layers {', '.join(map(str, linear_layers(config)))} have HyperAttention (low_rank.linearise), which "
            "recurses over whole prompts and has no state that a graph could carry. Export the model without it (load it anew, "
            f"without {METHOD} and {LAYERS} in its configuration): its steps after a prompt are softmax's in any case. Of "
            "linearise's methods favor, vq and lara are exported"
        )
    for path, module in rotary_modules(model):
        if any("dynamic" in kind for _, kind in _kinds(module)):
            raise ValueError(
                f"{name}: its rotary encoding {path} ({type(module).__name__}) is of rope_type dynamic: angles "
                "follow the longest request of a batch and change those of cached keys. Load the model with "
                "another rope_type in config.rope_parameters (yarn and linear are served)"
            )


def check_shared_layers(model: object, caches: Sequence[str], option: str, shared: str = "softmax attention") -> None:
    """Raises ValueError, naming the layer, for a model that has layers without softmax attention, which `option` does not share
    out to ranks. caches: names of what its layers carry. shared: what it does share out."""
    name, again = type(model).__name__, "export it for one GPU"
    if hasattr(model, "cache_shapes"):
        raise ValueError(f"{name}: {option} is for transformers' decoders with softmax attention: {again}")
    parts: dict[str, set[str]] = {}
    for cache in caches:
        layer, _, part = cache.partition(".")
        parts.setdefault(layer, set()).add(part)
    for layer in sorted(parts, key=int):
        if KEY not in parts[layer] or any("state" in part for part in parts[layer]):
            raise ValueError(f"{name}: layer {layer} carries a state, and {option} shares out {shared}: {again}")


def _recurrent_alone(model):
    """Whether a model has recurrent layers that are served, and no attention, so that positions are nothing to it."""
    kinds = [type(m).__name__ for m in model.modules()]
    return any(kind in HYBRID_LAYERS for kind in kinds) and not any(kind.endswith("Attention") for kind in kinds)


def _check_layers(model, config):
    """Refuses layers that carry something other than keys and values, and attention that we cannot take the place of."""
    name = type(model).__name__
    # Hybrid models' softmax layers go through the interface, though the models do not say so.
    served = getattr(model, "_supports_attention_backend", False) or any(
        type(m).__name__ in HYBRID_LAYERS for m in model.modules()
    )
    for path, module in model.named_modules():
        kind = type(module).__name__
        if _STATE.fullmatch(kind) and kind not in (LIGHTNING, EXPANDED_LATENT, *HYBRID_LAYERS):
            raise ValueError(
                f"{name}: layer {path} ({kind}) carries a state that none of leanfleet's operators computes; "
                "export_decoder serves softmax attention, MiniMax's linear attention, the gated delta rule of Qwen3-Next, "
                "Qwen3.5, LaraMini, OLMo-hybrid and Kimi-Linear, and the selective scan of Mamba-2, Bamba, Falcon-H1, "
                f"Nemotron-H and Granite-4. {ELSEWHERE}"
            )
        if hasattr(module, "create_position_ids_from_input_ids"):
            raise ValueError(
                f"{name}: its positions begin behind the padding token's ({path}, {kind}), where export_decoder "
                f"counts from 0. {ELSEWHERE}"
            )
    latent = [type(m).__name__ for m in model.modules() if hasattr(m, "kv_lora_rank")]
    if getattr(config, "kv_lora_rank", None) and any(kind != EXPANDED_LATENT for kind in latent or [""]):
        kind = next(
            (f"attention layer {path} ({type(m).__name__})" for path, m in model.named_modules() if hasattr(m, "kv_lora_rank")),
            "its attention",
        )
        raise ValueError(
            f"{name}: {kind} is multi-head latent attention (kv_lora_rank {config.kv_lora_rank}), which "
            f"leanfleet does not serve. {ELSEWHERE}"
        )
    if not served:
        kind = next(
            (
                f"attention layer {path} ({type(m).__name__})"
                for path, m in model.named_modules()
                if type(m).__name__.endswith("Attention") and "vision" not in path
            ),
            "its attention",
        )
        biased = any(getattr(config, a, None) for a in ("alibi", "use_alibi")) or config.model_type in ("bloom", "mpt")
        raise ValueError(
            f"{name}: {kind} does not go through transformers' AttentionInterface"
            f"{', and its ALiBi biases have no counterpart in LeanAttention' if biased else ''}. {ELSEWHERE}"
        )


def _configs(model):
    """The configurations that a model's modules look their attention's implementation up in, as (module, configuration)."""
    found = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            found.setdefault(id(config), (module, config))
    return list(found.values())


def _is_softmax(name):
    """Whether an implementation is one of transformers' own of softmax attention, not a function registered under its name."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if not _SOFTMAX.fullmatch(name):
        return False
    function = ALL_ATTENTION_FUNCTIONS.get(name, ALL_ATTENTION_FUNCTIONS.get(name.removeprefix("paged|")))
    while isinstance(function, functools.partial):
        function = function.func
    return function is None or (getattr(function, "__module__", None) or "").partition(".")[0] == "transformers"


def is_linear(name: str | None) -> bool:
    """Whether an implementation is register_transformers()'s, under whatever name it was registered."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function = None if name is None else ALL_ATTENTION_FUNCTIONS.get(name)
    return getattr(function, "__module__", None) == "leanfleet.export.linear_attention"


def linear_layers(config: "PreTrainedConfig") -> list[int]:
    """The layers of a decoder's configuration that register_transformers()'s attention makes linear, where the model has it."""
    chosen = getattr(config, LAYERS, None)
    return list(range(config.num_hidden_layers)) if chosen is None else sorted(set(chosen))


def check_linear_layers(config: "PreTrainedConfig") -> None:
    """Raises ValueError for a choice of linear layers that the model does not have."""
    chosen, count = getattr(config, LAYERS, None), config.num_hidden_layers
    if chosen is None:
        return
    if not isinstance(chosen, (list, tuple)) or not all(type(n) is int and 0 <= n < count for n in chosen):
        raise ValueError(f"config.{LAYERS} is {chosen!r}; expected a list of layers from 0 to {count - 1}")


def keeps_keys(config: "PreTrainedConfig") -> bool:
    """Whether the layers that low_rank.linearise changed keep keys and values, because their form has no state."""
    return getattr(config, METHOD, None) in PROMPTS


def linear_layers_of(model: "PreTrainedModel") -> list[int]:
    """The layers of a transformers model that attend by NormalizedLinearAttention. Raises what check_linear_layers raises."""
    config = model.config.get_text_config(decoder=True)
    if not is_linear(config._attn_implementation):
        return []
    check_linear_layers(config)
    return linear_layers(config)


def check_implementation(model: "PreTrainedModel") -> None:
    """Raises ValueError where a model attends in a way that export would write as something else: as softmax."""
    name = type(model).__name__
    linear = is_linear(model.config.get_text_config(decoder=True)._attn_implementation)
    for module, config in _configs(model):
        implementation = config._attn_implementation
        if linear and is_linear(implementation):
            continue
        if implementation is not None and not _is_softmax(implementation):
            raise ValueError(
                f"{name}: {type(module).__name__} attends by '{implementation}', which export would write as softmax. If "
                "softmax is meant, call model.set_attn_implementation('sdpa') first; other attention is exported where it is "
                "register_transformers()'s alone"
            )
        if remembered := getattr(config, REMEMBERED, None):
            raise ValueError(
                f"{name}: its configuration says {REMEMBERED} = '{remembered}': it has run with that attention, which export "
                "would write as softmax. Load the model with attn_implementation=register_transformers() "
                "(leanfleet.export.linear_attention); if softmax is meant, delete that entry "
                f"(del model.config.{REMEMBERED}, or in config.json)"
            )


@contextmanager
def implementation(model: "PreTrainedModel", name: str) -> Iterator[None]:
    """A model that attends by the implementation `name`; afterwards each of its configurations is as it was."""
    before = [(config, config._attn_implementation) for _, config in _configs(model)]
    top = model.config, model.config._attn_implementation
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        for config, value in [top, *before]:
            config._attn_implementation_internal = value


def rotary_modules(model: "PreTrainedModel") -> "list[tuple[str, Module]]":
    """(path, module) of what makes a model's rotary encodings."""
    return [(path, m) for path, m in model.named_modules() if isinstance(getattr(m, "rope_type", None), (str, dict))]


def _kinds(module):
    """(layer type or None, rope_type) of a module of rotary encodings."""
    return list(module.rope_type.items()) if isinstance(module.rope_type, dict) else [(None, module.rope_type)]


def longrope(model: "PreTrainedModel") -> "list[tuple[Module, str | None, int]]":
    """(module, layer type or None, original_max_position_embeddings) of the rotary encodings with short and long factors."""
    found = []
    for _, module in rotary_modules(model):
        for kind, rope in _kinds(module):
            if rope == "longrope":
                parameters = module.config.rope_parameters
                own = parameters if kind is None else parameters[kind]
                found.append((module, kind, own["original_max_position_embeddings"]))
    return found


def most_positions(model: "PreTrainedModel", rope: str = "short") -> int | None:
    """The number of positions that a model's export is right for, or None where the model does not say.

    rope: for longrope, the factors that all positions are rotated by. transformers rotates a batch by the long ones as soon as
    one of its requests is longer than original_max_position_embeddings, and by the short ones before. A graph with a cache can
    do neither, because cached keys stay rotated as they were. With short factors it is right up to that length and refuses
    more; with long ones it gives what transformers gives for longer requests. Raises ValueError for "long" where there are
    none.
    """
    config = model.config.get_text_config(decoder=True)
    most = getattr(config, "max_position_embeddings", None)
    if rope not in ("short", "long"):
        raise ValueError(f"rope is '{rope}'; it can be short or long")
    limits = [limit for _, _, limit in longrope(model)]
    if rope == "long" and not limits:
        raise ValueError(f"{type(model).__name__}: rope 'long' is for models of rope_type longrope; this has no long factors")
    return min([*limits, *([most] if most else [])]) if limits and rope == "short" else most


@contextmanager
def fixed_rotary(model: "PreTrainedModel", rope: str) -> Iterator[None]:
    """A model whose rotary encodings of rope_type longrope turn all positions by their short or their long factors."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    before = []
    try:
        for module, kind, limit in longrope(model):
            prefix = "" if kind is None else f"{kind}_"
            chosen = getattr(module, f"{prefix}original_inv_freq")
            if rope == "long":
                chosen, _ = ROPE_INIT_FUNCTIONS["longrope"](
                    module.config, chosen.device, seq_len=limit + 1, **({} if kind is None else {"layer_type": kind})
                )
            name = f"{prefix}inv_freq"
            before.append((module, module.rope_type, name, getattr(module, name)))
            setattr(module, name, chosen.clone())  # not in place: an exported program holds on to the tensor
            module.rope_type = "default" if kind is None else {**module.rope_type, kind: "default"}
        yield
    finally:
        for module, kind, name, frequencies in before[::-1]:
            module.rope_type = kind
            setattr(module, name, frequencies)
