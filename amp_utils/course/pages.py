"""Notebooks as HTML that needs no network: pictures inside, formulas as MathML, and no script but
that of the figures to touch.

nbconvert renders the cells; math-core replaces MathJax, which nbconvert would load from the web.
"""

import base64
import mimetypes
import re
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from math_core import LatexError, LatexToMathML
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbformat import NotebookNode
from pygments.formatters import HtmlFormatter

from amp_utils.course import CourseError

LATEX = LatexToMathML(fancy_error=False)
# What may be wider than a phone can be scrolled with the keyboard; a group, not one landmark each.
WIDE = '<div class="wide" tabindex="0" role="group" aria-label="{}">{}</div>'
# Every page extends templates/base.html.j2, and Jinja escapes its values.
TEMPLATES = Environment(
    loader=PackageLoader("amp_utils.course"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
for theme, style in (("light", "default"), ("dark", "github-dark")):
    TEMPLATES.globals[f"{theme}_code"] = HtmlFormatter(style=style).get_style_defs(".highlight")
MARKDOWN = TEMPLATES.overlay(autoescape=False)


def mathml(latex: str, display: bool = False) -> str:
    """A LaTeX formula as MathML. Raises CourseError if it cannot be converted."""
    try:
        return LATEX.convert_with_local_state(latex, displaystyle=display)
    except LatexError as error:
        reason = str(error).splitlines()[0]
        raise CourseError(f"The formula ${latex}$ cannot be shown offline: {reason}") from None


def as_page(url: str) -> str:
    """Where a link leads in the handout: to the page of a lesson or of the ledger, if it can."""
    return url if "://" in url else re.sub(r"\.ipynb(?=#|$)|(?<=^claims)\.md", ".html", url)


class Renderer(IPythonRenderer):
    """nbconvert's Markdown with pictures and formulas inside.

    Links to lessons stay if their pages are `beside` this one, links within it with `anchors`.
    """

    def __init__(self, folder: Path, beside: bool = False, anchors: bool = True):
        super().__init__(escape=False, exclude_anchor_links=not anchors)
        self.folder, self.beside, self.anchors = folder, beside, anchors

    inline_math = staticmethod(mathml)

    def block_code(self, code: str, info: str | None = None) -> str:
        return WIDE.format("code", super().block_code(code, info))

    def block_math(self, latex: str) -> str:
        return WIDE.format("formula", mathml(latex, display=True))

    def latex_environment(self, name: str, body: str) -> str:
        return self.block_math(rf"\begin{{{name}}}{body}\end{{{name}}}")

    def link(self, text: str, url: str, title: str | None = None) -> str:
        kept = "://" in url or (self.anchors if url.startswith("#") else self.beside)
        return super().link(text, as_page(url), title) if kept else text

    def image(self, text: str, url: str, title: str | None = None) -> str:
        path, kind = self.folder / url, mimetypes.guess_type(url)[0] or ""
        if not path.is_file() or not kind.startswith("image/"):
            raise CourseError(f"The picture {path.name} is not a file that can go into the page.")
        data = base64.b64encode(path.read_bytes()).decode()
        return super().image(text, f"data:{kind};base64,{data}", title)


@cache  # an exporter takes a while to make
def _exporter(*options: Path | bool) -> HTMLExporter:
    return HTMLExporter(
        template_name="basic",
        template_file="cells.html.j2",
        extra_loaders=[TEMPLATES.loader],
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        filters={"markdown2html": MarkdownWithMath(Renderer(*options)).render},
    )


def cells(notebook: NotebookNode, *options: Path | bool) -> str:
    """All cells as HTML; the options are those of `Renderer`. Raises CourseError as it does."""
    return _exporter(*options).from_notebook_node(notebook)[0]


def page(template: str, **values: Any) -> str:
    """The template filled with `values`, which are escaped unless it says `safe`."""
    return TEMPLATES.get_template(template).render(values)
