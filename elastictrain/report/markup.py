"""HTML and SVG that cannot be broken by names: all text and every attribute is escaped."""

from collections.abc import Iterable, Sequence
from html import escape


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, *children: str | Iterable[str], **attributes: object) -> Markup:
    """An element. Children that are no `Markup` are text; `class_` and `data_x` stand for `class` and `data-x`."""
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"' for key, value in attributes.items())
    return Markup(f"<{name}{given}>{join(*children)}</{name}>")


def join(*children: str | Iterable[str]) -> Markup:
    """Children one after the other."""
    flat = (part for child in children for part in ([child] if isinstance(child, str) else child))
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in flat))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, class_: str = "") -> Markup:
    """A table in a box that scrolls where it is too wide."""
    header = tag("thead", tag("tr", *(tag("th", one) for one in head)))
    body = tag("tbody", *(tag("tr", *(tag("td", one) for one in row)) for row in rows))
    return tag("div", tag("table", header, body), class_=f"scroll {class_}".strip())


def svg(*children: str | Iterable[str], width: float, height: float, label: str, css: str) -> Markup:
    """A drawing that takes the width of its box; it is stretched, so it holds no text but titles."""
    view, ratio = f"0 0 {width:g} {height:g}", "none"
    return tag("svg", *children, viewBox=view, preserveAspectRatio=ratio, role="img", aria_label=label, class_=css)
