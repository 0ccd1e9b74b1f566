"""Writes the C++ tables of a schema: python csrc/generate.py [--check] [SCHEMA.toml OUTPUT.h].

Without arguments csrc/ops.toml becomes csrc/core/op_specs.h and the tables of the operators' pages, docs/operators/*.md;
both are committed. An operator without a page gets one. Beside the tables, op_sizes.h says how long the arrays must be that
hold any operator of the schema. --check writes nothing and exits with 1 if a file is not what the schema gives.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def load_spec_module():
    """leanfleet/spec.py, without importing or installing the package."""
    loader = importlib.util.spec_from_file_location("leanfleet_spec", HERE.parent / "leanfleet" / "spec.py")
    module = importlib.util.module_from_spec(loader)
    sys.modules[loader.name] = module
    loader.loader.exec_module(module)
    return module


def pascal(name):
    return "".join(word[:1].upper() + word[1:] for word in name.split("_"))


def boolean(value):
    return "true" if value else "false"


def quoted(text):
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


class OpTables:
    """The C++ text of one operator."""

    def __init__(self, spec):
        self.spec = spec
        self.inputs = {t.name: i for i, t in enumerate(spec.inputs)}
        self.attrs = {a.name: i for i, a in enumerate(spec.attrs)}
        self.symbols = {s: i for i, s in enumerate(spec.symbols)}

    def ref(self, name):
        for kind, table in (("kInput", self.inputs), ("kAttr", self.attrs), ("kSymbol", self.symbols)):
            if name in table:
                return f"{{RefKind::{kind}, {table[name]}}}"
        return "{RefKind::kNone, -1}"

    def shape(self, shape):
        axes = [
            f"{{{self.symbols.get(a.symbol, -1)}, {a.offset}, {self.symbols.get(a.plus, -1)}, {a.times}}}" for a in shape.axes
        ]
        conditions = ", ".join(map(self.ref, shape.conditions))
        swap = -1 if shape.swap is None else shape.swap
        return f"{{{len(shape.conditions)}, {{{conditions}}}, {len(axes)}, {swap}, {{{', '.join(axes)}}}}}"

    def tensor(self, t):
        when = ", ".join(str(self.attrs[w]) for w in t.when)
        like = self.inputs[t.like] if t.like else -1
        takes = self.inputs[t.takes] if t.takes else -1
        shapes = ", ".join(self.shape(s) for s in t.shapes)
        return (
            f"    {{{quoted(t.name)}, TypeVar::k{t.type}, {boolean(t.optional)}, {like}, {takes}, "
            f"{self.attrs[t.repeats] if t.repeats else -1}, {len(t.when)}, {{{when}}}, {len(t.shapes)}, {{{shapes}}}}},"
        )

    def attr(self, a):
        served = [v for v in a.values if v not in a.reference_only]
        if tuple(served) != a.values[: len(served)]:
            raise ValueError(f"ops.toml: {self.spec.name}.{a.name}: values of the reference alone come last")
        free_text = a.type == "string" and not a.values
        default_int = 0 if free_text or a.type == "float" else a.values.index(a.default) if a.values else int(a.default)
        default_float = a.default if a.type == "float" else 0.0
        values = f"k{pascal(a.name)}Values" if a.values else "nullptr"
        return (
            f"    {{{quoted(a.name)}, AttrType::k{pascal(a.type)}, {default_int}, {float(default_float)!r}f, "
            f"{boolean(a.off is not None)}, {boolean(a.min is not None)}, {float(a.off or 0)!r}, {float(a.min or 0)!r}, "
            f"{len(a.values)}, {len(served)}, {values}, {quoted(a.refuse) if a.refuse else 'nullptr'}, "
            f"{self.symbols.get(a.name, -1)}, {quoted(a.default) if free_text else 'nullptr'}}},"
        )

    def rule(self, r):
        names = [n for n in r.args if not n.isdigit()]
        value = next((n for n in r.args if n.isdigit()), "0")
        refs = ", ".join(self.ref(n) for n in names)
        return f"    {{RuleKind::k{pascal(r.kind)}, {self.ref(r.condition)}, {len(names)}, {{{refs}}}, {value}}},"

    def text(self):
        s = self.spec
        lines = [f"namespace {s.snake_name} {{"]
        lines.append("enum Input { " + ", ".join(f"k{pascal(t.name)}" for t in s.inputs) + " };")
        lines.append("enum Output { " + ", ".join(f"kOut{pascal(t.name)}" for t in s.outputs) + " };")
        lines.append("enum Attr { " + ", ".join(f"kAttr{pascal(a.name)}" for a in s.attrs) + " };")
        lines.append("enum Dim { " + ", ".join(f"kDim{pascal(d)}" for d in s.symbols) + " };")
        for a in s.attrs:
            if a.values:
                names = ", ".join(f"k{pascal(a.name)}{pascal(v)}" for v in a.values)
                lines.append(f"enum {pascal(a.name)} {{ {names} }};")
                lines.append(
                    f"inline constexpr const char* k{pascal(a.name)}Values[] = {{" + ", ".join(map(quoted, a.values)) + "};"
                )
        tables = (
            ("TensorSpec", "Inputs", map(self.tensor, s.inputs)),
            ("TensorSpec", "Outputs", map(self.tensor, s.outputs)),
            ("AttrSpec", "Attrs", map(self.attr, s.attrs)),
            ("RuleSpec", "Rules", map(self.rule, s.rules)),
        )
        for kind, name, rows in tables:
            rows = list(rows)
            if rows:
                lines += [f"inline constexpr {kind} k{name}[] = {{", *rows, "};"]
            else:
                lines.append(f"inline constexpr const {kind}* k{name} = nullptr;")
        lines.append("inline constexpr const char* kSymbols[] = {" + ", ".join(map(quoted, s.symbols)) + "};")
        counts = f"{len(s.inputs)}, {len(s.outputs)}, {len(s.attrs)}, {len(s.rules)}, {len(s.symbols)}"
        lines.append(
            f"inline constexpr OpSpec kSpec = {{{quoted(s.name)}, {s.version}, {counts}, "
            f"kInputs, kOutputs, kAttrs, kRules, kSymbols, {self.attrs.get('layout', -1)}}};"
        )
        lines.append("extern const OpImpl kImpl;  // defined in the operator's folder")
        lines.append(f"}}  // namespace {s.snake_name}")
        return "\n".join(lines)


def sizes_of(specs):
    """{constant: length of the array that any of the operators fits in}; never 0, which C++ does not allow."""
    tensors = [t for s in specs for t in s.inputs + s.outputs]
    shapes = [shape for t in tensors for shape in t.shapes]
    rules = [r for s in specs for r in s.rules]
    lengths = {
        "kMaxInputs": [s.inputs for s in specs],
        "kMaxOutputs": [s.outputs for s in specs],
        "kMaxAttrs": [s.attrs for s in specs],
        "kMaxSymbols": [s.symbols for s in specs],
        "kMaxRank": [shape.axes for shape in shapes],
        "kMaxShapes": [t.shapes for t in tensors],
        "kMaxConditions": [shape.conditions for shape in shapes],
        "kMaxWhen": [t.when for t in tensors],
        "kMaxRuleArgs": [r.args for r in rules],
        "kMaxValueLength": [v for s in specs for a in s.attrs for v in a.values],
    }
    return {name: max([1, *map(len, lists)]) for name, lists in lengths.items()}


def generate_sizes(schema):
    sizes = sizes_of(load_spec_module().parse(schema))
    constants = "\n".join(f"constexpr int {name} = {size};" for name, size in sizes.items())
    return f"""// Generated from {Path(schema).name} by csrc/generate.py: change that file and run the generator again.
// The most that an operator of the schema has of each; kMaxValueLength: characters of an attribute's value.
#pragma once

namespace leanfleet {{

{constants}

}}  // namespace leanfleet
"""


def generate(schema):
    module = load_spec_module()
    specs = module.parse(schema)
    narrow = ", ".join(f"DType::k{pascal(name)}" for name in module.TYPES["C"])
    ops = "\n".join(f"    {{&{s.snake_name}::kSpec, &{s.snake_name}::kImpl}}," for s in specs)
    tables = "\n\n".join(OpTables(s).text() for s in specs)
    return f"""// Generated from {Path(schema).name} by csrc/generate.py: change that file and run the generator again.
#pragma once

#include "core/op.h"

namespace leanfleet {{

// What a tensor of type C may have besides T.
inline constexpr DType kNarrowTypes[] = {{{narrow}}};

{tables}

// The registry, in the order of the schema.
inline const Op kOps[] = {{
{ops}
}};

}}  // namespace leanfleet
"""


BEGIN = "<!-- schema: written by csrc/generate.py -->\n"
END = "<!-- end of schema -->\n"
LAYOUT_NOTE = "Shapes are those of layout `bhnd`; the letters of types and the symbols: [Operators](index.md)."


def cell(text):
    return text.replace("|", "\\|")


def shapes_of(tensor):
    if tensor.like:
        return f"as `{tensor.like}`" + (f", its first axis `{tensor.repeats}` times" if tensor.repeats else "")
    return "<br>".join(f"`{shape}`".replace(" with ", "`&nbsp;with&nbsp;`") for shape in tensor.shapes)


def table(head, rows):
    return ["", f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows), ""]


def page_tables(s):
    """What the page of an operator says from its schema, in Markdown."""
    lines = [s.doc, ""]
    if s.equation:
        lines += ["## Equation", "", "```text", *s.equation.split("\n"), "```", "", f"Source: {s.paper}.", ""]
    lines += ["## Inputs", "", LAYOUT_NOTE]
    lines += table(
        ("name", "type", "shape", "meaning"),
        (
            (f"`{t.name}`", t.type, shapes_of(t), cell("optional" * t.optional + "; " * bool(t.optional and t.doc) + t.doc))
            for t in s.inputs
        ),
    )
    lines += ["## Outputs"]
    rows = []
    for t in s.outputs:
        notes = (
            f"only with `{'` and `'.join(t.when)}`" if t.when else "",
            f"may share `{t.takes}`'s buffer" if t.takes else "",
            t.doc,
        )
        rows.append((f"`{t.name}`", t.type, shapes_of(t), cell("; ".join(n for n in notes if n))))
    lines += table(("name", "type", "shape", "meaning"), rows)
    lines += ["## Attributes"]
    rows = []
    for a in s.attrs:
        values = f"; one of {', '.join(f'`{v}`' for v in a.values)}" if a.values else ""
        alone = ", ".join(f"`{v}`" for v in a.reference_only)
        reference = f" ({alone} in the PyTorch reference alone)" if alone else ""
        refused = f"refused: {a.refuse}" if a.refuse else a.doc
        rows.append(
            (
                f"`{a.name}`",
                a.type,
                f"`{int(a.default) if a.type == 'bool' else a.default}`",
                cell(refused + values + reference),
            )
        )
    lines += table(("name", "type", "default", "meaning"), rows)
    if s.rules:
        lines += ["Rules, checked before anything is written:", "", *(f"- {rule}" for rule in s.rules), ""]
    if s.example:
        lines += ["## Example", "", "```python", *s.example.split("\n"), "```", ""]
    return "\n".join(lines)


def with_tables(path, s):
    """The text of an operator's page with what the schema gives."""
    if not path.exists():
        return f"# {s.name}\n\n{BEGIN}\n{page_tables(s)}\n{END}"
    before, found, rest = path.read_text().partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (found and ended):
        raise SystemExit(f"{path}: the lines {BEGIN.strip()} and {END.strip()} are missing")
    return f"{before}{BEGIN}\n{page_tables(s)}\n{END}{after}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schema", nargs="?", type=Path, default=HERE / "ops.toml")
    parser.add_argument("output", nargs="?", type=Path, default=HERE / "core" / "op_specs.h")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    wanted = {args.output: generate(args.schema), args.output.with_name("op_sizes.h"): generate_sizes(args.schema)}
    if args.schema == HERE / "ops.toml":
        for s in load_spec_module().parse(args.schema):
            page = HERE.parent / "docs" / "operators" / f"{s.snake_name}.md"
            wanted[page] = with_tables(page, s)
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if args.check:
        for path in stale:
            print(f"{path} is not what {args.schema} gives: run python csrc/generate.py", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())
