"""python .ci/audit.py: do packages of this environment have known vulnerabilities? By pip-audit, which runs beside it.

Exit code 0: none that is known, a line naming what could not be looked up, as without network. 1: some have.
"""

import json
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

AUDITOR = "pip-audit==2.10.1"
NO_NETWORK = ("ConnectionError", "ConnectTimeout", "Max retries", "Name or service", "No matching distribution", "ServiceError")


def audit(auditor, packages):
    """(findings [text], why packages could not be looked up or None). auditor: a command; packages: the folder."""
    command = [*auditor, "--path", packages, "-f", "json", "--progress-spinner", "off"]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        found = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        if any(word in done.stderr for word in NO_NETWORK):
            return [], last
        return [f"pip-audit failed: {last}"], None
    if not found:
        return [f"pip-audit found no packages in {packages}"], None
    # pip-audit itself says that all is well where nobody answered.
    skipped = [package["name"] for package in found if "skip_reason" in package]
    problem = f"{len(skipped)} of {len(found)} packages could not be looked up, {', '.join(skipped[:3])} among them"
    findings = [
        f"{package['name']} {package['version']}: {v['id']}, mended in {', '.join(v['fix_versions']) or 'no version'}"
        for package in found
        for v in package.get("vulns", ())
    ]
    return findings, problem if skipped else None


def installed(folder):
    """The auditor's command, in an environment of its own; None and why where pip cannot get it."""
    python = Path(folder, "bin", "python")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", AUDITOR]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return None, (done.stderr.strip().splitlines() or ["pip failed"])[-1]
    return [python, "-m", "pip_audit"], None


def main():
    with tempfile.TemporaryDirectory() as folder:
        auditor, problem = installed(folder)
        findings = []
        if auditor:
            findings, problem = audit(auditor, sysconfig.get_paths()["purelib"])
    if problem:
        print(f"not audited: {problem}")
    if findings or not problem:
        print("\n".join(findings) or "no known vulnerabilities")
    return 1 if findings else 0


if __name__ == "__main__":
    raise SystemExit(main())
