"""Compiles one file and notes its CPU seconds: python time_compile.py LOG LANGUAGE OBJECT COMMAND...

CMake puts this before every compiler call (RULE_LAUNCH_COMPILE). LOG has a JSON object a line: {"object", "language",
"cpu_seconds", "wall_seconds", "yardstick"}; of several lines of an object the last counts. "yardstick" is the CPU seconds of
a fixed piece of work right after the file: a machine that others use too needs more for both. "serialised": the compiler's
lines about kernels in which each wgmma waits for the one before, for want of registers.

    python time_compile.py --report LOG [LANGUAGE]    prints the sum and the five longest
"""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path


YARDSTICK = 0.04  # about what the fixed work takes where all CUDA files of November 2026 take 970 CPU seconds


def yardstick():
    """CPU seconds of the fixed work."""
    start, x = time.process_time(), 0
    for i in range(1_000_000):
        x = (x * 31 + i) & 0xFFFF
    return time.process_time() - start


def quiet_seconds(line):
    """What a file's CPU seconds would have been on a quiet core; a faster core than CI's counts as it is."""
    return line["cpu_seconds"] / max(1.0, line.get("yardstick", YARDSTICK) / YARDSTICK)


def compile_timed(log, language, target, command):
    """Runs the command, appends to the log what it took, and returns its exit code."""
    start = time.perf_counter()
    found = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    print(found.stdout, end="", flush=True)
    code, usage = found.returncode, resource.getrusage(resource.RUSAGE_CHILDREN)
    line = {
        "object": target,
        "language": language,
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
        "wall_seconds": round(time.perf_counter() - start, 2),
        "serialised": [text for text in found.stdout.splitlines() if "wgmma.mma_async instructions are serialized" in text],
    }
    if code == 0:
        line["yardstick"] = round(yardstick(), 4) if language == "CUDA" else YARDSTICK
        with open(log, "a") as file:
            file.write(json.dumps(line) + "\n")
    return code


def read(log, language):
    """{object: its line} of a language."""
    lines = map(json.loads, Path(log).read_text().splitlines())
    return {line["object"]: line for line in lines if line["language"] == language}


def report(log, language="CUDA"):
    """Prints what the language took to compile."""
    files = sorted(read(log, language).values(), key=lambda line: -line["cpu_seconds"]) if Path(log).exists() else []
    if not files:
        print(f"{language}: nothing was compiled")
        return
    print(
        f"{language}: {len(files)} files, {sum(f['cpu_seconds'] for f in files):.0f} CPU seconds "
        f"({sum(map(quiet_seconds, files)):.0f} on quiet cores); the longest: "
        + ", ".join(f"{Path(f['object']).name.split('.')[0]} {f['cpu_seconds']:.0f} s" for f in files[:5])
    )


if __name__ == "__main__":
    if sys.argv[1] == "--report":
        report(*sys.argv[2:])
    else:
        sys.exit(compile_timed(*sys.argv[1:4], sys.argv[4:]))
