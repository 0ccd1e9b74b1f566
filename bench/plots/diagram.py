"""Boxes and arrows of an SVG diagram, in the colours of leanfleet.plotting, with a light and a dark form."""

from xml.sax.saxutils import escape

from leanfleet import plotting

ARROW = (
    f'<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    f'<path d="M0 0L8 4L0 8z" fill="{plotting.MUTED}"/></marker></defs>'
)


def document(width, height, parts):
    """The text of an SVG of these parts on a background of its own."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="{plotting.FONTS}" font-size="12">'
    )
    background = f'<rect width="100%" height="100%" fill="{plotting.CARD}"/>'
    return plotting.with_dark_form("\n".join([head, background, ARROW, *parts, "</svg>", ""]))


def text(x, y, words, color=plotting.INK, size=12, weight="normal", anchor="middle"):
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" fill="{color}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(words)}</text>'
    )


def box(x, y, width, height, fill, dashed=False):
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    return (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="6" fill="{fill}" '
        f'stroke="{plotting.MUTED}"{dash}/>'
    )


def arrow(path, dashed=False):
    """path: an SVG path's data."""
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<path d="{path}" fill="none" stroke="{plotting.MUTED}" stroke-width="1.3" marker-end="url(#arrow)"{dash}/>'


def down(x1, y1, x2, y2):
    """A curve that leaves and arrives upright."""
    bend = (y2 - y1) / 2
    return f"M{x1:.0f} {y1:.0f}C{x1:.0f} {y1 + bend:.0f} {x2:.0f} {y2 - bend:.0f} {x2:.0f} {y2:.0f}"


def across(x1, y1, x2, y2):
    """A curve that leaves and arrives level."""
    bend = (x2 - x1) / 2
    return f"M{x1:.0f} {y1:.0f}C{x1 + bend:.0f} {y1:.0f} {x2 - bend:.0f} {y2:.0f} {x2:.0f} {y2:.0f}"
