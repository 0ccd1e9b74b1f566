"""SampleTokens: tokens are those of the reference, bit for bit, and they are distributed as they should be."""

import math

import pytest
import torch

from leanfleet.export import reference, sample_tokens, sample_tokens_
from support.kernels import run_kernel
from support.linear_cases import OPS, one_node_model, ort_models, session_of
from support.sampling_cases import assert_right, expected_outputs, make_case, tail_case

pytestmark = pytest.mark.usefixtures("one_torch_thread")
NAME = "SampleTokens"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
VOCABULARIES = (1, 2, 3, 31, 32, 33, 100, 1023, 1025, 5003)
NAN, INF = float("nan"), float("inf")


def kernel(inputs, attrs=None, **options):
    return run_kernel(NAME, inputs, attrs, **options)


def draws(batch, temperature=1.0, seed=0, **others):
    """Settings of `batch` requests, a seed each."""
    settings = {"temperature": torch.full((batch,), temperature), "seed": seed + torch.arange(batch)}
    return settings | {"position": torch.zeros(batch, dtype=torch.int32)} | others


# Tokens


@pytest.mark.everywhere
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hard", (False, True), ids=("plain", "hard"))
def test_any_call(dtype, hard, instruction_set):
    """Random settings and sizes, equal logits, NaN and infinities; on one thread and on several."""
    for seed in range(60):
        vocabulary = VOCABULARIES[seed % len(VOCABULARIES)]
        inputs, attrs = make_case(seed, 1 + seed % 5, vocabulary, dtype, hard)
        before = {n: t.clone() for n, t in inputs.items()}
        found = kernel(inputs, attrs, threads=1 + seed % 4)
        assert_right(found, expected_outputs(inputs, attrs), f"of case {seed}")
        assert all(torch.equal(t.view(torch.uint8), before[n].view(torch.uint8)) for n, t in inputs.items())


@pytest.mark.parametrize("vocabulary", (32_768, 151_936, 200_001))
def test_large_vocabularies(vocabulary, instruction_set):
    """More threads than requests: rows are cut into pieces."""
    for seed, dtype in enumerate(DTYPES):
        inputs, attrs = make_case(100 + seed, 2, vocabulary, dtype, hard=seed == 1, all_inputs=seed == 2)
        assert_right(kernel(inputs, attrs, threads=8), expected_outputs(inputs, attrs))


def test_every_row_of_a_large_batch():
    inputs, attrs = make_case(7, 65, 2049, torch.float16, all_inputs=True)
    assert_right(kernel(inputs, attrs, threads=3), expected_outputs(inputs, attrs))


def test_all_logits_equal():
    """One bin holds all tokens: order is by index alone."""
    logits = torch.full((300, 70_000), -1.5)
    settings = draws(300, 0.7, top_k=torch.full((300,), 1000, dtype=torch.int32), top_p=torch.full((300,), 0.5))
    tokens = kernel({"logits": logits[:3], **{n: t[:3] for n, t in settings.items()}})["tokens"]
    assert torch.equal(tokens, reference.sample_tokens(logits[:3], **{n: t[:3] for n, t in settings.items()})[0])
    many = kernel({"logits": logits[:, :3000].contiguous(), **settings})["tokens"]
    assert many.max() < 500 and many.unique().numel() > 200


@pytest.mark.parametrize("vocabulary", (40_000, 100_001))
def test_most_of_the_weight_in_the_tail(vocabulary):
    inputs, attrs = tail_case(vocabulary)
    found = kernel(inputs, attrs)
    assert_right(found, expected_outputs(inputs, attrs))
    assert found["tokens"].unique().numel() > 3


def test_greedy_takes_the_first_of_the_largest():
    logits = torch.zeros(4, 3000)
    logits[0, [1999, 2000]] = 1.0
    logits[1, [5, 2999]] = INF
    logits[2] = -0.0
    logits[2, 7] = 0.0
    logits[3, 0] = NAN
    assert kernel({"logits": logits})["tokens"].tolist() == [1999, 5, 0, 1]


@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_rows_without_a_possible_token(temperature):
    logits = torch.zeros(5, 40)
    logits[0] = -INF
    logits[1] = NAN
    allowed = torch.full((5, 2), -1, dtype=torch.int32)
    allowed[2] = 0
    allowed[3] = torch.tensor([0, ~0xFF])  # bits behind the last token
    counts = torch.zeros(5, 40, dtype=torch.int32)
    inputs = {"logits": logits, "allowed_tokens": allowed, "token_counts": counts, **draws(5, temperature)}
    inputs["active"] = torch.tensor([1, 1, 1, 1, 0], dtype=torch.int32)
    found = kernel(inputs, {"logprob": 1, "num_logprobs": 2, "count_tokens": 1})
    assert found["tokens"].tolist() == [-1] * 5 and found["logprob"].isnan().all()
    assert not found["token_counts_out"].any() and found["top_tokens"][4].tolist() == [-1, -1]
    assert_right(found, expected_outputs(inputs, {"logprob": 1, "num_logprobs": 2, "count_tokens": 1}))


def test_a_mask_of_one_token_decides():
    allowed = torch.zeros(97, 4, dtype=torch.int32)
    for token in range(97):
        allowed[token, token // 32] = torch.tensor(1 << token % 32).int() if token % 32 < 31 else -(2**31)
    inputs = {"logits": torch.randn(97, 97), "allowed_tokens": allowed, **draws(97, 2.0)}
    assert kernel(inputs)["tokens"].tolist() == list(range(97))


def test_a_request_does_not_depend_on_its_neighbours():
    """Alone, in another order, among others, on other threads: the same token and log-probabilities."""
    inputs, attrs = make_case(11, 9, 4001, torch.bfloat16, all_inputs=True)
    attrs.pop("count_tokens")
    whole = kernel(inputs, attrs)
    order = torch.randperm(9)

    def rows(which):
        return {n: t if n == "token_counts" else t[which].contiguous() for n, t in inputs.items()}

    for threads in (1, 2, 5):
        mixed = kernel(rows(order), attrs, threads=threads)
        alone = [kernel(rows(torch.tensor([b])), attrs, threads=threads) for b in range(9)]
        for name, output in whole.items():
            expected = output.nan_to_num(9.0)
            assert torch.equal(mixed[name].nan_to_num(9.0), expected[order]), name
            assert torch.equal(torch.cat([one[name] for one in alone]).nan_to_num(9.0), expected), name


def test_settings_that_mean_nothing_are_off():
    logits = torch.randn(6, 50)
    good = draws(6, top_k=torch.zeros(6, dtype=torch.int32), top_p=torch.ones(6), min_p=torch.zeros(6))
    bad = good | {"top_k": torch.full((6,), -3, dtype=torch.int32), "top_p": torch.tensor([NAN, INF, 2, 1, 1, 1])}
    bad |= {"min_p": torch.tensor([NAN, -1, -INF, 0, 0, 0])}
    assert torch.equal(kernel({"logits": logits, **good})["tokens"], kernel({"logits": logits, **bad})["tokens"])
    cold = good | {"temperature": torch.tensor([-1, NAN, -INF, 0, -0.0, 1e-45])}
    assert torch.equal(kernel({"logits": logits, **cold})["tokens"], logits.argmax(1))
    few = good | {"top_p": torch.tensor([0.0, -1, 1e-30, -INF, 1e-9, 0])}
    assert torch.equal(kernel({"logits": logits, **few})["tokens"], logits.argmax(1))


def test_garbage_in_integers_reaches_nothing(instruction_set):
    """Rows of counts that do not exist, counts and positions of any value."""
    for seed in range(20):
        inputs, attrs = make_case(seed, 3, 300, all_inputs=True)
        g = torch.Generator().manual_seed(seed)
        for name in ("top_k", "position", "token_counts", "active"):
            shape = inputs[name].shape
            inputs[name] = torch.randint(-(2**31), 2**31, shape, generator=g).int()
        inputs["count_index"] = torch.tensor([[2, -1, 7], [-(2**31), 0, 2**31 - 1]][seed % 2], dtype=torch.int32)
        assert_right(kernel(inputs, attrs), expected_outputs(inputs, attrs), f"of case {seed}")


# Counts


def test_counts_in_place():
    """The token counts once more in its own row; rows that no request names stay as they are, full counts too."""
    counts = torch.randint(0, 4, (5, 60)).int()
    counts[3, 2], counts[0, 3] = 2**31 - 1, 2**30 - 1
    logits = torch.zeros(3, 60)
    logits[[0, 1, 2], [2, 3, 4]] = 1.0
    inputs = {"logits": logits, "token_counts": counts.clone(), "count_index": torch.tensor([3, 0, 1], dtype=torch.int32)}
    wanted = counts.clone()
    wanted[1, 4] += 1
    for in_place in (False, True):
        given = {n: t.clone() for n, t in inputs.items()}
        found = kernel(given, {"count_tokens": 1}, in_place=in_place)
        assert found["tokens"].tolist() == [2, 3, 4] and torch.equal(found["token_counts_out"], wanted)
    tokens = sample_tokens_(logits, token_counts=inputs["token_counts"], count_index=inputs["count_index"])
    assert tokens.tolist() == [2, 3, 4] and torch.equal(inputs["token_counts"], wanted)


def test_counts_carry_penalties_from_step_to_step():
    """With a presence penalty above all differences of logits greedy goes through all tokens, the prompt's last or first."""
    logits, counts = torch.linspace(0, 1, 12).unsqueeze(0), torch.zeros(1, 12, dtype=torch.int32)
    seen = [sample_tokens_(logits, token_counts=counts, presence_penalty=torch.tensor([5.0])).item() for _ in range(12)]
    assert seen == list(range(11, -1, -1)) and (counts == 1).all()
    counts = torch.zeros(1, 12, dtype=torch.int32)
    counts[0, 6:] = 1 << 30
    assert sample_tokens(logits, token_counts=counts, presence_penalty=torch.tensor([5.0])).item() == 11
    assert sample_tokens(logits, token_counts=counts, repetition_penalty=torch.tensor([3.0])).item() == 5


# Arithmetic


def test_philox_is_that_of_its_authors():
    """The known answers that come with Random123."""
    assert reference.philox(0, 0) == (0x6627E8D5, 0xE169C58D)


def test_weights_are_powers_of_e():
    exponents = -torch.rand(100_000) * 30
    found, exact = reference._weights(exponents), torch.exp2(exponents.double() + 30)
    assert ((found - exact).abs() <= 1 + exact * 2e-7).all()
    assert reference._weights(torch.tensor([0.0, -30.0, -30.1, -INF, NAN])).tolist() == [1 << 30, 1, 0, 0, 0]


# Distributions


def plain_probabilities(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """What the settings mean, in float64: probabilities [V] of the tokens of logits [V]."""
    p = (logits.double() / temperature).softmax(0)
    p = torch.where(p >= min_p * p.max(), p, 0.0)
    order = p.argsort(descending=True, stable=True)
    if top_k:
        p[order[top_k:]] = 0.0
    p = p / p.sum()
    before = p[order].cumsum(0) - p[order]
    p[order[before >= top_p]] = 0.0
    return p / p.sum()


def surprise(tokens, probabilities):
    """How many standard deviations the chi-square statistic of a sample is above its mean; infinite where a token of
    probability 0 was drawn. Wilson and Hilferty's approximation; tokens expected less than 10 times count together."""
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    expected = probabilities * len(tokens)
    if counts[expected == 0].any():
        return math.inf
    rare = expected < 10
    counts, expected = (torch.cat([t[~rare], t[rare].sum().unsqueeze(0)]) for t in (counts, expected))
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(counts) - 1
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    return ((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


SAMPLES = 40_000
FILTERS = {
    "plain": {},
    "cold": dict(temperature=0.5),
    "hot": dict(temperature=3.0),
    "top_k": dict(top_k=7),
    "top_p": dict(top_p=0.8),
    "min_p": dict(min_p=0.05),
    "all": dict(temperature=1.5, top_k=20, top_p=0.9, min_p=0.02),
}


def sample(logits, seed=1000, same_seed=False, temperature=1.0, **filters):
    """SAMPLES tokens of one row of logits: of as many seeds, or of as many positions of one."""
    settings = draws(SAMPLES, temperature, seed)
    if same_seed:
        settings["seed"][:], settings["position"] = seed, torch.arange(SAMPLES, dtype=torch.int32)
    for name, value in filters.items():
        settings[name] = torch.full((SAMPLES,), value, dtype=torch.int32 if name == "top_k" else torch.float32)
    return kernel({"logits": logits.expand(SAMPLES, -1).contiguous(), **settings})["tokens"]


@pytest.mark.parametrize("same_seed", (False, True), ids=("seeds", "positions"))
@pytest.mark.parametrize("name", FILTERS)
def test_tokens_are_distributed_as_they_should_be(name, same_seed):
    logits = 2 * torch.randn(50, generator=torch.Generator().manual_seed(3))
    tokens = sample(logits, same_seed=same_seed, **FILTERS[name])
    assert abs(surprise(tokens, plain_probabilities(logits, **FILTERS[name]))) < 4


def test_penalties_and_bias_shift_the_distribution():
    logits, bias = torch.randn(30), torch.randn(30)
    counts = torch.randint(0, 3, (30,)).int() + (torch.rand(30) < 0.3).int() * (1 << 30)
    settings = draws(SAMPLES, 1.0, 5)
    inputs = {"logits": logits, "logit_bias": bias, "token_counts": counts}
    inputs = {n: t.expand(SAMPLES, -1).contiguous() for n, t in inputs.items()} | settings
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
    tokens = kernel(inputs | {n: torch.full((SAMPLES,), p) for n, p in penalties.items()})["tokens"]
    x, answered = logits.double() + bias, counts & (1 << 30) - 1
    x = torch.where(counts > 0, torch.where(x < 0, x * 1.3, x / 1.3), x) - 0.2 * answered - 0.4 * (answered > 0)
    assert abs(surprise(tokens, plain_probabilities(x))) < 4
    assert surprise(tokens, plain_probabilities(logits + bias)) > 10


def test_a_wrong_sampler_is_noticed():
    """The check of the check: a tenth more temperature, one token fewer, draws that repeat, a token that should not be."""
    logits = 2 * torch.randn(50, generator=torch.Generator().manual_seed(3))
    right = plain_probabilities(logits)
    assert surprise(sample(logits, temperature=1.1), right) > 10
    assert surprise(sample(logits, top_p=0.95), right) > 10
    assert surprise(sample(logits)[: SAMPLES // 8].repeat(8), right) > 4
    assert surprise(sample(logits), plain_probabilities(logits, top_k=40)) == math.inf


def test_requests_draw_independently():
    """Neighbouring seeds, neighbouring positions, and seeds beside positions: pairs of tokens have the product's distribution."""
    logits = torch.tensor([0.0, 0.2, -0.3, 0.5, 0.1, -0.6])
    p = plain_probabilities(logits)
    pairs = (p.unsqueeze(1) * p).flatten()
    seeds, positions = sample(logits, seed=1), sample(logits, seed=0, same_seed=True)
    for first, second in ((seeds[::2], seeds[1::2]), (positions[::2], positions[1::2]), (seeds, positions)):
        assert abs(surprise(first * 6 + second, pairs)) < 4
    assert surprise(seeds * 6 + seeds, pairs) > 10


# The function body, PyTorch


@pytest.mark.parametrize("all_inputs", (False, True), ids=("some", "all"))
def test_the_body_draws_the_same_tokens(all_inputs):
    for seed in range(3 if all_inputs else 12):
        inputs, attrs = make_case(seed, 1 + seed % 3, (7, 300, 5003)[seed % 3], hard=seed % 2 == 1, all_inputs=all_inputs)
        model = one_node_model(NAME, inputs, attrs, {n: t.dim() for n, t in inputs.items()})
        found = ort_models.run_node(session_of(model), OPS[NAME], inputs, attrs)
        assert_right(found, expected_outputs(inputs, attrs), f"of case {seed}")


def test_float64_is_computed_by_the_reference():
    inputs, _ = make_case(1, 4, 200)
    exact = {n: t.double() if t.is_floating_point() else t for n, t in inputs.items()}
    assert torch.equal(sample_tokens(**exact), sample_tokens(**inputs))


@pytest.mark.parametrize("seed", range(4))
def test_a_nan_reaches_its_own_row_alone(seed):
    inputs, attrs = make_case(seed, 4, 130, torch.float16, all_inputs=True)
    attrs.pop("count_tokens")
    clean = kernel(inputs, attrs)
    inputs["logits"][2, 77] = NAN
    found = kernel(inputs, attrs)
    others = [0, 1, 3]
    for name, output in found.items():
        assert torch.equal(output[others].nan_to_num(9.0), clean[name][others].nan_to_num(9.0)), name
    assert found["logprob"][2].isnan() and found["top_logprobs"][2].isnan().all()
