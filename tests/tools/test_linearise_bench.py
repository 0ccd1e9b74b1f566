"""bench/models/linearise.py and step_at.py: the steps they time are a model's, errors of attention weights, the tables."""

import copy

import numpy as np
import pytest
import torch

from leanfleet.export import export_decoder
from leanfleet.export.low_rank import linearise
from leanfleet.ort_ops import load_decoder
from support.benchmarks import script
from support.decoders import make, prompts

LINEARISE, STEP_AT = script("models.linearise"), script("models.step_at")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """(model, folder, 40 tokens, what its layers carry after them); one layer has a state, one keys and values."""
    folder, model = tmp_path_factory.mktemp("linearised"), linearise(make("llama"), "favor", [1], features=24)
    export_decoder(model, folder, verify=False)
    ids = torch.tensor(prompts(40))
    return model, folder, ids, LINEARISE.carried(model, ids)


def test_a_filled_step_is_the_models(exported):
    """Over as many tokens as were read, rows in another order: attention does not see the order of rotated keys."""
    model, folder, ids, samples = exported
    steps = load_decoder(folder, providers=["CPUExecutionProvider"]).steps(1, 44)
    STEP_AT.fill(steps, samples, 40)
    one = np.ones(1, np.int32)
    found = torch.from_numpy(steps.run(np.array([[7]]), 41 * one, one))
    whole = torch.cat([ids, torch.tensor([[7]])], 1)
    with torch.no_grad():
        low, expected = (m(whole, use_cache=False).logits[:, -1] for m in (model, copy.deepcopy(model).double()))
    assert (found - expected).abs().max() < 8 * (low - expected).abs().max()


def test_measured_steps(exported):
    _, folder, _, samples = exported
    found = STEP_AT.measure(folder, samples, 1000, warm=1, timed=2)
    assert found["held_bytes"] == 4 * (2 * 2 * 1003 * 16 + 2 * 24 * 17)
    assert found["peak_bytes"] > found["held_bytes"] and found["step_ms"] > 0
    with pytest.raises(RuntimeError, match="a step after 50 tokens has logits that are not finite"):
        STEP_AT.measure(folder, samples | {"0.value": samples["0.value"] * np.float32(np.nan)}, 50, warm=1, timed=2)


def test_errors_of_attention_weights():
    """By loops, of heads that share keys; codewords that are the window's own keys make no error."""
    model, window = make("llama"), torch.tensor(prompts(40)[0])
    found = LINEARISE.errors(model, window, ["favor", "vq"], [3, 40], 1, window[None])
    assert [(r["method"], r["rank"], r["layers"]) for r in found] == [(m, n, 1) for m in ("favor", "vq") for n in (3, 40)]
    layer = linearise(copy.deepcopy(model), "favor", [0], 3).model.layers[0].self_attn
    query, key = LINEARISE._queries_and_keys(model, window[None])[0]
    ratios, causal = [], []
    for head, q in enumerate(query.double() * layer.scaling**0.5):
        k = key[head * len(key) // len(query)].double() * layer.scaling**0.5
        low = layer.leanfleet_features.query(q[None, None])[0, 0] @ layer.leanfleet_features.key(k[None, None])[0, 0].T
        pairs = [(w / w.sum(1, keepdim=True)) for w in (torch.exp(q @ k.T), low)]
        difference = pairs[0] - pairs[1]
        below = torch.tensor([[difference[i, j] if j <= i else 0.0 for j in range(40)] for i in range(40)])
        ratios.append((below.square().sum() / difference.square().sum()).sqrt().item())
        exact, other = (w.tril() / w.tril().sum(1, keepdim=True) for w in pairs)
        causal.append(((exact - other).norm() / exact.norm()).item())
    row = found[0]
    assert row["masked_over_unmasked"] == pytest.approx(sum(ratios) / len(ratios), rel=1e-5)
    assert row["most_masked_over_unmasked"] == pytest.approx(max(ratios), rel=1e-5) and max(ratios) < 1
    assert row["causal_error"] == pytest.approx(sum(causal) / len(causal), rel=1e-5)
    assert found[3]["causal_error"] < 1e-5 < found[2]["causal_error"]
    line = LINEARISE.errors_table(found)[2]
    assert line.startswith(f"| favor | 3 | {row['causal_error']:.3f} | {row['unmasked_error']:.3f} | ")


def test_table_of_steps():
    rows = [
        dict(method=m, rank=r, layers=n, context=c, step_ms=c / 100, held_bytes=10**6 * c, peak_bytes=2 * 10**6 * c)
        for m, r, n in (("softmax", None, 0), ("vq", 256, 2))
        for c in (10, 2000)
    ]
    assert LINEARISE.steps_table(rows)[2:] == [
        "| softmax | 0 | 0.1 | 20.0 | 10.0 | 2000.0 | 20.0 | 4000.0 |",
        "| vq | 2 | 0.1 | 20.0 | 10.0 | 2000.0 | 20.0 | 4000.0 |",
    ]
