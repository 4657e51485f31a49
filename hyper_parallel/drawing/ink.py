"""What all pictures share: their colours, and words in SVG."""

from __future__ import annotations

from xml.sax.saxutils import escape

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#99aabb")
REPLICATED, INK, FAINT, LINE = "#c9ced6", "#1f2933", "#67717e", "#d5dae1"


def opening(width: float, height: float) -> str:
    """The first line of an SVG file."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">'
    )


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: float,
    fill: str = INK,
    weight: int = 400,
    mono: bool = False,
    anchor: str = "start",
) -> str:
    """A line of words at a place."""
    family = ' font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"' if mono else ""
    bold = f' font-weight="{weight}"' if weight != 400 else ""
    side = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}"{bold}{side}{family}>{escape(words)}</text>'
