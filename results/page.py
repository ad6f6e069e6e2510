"""`RESULTS.md` and the README's first table, from records and prose."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median
from typing import Any

from papa.cli.arguments import take_budget
from papa.errors import RunError
from papa.rules import Push
from results.record import FOLDER, names_of, read_records, runs_of
from results.studies import HEADLINE, STUDIES, Study, Table
from results.tables import headline, prose_number

PROSE = Path(__file__).parent / "prose"
NUMBER = re.compile(r"\{([\w./-]+)\s+([\w.]+)\}")
"""A number in prose: `{main/cifar10-vgg11/papa average_soup}`, the mean over the seeds of these runs."""
MOST_VALUES = 5
"""How many values of one setting are listed."""
BLOCK = re.compile(r"(<!-- results -->\n).*?(<!-- end of results -->\n)", re.DOTALL)


def results_page(records: Path = FOLDER, prose: Path = PROSE, studies: Sequence[Study] = STUDIES) -> str:
    """The whole of `RESULTS.md`.

    Args:
        records: where the records are; one that belongs to no command is a `RunError`.
        prose: where the words are.
        studies: what it shows.
    """
    _check_all_belong(records, studies)
    parts = [prose_of("opening", records, prose, studies)]
    for study in studies:
        words = prose_of(study.name, records, prose, studies)
        parts += [f"## {study.title}", *([words] if words else [])]
        parts += [_table_part(table, records, studies) for table in study.tables]
    return "\n\n".join(parts) + "\n"


def readme_with_headline(readme: str, records: Path = FOLDER) -> str:
    """The README with its block of results filled; as it is, where no run of the main study is there.

    Args:
        readme: its text, with a block between `<!-- results -->` and `<!-- end of results -->`.
        records: where the records are.
    """
    found = {name: list(read_records([command], records).values()) for name, command in HEADLINE.items()}
    found = {name: runs for name, runs in found.items() if runs}
    if not found:
        return readme
    if len(BLOCK.findall(readme)) != 1:
        raise RunError("README.md has no block <!-- results --> ... <!-- end of results -->, or several: keep one")
    words = _headline_words(found)
    filled = f"\n{headline(found)}\n\n{textwrap.fill(words, 120)}\n\n"
    return BLOCK.sub(lambda match: f"{match[1]}{filled}{match[2]}", readme)


def _headline_words(found: Mapping[str, list[dict[str, Any]]]) -> str:
    members = _listed(record["config"]["members"] for runs in found.values() for record in runs)
    minutes = _each(found, lambda runs: f"{median(sum(run['seconds'].values()) for run in runs) / 60:.0f}")
    seeds = _each(found, lambda runs: _listed(run["seed"] for run in runs))
    return (
        f"Small networks and a part of the training data: a population of {members} takes {minutes} minutes of one CPU "
        f"core. Accuracy in percent on the test set, seeds {seeds}, means with standard deviations in parentheses. "
        "*Gap closed* is where the average soup, one network, stands between the mean of independent members (0%) and "
        "their ensemble (100%). [RESULTS.md](RESULTS.md) has every run and its command."
    )


def _each(found: Mapping[str, list[dict[str, Any]]], tell: Callable[[list[dict[str, Any]]], str]) -> str:
    """Something about the runs on each data set; once, where it is the same on all."""
    told = {name: tell(runs) for name, runs in found.items()}
    if len(set(told.values())) == 1:
        return next(iter(told.values()))
    return " and ".join(f"{words} ({name})" for name, words in told.items())


def prose_of(name: str, records: Path = FOLDER, prose: Path = PROSE, studies: Sequence[Study] = STUDIES) -> str:
    """What is written about a study, its numbers filled in; nothing where nothing is.

    Args:
        name: the study's, or `opening`.
        records: where the numbers come from.
        prose: where the words are.
        studies: which runs there are.
    """
    path = prose / f"{name}.md"
    if not path.exists():
        return ""
    known = read_records([command for study in studies for command in study.commands], records)

    def fill(match: re.Match[str]) -> str:
        runs = [record for run, record in known.items() if fnmatchcase(run, f"{match[1]}-seed*")]
        number = prose_number(runs, match[2])
        if not number:
            raise RunError(f"{path.name} asks for {match[0]}, of which there is no record: collect it, or say less")
        return number

    return NUMBER.sub(fill, path.read_text(encoding="utf-8").strip())


def _table_part(table: Table, records: Path, studies: Sequence[Study]) -> str:
    found = read_records(table.all_commands, records)
    parts = [f"### {table.title}"]
    if table.commands:
        parts.append("```console\n" + "\n".join(table.commands) + "\n```")
    parts += [f"Beside them, the runs of {_named(command, studies)}." for command in table.beside]
    own = read_records(table.commands, records) if table.commands else found
    if not own:
        return "\n\n".join([*parts, "Not run yet."])
    return "\n\n".join([*parts, _provenance(table, found), table.render(list(found.values()))])


def _named(command: str, studies: Sequence[Study]) -> str:
    """Which study and table make a command's runs."""
    for study in studies:
        for table in study.tables:
            if command in table.commands:
                return f"*{study.title}*, {table.title}"
    raise RunError(f"no study makes the runs of '{command}': add it to results/studies.py")


def _provenance(table: Table, records: Mapping[str, Mapping[str, Any]]) -> str:
    """Budget, seeds, versions, and how many of the runs are there."""
    asked = {name for command in table.all_commands for name in runs_of(command)}
    budgets = _listed(take_budget(shlex.split(command))[0] for command in table.all_commands)
    seeds = _listed(record["seed"] for record in records.values())
    environments = [record["environment"] for record in records.values()]
    versions = "; ".join(
        f"{word} {_listed(one[key] for one in environments)}"
        for word, key in (("papa", "papa"), ("PyTorch", "torch"), ("Python", "python"), ("device", "device"))
    )
    missing = len(asked) - len(records)
    so_far = f"; {missing} of {len(asked)} runs are still to come" if missing else ""
    setting = "; ".join(f"{word} {_in_short(found)}" for word, found in _setting(list(records.values())).items())
    return f"Budget {budgets}; seeds {seeds}; {versions}{so_far}.\n\nThe setting: {setting}."


def _setting(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """What a reader needs to know of how large and how long these trainings are, and how members are averaged."""
    told: dict[str, list[Any]] = {}

    def tell(word: str, value: Any) -> None:
        if value is not None:
            told.setdefault(word, []).append(value)

    for record in records:
        config, steps = record["config"], record["epochs"][-1]["step"]
        data, train, average = config["data"], config["train"], config["average"]
        tell("members", config["members"])
        tell("width", config["model"]["width"])
        if data["max_train"] is not None:
            held_out = round(data["max_train"] * data["validation"])
            tell("training images", data["max_train"] - held_out)
            tell("validation images", held_out)
        tell("epochs", train["epochs"])
        tell("steps", steps)
        tell("batches of", train["batch_size"])
        tell("precision", train["precision"])
        tell("learning rate", train["lr"])
        if record["method"] == "papa" and average["half_life"] is not None:
            half_life = average["half_life"] * steps
            push = Push(half_life=half_life, every_steps=average["every_steps"])
            tell("steps between pushes", average["every_steps"])
            tell("half-life of a push, in steps,", half_life)
            tell("its alpha", push.effective_alpha)
        if record["method"] in ("papa-all", "papa-2"):
            tell("steps between merges", max(1, round(average["every_epochs"] * steps / train["epochs"])))
            tell("batches for REPAIR", average["repair"])
    return told


def _in_short(values: Sequence[Any]) -> str:
    """Different values in their order; of many numbers the least and the largest."""
    found = list(dict.fromkeys(values))
    if len(found) > MOST_VALUES and not any(isinstance(value, str) for value in found):
        return f"{_told(min(found))} to {_told(max(found))}"
    return _listed(map(_told, found))


def _told(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def _listed(values: Any) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values))


def _check_all_belong(records: Path, studies: Sequence[Study]) -> None:
    asked = {name for study in studies for command in study.commands for name in runs_of(command)}
    strays = [name for name in names_of(records) if name not in asked]
    if strays:
        raise RunError(f"no command of results/studies.py makes {', '.join(strays)}: remove these records")
