"""CausalLinearDecay and its gradients on the CPU against the float64 reference."""

import math
import os
import subprocess
import sys

import pytest
import torch
from kernels import run_kernel

from leanfleet import spec
from leanfleet.export import reference

I32 = torch.int32
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DECAYS = {"none": None, "one": 0.0, "slow": math.log(0.999), "half": math.log(0.5), "tiny": -60.0, "zero": float("-inf")}


def make(n, b=2, group=3, kv=2, r=5, dv=7, layout="bhnd", dtype="float32", decay="slow", per_token=False, state=False, norm=False,
         packed=False, pool=False, grad=False, seed=0):
    """Inputs by name. packed: four requests of unequal length, one of them empty, in one row."""
    g = torch.Generator().manual_seed(seed + n)
    requests, b = (4, 1) if packed else (b, b)

    def tensor(heads, width, positive=False):
        x = torch.randn(b, heads, n, width, generator=g) / width**0.25
        x = (x.abs() if positive else x).to(DTYPES[dtype])
        return x.transpose(1, 2).contiguous() if layout == "bnhd" else x

    inputs = {"query": tensor(group * kv, r, norm), "key": tensor(kv, r, norm), "value": tensor(kv, dv)}
    if DECAYS[decay] is not None:
        inputs["log_decay"] = torch.full((kv,), DECAYS[decay]) * (1 + torch.arange(kv) / 7)
        if DECAYS[decay] == 0:
            inputs["log_decay"] = torch.zeros(kv)
        if per_token:
            values = torch.where(torch.isinf(inputs["log_decay"]), -0.5, inputs["log_decay"]).view(1, kv, 1)
            values = values * torch.rand(b, kv, n, generator=g)
            values.view(-1)[3::11] = float("-inf")
            inputs["log_decay"] = values.transpose(1, 2).contiguous() if layout == "bnhd" else values.contiguous()
    rows = requests + 3 if pool else requests
    if state or pool:
        inputs["initial_state"] = torch.randn(rows, kv, r, dv, generator=g)
        if norm:
            inputs["initial_norm"] = torch.rand(rows, kv, r, generator=g)
    if grad:
        inputs["grad_output"] = tensor(group * kv, dv)
        if state:
            inputs["grad_final_state"] = torch.randn(requests, kv, r, dv, generator=g)
    if packed:
        inputs["cu_seqlens"] = torch.tensor([0, n // 3, n // 3, n - n // 4, n], dtype=I32)
    if pool:
        inputs["state_index"] = torch.randperm(rows, generator=g)[:requests].to(I32)
    return inputs


def judged(op_name, inputs, attrs, dtype=torch.float64):
    """The reference; float64 unless told, then in the inputs' own type or in float32 throughout."""
    op = spec.all_specs()[op_name]
    tensors = [inputs.get(t.name) for t in op.inputs]
    if dtype == torch.float64:
        tensors = [t.double() if t is not None and t.is_floating_point() else t for t in tensors]
    return getattr(reference, op.snake_name)(*tensors, **attrs)


def check(op_name, inputs, attrs, found=None, factor=2, **options):
    """Every output within `factor` times what the plain reference in the inputs' type loses, and a few roundings.

    Sums that cancel (grad_log_decay) are held to the size of their terms, the sum of |query| |grad_query|.
    """
    op = spec.all_specs()[op_name]
    found = found or run_kernel(op_name, inputs, attrs, **options)
    expected, plain = judged(op_name, inputs, attrs), judged(op_name, inputs, attrs, None)
    unit = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[inputs["query"].dtype]
    for t, e, p in zip(op.active_outputs(attrs), expected, plain, strict=True):
        f = found[t.name]
        assert f.shape == e.shape and not torch.isnan(f).any(), t.name
        rounding = unit if t.type == "T" else 2.0**-23
        allowed = factor * (p.double() - e).abs().max() + 4 * rounding * e.abs().max()
        if t.name == "grad_log_decay":
            terms = (inputs["query"].double().norm(dim=-1) * expected[0].norm(dim=-1)).sum()
            allowed = allowed + 8 * 2.0**-23 * terms
        error = (f.double() - e).abs().max()
        assert error <= allowed, f"{t.name}: {error:.2e}, allowed {allowed:.2e}"
    return found


FORWARD, GRAD = "CausalLinearDecay", "CausalLinearDecayGrad"
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 130)


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", LENGTHS)
def test_forward_at_every_length(n, dtype, layout):
    for group in (1, 5):
        check(FORWARD, make(n, group=group, dtype=dtype, layout=layout, state=True), dict(return_state=1, scale=0.5, layout=layout))


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("decay", DECAYS)
def test_decays(decay, per_token):
    """From no decay to gamma = 0, which forgets at once; nothing overflows."""
    inputs = make(97, decay=decay, per_token=per_token, state=True)
    check(FORWARD, inputs, dict(return_state=1))
    if "log_decay" in inputs:
        grads = make(97, decay=decay, per_token=per_token, state=True, grad=True)
        found = check(GRAD, grads, dict(grad_decay=1, grad_state=1))
        assert (found["grad_log_decay"][torch.isinf(grads["log_decay"])] == 0).all()


@pytest.mark.parametrize("r, dv", [(1, 1), (1, 64), (4, 33), (8, 8), (37, 20), (64, 130), (128, 16), (512, 3)])
@pytest.mark.parametrize("group", [1, 3, 4, 7])
def test_widths_and_groups(r, dv, group):
    check(FORWARD, make(21, b=1, r=r, dv=dv, group=group), dict(return_state=1))
    check(GRAD, make(21, b=1, r=r, dv=dv, group=group, grad=True), dict(grad_decay=1, grad_state=1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("packed", [False, True])
def test_normalised_form(packed, layout, dtype):
    inputs = make(40, norm=True, state=True, packed=packed, layout=layout, dtype=dtype, per_token=True)
    check(FORWARD, inputs, dict(normalize=1, return_state=1, layout=layout))


def test_denominators_near_zero_are_held():
    inputs = make(9, norm=True)
    inputs["query"][:, :, 3] = 0
    inputs["query"][:, :, 5] *= -1
    found = check(FORWARD, inputs, dict(normalize=1, eps=0.25))
    assert (found["output"][:, :, 3] == 0).all()


@pytest.mark.parametrize("n", (5, 64, 130))
@pytest.mark.parametrize("per_token", [False, True])
def test_packed_requests_equal_separate_ones(n, per_token):
    inputs = make(n, packed=True, state=True, per_token=per_token)
    found = check(FORWARD, inputs, dict(return_state=1))
    for q, (begin, end) in enumerate(zip(inputs["cu_seqlens"].tolist(), inputs["cu_seqlens"].tolist()[1:])):
        if end == begin:
            assert torch.equal(found["final_state"][q], inputs["initial_state"][q])
            continue
        alone = {k: inputs[k][:, :, begin:end].contiguous() for k in ("query", "key", "value")}
        decay = inputs["log_decay"]
        alone["log_decay"] = decay[:, :, begin:end].contiguous() if per_token else decay
        alone["initial_state"] = inputs["initial_state"][q:q + 1].contiguous()
        single = run_kernel(FORWARD, alone, dict(return_state=1))
        torch.testing.assert_close(found["output"][:, :, begin:end], single["output"], rtol=1e-5, atol=1e-6)
    check(GRAD, make(n, packed=True, state=True, per_token=per_token, grad=True), dict(grad_decay=1, grad_state=1))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("normalize", [0, 1])
def test_pool_rows_not_named_stay(in_place, normalize):
    inputs = make(12, pool=True, norm=bool(normalize))
    before = inputs["initial_state"].clone()
    kept = [i for i in range(before.shape[0]) if i not in inputs["state_index"].tolist()]
    expected = judged(FORWARD, inputs, dict(return_state=1, normalize=normalize))
    found = run_kernel(FORWARD, inputs, dict(return_state=1, normalize=normalize), in_place=in_place)
    assert torch.equal(found["final_state"][kept], before[kept])
    torch.testing.assert_close(found["final_state"].double(), expected[1], rtol=1e-5, atol=1e-5)
    if not in_place:
        assert torch.equal(inputs["initial_state"], before)


@pytest.mark.parametrize("n", (1, 3, 70))
@pytest.mark.parametrize("group", (1, 3))
def test_in_place_equals_out_of_place(n, group):
    inputs = make(n, state=True, norm=True, group=group)
    apart = run_kernel(FORWARD, inputs, dict(return_state=1, normalize=1))
    same = run_kernel(FORWARD, {k: t.clone() for k, t in inputs.items()}, dict(return_state=1, normalize=1), in_place=True)
    assert all(torch.equal(apart[k], same[k]) for k in apart)


@pytest.mark.parametrize("cut", (1, 7, 63, 64))
def test_splitting_and_carrying_the_state_equals_one_call(cut):
    inputs = make(100, state=True, norm=True, per_token=True)
    attrs = dict(return_state=1, normalize=1)
    whole = check(FORWARD, inputs, attrs)
    tokens = ("query", "key", "value", "log_decay")
    first = run_kernel(FORWARD, {**inputs, **{k: inputs[k][:, :, :cut].contiguous() for k in tokens}}, attrs)
    second = run_kernel(FORWARD, {**{k: inputs[k][:, :, cut:].contiguous() for k in tokens}, "initial_state": first["final_state"],
                                  "initial_norm": first["final_norm"]}, attrs)
    torch.testing.assert_close(torch.cat([first["output"], second["output"]], 2), whole["output"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(second["final_state"], whole["final_state"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["auto", "causal_dot_product", "fleet", "lightning"])
def test_named_algorithms(algorithm):
    inputs = make(33)
    attrs = dict(algorithm=algorithm)
    found = run_kernel(FORWARD, inputs, attrs)["output"]
    torch.testing.assert_close(found.double(), judged(FORWARD, inputs, {})[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("n", (1, 16, 65, 130))
def test_gradients(n, layout, dtype):
    for per_token in (False, True):
        inputs = make(n, layout=layout, dtype=dtype, per_token=per_token, state=True, grad=True)
        check(GRAD, inputs, dict(scale=0.5, grad_decay=1, grad_state=1, layout=layout))
    check(GRAD, make(n, layout=layout, dtype=dtype, decay="none", grad=True), dict(layout=layout))


def test_gradient_of_a_long_sequence():
    """The reference here is chunked; a sequential float32 loop, which a kernel may lose twice as much as, loses more."""
    inputs = make(8192, b=1, group=1, kv=1, r=8, dv=8, grad=True)
    check(GRAD, inputs, dict(grad_decay=1), factor=4)


@pytest.mark.parametrize("threads", (1, 2, 5))
def test_repeatable_with_any_number_of_threads(threads):
    for op, inputs, attrs in ((FORWARD, make(77, state=True, norm=True), dict(return_state=1, normalize=1)),
                              (GRAD, make(77, grad=True), dict(grad_decay=1))):
        first = check(op, inputs, attrs, threads=threads)
        again = run_kernel(op, inputs, attrs, threads=threads)
        one = run_kernel(op, inputs, attrs, threads=1)
        assert all(torch.equal(first[k], again[k]) and torch.equal(first[k], one[k]) for k in first)


@pytest.mark.parametrize("offsets", [(-5, 3, 99, 2, 7), (9, 1, 0, -2**31, 2**31 - 1), (7, 7, 7, 7, 7)])
def test_garbage_offsets_stay_inside(offsets):
    inputs = make(9, packed=True, state=True, grad=False)
    inputs["cu_seqlens"] = torch.tensor(offsets, dtype=I32)
    found = run_kernel(FORWARD, inputs, dict(return_state=1))
    assert not torch.isnan(found["output"]).any()
    inputs = make(9, packed=True, state=True, grad=True)
    inputs["cu_seqlens"] = torch.tensor(offsets, dtype=I32)
    found = run_kernel(GRAD, inputs, dict(grad_decay=1, grad_state=1))
    assert not torch.isnan(found["grad_query"]).any()


@pytest.mark.parametrize("index", [(-1, 2), (2**31 - 1, -2**31), (5, 0)])
def test_garbage_pool_rows_read_zeros_and_write_nothing(index):
    inputs = make(4, pool=True)
    inputs["state_index"] = torch.tensor(index, dtype=I32)
    before = inputs["initial_state"].clone()
    found = run_kernel(FORWARD, inputs, dict(return_state=1))
    outside = [b for b, i in enumerate(index) if not 0 <= i < 5]
    plain = {k: v for k, v in inputs.items() if k not in ("initial_state", "state_index")}
    zero = run_kernel(FORWARD, plain, {})
    assert torch.equal(found["output"][outside], zero["output"][outside])
    untouched = [i for i in range(5) if i not in index]
    assert torch.equal(found["final_state"][untouched], before[untouched])


@pytest.mark.parametrize("build", ["baseline", "avx2"])
def test_older_instruction_sets(build):
    """A part of this file on the kernels for older processors, which are chosen once a process."""
    run = subprocess.run([sys.executable, "-P", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__, "-k",
                          "decays or widths or (gradients and 65) or normalised"],
                         env=os.environ | {"LEANFLEET_CPU": build}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
