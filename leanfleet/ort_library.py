"""libleanfleet_ort.so and onnxruntime: where the library is, and how sessions get to know its operators.

Importing this module needs neither onnxruntime nor numpy.
"""

from __future__ import annotations

import json
import re
import weakref
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from leanfleet import native, spec

if TYPE_CHECKING:
    from onnxruntime import SessionOptions

OLDEST_RUNTIME = (1, 18)  # the first with the C API that the library asks for

_registered: weakref.WeakSet[SessionOptions] = weakref.WeakSet()


def get_library_path() -> str:
    """Path of libleanfleet_ort.so, for SessionOptions.register_custom_ops_library and other runtimes' settings.

    Raises FileNotFoundError where the package was installed without its libraries.

    Example:
        import onnxruntime
        from leanfleet.ort_ops import get_library_path

        options = onnxruntime.SessionOptions()
        options.register_custom_ops_library(get_library_path())     # what register does, beside its checks
    """
    return str(native.library_path("leanfleet_ort"))


def onnxruntime() -> ModuleType:
    """The installed package. Raises ImportError without it, RuntimeError for one older than 1.18."""
    try:
        import onnxruntime as found
    except ImportError as error:
        raise ImportError(
            "leanfleet.ort_ops needs onnxruntime, which cannot be imported here: pip install 'leanfleet[ort]', or for "
            f"NVIDIA GPUs pip install leanfleet onnxruntime-gpu ({error})"
        ) from error
    version = tuple(map(int, re.findall(r"\d+", found.__version__)[:2]))
    if version < OLDEST_RUNTIME:
        raise RuntimeError(
            f"leanfleet needs onnxruntime {'.'.join(map(str, OLDEST_RUNTIME))} or newer; found "
            f"{found.__version__}. Run: pip install -U onnxruntime"
        )
    return found


def register(session_options: SessionOptions) -> SessionOptions:
    """Makes leanfleet's operators known to sessions created with these onnxruntime.SessionOptions; returns them.

    Doing it again to the same object changes nothing. Raises ImportError (no onnxruntime), RuntimeError (one older
    than 1.18) or FileNotFoundError (the package's library is missing).

    Example:
        import onnxruntime
        from leanfleet.ort_ops import register

        session = onnxruntime.InferenceSession("layer.onnx", register(onnxruntime.SessionOptions()))
    """
    onnxruntime()
    path = get_library_path()
    if session_options not in _registered:
        session_options.register_custom_ops_library(path)
        _registered.add(session_options)
    return session_options


def kernels_in_profile(path: str | Path) -> Counter[tuple[str, str]]:
    """Counter {(operator, provider): runs} of leanfleet's kernels in an ONNX Runtime profile."""
    return Counter(
        (e["args"]["op_name"], e["args"]["provider"])
        for e in json.loads(Path(path).read_text())
        if e.get("cat") == "Node" and e["name"].endswith("_kernel_time") and e["args"].get("op_name") in spec.all_specs()
    )
