"""One case: runs it and says what is wrong."""

import dataclasses
import re

import torch

from stress import draw, judge, runtimes, values

# Operators whose documents promise the same bits for any number of threads; of others each number gives its own, every time.
SAME_FOR_ALL_THREADS = {"SampleTokens", "GatedActivation", "CausalConv", "DecayGates", "RmsNorm", "BlockLinear", "Linear"}


def check(case):
    """Raises judge.Wrong, or whatever the runtime raises, where the case does not do what it should."""
    torch.set_num_threads(1)
    clean, poisoned = values.make(case)
    if case.wrong is not None:
        return check_refusals(case, clean)
    if case.runtime == "trt":
        return runtimes.drive_plugin(case, clean, poisoned)
    judged = judge.Judge(case, clean, poisoned)
    torch.set_num_threads(1)
    before = copied(poisoned)
    try:
        found = runtimes.run(case, poisoned, case.attrs, case.threads, checked=is_checkable(case))
    except Exception as error:  # of other types through PyTorch and ONNX Runtime
        if case.runtime not in draw.GPU or not re.search(runtimes.LEFT_TO_THE_CPU, str(error)):
            raise
        return
    refuse_changes(before, poisoned, "an input changed")
    check_outputs(case, judged, clean, poisoned, found)
    again = runtimes.run(case, poisoned, case.attrs, case.threads)
    refuse_changes(found, again, "a second run gives other bits")
    if case.op in SAME_FOR_ALL_THREADS and case.runtime != "body":
        other = runtimes.run(case, poisoned, case.attrs, 1 if case.threads > 1 else 3)
        refuse_changes(found, other, "another number of threads gives other bits")
    if case.in_place and case.runtime != "body":
        taken = runtimes.run(case, copied(poisoned), case.attrs, case.threads, in_place=True)
        refuse_changes(found, taken, "in place it gives other bits")


def check_outputs(case, judged, clean, poisoned, found):
    """Quantised caches that rows were appended to are judged first, and what follows from them with the bytes that were found."""
    after = judge.settled(case, poisoned, found)
    if after is None:
        return judged.check(found)
    op = draw.OPS[case.op]
    for t in op.active_outputs(case.attrs):
        if t.takes:
            judged._check_output(t.name, found[t.name])
    inputs, attrs = after
    cleaned = {n: t if n not in clean or t.shape != clean[n].shape else t.clone() for n, t in inputs.items()}
    for name, mask in values.unread(op, {n: t for n, t in inputs.items()}, attrs).items():
        values.fill_in(cleaned[name], mask, 0)
    rest = judge.Judge(dataclasses.replace(case, attrs=attrs), cleaned, inputs)
    rest.check({name: found[name] for name in rest.exact})


def is_checkable(case):
    """LEANFLEET_CHECK=1 also refuses what has a meaning but is likely to be a mistake: positions beyond the tables of a rotary
    encoding, which count as the last, and rows of allowed_tokens that allow none."""
    return case.checked and not {"cos_cache", "allowed_tokens"} & set(case.ranks)


def copied(tensors):
    return {name: t.clone() for name, t in tensors.items()}


def refuse_changes(before, after, words):
    for name, t in before.items():
        if not runtimes.bits(t).equal(runtimes.bits(after[name])):
            raise judge.Wrong(f"{words}: {name}")


def check_refusals(case, inputs):
    for words, changed, attrs, names, checked in values.wrong_calls(case, inputs):
        check_refusal(case, words, changed, attrs, names, checked)


def check_refusal(case, words, inputs, attrs, names, checked):
    text = runtimes.refusal(case, inputs, attrs, checked)
    if text is None:
        raise judge.Wrong(f"a call {words} was not refused")
    op = draw.OPS[case.op]
    if op.name not in text and op.snake_name not in text:
        raise judge.Wrong(f"a call {words} is refused without the operator's name: {text}")
    if case.runtime == "ort" and "ONNXRuntimeError] : " in text and op.name + " '" not in text:
        return  # ONNX Runtime itself refuses models without an input that must be there, and of wrong types, in words of its own
    if case.runtime == "cuda" and "on the CPU" in text:
        return  # sizes that the CUDA kernels leave to the CPU's, which are looked at before values are
    if not any(name in text for name in names):
        raise judge.Wrong(f"a call {words} is refused with none of the names {', '.join(names)}: {text}")
