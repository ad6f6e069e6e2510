"""Records: the scores and options of a run, small enough to commit and without names of the machine."""

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
from papa.lab.result import checked_result
from papa.lab.runs import Run
from papa.storage import file_errors, json_text, write_atomically

FOLDER = Path(__file__).parent / "records"
OTHERS = ("strength", "text-pushes")
"""Files there whose records are not those of runs: `results/strength.py` and `results/text_pushes.py` read them."""
KEPT = (
    *("recipe", "method", "seed", "config", "test", "validation", "repaired", "aligned", "greedy_members"),
    *("best_soup", "trajectory", "similarity", "interpolation", "num_averagings", "nonfinite", "seconds", "policies"),
)
"""The keys of `result.json` that a record has."""
ENVIRONMENT = ("papa", "torch", "python", "system", "processors", "threads", "device", "workers")
"""The keys of its environment; neither the command, which names directories, nor the time."""
OF_THE_MACHINE = ("device", "data.root", "model.weights")
"""Options that depend on the machine."""
DIGITS = 6
MAX_EPOCHS = 20
"""The largest number of epochs in a record; of a longer run every second, third, ... epoch is kept, and the last."""


@cache
def runs_of(command: str) -> Mapping[str, Config]:
    """The runs of a command: the name of each record, which is its directory below runs/, and its config.

    Example:
        >>> runs = runs_of("papa compare digits --methods papa --seeds 1,2 --out runs/small")
        >>> list(runs)
        ['small/papa-seed1', 'small/papa-seed2']
    """
    papa, kind, recipe, *arguments = shlex.split(command)
    if (papa, kind) != ("papa", "compare"):
        raise RunError(f"a study has '{command}', expected a command that begins with papa compare")
    given = _given(arguments)
    if not str(out := given.pop("out", "")).startswith("runs/"):
        raise RunError(f"a study has '{command}', expected an --out below runs/")
    own: dict[str, Any] = {name: str(given.pop(name)) for name in ("methods", "seeds") if name in given}
    given.pop("parallel", None)
    base = find(recipe).config(given.pop("budget", None))
    base = replace(base, method=str(own.get("methods", CompareOptions.methods)).split(",")[0])
    nested = _nested(given)
    coupling = nested.pop("coupling", {})
    options = CompareOptions(config=Config.from_json(nested, base=base), coupling=coupling, **own)
    return {str(Path(*path.parts[1:])): config for config, path in jobs_of(options, Path(out))}


def _given(arguments: Sequence[str]) -> dict[str, Any]:
    """Options and values of a command, without the command's own parser: that takes a tenth of a second.

    Example:
        >>> _given(["--train.lr", "0.1", "--analysis", "--average.half-life", "0.5", "--seeds", "1,2"])
        {'train.lr': 0.1, 'analysis': True, 'average.half_life': 0.5, 'seeds': '1,2'}
    """
    found: dict[str, Any] = {}
    for place, word in enumerate(arguments):
        if word.startswith("--"):
            following = arguments[place + 1 : place + 2]
            has_value = following and not following[0].startswith("--")
            found[word[2:].replace("-", "_")] = _value(following[0]) if has_value else True
    return found


def _value(text: str) -> Any:
    if text == "None":
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


def _nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by dotted names as objects in objects."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        group, dot, own = name.partition(".")
        if dot:
            found.setdefault(group, {})[own] = value
        else:
            found[group] = value
    return found


def record_of(run: Run, config: Config) -> dict[str, Any]:
    """The record of a finished run, or a `RunError` if the options of the run differ from its command."""
    check_config(run.result["config"], config, str(run.path))
    kept = {name: run.result[name] for name in KEPT if run.result.get(name) is not None}
    kept["config"] = _with_placeholders(run.result["config"], config)
    kept["environment"] = {name: run.result["environment"].get(name) for name in ENVIRONMENT}
    kept["epochs"] = [
        {
            "epoch": event["epoch"],
            "step": event["step"],
            "loss": _mean(event["losses"]),
            "validation": _mean(event["validation"]),
            "soup": event.get("validation_average_soup"),
            "distance": _mean(event["distances"]),
        }
        for event in thinned([event for event in run.events if event["event"] == "epoch"], MAX_EPOCHS)
    ]
    return {name: value if name == "config" else _rounded(value) for name, value in kept.items()}


def thinned(events: Sequence[Mapping[str, Any]], most: int) -> list[Mapping[str, Any]]:
    """Every n-th event and the last, at most `most`.

    Example:
        >>> [event["epoch"] for event in thinned([{"epoch": number} for number in range(1, 8)], 4)]
        [1, 3, 5, 7]
    """
    every = -(-len(events) // most)
    return list(events[::-1][:: max(every, 1)][::-1])


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
            "results/studies.py"
        )


def write_records(study: str, records: Mapping[str, Mapping[str, Any]], folder: Path = FOLDER) -> None:
    """Add the records of a study to its file, one run a line, in the order of their names."""
    path = folder / f"{study}.jsonl"
    found = {**read_file(path), **records}
    lines = [
        json.dumps({"run": name, **found[name]}, separators=(",", ":"), ensure_ascii=False) for name in sorted(found)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(f"{line}\n" for line in lines))


def read_file(path: Path) -> dict[str, dict[str, Any]]:
    """The records in a file, by the name of their run; none if there is no such file."""
    if not path.exists():
        return {}
    with file_errors(path, kind="a file with one record a line"):
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return {record.pop("run"): record for record in records}


def read_records(commands: Sequence[str], folder: Path = FOLDER) -> dict[str, dict[str, Any]]:
    """The existing records of the runs of some commands; each is checked against its command."""
    found = all_records(folder)
    runs = {name: config for command in commands for name, config in runs_of(command).items() if name in found}
    return {name: _checked(name, config, _files(folder)) for name, config in runs.items()}


def all_records(folder: Path = FOLDER) -> dict[str, dict[str, Any]]:
    """All existing records of runs, by name."""
    return _all_records(_files(folder))


Files: TypeAlias = tuple[tuple[Path, int], ...]
"""Paths, and when they were changed: what is read from them is kept until then."""


def _files(folder: Path) -> Files:
    return tuple((path, path.stat().st_mtime_ns) for path in sorted(folder.glob("*.jsonl")) if path.stem not in OTHERS)


@cache
def _all_records(files: Files) -> dict[str, dict[str, Any]]:
    return {name: record for path, _ in files for name, record in read_file(path).items()}


@cache
def _checked(name: str, config: Config, files: Files) -> dict[str, Any]:
    record = _all_records(files)[name]
    check_config(record["config"], config, f"the record {name}")
    return checked_result(record)


def _with_placeholders(found: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The options of a run, with the paths of data and weights as in its command."""
    return {
        **found,
        "data": {**found["data"], "root": config.data.root},
        "model": {**found["model"], "weights": config.model.weights},
    }


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
