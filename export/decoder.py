"""Exports a decoder as one ONNX graph that serves prompts and decode steps.

Softmax attention becomes a LeanAttention node that appends to a cache of fixed capacity and attends over it; decayed
linear attention becomes a CausalLinearDecay node that carries its state. The graph's inputs and outputs, B requests of up
to N new tokens over caches of S slots (all three dynamic):

    input_ids                     int64 [B,N]       new tokens, at the front of each row; the rest is padding
    seq_lens                      int32 [B]         tokens seen once the new ones are in
    query_lens                    int32 [B]         new tokens of each request; 0: the row is all padding
    past_key_values.L.key/.value  T [B,Hkv,S,D]     the caches of softmax layer L
    past_key_values.L.recurrent_state  float32 [B,Hkv,R,Dv]  the state of linear layer L; zeros before the first token
    logits                        float32 [B,vocabulary], of each request's last new token; with all_logits [B,N,vocabulary]
    present.L...                  as the past, with the new tokens; may be bound to the inputs' buffers
"""

import json
import types
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from leanfleet.export.experts import add_function, as_one_node
from leanfleet.export.fusions import fuse_for_onnxruntime
from leanfleet.export.onnx_export import export
from leanfleet.export.torch_ops import causal_linear_decay, lean_attention

IMPLEMENTATION = "leanfleet"  # the name under which transformers knows our attention
_HANDLED = {"dropout", "is_causal", "position_ids", "use_cache", "output_attentions", "output_hidden_states",
            "position_embeddings", "past_key_values"}
_ELSEWHERE = "Export this model with transformers' own exporter (transformers.exporters.exporter_onnx) instead"


class Cache:
    """The caches of one traced call by name ("0.key"); attention replaces them as it appends."""

    def __init__(self, tensors, seq_lens, query_lens):
        self.tensors, self.seq_lens, self.query_lens, self.updated = dict(tensors), seq_lens, query_lens, set()

    def update(self, name, tensor):
        self.tensors[name] = tensor
        self.updated.add(name)

    def attend(self, layer, query, key, value, **options):
        """Appends the new keys and values [B,Hkv,N,D] to a layer's caches; the attention of query [B,H,N,D] as [B,N,H,D]."""
        names = f"{layer}.key", f"{layer}.value"
        output, _, *updated = lean_attention(
            query, *(self.tensors[name] for name in names), self.seq_lens, query_lens=self.query_lens, new_key=key,
            new_value=value, append=True, **options)
        for name, tensor in zip(names, updated, strict=True):
            self.update(name, tensor)
        return output.transpose(1, 2)


def attention(module, query, key, value, attention_mask, scaling=None, sliding_window=None, softcap=None, s_aux=None,
              leanfleet_cache=None, **kwargs):
    """transformers' attention function: query [B,H,N,D], key and value [B,Hkv,N,D] of the new tokens.

    Raises ValueError where the model asks for something that LeanAttention does not do, naming the layer.
    """
    index = getattr(module, "layer_idx", None)
    layer = f"attention layer {'?' if index is None else index} ({type(module).__name__})"
    if leanfleet_cache is None:
        raise ValueError(f"{layer}: the '{IMPLEMENTATION}' attention runs inside leanfleet.export.export_decoder only")
    if getattr(module, "is_causal", True) is False:
        raise ValueError(f"{layer}: it is not causal (an encoder's or cross attention); LeanAttention with a cache serves "
                         f"causal decoders. {_ELSEWHERE}")
    unknown = sorted(name for name in kwargs.keys() - _HANDLED if kwargs[name] is not None and kwargs[name] is not False)
    if attention_mask is not None:
        unknown.insert(0, "an attention mask of its own (as for ALiBi or relative biases)")
    if unknown:
        raise ValueError(f"{layer}: it passes {', '.join(unknown)}, which LeanAttention has no counterpart for. {_ELSEWHERE}")
    output = leanfleet_cache.attend(
        index, query, key, value, sinks=None if s_aux is None else s_aux.float(),
        scale=0.0 if scaling is None else scaling, window=-1 if sliding_window is None else sliding_window,
        softcap=0.0 if softcap is None else softcap)
    return output, None


def decayed_attention(cache, layer, query, key, value, log_decay, scale=1.0):
    """Linear layer `layer` over its carried state: query, key [B,N,H,R], value [B,N,H,Dv], log_decay float32 [H].

    Rows past query_lens leave the state as it is: their keys are zero and their decay is 1.
    """
    name = f"{layer}.recurrent_state"
    valid = (torch.arange(query.shape[1], device=query.device) < cache.query_lens.unsqueeze(1)).unsqueeze(-1)
    decay = torch.where(valid, log_decay, torch.zeros((), dtype=log_decay.dtype))
    output, state = causal_linear_decay(query, key * valid.unsqueeze(-1).to(key.dtype), value, decay,
                                        cache.tensors[name], return_state=True, scale=scale, layout="bnhd")
    cache.update(name, state)
    return output


def _lightning_forward(self, hidden_states, *args, leanfleet_cache=None, **kwargs):
    """MiniMaxLightningAttention.forward over CausalLinearDecay: S = exp(-slope) S + k^T v, o = q S."""
    batch, tokens, _ = hidden_states.shape
    heads = self.act_fn(self.qkv_proj(hidden_states)).view(batch, tokens, self.num_attention_heads, 3 * self.head_dim)
    query, key, value = heads.split(self.head_dim, dim=3)
    output = decayed_attention(leanfleet_cache, self.layer_idx, query, key, value, -self.slope_rate.float().flatten())
    output = self.norm(output.reshape(batch, tokens, -1))
    return self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * output), None


def _no_mask(*args, **kwargs):
    """transformers' mask function: lengths say everything, so there is no mask."""
    return None


@contextmanager
def traceable(model, fuse):
    """A transformers model whose layers run our operators and whose experts can be traced; fuse: for ONNX Runtime alone."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
    before = model.config._attn_implementation
    # A loop over the experts that were hit cannot be traced.
    experts = model.get_experts_implementation() if model._can_set_experts_implementation() else None
    lightning = [m for m in model.modules() if type(m).__name__ == "MiniMaxLightningAttention"]
    try:
        model.set_attn_implementation(IMPLEMENTATION)
        if experts is not None:
            model.set_experts_implementation("batched_mm")
        for module in lightning:
            module.forward = types.MethodType(_lightning_forward, module)
        with as_one_node(model) if experts is not None and fuse else nullcontext():
            yield
    finally:
        for module in lightning:
            vars(module).pop("forward", None)
        if experts is not None:
            model.set_experts_implementation(experts)
        model.set_attn_implementation(before)


def _check_supported(model, config):
    """Raises ValueError, naming the layer, for models that attend in a way that our operators do not."""
    name = type(model).__name__
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise ValueError(f"{name}: its decoder layers have cross attention; LeanAttention with a cache serves self attention. "
                         f"{_ELSEWHERE}")
    if not getattr(model, "_supports_attention_backend", False):
        kind = next((f"attention layer {key} ({type(m).__name__})" for key, m in model.named_modules()
                     if type(m).__name__.endswith("Attention")), "its attention")
        biased = any(getattr(config, a, None) for a in ("alibi", "use_alibi")) or config.model_type in ("bloom", "mpt")
        raise ValueError(f"{name}: {kind} does not go through transformers' AttentionInterface"
                         f"{', and its ALiBi biases have no counterpart in LeanAttention' if biased else ''}. {_ELSEWHERE}")
    if getattr(config, "num_kv_shared_layers", 0):
        raise ValueError(f"{name}: its last {config.num_kv_shared_layers} layers attend over other layers' caches; "
                         f"leanfleet.export_decoder gives each layer its own. {_ELSEWHERE}")


def cache_shapes(model):
    """{name: (dtype, shape)} of the caches, layer by layer; shape has "batch" and "capacity" where they stand.

    Raises ValueError, naming the layer, for a kind of layer that our operators do not serve.
    """
    if hasattr(model, "cache_shapes"):
        return model.cache_shapes()
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    lightning = {m.layer_idx for m in model.modules() if type(m).__name__ == "MiniMaxLightningAttention"}
    shapes = {}
    for layer, kind in enumerate(kinds):
        if layer in lightning:
            shapes[f"{layer}.recurrent_state"] = (torch.float32, ("batch", heads, head_size, head_size))
        elif kind in ("full_attention", "sliding_attention"):
            kv_heads = getattr(config, "num_key_value_heads", None) or heads
            for part in ("key", "value"):
                shapes[f"{layer}.{part}"] = (model.dtype, ("batch", kv_heads, "capacity", head_size))
        else:
            raise ValueError(f"{type(model).__name__}: layer {layer} is of kind {kind}; export_decoder serves full_attention, "
                             f"sliding_attention and MiniMax's linear_attention. {_ELSEWHERE}")
    return shapes


class Decoder(torch.nn.Module):
    """A causal LM with the inputs and outputs of this module's graph."""

    def __init__(self, model, names, all_logits=False):
        super().__init__()
        self.model, self.names, self.all_logits = model, list(names), all_logits

    def forward(self, input_ids, seq_lens, query_lens, caches):
        """caches: tensors in the order of names; returns (logits, *caches)."""
        cache = Cache(zip(self.names, caches, strict=True), seq_lens, query_lens)
        steps = torch.arange(input_ids.shape[1], device=input_ids.device)
        positions = (seq_lens - query_lens).unsqueeze(1).to(torch.int64) + steps
        last = (query_lens.to(torch.int64) - 1).clamp(min=0)

        def keep_last_row(head, arguments):
            hidden = arguments[0]
            rows = last.view(-1, 1, 1).expand(-1, 1, hidden.shape[-1])
            return (hidden.gather(1, rows),)

        hook = None if self.all_logits else self.model.get_output_embeddings().register_forward_pre_hook(keep_last_row)
        try:
            logits = self.model(input_ids=input_ids, position_ids=positions, use_cache=False,
                                leanfleet_cache=cache).logits
        finally:
            if hook is not None:
                hook.remove()
        if left := [name for name in self.names if name not in cache.updated]:
            layer = left[0].partition(".")[0]
            raise ValueError(f"{type(self.model).__name__}: attention layer {layer} does not go through transformers' "
                             f"AttentionInterface. {_ELSEWHERE}")
        return (logits.float() if self.all_logits else logits.squeeze(1).float(), *(cache.tensors[n] for n in self.names))


def _example(dtype, shape, sizes):
    return torch.zeros([sizes.get(n, n) for n in shape], dtype=dtype)


def export_decoder(model, folder, tokenizer=None, all_logits=False, fuse=True, **options):
    """Writes model.onnx, leanfleet.json and, with a tokenizer, its files to `folder`; returns the ONNXProgram.

    model: a leanfleet.export.LinearDecoder, or a transformers causal LM whose attention goes through AttentionInterface
    (Llama, Mistral, Phi-3, Qwen2, Qwen3, Gemma 2, Gemma 3, gpt-oss and MiniMax are tested). all_logits: logits of every new
    token, [B,N,vocabulary], in place of the last one's (for scoring). fuse: write norms, rotary encodings and experts so
    that ONNX Runtime runs each as one kernel (leanfleet.export.fusions and experts); False leaves standard operators and
    ours alone, for runtimes that do not take functions of a model for what they do not know. leanfleet.json holds what
    leanfleet.ort_ops.generate needs to know. options go to leanfleet.export.export. Raises ValueError, naming the layer, for
    attention that our operators do not do.
    """
    model = model.eval()
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    ours = hasattr(model, "cache_shapes")
    caches = cache_shapes(model)
    if not ours:
        _check_supported(model, config)
    sizes = {"batch": 2, "tokens": 3, "capacity": 16}
    dims = {name: torch.export.Dim(name, min=1) for name in sizes}
    examples = [_example(dtype, shape, sizes) for dtype, shape in caches.values()]
    lens = torch.full((sizes["batch"],), sizes["tokens"], dtype=torch.int32)
    ids = torch.ones(sizes["batch"], sizes["tokens"], dtype=torch.int64)
    shapes = {"input_ids": {0: dims["batch"], 1: dims["tokens"]}, "seq_lens": {0: dims["batch"]},
              "query_lens": {0: dims["batch"]},
              "caches": [{axis: dims[n] for axis, n in enumerate(shape) if n in dims} for _, shape in caches.values()]}
    folder = Path(folder)
    decoder = Decoder(model, caches, all_logits).eval()
    with nullcontext() if ours else traceable(model, fuse), torch.no_grad():
        # Tracing buries an error under its own; a plain call first shows the model's refusals as they are.
        decoder(ids, lens, lens.clone(), examples)
        program = export(decoder, (ids, lens, lens.clone(), examples), dynamic_shapes=shapes,
                         input_names=["input_ids", "seq_lens", "query_lens", *(f"past_key_values.{n}" for n in caches)],
                         output_names=["logits", *(f"present.{n}" for n in caches)], **options)
    if fuse:
        add_function(program.model)
        fuse_for_onnxruntime(program.model, getattr(config, "max_position_embeddings", None))
    folder.mkdir(parents=True, exist_ok=True)
    program.save(str(folder / "model.onnx"))
    facts = {"vocabulary": config.vocab_size, "stop_tokens": _stop_tokens(model),
             "max_positions": getattr(config, "max_position_embeddings", None)}
    (folder / "leanfleet.json").write_text(json.dumps(facts, indent=2) + "\n")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return program


def _stop_tokens(model):
    stop = getattr(getattr(model, "generation_config", model.config), "eos_token_id", None)
    return [] if stop is None else stop if isinstance(stop, list) else [stop]
