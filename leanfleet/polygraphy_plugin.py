"""`polygraphy run` with leanfleet nodes: --onnxrt sessions get the library, --pluginref gets the references."""

from polygraphy.tools.args.backend.onnxrt.loader import OnnxrtSessionArgs
from polygraphy.tools.args.backend.pluginref.runner import PluginRefRunnerArgs
from polygraphy.tools.args.base import BaseArgs
from polygraphy.tools.script import safe


class LeanfleetArgs(BaseArgs):
    """
    leanfleet: running leanfleet's operators.
    """

    def add_parser_args_impl(self):
        self.group.add_argument("--no-leanfleet", action="store_true", default=None,
                                help="Do not register leanfleet's kernels: a model's function bodies run instead")

    def parse_impl(self, args):
        if getattr(args, "no_leanfleet", None):
            return
        session_args, reference_args = self.arg_groups[OnnxrtSessionArgs], self.arg_groups[PluginRefRunnerArgs]
        add_session, add_reference = session_args.add_to_script_impl, reference_args.add_to_script_impl

        def add_session_with_library(script, *args, **kwargs):
            script.add_import(imports=["use_library"], frm="leanfleet.polygraphy_plugin")
            script.append_prefix(safe("use_library()"))
            return add_session(script, *args, **kwargs)

        def add_reference_with_ours(script, *args, **kwargs):
            script.add_import(imports=["register_references"], frm="leanfleet.parity")
            script.append_prefix(safe("register_references()"))
            return add_reference(script, *args, **kwargs)

        session_args.add_to_script_impl = add_session_with_library
        reference_args.add_to_script_impl = add_reference_with_ours


def use_library():
    """Has Polygraphy's SessionFromOnnx register leanfleet in each session it makes in this process."""
    import onnxruntime

    from leanfleet.ort_ops import register

    class SessionOptions(onnxruntime.SessionOptions):
        """onnxruntime's own, with leanfleet's operators registered."""

        def __init__(self):
            super().__init__()
            register(self)

    from polygraphy.backend.onnxrt import loader

    class _Onnxruntime:
        """onnxruntime as Polygraphy's loader sees it: the same module but for SessionOptions."""

        def __getattr__(self, name):
            return SessionOptions if name == "SessionOptions" else getattr(onnxruntime, name)

    loader.onnxrt = _Onnxruntime()


def LOADER():  # noqa: N802  the name that pyproject.toml's entry point gives
    """The argument groups that Polygraphy adds to `polygraphy run`."""
    return [LeanfleetArgs()]
