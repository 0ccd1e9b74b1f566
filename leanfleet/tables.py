"""Tables of text for the terminal. Standard library only."""

from collections.abc import Collection, Sequence


def print_table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> None:
    """Prints rows of text, indented, in aligned columns; those numbered in `right` to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            text.rjust(width) if i in right else text.ljust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  " + "  ".join(cells).rstrip())
