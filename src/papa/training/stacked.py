"""Stacked members: all local members take a step in one call, for tiny networks that are mostly overhead one by one.

The matrix holds each parameter of all members as one tensor, `(members, *shape)`. The losses of all members are one
call by `torch.func.vmap`, their gradients one backward pass, and one optimizer steps the stacked tensors. Results equal
the loop's to float tolerance.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from papa.errors import ConfigError
from papa.evaluation.inputs import logits_of, outputs_of
from papa.evaluation.scores import Batch
from papa.training.loop import Training
from papa.training.task import own_loss

ELEMENTWISE = (SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop)
"""Optimizers that update every number by itself, so that one of them can step the stacked weights of all members."""
IGNORED = -100
"""The target that `cross_entropy` leaves out."""
COUNTERS = ("step", "mu_product")
"""State that is not of the shape of the weights, and the same for all members."""
Gradients: TypeAlias = tuple[Tensor | None, ...]


class Stacked:
    """Trains all local members at once; pass the class to `papa.train` as `engine`.

    Networks that draw random numbers, such as dropout, or decide on numbers in tensors are refused, as are optimizers
    that look at whole tensors, float16 with its gradient scaler, and several batches per step. Hooks on modules and
    code in `forward` run once for all members.

    Example:
        >>> from papa import train
        >>> inputs = torch.randn(200, 4)
        >>> data = inputs, (inputs.sum(dim=1) > 0).long()
        >>> make = lambda: torch.nn.Linear(4, 2)
        >>> outcome = train(make, data, num_members=3, num_epochs=2, batch_size=1, engine=Stacked)

    Args:
        training: the training whose members take steps.
    """

    def __init__(self, training: Training) -> None:
        if training.settings.numerics.autocast is torch.float16:
            raise ConfigError("stacked members have no gradient scaler, which float16 needs: use bfloat16 or float32")
        if training.settings.accumulate > 1:
            raise ConfigError(
                f"stacked members take one batch per step, got accumulate={training.settings.accumulate}: use a larger "
                "batch, or leave out engine=Stacked"
            )
        self.training, population = training, training.population
        self._parameters = [dict(model.named_parameters()) for model in population]
        self._buffers = [dict(model.named_buffers()) for model in population]
        self._modules = [list(model.modules()) for model in population]
        self._matrices = population.matrices
        stacked = population.stacked()
        self.leaves = {name: stacked[name].detach() for name in self._parameters[0]}
        """Each parameter of all members, by name."""
        every = population[0].named_parameters(remove_duplicate=False)
        shared = {id(parameter): name for name, parameter in self._parameters[0].items()}
        self._tied = {name: shared[id(parameter)] for name, parameter in every if name not in self.leaves}
        self._check_optimizers()
        self.optimizer = self._make_optimizer(training.optimizers[0])
        self._num_shared = 0
        self._known_switches: list[bool] = []
        self._batches: Iterator[Batch] = iter(())

    def _check_optimizers(self) -> None:
        """All must have the same type and settings, and update every number by itself."""
        found: list[list[dict[str, Any]]] = []
        for index, optimizer in enumerate(self.training.optimizers):
            kind = type(optimizer)
            if kind not in ELEMENTWISE:
                known = ", ".join(one.__name__ for one in ELEMENTWISE)
                raise ConfigError(
                    f"stacked members cannot be stepped by {kind.__name__}, expected one of {known}, which update "
                    "every number by itself: leave out engine=Stacked"
                )
            names = {id(parameter): name for name, parameter in self._parameters[index].items()}
            if any(id(one) not in names for group in optimizer.param_groups for one in group["params"]):
                raise ConfigError(
                    f"the optimizer of member {index} trains a tensor that is not a parameter of the member: leave out "
                    "engine=Stacked"
                )
            groups = optimizer.param_groups
            found.append([{**group, "params": [names[id(one)] for one in group["params"]]} for group in groups])
            if found[index] != found[0] or kind is not type(self.training.optimizers[0]):
                raise ConfigError(
                    f"the optimizer of member {index} has other settings than that of member 0, and stacked members "
                    "share them: leave out engine=Stacked"
                )

    def _make_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """A copy of a member's optimizer, for the stacked tensors."""
        memo: dict[int, Any] = {id(self._parameters[0][name]): leaf for name, leaf in self.leaves.items()}
        memo[id(optimizer.state)] = defaultdict(dict)
        return copy.deepcopy(optimizer, memo)

    def start_(self) -> None:
        """Take over the state of the members' optimizers, and begin with the current step."""
        training = self.training
        training.population.refresh_()
        self.optimizer.state.clear()
        for name, leaf in self.leaves.items():
            pairs = zip(training.optimizers, self._parameters, strict=True)
            states = [optimizer.state.get(own[name], {}) for optimizer, own in pairs]
            for key in states[0]:
                values = [state.get(key) for state in states]
                is_shared = key in COUNTERS or not isinstance(values[0], Tensor)
                if any(value is None or (is_shared and value != values[0]) for value in values):
                    raise ConfigError(
                        f"the optimizers of members have other values as '{key}' of '{name}', which stacked members "
                        "share: leave out engine=Stacked"
                    )
                self.optimizer.state[leaf][key] = copy.deepcopy(values[0]) if is_shared else torch.stack(values)
        self._share_state_()
        self._batches = training.batches.stacked(training.step)

    def _share_state_(self) -> None:
        """Let the state of each member's optimizer be its part of the stacked state, in the same memory."""
        for name, leaf in self.leaves.items():
            state = self.optimizer.state.get(leaf, {})
            for key, value in state.items():
                is_shared = key in COUNTERS or not isinstance(value, Tensor)
                if not is_shared:  # in the memory order of the weights
                    value = state[key] = torch.empty_like(leaf, dtype=value.dtype).copy_(value)
                for index, optimizer in enumerate(self.training.optimizers):
                    own = optimizer.state[self._parameters[index][name]]
                    own[key] = value if is_shared else value[index]
        self._num_shared = len(self.optimizer.state)

    def hand_back_(self) -> None:
        """Give the members' optimizers memory of their own for their state, at the end of training."""
        for optimizer in self.training.optimizers:
            for state in optimizer.state.values():
                state.update({key: value.clone() for key, value in state.items() if isinstance(value, Tensor)})

    @torch.no_grad()
    def reset_member_(self, index: int) -> None:
        """Set a member's part of the optimizer state to zero, its initial value; counters are shared and stay."""
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if key not in COUNTERS and isinstance(value, Tensor):
                    value[index].zero_()
        self._share_state_()

    def step_(self) -> None:
        """Take a step with every local member."""
        training = self.training
        self._follow_members_()
        inputs, targets = next(self._batches)
        # Copies: `vmap` drops what a forward pass writes to tensors with gaps, as those of the matrix are.
        buffers = [torch.stack([own[name] for own in self._buffers]) for name in self._buffers[0]]
        try:
            losses = self._losses(inputs, targets, [*self.leaves.values(), *buffers])
        except RuntimeError as error:  # whatever torch raises at what vmap cannot do
            raise ConfigError(
                f"members cannot be stacked: a {type(training.population[0]).__name__} fails in torch.vmap, as "
                "networks with dropout or decisions on numbers do "
                f"({str(error).strip().partition(chr(10))[0]}): leave out engine=Stacked"
            ) from error
        trained = [leaf for leaf in self.leaves.values() if leaf.requires_grad]
        # A parameter that nothing uses has no gradient and is not updated, not even by weight decay, as in the loop.
        gradients: Gradients = torch.autograd.grad(losses, trained, torch.ones_like(losses), allow_unused=True)
        with torch.no_grad():
            for name, buffer in zip(self._buffers[0], buffers, strict=True):
                for own, value in zip(self._buffers, buffer, strict=True):
                    own[name].copy_(value)
            if training.settings.numerics.clip_norm is not None:
                gradients = _clipped(gradients, training.settings.numerics.clip_norm)
        for leaf, gradient in zip(trained, gradients, strict=True):
            leaf.grad = gradient
        for joint, group in zip(self.optimizer.param_groups, training.optimizers[0].param_groups, strict=True):
            # Schedules change the members' settings. Fused kernels take no tensors with gaps.
            joint.update({**group, "params": joint["params"], "fused": False})
        self.optimizer.step()
        if len(self.optimizer.state) != self._num_shared:
            self._share_state_()
        training.add_losses_(losses)

    def _losses(self, inputs: Tensor, targets: Tensor, tensors: list[Tensor]) -> Tensor:
        """The loss of each member, from the parameters and buffers of all."""
        task = self.training.task
        is_usual = task.objective is None and task.loss in (own_loss, F.cross_entropy)
        if not is_usual or targets.dim() != 2 or targets.is_floating_point():

            def loss(inputs: Tensor, targets: Tensor, *tensors: Tensor) -> Tensor:
                return self.training.loss_of(self._network(tensors), inputs, targets)

            return vmap(loss)(inputs, targets, *tensors)

        def logits(inputs: Tensor, *tensors: Tensor) -> Tensor:
            return logits_of(outputs_of(self._network(tensors), inputs))  # type: ignore[no-any-return]

        with self.training.autocast():  # the cross-entropy of classes in one call: vmap takes three times as long
            outputs = vmap(logits)(inputs, *tensors)
            found = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
            return found.sum(dim=1) / (targets != IGNORED).sum(dim=1)

    def _network(self, tensors: Sequence[Tensor]) -> Callable[..., Any]:
        """One member, from its parameters and buffers."""
        named = dict(zip((*self.leaves, *self._buffers[0]), tensors, strict=True))
        named.update({name: named[first] for name, first in self._tied.items()})
        return partial(functional_call, self.training.population[0], named, tie_weights=False)

    def _follow_members_(self) -> None:
        """Train what the members train, in the memory that they are in; all must be alike."""
        population = self.training.population
        if self._matrices is not population.matrices:  # it was laid out anew, for another memory order
            self._matrices = population.matrices
            for name, leaf in self.leaves.items():
                leaf.data = population.stacked()[name]
        if self._switches(0) == self._known_switches:
            return
        self._known_switches = self._switches(0)
        for index, member in enumerate(self.training.members):
            if self._switches(index) != self._known_switches:
                raise ConfigError(
                    f"member {member} trains other parameters than member {self.training.members[0]}, or has modules "
                    "in another mode: leave out engine=Stacked"
                )
        for name, leaf in self.leaves.items():
            leaf.grad = None
            leaf.requires_grad_(self._parameters[0][name].requires_grad)

    def _switches(self, index: int) -> list[bool]:
        """Which parameters a member trains, and the mode of its modules."""
        trained = [parameter.requires_grad for parameter in self._parameters[index].values()]
        return trained + [module.training for module in self._modules[index]]


def _clipped(gradients: Gradients, max_norm: float) -> Gradients:
    """Gradients scaled down so that no member's has a larger norm, as `clip_grad_norm_` does for one network."""
    parts = [torch.linalg.vector_norm(one.flatten(1), dim=1) for one in gradients if one is not None]
    scales = (max_norm / (torch.linalg.vector_norm(torch.stack(parts), dim=0) + 1e-6)).clamp(max=1.0)
    return tuple(
        None if one is None else one * scales.to(one.dtype).view(-1, *[1] * (one.dim() - 1)) for one in gradients
    )
