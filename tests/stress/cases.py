"""What cases are drawn by: calls of operators, files, processes, clients of a server, and launches. Each generator has place,
draw, simpler and a Case.
"""

import json

import torch

from stress import check, clients, draw, files, launches, processes

GENERATORS = {"calls": draw, "files": files, "processes": processes, "clients": clients, "launches": launches}
OTHERS = [files.Case.runtime, processes.Case.runtime, clients.Case.runtime]  # in the place of a runtime
OTHERS += [launches.Case.runtime] if torch.cuda.is_available() else []
SHARES = {draw: 0.5, files: 0.3, processes: 0.2, clients: 0.1, launches: 0.2}  # of the time


def missing():
    """Kinds of files and acts of processes that this machine cannot run."""
    return files.missing() | processes.missing()


def generator_of(case):
    return next(g for g in GENERATORS.values() if isinstance(case, g.Case))


def from_json(text):
    """A case of any generator, by the fields that it has."""
    fields = json.loads(text)
    marks = {"op": draw, "kind": files, "launches": launches, "act": processes, "clients": clients}
    return next(g for name, g in marks.items() if name in fields).Case.from_json(text)


def rows():
    """What runs can be held to: operators, kinds of files, acts of processes and what a server runs."""
    return [*draw.OPS, *files.KINDS, *processes.NUMBERS, *clients.BASES, *dict.fromkeys(launches.KINDS)]


def error_of(case):
    """What is wrong with a case, or None."""
    if isinstance(case, files.Case):
        files.prepare(case)
        return files.alone(case)
    try:
        (check if isinstance(case, draw.Case) else generator_of(case)).check(case)
    except Exception as error:  # whatever a runtime raises is a finding
        return f"{type(error).__name__}: {error}"
    return None
