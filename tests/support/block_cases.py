"""Calls of BlockLinear, and how far a kernel may be from the float64 reference."""

import torch

from leanfleet.export import reference

NAME = "BlockLinear"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FORMS = (torch.int8, torch.uint8, torch.float8_e4m3fn, None)  # of weights; None: T
# (B, N, I, G, O): whole vectors and chunks of 32 and 16 columns, blocks of neither, one block, ends of panels, few rows and many,
# more chunks than have their factors worked out at once, rows that workers share.
SIZES = (
    (1, 1, 64, 2, 5),
    (1, 3, 96, 3, 33),
    (2, 4, 160, 10, 7),
    (1, 5, 2112, 66, 17),
    (1, 9, 96, 3, 40),
    (2, 11, 80, 5, 70),
    (1, 21, 224, 7, 64),
    (1, 2, 28, 4, 3),
    (1, 12, 42, 3, 19),
    (1, 3, 256, 1, 2),
    (1, 40, 64, 1, 9),
    (1, 2, 80, 5, 7),
    (1, 4, 4112, 257, 3),
    (1, 3, 112, 7, 6),
    (1, 40, 1056, 33, 34),
    (1, 130, 8192, 256, 3),
)


def make(sizes, dtype, form, shift=True, bias=True, scale_dtype=torch.float32, seed=0):
    random = torch.Generator().manual_seed(seed)
    batch, tokens, width, groups, outputs = sizes
    numbers = torch.randint(
        -8 if form == torch.uint8 else -128, 8 if form == torch.uint8 else 128, (outputs, width), generator=random
    )
    if form == torch.uint8:
        weight = ((numbers[:, 0::2] + 8) | (numbers[:, 1::2] + 8) << 4).to(torch.uint8)
    elif form == torch.int8:
        weight = numbers.to(torch.int8)
    else:
        weight = (numbers / 16).to(form or dtype)
    # Blocks of all sizes, some of zeros and some of numbers so small that they count as zeros.
    x = torch.randn(batch, tokens, width, generator=random) * torch.rand(batch, tokens, 1, generator=random) * 8
    x *= min(1.0, 1024 / width) / (8 if form == torch.int8 else 1)  # results within float16
    blocks = x.view(batch, tokens, groups, -1)
    blocks[torch.rand(batch, tokens, groups, generator=random) < 0.1] = 0.0
    if dtype != torch.float16:
        blocks[torch.rand(batch, tokens, groups, generator=random) < 0.1] *= 2.0**-110
    inputs = {"input": x.to(dtype), "weight": weight, "scale": torch.randn(outputs, groups, generator=random).to(scale_dtype)}
    if shift:
        inputs["shift"] = torch.randn(outputs, groups, generator=random).to(scale_dtype)
    if bias:
        inputs["bias"] = torch.randn(outputs, generator=random).to(dtype)
    return inputs


def calls(sizes, dtype, form, seed=0):
    """(inputs, attributes) of some calls."""
    other = torch.float32 if seed % 2 else dtype
    for rounds in (0, 1):
        for shift, bias in ((True, seed % 3 == 0), (False, seed % 3 == 1)):
            yield make(sizes, dtype, form, shift, bias, other, seed), {"round_input": rounds}


def rounds_weights(inputs):
    """Whether a CUDA kernel makes T of the weights: not of up to 8 rows, whose weights lie in blocks of whole pieces of 16 bytes."""
    x, weight, scale = (inputs[name] for name in ("input", "weight", "scale"))
    piece = {torch.uint8: 32, torch.int8: 16, torch.float8_e4m3fn: 16}.get(weight.dtype, 16 // weight.element_size())
    return x.dtype != torch.float32 and (x.shape[0] * x.shape[1] > 8 or x.shape[2] // scale.shape[1] % piece != 0)


def assert_right(found, inputs, attrs, weight_eps=0.0):
    """The output's rounding, and float32's of a sum of as many terms as there are columns. A term is as large as what is multiplied
    as an unsigned number. weight_eps: of kernels that round weights and inputs to their type before they multiply."""
    double = {name: t if name == "weight" and not t.is_floating_point() else t.double() for name, t in inputs.items()}
    if inputs["weight"].dtype == torch.float8_e4m3fn:
        double["weight"] = inputs["weight"]
    dtype = inputs["input"].dtype
    (exact,) = reference.block_linear(**double, **attrs)
    numbers = reference.block_numbers(double["weight"]).double().abs()
    centre = {torch.int8: 256, torch.uint8: 16}.get(inputs["weight"].dtype, 0)
    blocks = double["scale"].shape[1]
    large = (numbers + centre).unflatten(1, (blocks, -1)) * double["scale"].abs().unsqueeze(-1)
    plain = numbers.unflatten(1, (blocks, -1)) * double["scale"].abs().unsqueeze(-1)
    if "shift" in double:
        large, plain = (x + double["shift"].abs().unsqueeze(-1) for x in (large, plain))
    terms, plain = (double["input"].abs() @ x.flatten(1).T for x in (large, plain))
    bias = double["bias"].abs() if "bias" in double else 0.0
    bound = 0.51 * torch.finfo(dtype).eps * exact.abs() + 2.0**-22 * (1.01 * terms + bias) + weight_eps * plain
    bound = bound + torch.finfo(dtype).smallest_normal
    wrong = ~((found.double() - exact).abs() <= bound)
    assert not wrong.any(), (
        attrs,
        [(n, list(t.shape)) for n, t in inputs.items()],
        found[wrong][:3],
        exact[wrong][:3],
        bound[wrong][:3],
    )
