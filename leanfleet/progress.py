"""What long work is at, on stderr. Standard library only.

Any code says with stage() what it does; what it says is shown inside shown() alone, which the command line opens, so that the
same code is silent in a program. On a terminal one line is drawn over and over, from a second after the stage began, and wiped
when it ends. Elsewhere, as in a log, a line comes every ten seconds of a stage, and none from a shorter one.

    with progress.shown(), progress.stage("comparing") as stage:
        for number, request in enumerate(requests):
            stage.at(request.name, number, len(requests))
            compare(request)
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

# Seconds of a stage before anything is shown, and from then on between two times: on a terminal, and elsewhere.
TERMINAL = (1.0, 0.5)
LOG = (10.0, 10.0)
BAR = 20  # columns

_display: _Display | None = None  # the one that is open


class Stage:
    """A piece of work. `what` it is stands in front of its details; seconds count from its beginning."""

    def __init__(self, what: str) -> None:
        self.what, self.detail, self.done, self.total = what, "", 0, 0
        self.began = time.monotonic()
        self.next_line = 0.0  # seconds from the beginning on

    def at(self, detail: str = "", done: int = 0, total: int = 0) -> None:
        """Says what the stage is at, and of how many steps (total; 0: unknown) it has done how many."""
        self.detail, self.done, self.total = detail, done, total

    def line(self) -> str:
        """What is shown of it, such as "  12 s  comparing [##########..........] 4/8 alone"."""
        bar = "#" * (BAR * self.done // self.total) if self.total else ""
        parts = [self.what, f"[{bar.ljust(BAR, '.')}] {self.done}/{self.total}" if self.total else "", self.detail]
        return f"{time.monotonic() - self.began:4.0f} s  {' '.join(filter(None, parts))}"


@contextmanager
def stage(what: str) -> Iterator[Stage]:
    """Yields the Stage of the work in the block, for its details. Of stages inside each other the innermost is shown."""
    display, new = _display, Stage(what)
    if display is None:
        yield new
        return
    display.push(new)
    try:
        yield new
    finally:
        display.pop(new)


def tell(detail: str, done: int = 0, total: int = 0) -> None:
    """Stage.at for the innermost stage, for code that did not open it."""
    if _display is not None and _display.stages:
        _display.stages[-1].at(detail, done, total)


def clear() -> None:
    """Makes room on a terminal for what is printed next while a stage lasts."""
    if _display is not None:
        _display.clear()


@contextmanager
def shown(stream: TextIO | None = None) -> Iterator[None]:
    """Shows the stages of the block on a stream (default: stderr as it is now, also where the block redirects it)."""
    global _display
    stream = stream or sys.stderr
    if stream is None or _display is not None:  # a process without stderr; an outer block shows them already
        yield
        return
    _display = _Display(stream)
    try:
        yield
    finally:
        _display.close()
        _display = None


class _Display:
    """Draws the innermost stage from a thread of its own: the work may stay in a library for minutes."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.terminal = stream, stream.isatty()
        self.quiet, self.every = TERMINAL if self.terminal else LOG
        self.stages: list[Stage] = []
        self.drawn = False
        self.lock, self.closed = threading.Lock(), threading.Event()
        self.thread: threading.Thread | None = None

    def push(self, new: Stage) -> None:
        new.next_line = self.quiet
        with self.lock:
            self.stages.append(new)
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, name="leanfleet-progress", daemon=True)
                self.thread.start()

    def pop(self, old: Stage) -> None:
        with self.lock:
            self.stages.remove(old)
            self._wipe()

    def clear(self) -> None:
        with self.lock:
            self._wipe()
            for each in self.stages:
                each.next_line = max(each.next_line, time.monotonic() - each.began + self.every)

    def close(self) -> None:
        self.closed.set()
        if self.thread is not None:
            self.thread.join()

    def _run(self) -> None:
        while not self.closed.wait(self.every / 2):
            with self.lock:
                try:
                    self._draw()
                except (OSError, ValueError):  # nobody reads stderr any more
                    return

    def _draw(self) -> None:
        if not self.stages:
            return
        current = self.stages[-1]
        if (passed := time.monotonic() - current.began) < current.next_line:
            return
        current.next_line = passed + self.every
        if not self.terminal:
            print(current.line(), file=self.stream, flush=True)
            return
        print(f"\r\033[K{current.line()[: shutil.get_terminal_size().columns - 1]}", end="", file=self.stream, flush=True)
        self.drawn = True

    def _wipe(self) -> None:
        if self.drawn:
            self.drawn = False
            try:
                print("\r\033[K", end="", file=self.stream, flush=True)
            except (OSError, ValueError):
                pass
