"""`RESULTS.md`, the pages of details, the README's first table and its figure, from records and prose."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from papa.cli.options import take_budget
from papa.core.rules import Push
from papa.errors import RunError
from papa.lab.report.draw import Chart
from papa.lab.report.figures import members_to_soup
from results import claims
from results.controls import controls
from results.record import FOLDER, all_records, read_records, runs_of
from results.studies import HEADLINE, PAGES, STUDIES
from results.study import Study, Table
from results.tables import headline, prose_number

PROSE = Path(__file__).parent / "prose"
NUMBER_IN_PROSE = re.compile(r"\{([\w./-]+)\s+([\w.]+)\}")
"""A number in prose: `{main/cifar10-vgg11/papa average_soup}`, the mean over the seeds of these runs."""
CLAIMS_IN_PROSE = "{claims}"
"""The table of the paper's claims."""
HOURS_IN_PROSE = "{hours}"
"""The time of all runs in hours."""
TABLE_IN_PROSE = re.compile(r"^\{controls ([\w-]+)\}$", re.MULTILINE)
"""A table in prose: `{controls cifar10-2k}`, the controls of that study below its command."""
MAX_VALUES = 5
"""The number of values of one option that are listed."""
BLOCK = re.compile(r"(<!-- results -->\n).*?(<!-- end of results -->\n)", re.DOTALL)


def results_page(records: Path = FOLDER, prose: Path = PROSE, studies: Sequence[Study] = STUDIES) -> str:
    """The whole of `RESULTS.md`: words, with the tables and numbers that they ask for."""
    return prose_of("opening", records, prose, studies) + "\n"


def detail_page(
    name: str, records: Path = FOLDER, prose: Path = PROSE, pages: Mapping[str, Sequence[Study]] = PAGES
) -> str:
    """A page of `docs/results/`: every study of it; a `RunError` if a record belongs to no command."""
    studies = [study for some in pages.values() for study in some]
    _check_all_belong(records, studies)
    parts = [prose_of(name, records, prose, studies)]
    for study in pages[name]:
        words = prose_of(study.name, records, prose, studies) if study.name != name else ""  # the page has them
        parts += [f"## {study.title}", *([words] if words else [])]
        parts += [_table_part(table, records, studies) for table in study.tables]
    return "\n\n".join(part for part in parts if part) + "\n"


def readme_with_headline(readme: str, records: Path = FOLDER) -> str:
    """The README with its block of results filled in; unchanged if there is no run of the main study.

    The block is between `<!-- results -->` and `<!-- end of results -->`.
    """
    title, command, longer_command = HEADLINE
    runs, longer = (list(read_records([one], records).values()) for one in (command, longer_command))
    if not runs:
        return readme
    if len(BLOCK.findall(readme)) != 1:
        raise RunError("README.md has no block <!-- results --> ... <!-- end of results -->, or several: keep one")
    filled = f"{headline(runs, longer)}\n\n{textwrap.fill(_headline_words(title, runs), 120)}\n"
    return BLOCK.sub(lambda match: f"{match[1]}{filled}{match[2]}", readme)


def _headline_words(title: str, runs: Sequence[Mapping[str, Any]]) -> str:
    train = runs[0]["config"]
    seeds = _listed(run["seed"] for run in runs)
    return (
        f"{title} of width {train['model']['width']}, {train['data']['max_train']:,} images, "
        f"{train['train']['epochs']} epochs, {train['members']} members; seeds {seeds} (standard deviations)."
    )


def headline_plot(records: Path = FOLDER) -> Chart:
    """The README's figure: from single networks to one, for the first data set of its table."""
    name, command, _ = HEADLINE
    runs = list(read_records([command], records).values())
    members = _listed(record["config"]["members"] for record in runs)
    methods = {run["method"] for run in runs}
    chart = members_to_soup(runs, f"{name}: {members} networks, {len(methods)} ways to train them")
    if chart is None:
        raise RunError(f"there is no record of the runs of '{command}': collect them first")
    return chart


def prose_of(name: str, records: Path = FOLDER, prose: Path = PROSE, studies: Sequence[Study] = STUDIES) -> str:
    """The text about a study, or the `opening`, with its numbers filled in; empty if there is none."""
    path = prose / f"{name}.md"
    if not path.exists():
        return ""
    commands = {command: runs_of(command) for study in studies for command in study.commands}

    def fill(match: re.Match[str]) -> str:
        pattern = f"{match[1]}-seed*"
        named = [command for command, runs in commands.items() if any(fnmatchcase(run, pattern) for run in runs)]
        runs = [record for run, record in read_records(named, records).items() if fnmatchcase(run, pattern)]
        number = prose_number(runs, match[2])
        if not number:
            raise RunError(f"{path.name} needs {match[0]}, of which there is no record: collect it, or change the text")
        return number

    def fill_table(match: re.Match[str]) -> str:
        study = next((study for study in studies if study.name == match[1]), None)
        if study is None:
            raise RunError(f"{path.name} needs {match[0]}, and there is no study of that name: correct the text")
        found = list(read_records(study.tables[-1].commands, records).values())
        command = f"```console\npython -m results.make run DATA {study.name}\n```"
        return "\n\n".join([command, controls(found, ["PAPA"]) if found else "Not run yet."])

    text = TABLE_IN_PROSE.sub(fill_table, path.read_text(encoding="utf-8").strip())
    if HOURS_IN_PROSE in text:
        text = text.replace(HOURS_IN_PROSE, f"{_hours(list(commands), records):.0f}")
    if CLAIMS_IN_PROSE in text:
        found = list(read_records(claims.STUDY.tables[-1].all_commands, records).values())
        text = text.replace(CLAIMS_IN_PROSE, claims.claims_in_brief(found) if found else "Not run yet.")
    return NUMBER_IN_PROSE.sub(fill, text)


def _hours(commands: Sequence[str], records: Path) -> float:
    """How long all runs took that have a record."""
    return sum(sum(record["seconds"].values()) for record in read_records(commands, records).values()) / 3600


def _table_part(table: Table, records: Path, studies: Sequence[Study]) -> str:
    found = read_records(table.all_commands, records)
    parts = [f"### {table.title}"]
    if table.commands:
        parts.append("```console\n" + "\n".join(table.commands) + "\n```")
    parts += [f"Also shown: the runs of {_named(command, studies)}." for command in table.shown_with]
    own = read_records(table.commands, records) if table.commands else found
    if not own:
        return "\n\n".join([*parts, "Not run yet."])
    return "\n\n".join([*parts, _provenance(table, found), table.render(list(found.values()))])


def _named(command: str, studies: Sequence[Study]) -> str:
    """The study and table that a command belongs to."""
    for study in studies:
        for table in study.tables:
            if command in table.commands:
                return f"*{study.title}*, {table.title}"
    raise RunError(f"no study makes the runs of '{command}': add it to results/studies.py")


def _provenance(table: Table, records: Mapping[str, Mapping[str, Any]]) -> str:
    """Budget, seeds, versions, and the number of missing runs."""
    expected = {name for command in table.all_commands for name in runs_of(command)}
    given = [budget for command in table.all_commands if (budget := take_budget(shlex.split(command))[0])]
    budget = f"Budget {_listed(given)}; seeds" if given else "Seeds"
    seeds = _listed(record["seed"] for record in records.values())
    environments = [record["environment"] for record in records.values()]
    versions = "; ".join(
        f"{word} {_listed(one[key] for one in environments)}"
        for word, key in (("papa", "papa"), ("PyTorch", "torch"), ("Python", "python"), ("device", "device"))
    )
    missing = len(expected) - len(records)
    incomplete = f"; {missing} of {len(expected)} runs are missing" if missing else ""
    setting = "; ".join(f"{word} {_in_short(found)}" for word, found in _setting(list(records.values())).items())
    return f"{budget} {seeds}; {versions}{incomplete}.\n\nThe setting: {setting}."


def _setting(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The main options of some runs: size and length of training, and how members are averaged."""
    found: dict[str, list[Any]] = {}

    def add(word: str, value: Any) -> None:
        if value is not None:
            found.setdefault(word, []).append(value)

    for record in records:
        config, steps = record["config"], record["epochs"][-1]["step"]
        data, train, average = config["data"], config["train"], config["average"]
        add("members", config["members"])
        add("width", config["model"]["width"])
        if data["max_train"] is not None:
            held_out = round(data["max_train"] * data["validation"])
            add("training images", data["max_train"] - held_out)
            add("validation images", held_out)
        add("epochs", train["epochs"])
        add("steps", steps)
        add("batches of", train["batch_size"])
        add("precision", train["precision"])
        add("learning rate", train["lr"])
        if record["method"] == "papa" and average["half_life"] is not None:
            half_life = average["half_life"] * steps
            push = Push(half_life_steps=half_life, every_steps=average["every_steps"])
            add("steps between pushes", average["every_steps"])
            add("half-life of a push, in steps,", half_life)
            add("its alpha", push.effective_alpha)
        if record["method"] in ("papa-all", "papa-2"):
            add("steps between merges", max(1, round(average["every_epochs"] * steps / train["epochs"])))
            add("batches for REPAIR", average["repair"])
    return found


def _in_short(values: Sequence[Any]) -> str:
    """The different values in their order; of many numbers the smallest and the largest."""
    found = list(dict.fromkeys(values))
    if len(found) > MAX_VALUES and not any(isinstance(value, str) for value in found):
        return f"{_formatted(min(found))} to {_formatted(max(found))}"
    return _listed(map(_formatted, found))


def _formatted(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def _listed(values: Any) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values))


def _check_all_belong(records: Path, studies: Sequence[Study]) -> None:
    expected = {name for study in studies for command in study.commands for name in runs_of(command)}
    strays = [name for name in all_records(records) if name not in expected]
    if strays:
        raise RunError(f"no command of results/studies.py makes {', '.join(strays)}: remove these records")
