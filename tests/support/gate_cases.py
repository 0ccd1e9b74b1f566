"""Calls of DecayGates, and what they may lose."""

import torch

from leanfleet.export import reference

NAME = "DecayGates"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# (B, N, H, D or None): a step, ends of vectors, more rows than a piece, decays of each key dimension.
SIZES = ((1, 1, 1, None), (2, 3, 7, None), (1, 40, 64, None), (3, 300, 24, None), (1, 2, 5, 1), (2, 9, 3, 20), (1, 30, 4, 129))


def make(sizes, dtype, seed=0, lens=False, betas=True, bias=True):
    """(inputs, attributes): raw numbers where softplus bends and far out."""
    random = torch.Generator().manual_seed(seed)
    B, N, H, D = sizes
    shape = (H,) if D is None else (H, D)
    raw = 3 * torch.randn(B, N, *shape, generator=random)
    raw.view(-1)[::13] *= 20
    inputs = {"input": raw.to(dtype), "rate": -4 * torch.rand(H, generator=random)}
    attrs = {"return_step": 1, "per_key": int(D is not None), "step_min": 1e-3 * (seed % 2), "step_max": 2.0 * (seed % 3)}
    if bias:
        inputs["bias"] = torch.randn(shape, generator=random)
    if betas:
        inputs["beta_input"] = 4 * torch.randn(B, N, H, generator=random)
        inputs["beta_input"].view(-1)[::5] -= 20
        inputs["beta_input"] = inputs["beta_input"].to(dtype)
        attrs |= {"return_beta": 1, "beta_scale": 2.0}
    if lens:
        inputs["query_lens"] = torch.randint(0, N + 1, (B,), generator=random, dtype=torch.int32)
        if seed % 2:
            inputs["query_lens"][0] = -3  # which a kernel takes for none
        attrs |= {"step_min": 0.01, "step_max": 3.0}
    return inputs, attrs


def among_others(inputs, attrs, seed=0):
    """That call with its numbers among other columns, which are NaN: of one tensor, or of two."""
    heads, random = len(inputs["rate"]), torch.Generator().manual_seed(seed)
    gaps = [int(n) for n in torch.randint(0, 9, (3,), generator=random)]
    places = {"input": gaps[0], "beta_input": gaps[0] + heads + gaps[1]}
    if attrs["per_key"]:
        del places["input"]
    wide = torch.full((*inputs["input"].shape[:2], 2 * heads + sum(gaps)), torch.nan, dtype=inputs["input"].dtype)
    made = dict(inputs)
    for name, first in places.items():
        if name in inputs:
            wide[..., first : first + heads] = inputs[name]
            made[name] = wide
    if seed % 2 and "beta_input" in inputs:
        made["beta_input"] = wide[..., places["beta_input"] :].contiguous()
        places["beta_input"] = 0
    attributes = {"input": "first_column", "beta_input": "first_beta_column"}
    where = {attributes[name]: first for name, first in places.items() if name in inputs}
    return made, attrs | {"columns": 1} | where


def calls(sizes, dtype, seed=0):
    yield make(sizes, dtype, seed, lens=True)
    yield make(sizes, dtype, seed, betas=False, bias=False)
    for betas in (True, False):
        inputs, attrs = make(sizes, dtype, seed, lens=betas, betas=betas)
        yield among_others(inputs, attrs, seed)
    inputs, _ = make(sizes, dtype, seed)
    yield {name: x for name, x in inputs.items() if name != "beta_input"}, {"per_key": int(sizes[3] is not None)}


def assert_right(found, inputs, attrs, absolute=1e-37):
    """Computed in float32 whatever the type: what a sum, an exponential and a logarithm round there."""
    double = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    names = ["log_decay", *["step"] * attrs.get("return_step", 0), *["beta"] * attrs.get("return_beta", 0)]
    assert list(found) == names
    if attrs.get("columns"):
        heads = len(inputs["rate"])
        for name, attribute in (("input", "first_column"), ("beta_input", "first_beta_column")):
            if name in double and not (attrs.get("per_key") and name == "input"):
                double[name] = double[name][..., (first := attrs.get(attribute, 0)) : first + heads]
        attrs = {name: x for name, x in attrs.items() if "column" not in name}
    raw = double["input"].abs() + double.get("bias", torch.zeros(())).abs()
    for name, exact in zip(names, reference.decay_gates(**double, **attrs), strict=True):
        x = found[name]
        assert x.dtype == torch.float32 and x.shape == exact.shape, name
        # A sum that is rounded moves softplus by as much as its derivative, its own size where it is small.
        moved = exact.abs() * (double["beta_input"].abs() if name == "beta" else raw)
        bound = 2.0**-22 * (exact.abs() + moved) + {"log_decay": 8 * absolute, "step": absolute, "beta": 1e-37}[name]
        wrong = ~((x.double() - exact).abs() <= bound)
        assert not wrong.any(), (name, x[wrong][:3], exact[wrong][:3])
