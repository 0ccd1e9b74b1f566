"""CPU kernels of GatedDeltaRuleGrad, and the gradients of GatedDeltaRule in PyTorch, against float64.

Tolerances are those of support.delta_cases: what the token-by-token equations lose in float32.
"""

from itertools import product

import pytest
import torch

from leanfleet import native
from leanfleet.export import gated_delta_rule, gated_delta_rule_grad, reference
from support.cpu_time import rest_slow
from support.delta_cases import GRAD, assert_right, make, with_grads
from support.kernels import run_kernel

LENGTHS = (1, 2, 3, 31, 32, 33, 40, 64, 97)
# Hq, Hk, Hv: all alike, inverse grouping, grouped queries, both kinds of sharing at once.
HEADS = ((2, 2, 2), (2, 2, 6), (6, 2, 2), (4, 2, 8), (8, 2, 4), (1, 1, 1))
# D, Dv: whole vectors, ends of them, one element.
WIDTHS = ((1, 1), (5, 7), (16, 16), (32, 24), (20, 50), (64, 128), (128, 33))
every_instruction_set = pytest.mark.usefixtures("one_torch_thread", "instruction_set")


def check(inputs, attrs, threads=2, factor=2.0, last=True):
    inputs, attrs = with_grads(inputs, attrs, last)
    before = {name: x.clone() for name, x in inputs.items()}
    found = run_kernel(GRAD, inputs, attrs, threads)
    assert_right(found, inputs, attrs, factor, relative=16 * 2.0**-24)
    for name, x in before.items():
        assert torch.equal(inputs[name].nan_to_num(), x.nan_to_num()), name
    return found


@every_instruction_set
@pytest.mark.parametrize("n", LENGTHS)
def test_lengths(n):
    for decay, state, v_first in product((None, "token", "key"), (False, True), (0, 1)):
        check(make(n, decay=decay, state=state, v_first=v_first), {"state_v_first": v_first}, last=state)


@every_instruction_set
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_heads(heads):
    for n, (decay, layout) in product((1, 40), product(("token", "key"), ("bhnd", "bnhd"))):
        inputs = make(n, heads=heads, d=16, dv=24, decay=decay, layout=layout, state=True, unit=False)
        check(inputs, {"normalize_qk": 1, "layout": layout, "scale": 0.7})


@every_instruction_set
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
def test_widths_and_types(widths, dtype):
    for n, (decay, normalize) in product((1, 37), product(("token", "key"), (0, 1))):
        if normalize and widths[0] == 1:
            continue  # nearly nothing gets through the length of such rows
        inputs = make(n, d=widths[0], dv=widths[1], dtype=dtype, decay=decay, state=True)
        check(inputs, {"normalize_qk": normalize})


@every_instruction_set
@pytest.mark.parametrize("decay", rest_slow(("token", "key")))
def test_more_chunks_than_states_are_held(decay):
    """35 chunks in spans of 16: the states before a span are kept, and those in it found again. Decays forget nothing between."""
    inputs = make(1100, b=1, heads=(1, 1, 1), d=256, dv=256, decay=-1e-3, state=True)
    if decay == "key":
        inputs["log_decay"] = inputs["log_decay"].unsqueeze(-1) * torch.rand(256)
    check(inputs, {"normalize_qk": 1})


@pytest.mark.everywhere
@every_instruction_set
@pytest.mark.parametrize("layout", ("bhnd", "bnhd"))
def test_packed_requests(layout):
    """Also requests without tokens, and tokens of no request, which are NaN and have gradients of 0."""
    for offsets in (True, [0, 1, 2, 40], [0, 0, 0], [3, 8, 45], [0, 0, 33, 33]):
        for decay, heads in product(("token", "key"), ((2, 2, 4), (4, 1, 2))):
            inputs = make(50, packed=offsets, decay=decay, heads=heads, state=True, layout=layout)
            check(inputs, {"layout": layout, "normalize_qk": int(offsets is True)})


@every_instruction_set
def test_wrong_offsets_stay_inside():
    inputs = make(20, packed=[0, 8, 20], state=True)
    inputs["cu_seqlens"] = torch.tensor([-5, 8, 1000], dtype=torch.int32)
    check(inputs, {})


def test_the_same_bits_on_any_number_of_threads():
    inputs, attrs = with_grads(make(300, heads=(4, 1, 8), d=32, dv=40, state=True), {})
    first = run_kernel(GRAD, inputs, attrs, 1)
    for threads in (2, 3, 8):
        for name, x in run_kernel(GRAD, inputs, attrs, threads).items():
            assert torch.equal(x, first[name]), name


def adversarial():
    yield "slow decay", make(1500, b=1, d=16, dv=16, decay=-1e-5, state=True)
    yield "strong decay", make(200, b=1, decay=-100.0, state=True)
    yield "no memory", make(100, b=1, decay=float("-inf"), state=True)
    for decay in ("token", "key"):
        mixed = make(300, b=1, decay=decay, state=True)
        mixed["log_decay"].view(-1)[::3] = 0.0
        mixed["log_decay"].view(-1)[1::7] = -100.0
        yield f"mixed decays of a {decay}", mixed
    yield "decays of 1", make(3000, b=1, d=16, dv=16, state=True) | {"log_decay": torch.zeros(1, 4, 3000)}
    for beta in (0.0, 1.0, 2.0):
        inputs = make(300, b=1, d=16, dv=16, decay=None, state=True)
        inputs["beta"].fill_(beta)
        yield f"beta {beta:g}", inputs
    inputs = make(300, b=1, d=16, dv=16, decay=None, state=True)
    near = inputs["key"][:, :, :1] + 1e-3 * inputs["key"]
    inputs["key"] = near / near.norm(dim=-1, keepdim=True)
    yield "nearly parallel keys", inputs
    yield "nearly parallel keys, beta 2", inputs | {"beta": torch.full_like(inputs["beta"], 2.0)}
    inputs = make(64, b=1, d=16, dv=16, decay=-0.1, unit=False)
    inputs["key"] /= 2
    yield "keys that are too long", inputs
    yield "zero keys", make(50) | {"key": torch.zeros(2, 2, 50, 8)}


@every_instruction_set
@pytest.mark.parametrize("name", rest_slow((name for name, _ in adversarial()), quick=3))
def test_adversarial_inputs(name):
    """Parallel keys that flip the state with every token lose as much more as in the forward."""
    inputs = dict(adversarial())[name]
    for normalize in (0, 1) if name != "keys that are too long" else (0,):
        found = check(inputs, {"normalize_qk": normalize}, factor=6.0 if "parallel" in name else 2.0)
    if name == "no memory":
        assert not found["grad_log_decay"].any()


@pytest.mark.parametrize("role", ("query", "key", "value", "beta", "initial_state", "grad_output", "grad_final_state"))
def test_values_that_are_not_finite_stay_in_their_head(role):
    """They reach no request but theirs, and there nothing beyond the heads that share a head of queries or keys with theirs."""
    for decay, bad in product(("token", "key"), (float("nan"), float("inf"))):
        inputs, attrs = with_grads(make(40, heads=(2, 2, 4), d=16, dv=20, decay=decay, state=True), {})
        clean = run_kernel(GRAD, inputs, attrs)
        inputs[role] = inputs[role].clone()
        inputs[role][1, 1].view(-1)[0] = bad
        found = run_kernel(GRAD, inputs, attrs)
        states = (2, 3) if role in ("query", "key") else (1,)
        touched = {"grad_query": {s // 2 for s in states}, "grad_key": {s // 2 for s in states}}
        for name, x in found.items():
            assert torch.equal(x[0], clean[name][0])
            for head in range(x.shape[1]):
                if head not in touched.get(name, states):
                    assert torch.equal(x[1, head], clean[name][1, head]), (name, head)
        assert not found["grad_key"][1].isfinite().all()


def test_errors():
    def refused(match, inputs, attrs):
        with pytest.raises(ValueError, match=match):
            run_kernel(GRAD, inputs, attrs)

    inputs, attrs = with_grads(make(5, heads=(4, 2, 2), state=True), {})
    refused(
        r"grad_output has shape \[2,2,5,7\]: axis 1 of \[B,max\(Hq,Hv\),N,Dv\] is 2; expected 4",
        inputs | {"grad_output": torch.zeros(2, 2, 5, 7)},
        attrs,
    )
    refused(
        r"grad_final_state has shape \[2,2,7,8\]: axis 2 of \[B,Hv,D,Dv\] is 7; expected 8",
        inputs | {"grad_final_state": torch.zeros(2, 2, 7, 8)},
        attrs,
    )
    with pytest.raises(ValueError, match="grad_decay = 1 needs input log_decay"):
        gated_delta_rule_grad(**inputs | {"log_decay": None}, grad_decay=True)
    refused("input grad_output is missing", inputs | {"grad_output": None}, attrs)
    inputs["log_decay"][1, 1, 2] = 0.5
    refused(r"log_decay\[1,1,2\] is 0.5", inputs, attrs)


def exact(inputs):
    return {k: x.double() if x.is_floating_point() else x for k, x in inputs.items()}


@pytest.mark.parametrize("packed", (None, [1, 3, 3, 8]), ids=("batch", "packed"))
@pytest.mark.parametrize("heads", ((1, 1, 2), (4, 2, 2), (2, 1, 4)), ids=str)
def test_the_reference_is_the_gradient(heads, packed):
    """Of the forward's reference, by automatic differentiation."""
    for decay, layout, v_first, normalize in product((None, "token", "key"), ("bhnd", "bnhd"), (0, 1), (0, 1)):
        attrs = {"layout": layout, "state_v_first": v_first, "normalize_qk": normalize, "scale": 0.7}
        n = 9 if packed else 70
        inputs = make(n, heads=heads, d=4, dv=3, layout=layout, decay=decay, state=True, v_first=v_first, packed=packed)
        grads, grad_attrs = with_grads(inputs, attrs)
        grads = exact(grads)
        inputs = {k: x.nan_to_num(0.0, neginf=-float("inf")) if x.is_floating_point() else x for k, x in exact(inputs).items()}
        wanted = {k: x.requires_grad_() for k, x in inputs.items() if x.is_floating_point()}
        outputs = reference.gated_delta_rule(**inputs, **attrs, return_state=1)
        last = grads["grad_output"].nan_to_num(), grads["grad_final_state"]
        right = dict(zip(wanted, torch.autograd.grad(outputs, list(wanted.values()), last), strict=True))
        found = reference.gated_delta_rule_grad(**grads, **grad_attrs)
        names = ["query", "key", "value", "beta", *["log_decay"] * (decay is not None), "initial_state"]
        for name, x in zip(names, found, strict=True):
            assert torch.allclose(x, right[name], atol=1e-10, rtol=1e-9), name


@pytest.mark.parametrize("decay", (None, "token", "key"))
def test_gradcheck(decay):
    """Of the operator in PyTorch: small, because finite differences try every element."""
    inputs = exact(make(3, b=1, heads=(2, 1, 1), d=3, dv=2, decay=decay, state=True, unit=False))
    if decay:
        inputs["log_decay"].clamp_(min=-3.0)  # no finite differences at -inf
        inputs["log_decay"] -= 0.1  # nor above 0
    names = list(inputs)

    def call(*values):
        return gated_delta_rule(**dict(zip(names, values)), normalize_qk=True, return_state=True, scale=0.7)

    assert torch.autograd.gradcheck(call, tuple(x.requires_grad_() for x in inputs.values()))


def test_pytorch_gradients():
    """What autograd gives is the operator's result, and only what is asked for is computed."""
    inputs = make(40, state=True)
    for x in inputs.values():
        x.requires_grad_()
    output, state = gated_delta_rule(**inputs, return_state=True)
    grads = torch.randn_like(output), torch.randn_like(state)
    found = dict(zip(inputs, torch.autograd.grad((output, state), list(inputs.values()), grads)))
    with torch.no_grad():
        right = gated_delta_rule_grad(
            **inputs, grad_output=grads[0], grad_final_state=grads[1], grad_decay=True, grad_state=True
        )
    for name, x in zip(("query", "key", "value", "beta", "log_decay", "initial_state"), right, strict=True):
        assert torch.equal(found[name], x), name
    plain = {name: x.detach() for name, x in inputs.items()} | {"value": inputs["value"]}
    (alone,) = torch.autograd.grad(gated_delta_rule(**plain), [inputs["value"]], grads[0])
    assert torch.allclose(alone, gated_delta_rule_grad(**plain, grad_output=grads[0])[2])
    (of_state,) = torch.autograd.grad(gated_delta_rule(**plain, return_state=True)[1], [inputs["value"]], grads[1])
    zeros = torch.zeros_like(grads[0])
    assert torch.allclose(of_state, gated_delta_rule_grad(**plain, grad_output=zeros, grad_final_state=grads[1])[2].detach())


@pytest.mark.parametrize("packed", (False, True))
def test_compiled(packed):
    """Forward and backward in one graph each, and the same numbers."""
    inputs = make(20, heads=(2, 1, 4), packed=packed, decay="key", state=True, layout="bnhd")
    if packed:
        inputs = {k: x.nan_to_num(0.0) if x.is_floating_point() else x for k, x in inputs.items()}
        inputs["cu_seqlens"][-1] = 20

    def loss(query, key, value, log_decay, beta, initial_state):
        given = dict(query=query, key=key, value=value, log_decay=log_decay, beta=beta, initial_state=initial_state)
        if packed:
            given["cu_seqlens"] = inputs["cu_seqlens"]
        output, state = gated_delta_rule(**given, normalize_qk=True, return_state=True, layout="bnhd")
        return output.square().sum() + state.square().sum()

    tensors = [x.requires_grad_() for x in inputs.values() if x.is_floating_point()]
    right = torch.autograd.grad(loss(*tensors), tensors)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for found, x in zip(torch.autograd.grad(compiled(*tensors), tensors), right, strict=True):
        assert torch.allclose(found, x, atol=1e-6, rtol=1e-5)


class Layer(torch.nn.Module):
    """A gated delta rule layer: 2 heads of keys, 4 of values, of width 8. rule(query, key, value, log_decay, beta), in bnhd."""

    def __init__(self, rule, width=32):
        super().__init__()
        self.rule = rule
        self.queries, self.keys, self.values = (torch.nn.Linear(width, n, bias=False) for n in (16, 16, 32))
        self.gates, self.out = torch.nn.Linear(width, 8), torch.nn.Linear(32, width, bias=False)

    def forward(self, x):
        def heads(y, n):
            return y.unflatten(-1, (n, -1))

        log_decay, beta = self.gates(x).chunk(2, -1)
        log_decay = -torch.nn.functional.softplus(log_decay)
        y = self.rule(
            heads(self.queries(x), 2), heads(self.keys(x), 2), heads(self.values(x), 4), log_decay, beta=beta.sigmoid()
        )
        return x + self.out(y.flatten(2))


def test_training_is_that_of_plain_pytorch():
    """Two layers trained side by side in float32: losses and weights stay together, and the loss falls."""

    def ours(*tokens, beta):
        return gated_delta_rule(*tokens, beta=beta, normalize_qk=True, layout="bnhd")

    def plain(*tokens, beta):
        return reference.gated_delta_rule(*tokens, beta=beta, normalize_qk=1, layout="bnhd")[0]

    torch.manual_seed(3)
    x, target = torch.randn(2, 45, 32), torch.randn(2, 45, 32)
    first = torch.nn.Sequential(Layer(ours), Layer(ours))
    second = torch.nn.Sequential(Layer(plain), Layer(plain))
    second.load_state_dict(first.state_dict())
    losses = []
    for model in (first, second):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4)
        losses.append([])
        for _ in range(20):
            loss = (model(x) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0][-1] < 0.95 * losses[0][0]
    assert torch.allclose(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-5)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_the_library_knows_it():
    assert GRAD in native.op_names()
