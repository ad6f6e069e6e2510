"""Loading weights from a local file, also into a network with another number of classes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TypeAlias

from torch import Tensor, nn

from papa.errors import ConfigError, SoupError
from papa.files import open_weights
from papa.lab.models.head import head_modules

FilePath: TypeAlias = str | os.PathLike[str]

_NUM_DIFFERENCES_SHOWN = 10


def load_weights_(model: nn.Module, path: FilePath) -> list[str]:
    """Load weights from a file; the classifier is kept if the file has none, or one for other classes.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from papa.lab.models import VGG
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save(VGG(11, num_classes=100, width=4).state_dict(), f"{folder}/vgg.pt")
        ...     load_weights_(VGG(11, num_classes=10, width=4), f"{folder}/vgg.pt")
        ['head.weight', 'head.bias']

    The file is one that `papa.files.open_weights` takes. One that does not fit a timm network is converted by timm's
    `checkpoint_filter_fn`, as files that timm downloads are. The first convolution is not adapted to another number of
    channels. The network is changed only if all weights fit.

    Returns:
        The names of the classifier's tensors that were not loaded.
    """
    found = read_state_dict(path)
    expected = model.state_dict()
    new_head, differences = _compare(model, found, expected)
    if differences and (converted := _converted_by_timm(model, found)) is not None:
        other_head, remaining = _compare(model, converted, expected)
        if len(remaining) < len(differences):
            found, new_head, differences = converted, other_head, remaining
    if differences:
        shown = "; ".join(differences[:_NUM_DIFFERENCES_SHOWN])
        more = len(differences) - _NUM_DIFFERENCES_SHOWN
        rest = f"; and {more} more" if more > 0 else ""
        raise ConfigError(
            f"the weights in {path} do not fit {type(model).__name__}: {shown}{rest}. Expected weights of the same "
            "network and options; only the classifier may have another number of classes"
        )
    model.load_state_dict({name: tensor for name, tensor in found.items() if name not in new_head}, strict=False)
    return new_head


def read_state_dict(path: FilePath) -> dict[str, Tensor]:
    """The state dict in a file, on the CPU, without the nesting and prefixes that training scripts add."""
    try:
        weights = open_weights(path)
        return {name: weights.read(name) for name in weights.tensors}
    except SoupError as error:
        raise ConfigError(f"the weights cannot be loaded: {error}") from error


def _compare(
    model: nn.Module, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> tuple[list[str], list[str]]:
    """The classifier's tensors to keep, as the file has none or another number of classes, and all differences."""
    heads = set(head_modules(model))
    prefixes = tuple(f"{name}." for name, module in model.named_modules() if module in heads)
    kept = [name for name in expected if name.startswith(prefixes)]
    if any(name in found for name in kept):
        shapes = {name: (found[name].shape, expected[name].shape) for name in kept if name in found}
        kept = [name for name, (own, other) in shapes.items() if own[:1] != other[:1] and own[1:] == other[1:]]
    differences = []
    for name in [*expected, *(name for name in found if name not in expected)]:
        found_shape = tuple(found[name].shape) if name in found else "nothing"
        expected_shape = tuple(expected[name].shape) if name in expected else "nothing"
        if found_shape != expected_shape and name not in kept:
            differences.append(f"'{name}' found {found_shape}, expected {expected_shape}")
    return kept, differences


def _converted_by_timm(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """The weights converted by timm from an older layout; None if it has no conversion for this network."""
    for kind in type(model).__mro__:
        convert = getattr(sys.modules.get(kind.__module__), "checkpoint_filter_fn", None)
        if convert is not None:
            try:
                return dict(convert(dict(state), model))
            except Exception:
                return None  # The caller then reports how the file differs, which is more helpful.
    return None
