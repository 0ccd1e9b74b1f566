"""python tests/versions.py [package ...]: which versions of the packages beside us pass their tests.

Of each version the package alone is installed into a folder that comes first on PYTHONPATH, beside the rest of this environment,
and the tests named here run. The results take their place in docs/reference/versions.json and in the table of support.md.
"""

import datetime
import json
import os
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from support.ort_models import install_package
from support.paths import ROOT

RESULTS = ROOT / "docs" / "reference" / "versions.json"
PAGE, MARK = ROOT / "docs" / "reference" / "support.md", "<!-- made by tests/versions.py -->\n"
# {package: (what its tests cover, tests, versions)}
MATRIX = {
    "onnxruntime": (
        "every operator, type and variant, in place too; function bodies without the library",
        ["tests/runtimes/test_ort_library.py", "tests/export/test_function_bodies.py"],
        "1.20.1 1.21.1 1.22.1 1.23.2 1.24.4 1.25.1 1.26.0 1.27.0 1.28.0 1.29.0 1.30.0 1.31.1 1.32.0".split(),
    ),
    "onnx": (
        "export of every operator; the rewriter",
        ["tests/export/test_export.py", "tests/export/test_rewrite.py"],
        "1.19.1 1.20.1 1.21.0 1.22.0 1.23.2".split(),
    ),
}
NESTED = ["--deselect", "tests/runtimes/test_ort_library.py::test_oldest_runtime", "-k", "not oldest"]


def run(package, version, tests):
    """{"passed": .., "failed": .., "skipped": .., "names": [of failed tests]} of one version."""
    folder = install_package(package, version)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT), str(ROOT / "tests")])}
    check = f"import {package}; assert {package}.__version__ == '{version}', {package}.__file__"
    subprocess.run([sys.executable, "-P", "-c", check], env=environment, check=True)
    command = [sys.executable, "-P", "-m", "pytest", "-rf", "-p", "no:cacheprovider", *NESTED, *tests]
    text = subprocess.run(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ).stdout
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", text.splitlines()[-1])}
    if not counts:
        raise SystemExit(f"{package} {version}: pytest said nothing that counts\n{text[-3000:]}")
    failed = counts.get("failed", 0) + counts.get("error", 0)
    names = re.findall(r"^(?:FAILED|ERROR) \S+::(\S+)", text, re.MULTILINE)
    return {"passed": counts.get("passed", 0), "failed": failed, "skipped": counts.get("skipped", 0), "names": names[:20]}


def table(results):
    """The results in Markdown. A line covers versions that follow each other and say the same."""
    lines = ["| | tests | passed | failed | date |", "|---|---|---|---|---|"]
    for package, of_package in results.items():
        groups = []
        for version, found in of_package["versions"].items():
            said = [found["passed"], ", ".join(found["names"]) or "none", found["date"]]
            if groups and groups[-1][2] == said:
                groups[-1][1] = version
            else:
                groups.append([version, version, said])
        for first, last, said in groups:
            span = first if first == last else f"{first} to {last}"
            lines.append("| " + " | ".join([f"{package} {span}", of_package["covers"], *map(str, said)]) + " |")
    return "\n".join(lines) + "\n"


def main():
    for package in sys.argv[1:] or MATRIX:
        covers, tests, versions = MATRIX[package]
        for version in versions:
            found = run(package, version, tests)
            results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
            lines = results.setdefault(package, {"covers": covers, "versions": {}})
            lines["covers"] = covers
            lines["versions"][version] = {"date": datetime.date.today().isoformat(), **found}
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            before, _, after = PAGE.read_text().split(MARK)
            PAGE.write_text(before + MARK + table(results) + MARK + after)
            print(
                package, version, *(f"{n} {found[n]}" for n in ("passed", "failed", "skipped")), *found["names"][:3], flush=True
            )


if __name__ == "__main__":
    main()
