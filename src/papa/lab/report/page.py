"""Reports as self-contained pages, rendered from templates that escape everything."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from papa._version import __version__
from papa.lab.config import METHODS, NEVER_AVERAGED, flat
from papa.lab.report.conclusion import conclusion
from papa.lab.report.draw import DARK, FONTS, LIGHT, SVG_STYLE, Chart, evenly_spaced, svg
from papa.lab.report.figures import compare_figures, run_figures
from papa.lab.report.metric import metric_of
from papa.lab.report.table import (
    COLUMNS,
    KEYS,
    NOT_FINISHED,
    REMARKS,
    Table,
    cells_of,
    compare_table,
    data_of,
    details_table,
    run_rows,
    runs_by_setting,
    scores_of,
)
from papa.lab.report.words import printable, text, verdict_text
from papa.packages import require

if TYPE_CHECKING:
    from jinja2 import Environment

GENERATOR = '<meta name="generator" content="papa'
"""The mark of a page that papa wrote, and may replace."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
MAX_ROWS, MAX_NUMBERS, MAX_WARNINGS = 1000, 100, 20


def run_page(result: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> str:
    """The page of one run, without the parts that its result lacks; without scores it says that it is not finished."""
    members = len(scores_of(result).get("members", ())) or result["config"].get("members")
    counted = f", {members} members" if members else ""
    seconds = result.get("seconds") or {}
    total = sum(seconds.values()) or math.inf
    shares = [(name, f"{value:.2f}", f"{100 * value / total:.1f}%") for name, value in seconds.items()]
    return _rendered(
        "run.html.j2",
        title=f"{text(result['recipe'])}: {text(result['method'])}{counted}, seed {result['seed']}",
        summary=" ".join(filter(None, [verdict_text(result), conclusion([result])])),
        words=_about(result),
        notes=_notes(result, events),
        tiles=_tiles(result),
        scores=(("data", *COLUMNS), run_rows(result)),
        details=details_table([result]),
        charts=_drawn(run_figures(result, events)),
        greedy_members=", ".join(map(str, result.get("greedy_members") or ())),
        greedy_trials=_greedy_trials(result),
        policies=_policies(result),
        seconds=(("part", "seconds", "share"), shares),
        averagings=result.get("num_averagings"),
        communication=result.get("communication") or {},
        **_provenance(result),
    )


def compare_page(results: Sequence[Mapping[str, Any]], metrics: Sequence[Sequence[Mapping[str, Any]]] = ()) -> str:
    """The page that compares methods: means over seeds, curves if there are metrics, and every single run."""
    recipes = list(dict.fromkeys(text(result["recipe"]) for result in results))
    seeds = list(dict.fromkeys(str(result["seed"]) for result in results))
    unfinished = [_name(result) for result in results if not scores_of(result)]
    notes = [f"Not finished, and therefore without scores: {'; '.join(unfinished)}."] if unfinished else []
    if " or " in data_of(results):
        notes.append("Runs without test data are scored on validation data: do not compare them with the others.")
    words = (
        f"{_counted(len(runs_by_setting(results)), 'way')} to train a population, "
        f"seed{'s' * (len(seeds) != 1)} {', '.join(seeds)}; scores on {data_of(results)} data."
    )
    return _rendered(
        "compare.html.j2",
        title=f"{', '.join(recipes)}: {_counted(len(results), 'run')} compared",
        summary=conclusion(results),
        words=words,
        notes=notes,
        charts=_drawn(compare_figures(results, metrics)),
        scores=compare_table(results),
        has_independent=any(result["method"] == "independent" for result in results),
        has_paper=any(result.get("paper") for result in results),
        details=details_table(results),
        runs=(("run", *COLUMNS, "seconds"), [_single(result) for result in results]),
        **_provenance(results[0] if results else {}),
    )


def table_page(
    title: str,
    words: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    runs: Sequence[tuple[str, str]],
    results: Sequence[Mapping[str, Any]] = (),
    metrics: Sequence[Sequence[Mapping[str, Any]]] = (),
) -> str:
    """The page of a table of the paper: its numbers and ours, and the name and directory of each run.

    For a figure of the paper, it is drawn from the results and metrics of the runs.
    """
    charts = _drawn(compare_figures(results, metrics))
    return _rendered(
        "table.html.j2", title=title, words=words, charts=charts, scores=(head, rows), runs=(("row", "directory"), runs)
    )


@cache
def _environment() -> Environment:
    require("jinja2")
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("papa.lab.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals |= {"light": LIGHT, "dark": DARK, "fonts": FONTS, "svg_style": SVG_STYLE, "policy": POLICY}
    environment.globals |= {"version": __version__}
    return environment


def _rendered(template: str, **values: Any) -> str:
    return printable(_environment().get_template(template).render(values))


def _drawn(sections: Mapping[str, Sequence[Chart]]) -> dict[str, list[dict[str, Any]]]:
    """The figures of each section as templates show them."""

    def drawn(chart: Chart) -> dict[str, Any]:
        head, rows = chart.numbers
        shown = evenly_spaced(rows, MAX_NUMBERS)
        return {"chart": chart, "svg": svg(chart), "table": (head, shown), "is_thinned": len(shown) < len(rows)}

    return {name: [drawn(chart) for chart in charts] for name, charts in sections.items()}


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}{'s' * (count != 1)}"


def _name(result: Mapping[str, Any]) -> str:
    return f"{text(result['method'])}, seed {result['seed']}"


def _single(result: Mapping[str, Any]) -> tuple[str, ...]:
    cells = cells_of(scores_of(result), metric_of([result]).digits) if scores_of(result) else NOT_FINISHED
    seconds = result.get("seconds")
    return (_name(result), *cells, f"{sum(seconds.values()):.1f}" if seconds else "")


def _about(result: Mapping[str, Any]) -> str:
    options, method = dict(flat(result["config"])), METHODS.get(result["method"])
    model, data = text(options.get("model.name")), text(options.get("data.name"))
    finished = text((result.get("environment") or {}).get("finished"))
    sentences = [f"Method: {method}." if method else "", f"{model} on {data}." if model and data else ""]
    return " ".join(filter(None, [*sentences, f"Finished {finished}." if finished else ""]))


def _notes(result: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is missing, and what went wrong during the run."""
    found = []
    epochs = [event for event in events if event["event"] == "epoch"]
    if not scores_of(result):
        total = (result["config"].get("train") or {}).get("epochs")
        done = max((event["epoch"] for event in epochs if "epoch" in event), default=None)
        words = "none" if done is None else f"{done:.0f}"
        found.append(f"This run is not finished: {words}{f' of {total}' if total else ''} epochs are done.")
    for event in [*(result.get("nonfinite") or ()), *(event for event in events if event["event"] == "nonfinite")]:
        step, member, reason, action = (text(event.get(key)) for key in ("step", "member", "reason", "action"))
        found.append(f"Step {step}: member {member} became non-finite ({reason}); {action}.")
    for event in events:
        if event["event"] == "checkpoint-failed":
            found.append(f"Step {text(event.get('step'))}: writing a checkpoint failed: {text(event.get('error'))}.")
    if result.get("num_averagings") == 0 and result["method"] not in NEVER_AVERAGED:
        found.append("Training ended before the first averaging: these members were never averaged.")
    return list(dict.fromkeys(found))[:MAX_WARNINGS]


def _tiles(result: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Name, value and remark of the numbers at the top."""
    scores, data, papers = scores_of(result), data_of([result]), result.get("paper") or {}
    tiles = []
    for key in ("average_soup", "greedy_soup", "mean", "ensemble"):
        if (value := scores.get(key)) is not None:
            paper = papers.get(key) if data == "test" else None
            remark = "" if paper is None else f"; paper, full setting: {paper:.2f}"
            tiles.append((f"{KEYS[key]}, {data}", metric_of([result]).text(value), REMARKS[key] + remark))
    return tiles


def _greedy_trials(result: Mapping[str, Any]) -> Table:
    """The steps of the greedy soup."""
    metric = metric_of([result])
    rows = [
        (f"+ member {trial['members'][-1]}", metric.text(trial["score"]), "kept" if trial["kept"] else "left out")
        for trial in result.get("greedy_trials") or ()
        if trial["members"] and trial["score"] is not None
    ]
    return ("step", f"{metric.name} on validation data", ""), rows[:MAX_ROWS]


def _policies(result: Mapping[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    policies = result.get("policies") or []
    rows = [
        (f"member {member}", *(text(value) or "none" for value in policy.values()))
        for member, policy in enumerate(policies[:MAX_ROWS])
        if policy
    ]
    return ("", *(policies[0] if policies else ())), rows


def _provenance(result: Mapping[str, Any]) -> dict[str, Any]:
    """Command, configuration and environment of a run."""
    config, environment = (
        [(key, text(value) or "none") for key, value in flat(result.get(name) or {}) if key != "command"][:MAX_ROWS]
        for name in ("config", "environment")
    )
    command = text((result.get("environment") or {}).get("command"))
    return {"command": command, "config": config, "environment": environment}
