"""PyTorch operators, their reference, export to ONNX, and rewriting of ONNX files.

Every name comes on first use, with what it needs: the operators torch (they register torch.ops.leanfleet), export and the
exporters also onnx and onnxscript; leanfleet.export.rewrite needs onnx and onnx-ir alone.
"""

import importlib

_HOMES = {
    "LinearAttention": "linear_attention",
    "LinearDecoder": "linear_decoder",
    "LinearDecoderConfig": "linear_decoder",
    "causal_linear_decay": "torch_ops",
    "causal_linear_decay_": "torch_ops",
    "causal_linear_decay_grad": "torch_ops",
    "export": "onnx_export",
    "export_decoder": "decoder",
    "finalize": "onnx_export",
    "lean_attention": "torch_ops",
    "lean_attention_": "torch_ops",
    "normalized_linear_attention": "torch_ops",
    "normalized_linear_attention_": "torch_ops",
    "normalized_linear_attention_grad": "torch_ops",
    "register_schemas": "onnx_export",
    "translation_table": "onnx_export",
}
__all__ = list(_HOMES)


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module 'leanfleet.export' has no attribute '{name}'")
    return getattr(importlib.import_module(f"leanfleet.export.{_HOMES[name]}"), name)
