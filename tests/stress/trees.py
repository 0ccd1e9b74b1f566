"""Files as trees of dicts, lists and leaves, and changes of them that know what stands where.

A change is a list that JSON can hold: [action, place, ...]. The place of the actions on trees is a path of keys and numbers, that
of the actions on bytes a number. A tree that a change makes impossible to write, such as a text where a protobuf field holds a
number, raises Impossible.
"""

import copy
import json
import re
import struct

import onnx
from google.protobuf.descriptor import FieldDescriptor

from leanfleet import gguf_file


class Impossible(Exception):
    """A change that the file has no place for."""


# ONNX


def onnx_tree(data):
    """A model as nested dicts of the fields that are set."""
    return _fields_of(onnx.load_model_from_string(data))


def _fields_of(message):
    tree = {}
    for field, value in message.ListFields():
        deep = field.type == FieldDescriptor.TYPE_MESSAGE
        if field.is_repeated:
            tree[field.name] = [_fields_of(v) if deep else v for v in value]
        else:
            tree[field.name] = _fields_of(value) if deep else value
    return tree


def onnx_bytes(tree):
    model = onnx.ModelProto()
    _fill(model, tree)
    return model.SerializeToString()


def _fill(message, tree):
    if not isinstance(tree, dict):
        raise Impossible
    for name, value in tree.items():
        field = message.DESCRIPTOR.fields_by_name.get(name)
        if field is None or isinstance(value, list) != bool(field.is_repeated):
            raise Impossible
        place = getattr(message, name)
        try:
            if field.type == FieldDescriptor.TYPE_MESSAGE and field.is_repeated:
                for part in value:
                    _fill(place.add(), part)
            elif field.type == FieldDescriptor.TYPE_MESSAGE:
                place.SetInParent()
                _fill(place, value)
            elif field.is_repeated:
                place.extend(_of_type(field, v) for v in value)
            else:
                setattr(message, name, _of_type(field, value))
        except (TypeError, ValueError) as error:
            raise Impossible from error


def _of_type(field, value):
    """Changes hold bytes as texts, as JSON does."""
    return value.encode("latin-1") if field.type == FieldDescriptor.TYPE_BYTES and isinstance(value, str) else value


# GGUF: lengths and numbers of entries are leaves like others, so that they may lie. The weights are one leaf that stays.

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def gguf_tree(data):
    at = 24

    def scalar(letter):
        nonlocal at
        (value,) = struct.unpack_from("<" + letter, data, at)
        at += struct.calcsize(letter)
        return value

    def text():
        nonlocal at
        size = scalar("Q")
        at += size
        return data[at - size : at].decode("latin-1")

    def value(kind):
        if kind == _STRING:
            return text()
        if kind != _ARRAY:
            return scalar(_SCALARS[kind])
        inner, count = scalar("I"), scalar("Q")
        return {"type": inner, "count": count, "values": [value(inner) for _ in range(count)]}

    version, tensors, entries = struct.unpack_from("<IQQ", data, 4)
    tree = {"magic": data[:4].decode("latin-1"), "version": version, "tensor_count": tensors, "entry_count": entries}
    tree["entries"] = []
    for _ in range(entries):
        key, kind = text(), scalar("I")
        tree["entries"].append({"key": key, "type": kind, "value": value(kind)})
    tree["tensors"] = []
    for _ in range(tensors):
        name, rank = text(), scalar("I")
        sizes = [scalar("Q") for _ in range(rank)]
        tree["tensors"].append({"name": name, "rank": rank, "sizes": sizes, "type": scalar("I"), "offset": scalar("Q")})
    tree["weights"] = data[-(-at // gguf_file.ALIGNMENT) * gguf_file.ALIGNMENT :]
    return tree


def gguf_bytes(tree):
    def text(value):
        return struct.pack("<Q", len(value)) + value.encode("latin-1")

    def packed(kind, value):
        if kind == _STRING:
            return text(value)
        if kind == _ARRAY:
            head = struct.pack("<IQ", value["type"], value["count"])
            return head + b"".join(packed(value["type"], v) for v in value["values"])
        if kind not in _SCALARS:  # of a type that does not exist
            return b"\x01"
        return struct.pack("<" + _SCALARS[kind], value)

    try:
        head = tree["magic"].encode("latin-1")
        head += struct.pack("<IQQ", tree["version"], tree["tensor_count"], tree["entry_count"])
        for entry in tree["entries"]:
            head += text(entry["key"]) + struct.pack("<I", entry["type"]) + packed(entry["type"], entry["value"])
        for t in tree["tensors"]:
            head += text(t["name"]) + struct.pack("<I", t["rank"]) + b"".join(struct.pack("<Q", n) for n in t["sizes"])
            head += struct.pack("<IQ", t["type"], t["offset"])
        return head + bytes(-len(head) % gguf_file.ALIGNMENT) + tree["weights"]
    except (KeyError, TypeError, AttributeError, UnicodeEncodeError, struct.error, OverflowError) as error:
        raise Impossible from error


# safetensors: the header alone


def safetensors_tree(data):
    (size,) = struct.unpack_from("<Q", data)
    return {"header": json.loads(data[8 : 8 + size]), "weights": data[8 + size :]}


def safetensors_bytes(tree):
    try:
        header = json.dumps(tree["header"]).encode()
        return struct.pack("<Q", len(header)) + header + tree["weights"]
    except (KeyError, TypeError, ValueError) as error:
        raise Impossible from error


def json_bytes(tree):
    try:
        return json.dumps(tree, ensure_ascii=True).encode()
    except (TypeError, ValueError) as error:
        raise Impossible from error


# Fields of TensorRT's plugins, which are no file: nothing but what the runtime can hand over is drawn.

MOST_BYTES = 1 << 20  # of a field: lengths beyond are a promise that only the runtime can keep
INT32 = range(-(2**31), 2**31)


def fields_bytes(tree):
    try:
        for f in tree["fields"]:
            right = f.keys() == {"name", "type", "length", "data"} and type(f["type"]) is type(f["length"]) is int
            if not right or f["type"] not in INT32 or f["length"] not in range(-(2**31), MOST_BYTES // 8):
                raise Impossible
            if not all(f[key] is None or isinstance(f[key], str) for key in ("name", "data")):
                raise Impossible
            bytes.fromhex(f["data"] or "")
            if "\0" in (f["name"] or ""):
                raise Impossible
            (f["name"] or "").encode()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Impossible from error
    return json_bytes(tree)


FORMATS = {
    ".onnx": (onnx_tree, onnx_bytes),
    ".gguf": (gguf_tree, gguf_bytes),
    ".safetensors": (safetensors_tree, safetensors_bytes),
    ".json": (json.loads, json_bytes),
    ".fields": (json.loads, fields_bytes),
}
OPAQUE = "weights", "raw_data"  # leaves of this name are not looked into: bytes' own changes are for them

# Changes

INTEGERS = (-(2**63), -(2**31) - 1, -1, 0, 1, 2, 3, 2**31 - 1, 2**31, 2**40, 2**63 - 1)
FLOATS = (float("nan"), float("inf"), float("-inf"), 0.0, -1.0, 1e300, 1e-300, 0.5)
TEXTS = ("", "x", "\u00e9", "\u0000", "\ud800", "../../x", "%s{0}", " ", "y" * 500, "ai.onnx", "leanfleet")
OTHERS = (None, -1, 0, 1.5, 10**30, "x", [], {}, [None], True, float("nan"), {"x": {"x": {}}}, [[[]]])


def changed(tree, change):
    """The tree after one change; it may share parts with the one before. Raises Impossible."""
    action, path, *rest = change
    tree = copy.deepcopy(tree)
    if not path:
        if action != "set":
            raise Impossible
        return rest[0]
    parent = tree
    try:
        for key in path[:-1]:
            parent = parent[key]
        key = path[-1]
        if action == "drop":
            del parent[key]
        elif action == "set":
            if isinstance(parent, dict) and key not in parent:
                raise Impossible
            parent[key] = rest[0]
        elif action == "swap":
            parent[key], parent[rest[0]] = parent[rest[0]], parent[key]
        elif action == "copy" and isinstance(parent, list):
            parent[key:key] = [copy.deepcopy(parent[key])] * rest[0]
        elif action == "name" and isinstance(parent, dict):
            parent[rest[0]] = parent.pop(key)
        else:
            raise Impossible
    except (KeyError, IndexError, TypeError) as error:
        raise Impossible from error
    return tree


def draw_change(source, tree, retypes):
    """A change of a tree, or None. retypes: whether leaves may get another type, as in JSON."""
    path, node = [], tree
    while isinstance(node, (dict, list)) and node:
        keys = [k for k in (node if isinstance(node, dict) else range(len(node))) if k not in OPAQUE]
        if not keys:
            break
        path.append(source.choice(keys))
        parent, node = node, node[path[-1]]
        if source.random() < 0.2:
            break
    if not path:
        return None
    key, siblings = path[-1], list(parent if isinstance(parent, dict) else range(len(parent)))
    action = source.choice(("drop", "set", "set", "set", "swap", "copy", "name"))
    if action == "set":
        return ["set", path, _as_text(draw_value(source, node, parent, retypes))]
    if action == "swap":
        return ["swap", path, source.choice(siblings)]
    if action == "copy":
        return ["copy", path, source.choice((1, 1, 2, 30))]
    if action == "name":
        return ["name", path, source.choice(("x", f"{key}_", str(key).upper(), ""))]
    return ["drop", path]


def _as_text(value):
    if isinstance(value, dict):
        return {key: _as_text(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_as_text(v) for v in value]
    return value.decode("latin-1") if isinstance(value, bytes) else value


def draw_value(source, old, parent, retypes):
    others = [v for v in (parent.values() if isinstance(parent, dict) else parent) if isinstance(v, type(old))]
    if retypes and source.random() < 0.4:
        return source.choice((*OTHERS, [old], str(old)))
    if isinstance(old, dict) and {"name", "type"} <= old.keys() and source.random() < 0.8:  # an attribute of an ONNX node
        kinds = {"f": (1, 1.5), "i": (2, 3), "s": (3, "x"), "floats": (6, [0.5]), "ints": (7, [1, 2]), "strings": (8, ["a"])}
        field = source.choice(list(kinds))
        number, value = kinds[field]
        return {"name": old["name"], "type": number, field: value}
    if isinstance(old, bool) or old is None:
        return not old
    if isinstance(old, int):
        return source.choice((*INTEGERS, old + 1, old - 1, old * 2, *others))
    if isinstance(old, float):
        return source.choice((*FLOATS, -old, old * 2, *others))
    if isinstance(old, (str, bytes)):
        text = old if isinstance(old, str) else old.decode("latin-1")
        others = [v for v in others if isinstance(v, str)]
        return source.choice((*TEXTS, text + text[:9], text[:-1], text.upper(), *others))
    if isinstance(old, list) and old:
        return source.choice(([], old[:-1], old[::-1], old * 2, old[:1]))
    return type(old)()


# Changes of bytes


def changed_bytes(data, change):
    """None where the file goes."""
    action, at, *rest = change
    at = at % len(data) if data else 0
    if action == "gone":
        return None
    if action == "cut":
        return data[:at]
    if action == "flip":
        return data[:at] + bytes([rest[0]]) + data[at + 1 :]
    if action == "insert":
        return data[:at] + bytes.fromhex(rest[0]) + data[at:]
    if action == "remove":
        return data[:at] + data[at + rest[0] :]
    if action == "zero":
        return data[:at] + bytes(len(data[at : at + rest[0]])) + data[at + rest[0] :]
    if action == "twice":
        return data + data
    if action == "encode":
        return data.decode("latin-1").encode(rest[0], "replace")
    if action == "foreign":  # a letter of a text becomes a byte that UTF-8 never has
        found = WORD.search(data, at) or WORD.search(data)
        return data[: found.end() - 1] + b"\xff" + data[found.end() :] if found else data
    raise Impossible


WORD = re.compile(rb"[A-Za-z_]{4}")
BYTE_ACTIONS = ("gone", "cut", "flip", "insert", "remove", "zero", "twice", "encode", "foreign")


def draw_bytes_change(source, data):
    action = source.choice((*BYTE_ACTIONS[1:], "flip", "flip", "cut"))
    if source.random() < 0.05:
        action = "gone"
    at = source.randrange(max(1, len(data)))
    at = at % 400 if source.random() < 0.4 else at  # heads say more than weights
    rest = {
        "flip": [source.randrange(256)],
        "insert": [source.randbytes(source.choice((1, 8, 64))).hex()],
        "remove": [source.choice((1, 8, 300))],
        "zero": [source.choice((1, 8, 300))],
        "encode": [source.choice(("utf-16", "utf-8-sig", "cp037"))],
    }.get(action, [])
    return [action, at, *rest]


def applied(name, data, changes):
    """The bytes of a file after these changes, None where it is gone. Raises Impossible."""
    read, write = FORMATS.get(name[name.rfind(".") :], (None, None))
    of_tree = [c for c in changes if c[0] not in BYTE_ACTIONS]
    if of_tree:
        if read is None:
            raise Impossible
        tree = read(data)
        for change in of_tree:
            tree = changed(tree, change)
        data = write(tree)
    for change in changes:
        if change[0] in BYTE_ACTIONS and data is not None:
            data = changed_bytes(data, change)
    return data
