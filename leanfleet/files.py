"""Writes files whole or not at all, tells before the work whether a path can be written, and reads files that may be damaged.

Standard library only.
"""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Of transformers' from_pretrained: no Python file that a folder or the hub holds is run, and nobody is asked whether it may.
NO_CODE: dict[str, Any] = {"trust_remote_code": False}


@contextmanager
def new_file(path: str | os.PathLike) -> Iterator[Path]:
    """Yields the path of a file to write in the place of `path`; it takes that place when the block ends well.

    Missing folders are made. Where the block raises, everything is as it was before. Raises OSError on entry for a path that
    cannot be written: a folder, one below a file, one without permission. A device such as /dev/null is written as it is.
    """
    target = Path(path).resolve()
    if target.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give the path of a file to write")
    if target.exists() and not target.is_file():
        yield target
        return
    part = _beside(target)
    with _parents_of(target, path):
        try:
            with _explained(path):
                part.touch()
            yield part
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)


@contextmanager
def new_folder(path: str | os.PathLike, outdated: Iterable[str] = ()) -> Iterator[Path]:
    """Yields an empty folder whose files move to the folder `path` when the block ends well, over those of the same names.

    outdated: names of files, or patterns of them, that go from there where the block has not written them. Otherwise as
    new_file.
    """
    target = Path(path).resolve()
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"{path} is a file; give the path of a folder to write")
    there = target.is_dir()
    part = _beside(target / "files" if there else target)
    with _parents_of(target, path):
        try:
            with _explained(path):
                part.mkdir()
            yield part
            if not there:
                part.rename(target)
            else:
                for old in [file for pattern in outdated for file in target.glob(pattern)]:
                    if not (part / old.name).exists():
                        old.unlink(missing_ok=True)
                for file in part.iterdir():
                    if file.is_dir():
                        shutil.rmtree(target / file.name, ignore_errors=True)
                    os.replace(file, target / file.name)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def check_file(path: str | os.PathLike) -> None:
    """Raises OSError where new_file would."""
    _check(new_file, path)


def check_onnx(path: str | os.PathLike) -> None:
    """Raises FileNotFoundError where there is no file to read."""
    path = Path(path)
    if path.is_dir():
        inside = next(iter(sorted(path.glob("*.onnx"))), None)
        example = "" if inside is None else f", such as {inside}"
        raise FileNotFoundError(f"{path} is a folder; give the path of an ONNX file{example}")
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give the path of an ONNX file")


def check_folder(path: str | os.PathLike) -> None:
    """Raises OSError where new_folder would."""
    _check(new_folder, path)


def _check(new, path):
    class Writable(Exception):
        pass

    try:
        with new(path):
            raise Writable
    except Writable:
        pass


def _beside(path):
    """A temporary name beside `path`, unique to this process: moving it to `path` copies nothing."""
    return path.with_name(f".{path.stem}.{os.getpid()}.part{path.suffix}")


@contextmanager
def _explained(path):
    try:
        yield
    except OSError as error:
        raise type(error)(f"{path} cannot be written: {error.strerror or error}") from None


@contextmanager
def _parents_of(target, path):
    """Makes the folders above `target`, and removes those that it made where the block raises."""
    missing = [folder for folder in target.parents if not folder.exists()]
    there = next(folder for folder in target.parents if folder not in missing)
    if not there.is_dir():
        raise NotADirectoryError(f"{path} cannot be written: {there} is a file")
    try:
        with _explained(path):
            target.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for folder in missing:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        raise


@contextmanager
def reading(what: object) -> Iterator[None]:
    """Turns what a library raises while it reads damaged files into ValueError: "`what` cannot be read: ...".

    For loaders that pass on whatever happened inside: KeyError, plain Exception, a panic of Rust's. Errors that tell of
    something else, OSError, ImportError and MemoryError, stay as they are.
    """
    try:
        yield
    except (OSError, ImportError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        told = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ValueError(f"{what} cannot be read: {told}") from error
