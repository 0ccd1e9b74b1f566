"""Shows docstrings as this project writes them: parameters as "name: what it is.", one after the other, become a list, the
program under "Example:" becomes code."""

import re
import textwrap

import griffe


def split(text, names):
    """A docstring's text with its parameters as a list in Markdown. names: of the parameters."""
    word = "|".join(map(re.escape, names))
    start = re.compile(rf"(?:(?<=^)|(?<=\. )|(?<=\.\n)|(?<=\n))((?:{word})(?:(?:, | and )(?:{word}))*): ")
    end = re.compile(r"(?<=\.)\s+(?=(?:Returns?|Raises|Yields)\b)")
    paragraphs = []
    for paragraph in text.split("\n\n"):
        before, *parts = start.split(paragraph)
        if not parts or paragraph.startswith("    "):
            paragraphs.append(paragraph)
            continue
        items, after = [], []
        for name, meaning in zip(parts[::2], parts[1::2], strict=True):
            meaning, *rest = end.split(meaning, maxsplit=1)
            items.append(f"- **{name}**: {' '.join(meaning.split())}")
            after += rest
        paragraphs += [before.strip(), "\n".join(items), *(part.strip() for part in after)]
    return "\n\n".join(p for p in paragraphs if p)


def shown(text, names):
    """The Markdown of a docstring. names: of the parameters."""
    words, mark, program = text.partition("\nExample:\n")
    words = split(words.rstrip(), names) if names else words.rstrip()
    return f"{words}\n\nExample:\n\n```python\n{textwrap.dedent(program).strip()}\n```" if mark else words


class Docstrings(griffe.Extension):
    """The extension that mkdocs.yml names."""

    def on_package(self, *, pkg, **kwargs):
        self._visit(pkg)

    def _visit(self, item):
        for member in item.members.values():
            if member.is_alias:
                continue
            if member.docstring:
                member.docstring.value = shown(member.docstring.value, self._names(member))
            if member.is_module or member.is_class:
                self._visit(member)

    def _names(self, item):
        if item.is_function:
            return [p.name.lstrip("*") for p in item.parameters if p.name != "self"]
        if item.is_class:
            fields = [name for name, member in item.members.items() if member.is_attribute]
            return fields + ([p.name for p in item.members["__init__"].parameters] if "__init__" in item.members else [])
        return []
