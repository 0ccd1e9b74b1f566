"""Small language models, prompts and a tokenizer."""

import functools

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedTokenizerFast

from leanfleet.export import LinearDecoder, LinearDecoderConfig
from leanfleet.export.linear_attention import register_transformers

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}<assistant>"


def byte_tokenizer(chat=True):
    """A token a byte, and four special ones: characters beyond ASCII are several tokens."""
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>", "<user>", "<assistant>", "<system>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = TEMPLATE if chat else None
    return fast


class _Float64(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        wider = {torch.float32: torch.float64}
        args, kwargs = torch.utils._pytree.tree_map(
            lambda x: wider.get(x, x) if isinstance(x, torch.dtype) else x, (args, kwargs or {})
        )
        return function(*args, **kwargs)


def judge_logits(model, ids):
    """Logits [tokens, vocabulary] of one prompt in float64, in which the model stays; also what it computes in float32
    whatever its weights are (norms, gates, softmax)."""
    with torch.no_grad(), _Float64():
        return model.double()(ids.unsqueeze(0), use_cache=False).logits[0]


SIZES = dict(
    hidden_size=96,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=211,
    intermediate_size=128,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", dict(sliding_window=5)),
    "phi3": ("Phi3Config", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "gemma2": ("Gemma2Config", dict(sliding_window=6, attn_logit_softcapping=20.0, query_pre_attn_scalar=16)),
    # local layers with a rotary base of their own beside global ones
    "gemma3": (
        "Gemma3TextConfig",
        dict(sliding_window=6, query_pre_attn_scalar=16, layer_types=["sliding_attention", "full_attention"]),
    ),
    # attention sinks, experts
    "gpt-oss": ("GptOssConfig", dict(sliding_window=5, num_local_experts=4, num_experts_per_tok=2)),
}


def make(family):
    config, extra = FAMILIES[family]
    torch.manual_seed(5)
    config = getattr(transformers, config)(**{**SIZES, **extra})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # random weights as they come give nearly equal logits: spread them
        for p in model.parameters():
            p.mul_(3 if p.dim() > 1 else 1)
    return model


def prompts(*lengths):
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(3, SIZES["vocab_size"], (n,), generator=generator).tolist() for n in lengths]


VOCABULARY, LONGEST = 211, 200


def minimax(vocab_size=VOCABULARY, **sizes):
    usual = dict(
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=vocab_size,
        intermediate_size=64,
        max_position_embeddings=256,
        num_local_experts=4,
        block_size=16,
        pad_token_id=0,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    )
    config = transformers.MiniMaxConfig(**usual | sizes)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")


# Hybrids of recurrent and softmax layers, with the head groups of the models that are trained: two value heads for each key head in
# Qwen's, all heads alike in the others; experts beside a shared one.
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
GATED_DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=24)
LAYERS = dict(num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"])
MAMBA = dict(mamba_n_heads=4, mamba_d_head=24, mamba_d_state=16, mamba_n_groups=1, mamba_expand=1, mamba_chunk_size=16)
HYBRIDS = {
    "qwen3-next": ("Qwen3NextConfig", dict(**GATED_DELTA, **EXPERTS, **LAYERS, shared_expert_intermediate_size=32)),
    "qwen3.5": ("Qwen3_5TextConfig", dict(**GATED_DELTA, **LAYERS)),
    "olmo-hybrid": (
        "OlmoHybridConfig",
        dict(**{**GATED_DELTA, "linear_num_key_heads": 4}, **LAYERS, linear_allow_neg_eigval=True, num_key_value_heads=6),
    ),
    "kimi-linear": (
        "KimiLinearConfig",
        dict(
            **EXPERTS,
            **LAYERS,
            num_key_value_heads=6,
            linear_num_heads=4,
            linear_head_dim=16,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            num_shared_experts=1,
            head_dim=24,
        ),
    ),
    # Mamba-2: groups of heads share B and C, one group in some models and several in others. Falcon-H1's layers attend beside their
    # scan; Nemotron-H has feed-forward layers and experts as layers of their own.
    "mamba2": ("Mamba2Config", dict(num_hidden_layers=2, num_heads=8, head_dim=24, state_size=16, n_groups=2, chunk_size=16)),
    "bamba": ("BambaConfig", dict(**MAMBA, num_hidden_layers=2, attn_layer_indices=[1])),
    "falcon-h1": ("FalconH1Config", dict(**MAMBA, mamba_d_ssm=96, num_hidden_layers=2)),
    "granite": (
        "GraniteMoeHybridConfig",
        dict(**MAMBA, **LAYERS, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=32),
    ),
    "nemotron-h": (
        "NemotronHConfig",
        dict(
            num_hidden_layers=4,
            layer_types=["linear_attention", "moe", "full_attention", "mlp"],
            mamba_num_heads=4,
            mamba_head_dim=24,
            ssm_state_size=16,
            n_groups=2,
            chunk_size=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            moe_shared_expert_intermediate_size=32,
        ),
    ),
}


def hybrid(name, **changes):
    config, extra = HYBRIDS[name]
    sizes = SIZES if name != "mamba2" else {n: SIZES[n] for n in ("hidden_size", "vocab_size", "eos_token_id", "pad_token_id")}
    config = getattr(transformers, config)(**{**sizes, **extra, **changes})
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")


def ours(kind, layers=2, vocab_size=VOCABULARY, **sizes):
    usual = dict(hidden_size=96, num_hidden_layers=layers, num_attention_heads=6, feed_forward_size=128, eos_token_id=2)
    return LinearDecoder(LinearDecoderConfig(kind, vocab_size, **usual | sizes))


def linear(family="llama", layers=None):
    """A transformers model with register_transformers()'s attention, in all layers or in these."""
    model = make(family)
    if layers is not None:
        model.config.leanfleet_linear_layers = layers
    model.set_attn_implementation(register_transformers())
    return model


MODELS = {
    "minimax": minimax,
    "retnet": lambda: ours("retnet"),
    "transnormer": lambda: ours("transnormer"),
    **{name: functools.partial(hybrid, name) for name in HYBRIDS},
    "normalized": linear,
    "normalized, mixed": lambda: linear("mistral", [0]),
}
