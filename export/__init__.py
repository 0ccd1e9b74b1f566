"""PyTorch operators, their reference, export to ONNX, and rewriting of ONNX files.

Every name comes on first use, with what it needs: the operators torch (they register torch.ops.leanfleet), export and the
exporters also onnx and onnxscript; leanfleet.export.rewrite needs onnx and onnx-ir alone.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for editors and type checkers, which do not see __getattr__
    from leanfleet.export.decoder import export_decoder as export_decoder
    from leanfleet.export.linear_attention import LinearAttention as LinearAttention
    from leanfleet.export.linear_decoder import LinearDecoder as LinearDecoder
    from leanfleet.export.linear_decoder import LinearDecoderConfig as LinearDecoderConfig
    from leanfleet.export.onnx_export import export as export
    from leanfleet.export.onnx_export import finalize as finalize
    from leanfleet.export.onnx_export import register_schemas as register_schemas
    from leanfleet.export.onnx_export import translation_table as translation_table
    from leanfleet.export.quantised_caches import CalibratedCache as CalibratedCache
    from leanfleet.export.quantised_caches import calibrate as calibrate
    from leanfleet.export.quantised_weights import quantise as quantise
    from leanfleet.export.token_shards import decay_over_ranks as decay_over_ranks
    from leanfleet.export.token_shards import normalized_over_ranks as normalized_over_ranks
    from leanfleet.export.torch_ops import all_gather as all_gather
    from leanfleet.export.torch_ops import all_reduce as all_reduce
    from leanfleet.export.torch_ops import block_linear as block_linear
    from leanfleet.export.torch_ops import causal_conv as causal_conv
    from leanfleet.export.torch_ops import causal_conv_ as causal_conv_
    from leanfleet.export.torch_ops import causal_linear_decay as causal_linear_decay
    from leanfleet.export.torch_ops import causal_linear_decay_ as causal_linear_decay_
    from leanfleet.export.torch_ops import causal_linear_decay_grad as causal_linear_decay_grad
    from leanfleet.export.torch_ops import decay_gates as decay_gates
    from leanfleet.export.torch_ops import gated_activation as gated_activation
    from leanfleet.export.torch_ops import gated_delta_rule as gated_delta_rule
    from leanfleet.export.torch_ops import gated_delta_rule_ as gated_delta_rule_
    from leanfleet.export.torch_ops import gated_delta_rule_grad as gated_delta_rule_grad
    from leanfleet.export.torch_ops import lean_attention as lean_attention
    from leanfleet.export.torch_ops import lean_attention_ as lean_attention_
    from leanfleet.export.torch_ops import linear as linear
    from leanfleet.export.torch_ops import merge_attention as merge_attention
    from leanfleet.export.torch_ops import normalized_linear_attention as normalized_linear_attention
    from leanfleet.export.torch_ops import normalized_linear_attention_ as normalized_linear_attention_
    from leanfleet.export.torch_ops import normalized_linear_attention_grad as normalized_linear_attention_grad
    from leanfleet.export.torch_ops import rms_norm as rms_norm
    from leanfleet.export.torch_ops import sample_tokens as sample_tokens
    from leanfleet.export.torch_ops import sample_tokens_ as sample_tokens_

_HOMES = {
    "CalibratedCache": "quantised_caches",
    "LinearAttention": "linear_attention",
    "LinearDecoder": "linear_decoder",
    "LinearDecoderConfig": "linear_decoder",
    "all_gather": "torch_ops",
    "all_reduce": "torch_ops",
    "calibrate": "quantised_caches",
    "block_linear": "torch_ops",
    "causal_conv": "torch_ops",
    "causal_conv_": "torch_ops",
    "causal_linear_decay": "torch_ops",
    "causal_linear_decay_": "torch_ops",
    "causal_linear_decay_grad": "torch_ops",
    "export": "onnx_export",
    "export_decoder": "decoder",
    "finalize": "onnx_export",
    "decay_gates": "torch_ops",
    "decay_over_ranks": "token_shards",
    "gated_activation": "torch_ops",
    "gated_delta_rule": "torch_ops",
    "gated_delta_rule_": "torch_ops",
    "gated_delta_rule_grad": "torch_ops",
    "rms_norm": "torch_ops",
    "lean_attention": "torch_ops",
    "lean_attention_": "torch_ops",
    "linear": "torch_ops",
    "merge_attention": "torch_ops",
    "normalized_linear_attention": "torch_ops",
    "normalized_linear_attention_": "torch_ops",
    "normalized_linear_attention_grad": "torch_ops",
    "normalized_over_ranks": "token_shards",
    "quantise": "quantised_weights",
    "register_schemas": "onnx_export",
    "sample_tokens": "torch_ops",
    "sample_tokens_": "torch_ops",
    "translation_table": "onnx_export",
}
__all__ = list(_HOMES)


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module 'leanfleet.export' has no attribute '{name}'")
    return getattr(importlib.import_module(f"leanfleet.export.{_HOMES[name]}"), name)


def __dir__():
    return sorted({*globals(), *__all__})
