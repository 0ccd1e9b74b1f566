"""What tests of operators do alike, whose calls a module has as NAME, SIZES, calls(sizes, dtype, seed) and assert_right."""

from support import ort_models
from support.kernels import run_untouched
from support.linear_cases import OPS, one_node_model, session_of


def check_on_cpu(cases, dtype):
    """All calls on the CPU, by one to four threads."""
    for seed, sizes in enumerate(cases.SIZES):
        for inputs, attrs in cases.calls(sizes, dtype, seed):
            cases.assert_right(run_untouched(cases.NAME, inputs, attrs, threads=1 + seed % 4), inputs, attrs)


def check_bodies(cases, sizes, dtype, **allowed):
    """Calls of these sizes as a node in ONNX Runtime, by its function body and by the library. allowed: of assert_right."""
    for inputs, attrs in cases.calls(sizes, dtype, 3):
        ranks = {name: x.dim() for name, x in inputs.items()}
        model = one_node_model(cases.NAME, inputs, attrs, ranks, dtype=str(dtype).removeprefix("torch."))
        for library in (False, True):
            given = {name: x.clone() for name, x in inputs.items()}
            found = ort_models.run_node(session_of(model, library), OPS[cases.NAME], given, attrs)
            cases.assert_right(found, inputs, attrs, **allowed)
