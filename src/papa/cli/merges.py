"""The merge that `papa soup` was asked for, by options or by a config file."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from papa.errors import ConfigError
from papa.files import MergeConfig, MergeMethod, ModelStock, merge_config
from papa.files.methods import METHODS
from papa.files.storage import file_errors, read_file

MAX_CONFIG_BYTES = 1 << 20
OPTION = {"seed": "drop-seed"}
NEEDED = {"base": "--base FILE", "density": "--density SHARE"}


def merge_from(options: Any) -> MergeConfig:
    """The files and the method that options or a config name."""
    if options.config is not None:
        return _from_file(options)
    given = {
        "base": options.base,
        "t": options.t,
        "density": _density(options.density),
        "scale": options.scale,
        "seed": options.drop_seed,
    }
    given = {name: value for name, value in given.items() if value is not None}
    weights = None if options.weights is None else split_numbers(options.weights, "--weights")
    method: MergeMethod | None
    if options.stock is not None:
        if options.merge not in ("linear", "model_stock") or given:
            raise ConfigError("--stock is short for --merge model_stock --base FILE: leave out the other method")
        method = ModelStock(base=options.stock)
    else:
        kind = METHODS[options.merge]
        known = {field.name: field.default for field in fields(kind)}
        idle = [OPTION.get(name, name) for name in given if name not in known]
        missing = [NEEDED[name] for name, default in known.items() if default is MISSING and name not in given]
        problems = [f"--{name} has no meaning for --merge {options.merge}" for name in idle]
        _raise(problems + [f"--merge {options.merge} needs {text}" for text in missing])
        method = None if options.merge == "linear" else kind(**given)
    return MergeConfig(
        paths=options.paths, weights=weights, normalize=options.normalize, method=method, dtype=options.dtype
    )


def _from_file(options: Any) -> MergeConfig:
    taken = {
        **{"the files": bool(options.paths), "--weights": options.weights, "--normalize": options.normalize},
        **{"--base": options.base, "--t": options.t, "--density": options.density, "--scale": options.scale},
        **{"--drop-seed": options.drop_seed, "--stock": options.stock, "--merge": options.merge != "linear"},
    }
    _raise([f"{name}: the config says so already" for name, value in taken.items() if value not in (None, False)])
    try:
        import yaml
    except ImportError as error:
        raise ConfigError("reading a config needs the package pyyaml: pip install 'papa-torch[cli]'") from error
    content = read_file(options.config, MAX_CONFIG_BYTES, error=ConfigError)
    with file_errors(options.config, error=ConfigError, kind="valid YAML"):
        try:
            text = content.decode()
            if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
                raise ConfigError(f"{options.config} has aliases (*name), which are not read: write values out")
            value = yaml.safe_load(text)
        except (yaml.YAMLError, RecursionError) as error:
            raise ValueError(str(error).replace("\n", " ")) from error
    found = merge_config(value)
    return found if options.dtype is None else MergeConfig(**{**vars(found), "dtype": options.dtype})


def _density(text: str | None) -> float | tuple[float, ...] | None:
    if text is None:
        return None
    values = split_numbers(text, "--density")
    return values if len(values) > 1 else values[0]


def _raise(problems: list[str]) -> None:
    if problems:
        raise ConfigError("; ".join(problems))


def split_numbers(text: str, option: str = "--weights") -> tuple[float, ...]:
    """Parse numbers separated by commas."""
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{option} is '{text}', expected numbers such as 0.5,0.3,0.2") from error
