"""Notebooks as HTML that needs no network: pictures inside, formulas as MathML, no script.

nbconvert renders the cells; math-core replaces MathJax, which nbconvert would load from the web.
"""

import base64
import mimetypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import PackageLoader
from math_core import LatexError, LatexToMathML
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbconvert.preprocessors import CSSHTMLHeaderPreprocessor
from nbformat import NotebookNode

from amp_utils.course import CourseError, html

LATEX = LatexToMathML(fancy_error=False)
# Without a folder of settings, from which nbconvert would take the user's own custom.css.
STYLE = CSSHTMLHeaderPreprocessor(style="default").preprocess(None, {"config_dir": os.devnull})
HIGHLIGHTING = STYLE[1]["inlining"]["css"][0]


def mathml(latex: str, display: bool = False) -> str:
    """A LaTeX formula as MathML. Raises CourseError if it cannot be converted.

    >>> mathml("2^{-24}")
    '<math><msup><mn>2</mn><mrow><mo lspace="0" rspace="0">−</mo><mn>24</mn></mrow></msup></math>'
    """
    try:
        return LATEX.convert_with_local_state(latex, displaystyle=display)
    except LatexError as error:
        reason = str(error).splitlines()[0]
        raise CourseError(f"The formula ${latex}$ cannot be shown offline: {reason}") from None


def outward(url: str) -> str:
    """Keep anchors and web links; drop links to other lessons, which need not be beside a page."""
    return url if url.startswith("#") or "://" in url else ""


class Renderer(IPythonRenderer):
    """nbconvert's Markdown with pictures and formulas inside; links become `link_to(url)`."""

    def __init__(self, folder: Path, link_to: Callable[[str], str] = outward, anchors: bool = True):
        super().__init__(escape=False, exclude_anchor_links=not anchors)
        self.folder, self.link_to, self.anchors = folder, link_to, anchors

    def inline_math(self, body: str) -> str:
        return mathml(body)

    def block_math(self, body: str) -> str:
        return mathml(body, display=True)

    def latex_environment(self, name: str, body: str) -> str:
        return mathml(rf"\begin{{{name}}}{body}\end{{{name}}}", display=True)

    def link(self, text: str, url: str, title: str | None = None) -> str:
        target = self.link_to(url) if self.anchors or not url.startswith("#") else ""
        return super().link(text, target, title) if target else text

    def image(self, text: str, url: str, title: str | None = None) -> str:
        path, kind = self.folder / url, mimetypes.guess_type(url)[0] or ""
        if not path.is_file() or not kind.startswith("image/"):
            raise CourseError(f"The picture {path.name} is not a file that can go into the page.")
        data = base64.b64encode(path.read_bytes()).decode()
        return super().image(text, f"data:{kind};base64,{data}", title)


@cache  # an exporter takes a while to make
def _exporter(*options: Any) -> HTMLExporter:
    return HTMLExporter(
        template_name="basic",
        template_file="cells.html.j2",
        extra_loaders=[PackageLoader("amp_utils.course")],
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        filters={"markdown2html": MarkdownWithMath(Renderer(*options)).render},
    )


def cells(notebook: NotebookNode, *options: Any) -> str:
    """All cells as HTML; the options are those of `Renderer`. Raises CourseError as it does."""
    return _exporter(*options).from_notebook_node(notebook)[0]


def page(title: str, body: str) -> str:
    """A whole page around `body`, which is HTML."""
    return html.page("lesson.html.j2", title=title, body=body, highlighting=HIGHLIGHTING)
