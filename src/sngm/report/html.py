"""Render the package's HTML pages from Jinja2 templates; pages load no external files and have no scripts."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from .drawing import inline

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


def render(template: str, **values: Any) -> str:
    """Return a page from templates/<template>.html.j2, with every value escaped."""
    page = _environment().get_template(f"{template}.html.j2").render(values)
    return page.encode("utf-8", "replace").decode()  # a lone surrogate, from an undecodable argument, becomes "?"


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("sngm.report")
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    found.globals["draw"] = inline
    found.filters |= {"breakable": _breakable, "words": words, "short": short}
    return found


def _breakable(name: object) -> Markup:
    """Escape a name and allow line breaks inside its settings."""
    from markupsafe import Markup, escape

    return escape(words(name)).replace("(", Markup("(<wbr>")).replace("_", Markup("_<wbr>"))


def words(value: object, missing: str = "None") -> str:
    """Return a value of a record as text, not escaped; return `missing` for None.

    >>> words({"torch": "2.5", "lr": (0.1, 1.0)}), words(0.1 + 0.2), words(None)
    ('torch 2.5, lr 0.1 to 1', '0.3', 'None')
    """
    if isinstance(value, dict):
        return ", ".join(f"{key} {words(inner)}" for key, inner in value.items())
    if isinstance(value, tuple):  # a range
        return " to ".join(map(words, value))
    return missing if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def short(value: object) -> str:
    """Return a value as text: a number below 1,000 with at most four digits, a larger one as integer, None as a dash.

    >>> short(0.123456), short(12345.6), short(None), short("0.9")
    ('0.1235', '12,346', '–', '0.9')
    """
    if not isinstance(value, int | float):
        return words(value, "–")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
