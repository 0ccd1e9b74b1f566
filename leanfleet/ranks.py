"""One process a rank: starts them, hands the communicator's id round, and sees to it that all end, well or together.

A rank is told its place by the environment, as torchrun tells it, so that the same program runs under either. Where one fails,
or is killed, the others are ended, and the error names it. Standard library only; leanfleet's library where a rank joins.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leanfleet import files

if TYPE_CHECKING:
    from leanfleet.communicators import Communicator

RANK, WORLD_SIZE, LOCAL_RANK = "RANK", "WORLD_SIZE", "LOCAL_RANK"  # as torchrun has them
_ID_FILE, _PARENT = "LEANFLEET_RENDEZVOUS", "LEANFLEET_PARENT"  # what launch adds
_POLL = 0.02  # seconds
_GRACE, _FINISH = 5.0, 30.0  # seconds that a process has to end before it is killed, and the others once one is through
_KILL_ON_PARENTS_DEATH = 1  # PR_SET_PDEATHSIG
JOIN_SECONDS = 120.0  # that a rank waits for the others to load the model


class RankError(RuntimeError):
    """A rank has failed, was killed, or did not end."""


@dataclass(frozen=True)
class Place:
    """This process's place among the ranks."""

    rank: int
    world: int
    local: int  # among those of this machine


def place() -> Place | None:
    """This process's place, as launch or torchrun says it; None outside of both. Raises ValueError for what makes no sense."""
    if RANK not in os.environ or WORLD_SIZE not in os.environ:
        return None
    try:
        rank, world = int(os.environ[RANK]), int(os.environ[WORLD_SIZE])
        local = int(os.environ.get(LOCAL_RANK, rank))
        if not 0 <= rank < world or local < 0:
            raise ValueError
    except ValueError:
        told = ", ".join(f"{name}={os.environ.get(name)!r}" for name in (RANK, WORLD_SIZE, LOCAL_RANK))
        raise ValueError(f"the environment has {told}: expected numbers, RANK from 0 to WORLD_SIZE - 1") from None
    return Place(rank, world, local)


def join(name: str, engine: str, device: int | None = None) -> Communicator:
    """Creates this rank's end of the communicator of all ranks, and waits for the others. engine, device: see
    leanfleet.communicators.create.

    Raises ValueError outside of launch and torchrun, RuntimeError where another rank does not come.
    """
    from leanfleet import communicators

    here = place()
    if here is None:
        raise ValueError("this process is no rank: start it with leanfleet generate --gpus, or with torchrun")
    file = os.environ.get(_ID_FILE)
    if file is None:
        return communicators.world_from_torchrun(name, engine=engine, device=device, timeout=JOIN_SECONDS)
    own = communicators.exchange_id(file, here.rank, engine, JOIN_SECONDS)
    return communicators.create(name, here.rank, here.world, id=own, engine=engine, device=device, timeout=JOIN_SECONDS)


def host() -> str:
    """Where rank 0 is, for the others."""
    return "127.0.0.1" if _ID_FILE in os.environ else os.environ.get("MASTER_ADDR", "127.0.0.1")


def publish(name: str, text: str) -> None:
    """Rank 0 leaves a text for the others, once under a name."""
    if (path := _path_of(name)) is None:
        _torchrun_store().set(f"leanfleet/{name}", text)
        return
    with files.new_file(path) as new:
        new.write_text(text)


def published(name: str, seconds: float) -> str:
    """What rank 0 has left under a name. Raises TimeoutError where it does not come."""
    deadline = time.monotonic() + seconds
    while (text := _found(name)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 has not said within {seconds:g} s where it listens")
        time.sleep(_POLL)
    return text


def _found(name: str) -> str | None:
    if (path := _path_of(name)) is None:
        store, key = _torchrun_store(), f"leanfleet/{name}"
        return store.get(key).decode() if store.check([key]) else None
    return path.read_text() if path.exists() else None


def _path_of(name: str) -> Path | None:
    """Where launch's ranks have a text; None under torchrun, whose store has it."""
    file = os.environ.get(_ID_FILE)
    return None if file is None else Path(file).with_name(name)


def _torchrun_store() -> Any:
    from leanfleet import communicators

    return communicators.torchrun_store()


def python(*arguments: str) -> list[str]:
    """A command of this interpreter, which takes modules from where this process does and not from the current folder."""
    return [sys.executable, "-P", *arguments]


def end_with_parent() -> None:
    """In a process that launch started: the kernel kills it when its parent has ended, however that came about."""
    parent = os.environ.get(_PARENT)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_KILL_ON_PARENTS_DEATH, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # it ended before
        os.kill(os.getpid(), signal.SIGKILL)


def launch(
    command: Sequence[str],
    world: int,
    *,
    stdin: str | None = None,
    environment: Mapping[str, str] | None = None,
    passed_on: Sequence[int] = (),
    seconds: float | None = None,
    serving: bool = False,
) -> int:
    """Runs a command as `world` processes, and waits for them. Rank 0's output and errors are this process's own; what the
    others print is not shown.

    stdin: a text for each; None: nothing. passed_on: exit codes of rank 0 that are no failure, such as of a reader that left.
    seconds: that all may take; None: as long as they like. serving: SIGINT and SIGTERM reach rank 0 alone, as SIGTERM, and this
    process ends by them once all ranks have ended. Returns rank 0's exit code. Raises RankError, which names the rank
    and has the last line that it said, where one fails, is killed or does not end; no process is left then.

    Example:
        from leanfleet import ranks

        program = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
        ranks.launch(ranks.python("-c", program), 2)  # rank 0 of 2
    """
    started: list[_Rank] = []
    signals: AbstractContextManager[list[int]] = _passed_to_first(started) if serving else nullcontext([])
    with signals as asked:
        with tempfile.TemporaryDirectory(prefix="leanfleet-ranks-") as folder:
            try:
                for rank in range(world):
                    started.append(_Rank(command, rank, world, Path(folder), stdin, environment or {}))
                if asked:  # while the first was starting
                    started[0].process.terminate()
                return _watch(started, passed_on, seconds)
            finally:
                _end(started)
    return 128 + asked[0]


@contextmanager
def _passed_to_first(started: Sequence[_Rank]) -> Iterator[list[int]]:
    """While it lasts, what asks this process to end asks rank 0, which ends in good order. It ends this process afterwards.
    Gives the signals that came."""
    asked: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        asked.append(number)
        if started:
            started[0].process.terminate()

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    except RankError:  # by the signal, where it was still loading
        if not asked:
            raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if asked:
        signal.raise_signal(asked[0])


class _Rank:
    """A process, and what it says on stderr, but rank 0's, which is shown as it comes."""

    def __init__(
        self, command: Sequence[str], rank: int, world: int, folder: Path, stdin: str | None, environment: Mapping[str, str]
    ) -> None:
        self.rank, self.said = rank, folder / f"rank{rank}.txt"
        own = {RANK: str(rank), WORLD_SIZE: str(world), LOCAL_RANK: str(rank), _PARENT: str(os.getpid())}
        own |= {_ID_FILE: str(folder / "id"), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        given: Any = subprocess.DEVNULL
        if stdin is not None:
            (folder / "stdin").write_text(stdin, encoding="utf-8")
            given = (folder / "stdin").open("rb")
        with self.said.open("wb") as said:
            quiet: dict[str, Any] = {} if rank == 0 else {"stdout": subprocess.DEVNULL, "stderr": said}
            try:
                self.process = subprocess.Popen(list(command), stdin=given, env={**os.environ, **environment, **own}, **quiet)
            finally:
                if stdin is not None:
                    given.close()

    def failure(self, code: int) -> str:
        """One phrase on how it ended."""
        if code < 0:
            try:
                name = signal.Signals(-code).name
            except ValueError:
                name = f"signal {-code}"
            return f"rank {self.rank} (process {self.process.pid}) was killed by {name}"
        lines = self.said.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"rank {self.rank} failed with exit code {code}" + (f": {lines[-1]}" if lines else "")


def _watch(started: Sequence[_Rank], passed_on: Sequence[int], seconds: float | None) -> int:
    begun, through = time.monotonic(), None
    while True:
        codes = [each.process.poll() for each in started]
        if codes[0] is not None and codes[0] in passed_on:
            return codes[0]
        if any(codes):  # a rank whose peer is gone fails too: ask again, whether one was killed before
            codes = [each.process.poll() for each in started]
        bad = sorted((code >= 0, each.rank) for each, code in zip(started, codes, strict=True) if code)
        if bad:
            rank = bad[0][1]
            raise RankError(f"{started[rank].failure(codes[rank] or 0)}; the other ranks were ended")
        if all(code == 0 for code in codes):
            return 0
        now = time.monotonic()
        through = through or (now if any(code == 0 for code in codes) else None)
        late = next((each.rank for each, code in zip(started, codes, strict=True) if code is None), 0)
        if through is not None and now - through > _FINISH:
            raise RankError(f"rank {late} did not end within {_FINISH:g} s of the others; it was ended")
        if seconds is not None and now - begun > seconds:
            raise RankError(f"rank {late} was not through after {seconds:g} s; all ranks were ended")
        time.sleep(_POLL)


def _end(started: Sequence[_Rank]) -> None:
    """No process is left: they are asked, and then killed."""
    left = [each.process for each in started if each.process.poll() is None]
    for process in left:
        process.terminate()
    deadline = time.monotonic() + _GRACE
    for process in left:
        try:
            process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
