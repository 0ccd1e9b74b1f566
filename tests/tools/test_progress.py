"""What long work is at: shown by the command line alone, drawn over on a terminal, a line now and then elsewhere."""

import io
import re
import time

import pytest

from leanfleet import cli, progress
from support.parity_models import saved, variant_model


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(progress, "TERMINAL", (0.04, 0.02))
    monkeypatch.setattr(progress, "LOG", (0.2, 0.1))


def until(said, text):
    """Waits for a text in what was said."""
    for _ in range(500):
        if text in said.getvalue():
            return
        time.sleep(0.01)
    raise AssertionError(f"{text!r} never came: {said.getvalue()!r}")


def test_nothing_is_shown_outside_of_shown(capfd):
    with progress.stage("work") as stage:
        stage.at("this", 1, 2)
        time.sleep(0.3)
    assert capfd.readouterr() == ("", "")


def test_short_stages_say_nothing():
    for said in (io.StringIO(), Terminal()):
        with progress.shown(said), progress.stage("work"):
            pass
        assert said.getvalue() == ""


def test_a_log_gets_whole_lines_while_a_stage_lasts():
    said = io.StringIO()
    with progress.shown(said), progress.stage("comparing") as stage:
        stage.at("alone", 4, 8)
        until(said, "alone")
        stage.at("in a batch", 5, 8)
        until(said, "batch")
    lines = said.getvalue().splitlines()
    assert len(lines) >= 2 and all(
        re.fullmatch(r" +\d+ s  comparing \[#{10,12}\.{8,10}\] [45]/8 (alone|in a batch)", x) for x in lines
    )


def test_a_terminal_has_one_line_that_is_wiped():
    said = Terminal()
    with progress.shown(said):
        with progress.stage("building"):
            until(said, "building")
        assert said.getvalue().endswith("\r\033[K") and "\n" not in said.getvalue()
        length = len(said.getvalue())
        time.sleep(0.1)
        assert len(said.getvalue()) == length


def test_a_long_line_does_not_wrap(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    said = Terminal()
    with progress.shown(said), progress.stage("a stage of a long name that goes on and on"):
        until(said, "a stage")
    assert max(map(len, said.getvalue().split("\r\033[K"))) == 29


def test_the_innermost_stage_is_shown():
    said = Terminal()
    with progress.shown(said), progress.shown(io.StringIO()), progress.stage("outer"):
        until(said, "outer")
        with progress.stage("inner"):
            until(said, "inner")
        seen = said.getvalue().count("outer")
        for _ in range(500):
            if said.getvalue().count("outer") > seen:
                break
            time.sleep(0.01)
        assert said.getvalue().count("outer") > seen


def test_tell_is_about_the_innermost_stage():
    said = Terminal()
    progress.tell("nobody listens")
    with progress.shown(said), progress.stage("exporting"):
        progress.tell("tracing", 1, 4)
        until(said, "exporting [#####...............] 1/4 tracing")


def test_redirected_stderr_and_a_closed_one_do_no_harm(capsys):
    import contextlib

    with progress.shown(), contextlib.redirect_stderr(io.StringIO()) as other, progress.stage("tracing"):
        time.sleep(0.4)
    assert "tracing" in capsys.readouterr().err and other.getvalue() == ""
    said = Terminal()
    with progress.shown(said), progress.stage("work"):
        until(said, "work")
        said.close()


def test_errors_pass_and_end_the_stage():
    said = Terminal()
    with pytest.raises(KeyError), progress.shown(said), progress.stage("work"):
        until(said, "work")
        raise KeyError
    assert progress._display is None and said.getvalue().endswith("\r\033[K")


@pytest.fixture
def stages(monkeypatch):
    """The names of the stages that commands begin."""
    seen, push = [], progress._Display.push

    def record(self, new):
        seen.append(new.what)
        push(self, new)

    monkeypatch.setattr(progress._Display, "push", record)
    return seen


def test_check_and_rewrite_have_stages(stages, tmp_path):
    model = saved(variant_model("LeanAttention", 0), tmp_path)
    assert cli.main(["check", str(model)]) == 0
    assert stages == ["running the model with"]
    del stages[:]
    assert cli.main(["rewrite", str(model), "-o", str(tmp_path / "new.onnx"), "--to", "standard", "--inline"]) == 0
    assert stages == [f"reading {model}", "rewriting its nodes", "running the original and the result"]


def test_what_is_printed_gets_a_line_of_its_own():
    said = Terminal()
    with progress.shown(said), progress.stage("timing"):
        until(said, "timing")
        progress.clear()
        said.write("a result\n")
        assert "\r\033[Ka result\n" in said.getvalue()
        until(said, "a result\n\r\033[K   0 s  timing")
