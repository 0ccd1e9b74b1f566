"""Small models of every entry of transformers' MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, built from their configuration classes."""

import copy
from types import SimpleNamespace

import torch
import transformers
from onnx import TensorProto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as ENTRIES

from leanfleet.decoder_contract import DECODER, SERVING
from leanfleet.export import verification
from leanfleet.export.cache import pool_shape
from leanfleet.export.decoder import Decoder, cache_shapes, call, example_inputs, traceable
from leanfleet.export.serving import PackedDecoder
from leanfleet.export.support import check_supported, most_positions

VOCABULARY, POSITIONS, LAYERS = 96, 64, 2
TOKENS = 60  # prompts draw from 3 .. TOKENS; tokens with a meaning lie above
# Sizes by what configurations call them; each is set where a configuration has it.
SIZES = {
    "vocab_size": VOCABULARY,
    "decoder_vocab_size": VOCABULARY,
    "unpadded_vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    **dict.fromkeys(
        (
            "hidden_size",
            "d_model",
            "n_embd",
            "emb_dim",
            "embedding_size",
            "embedding_dim",
            "attention_hidden_size",
            "word_embed_proj_dim",
            "lru_width",
            "input_embedding_size",
            "output_embedding_size",
        ),
        32,
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "num_layers",
            "n_layer",
            "n_layers",
            "decoder_layers",
            "num_decoder_layers",
            "encoder_layers",
            "num_encoder_layers",
            "num_blocks",
        ),
        LAYERS,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "decoder_attention_heads",
            "attention_heads",
            "encoder_attention_heads",
            "num_decoder_attention_heads",
            "num_encoder_attention_heads",
            "swa_num_attention_heads",
        ),
        4,
    ),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(
        (
            "head_dim",
            "swa_head_dim",
            "dim_head",
            "attention_head_size",
            "rotary_dim",
            "d_head",
            "attention_head_dim",
            "kv_channels",
        ),
        8,
    ),
    **dict.fromkeys(
        (
            "intermediate_size",
            "ffn_dim",
            "n_inner",
            "dim_ff",
            "dff",
            "d_inner",
            "encoder_ffn_dim",
            "decoder_ffn_dim",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "shared_intermediate_size",
            "ffn_hidden_size",
            "intermediate_size_mlp",
            "expert_ffn_hidden_size",
            "shared_experts_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "dense_intermediate_size",
            "feed_forward_size",
        ),
        48,
    ),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(
        (
            "max_position_embeddings",
            "n_positions",
            "n_ctx",
            "max_seq_len",
            "model_max_length",
            "context_length",
            "max_target_positions",
            "original_max_position_embeddings",
        ),
        POSITIONS,
    ),
    **dict.fromkeys(
        (
            "sliding_window",
            "sliding_window_size",
            "attention_window_size",
            "window_size",
            "local_attention",
            "attention_chunk_size",
        ),
        6,
    ),
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "state_size": 8,
    "mamba_d_state": 8,
    "ssm_state_size": 8,
    "query_pre_attn_scalar": 8,
    "hidden_size_per_layer_input": 8,
    "image_size": 32,
    "patch_size": 16,
}
# What the names above do not say, by model type.
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8}
_BLT = {"hidden_size_global": 32, "vocab_size": 260}
_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
_ZAMBA = {
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    "num_hidden_layers": 4,
    "attention_hidden_size": 64,
    "attention_head_dim": 16,
    "num_key_value_heads": 4,
}
MORE = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 50, "vocab_size": 260},
    "blt_patcher": {"vocab_size": 260},
    "blt_local_encoder": _BLT,
    "blt_local_decoder": _BLT,
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {kind: {**_ROTARY, "mrope_section": [2, 1, 1]} for kind in ("full_attention", "sliding_attention")},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {
        "num_key_value_heads": 4,
        "head_dim": 16,
        "layer_types": ["indexed_attention", "sliding_attention"],
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "dory": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
    },
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    # A single layer, the sparse kind: exporting takes long to come to what it cannot translate.
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "altup_num_inputs": 2,
        "intermediate_size": 48,
        "activation_sparsity_pattern": [0.95],
    },
    "gemma4_text": {"num_kv_shared_layers": 0, "global_head_dim": 16},
    "gemma4_unified_text": {"num_kv_shared_layers": 0, "global_head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"]},
    "laguna": {"layer_types": ["full_attention", "sliding_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "n_groups": 1, "chunk_size": 8},
    "mellum": {"layer_types": ["full_attention", "sliding_attention"]},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_block_size": 4,
        "index_topk_blocks": 2,
        "index_head_dim": 8,
        "index_n_heads": 2,
    },
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": _INDEXER,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {"axial_pos_shape": [8, 8], "axial_pos_embds_dim": [8, 24], "attn_layers": ["local", "lsh"], "num_buckets": 2},
    "smollm3": {"no_rope_layer_interval": 2},
    "xmod": {"default_language": "en_XX"},
    "zamba": {**_ZAMBA, "mamba_dt_rank": 8},
    "zamba2": {
        **_ZAMBA,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "chunk_size": 8,
        "kv_channels": 8,
        "num_query_groups": 4,
        "adapter_rank": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
}
# Classes that do not even give their defaults, or whose decoder is the one to build.
_ASSISTANT = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
FIRST = {"gemma4_assistant": {"text_config": {"model_type": "gemma4_text", **_ASSISTANT}}}


def _size_of(config):
    """Configuration arguments that make one of this class small."""
    sizes, fields = {}, {**config.to_dict(), **{n: getattr(config, n, None) for n in config.attribute_map}}
    for name, size in SIZES.items():
        if name in fields and (fields[name] is not None or name == "head_dim") and not isinstance(fields[name], (list, dict)):
            sizes[config.attribute_map.get(name, name)] = size
    kinds, own = fields.get("layer_types"), config.attribute_map.get("layer_types", "layer_types")
    if isinstance(kinds, list) and kinds and not isinstance(getattr(type(config), own, None), property):
        sizes[own] = list(dict.fromkeys(kinds)) * (2 if len(set(kinds)) == 1 else 1)
        sizes[config.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = len(sizes[own])
    if fields.get("kv_lora_rank"):
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    if "is_decoder" in fields:
        sizes["is_decoder"] = True
    taken = VOCABULARY - 1
    for name, value in fields.items():
        if (name.endswith(("token_id", "token_index"))) and isinstance(value, int) and value > TOKENS:
            sizes[name], taken = taken, taken - 1
    return sizes | MORE.get(config.model_type, {})


def make_config(entry):
    """The configuration of an entry's model, small."""
    kind = CONFIG_MAPPING[entry]
    if entry.startswith("musicgen"):  # its configuration holds those of two encoders too
        kind = getattr(transformers, ENTRIES[entry]).config_class
    config = kind(**FIRST.get(entry, {}))
    sizes = _size_of(config)
    for name in config.sub_configs:
        sub = getattr(config, name, None)
        if sub is not None:
            sizes[name] = {"model_type": sub.model_type, **_size_of(sub), **sizes.get(name, {})}
            if entry.endswith("_assistant"):
                sizes[name] |= _ASSISTANT
            if entry == "dots3_note" and name != "text_config":
                sizes[name] = {"adapter_out_dim": 32}  # of encoders that its causal language model leaves out
    return kind(**sizes)


def make(entry, seed=5):
    """The model of an entry, in eval mode, with weights spread so that attention and logits differ from token to token."""
    config = make_config(entry)
    torch.manual_seed(seed)
    if entry.startswith("musicgen"):
        model = getattr(transformers, ENTRIES[entry])(config).eval()
    else:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(noise * 1.5 / p.shape[-1] ** 0.5) if p.dim() > 1 else p.add_(0.1 * noise)  # biases are 0 at first
    return model


class Eager:
    """A decoder module with onnxruntime's interface, so that leanfleet.export.verification can compare it with its model."""

    def __init__(self, decoder, caches):
        """caches: (name, shape) of the graph's inputs that hold caches, in the module's order."""
        self.decoder = decoder
        self.inputs = [SimpleNamespace(name=name, shape=shape, type="tensor(float)") for name, shape in caches]

    def get_inputs(self):
        return self.inputs

    def get_outputs(self):
        interface = SERVING if self.argument == "pages" else DECODER
        return [*interface.outputs, *self.inputs]

    def run_with_ort_values(self, _, feed):
        tensors = {name: torch.from_numpy(value.numpy()) for name, value in feed.items()}
        caches = [tensors.pop(entry.name) for entry in self.inputs]
        with torch.no_grad():
            logits, *caches = self.decoder(**tensors, **{self.argument: caches})
        # No OrtValue: its numpy() would not keep the tensor alive.
        return [SimpleNamespace(numpy=t.numpy, element_type=lambda: TensorProto.FLOAT) for t in (logits, *caches)]

    @property
    def argument(self):
        return "pages" if isinstance(self.decoder, PackedDecoder) else "caches"


def check_eagerly(model, block=4):
    """What verification says of a model's decoder modules, that of export_decoder and that of export_for_serving, before any
    export: [{"largest_difference", "bound"}, ...]. Raises ValueError where it is refused."""
    check_supported(model)
    caches = cache_shapes(model)
    traced = copy.deepcopy(model)
    facts = {"vocabulary": model.config.get_text_config(decoder=True).vocab_size, "max_positions": most_positions(model)}
    with traceable(traced, fuse=False), torch.no_grad():
        module = Decoder(traced, caches).eval()
        call(module, example_inputs(caches))
        found = [
            verification.compare(model, Eager(module, [(f"past_key_values.{n}", s) for n, (_, s) in caches.items()]), facts)
        ]
        pages = [(f"pages.{name}", pool_shape(name, shape, block)) for name, (_, shape) in caches.items()]
        session = Eager(PackedDecoder(traced, caches).eval(), pages)
        found.append(verification.compare(model, session, facts | {"kind": "serving", "block": block}))
    return found
