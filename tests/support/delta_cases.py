"""Calls of GatedDeltaRule and GatedDeltaRuleGrad, and how far a kernel may be from the float64 reference.

The tolerance is what the plain recurrence in float32 loses on the same inputs, times `factor`, plus what rounding the exact
result to the output's type loses, times `roundings`; both as root mean squares over the tensor. `relative` times the
largest element is added, at least a few float32 roundings, for inputs on which the recurrence is exact.
"""

import torch

from leanfleet import spec
from leanfleet.export import reference
from support.kernels import TORCH_DTYPES, remembered

NAME, GRAD = "GatedDeltaRule", "GatedDeltaRuleGrad"


def swap(x, layout):
    return x if layout == "bhnd" else x.transpose(1, 2).contiguous()


def make(
    n,
    b=2,
    heads=(2, 2, 4),
    d=8,
    dv=7,
    layout="bhnd",
    dtype="float32",
    decay="token",
    state=False,
    packed=None,
    pool=False,
    v_first=False,
    unit=True,
    seed=0,
):
    """Inputs by name. heads: Hq, Hk, Hv. decay: None, "token", "key", "edge" (of key dimensions too, where chunks of 64 tokens lie
    on either side of what prepare_keys.cu takes), "mixed" (of key dimensions, forgetting all or nothing), or a number for all tokens. packed: offsets, or True for
    four requests, one of them empty. unit: keys of unit length, as the kernels expect where normalize_qk is off. Tokens of no
    request are NaN."""
    g = torch.Generator().manual_seed(seed + n)
    if packed is True:
        packed = [0, n // 3, n // 3, n - n // 4, n]
    b = 1 if packed else b
    requests = len(packed) - 1 if packed else b
    q_heads, k_heads, v_heads = heads

    def tensor(count, width):
        return torch.randn(b, count, n, width, generator=g)

    query, key, value = tensor(q_heads, d), tensor(k_heads, d), tensor(v_heads, dv)
    if unit:
        key = key / key.norm(dim=-1, keepdim=True)
    tokens = {"query": query, "key": key, "value": value}
    if decay == "token":
        tokens["log_decay"] = -torch.rand(b, v_heads, n, generator=g) / 4
        tokens["log_decay"].view(-1)[3::11] = float("-inf")
    elif decay == "key":
        tokens["log_decay"] = -torch.rand(b, v_heads, n, d, generator=g) / 4
        tokens["log_decay"].view(-1)[3::11] = float("-inf")
    elif decay == "mixed":  # every kind side by side in a row
        kinds = torch.tensor([float("-inf"), -50.0, -0.3, -1e-6, 0.0])
        tokens["log_decay"] = kinds[torch.randint(len(kinds), (b, v_heads, n, d), generator=g)]
    elif decay == "edge":
        steepest = torch.rand(b, v_heads, -(-n // 64), 1, generator=g).repeat_interleave(64, 2)[:, :, :n] * 16
        tokens["log_decay"] = -torch.rand(b, v_heads, n, d, generator=g) * steepest
    elif decay is not None:
        tokens["log_decay"] = torch.full((b, v_heads, n), float(decay))
    tokens["beta"] = 2 * torch.rand(b, v_heads, n, generator=g)
    if packed:
        for x in tokens.values():
            x[:, :, : packed[0]] = float("nan")
            x[:, :, packed[-1] :] = float("nan")
    inputs = {name: swap(x, layout) for name, x in tokens.items()}
    for name in ("query", "key", "value"):
        inputs[name] = inputs[name].to(TORCH_DTYPES[dtype])
    rows = requests + 3 if pool else requests
    if state or pool:
        inputs["initial_state"] = torch.randn(rows, v_heads, *((dv, d) if v_first else (d, dv)), generator=g)
    if packed:
        inputs["cu_seqlens"] = torch.tensor(packed, dtype=torch.int32)
    if pool:
        inputs["state_index"] = torch.randperm(rows, generator=g)[:requests].int()
    return inputs


def long_keys(dtype, layout="bhnd", grad=False):
    """(inputs, attrs, what a checked call says of them or None). Beside keys that are too long, those that may stand: of unit
    length with beta 2, of no request, of a state that decays by more than it grows, and normalised ones."""

    def case(length, beta, decay, attrs=(), packed=None):
        inputs = make(6, b=1, d=16, dtype="float32", decay=decay, packed=packed)
        inputs["key"] *= torch.where(torch.arange(6)[:, None] == 4, length, 1.0)
        inputs["beta"].fill_(1.0)
        inputs["beta"][:, :, 4] = beta
        inputs = {name: x.to(TORCH_DTYPES[dtype]) if name in ("query", "key", "value") else x for name, x in inputs.items()}
        tokens = ("query", "key", "value", "log_decay", "beta")
        inputs = {name: swap(x, layout) if name in tokens else x for name, x in inputs.items()}
        attrs = {"layout": layout} | dict(attrs)
        return with_grads(inputs, attrs) if grad else (inputs, attrs)

    at = "0,0,4" if layout == "bhnd" else "0,4,0"
    said = rf"key\[{at}\] \(batch row 0, head 0, token 4\) has \|k\|\^2 = "
    yield *case(3.0, 0.5, None), said + r"(9\.0|8\.9).* with beta 0\.5.* state 0 .*by -3\.[45].*set normalize_qk"
    yield *case(1.1, 2.0, None), said + r"1\.2.* with beta 2.*expected beta \|k\|\^2 of 2 or less"
    yield *case(3.0, 0.5, -0.5), said
    yield *case(1.0, 2.0, None), None
    yield *case(1.4, 1.0, None), None
    yield *case(3.0, 0.5, -2.0), None
    yield *case(3.0, 0.5, None, {"normalize_qk": 1}), None
    yield *case(float("nan"), 0.5, None, packed=[0, 2, 4]), None


def with_decays_of_keys(inputs):
    """The same call where each key dimension has its token's decay as its own."""
    decay, width = inputs["log_decay"], inputs["key"].shape[-1]
    return inputs | {"log_decay": decay[..., None].repeat(*[1] * decay.dim(), width)}


def with_grads(inputs, attrs, last=True, seed=1):
    """Inputs and attributes of GatedDeltaRuleGrad for those of the forward: all gradients are asked for. last: the last state
    has one too. Rows of no request are NaN."""
    g = torch.Generator().manual_seed(seed)
    axis = 1 if attrs.get("layout", "bhnd") == "bhnd" else 2
    query, value = inputs["query"], inputs["value"]
    shape = list(value.shape)
    shape[axis] = max(shape[axis], query.shape[axis])
    grad = swap(torch.randn(shape, generator=g), "bhnd")
    requests = shape[0]
    if "cu_seqlens" in inputs:
        offsets = inputs["cu_seqlens"].clamp(0, shape[3 - axis]).tolist()
        requests = len(offsets) - 1
        rows = grad if axis == 2 else grad.transpose(1, 2)
        rows[:, : offsets[0]], rows[:, offsets[-1] :] = float("nan"), float("nan")
    inputs = inputs | {"grad_output": grad.to(value.dtype)}
    if last:
        sizes = query.shape[-1], shape[-1]
        state = torch.randn(requests, value.shape[axis], *(sizes[::-1] if attrs.get("state_v_first") else sizes), generator=g)
        inputs["grad_final_state"] = state
    kept = {name: x for name, x in attrs.items() if name != "return_state"}
    return inputs, kept | {"grad_state": 1, "grad_decay": int("log_decay" in inputs)}


def _by_reference(inputs, attrs, dtype, names):
    op = spec.all_specs()[names["grad_output" in inputs]]
    tensors = [inputs.get(t.name) for t in op.inputs]
    tensors = [t.to(dtype) if t is not None and t.is_floating_point() else t for t in tensors]
    names = [t.name for t in op.active_outputs(attrs)]
    return dict(zip(names, getattr(reference, op.snake_name)(*tensors, **attrs), strict=True))


@remembered
def judge(inputs, attrs, names=(NAME, GRAD)):
    """The outputs by name, exactly, and in float32. names: of the operator and its gradient."""
    return tuple(_by_reference(inputs, attrs, dtype, names) for dtype in (torch.float64, torch.float32))


def rms(x):
    return x.double().square().mean().sqrt().item()


def assert_right(found, inputs, attrs, factor=2.0, roundings=1.2, relative=4 * 2.0**-24, names=(NAME, GRAD)):
    """Every output is finite where the exact one is, and as near to it as the module says."""
    exact, plain = judge({k: v.cpu() for k, v in inputs.items() if v is not None}, attrs, names)
    assert found.keys() == exact.keys()
    for name, right in exact.items():
        got, dtype = found[name].cpu(), found[name].dtype
        assert got.shape == right.shape and got.isfinite().all(), name
        rounding = rms(right.to(dtype).double() - right)
        largest = right.abs().max().item() if right.numel() else 0.0
        allowed = factor * rms(plain[name].double() - right) + roundings * rounding + max(relative, 4 * 2.0**-24) * largest
        allowed += 2.0**-126  # what is not normal may be 0
        assert rms(got.double() - right) <= allowed, (name, rms(got.double() - right), allowed)


# The exponential of CUDA is rounded twice as far as PyTorch's. Chunks of 16-bit prompts round the scores to 16 bits too, and
# hold states, updates and the system that is solved as two 16-bit numbers, 16 bits in bfloat16 and 22 in float16.
PLAIN, PLANES = 4.0, {"float32": 0.0, "float16": 2.0**-20, "bfloat16": 2.0**-15}
ROUNDINGS = 2.0


def assert_near(found, inputs, attrs, factor=PLAIN, names=(NAME, GRAD)):
    planes = PLANES[str(inputs["query"].dtype).removeprefix("torch.")]
    if "grad_output" in inputs:  # some are sums of few elements
        planes = max(planes, 16 * 2.0**-24)
    assert_right(found, inputs, attrs, factor, ROUNDINGS, planes, names)
