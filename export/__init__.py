"""PyTorch operators, their reference, and export to ONNX. Needs torch; export() needs onnx and onnxscript too."""

from leanfleet.export.linear_attention import LinearAttention
from leanfleet.export.torch_ops import (
    causal_linear_decay,
    causal_linear_decay_,
    causal_linear_decay_grad,
    lean_attention,
    lean_attention_,
    normalized_linear_attention,
    normalized_linear_attention_,
    normalized_linear_attention_grad,
)



def __getattr__(name):
    """export and export_decoder come on first use: they need onnx and onnxscript, the operators only torch."""
    if name in ("export", "finalize", "translation_table", "register_schemas"):
        from leanfleet.export import onnx_export

        return getattr(onnx_export, name)
    if name == "export_decoder":
        from leanfleet.export.decoder import export_decoder

        return export_decoder
    raise AttributeError(f"module 'leanfleet.export' has no attribute '{name}'")


__all__ = [
    "LinearAttention", "export", "export_decoder", "finalize", "register_schemas", "translation_table",
    "causal_linear_decay", "causal_linear_decay_", "causal_linear_decay_grad", "lean_attention", "lean_attention_",
    "normalized_linear_attention", "normalized_linear_attention_", "normalized_linear_attention_grad",
]
