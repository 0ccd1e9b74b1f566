"""What a long command is doing and how far it is: functions tell it, and a command shows it where somebody watches."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

INTERVAL = 2.0  # seconds between two lines about the same thing

_shown: Callable[[str, int, int], None] | None = None


@contextmanager
def shown(write: Callable[[str], object]) -> Iterator[None]:
    """While this lasts, `write` gets a line for each new thing, and one every INTERVAL seconds about how far it is."""
    global _shown
    start, last, before = time.monotonic(), 0.0, ""

    def show(what: str, done: int, of: int) -> None:
        nonlocal last, before
        now = time.monotonic()
        if what != before or now - last >= INTERVAL:
            last, before = now, what
            write(f"{now - start:6.1f} s  {what}" + (f": {done} of {of}" if of else ""))

    outer, _shown = _shown, show
    try:
        yield
    finally:
        _shown = outer


def tell(what: str, done: int = 0, of: int = 0) -> None:
    """Says what is being done now and, with `of`, how much of it is done."""
    if _shown is not None:
        _shown(what, done, of)
