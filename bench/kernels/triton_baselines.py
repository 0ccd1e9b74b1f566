"""The papers' Triton methods in Triton versions of our own, to be measured on GPUs beside the kernels. Never a runtime path.

    leanfleet bench --device cuda --load bench/kernels/triton_baselines.py

registers triton_lightning and triton_fleet for causal_linear_decay, triton_fleet for its normalised form, and
triton_lightning for normalized_linear_attention, where there is a GPU. With TRITON_INTERPRET=1 the functions run on the CPU.

Tensors are contiguous, T one of float32, float16 and bfloat16: query [B,H,N,R], key [B,Hkv,N,R], value [B,Hkv,N,Dv],
log_decay float32 [Hkv] or None. All functions raise ValueError for per-token decays, which the papers' methods do not have.
"""

import torch
import triton
import triton.language as tl

from leanfleet.bench import register_method

EPS = 1e-6  # the normalisers' magnitude is held at this or more, as in the operators
LARGEST_RANK = 256  # R and Dv up to this fit a program's tiles


@triton.jit
def masked_product_kernel(
    x_ptr,
    y_ptr,
    z_ptr,
    row_ptr,
    column_ptr,
    decay_ptr,
    out_ptr,
    sum_ptr,
    heads,
    tokens,
    rank,
    dim,
    scale,
    X_GROUP: tl.constexpr,
    Y_GROUP: tl.constexpr,
    Z_GROUP: tl.constexpr,
    DECAY_GROUP: tl.constexpr,
    REVERSE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    STORE_SUM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out = (M * (scale X Y^T + row column^T)) Z, block after block, with M_ij = decay^(i-j) for i >= j.

    REVERSE: the same with time reversed, M_ij = decay^(j-i) for j >= i. A program owns one query head and BLOCK_D columns of
    Z. It carries Y^T Z [BLOCK_R,BLOCK_D] and column^T Z [BLOCK_D] of the blocks before; with STORE_SUM (no decay) also what
    sum gets: the sum of each row's masked scores. float32 products are taken as three of TF32 parts.
    x, y, z: [B*heads/GROUP,N,..]; row, column, sum: float32 [B*heads,N].
    """
    head, first_column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_D
    n, r, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R), first_column + tl.arange(0, BLOCK_D)
    x_ptr += head // X_GROUP * tokens * rank
    y_ptr += head // Y_GROUP * tokens * rank
    z_ptr += head // Z_GROUP * tokens * dim
    out_ptr += head * tokens * dim
    log_decay = 0.0
    if HAS_DECAY:
        log_decay = tl.load(decay_ptr + head % heads // DECAY_GROUP)
    dtype = z_ptr.dtype.element_ty
    state = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    bias_state = tl.zeros((BLOCK_D,), tl.float32)
    y_sum = tl.zeros((BLOCK_R,), tl.float32)
    column_sum = 0.0
    own_rows = tl.where(first_column == 0, BLOCK_N, 0)  # the programs of the first columns write the sums
    steps = n[:, None] - n[None, :]
    # Exponents are multiplied by decays only where they are not 0, so that a decay of 0 (log -inf) makes no NaN.
    mask = tl.where(steps > 0, tl.exp(tl.where(steps > 0, steps, 1) * log_decay), tl.where(steps == 0, 1.0, 0.0))
    for block in range(tl.cdiv(tokens, BLOCK_N)):
        start = block * BLOCK_N
        length = tl.minimum(BLOCK_N, tokens - start)
        at = start + n
        if REVERSE:
            at = tokens - 1 - at
        valid = n < length
        in_rank, in_dim = valid[:, None] & (r < rank)[None, :], valid[:, None] & (d < dim)[None, :]
        x = tl.load(x_ptr + at[:, None] * rank + r[None, :], in_rank, 0.0)
        y = tl.load(y_ptr + at[:, None] * rank + r[None, :], in_rank, 0.0)
        z = tl.load(z_ptr + at[:, None] * dim + d[None, :], in_dim, 0.0)
        scores = scale * tl.dot(x, tl.trans(y), input_precision="tf32x3")
        carried = scale * tl.dot(x, state.to(dtype), input_precision="tf32x3")
        if HAS_BIAS:
            row = tl.load(row_ptr + head * tokens + at, valid, 0.0)
            column = tl.load(column_ptr + head * tokens + at, valid, 0.0)
            scores += row[:, None] * column[None, :]
            carried += row[:, None] * bias_state[None, :]
        weights = scores * mask
        if HAS_DECAY:
            carried *= tl.exp((n + 1) * log_decay)[:, None]
        out = tl.dot(weights.to(dtype), z, input_precision="tf32x3") + carried
        tl.store(out_ptr + at[:, None] * dim + d[None, :], out.to(out_ptr.dtype.element_ty), in_dim)
        if STORE_SUM:
            sums = tl.sum(weights, 1) + scale * tl.sum(x.to(tl.float32) * y_sum[None, :], 1) + row * column_sum
            tl.store(sum_ptr + head * tokens + at, sums, valid & (n < own_rows))
            y_sum += tl.sum(y.to(tl.float32), 0)
            column_sum += tl.sum(column, 0)
        if HAS_DECAY:
            left = length - 1 - n
            kept = tl.where(left > 0, tl.exp(tl.where(left > 0, left, 1) * log_decay), 1.0)
            y = (y.to(tl.float32) * kept[:, None]).to(dtype)
            state *= tl.exp(length * log_decay)
        state += tl.dot(tl.trans(y), z, input_precision="tf32x3")
        if HAS_BIAS:
            bias_state += tl.sum(column[:, None] * z.to(tl.float32), 0)


def _check(log_decay, *sizes):
    if log_decay is not None and log_decay.dim() != 1:
        raise ValueError(f"log_decay has shape {list(log_decay.shape)}; the papers' methods take one decay for each head")
    if max(sizes) > LARGEST_RANK:
        raise ValueError(f"the sizes of heads are {list(sizes)}; these methods hold up to {LARGEST_RANK} in a program")


def _masked_product(x, y, z, log_decay=None, scale=1.0, row=None, column=None, reverse=False, row_sums=False):
    """The kernel on [B,heads,N,..] tensors, of which those with fewer heads are shared. Returns [B,H,N,D] and, with
    row_sums, float32 [B,H,N]."""
    batch, tokens, rank, dim = x.shape[0], x.shape[2], x.shape[3], z.shape[3]
    heads = max(x.shape[1], y.shape[1], z.shape[1])
    out = torch.empty(batch, heads, tokens, dim, dtype=z.dtype, device=z.device)
    sums = torch.empty(batch, heads, tokens, device=z.device) if row_sums else out
    # Tiles of 64 columns also where there are fewer: with 32, Triton 3.6's code for Hopper reads past its shared memory.
    block_r, block_d, short = max(64, triton.next_power_of_2(rank)), 64, z.element_size() == 2
    masked_product_kernel[(batch * heads, triton.cdiv(dim, block_d))](
        x.contiguous(),
        y.contiguous(),
        z.contiguous(),
        out if row is None else row.contiguous(),
        out if column is None else column.contiguous(),
        out if log_decay is None else log_decay.contiguous(),
        out,
        sums,
        heads,
        tokens,
        rank,
        dim,
        scale,
        X_GROUP=heads // x.shape[1],
        Y_GROUP=heads // y.shape[1],
        Z_GROUP=heads // z.shape[1],
        DECAY_GROUP=1 if log_decay is None else heads // log_decay.numel(),
        REVERSE=reverse,
        HAS_BIAS=row is not None,
        HAS_DECAY=log_decay is not None,
        STORE_SUM=row_sums,
        BLOCK_N=64 if short else 32,
        BLOCK_R=block_r,
        BLOCK_D=block_d,
        num_warps=4 if block_r == 64 else 8,
        num_stages=1 if block_r > 128 else 3 if short else 2,
    )
    return (out, sums) if row_sums else out


def _over_group(grad, kv_heads):
    """Sums the gradients of the query heads that share a key/value head."""
    return grad if grad.shape[1] == kv_heads else grad.float().unflatten(1, (kv_heads, -1)).sum(2).to(grad.dtype)


class _Lightning(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, log_decay):
        ctx.save_for_backward(query, key, value, log_decay)
        return _masked_product(query, key, value, log_decay)

    @staticmethod
    def backward(ctx, grad):
        """The same product three times: dq of (dO, V, K); dk of (V, dO, Q) and dv of (K, Q, dO) with time reversed."""
        query, key, value, log_decay = ctx.saved_tensors
        dq = _masked_product(grad, value, key, log_decay)
        dk = _masked_product(value, grad, query, log_decay, reverse=True)
        dv = _masked_product(key, query, grad, log_decay, reverse=True)
        return dq, _over_group(dk, key.shape[1]), _over_group(dv, key.shape[1]), None


def lightning(query, key, value, log_decay=None):
    """Lightning Attention-2 (LeetDecoding, section 3.2): masked products inside blocks, a carried state between them.

    Returns T [B,H,N,Dv], differentiable in query, key and value.
    """
    _check(log_decay, query.shape[-1], value.shape[-1])
    return _Lightning.apply(query, key, value, log_decay)


@triton.jit
def _decayed_add(log_decay1, x1, log_decay2, x2):
    """Sums of logarithms and not products of decays, whose rounding would grow with the distance of tokens."""
    return log_decay1 + log_decay2, x1 * tl.exp(log_decay2) + x2


@triton.jit
def fleet_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    decay_ptr,
    out_ptr,
    norm_ptr,
    heads,
    tokens,
    rank,
    dim,
    GROUP: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Adds diag(b_j) cumsum(diag(c_j) V) to out for one rank j and BLOCK_D columns (LeetDecoding, algorithm 5).

    The prefix l_j of the blocks before is carried in registers; the ranks are programs of their own, whose results meet in
    atomic additions (its appendix D). NORMALIZE: also diag(b_j) cumsum(c_j) to norm (FleetAttention, algorithm 1).
    """
    head, rank_j = tl.program_id(0).to(tl.int64), tl.program_id(2)
    first_column = tl.program_id(1) * BLOCK_D
    n, d = tl.arange(0, BLOCK_N), first_column + tl.arange(0, BLOCK_D)
    query_ptr += head * tokens * rank + rank_j
    key_ptr += head // GROUP * tokens * rank + rank_j
    value_ptr += head // GROUP * tokens * dim
    log_decay = 0.0
    if HAS_DECAY:
        log_decay = tl.load(decay_ptr + head % heads // GROUP)
    kept = tl.exp((n + 1) * log_decay)
    own_rows = tl.where(first_column == 0, BLOCK_N, 0)  # the programs of the first columns add up the norm
    prefix = tl.zeros((BLOCK_D,), tl.float32)
    norm_prefix = 0.0
    for block in range(tl.cdiv(tokens, BLOCK_N)):
        at = block * BLOCK_N + n
        valid = at < tokens
        last = n == tl.minimum(BLOCK_N, tokens - block * BLOCK_N) - 1
        b = tl.load(query_ptr + at * rank, valid, 0.0).to(tl.float32)
        c = tl.load(key_ptr + at * rank, valid, 0.0).to(tl.float32)
        in_dim = valid[:, None] & (d < dim)[None, :]
        v = tl.load(value_ptr + at[:, None] * dim + d[None, :], in_dim, 0.0).to(tl.float32)
        x = c[:, None] * v
        if HAS_DECAY:
            _, sums = tl.associative_scan((tl.zeros((BLOCK_N, BLOCK_D), tl.float32) + log_decay, x), 0, _decayed_add)
        else:
            sums = tl.cumsum(x, 0)
        sums += kept[:, None] * prefix[None, :]
        tl.atomic_add(out_ptr + (head * tokens + at[:, None]) * dim + d[None, :], b[:, None] * sums, in_dim)
        prefix = tl.sum(tl.where(last[:, None], sums, 0.0), 0)
        if NORMALIZE:
            if HAS_DECAY:
                _, norms = tl.associative_scan((tl.zeros((BLOCK_N,), tl.float32) + log_decay, c), 0, _decayed_add)
            else:
                norms = tl.cumsum(c, 0)
            norms += kept * norm_prefix
            tl.atomic_add(norm_ptr + head * tokens + at, b * norms, valid & (n < own_rows))
            norm_prefix = tl.sum(tl.where(last, norms, 0.0), 0)


def fleet(query, key, value, log_decay=None, normalize=False):
    """FleetAttention: the sum over ranks of diag(b_j) cumsum(diag(c_j) V) (LeetDecoding, equation 5 and appendices B.4, C.1).

    normalize: each row divided by the sum of its masked scores (FleetAttention, algorithm 1). Returns T [B,H,N,Dv]; its
    backward is not in the papers, and asking for it raises NotImplementedError.
    """
    _check(log_decay, value.shape[-1])
    if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)):
        raise NotImplementedError("the papers give no backward of FleetAttention")
    batch, heads, tokens, rank = query.shape
    kv_heads, dim = key.shape[1], value.shape[-1]
    out = torch.zeros(batch, heads, tokens, dim, device=query.device)
    norm = torch.zeros(batch, heads, tokens, device=query.device) if normalize else out
    block_d = max(16, min(64, triton.next_power_of_2(dim)))
    fleet_kernel[(batch * heads, triton.cdiv(dim, block_d), rank)](
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        out if log_decay is None else log_decay,
        out,
        norm,
        heads,
        tokens,
        rank,
        dim,
        GROUP=heads // kv_heads,
        HAS_DECAY=log_decay is not None,
        NORMALIZE=normalize,
        BLOCK_N=64,
        BLOCK_D=block_d,
    )
    return (out / _held(norm).unsqueeze(-1) if normalize else out).to(query.dtype)


def _held(g):
    """g with its magnitude at EPS or more, its sign kept."""
    return torch.where(g.abs() >= EPS, g, torch.where(g < 0, -EPS, EPS))


class _Normalized(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, a, b):
        row = torch.full(query.shape[:3], a, device=query.device)
        f, g = _masked_product(query, key, value, scale=b, row=row, column=torch.ones_like(row), row_sums=True)
        output = (f / _held(g).unsqueeze(-1)).to(query.dtype)
        ctx.save_for_backward(query, key, value, output, g)
        ctx.a, ctx.b = a, b
        return output

    @staticmethod
    def backward(ctx, grad):
        """With w = dO / g and rho_i = o_i . w_i (equations 17 to 20, corrected):
        dq_i = b [sum over l <= i of (w_i . v_l - rho_i) k_l], dk_p = b [sum over i >= p of (w_i . v_p - rho_i) q_i],
        dv_p = sum over i >= p of (a + b q_i . k_p) w_i."""
        query, key, value, output, g = ctx.saved_tensors
        w = grad.float() / _held(g).unsqueeze(-1)
        rho = (output.float() * w).sum(-1).masked_fill(g.abs() < EPS, 0)
        w, ones = w.to(query.dtype), torch.ones_like(rho)
        dq = ctx.b * _masked_product(w, value, key, row=-rho, column=ones)
        dk = ctx.b * _masked_product(value, w, query, row=ones, column=-rho, reverse=True)
        dv = _masked_product(key, query, w, scale=ctx.b, row=ctx.a * ones, column=ones, reverse=True)
        return dq, _over_group(dk, key.shape[1]), _over_group(dv, key.shape[1]), None, None


def normalized(query, key, value, a=1.0, b=1.0):
    """Normalised linear attention o_i = f_i / g_i with scores a + b q.k ("Linear attention kernels with backward",
    equations 5 to 9), and its backward in O(N D^2) time and O(N D) memory.

    Returns T [B,H,N,Dv], differentiable in query, key and value.
    """
    _check(None, query.shape[-1], value.shape[-1])
    return _Normalized.apply(query, key, value, a, b)


def register():
    """Makes them methods of leanfleet.bench, for GPUs alone."""
    gpu = {"devices": ("cuda",)}
    register_method("triton_lightning", lightning, **gpu)
    register_method("triton_fleet", fleet, **gpu)
    register_method(
        "triton_fleet", lambda q, k, v, g: fleet(q, k, v, g, normalize=True), operator="causal_linear_decay_normalized", **gpu
    )
    register_method("triton_lightning", normalized, operator="normalized_linear_attention", **gpu)


if torch.cuda.is_available():
    register()
