"""CUDA kernels run by host threads (support.simulated_gpu), where the CUDA headers are: no GPU is needed."""

import subprocess

import pytest
import torch

from leanfleet.export import reference
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
