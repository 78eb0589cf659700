"""Notebooks as HTML that needs no network: pictures inside, formulas as MathML, no script.

nbconvert renders the cells. What it would load from a CDN (MathJax, RequireJS) is not there: math-core turns each
formula into MathML when the page is built, and browsers draw that themselves.
"""

import base64
import mimetypes
import re
from collections.abc import Callable
from functools import cache
from html import escape
from pathlib import Path

from math_core import LatexError, LatexToMathML
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbformat import NotebookNode

from amp_utils.course import CourseError

LATEX = LatexToMathML(fancy_error=False)
# A solution is folded away as in JupyterLab. For slides a cell may ask to be shown without its source (outputs_only),
# or one keystroke later than the rest (later).
TEMPLATE = """
{%- extends 'basic/index.html.j2' -%}
{% block codecell %}
{% if 'solution' in cell.metadata.get('tags', []) %}<details class="solution"><summary>Solution</summary>
{{ super() }}</details>{% else %}{{ super() }}{% endif %}
{% endblock %}
{% block input %}{{ cell.source | highlight_code(metadata=cell.metadata) }}{% endblock %}
{% block markdowncell %}
{% if cell.metadata.get('later') %}<div class="fragment">{{ super() }}</div>{% else %}{{ super() }}{% endif %}
{% endblock %}
{% block input_group %}{% if not cell.metadata.get('outputs_only') %}{{ super() }}{% endif %}{% endblock %}
{% block output_group %}
{% if cell.metadata.get('later') %}<div class="fragment">{{ super() }}</div>{% else %}{{ super() }}{% endif %}
{% endblock %}
"""
# Colours of the text reach a contrast of 4.5 : 1 or more on white, those of Pygments' default style as well.
BASE = """
:root { --line: #d5d9e0; --quiet: #586069; --link: #0b5cad; --code: #f6f8fa; }
a { color: var(--link); }
code, pre { font: .85em/1.45 ui-monospace, "DejaVu Sans Mono", Consolas, monospace; }
:not(pre) > code { background: var(--code); padding: .1em .3em; border-radius: 3px; }
.input { background: var(--code); border: 1px solid var(--line); border-radius: 6px; margin: .9em 0 .3em; }
.input pre, .output pre { margin: 0; padding: .5em .8em; overflow-x: auto; white-space: pre; }
.output { border-left: 3px solid var(--line); margin: 0 0 .9em; }
.output_stderr pre { background: #fdecea; }
table { border-collapse: collapse; margin: .8em 0; }
th, td { border: 1px solid var(--line); padding: .3em .7em; text-align: left; vertical-align: top; }
thead:not(:has(th:not(:empty))) { display: none; }
details { border: 1px solid var(--line); border-radius: 6px; padding: .2em .9em; margin: .6em 0; }
summary { cursor: pointer; font-weight: 600; color: var(--quiet); }
.celltag_predict { border-left: 4px solid #d97706; background: #fff8ec; padding: .1em .9em; border-radius: 4px; }
img { max-width: 100%; height: auto; }
math { font-size: 1.05em; }
math[display="block"] { margin: .8em 0; }
"""
STYLE = f"""{BASE}
body {{ font: 17px/1.55 system-ui, sans-serif; color: #1f2328; background: #fff; margin: 0 auto; max-width: 58rem;
  padding: 1rem 1.2rem 4rem; }}
h1, h2, h3 {{ line-height: 1.25; margin: 1.6em 0 .5em; }}
.anchor-link {{ visibility: hidden; margin-left: .3em; text-decoration: none; }}
:hover > .anchor-link {{ visibility: visible; }}
hr {{ border: 0; border-top: 1px solid var(--line); margin: 2em 0 1em; }}
"""


class PageError(CourseError):
    """Something in a lesson cannot become part of a page that stands alone; the message is one sentence."""


def mathml(latex: str, display: bool = False) -> str:
    """A LaTeX formula as MathML. Raises PageError for what cannot be converted.

    >>> mathml("2^{-24}")
    '<math><msup><mn>2</mn><mrow><mo lspace="0" rspace="0">−</mo><mn>24</mn></mrow></msup></math>'
    """
    try:
        return LATEX.convert_with_local_state(latex, displaystyle=display)
    except LatexError as error:
        raise PageError(
            f"The formula ${latex}$ cannot be shown offline: {str(error).splitlines()[0]}"
        ) from None


class Renderer(IPythonRenderer):
    """nbconvert's Markdown with formulas and pictures inside. `link_to` says where a link leads; "" makes it text."""

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


def picture(path: Path) -> str:
    """A picture file as a data URL. Raises PageError where there is none."""
    kind, _ = mimetypes.guess_type(path.name)
    if not path.is_file() or not (kind or "").startswith("image/"):
        raise PageError(f"The picture {path.name} is not a file that can be put into the page.")
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


class Cells(HTMLExporter):
    """The cells of a notebook as HTML, without a page around them; made once for each folder, as that takes a while."""

    def __init__(self, folder: Path, link_to: Callable[[str], str], anchors: bool):
        super().__init__(template_name="basic", raw_template=TEMPLATE)
        self.exclude_input_prompt = self.exclude_output_prompt = True
        self.folder, self.link_to, self.anchors = folder, link_to, anchors

    def markdown2html(self, source: str) -> str:
        return MarkdownWithMath(Renderer(self.folder, self.link_to, self.anchors)).render(source)


def cells(
    notebook: NotebookNode, folder: Path, link_to: Callable[[str], str] = str, anchors: bool = True
) -> str:
    """All cells as HTML; pictures are looked up from `folder`, and `link_to` may change where a link leads.

    Raises PageError for a formula or a picture that cannot be put inside.
    """
    return _exporter(folder, link_to, anchors).from_notebook_node(notebook)[0]


_exporter = cache(Cells)


@cache
def highlighting() -> str:
    """The style sheet of highlighted code, as nbconvert makes it."""
    resources: dict = {}
    exporter = HTMLExporter(template_name="basic")
    _, resources = exporter.from_notebook_node(
        NotebookNode(cells=[], metadata={}, nbformat=4, nbformat_minor=5)
    )
    return "\n".join(resources["inlining"]["css"])


def page(title: str, body: str, style: str = STYLE) -> str:
    """A whole page that needs nothing but itself. `body` is HTML, `style` CSS and `title` text."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n'
        f"<style>{style}{highlighting()}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def as_html(url: str) -> str:
    """The link to a lesson's page where `url` leads to its notebook; every other link stays.

    >>> as_html("00_start_here.ipynb#The-course"), as_html("https://pytorch.org"), as_html("#Recap")
    ('00_start_here.html#The-course', 'https://pytorch.org', '#Recap')
    """
    return url if "://" in url else re.sub(r"\.ipynb(?=#|$)", ".html", url)
