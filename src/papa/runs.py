"""Run directories: what a run writes, where, and who may write it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from papa.checkpoint import json_text, latest_checkpoint, read_json, save_network, write_atomically, write_json
from papa.errors import RunError


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

    def create(self, config: Mapping[str, Any], *, overwrite: bool = False) -> None:
        """Begin a run here; one that is here already is refused, or removed when told to overwrite."""
        if self.holds_run:
            if not overwrite:
                state = "a finished run" if self.is_finished else "an unfinished run"
                raise RunError(
                    f"{self.path} already holds {state}: choose another --out, continue it with --resume, "
                    "or replace it with --overwrite"
                )
            self._remove()
        try:
            self.members.mkdir(parents=True, exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make the directory {self.path}: {error.strerror or error}") from error
        write_json(self.config, dict(config))
        write_atomically(self.metrics, "")

    def _remove(self) -> None:
        """Remove a run, and nothing that a run does not write."""
        self.read_config()  # a directory without a papa config is somebody else's
        written = [file for file in self.files if not file.is_dir()]
        written += [*self.members.glob("[0-9]*.safetensors"), *self.checkpoints.glob("step-*")]
        for file in written:
            shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)

    def read_config(self) -> dict[str, Any]:
        """The config of the run here."""
        if not self.config.exists():
            raise RunError(f"{self.path} holds no run of papa: there is no config.json in it")
        config: dict[str, Any] = read_json(self.config)
        return config

    def log(self, event: Mapping[str, Any]) -> None:
        """Add one line to the metrics."""
        try:
            with self.metrics.open("a") as file:
                file.write(json_text(event) + "\n")
        except OSError as error:
            raise RunError(f"cannot write {self.metrics}: {error.strerror or error}") from error

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """The metrics so far; a last line that was cut short is left out."""
        if self.metrics.exists():
            for line in self.metrics.read_text().splitlines():
                try:
                    yield json.loads(line)
                except ValueError:
                    return

    def rewind(self, step: int) -> None:
        """Forget metrics of steps after `step`, which will be taken again."""
        kept = [json_text(event) + "\n" for event in self.read_metrics() if event["step"] <= step]
        write_atomically(self.metrics, "".join(kept))

    def latest_checkpoint(self) -> Path | None:
        """The newest whole checkpoint, or None."""
        return latest_checkpoint(self.checkpoints)

    def save_member(self, member: int, network: nn.Module) -> None:
        """Write one member's weights."""
        save_network(self.members / f"{member:03d}.safetensors", network, {"role": f"member {member}"})

    def save_soups(self, average: nn.Module, greedy: nn.Module) -> None:
        """Write both soups' weights."""
        save_network(self.average_soup, average, {"role": "average soup"})
        save_network(self.greedy_soup, greedy, {"role": "greedy soup"})
