"""The page around a report: style, tables, figures; every value is escaped here."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from papa._version import __version__
from papa.lab.report.fields import flat, printable, text
from papa.lab.report.figure import Figure
from papa.lab.report.svg import DARK, LIGHT, svg
from papa.lab.report.svg import STYLE as FIGURE_STYLE

GENERATOR = '<meta name="generator" content="papa'
"""How a page that papa wrote is told from anybody else's."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def _variables(colours: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())


STYLE = f"""
:root {{ color-scheme: light dark; {_variables(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}
* {{ box-sizing: border-box; }}
html {{ -webkit-text-size-adjust: 100%; }}
body {{ margin: 0; font: 16px/1.55 system-ui, "Liberation Sans", Arial, sans-serif; color: var(--ink);
  background: var(--paper); }}
main {{ margin: 0 auto; max-width: 66rem; padding: 2rem 1.25rem 4rem; }}
h1 {{ font-size: 1.7rem; line-height: 1.25; margin: 0 0 .35rem; letter-spacing: -.01em; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.15rem; margin: 2.75rem 0 .75rem; padding-top: .75rem; border-top: 1px solid var(--line); }}
h3 {{ font-size: 1rem; margin: 0; }}
p {{ margin: .4rem 0; max-width: 46rem; overflow-wrap: anywhere; }}
.quiet, figcaption p {{ color: var(--quiet); }} figcaption p {{ font-size: .9rem; margin: .15rem 0 .5rem; }}
.note {{ border-left: 4px solid var(--c1); background: var(--panel); padding: .6rem .9rem; margin: 1rem 0; }}
.tiles {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem;
  margin: 1.25rem 0; }}
.tiles div {{ background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: .7rem .9rem; }}
.tiles dt {{ color: var(--quiet); font-size: .85rem; }} .tiles dl, .tiles dd {{ margin: 0; }}
.tiles dd.big {{ font-size: 1.65rem; line-height: 1.25; font-weight: 600; font-variant-numeric: tabular-nums; }}
.tiles dd.small {{ color: var(--quiet); font-size: .8rem; }}
.figures {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); gap: 2rem 2.25rem;
  align-items: start; }}
figure {{ margin: 0; min-width: 0; }} svg {{ display: block; width: 100%; max-width: 40rem; height: auto; }}
.scroll {{ overflow-x: auto; }} table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .35rem 1.1rem .35rem 0; border-bottom: 1px solid var(--line); text-align: left;
  white-space: nowrap; }}
th {{ font-weight: 600; color: var(--quiet); font-size: .85rem; }} tbody th {{ color: inherit; font-size: 1rem; }}
td.wrap {{ white-space: normal; overflow-wrap: anywhere; min-width: 12rem; }}
details {{ margin: .5rem 0; }} details table {{ font-size: .85rem; }}
details tbody th {{ font-size: inherit; font-weight: 400; }}
summary {{ cursor: pointer; color: var(--quiet); font-size: .9rem; }}
summary:focus-visible {{ outline: 2px solid var(--c0); }}
pre {{ overflow-x: auto; padding: .75rem .9rem; margin: .5rem 0; border: 1px solid var(--line); border-radius: 8px;
  background: var(--panel); font-size: .85rem; white-space: pre-wrap; overflow-wrap: anywhere; }}
footer {{ margin-top: 3rem; color: var(--quiet); font-size: .85rem; }}
{FIGURE_STYLE}
@media screen and (max-width: 40rem) {{ svg text {{ font-size: 13px; }}
  .stacks, .stacks tbody, .stacks tr, .stacks tbody th {{ display: block; border: 0; }}
  .stacks thead {{ display: none; }}
  .stacks tr {{ border-bottom: 1px solid var(--line); padding: .35rem 0; }}
  .stacks tbody th {{ padding: 0; }} .stacks td:empty {{ display: none; }}
  .stacks td {{ display: flex; justify-content: space-between; gap: 1rem; padding: .1rem 0; border: 0;
    white-space: normal; text-align: right; }}
  .stacks td::before {{ content: attr(data-label); color: var(--quiet); white-space: nowrap; }} }}
@media print {{ :root {{ color-scheme: light; {_variables(LIGHT)} }} body {{ font-size: 11pt; }}
  main {{ max-width: none; padding: 0; }} figure details {{ display: none; }}
  figure, .tiles div, tr {{ break-inside: avoid; }} h2, h3 {{ break-after: avoid; }}
  .figures {{ grid-template-columns: 1fr 1fr; }} .scroll {{ overflow: visible; }} th, td {{ white-space: normal; }}
  .always summary {{ display: none; }} .always::details-content {{ content-visibility: visible; display: block; }} }}
"""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, wrap_last: bool = False, stacks: bool = False) -> str:
    """A table whose first column names its rows; every cell is escaped.

    Args:
        head: the names of its columns.
        rows: its cells.
        wrap_last: let the last column wrap.
        stacks: on a narrow screen, put a row's cells below each other, each with its column's name.
    """
    top = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in head)
    body = []
    labels = [f' data-label="{html.escape(cell, quote=True)}"' if stacks else "" for cell in head[1:]]
    for first, *rest in rows:
        kinds = [""] * (len(rest) - 1) + [' class="wrap"' if wrap_last else ""]
        cells = "".join(
            f"<td{kind}{label}>{html.escape(cell)}</td>" for kind, label, cell in zip(kinds, labels, rest, strict=False)
        )
        body.append(f'<tr><th scope="row">{html.escape(first)}</th>{cells}</tr>')
    kind = ' class="stacks"' if stacks else ""
    return f'<div class="scroll"><table{kind}><thead><tr>{top}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def figure_markup(figure: Figure) -> str:
    """A figure with its title, how to read it, the drawing, and its numbers behind a fold."""
    note = "<p>Evenly spaced ones of many; the run's files have all.</p>" if figure.is_thinned else ""
    return (
        f'<figure id="{html.escape(figure.name)}"><figcaption><h3>{html.escape(figure.title)}</h3>'
        f"<p>{html.escape(figure.caption)}</p></figcaption>{svg(figure)}"
        f"<details><summary>numbers</summary>{note}{table(*figure.table())}</details></figure>"
    )


def figures_markup(figures: Sequence[Figure]) -> str:
    """Figures beside each other where there is room."""
    return f'<div class="figures">{"".join(map(figure_markup, figures))}</div>' if figures else ""


def tiles(values: Iterable[tuple[str, str, str]]) -> str:
    """A few numbers to see first: each with a name above and a remark below."""
    parts = [
        f"<div><dt>{html.escape(name)}</dt><dd class='big'>{html.escape(value)}</dd>"
        f"<dd class='small'>{html.escape(remark)}</dd></div>"
        for name, value, remark in values
    ]
    return f'<dl class="tiles">{"".join(parts)}</dl>' if parts else ""


def note(words: str) -> str:
    """Something a reader should not miss."""
    return f'<p class="note">{html.escape(words)}</p>'


def section(title: str, *parts: str) -> str:
    """A section, or nothing when all its parts are empty."""
    inside = "".join(parts)
    return f"<section><h2>{html.escape(title)}</h2>{inside}</section>" if inside else ""


def paragraph(words: str) -> str:
    """A quiet remark."""
    return f'<p class="quiet">{html.escape(words)}</p>'


def preformatted(words: str) -> str:
    """A command or the like."""
    return f"<pre>{html.escape(words)}</pre>"


def folded(title: str, value: Any) -> str:
    """Nested values as a table of their leaves, behind a fold; all of them in print."""
    rows = [(key, text(leaf) or "none") for key, leaf in flat(value) if key]
    if not rows:
        return ""
    inside = table(("", "value"), rows[:1000], wrap_last=True)
    return f'<details class="always"><summary>{html.escape(title)}</summary>{inside}</details>'


def page(title: str, parts: Iterable[str]) -> str:
    """The whole page."""
    escaped = html.escape(title)
    return printable(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">{GENERATOR} {__version__}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped}</title><style>{STYLE}</style></head><body><main><h1>{escaped}</h1>"
        f"{''.join(parts)}<footer>Made by papa {__version__}.</footer></main></body></html>\n"
    )
