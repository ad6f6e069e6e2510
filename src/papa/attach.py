"""Averaging without a change to the loop: hooks on the optimizers call the averager after every step.

`averaging` is for several members in one process, `join` for one member per process. Both work in any loop, also one
inside of another library, since only the optimizers need to be known.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import shutil
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock
from safetensors import safe_open
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from papa.core.averager import Averager, Averaging, MergeHook
from papa.core.diagnostics import MIN_STEPS
from papa.core.group import LocalGroup
from papa.core.health import OnNonFinite
from papa.core.mixing import soup_row
from papa.core.population import Population
from papa.core.rules import Independent, Rule
from papa.core.soups import average_soup
from papa.distributed.asynchronous import AsyncAverager
from papa.distributed.members import (
    group_of_environment,
    member_of_environment,
    published_of_environment,
    start_of,
)
from papa.errors import MixingError, PapaWarning
from papa.files import soup_files
from papa.files.saved_soups import member_state
from papa.member import PUBLISHED, SOUP, WEIGHTS
from papa.storage.tensors import save_network

LOG = logging.getLogger(__name__)

MIN_SHARE = 0.5
"""Trainings that end before this share of `num_steps` were not as long as planned."""


def averaging(
    models: Iterable[nn.Module] | Population,
    optimizers: Optimizer | Sequence[Optimizer],
    rule: Rule,
    *,
    num_steps: int | None = None,
    num_steps_taken: int = 0,
    group: Any = None,
    average: Mapping[str, bool] | None = None,
    merge_hooks: MergeHook | Sequence[MergeHook] = (),
    on_nonfinite: OnNonFinite | None = "restart",
    measure: bool = True,
    on_averaging: Callable[[Averaging], object] | None = None,
) -> Joined:
    """Average members whenever all of them have taken an optimizer step, without a call in the loop.

    Example:
        >>> import torch
        >>> from papa import Push
        >>> nets = [nn.Linear(4, 2) for _ in range(3)]
        >>> optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
        >>> with averaging(nets, optimizers, Push(half_life=0.1), num_steps=20) as joined:
        ...     for step in range(20):
        ...         for net, optimizer in zip(nets, optimizers):
        ...             optimizer.zero_grad()
        ...             net(torch.randn(8, 4)).square().mean().backward()
        ...             optimizer.step()
        >>> joined.averager.num_averagings
        10
        >>> net = joined.soup()

    Steps are counted by the optimizers themselves, so batches whose gradients are accumulated do not count, and a step
    that a `GradScaler` skips counts as one. A push is scaled by the learning rate of the step just taken.

    Args:
        models: the members of this process, or their population.
        optimizers: one for each member, or one for all; also as wrapped by Accelerate, Lightning and the like.
        rule: how to average.
        num_steps: the number of optimizer steps of the whole training, per member.
        num_steps_taken: how many of them were taken before, where a training continues without a `state_dict`.
        group: the processes that hold the other members, as for `Population`.
        average: which tensors are averaged, as for `Population`.
        merge_hooks: as for `Averager`.
        on_nonfinite: as for `Averager`.
        measure: as for `Averager`.
        on_averaging: called after each averaging with what it did, to log it.

    Returns:
        An object with the population, the averager and the soup. Use it in `with`, or call `close`, to stop averaging.
    """
    population = models if isinstance(models, Population) else Population(models, group, average=average)
    listed = [optimizers] if isinstance(optimizers, Optimizer) or hasattr(optimizers, "param_groups") else optimizers
    averager = Averager(
        population,
        rule,
        [unwrapped(optimizer) for optimizer in listed],
        num_steps=num_steps,
        measure=measure,
        merge_hooks=merge_hooks,
        on_nonfinite=on_nonfinite,
    )
    averager.num_steps_taken = num_steps_taken
    return Joined(averager, on_averaging=on_averaging)


def join(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    rule: Rule,
    *,
    num_steps: int | None = None,
    group: Any = None,
    asynchronous: bool | None = None,
    required: bool = True,
    **options: Any,
) -> Joined:
    """Make this process's network a member of a population, with one member per process.

    The processes are those that `papa.member` started, or those of `group`. Afterwards the network is averaged with the
    others whenever its optimizer steps. Every process must take the same number of steps, unless members are
    asynchronous: then each goes at its own speed, and is pushed toward the newest weights of the others.

    ```text
    model, optimizer = ...
    papa.join(model, optimizer, papa.Push(half_life=0.003), num_steps=num_steps)    # and train as before
    ```

    Args:
        model: this process's member.
        optimizer: its optimizer, or several; also as wrapped by Accelerate, Lightning and the like.
        rule: how to average.
        num_steps: the number of optimizer steps of the whole training.
        group: None for the processes of `papa.member`; otherwise as for `Population`.
        asynchronous: whether members go at their own speed
            (`papa.distributed.asynchronous.AsyncAverager`); None for what `papa.member` was started with.
        required: False to train this network alone where `papa.member` did not start the process.
        options: `num_steps_taken`, `average`, `merge_hooks`, `on_nonfinite`, `measure` and `on_averaging`, as for
            `averaging`; for asynchronous members `average`, `on_nonfinite`, `max_staleness` and `on_averaging`.
    """
    if not required and group is None and member_of_environment() is None:
        LOG.warning("papa.join does nothing: this process is not one of several members of a population")
        options = {name: value for name, value in options.items() if name != "max_staleness"}
        return averaging([model], optimizer, Independent(), num_steps=num_steps, group=LocalGroup(), **options)
    if asynchronous or (asynchronous is None and group is None and PUBLISHED in os.environ):
        if group is not None:
            raise MixingError("asynchronous members have no group: start them with papa.member --asynchronous DIR")
        return _join_asynchronously(model, optimizer, rule, num_steps=num_steps, **options)
    group = group_of_environment() if group is None else group
    joined = averaging([model], optimizer, rule, num_steps=num_steps, group=group, **options)
    weights, soup = os.environ.get(WEIGHTS), os.environ.pop(SOUP, None)
    if weights:
        joined.call_at_end(lambda: _save_member(joined.population, Path(weights), soup))
    return joined


def _join_asynchronously(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    rule: Rule,
    *,
    on_averaging: Callable[[Averaging], object] | None = None,
    **options: Any,
) -> Joined:
    if not isinstance(optimizer, Optimizer) and isinstance(optimizer, Sequence):
        raise MixingError(f"asynchronous members have one optimizer each, found {len(optimizer)}")
    unknown = sorted(options.keys() - {"num_steps", "average", "on_nonfinite", "max_staleness"})
    if unknown:
        raise MixingError(f"asynchronous members have no {', '.join(unknown)}: remove it, or let members wait")
    published, member, num_members = published_of_environment()
    inner = unwrapped(optimizer)
    averager = AsyncAverager(model, inner, rule, published, member=member, num_members=num_members, **options)
    joined = Joined(averager, on_averaging=on_averaging)
    soup = os.environ.pop(SOUP, None)

    def publish() -> None:
        averager.publish()
        if soup:
            # The last member to end finds the last weights of all. Until then, others may replace their files.
            with FileLock(published.directory / ".lock"), tempfile.TemporaryDirectory() as copies:
                files = [published.path(other) for other in range(num_members) if published.version(other)]
                _write_soup({int(file.stem): Path(shutil.copy(file, copies)) for file in files}, Path(soup))

    joined.call_at_end(publish)
    return joined


def _save_member(population: Population, directory: Path, soup: str | None) -> None:
    """Write the weights of this process's member; with a soup, the last member to end writes it instead of them all."""
    state = member_state(population)
    if not state:
        return  # another process that trains this member writes it
    directory.mkdir(parents=True, exist_ok=True)
    files = {member: directory / f"{member}.safetensors" for member in range(population.size)}
    start = start_of(population.group)
    with FileLock(directory / ".lock"):
        save_network(files[population.members[0]], state, {"start": start})
        if soup and all(file.exists() and _start_in(file) == start for file in files.values()):
            _write_soup(files, Path(soup))
            shutil.rmtree(directory)


def _start_in(file: Path) -> str:
    """The start of the processes that wrote a member; an earlier start may have left files."""
    with safe_open(file, framework="pt") as opened:
        return str((opened.metadata() or {}).get("start", ""))


def _write_soup(files: Mapping[int, Path], soup: Path) -> None:
    soup.parent.mkdir(parents=True, exist_ok=True)
    soup_files(list(files.values()), soup, overwrite=True, names=[f"member {member}" for member in files])


class Joined:
    """Members that are averaged when their optimizers step.

    Args:
        averager: what to call when all members have taken a step.
        on_averaging: called after each averaging.
    """

    def __init__(
        self, averager: Averager | AsyncAverager, *, on_averaging: Callable[[Averaging], object] | None = None
    ) -> None:
        self.averager, self.population = averager, averager.population
        self.last: Averaging | None = None
        """What the last averaging did."""
        self._on_averaging = on_averaging
        self._optimizers = averager.optimizers
        if not self._optimizers:
            raise MixingError("there is no optimizer, expected one for each member: their steps are what is counted")
        self.num_counted = 0
        """The steps of all optimizers."""
        self._counts = dict.fromkeys(self._optimizers, 0)
        """The steps that each optimizer has taken since all of them took one."""
        self._at_end: Callable[[], object] | None = None
        self._has_checked = self._has_warned = self._has_warned_of_length = False
        self._handles = [one.register_step_post_hook(lambda one, *_: self.count(one)) for one in self._optimizers]
        _count_skipped_steps()
        for optimizer in self._optimizers:
            _joined[optimizer] = weakref.ref(self)

    def count(self, optimizer: Optimizer) -> None:
        """Note that an optimizer stepped, or that a scaler skipped its step."""
        self.num_counted += 1
        self.averager.record_lr(optimizer)  # a schedule may change it before all members have taken their step
        self._counts[optimizer] += 1
        lowest, highest = min(self._counts.values()), max(self._counts.values())
        if highest - lowest > 1 and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"an optimizer is {highest - lowest} steps ahead of another: let members take their steps in turn, one "
                "each, since they are averaged when all of them have taken a step",
                PapaWarning,
                stacklevel=4,
            )
        if lowest:
            for one in self._counts:
                self._counts[one] -= 1
            self._step()

    def _step(self) -> None:
        if not self._has_checked:
            self._has_checked = True
            step = str(self.averager.num_steps_taken)
            self.population.group.check_same({"steps taken": step}, cure="continue all members from the same step")
        found = self.averager.step()
        if found is not None:
            self.last = found
            if self._on_averaging is not None:
                self._on_averaging(found)
        if self.averager.num_steps_taken == self.averager.num_steps:
            self._end()

    @property
    def num_steps_taken(self) -> int:
        """The number of steps so far; where to continue, for an asynchronous member that was started again."""
        return self.averager.num_steps_taken

    def soup(self) -> nn.Module:
        """The average soup now, as a separate network. All processes must call it, unless members are asynchronous."""
        return self.averager.soup() if isinstance(self.averager, AsyncAverager) else average_soup(self.population)

    def soup_tensors(self) -> dict[str, Tensor]:
        """The averaged tensors of the average soup now, by name, in new memory. All processes must call it."""
        return self.population.combined(soup_row(self.population.size, self.population.active))

    def state_dict(self) -> dict[str, Any]:
        """What must be saved, with the members and their optimizers, to continue exactly."""
        return self.averager.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.averager.load_state_dict(state)

    def call_at_end(self, function: Callable[[], object]) -> None:
        """Call a function after the last of `num_steps`, or else when the process ends."""
        self._at_end = function
        atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        if not hasattr(sys, "last_value"):  # no error has ended the process
            self._check_length()
            self._end()

    def _end(self) -> None:
        function, self._at_end = self._at_end, None
        if function is not None:
            function()

    def _check_length(self) -> None:
        """Warn, once, if training was far shorter than `num_steps`."""
        taken, planned = self.averager.num_steps_taken, self.averager.num_steps
        if planned is not None and MIN_STEPS <= taken < MIN_SHARE * planned and not self._has_warned_of_length:
            self._has_warned_of_length = True
            warnings.warn(
                f"training ended after {taken} of num_steps = {planned}, and what is a share of training, such as a "
                "half-life, was set for that length: averaging was weaker than asked for. Pass the number of optimizer "
                "steps of a member; batches whose gradients are accumulated count as one step",
                PapaWarning,
                stacklevel=3,
            )

    def close(self, *, early: bool = False) -> None:
        """Remove the hooks: the optimizers' steps are no longer counted.

        Args:
            early: training was stopped before its end, so that far fewer steps than `num_steps` are no mistake.
        """
        if not early:
            self._check_length()
        for handle in self._handles:
            handle.remove()
        for optimizer in self._optimizers:
            _joined.pop(optimizer, None)

    def __enter__(self) -> Joined:
        return self

    def __exit__(self, *error: object) -> None:
        self.close(early=error[0] is not None)

    def __repr__(self) -> str:
        return f"Joined({self.averager!r})"


_joined: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Joined]] = weakref.WeakKeyDictionary()
"""What counts the steps of an optimizer."""


def _count_skipped_steps() -> None:
    """Let `GradScaler.step` report steps that it skips, which call no hook of the optimizer.

    Otherwise a member whose gradients overflow would be a step behind the others, and wait for them at the end.
    Libraries keep their scalers to themselves, so it is the class that has to tell; it does so for joined optimizers
    only.
    """
    step = GradScaler.step
    if hasattr(step, "counts_skipped_steps"):
        return

    @functools.wraps(step)
    def counting(self: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        inner = optimizer if optimizer in _joined else unwrapped(optimizer)
        joined = _joined.get(inner, lambda: None)()
        if joined is None:
            return step(self, optimizer, *args, **kwargs)
        before = joined.num_counted
        result = step(self, optimizer, *args, **kwargs)
        if joined.num_counted == before:
            joined.count(inner)
        return result

    counting.counts_skipped_steps = True  # type: ignore[attr-defined]
    GradScaler.step = counting  # type: ignore[method-assign]


def unwrapped(optimizer: Any) -> Optimizer:
    """The optimizer inside of a library's wrapper, such as `AcceleratedOptimizer` or `LightningOptimizer`.

    A wrapper that is a complete optimizer, with hooks of its own, is left as it is.
    """
    # Wrappers may pass attributes of the optimizer inside on as their own: only those of the object itself count.
    while hasattr(optimizer, "optimizer") and "_optimizer_step_post_hooks" not in vars(optimizer):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Optimizer):
        raise MixingError(f"an optimizer is a {type(optimizer).__name__}, expected a torch.optim.Optimizer")
    return optimizer
