"""Model-local functions: every leanfleet node's meaning in standard ONNX operators.

An exported model carries one function for each kind of leanfleet node in it, so that it runs where the library is not
registered; where it is, the kernels win. What a node needs depends on which optional inputs it has and on its attributes,
so every such variant is an overload of its own, with the attributes' values built in.

The bodies compute in float32, keep every dimension dynamic, and need memory linear in the number of tokens: the linear
operators run a Scan over chunks. They use operators that ONNX Runtime's CPU provider has for float, opset 18 on.
"""

import zlib

import numpy as np
import onnx_ir as ir

from leanfleet import spec

CHUNK = 64  # tokens of one step of the Scan
UNIT_ROW_EPS = 1e-12  # normalize_qk divides by at least this, as the reference and the kernels do
FLOAT, INT64, INT32, BOOL = 1, 7, 6, 9
NEG_INF = float("-inf")


class Builder:
    """Emits nodes: b.MatMul(x, y), b.Cast(x, to=FLOAT). Numbers become constants; int64 for int, float32 for float."""

    def __init__(self, prefix="v"):
        self.nodes, self.prefix, self._constants, self._names = [], prefix, {}, 0

    def _add(self, node):
        """Values of a Scan's body see those outside: every Builder of a function needs a prefix of its own."""
        for output in node.outputs:
            output.name = f"{self.prefix}{self._names}"
            self._names += 1
        self.nodes.append(node)

    def constant(self, value):
        array = np.asarray(value)
        array = array.astype(np.float32 if array.dtype.kind == "f" else np.int64 if array.dtype.kind == "i" else array.dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            node = ir.Node("", "Constant", [], [ir.AttrTensor("value", ir.tensor(array))])
            self._add(node)
            self._constants[key] = node.outputs[0]
        return self._constants[key]

    def __getattr__(self, op_type):
        if op_type.startswith("_"):
            raise AttributeError(op_type)

        def emit(*inputs, outputs=1, **attributes):
            values = [v if v is None or isinstance(v, ir.Value) else self.constant(v) for v in inputs]
            attributes = [v if isinstance(v, ir.Attr) else ir.convenience.convert_attribute(k, v)
                          for k, v in attributes.items()]
            node = ir.Node("", op_type, values, attributes, num_outputs=outputs)
            self._add(node)
            return node.outputs[0] if outputs == 1 else node.outputs

        return emit

    # Shorthands. Axes are those of the shape in the comment at the call.

    def float(self, x):
        return self.Cast(x, to=FLOAT)

    def int(self, x):
        return self.Cast(x, to=INT64)

    def dim(self, x, axis):
        """The size of an axis as an int64 [1]."""
        return self.Shape(x, start=axis, end=axis + 1)

    def join(self, *sizes):
        """A shape from int64 [1] values and numbers."""
        return self.Concat(*[s if isinstance(s, ir.Value) else [s] for s in sizes], axis=0)

    def reshape(self, x, *sizes):
        return self.Reshape(x, self.join(*sizes))

    def expand(self, x, *sizes):
        return self.Expand(x, self.join(*sizes))

    def unsqueeze(self, x, *axes):
        return self.Unsqueeze(x, list(axes))

    def squeeze(self, x, *axes):
        return self.Squeeze(x, list(axes))

    def cut(self, x, begin, end, axis):
        """x[begin:end] along an axis; numbers or int64 [1] values."""
        return self.Slice(x, *[v if isinstance(v, ir.Value) else [v] for v in (begin, end)], [axis])

    def range(self, size):
        """0 .. size-1 as int64 [size]; size int64 [1]."""
        return self.Range(0, self.squeeze(size, 0), 1)

    def sum(self, x, *axes, keep=False):
        return self.ReduceSum(x, list(axes), keepdims=int(keep))

    def transposed(self, x, axes):
        return self.Transpose(x, perm=list(axes))

    def clip(self, x, low, high):
        """x within [low, high], elementwise; low wins."""
        return self.Max(self.Min(x, high), low)

    def all(self, *conditions):
        result = conditions[0]
        for condition in conditions[1:]:
            result = self.And(result, condition)
        return result


class Body:
    """One function under construction: inputs by name (None when absent), attribute values, outputs in order."""

    def __init__(self, op, present, attrs):
        self.b = Builder()
        self.op, self.attrs = op, attrs
        self.values = {t.name: ir.Value(name=t.name) if t.name in present else None for t in op.inputs}
        self.bnhd = attrs.get("layout") == "bnhd"

    def __getitem__(self, name):
        return self.values[name]

    def tensor(self, name, rank=4):
        """A T or F input that follows `layout`, as float32 [B,heads,tokens(,D)]."""
        x = self.b.float(self[name])
        return self.b.transposed(x, (0, 2, 1, 3)[:rank]) if self.bnhd else x

    def result(self, x, rank=4, like="query"):
        """A [B,heads,tokens(,D)] result in the node's layout, and in the type of input `like` (None: float32)."""
        x = self.b.transposed(x, (0, 2, 1, 3)[:rank]) if self.bnhd else x
        return self.b.CastLike(x, self[like]) if like else x

    def function(self, outputs):
        """The function's inputs and outputs. `outputs` are those that the attributes ask for, in the schema's order.

        Outputs are positional: one that is not asked for but stands before one that is becomes an empty tensor.
        """
        active = dict(zip((t.name for t in self.op.active_outputs(self.attrs)), outputs, strict=True))
        listed = self.op.outputs[:1 + max(i for i, t in enumerate(self.op.outputs) if t.name in active)]
        empty = np.zeros(0, np.float32)
        # Identity: an output must not be an input or a shared constant.
        outputs = [self.b.Identity(active.get(t.name, empty)) for t in listed]
        for t, value in zip(listed, outputs, strict=True):
            value.name = t.name
        inputs = [self.values[t.name] or ir.Value(name=t.name) for t in self.op.inputs]
        while self.values[self.op.inputs[len(inputs) - 1].name] is None:
            inputs.pop()
        return inputs, outputs


def attention(body):
    """LeanAttention: the cache of every request as a dense [B,Hkv,S,D] view, then masked softmax."""
    b, attrs = body.b, body.attrs
    q = body.tensor("query")  # [B,H,Nq,D]
    batch, heads, nq, width = (b.dim(q, i) for i in range(4))
    keys, values, capacity, slot_ok, place = _cache_view(body, batch)
    kv_heads, slots = b.dim(keys, 1), b.dim(keys, 2)
    seq = capacity if body["seq_lens"] is None else b.clip(b.int(body["seq_lens"]), 0, capacity)  # [B]
    new = b.expand(nq, batch) if body["query_lens"] is None else b.int(body["query_lens"])
    new = b.clip(new, 0, b.Min(nq, seq))  # [B] rows that are not padding
    first = b.Sub(seq, new)  # [B] position of row 0
    slot = b.range(slots)
    caches = []
    if attrs["append"]:
        offset = b.Sub(b.unsqueeze(slot, 0), b.unsqueeze(first, 1))  # [B,S] which new row a slot takes
        fresh = b.all(b.GreaterOrEqual(offset, 0), b.Less(offset, b.unsqueeze(new, 1)))
        row = b.unsqueeze(b.clip(offset, 0, b.Sub(nq, 1)), 1, 3)  # [B,1,S,1]
        fresh = b.unsqueeze(fresh, 1, 3)
        rows = [body.tensor("new_key"), body.tensor("new_value")]  # [B,Hkv,Nq,D]
        views = []
        for view, source in zip((keys, values), rows):
            index = b.expand(row, batch, kv_heads, slots, b.dim(source, 3))
            views.append(b.Where(fresh, b.GatherElements(source, index, axis=2), view))
        keys, values = views
        caches = place(rows, first, new)
    groups = b.Div(heads, kv_heads)
    scale = float(attrs["scale"]) if attrs["scale"] else b.Reciprocal(b.Sqrt(b.float(width)))
    valid = b.Less(b.unsqueeze(slot, 0), b.unsqueeze(seq, 1))  # [B,S]
    if slot_ok is not None:
        valid = b.And(valid, slot_ok)
    # Slots that do not count may hold NaN: select, then multiply.
    keys, values = (b.Where(b.unsqueeze(valid, 1, 3), x, 0.0) for x in (keys, values))
    packed = b.reshape(b.Mul(q, scale), batch, kv_heads, b.Mul(groups, nq), width)
    logits = b.reshape(b.MatMul(packed, b.transposed(keys, (0, 1, 3, 2))), batch, kv_heads, groups, nq, slots)
    if attrs["softcap"]:
        logits = b.Mul(b.Tanh(b.Div(logits, float(attrs["softcap"]))), float(attrs["softcap"]))
    step = b.range(nq)
    position = b.unsqueeze(b.Add(b.unsqueeze(first, 1), b.unsqueeze(step, 0)), 2)  # [B,Nq,1]
    at = b.unsqueeze(slot, 0, 1)  # [1,1,S]
    real = b.Less(b.unsqueeze(step, 0), b.unsqueeze(new, 1))  # [B,Nq]
    mask = b.And(b.unsqueeze(valid, 1), b.unsqueeze(real, 2))  # [B,Nq,S]
    if attrs["causal"]:
        mask = b.And(mask, b.LessOrEqual(at, position))
    if attrs["window"] >= 0:
        mask = b.And(mask, b.Greater(at, b.Sub(position, int(attrs["window"]))))
    logits = b.Where(b.unsqueeze(mask, 1, 2), logits, NEG_INF)
    largest = b.ReduceMax(logits, [4], keepdims=1)  # [B,Hkv,G,Nq,1]
    sink = None
    if body["sinks"] is not None:
        sink = b.reshape(body["sinks"], 1, kv_heads, groups, 1, 1)
        largest = b.Max(largest, sink)
    largest = b.Where(b.Equal(largest, NEG_INF), 0.0, largest)
    weights = b.Exp(b.Sub(logits, largest))
    total = b.sum(weights, 4, keep=True)
    if sink is not None:
        total = b.Add(total, b.Exp(b.Sub(sink, largest)))
    attended = b.MatMul(b.reshape(weights, batch, kv_heads, b.Mul(groups, nq), slots), values)
    attended = b.reshape(attended, batch, kv_heads, groups, nq, b.dim(values, 3))
    output = b.Div(attended, b.Where(b.Equal(total, 0.0), 1.0, total))
    lse = b.squeeze(b.Add(b.Log(total), largest), 4)  # [B,Hkv,G,Nq]
    lse = b.Where(b.unsqueeze(real, 1, 2), lse, NEG_INF)
    output = b.reshape(output, batch, heads, nq, b.dim(values, 3))
    return [body.result(output), body.result(b.reshape(lse, batch, heads, nq), 3, None), *caches]


def _cache_view(body, batch):
    """(keys, values [B,Hkv,S,D] float32, capacity [B], slot_ok [B,S] or None, place).

    place(rows, first, new): the two caches with rows [B,Hkv,Nq,D] appended at positions first .. first + new - 1.
    """
    b = body.b
    caches = [b.float(body["key_cache"]), b.float(body["value_cache"])]

    def finish(results):
        return [b.CastLike(x, body["query"]) for x in results]

    if body["block_table"] is not None:
        pages, block, kv_heads = (b.dim(caches[0], i) for i in range(3))
        table = b.int(body["block_table"])  # [B,M]
        inside = b.all(b.GreaterOrEqual(table, 0), b.Less(table, pages))
        table = b.Where(inside, table, 0)
        slots = b.Mul(b.dim(table, 1), block)
        views = []
        for cache in caches:
            gathered = b.transposed(b.Gather(cache, table, axis=0), (0, 3, 1, 2, 4))  # [B,Hkv,M,block,D]
            views.append(b.reshape(gathered, batch, kv_heads, slots, b.dim(cache, 3)))
        slot_page = b.Div(b.range(slots), block)  # [S]
        slot_ok = b.Gather(inside, slot_page, axis=1)

        def place(rows, first, new):
            nq = b.dim(rows[0], 2)
            step = b.range(nq)
            position = b.Add(b.unsqueeze(first, 1), b.unsqueeze(step, 0))  # [B,Nq]
            real = b.Less(b.unsqueeze(step, 0), b.unsqueeze(new, 1))
            page = b.clip(b.Div(position, block), 0, b.Sub(b.dim(table, 1), 1))
            real = b.And(real, b.GatherElements(inside, page, axis=1))
            trash = b.Mul(pages, block)  # one row past the pool takes what is not written
            row = b.Add(b.Mul(b.GatherElements(table, page, axis=1), block), b.Mod(position, block))
            row = b.reshape(b.Where(real, row, trash), -1, 1)
            results = []
            for cache, source in zip(caches, rows):
                width = b.dim(cache, 3)
                flat = b.reshape(cache, trash, kv_heads, width)
                flat = b.Concat(flat, b.expand([[[0.0]]], 1, kv_heads, width), axis=0)
                updates = b.reshape(b.transposed(source, (0, 2, 1, 3)), -1, kv_heads, width)
                flat = b.cut(b.ScatterND(flat, row, updates), 0, trash, 0)
                results.append(b.reshape(flat, pages, block, kv_heads, width))
            return finish(results)

        return *views, b.expand(slots, batch), slot_ok, place
    if body["cu_seqlens"] is not None:
        total = b.dim(caches[0], 1)
        begin, capacity = _segments(b, body["cu_seqlens"], total)
        slots = b.Max(b.ReduceMax(capacity, [0], keepdims=1), [1])
        index = b.Min(b.Add(b.unsqueeze(begin, 1), b.unsqueeze(b.range(slots), 0)), b.Sub(total, 1))  # [B,S]
        views = [b.transposed(b.Gather(cache, index, axis=1), (1, 0, 2, 3)) for cache in caches]

        def place(rows, first, new):
            nq = b.dim(rows[0], 2)
            flat = b.unsqueeze(b.range(total), 0)  # [1,total]
            offset = b.Sub(flat, b.unsqueeze(b.Add(begin, first), 1))  # [B,total]
            taken = b.all(b.GreaterOrEqual(offset, 0), b.Less(offset, b.unsqueeze(new, 1)))
            owner = b.ArgMax(b.Cast(taken, to=INT32), axis=0, keepdims=1)  # [1,total]
            fresh = b.GatherElements(taken, owner, axis=0)
            row = b.Add(b.Mul(owner, nq), b.clip(b.GatherElements(offset, owner, axis=0), 0, b.Sub(nq, 1)))
            results = []
            for cache, source in zip(caches, rows):
                listed = b.reshape(b.transposed(source, (1, 0, 2, 3)), b.dim(cache, 0), -1, b.dim(cache, 2))
                results.append(b.Where(b.unsqueeze(fresh, 2), b.Gather(listed, b.squeeze(row, 0), axis=1), cache))
            return finish(results)

        return *views, capacity, None, place

    slots = b.dim(caches[0], 2)

    def place(rows, first, new):
        nq = b.dim(rows[0], 2)
        offset = b.Sub(b.unsqueeze(b.range(slots), 0), b.unsqueeze(first, 1))
        fresh = b.unsqueeze(b.all(b.GreaterOrEqual(offset, 0), b.Less(offset, b.unsqueeze(new, 1))), 1, 3)
        row = b.unsqueeze(b.clip(offset, 0, b.Sub(nq, 1)), 1, 3)
        return finish([b.Where(fresh, b.GatherElements(
            source, b.expand(row, batch, b.dim(cache, 1), slots, b.dim(cache, 3)), axis=2), cache)
            for cache, source in zip(caches, rows)])

    return *caches, b.expand(slots, batch), None, place


def _segments(b, cu_seqlens, total):
    """(begin, length) of each request, int64 [Q], from offsets held within [0, total] and non-decreasing."""
    offsets = b.clip(b.int(cu_seqlens), 0, total)
    begin = b.cut(offsets, 0, -1, 0)
    return begin, b.Max(b.Sub(b.cut(offsets, 1, np.iinfo(np.int64).max, 0), begin), 0)


def linear_product(b, rows, keys, values, decay, state, reverse=False):
    """(Σ over tokens j <= i of M_ij (rows_i . keys_j) values_j + the state's part, and the state after the last token).

    rows [B,Hkv,Gq,N,X], keys [B,Hkv,Gk,N,X], values [B,Hkv,Gk,N,Y]; the sum also runs over Gk. decay: log decay
    [B,Hkv,N] or None; M_ij = exp(Σ_{t=j+1..i} decay_t). state [B,Hkv,X,Y]: decayed first, then tokens are added.
    reverse: tokens j >= i with M_ji instead; the state then enters after the last token, undecayed, and comes out before
    the first one, decayed by it.
    Returns [B,Hkv,Gq,N,Y] and [B,Hkv,X,Y]. A Scan over chunks of CHUNK tokens: memory linear in N.
    """
    batch, heads, gq, n, x = (b.dim(rows, i) for i in range(5))
    gk, y = b.dim(keys, 2), b.dim(values, 4)
    chunks = b.Div(b.Add(n, CHUNK - 1), CHUNK)
    missing = b.Sub(b.Mul(chunks, CHUNK), n)  # tokens of padding: zero keys and values, no decay

    def chunked(t, group):  # [B,Hkv,G,N,W] -> [chunks,B,Hkv,G*CHUNK,W]
        width = b.dim(t, 4)
        t = b.Pad(t, b.join(0, 0, 0, 0, 0, 0, 0, 0, missing, 0))
        t = b.transposed(b.reshape(t, batch, heads, group, chunks, CHUNK, width), (3, 0, 1, 2, 4, 5))
        return b.reshape(t, chunks, batch, heads, b.Mul(group, CHUNK), width)

    sequences = [chunked(rows, gq), chunked(keys, gk), chunked(values, gk)]
    if decay is not None:
        padded = b.Pad(decay, b.join(0, 0, 0, 0, 0, missing))
        sequences.append(b.transposed(b.reshape(padded, batch, heads, chunks, CHUNK), (2, 0, 1, 3)))

    inner = Builder(f"scan{len(b.nodes)}_")  # a count of nodes so far: unique in the function
    state_in = ir.Value(name=f"{inner.prefix}state")
    parts = [ir.Value(name=f"{inner.prefix}part_{i}") for i in range(len(sequences))]
    r, k, v = parts[:3]
    causal = np.tril(np.ones((CHUNK, CHUNK), dtype=bool))
    spread = np.tril(np.ones((CHUNK, CHUNK), dtype=bool), -1)  # token t of row i counts for column j where t > j
    scores = inner.MatMul(r, inner.transposed(k, (0, 1, 3, 2)))  # [B,Hkv,Gq*C,Gk*C]
    scores = inner.Reshape(scores, inner.Concat(batch, heads, gq, [CHUNK], gk, [CHUNK], axis=0))
    if decay is None:
        weighted = inner.Where(inner.constant((causal.T if reverse else causal)[:, None, :]), scores, 0.0)
        carried, kept = r, k
        kept_state = state_in
    else:
        g = parts[3]  # [B,Hkv,C]
        steps = inner.Where(inner.constant(spread), inner.unsqueeze(g, 3), 0.0)  # [B,Hkv,i,j]
        between = inner.CumSum(steps, inner.constant(np.int64(2)))  # Σ_{t=j+1..i}: never positive, -inf is fine
        mask = inner.Where(inner.constant(causal), inner.Exp(between), 0.0)
        if reverse:
            mask = inner.transposed(mask, (0, 1, 3, 2))
        weighted = inner.Mul(scores, inner.unsqueeze(mask, 2, 4))
        from_start = inner.Exp(inner.CumSum(g, inner.constant(np.int64(2))))  # [B,Hkv,C]: tokens 0 .. i
        to_end = inner.Exp(inner.squeeze(inner.cut(between, CHUNK - 1, CHUNK, 2), 2))  # tokens j+1 .. C-1
        row_factor, key_factor = (to_end, from_start) if reverse else (from_start, to_end)

        def scaled(t, factor, group):
            t = inner.Reshape(t, inner.Concat(batch, heads, group, [CHUNK], [-1], axis=0))
            t = inner.Mul(t, inner.unsqueeze(factor, 2, 4))
            return inner.Reshape(t, inner.Concat(batch, heads, [-1], x, axis=0))

        carried, kept = scaled(r, row_factor, gq), scaled(k, key_factor, gk)
        whole = inner.cut(from_start, CHUNK - 1, CHUNK, 2)  # [B,Hkv,1]
        kept_state = inner.Mul(inner.unsqueeze(whole, 3), state_in)
    weighted = inner.Reshape(weighted, inner.Concat(batch, heads, inner.Mul(gq, CHUNK), inner.Mul(gk, CHUNK), axis=0))
    out = inner.Add(inner.MatMul(weighted, v), inner.MatMul(carried, state_in))
    state_out = inner.Add(kept_state, inner.MatMul(inner.transposed(kept, (0, 1, 3, 2)), v))
    graph = ir.Graph([state_in, *parts], [state_out, out], nodes=inner.nodes, name="chunk")
    directions = {}
    if reverse:
        directions = {"scan_input_directions": [1] * len(sequences), "scan_output_directions": [1]}
    final, result = b.Scan(state, *sequences, outputs=2, body=ir.AttrGraph("body", graph), num_scan_inputs=len(sequences),
                           **directions)
    result = b.reshape(result, chunks, batch, heads, gq, CHUNK, y)
    result = b.reshape(b.transposed(result, (1, 2, 3, 0, 4, 5)), batch, heads, gq, b.Mul(chunks, CHUNK), y)
    return b.cut(result, 0, n, 3), final


def _grouped(b, x, kv_heads):
    """[B,H,N,W] -> [B,Hkv,H/Hkv,N,W]."""
    return b.reshape(x, b.dim(x, 0), kv_heads, b.Div(b.dim(x, 1), kv_heads), b.dim(x, 2), b.dim(x, 3))


def _ungrouped(b, x):
    """[B,Hkv,G,N,W] -> [B,H,N,W]."""
    return b.reshape(x, b.dim(x, 0), b.Mul(b.dim(x, 1), b.dim(x, 2)), b.dim(x, 3), b.dim(x, 4))


class _Packing:
    """Packed requests as a padded batch: tokens of request q at [q, :, 0 .. length), zeros behind."""

    def __init__(self, b, cu_seqlens, tokens):
        self.b = b
        self.begin, self.length = _segments(b, cu_seqlens, tokens)
        self.longest = b.Max(b.ReduceMax(self.length, [0], keepdims=1), [1])
        step = b.unsqueeze(b.range(self.longest), 0)
        self.index = b.Min(b.Add(b.unsqueeze(self.begin, 1), step), b.Sub(tokens, 1))  # [Q,L]
        self.real = b.Less(step, b.unsqueeze(self.length, 1))
        self.tokens = tokens

    def unpack(self, x, rank=4):
        """[1,heads,N(,W)] -> [Q,heads,L(,W)]."""
        b = self.b
        x = b.transposed(b.Gather(b.squeeze(x, 0), self.index, axis=1), (1, 0, 2, 3)[:rank])
        return b.Where(b.unsqueeze(self.real, *((1, 3) if rank == 4 else (1,))), x, 0.0)

    def pack(self, x, rank=4):
        """[Q,heads,L(,W)] -> [1,heads,N(,W)]; tokens of no request are 0."""
        b = self.b
        flat = b.unsqueeze(b.range(self.tokens), 0)  # [1,N]
        offset = b.Sub(flat, b.unsqueeze(self.begin, 1))  # [Q,N]
        inside = b.all(b.GreaterOrEqual(offset, 0), b.Less(offset, b.unsqueeze(self.length, 1)))
        owner = b.ArgMax(b.Cast(inside, to=INT32), axis=0, keepdims=1)
        row = b.Add(b.Mul(owner, self.longest), b.clip(b.GatherElements(offset, owner, axis=0), 0, b.Sub(self.longest, 1)))
        heads = b.dim(x, 1)
        order = (1, 0, 2, 3)[:rank]
        listed = b.reshape(b.transposed(x, order), heads, -1, *([b.dim(x, 3)] if rank == 4 else []))
        picked = b.Gather(listed, b.squeeze(row, 0), axis=1)  # [heads,N(,W)]
        real = b.GatherElements(inside, owner, axis=0)  # [1,N]
        return b.unsqueeze(b.Where(b.unsqueeze(real, 2) if rank == 4 else real, picked, 0.0), 0)


def _decay_inputs(body, names):
    """The [B,heads,N,W] inputs `names`, the log decay [B,Hkv,N] or None, and the packing or None."""
    b = body.b
    tensors = [body.tensor(name) for name in names]
    tokens = b.dim(tensors[0], 2)
    packing = None if body["cu_seqlens"] is None else _Packing(b, body["cu_seqlens"], tokens)
    kv_heads = b.dim(tensors[1], 1)
    decay = body["log_decay"]
    if decay is not None:
        if body.attrs["per_token"]:
            decay = body.tensor("log_decay", 3)
        else:
            decay = b.expand(b.reshape(decay, 1, -1, 1), b.dim(tensors[0], 0), kv_heads, tokens)
    if packing is not None:
        tensors = [packing.unpack(t) for t in tensors]
        decay = None if decay is None else packing.unpack(decay, 3)
    return tensors, decay, packing


def _pool_rows(b, pool, index):
    """(rows of the pool by request, zeros where the index is outside; index held inside; which are inside)."""
    index, size = b.int(index), b.dim(pool, 0)
    inside = b.all(b.GreaterOrEqual(index, 0), b.Less(index, size))
    return b.Gather(pool, b.Where(inside, index, 0), axis=0), index, inside


def _with_ones(b, x):
    """[...,N,W] -> [...,N,W+1] with a last column of ones: sums along with the product."""
    one = b.Add(b.Mul(b.cut(x, 0, 1, 4), 0.0), 1.0)
    return b.Concat(x, one, axis=4)


def _last_column(b, x, axis):
    last = np.iinfo(np.int64).max
    return b.cut(x, 0, -1, axis), b.cut(x, -1, last, axis)


def _held(b, x, eps):
    """x with its magnitude held at eps or more, its sign kept; and where it was held."""
    small = b.Less(b.Abs(x), float(eps))
    return b.Where(small, b.Where(b.Less(x, 0.0), -float(eps), float(eps)), x), small


def decay(body):
    """CausalLinearDecay. The normaliser rides along as one more column of the value (of ones) and of the state."""
    b, attrs = body.b, body.attrs
    (q, k, v), g, packing = _decay_inputs(body, ("query", "key", "value"))
    batch, kv_heads, width, v_width = b.dim(q, 0), b.dim(k, 1), b.dim(k, 3), b.dim(v, 3)
    state, norm = body["initial_state"], body["initial_norm"]
    if body["state_index"] is not None:
        state_pool, norm_pool = state, norm
        state, index, inside = _pool_rows(b, state_pool, body["state_index"])
        state = b.Where(b.unsqueeze(inside, 1, 2, 3), state, 0.0)
        if norm is not None:
            norm = b.Where(b.unsqueeze(inside, 1, 2), _pool_rows(b, norm_pool, body["state_index"])[0], 0.0)
    if state is None:
        state = b.expand([[[[0.0]]]], batch, kv_heads, width, v_width)
    q = _grouped(b, b.Mul(q, float(attrs["scale"])), kv_heads)
    k, v = b.unsqueeze(k, 2), b.unsqueeze(v, 2)
    if attrs["normalize"]:
        norm = b.expand([[[0.0]]], batch, kv_heads, width) if norm is None else norm
        v, state = _with_ones(b, v), b.Concat(state, b.unsqueeze(norm, 3), axis=3)
    out, final = linear_product(b, q, k, v, g, state)
    finals = [final]
    if attrs["normalize"]:
        out, total = _last_column(b, out, 4)
        out = b.Div(out, _held(b, total, attrs["eps"])[0])
        final, final_norm = _last_column(b, final, 3)
        finals = [final, b.squeeze(final_norm, 3)]
    out = _ungrouped(b, out)
    out = body.result(out if packing is None else packing.pack(out))
    if not attrs["return_state"]:
        return [out]
    if body["state_index"] is not None:
        finals = [_scatter_rows(b, pool, index, inside, rows)
                  for pool, rows in zip((state_pool, norm_pool), finals)]
    return [out, *finals]


def _scatter_rows(b, pool, index, inside, rows):
    """The pool with rows written at index, where it is inside."""
    size = b.dim(pool, 0)
    spare = b.Concat(pool, b.Mul(b.cut(rows, 0, 1, 0), 0.0), axis=0)  # one row past the pool takes what is not written
    return b.cut(b.ScatterND(spare, b.unsqueeze(b.Where(inside, index, size), 1), rows), 0, size, 0)


def decay_grad(body):
    """CausalLinearDecayGrad: the product three times, with dO, V and Q, K in turn as rows, keys and values."""
    b, attrs = body.b, body.attrs
    (q, k, v, do), g, packing = _decay_inputs(body, ("query", "key", "value", "grad_output"))
    batch, kv_heads, width, v_width = b.dim(q, 0), b.dim(k, 1), b.dim(k, 3), b.dim(v, 3)
    zeros = b.expand([[[[0.0]]]], batch, kv_heads, width, v_width)
    start = zeros if body["initial_state"] is None else body["initial_state"]
    end = zeros if body["grad_final_state"] is None else body["grad_final_state"]
    swap = (0, 1, 3, 2)
    q = _grouped(b, b.Mul(q, float(attrs["scale"])), kv_heads)
    do = _grouped(b, do, kv_heads)
    k, v = b.unsqueeze(k, 2), b.unsqueeze(v, 2)
    dq, final = linear_product(b, do, v, k, g, b.transposed(start, swap))  # final = S_Nᵀ
    dk, _ = linear_product(b, v, do, q, g, b.transposed(end, swap), reverse=True)
    dv, d_start = linear_product(b, k, q, do, g, end, reverse=True)
    results = [_ungrouped(b, b.Mul(dq, float(attrs["scale"]))), b.squeeze(dk, 2), b.squeeze(dv, 2)]
    results = [body.result(x if packing is None else packing.pack(x)) for x in results]
    if attrs["grad_decay"]:
        # d log_decay_t = Σ_{u >= t} (q_u . dq_u - k_u . dk_u) + <dS_N, S_N>; q carries the scale already
        terms = b.Sub(b.sum(b.sum(b.Mul(q, dq), 4), 2), b.sum(b.squeeze(b.Mul(k, dk), 2), 3))  # [B,Hkv,N]
        edge = b.sum(b.Mul(b.transposed(end, swap), final), 2, 3)  # [B,Hkv]
        d_decay = b.Add(b.CumSum(terms, b.constant(np.int64(2)), reverse=1), b.unsqueeze(edge, 2))
        d_decay = b.Where(b.Equal(g, NEG_INF), 0.0, d_decay)
        if packing is not None:
            d_decay = packing.pack(d_decay, 3)
        results.append(body.result(d_decay, 3, None) if attrs["per_token"] else b.sum(d_decay, 0, 2))
    if attrs["grad_state"]:
        results.append(d_start)
    return results


def _unit_rows(b, x):
    """(rows divided by max(norm, UNIT_ROW_EPS), that divisor)."""
    norm = b.Max(b.Sqrt(b.sum(b.Mul(x, x), -1, keep=True)), UNIT_ROW_EPS)
    return b.Div(x, norm), norm


def _coefficients(b, body):
    """a and b as float32 [1]."""
    if body["coefficients"] is None:
        return b.constant([1.0]), b.constant([1.0])
    return b.cut(body["coefficients"], 0, 1, 0), b.cut(body["coefficients"], 1, 2, 0)


def _normalized_inputs(body):
    """query [B,Hkv,G,N,D], key and value [B,Hkv,1,N,*], and the divisors of query's and key's rows or None."""
    b = body.b
    q, k, v = (body.tensor(name) for name in ("query", "key", "value"))
    q_norm = k_norm = None
    kv_heads = b.dim(k, 1)
    q, k, v = _grouped(b, q, kv_heads), b.unsqueeze(k, 2), b.unsqueeze(v, 2)
    if body.attrs["normalize_qk"]:
        (q, q_norm), (k, k_norm) = _unit_rows(b, q), _unit_rows(b, k)
    return q, k, v, q_norm, k_norm


def normalized(body):
    """NormalizedLinearAttention: Σ (q.k) [v, 1] by the product (or at once, when not causal), plus the part of a."""
    b, attrs = body.b, body.attrs
    q, k, v, _, _ = _normalized_inputs(body)
    batch, kv_heads, tokens, width, v_width = b.dim(q, 0), b.dim(q, 1), b.dim(q, 3), b.dim(q, 4), b.dim(v, 4)
    alpha, beta = _coefficients(b, body)
    if body["initial_state"] is not None:
        state = b.Concat(body["initial_state"], b.unsqueeze(body["initial_key_sum"], 3), axis=3)
        value_sum, count = body["initial_value_sum"], b.int(body["initial_count"])
    else:
        state = b.expand([[[[0.0]]]], batch, kv_heads, width, b.Add(v_width, 1))
        value_sum, count = b.expand([[[0.0]]], batch, kv_heads, v_width), b.expand([0], batch)
    values = _with_ones(b, v)
    if attrs["causal"]:
        product, final = linear_product(b, q, k, values, None, state)
        sums = b.Add(b.CumSum(v, b.constant(np.int64(3))), b.unsqueeze(value_sum, 2, 3))  # [B,Hkv,1,N,Dv]
        seen = b.Add(b.unsqueeze(count, 1), b.unsqueeze(b.Add(b.range(tokens), 1), 0))  # [B,N]
        seen = b.unsqueeze(b.float(seen), 1, 2, 4)
    else:
        product = b.MatMul(q, b.MatMul(b.transposed(k, (0, 1, 2, 4, 3)), values))
        sums, seen = b.sum(v, 3, keep=True), b.float(tokens)
    f, g = _last_column(b, product, 4)
    f, g = b.Add(b.Mul(beta, f), b.Mul(alpha, sums)), b.Add(b.Mul(beta, g), b.Mul(alpha, seen))
    output = _ungrouped(b, b.Div(f, _held(b, g, attrs["eps"])[0]))
    results = [body.result(output), body.result(b.squeeze(_ungrouped(b, g), 3), 3, None)]
    if attrs["return_state"]:
        final, key_sum = _last_column(b, final, 3)
        total = b.Add(value_sum, b.sum(v, 2, 3))
        results += [final, b.squeeze(key_sum, 3), total, b.Cast(b.Add(count, tokens), to=INT32)]
    return results


def normalized_grad(body):
    """NormalizedLinearAttentionGrad: with w = dO / g and r = o.w, the product of [w, -r] with [v, 1] and back."""
    b, attrs = body.b, body.attrs
    q, k, v, q_norm, k_norm = _normalized_inputs(body)
    kv_heads = b.dim(q, 1)
    alpha, beta = _coefficients(b, body)
    o, do = _grouped(b, body.tensor("output"), kv_heads), _grouped(b, body.tensor("grad_output"), kv_heads)
    g = _grouped(b, b.unsqueeze(body.tensor("normalizer", 3), 3), kv_heads)
    held, small = _held(b, g, attrs["eps"])
    w = b.Div(do, held)
    r = b.Where(small, 0.0, b.sum(b.Mul(o, w), 4, keep=True))
    wr, values = b.Concat(w, b.Neg(r), axis=4), _with_ones(b, v)

    def product(rows, keys, vals, reverse):
        if not attrs["causal"]:
            summed = b.sum(b.MatMul(b.transposed(keys, (0, 1, 2, 4, 3)), vals), 2, keep=True)
            return b.MatMul(rows, summed)
        state = b.expand([[[[0.0]]]], b.dim(rows, 0), kv_heads, b.dim(rows, 4), b.dim(vals, 4))
        return linear_product(b, rows, keys, vals, None, state, reverse)[0]

    axis = b.constant(np.int64(3))
    dq = product(wr, values, k, False)  # before the factor b
    dk = b.Mul(beta, product(values, wr, q, True))
    w_sum = b.sum(w, 2, keep=True)  # over the query heads of a group
    if attrs["causal"]:
        w_sum, v_sum = b.CumSum(w_sum, axis, reverse=1), b.CumSum(values, axis)
    else:
        w_sum, v_sum = b.sum(w_sum, 3, keep=True), b.sum(values, 3, keep=True)
    dv = b.Add(b.Mul(alpha, w_sum), b.Mul(beta, product(k, q, w, True)))
    da = b.ReduceSum(b.Mul(wr, v_sum), keepdims=0)
    db = b.ReduceSum(b.Mul(q, dq), keepdims=0)
    dq = b.Mul(beta, dq)
    if attrs["normalize_qk"]:
        def through_norm(dy, y, norm):
            along = b.Mul(y, b.sum(b.Mul(y, dy), 4, keep=True))
            return b.Div(b.Sub(dy, b.Where(b.LessOrEqual(norm, UNIT_ROW_EPS), 0.0, along)), norm)

        dq, dk = through_norm(dq, q, q_norm), through_norm(dk, k, k_norm)
    results = [body.result(x) for x in (_ungrouped(b, dq), b.squeeze(dk, 2), b.squeeze(dv, 2))]
    return [*results, b.Concat(b.unsqueeze(da, 0), b.unsqueeze(db, 0), axis=0)]


BODIES = {"LeanAttention": attention, "CausalLinearDecay": decay, "CausalLinearDecayGrad": decay_grad,
          "NormalizedLinearAttention": normalized, "NormalizedLinearAttentionGrad": normalized_grad}


def overload_name(op, present, attrs, per_token=False):
    """A name for the variant: what differs from the defaults, and a checksum of it all."""
    optional = [t.name for t in op.inputs if t.optional and t.name in present]
    changed = [f"{a.name}={attrs[a.name]}" for a in op.attrs if not a.refuse and attrs[a.name] != a.default]
    words = optional + changed + (["per_token"] if per_token else [])
    digest = zlib.crc32("|".join(words).encode())
    return f"{digest:08x}" if words else "plain"


def function_for(op_name, present, attrs, per_token=False, opset=20):
    """The function (onnx_ir.Function) of one variant of an operator.

    present: names of the inputs given. attrs: attribute values that differ from the defaults. per_token: log_decay has
    rank 3. opset: of the standard operators. Raises KeyError for an unknown operator.
    """
    op = spec.all_specs()[op_name]
    values = {a.name: attrs.get(a.name, a.default) for a in op.attrs}
    body = Body(op, set(present), {**values, "per_token": per_token})
    inputs, outputs = body.function(BODIES[op_name](body))
    graph = ir.Graph(inputs, outputs, nodes=body.b.nodes, opset_imports={"": opset}, name=op_name)
    kinds = {"bool": ir.AttrInt64, "int": ir.AttrInt64, "float": ir.AttrFloat32, "string": ir.AttrString}
    convert = {"bool": int, "int": int, "float": float, "string": str}
    attributes = [kinds[a.type](a.name, convert[a.type](a.default)) for a in op.attrs]
    return ir.Function(spec.DOMAIN, op_name, overload_name(op, present, values, per_token), graph=graph, attributes=attributes)


def attach(model):
    """Gives every leanfleet node of a model (onnx_ir.Model) its overload, and the model the functions. Returns it.

    Raises ValueError where log_decay's rank, which chooses the body, is unknown.
    """
    model.ir_version = max(model.ir_version, 10)  # overloads
    model.opset_imports.setdefault(spec.DOMAIN, spec.OPSET_VERSION)
    opset = model.opset_imports.get("", 20)
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.domain != spec.DOMAIN or node.op_type not in BODIES:
            continue
        op = spec.all_specs()[node.op_type]
        given = {t.name: value for t, value in zip(op.inputs, node.inputs) if value is not None}
        values = {a.name: a.default for a in op.attrs}
        for attr in node.attributes.values():
            values[attr.name] = bool(attr.value) if op.attr(attr.name).type == "bool" else attr.value
        per_token = False
        if "log_decay" in given:
            shape = given["log_decay"].shape
            if shape is None:
                raise ValueError(f"{node.op_type} '{node.name}': the rank of log_decay is unknown; run shape inference first")
            per_token = len(shape) == 3
        name = overload_name(op, set(given), values, per_token)
        node.overload = name
        if (spec.DOMAIN, node.op_type, name) not in model.functions:
            function = function_for(node.op_type, set(given), values, per_token, opset)
            model.functions[function.identifier()] = function
    return model


# The linear operators
#
# Inside, query is [Q,Hkv,G,N,R], key and value [Q,Hkv,1,N,..], log_decay [Q,Hkv,1,N,1] or None where there is no
# decay, and a state [Q,Hkv,1,R,Dv]. Rows of zeros behind the last token change nothing: their key is 0, their decay 1.
