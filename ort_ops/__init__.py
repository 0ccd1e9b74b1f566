"""leanfleet's operators in ONNX Runtime: the library's path, its registration, and sessions.

Importing this module needs neither onnxruntime nor torch nor a GPU.
"""

import importlib
import os
import re
import weakref
from typing import TYPE_CHECKING

from leanfleet import model_file, native, spec

if TYPE_CHECKING:  # for editors and type checkers, which do not see __getattr__
    from leanfleet.ort_ops.generation import generate as generate
    from leanfleet.ort_ops.generation import load_decoder as load_decoder
    from leanfleet.ort_ops.generation import stream as stream

_HOMES = {"generate": "generation", "load_decoder": "generation", "stream": "generation"}
__all__ = ["get_library_path", "make_session", "register", *_HOMES]
OLDEST_RUNTIME = (1, 18)  # the first with the C API that the library asks for

_registered = weakref.WeakSet()


def get_library_path():
    """Path of libleanfleet_ort.so, for SessionOptions.register_custom_ops_library and other runtimes' settings.

    Raises FileNotFoundError where the package was installed without its libraries.
    """
    return str(native.library_path("leanfleet_ort"))


def _onnxruntime():
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError(
            "leanfleet.ort_ops needs onnxruntime, which cannot be imported here: pip install 'leanfleet[ort]', or for "
            f"NVIDIA GPUs pip install leanfleet onnxruntime-gpu ({error})") from error
    found = tuple(map(int, re.findall(r"\d+", onnxruntime.__version__)[:2]))
    if found < OLDEST_RUNTIME:
        raise RuntimeError(f"leanfleet needs onnxruntime {'.'.join(map(str, OLDEST_RUNTIME))} or newer; found "
                           f"{onnxruntime.__version__}. Run: pip install -U onnxruntime")
    return onnxruntime


def register(session_options):
    """Makes leanfleet's operators known to sessions created with these onnxruntime.SessionOptions; returns them.

    Doing it again to the same object changes nothing. Raises ImportError (no onnxruntime), RuntimeError (one older
    than 1.18) or FileNotFoundError (the package's library is missing).
    """
    _onnxruntime()
    path = get_library_path()
    if session_options not in _registered:
        session_options.register_custom_ops_library(path)
        _registered.add(session_options)
    return session_options


def _default_providers(available):
    if "CUDAExecutionProvider" in available and "cuda" in native.build_info():
        return ["CUDAExecutionProvider", "CPUExecutionProvider"]
    return ["CPUExecutionProvider"]


def _explained(error):
    """The error with the types that the operator in it takes, where onnxruntime refuses a node's types."""
    refusals = r"of operator \((\w+)\) in node .* is invalid|no kernel def matches node inputs for Op: (\w+)"
    found = re.search(refusals, str(error))
    op = found and spec.all_specs().get(found[1] or found[2])
    if not op:
        return error
    types = ", ".join(f"{t.name} {t.type}" for t in op.inputs)
    return type(error)(f"{error}\n{op.name} takes {types}; T is {', '.join(spec.TYPES['T'][:-1])} or "
                       f"{spec.TYPES['T'][-1]}, the same for all of them, F is float32, I is int32")


def _overridden(model, override, options):
    """The bytes of a model in which nodes of these operators are leanfleet's, where the meaning is the same.

    External weights stay in their files; `options` tells onnxruntime where these are.
    """
    import onnx_ir
    from leanfleet.export.rewrite import rewrite

    if isinstance(model, str):
        found = onnx_ir.load(model)
        folder = os.path.dirname(os.path.abspath(model))
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    else:
        import onnx

        found = onnx_ir.from_proto(onnx.load_from_string(model))
    rewrite(found, operators=override, bodies=False)
    return onnx_ir.to_proto(found).SerializeToString()


def make_session(model, providers=None, session_options=None, *, override=(), **kwargs):
    """An onnxruntime.InferenceSession that knows leanfleet's operators.

    model: a path, the bytes of a model, or an onnx.ModelProto. providers: as InferenceSession takes them; None: CUDA
    where onnxruntime and this build of leanfleet both have it, then the CPU. session_options: gets the operators
    registered, see register; None: new ones. kwargs go to InferenceSession.
    override: other operators whose nodes our kernels serve, such as "com.microsoft.LinearAttention", in a model that
    stays as it is on disk; leanfleet.export.rewrite.OPERATORS lists them. A node that means something that ours do not
    is left to onnxruntime. Needs onnx and onnx-ir.

    Raises what register raises, ValueError for a provider that the installed onnxruntime does not have, for an attribute
    that our operators do not have (which onnxruntime itself would ignore) and for another version of them, and
    RuntimeError for a provider that was asked for and does not start. Errors in the model are onnxruntime's; those about our
    nodes name operator, node, argument, and the values found and allowed.
    """
    ort = _onnxruntime()
    available = ort.get_available_providers()
    wanted = [p if isinstance(p, str) else p[0] for p in providers or ()]
    for name in wanted:
        if name not in available:
            raise ValueError(f"provider {name} is not in the installed onnxruntime {ort.__version__}, which has "
                             f"{', '.join(available)}" + ("; CUDA needs the package onnxruntime-gpu in place of "
                                                          "onnxruntime" if name.startswith("CUDA") else ""))
    if hasattr(model, "SerializeToString"):
        model = model.SerializeToString()
    elif not isinstance(model, bytes):
        model = os.fspath(model)
    options = register(session_options if session_options is not None else ort.SessionOptions())
    model_file.check(model)
    if override:
        model = _overridden(model, [override] if isinstance(override, str) else list(override), options)
    try:
        session = ort.InferenceSession(model, options, providers=providers or _default_providers(available), **kwargs)
    except Exception as error:
        raise _explained(error) from None
    if missing := [name for name in wanted if name not in session.get_providers()]:
        raise RuntimeError(f"provider {missing[0]} did not start, so that the session would run on "
                           f"{', '.join(session.get_providers())}; onnxruntime's log above says why. Leave it out of "
                           "providers, or mend its installation")
    return session


def __getattr__(name):
    """Generation comes on first use: it needs numpy."""
    if name not in _HOMES:
        raise AttributeError(f"module 'leanfleet.ort_ops' has no attribute '{name}'")
    return getattr(importlib.import_module(f"leanfleet.ort_ops.{_HOMES[name]}"), name)


def __dir__():
    return sorted({*globals(), *__all__})
