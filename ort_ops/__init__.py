"""leanfleet's operators in ONNX Runtime: the library's path, its registration, and sessions.

Importing this module needs neither onnxruntime nor torch nor a GPU.
"""

import importlib
from typing import TYPE_CHECKING, Any

from leanfleet.ort_library import OLDEST_RUNTIME as OLDEST_RUNTIME
from leanfleet.ort_library import get_library_path, register
from leanfleet.ort_ops.sessions import make_session

if TYPE_CHECKING:  # for editors and type checkers, which do not see __getattr__
    from leanfleet.generation import generate as generate
    from leanfleet.generation import stream as stream
    from leanfleet.ort_ops.generation import load_decoder as load_decoder

_HOMES = {"generate": "generation", "load_decoder": "generation", "stream": "generation"}
__all__ = ["get_library_path", "make_session", "register", *_HOMES]


def __getattr__(name: str) -> Any:
    """Generation comes on first use: it needs numpy."""
    if name not in _HOMES:
        raise AttributeError(f"module 'leanfleet.ort_ops' has no attribute '{name}'")
    return getattr(importlib.import_module(f"leanfleet.ort_ops.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
