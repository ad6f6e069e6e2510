"""Run directories: the files of a run, and reading and writing them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from papa.errors import PapaError, RunError, StoppedError
from papa.lab.config import METHODS
from papa.lab.result import checked_result, fold_merges, parsed_event
from papa.storage import (
    file_errors,
    json_text,
    matches,
    read_file,
    read_json,
    read_object,
    write_atomically,
    write_json,
)
from papa.storage.lock import Lock

if TYPE_CHECKING:
    from torch import nn

MAX_METRICS_BYTES = 1 << 30


class MetricsState(TypedDict):
    """The metrics at the time of a checkpoint."""

    bytes: int
    sha256: str
    unwritten: str


class RunDirectory:
    """The files of one run: config, metrics, result, networks, checkpoints."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.metrics = path / "metrics.jsonl"
        self.result = path / "result.json"
        self.report = path / "report.html"
        self.picture = path / "prediction.png"
        self.tokenizer = path / "tokenizer.json"
        self.average_soup = path / "soup.safetensors"
        self.greedy_soup = path / "greedy.safetensors"
        self.best_soup = path / "best.safetensors"
        self.members = path / "members"
        self.checkpoints = path / "checkpoint"
        self.torchrun = path / ".torchrun"
        self._unwritten = b""
        self._metrics_end = 0
        self._metrics_sha = hashlib.sha256()

    def lock(self) -> Lock:
        """A context in which no other process may write here."""
        return Lock(self.path / ".lock")

    @property
    def files(self) -> tuple[Path, ...]:
        """Everything a run writes; the config last, since it makes the directory a run."""
        return (
            *(self.result, self.metrics, self.report, self.picture, self.tokenizer),
            *(self.average_soup, self.greedy_soup, self.best_soup, self.members, self.checkpoints, self.config),
        )

    @property
    def holds_run(self) -> bool:
        """Whether there is a run here, finished or not."""
        return is_run(self.path)

    @property
    def is_finished(self) -> bool:
        return self.result.exists()

    @property
    def is_interrupted(self) -> bool:
        """Whether there is an unfinished run here and no process works on it."""
        # Checked again at the end: it may have finished between the first two checks.
        return not self.is_finished and not self.lock().is_held and self.holds_run and not self.is_finished

    @contextlib.contextmanager
    def reserved(self, config: Mapping[str, Any], *, torchrun: Mapping[str, Any] | None = None) -> Iterator[None]:
        """Write the config of a new run at once, so that a run that is killed before it trains can be resumed.

        Nothing is left of a run that ends in an error before it trains. Without effect where a run exists. `torchrun`
        says which torchrun started it, if any; without it, restarted processes would not continue the run.
        """
        self._check_links()
        is_new = not self.holds_run
        try:
            if is_new:
                if torchrun is not None:
                    write_json(self.torchrun, torchrun)
                write_json(self.config, dict(config))
            yield
        except StoppedError:
            raise
        except BaseException:
            if is_new and not self.metrics.exists():
                self.config.unlink(missing_ok=True)
                self.torchrun.unlink(missing_ok=True)
            raise

    def _check_links(self) -> None:
        links = [path for path in self.path.iterdir() if path.is_symlink()]
        if links:
            raise RunError(
                f"{links[0]} is a symbolic link, expected none in a run, which writes only into its own directory: "
                "remove it"
            )

    def create(self, config: Mapping[str, Any], *, overwrite: bool = False) -> None:
        """Begin a run here; an existing run is an error, or removed with `overwrite`.

        There is a config at any time, the old or the new one, so a run that is killed here can be resumed.
        """
        self.check_free(overwrite=overwrite)
        self._remove()
        with file_errors(self.path, "make the directory"):
            self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.config, dict(config))
        write_atomically(self.metrics, "")  # from here on, `reserved` keeps the config
        self.make_directories()

    def check_free(self, *, overwrite: bool = False) -> None:
        """Raise unless a run may begin here: there is none, or it may be overwritten. Nothing is changed."""
        existing = sorted(file.name for file in self.files if file.exists())
        if not existing:
            return
        if not self.holds_run:
            raise RunError(f"{self.path} holds {', '.join(existing)}, but no run of papa: choose another directory")
        if not overwrite:
            state = "a finished run" if self.is_finished else "an unfinished run"
            go_on = "" if self.is_finished else "--resume to continue it, or "
            raise RunError(
                f"{self.path} already holds {state}: choose another directory, or give {go_on}--overwrite to replace it"
            )

    def make_directories(self) -> None:
        with file_errors(self.path, "make the directory"):
            self.members.mkdir(parents=True, exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)

    def _remove(self) -> None:
        """Remove a run except for its config, and nothing that a run does not write."""
        written = [file for file in self.files if not file.is_dir() and file != self.config]
        written += [*self.members.glob("[0-9]*.safetensors"), *self.checkpoints.glob("step-*")]
        written += self.checkpoints.glob(".step-*.partial")
        for file in written:
            shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)

    def read_config(self) -> dict[str, Any]:
        if not self.config.exists():
            raise RunError(f"{self.path} holds no run of papa: there is no config.json in it")
        return read_object(self.config)

    def read_result(self) -> dict[str, Any]:
        """The result of the finished run here, as `RunResult` describes it; missing optional parts are None."""
        return self._read_result(self.result, read_object(self.result))

    def read_result_so_far(self) -> dict[str, Any]:
        """The result of the run here; of an unfinished run recipe, method, seed and config, everything else None."""
        if self.is_finished:
            return self.read_result()
        config = self.read_config()
        known = {key: config.get(key) for key in ("recipe", "method", "seed")}
        return self._read_result(self.config, {**known, "config": config})

    def _read_result(self, file: Path, value: dict[str, Any]) -> dict[str, Any]:
        with file_errors(file, kind="a valid result of papa"):
            return checked_result(value)

    def log(self, event: Mapping[str, Any]) -> str | None:
        """Add one line to the metrics; a line that cannot be written is kept and written with a later one.

        Returns the reason why it was not written, if any.
        """
        self._unwritten += (json_text(event) + "\n").encode()
        try:
            handle = os.open(self.metrics, os.O_WRONLY)
            try:
                # At a known position, over what a failed write may have left there: only complete lines count.
                num_written = os.pwrite(handle, self._unwritten, self._metrics_end)
                if num_written < len(self._unwritten):
                    os.ftruncate(handle, self._metrics_end)
                    return f"cannot write {self.metrics}: no space left"
            finally:
                os.close(handle)
        except OSError as error:
            return f"cannot write {self.metrics}: {error.strerror or error}"
        self._metrics_end += len(self._unwritten)
        self._metrics_sha.update(self._unwritten)
        self._unwritten = b""
        return None

    def metrics_state(self) -> MetricsState:
        """The content of the metrics, for a checkpoint, and the lines that could not be written yet."""
        return {
            "bytes": self._metrics_end,
            "sha256": self._metrics_sha.hexdigest(),
            "unwritten": self._unwritten.decode(),
        }

    def flush_metrics(self) -> None:
        """Flush the metrics to disk. May raise an `OSError`."""
        handle = os.open(self.metrics, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rewind_metrics(self, state: Any) -> None:
        """Remove the lines after those of `metrics_state`, which will be written again; None for all lines.

        A missing file is made. A file with other lines is a `RunError`, and does not change.
        """
        content = read_file(self.metrics, MAX_METRICS_BYTES) if state is not None and self.metrics.exists() else b""
        if content:
            kept = content[: state["bytes"]]
            if (len(kept), hashlib.sha256(kept).hexdigest()) != (state["bytes"], state["sha256"]):
                raise RunError(
                    f"{self.metrics} does not begin with the lines that the checkpoint recorded: restore it, or remove "
                    "it to continue without the earlier lines"
                )
            content = kept + state["unwritten"].encode()
        write_atomically(self.metrics, content)
        self._metrics_end, self._metrics_sha, self._unwritten = len(content), hashlib.sha256(content), b""

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """The metrics so far, without an incomplete last line."""
        if not self.metrics.exists():
            return
        lines = read_file(self.metrics, MAX_METRICS_BYTES).split(b"\n")
        for number, line in enumerate(lines[:-1], start=1):
            try:
                yield parsed_event(line)
            except ValueError as error:
                raise RunError(f"line {number} of {self.metrics} is no event of papa: {error}") from error

    def latest_checkpoint(self) -> Path | None:
        from papa.training.checkpoints import checkpoints  # imports torch, which listings do without

        found = checkpoints(self.checkpoints)
        return found[-1][1] if found else None

    def save_member(self, member: int, network: nn.Module) -> None:
        from papa.storage.tensors import save_network  # imports torch, which listings do without

        save_network(self.members / f"{member:03d}.safetensors", network, {"role": f"member {member}"})

    def save_soups(self, average: nn.Module, greedy: nn.Module, best: nn.Module | None = None) -> None:
        from papa.storage.tensors import save_network  # imports torch, which listings do without

        save_network(self.average_soup, average, {"role": "average soup"})
        save_network(self.greedy_soup, greedy, {"role": "greedy soup"})
        if best is not None:
            save_network(self.best_soup, best, {"role": "best average soup by validation"})


def is_metrics_state(value: Any) -> bool:
    """Whether this is what `RunDirectory.metrics_state` gives."""
    return matches(value, MetricsState) and value["bytes"] >= 0


@dataclass(frozen=True)
class Run:
    """What a run has written, finished or not."""

    path: Path
    result: dict[str, Any]
    """The content of `result.json`; for an unfinished run only recipe, method, seed and config."""
    events: list[dict[str, Any]]
    """The events of `metrics.jsonl`, one for each merge."""
    is_finished: bool


def read_run(path: Path) -> Run:
    """Read the run in a directory; a `RunError` if there is none, or if its files are not those of papa."""
    run = RunDirectory(path)
    return Run(path, run.read_result_so_far(), fold_merges(run.read_metrics()), run.is_finished)


def read_runs(paths: Sequence[Path]) -> tuple[list[Run], list[RunError]]:
    """The runs in some directories, sorted by recipe, method and seed, and an error for each that cannot be read.

    Each directory is a run, or contains runs as `papa compare` writes them. If no run can be read, its error is raised.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise RunError(f"there is no directory {path}: give one that `papa run` or `papa compare` wrote")
        inside = [path] if is_run(path) else [child for child in sorted(path.iterdir()) if is_run(child)]
        if not inside:
            raise RunError(
                f"neither {path} nor a directory in it is a run of papa: config.json and result.json are missing"
            )
        found |= dict.fromkeys(path.resolve() for path in inside)
    runs, errors = [], []
    for path in found:
        try:
            runs.append(read_run(path))
        except RunError as error:
            errors.append(error)
    if not runs:
        raise errors[0]
    order = {method: place for place, method in enumerate(METHODS)}

    def key(run: Run) -> tuple[str, int, int]:
        recipe, method, seed = (run.result[name] for name in ("recipe", "method", "seed"))
        return recipe, order.get(method, len(order)), seed

    return sorted(runs, key=key), errors


def is_run(path: Path) -> bool:
    """Whether a directory is of `papa run`: its config or result is an object that names a recipe and a method.

    Directories of model hubs have a `config.json` too, but neither key.
    """
    for name in ("config.json", "result.json"):
        with contextlib.suppress(PapaError):
            value = read_json(path / name)
            if isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("recipe", "method")):
                return True
    return False


def member_files(path: Path) -> list[Path]:
    """The files of the members of a finished run."""
    num_members = read_object(path / "config.json").get("members")
    files = sorted((path / "members").glob("[0-9]*.safetensors"))
    if not (path / "result.json").exists():
        raise RunError(f"{path} holds an unfinished run: finish it with papa resume {path}")
    if len(files) != num_members:
        raise RunError(
            f"{path} has {len(files)} of the {num_members} members its config names: name the files you want instead"
        )
    return files
