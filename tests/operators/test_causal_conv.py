"""CausalConv against the float64 reference: the CPU kernels, the CUDA kernel, and the function body."""

from itertools import product

import pytest
import torch

from leanfleet.export import causal_conv, causal_conv_, reference
from support import ort_models
from support.conv_cases import NAME, among_others, assert_right, make, parts_of
from support.kernels import run_kernel
from support.linear_cases import OPS, one_node_model, session_of

pytestmark = pytest.mark.usefixtures("one_torch_thread")
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DTYPES = ("float32", "float16", "bfloat16")
SILU = {"return_state": 1, "activation": "silu"}


def check(inputs, attrs, threads=2, in_place=False, device="cpu"):
    given = {name: x.clone().to(device) for name, x in inputs.items()}
    found = run_kernel(NAME, given, attrs, threads, in_place=in_place)
    assert_right(found, inputs, attrs)
    for name, x in inputs.items():
        if not (in_place and name == "initial_state" and attrs.get("return_state")):
            assert torch.equal(given[name].cpu().nan_to_num(), x.nan_to_num()), name
    return found


def any_calls(dtype):
    """(inputs, attributes): whole vectors and ends of them, several strips of channels, prompts in several pieces, requests
    shorter than the kernel, packed requests, pools, lengths and offsets that are wrong."""
    for i, (n, c) in enumerate(product((1, 2, 5, 16, 17, 65, 200), (1, 7, 32, 100, 300))):
        options = dict(c=c, past=(3, 1, 4)[i % 3], dtype=dtype, bias=i % 2 == 0, state=i % 4 < 2)
        yield make(n, **options), SILU if i % 2 else {"return_state": i % 4 < 2}
    for n, lens in ((5, (0, 2, 5)), (70, (70, 1, 66)), (40, (-3, 99, 7))):
        for state in (False, True):
            yield make(n, b=3, c=20, dtype=dtype, lens=lens, state=state), SILU
    for offsets in ([0, 13, 13, 50], [0, 1, 2, 40], [0, 0, 0], [3, 8, 45], [0, 0, 33, 33]):
        for pool in (False, True):
            yield make(50, c=24, dtype=dtype, packed=offsets, pool=pool, state=True, bias=True), SILU
    wrong = make(20, dtype=dtype, packed=[0, 8, 20], state=True)
    wrong["cu_seqlens"] = torch.tensor([-5, 8, 1000], dtype=torch.int32)
    yield wrong, SILU
    yield make(90, c=16, past=80, dtype=dtype, state=True), SILU
    for n, c in ((1, 32), (40, 300), (17, 7), (9, 520), (5, 3)):
        inputs = make(n, c=c, dtype=dtype, state=True, bias=True)
        yield inputs, SILU | parts_of(inputs)
        for before, behind in ((0, 8), (8, 0), (3, 1)):
            wide, where = among_others(inputs, before, behind)
            yield wide, SILU | where | (parts_of(inputs) if before else {})
    inputs = make(30, b=3, c=24, dtype=dtype, lens=(30, 0, 7))
    yield inputs, SILU | {"split": 1, "first": 1, "second": 19, "third": 4}
    inputs = make(50, c=24, dtype=dtype, packed=[3, 8, 45], pool=True)
    yield inputs, SILU | {"split": 1, "first": 11, "second": 12, "third": 1}


@pytest.mark.everywhere
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_call(dtype, instruction_set):
    for i, (inputs, attrs) in enumerate(any_calls(dtype)):
        check(inputs, attrs, threads=1 + i % 4, in_place=i % 2 == 0)


@GPU
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda(dtype):
    for i, (inputs, attrs) in enumerate(any_calls(dtype)):
        check(inputs, attrs, in_place=i % 2 == 0, device="cuda")


@pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=GPU)))
@pytest.mark.parametrize("in_place", (False, True))
def test_pools(in_place, device):
    """Rows that no request names stay as they are; one outside the pool is zeros and is written nowhere."""
    for n in (1, 2, 40):
        inputs = make(n, b=3, c=40, pool=True)
        inputs["state_index"][1] = 17
        found = check(inputs, SILU, in_place=in_place, device=device)
        others = [row for row in range(6) if row not in inputs["state_index"].tolist()]
        assert torch.equal(found["final_state"].cpu()[others], inputs["initial_state"][others])


def test_pieces_are_the_whole():
    """Bit for bit: a sum has the same terms in the same order."""
    inputs = make(90, c=33, state=True)
    whole = run_kernel(NAME, inputs, SILU)
    state, outputs = inputs["initial_state"], []
    for start, stop in ((0, 1), (1, 3), (3, 37), (37, 38), (38, 90)):
        piece = inputs | {"input": inputs["input"][:, start:stop].contiguous(), "initial_state": state}
        found = run_kernel(NAME, piece, SILU)
        state = found["final_state"]
        outputs.append(found["output"])
    assert torch.equal(torch.cat(outputs, 1), whole["output"]) and torch.equal(state, whole["final_state"])


@pytest.mark.parametrize("role", ("input", "initial_state"))
def test_values_that_are_not_finite_stay_in_their_channel(role):
    for bad in (float("nan"), float("inf")):
        inputs = make(12, c=20, state=True)
        clean = run_kernel(NAME, inputs, SILU)
        inputs[role] = inputs[role].clone()
        inputs[role][1, 0, 5] = bad
        found = run_kernel(NAME, inputs, SILU)
        reached = slice(0, 4 if role == "input" else 1)  # the oldest token of a state is in the first sum alone
        assert torch.equal(found["final_state"], clean["final_state"])
        if bad != bad:
            assert found["output"][1, reached, 5].isnan().all()
        for output in (found["output"], clean["output"]):
            output[1, reached, 5] = 0
        assert torch.equal(found["output"], clean["output"])


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_function_body(dtype):
    cases = [
        (make(9, dtype=dtype), {}),
        (make(9, c=5, bias=True, state=True, lens=(2, 9), dtype=dtype), SILU),
        (make(1, pool=True, dtype=dtype), SILU),
        (make(20, packed=[2, 2, 11, 18], pool=True, dtype=dtype), SILU),
        (make(20, packed=[0, 0, 0], state=True, dtype=dtype), {"return_state": 1}),
        (make(20, packed=[0, 1, 20], bias=True, dtype=dtype), {"return_state": 1}),
    ]
    inputs, where = among_others(make(9, c=12, bias=True, state=True, lens=(2, 9), dtype=dtype))
    cases.append((inputs, SILU | where | {"split": 1, "first": 5, "second": 3, "third": 4}))
    cases.append((make(9, c=12, dtype=dtype), {"split": 1, "first": 5, "second": 3, "third": 4}))
    for inputs, attrs in cases:
        model = one_node_model(NAME, inputs, attrs, {n: t.dim() for n, t in inputs.items()}, dtype=dtype)
        for library in (False, True):
            given = {name: x.clone() for name, x in inputs.items()}
            assert_right(ort_models.run_node(session_of(model, library), OPS[NAME], given, attrs), inputs, attrs)


def test_errors(monkeypatch):
    def refused(match, inputs, **attrs):
        with pytest.raises(ValueError, match=match):
            run_kernel(NAME, inputs, attrs)

    refused(r"weight has shape \[4,9\]", make(4) | {"weight": torch.zeros(4, 9)})
    refused(r"axis 0 of \[K\+1,C\] is 1; it is empty, expected at least 2", make(4) | {"weight": torch.zeros(1, 8)})
    refused(r"initial_state has shape \[2,3,8\]", make(4, state=True) | {"weight": torch.zeros(3, 8)})
    refused("first_column = 6 needs columns = 1; found columns = 0", make(4) | {"weight": torch.zeros(4, 4)}, first_column=6)
    refused("second = 2 needs split = 1; found split = 0", make(4) | {"weight": torch.zeros(4, 4)}, second=2)
    columns = dict(columns=1, first_column=6)
    refused("first_column is 6, and input has 8 columns; expected 4 from", make(4) | {"weight": torch.zeros(4, 4)}, **columns)
    parts = dict(split=1, first=3, second=3, third=3)
    refused(
        "first, second and third are 3, 3 and 3; expected three times 1 or more channels that add up to C = 8", make(4), **parts
    )
    refused("third are 8, 0 and 0; expected three times 1", make(4), split=1, first=8)
    refused("third are 100, 1 and 1; expected", make(4), split=1, first=100, second=1, third=1)
    refused("state_index needs input initial_state", make(4) | {"state_index": torch.zeros(2, dtype=torch.int32)})
    refused("B = 2; with cu_seqlens it must be 1", make(4) | {"cu_seqlens": torch.tensor([0, 4], dtype=torch.int32)})
    monkeypatch.setenv("LEANFLEET_CHECK", "1")
    refused(r"query_lens\[1\] is 5; expected 0 .. N = 4", make(4, lens=(4, 5)))
    twice = make(5, pool=True)
    twice["state_index"][:] = 1
    refused(r"state_index\[1\] is 1, as is state_index\[0\]", twice)
    refused(r"cu_seqlens\[2\] is 6; there are N = 5 tokens", make(5, packed=[0, 2, 6]))


def test_pytorch_forms():
    """The functional form, the one that changes a pool in place, float64 by the reference, which has gradients, and no silent
    one of the kernels."""
    inputs = make(6, pool=True)
    found = causal_conv(**inputs, return_state=True)
    assert_right(dict(zip(("output", "final_state"), found)), inputs, {"return_state": 1})
    pool = inputs["initial_state"].clone()
    assert torch.equal(causal_conv_(**inputs | {"initial_state": pool}), found[0]) and torch.equal(pool, found[1])
    exact = {k: x.double() if x.is_floating_point() else x for k, x in inputs.items()}
    assert torch.equal(causal_conv(**exact), reference.causal_conv(**exact)[0])
    inputs["weight"].requires_grad_()
    with pytest.raises(NotImplementedError, match="CausalConv has no backward"):
        causal_conv(**inputs).sum().backward()
    tensors = [x.double().requires_grad_() for x in make(4, c=2, bias=True, state=True).values()]
    assert torch.autograd.gradcheck(lambda *t: reference.causal_conv(*t, activation="silu", return_state=1), tensors)
