"""Every HTML page of the toolbox extends templates/base.html.j2; Jinja escapes what goes into it."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

TEMPLATES = Environment(
    loader=PackageLoader("amp_utils.course"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def page(template: str, **values: Any) -> str:
    """A file of templates/ filled with `values`; text is escaped unless it is `markupsafe.Markup`."""
    return TEMPLATES.get_template(template).render(values)
