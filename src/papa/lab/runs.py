"""Run directories: what a run writes, where, and who may write it."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from papa.checkpoint import (
    checkpoints,
    json_text,
    parse_json,
    read_file,
    read_object,
    save_network,
    write_atomically,
    write_json,
)
from papa.errors import RunError
from papa.lock import Lock

MOST_METRICS_BYTES = 1 << 30
SCORES = ("mean", "min", "max", "ensemble", "average_soup", "greedy_soup")


class RunDirectory:
    """The files of one run: config, metrics, result, networks, checkpoints.

    Args:
        path: the directory; made when missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.metrics = path / "metrics.jsonl"
        self.result = path / "result.json"
        self.report = path / "report.html"
        self.picture = path / "prediction.png"
        self.average_soup = path / "soup.safetensors"
        self.greedy_soup = path / "greedy.safetensors"
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
        """Everything a run writes."""
        return (
            *(self.config, self.metrics, self.result, self.report, self.picture),
            *(self.average_soup, self.greedy_soup, self.members, self.checkpoints),
        )

    @property
    def holds_run(self) -> bool:
        """Whether a run was begun here."""
        return any(file.exists() for file in self.files)

    @property
    def is_finished(self) -> bool:
        """Whether the run here came to its end."""
        return self.result.exists()

    @property
    def is_left_alone(self) -> bool:
        """Whether a run was begun here, is not finished, and no process works on it."""
        # Asked again at the end: it may have finished between the first two questions.
        return not self.is_finished and not self.lock().seems_held and self.holds_run and not self.is_finished

    def create(self, config: Mapping[str, Any], *, overwrite: bool = False) -> None:
        """Begin a run here; one that is here already is refused, or removed when told to overwrite."""
        self.check_free(overwrite=overwrite)
        if self.holds_run:
            self._remove()
        self.make_directories()
        write_json(self.config, dict(config))
        write_atomically(self.metrics, "")

    def check_free(self, *, overwrite: bool = False) -> None:
        """Raise unless a run may begin here: there is none, or it may be overwritten. Nothing is changed."""
        if not self.holds_run:
            return
        self._check_ours()
        if not overwrite:
            state = "a finished run" if self.is_finished else "an unfinished run"
            raise RunError(
                f"{self.path} already holds {state}: choose another --out, continue it with --resume, "
                "or replace it with --overwrite"
            )

    def make_directories(self) -> None:
        """Make what is not there of the run's directories."""
        try:
            self.members.mkdir(parents=True, exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make the directory {self.path}: {error.strerror or error}") from error

    def _check_ours(self) -> None:
        """Raise unless what is here is a run of papa: a directory without papa's config is somebody else's."""
        if not (self.config.exists() and _is_config(read_object(self.config))):
            there = ", ".join(sorted(file.name for file in self.files if file.exists()))
            raise RunError(f"{self.path} holds {there}, but no run of papa: choose another --out")

    def _remove(self) -> None:
        """Remove a run, and nothing that a run does not write."""
        written = [file for file in self.files if not file.is_dir()]
        written += [*self.members.glob("[0-9]*.safetensors"), *self.checkpoints.glob("step-*")]
        written += self.checkpoints.glob(".step-*.partial")
        for file in written:
            shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)

    def read_config(self) -> dict[str, Any]:
        """The config of the run here."""
        if not self.config.exists():
            raise RunError(f"{self.path} holds no run of papa: there is no config.json in it")
        return read_object(self.config)

    def read_result(self) -> dict[str, Any]:
        """The result of the finished run here, when it has everything that tables show."""
        result = read_object(self.result)
        if not _is_result(result):
            raise RunError(f"{self.result} is no result of papa: it was altered; run again with --overwrite")
        return result

    def log(self, event: Mapping[str, Any]) -> str | None:
        """Add one line to the metrics; a line that cannot be written now is kept and written with a later one.

        Returns:
            What kept it from being written, if anything did.
        """
        self._unwritten += (json_text(event) + "\n").encode()
        try:
            handle = os.open(self.metrics, os.O_WRONLY)
            try:
                # At a known place, over what a failed write may have left there: only whole lines count.
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

    def metrics_state(self) -> dict[str, Any]:
        """How far the metrics are, for a checkpoint: what the file holds, and lines that could not be written yet."""
        return {
            "bytes": self._metrics_end,
            "sha256": self._metrics_sha.hexdigest(),
            "unwritten": self._unwritten.decode(),
        }

    def flush_metrics(self) -> None:
        """Make sure that the metrics are on disk. May raise an `OSError`."""
        handle = os.open(self.metrics, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rewind_metrics(self, state: Any) -> None:
        """Forget lines after those of `metrics_state`, which will be written again; None for all lines.

        A file that is gone is begun anew. One that holds other lines raises a `RunError` and stays as it is.
        """
        content = read_file(self.metrics, MOST_METRICS_BYTES) if state is not None and self.metrics.exists() else b""
        if content:
            kept = content[: state["bytes"]]
            if (len(kept), hashlib.sha256(kept).hexdigest()) != (state["bytes"], state["sha256"]):
                raise RunError(
                    f"{self.metrics} is not what the checkpoint was taken with: put the original back, or remove it to "
                    "go on without the lines so far"
                )
            content = kept + state["unwritten"].encode()
        write_atomically(self.metrics, content)
        self._metrics_end, self._metrics_sha, self._unwritten = len(content), hashlib.sha256(content), b""

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """The metrics so far; a last line that was cut short is left out."""
        if not self.metrics.exists():
            return
        lines = read_file(self.metrics, MOST_METRICS_BYTES).split(b"\n")
        for number, line in enumerate(lines[:-1], start=1):
            try:
                event = parse_json(line)
            except ValueError as error:
                raise RunError(f"line {number} of {self.metrics} is not valid JSON: {error}") from error
            if not isinstance(event, dict) or not isinstance(event.get("event"), str):
                raise RunError(f"line {number} of {self.metrics} is no event: it was altered")
            yield event

    def latest_checkpoint(self) -> Path | None:
        """The newest whole checkpoint, or None."""
        found = checkpoints(self.checkpoints)
        return found[-1][1] if found else None

    def save_member(self, member: int, network: nn.Module) -> None:
        """Write one member's weights."""
        save_network(self.members / f"{member:03d}.safetensors", network, {"role": f"member {member}"})

    def save_soups(self, average: nn.Module, greedy: nn.Module) -> None:
        """Write both soups' weights."""
        save_network(self.average_soup, average, {"role": "average soup"})
        save_network(self.greedy_soup, greedy, {"role": "greedy soup"})


def is_metrics_state(value: Any) -> bool:
    """Whether this is what `RunDirectory.metrics_state` gives."""
    return (
        isinstance(value, dict)
        and type(value.get("bytes")) is int
        and value["bytes"] >= 0
        and isinstance(value.get("sha256"), str)
        and isinstance(value.get("unwritten"), str)
    )


def _is_config(value: Mapping[str, Any]) -> bool:
    """Whether this may be the config of a run; whether it is a good one, `papa.lab.config` knows."""
    parts = all(isinstance(value.get(name), dict) for name in ("data", "model", "train", "average"))
    return parts and isinstance(value.get("recipe"), str) and isinstance(value.get("method"), str)


def _is_result(result: Mapping[str, Any]) -> bool:
    """Whether all is there that tables and pages read without asking."""
    texts = isinstance(result.get("recipe"), str) and isinstance(result.get("method"), str)
    parts = all(isinstance(result.get(name), dict) for name in ("config", "environment", "seconds"))
    repaired, paper = result.get("repaired"), result.get("paper")
    return (
        texts
        and parts
        and result.keys() >= {"test", "repaired", "paper"}
        and type(result.get("seed")) is int
        and type(result.get("num_averagings")) is int
        and isinstance(result.get("greedy_members"), list)
        and (result.get("test") is None or _are_scores(result["test"]))
        and _are_scores(result.get("validation"))
        and _are_sick(result.get("nonfinite"))
        and _are_policies(result.get("policies"))
        and (paper is None or (isinstance(paper, dict) and all(map(_is_number, paper.values()))))
        and (repaired is None or (isinstance(repaired, dict) and all(map(_is_repaired, repaired.items()))))
    )


def _are_scores(scores: Any) -> bool:
    return (
        isinstance(scores, dict)
        and isinstance(scores.get("members"), list)
        and all(name in scores and (scores[name] is None or _is_number(scores[name])) for name in SCORES)
    )


def _are_sick(events: Any) -> bool:
    keys = {"event", "step", "member", "reason", "action"}
    return isinstance(events, list) and all(isinstance(event, dict) and event.keys() == keys for event in events)


def _are_policies(policies: Any) -> bool:
    if not isinstance(policies, list) or not all(isinstance(policy, dict) for policy in policies):
        return False
    return all(policy.keys() == policies[0].keys() for policy in policies)


def _is_repaired(item: tuple[str, Any]) -> bool:
    name, value = item
    if name not in ("test", "validation"):
        return name == "greedy_members"
    return isinstance(value, dict) and all(_is_number(score) for key, score in value.items() if key != "details")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def fold_merges(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A run's metrics with one event for each merge that was probed.

    A run logs scores around a merge when they are known, so that it can be stopped in between: those before and after
    at the merge, those some steps later in an event of their own. Readers want them together.

    Example:
        >>> merge = {"event": "merge", "step": 10, "epoch": 1, "data": "test", "before": [90.0], "after": [92.0]}
        >>> later = {"event": "merge-later", "step": 12, "merge_step": 10, "data": "test", "scores": [91.0]}
        >>> (event,) = fold_merges([merge, later])
        >>> event["later"], event["steps_later"]
        ([91.0], 2)

    Returns:
        All events in their order; each `merge` with `later` and `steps_later`, both None when training ended before.
    """
    folded: list[dict[str, Any]] = []
    merges: dict[int, dict[str, Any]] = {}
    for event in events:
        kind, step, merge_step = (event.get(key) for key in ("event", "step", "merge_step"))
        if kind == "merge-later" and type(step) is type(merge_step) is int and merge_step in merges:
            merges[merge_step].update(later=event.get("scores"), steps_later=step - merge_step)
            continue
        folded.append(dict(event))
        if kind == "merge" and type(step) is int:
            merges[step] = folded[-1]
            folded[-1].setdefault("later", None)
            folded[-1].setdefault("steps_later", None)
    return folded
