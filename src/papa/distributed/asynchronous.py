"""Asynchronous averaging: one member per process, each at its own speed, and nobody waits.

When its push is due, a member reads the newest weights that the others have published and is pushed toward the mean:

    w_j <- a w_j + (1 - a) mean,   mean = (w_j + sum of the newest weights of the others that count) / their number

Then it publishes its own, as a file in a directory that all members share. What others published does not count any
more once this member has taken more than `max_staleness` steps since it first saw it: they are stopped, dead or far too
slow.
"""

from __future__ import annotations

import copy
import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from papa.core.averager import Averaging, LearningRates, check_optimizers, clamped
from papa.core.group import LocalGroup
from papa.core.health import WEIGHTS_NOT_FINITE, NonFiniteMember
from papa.core.layout import check_same_tensors, is_sharded, named_tensors
from papa.core.population import Population
from papa.core.product import accumulation_dtype
from papa.core.rules import AveragingContext, Push, Rule
from papa.errors import MemberError, MixingError, RunError

NUM_PUSHES_TO_STALE = 10
"""Without `max_staleness`, weights count for this many pushes of the member that reads them."""

OnOwnNonFinite: TypeAlias = Literal["restart", "stop"]


class PublishedFiles:
    """The newest weights of each member in one directory: `0.safetensors`, `1.safetensors` and so on.

    A reader gets the whole content of one publication, never a part of one or a mix of two, however the writer is
    stopped or killed: a file is written under a hidden name, renamed when it is complete, and never changed. The
    directory is made if it does not exist.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot write {self.directory}: {error.strerror}") from error

    def path(self, member: int) -> Path:
        """The file of a member."""
        return self.directory / f"{member}.safetensors"

    def publish(self, member: int, state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> int:
        """Make these tensors the newest of a member, and return the number of bytes."""
        # Copies, since a file of the safetensors library has no tied tensors.
        copies = {
            name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            for name, tensor in state.items()
        }
        content = safetensors.torch.save(copies, {"format": "pt", **metadata})
        # A name of its own: the process that this one replaces may still be there, and write.
        partial = self.directory / f".{member}.{uuid.uuid4().hex}.partial"
        try:
            try:
                partial.write_bytes(content)
                os.replace(partial, self.path(member))
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise RunError(f"cannot write {self.path(member)}: {error.strerror}") from error
        return len(content)

    def version(self, member: int) -> str | None:
        """Changes with each publication of a member; None before the first."""
        try:
            status = os.stat(self.path(member))
        except FileNotFoundError:
            return None
        return f"{status.st_ino} {status.st_mtime_ns}"

    def read(self, member: int) -> tuple[dict[str, Tensor], dict[str, str]] | None:
        """The tensors and the metadata that a member published last; None before the first."""
        try:
            content = self.path(member).read_bytes()
        except FileNotFoundError:
            return None
        tensors = safetensors.torch.load(content)  # checks the header
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        return tensors, header.get("__metadata__", {})

    def remove_unfinished(self, member: int) -> None:
        """Remove what a killed process of this member left half-written."""
        for partial in self.directory.glob(f".{member}.*.partial"):
            partial.unlink(missing_ok=True)


@dataclass(frozen=True)
class AsyncAveraging(Averaging):
    """What one asynchronous averaging did, for logs."""

    counted: tuple[int, ...] = ()
    """The members in the mean, with this one."""


class AsyncAverager:
    """Pushes one member toward the newest weights of the others, without waiting for them.

    Made by `papa.join(model, optimizer, rule, asynchronous=True)`, which also calls `step` after every optimizer step.

    A member that was started before takes up the weights that it published last, and counts on from their step.

    Args:
        model: this process's member.
        optimizer: its optimizer.
        rule: a `Push`. Every other rule acts on all members at one moment, which does not exist here.
        published: where members publish their weights.
        member: the index of this member.
        num_members: the number of members.
        num_steps: the number of optimizer steps of the whole training.
        average: which tensors are averaged, as for `Population`.
        on_nonfinite: what to do if this member's weights are not finite, which are never published: `restart` from the
            mean of the others, with fresh optimizer state, or `stop` with an error.
        max_staleness: the number of steps of this member for which weights that another published count; None for 10
            pushes.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        rule: Rule,
        published: PublishedFiles,
        *,
        member: int,
        num_members: int,
        num_steps: int | None = None,
        average: Mapping[str, bool] | None = None,
        on_nonfinite: OnOwnNonFinite = "restart",
        max_staleness: int | None = None,
    ) -> None:
        if not isinstance(rule, Push):
            raise MixingError(
                f"asynchronous members need a Push, got {type(rule).__name__}: every other rule acts on all members "
                "at one moment, and asynchronous members share none"
            )
        self.rule = rule.for_length(num_steps)
        if on_nonfinite not in ("restart", "stop"):
            raise MixingError(
                f"on_nonfinite is {on_nonfinite!r}, expected 'restart' or 'stop' for asynchronous members"
            )
        if max_staleness is not None and max_staleness < 0:
            raise MixingError(f"max_staleness is {max_staleness}, expected a number of steps, at least 0, or None")
        self.population = Population([model], LocalGroup(), average=average)
        """This member alone: the others are in other processes."""
        if any(is_sharded(tensor) for tensor in named_tensors(model).values()):
            raise MemberError("an asynchronous member cannot be sharded (fully_shard): keep it whole in its process")
        self.rule.check(num_members, self.population.matrices)
        self.published, self.member, self.num_members = published, member, num_members
        self.num_steps, self.num_steps_taken, self.num_averagings = num_steps, 0, 0
        self.on_nonfinite = on_nonfinite
        self.max_staleness = NUM_PUSHES_TO_STALE * self.rule.every_steps if max_staleness is None else max_staleness
        self._rates = LearningRates([optimizer])
        check_optimizers(self.population, [optimizer])
        self._seen: dict[int, tuple[str, int]] = {}
        """The newest version of each other member, and this member's step when it first saw it."""
        self._continue_()
        self.publish()

    @property
    def optimizers(self) -> list[Optimizer]:
        """The member's optimizer."""
        return self._rates.optimizers

    def record_lr(self, optimizer: Optimizer) -> None:
        """Let the next step use the present learning rate, whatever schedules do until then."""
        self._rates.record(optimizer)

    def step(self, lr_ratio: float | None = None) -> AsyncAveraging | None:
        """Count one optimizer step, and push and publish if the rule is due.

        Args:
            lr_ratio: the learning rate divided by its initial value; None to read it from the optimizer.

        Returns:
            What happened, or None if nothing happened.
        """
        self.num_steps_taken += 1
        self._rates.update()
        if not self.rule.is_due(self.num_steps_taken, self.num_steps):
            return None
        start = time.perf_counter()
        if lr_ratio is None:
            lr_ratio = self._rates.ratio() if self.rule.uses_lr else 1.0
        found = self._check_()
        context = AveragingContext(step=self.num_steps_taken, size=self.num_members, lr_ratio=clamped(lr_ratio))
        keep = self.rule.keep(context)
        assert keep is not None
        total, counted = self._sum([self.member, *self.live()])
        if len(counted) > 1:
            self._write_(total, (1.0 - keep) / len(counted), keep)
        size = self.publish()
        self.num_averagings += 1
        seconds = time.perf_counter() - start
        name = type(self.rule).__name__
        return AsyncAveraging(
            self.num_steps_taken, name, keep, None, None, found, size, seconds, counted=tuple(counted)
        )

    def live(self) -> list[int]:
        """The other members whose newest weights count."""
        found = []
        for member in range(self.num_members):
            version = None if member == self.member else self.published.version(member)
            if version is None:
                continue
            if self._seen.get(member, ("", 0))[0] != version:
                self._seen[member] = (version, self.num_steps_taken)
            if self.num_steps_taken - self._seen[member][1] <= self.max_staleness:
                found.append(member)
        return found

    def publish(self) -> int:
        """Publish this member's weights as they are, unless they are not finite; returns the number of bytes."""
        self.population.refresh_()
        if not self.population.is_finite(0):
            return 0
        metadata = {"member": str(self.member), "step": str(self.num_steps_taken)}
        return self.published.publish(self.member, self.population[0].state_dict(), metadata)

    def soup(self) -> nn.Module:
        """The average soup of this member and the others that count, as a separate network. Nobody needs to wait."""
        total, counted = self._sum([self.member, *self.live()])
        network = copy.deepcopy(self.population[0])
        with torch.no_grad():
            for name, tensor in named_tensors(network, self.population.averaged).items():
                tensor.copy_(total[name].div_(len(counted)))
        return network

    def state_dict(self) -> dict[str, Any]:
        """What must be saved to continue at the same step."""
        return {
            "num_steps_taken": self.num_steps_taken,
            "num_averagings": self.num_averagings,
            "highest_lrs": list(self._rates.highest),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        missing = {"num_steps_taken", "num_averagings", "highest_lrs"} - set(state)
        if missing:
            raise MixingError(f"the state has no {', '.join(sorted(missing))}: it is not the state of an averager")
        self._rates.load_highest(state["highest_lrs"])
        self.num_steps_taken, self.num_averagings = int(state["num_steps_taken"]), int(state["num_averagings"])
        self._seen = {}

    def _tensors(self) -> dict[str, Tensor]:
        self.population.refresh_()
        return named_tensors(self.population[0], self.population.averaged)

    @torch.no_grad()
    def _sum(self, members: Sequence[int]) -> tuple[dict[str, Tensor], list[int]]:
        """The sum of the averaged tensors of this member now and of others as published, and whose they are."""
        own = self._tensors()
        total = {name: torch.zeros_like(tensor, dtype=accumulation_dtype(tensor.dtype)) for name, tensor in own.items()}
        counted = []
        for member in sorted(members):
            tensors: Mapping[str, Tensor] | None = own if member == self.member else self._read(member)
            if tensors is None:
                continue
            counted.append(member)
            for name, tensor in total.items():
                tensor.add_(tensors[name].to(tensor.device))
        return total, counted

    @torch.no_grad()
    def _write_(self, total: Mapping[str, Tensor], weight: float, keep: float) -> None:
        """`w <- keep w + weight total`."""
        for name, tensor in self._tensors().items():
            tensor.copy_(total[name].mul_(weight).add_(tensor, alpha=keep))
        self.population.mark_changed_()

    def _read(self, member: int) -> dict[str, Tensor] | None:
        """The tensors that a member published last."""
        found = self.published.read(member)
        if found is None:
            return None
        tensors, _ = found
        own = self._tensors()
        check_same_tensors(
            {name: tensor for name, tensor in tensors.items() if name in own},
            own,
            subject=f"what member {member} published",
            reference=f"member {self.member}",
            remedy="all members of a population must share one architecture",
        )
        return tensors

    def _continue_(self) -> None:
        """Take up the weights that an earlier process of this member has published."""
        found = self.published.read(self.member)
        if found is not None:
            self._read(self.member)  # checks
            self.population[0].load_state_dict(found[0])
            self.num_steps_taken = int(found[1]["step"])

    def _check_(self) -> tuple[NonFiniteMember, ...]:
        self.population.refresh_()
        if self.population.is_finite(0):
            return ()
        last = self.published.read(self.member)
        if self.on_nonfinite == "stop" or last is None:
            raise MemberError(
                f"member {self.member} is non-finite at step {self.num_steps_taken}: look for what made it diverge: "
                "the learning rate, the loss, the data"
            )
        self.population[0].load_state_dict(last[0])  # also what is not averaged
        total, counted = self._sum(self.live())
        if counted:
            self._write_(total, 1.0 / len(counted), 0.0)
        for parameter in self.population[0].parameters():
            self.optimizers[0].state.pop(parameter, None)
        action = "restarted from the mean of the others" if counted else "restarted from its last published weights"
        return (NonFiniteMember(self.num_steps_taken, self.member, WEIGHTS_NOT_FINITE, action),)

    def __repr__(self) -> str:
        total = "" if self.num_steps is None else f" of {self.num_steps}"
        steps = f"step {self.num_steps_taken}{total}, {self.num_averagings} averagings"
        return f"AsyncAverager({self.rule}, member {self.member} of {self.num_members}, {steps})"
