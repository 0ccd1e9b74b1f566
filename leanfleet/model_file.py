"""leanfleet's nodes in an ONNX file: are their attributes and their version known? Standard library only.

Reads the protobuf encoding directly and skips weights, so that a model of any size takes milliseconds. onnxruntime itself
ignores a mistyped attribute: it hands a kernel only the attributes that the kernel asks for by name.
"""

import mmap
import os

from leanfleet import spec

# Field numbers of onnx.proto.
_MODEL = {"graph": 7, "opset_import": 8, "functions": 25}
_GRAPH = {"node": 1}
_FUNCTION = {"node": 7, "domain": 10}
_NODE = {"name": 3, "op_type": 4, "attribute": 5, "domain": 7}
_ATTRIBUTE = {"name": 1, "g": 6, "graphs": 11}
_OPSET = {"domain": 1, "version": 2}


def check(model: str | os.PathLike | bytes | bytearray) -> None:
    """Checks a path or the bytes of a model. What is no ONNX model passes: the runtime says why.

    Raises ValueError that names node, attribute and the known ones, or the version of the domain and the known one, and for
    graphs nested too deep to be read.
    """
    if isinstance(model, (bytes, bytearray)):
        _check(memoryview(model))
    elif os.path.isfile(model) and os.path.getsize(model):
        with open(model, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            view = memoryview(content)
            try:
                _check(view)
            finally:
                view.release()


def _check(view):
    if bytes(view[4:8]) == b"ORTM":  # onnxruntime's own format
        return
    try:
        versions, nodes = _read(view)
    except (_NotOnnx, UnicodeDecodeError):
        return
    except RecursionError:
        raise ValueError("the model nests graphs in graphs deeper than any runtime reads") from None
    if not nodes:
        return
    for version in versions:
        spec.check_version(version)
    for node in nodes:
        spec.check_attributes(*node)


class _NotOnnx(Exception):
    pass


def _read(view):
    """(versions of leanfleet's domain that are imported, (operator, node, names of its attributes) of each of its nodes).

    Nodes in subgraphs and functions count, those in leanfleet's own functions do not exist.
    """
    versions, nodes = [], []
    for number, value in _fields(view, 0, len(view)):
        if number == _MODEL["opset_import"]:
            entry = dict(_inside(view, value))
            if _text(view, entry.get(_OPSET["domain"])) == spec.DOMAIN:
                versions.append(entry.get(_OPSET["version"], 0))
        elif number == _MODEL["graph"]:
            _read_nodes(view, value, _GRAPH["node"], nodes)
        elif number == _MODEL["functions"] and spec.DOMAIN not in _texts(view, value, _FUNCTION["domain"]):
            _read_nodes(view, value, _FUNCTION["node"], nodes)
    return versions, nodes


def _read_nodes(view, span, node_field, nodes):
    for number, value in _inside(view, span):
        if number != node_field:
            continue
        name = op_type = domain = ""
        attributes = []
        for number, part in _inside(view, value):
            if number == _NODE["domain"]:
                domain = _text(view, part)
            elif number == _NODE["op_type"]:
                op_type = _text(view, part)
            elif number == _NODE["name"]:
                name = _text(view, part)
            elif number == _NODE["attribute"]:
                attributes.append(part)
        if domain == spec.DOMAIN:
            nodes.append((op_type, name, ["".join(_texts(view, a, _ATTRIBUTE["name"])) for a in attributes]))
        for attribute in attributes:
            for number, part in _inside(view, attribute):
                if number in (_ATTRIBUTE["g"], _ATTRIBUTE["graphs"]):
                    _read_nodes(view, part, _GRAPH["node"], nodes)


def _texts(view, span, wanted):
    return [_text(view, value) for number, value in _inside(view, span) if number == wanted]


def _text(view, span):
    return str(view[span[0] : span[1]], "utf-8") if isinstance(span, tuple) else ""


def _inside(view, span):
    """The fields of a message where it stands; a damaged file may have a number there."""
    if not isinstance(span, tuple):
        raise _NotOnnx
    return _fields(view, *span)


def _fields(view, at, end):
    """(number, value) of each field of the message at [at, end): an integer, or where a text or a message stands."""
    while at < end:
        key, at = _varint(view, at, end)
        kind = key & 7
        if kind == 0:
            value, at = _varint(view, at, end)
        elif kind == 2:
            size, at = _varint(view, at, end)
            value, at = (at, at + size), at + size
        elif kind in (1, 5):
            value, at = 0, at + (8 if kind == 1 else 4)
        else:
            raise _NotOnnx
        if at > end:
            raise _NotOnnx
        yield key >> 3, value


def _varint(view, at, end):
    value = shift = 0
    while at < end and shift < 70:
        byte = view[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise _NotOnnx
