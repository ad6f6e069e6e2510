"""The merge hooks of a training: alignment before averaging and REPAIR after merges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from papa.align import AlignMerges
from papa.core.averager import MergeHook
from papa.core.population import Population
from papa.core.rules import AveragingContext, Rule
from papa.errors import ConfigError
from papa.repair import BatchesFor, RepairMerges, ResetBatchNormAfterMerges
from papa.training.loop import Training
from papa.training.options import AveragingOptions


def merge_hooks_for(training: Training, rule: Rule) -> list[MergeHook]:
    """The hooks that a training's settings ask for: align members before averaging, repair them after merges."""
    options, hooks = training.settings.averaging, list[MergeHook]()
    if options.align is not None and rule.averages:
        hooks.append(
            AlignMerges(
                training.batches.plain(options.align.num_batches),
                by=options.align.by,
                optimizers=training.optimizers if options.align.move_momentum else (),
                every_steps=1 if rule.is_merge else training.steps_in(options.align.every_epochs),
            )
        )
    if options.repair is not None and options.repair.num_batches and rule.is_merge and rule.takes_hooks:
        batches = training.batches
        hooks.append(repair_hook(training.population[0], options, batches.repair_batches, batches.plain_repair))
    return hooks


def repair_hook(
    model: nn.Module, options: AveragingOptions, own_batches: BatchesFor, plain_batches: Callable[[], Sequence[Tensor]]
) -> MergeHook:
    """A hook that repairs members after a merge, as `options.repair` says.

    `model` is one of the members. `own_batches` are a member's batches under its own augmentation, `plain_batches`
    those without.
    """
    repair = options.repair
    assert repair is not None
    resets_batch_norm = repair.scope == "batch-norm"
    if resets_batch_norm and not any(isinstance(layer, _BatchNorm) for layer in model.modules()):
        raise ConfigError(
            f"REPAIR is to re-estimate BatchNorm only, but {type(model).__name__} has no BatchNorm layer: repair all "
            "layers, or none"
        )

    def hook(population: Population, matrix: Tensor, context: AveragingContext) -> AbstractContextManager[None]:
        batches_for = own_batches
        if not repair.own_policies:
            shared = plain_batches()
            batches_for = lambda member: shared  # noqa: E731
        if resets_batch_norm:
            return ResetBatchNormAfterMerges(batches_for)(population, matrix, context)
        return RepairMerges(batches_for, scope=options.repaired_layers)(population, matrix, context)

    return hook
