"""Beam search over continuous batching finds what transformers' beam search finds."""

import numpy as np
import pytest
import torch
import transformers

from leanfleet.beams import beam_search
from leanfleet.export.serving import export_for_serving
from leanfleet.ort_ops.serving import ContinuousBatch
from support import decoders
from support.cpu_time import rest_slow

STOP = 2


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """(model, folder). The stop token is likely, so that answers end at many lengths."""
    torch.manual_seed(0)
    config = {**decoders.SIZES, "num_hidden_layers": 1, "eos_token_id": STOP, "vocab_size": 60}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3 if p.dim() > 1 else 1)
        model.lm_head.weight[STOP] *= 1.5
    folder = tmp_path_factory.mktemp("beams")
    export_for_serving(model, folder, block=4, verify=False)
    return model, folder


def batch_of(folder, **limits):
    return ContinuousBatch(folder, **dict(pages=60, max_requests=7, step_tokens=40) | limits, device="cpu")


PROMPTS = [np.random.default_rng(n).integers(3, 60, n).tolist() for n in (1, 4, 9, 17)]


@pytest.mark.parametrize("early_stopping", (False, True, "never"))
@pytest.mark.parametrize("length_penalty", rest_slow((1.0, 0.0, -1.5, 2.5)))
@pytest.mark.parametrize("beams", rest_slow((3, 2, 6)))
def test_answers_are_transformers_s(exported, beams, length_penalty, early_stopping):
    model, folder = exported
    batch = batch_of(folder)
    beside = batch.add([5, 6, 7], max_new_tokens=30, stop_tokens=())
    found = beam_search(
        batch, PROMPTS, beams, 14, length_penalty=length_penalty, early_stopping=early_stopping, stop_tokens=[STOP]
    )
    ended = set()
    for prompt, answers in zip(PROMPTS, found, strict=True):
        expected = model.generate(
            torch.tensor([prompt]),
            num_beams=beams,
            num_return_sequences=beams,
            max_new_tokens=14,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        rows = [row[len(prompt) :] for row in expected.sequences.tolist()]
        rows = [row[: row.index(STOP) + 1] if STOP in row else row for row in rows]
        assert [answer.tokens for answer in answers] == rows
        np.testing.assert_allclose([answer.score for answer in answers], expected.sequences_scores, rtol=1e-5, atol=1e-4)
        ended |= {len(answer.tokens) for answer in answers}
    assert len(ended) > 2 or length_penalty > 1  # which has all go on to the end
    batch.run()
    assert beside.done and batch.pool.in_use == 0 and batch.shared_tokens > 100


def test_a_pool_too_small_for_all_beams(exported):
    """Beams wait for one another, and give pages back: the answers are the same."""
    _, folder = exported
    small = batch_of(folder, pages=9, max_requests=2, step_tokens=8)
    found, expected = (
        [[answer.tokens for answer in answers] for answers in beam_search(batch, PROMPTS, 3, 14, stop_tokens=[STOP])]
        for batch in (small, batch_of(folder))
    )
    assert found == expected and small.preemptions


def test_one_beam_is_greedy(exported):
    (answers,) = beam_search(
        batch_of(exported[1]), PROMPTS[2:3], 1, 14, length_penalty=0.0, early_stopping=True, stop_tokens=()
    )
    batch = batch_of(exported[1])
    request = batch.add(PROMPTS[2], 14, stop_tokens=())
    batch.run()
    assert answers[0].tokens == request.tokens and answers[0].logprob == pytest.approx(sum(request.logprobs), abs=1e-4)


def test_wrong_options(exported):
    batch = batch_of(exported[1])
    for options, words in (
        (dict(beams=0), "beams is 0"),
        (dict(beams=11), "ask for 10 beams or fewer"),
        (dict(beams=6, stop_tokens=[1, 2, 3]), "ask for 5 beams or fewer"),
        (dict(max_new_tokens=0), "max_new_tokens is 0"),
        (dict(early_stopping="soon"), "early_stopping is 'soon'; expected True, False or 'never'"),
        (dict(length_penalty=float("nan")), "length_penalty is nan"),
        (dict(length_penalty="long"), "length_penalty is 'long'; expected a finite number"),
        (dict(max_new_tokens=10_000), "positions that the model was trained for|the pool has 60"),
    ):
        with pytest.raises(ValueError, match=words):
            beam_search(batch, [[4, 5]], **options)
        assert batch.idle
    with pytest.raises(ValueError, match="token"):
        beam_search(batch, [[4, 5], [4, 60]])
    assert batch.idle
