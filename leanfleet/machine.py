"""This machine: its processor, and functions of ours in processes of their own. Standard library only."""

import json
import signal
import sys
from pathlib import Path

_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16")  # those that kernels may use
# -P keeps Python from looking for modules in the current folder, where a json.py may lie.
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); import importlib; "
    "getattr(importlib.import_module(sys.argv.pop(1)), sys.argv.pop(1))(*sys.argv[1:])"
)


def cpu() -> tuple[str, list[str]]:
    """The processor's model, and those of its instruction sets that matter here."""
    facts: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            facts.setdefault(name.strip(), value.strip())
    except OSError:
        pass
    flags = facts.get("flags", "").split()
    return facts.get("model name", "unknown processor"), [name for name in _FLAGS if name in flags]


def command(module: str, function: str, *arguments: str) -> list[str]:
    """The command line of a process that calls a function of a module with these arguments."""
    return [sys.executable, "-P", "-c", _CODE, json.dumps(sys.path), module, function, *arguments]


def ending(code: int, log: str) -> str:
    """How a process ended that should have gone on, in words. log: what it wrote."""
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}: {log[-300:]}"
