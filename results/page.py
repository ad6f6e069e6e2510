"""Pages of results: templates with words and commands, filled with tables and numbers from records.

`pages/RESULTS.md` becomes `RESULTS.md`, the others pages of `docs/results/`. A template has these marks:

- `{study NAME}` below a heading: a study begins, whose records are `records/NAME.jsonl`.
- A heading `###`, the commands of a table in a block, and `{table NAME}`: the table of their runs, a function of
  `results`. Between them `{with main/cifar10-vgg11}`: the runs of the command with that `--out` are shown first.
- `{main/cifar10-vgg11/papa average_soup}`: the mean over seeds of a test score.
- `{controls NAME}`, `{claims}`, `{hours}`: the controls of a study, the claims in brief, the time of all runs.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from papa.cli.options import take_budget
from papa.core.rules import Push
from papa.errors import RunError
from papa.lab.report.draw import Chart
from papa.lab.report.figures import members_to_soup
from papa.lab.report.metric import metric_of
from papa.lab.result import checked_result
from results import couplings, evidence, tables
from results.record import FOLDER, OTHERS, Record, check_config, read_file, runs_of

PAGES = Path(__file__).parent / "pages"
STUDY = re.compile(r"^## (?P<title>.+)\n\{study (?P<name>[\w-]+)\}$", re.MULTILINE)
TABLE = re.compile(
    r"^### (?P<title>.+)\n\n(?:```console\n(?P<commands>(?:papa .+\n)+)```\n\n)?(?P<others>(?:\{with .+\}\n\n)*)"
    r"\{table (?P<render>[\w-]+)\}$",
    re.MULTILINE,
)
NUMBER = re.compile(r"\{([\w./-]+)\s+([\w.]+)\}")
BLOCK = re.compile(r"(<!-- results -->\n).*?(<!-- end of results -->\n)", re.DOTALL)
HEADLINE = "CIFAR-10, VGG-11", "small/cifar10-2k", "small/cifar10-2k-longer"
"""The title of the README's table, where its populations are, and where one network trained longer is."""
PICTURES: dict[str, tuple[str, Callable[[Sequence[Record]], Chart]]] = {
    "where-it-pays": ("pays", evidence.picture_of_gains),
    "couplings": ("couplings", couplings.picture),
}
"""Figures in `docs/assets/`: the study whose last table has their runs, and how they are drawn."""
MAX_VALUES = 5
"""The number of values of one option that are listed."""


def render_of(name: str) -> Callable[[Sequence[Record]], str]:
    """The function that makes a table."""
    for module in (tables, evidence, couplings):
        if found := getattr(module, name.replace("-", "_"), None):
            render: Callable[[Sequence[Record]], str] = found
            return render
    raise RunError(f"a page in results/pages/ has {{table {name}}}, and there is no function of that name: correct it")


@dataclass(frozen=True)
class Table:
    """A table of a study: its title, its commands, and what is shown before their runs."""

    study: str
    title: str
    commands: tuple[str, ...]
    others: tuple[str, ...]
    """The `--out` of commands of other tables."""


class Results:
    """The studies of the pages in a folder, and their records."""

    def __init__(self, pages: Path = PAGES, records: Path = FOLDER) -> None:
        self.pages = {path.stem: path.read_text(encoding="utf-8") for path in sorted(pages.glob("*.md"))}
        self.folder = records
        self.studies: dict[str, list[Table]] = {}
        self.titles: dict[str, str] = {}
        for text in self.pages.values():
            found = list(STUDY.finditer(text))
            for study, following in zip(found, [*found[1:], None], strict=False):
                part = text[study.end() : None if following is None else following.start()]
                self.titles[study["name"]] = study["title"]
                self.studies[study["name"]] = [_table_of(match, study["name"]) for match in TABLE.finditer(part)]

    def commands(self, studies: Iterable[str] = ()) -> list[str]:
        """The commands of some studies, or of all."""
        return [
            command for name in studies or self.studies for table in self.studies[name] for command in table.commands
        ]

    @cached_property
    def records(self) -> dict[str, Record]:
        """All records of runs, by name, each checked against its command."""
        found: dict[str, Record] = {}
        for path in sorted(self.folder.glob("*.jsonl")):
            found |= {} if path.stem in OTHERS else read_file(path)
        expected = {name: config for command in self.commands() for name, config in runs_of(command).items()}
        if strays := [name for name in found if name not in expected]:
            raise RunError(f"no command of results/pages/ makes {', '.join(strays)}: remove these records")
        for name, record in found.items():
            check_config(record["config"], expected[name], f"the record {name}")
        return {name: {**checked_result(record), "run": name} for name, record in found.items()}

    def read(self, commands: Iterable[str]) -> list[Record]:
        """The existing records of the runs of some commands."""
        return [self.records[name] for command in commands for name in runs_of(command) if name in self.records]

    def runs_of(self, study: str, place: int = -1) -> list[Record]:
        """The runs of a table of a study, the last by default, since those before it are of trials."""
        if study not in self.studies:
            raise RunError(f"results/pages/ names the study {study}, and there is none of that name: correct the text")
        return self.read(self._shown(self.studies[study][place]))

    def page(self, name: str) -> str:
        """A page with everything filled in."""
        text = TABLE.sub(self._table_part, self.pages[name])
        text = re.sub(r"^\{controls ([\w-]+)\}$", self._controls, STUDY.sub(r"## \g<title>", text), flags=re.MULTILINE)
        if "{claims}" in text:
            text = text.replace("{claims}", evidence.claims_in_brief(self.runs_of("claims")))
        seconds = sum(sum(run["seconds"].values()) for run in self.records.values())
        text = text.replace("{hours}", f"{seconds / 3600:.0f}")
        return NUMBER.sub(lambda match: self._number(match, name), text)

    def _shown(self, table: Table) -> list[str]:
        """The commands of the runs that a table shows."""
        return [*(self._table_at(out)[1] for out in table.others), *table.commands]

    def _table_at(self, out: str) -> tuple[Table, str]:
        """The command that writes into a directory below runs/, and its table."""
        for table in (table for study in self.studies.values() for table in study):
            for command in table.commands:
                if command.endswith(f"--out runs/{out}"):
                    return table, command
        raise RunError(f"results/pages/ shows the runs in {out}, and no command has '--out runs/{out}': correct it")

    def _table_part(self, match: re.Match[str]) -> str:
        table = _table_of(match)
        parts = [f"### {table.title}"]
        if table.commands:
            parts.append("```console\n" + "\n".join(table.commands) + "\n```")
        for other in (self._table_at(out)[0] for out in table.others):
            parts.append(f"Also shown: the runs of *{self.titles[other.study]}*, {other.title}.")
        found = self.read(self._shown(table))
        if not (self.read(table.commands) if table.commands else found):
            return "\n\n".join([*parts, "Not run yet."])
        return "\n\n".join([*parts, _provenance(self._shown(table), found), render_of(match["render"])(found)])

    def _controls(self, match: re.Match[str]) -> str:
        found = self.runs_of(match[1])
        command = f"```console\npython -m results.make run DATA {match[1]}\n```"
        return "\n\n".join([command, evidence.controls(found, ["PAPA"]) if found else "Not run yet."])

    def _number(self, match: re.Match[str], page: str) -> str:
        soups, dot, key = match[2].rpartition(".")
        runs = [run for name, run in self.records.items() if name.startswith(f"{match[1]}-seed")]
        found = tables.text(runs, f"{soups}{dot}test.{key}", metric_of(runs).digits)
        if not found:
            raise RunError(f"{page}.md needs {match[0]}, of which there is no record: collect it, or change the text")
        return found

    def readme(self, readme: str) -> str:
        """The README with its block of results filled in; unchanged if there is no run of the main study.

        The block is between `<!-- results -->` and `<!-- end of results -->`.
        """
        title, *places = HEADLINE
        runs, longer = (self.read([self._table_at(place)[1]]) for place in places)
        if not runs:
            return readme
        if len(BLOCK.findall(readme)) != 1:
            raise RunError("README.md has no block <!-- results --> ... <!-- end of results -->, or several: keep one")
        train = runs[0]["config"]
        words = (
            f"{title} of width {train['model']['width']}, {train['data']['max_train']:,} images, "
            f"{train['train']['epochs']} epochs, {train['members']} members; seeds "
            f"{_listed(run['seed'] for run in runs)} (standard deviations)."
        )
        filled = f"{evidence.headline(runs, longer)}\n\n{textwrap.fill(words, 120)}\n"
        return BLOCK.sub(lambda match: f"{match[1]}{filled}{match[2]}", readme)

    def pictures(self) -> dict[str, Chart]:
        """The README's figure, and those of studies; of those that were run."""
        runs = self.read([self._table_at(HEADLINE[1])[1]])
        networks = _listed(run["config"]["members"] for run in runs)
        title = f"{HEADLINE[0]}: {networks} networks, {len({run['method'] for run in runs})} ways to train them"
        headline = members_to_soup(runs, title)
        found = {name: (self.runs_of(study), draw) for name, (study, draw) in PICTURES.items()}
        charts = {name: draw(runs) for name, (runs, draw) in found.items() if runs}
        return charts if headline is None else {"members-to-soup": headline, **charts}


def _table_of(match: re.Match[str], study: str = "") -> Table:
    commands, others = (match["commands"] or "").splitlines(), re.findall(r"\{with (.+)\}", match["others"])
    return Table(study, match["title"], tuple(commands), tuple(others))


def _provenance(commands: Sequence[str], records: Sequence[Record]) -> str:
    """Budget, seeds, versions, the number of missing runs, and the main options."""
    given = [budget for command in commands if (budget := take_budget(shlex.split(command))[0])]
    budget = f"Budget {_listed(given)}; seeds" if given else "Seeds"
    versions = "; ".join(
        f"{word} {_listed(record['environment'][key] for record in records)}"
        for word, key in (("papa", "papa"), ("PyTorch", "torch"), ("Python", "python"), ("device", "device"))
    )
    num_runs = len({name for command in commands for name in runs_of(command)})
    missing = num_runs - len(records)
    incomplete = f"; {missing} of {num_runs} runs are missing" if missing else ""
    found: dict[str, list[Any]] = {}
    for record in records:
        for word, one in _setting(record).items():
            if one is not None:
                found.setdefault(word, []).append(one)
    setting = "; ".join(f"{word} {_in_short(values)}" for word, values in found.items())
    seeds = _listed(record["seed"] for record in records)
    return f"{budget} {seeds}; {versions}{incomplete}.\n\nThe setting: {setting}."


def _setting(record: Record) -> Mapping[str, Any]:
    """The main options of a run: size and length of training, and how members are averaged."""
    config, steps = record["config"], record["epochs"][-1]["step"]
    data, train, average = config["data"], config["train"], config["average"]
    found = {"members": config["members"], "width": config["model"]["width"]}
    if data["max_train"] is not None:
        held_out = round(data["max_train"] * data["validation"])
        found |= {"training images": data["max_train"] - held_out, "validation images": held_out}
    found |= {"epochs": train["epochs"], "steps": steps, "batches of": train["batch_size"]}
    found |= {"precision": train["precision"], "learning rate": train["lr"]}
    if record["method"] == "papa" and average["half_life"] is not None:
        half_life = average["half_life"] * steps
        push = Push(half_life_steps=half_life, every_steps=average["every_steps"])
        found |= {"steps between pushes": average["every_steps"], "half-life of a push, in steps,": half_life}
        found |= {"its alpha": push.effective_alpha}
    if record["method"] in ("papa-all", "papa-2"):
        found["steps between merges"] = max(1, round(average["every_epochs"] * steps / train["epochs"]))
        found["batches for REPAIR"] = average["repair"]
    return found


def _in_short(values: Sequence[Any]) -> str:
    """The different values in their order; of many numbers the smallest and the largest."""
    found = list(dict.fromkeys(values))
    if len(found) > MAX_VALUES and not any(isinstance(one, str) for one in found):
        return f"{_formatted(min(found))} to {_formatted(max(found))}"
    return _listed(map(_formatted, found))


def _formatted(one: float | str) -> str:
    if isinstance(one, str):
        return one
    return f"{one:,}" if isinstance(one, int) else f"{one:.3g}"


def _listed(values: Any) -> str:
    return ", ".join(dict.fromkeys(str(one) for one in values))
