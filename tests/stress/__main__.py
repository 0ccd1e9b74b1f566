"""Draws calls and files without end, runs them in processes of their own, and reduces what fails. `make stress` starts it.

python -m stress [--seconds S] [--seed N] [--jobs J] [--op NAME] [--runtime NAME]     draws
python -m stress --runtime cuda --sanitizer memcheck                                   with the kernels under compute-sanitizer
python -m stress --case JSON                                                           runs one case
python -m stress --reduce JSON                                                         reduces one that fails
"""

import argparse
import collections
import contextlib
import itertools
import json
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from importlib.util import find_spec

from stress import cases, clients, draw, files, runtimes

CASE_SECONDS = 120  # longer is a hang
REDUCE_SECONDS = 120  # for a finding
SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")
SAME = 3  # findings of one kind that are reduced; of more only the number is told


# A process that runs cases: a line of JSON in, a line out


def work():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        answers.write(json.dumps(cases.error_of(cases.from_json(line))) + "\n")
        answers.flush()


class Worker:
    """Runs cases of one generator one after the other in another process, which is started anew where a case ends it."""

    def __init__(self, sanitizer=None):
        """sanitizer: the tool of compute-sanitizer that looks on, whose findings count as the case's."""
        self.process, self.sanitizer = None, sanitizer

    def check(self, case):
        """What is wrong, crashes and hangs included; None: nothing."""
        if self.process is None:
            self.errors, self.log = tempfile.TemporaryFile(), tempfile.NamedTemporaryFile()
            beneath = ["compute-sanitizer", "--tool", self.sanitizer, "--log-file", self.log.name]
            if self.sanitizer != "initcheck":  # which would not see what other kernels write
                beneath += ["--kernel-name", "kns=leanfleet"]
            self.process = subprocess.Popen(
                [*(beneath if self.sanitizer else []), sys.executable, "-m", "stress", "--work"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            first = CASE_SECONDS  # the time to start
        else:
            first = 0
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(case.to_json().encode() + b"\n")
            self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], first + CASE_SECONDS)[0]:
            self.close()
            return f"no answer in {CASE_SECONDS} s"
        if line := self.process.stdout.readline():
            if said := self.reported():
                self.close()  # later kernels of this process may fail for the same reason
                return said
            return json.loads(line)
        code = self.process.wait()
        self.errors.seek(0)
        said = self.errors.read()[-2000:].decode(errors="replace").strip()
        self.close()
        return f"the process ended with {signal.Signals(-code).name if code < 0 else code}: {said}"

    def reported(self):
        """What the sanitizer has written beyond its own name."""
        lines = self.log.read().decode(errors="replace").splitlines() if self.sanitizer else []
        return "\n".join(line for line in lines if line.strip("= ") and "COMPUTE-SANITIZER" not in line)[:2000]

    def close(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process.stdin.close()
            self.process.stdout.close()
            self.errors.close()
            self.log.close()
            self.process = None


# Findings


def kind_of(error):
    """The first words of an error without numbers: findings with the same ones are likely to have one cause."""
    return re.sub(r"\[.*?\]|[-+]?\d[-+.\w]*", "#", error)[:60]


def reduced(case, error, worker, seconds=REDUCE_SECONDS):
    """(the simplest case found that fails with an error of the same kind, its error)."""
    end, kind = time.monotonic() + seconds, kind_of(error)
    progress = True
    while progress:
        progress = False
        for candidate in cases.generator_of(case).simpler(case):
            if time.monotonic() > end:
                return case, error
            found = worker.check(candidate)
            if found is not None and kind_of(found) == kind:
                case, error, progress = candidate, found, True
                break
    return case, error


class Run:
    """Draws and checks until the time is over."""

    def __init__(self, seed, seconds, ops, chosen, first, sanitizer=None):
        self.seed, self.end, self.first, self.sanitizer = seed, time.monotonic() + seconds, first, sanitizer
        there, self.missing = [*runtimes.available(), *cases.OTHERS], cases.missing()
        self.ops, self.runtimes = ops, [r for r in there if not chosen or r in chosen]
        self.generators = [g for g in cases.GENERATORS.values() if any(self.wants(*g.place(i)) for i in range(1000))]
        self.indices = {g: itertools.count() for g in self.generators}
        self.spent = dict.fromkeys(self.generators, 0.0)  # seconds, by their share
        self.lock = threading.Lock()
        self.counts, self.kinds = collections.Counter(), collections.Counter()
        self.refused, self.failed = 0, None

    def wants(self, op, runtime):
        """Whether this run is asked for such cases and this machine has the runtime."""
        return runtime in self.runtimes and op not in self.missing and (not self.ops or op in self.ops)

    def next_case(self):
        """(generator, index, case): the next of the generator that is behind with its share of the time."""
        with self.lock:
            generator = min(self.generators, key=self.spent.__getitem__)
            index = next(i for i in self.indices[generator] if self.wants(*generator.place(i)))
            self.spent[generator] += 0.01  # so that another worker turns to another one
        return generator, index, generator.draw(self.seed, index)

    def go(self):
        """One worker's part."""
        try:
            self._go()
        except BaseException as error:
            self.end, self.failed = 0.0, error
            raise

    def _go(self):
        workers = {g: Worker(self.sanitizer) for g in self.generators}
        while time.monotonic() < self.end:
            started = time.monotonic()
            generator, index, case = self.next_case()
            error = workers[generator].check(case)
            with self.lock:
                self.spent[generator] += (time.monotonic() - started) / cases.SHARES[generator]
                self.counts[case.op, case.runtime] += 1
                self.refused += getattr(case, "wrong", None) is not None
            if error is not None:
                self.tell(index, case, error, workers[generator])
        for worker in workers.values():
            worker.close()

    def tell(self, index, case, error, worker):
        key = case.op, case.runtime, kind_of(error)
        with self.lock:
            self.kinds[key] += 1
            if self.kinds[key] > SAME:
                return
        print(f"\nFOUND {self.seed}:{index} {case.op} on {case.runtime}: {error}\n  {case.to_json()}", flush=True)
        if self.first:
            self.end = 0.0
            return
        smaller, error = reduced(case, error, worker)
        print(f"\nREDUCED {self.seed}:{index}: {error}\n  {smaller.to_json()}", flush=True)

    def summary(self):
        """A table of operators and runtimes, and the findings."""
        names = list(dict.fromkeys(op for op, _ in self.counts))
        width = max(map(len, [*names, "all"]), default=8)
        lines = [" ".join([" " * width, *(f"{r:>11}" for r in self.runtimes)])]
        for op in [*sorted(names), "all"]:
            numbers = [
                sum(n for (o, r), n in self.counts.items() if r == runtime and op in (o, "all")) for runtime in self.runtimes
            ]
            lines.append(" ".join([f"{op:{width}}", *(f"{n:11}" for n in numbers)]))
        lines.append(f"{sum(self.counts.values())} cases of seed {self.seed}, {self.refused} of them wrong calls; ")
        lines[-1] += f"{sum(self.kinds.values())} findings of {len(self.kinds)} kinds"
        lines += [f"{n:4} {op} on {runtime}: {kind}" for (op, runtime, kind), n in self.kinds.most_common()]
        return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(prog="python -m stress", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=300, help="how long; 300")
    parser.add_argument("--seed", type=int, help="of the drawn cases; another one each time")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes at once; as many as cores")
    parser.add_argument("--op", action="append", choices=cases.rows(), help="these operators, or kinds of files, alone")
    parser.add_argument("--runtime", action="append", choices=[*draw.RUNTIMES, *cases.OTHERS], help="these runtimes alone")
    parser.add_argument("--first", action="store_true", help="ends with the first finding and does not reduce it")
    parser.add_argument("--sanitizer", choices=SANITIZERS, help="a tool of compute-sanitizer for the processes of calls")
    parser.add_argument("--case", help="JSON of a case to run")
    parser.add_argument("--reduce", help="JSON of a case that fails, to reduce")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work()
    if args.case or args.reduce:
        worker, case = Worker(args.sanitizer), cases.from_json(args.case or args.reduce)
        error = worker.check(case)
        if error is not None and args.reduce:
            case, error = reduced(case, error, worker)
            print(case.to_json())
        worker.close()
        print(error or "right")
        return error is not None
    if missing := set(args.runtime or ()) - {*runtimes.available(), *cases.OTHERS}:
        parser.error(f"this machine has no {', '.join(sorted(missing))}; it has {', '.join(runtimes.available())}")
    for generator in (files, clients):
        absent = [name for name in generator.PACKAGES if find_spec(name) is None]
        if absent and generator.Case.runtime in (args.runtime or cases.OTHERS):
            install = 'pip install ".[models,serve]"'
            parser.error(f"{generator.Case.runtime} need {', '.join(absent)}: {install}, or choose others with --runtime")
    seed = secrets.randbelow(2**31) if args.seed is None else args.seed
    run = Run(seed, args.seconds, args.op, args.runtime, args.first, args.sanitizer)
    print(f"seed {seed}; {args.seconds:g} s on {', '.join(run.runtimes)}", flush=True)
    threads = [threading.Thread(target=run.go) for _ in range(args.jobs)]
    for thread in threads:
        thread.start()
    started = told = time.monotonic()
    while any(t.is_alive() for t in threads):
        time.sleep(0.2)
        if time.monotonic() - told > 30:
            told = time.monotonic()
            print(f"{told - started:.0f} s, {sum(run.counts.values())} cases, {sum(run.kinds.values())} findings", flush=True)
    print(run.summary(), flush=True)
    return bool(run.kinds) or run.failed is not None


if __name__ == "__main__":
    sys.exit(main())
