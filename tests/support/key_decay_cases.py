"""Calls of CausalLinearDecay and its gradient with a decay of each key dimension, or with states [Dv,R], which the delta rule's
kernels serve: their tolerances, and most of their inputs, are those of support.delta_cases."""

import functools

import torch

from support import delta_cases

NAMES = ("CausalLinearDecay", "CausalLinearDecayGrad")
assert_right = functools.partial(delta_cases.assert_right, names=NAMES)
assert_near = functools.partial(delta_cases.assert_near, names=NAMES)
with_grads = delta_cases.with_grads


def make(n, normalize=False, beta=True, narrow=False, **case):
    """Inputs by name. normalize: queries and keys above 0, and a norm beside the state. narrow: states of query's type. case:
    that of delta_cases.make(), where a decay may also be "head"."""
    head = case.get("decay") == "head"
    inputs = delta_cases.make(n, **case | ({"decay": None} if head else {}), unit=False)
    states = inputs["value"].shape[2 if case.get("layout") == "bnhd" else 1]
    if head:
        inputs["log_decay"] = -torch.rand(states, generator=torch.Generator().manual_seed(n)) / 4
    if not beta:
        del inputs["beta"]
    if normalize:
        for name in ("query", "key"):
            inputs[name] = inputs[name].abs()
        if (state := inputs.get("initial_state")) is not None:
            inputs["initial_norm"] = torch.rand(*state.shape[:2], inputs["key"].shape[-1])
    if narrow:
        inputs["initial_state"] = inputs["initial_state"].to(inputs["query"].dtype)
    return inputs


def grads_of(inputs, attrs, last=True):
    """Inputs and attributes of the gradient for those of the forward without beta."""
    kept = {name: x for name, x in attrs.items() if name in ("scale", "layout", "state_v_first")}
    return with_grads({name: x for name, x in inputs.items() if name != "beta"}, kept, last)
