"""Random calls of an operator for compute-sanitizer, which no test can start for every shape:

    PYTHONPATH=tests compute-sanitizer --tool racecheck --kernel-name kns=leanfleet \\
        python tests/operators/sanitize_cuda.py --calls 210 --seed 1 --operator SampleTokens

Prints the calls as it goes, and at the end how many ran.
"""

import argparse
import random
from functools import partial

import torch

from support import block_cases, delta_cases, norm_cases, product_cases, quantised_cases, sampling_cases
from support.attention_cases import QUANT_PAIRS, VARIANTS, draw_packed_prompts, draw_packed_tokens, make_case
from support.kernels import run_kernel
from support.linear_cases import LINEAR, PACKED_CASES, fill


def draw_attention(random):
    """(inputs on the CPU, attrs, words that describe them) of a call: steps, pieces of prompts, prompts; all caches."""
    if random.random() < 0.3:
        return draw_packed_tokens(random, (8, 48, 64, 64, 80, 128, 128, 192, 256))
    Hkv, group = random.choice(((1, 1), (2, 3), (3, 8), (8, 16), (1, 71), (4, 7)))
    D = random.choice((8, 48, 64, 64, 80, 128, 128, 128, 192, 256))
    Dv = random.choice((D, D, 72, 128, 40))
    Nq = random.choice((1, 1, 2, 5, 16, 33, 130, 257))
    B = random.choice((1, 1, 2, 5, 140))  # 140: whole units, more than CTAs
    lens = [random.choice((0, 1, 64, 300, 900, 2000) if B < 140 else (0, 1, 64, 130)) + Nq for _ in range(B)]
    if random.random() < 0.4:
        lens = lens[:1] * B
    append, causal = random.random() < 0.6, random.random() < 0.8
    rotary = random.choice((0, D // 2, D // 4)) if append else 0
    query_lens = [random.randint(0, Nq) for _ in lens] if random.random() < 0.5 else None
    facts = dict(
        variant=random.choice(VARIANTS),
        dtype=random.choice((torch.float16, torch.bfloat16, torch.float32)),
        lens=lens,
        query_lens=query_lens,
        H=Hkv * group,
        Hkv=Hkv,
        Nq=Nq,
        D=D,
        Dv=Dv,
        block=random.choice((1, 16, 64)),
        sinks=random.random() < 0.2,
        layout=random.choice(("bhnd", "bnhd")),
        append=append,
        causal=int(causal),
        window=random.choice((-1, -1, 100)) if causal else -1,
        softcap=random.choice((0.0, 0.0, 30.0)),
        rotary=rotary,
    )
    inputs, attrs = make_case(random.randrange(2**20), **facts)
    return inputs, attrs, ", ".join(f"{k} {v}" for k, v in facts.items())


def draw_quantised(random):
    """The same over quantised caches, all types."""
    widths = (8, 40, 64, 64, 72, 128, 128, 136, 256)
    if random.random() < 0.3:
        return draw_packed_tokens(random, widths, quant=QUANT_PAIRS)
    inputs, attrs = quantised_cases.draw(random, widths, 1000)
    return (
        inputs,
        attrs,
        ", ".join(f"{n} {tuple(t.shape)} {t.dtype}" for n, t in inputs.items() if t is not None) + f", {attrs}",
    )


def draw_sampling(random):
    """The same of SampleTokens: clusters of every size, rows in and beyond shared memory, equal logits."""
    facts = dict(
        seed=random.randrange(2**20),
        batch=random.choice((1, 2, 5, 17, 40)),
        vocabulary=random.choice((1, 33, 1000, 4096, 9001, 32_000, 70_001)),
        dtype=random.choice((torch.float16, torch.bfloat16, torch.float32)),
        hard=random.random() < 0.4,
        all_inputs=random.random() < 0.3,
    )
    inputs, attrs = sampling_cases.make_case(**facts)
    return inputs, attrs, ", ".join(f"{k} {v}" for k, v in facts.items())


def draw_linear(name, random):
    """The same of a linear operator: wide and narrow rows, one or many segments, packed or not."""
    cases = [case[1:] for case in (*LINEAR.values(), *PACKED_CASES.values()) if case[0] == name]
    present, attrs, rank = random.choice(cases)
    if name == "CausalLinearDecay":
        if random.random() < 0.5:  # without decay
            present, rank = [p for p in present if p != "log_decay"], None
        attrs = {**attrs, "algorithm": "auto" if rank == 4 else "lightning"}
    tokens = random.choice((1, 5, 65, 300, 1100))
    offsets = None
    if "cu_seqlens" in present:
        offsets = sorted(random.randint(0, tokens) for _ in range(4))
    Hkv, group = random.choice((1, 2)), random.choice((1, 3))
    size = (
        1 if offsets else 2,
        Hkv * group,
        Hkv,
        tokens,
        random.choice((8, 64, 128, 136, 256)),
        random.choice((8, 72, 136, 256)),
    )
    dtype = random.choice(("float32", "float16", "bfloat16"))
    inputs = fill(name, present, size, attrs, rank, random.randrange(2**20), dtype, offsets)
    return inputs, attrs, f"{dtype}, size {size}, offsets {offsets}, {sorted(inputs)}, {attrs}"


def draw_delta(random):
    """The same of GatedDeltaRule: steps and prompts, in chunks and token by token, pools of states."""
    tokens, k_heads = random.choice((1, 1, 3, 8, 40, 64, 130, 300)), random.choice((1, 2))
    q_group, v_group = random.choice(((1, 1), (1, 3), (2, 4), (3, 1)))
    facts = dict(
        heads=(k_heads * q_group, k_heads, k_heads * v_group),
        d=random.choice((4, 8, 20, 33, 64, 128, 128, 136, 160, 252, 256)),
        dv=random.choice((4, 7, 64, 72, 128, 128, 200)),
        dtype=random.choice(("float32", "float16", "bfloat16", "bfloat16")),
        decay=random.choice((None, "token", "token", "key", "edge")),
        layout=random.choice(("bhnd", "bnhd")),
        state=random.random() < 0.5,
        pool=random.random() < 0.3,
        packed=sorted(random.randint(0, tokens) for _ in range(4)) if random.random() < 0.4 else None,
        v_first=random.choice((0, 1)),
        seed=random.randrange(2**20),
    )
    attrs = {"normalize_qk": random.choice((0, 1, 1)), "layout": facts["layout"], "state_v_first": facts["v_first"]}
    inputs = delta_cases.make(tokens, **facts)
    attrs["return_state"] = int("state_index" in inputs or random.random() < 0.6)
    return inputs, attrs, f"{tokens} tokens, " + ", ".join(f"{k} {v}" for k, v in {**facts, **attrs}.items())


def draw_delta_grad(random):
    """The same of GatedDeltaRuleGrad: on tensor cores and not, whole vectors and not, packed or not."""
    tokens, k_heads = random.choice((1, 40, 64, 130, 300)), random.choice((1, 2))
    q_group, v_group = random.choice(((1, 1), (1, 3), (4, 2), (2, 4), (3, 1)))
    facts = dict(
        heads=(k_heads * q_group, k_heads, k_heads * v_group),
        d=random.choice((8, 33, 64, 128, 128, 256)),
        dv=random.choice((7, 64, 72, 128, 128)),
        dtype=random.choice(("float32", "float16", "bfloat16", "bfloat16")),
        decay=random.choice((None, "token", "token", "key")),
        layout=random.choice(("bhnd", "bnhd")),
        state=random.random() < 0.5,
        packed=sorted(random.randint(0, tokens) for _ in range(4)) if random.random() < 0.4 else None,
        v_first=random.choice((0, 1)),
        seed=random.randrange(2**20),
    )
    attrs = {"normalize_qk": random.choice((0, 1, 1)), "layout": facts["layout"], "state_v_first": facts["v_first"]}
    inputs, attrs = delta_cases.with_grads(delta_cases.make(tokens, **facts), attrs, last=random.random() < 0.5)
    return inputs, attrs, f"{tokens} tokens, " + ", ".join(f"{k} {v}" for k, v in {**facts, **attrs}.items())


def draw_block(random):
    """The same of BlockLinear: few rows, panels and tiles, all forms of weights, blocks of whole pieces and not."""
    sizes = (
        random.choice((1, 2)),
        random.choice((1, 1, 2, 3, 4, 7, 9, 70, 500)),
        *random.choice(((32, 1), (32, 40), (64, 9), (128, 33), (128, 130), (20, 3), (48, 5), (256, 2), (16, 200))),
        random.choice((1, 5, 64, 300, 1000, 9000, 34000)),
    )
    sizes = sizes[0], sizes[1], sizes[2] * sizes[3], sizes[3], sizes[4]
    dtype, form, seed = random.choice(block_cases.DTYPES), random.choice(block_cases.FORMS), random.randrange(2**20)
    drawn = list(block_cases.calls(sizes, dtype, form, seed))
    inputs, attrs = random.choice(drawn)
    return inputs, attrs, f"{sizes}, {dtype}, {form}, {sorted(inputs)}, {attrs}"


def draw_products(random):
    """The same of Linear: few rows, with tiles that ranges share in many ways, and more."""
    sizes = (
        random.choice((1, 2)),
        random.choice((1, 1, 2, 5, 8, 16, 60)),
        random.choice((8, 64, 72, 128, 1000, 4096, 7)),
        random.choice((8, 64, 200, 1000, 9000, 5)),
    )
    dtype, seed = random.choice(product_cases.DTYPES), random.randrange(2**20)
    inputs, attrs = random.choice(list(product_cases.calls(sizes, dtype, seed)))
    return inputs, attrs, f"{sizes}, {dtype}, {sorted(inputs)}, {attrs}"


def draw_norms(random):
    """The same of RmsNorm: units of all teams, and longer ones."""
    width, group = random.choice(((64, 16), (512, 128), (1024, 0), (2048, 0), (4096, 0), (6000, 0), (20001, 0), (60, 1)))
    sizes = random.choice((1, 3)), random.choice((1, 9, 200)), width, group
    dtype, seed = random.choice(norm_cases.DTYPES), random.randrange(2**20)
    inputs, attrs = random.choice(list(norm_cases.calls(sizes, dtype, seed)))
    return inputs, attrs, f"{sizes}, {dtype}, {sorted(inputs)}, {attrs}"


# By name: the operator, the draw, and the attribute, if any, with which a call changes its inputs.
DRAW = {
    "LeanAttention": ("LeanAttention", draw_attention, "append"),
    "prompts": ("LeanAttention", draw_packed_prompts, "append"),
    "quantised": ("LeanAttention", draw_quantised, "append"),
    "BlockLinear": ("BlockLinear", draw_block, None),
    "Linear": ("Linear", draw_products, None),
    "RmsNorm": ("RmsNorm", draw_norms, None),
    "SampleTokens": ("SampleTokens", draw_sampling, "count_tokens"),
    "GatedDeltaRule": ("GatedDeltaRule", draw_delta, "return_state"),
    "GatedDeltaRuleGrad": ("GatedDeltaRuleGrad", draw_delta_grad, "return_state"),
    **{
        name: (name, partial(draw_linear, name), "return_state")
        for name in ("CausalLinearDecay", "CausalLinearDecayGrad", "NormalizedLinearAttention", "NormalizedLinearAttentionGrad")
    },
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--operator", choices=DRAW, default="LeanAttention")
    arguments = parser.parse_args()
    operator, draw, mutating = DRAW[arguments.operator]
    generator, ran = random.Random(arguments.seed), 0
    for i in range(arguments.calls):
        inputs, attrs, words = draw(generator)
        print(f"{i}: {words}", flush=True)
        device_inputs = {n: t.cuda() if t is not None else None for n, t in inputs.items()}
        run_kernel(operator, device_inputs, attrs, in_place=generator.random() < 0.5 and bool(attrs.get(mutating)))
        ran += 1
    print(f"{ran} calls ran")


if __name__ == "__main__":
    main()
