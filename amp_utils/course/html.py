"""The one HTML shell: every page extends templates/base.html.j2, and Jinja escapes its values."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

TEMPLATES = Environment(
    loader=PackageLoader("amp_utils.course"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def page(template: str, **values: Any) -> str:
    """The template filled with `values`; what is not `markupsafe.Markup` is escaped."""
    return TEMPLATES.get_template(template).render(values)
