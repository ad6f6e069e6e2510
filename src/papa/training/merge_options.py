"""What is done to members right before and right after they are averaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from papa.averager import MergeHook
from papa.errors import ConfigError
from papa.population import Population
from papa.repair import BatchesFor, RepairMerges, ResetBatchNormAfterMerges, Scope
from papa.rules import AveragingContext

RepairScope: TypeAlias = Literal["all", "activations", "batch-norm"]


@dataclass(frozen=True, kw_only=True)
class MergeOptions:
    """How members are matched before they are averaged, and repaired after merges."""

    own_policies: bool = True
    """Look at the data under each member's own augmentation, as the paper does: two passes for each member. Else at
    plain data: one pass for each member and one for each distinct child."""
    repair_scope: RepairScope = "all"
    """Repair all convolutions and linear layers; those before activation functions or BatchNorm (`activations`, see
    `papa.repair.Scope`); or only re-estimate BatchNorm, after which networks with BatchNorm after every convolution
    compute the same."""
    align: str | None = None
    """Match members' units to the first member's before they are averaged, by `activations`, `weights` or `sinkhorn`;
    None for not."""
    align_momentum: bool = True
    """Permute the optimizers' state with the units. The paper's published code leaves it unpermuted."""
    align_every_epochs: float = 5.0
    """How often, for rules that average more often than that and do not merge."""
    num_align_batches: int | None = 10
    """How many batches of training data units are matched on; None for all there are."""
    mutation: float = 0.0
    """Add noise of this standard deviation, divided by the generation, to members after averaging; 0 for not."""
    mutation_every_epochs: float = 5.0
    """How often, for rules that do not merge."""

    @property
    def repaired_layers(self) -> Scope:
        """The scope of a REPAIR that rescales layers, such as that of independent members' soups."""
        return "activations" if self.repair_scope == "activations" else "all"


def repair_hook(
    model: nn.Module, merging: MergeOptions, own_batches: BatchesFor, plain_batches: Callable[[], Sequence[Tensor]]
) -> MergeHook:
    """What repairs members after they were merged.

    Args:
        model: one of them.
        merging: how.
        own_batches: a member's batches under its own augmentation.
        plain_batches: the batches without any.
    """
    resets_batch_norm = merging.repair_scope == "batch-norm"
    if resets_batch_norm and not any(isinstance(layer, _BatchNorm) for layer in model.modules()):
        raise ConfigError(
            f"REPAIR is to re-estimate BatchNorm only, but {type(model).__name__} has no BatchNorm layer: repair all "
            "layers, or none"
        )

    def hook_for(batches_for: BatchesFor) -> MergeHook:
        if resets_batch_norm:
            return ResetBatchNormAfterMerges(batches_for)
        return RepairMerges(batches_for, scope=merging.repaired_layers)

    def around(population: Population, matrix: Tensor, context: AveragingContext) -> AbstractContextManager[None]:
        if merging.own_policies:
            return hook_for(own_batches)(population, matrix, context)
        shared = plain_batches()
        return hook_for(lambda member: shared)(population, matrix, context)

    return around
