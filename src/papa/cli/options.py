"""Options: a recipe with all of its own, short help, and what several commands share.

What imports torch is imported last: help, wrong options and the first line of output do without.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro

from papa.cli.tables import printable, wrapped
from papa.errors import ConfigError, did_you_mean
from papa.lab.config import Config, flat, idle_options, option_of
from papa.lab.recipes import BUDGETS, Recipe, find
from papa.lab.report.metric import metric_of

if TYPE_CHECKING:
    from papa.lab.launch import RunSpec
    from papa.lab.launch_many import Outcomes

Options = TypeVar("Options", bound=Any)

NAMES = ["--" + name.replace("_", "-") for name, _ in flat(Config().to_json())]
"""The options of a recipe."""


def parse_options(
    kind: type[Options], arguments: Sequence[str], *, prog: str, description: str, default: Options | None = None
) -> Options:
    """The options of a command, parsed by tyro, which exits with code 2 and a message when they are wrong."""
    defaults: dict[str, Any] = {} if default is None else {"default": default}
    # tyro joins lines that are not indented, and doubles empty ones.
    text = "\n".join(f" {line}" for line in wrapped(description, 79).split("\n") if line)
    options: Options = tyro.cli(kind, prog=prog, description=text, args=arguments, **defaults)
    return options


@dataclass(frozen=True, kw_only=True)
class _ConfigOptions(Config):
    """A config as options of a command; the recipe is an argument, and options of rules are taken before."""

    recipe: Annotated[str, tyro.conf.Suppress, tyro.conf.Fixed] = "custom"
    coupling: Annotated[dict[str, Any], tyro.conf.Suppress, tyro.conf.Fixed] = field(default_factory=dict, hash=False)


def parse_recipe(
    make_options: Callable[[Config], Options], recipe: Recipe, arguments: Sequence[str], *, command: str
) -> tuple[Options, dict[str, Any], str]:
    """The options of a command that has all options of a recipe.

    An option is understood by the ending of its name too, if only one ends so: `--epochs` is `--train.epochs`.

    Returns:
        The options; those of the method's rule, `--coupling.NAME`; and a name for the run: that of the recipe, followed
        by the budget if there is one.
    """
    budget, rest = take_budget(arguments)
    coupling, rest = _take_coupling(rest)
    config = recipe.config(budget)
    default = make_options(_as(_ConfigOptions, config))
    options = parse_options(
        type(default),
        ["--help" if word == "--help-all" else _whole_name(word) for word in rest],
        prog=f"papa {command} {recipe.name}",
        description=f"{recipe.summary}; --budget sets the defaults, see papa {command} --help",
        default=default,
    )
    name = f"{recipe.name}-{budget}" if budget else recipe.name
    return replace(options, config=_as(Config, options.config)), coupling, name


def _as(kind: type[Config], config: Config) -> Config:
    return kind(**{entry.name: getattr(config, entry.name) for entry in fields(Config)})


def _whole_name(argument: str) -> str:
    name, equals, value = argument.partition("=")
    found = [option for option in NAMES if option.endswith(f".{name.removeprefix('--')}")] if name[:2] == "--" else []
    return f"{found[0]}{equals}{value}" if len(found) == 1 else argument


def _take_coupling(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The options of the method's rule, such as `--coupling.share 0.02`, and the remaining arguments."""
    found: dict[str, Any] = {}
    rest = list(arguments)
    while name := next((word for word in rest if word.startswith("--coupling.")), None):
        option = name.partition("=")[0]
        value, rest = take_value(option, rest)
        found[option.removeprefix("--coupling.").replace("-", "_")] = json_value(value or "")
    return found, rest


def json_value(text: str) -> Any:
    """A number, true, false, null, or a word."""
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return text


def take_recipe(arguments: Sequence[str], usage: str) -> tuple[Recipe, list[str]]:
    """The recipe, which is the first argument, and the remaining arguments; an error shows the usage."""
    first_line = usage.partition("\n")[0]
    if not arguments:
        raise ConfigError(f"a recipe is missing: `papa ls` lists all\n{first_line}")
    name, *rest = arguments
    if name.startswith("-"):
        raise ConfigError(f"the recipe comes first, found {name}\n{first_line}")
    return find(name), rest


def take_value(option: str, arguments: Sequence[str], expected: str = "") -> tuple[str | None, list[str]]:
    """The value of an option on which other options depend, such as `--budget`, and the remaining arguments."""
    rest = list(arguments)
    for index, argument in enumerate(rest):
        name, equals, value = argument.partition("=")
        if name == option:
            if not equals:
                if index + 1 >= len(rest):
                    raise ConfigError(f"{option} needs a value{expected}")
                value = rest.pop(index + 1)
            rest.pop(index)
            return value, rest
    return None, rest


def take_budget(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of --budget, which sets the defaults of other options, and the remaining arguments."""
    return take_value("--budget", arguments, f", known: {', '.join(BUDGETS)}")


def split_names(option: str, text: str, known: Sequence[str]) -> list[str]:
    """A comma-separated list of known names."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"{option} is empty, expected some of: {', '.join(known)}")
    for name in names:
        if name not in known:
            raise ConfigError(f"{option} has {name}: {did_you_mean(name, known)}")
    return list(dict.fromkeys(names))


def split_numbers(option: str, text: str) -> list[int]:
    """A comma-separated list of whole numbers."""
    try:
        numbers = [int(number) for number in text.split(",") if number.strip()]
    except ValueError:
        numbers = []
    if not numbers:
        raise ConfigError(f"{option} is '{text}', expected whole numbers such as 1,2,3")
    return list(dict.fromkeys(numbers))


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Options of every command that trains."""

    workers: int | None = None
    """Processes per run; None to choose. The result does not depend on it."""
    checkpoint_minutes: float = 10.0
    """Longest time between checkpoints; there is also one at the end of each epoch."""
    keep: int = 2
    """Number of checkpoints to keep."""

    def check(self) -> None:
        """Raise a `ConfigError` for a value that no run can have."""
        if not self.checkpoint_minutes > 0:
            raise ConfigError(f"--checkpoint-minutes is {self.checkpoint_minutes}, expected more than 0")
        if self.keep < 1:
            raise ConfigError(f"--keep is {self.keep}, expected at least 1")

    def spec(
        self, title: str, config: Config, path: Path, *, overwrite: bool, resume: bool, display: bool = True
    ) -> RunSpec:
        """A run with these options, which shows its progress."""
        from papa.cli.progress import Progress
        from papa.lab.launch import RunSpec
        from papa.training import CheckpointOptions

        return RunSpec(
            config=config,
            path=path,
            workers=self.workers,
            overwrite=overwrite,
            resume=resume,
            checkpoints=CheckpointOptions(minutes=self.checkpoint_minutes, keep=self.keep),
            make_callback=partial(Progress, title, metric_of([{"config": config.to_json()}]), display=display),
        )

    def execute(self, config: Config, path: Path, *, overwrite: bool = False, resume: bool = False) -> dict[str, Any]:
        """Execute a run with these options and return its result."""
        announce([config], path)
        from papa.lab.launch import execute
        from papa.process import configure_process

        configure_process()
        return execute(self.spec(run_title(config), config, path, overwrite=overwrite, resume=resume))


@dataclass(frozen=True, kw_only=True)
class ParallelOptions(TrainingOptions):
    """Options of the commands that execute several runs."""

    parallel: int = 1
    """Number of runs to train at the same time, each in its own process; for runs too small for several workers."""

    def check(self) -> None:
        super().check()
        if self.parallel < 1:
            raise ConfigError(f"--parallel is {self.parallel}, expected at least 1")
        if self.parallel > 1 and self.workers is not None:
            raise ConfigError(
                "--workers and --parallel are both set, expected one of them: parallel runs have one worker"
            )

    def execute_all(self, runs: Sequence[tuple[str, Config, Path]], *, overwrite: bool = False) -> Outcomes:
        """Execute runs, each given by title, config and directory; existing ones are resumed unless overwritten."""
        from papa.lab.launch_many import execute_all
        from papa.process import configure_process

        configure_process()
        specs = []
        for number, (title, config, path) in enumerate(runs, start=1):
            named = f"{title} (run {number} of {len(runs)})" if len(runs) > 1 else title
            display = self.parallel == 1
            specs.append(self.spec(named, config, path, overwrite=overwrite, resume=not overwrite, display=display))
        return execute_all(specs, num_parallel=self.parallel)


def run_title(config: Config) -> str:
    """The name of a run in the display of progress."""
    return f"{config.recipe} {config.method} seed {config.seed}"


def announce(configs: Sequence[Config], path: Path) -> None:
    """Say on standard error what will be trained, before the seconds that it takes to load PyTorch."""
    if not configs or not is_main_process():
        return
    largest = max(configs, key=lambda config: config.members)
    methods = ", ".join(dict.fromkeys(config.method for config in configs))
    runs = f"training ({methods})" if len(configs) == 1 else f"{len(configs)} runs ({methods}), each"
    up_to = "up to " if any(config.members < largest.members for config in configs) else ""
    networks = f"{up_to}{largest.members} {largest.model.name} network{'s' if largest.members > 1 else ''}"
    _say(f"{runs} of {networks} on {largest.data.name}, {largest.train.epochs} epochs, to {path}")


def note_unused(configs: Iterable[Config], base: Config) -> None:
    """Say which options of averaging were given, compared with a recipe's config, that no method uses."""
    before, configs = dict(flat(base.to_json())), list(configs)
    unused = frozenset[str].intersection(*(idle_options(config.method) for config in configs))
    given = [option_of(key) for key, value in flat(configs[0].to_json()) if key in unused and value != before[key]]
    if given and is_main_process():
        methods = ", ".join(dict.fromkeys(config.method for config in configs))
        _say(f"{', '.join(given)}: without effect, as {methods} does not use {'it' if len(given) == 1 else 'them'}")


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # a terminal that is gone is no reason to stop
        print(printable(f"papa: {text}"), file=sys.stderr, flush=True)


def is_main_process() -> bool:
    """Whether this process prints: rank 0 under torchrun, otherwise every process."""
    return os.environ.get("RANK", "0") == "0"


def use_one_thread() -> None:
    """Use one thread: more would change the bits of a result, and slow each other down on a busy machine."""
    import torch

    torch.set_num_threads(1)
