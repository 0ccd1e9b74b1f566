"""The checkout's package `bench`, alone: no other folder of the checkout becomes importable, so that leanfleet stays the
installed one."""

import importlib
import importlib.util
import sys

from support.paths import ROOT


def script(name):
    """A module of bench, such as "plots.pictures"."""
    if "bench" not in sys.modules:
        folder = ROOT / "bench"
        found = importlib.util.spec_from_file_location(
            "bench", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        sys.modules["bench"] = importlib.util.module_from_spec(found)
        found.loader.exec_module(sys.modules["bench"])
    return importlib.import_module(f"bench.{name}")
