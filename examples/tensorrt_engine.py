"""A TensorRT engine of a layer: leanfleet's nodes become plugin layers.

    python examples/tensorrt_engine.py [FOLDER] [COMPUTE_CAPABILITY]

With TensorRT-RTX the engine is built for a compute capability (default 8.9) and no GPU is needed; TensorRT builds for the
GPU that is here. Without either, or without the plugin library, the script says what is missing. Needs the extra export.
"""

from pathlib import Path

import torch

from common import run_in_folder
from leanfleet import trt_plugins
from leanfleet.export import export, lean_attention


class Attention(torch.nn.Module):
    def forward(self, query, key, value):
        return lean_attention(query, key, value)[0]


def main(folder, compute_capability="8.9"):
    path = Path(folder) / "attention.onnx"
    tokens = torch.export.Dim("tokens", min=1, max=4096)
    q, k, v = torch.randn(1, 8, 16, 64), torch.randn(1, 2, 16, 64), torch.randn(1, 2, 16, 64)
    export(
        Attention().eval(),
        (q, k, v),
        path,
        input_names=["query", "key", "value"],
        output_names=["output"],
        dynamic_shapes=({2: tokens}, {2: tokens}, {2: tokens}),
    )
    try:
        trt = trt_plugins.runtime()
        trt_plugins.get_plugin_path()
    except (ImportError, FileNotFoundError) as error:
        print(f"no engine is built here: {error}")
        return
    # --8<-- [start:build]
    capabilities = [compute_capability] if trt.__name__ == "tensorrt_rtx" else []
    built = trt_plugins.build_engine(
        path, {"tokens": (1, 128, 4096)}, Path(folder) / "attention.engine", compute_capabilities=capabilities
    )
    print(f"{built.runtime}: {len(built.engine) / 2**20:.1f} MiB in {built.seconds:.1f} s")
    for name, operator in built.layers:
        print(f"  plugin layer {name}: {operator}")
    # --8<-- [end:build]
    if [operator for _, operator in built.layers] != ["LeanAttention"]:
        raise SystemExit("LeanAttention did not become a plugin layer")
    # On a GPU that the engine was built for:
    #     from leanfleet.trt_plugins.running import Engine
    #     outputs = Engine("attention.engine")({"query": q, "key": k, "value": v})


if __name__ == "__main__":
    run_in_folder(main)
