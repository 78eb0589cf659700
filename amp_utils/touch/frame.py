"""What all figures to touch share: a drawing that stands still, and a script that takes its place.

Nothing is fetched, numbered or drawn by lot, so the same data give the same bytes.
"""

import base64
import html
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

INK, QUIET, LINE = "#1f2328", "#586069", "#d5d9e0"
BLUE, RED, ORANGE, GREEN = "#0072B2", "#D55E00", "#E69F00", "#009E73"  # those of amp_utils.plots


def show(name: str, data: Any, *, label: str, alt: str, still: str, uses: str = "") -> None:
    """Display the figure of `name.js` with `data`, anything that JSON can hold.

    `label` names it for a screen reader. `still` is an SVG (see `drawing`) with the same message,
    seen where no script runs, and `alt` its message in words. `uses` names a file of functions,
    `floats` for `floats.js`, that `name.js` shares with other figures. ValueError for data with NaN
    or infinity.
    """
    from IPython.display import display

    scripts = "\n".join(_source(f"{part}.js") for part in ("frame", uses, name) if part)
    style, values = _json(_source("frame.css")), _json(data)
    picture = base64.b64encode(still.encode()).decode()
    page = f"""\
<div class="touch" data-lm-suppress-shortcuts="true"><img alt="{html.escape(alt)}" \
style="max-width: 100%" src="data:image/svg+xml;base64,{picture}"></div>
<script>
(() => {{
"use strict";
{scripts}
const host = document.currentScript.parentElement.querySelector(".touch:not([data-ready])");
if (host) frame(host, {style}, {_json(label)}, stage => figure(stage, {values}));
}})();
</script>"""
    display({"text/html": page, "text/plain": f"[figure to touch: {alt}]"}, raw=True)


def drawing(width: int, height: int, *parts: str) -> str:
    """An SVG of `parts` on white, so that it can be read on a dark page too."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" font-size="13" '
        f'fill="{INK}"><rect width="100%" height="100%" rx="6" fill="#fff"/>{"".join(parts)}</svg>'
    )


def text(x: float, y: float, words: str, **attributes: str | float) -> str:
    """A line of text in a drawing; `text_anchor="end"` and the like are its attributes."""
    given = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:g}" y="{y:g}"{given}>{html.escape(words)}</text>'


def path(steps: str, color: str, width: float = 1) -> str:
    """A line of SVG's path commands; wide enough, it is a row of bars."""
    return f'<path d="{steps}" stroke="{color}" stroke-width="{width:g}" fill="none"/>'


def power(exponent: int) -> str:
    """2 to the power of `exponent`, as it is printed.

    >>> power(-24)
    '2⁻²⁴'
    """
    return "2" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _json(value: Any) -> str:
    """A JavaScript value that cannot end the script it stands in."""
    compact = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return compact.replace("<", "\\u003c")


@cache
def _source(name: str) -> str:
    """A file beside this one, without indentation and lines of comment: they stay here."""
    source = Path(__file__).with_name(name).read_text("utf-8")
    return re.sub(r"^[ ]*(//.*|/[*].*[*]/)?\n?", "", source, flags=re.M).strip()
