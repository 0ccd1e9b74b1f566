"""Text generation with an exported decoder, the same for every runtime. Needs numpy, for texts transformers.

A runtime brings a Decoder, whose Steps run its graph over caches; choosing tokens, stopping and text are done here.
Prompts of unequal length run in one batch (query_lens).
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from leanfleet import progress
from leanfleet.files import NO_CODE, reading
from leanfleet.sampling import check_sampling, problem, sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from leanfleet.decoder_contract import Sampling

NEW_TOKENS = 128  # of an answer, where nothing else is said and the model has positions for them
MOST_PENDING = 8  # tokens that may wait for a whole character; one has four bytes at most


class Steps(Protocol):
    """The calls of one batch: its caches and states, as they are after the tokens so far."""

    def run(self, input_ids: np.ndarray, seq_lens: np.ndarray, query_lens: np.ndarray, capture: bool = False) -> np.ndarray:
        """One call of the graph; returns the logits of each request's last new token, float32 [B,vocabulary].

        input_ids: int64 [B,N]. seq_lens, query_lens: int32 [B]; see leanfleet.decoder_contract. capture: N is 1, and the
        call may run as a CUDA graph.
        """


class Decoder(Protocol):
    """An exported decoder that a runtime has loaded."""

    vocabulary: int
    stop_tokens: list[int]
    max_positions: int | None  # None: no limit

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The folder's. Raises what load_tokenizer raises."""

    def steps(self, batch: int, capacity: int) -> Steps:
        """Starts a batch: so many requests, caches of so many slots. Steps of the batch before must not be used any more."""


class Batching(Protocol):
    """Requests that share steps, which choose their tokens in the graph: leanfleet.batching.Batch."""

    vocabulary: int
    stop_tokens: set[int]
    max_positions: int | None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The folder's."""

    @property
    def capacity(self) -> int | None:
        """How many tokens of one request there is room for."""

    def check_room(self, prompt: int, max_new_tokens: int) -> None:
        """Raises ValueError where there could never be room."""

    @property
    def add(self) -> Callable[..., Any]:
        """Queues a request: add(prompt, max_new_tokens, stop_tokens, temperature=..., ...)."""

    def step(self) -> object:
        """Runs a call."""

    def cancel(self, request: Any) -> None:
        """Ends a request."""


class FolderTokenizer:
    """Gives a loaded decoder its `tokenizer`: the one in its folder, loaded on first use."""

    folder: Path

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.folder)


@dataclass
class Statistics:
    """Seconds and tokens of a generation; `decode_tokens` leaves out each request's first token, which prefill makes."""

    prefill_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_seconds: float = 0.0
    decode_tokens: int = 0
    tokens: list[list[int]] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else float("nan")

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prefill_tokens / self.prefill_seconds if self.prefill_seconds else float("nan")


def check_positive(name: str, value: int) -> None:
    """Raises ValueError for a value that is no whole number from 1 on."""
    if not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a whole number, at least 1")


def check_prompt(prompt: Iterable[int], vocabulary: int) -> list[int]:
    """The token ids of a prompt as a list of ints. Raises ValueError for an empty one, and for what is no token id."""
    if isinstance(prompt, str):
        raise ValueError(f"a prompt is the text {prompt[:40]!r}; expected a list of token ids")
    try:
        prompt = [operator.index(t) for t in prompt]
    except TypeError as error:
        raise ValueError(f"a prompt is no list of token ids: {error}") from None
    if not prompt:
        raise ValueError("a prompt is empty; every request needs at least one token")
    if min(prompt) < 0 or max(prompt) >= vocabulary:
        raise ValueError(
            f"token ids lie in 0 .. {vocabulary - 1}; found {min(prompt)} .. {max(prompt)}. Is this the model's own tokenizer?"
        )
    return prompt


def stop_set(stop_tokens: Iterable[int] | None, default: Iterable[int]) -> set[int]:
    """Stop tokens as a set; None: the default ones. Raises ValueError for anything but token ids."""
    try:
        return {operator.index(t) for t in (default if stop_tokens is None else stop_tokens)}
    except TypeError as error:
        raise ValueError(f"stop_tokens is {stop_tokens!r}; expected a list of token ids ({error})") from None


def default_new_tokens(prompt: int, *limits: int | None) -> int:
    """128, or what a prompt's tokens leave of the least limit (None: no limit); at least 1."""
    return max(min([NEW_TOKENS] + [n - prompt for n in limits if n]), 1)


def new_tokens(longest: int, max_new_tokens: int | None, capacity: int | None, max_positions: int | None) -> tuple[int, int]:
    """(new tokens of each request, cache slots). Defaults (None) are what fits; raises ValueError where a wish does not."""
    for name, value in (("max_new_tokens", max_new_tokens), ("capacity", capacity)):
        if value is not None:
            check_positive(name, value)
    if max_new_tokens is None:
        max_new_tokens = default_new_tokens(longest, capacity, max_positions)
    needed = longest + max_new_tokens
    capacity = needed if capacity is None else capacity
    if needed > capacity:
        raise ValueError(
            f"generate: a prompt of {longest} tokens and {max_new_tokens} new ones need {needed} cache slots; the "
            f"caches have {capacity}. Raise capacity, or ask for fewer tokens"
        )
    if max_positions and needed > max_positions:
        raise ValueError(
            f"generate: {needed} tokens, {longest} of them a prompt's, are more than the {max_positions} "
            "positions that the model was trained for"
        )
    return max_new_tokens, capacity


def stream(
    decoder: Decoder | Batching,
    prompts: Sequence[str | Sequence[int]],
    max_new_tokens: int | None = None,
    *,
    capacity: int | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    stop_tokens: Iterable[int] | None = None,
    statistics: Statistics | None = None,
    on_logits: Callable[[np.ndarray], object] | None = None,
    chat: bool | None = None,
) -> Iterator[list[int | None]]:
    """Yields, step by step, a list with each request's new token, or None once that request has stopped.

    decoder: a loaded decoder, whose logits come to the host, which chooses; or a ContinuousBatch, whose graph chooses, so that
    tokens alone come: as many prompts as its max_requests are answered at once. The tokens are the same.
    prompts: texts or lists of token ids, of any lengths from 1, also both in one list. A text needs the tokenizer in the
    decoder's folder and is a user's turn in its chat template where it has one; chat=False continues it as it is.
    max_new_tokens: default 128, or as many as the model's positions (and `capacity`) hold if these are fewer.
    capacity: slots of each cache; default: what is needed. temperature 0 is greedy, else tokens are drawn from those that
    top_k, top_p and min_p keep; prompt r draws as a request of the seed `seed` + r does in continuous batching. stop_tokens:
    default those of the model and, with texts, the tokenizer's end of text. statistics: a Statistics to fill. on_logits: called
    with each step's logits, float32 [B,vocabulary]. decoder.tokenizer.decode(tokens) makes text of the tokens.
    Raises ValueError for an empty prompt, ids outside the vocabulary, wrong sampling options, more tokens than the caches or
    the model's positions hold, capacity or on_logits with a ContinuousBatch, which has neither, and logits that are not finite,
    FileNotFoundError for texts where the folder has no tokenizer, RuntimeError where the runtime fails.

    Example:
        from leanfleet.ort_ops import load_decoder, stream

        decoder = load_decoder("decoder", providers=["CPUExecutionProvider"])
        for first, second in stream(decoder, [[1, 2, 3], [4, 5]], max_new_tokens=8, temperature=0.8, top_p=0.9, seed=1):
            print(first, second)                            # a token id each, None for a request that has stopped
    """
    if isinstance(prompts, str):
        raise ValueError("generate: prompts is one text; give a list of them")
    sampling = check_sampling(temperature, top_k, top_p, seed, min_p)
    stop = stop_set(stop_tokens, decoder.stop_tokens)
    if stop_tokens is None and any(isinstance(p, str) for p in prompts) and decoder.tokenizer.eos_token_id is not None:
        stop.add(decoder.tokenizer.eos_token_id)
    tokens = [
        check_prompt(encode(decoder.tokenizer, p, chat) if isinstance(p, str) else p, decoder.vocabulary) for p in prompts
    ]
    if not tokens:
        raise ValueError("generate: there is no prompt; give a list with one or more")
    longest = max(map(len, tokens))
    choices = [replace(sampling, seed=(seed + row) % 2**63) for row in range(len(tokens))]
    statistics = statistics if statistics is not None else Statistics()
    statistics.tokens = [[] for _ in tokens]
    if hasattr(decoder, "add"):
        batch = cast(Batching, decoder)
        for name, value in (("capacity", capacity), ("on_logits", on_logits)):
            if value is not None:
                raise ValueError(f"generate: {name} is for a decoder of load_decoder; a ContinuousBatch has none: leave it out")
        if max_new_tokens is None:
            max_new_tokens = default_new_tokens(longest, batch.max_positions, batch.capacity)
        yield from _by_requests(batch, tokens, max_new_tokens, choices, stop, statistics)
    else:
        max_new_tokens, capacity = new_tokens(longest, max_new_tokens, capacity, decoder.max_positions)
        steps = decoder.steps(len(tokens), capacity)
        yield from _by_logits(steps, tokens, max_new_tokens, choices, stop, statistics, on_logits)


def _by_requests(
    batch: Batching,
    prompts: list[list[int]],
    max_new_tokens: int,
    choices: Sequence[Sampling],
    stop: set[int],
    statistics: Statistics,
) -> Iterator[list[int | None]]:
    """As stream, of tokens that the graph chooses. Requests that are not through when the caller stops are cancelled."""
    check_positive("max_new_tokens", max_new_tokens)
    for prompt in prompts:
        batch.check_room(len(prompt), max_new_tokens)
    requests: list[Any] = []
    try:
        for prompt, sampling in zip(prompts, choices, strict=True):
            requests.append(batch.add(prompt, max_new_tokens, stop, **asdict(sampling)))
        statistics.prefill_tokens = sum(map(len, prompts))
        for step in range(max_new_tokens):
            start = time.perf_counter()
            with nullcontext() if step else progress.stage(f"reading {statistics.prefill_tokens} tokens of the prompts"):
                while not all(r.done or len(r.tokens) > step for r in requests):
                    batch.step()
            if wrong := next((r.error for r in requests if r.error is not None), None):
                raise wrong
            seconds = time.perf_counter() - start
            new = [r.tokens[step] if len(r.tokens) > step else None for r in requests]
            given = len(new) - new.count(None)
            if not given:
                return
            if step == 0:
                statistics.prefill_seconds = seconds
            else:
                statistics.decode_seconds += seconds
                statistics.decode_tokens += given
            for own, token in zip(statistics.tokens, new, strict=True):
                own += [] if token is None else [token]
            yield new
    finally:
        for request in requests:
            batch.cancel(request)


def _by_logits(
    steps: Steps,
    prompts: list[list[int]],
    max_new_tokens: int,
    choices: Sequence[Sampling],
    stop: set[int],
    statistics: Statistics,
    on_logits: Callable[[np.ndarray], object] | None,
) -> Iterator[list[int | None]]:
    """As stream, of tokens that are chosen here."""
    batch, lengths = len(prompts), np.array([len(p) for p in prompts], dtype=np.int32)
    ids = np.zeros((batch, int(lengths.max())), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    seq_lens, query_lens = lengths.copy(), lengths.copy()
    alive = np.ones(batch, dtype=bool)
    for step in range(max_new_tokens):
        start = time.perf_counter()
        with nullcontext() if step else progress.stage(f"reading {lengths.sum()} tokens of the prompts"):
            logits = steps.run(ids, seq_lens, query_lens, capture=step > 0)
        if on_logits is not None:
            on_logits(logits)
        chosen, logprobs = sample(logits, choices, seq_lens)
        if wrong := next((e for p in logprobs[alive] if (e := problem(p))), None):
            raise wrong
        seconds = time.perf_counter() - start
        if step == 0:
            statistics.prefill_seconds, statistics.prefill_tokens = seconds, int(lengths.sum())
            ids, query_lens = np.zeros((batch, 1), dtype=np.int64), np.ones(batch, dtype=np.int32)
        else:
            statistics.decode_seconds += seconds
            statistics.decode_tokens += int(alive.sum())
        new = []
        for row in range(batch):
            token = int(chosen[row]) if alive[row] else None
            new.append(token)
            if token is not None:
                statistics.tokens[row].append(token)
                alive[row] = token not in stop
        yield new
        if not alive.any():
            return
        ids[:, 0] = [token if token is not None else 0 for token in new]
        # A request that has stopped adds nothing: its length stays, its row of the batch is padding.
        query_lens = alive.astype(np.int32)
        seq_lens = seq_lens + query_lens


def generate(
    decoder: Decoder | Batching, prompts: Sequence[str | Sequence[int]], max_new_tokens: int | None = None, **options: Any
) -> tuple[list[list[int]], Statistics]:
    """All tokens at once: (list of token lists, Statistics). Prompts, options and errors are those of stream.

    Example:
        from leanfleet.ort_ops import generate, load_decoder

        decoder = load_decoder("decoder", providers=["CPUExecutionProvider"])
        answers, statistics = generate(decoder, ["Good morning", "Hello"], max_new_tokens=8)
        texts = decoder.tokenizer.batch_decode(answers)
    """
    statistics = Statistics()
    for _ in stream(decoder, prompts, max_new_tokens, statistics=statistics, **options):
        pass
    return statistics.tokens, statistics


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer beside a decoder. Needs transformers. Raises FileNotFoundError for a folder without one, ValueError for
    damaged files.

    Example:
        from leanfleet.ort_ops.generation import load_tokenizer

        print(load_tokenizer("decoder").decode([72, 105]))
    """
    folder = Path(folder)
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise FileNotFoundError(
            f"{folder} holds no tokenizer (tokenizer.json); give one to export_decoder, or copy the model's own there"
        )
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    with reading(f"the tokenizer in {folder}"):
        if not (folder / "tokenizer_config.json").exists():
            return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, **NO_CODE)


def encode(tokenizer: Any, text: str, chat: bool | None = None, system: str | None = None) -> list[int]:
    """Token ids of a prompt. chat: wrap it as a user's turn in the tokenizer's chat template; default: if there is one.

    system: the system's turn before it. Raises ValueError for an empty text, for a chat without a template, and for a
    template or tokenizer that fails.

    Example:
        from leanfleet.ort_ops.generation import encode, load_tokenizer

        tokenizer = load_tokenizer("decoder")
        chat = encode(tokenizer, "Hello", system="Answer in one word.")
        plain = encode(tokenizer, "Hello", chat=False)      # the text alone, without the chat template
    """
    if not text.strip():
        raise ValueError("the prompt is empty; give it some text")
    template = getattr(tokenizer, "chat_template", None)
    if (chat or system) and not template:
        raise ValueError("this model's tokenizer has no chat template; leave the system's turn and the chat out")
    if chat is False or not template:
        with reading("the prompt (by this model's tokenizer)"):
            return list(tokenizer(text)["input_ids"])
    turns = [{"role": "system", "content": system}] if system else []
    return encode_chat(tokenizer, [*turns, {"role": "user", "content": text}])


def encode_chat(tokenizer: Any, turns: Sequence[dict[str, str]]) -> list[int]:
    """Token ids of a chat that the model is to go on with. turns: {"role", "content"}. Raises ValueError without a template,
    and for turns that the template refuses.

    Example:
        from leanfleet.ort_ops.generation import encode_chat, load_tokenizer

        turns = [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "Hello"}]
        prompt = encode_chat(load_tokenizer("decoder"), turns)
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("this model's tokenizer has no chat template; ask for a completion of a text instead")
    with reading("the prompt (by this model's chat template, which --raw or chat=False leaves out)"):
        return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"])


CLEANED_UP = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"


class TextStream:
    """Turns tokens into text as they come, a whole character at a time.

    Example:
        from leanfleet.ort_ops import load_decoder, stream
        from leanfleet.ort_ops.generation import TextStream

        decoder = load_decoder("decoder", providers=["CPUExecutionProvider"])
        text = TextStream(decoder.tokenizer)
        for (token,) in stream(decoder, ["Good morning"], max_new_tokens=8):
            print(text.add(token), end="", flush=True)
        print(text.finish())
    """

    # A token's text depends on the ones just before it, such as whether a space stands in front: they are decoded with it.
    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self._from = self._to = 0  # the tokens before `_to` are told; those from `_from` on are decoded again

    def add(self, token: int) -> str:
        """The text that this token completes."""
        return add_each([self], [token])[0]

    def finish(self) -> str:
        """The rest: bytes at the end that are no whole character, as U+FFFD."""
        return self._told(True, *decode_each(self.tokenizer, self._windows()))

    def _windows(self, *new: int) -> list[list[int]]:
        """What is told already and decoded again, and the same with what is not told."""
        return [self.tokens[self._from : self._to], [*self.tokens[self._from :], *new]]

    def _told(self, whole: bool, before: str, text: str) -> str:
        """whole: nothing comes any more."""
        pending = len(self.tokens) - self._to
        if text.endswith("\ufffd") and len(text) > len(before) and not whole:  # a character of several tokens
            if pending > MOST_PENDING and (end := self._end_of_broken(text)):
                return self._tell(end, text[len(before) : -1])
            if pending <= 2 * MOST_PENDING:
                return ""
        whole = whole or pending > MOST_PENDING
        if len(text) <= len(before):
            if whole:  # tokens without text, such as a model's own marks
                del self.tokens[self._to :]
            return ""
        return self._tell(len(self.tokens), text[len(before) :])

    def _end_of_broken(self, text: str) -> int:
        """Of many bytes that are no characters, all but the last U+FFFD are so for good; it stands for one to three bytes that
        may yet become one. Where the tokens of these begin, 0 where no token does."""
        for end in range(len(self.tokens) - 1, max(len(self.tokens) - 4, self._to), -1):
            if decode_each(self.tokenizer, [self.tokens[self._from : end]])[0] + "\ufffd" == text:
                return end
        return 0

    def _tell(self, end: int, text: str) -> str:
        """The text, which is that of the tokens up to `end`: they are told from now on."""
        self._from, self._to = self._to, end
        return text


def add_each(streams: Sequence[TextStream], tokens: Sequence[int]) -> list[str]:
    """The text that each token completes, one for each of these streams, all of one tokenizer. It is called once for all: it
    lets other threads run meanwhile, and a thread that calls it for each stream waits for its turn as often.

    Example:
        from leanfleet.generation import TextStream, add_each
        from leanfleet.ort_ops import load_decoder

        tokenizer = load_decoder("decoder", providers=["CPUExecutionProvider"]).tokenizer
        streams = [TextStream(tokenizer) for _ in range(2)]
        print(add_each(streams, [30, 41]) == [tokenizer.decode([30]), tokenizer.decode([41])])    # True
    """
    if not streams:
        return []
    windows = [window for stream, token in zip(streams, tokens, strict=True) for window in stream._windows(token)]
    texts = decode_each(streams[0].tokenizer, windows)
    found = []
    for i, (stream, token) in enumerate(zip(streams, tokens, strict=True)):
        stream.tokens.append(token)
        found.append(stream._told(False, *texts[2 * i : 2 * i + 2]))
    return found


def decode_each(tokenizer: Any, texts: Sequence[list[int]]) -> list[str]:
    """The text of each list of tokens, as tokenizer.decode has it: one call of the library beneath, where that is the same."""
    plain = getattr(type(tokenizer), "_decode", None)
    if getattr(plain, "__qualname__", "") == "TokenizersBackend._decode":
        beneath = tokenizer.backend_tokenizer
        # transformers cleans texts of byte-pair encodings up only where this is set; versions without it do so always.
        spared = type(beneath.model).__name__ == "BPE" and not getattr(tokenizer, CLEANED_UP, True)
        if spared or not tokenizer.clean_up_tokenization_spaces:
            found: list[str] = beneath.decode_batch(texts, skip_special_tokens=True)
            return found
    return [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in texts]


class StopStrings:
    """Ends a text where one of some strings begins. What may be the beginning of one is held back until that is known.

    Example:
        from leanfleet.generation import StopStrings

        text = StopStrings(["END"])
        print([text.add(part) for part in ("one E", "N", "T two EN", "D three")])  # ['one ', '', 'ENT two ', '']
        print(text.found)  # True
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings, self.held, self.found = [s for s in strings if s], "", False

    def add(self, text: str) -> str:
        """What of the text so far can be told now."""
        if self.found:
            return ""
        text = self.held + text
        places = [(place + len(s), place) for s in self.strings if (place := text.find(s)) >= 0]
        if places:  # the one that is complete first counts, so that it does not matter in which pieces a text comes
            self.found, self.held = True, ""
            return text[: min(places)[1]]
        most = min(max(map(len, self.strings), default=1) - 1, len(text))
        keep = next((n for n in range(most, 0, -1) if any(s.startswith(text[len(text) - n :]) for s in self.strings)), 0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, where the text ends without a stop string."""
        text, self.held = self.held, ""
        return text
