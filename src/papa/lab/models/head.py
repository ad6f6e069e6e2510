"""The classifier (head) of a network: finding it, and freezing all other parameters."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from papa.errors import ConfigError
from papa.training import Callback, Training


def head_of(model: nn.Module) -> nn.Module:
    """The layer that turns features into class scores; a `ModuleList` of several, as in distilled transformers.

    Example:
        >>> from papa.lab.models import make_model
        >>> head_of(make_model("digits-cnn", num_classes=10, in_channels=1, image_size=8))
        Linear(in_features=32, out_features=10, bias=True)
    """
    modules = head_modules(model)
    if not modules:
        raise ConfigError(
            f"{type(model).__name__} has no classifier with parameters: expected a module with `get_classifier()`, "
            "as timm's have, or with a `head`"
        )
    return modules[0] if len(modules) == 1 else nn.ModuleList(modules)


def head_modules(model: nn.Module) -> list[nn.Module]:
    """The classifier layers that have parameters; an empty list if the network has no classifier."""
    get_classifier = getattr(model, "get_classifier", None)
    found = get_classifier() if callable(get_classifier) else getattr(model, "head", None)
    candidates = list(found) if isinstance(found, tuple | list) else [found]
    return [module for module in candidates if isinstance(module, nn.Module) and any(True for _ in module.parameters())]


def freeze_all_but_head_(model: nn.Module) -> list[nn.Parameter]:
    """Freeze all parameters but those of the classifier, as in the first phase of fine-tuning.

    Example:
        >>> from papa.lab.models import make_model
        >>> net = make_model("digits-cnn", num_classes=10, in_channels=1, image_size=8)
        >>> frozen = freeze_all_but_head_(net)
        >>> [name for name, parameter in net.named_parameters() if parameter.requires_grad]
        ['head.weight', 'head.bias']
        >>> unfreeze_(frozen)

    Gradients of frozen parameters are set to None, as an optimizer would keep using them. BatchNorm statistics are
    buffers and keep changing in training mode. Returns the parameters that were not frozen before.
    """
    head = {id(parameter) for parameter in head_of(model).parameters()}
    frozen = [parameter for parameter in model.parameters() if parameter.requires_grad and id(parameter) not in head]
    for parameter in frozen:
        parameter.requires_grad_(False)
        parameter.grad = None
    return frozen


def unfreeze_(frozen: Iterable[nn.Parameter]) -> None:
    """Unfreeze the parameters that `freeze_all_but_head_` returned."""
    for parameter in frozen:
        parameter.requires_grad_(True)


class FrozenBody(Callback):
    """Freezes everything but the head for the first `share` of training.

    A head with random weights sends random gradients into a pretrained body; the paper trains it alone for 4% of
    training first.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self._frozen: list[nn.Parameter] = []

    def on_step_begin(self, training: Training) -> None:
        """Freeze at the start or after a resume, unfreeze when it is time."""
        is_frozen_now = training.step < round(self.share * training.length.num_steps)
        if is_frozen_now and not self._frozen:
            self._frozen = [parameter for model in training.population for parameter in freeze_all_but_head_(model)]
        elif not is_frozen_now:
            unfreeze_(self._frozen)
            self._frozen = []
