"""Reports as one self-contained page each: no outside request, light and dark, everything escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from papa.lab.config import METHODS
from papa.lab.report import markup
from papa.lab.report.fields import entries, number, numbers, part, plain, text
from papa.lab.report.figures import compare_figures, run_figures
from papa.lab.report.gap import with_gap_closed
from papa.lab.report.groups import groups_of
from papa.lab.report.table import (
    COLUMNS,
    KEYS,
    NOT_FINISHED,
    REMARKS,
    cells_of,
    compare_rows_with_paper,
    details_table,
    paper_rows,
    run_rows,
    scores_of,
)


def run_page(result: Mapping[str, Any], metrics: Iterable[Mapping[str, Any]]) -> str:
    """The page of one run; whatever is not there, or not what it should be, is left out.

    Args:
        result: what `result.json` holds; without scores, the page says that the run has not finished.
        metrics: what `metrics.jsonl` holds.
    """
    events = [event for event in metrics if isinstance(event, Mapping)]
    figures = run_figures(result, events)
    members = len(numbers(scores_of(result).get("members"))) or number(part(result, "config", "members"))
    title = ", ".join(
        [
            f"{text(result.get('recipe')) or 'a run'}: {text(result.get('method'))}",
            *([f"{plain(members)} members"] if members else []),
            f"seed {text(result.get('seed'))}",
        ]
    )
    rows = run_rows(result)
    parts = [
        _what(result),
        *map(markup.note, [*_unfinished(result, events), *_warnings(result, events)]),
        _headline(result),
        markup.section(
            "Results", markup.table(("data", *COLUMNS), rows, stacks=True) if rows else "", _details([result])
        ),
        markup.section("While it trained", markup.figures_markup(figures["training"])),
        markup.section("What merging did", markup.figures_markup(figures["merges"])),
        markup.section("Greedy soup", _greedy_words(result), markup.figures_markup(figures["greedy"])),
        markup.section("What each member drew", _policies(result)),
        markup.section("How alike members are", markup.figures_markup(figures["similarity"])),
        markup.section("Between two members", markup.figures_markup(figures["interpolation"])),
        markup.section("Time and communication", _time(result), markup.figures_markup(figures["communication"])),
        *_provenance(result),
    ]
    return markup.page(title, parts)


def table_page(
    title: str,
    words: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    runs: Sequence[tuple[str, str]],
    results: Sequence[Mapping[str, Any]] = (),
    metrics: Sequence[Sequence[Mapping[str, Any]]] = (),
) -> str:
    """The page of a table of the paper: its numbers beside ours, and where the runs behind them are.

    Args:
        title: what the table shows.
        words: in which setting ours were made.
        head: the names of the columns.
        rows: the cells.
        runs: each row's name and the directory of a run behind it.
        results: for a figure of the paper, what each run's `result.json` holds.
        metrics: and what its `metrics.jsonl` holds, of which the figure is drawn.
    """
    parts = [
        markup.paragraph(words),
        markup.section("While they trained", markup.figures_markup(compare_figures(results, metrics)["curves"])),
        markup.section("The paper's numbers and ours", markup.table(head, rows, stacks=True)),
        markup.section("Runs", markup.table(("row", "directory"), runs, wrap_last=True) if runs else ""),
    ]
    return markup.page(title, parts)


def compare_page(results: Sequence[Mapping[str, Any]], metrics: Sequence[Sequence[Mapping[str, Any]]] = ()) -> str:
    """The page that puts methods side by side: means over seeds, then every single run.

    Args:
        results: what each run's `result.json` holds.
        metrics: what each run's `metrics.jsonl` holds, for curves over epochs.
    """
    recipes = list(dict.fromkeys(text(result.get("recipe")) for result in results))
    figures = compare_figures(results, metrics)
    first = results[0] if results else {}
    seeds = list(dict.fromkeys(text(result.get("seed")) for result in results))
    unfinished = [_name(result) for result in results if not scores_of(result)]
    data = list(dict.fromkeys(_data(result) for result in results if scores_of(result)))
    parts = [
        markup.paragraph(
            f"{_counted(len(groups_of(results)), 'way')} to train a population, "
            f"seed{'s' * (len(seeds) != 1)} {', '.join(seeds)}; scores on the "
            f"{' or '.join(data) or 'test'} data. "
            "Cells are the mean over seeds, with the standard deviation in parentheses where there are several."
        ),
        markup.note(f"Not finished, and so without scores: {'; '.join(unfinished)}.") if unfinished else "",
        markup.note("Runs without test data are scored on validation data, and are not to be compared with the others.")
        if len(data) > 1
        else "",
        markup.section(
            "Side by side",
            markup.table(*with_gap_closed(results, compare_rows_with_paper(results)), stacks=True),
            _gap_words(results),
            _paper_words(results),
            _details(results),
        ),
        markup.section(
            "Scores",
            markup.paragraph("Values far from all others stand at the edge, written out.") if figures["scores"] else "",
            markup.figures_markup(figures["scores"]),
        ),
        markup.section("While they trained", markup.figures_markup(figures["curves"])),
        markup.section("Every run", markup.table(("run", *COLUMNS, "seconds"), map(_single, results), stacks=True)),
        *_provenance(first, of=" of the first run"),
    ]
    return markup.page(f"{', '.join(recipes)}: {_counted(len(results), 'run')} compared", parts)


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"


def _details(results: Sequence[Mapping[str, Any]]) -> str:
    head, rows = details_table(results)
    return markup.table(head, rows, stacks=True) if rows else ""


def _data(result: Mapping[str, Any]) -> str:
    """Which data `scores_of` tells of."""
    return "test" if isinstance(result.get("test"), Mapping) else "validation"


def _name(result: Mapping[str, Any]) -> str:
    return f"{text(result.get('method'))}, seed {text(result.get('seed'))}"


def _single(result: Mapping[str, Any]) -> tuple[str, ...]:
    seconds = [value for entry in _seconds(result).values() if (value := number(entry)) is not None]
    cells = cells_of(scores_of(result)) if scores_of(result) else NOT_FINISHED
    return (_name(result), *cells, f"{sum(seconds):.1f}" if seconds else "")


def _what(result: Mapping[str, Any]) -> str:
    method, data = METHODS.get(text(result.get("method"))), text(part(result, "config", "data", "name"))
    model = text(part(result, "config", "model", "name"))
    said = [f"Method: {method}." if method else "", f"{model} on {data}." if model and data else ""]
    finished = text(part(result, "environment", "finished"))
    return markup.paragraph(" ".join([*filter(None, said), f"Finished {finished}." if finished else ""]).strip())


def _unfinished(result: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> list[str]:
    if scores_of(result):
        return []
    told = [number(event.get("epoch")) for event in events if event.get("event") == "epoch"]
    epochs = [epoch for epoch in told if epoch is not None]
    asked = number(part(result, "config", "train", "epochs"))
    done = f"{max(epochs):.0f}" if epochs else "none"
    return [f"This run has not finished: {done}{f' of {asked:.0f}' if asked else ''} epochs are done."]


def _warnings(result: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> list[str]:
    """What went wrong on the way."""
    said = []
    for event in [*entries(result.get("nonfinite")), *(event for event in events if event.get("event") == "nonfinite")]:
        step, reason, action = (text(event.get(key)) for key in ("step", "reason", "action"))
        said.append(f"Step {step}: member {text(event.get('member'))} fell sick ({reason}); {action}.")
    for event in events:
        if event.get("event") == "checkpoint-failed":
            said.append(f"Step {text(event.get('step'))}: no checkpoint could be written: {text(event.get('error'))}.")
    if number(result.get("num_averagings")) == 0 and result.get("method") != "independent":
        said.append("Training was over before averaging was due: these members were never averaged.")
    return list(dict.fromkeys(said))[:20]


def _headline(result: Mapping[str, Any]) -> str:
    scores = scores_of(result)
    data = _data(result)
    found = []
    for key in ("average_soup", "greedy_soup", "mean", "ensemble"):
        value, paper = number(scores.get(key)), number(part(result, "paper", key))
        if value is not None:
            beside = f"; paper, full setting: {paper:.2f}" if paper is not None and data == "test" else ""
            found.append((f"{KEYS[key]}, {data}", f"{value:.2f}", REMARKS[key] + beside))
    return markup.tiles(found)


def _greedy_words(result: Mapping[str, Any]) -> str:
    members = [f"{member:.0f}" for member in numbers(result.get("greedy_members")) if member is not None]
    return markup.paragraph(f"Members in it: {', '.join(members)}.") if members else ""


def _policies(result: Mapping[str, Any]) -> str:
    policies = entries(result.get("policies"))
    names = list(dict.fromkeys(name for policy in policies for name in policy))
    rows = [
        (f"member {member}", *(text(policy.get(name)) or "none" for name in names))
        for member, policy in enumerate(policies)
    ]
    return markup.table(("", *names), rows[:1000], stacks=True) if names else ""


def _seconds(result: Mapping[str, Any]) -> Mapping[str, Any]:
    seconds = result.get("seconds")
    return seconds if isinstance(seconds, Mapping) else {}


def _time(result: Mapping[str, Any]) -> str:
    seconds = {str(name): value for name, entry in _seconds(result).items() if (value := number(entry)) is not None}
    total = sum(seconds.values())
    rows = [
        (name, f"{value:.2f}", f"{100 * value / total:.1f}%" if total > 0 else "") for name, value in seconds.items()
    ]
    said = markup.table(("what", "seconds", "share"), rows) if rows else ""
    size, spent = (number(part(result, "communication", key)) for key in ("bytes", "seconds"))
    averagings = number(result.get("num_averagings"))
    words = [f"{averagings:.0f} averagings." if averagings is not None else ""]
    words += [f"{_size(size)} communicated." if size is not None else ""]
    words += [f"{spent:.2f} seconds spent averaging." if spent is not None else ""]
    return said + (markup.paragraph(" ".join(filter(None, words))) if any(words) else "")


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


def _gap_words(results: Sequence[Mapping[str, Any]]) -> str:
    if not any(result.get("method") == "independent" for result in results):
        return ""
    return markup.paragraph(
        "Gap closed: where the average soup stands between the mean of independent members (0%) and their ensemble "
        "(100%), from means over seeds; empty where the ensemble is no better than its members."
    )


def _paper_words(results: Sequence[Mapping[str, Any]]) -> str:
    if not paper_rows(results):
        return ""
    return markup.paragraph("The paper's numbers are for its full setting; these runs may have a smaller budget.")


def _provenance(result: Mapping[str, Any], of: str = "") -> list[str]:
    command = text(part(result, "environment", "command"))
    environment = result.get("environment")
    rest = {k: v for k, v in environment.items() if k != "command"} if isinstance(environment, Mapping) else {}
    return [
        markup.section(f"Command{of}", markup.preformatted(command) if command else ""),
        markup.section(f"Configuration{of}", markup.folded("every option", result.get("config"))),
        markup.section(f"Environment{of}", markup.folded("versions and machine", rest)),
    ]
