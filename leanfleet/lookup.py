"""Guesses at what a text goes on with: what followed when it last said the same (Saxena 2023, prompt lookup decoding).

Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable

SIZES = 3, 2  # of the endings that are looked up, the longest first: a single token says too little


class Lookup:
    """A text of tokens that grows, and where each short sequence of it last ended.

    Example:
        from leanfleet.lookup import Lookup

        text = Lookup([7, 1, 2, 3, 4, 5])
        text.extend([9, 1, 2])
        print(text.guess(3))                                     # [3, 4, 5]
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.text: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds tokens to the text."""
        for token in tokens:
            for size in SIZES:  # what ends here is known from now on, since something follows
                if len(self.text) >= size:
                    self._ends[tuple(self.text[-size:])] = len(self.text)
            self.text.append(token)

    def guess(self, count: int) -> list[int]:
        """So many tokens that may come next: those behind the last place that has the text's ending. None where there is none.
        Behind the text's end they go on as the guess itself does, so that a loop is guessed for as long as it may last."""
        for size in SIZES:
            start = self._ends.get(tuple(self.text[-size:])) if len(self.text) >= size else None
            if start is not None:
                found = self.text[start : start + count]
                while len(found) < count:
                    found.append(found[len(found) - (len(self.text) - start)])
                return found
        return []
