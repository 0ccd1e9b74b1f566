"""Wrong input: every case must give an error that names operator, argument, value found and value allowed, in PyTorch and
in ONNX Runtime alike, and leave caches and states as they were."""

import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from leanfleet import native, spec
from leanfleet.export import torch_ops
from leanfleet.ort_ops import make_session
from support import ort_models
from support.kernels import DTYPE_NAMES

I32 = torch.int32


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)


def ints(*values):
    return torch.tensor(values, dtype=I32)


def dense():
    return dict(
        query=randn(2, 6, 3, 8),
        key_cache=randn(2, 2, 11, 8),
        value_cache=randn(2, 2, 11, 4),
        seq_lens=ints(9, 5),
        query_lens=ints(3, 2),
        new_key=randn(2, 2, 3, 8),
        new_value=randn(2, 2, 3, 4),
    )


def ragged():
    return dict(
        query=randn(2, 6, 3, 8),
        key_cache=randn(2, 16, 8),
        value_cache=randn(2, 16, 4),
        seq_lens=ints(5, 9),
        cu_seqlens=ints(0, 6, 16),
    )


def packed_tokens():
    return dict(
        query=randn(6, 5, 8),
        key_cache=randn(2, 2, 11, 8),
        value_cache=randn(2, 2, 11, 4),
        seq_lens=ints(9, 4),
        cu_query_lens=ints(0, 2, 5),
    )


def paged():
    return dict(
        query=randn(2, 6, 3, 8),
        key_cache=randn(5, 4, 2, 8),
        value_cache=randn(5, 4, 2, 4),
        seq_lens=ints(7, 3),
        block_table=torch.tensor([[4, 0], [2, 1]], dtype=I32),
    )


def decay():
    return dict(
        query=randn(2, 6, 7, 4),
        key=randn(2, 2, 7, 4),
        value=randn(2, 2, 7, 5),
        log_decay=-torch.rand(2),
        initial_state=randn(2, 2, 4, 5),
    )


def packed():
    return dict(query=randn(1, 6, 7, 4), key=randn(1, 2, 7, 4), value=randn(1, 2, 7, 5), cu_seqlens=ints(0, 3, 7))


def decay_grad():
    return dict(
        query=randn(2, 6, 7, 4),
        key=randn(2, 2, 7, 4),
        value=randn(2, 2, 7, 5),
        log_decay=-torch.rand(2),
        grad_output=randn(2, 6, 7, 5),
    )


def normalized():
    return dict(query=randn(2, 6, 7, 4), key=randn(2, 2, 7, 4), value=randn(2, 2, 7, 5))


def normalized_grad():
    return {**normalized(), "output": randn(2, 6, 7, 5), "normalizer": randn(2, 6, 7), "grad_output": randn(2, 6, 7, 5)}


def sampling():
    return dict(
        logits=randn(2, 40),
        temperature=torch.ones(2),
        seed=torch.tensor([1, 2]),
        position=ints(0, 5),
        token_counts=torch.zeros(2, 40, dtype=I32),
    )


APPEND = {"append": 1}
# name: (operator, inputs, attributes, changes to the inputs, what the message must say)
CASES = {
    # rank
    "query rank": (
        "LeanAttention",
        dense,
        APPEND,
        dict(query=randn(2, 6, 8)),
        r"query has shape \[2,6,8\], rank 3; expected \[B,H,Nq,D\]",
    ),
    "cache rank": (
        "LeanAttention",
        dense,
        APPEND,
        dict(key_cache=randn(2, 22, 8)),
        r"key_cache has shape \[2,22,8\], rank 3; expected \[B,Hkv,S,D\]",
    ),
    "lengths rank": (
        "LeanAttention",
        dense,
        APPEND,
        dict(seq_lens=torch.ones(2, 1, dtype=I32)),
        r"seq_lens has shape \[2,1\], rank 2; expected \[B\]",
    ),
    "decay rank": (
        "CausalLinearDecay",
        decay,
        {},
        dict(log_decay=-torch.rand(2, 7)),
        r"log_decay has shape \[2,7\], rank 2; expected \[Hv\] or \[B,Hv,N\]",
    ),
    "coefficients rank": (
        "NormalizedLinearAttention",
        normalized,
        {},
        dict(coefficients=torch.ones(1, 2)),
        r"coefficients has shape \[1,2\], rank 2; expected \[2\]",
    ),
    "bnhd rank": (
        "CausalLinearDecay",
        decay,
        {"layout": "bnhd"},
        dict(query=randn(2, 7, 24)),
        r"query has shape \[2,7,24\], rank 3; expected \[B,N,Hq,R\]",
    ),
    "logits rank": ("SampleTokens", sampling, {}, dict(logits=randn(40)), r"logits has shape \[40\], rank 1; expected \[B,V\]"),
    "counts rank": (
        "SampleTokens",
        sampling,
        {},
        dict(token_counts=torch.zeros(2, dtype=I32)),
        r"token_counts has shape \[2\], rank 1; expected \[B,V\]",
    ),
    # type
    "seed type": ("SampleTokens", sampling, {}, dict(seed=ints(1, 2)), r"seed has type int32; expected int64|tensor\(int32\)"),
    "logits type": (
        "SampleTokens",
        sampling,
        {},
        dict(logits=torch.ones(2, 40, dtype=torch.int64)),
        r"logits has type int64; expected float32, float16 or bfloat16|tensor\(int64\)",
    ),
    # sampling
    "penalty without counts": (
        "SampleTokens",
        sampling,
        {},
        dict(token_counts=None, presence_penalty=torch.ones(2)),
        "input presence_penalty needs input token_counts, which is missing",
    ),
    "counting without counts": (
        "SampleTokens",
        sampling,
        {"count_tokens": 1},
        dict(token_counts=None),
        "count_tokens = 1 needs input token_counts, which is missing",
    ),
    "seed without temperature": (
        "SampleTokens",
        sampling,
        {},
        dict(temperature=None),
        "temperature is missing, position is given; give both or neither",
    ),
    "filter without temperature": (
        "SampleTokens",
        sampling,
        {},
        dict(temperature=None, seed=None, position=None, top_p=torch.ones(2)),
        "input top_p needs input temperature, which is missing",
    ),
    "words of the mask": (
        "SampleTokens",
        sampling,
        {},
        dict(allowed_tokens=torch.ones(2, 3, dtype=I32)),
        "allowed_tokens has W = 3 words of 32 tokens; logits give V = 40, which takes 2",
    ),
    "counts of another vocabulary": (
        "SampleTokens",
        sampling,
        {},
        dict(token_counts=torch.zeros(2, 41, dtype=I32)),
        r"token_counts has shape \[2,41\]: axis 1 of \[B,V\] is 41; expected 40, because logits gives V = 40",
    ),
    "more log-probabilities than tokens": (
        "SampleTokens",
        sampling,
        {"num_logprobs": 41},
        {},
        "attribute num_logprobs is 41; expected at most 40, because logits give V = 40",
    ),
    "log-probabilities below 0": (
        "SampleTokens",
        sampling,
        {"num_logprobs": -1},
        {},
        "attribute num_logprobs is -1; expected 1 or more, or 0 for off",
    ),
    "cache type": (
        "LeanAttention",
        dense,
        APPEND,
        dict(key_cache=randn(2, 2, 11, 8, dtype=torch.float16)),
        r"key_cache.*float16|float16",
    ),
    "lengths type": ("LeanAttention", dense, APPEND, dict(seq_lens=torch.tensor([9, 5])), r"seq_lens.*int64|int64"),
    "decay type": ("CausalLinearDecay", decay, {}, dict(log_decay=-torch.rand(2).half()), r"log_decay.*float16|float16"),
    "state type": (
        "CausalLinearDecay",
        decay,
        {},
        dict(initial_state=randn(2, 2, 4, 5, dtype=torch.bfloat16)),
        r"initial_state.*bfloat16|bfloat16",
    ),
    "query integer": (
        "NormalizedLinearAttention",
        normalized,
        {},
        dict(query=torch.ones(2, 6, 7, 4, dtype=I32)),
        r"query.*int32|int32",
    ),
    # sizes
    "head ratio": ("LeanAttention", dense, APPEND, dict(query=randn(2, 5, 3, 8)), r"H = 5 is not a multiple of Hkv = 2"),
    "decay head ratio": ("CausalLinearDecay", decay, {}, dict(query=randn(2, 3, 7, 4)), r"Hq = 3 is not a multiple of Hk = 2"),
    "grad head ratio": (
        "NormalizedLinearAttentionGrad",
        normalized_grad,
        {},
        dict(query=randn(2, 3, 7, 4), output=randn(2, 3, 7, 5), normalizer=randn(2, 3, 7), grad_output=randn(2, 3, 7, 5)),
        r"H = 3 is not a multiple of Hkv = 2",
    ),
    "cache sizes": (
        "LeanAttention",
        dense,
        APPEND,
        dict(value_cache=randn(2, 2, 12, 4)),
        r"value_cache has shape \[2,2,12,4\]: axis 2 of \[B,Hkv,S,Dv\] is 12; expected 11, because key_cache gives S = 11",
    ),
    "head size": (
        "LeanAttention",
        dense,
        APPEND,
        dict(key_cache=randn(2, 2, 11, 16)),
        r"key_cache.*axis 3 .* is 16; expected 8, because query gives D = 8",
    ),
    "batch": (
        "LeanAttention",
        dense,
        APPEND,
        dict(seq_lens=ints(9, 5, 1)),
        r"seq_lens.* is 3; expected 2, because query gives B = 2",
    ),
    "new tokens": (
        "LeanAttention",
        dense,
        APPEND,
        dict(new_key=randn(2, 2, 4, 8)),
        r"new_key.* is 4; expected 3, because query gives Nq = 3",
    ),
    "sinks": ("LeanAttention", dense, APPEND, dict(sinks=randn(2)), r"sinks.* is 2; expected 6, because query gives H = 6"),
    "offsets": (
        "LeanAttention",
        ragged,
        {},
        dict(cu_seqlens=ints(0, 6)),
        r"cu_seqlens.*\[B\+1\] is 2; expected 3, because query gives B = 2",
    ),
    "state sizes": (
        "CausalLinearDecay",
        decay,
        {},
        dict(initial_state=randn(2, 2, 5, 4)),
        r"initial_state.* is 5; expected 4, because query gives R = 4",
    ),
    "tokens": (
        "CausalLinearDecay",
        decay,
        {},
        dict(value=randn(2, 2, 8, 5)),
        r"value.* is 8; expected 7, because query gives N = 7",
    ),
    "layout": (
        "CausalLinearDecay",
        decay,
        {"layout": "bnhd"},
        {},
        r"key has shape \[2,2,7,4\]: axis 1 of \[B,N,Hk,R\] is 2; expected 6, because query gives N = 6",
    ),
    "coefficients": (
        "NormalizedLinearAttention",
        normalized,
        {},
        dict(coefficients=torch.ones(3)),
        r"coefficients.* is 3; expected 2",
    ),
    "grad sizes": (
        "CausalLinearDecayGrad",
        decay_grad,
        {},
        dict(grad_output=randn(2, 6, 7, 6)),
        r"grad_output.* is 6; expected 5, because value gives Dv = 5",
    ),
    "packed batch": (
        "CausalLinearDecay",
        packed,
        {},
        dict(query=randn(2, 6, 7, 4), key=randn(2, 2, 7, 4), value=randn(2, 2, 7, 5)),
        r"B = 2; with cu_seqlens it must be 1",
    ),
    # empty
    "empty batch": (
        "LeanAttention",
        dense,
        {},
        {k: v[:0] for k, v in dense().items() if not k.startswith("new")} | dict(new_key=None, new_value=None),
        r"query has shape \[0,6,3,8\]: axis 0 of \[B,H,Nq,D\] is 0; it is empty, expected at least 1",
    ),
    "no tokens": (
        "CausalLinearDecay",
        decay,
        {},
        dict(query=randn(2, 6, 0, 4), key=randn(2, 2, 0, 4), value=randn(2, 2, 0, 5)),
        r"axis 2 .* is 0; it is empty",
    ),
    "no request": (
        "CausalLinearDecay",
        packed,
        {},
        dict(cu_seqlens=ints(0)),
        r"cu_seqlens.* is 1; it is empty, expected at least 2",
    ),
    # partners
    "new_value missing": (
        "LeanAttention",
        dense,
        APPEND,
        dict(new_value=None),
        r"new_value is missing, new_key is given; give both or neither",
    ),
    "new_key missing": (
        "LeanAttention",
        dense,
        APPEND,
        dict(new_key=None, new_value=None),
        r"append = 1 needs input new_key, which is missing",
    ),
    "append off": ("LeanAttention", dense, {}, {}, r"input new_key needs append = 1; found append = 0"),
    "two variants": (
        "LeanAttention",
        paged,
        {},
        dict(cu_seqlens=ints(0, 6, 16)),
        r"cu_seqlens and block_table are both given.*give one",
    ),
    "ragged cache not ragged": (
        "LeanAttention",
        ragged,
        {},
        dict(key_cache=randn(2, 2, 8, 8)),
        r"key_cache has shape \[2,2,8,8\], rank 4; expected \[Hkv,total,D\]",
    ),
    "paged cache not paged": (
        "LeanAttention",
        paged,
        {},
        dict(key_cache=randn(2, 16, 8)),
        r"key_cache has shape \[2,16,8\], rank 3; expected \[P,block,Hkv,D\]",
    ),
    "norm without normalize": (
        "CausalLinearDecay",
        decay,
        {},
        dict(initial_norm=randn(2, 2, 4)),
        r"input initial_norm needs normalize = 1; found normalize = 0",
    ),
    "state without norm": (
        "CausalLinearDecay",
        decay,
        {"normalize": 1},
        {},
        r"initial_norm is missing, initial_state is given; give both or neither \(with normalize = 1\)",
    ),
    "index without pool": (
        "CausalLinearDecay",
        decay,
        {},
        dict(initial_state=None, state_index=ints(0, 1)),
        r"input state_index needs input initial_state, which is missing",
    ),
    "three of four sums": (
        "NormalizedLinearAttention",
        normalized,
        {},
        dict(initial_state=randn(2, 2, 4, 5), initial_key_sum=randn(2, 2, 4), initial_value_sum=randn(2, 2, 5)),
        r"initial_count is missing",
    ),
    "decay gradient of nothing": (
        "CausalLinearDecayGrad",
        decay_grad,
        {"grad_decay": 1},
        dict(log_decay=None),
        r"grad_decay = 1 needs input log_decay, which is missing",
    ),
    "state without causality": (
        "NormalizedLinearAttention",
        normalized,
        {"causal": 0, "return_state": 1},
        {},
        r"return_state = 1 needs causal = 1; found causal = 0",
    ),
    "packed tokens in rows": (
        "LeanAttention",
        packed_tokens,
        {},
        dict(query=randn(2, 6, 3, 8)),
        r"query has shape \[2,6,3,8\], rank 4; expected \[H,Nq,D\]",
    ),
    "packed tokens without offsets": (
        "LeanAttention",
        packed_tokens,
        {},
        dict(cu_query_lens=None),
        r"query has shape \[6,5,8\], rank 3; expected \[B,H,Nq,D\]",
    ),
    "packed tokens and their numbers": (
        "LeanAttention",
        packed_tokens,
        {},
        dict(query_lens=ints(2, 3)),
        r"cu_query_lens.*query_lens|query_lens.*cu_query_lens",
    ),
    "packed tokens of other requests": (
        "LeanAttention",
        packed_tokens,
        {},
        dict(cu_query_lens=ints(0, 1, 2, 5)),
        r"cu_query_lens.* is 4; expected 3, because .* gives B = 2",
    ),
    # attributes
    "window 0": (
        "LeanAttention",
        dense,
        {**APPEND, "window": 0},
        {},
        r"attribute window is 0; expected 1 or more, or -1 for off",
    ),
    "window not causal": (
        "LeanAttention",
        dense,
        {**APPEND, "window": 4, "causal": 0},
        {},
        r"window = 4 needs causal = 1; found causal = 0",
    ),
    "softcap negative": (
        "LeanAttention",
        dense,
        {**APPEND, "softcap": -1.0},
        {},
        r"attribute softcap is -1; expected 0 or more",
    ),
    "scale not finite": (
        "LeanAttention",
        dense,
        {**APPEND, "scale": float("nan")},
        {},
        r"attribute scale is -?nan; expected a finite number",
    ),
    "layout unknown": (
        "LeanAttention",
        dense,
        {**APPEND, "layout": "nhd"},
        {},
        r"attribute layout is 'nhd'; expected one of bhnd, bnhd",
    ),
    "reference only": (
        "CausalLinearDecay",
        decay,
        {"algorithm": "vanilla"},
        {},
        r"attribute algorithm is 'vanilla', which only the PyTorch reference has; the kernels have auto, causal_dot_product, fleet, lightning",
    ),
    "algorithm unknown": (
        "CausalLinearDecay",
        decay,
        {"algorithm": "fast"},
        {},
        r"attribute algorithm is 'fast'; expected one of auto, causal_dot_product, fleet, lightning",
    ),
    "eps negative": ("NormalizedLinearAttention", normalized, {"eps": -1.0}, {}, r"attribute eps is -1; expected 0 or more"),
    "normalised gradient": (
        "CausalLinearDecayGrad",
        decay_grad,
        {"normalize": 1},
        {},
        r"attribute normalize is 1: the normalised form is differentiated by composition",
    ),
    "gradient of states": (
        "NormalizedLinearAttentionGrad",
        normalized_grad,
        {"return_state": 1},
        {},
        r"attribute return_state is 1: carried states have no gradient here",
    ),
    # values that are always checked
    "positive decay": (
        "CausalLinearDecay",
        decay,
        {},
        dict(log_decay=torch.tensor([-0.1, 0.3])),
        r"log_decay\[1\] is 0\.3.*\[-inf, ?0\]",
    ),
    "NaN decay": (
        "CausalLinearDecay",
        decay,
        {},
        dict(log_decay=torch.tensor([float("nan"), -0.1])),
        r"log_decay\[0\] is -?nan",
    ),
    "positive token decay": (
        "CausalLinearDecayGrad",
        decay_grad,
        {},
        dict(log_decay=torch.full((2, 2, 7), -0.1).index_fill(2, torch.tensor(3), 0.5)),
        r"log_decay\[0,0,3\] is 0\.5",
    ),
}
# Values that kernels tolerate by clamping; LEANFLEET_CHECK=1 reports them.
CHECKED = {
    "seq_lens": ("LeanAttention", dense, APPEND, dict(seq_lens=ints(9, 12)), r"seq_lens\[1\] is 12.*11"),
    "seq_lens negative": ("LeanAttention", dense, APPEND, dict(seq_lens=ints(-1, 5)), r"seq_lens\[0\] is -1"),
    "query_lens": ("LeanAttention", dense, APPEND, dict(query_lens=ints(4, 2)), r"query_lens\[0\] is 4"),
    "packed offsets fall": (
        "LeanAttention",
        packed_tokens,
        {},
        dict(cu_query_lens=ints(0, 4, 3)),
        r"cu_query_lens\[2\] is 3, less than cu_query_lens\[1\] = 4",
    ),
    "packed offsets beyond": (
        "LeanAttention",
        packed_tokens,
        {},
        dict(cu_query_lens=ints(0, 2, 6)),
        r"cu_query_lens\[2\] is 6; query has 5 rows, expected 0 \.\. 5",
    ),
    "packed offsets begin": (
        "LeanAttention",
        packed_tokens,
        {},
        dict(cu_query_lens=ints(1, 2, 5)),
        r"cu_query_lens\[0\] is 1; the first request begins at 0",
    ),
    "packed tokens and keys": (
        "LeanAttention",
        packed_tokens,
        {},
        dict(seq_lens=ints(9, 2)),
        r"cu_query_lens gives request 1 3 tokens, more than the 2 valid keys of request 1",
    ),
    "ragged length": ("LeanAttention", ragged, {}, dict(seq_lens=ints(7, 9)), r"seq_lens\[0\] is 7.*6"),
    "ragged offsets": ("LeanAttention", ragged, {}, dict(cu_seqlens=ints(0, 12, 9)), r"cu_seqlens\[2\] is 9"),
    "page id": (
        "LeanAttention",
        paged,
        {},
        dict(block_table=torch.tensor([[4, 7], [2, 1]], dtype=I32)),
        r"block_table\[0,1\] is 7",
    ),
    "packed offsets": ("CausalLinearDecay", packed, {}, dict(cu_seqlens=ints(0, 3, 9)), r"cu_seqlens\[2\] is 9"),
    "temperature": (
        "SampleTokens",
        sampling,
        {},
        dict(temperature=torch.tensor([1, -0.5])),
        r"temperature\[1\] is -0.5.*0 or more",
    ),
    "temperature NaN": (
        "SampleTokens",
        sampling,
        {},
        dict(temperature=torch.tensor([1, torch.nan])),
        r"temperature\[1\] is -?nan",
    ),
    "top_k": ("SampleTokens", sampling, {}, dict(top_k=ints(-1, 3)), r"top_k\[0\] is -1; expected 0 \(all\) or more"),
    "top_p": (
        "SampleTokens",
        sampling,
        {},
        dict(top_p=torch.tensor([0.0, 1])),
        r"top_p\[0\] is 0.*expected above 0, at most 1",
    ),
    "min_p": ("SampleTokens", sampling, {}, dict(min_p=torch.tensor([0.0, 1.5])), r"min_p\[1\] is 1.5.*expected 0 to 1"),
    "position": ("SampleTokens", sampling, {}, dict(position=ints(0, -5)), r"position\[1\] is -5; expected 0 or more"),
    "repetition_penalty": (
        "SampleTokens",
        sampling,
        {},
        dict(repetition_penalty=torch.tensor([0.0, 1])),
        r"repetition_penalty\[0\] is 0.*expected a finite number above 0",
    ),
    "frequency_penalty": (
        "SampleTokens",
        sampling,
        {},
        dict(frequency_penalty=torch.tensor([0.0, torch.inf])),
        r"frequency_penalty\[1\] is inf.*expected a finite number",
    ),
    "count row": (
        "SampleTokens",
        sampling,
        {},
        dict(count_index=ints(0, 2)),
        r"count_index\[1\] is 2; token_counts has rows 0 to 1",
    ),
    "count row twice": (
        "SampleTokens",
        sampling,
        {},
        dict(count_index=ints(1, 1)),
        r"count_index\[1\] is 1, as count_index\[0\] is; a row serves one request",
    ),
    "mask without a token": (
        "SampleTokens",
        sampling,
        {},
        dict(allowed_tokens=torch.tensor([[1, 0], [0, -256]], dtype=I32)),
        r"allowed_tokens\[1\] allows no token",
    ),
    "pool row": ("CausalLinearDecay", decay, {}, dict(state_index=ints(0, 5)), r"state_index\[1\] is 5"),
    "count": (
        "NormalizedLinearAttention",
        normalized,
        {},
        dict(
            initial_state=randn(2, 2, 4, 5),
            initial_key_sum=randn(2, 2, 4),
            initial_value_sum=randn(2, 2, 5),
            initial_count=ints(3, -1),
        ),
        r"initial_count(\[1\] is| holds) -1",
    ),
}


def build(case):
    op_name, make, attrs, change, message = case
    torch.manual_seed(0)
    return spec.all_specs()[op_name], {k: v for k, v in {**make(), **change}.items() if v is not None}, attrs, message


def typed(op, attrs):
    kinds = {"bool": bool, "int": int, "float": float, "string": str}
    return {name: kinds[op.attr(name).type](value) for name, value in attrs.items()}


def run_torch(op, inputs, attrs):
    raw = getattr(torch.ops.leanfleet, op.snake_name).default
    return raw(*[inputs.get(t.name) for t in op.inputs], **typed(op, attrs))


def run_ort(op, inputs, attrs):
    shapes = {name: [None] * t.dim() for name, t in inputs.items()}
    onnx_types = {name: DTYPE_NAMES.get(t.dtype, "int64") for name, t in inputs.items()}
    model = ort_models.node_model(op, shapes, attrs, dtype=onnx_types[op.inputs[0].name], name="layers.3")
    for value in model.graph.input:
        elem = ort_models.ONNX_TYPES[onnx_types[value.name]]
        value.type.tensor_type.elem_type = elem
    session = make_session(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feed = {name: t.numpy() if t.dtype != torch.bfloat16 else t for name, t in inputs.items()}
    return session.run(None, feed)


def test_there_are_at_least_forty_cases():
    assert len(CASES) + len(CHECKED) >= 40


def expect_refusal(case, run, raised):
    op, inputs, attrs, message = build(case)
    before = {name: t.clone() for name, t in inputs.items()}
    with pytest.raises(raised) as caught:
        run(op, inputs, attrs)
    text = str(caught.value)
    assert op.name in text and re.search(message, text, re.S), text
    for name, t in inputs.items():
        assert torch.equal(t.view(torch.uint8) if t.numel() else t, before[name].view(torch.uint8) if t.numel() else t), name
    return text


@pytest.mark.parametrize("name", CASES)
def test_torch_refuses(name):
    expect_refusal(CASES[name], run_torch, (ValueError, native.UnsupportedError))


@pytest.mark.parametrize("name", CASES)
def test_onnxruntime_refuses(name):
    text = expect_refusal(CASES[name], run_ort, Exception)
    if "type" not in name and name != "query integer":  # types are refused by ORT itself, before our kernel exists
        assert "layers.3" in text, text


@pytest.mark.parametrize("name", CHECKED)
def test_values_are_refused_with_the_check_on(name, monkeypatch):
    monkeypatch.setenv("LEANFLEET_CHECK", "1")
    expect_refusal(CHECKED[name], run_torch, ValueError)
    assert "layers.3" in expect_refusal(CHECKED[name], run_ort, Exception)


@pytest.mark.parametrize("name", CHECKED)
def test_without_the_check_they_are_clamped(name, monkeypatch):
    monkeypatch.delenv("LEANFLEET_CHECK", raising=False)
    op, inputs, attrs, _ = build(CHECKED[name])
    outputs = run_torch(op, inputs, attrs)
    assert not torch.isnan(outputs[0]).any()


def test_mutating_form_leaves_the_cache_when_it_refuses():
    inputs = dense()
    kept = inputs["key_cache"].clone()
    inputs["new_value"] = randn(2, 2, 3, 5)
    with pytest.raises(ValueError, match="new_value"):
        torch_ops.lean_attention_(**inputs)
    assert torch.equal(inputs["key_cache"], kept)


def test_missing_library(tmp_path, monkeypatch):
    monkeypatch.setenv("LEANFLEET_LIBRARY_DIR", str(tmp_path))
    model = ort_models.node_model(
        spec.all_specs()["NormalizedLinearAttention"], {k: list(v.shape) for k, v in normalized().items()}
    )
    with pytest.raises(FileNotFoundError, match="libleanfleet_ort.so does not exist.*pip install"):
        make_session(model.SerializeToString(), providers=["CPUExecutionProvider"])


def test_without_onnxruntime_the_import_works_and_the_call_says_what_to_install():
    code = (
        "import sys; sys.modules['onnxruntime'] = None\n"
        "import leanfleet.ort_ops as o\n"
        "try:\n    o.make_session(b'')\nexcept ImportError as error:\n    print(error)\n"
    )
    printed = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout
    assert "onnxruntime" in printed and "[ort]" in printed, printed


def test_too_old_runtime_is_named(monkeypatch):
    import onnxruntime

    monkeypatch.setattr(onnxruntime, "__version__", "1.16.3")
    with pytest.raises(Exception, match=r"1\.16\.3.*1\.18|1\.18.*1\.16\.3"):
        make_session(b"", providers=["CPUExecutionProvider"])


def test_numpy_model_input_of_wrong_rank_is_refused_by_the_kernel_with_its_name():
    op, inputs, attrs, _ = build(CASES["query rank"])
    with pytest.raises(Exception, match="LeanAttention 'layers.3': query has shape") as caught:
        run_ort(op, {**inputs, "query": torch.from_numpy(np.zeros((2, 6, 8), np.float32))}, attrs)
    assert "rank 3" in str(caught.value)


def workspace_of(op, sizes, changed=None, attrs=None):
    """The workspace of a call of the required inputs, whose axes have these sizes (1 where none is told), and `changed`, an
    (input, axis, size) of its own. Shapes only: nothing is allocated."""
    entries = []
    for t in op.inputs:
        shape = [a.size(dict.fromkeys(op.symbols, 1) | sizes) for a in op.shape_of(t, set()).axes]
        if changed and changed[0] == t.name:
            shape[changed[1]] = changed[2]
        required = not t.optional or (changed and changed[0] == t.name)
        entries.append(
            (0, tuple(shape), t.dtype("float16", {"F": "float32", "I": "int32", "L": "int64"}, {})) if required else None
        )
    return native.Call(op.name, entries, [], attrs or {}, threads=2).workspace()


AXES = [
    (op.name, t.name, axis)
    for op in spec.all_specs().values()
    for t in op.inputs
    if not t.optional
    for axis in range(len(op.shape_of(t, set()).axes))
]


@pytest.mark.parametrize("op_name, name, axis", AXES)
@pytest.mark.parametrize("size", (2**31, 2**32 + 1, 2**63 - 1))
def test_an_axis_longer_than_int32_is_refused(op_name, name, axis, size):
    """A size that kernels hold as int32 must not become another one."""
    op = spec.all_specs()[op_name]
    with pytest.raises(
        ValueError,
        match=rf"^{op_name}: {name} has shape \[.*: axis {axis} of \[.*\] is {size}; "
        "an axis has at most 2147483647$",
    ):
        workspace_of(op, {}, (name, axis, size))


LONGEST = 2**31 - 1


@pytest.mark.parametrize(
    "op_name, sizes, message",
    (
        ("LeanAttention", dict(B=2**15, Hkv=2**15, H=2**15), r"the batch has B x Hkv = 1073741824 heads; .* fewer than 2\^30"),
        ("LeanAttention", dict(D=2**28), r"query has D = 268435456; the kernels take fewer than 2\^28"),
        ("LeanAttention", dict(Dv=LONGEST), r"value_cache has Dv = 2147483647; the kernels take fewer than 2\^28"),
        (
            "LeanAttention",
            dict(H=LONGEST, Nq=LONGEST),
            r"query has shape \[1,2147483647,2147483647,1\]; a tensor has at most 2\^47 elements",
        ),
        (
            "CausalLinearDecay",
            dict(R=LONGEST, Dv=LONGEST),
            r"a state has R x Dv = 4611686014132420609 elements; .* up to 2\^40",
        ),
        ("CausalLinearDecay", dict(B=LONGEST, H=LONGEST, N=LONGEST, R=LONGEST), r"query has shape .* at most 2\^47 elements"),
        ("CausalLinearDecayGrad", dict(R=2**21, Dv=2**20), r"a state has R x Dv = 2199023255552 elements"),
        (
            "NormalizedLinearAttention",
            dict(H=LONGEST, Dv=2**18),
            r"output has shape \[1,2147483647,1,262144\]; a tensor has at most 2\^47",
        ),
        (
            "NormalizedLinearAttention",
            dict(D=LONGEST, Dv=LONGEST),
            r"a state has D x Dv = 4611686014132420609 elements; .* up to 2\^40",
        ),
        ("NormalizedLinearAttentionGrad", dict(D=2**21, Dv=2**20), r"a state has D x Dv = 2199023255552 elements"),
    ),
)
def test_products_of_sizes_beyond_the_kernels_are_refused(op_name, sizes, message):
    with pytest.raises((ValueError, native.UnsupportedError), match=f"^{op_name}: {message}"):
        workspace_of(spec.all_specs()[op_name], sizes)


def test_the_longest_axes_are_taken():
    assert workspace_of(spec.all_specs()["CausalLinearDecay"], dict(N=LONGEST))[0] > 0
    assert workspace_of(spec.all_specs()["NormalizedLinearAttention"], dict(B=LONGEST))[0] > 0
