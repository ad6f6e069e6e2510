"""One optimizer for the parameters of all members, each stacked into one tensor."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from papa.core.population import Population
from papa.errors import ConfigError

ELEMENTWISE = (SGD, Adam, AdamW, RMSprop)
"""Optimizers that update every weight independently, so that one instance can hold all members' weights."""

COUNTER = "step"
"""The only state that does not have the shape of the parameter."""


class StackedOptimizer:
    """Steps all members at once, by the settings of their own optimizers.

    It holds the state (such as momentum) until `hand_back_` returns it to the members' optimizers. Settings are read
    before each step from the first member's optimizer, where schedules change them.

    Args:
        population: the members to train.
        optimizers: the members' optimizers.
    """

    def __init__(self, population: Population, optimizers: Sequence[Optimizer]) -> None:
        self.population, self.optimizers = population, optimizers
        self._check_alike()
        self._matrices = population.matrices
        stacked = population._stacked()
        self.parameters = [dict(model.named_parameters()) for model in population]
        self.leaves = {name: stacked[name].detach() for name in self.parameters[0]}
        names = [{id(parameter): name for name, parameter in own.items()} for own in self.parameters]
        self._names = [[names[0][id(parameter)] for parameter in group["params"]] for group in self._groups(0)]
        # A copy, since not every constructor takes what `defaults` holds.
        self._joint = copy.copy(optimizers[0])
        self._joint.state = defaultdict(dict)
        self._joint.param_groups = [{"params": [self.leaves[name] for name in group]} for group in self._names]

    def _groups(self, index: int) -> list[dict[str, Any]]:
        return self.optimizers[index].param_groups

    def _check_alike(self) -> None:
        for index, optimizer in enumerate(self.optimizers):
            kind = type(optimizer)
            if kind not in ELEMENTWISE:
                known = ", ".join(each.__name__ for each in ELEMENTWISE)
                raise ConfigError(
                    f"the stacked engine cannot step {kind.__name__}, expected one of {known}, which update every "
                    "weight independently: use the loop engine"
                )
            names = {id(parameter): name for name, parameter in self.population[index].named_parameters()}
            for group in optimizer.param_groups:
                if any(id(parameter) not in names for parameter in group["params"]):
                    raise ConfigError(
                        f"the optimizer of member {index} trains a tensor that is not a parameter of the member: "
                        "use the loop engine"
                    )
            if self._settings(index) != self._settings(0) or kind is not type(self.optimizers[0]):
                raise ConfigError(
                    f"the optimizer of member {index} has other settings than that of member 0, and stacked members "
                    "share them: use the loop engine"
                )

    def _settings(self, index: int) -> list[dict[str, Any]]:
        names = {id(parameter): name for name, parameter in self.population[index].named_parameters()}
        return [
            {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
            for group in self._groups(index)
        ]

    def follow_matrix_(self) -> bool:
        """Use the population's new matrix, if it was laid out again for another memory order; whether it was."""
        if self._matrices is self.population.matrices:
            return False
        self._matrices = self.population.matrices
        for name, view in self.population._stacked().items():
            if name in self.leaves:
                self.leaves[name].data = view
        return True

    def step(self) -> None:
        """Step all members with the gradients in the `.grad` of `leaves`."""
        for joint, group in zip(self._joint.param_groups, self._groups(0), strict=True):
            # Only the plain implementations take tensors with gaps between the rows.
            joint.update({**group, "params": joint["params"], "foreach": False, "fused": False})
        self._joint.step()

    def take_over_(self) -> None:
        """Take over the state of the members' optimizers."""
        self._joint.state = defaultdict(dict)
        for name, leaf in self.leaves.items():
            states = [
                optimizer.state.get(own[name], {})
                for optimizer, own in zip(self.optimizers, self.parameters, strict=True)
            ]
            for key in states[0]:
                if any(key not in state for state in states):
                    raise ConfigError(
                        f"the optimizers of only some members have '{key}' for '{name}': use the loop engine"
                    )
                self._joint.state[leaf][key] = _joined(key, [state[key] for state in states])

    def hand_back_(self) -> None:
        """Return each member's part of the state to its optimizer."""
        for name, leaf in self.leaves.items():
            for index, (optimizer, own) in enumerate(zip(self.optimizers, self.parameters, strict=True)):
                for key, value in self._joint.state.get(leaf, {}).items():
                    optimizer.state[own[name]][key] = _part(key, value, index)

    @torch.no_grad()
    def forget_(self, index: int) -> None:
        """Set a member's part of the state to zero, its initial value; counters are shared and stay."""
        for state in self._joint.state.values():
            for key, value in state.items():
                if key != COUNTER and isinstance(value, Tensor):
                    value[index].zero_()


def _joined(key: str, values: list[Any]) -> Any:
    if key != COUNTER and isinstance(values[0], Tensor):
        return torch.stack(values)
    if any(value != values[0] for value in values):
        raise ConfigError(
            f"members' optimizers differ in '{key}' ({values}), which stacked members share: use the loop engine"
        )
    return copy.deepcopy(values[0])


def _part(key: str, value: Any, index: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.clone() if key == COUNTER else value[index].clone()


def clipped(gradients: Sequence[Tensor], max_norm: float) -> list[Tensor]:
    """Gradients scaled down so that no member's has a larger norm, as `clip_grad_norm_` does for one network."""
    parts = [torch.linalg.vector_norm(gradient.flatten(1), dim=1) for gradient in gradients]
    norms = torch.linalg.vector_norm(torch.stack(parts), dim=0)
    scales = (max_norm / (norms + 1e-6)).clamp(max=1.0)
    return [gradient * scales.to(gradient.dtype).view(-1, *[1] * (gradient.dim() - 1)) for gradient in gradients]
