"""CUDA kernels run by host threads (support.simulated_gpu), where the CUDA headers are: no GPU is needed."""

import ctypes
import subprocess

import pytest
import torch

from leanfleet.export import reference
from support import conv_cases, delta_cases
from support.simulated_gpu import build, compile_files, cuda_include, run_simulated
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
def gated_activation(tmp_path_factory):
    return build(tmp_path_factory.mktemp("simulated"), ["GatedActivation"])


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
def test_gated_activation(gated_activation, dtype):
    """Widths of whole vectors and of none; the first test of the real kernels that needs nothing but C++."""
    for width in (1, 7, 64, 520):
        gate_up = torch.randn(3, 5, 2, width, generator=torch.manual_seed(width)).to(dtype)
        for activation in ("silu", "gelu", "gelu_tanh", "relu"):
            found = run_simulated(gated_activation, "GatedActivation", {"gate_up": gate_up}, {"activation": activation})
            (exact,) = reference.gated_activation(gate_up.double(), activation=activation)
            rounding = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
            torch.testing.assert_close(found["output"].double(), exact, rtol=rounding, atol=rounding / 10)


@pytest.fixture(scope="module")
def causal_conv(tmp_path_factory):
    return build(tmp_path_factory.mktemp("simulated"), ["CausalConv"])


@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
def test_causal_conv(causal_conv, dtype):
    """Steps and prompts; whole vectors and single channels; requests of some tokens, packed ones and pools, in place too."""
    attrs = {"return_state": 1, "activation": "silu"}
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
            given = {name: x.clone() for name, x in inputs.items()}
            found = run_simulated(causal_conv, conv_cases.NAME, given, attrs, in_place=in_place)
            conv_cases.assert_right(found, inputs, attrs)


@pytest.fixture(scope="module")
def delta_rule(tmp_path_factory):
    return build(tmp_path_factory.mktemp("simulated"), ["GatedDeltaRule"])


def products(folder):
    """mma.sync that the library's kernels have run so far."""
    count = ctypes.CDLL(str(folder / "libleanfleet.so")).leanfleet_simulated_products
    count.restype = ctypes.c_uint64
    return count()


def check_delta_rule(folder, inputs, attrs, in_place=False):
    given = {name: x.clone() for name, x in inputs.items()}
    found = run_simulated(folder, delta_cases.NAME, given, attrs, in_place=in_place)
    delta_cases.assert_near(found, inputs, attrs)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_gated_delta_rule_by_recurrence(delta_rule, dtype):
    """Steps, ends of vectors and widths that no vector fits, both orders of the state, both kinds of decay, shared heads."""
    before = products(delta_rule)
    for n, d, dv, decay, v_first in (
        (1, 128, 32, "token", 0),
        (1, 64, 20, "key", 1),
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


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_gated_delta_rule_in_chunks(delta_rule, dtype):
    """Prompts on tensor cores: whole chunks and ends of them, packed requests with tokens of none, pools."""
    before = products(delta_rule)
    for n, d, dv, v_first in ((64, 64, 64, 0), (70, 128, 40, 1)):
        inputs = delta_cases.make(n, b=1, heads=(1, 1, 2), d=d, dv=dv, dtype=dtype, state=True, v_first=v_first)
        check_delta_rule(delta_rule, inputs, {"return_state": 1, "state_v_first": v_first, "normalize_qk": 1})
    for pool in (False, True):
        inputs = delta_cases.make(
            140, packed=[3, 8, 135], heads=(1, 1, 2), d=32, dv=40, dtype=dtype, pool=pool, state=True, layout="bnhd"
        )
        check_delta_rule(delta_rule, inputs, {"return_state": 1, "layout": "bnhd"})
    assert products(delta_rule) > before
