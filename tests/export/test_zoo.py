"""Every causal language model of transformers, built small: exported right, or refused by name. zoo.toml says which.

The decoder modules of all of them are compared with their models eagerly, through the operators' kernels. Files take seconds
each: every run writes and checks some, others from day to day; LEANFLEET_ZOO=all writes all.
"""

import datetime
import json
import os
import tomllib
import zlib
from pathlib import Path

import pytest
import transformers

from leanfleet.export import export_decoder
from leanfleet.export.serving import export_for_serving
from support import zoo
from support.cpu_time import slow_if

TABLE = tomllib.loads((Path(__file__).parent / "zoo.toml").read_text())
REASONS = {entry: reason for reason, entries in TABLE["refused"].items() for entry in entries}
SAME_VERSION = transformers.__version__.startswith(TABLE["transformers"] + ".")
PARTS = 30  # a run writes one file in so many
TODAY = datetime.date.today().toordinal() % PARTS
WRITTEN = [
    entry
    for entry in TABLE["served"]
    if os.environ.get("LEANFLEET_ZOO") == "all" or zlib.crc32(entry.encode()) % PARTS == TODAY
]


def test_table_is_complete():
    known = [*TABLE["served"], *REASONS, *TABLE["unbuilt"]]
    assert len(known) == len(set(known))
    if SAME_VERSION:
        assert sorted(known) == sorted(zoo.ENTRIES)


def entries(names):
    """Those that this version of transformers has."""
    return [name for name in names if name in zoo.ENTRIES]


SERVED = entries(TABLE["served"])


@pytest.mark.parametrize("entry", slow_if(SERVED, [entry for i, entry in enumerate(SERVED) if i % 3]))
def test_served(entry, tmp_path):
    """Prompts, decode steps alone and in a ragged batch, over caches and over pages; see leanfleet.export.verification."""
    if not SAME_VERSION:
        return right_or_refused(zoo.make(entry), tmp_path)
    for found in zoo.check_eagerly(zoo.make(entry)):
        assert found["largest_difference"] <= found["bound"] < 1e-3


def assert_refused(model, reason, folder, printed=lambda: ""):
    for exporter in (export_decoder, export_for_serving):
        with pytest.raises(ValueError) as error:
            exporter(model, folder / "out")
        message = str(error.value)
        assert reason in message and type(model).__name__ in message and "\n" not in message and len(message) < 500, message
        assert list(folder.iterdir()) == [] and "def forward" not in printed(), "a graph was printed"


def right_or_refused(model, folder):
    try:
        zoo.check_eagerly(model)
    except ValueError as error:
        assert_refused(model, str(error), folder)


@pytest.mark.parametrize("entry", slow_if(entries(REASONS), ["gemma3n_text"]))
def test_refused(entry, tmp_path, capsys):
    if SAME_VERSION:
        assert_refused(zoo.make(entry), REASONS[entry], tmp_path, lambda: capsys.readouterr().err)
    else:
        right_or_refused(zoo.make(entry), tmp_path)


@pytest.mark.parametrize("entry", entries(TABLE["unbuilt"]))
def test_unbuilt(entry, tmp_path):
    """Should another version build it, it is right or refused."""
    try:
        model = zoo.make(entry)
    except (ImportError, ValueError):
        return
    right_or_refused(model, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("entry", entries(WRITTEN))
def test_file(entry, tmp_path):
    """The ONNX file, run by ONNX Runtime with the library."""
    model = zoo.make(entry)
    export_decoder(model, tmp_path / "decoder")
    verified = json.loads((tmp_path / "decoder" / "leanfleet.json").read_text())["verified"]
    assert verified["largest_difference"] <= verified["bound"] < 1e-3
