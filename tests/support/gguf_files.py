"""Small GGUF files with random weights, as llama.cpp's converter writes them."""

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from transformers.convert_slow_tokenizer import bytes_to_unicode

from leanfleet import gguf_file

WIDTH, FEED, HEADS, KV_HEADS, LAYERS = 256, 512, 8, 2, 2
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # where a block's float16 stand


def random_blocks(kind, rows, columns, seed=0, scales=None):
    """Rows of bytes of a quantised type: random weights, and scales of 0.001 to 0.02 or `scales`."""
    random = np.random.default_rng(seed)
    number, (_, block, width) = next((k, v) for k, v in gguf_file.TYPES.items() if v[0] == kind)
    data = random.integers(0, 256, (rows, columns // block, width), dtype=np.uint8)
    for at in HALVES.get(kind, (0,)):
        size = 0.02 / (64 if "K" in kind else 1)
        halves = random.uniform(size / 20, size, data.shape[:2]) if scales is None else random.choice(scales, data.shape[:2])
        if at == 2:
            halves *= 1 if "K" in kind else -8  # so that weights lie on both sides of 0
        data[..., at : at + 2] = halves.clip(-65504, 65504).astype(np.float16)[..., None].view(np.uint8)
    return data.reshape(rows, -1), GGMLQuantizationType(number)


def write(path, kinds=("Q4_0",), embedding="Q8_0", tied=True, architecture="llama", vocabulary=True):
    """A decoder of two layers. kinds: of its matrices, in turn; F32 for ordinary ones."""
    writer = GGUFWriter(path, architecture)
    chars = [*bytes_to_unicode().values(), "<|end|>", "ab", "cd"] + [f"<|{i}|>" for i in range(29)]
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    if vocabulary:
        writer.add_vocab_size(len(chars))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(chars)
    writer.add_token_types([1] * 256 + [3] * 32)
    writer.add_token_merges(["a b", "c d"])
    writer.add_eos_token_id(256)
    random = np.random.default_rng(1)
    count = 0

    def matrix(name, rows, columns, kind=None):
        nonlocal count
        kind = kind or kinds[count % len(kinds)]
        count += 1
        if kind == "F32":
            writer.add_tensor(name, (0.05 * random.standard_normal((rows, columns))).astype(np.float32))
        else:
            data, number = random_blocks(kind, rows, columns, seed=count)
            writer.add_tensor(name, data, raw_dtype=number)

    def vector(name):
        writer.add_tensor(name, (1 + 0.1 * random.standard_normal(WIDTH)).astype(np.float32))

    matrix("token_embd.weight", len(chars), WIDTH, embedding)
    vector("output_norm.weight")
    if not tied:
        matrix("output.weight", len(chars), WIDTH)
    narrow = WIDTH // HEADS * KV_HEADS
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        vector(at + "attn_norm.weight")
        vector(at + "ffn_norm.weight")
        for name, rows, columns in (
            ("attn_q", WIDTH, WIDTH),
            ("attn_k", narrow, WIDTH),
            ("attn_v", narrow, WIDTH),
            ("attn_output", WIDTH, WIDTH),
            ("ffn_gate", FEED, WIDTH),
            ("ffn_up", FEED, WIDTH),
            ("ffn_down", WIDTH, FEED),
        ):
            matrix(f"{at}{name}.weight", rows, columns)
        if architecture == "qwen2":
            for name, rows in (("attn_q", WIDTH), ("attn_k", narrow), ("attn_v", narrow)):
                writer.add_tensor(f"{at}{name}.bias", (0.1 * random.standard_normal(rows)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def dequantized(kind, data):
    """What the package gguf makes of rows of bytes."""
    number = next(k for k, v in gguf_file.TYPES.items() if v[0] == kind)
    return gguf.quants.dequantize(data, GGMLQuantizationType(number))
