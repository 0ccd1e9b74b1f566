"""The pool's book of pages: drawn calls against a plain list of what every page holds."""

import numpy as np
import pytest

from leanfleet.pages import ROOT, PagePool, Snapshots, borders

BLOCK = 3


class Text:
    """A request that fills its pages, and what they hold."""

    def __init__(self, pool, tokens):
        self.tokens = tokens
        self.pages, self.chain = pool.match(tokens)
        self.shared = len(self.pages)


@pytest.mark.parametrize("seed", range(4))
def test_drawn_calls(seed):
    random, pool = np.random.default_rng(seed), PagePool(12, BLOCK)
    holds = [None] * 12  # what was written to each page, from the start of its text on
    texts, shared = [], 0
    for _ in range(1500):
        kind = random.integers(0, 3)
        if kind == 0 and len(texts) < 5:
            text = Text(pool, random.integers(0, 2, random.integers(1, 20)).tolist())
            assert text.shared * BLOCK < len(text.tokens)
            for i, page in enumerate(text.pages):
                assert holds[page] == text.tokens[: (i + 1) * BLOCK], "another text's page"
            shared += text.shared
            texts.append(text)
        elif kind == 1 and texts:
            text = texts[random.integers(0, len(texts))]
            filled = len(text.pages) * BLOCK
            if filled >= len(text.tokens):
                continue
            page = pool.take()
            if page is None:
                assert pool.available == 0
                continue
            assert all(page not in other.pages for other in texts)
            text.pages.append(page)
            holds[page] = text.tokens[: filled + BLOCK]
            if len(holds[page]) == filled + BLOCK and len(text.chain) == len(text.pages) - 1:
                before = text.chain[-1] if text.chain else ROOT
                text.chain.append(pool.keep(page, before, text.tokens[filled : filled + BLOCK]))
        elif kind == 2 and texts:
            text = texts.pop(random.integers(0, len(texts)))
            pool.release(text.pages)
        had = {page for text in texts for page in text.pages}
        assert pool.in_use == len(had) and pool.available == 12 - len(had)
    assert shared > 100
    for text in texts:
        pool.release(text.pages)
    pool.clear()
    assert pool.available == 12 and pool.match([0] * 10) == ([], []) and not pool._known and not pool._key


def test_the_longest_idle_goes_first():
    pool = PagePool(3, 1)
    for token in (1, 2, 3):
        page = pool.take()
        pool.keep(page, ROOT, [token])
        pool.release([page])
    pool.release(pool.match([1, 0])[0])  # used again
    assert pool.take(empty=True) is None and pool.available == 3
    assert pool.take() == 1 and [len(pool.match([t, 0])[0]) for t in (1, 2, 3)] == [1, 0, 1]


def test_nothing_is_shared_without_share():
    pool = PagePool(3, 1, share=False)
    page = pool.take()
    assert pool.keep(page, ROOT, [1]) == ROOT and pool.match([1, 2]) == ([], [])
    pool.release([page])
    assert pool.available == 3 and pool.in_use == 0


@pytest.mark.parametrize("seed", range(3))
def test_drawn_snapshots(seed):
    """A row that `find` gives holds the state of just that beginning, as long as nobody else got it."""
    random, book, holds = np.random.default_rng(seed), Snapshots([5, 2, 9, 4]), {}
    found = 0
    for _ in range(800):
        text = random.integers(0, 2, random.integers(1, 22)).tolist()
        names = borders(text, BLOCK)
        blocks, row = book.find(names)
        if row is not None:
            assert holds[row] == text[: blocks * BLOCK] and blocks * BLOCK < len(text)
            found += 1
        worth_it = book.worth_it(names, blocks)
        assert worth_it == sorted(set(worth_it)) and all(blocks < n <= len(names) for n in worth_it)
        for n in worth_it:
            row = book.room()
            holds[row] = text[: n * BLOCK]
            if random.random() < 0.9:  # else the copy failed
                book.keep(names[n - 1], row)
                assert book.find(names[:n]) == (n, row)
    assert found > 50 and len(book._rows) + len(book._free) == 4
    book.clear()
    assert book.find(names) == (0, None) and sorted(book._free) == [2, 4, 5, 9]


def test_snapshots_where_texts_part():
    """The second text that begins like another is kept where they part; the longest unused one goes first."""
    book, common = Snapshots([0, 1]), [1, 2, 3, 4, 5, 6]
    first, second, third = (borders([*common, n, n, n, n], BLOCK) for n in (7, 8, 9))
    assert book.worth_it(first, 0) == [3] and book.worth_it(second, 0) == [2, 3]
    for name in (first[2], second[1], second[2]):
        book.keep(name, book.room())
    assert book.find(third) == (2, book._rows[second[1]]) and book.find(first) == book.find(third)  # the first one's went
    assert book.worth_it(third, 2) == [3]


def test_names_of_beginnings():
    assert borders([1, 2, 3, 4, 5, 6, 7], 3) == [*borders([1, 2, 3, 4], 3), *borders([1, 2, 3, 4, 5, 6, 0], 3)[1:]]
    assert borders([1, 2, 3], 3) == [] and borders([1, 2, 3, 4], 3) != borders([1, 2, 4, 4], 3)
    assert borders([0, 0, 0, 1, 2, 3, 4], 3)[1] != borders([9, 9, 9, 1, 2, 3, 4], 3)[1]
