"""python tests/support_table.py: writes what ran where into docs/reference/support.md, from docs/reference/reports/*.json.

These are reports of `leanfleet verify --report FILE.json`.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]
from leanfleet import verify  # noqa: E402

REPORTS = ROOT / "docs" / "reference" / "reports"
PAGE, MARK = ROOT / "docs" / "reference" / "support.md", "<!-- made by tests/support_table.py -->\n"


def table():
    return verify.support_table([json.loads(path.read_text()) for path in sorted(REPORTS.glob("*.json"))])


if __name__ == "__main__":
    before, _, after = PAGE.read_text().split(MARK)
    PAGE.write_text(before + MARK + table() + MARK + after)
