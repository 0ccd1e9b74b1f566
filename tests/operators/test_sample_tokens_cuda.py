"""The CUDA kernel of SampleTokens draws the tokens of the reference, bit for bit, whatever the cluster and the cache."""

import pytest
import torch

from support.kernels import Launches, run_kernel
from support.sampling_cases import assert_right, expected_outputs, make_case, tail_case

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("one_torch_thread"),
]
NAME = "SampleTokens"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Clusters of 1, 2, 4 and 8, chunks that end with the row and that do not, rows beyond the cache.
VOCABULARIES = (1, 3, 33, 1000, 2048, 4096, 4097, 8191, 16_384, 32_000, 50_257, 128_256, 151_936, 200_001)


def on_gpu(inputs):
    return {n: t.cuda() for n, t in inputs.items()}


def kernel(inputs, attrs=None, **options):
    return run_kernel(NAME, on_gpu(inputs), attrs, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hard", (False, True), ids=("plain", "hard"))
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_random_calls(vocabulary, hard, dtype):
    for seed in range(4):
        inputs, attrs = make_case(seed, (1, 3, 7, 20)[seed], vocabulary, dtype, hard, all_inputs=seed == 2)
        assert_right(kernel(inputs, attrs), expected_outputs(inputs, attrs), f"of case {seed}")


@pytest.mark.parametrize("batch", (16, 17, 33, 64, 65, 132, 133, 300))
def test_batches(batch):
    """Of every size of cluster on an H200, and more CTAs than run at once."""
    for seed, vocabulary in enumerate((5003, 16_392)):
        inputs, attrs = make_case(batch + seed, batch, vocabulary, torch.float16, all_inputs=seed == 1)
        assert_right(kernel(inputs, attrs), expected_outputs(inputs, attrs))


def test_rows_that_do_not_begin_at_16_bytes():
    inputs, attrs = make_case(3, 5, 4099, torch.bfloat16, all_inputs=True)
    assert_right(kernel(inputs, attrs), expected_outputs(inputs, attrs))
    buffer = torch.empty(5 * 4096 + 1, dtype=torch.float16, device="cuda")
    inputs, attrs = make_case(4, 5, 4096, torch.float16)
    given = on_gpu(inputs)
    given["logits"] = buffer[1:].view(5, 4096).copy_(given["logits"])
    assert_right(run_kernel(NAME, given, attrs), expected_outputs(inputs, attrs))


@pytest.mark.parametrize("vocabulary", (2000, 70_000))
def test_all_logits_equal(vocabulary):
    """A bin with more tokens than the list has places: the row is searched itself."""
    settings = dict(
        temperature=torch.full((3,), 0.7),
        top_k=torch.tensor([0, 1000, 1500], dtype=torch.int32),
        top_p=torch.tensor([1.0, 0.5, 0.9]),
        seed=torch.arange(3),
        position=torch.arange(3, dtype=torch.int32),
    )
    inputs = {"logits": torch.full((3, vocabulary), -1.5, dtype=torch.float16), **settings}
    assert_right(kernel(inputs), expected_outputs(inputs, {}))


@pytest.mark.parametrize("vocabulary", (3000, 40_000, 128_256))
def test_most_of_the_weight_in_the_tail(vocabulary):
    """Searches end among the tokens that are first added up as one bin."""
    inputs, attrs = tail_case(vocabulary)
    assert_right(kernel(inputs, attrs), expected_outputs(inputs, attrs))


def test_the_same_as_on_the_cpu():
    for seed in range(10):
        inputs, attrs = make_case(500 + seed, 4, 20_000, DTYPES[seed % 3])
        found, own = kernel(inputs, attrs), run_kernel(NAME, inputs, attrs)
        assert torch.equal(found["tokens"].cpu(), own["tokens"])


def test_in_place_and_replayed():
    """A captured step replayed on changed logits, positions and settings, its counts kept from one to the next."""
    inputs, attrs = make_case(9, 6, 9001, torch.float16, all_inputs=True)
    inputs.pop("active")
    device = on_gpu(inputs)
    graph = Launches(NAME, device, attrs, in_place=True)
    kept = device["token_counts"].clone()
    graph.run()  # warms up, counting
    captured = graph.capture()
    device["token_counts"].copy_(kept)
    for step in range(20):
        inputs["logits"] = (2 * torch.randn(6, 9001)).half()
        inputs["position"] += 1
        inputs["temperature"] = torch.rand(6) * (torch.arange(6) != step % 6)
        for name in ("logits", "position", "temperature"):
            device[name].copy_(inputs[name])
        captured.replay()
        torch.cuda.synchronize()
        expected = expected_outputs(inputs, attrs)
        assert_right(graph.outputs, expected, f"of step {step}")
        inputs["token_counts"] = expected["token_counts_out"]


def test_repeats_bit_for_bit():
    inputs, attrs = make_case(21, 8, 128_256, torch.bfloat16, all_inputs=True)
    first = kernel(inputs, attrs)
    for _ in range(20):
        again = kernel(inputs, attrs)
        assert all(torch.equal(again[n].nan_to_num(7.0), t.nan_to_num(7.0)) for n, t in first.items())


def test_garbage_in_integers_reaches_nothing():
    for seed in range(6):
        inputs, attrs = make_case(seed, 3, 9000, all_inputs=True)
        for name in ("top_k", "position", "token_counts", "active"):
            inputs[name] = torch.randint(-(2**31), 2**31, inputs[name].shape).int()
        inputs["count_index"] = torch.tensor([[2, -1, 7], [-(2**31), 0, 2**31 - 1]][seed % 2], dtype=torch.int32)
        assert_right(kernel(inputs, attrs), expected_outputs(inputs, attrs), f"of case {seed}")
