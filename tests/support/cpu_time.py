"""What tests take of the processor, as hooks of pytest that tests/conftest.py imports.

--most-cpu-seconds N prints the sum and the longest tests, and fails the run where a test without the mark `slow` takes more:
`make test` stays quick that way. CPU seconds, since a machine that others use too makes a test wait, but hardly work, more;
and what is over the limit is divided by what the yardstick of csrc/time_compile.py takes longer than on a quiet core. A test
that is the first to need a fixture pays for it. Processes count once they are waited for.

--days N runs those of the chosen tests whose turn it is today: each has its turn every N days.
"""

import datetime
import importlib.util
import os
import zlib

import pytest

from support.paths import ROOT

START = pytest.StashKey[float]()
DAY = "LEANFLEET_TEST_DAY"  # of the run: its workers take it over, whatever the time is when they begin


def time_compile():
    """csrc/time_compile.py, which is in no package."""
    specification = importlib.util.spec_from_file_location("time_compile", ROOT / "csrc" / "time_compile.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def cpu_seconds():
    """Of this process and of those that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def pytest_addoption(parser):
    parser.addoption("--most-cpu-seconds", type=float, metavar="N", help="fail where a test without the mark `slow` takes more")
    parser.addoption(
        "--days", type=int, default=1, metavar="N", help="run what is due today of tests that have a turn in N days"
    )


@pytest.hookimpl(trylast=True)  # of the tests that -m and -k leave
def pytest_collection_modifyitems(config, items):
    days = config.getoption("--days")
    due = [zlib.crc32(item.nodeid.encode()) % days == int(os.environ[DAY]) % days for item in items]
    config.hook.pytest_deselected(items=[item for item, today in zip(items, due, strict=True) if not today])
    items[:] = [item for item, today in zip(items, due, strict=True) if today]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    item.stash[START] = cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    limit = item.config.getoption("--most-cpu-seconds")
    if limit is not None and call.when == "teardown":
        taken = cpu_seconds() - item.stash[START]
        if taken > limit:
            tool = time_compile()
            taken = tool.quiet_seconds({"cpu_seconds": taken, "yardstick": tool.yardstick()})
        # Workers of xdist send these along.
        report.cpu_seconds, report.slow = round(taken, 2), item.get_closest_marker("slow") is not None
    return report


class Judge:
    """Of all tests, in the process that hears of them all."""

    def __init__(self, limit):
        self.limit, self.taken, self.too_long = limit, {}, {}

    def pytest_runtest_logreport(self, report):
        if not hasattr(report, "cpu_seconds"):
            return
        self.taken[report.nodeid] = report.cpu_seconds
        if report.cpu_seconds > self.limit and not report.slow:
            self.too_long[report.nodeid] = report.cpu_seconds

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        if self.too_long and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.section(f"{sum(self.taken.values()):.0f} CPU seconds in tests")
        for name, seconds in sorted(self.taken.items(), key=lambda one: -one[1])[:20]:
            terminalreporter.line(f"{seconds:6.1f} s  {name}")
        for name, seconds in self.too_long.items():
            terminalreporter.line(
                f"FAILED {name} takes {seconds:.0f} CPU seconds, and tests of `make test` at most {self.limit:g}: make it "
                "cheaper, or mark it with pytest.mark.slow",
                red=True,
            )


def pytest_configure(config):
    if config.getoption("--days") < 1:
        raise pytest.UsageError(f"--days is {config.getoption('--days')}; expected 1 or more")
    os.environ.setdefault(DAY, f"{datetime.date.today().toordinal()}")
    limit = config.getoption("--most-cpu-seconds")
    if limit is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Judge(limit))


def slow(value):
    """A parameter's value, or the values of several parameters, with the mark `slow`."""
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)


def rest_slow(values, quick=1):
    """Values of a parameter, of which all but the first `quick` get the mark `slow`."""
    values = list(values)
    return values[:quick] + [slow(value) for value in values[quick:]]


def slow_if(values, which):
    """Values of a parameter, of which those in `which` get the mark `slow`."""
    return [slow(value) if value in which else value for value in values]
