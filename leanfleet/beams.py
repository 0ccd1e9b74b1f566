"""Beam search over continuous batching: each step asks for one token behind every beam, and beams share the pages of what they
have in common. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING

from leanfleet.decoder_contract import TOP
from leanfleet.generation import check_positive, check_prompt, stop_set

if TYPE_CHECKING:
    from leanfleet.batching import Batch, Request


@dataclass(frozen=True)
class Beam:
    """An answer: its tokens, the stop token included; the sum of their log-probabilities; and its score, that sum over
    len(tokens) ** length_penalty."""

    tokens: list[int]
    logprob: float
    score: float


def beam_search(
    batch: Batch,
    prompts: Sequence[Iterable[int]],
    beams: int = 4,
    max_new_tokens: int = 128,
    *,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    stop_tokens: Iterable[int] | None = None,
    priority: int = 0,
) -> list[list[Beam]]:
    """The likeliest continuations of prompts: for each a list of up to `beams` answers, the best first, as transformers'
    generate(num_beams=beams) finds them.

    batch: other requests in it go on beside. prompts: rows of token ids. max_new_tokens: of an answer. length_penalty: above 0
    it favours long answers, below 0 short ones. early_stopping: True ends a search once `beams` answers have ended; False once
    no beam can become better as it is; "never" once none can at any length. stop_tokens: default those of the model.
    Every step is a request of one token for each beam, with the tokens so far as its prompt: pages that beams share are not
    computed again, at most a page's last tokens are; a decoder with states begins at its newest snapshot.

    Raises ValueError for wrong options, for (1 + stop tokens) * beams above 20, which is as many likely tokens as a step
    tells, and what batch.add raises; the exception of a request whose logits are not finite.

    Example:
        from leanfleet.beams import beam_search
        from leanfleet.ort_ops.serving import ContinuousBatch

        batch = ContinuousBatch("serving", pages=64, providers=["CPUExecutionProvider"])
        (answers,) = beam_search(batch, [[1, 2, 3]], beams=3, max_new_tokens=8)
        print([round(answer.score, 2) for answer in answers])
    """
    check_positive("beams", beams)
    check_positive("max_new_tokens", max_new_tokens)
    if early_stopping not in (True, False, "never"):
        raise ValueError(f"early_stopping is {early_stopping!r}; expected True, False or 'never'")
    if not isinstance(length_penalty, Real) or not math.isfinite(length_penalty):
        raise ValueError(f"length_penalty is {length_penalty!r}; expected a finite number")
    stop = stop_set(stop_tokens, batch.stop_tokens)
    each = max(2, 1 + len(stop))  # so that `beams` go on, though all likelier tokens are stop tokens
    looked_at = each * beams
    if looked_at > TOP:
        raise ValueError(
            f"beams is {beams}, and with {len(stop)} stop tokens a step looks at {looked_at} tokens behind each beam; it tells "
            f"{TOP}: ask for {TOP // each} beams or fewer"
        )
    searches = [
        _Search(check_prompt(prompt, batch.vocabulary), beams, looked_at, max_new_tokens, length_penalty, early_stopping, stop)
        for prompt in prompts
    ]
    for search in searches:
        batch.check_room(len(search.prompt), max_new_tokens)
    top = min(looked_at, batch.vocabulary)
    while going := [search for search in searches if not search.over]:
        asked: list[list[Request]] = [[] for _ in going]
        try:
            for search, requests in zip(going, asked, strict=True):
                for tokens, _ in search.beams:
                    text = search.prompt + tokens
                    requests.append(batch.add(text, 1, (), top_logprobs=top, priority=priority))
            while not all(request.done for requests in asked for request in requests):
                batch.step()
        except BaseException:
            for requests in asked:
                for request in requests:
                    batch.cancel(request)
            raise
        for search, requests in zip(going, asked, strict=True):
            if failed := next((request.error for request in requests if request.error is not None), None):
                raise failed
            search.take([request.top_logprobs[0] for request in requests])
    return [search.answers for search in searches]


class _Search:
    """The search behind one prompt. looked_at: how many continuations of all beams a step looks at. beams: [(tokens, sum of
    their log-probabilities)] that go on, the best first. answers: those that have ended, the best first."""

    def __init__(
        self, prompt: list[int], count: int, looked_at: int, most: int, length_penalty: float, early: bool | str, stop: set[int]
    ) -> None:
        self.prompt, self.count, self.looked_at, self.most = prompt, count, looked_at, most
        self.length_penalty, self.stop = length_penalty, stop
        self.never = early == "never"
        self.at_once = bool(early) and not self.never
        self.beams: list[tuple[list[int], float]] = [([], 0.0)]
        self.answers: list[Beam] = []
        self.over = False

    def score(self, logprob: float, length: int) -> float:
        return logprob / length**self.length_penalty

    def take(self, likeliest: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Goes a step on. likeliest: of each beam the tokens that may follow, with their log-probabilities."""
        found = [
            (tokens + [token], so_far + logprob)
            for (tokens, so_far), row in zip(self.beams, likeliest, strict=True)
            for token, logprob in row
        ]
        found.sort(key=lambda each: -each[1])
        self.beams = []
        for place, (tokens, logprob) in enumerate(found[: self.looked_at]):
            if tokens[-1] in self.stop or len(tokens) == self.most:
                if place < self.count:  # what is no better than a beam ends no search
                    self.answers.append(Beam(tokens, logprob, self.score(logprob, len(tokens))))
            elif len(self.beams) < self.count:
                self.beams.append((tokens, logprob))
        self.answers = sorted(self.answers, key=lambda answer: -answer.score)[: self.count]
        full = len(self.answers) == self.count
        self.over = not self.beams or (full and (self.at_once or not self._may_improve()))

    def _may_improve(self) -> bool:
        """Whether a beam that goes on may become better than the worst answer."""
        tokens, logprob = self.beams[0]
        length = self.most if self.never and self.length_penalty > 0 else len(tokens)
        return self.score(logprob, length) > self.answers[-1].score
