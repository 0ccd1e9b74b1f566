"""The cases that once failed, and a short slice of `make stress`, the same in every run."""

import asyncio
import ctypes
import dataclasses
import itertools
import json
import random
import time
from pathlib import Path

import pytest
import torch

from leanfleet import generation, pages, serve, spec
from stress import (
    act,
    cases,
    check,
    clients,
    draw,
    faults,
    files,
    judge,
    launches,
    processes,
    runtimes,
    soak,
    steps,
    trees,
    values,
)
from stress.__main__ import Worker
from support.cpu_time import slow_if
from support.ort_models import TOY_SCHEMA
from support.paths import ROOT

KEPT = [json.loads(line) for line in (Path(__file__).parent / "kept.jsonl").read_text().splitlines()]
SLICE = 2  # cases of an operator on a runtime
SEED = 1
FILES, PROCESSES, CLIENTS = 12, 10, 4  # cases of files, of processes, and of clients


@pytest.fixture(scope="module")
def worker():
    """Another process, whose forks run cases of files; it runs those of processes too."""
    worker = Worker()
    yield worker
    worker.close()


@pytest.mark.parametrize("kept", KEPT, ids=lambda kept: kept["was"])
def test_what_failed_once(kept, worker):
    case = cases.from_json(json.dumps(kept["case"]))
    if case.runtime not in [*runtimes.available(), *cases.OTHERS] or case.op in cases.missing():
        pytest.skip(f"there is no {case.runtime} here")
    if case.runtime in cases.OTHERS:
        assert worker.check(case) is None
    else:
        check.check(case)


@pytest.mark.parametrize("op", slow_if(draw.OPS, ["GatedDeltaRule", "GatedDeltaRuleGrad"]))
def test_a_slice(op, one_torch_thread):
    rounds = len(draw.OPS) * len(draw.RUNTIMES)
    for index in range(SLICE * rounds):
        name, runtime = draw.place(index)
        if name == op and runtime in runtimes.available():
            case = draw.draw(SEED, index)
            try:
                check.check(case)
            except Exception as error:
                raise AssertionError(f"{error}\npython -m stress --reduce '{case.to_json()}'") from error


def test_a_slice_of_files(worker):
    for index in range(FILES):
        if files.place(index)[0] not in files.missing():
            case = files.draw(SEED, index)
            error = worker.check(case)
            assert error is None, f"{error}\npython -m stress --reduce '{case.to_json()}'"


def test_a_slice_of_processes():
    seen = set()
    for index in range(PROCESSES):
        case = processes.draw(SEED, index)
        if case.act in processes.missing():
            seen.add(case.act)
            continue
        short = {"rounds": 3, "sessions": 60, "row": 20 if case.act == "session_memory" else case.numbers.get("row")}
        numbers = case.numbers | {name: short[name] for name in case.numbers if name in short}
        case = dataclasses.replace(case, numbers=numbers)
        seen.add(case.act)
        error = cases.error_of(case)
        assert error is None, f"{error}\npython -m stress --reduce '{case.to_json()}'"
    assert seen == set(act.ACTS) == set(processes.NUMBERS)


def test_a_slice_of_clients():
    """All that clients do, a few at a time, of one of the models."""
    seen = set()
    for index in range(0, CLIENTS * len(clients.BASES), len(clients.BASES)):
        case = clients.draw(SEED, index)
        case = dataclasses.replace(case, clients=case.clients[:30])
        seen |= {client["does"] for client in case.clients}
        error = cases.error_of(case)
        assert error is None, f"{error}\npython -m stress --reduce '{case.to_json()}'"
    assert len(seen) > 12


def test_another_text_to_a_client_is_a_finding(monkeypatch):
    """And a page that is not given back, and a status that is another."""
    case = clients.Case("llama", clients.draw(SEED, 0).options, ({"does": "whole", "text": 1, "tokens": 9, "at": 0},))

    def found(owner, name, function):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, function)
            return cases.error_of(case)

    assert cases.error_of(case) is None
    assert "another text than alone" in found(generation.TextStream, "_told", lambda self, whole, before, text: "x")
    assert "pages are in use" in found(pages.PagePool, "release", lambda self, given: None)
    assert "got 500" in found(serve.Server, "options", lambda self, body: 1 / 0)


@pytest.mark.parametrize("base", ("llama", "qwen3.5"))
def test_steps_give_what_the_slow_path_gives(base, tmp_path, monkeypatch):
    """And a token that is another is a finding."""
    vocabulary = steps.made(base, tmp_path)
    found = steps.run(tmp_path, vocabulary, 250, SEED, speculate=2)
    assert found["answers"] > 30 and found["tokens compared"] > 500 and found["preempted"]
    take = steps.ContinuousBatch._take

    def wrong(self, request, guess, tokens, logprobs):
        if len(request.tokens) == 3:
            tokens[0] = (tokens[0] + 1) % vocabulary
        take(self, request, guess, tokens, logprobs)

    monkeypatch.setattr(steps.ContinuousBatch, "_take", wrong)
    with pytest.raises(AssertionError, match="token 3 is .*, expected"):
        steps.run(tmp_path, vocabulary, 60, SEED)


@pytest.mark.slow
def test_one_server_for_a_while():
    soak.expected("llama")
    process, port = soak.serving("llama")
    try:
        found = asyncio.run(soak.soak(process, port, "llama", 20, 60, SEED))
    finally:
        process.terminate()
        process.wait()
    assert found["right"] > 100 and found["refused"] > 20 and found["left"] > 20 and found["preemptions"] > 20


def test_what_grows_is_seen():
    def rows(memory, files):
        return [(time, memory[time >= 5] << 20, files[time >= 5]) for time in range(10)]

    told = soak.growth(rows((300, 310), (100, 110)), 5)
    assert told == {
        "memory_mib": {"first half": 300, "second half": 310},
        "open_files": {"first half": 100, "second half": 110},
    }
    with pytest.raises(clients.Wrong, match="memory grew from 300 to 330 MiB"):
        soak.growth(rows((300, 330), (100, 100)), 5)
    with pytest.raises(clients.Wrong, match="open files grew from 100 to 130"):
        soak.growth(rows((300, 300), (100, 130)), 5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_slice_of_launches():
    launched = set()
    for index in range(16):
        case = dataclasses.replace(launches.draw(SEED, index), rounds=50)
        try:
            launched |= {case.launches} if launches.check(case) else set()
        except Exception as error:
            raise AssertionError(f"{error}\npython -m stress --reduce '{case.to_json()}'") from error
    assert launched == set(launches.KINDS)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_other_bits_of_a_launch_are_a_finding(monkeypatch):
    case = next(
        c for i in itertools.count() if (c := launches.draw(SEED, i)).launches == "graph" and c.calls[0]["op"] == "CausalConv"
    )
    case, right = dataclasses.replace(case, rounds=20), launches.Node.put

    def spoiled(node, number):
        right(node, number)
        node.launches.inputs["input"].view(-1)[0] += 1  # what the captured call reads

    assert cases.error_of(case) is None
    monkeypatch.setattr(launches.Node, "put", spoiled)
    assert "other bits than a call" in cases.error_of(case)


@pytest.mark.parametrize("fault", [*faults.FAULTS, *faults.CUDA_FAULTS], ids=lambda fault: fault[0])
def test_faults_have_their_place(fault):
    """What they change is in its file, once."""
    _, file, old, new, op, *_ = fault
    assert faults.path_of(file, ROOT).read_text().count(old) == 1 and new != old and op in cases.rows()


def test_other_bits_in_a_process_are_a_finding(monkeypatch):
    """And a crash of it, and an error where none should be."""
    case = dataclasses.replace(
        processes.draw(SEED, 4), numbers={"threads": [2], "signal": "SIGALRM", "raises": False, "rounds": 1}
    )
    right = processes.plan_of

    def check(**changes):
        with monkeypatch.context() as patch:
            patch.setattr(processes, "plan_of", lambda case: right(case) | changes)
            return cases.error_of(case)

    assert check() is None
    expected = right(case)["expected"][2]
    flipped = [x and bytes([x[0] ^ 1]) + x[1:] for x in expected]
    assert "other bits with 2 threads" in check(expected={2: flipped})
    assert "no operator is named" in check(op="Nothing")
    assert "KeyError" in check(expected={})


@pytest.mark.parametrize("kind", files.KINDS)
def test_files_that_nobody_changed_are_right(kind, worker):
    if kind not in files.missing():
        case = files.Case(kind, files.KINDS[kind].bases()[0])
        assert worker.check(case) is None


def test_files_that_are_read_and_written_again_say_the_same():
    source = random.Random(SEED)
    for kind in ("node", "gguf", "model"):
        base = files.KINDS[kind].bases()[0]
        for name, data in files.contents(kind, base).items():
            read, write = trees.FORMATS.get(name[name.rfind(".") :], (None, None))
            if read is not None:
                tree = read(data)
                assert read(write(tree)) == tree and (not name.endswith((".onnx", ".gguf")) or write(tree) == data)
                for _ in range(20):
                    change = trees.draw_change(source, tree, False)
                    assert json.loads(json.dumps(change)) == change or "NaN" in json.dumps(change)


def test_a_case_that_ends_its_process_is_a_finding(worker, monkeypatch):
    """Errors of a type that nobody promised, signals, and results that are another's."""
    case = files.Case("node", files.KINDS["node"].bases()[0])

    def ends(function):
        return files.alone(case, function)

    assert ends(lambda case: None) is None
    assert "SIGSEGV" in ends(lambda case: ctypes.string_at(0))
    assert "KeyError" in ends(lambda case: files.attempt({}.__getitem__, 1))
    assert "UnicodeDecodeError" in ends(lambda case: files.attempt(b"\xff".decode))
    assert ends(lambda case: files.attempt(int, "x")) is None
    assert "MemoryError" in ends(lambda case: files.attempt(bytearray, 64 << 30))
    monkeypatch.setattr(files, "SECONDS", 1)
    assert "no end" in ends(lambda case: time.sleep(60))


def test_cases_survive_as_text():
    for index in range(200):
        case = draw.draw(SEED, index)
        assert draw.Case.from_json(case.to_json()) == case
        assert draw.draw(SEED, index) == case
    for index in range(FILES):
        case = files.draw(SEED, index)
        assert repr(files.Case.from_json(case.to_json())) == repr(case) == repr(files.draw(SEED, index))
        case = launches.draw(SEED, index)
        assert cases.from_json(case.to_json()) == case == launches.draw(SEED, index)
        assert all(simpler != case for simpler in itertools.islice(launches.simpler(case), 5))
        case = processes.draw(SEED, index)
        assert cases.from_json(case.to_json()) == case == processes.draw(SEED, index)
        for simpler in itertools.islice(processes.simpler(case), 5):
            assert simpler != case and simpler.act == case.act


def test_what_is_simpler_is_valid():
    """The library takes each of them."""
    for index in range(0, 900, 7):
        case = draw.draw(SEED, index)
        for simpler in itertools.islice(draw.simpler(case), 5):
            assert draw.complexity(simpler) < draw.complexity(case)
            assert draw.refitted(simpler) == simpler
            draw.shapes_of(draw.OPS[case.op], simpler.ranks, simpler.attrs, simpler.sizes)


def test_everything_in_the_schema_is_drawn():
    """Inputs with and without, in every rank, types, and attributes at more than their defaults."""
    seen = set()
    for index in range(20_000):
        case = draw.draw(SEED, index)
        op = draw.OPS[case.op]
        if case.wrong is None:
            seen |= {(op.name, "dtype", case.dtype)}
            seen |= {(op.name, t.name, case.ranks.get(t.name)) for t in op.inputs}
            seen |= {(op.name, n, v) for n, v in case.attrs.items() if isinstance(v, str)}
            seen |= {(op.name, n, "other") for n, v in case.attrs.items() if v != op.attr(n).default}
    for op in draw.OPS.values():
        wanted = {(op.name, "dtype", d) for d in spec.TYPES["T"]}
        wanted |= {(op.name, t.name, len(s.axes)) for t in op.inputs for s in t.shapes}
        wanted |= {(op.name, t.name, None) for t in op.inputs if t.optional}
        wanted |= {(op.name, a.name, v) for a in op.attrs for v in a.values if v not in a.reference_only}
        wanted |= {(op.name, a.name, "other") for a in op.attrs if not a.refuse and a.name != "world"}  # one process a call
        assert wanted <= seen, wanted - seen


def test_an_operator_of_another_schema_is_drawn(monkeypatch):
    """Nothing here knows operators by name but for what their documents promise."""
    monkeypatch.setattr(draw, "OPS", {op.name: op for op in spec.parse(TOY_SCHEMA)})
    for index in range(50):
        case = draw.draw(SEED, index)
        op = draw.OPS[case.op]
        shapes = draw.shapes_of(op, case.ranks, case.attrs, case.sizes)
        assert all(size > 0 for shape in shapes.values() for size in shape)


@pytest.mark.parametrize("op", draw.OPS)
def test_the_judge_sees_one_wrong_element(op):
    """One element of each floating point output off by what is large beside its row, and one that was never written."""
    cases = (draw.draw(SEED, i) for i in itertools.count() if draw.place(i) == (op, "torch"))
    case = next(c for c in cases if c.wrong is None and not c.edges)  # at the edges of a type, as much may be right
    clean, poisoned = values.make(case)
    judged = judge.Judge(case, clean, poisoned)
    found = runtimes.run(case, poisoned, case.attrs, 1)
    judged.check(found)
    for name, tensor in found.items():
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            continue
        for spoil in (1 + tensor.abs().max(), float("nan")):
            spoiled = tensor.clone()
            spoiled.view(-1)[-1:] += spoil
            with pytest.raises(judge.Wrong):
                judged.check(found | {name: spoiled})
