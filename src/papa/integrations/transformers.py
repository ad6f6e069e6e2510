"""A callback that makes the model of a transformers `Trainer` a member of a population, one per process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from papa.attach import Joined, averaging, join
from papa.core.layout import named_tensors
from papa.core.rules import Rule
from papa.couplings.by_name import options_of, rule_of
from papa.distributed.members import group_of_environment
from papa.errors import ConfigError, PapaWarning
from papa.files.saved_soups import soup_state
from papa.packages import importing
from papa.training.callbacks import averaging_values

with importing():
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

TENSORS = "papa.pt"
"""The file of a checkpoint with the tensors that a rule keeps, if it keeps any."""


class PopulationAveragingCallback(TrainerCallback, ExportableState):
    """Averages the Trainer's model with those of the other processes that `papa.member` started.

    Each process is an ordinary training of one member, with its own output directory and its own checkpoints:

    ```text
    callback = PopulationAveragingCallback(papa.Push(half_life=0.003), soup="out/soup")
    trainer = Trainer(model, args, ..., callbacks=[callback])
    ```

    ```console
    torchrun --nproc-per-node 3 -m papa.member train.py --seed {member} --output_dir out/{member}
    ```

    Checkpoints of the Trainer have the state of the averaging: a training that resumes, in all processes from the same
    step, gives the weights of one that was never stopped. Of a PEFT model only the adapters are averaged. The members'
    mean distance to their mean around the last averaging is logged as `papa/distance_before` and `papa/distance_after`.

    Args:
        rule: how to average; or its name and options, `{"name": "Push", "half_life": 0.003}`, as JSON can hold them.
        soup: where the average soup is saved when training ends, as by `save_pretrained`; None to leave it to
            `papa.member --soup`, which writes a plain file of weights.
        average: which tensors are averaged, as for `papa.Population`.
        on_nonfinite: as for `papa.Averager`.
        group: None for the processes of `papa.member`; otherwise as for `papa.Population`. It is not saved.
    """

    def __init__(
        self,
        rule: Rule | Mapping[str, Any],
        *,
        soup: str | os.PathLike[str] | None = None,
        average: Mapping[str, bool] | None = None,
        on_nonfinite: Any = "restart",
        group: Any = None,
    ) -> None:
        self.rule = rule if isinstance(rule, Rule) else rule_of(rule)
        self.soup = None if soup is None else os.fspath(soup)
        self.average, self.on_nonfinite, self.group = dict(average or {}), on_nonfinite, group
        self.joined: Joined | None = None
        """The member and its averager while training."""

    def state(self) -> dict[str, Any]:
        """Arguments and progress, as JSON: what the Trainer saves in `trainer_state.json`."""
        arguments = {"soup": self.soup, "average": self.average, "on_nonfinite": self.on_nonfinite}
        progress = None if self.joined is None else self.joined.state_dict()
        if _has_tensors(progress):
            progress = {"file": TENSORS}
        return {"args": {"rule": options_of(self.rule), **arguments}, "attributes": {"progress": progress}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Join the population, and continue from the checkpoint if there is one."""
        self._close()
        model = kwargs["model"]
        base = only_trainable(model) if hasattr(model, "peft_config") else {}
        options: dict[str, Any] = {
            "num_steps": state.max_steps,
            "num_steps_taken": state.global_step,
            "group": group_of_environment() if self.group is None else self.group,
            "average": {**base, **self.average},
            "on_nonfinite": self.on_nonfinite,
        }
        if self.soup is None:
            self.joined = join(model, kwargs["optimizer"], self.rule, **options)
        else:  # the soup is saved here
            self.joined = averaging([model], kwargs["optimizer"], self.rule, **options)
        if state.global_step:
            self._resume(args, state)

    def _resume(self, args: TrainingArguments, state: TrainerState) -> None:
        assert self.joined is not None
        callbacks: Any = state.stateful_callbacks or {}
        saved = callbacks.get(type(self).__name__, {})
        progress = saved.get("attributes", {}).get("progress") if isinstance(saved, dict) else None
        if progress is None:
            warnings.warn(
                f"the checkpoint has no state of {type(self).__name__}: averaging begins at step {state.global_step}",
                PapaWarning,
                stacklevel=2,
            )
            return
        if "file" in progress:
            given = args.resume_from_checkpoint
            path = (Path(given) if isinstance(given, str) else _checkpoint_of(args, state)) / TENSORS
            if not path.is_file():
                raise ConfigError(
                    f"there is no {path}, expected the tensors that the rule keeps: name the checkpoint's "
                    "directory in TrainingArguments(resume_from_checkpoint=...)"
                )
            progress = torch.load(path, map_location="cpu", weights_only=True)
        self.joined.load_state_dict(progress)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Save the tensors that a rule keeps, which JSON cannot hold, into the checkpoint."""
        if self.joined is None or not args.should_save:
            return
        progress = self.joined.state_dict()
        if _has_tensors(progress):
            torch.save(progress, _checkpoint_of(args, state) / TENSORS)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the distance of members to their mean to what is logged."""
        last = None if self.joined is None else self.joined.last
        if last is not None:
            kwargs["logs"].update(averaging_values(last))
            state.log_history[-1].update(averaging_values(last))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save the soup, and stop averaging."""
        if self.joined is not None and self.soup is not None:
            model = kwargs["model"]
            weights = soup_state(self.joined.population, only_averaged=hasattr(model, "peft_config"))
            if weights:
                for part in (model, kwargs.get("processing_class")):
                    if part is not None:
                        part.save_pretrained(self.soup, **({"state_dict": weights} if part is model else {}))
            self.joined.population.group.barrier()
        self._close()

    def _close(self) -> None:
        if self.joined is not None:
            self.joined.close(early=True)  # the length is the Trainer's own: if it ends before, it was asked to
        self.joined = None


def only_trainable(model: nn.Module) -> dict[str, bool]:
    """For `average`: leave out all tensors but the parameters that are trained, such as adapters.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
        >>> only_trainable(net)
        {'*': False, '1.weight': True, '1.bias': True}
    """
    trained = [name for name, tensor in named_tensors(model).items() if tensor.requires_grad]
    return {"*": False, **dict.fromkeys(trained, True)}


def _checkpoint_of(args: TrainingArguments, state: TrainerState) -> Path:
    """The directory that the Trainer writes or wrote at this step."""
    return Path(args.output_dir or ".") / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _has_tensors(state: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(state))
