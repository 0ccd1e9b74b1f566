"""Exports a decoder from transformers as one ONNX graph that serves prompts and decode steps.

Every attention becomes a LeanAttention node that appends to a cache of fixed capacity and attends over it. The
graph's inputs and outputs, B requests of up to N new tokens over caches of S slots (all three dynamic):

    input_ids                     int64 [B,N]       new tokens, at the front of each row; the rest is padding
    seq_lens                      int32 [B]         tokens in the cache once the new ones are in it
    query_lens                    int32 [B]         new tokens of each request
    past_key_values.L.key/.value  T [B,Hkv,S,D]     the caches, one pair a layer
    logits                        float32 [B,vocabulary], of each request's last new token
    present.L.key/.value          T [B,Hkv,S,D]     the caches with the new tokens; may be bound to the inputs' buffers
"""

import json
from contextlib import contextmanager
from pathlib import Path

import torch

from leanfleet.export.onnx_export import export
from leanfleet.export.torch_ops import lean_attention

IMPLEMENTATION = "leanfleet"  # the name under which transformers knows our attention
_HANDLED = {"dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids", "leanfleet_cache",
            "use_cache", "output_attentions", "output_hidden_states", "position_embeddings", "past_key_values"}


class _Cache:
    """The caches of one traced call, by layer: the attention function replaces them as it appends."""

    def __init__(self, keys, values, seq_lens, query_lens):
        self.keys, self.values = list(keys), list(values)
        self.seq_lens, self.query_lens = seq_lens, query_lens


def attention(module, query, key, value, attention_mask, scaling=None, sliding_window=None, softcap=None, s_aux=None,
              leanfleet_cache=None, **kwargs):
    """transformers' attention function: query [B,H,N,D], key and value [B,Hkv,N,D] of the new tokens.

    Raises ValueError where the model asks for something that LeanAttention does not do, naming the layer.
    """
    layer = f"attention layer {getattr(module, 'layer_idx', '?')} ({type(module).__name__})"
    if leanfleet_cache is None:
        raise ValueError(f"{layer}: the '{IMPLEMENTATION}' attention runs inside leanfleet.export.export_decoder only")
    if getattr(module, "is_causal", True) is False:
        raise ValueError(f"{layer}: it is not causal, LeanAttention with a cache serves causal decoders")
    unknown = sorted(name for name, given in kwargs.items() if given is not None and name not in _HANDLED)
    if unknown:
        raise ValueError(f"{layer}: it passes {', '.join(unknown)}, which LeanAttention has no counterpart for. Export "
                         "this model with transformers' own exporter instead")
    cache, index = leanfleet_cache, module.layer_idx
    output, _, cache.keys[index], cache.values[index] = lean_attention(
        query, cache.keys[index], cache.values[index], cache.seq_lens, query_lens=cache.query_lens,
        new_key=key, new_value=value, sinks=None if s_aux is None else s_aux.float(), append=True,
        scale=0.0 if scaling is None else scaling, window=-1 if sliding_window is None else sliding_window,
        softcap=0.0 if softcap is None else softcap)
    return output.transpose(1, 2), None


def _no_mask(*args, **kwargs):
    """transformers' mask function: lengths say everything, so there is no mask."""
    return None


@contextmanager
def _attention_implementation(model):
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(IMPLEMENTATION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


class Decoder(torch.nn.Module):
    """A transformers causal LM with the inputs and outputs of this module's graph."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.layers = model.config.num_hidden_layers

    def forward(self, input_ids, seq_lens, query_lens, caches):
        """caches: key of layer 0, value of layer 0, key of layer 1, ...; returns (logits, *caches)."""
        cache = _Cache(caches[0::2], caches[1::2], seq_lens, query_lens)
        steps = torch.arange(input_ids.shape[1], device=input_ids.device)
        positions = (seq_lens - query_lens).unsqueeze(1).to(torch.int64) + steps
        last = (query_lens.to(torch.int64) - 1).clamp(min=0)

        def keep_last_row(head, arguments):
            hidden = arguments[0]
            rows = last.view(-1, 1, 1).expand(-1, 1, hidden.shape[-1])
            return (hidden.gather(1, rows),)

        hook = self.model.get_output_embeddings().register_forward_pre_hook(keep_last_row)
        try:
            logits = self.model(input_ids=input_ids, position_ids=positions, use_cache=False,
                                leanfleet_cache=cache).logits
        finally:
            hook.remove()
        return (logits.squeeze(1).float(), *[t for pair in zip(cache.keys, cache.values) for t in pair])


def cache_names(layers, prefix):
    """prefix "past_key_values" or "present": the names of the caches, layer by layer."""
    return [f"{prefix}.{layer}.{part}" for layer in range(layers) for part in ("key", "value")]


def export_decoder(model, folder, tokenizer=None, **options):
    """Writes model.onnx, leanfleet.json and, with a tokenizer, its files to `folder`; returns the ONNXProgram.

    model: a transformers causal LM whose attention goes through AttentionInterface (Llama, Mistral, Qwen3
    and Gemma 2 are tested). leanfleet.json says what leanfleet.ort_ops.generate needs to know: layers, heads, sizes, end of
    text. Raises ValueError, naming the layer, for attention that LeanAttention does not do.
    """
    model = model.eval()
    config = model.config.get_text_config()
    heads = config.num_key_value_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers, dtype = config.num_hidden_layers, model.dtype
    batch, tokens, capacity = 2, 3, 16
    caches = [torch.zeros(batch, heads, capacity, head_size, dtype=dtype) for _ in range(2 * layers)]
    lens = torch.full((batch,), tokens, dtype=torch.int32)
    ids = torch.ones(batch, tokens, dtype=torch.int64)
    batch_dim, token_dim, slot_dim = (torch.export.Dim(n, min=1) for n in ("batch", "tokens", "capacity"))
    shapes = {"input_ids": {0: batch_dim, 1: token_dim}, "seq_lens": {0: batch_dim}, "query_lens": {0: batch_dim},
              "caches": [{0: batch_dim, 2: slot_dim}] * (2 * layers)}
    names = ["input_ids", "seq_lens", "query_lens", *cache_names(layers, "past_key_values")]
    folder = Path(folder)
    with _attention_implementation(model), torch.no_grad():
        program = export(Decoder(model).eval(), (ids, lens, lens.clone(), caches), folder / "model.onnx", dynamic_shapes=shapes,
                         input_names=names, output_names=["logits", *cache_names(layers, "present")], **options)
    stop = model.generation_config.eos_token_id
    stop = [] if stop is None else stop if isinstance(stop, list) else [stop]
    facts = {"layers": layers, "kv_heads": heads, "head_size": head_size, "dtype": str(dtype).removeprefix("torch."),
             "vocabulary": config.vocab_size, "stop_tokens": stop,
             "max_positions": getattr(config, "max_position_embeddings", None)}
    (folder / "leanfleet.json").write_text(json.dumps(facts, indent=2) + "\n")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return program
