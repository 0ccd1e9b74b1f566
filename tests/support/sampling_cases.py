"""Calls of SampleTokens drawn at random, and what their results are compared by."""

import numpy as np
import torch

from leanfleet.export import reference

LOGPROBS = ("logprob", "top_logprobs")  # the outputs that are not the same bit for bit


def make_case(seed, batch, vocabulary, dtype=torch.float32, hard=False, all_inputs=False):
    """(inputs, attributes). hard: many equal logits, NaN and infinities too. all_inputs: every optional input is given."""
    g = torch.Generator().manual_seed(seed)

    def chance(p):
        return all_inputs or bool(torch.rand(1, generator=g) < p)

    def uniform(low, high):
        return low + (high - low) * torch.rand(batch, generator=g)

    def integers(low, high, *shape, dtype=torch.int32):
        return torch.randint(low, high, shape, generator=g, dtype=dtype)

    spread = 2 * torch.randn(1, generator=g).exp()
    inputs, attrs = {"logits": (spread * torch.randn(batch, vocabulary, generator=g)).to(dtype)}, {}
    if hard:
        logits = inputs["logits"]
        logits[integers(0, batch, 1).item(), vocabulary // 3 :] = logits[0, 0]
        logits[integers(0, batch, 1).item(), :: integers(1, 5, 1).item()] = float("nan")
        logits[integers(0, batch, 1).item(), integers(0, vocabulary, 1).item()] = float("inf")
        logits[integers(0, batch, 1).item(), : integers(0, vocabulary + 1, 1).item()] = -float("inf")
    if chance(0.85):
        greedy = torch.rand(batch, generator=g) < 0.2
        inputs["temperature"] = torch.where(greedy, torch.zeros(batch), uniform(0.05, 2.0))
        inputs["seed"] = integers(-(2**62), 2**62, batch, dtype=torch.int64)
        inputs["position"] = integers(0, 2**31 - 1, batch)
        if chance(0.5):
            inputs["top_k"] = integers(0, min(vocabulary, 60) + 2, batch)
        if chance(0.5):
            inputs["top_p"] = uniform(0.01, 1.0)
        if chance(0.4):
            inputs["min_p"] = uniform(0.0, 0.3)
    if chance(0.5):
        rows = batch + 3 if chance(0.5) else batch
        if rows > batch:
            inputs["count_index"] = torch.randperm(rows, generator=g)[:batch].int()
        counts = integers(0, 5, rows, vocabulary) * (torch.rand(rows, vocabulary, generator=g) < 0.1)
        inputs["token_counts"] = (counts + (integers(0, 10, rows, vocabulary) == 0) * (1 << 30)).int()
        attrs["count_tokens"] = 1
        if chance(0.7):
            inputs["repetition_penalty"] = uniform(0.5, 1.5)
        if chance(0.7):
            inputs["presence_penalty"] = uniform(-0.5, 0.5)
        if chance(0.7):
            inputs["frequency_penalty"] = uniform(-0.5, 0.5)
    if chance(0.3):
        inputs["logit_bias"] = torch.randn(batch, vocabulary, generator=g)
    if chance(0.3):
        inputs["allowed_tokens"] = integers(-(2**31), 2**31 - 1, batch, -(-vocabulary // 32))
    if chance(0.2):
        inputs["active"] = integers(0, 2, batch)
    if chance(0.4):
        attrs["logprob"] = 1
    if chance(0.3):
        attrs["num_logprobs"] = min(vocabulary, integers(1, 21, 1).item())
    return inputs, attrs


def tail_case(vocabulary):
    """(inputs, attributes): a token, and many that weigh about 2^-14.4 of it."""
    batch = 9
    logits = 0.1 * torch.randn(batch, vocabulary, generator=torch.Generator().manual_seed(5)) - 10
    logits[:, 5] = 0.0
    logits[batch - 1, 6:] = -10.0  # all in one bin
    kept = torch.tensor([0, 40, vocabulary // 2] * 3, dtype=torch.int32)
    settings = {"temperature": torch.ones(batch), "top_k": kept, "top_p": 1 - torch.arange(batch) / 30}
    settings |= {"seed": torch.arange(batch), "position": torch.zeros(batch, dtype=torch.int32)}
    return {"logits": logits, **settings}, {"num_logprobs": 4}


def expected_outputs(inputs, attrs):
    """The reference's, in float32: its tokens are the kernels', bit for bit; log-probabilities of the float64 reference."""
    op_outputs = ["tokens"]
    op_outputs += ["logprob"] * bool(attrs.get("logprob"))
    op_outputs += ["top_logprobs", "top_tokens"] * bool(attrs.get("num_logprobs"))
    op_outputs += ["token_counts_out"] * bool(attrs.get("count_tokens"))
    found = dict(zip(op_outputs, reference.sample_tokens(**inputs, **attrs), strict=True))
    raw = inputs["logits"].double()
    largest = raw.nan_to_num(-float("inf"), float("inf"), -float("inf")).amax(1, keepdim=True)
    below = torch.where(raw == largest, torch.zeros_like(raw), raw - largest)
    logprobs = below - below.exp().sum(1, keepdim=True).log()
    logprobs[largest.isinf()[:, 0]] = float("nan")
    for name, tokens in (("logprob", found["tokens"].unsqueeze(1)), ("top_logprobs", found.get("top_tokens"))):
        if name in found:
            exact = torch.where(tokens < 0, float("nan"), logprobs.gather(1, tokens.clamp(min=0)))
            found[name] = exact.reshape(found[name].shape)
    return found


def assert_right(found, expected, words=""):
    """found: outputs by name, on any device."""
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        output = found[name].cpu()
        if name in LOGPROBS:
            torch.testing.assert_close(output.double(), right, rtol=2e-6, atol=2e-5, equal_nan=True, msg=f"{name} {words}")
        else:
            assert torch.equal(output, right), (
                f"{name} {words}: {output[output != right][:4]}, not {right[output != right][:4]}"
            )


class Rule:
    """A constraint of 97 tokens: allows some; which ones depends on all that came before."""

    def __init__(self, seed, count=9):
        self.seed, self.count, self.said = seed, count, []

    def tokens(self):
        return np.random.default_rng([self.seed, *self.said]).choice(97, self.count, replace=False)

    def allowed(self):
        words = np.zeros(4, np.uint32)
        for token in self.tokens():
            words[token // 32] |= np.uint32(1 << token % 32)
        return words.view(np.int32)

    def accept(self, token):
        assert token in self.tokens()
        self.said.append(token)
