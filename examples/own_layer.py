"""Your own attention layer, with a key/value cache, as an ONNX file that runs with the kernels and without them.

    python examples/own_layer.py [FOLDER]

Needs the extras export and ort.
"""

from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import nn

from common import run_in_folder
from leanfleet.export import export, lean_attention
from leanfleet.ort_ops import make_session


# --8<-- [start:layer]
class CachedAttention(nn.Module):
    """Grouped-query attention with a cache: 8 query heads share 2 key/value heads."""

    def __init__(self, hidden=256, heads=8, kv_heads=2, head_dim=32):
        super().__init__()
        self.head_dim = head_dim
        self.q = nn.Linear(hidden, heads * head_dim, bias=False)
        self.k = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.v = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, hidden, bias=False)

    def forward(self, hidden, key_cache, value_cache, seq_lens):
        """hidden [B,N,E]; caches [B,Hkv,S,D]; seq_lens int32 [B]: cached tokens, new ones included."""
        projections = (self.q, self.k, self.v)
        q, k, v = (p(hidden).unflatten(-1, (-1, self.head_dim)) for p in projections)  # [B,N,heads,D]
        output, _, key_cache, value_cache = lean_attention(
            q, key_cache, value_cache, seq_lens, new_key=k, new_value=v, append=True, layout="bnhd"
        )
        return self.out(output.flatten(2)), key_cache, value_cache


# --8<-- [end:layer]


def main(folder):
    torch.manual_seed(0)
    layer = CachedAttention().eval()
    path = Path(folder) / "layer.onnx"

    # --8<-- [start:export]
    # Sizes that change from call to call get a name.
    batch, tokens, capacity = (torch.export.Dim(name, min=1) for name in ("batch", "tokens", "capacity"))
    cache = torch.zeros(2, 2, 64, 32)
    example = (torch.randn(2, 5, 256), cache, cache.clone(), torch.tensor([5, 5], dtype=torch.int32))
    export(
        layer,
        example,
        path,
        input_names=["hidden", "key_cache", "value_cache", "seq_lens"],
        output_names=["output", "new_key_cache", "new_value_cache"],
        dynamic_shapes=({0: batch, 1: tokens}, {0: batch, 2: capacity}, {0: batch, 2: capacity}, {0: batch}),
    )
    # --8<-- [end:export]

    # --8<-- [start:run]
    # A prompt of 5 tokens, then one decode step, for one request with a cache of 16 slots.
    prompt, step = torch.randn(1, 5, 256), torch.randn(1, 1, 256)

    def run(session):
        caches = [np.zeros((1, 2, 16, 32), np.float32)] * 2
        for hidden, length in ((prompt, 5), (step, 6)):
            feed = {
                "hidden": hidden.numpy(),
                "key_cache": caches[0],
                "value_cache": caches[1],
                "seq_lens": np.array([length], np.int32),
            }
            output, *caches = session.run(None, feed)
        return output

    kernels = run(make_session(path, providers=["CPUExecutionProvider"]))
    # The same file without leanfleet's library: ONNX Runtime runs the functions that the file carries.
    functions = run(onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]))
    # --8<-- [end:run]
    with torch.no_grad():  # and the layer in PyTorch, over all six tokens at once
        cache = torch.zeros(1, 2, 16, 32)
        whole, *_ = layer(torch.cat([prompt, step], 1), cache, cache.clone(), torch.tensor([6], dtype=torch.int32))

    for name, other in (("function bodies", functions), ("PyTorch", whole[:, -1:].numpy())):
        difference = np.abs(kernels - other).max()
        print(f"kernels in ONNX Runtime and {name}: largest difference {difference:.1e}")
        if not difference < 1e-5:
            raise SystemExit(f"the kernels and {name} disagree")


if __name__ == "__main__":
    run_in_folder(main)
