"""Constraints of answers: JSON by a schema, regular expressions, choices, context-free grammars. Needs llguidance, and a fast
tokenizer of transformers.

llguidance says which tokens may come next; leanfleet.batching masks the others in the step that chooses.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal

from leanfleet.decoder_contract import words_of

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from transformers import PreTrainedTokenizerBase

ANY_JSON = {"type": "object"}
Form = Literal["json_schema", "regex", "choice", "grammar"]


class Grammar:
    """A constraint of one answer, as ContinuousBatch.add takes it. Any object with these two methods is one.

    Example:
        from leanfleet.grammar import Grammars
        from leanfleet.ort_ops.generation import load_tokenizer

        tokenizer = load_tokenizer("serving")
        grammar = Grammars(tokenizer, 260, [tokenizer.eos_token_id]).regex("ab")
        first = grammar.allowed()
        for token in tokenizer("a", add_special_tokens=False).input_ids:
            grammar.accept(token)
        print(grammar.allowed() != first)                   # True
    """

    def __init__(self, matcher: LLMatcher, words: int, recipe: tuple[str, str, frozenset[int]]) -> None:
        self._matcher, self._bytes = matcher, 4 * words
        self.recipe = recipe  # (form, text, stop tokens): Grammars.made in another process makes the same of it

    def allowed(self) -> bytes:
        """Bits of the tokens that may come next. Raises ValueError where the grammar has run into llguidance's limits."""
        mask: bytes = self._matcher.compute_bitmask()
        self._check()
        return mask[: self._bytes]

    def accept(self, token: int) -> None:
        """Takes the token that came. Raises ValueError for one that may not."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ValueError(f"constraint: {_first_line(self._matcher.get_error())}")


class Grammars:
    """Makes constraints for a model: each method a new one, for one answer.

    tokenizer: the model's, a fast one. vocabulary: numbers in a row of the model's logits. stop_tokens: that end an answer;
    they come where the grammar may end, nowhere else. Raises ImportError without llguidance, ValueError for a slow tokenizer.

    Example:
        from leanfleet.grammar import Grammars
        from leanfleet.ort_ops.serving import ContinuousBatch

        batch = ContinuousBatch("serving", pages=64, providers=["CPUExecutionProvider"])
        grammars = Grammars(batch.tokenizer, batch.vocabulary, batch.stop_tokens)
        request = batch.add([1, 2, 3], max_new_tokens=16, constraint=grammars.choice(["yes", "no"]))
        batch.run()
        print(batch.tokenizer.decode(request.tokens, skip_special_tokens=True) in ("yes", "no"))    # True
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, stop_tokens: Collection[int]) -> None:
        try:
            import llguidance
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise ImportError(f"constraints need llguidance: pip install llguidance ({error})") from None
        self._llguidance, self._words, self._stop_tokens = llguidance, words_of(vocabulary), frozenset(stop_tokens)
        ends = sorted(t for t in stop_tokens if 0 <= t < vocabulary)
        if not ends:
            raise ValueError("constraints need a stop token, which ends an answer where its grammar does; the model has none")
        self._tokenizer = from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=ends)

    def json_schema(self, schema: dict[str, Any] | str | bool = ANY_JSON) -> Grammar:
        """JSON that a schema describes, as a dict or as text; any object by default. Raises ValueError for what is no
        schema, or has parts that llguidance does not know."""
        return self._made("json_schema", schema)

    def regex(self, pattern: str) -> Grammar:
        """A text that the whole pattern matches, in the syntax of Rust's regex. Raises ValueError for a wrong one."""
        return self._made("regex", pattern)

    def choice(self, texts: Sequence[str]) -> Grammar:
        """One of these texts. Raises ValueError for none."""
        if not texts:
            raise ValueError("choice: there is no text to choose")
        return self._made("choice", list(texts))

    def grammar(self, text: str) -> Grammar:
        """A text of a context-free grammar in the syntax of Lark or of llama.cpp's GBNF. Raises ValueError for a wrong one."""
        return self._made("grammar", text)

    def _made(self, form: Form, given: Any) -> Grammar:
        try:
            text = given if isinstance(given, str) else json.dumps(given)
        except Exception as error:  # a deep schema is a RecursionError
            raise ValueError(f"{form}: {_first_line(str(error))}") from None
        return self.made(form, text)

    def made(self, form: Form, text: str) -> Grammar:
        """The constraint of a form and its text, JSON of a schema or of choices. Raises ValueError as the methods above do."""
        try:
            grammar = self._llguidance.grammar_from(form, text)
            problem = self._llguidance.LLMatcher.validate_grammar(grammar, self._tokenizer)
        except Exception as error:  # of the conversion
            problem = str(error)
        if problem:
            raise ValueError(f"{form}: {_first_line(problem)}")
        matcher = self._llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        return Grammar(matcher, self._words, (form, text, self._stop_tokens))


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "llguidance does not say why")[:300]
