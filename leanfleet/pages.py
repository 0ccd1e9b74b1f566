"""The pages of a pool: who has them, and which hold the beginning of a text that another request may go on from.

Standard library only. A request has a list of pages, which it fills one after the other. A full page is known by its tokens
and by the known page before it, so that a chain of known pages stands for the beginning of a text. Requests that begin with the
same tokens have the same pages for them; nobody writes to a page that is full. Once no request has a known page any more it
stays as it is until room is needed: then the page goes first that nobody has had for the longest time (vLLM's automatic prefix
caching, after Kwon et al. 2023, section 4.3).

A linear layer has no pages: what it knows of a text's beginning is one state. Snapshots has the book of states that are kept so
that others may go on from them. They are large, so not every page's end has one: the end of a prompt does, and the place where
two texts were seen to part.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence

ROOT = 0  # what stands before a text's first page
SEEN = 1 << 16  # beginnings of texts that are remembered without a snapshot


class PagePool:
    """`count` pages of `block` tokens each. share: whether pages may be known; False: every request fills pages of its own.

    Example:
        from leanfleet.pages import ROOT, PagePool

        pool = PagePool(count=4, block=2)
        first = [pool.take(), pool.take()]                   # for the tokens 5 6 7
        pool.keep(first[0], ROOT, [5, 6])                    # full: others may read it now
        pages, chain = pool.match([5, 6, 8])
        print(pages == first[:1], pool.available)            # True 2
        pool.release(first)
        print(pool.available)                                # 3: the page that `match` handed out is still in use
    """

    def __init__(self, count: int, block: int, share: bool = True) -> None:
        self.count, self.block, self.share = count, block, share
        self._empty = list(range(count))[::-1]
        self._users = [0] * count
        self._known: dict[tuple[int, tuple[int, ...]], int] = {}  # (number of the page before, tokens) -> page
        self._key: dict[int, tuple[int, tuple[int, ...]]] = {}  # of known pages
        self._number: dict[int, int] = {}  # of known pages; never used again
        self._numbers = ROOT
        self._idle: dict[int, None] = {}  # known pages that nobody has, the longest idle first

    @property
    def available(self) -> int:
        """How many pages can be taken."""
        return len(self._empty) + len(self._idle)

    @property
    def in_use(self) -> int:
        """How many pages somebody has."""
        return self.count - self.available

    def take(self, empty: bool = False) -> int | None:
        """A page to write to, which nobody else has; None where all are in use. empty: only one that holds nothing known."""
        if self._empty:
            page = self._empty.pop()
        elif self._idle and not empty:
            page = next(iter(self._idle))
            del self._idle[page]
            self._forget(page)
        else:
            return None
        self._users[page] = 1
        return page

    def match(self, tokens: Sequence[int]) -> tuple[list[int], list[int]]:
        """(pages, their numbers) for the longest known beginning of a text. The caller has them from now on, and must not
        write to them. One token at least is left over, since the last token's logits are still to be computed."""
        pages: list[int] = []
        chain: list[int] = []
        for end in range(self.block, len(tokens), self.block):
            page = self._known.get((chain[-1] if chain else ROOT, tuple(tokens[end - self.block : end])))
            if page is None:
                break
            self._users[page] += 1
            self._idle.pop(page, None)
            pages.append(page)
            chain.append(self._number[page])
        return pages, chain

    def keep(self, page: int, before: int, tokens: Sequence[int]) -> int:
        """Makes a full page known. before: the number of the page before it, or ROOT. Returns its number, or, where another
        page of the same content is known already, that one's."""
        if not self.share:
            return ROOT
        key = before, tuple(tokens)
        known = self._known.setdefault(key, page)
        if known == page and page not in self._key:
            self._numbers += 1
            self._key[page], self._number[page] = key, self._numbers
        return self._number[known]

    def release(self, pages: Sequence[int]) -> None:
        """Gives back the pages of a request, in their order. The last ones, which fewer texts begin with, are reused first."""
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page in self._key:
                self._idle[page] = None
            else:
                self._empty.append(page)

    def clear(self) -> None:
        """Forgets what idle pages hold."""
        for page in list(self._idle):
            del self._idle[page]
            self._forget(page)
            self._empty.append(page)

    def _forget(self, page: int) -> None:
        del self._known[self._key.pop(page)], self._number[page]


def borders(tokens: Sequence[int], block: int) -> list[bytes]:
    """A name for each beginning of a text that is so many full blocks, with one token at least left over. Equal beginnings have
    equal names, and others do not: names are cryptographic."""
    names: list[bytes] = []
    for end in range(block, len(tokens), block):
        before = names[-1] if names else b""
        names.append(hashlib.blake2b(before + array("q", tokens[end - block : end]).tobytes(), digest_size=32).digest())
    return names


class Snapshots:
    """Which of these rows hold the state behind the beginning of a text. Beginnings go by the names of `borders`.

    Example:
        from leanfleet.pages import Snapshots, borders

        known, text = Snapshots([7]), borders([5, 6, 7, 8, 9], block=2)
        print(known.find(text), known.worth_it(text, 0))         # (0, None) [2]: behind block 2 one is worth its room
        row = known.room()                                       # 7: copy the state there, then
        known.keep(text[1], row)
        print(known.find(borders([5, 6, 7, 8, 1, 2], 2)))        # (2, 7): go on behind two blocks, from row 7
    """

    def __init__(self, rows: Iterable[int]) -> None:
        self._free = list(rows)[::-1]
        self.count = len(self._free)
        self._rows: dict[bytes, int] = {}  # the longest unused first
        self._seen: dict[bytes, None] = {}  # likewise

    def find(self, names: Sequence[bytes]) -> tuple[int, int | None]:
        """(blocks, row) of the longest beginning that has a snapshot; (0, None) where none has."""
        for blocks in range(len(names), 0, -1):
            row = self._rows.pop(names[blocks - 1], None)
            if row is not None:
                self._rows[names[blocks - 1]] = row
                return blocks, row
        return 0, None

    def worth_it(self, names: Sequence[bytes], start: int) -> list[int]:
        """Behind how many blocks of a text that goes on behind `start` of them a snapshot is worth its room: behind all, and
        where an earlier text was the same so far. The text counts as seen from now on."""
        parts = next((blocks for blocks in range(len(names), start, -1) if names[blocks - 1] in self._seen), start)
        for name in names:
            self._seen.pop(name, None)
            self._seen[name] = None
        while len(self._seen) > SEEN:
            del self._seen[next(iter(self._seen))]
        return [blocks for blocks in sorted({parts, len(names)}) if blocks > start and names[blocks - 1] not in self._rows]

    def room(self) -> int:
        """A row to copy a state to, that of the longest unused snapshot where all are taken. It is free until `keep`."""
        if not self._free:
            self._free.append(self._rows.pop(next(iter(self._rows))))
        return self._free[-1]

    def keep(self, name: bytes, row: int) -> None:
        """From now on the row that `room` gave has the state behind this beginning."""
        self._free.remove(row)
        if name in self._rows:
            self._free.append(self._rows.pop(name))
        self._rows[name] = row

    def clear(self) -> None:
        """Forgets all of them."""
        self._free += self._rows.values()
        self._rows.clear()
        self._seen.clear()
