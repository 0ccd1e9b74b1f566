"""Programs in documents: finding them, running them, comparing what they print."""

import contextlib
import io
import re

from support.paths import ROOT

DOCS = ROOT / "docs"


def python_blocks(text):
    return re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)


def printed(line):
    """What a line of a program says that it prints, None if it says nothing."""
    found = re.match(r"\s*print\(.*\)  # (.*)$", line)
    return found and found[1]


def run(program, folder, monkeypatch):
    """Runs a program in a folder; what it prints must be what the comments behind its prints say, where they say it."""
    monkeypatch.chdir(folder)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(program, "<document>", "exec"), {"__name__": "document"})
    expected = [printed(line) for line in program.splitlines() if printed(line)]
    if expected:
        assert output.getvalue().splitlines() == expected
