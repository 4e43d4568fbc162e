"""A page that loads nothing and runs nothing, and its pieces: tables that scroll in a box, lists of facts."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from .figures import css

STYLE = """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif;
overflow-wrap:anywhere}
main{max-width:70rem;margin:0 auto;padding:2rem 1.25rem 4rem}
h1{font-size:clamp(1.15rem,1rem + .8vw,1.55rem);line-height:1.4;font-weight:600;margin:.4rem 0 0;max-width:54rem}
h2{font-size:1.15rem;margin:2.75rem 0 .35rem}
p{margin:.35rem 0;max-width:46rem}
.soft,small,dt{color:var(--soft)}
small{font-size:.82rem;white-space:nowrap}
.scroll{overflow-x:auto;max-width:100%;border:1px solid var(--rule);border-radius:8px;margin:.75rem 0}
.scroll:focus-visible,summary:focus-visible{outline:2px solid var(--s0);outline-offset:2px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:left;vertical-align:top;padding:.5rem .9rem;border-top:1px solid var(--rule);font-weight:400}
thead th{border-top:0;color:var(--soft);font-size:.88rem;white-space:nowrap}
tbody th{font-weight:600;min-width:8.5rem;max-width:18rem}
td{white-space:nowrap}
td.best b::after{content:" ▲";font-size:.7em;color:var(--s0)}
.said td:last-child{white-space:normal;min-width:18rem}
.runs{font-size:.84rem}.runs th,.runs td{padding:.3rem .7rem}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.3rem 1.2rem;padding:0;margin:.75rem 0 .5rem;font-size:.9rem}
.legend li{display:flex;gap:.5rem;align-items:center;min-width:0}
.legend svg{flex:none}
.panels{display:grid;gap:1rem;
grid-template-columns:repeat(auto-fit,minmax(min(100%,max(18.5rem,100%/var(--n) - 1rem)),1fr))}
.chart{width:100%;height:auto;display:block;max-width:27rem}
.one .chart{max-width:34rem}
dl{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:.35rem 1.2rem;margin:.75rem 0}
dd{margin:0}
code{font:.88em ui-monospace,SFMono-Regular,Menlo,monospace}
details{margin-top:1rem}
summary{cursor:pointer;padding:.3rem 0}
@media (max-width:30rem){main{padding:1.25rem .9rem 3rem}dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:.6rem}
th,td{padding:.45rem .6rem}}
@media print{main{max-width:none;padding:0}.scroll{overflow:visible}.chart,tr{break-inside:avoid}
h2{break-after:avoid}td{white-space:normal}}
"""


def document(title: str, body: str, style: str = "") -> str:
    """The whole page. Should text ever get in unescaped, the policy in the head still lets nothing load or run."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{css(':root')}{STYLE}{style}</style></head>\n"
        f"<body><main>{body}</main></body></html>\n"
    )


def box(name: str, head: Iterable[str], body: Iterable[str], kind: str = "") -> str:
    """A table in a box of its own that scrolls, so that the page never has to."""
    columns = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    lines = "".join(f"<tr>{cells}</tr>" for cells in body)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}"><table class="{kind}">'
        f"<thead><tr>{columns}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def table_row(head: str, *cells: object) -> str:
    """Escaped cells; a long name may break inside its settings."""
    name = escape(head).replace("(", "(<wbr>").replace("_", "_<wbr>")
    return f'<th scope="row">{name}</th>' + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells)


def section(title: str, inside: str) -> str:
    """Under a heading of its own."""
    return f"<section><h2>{escape(title)}</h2>{inside}</section>"


def fact_list(named: dict[str, str], more: str = "") -> str:
    """Names and what they are; `more` is put after them as it is."""
    items = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in named.items())
    return f"<dl>{items}{more}</dl>"


def words(value: object) -> str:
    """A value of a record as text, not escaped.

    >>> words({"torch": "2.5", "numpy": "2.1"}), words(0.1 + 0.2), words(None)
    ('torch 2.5, numpy 2.1', '0.3', 'None')
    """
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)
