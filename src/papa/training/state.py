"""The state of a training in checkpoints: what is saved, what is expected when loading, and how to restore it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from papa.errors import MixingError, RunError
from papa.training import checkpoint
from papa.training.loop import NUM_BAD_LOSSES, Training


def member_states(training: Training) -> dict[int, tuple[dict[str, Tensor], dict[str, Any]]]:
    """The state of the local members."""
    states = {}
    memory = training.averager.memory
    for index, member in enumerate(training.members):
        tensors, numbers = checkpoint.member_state(training.population[index], training.optimizers[index])
        scaler = training.scalers[index]
        numbers["scaler"] = None if scaler is None else scaler.state_dict()
        numbers["loss_sum"] = float(training.loss_sums[index])
        numbers["bad_losses"] = [not math.isfinite(losses[index]) for losses in training.recent_losses]
        tensors.update({f"averager.{name}": tensor for name, tensor in memory.tensors_of(index).items()})
        tensors.update({f"callbacks.{name}": tensor for name, tensor in _callback_state(training, index).items()})
        states[member] = (tensors, numbers)
    return states


def _callback_state(training: Training, index: int) -> dict[str, Tensor]:
    return {
        f"{number}.{name}": tensor
        for number, callback in enumerate(training.callbacks)
        for name, tensor in callback.member_state(index).items()
    }


def expected_states(training: Training) -> dict[int, checkpoint.Expected]:
    """What a checkpoint of the local members must contain."""
    templates = training.averager.memory.templates()
    return {
        member: checkpoint.Expected(
            training.population[index], training.optimizers[index], templates, _callback_state(training, index)
        )
        for index, member in enumerate(training.members)
    }


def shared_state(training: Training) -> dict[str, Any]:
    """The state that all members share; a JSON value."""
    return {
        "num_averagings": training.averager.num_averagings,
        "seconds": dict(training.seconds),
        "nonfinite": list(training.nonfinite),
        "dropped": sorted(training.population.dropped),
        **({"rule": dict(training.averager.rule_state)} if training.averager.rule_state else {}),
    }


def _check_shared(training: Training, step: int, state: Mapping[str, Any]) -> None:
    """Raise a `RunError` if the shared state is invalid."""
    seconds, num_averagings = state.get("seconds"), state.get("num_averagings")
    if not 0 <= step <= training.length.num_steps:
        raise RunError(f"the checkpoint is of step {step}, expected at most {training.length.num_steps}")
    if (
        not isinstance(seconds, dict)
        or seconds.keys() != training.seconds.keys()
        or not all(map(_is_number, seconds.values()))
    ):
        raise RunError(f"the checkpoint has {seconds!r} as seconds, expected {', '.join(training.seconds)}")
    if type(num_averagings) is not int or num_averagings < 0:
        raise RunError(f"the checkpoint has {num_averagings!r} averagings, expected a whole number")
    nonfinite, dropped, size = state.get("nonfinite"), state.get("dropped"), training.population.size
    if not isinstance(nonfinite, list) or not all(
        isinstance(event, dict) and type(event.get("member")) is type(event.get("step")) is int for event in nonfinite
    ):
        raise RunError(f"the checkpoint has {nonfinite!r} as non-finite members, expected a list of events")
    if not isinstance(dropped, list) or not all(type(j) is int and 0 <= j < size for j in dropped):
        raise RunError(f"the checkpoint has {dropped!r} as dropped members, expected some of {size}")
    try:
        training.averager.checked_rule_state(state.get("rule"))
    except MixingError as error:
        raise RunError(f"the checkpoint is of another rule: {error}") from None


def _check_member(training: Training, index: int, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
    """Raise a `RunError` if a member's numbers are invalid; its tensors were checked before."""
    member, scaler = training.members[index], training.scalers[index]
    found, expected = numbers.get("scaler"), None if scaler is None else scaler.state_dict().keys()
    if (found.keys() if isinstance(found, dict) else found) != expected or not all(
        map(_is_number, (found or {}).values())
    ):
        raise RunError(f"the checkpoint has {found!r} as the gradient scaler of member {member}")
    loss_sum = numbers.get("loss_sum", "nothing")
    if loss_sum is not None and not _is_number(loss_sum):
        raise RunError(f"the checkpoint has {loss_sum!r} as the loss of member {member}")
    bad = numbers.get("bad_losses")
    if not isinstance(bad, list) or len(bad) != NUM_BAD_LOSSES or not all(type(one) is bool for one in bad):
        raise RunError(f"the checkpoint has {bad!r} as the bad losses of member {member}")
    missing = [name for name in training.averager.memory.names_of(member) if f"averager.{name}" not in tensors]
    if missing:
        raise RunError(f"the checkpoint has no {missing[0]} of member {member}: it is of another rule")


def load_state_(
    training: Training, step: int, state: Mapping[str, Any], members: Mapping[int, checkpoint.MemberState]
) -> None:
    """Restore a training from a checkpoint, one member after the other.

    After a `RunError` the training must not be used until another checkpoint was loaded.
    """
    _check_shared(training, step, state)
    of_averager = [_load_member_(training, index, *members[member]) for index, member in enumerate(training.members)]
    training.nonfinite, training.population.dropped = list(state["nonfinite"]), frozenset(state["dropped"])
    training.seconds.update(state["seconds"])
    training.averager.num_averagings = state["num_averagings"]
    training.averager.rule_state = training.averager.checked_rule_state(state.get("rule"))
    training.averager.memory.load_(of_averager)
    training.go_to_(step)


def _load_member_(
    training: Training, index: int, tensors: dict[str, Tensor], numbers: dict[str, Any]
) -> dict[str, Tensor]:
    """Restore a member; returns what the averager saved with it."""
    _check_member(training, index, tensors, numbers)
    checkpoint.load_member_state_(training.population[index], training.optimizers[index], tensors, numbers)
    scaler = training.scalers[index]
    if scaler is not None:
        scaler.load_state_dict(numbers["scaler"])
    training.loss_sums[index] = math.nan if numbers["loss_sum"] is None else float(numbers["loss_sum"])
    for position, is_bad in enumerate(numbers["bad_losses"]):
        training.recent_losses[position][index] = math.nan if is_bad else 0.0
    for number, callback in enumerate(training.callbacks):
        own = _with_prefix(tensors, f"callbacks.{number}.")
        if own:
            callback.load_member_state_(index, own)
    return _with_prefix(tensors, "averager.")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300


def _with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
