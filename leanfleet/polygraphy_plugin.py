"""`polygraphy run` with leanfleet nodes: --onnxrt sessions get the kernels, --pluginref gets the references."""

from polygraphy.backend.onnxrt import loader as onnxrt_loader
from polygraphy.logger import G_LOGGER
from polygraphy.tools.args import ModelArgs, OnnxrtSessionArgs, PluginRefRunnerArgs
from polygraphy.tools.args.base import BaseArgs
from polygraphy.tools.script import make_invocable

from leanfleet import spec


class LeanfleetArgs(BaseArgs):
    """
    leanfleet: running leanfleet's operators.

    Depends on:

        - ModelArgs
        - OnnxrtSessionArgs
        - PluginRefRunnerArgs
    """

    def add_parser_args_impl(self):
        self.group.add_argument("--no-leanfleet", action="store_true", default=None,
                                help="Do not register leanfleet's kernels with ONNX Runtime: the model's function "
                                "bodies run. Random inputs need ranges that the operators allow, for example "
                                "--val-range log_decay:[-1,0]")

    def parse_impl(self, args):
        """Extends what the groups of --onnxrt and --pluginref write into the script.

        A model without leanfleet nodes runs as if leanfleet were not installed.
        """
        without_kernels = getattr(args, "no_leanfleet", None)
        session_args, reference_args = self.arg_groups[OnnxrtSessionArgs], self.arg_groups[PluginRefRunnerArgs]
        add_session, add_reference_runner = session_args.add_to_script_impl, reference_args.add_to_script_impl

        def add_session_with_kernels(script, *args, **kwargs):
            session = add_session(script, *args, **kwargs)
            if without_kernels or not self._model_is_ours():
                return session
            script.add_import(imports=["with_kernels"], frm=__name__)
            return script.add_loader(make_invocable("with_kernels", session), "leanfleet_session")

        def add_reference_runner_with_ours(script):
            if self._model_is_ours():
                script.add_import(imports=["register_references"], frm="leanfleet.parity")
                script.add_loader(make_invocable("register_references"), "leanfleet_references")
            return add_reference_runner(script)

        session_args.add_to_script_impl = add_session_with_kernels
        reference_args.add_to_script_impl = add_reference_runner_with_ours

    def _model_is_ours(self):
        import onnx

        try:
            model = onnx.load(self.arg_groups[ModelArgs].path, load_external_data=False)
        except Exception:  # Polygraphy reads other formats too, and says itself what it cannot read
            return False
        return any(entry.domain == spec.DOMAIN for entry in model.opset_import)


class _Onnxruntime:
    """onnxruntime, but its SessionOptions come with leanfleet's operators."""

    def __getattr__(self, name):
        import onnxruntime

        return getattr(onnxruntime, name)

    def SessionOptions(self):  # noqa: N802
        import onnxruntime

        from leanfleet.ort_ops import register

        return register(onnxruntime.SessionOptions())


def with_kernels(session_from_onnx):
    """A loader of the session that Polygraphy's SessionFromOnnx makes, with leanfleet's kernels registered in it.

    SessionFromOnnx takes no session options, so that it is given another onnxruntime while it works. Calling the loader
    raises PolygraphyException where the library is missing.
    """

    def load():
        theirs = onnxrt_loader.onnxrt
        onnxrt_loader.onnxrt = _Onnxruntime()
        try:
            return session_from_onnx()
        except FileNotFoundError as error:
            G_LOGGER.critical(str(error))
        finally:
            onnxrt_loader.onnxrt = theirs

    return load


def LOADER():  # noqa: N802  Polygraphy's name for it
    """The argument groups that leanfleet adds to `polygraphy run`."""
    return [LeanfleetArgs()]
