"""What cases are drawn by: calls of operators, and files. Each generator has place, draw, simpler and a Case."""

import json

from stress import check, draw, files

GENERATORS = {"calls": draw, "files": files}
OTHERS = [files.Case.runtime]  # in the place of a runtime
SHARES = {draw: 0.6, files: 0.4}  # of the time


def generator_of(case):
    return next(g for g in GENERATORS.values() if isinstance(case, g.Case))


def from_json(text):
    """A case of any generator, by the fields that it has."""
    fields = json.loads(text)
    return (draw if "op" in fields else files).Case.from_json(text)


def rows():
    """What runs can be held to: operators and kinds of files."""
    return [*draw.OPS, *files.KINDS]


def error_of(case):
    """What is wrong with a case, or None."""
    if isinstance(case, files.Case):
        files.prepare(case)
        return files.alone(case)
    try:
        check.check(case)
    except Exception as error:  # whatever a runtime raises is a finding
        return f"{type(error).__name__}: {error}"
    return None
