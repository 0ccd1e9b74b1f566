"""Runs a long command and says every few seconds what it is at: python .ci/watch.py WHAT COMMAND...

The command's own output is kept back; when it fails, its end is printed. Exits with its code.
"""

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EVERY = 5  # seconds between two lines
TAIL = 40  # lines of a failed command
# What pip and ninja are at, in words: the last match in the output so far counts.
AT = (
    (re.compile(r"^Collecting ([\w.-]+)", re.M), "looking up {}"),
    (re.compile(r"^\s+(?:Downloading|Using cached) ([\w.]+-[\w.]+)", re.M), "fetching {}"),
    (re.compile(r"^Installing collected packages: .*?([\w.-]+)$", re.M), "unpacking packages up to {}"),
    (re.compile(r"^\s*\[(\d+/\d+)\] Building \w+ object \S*?/([\w./]+)\.o", re.M), "compiled {} {}"),
    (re.compile(r"^\s*\[(\d+/\d+)\] Linking .*?(\w+\.so)", re.M), "linked {} {}"),
)


def at(text):
    """The last thing that the output says, "" where it says nothing known."""
    found = [(match.start(), words.format(*match.groups())) for pattern, words in AT for match in pattern.finditer(text)]
    return max(found)[1] if found else ""


def run(what, command):
    """Runs the command; returns its exit code."""
    start = time.monotonic()
    print(f"{what} ...", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with open(log, "wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        shown, said = "", start
        while process.poll() is None:
            time.sleep(0.2)
            if time.monotonic() - said >= EVERY:
                said, now = time.monotonic(), at(log.read_text(errors="replace"))
                print(f"  {said - start:3.0f} s  {now if now != shown else '... ' + now}", flush=True)
                shown = now
        if process.returncode:
            print(*log.read_text(errors="replace").splitlines()[-TAIL:], sep="\n", file=sys.stderr)
            print(f"{what}: failed with exit code {process.returncode}", file=sys.stderr)
        else:
            print(f"  {time.monotonic() - start:3.0f} s  done", flush=True)
    return process.returncode


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
