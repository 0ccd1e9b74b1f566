"""Exports a decoder for continuous batching: requests of unequal length share one graph call and a pool of pages.

The new tokens of all requests stand one after the other, so that projections and feed-forward layers see no padding; only
around the attention they are spread to a row a request. The graph's inputs and outputs, T new tokens of B requests, at most N
a request, M pages a request, in a pool of P pages of `block` tokens (all but `block` dynamic):

    input_ids                     int64 [T]         new tokens, request after request
    positions                     int64 [T]         each token's position in its request
    slots                         int64 [B,N]       index into T of each request's new tokens, at the front; then anything
    rows                          int64 [T]         b * N + i of token i of request b
    last                          int64 [B]         index into T of each request's last new token
    seq_lens, query_lens          int32 [B]         as in LeanAttention
    block_table                   int32 [B,M]       the pages of each request
    pages.L.key, pages.L.value    T [P,block,Hkv,D] the pool, one pair a layer
    logits                        float32 [B,vocabulary], of each request's last new token
    pages_out.L.key, ...          the pool with the new tokens; may be bound to the inputs' buffers
"""

import torch

from leanfleet.export.decoder import Cache, cache_shapes, run, write
from leanfleet.export.support import check_supported
from leanfleet.export.torch_ops import lean_attention


class Pages(Cache):
    """The pools of one traced call, by name ("0.key")."""

    def __init__(self, tensors, seq_lens, query_lens, block_table, slots, rows):
        super().__init__(tensors, seq_lens, query_lens)
        self.block_table, self.slots, self.rows = block_table, slots, rows

    def sizes(self, layer):
        key, value = (self.tensors[f"{layer}.{part}"].shape for part in ("key", "value"))
        return key[2], key[3], value[3]

    def attend(self, layer, query, key, value, **options):
        """query [1,H,T,D], key and value [1,Hkv,T,D]; returns [1,T,H,D]."""
        def spread(x):
            rows = x[0].transpose(0, 1).index_select(0, self.slots.flatten())
            return rows.unflatten(0, self.slots.shape)  # [B,N,heads,D]

        names = f"{layer}.key", f"{layer}.value"
        output, _, *updated = lean_attention(
            spread(query), *(self.tensors[name] for name in names), self.seq_lens, query_lens=self.query_lens,
            new_key=spread(key), new_value=spread(value), block_table=self.block_table, append=True, layout="bnhd", **options)
        for name, tensor in zip(names, updated, strict=True):
            self.update(name, tensor)
        return output.flatten(0, 1).index_select(0, self.rows).unsqueeze(0)


class PackedDecoder(torch.nn.Module):
    """A transformers causal LM with the inputs and outputs of this module's graph."""

    def __init__(self, model, names):
        super().__init__()
        self.model, self.names = model, list(names)

    def forward(self, input_ids, positions, slots, rows, last, seq_lens, query_lens, block_table, pages):
        """pages: tensors in the order of names; returns (logits, *pages)."""
        cache = Pages(zip(self.names, pages, strict=True), seq_lens, query_lens, block_table, slots, rows)

        logits = run(self.model, cache, lambda hidden: hidden[0].index_select(0, last), input_ids=input_ids.unsqueeze(0),
                     position_ids=positions.unsqueeze(0))
        return (logits, *(cache.tensors[n] for n in self.names))


def export_for_serving(model, folder, tokenizer=None, block=16, fuse=True, verify=True, rope="short", **options):
    """Writes model.onnx, leanfleet.json and, with a tokenizer, its files to `folder`; returns the ONNXProgram.

    model: a transformers causal LM as export_decoder takes it. block: tokens a page. fuse, verify, rope, options: as for
    export_decoder. leanfleet.ort_ops.serving runs it. Raises what export_decoder raises, and ValueError for layers of linear
    attention.
    """
    model = model.eval()
    if hasattr(model, "cache_shapes"):
        raise ValueError(f"{type(model).__name__}: its layers are linear attention; export_for_serving takes softmax decoders. "
                         "Use export_decoder")
    check_supported(model)
    caches = cache_shapes(model)
    if carried := [name for name in caches if name.endswith("recurrent_state")]:
        raise ValueError(f"{type(model).__name__}: layer {carried[0].partition('.')[0]} is linear attention; "
                         "export_for_serving takes softmax decoders. Use export_decoder")
    batch, tokens, table, pool = 2, 5, 4, 9
    lens = torch.tensor([3, 2], dtype=torch.int32)
    example = {"input_ids": torch.ones(tokens, dtype=torch.int64), "positions": torch.tensor([0, 1, 2, 0, 1]),
               "slots": torch.tensor([[0, 1, 2], [3, 4, 0]]), "rows": torch.tensor([0, 1, 2, 3, 4]), "last": lens.cumsum(0) - 1,
               "seq_lens": lens, "query_lens": lens.clone(),
               "block_table": torch.arange(batch * table, dtype=torch.int32).view(batch, table),
               "pages": [torch.zeros(pool, block, shape[1], shape[3], dtype=dtype) for dtype, shape in caches.values()]}
    t, b, n, m, p = (torch.export.Dim(name, min=1) for name in ("tokens", "batch", "longest", "table", "pool"))
    shapes = {"input_ids": {0: t}, "positions": {0: t}, "slots": {0: b, 1: n}, "rows": {0: t}, "last": {0: b},
              "seq_lens": {0: b}, "query_lens": {0: b}, "block_table": {0: b, 1: m}, "pages": [{0: p}] * len(caches)}
    names = {"input_names": [*list(example)[:-1], *(f"pages.{n}" for n in caches)],
             "output_names": ["logits", *(f"pages_out.{n}" for n in caches)]}
    return write(PackedDecoder(model, caches).eval(), tuple(example.values()), shapes, folder,
                 {"kind": "serving", "block": block}, tokenizer, fuse, verify, rope, names | options)
