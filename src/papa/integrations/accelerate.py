"""Averaging in a loop that Accelerate prepares: p models in one process, or one in each process of `papa.member`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from papa.attach import averaging, join
from papa.core.rules import Rule
from papa.distributed.members import member_of_environment
from papa.distributed.mesh import inner_module
from papa.errors import ConfigError
from papa.packages import importing

with importing():
    from accelerate import Accelerator


class PopulationAveraging:
    """Averages prepared models whenever all of them have taken an optimizer step.

    Used as Accelerate's own `LocalSGD`, but without a call in the loop:

    ```text
    models, optimizers, loaders, schedulers = ([accelerator.prepare(one) for one in these] for these in ...)
    rule = papa.Push(half_life=0.003)
    with PopulationAveraging(accelerator, models, optimizers, rule, num_steps=n, loaders=loaders) as averaging:
        for batches in zip(*loaders, strict=True):
            with accelerator.accumulate(*models):
                for model, optimizer, scheduler, batch in zip(models, optimizers, schedulers, batches):
                    accelerator.backward(model(**batch).loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
    averaging.soup().save_pretrained("soup")
    ```

    Steps are those of the optimizers: micro-batches of `accumulate` do not count, and a step that mixed precision skips
    counts as one. `accelerator.save_state` and `load_state` include the state of the averaging.

    Args:
        accelerator: what prepared the models.
        models: the prepared models of all members; or the one of this process, started by `papa.member`.
        optimizers: their prepared optimizers.
        rule: how to average.
        num_steps: the number of optimizer steps of the whole training, per member.
        enabled: False to train members independently; there is still a soup.
        loaders: the members' loaders, if each has a generator of its own, as those of `papa.loaders`: their orders are
            saved too. Save between epochs, or use `accelerator.skip_first_batches` for the rest of one.
        options: further options of `papa.averaging`, such as `average` and `on_averaging`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        models: nn.Module | Sequence[nn.Module],
        optimizers: Optimizer | Sequence[Optimizer],
        rule: Rule,
        *,
        num_steps: int | None = None,
        enabled: bool = True,
        loaders: Sequence[DataLoader[Any]] = (),
        **options: Any,
    ) -> None:
        self.accelerator = accelerator
        self._generators = [loader.generator for loader in loaders if loader.generator is not None]
        if isinstance(models, nn.Module) and not isinstance(models, nn.ModuleList):
            is_member = member_of_environment() is not None or options.get("group") is not None
            if accelerator.num_processes > 1 and not is_member:
                raise ConfigError(
                    f"Accelerate trains one network in {accelerator.num_processes} processes: its copies are no "
                    "members of a population. Start one process for each member with `torchrun --nproc-per-node 3 -m "
                    "papa.member train.py`, or prepare several models in each process"
                )
            self.joined = join(inner_module(models), optimizers, rule, num_steps=num_steps, **options)
        else:
            members = [inner_module(model) for model in models]
            self.joined = averaging(members, optimizers, rule, num_steps=num_steps, **options)
        self.averager, self.population = self.joined.averager, self.joined.population
        if not enabled:
            self.joined.close()
        accelerator.register_for_checkpointing(self)

    def soup(self) -> nn.Module:
        """The average soup now, as a separate network without Accelerate's wrappers. All processes must call it."""
        soup: nn.Module = self.accelerator.unwrap_model(self.joined.soup(), keep_fp32_wrapper=False)
        return soup

    def state_dict(self) -> dict[str, Any]:
        """What `accelerator.save_state` saves besides members, optimizers and schedulers."""
        return {"averager": self.joined.state_dict(), "orders": [one.get_state() for one in self._generators]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        if len(state["orders"]) != len(self._generators):
            raise ConfigError(
                f"the state has the orders of {len(state['orders'])} loaders, got {len(self._generators)}: pass the "
                "same loaders as when it was saved"
            )
        self.joined.load_state_dict(state["averager"])
        for generator, order in zip(self._generators, state["orders"], strict=True):
            generator.set_state(order)

    def __enter__(self) -> PopulationAveraging:
        return self

    def __exit__(self, *error: object) -> None:
        self.joined.close(early=error[0] is not None)
