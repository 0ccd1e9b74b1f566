"""What a process case does, in a process that begins with it: python act.py PLAN. See stress.processes.

Needs neither torch nor numpy, whose own threads and locks would be in play, but for sessions.
"""

import array
import ctypes
import os
import pickle
import re
import resource
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from leanfleet import native


class Call:
    """A call of the library with buffers of its own; what is right is known by the number of threads."""

    def __init__(self, plan):
        self.plan = plan
        self.inputs = [x and (array.array("B", x[0]), *x[1:]) for x in plan["inputs"]]

    def run(self, threads):
        """Raises what the library raises, and AssertionError for other bits."""
        plan = self.plan
        outputs = [x and (array.array("B", b"\xff" * x[0]), *x[1:]) for x in plan["outputs"]]
        entries = [[x and (x[0].buffer_info()[0], *x[1:]) for x in tensors] for tensors in (self.inputs, outputs)]
        call = native.Call(plan["op"], *entries, plan["attrs"], threads=threads)
        size, sync = call.workspace()
        memory = array.array("B", b"\xff" * (size + 256))
        words = array.array("B", bytes(sync + 256))
        call.run(up(memory), size, up(words), sync)
        found = [x and x[0].tobytes() for x in outputs]
        for name, bits, right in zip(plan["names"], found, plan["expected"][threads], strict=True):
            assert bits == right, f"{name} has other bits with {threads} threads"


def up(buffer):
    return (buffer.buffer_info()[0] + 255) // 256 * 256


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def memory_held():
    """Bytes of this process: those that malloc has given out, and those in RAM."""
    libc = ctypes.CDLL(None)
    libc.fopen.restype, libc.fopen.argtypes = ctypes.c_void_p, [ctypes.c_char_p] * 2
    libc.malloc_info.argtypes, libc.fclose.argtypes = [ctypes.c_int, ctypes.c_void_p], [ctypes.c_void_p]
    with tempfile.NamedTemporaryFile("r") as file:
        stream = libc.fopen(file.name.encode(), b"w")
        libc.malloc_info(0, stream)
        libc.fclose(stream)
        text = file.read()
    sums = text[text.rindex("</heap>") :]  # of all arenas
    free = {kind: int(size) for kind, size in re.findall(r'<total type="(\w+)" count="\d+" size="(\d+)"', sums)}
    system = int(re.search(r'<system type="current" size="(\d+)"', sums)[1])
    return {"of malloc": system + free.pop("mmap") - sum(free.values()), "resident": resident()}


def in_a_child(function, seconds=60):
    """Runs it in a fork; raises AssertionError for another end than a good one."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(seconds)
            function()
            code = 0
        except BaseException as error:
            print(f"in a child: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    assert status == 0, f"a child ended with status {status}"


def fork(call, plan):
    """Forks before and after the first call, while other threads call, and forks of forks."""

    def children():
        for threads in plan["threads"]:
            call.run(threads)
        in_a_child(lambda: call.run(plan["threads"][0]))

    stop = threading.Event()

    def busy():
        while not stop.is_set():
            for threads in plan["threads"]:
                call.run(threads)

    if plan["used"]:
        call.run(plan["threads"][0])
    others = [threading.Thread(target=busy, daemon=True) for _ in range(plan["busy"])]
    for thread in others:
        thread.start()
    for _ in range(plan["rounds"]):
        in_a_child(children)
    stop.set()
    for thread in others:
        thread.join(60)
        assert not thread.is_alive(), "a thread that calls does not end"
    call.run(plan["threads"][-1])


def run_call(plan, threads):
    Call(plan).run(threads)


def spawn(call, plan):
    import multiprocessing

    if plan["used"]:
        call.run(plan["threads"][0])
    for method in ("spawn", "forkserver"):
        process = multiprocessing.get_context(method).Process(target=run_call, args=(plan, plan["threads"][-1]))
        process.start()
        process.join(60)
        assert process.exitcode == 0, f"a process of {method} ended with {process.exitcode}"


def come_and_go(call, plan):
    """Threads that call at once, with different numbers of threads, and end while others go on."""
    faults = []

    def some(count, number):
        try:
            own = Call(plan)
            for i in range(count):
                own.run(plan["threads"][(number + i) % len(plan["threads"])])
        except BaseException as error:
            faults.append(f"{type(error).__name__}: {error}")

    for _ in range(plan["rounds"]):
        threads = [threading.Thread(target=some, args=(1 + 3 * (n % 2), n)) for n in range(plan["busy"] + 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a thread that calls does not end"
    assert not faults, faults[0]


def limits(call, plan):
    """Processors and threads taken away, and memory that runs out: an error or the right result, and right again with memory."""
    processors = os.sched_getaffinity(0)
    for own in ({min(processors)}, processors):
        os.sched_setaffinity(0, own)
        for threads in plan["threads"]:
            call.run(threads)
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))  # no other thread can be made, but by root
    for threads in plan["threads"]:
        call.run(threads)
    resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    for spare in (0, 1 << 16, 1 << 20, plan["spare"]):
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + spare, hard))
        for threads in plan["threads"]:
            try:
                call.run(threads)
            except MemoryError:  # of Python, before the library is asked
                pass
            except native.LeanfleetError as error:
                assert_clear(error, plan)
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        call.run(plan["threads"][0])


def assert_clear(error, plan):
    assert plan["op"] in str(error) and "memory" in str(error), f"the error for a lack of memory is {str(error)!r}"


def memory(call, plan):
    """Every allocation of the library in a call fails once: an error that says so or the right result, and the next is right."""
    preloaded = ctypes.CDLL(None)
    refuse, asked = preloaded.refuse_memory, preloaded.memory_asked_for
    refuse.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    failed = 0
    for threads in dict.fromkeys(plan["threads"]):
        for start in range(4000):
            call.run(1)  # so that a pool of several threads is made anew
            refuse(start, plan["row"], None, None)
            try:
                call.run(threads)
                over = asked() <= start
                refuse(-1, 0, None, None)
            except native.LeanfleetError as error:
                refuse(-1, 0, None, None)
                over, failed = False, failed + 1
                assert_clear(error, plan)
            call.run(threads)
            if over:
                break
    assert failed or max(plan["threads"]) == 1, "nothing that the library asks for was refused"


def signals(call, plan):
    """Signals in the middle of calls: handlers run, and may raise; results stay right."""
    seen, number, inside = [], getattr(signal, plan["signal"]), False

    def handler(signum, frame):
        nonlocal inside
        seen.append(signum)
        if plan["raises"] and inside:
            inside = False
            raise KeyboardInterrupt

    signal.signal(number, handler)
    stop, own = threading.Event(), os.getpid()

    def send():
        while not stop.wait(0.0007):
            os.kill(own, number)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    done, end = 0, time.monotonic() + 30
    while (done < plan["rounds"] * 10 or not seen) and time.monotonic() < end:
        try:
            inside = True
            call.run(plan["threads"][done % len(plan["threads"])])
            inside = False
        except KeyboardInterrupt:
            pass
        done += 1
    stop.set()
    sender.join()
    signal.signal(number, signal.SIG_IGN)
    assert seen, "no signal came"
    call.run(plan["threads"][0])


def ended(call, plan):
    """A signal that nobody handles ends a process at once, and no thread of the library keeps it."""
    for name in ("SIGINT", "SIGTERM", "SIGALRM"):
        child = os.fork()
        if child == 0:
            signal.signal(getattr(signal, name), signal.SIG_DFL)
            while True:
                for threads in plan["threads"]:
                    call.run(threads)
        time.sleep(0.05)
        os.kill(child, getattr(signal, name))
        end = time.monotonic() + 30
        while (found := os.waitpid(child, os.WNOHANG))[0] == 0:
            assert time.monotonic() < end, f"{name} does not end a process that calls"
            time.sleep(0.01)
        assert os.WTERMSIG(found[1]) == getattr(signal, name), f"{name} ends a process with status {found[1]}"


def session_maker(plan):
    """A function that makes a session of ONNX Runtime, runs it once, and returns the bytes of its outputs."""
    import numpy as np
    import onnxruntime

    from leanfleet import ort_ops

    feed = {n: np.frombuffer(data, dtype).reshape(shape) for n, (data, dtype, shape) in plan["feed"].items()}

    def once():
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 4
        ort_ops.register(options)
        session = onnxruntime.InferenceSession(plan["model"], options, providers=["CPUExecutionProvider"])
        return [found.tobytes() for found in session.run(None, feed)]

    return once


def sessions(call, plan):
    """Sessions of ONNX Runtime made, run and dropped: right every time, and memory does not grow."""
    once, count = session_maker(plan), plan["sessions"]
    first, before = once(), {}
    for i in range(count):
        assert once() == first, "another session gives other bits"
        if i == count // 3:
            before = memory_held()
    allowed = {
        "of malloc": (64 << 10) + 300 * count,
        "resident": (8 << 20) + 2000 * count,
    }  # residency goes up and down by megabytes
    for what, held in memory_held().items():
        assert held - before[what] < allowed[what], f"{count} sessions leave {held - before[what]} bytes {what}"


def session_memory(call, plan):
    """As memory, of the library for ONNX Runtime, from its registration on."""
    once = session_maker(plan)
    first = once()
    library = ctypes.CDLL(str(native.library_path("leanfleet_ort")))  # it stays where it is
    assert library
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "libleanfleet_ort" in line]
    low, high = (int(n, 16) for n in next(m[0] for m in maps if "x" in m[1]).split("-"))
    preloaded = ctypes.CDLL(None)
    refuse, asked = preloaded.refuse_memory, preloaded.memory_asked_for
    refuse.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    failed = over = 0
    for start in range(0, 4000, plan["row"]):
        refuse(start, plan["row"], low, high)
        try:
            assert once() == first, "with little memory a session gives other bits"
        except AssertionError:
            raise
        except Exception as error:  # onnxruntime's have no base class of their own
            failed += 1
            text = str(error)
            assert "out of memory" in text, f"the error for a lack of memory is {text!r}"
        over = asked() <= start
        refuse(-1, 0, None, None)
        assert once() == first, "after a lack of memory a session gives other bits"
        if over:
            break
    assert failed and over, "nothing that the library asks for was refused"


ACTS = {act.__name__: act for act in (fork, spawn, come_and_go, limits, memory, signals, ended, sessions, session_memory)}

if __name__ == "__main__":
    with open(sys.argv[1], "rb") as file:
        content = pickle.load(file)
    try:
        ACTS[content["act"]](Call(content), content)
    except AssertionError as error:
        print(f"WRONG {error}", flush=True)
        os._exit(1)
    print("RIGHT", flush=True)
    sys.stdout.flush()
