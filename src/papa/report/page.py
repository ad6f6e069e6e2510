"""Reports as one self-contained page each: no outside request, light and dark, everything escaped."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from papa.report.chart import line_chart
from papa.report.table import (
    COLUMNS,
    PAPER_ROW,
    cells_of,
    compare_rows,
    details_table,
    paper_cells,
    paper_rows,
    scores_of,
)

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --paper: #fff; --line: #d5dae1; --quiet: #5b6675;
  --c0: #0b6bcb; --c1: #c2410c; --c2: #15803d; --c3: #7c3aed; --c4: #be185d; --c5: #0e7490; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --paper: #14181f; --line: #343c48; --quiet: #9aa5b4;
  --c0: #6cb2f7; --c1: #fb9a5c; --c2: #5fd38a; --c3: #b79cf7; --c4: #f58ab8; --c5: #5cc9de; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 52rem; padding: 1.5rem 1rem 4rem; font: 16px/1.5 system-ui, sans-serif;
  color: var(--ink); background: var(--paper); }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2.25rem 0 .5rem; }
.quiet, figcaption { color: var(--quiet); } figure { margin: 1.25rem 0; } svg { width: 100%; height: auto; }
svg text { font-size: 11px; fill: var(--quiet); } svg .grid { stroke: var(--line); }
svg polyline { fill: none; stroke: currentColor; stroke-width: 1.8; }
.d1 { stroke-dasharray: 7 4; } .d2 { stroke-dasharray: 2 3; } span.d1, span.d2 { font-style: italic; }
.s0 { color: var(--c0); } .s1 { color: var(--c1); } .s2 { color: var(--c2); } .s3 { color: var(--c3); }
.s4 { color: var(--c4); } .s5 { color: var(--c5); }
.legend { margin: .25rem 0; } .legend span { margin-right: 1rem; } .legend span::before { content: "\\2014\\00a0"; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); text-align: left; white-space: nowrap; }
pre { overflow-x: auto; padding: .75rem; border: 1px solid var(--line); border-radius: 6px; font-size: .85rem; }
@media print { details { display: none; } body { max-width: none; } }
"""


def run_page(result: Mapping[str, Any], metrics: Iterable[Mapping[str, Any]]) -> str:
    """The page of one run.

    Args:
        result: what `result.json` holds.
        metrics: what `metrics.jsonl` holds.
    """
    events = list(metrics)
    title = (
        f"{result['recipe']}: {result['method']}, {len(scores_of(result)['members'])} members, seed {result['seed']}"
    )
    rows = [("test", *cells_of(result["test"]))] if result["test"] else []
    rows.append(("validation", *cells_of(result["validation"])))
    for part, scores in (result.get("repaired") or {}).items():
        if part != "greedy_members":
            rows.append((f"{part}, repaired", *paper_cells(scores)))
    if result.get("paper"):
        rows.append((PAPER_ROW, *paper_cells(result["paper"])))
    parts = [
        table(("", *COLUMNS), rows),
        _details([result]),
        f'<p class="quiet">Greedy soup: members {html.escape(str(result["greedy_members"]))}.</p>',
        _sick(result),
        *_curves(events),
        _policies(result),
        _folded("Configuration", result["config"]),
        _folded("Environment", {"seconds": result["seconds"], **result["environment"]}),
    ]
    return _page(title, parts)


def compare_page(results: Sequence[Mapping[str, Any]]) -> str:
    """The page that puts methods side by side: means over seeds, then every single run."""
    title = f"{results[0]['recipe']}: {len(results)} runs compared"
    singles = [(f"{result['method']}, seed {result['seed']}", *cells_of(scores_of(result))) for result in results]
    parts = [
        table(("method", *COLUMNS), [*compare_rows(results), *paper_rows(results)]),
        _details(results),
        "<h2>Every run</h2>",
        table(("run", *COLUMNS), singles),
        _folded("Configuration of the first run", results[0]["config"]),
        _folded("Environment of the first run", results[0]["environment"]),
    ]
    return _page(title, parts)


def _curves(events: list[Mapping[str, Any]]) -> list[str]:
    epochs = [event for event in events if event["event"] == "epoch"]
    averagings = [event for event in events if event["event"] == "average" and event.get("distance_before")]
    if not epochs:
        return []
    members = range(len(epochs[0]["losses"]))

    def by_member(values: str) -> dict[str, list[tuple[float, float]]]:
        return {f"member {j}": [(event["epoch"], event[values][j]) for event in epochs] for j in members}

    accuracy = by_member("validation")
    accuracy["ensemble"] = [(event["epoch"], event["validation_ensemble"]) for event in epochs]
    distances = {
        "before": [(event["step"], event["distance_before"]) for event in averagings],
        "after": [(event["step"], event["distance_after"]) for event in averagings],
    }
    return [
        "<h2>While it trained</h2>",
        line_chart("Score on the validation data", accuracy, x_label="epoch", y_label="score"),
        line_chart("Training loss", by_member("losses"), x_label="epoch", y_label="loss"),
        line_chart("Distance of members to the mean", by_member("distances"), x_label="epoch", y_label="distance"),
        line_chart("Mean distance around each averaging", distances, x_label="step", y_label="distance"),
    ]


def _sick(result: Mapping[str, Any]) -> str:
    if not result.get("sick"):
        return ""
    names = ("step", "member", "reason", "action")
    rows = [tuple(str(event.get(name)) for name in names) for event in result["sick"]]
    return "<h2>Sick members</h2>" + table(names, rows)


def _details(results: Sequence[Mapping[str, Any]]) -> str:
    head, rows = details_table(results)
    return table(head, rows) if rows else ""


def _policies(result: Mapping[str, Any]) -> str:
    if not result.get("policies"):
        return ""
    names = list(result["policies"][0])
    rows = [(str(member), *(str(policy[name]) for name in names)) for member, policy in enumerate(result["policies"])]
    return "<h2>What each member drew</h2>" + table(("member", *names), rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """An HTML table; every cell is escaped."""
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'


def _folded(title: str, value: Any) -> str:
    text = html.escape(json.dumps(value, indent=2))
    return f"<h2>{title}</h2><details><summary>show</summary><pre>{text}</pre></details>"


def _page(title: str, parts: Iterable[str]) -> str:
    escaped = html.escape(title)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped}</title><style>{STYLE}</style></head><body><main><h1>{escaped}</h1>"
        f"{''.join(parts)}</main></body></html>\n"
    )
