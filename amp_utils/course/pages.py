"""Notebooks as HTML that needs no network: pictures inside, formulas as MathML, no script.

nbconvert renders the cells; math-core replaces MathJax, which nbconvert would load from the web.
"""

import base64
import mimetypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

from jinja2 import PackageLoader
from markupsafe import Markup
from math_core import LatexError, LatexToMathML
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbformat import NotebookNode
from pygments.formatters import HtmlFormatter

from amp_utils.course import CourseError, html

LATEX = LatexToMathML(fancy_error=False)
HIGHLIGHTING = Markup(HtmlFormatter(style="default").get_style_defs(".highlight"))


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


def picture(path: Path) -> str:
    """A picture file as a data URL. Raises CourseError if there is no such picture."""
    kind, _ = mimetypes.guess_type(path.name)
    if not path.is_file() or not (kind or "").startswith("image/"):
        raise CourseError(f"The picture {path.name} is not a file that can be put into the page.")
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


class Renderer(IPythonRenderer):
    """nbconvert's Markdown with pictures and formulas inside; links become `link_to(url)`."""

    def __init__(self, folder: Path, link_to: Callable[[str], str], anchors: bool):
        super().__init__(escape=False, exclude_anchor_links=not anchors)
        self.folder, self.link_to = folder, link_to

    def inline_math(self, body: str) -> str:
        return mathml(body)

    def block_math(self, body: str) -> str:
        return mathml(body, display=True)

    def latex_environment(self, name: str, body: str) -> str:
        return mathml(rf"\begin{{{name}}}{body}\end{{{name}}}", display=True)

    def link(self, text: str, url: str, title: str | None = None) -> str:
        target = self.link_to(url)
        return super().link(text, target, title) if target else text

    def image(self, text: str, url: str, title: str | None = None) -> str:
        return super().image(text, picture(self.folder / url), title)


@cache  # an exporter takes a while to make
def _exporter(folder: Path, link_to: Callable[[str], str], anchors: bool) -> HTMLExporter:
    return HTMLExporter(
        template_name="basic",
        template_file="cells.html.j2",
        extra_loaders=[PackageLoader("amp_utils.course")],
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        filters={"markdown2html": MarkdownWithMath(Renderer(folder, link_to, anchors)).render},
    )


def cells(
    notebook: NotebookNode, folder: Path, link_to: Callable[[str], str] = str, anchors: bool = True
) -> Markup:
    """All cells as HTML, with pictures from `folder`; where `link_to(url)` is "", the text stays.

    Raises CourseError for a formula or a picture that cannot be put inside.
    """
    return Markup(_exporter(folder, link_to, anchors).from_notebook_node(notebook)[0])


def page(title: str, body: str) -> str:
    """A whole page around `body`, which is text or, as from `cells`, Markup."""
    return html.page("lesson.html.j2", title=title, body=body, highlighting=HIGHLIGHTING)
