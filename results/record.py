"""Records: the scores and options of runs, small enough to commit and without names of the machine.

Those of a study are one file, `records/STUDY.jsonl`, one run a line: `run` is the directory of the run below `runs/`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from papa.cli.compare import CompareOptions, jobs_of
from papa.errors import RunError
from papa.lab.config import Config, flat, idle_options
from papa.lab.recipes import find
from papa.lab.runs import Run
from papa.storage import file_errors, json_text, write_atomically

FOLDER = Path(__file__).parent / "records"
OTHERS = ("strength", "text-pushes")
"""Files there whose records are not those of runs: `results/strength.py` and `results/text_pushes.py` read them."""
LEFT_OUT = (
    "network",
    "paper",
    "paper_soups",
    "paper_details",
    "repair",
    "communication",
    "greedy_trials",
    "failed_checkpoints",
)
"""The keys of `result.json` that a record does not have."""
ENVIRONMENT = ("papa", "torch", "python", "system", "processors", "threads", "device", "workers")
"""The keys of its environment; neither the command, which names directories, nor the time."""
OF_THE_MACHINE = ("device", "data.root", "model.weights")
"""Options that depend on the machine."""
DIGITS = 6
MAX_EPOCHS = 20
"""The largest number of epochs in a record; of a longer run every second, third, ... epoch is kept, and the last."""

Record: TypeAlias = Mapping[str, Any]


@cache
def runs_of(command: str) -> Mapping[str, Config]:
    """The runs of a command: the name of each record, which is its directory below runs/, and its config.

    The command's own parser is not used: it takes a tenth of a second.

    Example:
        >>> runs = runs_of("papa compare digits --methods papa --seeds 1,2 --out runs/small")
        >>> list(runs)
        ['small/papa-seed1', 'small/papa-seed2']
    """
    papa, kind, recipe, *words = shlex.split(command)
    if (papa, kind) != ("papa", "compare"):
        raise RunError(f"a study has '{command}', expected a command that begins with papa compare")
    given: dict[str, Any] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            group, dot, name = word[2:].replace("-", "_").partition(".")
            value = True if following.startswith("--") else _value(following)
            given.setdefault(group, {}).update({name: value}) if dot else given.update({group: value})
    if not str(out := given.pop("out", "")).startswith("runs/"):
        raise RunError(f"a study has '{command}', expected an --out below runs/")
    own: dict[str, Any] = {name: str(given.pop(name)) for name in ("methods", "seeds") if name in given}
    given.pop("parallel", None)
    base = find(recipe).config(given.pop("budget", None))
    base = replace(base, method=str(own.get("methods", CompareOptions.methods)).split(",")[0])
    coupling = given.pop("coupling", {})
    options = CompareOptions(config=Config.from_json(given, base=base), coupling=coupling, **own)
    return {str(Path(*path.parts[1:])): config for config, path in jobs_of(options, Path(out))}


def _value(text: str) -> Any:
    try:
        return None if text == "None" else json.loads(text)
    except ValueError:
        return text


def record_of(run: Run, config: Config) -> dict[str, Any]:
    """The record of a finished run, or a `RunError` if the options of the run differ from its command."""
    result = run.result
    check_config(result["config"], config, str(run.path))
    kept = {name: value for name, value in result.items() if name not in LEFT_OUT and value is not None}
    kept["environment"] = {name: result["environment"].get(name) for name in ENVIRONMENT}
    epochs = [event for event in run.events if event["event"] == "epoch"]
    every = max(1, -(-len(epochs) // MAX_EPOCHS))
    kept["epochs"] = [
        {
            **{name: event[name] for name in ("epoch", "step")},
            **{name: _mean(event[key]) for name, key in (("loss", "losses"), ("validation", "validation"))},
            "soup": event.get("validation_average_soup"),
            "distance": _mean(event["distances"]),
        }
        for event in epochs[::-1][::every][::-1]
    ]
    rounded: dict[str, Any] = _rounded(kept)
    data, model = ({**result["config"][part]} for part in ("data", "model"))
    data["root"], model["weights"] = config.data.root, config.model.weights  # as in the command
    return {**rounded, "config": {**result["config"], "data": data, "model": model}}


def check_config(found: Any, config: Config, where: str) -> None:
    """Raise a `RunError` if a run was made with other options than its command has now.

    Options that are newer than the run, or that its method does not use, are not compared.
    """
    unused = {*OF_THE_MACHINE, *idle_options(config.method)}
    unused |= {"average.align_every_epochs"} if config.average.align == "none" else set()
    unused |= {"average.mutation_every_epochs"} if not config.average.mutation else set()
    expected = dict(flat(json.loads(json_text(config.to_json()))))
    different = [
        f"{name} is {value!r}, its command says {expected[name]!r}"
        for name, value in flat(found)
        if name in expected and name not in unused and value != expected[name]
    ]
    if different:
        raise RunError(
            f"{where} differs from its command: {'; '.join(different)}. Run the command again, or correct it in "
            "results/pages/"
        )


def write_records(study: str, records: Mapping[str, Record], folder: Path = FOLDER) -> None:
    """Add the records of a study to its file, one run a line, in the order of their names."""
    path = folder / f"{study}.jsonl"
    found = {**read_file(path), **{name: {"run": name, **record} for name, record in records.items()}}
    lines = [json.dumps(found[name], separators=(",", ":"), ensure_ascii=False) for name in sorted(found)]
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(f"{line}\n" for line in lines))


def read_file(path: Path) -> dict[str, dict[str, Any]]:
    """The records in a file, by the name of their run; none if there is no such file."""
    if not path.exists():
        return {}
    with file_errors(path, kind="a file with one record a line"):
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return {record["run"]: record for record in records}


def _mean(values: Sequence[float | None]) -> float | None:
    finite = [value for value in values if value is not None]
    return sum(finite) / len(finite) if finite else None


def _rounded(value: Any) -> Any:
    """Numbers rounded to the significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {name: _rounded(part) for name, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list) else value
