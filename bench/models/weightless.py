"""Exported models without their weights: graphs of megabytes, made anywhere, that the parameters of a module fill later.

strip(folder, parameters)   folder/model.onnx loses its weights; folder/weights.json says which parameters they were
parameters_of(model)        those that both take
fill(folder, parameters)    writes the weights' file from parameters of the same names and shapes, of any values
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
import torch

from leanfleet.export.experts import interleave

DATA, PLAN = "model.onnx.data", "weights.json"
SMALL = 256  # bytes; smaller initializers stay in the graph
LARGEST_KEPT = 1 << 24  # bytes of another initializer that stays in the graph
ALIGNMENT = 4096  # of weights in their file
KEY = 16  # elements of a row by which its parameter is looked up
Parameters = Mapping[str, torch.Tensor]  # by name
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def parameters_of(model: torch.nn.Module) -> Parameters:
    """A module's parameters by name, as strip and fill take them."""
    return with_experts({name: p.detach() for name, p in model.named_parameters()})


def with_experts(parameters: dict[str, torch.Tensor]) -> Parameters:
    """Parameters by name, the experts' first weights in the order of ONNX Runtime's MoE node too."""
    return parameters | {f"{n} interleaved": interleave(p) for n, p in parameters.items() if n.endswith("experts.gate_up_proj")}


def _rows(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's bits as an integer array of two dimensions, the last one its own."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor.view(BITS[tensor.element_size()]).reshape(-1, tensor.shape[-1]).numpy()


def _pieces(array: np.ndarray, column: int, parameters: Parameters) -> Iterator[tuple[list, int]]:
    """([parameter, transposed, first column, columns], columns) of parameters that have an array's columns from this one on,
    as many as stand there in their order."""
    wanted, width = array[0, column:], array.itemsize
    for name, p in parameters.items():
        for transposed in (False, True)[: min(p.dim(), 2)]:
            row = p.mT if transposed else p
            while row.dim() > 1:
                row = row[0]
            row = _rows(row)[0]
            at = row.tobytes().find(wanted[:KEY].tobytes()) if row.itemsize == width else -1
            if at < 0 or at % width:
                continue
            first = at // width
            count = min(len(row) - first, len(wanted))
            differ = np.flatnonzero(row[first : first + count] != wanted[:count])
            count = int(differ[0]) if len(differ) else count
            whole = _rows(p.mT if transposed else p)
            if np.array_equal(whole[:, first : first + count], array[:, column : column + count]):
                yield [name, transposed, first, count], count


def _parts(
    array: np.ndarray, starts: Mapping[bytes, list[tuple[str, bool]]], parameters: Parameters
) -> tuple[list[list], None] | tuple[None, str]:
    """[[parameter, transposed], ...] that stand side by side in an array's columns, with [first, columns] of those that have a
    part of a parameter's, and None; or None and why it is not so."""
    column, parts = 0, []
    while column < array.shape[1]:
        found = []
        for name, transposed in starts.get(array[0, column : column + KEY].tobytes(), ()):
            whole = _rows(parameters[name].mT if transposed else parameters[name])
            if np.array_equal(whole, array[:, column : column + whole.shape[1]]):
                found.append(([name, transposed], whole.shape[1]))
        found = found or list(_pieces(array, column, parameters))
        if not found:
            return None, "is not made of the module's parameters (a rotary table is as long as max_position_embeddings says)"
        if len(names := {part[0] for part, _ in found}) > 1:
            return None, f"may be any of {', '.join(sorted(names))}, whose values are equal: give them others before exporting"
        parts.append(found[0][0])
        column += found[0][1]
    return parts, None


def strip(folder: str | Path, parameters: Parameters) -> int:
    """Takes the weights out of folder/model.onnx, which was exported with these parameters, tensors by name. Returns how many.

    The exporter renames parameters, transposes those of products, packs products of one input, sorts their columns, and
    doubles tied ones: each weight's values say which parameters it is made of. Some initializers stay in the graph, and so do
    their values: small ones, those that are no parameters, such as rotary tables, and those that may be one of several
    parameters of equal values, such as the norms of an untrained model. ValueError for one of the last two above 8 MiB.
    """
    folder = Path(folder)
    path = folder / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    starts = {}
    for name, p in parameters.items():
        for transposed in (False, True)[: min(p.dim(), 2)]:
            row = p.mT if transposed else p
            while row.dim() > 1:
                row = row[0]
            starts.setdefault(_rows(row[:KEY]).tobytes(), []).append((name, transposed))
    plan, end = {}, 0
    for t in model.graph.initializer:
        outside = t.data_location == onnx.TensorProto.EXTERNAL
        # From the file, not into the message, whose memory stays until all of it goes: the weights may not fit twice.
        array = _mapped(t, folder) if outside else onnx.numpy_helper.to_array(t)
        if array.nbytes < SMALL:
            _take_in(t, folder)
            continue
        bits = array.view(f"i{array.itemsize}")
        parts, problem = _parts(bits.reshape(-1, array.shape[-1]), starts, parameters)
        if not parts and array.ndim == 3:  # a gate's columns and those beside it, as Linear has them
            parts, problem = _parts(bits.reshape(array.shape[0], -1), starts, parameters)
        if parts:
            plan[t.name] = parts
            t.ClearField("raw_data")
            t.ClearField("external_data")
            t.data_location = onnx.TensorProto.EXTERNAL
            for key, value in (("location", DATA), ("offset", end), ("length", array.nbytes)):
                t.external_data.add(key=key, value=str(value))
            end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        elif array.nbytes > LARGEST_KEPT:
            raise ValueError(f"initializer {t.name}, {list(array.shape)}, is too large for the graph and {problem}")
        else:
            _take_in(t, folder)
    path.unlink()
    (folder / DATA).unlink(missing_ok=True)
    onnx.save(model, path)
    (folder / PLAN).write_text(json.dumps(plan) + "\n")
    return len(plan)


def _mapped(tensor: onnx.TensorProto, folder: Path) -> np.ndarray:
    """The values that a tensor has in a file."""
    place = onnx.external_data_helper.ExternalDataInfo(tensor)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return np.memmap(folder / place.location, dtype, "r", place.offset or 0, tuple(tensor.dims))


def _take_in(tensor: onnx.TensorProto, folder: Path) -> None:
    """Puts values that are in a file into the graph."""
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        onnx.external_data_helper.load_external_data_for_tensor(tensor, str(folder))
        tensor.data_location = onnx.TensorProto.DEFAULT
        tensor.ClearField("external_data")


def _columns(parameters: Parameters, name: str, transposed: bool, first: int = 0, columns: int | None = None) -> torch.Tensor:
    whole = parameters[name].detach()
    return (whole.mT if transposed else whole)[..., first : None if columns is None else first + columns]


def fill(folder: str | Path, parameters: Parameters) -> None:
    """Writes the weights' file of a folder that strip left, from tensors by the parameters' names, on any device."""
    folder = Path(folder)
    plan = json.loads((folder / PLAN).read_text())
    with open(folder / DATA, "wb") as file:
        for t in onnx.load(folder / "model.onnx", load_external_data=False).graph.initializer:
            if t.name in plan:
                parts = [_columns(parameters, *part) for part in plan[t.name]]
                value = torch.cat(parts, -1).contiguous().view(torch.uint8).cpu().numpy()
                place = {e.key: e.value for e in t.external_data}
                if value.nbytes != int(place["length"]):
                    raise ValueError(f"{t.name} has {place['length']} bytes in the graph, its parameters {value.nbytes}")
                file.seek(int(place["offset"]))
                file.write(value)
