"""leanfleet: attention operators for ONNX Runtime, TensorRT and PyTorch.

leanfleet.ort_ops       the ONNX Runtime library and sessions
leanfleet.export        PyTorch operators, the reference, export to ONNX
leanfleet.parity        Polygraphy runners and comparisons
leanfleet.spec, native  the operators' schema and the compiled library

Importing leanfleet imports none of these; each needs only what it uses.
"""

__version__ = "0.1.0"
