"""CUDA kernels run by host threads (support.simulated_gpu), where the CUDA headers are: no GPU is needed."""

import ctypes
import math
import os
import random
import re
import shutil
import subprocess
from functools import partial

import pytest
import torch

from leanfleet import spec
from leanfleet.export import reference
from support import (
    attention_cases,
    block_cases,
    conv_cases,
    delta_cases,
    gate_cases,
    key_decay_cases,
    linear_cases,
    merging_cases,
    norm_cases,
    product_cases,
    quantised_cases,
    ranks,
)
from support.attention_cases import (
    FORM_NAMES,
    QUANT_PAIRS,
    VARIANTS,
    draw_lone_tokens,
    draw_packed_tokens,
    make_case,
    same_bits,
)
from support.simulated_gpu import build, compile_files, cuda_include, run_simulated
from support.kernels import run_kernel
from support.paths import ROOT

pytestmark = pytest.mark.skipif(cuda_include() is None, reason="needs nvcc, for the CUDA headers")


def test_faults_are_found(tmp_path):
    compile_files(tmp_path, [ROOT / "tests" / "cpp" / "simulated_gpu" / "faults.cu"], "faults")
    done = subprocess.run([tmp_path / "faults"], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [
        "swap with a barrier: 0 wrong",
        "swap without: found",
        "copy waited for: 0 wrong",
        "copy not waited for: found",
        "divergent barrier: found",
        "misaligned matrix: found",
        "product in half: right",
        "product in bfloat16: right",
    ], done.stderr


@pytest.fixture(scope="module")
def small_operators(tmp_path_factory):
    return build(
        tmp_path_factory.mktemp("simulated"), ["GatedActivation", gate_cases.NAME, norm_cases.NAME, product_cases.NAME]
    )


@pytest.fixture(scope="module")
def conv_and_merge(tmp_path_factory):
    return build(tmp_path_factory.mktemp("simulated"), [conv_cases.NAME, "MergeAttention"])


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
def test_gated_activation(small_operators, dtype):
    """Widths of whole vectors and of none; the first test of the real kernels that needs nothing but C++."""
    for width in (1, 7, 64, 520):
        gate_up = torch.randn(3, 5, 2, width, generator=torch.manual_seed(width)).to(dtype)
        for activation in ("silu", "gelu", "gelu_tanh", "relu", "sigmoid"):
            apart = {"gate_up": gate_up[:, :, 0].contiguous(), "up": gate_up[:, :, 1].contiguous()}
            heads = torch.randn(4 if width % 4 == 0 else 1, generator=torch.manual_seed(1))
            skip = {"skip": apart["up"].flip(1).contiguous(), "skip_scale": heads}
            for inputs in ({"gate_up": gate_up}, apart, apart | skip):
                found = run_simulated(small_operators, "GatedActivation", inputs, {"activation": activation})
                (exact,) = reference.gated_activation(**{n: t.double() for n, t in inputs.items()}, activation=activation)
                rounding = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
                torch.testing.assert_close(found["output"].double(), exact, rtol=rounding, atol=rounding / 10)


@pytest.mark.parametrize("dtype", gate_cases.DTYPES, ids=str)
def test_decay_gates(small_operators, dtype):
    for seed, sizes in enumerate(gate_cases.SIZES):
        for inputs, attrs in gate_cases.calls(sizes, dtype, seed):
            gate_cases.assert_right(run_simulated(small_operators, gate_cases.NAME, inputs, attrs), inputs, attrs)


@pytest.mark.parametrize("dtype", norm_cases.DTYPES, ids=str)
def test_rms_norm(small_operators, dtype):
    for seed, sizes in enumerate(norm_cases.SIZES):
        for inputs, attrs in norm_cases.calls(sizes, dtype, seed):
            norm_cases.assert_right(run_simulated(small_operators, norm_cases.NAME, inputs, attrs), inputs, attrs)
    inputs, attrs = norm_cases.make((1, 2, 4096, 0), torch.float32)
    inputs["input"] = torch.full_like(inputs["input"], 1e30)
    found = run_simulated(small_operators, norm_cases.NAME, inputs, attrs)["output"]
    torch.testing.assert_close(found, inputs["weight"].expand(1, 2, -1), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("dtype", product_cases.DTYPES, ids=str)
def test_linear(small_operators, dtype):
    """That of few rows, whose CTAs share tiles in many ways, and the one that needs no cuBLAS."""
    before = products(small_operators, "group_products")
    for seed, sizes in enumerate(product_cases.SIZES):
        for inputs, attrs in product_cases.calls(sizes, dtype, seed):
            for sms in (3, 132):
                found = run_simulated(small_operators, product_cases.NAME, inputs, attrs, seed=seed, sms=sms)
                product_cases.assert_right(found, inputs, attrs, product_cases.rounds_products(sizes))
    assert (products(small_operators, "group_products") > before) == (dtype != torch.float32)


@pytest.fixture(scope="module")
def block_linear(tmp_path_factory):
    return build(tmp_path_factory.mktemp("simulated"), [block_cases.NAME])


def check_block_linear(folder, sizes, dtype, form, seed, odd=False, **options):
    """odd: tensors begin at addresses that are multiples of their elements' size alone."""
    for inputs, attrs in block_cases.calls(sizes, dtype, form, seed):
        given = {n: torch.cat([x.new_empty(1), x.flatten()])[1:].view(x.shape) for n, x in inputs.items()} if odd else inputs
        found = run_simulated(folder, block_cases.NAME, given, attrs, seed=seed, **options)["output"]
        rounds = dtype != torch.float32 if odd else block_cases.rounds_weights(inputs)
        block_cases.assert_right(found, inputs, attrs, torch.finfo(dtype).eps * rounds)


# Few rows: B, N, K, G, O. One turn of a warp and several, warps that share rows, ends of both, blocks of one piece and of many.
FEW_ROWS = ((1, 1, 64, 2, 5), (1, 2, 96, 3, 33), (1, 3, 64, 1, 2), (1, 8, 160, 5, 9), (1, 1, 2560, 80, 6), (1, 5, 4128, 1, 3))
# CTAs with several groups of outputs, and rows of the input that shared memory does not hold at once.
GROUPS = ((1, 2, 64, 2, 131), (1, 4, 6400, 200, 68), (1, 1, 26624, 1, 3))
# Panels: tiles of 16, 32 and 64 rows and their ends, lines that end within a group of 128 columns, lanes that share a block, parts
# of the columns.
PANELS = (
    (1, 9, 96, 3, 5),
    (1, 16, 544, 17, 66),
    (1, 17, 160, 5, 130),
    (2, 16, 1088, 17, 9),
    (1, 33, 32, 1, 3),
    (1, 64, 384, 3, 20),
    (1, 65, 1184, 37, 129),
)
# CTAs that go through more columns than are held and on their way at once, panels of 128 outputs of few rows, tiles of 128 rows.
LONG_PANELS = ((1, 12, 3104, 97, 258), (1, 20, 2080, 65, 257), (1, 70, 1312, 41, 130), (1, 121, 416, 13, 257))
# Tiles: blocks that are pieces and others, whole chunks of eight columns and none, ends of rows and of outputs.
TILES = ((1, 3, 28, 4, 3), (1, 9, 64, 2, 66), (1, 70, 48, 3, 5), (1, 12, 42, 3, 19), (1, 10, 136, 1, 4), (1, 1, 16, 1, 1))


@pytest.mark.parametrize("dtype", block_cases.DTYPES, ids=str)
def test_block_linear(block_linear, dtype):
    for i, form in enumerate(block_cases.FORMS):
        for seed, sizes in enumerate((*FEW_ROWS[:2], *PANELS[:2], *TILES[:2])):
            check_block_linear(block_linear, sizes, dtype, form, seed + i)


def test_weights_beyond_their_type_in_block_linear(block_linear):
    """A warp reads groups of 128 columns: those behind the width stay 0 where the weights that stand in for them are infinite."""
    inputs = block_cases.make((1, 9, 160, 5, 1), torch.float16, torch.int8, shift=False, bias=False)
    inputs["weight"][:, -32:], inputs["scale"][:, -1], inputs["input"][..., -32:] = 127, 600.0, 1.0
    assert run_simulated(block_linear, block_cases.NAME, inputs, {})["output"].isposinf().all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", block_cases.DTYPES, ids=str)
@pytest.mark.parametrize("form", block_cases.FORMS, ids=str)
def test_block_linear_of_all_sizes(block_linear, form, dtype):
    """16-bit weights have pieces of 8 columns and float32 ones of 4, so that blocks of 32 are whole pieces of any form."""
    before = products(block_linear)
    for seed, sizes in enumerate(FEW_ROWS):
        check_block_linear(block_linear, sizes, dtype, form, seed)
    for seed, sizes in enumerate(GROUPS):
        check_block_linear(block_linear, sizes, dtype, form, seed, sms=1)
    assert products(block_linear) == before, "another kernel ran"
    for seed, sizes in enumerate((*PANELS, *TILES, *block_cases.SIZES)):
        check_block_linear(block_linear, sizes, dtype, form, seed)
    for seed, sizes in enumerate(LONG_PANELS):
        check_block_linear(block_linear, sizes, dtype, form, seed, sms=1)
    for seed, sizes in enumerate((FEW_ROWS[1], PANELS[1], TILES[1])):
        check_block_linear(block_linear, sizes, dtype, form, seed, odd=True)
    assert (products(block_linear) > before) == (dtype != torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", block_cases.DTYPES, ids=str)
@pytest.mark.parametrize("rows, rounds", ((3, 0), (3, 1), (9, 0), (9, 1)))
def test_values_that_are_not_finite_in_block_linear(block_linear, rows, rounds, dtype):
    """A row of the input has results of its own, and so have an output's weights."""
    for form in block_cases.FORMS:
        inputs, attrs = block_cases.make((1, rows, 96, 3, 11), dtype, form), {"round_input": rounds}
        clean = run_simulated(block_linear, block_cases.NAME, inputs, attrs)["output"]
        for bad in (math.nan, math.inf):
            dirty = {name: x.clone() for name, x in inputs.items()}
            dirty["input"][0, 1, 40] = bad
            dirty["scale"][4, 1], dirty["shift"][5, 2], dirty["bias"][6] = bad, bad, bad
            found = run_simulated(block_linear, block_cases.NAME, dirty, attrs)["output"]
            kept = torch.ones_like(found, dtype=torch.bool)
            kept[0, 1], kept[0, :, 4:7] = False, False
            assert not found[0, 1].isfinite().any() and torch.equal(found[kept], clean[kept])
            assert not found[0, :, 4:7].isfinite().any()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", merging_cases.DTYPES, ids=str)
def test_merge_attention(conv_and_merge, dtype):
    for seed, sizes in enumerate(merging_cases.SIZES):
        inputs = merging_cases.parts_of(sizes, dtype, seed)
        merging_cases.assert_merged(run_simulated(conv_and_merge, "MergeAttention", inputs, {}), inputs)


@pytest.fixture(scope="module")
def exchanging(tmp_path_factory):
    yield build(tmp_path_factory.mktemp("simulated"), ["AllReduce", "AllGather"])
    for name in os.listdir("/dev/shm"):  # memory of ranks that were ended
        if found := re.fullmatch(r"simulated-gpu-(\d+)-\d+", name):
            if not os.path.exists(f"/proc/{found[1]}"):
                os.unlink(f"/dev/shm/{name}")


@pytest.mark.parametrize("world", (2, 3, 8))
def test_exchanges_through_windows(exchanging, fake_nccl, tmp_path, monkeypatch, world):
    """Processes with a simulated GPU each. What stands for NCCL exchanges nothing, so that all of it goes through windows."""
    monkeypatch.setenv("FAKE_NCCL_FOLDER", str(tmp_path))
    seed = 20 + world
    found = ranks.run_ranks(ranks.by_windows, world, world, os.urandom(128), fake_nccl, str(exchanging), seed)
    assert all(isinstance(f, tuple) for f in found), found
    assert all(f[0] == 0 and f[1] <= 1 for f in found), [f[:2] for f in found]
    assert all(f[2] == found[0][2] for f in found), "the ranks' sums are not the same"
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("leanfleet-")]


@pytest.mark.parametrize("how", ("cannot", "unwilling"))
def test_all_ranks_or_none_have_windows(exchanging, fake_nccl, tmp_path, monkeypatch, how):
    monkeypatch.setenv("FAKE_NCCL_FOLDER", str(tmp_path))
    ids = [os.urandom(128) for _ in range(12)]
    for number in range(len(ids)):
        (tmp_path / str(number)).mkdir()
    assert ranks.run_ranks(ranks.without_windows, 3, 3, ids, fake_nccl, str(exchanging), how) == [[0] * 12] * 3


def test_a_rank_that_ends_while_windows_wait_for_it(exchanging, fake_nccl, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_NCCL_FOLDER", str(tmp_path))
    given = os.urandom(128), fake_nccl, str(exchanging)
    texts, seconds = ranks.run_ranks(ranks.ends_while_windows_wait, 2, 2, *given, dying=(1,))[0]
    assert texts[0] == texts[1] and re.search(r"rank 0 of 2: rank 1 \(process \d+\) has ended$", texts[0]), texts
    assert seconds < 60  # and not by the time-out of 120; threads of the simulated GPU share what cores there are


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
def test_causal_conv(conv_and_merge, dtype):
    """Steps and prompts; whole vectors and single channels; requests of some tokens, packed ones and pools, in place too."""
    usual = {"return_state": 1, "activation": "silu"}
    for n, options in (
        (1, dict(c=64, pool=True)),
        (2, dict(c=7, past=4, state=True, bias=True)),
        (37, dict(c=2056, state=True)),
        (40, dict(c=24, lens=(40, 1), state=True)),
        (40, dict(c=24, lens=(0, 33))),
        (50, dict(c=16, packed=[3, 8, 8, 45], pool=True, bias=True)),
        (50, dict(c=5, past=20, packed=[0, 1, 50], state=True)),
        (20, dict(c=8, packed=[0, 0, 0])),
    ):
        for in_place in (False, True):
            inputs = conv_cases.make(n, dtype=dtype, **options)
            attrs = usual | (conv_cases.parts_of(inputs) if in_place else {})
            if in_place and not options.get("lens"):
                inputs, where = conv_cases.among_others(inputs, behind=n % 2)
                attrs |= where
            given = {name: x.clone() for name, x in inputs.items()}
            found = run_simulated(conv_and_merge, conv_cases.NAME, given, attrs, in_place=in_place)
            conv_cases.assert_right(found, inputs, attrs)


@pytest.fixture(scope="module")
def linear_decay(tmp_path_factory):
    """With the delta rule, whose kernels have decays of key dimensions."""
    templates = "causal_linear_decay/rows_launch.cu.in", "linear_scan/chunk_scan_launch.cu.in"
    instances = [(t, {"TYPE": of}) for t in templates for of in ("float", "__half", "__nv_bfloat16")]
    operators = ["CausalLinearDecay", "CausalLinearDecayGrad", "NormalizedLinearAttention", "NormalizedLinearAttentionGrad"]
    operators += ["GatedDeltaRule", "GatedDeltaRuleGrad"]
    return build(
        tmp_path_factory.mktemp("simulated"), operators, ["linear_scan/chunk_scan.cu", "linear_scan/row_sums.cu"], instances
    )


@pytest.fixture(scope="module")
def delta_rule(linear_decay):
    return linear_decay


def check_linear_decay(
    folder,
    op_name,
    heads,
    size,
    dtype="float32",
    offsets=None,
    norm=False,
    rows=3,
    beta=False,
    pool=False,
    narrow=False,
    **attrs,
):
    """size: N, R, Dv. narrow: states are of dtype. Errors against the float64 reference, each output's as a part of its size."""
    grad = op_name.endswith("Grad")
    present = [
        "log_decay",
        "initial_state",
        *["grad_final_state"] * grad,
        *["initial_norm"] * norm,
        *["cu_seqlens"] * bool(offsets),
        *["beta"] * beta,
        *["state_index"] * pool,
    ]
    attrs |= dict(grad_decay=1, grad_state=1) if grad else dict(return_state=1, normalize=int(norm))
    inputs = linear_cases.fill(
        op_name, present, (1 if offsets else 2, *heads, *size), attrs, rows, dtype=dtype, offsets=offsets
    )
    inputs["log_decay"] = inputs["log_decay"].nan_to_num(-0.5, neginf=-math.inf)
    if narrow:
        inputs["initial_state"] = inputs["initial_state"].to(inputs["query"].dtype)
    found = run_simulated(folder, op_name, {name: x.clone() for name, x in inputs.items()}, attrs)
    op = spec.all_specs()[op_name]
    exact = [inputs.get(t.name) for t in op.inputs]
    exact = [x.double() if x is not None and x.is_floating_point() else x for x in exact]
    for (name, x), e in zip(found.items(), getattr(reference, op.snake_name)(*exact, **attrs), strict=True):
        if offsets and name not in ("final_state", "final_norm", "grad_initial_state"):
            axis = 1 if attrs.get("layout") == "bnhd" else x.dim() - 1 if name == "grad_log_decay" else 2
            assert not x.narrow(axis, offsets[-1], size[0] - offsets[-1]).any(), name
        error = ((x.double() - e).norm() / e.norm()).item()
        assert error <= {"float32": 1e-6, "float16": 1.5e-3, "bfloat16": 1.2e-2}[dtype], (op_name, name, heads, error)


# Hq, Hk, Hv: inverse grouping, both kinds of sharing at once, grouped queries, all alike.
@pytest.mark.slow
@pytest.mark.parametrize("heads", ((2, 2, 6), (4, 2, 8), (1, 1, 4), (4, 1, 2), (4, 2, 2), (2, 2, 2)), ids=str)
def test_linear_decay_of_shared_heads(linear_decay, heads):
    """Steps, the recurrences, chunks on mma.sync, and gradients."""
    forward, grad = (
        partial(check_linear_decay, linear_decay, name, heads) for name in ("CausalLinearDecay", "CausalLinearDecayGrad")
    )
    before = products(linear_decay)
    forward((1, 64, 32), algorithm="auto")
    forward((1, 40, 12), "bfloat16", layout="bnhd")
    forward((3, 33, 8), "bfloat16", algorithm="causal_dot_product")
    forward((40, 16, 8), norm=True, algorithm="causal_dot_product")
    forward((40, 16, 8), "float16", norm=True, algorithm="fleet")
    assert products(linear_decay) == before
    forward((70, 16, 16), "bfloat16", algorithm="lightning")
    forward((70, 24, 8), offsets=(0, 20, 20, 66), layout="bnhd", algorithm="lightning")
    grad((70, 16, 16), "bfloat16")
    grad((40, 20, 9), layout="bnhd")
    grad((40, 16, 8), "float16", offsets=(0, 20, 20, 38))
    assert products(linear_decay) > before


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
def test_beta_of_linear_decay(linear_decay, dtype):
    """Steps, few tokens, the normalised recurrences, and chunks."""
    check = partial(check_linear_decay, linear_decay, "CausalLinearDecay", (4, 2, 8), dtype=dtype, beta=True)
    check((1, 64, 32))
    check((5, 24, 12), layout="bnhd")
    check((40, 16, 8), norm=True, algorithm="causal_dot_product")
    check((40, 16, 8), norm=True, algorithm="fleet")
    check((70, 24, 8), algorithm="lightning", layout="bnhd")
    check((70, 24, 8), norm=True, algorithm="lightning")
    check((70, 16, 8), offsets=(0, 20, 20, 66), algorithm="lightning")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_narrow_states_of_linear_decay(linear_decay, dtype):
    """Steps and few tokens read and write them; the others get float32 ones, of requests that a pool has and has not."""
    check = partial(check_linear_decay, linear_decay, "CausalLinearDecay", (4, 2, 8), dtype=dtype, narrow=True)
    check((1, 64, 32))
    check((1, 24, 12), pool=True, layout="bnhd")
    check((5, 24, 12), pool=True)
    check((40, 16, 8), norm=True, pool=True, algorithm="causal_dot_product")
    check((40, 16, 8), norm=True, algorithm="fleet")
    check((70, 24, 8), pool=True, algorithm="lightning", layout="bnhd")
    check((70, 16, 8), offsets=(0, 20, 20, 66), pool=True, algorithm="lightning")
    check((6, 16, 8), offsets=(0, 2, 2, 5), pool=True)


@pytest.mark.slow
def test_steps_of_linear_decay_with_offsets_that_fall(linear_decay):
    """Whatever they say, every request has a final state: that of no tokens is the initial one."""
    inputs = linear_cases.fill(
        "CausalLinearDecay", ["initial_state", "cu_seqlens"], (1, 2, 2, 2, 3, 16, 8), {}, offsets=(0, 3, 3, 3)
    )
    inputs["cu_seqlens"] = torch.tensor([0, 3, 2, 3], dtype=torch.int32)
    found = run_simulated(linear_decay, "CausalLinearDecay", inputs, {"return_state": 1})["final_state"]
    expected = run_kernel("CausalLinearDecay", inputs, {"return_state": 1})["final_state"]
    assert torch.equal(found[1], inputs["initial_state"][1])
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_row_sums_of_wide_keys(linear_decay, dtype):
    """Keys beyond 128 columns go in halves, with row sums found beforehand: carried, in place, of shared heads, held at eps."""
    rounding = {"float16": 1.5e-3, "bfloat16": 1.2e-2}[dtype]

    def check(name, present, heads, size, signed=False, allowed=rounding, **attrs):
        inputs = linear_cases.fill(name, present, (2, *heads, *size), attrs, seed=len(present), dtype=dtype)
        if signed:
            for role in ("query", "key"):
                sign = torch.randn(inputs[role].shape, generator=torch.manual_seed(len(role))).sign()
                inputs[role] = inputs[role] * sign.to(inputs[role].dtype)
        op = spec.all_specs()[name]
        exact = [inputs.get(t.name) for t in op.inputs]
        exact = [x.double() if x is not None and x.is_floating_point() else x for x in exact]
        expected = getattr(reference, op.snake_name)(*exact, **attrs)
        for in_place in (False, True) if not name.endswith("Grad") else (False,):
            given = {n: x.clone() for n, x in inputs.items()}
            found = run_simulated(linear_decay, name, given, attrs, in_place=in_place)
            for (output, x), e in zip(found.items(), expected, strict=True):
                error = ((x.double() - e).norm() / e.double().norm().clamp_min(1e-30)).item()
                most = allowed
                if output == "grad_coefficients":  # two sums of terms that cancel
                    most *= linear_cases.coefficient_terms(inputs, attrs) / e.norm().item()
                assert error <= most, (name, output, size, error, most)
        return found

    name, unit = "NormalizedLinearAttention", dict(normalize_qk=1)
    sums = [*linear_cases.SUMS, "coefficients"]
    check(name, sums, (4, 2), (530, 160, 40), return_state=1, **unit)
    check(name, sums, (6, 2), (37, 255, 12), return_state=1, signed=True, **unit)
    check(name, [], (2, 2), (130, 256, 72), layout="bnhd", signed=True, **unit)
    check(name, [], (2, 2), (2, 136, 8), signed=True, **unit)
    check(name, [], (2, 1), (40, 200, 16), signed=True, eps=4.0, **unit)  # the first rows are held
    check(name + "Grad", ["coefficients"], (4, 2), (130, 136, 24), **unit)
    check(name + "Grad", ["coefficients"], (4, 2), (70, 136, 160), layout="bnhd")
    check(name + "Grad", [], (2, 2), (100, 40, 250), grad_coefficients=0)
    # Signed scores whose halves cancel: the first token's output is its value, so that these are not split.
    signed = dict(signed=True, allowed=math.inf, normalize=1, algorithm="lightning")
    inputs = linear_cases.fill("CausalLinearDecay", [], (2, 2, 2, 5, 256, 8), {}, seed=0, dtype=dtype)
    first = check("CausalLinearDecay", [], (2, 2, 2), (5, 256, 8), **signed)["output"][:, :, 0]
    torch.testing.assert_close(first, inputs["value"][:, :, 0], rtol=rounding, atol=0)


def copy_of(folder, tmp_path_factory):
    """For another GPU."""
    copy = tmp_path_factory.mktemp("simulated")
    shutil.copy(folder / "libleanfleet.so", copy)
    return copy


@pytest.fixture(scope="module")
def delta_rule_before_hopper(delta_rule, tmp_path_factory):
    return copy_of(delta_rule, tmp_path_factory)


@pytest.fixture(scope="module")
def delta_rule_on_one_sm(delta_rule, tmp_path_factory):
    return copy_of(delta_rule, tmp_path_factory)


def products(folder, kind="products"):
    """mma.sync (with "group_products" wgmma) that the library's kernels have run so far."""
    count = getattr(ctypes.CDLL(str(folder / "libleanfleet.so")), f"leanfleet_simulated_{kind}")
    count.restype = ctypes.c_uint64
    return count()


def check_delta_rule(folder, inputs, attrs, in_place=False, **options):
    given = {name: x.clone() for name, x in inputs.items()}
    found = run_simulated(folder, delta_cases.NAME, given, attrs, in_place=in_place, **options)
    delta_cases.assert_near(found, inputs, attrs)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_gated_delta_rule_by_recurrence(delta_rule, dtype):
    """Steps, ends of vectors and widths that no vector fits, both orders of the state, both kinds of decay, shared heads."""
    before = products(delta_rule)
    for n, d, dv, decay, v_first in (
        (1, 128, 32, "token", 0),
        (1, 64, 20, "key", 1),
        (11, 128, 24, "key", 1),
        (5, 20, 7, None, 0),
        (3, 5, 48, "key", 1),
    ):
        inputs = delta_cases.make(n, d=d, dv=dv, dtype=dtype, decay=decay, state=True, v_first=v_first)
        check_delta_rule(delta_rule, inputs, {"return_state": 1, "state_v_first": v_first})
    for heads in ((2, 2, 6), (8, 2, 4)):
        inputs = delta_cases.make(4, heads=heads, d=32, dv=24, dtype=dtype, layout="bnhd", state=True, unit=False)
        check_delta_rule(delta_rule, inputs, {"normalize_qk": 1, "return_state": 1, "layout": "bnhd", "scale": 0.7})
    inputs = delta_cases.make(3, b=3, d=64, dv=32, dtype=dtype, pool=True)
    inputs["state_index"][1] = 17  # outside of the pool
    check_delta_rule(delta_rule, inputs, {"return_state": 1}, in_place=True)
    assert products(delta_rule) == before


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
def test_gated_delta_rule_grad(delta_rule, dtype):
    """Decays of each kind, ends of vectors and chunks, heads of each kind of sharing, packed requests, requests in spans."""

    def check(inputs, attrs, **options):
        inputs, attrs = delta_cases.with_grads(inputs, attrs)
        found = run_simulated(delta_rule, delta_cases.GRAD, inputs, attrs, **options)
        delta_cases.assert_near(found, inputs, attrs)

    for n, d, dv, decay, v_first in (
        (1, 5, 7, "token", 0),
        (16, 32, 24, "key", 1),
        (17, 40, 20, "token", 1),
        (50, 20, 70, "key", 0),
        (33, 130, 9, None, 0),
        (20, 256, 12, "key", 0),
    ):
        inputs = delta_cases.make(n, b=1, heads=(1, 1, 2), d=d, dv=dv, dtype=dtype, decay=decay, state=True, v_first=v_first)
        check(inputs, {"state_v_first": v_first})
    for heads, decay in (((4, 2, 2), "token"), ((2, 1, 4), "key")):
        inputs = delta_cases.make(20, heads=heads, d=16, dv=24, dtype=dtype, decay=decay, layout="bnhd", state=True, unit=False)
        check(inputs, {"normalize_qk": 1, "layout": "bnhd", "scale": 0.7})
    packed = [2, 3, 3, 40, 57, 88]
    for decay in ("token", "key"):
        check(delta_cases.make(90, packed=packed, heads=(4, 2, 2), d=16, dv=20, dtype=dtype, decay=decay, state=True), {})
    inputs = delta_cases.make(400, b=1, heads=(1, 1, 1), d=32, dv=40, dtype=dtype, decay=-1e-3, state=True)
    check(inputs, {"normalize_qk": 1}, seed=5)  # 25 chunks, of which tests hold 5


def check_delta_rule_grad(folder, inputs, attrs=(), factor=delta_cases.PLAIN, **options):
    """Of rows of unit length."""
    inputs, attrs = delta_cases.with_grads(inputs, {"normalize_qk": 1, **dict(attrs)})
    found = run_simulated(folder, delta_cases.GRAD, inputs, attrs, **options)
    delta_cases.assert_near(found, inputs, attrs, factor)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("decay", ("token", "key"))
def test_gated_delta_rule_grad_in_chunks(delta_rule, decay, dtype):
    """On tensor cores: ends of chunks, of widths and of vectors, heads of each kind of sharing, packed requests with tokens of
    none, in windows of a few chunks, as tests have them."""
    before = products(delta_rule)
    decays = {"token": (None, "token", -0.05), "key": ("mixed", "key", "edge")}[decay]
    for (n, d, dv, v_first), kind in zip(((64, 64, 64, 0), (150, 128, 72, 1), (100, 33, 20, 0)), decays, strict=True):
        inputs = delta_cases.make(n, b=1, heads=(1, 1, 2), d=d, dv=dv, dtype=dtype, decay=kind, state=True, v_first=v_first)
        check_delta_rule_grad(delta_rule, inputs, {"state_v_first": v_first})
    for heads in ((4, 2, 2), (2, 1, 4), (4, 1, 2)):
        inputs = delta_cases.make(70, heads=heads, d=16, dv=24, dtype=dtype, decay=decay, layout="bnhd", state=True, unit=False)
        check_delta_rule_grad(delta_rule, inputs, {"layout": "bnhd", "scale": 0.7})
    packed = [3, 70, 70, 134, 230, 295]
    for heads in ((2, 1, 2), (4, 1, 2)) if decay == "key" else ((2, 1, 2),):
        inputs = delta_cases.make(300, packed=packed, heads=heads, d=24, dv=72, dtype=dtype, decay=decay, state=True)
        check_delta_rule_grad(delta_rule, inputs, seed=3)
    assert products(delta_rule) > before


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_gated_delta_rule_grad_in_chunks_of_unusual_key_decays(delta_rule, dtype):
    """From none to all forgotten, alike and side by side, and walls between tokens that forget nothing; parallel keys."""
    case = {"b": 1, "heads": (1, 1, 1), "d": 64, "dv": 64, "dtype": dtype, "state": True}
    parallel = delta_cases.make(300, decay=0.0, **case | {"heads": (2, 2, 4)})  # the call of the CUDA tests
    key = parallel["key"].float()
    near = key[:, :, :1] + 1e-2 * key
    parallel["key"] = (near / near.norm(dim=-1, keepdim=True)).to(parallel["key"].dtype)
    parallel["beta"].fill_(2.0)
    for inputs in (
        parallel,
        *(delta_cases.make(130, decay=decay, **case) for decay in (-1e-5, -5.0, -20.0, -100.0, float("-inf"))),
    ):
        check_delta_rule_grad(delta_rule, delta_cases.with_decays_of_keys(inputs), factor=8.0)
    inputs = delta_cases.make(130, decay="key", **case)
    rates = torch.tensor((0.0, 1e-5, 1e-2, 1.0, 20.0, 103.0, 105.0, math.inf))
    inputs["log_decay"] = -rates.repeat(8).expand(1, 1, 130, 64).contiguous()
    check_delta_rule_grad(delta_rule, inputs)
    inputs["log_decay"] = torch.zeros(1, 1, 130, 64)
    inputs["log_decay"][:, :, 24::40] = -60.0
    check_delta_rule_grad(delta_rule, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_gated_delta_rule_grad_of_tokens_that_forget_all(delta_rule, dtype):
    """Between tokens that forget little, one in each block of 16 in turn: the gradient of its decays is 0, not nearly."""
    for token, heads in ((0, (1, 1, 1)), (5, (2, 1, 1)), (16, (1, 1, 1)), (24, (2, 1, 1)), (47, (1, 1, 1)), (63, (1, 1, 1))):
        inputs = delta_cases.make(100, b=1, heads=heads, d=64, dv=40, dtype=dtype, decay=-0.01, state=True)
        inputs = delta_cases.with_decays_of_keys(inputs)
        inputs["log_decay"][:, :, token] = float("-inf")
        found = check_delta_rule_grad(delta_rule, inputs)
        assert found["grad_log_decay"][:, :, token].eq(0).all(), token


@pytest.mark.slow
@pytest.mark.parametrize("scale", (1e-4, 4e5))
def test_gated_delta_rule_grad_in_chunks_of_unusual_scale(delta_rule, scale):
    """Queries times scale would leave float16's range."""
    inputs = delta_cases.make(100, b=1, heads=(1, 1, 1), d=64, dv=40, dtype="float16", decay="key", state=True)
    inputs, attrs = delta_cases.with_grads(inputs, {"normalize_qk": 1, "scale": scale})
    inputs["grad_output"] = inputs["grad_output"] * min(1e3, 1 / scale)
    found = run_simulated(delta_rule, delta_cases.GRAD, inputs, attrs)
    delta_cases.assert_near(found, inputs, attrs)


@pytest.mark.slow
@pytest.mark.parametrize("grad", (False, True), ids=("forward", "grad"))
def test_gated_delta_rule_with_keys_for_which_states_grow(delta_rule, monkeypatch, grad):
    """The check reads the keys back, and nothing runs."""
    monkeypatch.setenv("LEANFLEET_CHECK", "1")
    name = delta_cases.GRAD if grad else delta_cases.NAME
    for inputs, attrs, said in delta_cases.long_keys("bfloat16", grad=grad):
        if said is None:
            run_simulated(delta_rule, name, inputs, attrs)
            continue
        with pytest.raises(ValueError, match=f"{name}: {said}"):
            run_simulated(delta_rule, name, inputs, attrs)


@pytest.mark.slow
@pytest.mark.parametrize("role", ("query", "key", "value", "beta", "initial_state", "grad_output", "grad_final_state"))
@pytest.mark.parametrize("dtype, decay", (("float32", "token"), ("bfloat16", "token"), ("bfloat16", "key")))
def test_gated_delta_rule_grad_keeps_what_is_not_finite_in_its_head(delta_rule, dtype, decay, role):
    inputs = delta_cases.make(40, heads=(2, 2, 4), d=16, dv=24, dtype=dtype, decay=decay, state=True)
    inputs, attrs = delta_cases.with_grads(inputs, {})
    clean = run_simulated(delta_rule, delta_cases.GRAD, inputs, attrs)
    inputs[role] = inputs[role].clone()
    inputs[role][1, 1].view(-1)[0] = float("nan")
    found = run_simulated(delta_rule, delta_cases.GRAD, inputs, attrs)
    states = (2, 3) if role in ("query", "key") else (1,)
    touched = {"grad_query": {s // 2 for s in states}, "grad_key": {s // 2 for s in states}}
    for name, x in found.items():
        assert torch.equal(x[0], clean[name][0])
        for head in range(x.shape[1]):
            if head not in touched.get(name, states):
                assert torch.equal(x[1, head], clean[name][1, head]), (name, head)
    assert not found["grad_key"][1].isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_gated_delta_rule_in_chunks(delta_rule_before_hopper, dtype):
    """Prompts on tensor cores: whole chunks and ends of them, packed requests with tokens of none, pools."""
    folder = delta_rule_before_hopper
    before = products(folder)
    for n, d, dv, v_first in ((64, 64, 64, 0), (70, 128, 40, 1)):
        inputs = delta_cases.make(n, b=1, heads=(1, 1, 2), d=d, dv=dv, dtype=dtype, state=True, v_first=v_first)
        check_delta_rule(folder, inputs, {"return_state": 1, "state_v_first": v_first, "normalize_qk": 1}, major=8)
    for pool in (False, True):
        inputs = delta_cases.make(
            140, packed=[3, 8, 135], heads=(1, 1, 2), d=32, dv=40, dtype=dtype, pool=pool, state=True, layout="bnhd"
        )
        check_delta_rule(folder, inputs, {"return_state": 1, "layout": "bnhd"}, major=8)
    assert products(folder) > before
    assert products(folder, "group_products") == 0


@pytest.mark.slow
def test_gated_delta_rule_in_chunks_of_float32(delta_rule):
    """On the ordinary cores: cut widths and ends of chunks, both orders of states, shared heads, packed requests with tokens of
    none, pools in place."""
    for n, b, heads, d, dv, decay, options in (
        (64, 1, (1, 1, 1), 64, 64, "token", {}),
        (150, 1, (1, 1, 2), 128, 72, "token", dict(v_first=1)),
        (70, 2, (4, 1, 2), 20, 12, None, dict(unit=False, layout="bnhd")),
        (130, 1, (2, 2, 2), 100, 24, -100.0, {}),
        (300, 1, (2, 1, 1), 32, 40, "token", dict(packed=[3, 3, 70, 135, 290], pool=True)),
        (200, 1, (1, 1, 1), 128, 16, -1e-5, {}),
    ):
        inputs = delta_cases.make(n, b=b, heads=heads, d=d, dv=dv, decay=decay, state=True, **options)
        attrs = {"return_state": 1, "state_v_first": options.get("v_first", 0), "layout": options.get("layout", "bhnd")}
        for normalize in {1, int(not options.get("unit", True))}:
            check_delta_rule(delta_rule, inputs, attrs | {"normalize_qk": normalize}, in_place=bool(options.get("pool")))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("decay", ("token", "key", "edge"))
def test_gated_delta_rule_on_hopper(delta_rule, decay, dtype):
    """The same in two kernels: ends of chunks, one and several windows, several slices, all kinds of shared heads."""
    before = products(delta_rule, "group_products")
    for n, b, heads, d, dv, v_first in (
        (64, 1, (1, 1, 1), 64, 64, 0),
        (150, 1, (1, 1, 3), 128, 72, 1),
        (130, 2, (2, 2, 6), 96, 24, 0),
        (70, 1, (4, 1, 2), 64, 16, 0),
        (70, 1, (1, 1, 6), 32, 8, 1),
    ):
        facts = dict(b=b, heads=heads, d=d, dv=dv, dtype=dtype, decay=decay, state=True, v_first=v_first, unit=False)
        inputs = delta_cases.make(n, **facts)
        check_delta_rule(delta_rule, inputs, {"return_state": 1, "state_v_first": v_first, "normalize_qk": 1})
    check_delta_rule(delta_rule, inputs, {"state_v_first": 1, "normalize_qk": 1})  # the last state is not asked for
    for rate in (None if decay == "token" else 0.0, -100.0, float("-inf")):
        inputs = delta_cases.make(66, b=1, heads=(1, 1, 1), d=64, dv=16, dtype=dtype, decay=rate)
        if decay != "token":
            inputs = delta_cases.with_decays_of_keys(inputs)
        check_delta_rule(delta_rule, inputs, {"return_state": 1, "normalize_qk": 1})
    assert products(delta_rule, "group_products") > before


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("decay", ("token", "key", "edge", "mixed"))
def test_gated_delta_rule_on_hopper_with_wide_keys(delta_rule, decay, dtype):
    """Two warpgroups have half of the dimensions each: one head and several of a state, several windows. Up to 192 dimensions a
    tile of records stays empty."""
    for n, heads, d, dv, packed, v_first in (
        (64, (1, 1, 1), 256, 64, None, 1),
        (150, (2, 2, 6), 160, 40, None, 0),
        (70, (4, 1, 2), 192, 72, None, 1),
        (300, (1, 1, 1), 136, 16, [5, 5, 70, 290], 1),
        (40, (1, 1, 1), 200, 184, None, 0),
        (130, (2, 1, 1), 240, 88, [0, 64, 129], 0),
    ):
        before = products(delta_rule, "group_products")
        facts = dict(b=1, heads=heads, d=d, dv=dv, dtype=dtype, decay=decay, packed=packed, state=True, v_first=v_first)
        attrs = {"return_state": 1, "normalize_qk": 1, "state_v_first": v_first}
        check_delta_rule(delta_rule, delta_cases.make(n, **facts), attrs)
        assert products(delta_rule, "group_products") > before


@pytest.mark.slow
@pytest.mark.parametrize("d", (32, 136))
def test_heads_that_share_a_state_on_hopper_in_place(delta_rule, d):
    """With decays of key dimensions each head walks the state for itself, and one writes it where all read it."""
    before = products(delta_rule, "group_products")
    for n, b, heads, packed in ((130, 1, (6, 1, 2), None), (70, 2, (2, 1, 1), None), (130, 1, (2, 1, 1), [0, 66, 130])):
        inputs = delta_cases.make(n, b=b, heads=heads, d=d, dv=24, dtype="bfloat16", decay="key", packed=packed, state=True)
        check_delta_rule(delta_rule, inputs, {"return_state": 1, "normalize_qk": 1}, in_place=True)
    assert products(delta_rule, "group_products") > before


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_gated_delta_rule_on_hopper_with_many_columns(delta_rule_on_one_sm, dtype):
    """More of them than there are multiprocessors: a CTA takes 128."""
    folder = delta_rule_on_one_sm
    before = products(folder, "group_products")
    for n, heads, d, dv, packed in (
        (150, (2, 1, 1), 128, 128, None),
        (66, (1, 1, 2), 64, 200, None),
        (300, (1, 1, 1), 32, 72, [5, 5, 70, 290]),
    ):
        inputs = delta_cases.make(n, b=1, heads=heads, d=d, dv=dv, dtype=dtype, packed=packed, state=True)
        check_delta_rule(folder, inputs, {"return_state": 1, "normalize_qk": 1}, sms=1)
    assert products(folder, "group_products") > before


@pytest.mark.slow
@pytest.mark.parametrize("seed", (0, 1))
@pytest.mark.parametrize("decay", ("token", "key", "edge"))
@pytest.mark.parametrize("in_place", (False, True))
def test_gated_delta_rule_on_hopper_packed(delta_rule, in_place, decay, seed):
    """Requests of 0, 1, 63, 64, 65 and 200 tokens between tokens of none, more than a window has chunks; rows of the pool that
    no request names stay as they are, and one outside it is zeros."""
    before = products(delta_rule, "group_products")
    offsets = [3, 3, 4, 67, 131, 196, 396]
    for dtype, heads in (("bfloat16", (2, 1, 1)), ("float16", (1, 1, 2))):
        facts = dict(heads=heads, d=32, dv=40, dtype=dtype, decay=decay, pool=True, layout="bnhd")
        inputs = delta_cases.make(400, packed=offsets, **facts)
        inputs["state_index"][2] = 17
        attrs = {"return_state": 1, "layout": "bnhd", "normalize_qk": 1}
        found = check_delta_rule(delta_rule, inputs, attrs, in_place=in_place, seed=seed)
        others = [row for row in range(9) if row not in inputs["state_index"].tolist()]
        assert torch.equal(found["final_state"][others], inputs["initial_state"][others])
    assert products(delta_rule, "group_products") > before


@pytest.mark.slow
@pytest.mark.parametrize("decay, d", (("token", 16), ("key", 16), ("key", 136)))
@pytest.mark.parametrize("role", ("query", "key", "value", "beta", "initial_state"))
def test_gated_delta_rule_on_hopper_keeps_what_is_not_finite_in_its_head(delta_rule, role, decay, d):
    for dtype, bad in (("bfloat16", float("nan")), ("float16", float("inf"))):
        inputs = delta_cases.make(70, heads=(2, 2, 4), d=d, dv=24, dtype=dtype, decay=decay, state=True)
        attrs = {"return_state": 1, "normalize_qk": 1}
        clean = run_simulated(delta_rule, delta_cases.NAME, inputs, attrs)
        inputs[role] = inputs[role].clone()
        inputs[role][1, 1].view(-1)[-1 if role == "initial_state" else 0] = bad
        found = run_simulated(delta_rule, delta_cases.NAME, inputs, attrs)
        states = {"query": (2, 3), "key": (2, 3)}.get(role, (1,))
        for name, x in found.items():
            assert torch.equal(x[0], clean[name][0])
            for head in set(range(4)) - set(states):
                assert torch.equal(x[1, head], clean[name][1, head]), (name, head)
        assert not found["output"][1, states[0]].isfinite().all()


# CausalLinearDecay by the delta rule's kernels


def check_key_decays(folder, inputs, attrs, in_place=False, **options):
    name = key_decay_cases.NAMES["grad_output" in inputs]
    given = {name: x.clone() for name, x in inputs.items()}
    found = run_simulated(folder, name, given, attrs, in_place=in_place, **options)
    key_decay_cases.assert_near(found, inputs, attrs)
    if "state_index" in inputs:
        others = [row for row in range(len(inputs["initial_state"])) if row not in inputs["state_index"].tolist()]
        assert torch.equal(found["final_state"][others], inputs["initial_state"][others])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
def test_key_decays_token_by_token(linear_decay, dtype):
    """Steps and prompts, odd widths, both orders of the state, shared heads, norms, pools, states of 16 bits."""

    def check(n, normalize=0, in_place=False, **case):
        inputs = key_decay_cases.make(n, dtype=dtype, state=True, normalize=normalize, **{"decay": "key"} | case)
        if case.get("pool"):
            inputs["state_index"][1] = 17  # outside of the pool
        attrs = {"state_v_first": case.get("v_first", 0), "layout": case.get("layout", "bhnd"), "scale": 0.3}
        attrs |= {"return_state": 1, "normalize": normalize, "algorithm": "causal_dot_product" if n > 16 else "auto"}
        check_key_decays(linear_decay, inputs, attrs, in_place)

    check(1, d=64, dv=20, v_first=1)
    check(5, d=20, dv=7, heads=(2, 2, 6), layout="bnhd")
    check(3, d=5, dv=48, heads=(8, 2, 4), v_first=1, beta=False)
    check(40, d=70, dv=33, b=1, decay="mixed", v_first=1)
    check(3, d=64, dv=32, b=3, pool=True, normalize=1, in_place=True)
    check(20, d=16, dv=12, heads=(6, 2, 2), normalize=1, v_first=1, layout="bnhd")
    check(30, d=16, dv=12, packed=[2, 3, 3, 20, 27], normalize=1, pool=True)
    if dtype != "float32":
        check(1, d=24, dv=12, b=3, pool=True, narrow=True, v_first=1)
        check(20, d=16, dv=20, narrow=True, normalize=1)


@pytest.mark.slow
@pytest.mark.parametrize("decay", ("key", "edge", "mixed"))
def test_key_decays_on_hopper(linear_decay, decay):
    """Prompts in bfloat16 on tensor cores: ends of chunks, several windows and slices, packed requests, norms."""
    before = products(linear_decay, "group_products")
    for n, heads, d, dv, options in (
        (64, (1, 1, 1), 64, 64, {}),
        (150, (1, 1, 3), 128, 72, dict(v_first=1, beta=False)),
        (130, (2, 2, 2), 96, 24, dict(normalize=True)),
        (400, (2, 1, 2), 32, 40, dict(packed=[3, 3, 4, 67, 131, 196, 396], pool=True, v_first=1)),
        (70, (4, 2, 2), 32, 24, dict(normalize=True)),
        (100, (2, 1, 1), 176, 40, dict(normalize=True, v_first=1)),
    ):
        inputs = key_decay_cases.make(n, b=1, heads=heads, d=d, dv=dv, dtype="bfloat16", decay=decay, state=True, **options)
        attrs = {"return_state": 1, "state_v_first": options.get("v_first", 0), "normalize": int(options.get("normalize", 0))}
        check_key_decays(linear_decay, inputs, attrs)
    assert products(linear_decay, "group_products") > before


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_states_of_linear_decay_in_the_other_order(linear_decay, dtype):
    """Decays of heads and tokens: steps, and prompts on each algorithm's kernels."""
    for n, decay, options, attrs in (
        (1, "head", dict(d=24, dv=12, pool=True), {}),
        (5, "token", dict(d=64, dv=20, packed=[0, 2, 2, 5]), {}),
        (1, None, dict(d=16, dv=8, normalize=True, pool=True), {}),
        (40, "token", dict(d=16, dv=8, normalize=True), {"algorithm": "fleet"}),
        (40, "head", dict(d=16, dv=8, normalize=True), {"algorithm": "causal_dot_product"}),
        (70, "token", dict(d=24, dv=12, layout="bnhd", narrow=dtype != "float32"), {"algorithm": "lightning"}),
    ):
        inputs = key_decay_cases.make(n, dtype=dtype, decay=decay, state=True, v_first=1, **options)
        attrs = attrs | {"return_state": 1, "state_v_first": 1, "layout": options.get("layout", "bhnd")}
        check_key_decays(linear_decay, inputs, attrs | {"normalize": int(options.get("normalize", 0))})


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
def test_key_decays_grad(linear_decay, dtype):
    for n, decay, options in (
        (1, "key", dict(d=5, dv=7)),
        (17, "mixed", dict(d=32, dv=24, v_first=1)),
        (50, "key", dict(d=20, dv=70, b=1, heads=(1, 1, 2))),
        (20, "key", dict(d=16, dv=24, heads=(4, 2, 2), layout="bnhd", v_first=1)),
        (90, "key", dict(d=16, dv=20, heads=(2, 1, 4), packed=[2, 3, 3, 40, 57, 88])),
    ):
        inputs = key_decay_cases.make(n, dtype=dtype, decay=decay, state=True, **options)
        attrs = {"layout": options.get("layout", "bhnd"), "state_v_first": options.get("v_first", 0), "scale": 0.3}
        check_key_decays(linear_decay, *key_decay_cases.grads_of(inputs, attrs))


@pytest.mark.slow
@pytest.mark.parametrize("decay, packed", (("head", None), ("token", [2, 3, 3, 38])))
def test_gradients_of_states_in_the_other_order(linear_decay, decay, packed):
    """The same bits: the states alone are turned."""
    inputs = key_decay_cases.make(40, decay=decay, packed=packed, d=16, dv=20, state=True)
    inputs, attrs = key_decay_cases.grads_of(inputs, {})
    turned = inputs | {name: inputs[name].mT.contiguous() for name in ("initial_state", "grad_final_state")}
    name = key_decay_cases.NAMES[1]
    plain, found = (run_simulated(linear_decay, name, x, attrs | {"state_v_first": v}) for x, v in ((inputs, 0), (turned, 1)))
    assert torch.equal(plain.pop("grad_initial_state"), found.pop("grad_initial_state").mT)
    for name, x in plain.items():
        assert torch.equal(found[name], x), name


HALF = (torch.float16, torch.bfloat16)


@pytest.fixture(scope="module")
def lean_attention_library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("simulated"), ["LeanAttention"])


@pytest.fixture(autouse=True)
def no_wgmma(monkeypatch):
    """But in the test of it: prompts over quantised caches take the other kernel too."""
    monkeypatch.setenv("LEANFLEET_CONVERT", "0")


@pytest.fixture(scope="module")
def lean_attention(lean_attention_library):
    """On a GPU of 3 multiprocessors, which have several units each, whole ones and parts of some."""
    return partial(run_simulated, lean_attention_library, "LeanAttention", sms=3), partial(products, lean_attention_library)


@pytest.mark.slow
@pytest.mark.parametrize("world", (2, 3))
def test_attention_over_keys_of_all_ranks(lean_attention_library, fake_nccl, tmp_path, monkeypatch, world):
    monkeypatch.setenv("FAKE_NCCL_FOLDER", str(tmp_path))
    given = fake_nccl, str(lean_attention_library), "cuda", 30 + world
    for found in ranks.run_ranks(ranks.attention_over_ranks, world, world, os.urandom(128), *given):
        assert isinstance(found, tuple) and found[0] <= 1 and found[1] == found[2] == 12, found


# D, Dv, heads, new tokens, lengths: fewer columns than a kernel's 64 or 128, units of one CTA each and lists of units.
STRAIGHT = (
    (80, 80, (12, 1), 1, (65, 300, 17)),
    (64, 56, (5, 1), 3, (400, 90)),
    (80, 80, (6, 2), 1, (65, 300, 17)),
    (96, 96, (4, 2), 2, (700, 5)),
    (48, 40, (3, 1), 1, (130, 64, 1, 500)),
    (72, 128, (8, 2), 2, (90,)),
    (128, 96, (2, 2), 3, (170, 44, 3)),
    (64, 64, (5, 1), 1, (33, 380)),
    (128, 128, (4, 4), 1, (150, 1, 77)),
)


def assert_attention(found, inputs, attrs, what):
    """At most twice what a plain implementation in the tensors' type loses, and a rounding."""
    double = {n: t.double() if t is not None and t.is_floating_point() else t for n, t in inputs.items()}
    exact = reference.lean_attention(**double, **attrs)
    plain = reference.lean_attention(**inputs, **attrs, compute_dtype=inputs["query"].dtype)
    for name, x, e, p in zip(found, found.values(), exact, plain, strict=True):
        finite = e.isfinite()
        assert torch.equal(finite, x.isfinite()), (name, what)
        error, loses = ((y.double() - e)[finite].abs().max().item() for y in (x, p))
        rounding = torch.finfo(x.dtype).eps * e[finite].abs().max().item()
        assert error <= 2 * loses + rounding, (name, what, error, loses)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("append", (False, True))
def test_attention_over_rows_straight_into_registers(lean_attention, append, dtype):
    """Pages of any length, and short dense caches."""
    run, count = lean_attention
    for seed, (D, Dv, (H, Hkv), Nq, lens) in enumerate(STRAIGHT):
        for variant in ("paged", "dense"):
            if variant == "dense" and max(lens) > 190 - 3:
                continue
            facts = dict(H=H, Hkv=Hkv, Nq=Nq, D=D, Dv=Dv, lens=lens, append=append, rotary=D // 4 * append, layout="bnhd")
            inputs, attrs = make_case(seed, variant, dtype, **facts, window=50 if seed % 3 == 2 else -1)
            before = count()
            found = run({n: t if t is None else t.clone() for n, t in inputs.items()}, attrs)
            assert count() > before, "another kernel ran"
            assert_attention(found, inputs, attrs, (seed, variant))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_attention_of_lone_tokens(lean_attention, seed):
    """No more packed tokens than requests, whoever has them: kernels work out by themselves which tokens are whose."""
    run, count = lean_attention
    source = random.Random(seed)
    for _ in range(2):
        groups = ((1, 1), (2, 3), (1, 8), (2, 7))  # 16 rows of 128 columns go through the ring, which is not simulated
        inputs, attrs, words = draw_lone_tokens(source, (48, 64, 80, 128, 256), most_keys=300, groups=groups)
        print(words)
        before = count()
        found = run({n: t if t is None else t.clone() for n, t in inputs.items()}, attrs)
        if inputs["cu_query_lens"][-1] == 0:  # nothing to multiply or to compare
            continue
        assert count() > before, "another kernel ran"
        assert_attention(found, inputs, attrs, words)


# The same for units of 8 and of 16 rows, one and several of a head, and wide rows.
ONE_SEGMENT = (
    (64, 64, (4, 2), 1, (1, 300, 65)),
    (48, 56, (12, 2), 2, (70, 9)),
    (96, 96, (5, 1), 8, (130, 0, 40)),
    (128, 128, (8, 2), 6, (200, 33)),
    (192, 128, (3, 1), 1, (90, 17)),
    (256, 256, (6, 2), 7, (150,)),
)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("append", (False, True))
@pytest.mark.parametrize("way", (0, 1, 8), ids=("small", "large", "parts"))
def test_attention_of_one_segment_a_cta(lean_attention, lean_attention_library, monkeypatch, way, append, dtype):
    run, count = lean_attention
    monkeypatch.setenv("LEANFLEET_ONE_SEGMENT", str(way))
    for seed, (D, Dv, (H, Hkv), Nq, lens) in enumerate(ONE_SEGMENT):
        variant = VARIANTS[(seed + append) % 3]
        facts = dict(H=H, Hkv=Hkv, Nq=Nq, D=D, Dv=Dv, lens=lens, append=append, rotary=D // 4 * append, layout="bnhd")
        lens_of_query = tuple(min(Nq, n) for n in lens)
        options = dict(query_lens=lens_of_query, window=50 if seed % 3 == 2 else -1, sinks=seed % 2 == 1)
        inputs, attrs = make_case(seed, variant, dtype, **facts, **options)
        before, launched = count(), products(lean_attention_library, "launches")
        found = run({n: t if t is None else t.clone() for n, t in inputs.items()}, attrs)
        assert count() > before
        assert products(lean_attention_library, "launches") == launched + 1, "another kernel ran"
        assert_attention(found, inputs, attrs, (seed, variant))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", (torch.float32, *HALF), ids=str)
@pytest.mark.parametrize("ranges, lens", ((150, (900, 30)), (300, (2100,)), (40, (350, 1, 0))))
def test_attention_merged_by_a_launch_of_its_own(lean_attention, lean_attention_library, monkeypatch, dtype, ranges, lens):
    """Units of few parts and of more than a CTA has warps."""
    run, _ = lean_attention
    monkeypatch.setenv("LEANFLEET_RANGES", str(ranges))
    monkeypatch.setenv("LEANFLEET_MERGE_APART", "1")
    facts = dict(H=12, Hkv=1, Nq=1, D=128, Dv=128) if dtype == torch.float32 else dict(H=8, Hkv=1, Nq=1, D=128, Dv=96)
    inputs, attrs = make_case(ranges, "paged", dtype, lens=lens, **facts, sinks=True)
    launched = products(lean_attention_library, "launches")
    found = run(inputs, attrs)
    assert products(lean_attention_library, "launches") == launched + 2
    assert_attention(found, inputs, attrs, ranges)


@pytest.mark.slow
@pytest.mark.parametrize("quant", QUANT_PAIRS, ids=str)
def test_attention_over_quantised_caches(lean_attention, quant):
    run, count = lean_attention
    for seed, facts in enumerate(quantised_cases.CALLS):
        turn = seed + QUANT_PAIRS.index(quant)
        inputs, attrs = make_case(seed, VARIANTS[turn % 3], HALF[turn // 3 % 2], **facts, quant=quant)
        before = count()
        in_place = bool(attrs["append"]) and seed % 2 == 0
        quantised_cases.check(partial(run, seed=seed), inputs, attrs, in_place=in_place)
        assert count() > before


# Prompts: units of all rows and of some, several tiles and parts of tiles, all widths, pages of odd lengths.
CONVERTED = (
    dict(lens=(200, 33), H=4, Hkv=2, Nq=40, query_lens=(40, 33), D=64, Dv=64, append=True),
    dict(lens=(300,), H=3, Hkv=1, Nq=30, D=128, Dv=128, append=True, window=100),
    dict(lens=(150, 0, 129), H=2, Hkv=1, Nq=70, query_lens=(70, 0, 65), D=128, Dv=128, sinks=True, append=True, block=5),
    dict(lens=(200, 70), H=4, Hkv=1, Nq=20, D=256, Dv=256, append=True, rotary=64),
    dict(lens=(90,), H=8, Hkv=2, Nq=20, D=256, Dv=256, block=16, softcap=4.0, scale=-0.2),
)


@pytest.mark.slow
@pytest.mark.parametrize("quant", [pair for pair in QUANT_PAIRS if None not in pair and "channel" not in pair[0]], ids=str)
def test_quantised_tiles_for_wgmma(lean_attention_library, monkeypatch, quant):
    """Hopper's kernel of prompts, with the warps that convert tiles for it."""
    monkeypatch.setenv("LEANFLEET_CONVERT", "1")
    for seed, facts in enumerate(CONVERTED):
        turn = seed + QUANT_PAIRS.index(quant)
        inputs, attrs = make_case(turn, VARIANTS[turn % 3], HALF[turn // 3 % 2], **facts, quant=quant)
        before, of_groups = (products(lean_attention_library, kind) for kind in ("products", "group_products"))
        run = partial(run_simulated, lean_attention_library, "LeanAttention", sms=(1, 3, 5)[turn % 3], seed=turn)
        quantised_cases.check(run, inputs, attrs)
        assert products(lean_attention_library) == before, "another kernel"
        assert products(lean_attention_library, "group_products") > of_groups


@pytest.mark.slow
@pytest.mark.parametrize("quant", QUANT_PAIRS, ids=str)
def test_quantised_attention_of_one_segment_a_cta(lean_attention, monkeypatch, quant):
    run, count = lean_attention
    monkeypatch.setenv("LEANFLEET_ONE_SEGMENT", "9" if QUANT_PAIRS.index(quant) % 2 else "0")
    for seed, facts in enumerate(quantised_cases.CALLS):
        turn = seed + QUANT_PAIRS.index(quant)
        if facts["D"] != facts["Dv"] or facts["D"] not in (64, 128, 256):
            continue
        inputs, attrs = make_case(seed, VARIANTS[turn % 3], HALF[turn // 3 % 2], **facts, quant=quant)
        before = count()
        quantised_cases.check(partial(run, seed=seed), inputs, attrs, in_place=bool(attrs["append"]))
        assert count() > before


@pytest.mark.slow
@pytest.mark.parametrize("dtype", (torch.float32, *HALF), ids=str)
def test_attention_over_quantised_caches_without_tensor_cores(lean_attention, dtype):
    """float32, and tensors of other types that begin anywhere."""
    run, count = lean_attention
    before = count()
    for seed, quant in enumerate(QUANT_PAIRS):
        facts = quantised_cases.CALLS[(0, 3, 5, 7, 8, 9)[seed % 6]]
        inputs, attrs = make_case(seed, VARIANTS[seed % 3], dtype, **facts, quant=quant)
        quantised_cases.check(run, inputs, attrs, shift=int(dtype != torch.float32))
    assert count() == before


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_any_call_over_quantised_caches(lean_attention, seed):
    run, _ = lean_attention
    source = random.Random(seed)
    for _ in range(2):
        inputs, attrs = quantised_cases.draw(source, (8, 40, 64, 64, 72, 128, 136, 256), 200, (1, 1, 2, 7, 20))
        in_place = bool(attrs["append"]) and source.random() < 0.5
        quantised_cases.check(run, inputs, attrs, in_place=in_place, shift=source.choice((0, 0, 0, 1)))
        groups = ((1, 1), (2, 3), (1, 8), (1, 16), (2, 7))
        inputs, attrs, words = draw_packed_tokens(source, (8, 40, 64, 128), groups, quant=QUANT_PAIRS)
        print(words)
        in_place = bool(attrs["append"]) and source.random() < 0.5
        quantised_cases.check(run, inputs, attrs, in_place=in_place, shift=source.choice((0, 0, 0, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_lone_tokens_over_quantised_caches(lean_attention, seed):
    run, _ = lean_attention
    source = random.Random(seed)
    inputs, attrs, words = draw_lone_tokens(source, (40, 64, 128), most_keys=200, quant=QUANT_PAIRS)
    print(words)
    quantised_cases.check(run, inputs, attrs, in_place=bool(attrs["append"]))


@pytest.mark.slow
def test_packed_projections_over_quantised_caches(lean_attention):
    run, _ = lean_attention
    for Nq, variant in ((1, "dense"), (5, "paged"), (70, "ragged")):
        quant = QUANT_PAIRS[Nq % len(QUANT_PAIRS)]
        facts = dict(lens=(70, 90), query_lens=(min(Nq, 9), Nq), Nq=Nq, D=24, Dv=24, append=True, rotary=9, quant=quant)
        inputs, attrs = make_case(Nq, variant, HALF[Nq % 2], **facts)
        apart = quantised_cases.check(run, inputs, attrs)
        together = quantised_cases.check(run, *attention_cases.packed(inputs, attrs), in_place=True)
        assert all(same_bits(apart[name], together[name]) for name in apart)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", (torch.float32, *HALF), ids=str)
@pytest.mark.parametrize("form", FORM_NAMES)
def test_unusual_numbers_in_quantised_caches(lean_attention, form, dtype):
    run, _ = lean_attention
    if dtype == torch.bfloat16:
        quantised_cases.check_rows_that_are_not_finite(run, dtype=dtype, form=form)
    quantised_cases.check_rows_of_zeros_and_tiny_numbers(run, dtype=dtype, form=form)
    quantised_cases.check_ties_round_to_even(run, dtype=dtype, form=form)
    quantised_cases.check_every_number(run, form, dtype)
    if form == "int8":
        quantised_cases.check_scales_of_any_size(run, dtype)
        quantised_cases.check_pages_outside_the_pool(run, dtype)
