"""Building networks by name."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from papa.errors import ConfigError, did_you_mean
from papa.lab.models.networks import VGG, DigitsCNN, Linear, UNet, resnet18, resnet20
from papa.lab.models.weights import FilePath, load_weights_
from papa.packages import require

PREFIX = "timm:"
_NETWORKS: dict[str, tuple[Callable[..., nn.Module], int]] = {
    "digits-cnn": (DigitsCNN, 8),
    "vgg11": (partial(VGG, 11), 32),
    "vgg16": (partial(VGG, 16), 32),
    "resnet18": (resnet18, 32),
    "resnet20": (resnet20, 32),
    "unet": (UNet, 256),
    "linear": (Linear, 8),
}
"""How each network is made, and the image size that it was made for; `timm:NAME` is any network of timm."""


def make_model(
    name: str,
    *,
    num_classes: int,
    in_channels: int = 3,
    image_size: int = 32,
    width: int | None = None,
    pretrained: bool = False,
    weights: FilePath | None = None,
) -> nn.Module:
    """Build a network by name and check that it accepts the images.

    Example:
        >>> net = make_model("resnet18", num_classes=100, width=8)
        >>> net(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 100])

    Initial weights are drawn from torch's global generator, or come from a local file, as for `load_weights_`.

    Args:
        name: a key of `_NETWORKS`, or `timm:NAME` with or without a tag, such as `timm:convit_tiny.fb_in1k`.
        width: channels of the first stage; None for the published number. Not for timm, nor for `linear`.
        pretrained: whether to download the weights that timm publishes. The classifier is new if they have another
            number of classes.
    """
    is_timm = name.startswith(PREFIX)
    problems = []
    if width is not None and (is_timm or name == "linear"):
        why = "timm's networks have their width in their name" if is_timm else "one layer on all pixels has none"
        problems.append(f"width is {width}, but {why}: leave it out")
    if pretrained and not is_timm:
        problems.append("pretrained is for networks of timm (timm:NAME): give a file as `weights` instead")
    if pretrained and weights is not None:
        problems.append("pretrained and weights both say where the weights come from: give one of the two")
    if problems:
        raise ConfigError(f"{name}: {'; '.join(problems)}")
    options: dict[str, Any] = {"num_classes": num_classes, "in_channels": in_channels}
    if is_timm:
        model = _build_timm(name, **options, image_size=image_size, pretrained=pretrained)
    else:
        size = {"image_size": image_size} if name == "linear" else {} if width is None else {"width": width}
        model = _entry(name)[0](**options, **size)
    _check_fit(model, name, num_classes=num_classes, image_shape=(in_channels, image_size, image_size))
    if weights is not None:
        load_weights_(model, weights)
    return model


def input_size_of(model_name: str) -> int:
    """The height and width of the images that a network was designed for."""
    if model_name.startswith(PREFIX):
        return int(_pretrained_config(model_name).input_size[1])
    return _entry(model_name)[1]


def normalization_of(model_name: str) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Mean and standard deviation per channel that a timm network was pretrained with; None for other networks."""
    if not model_name.startswith(PREFIX):
        _entry(model_name)
        return None
    config = _pretrained_config(model_name)
    return tuple(config.mean), tuple(config.std)


def _entry(name: str) -> tuple[Callable[..., nn.Module], int]:
    if name not in _NETWORKS:
        known = [*_NETWORKS, f"{PREFIX}NAME"]
        raise ConfigError(f"unknown network '{name}': {did_you_mean(name, known)} (any network of timm)")
    return _NETWORKS[name]


def _build_timm(name: str, *, num_classes: int, in_channels: int, image_size: int, pretrained: bool) -> nn.Module:
    """Build the network `timm:NAME`, with its published weights if `pretrained`."""
    # Networks without a fixed input size do not accept `img_size`.
    options = {"img_size": image_size} if _pretrained_config(name).fixed_input_size else {}
    try:
        model: nn.Module = _timm().create_model(
            name.removeprefix(PREFIX), pretrained=pretrained, num_classes=num_classes, in_chans=in_channels, **options
        )
    except Exception as error:
        # Downloads and constructors raise too many kinds of errors to list.
        remedy = ": without a connection, give a downloaded file as `weights` instead" if pretrained else ""
        wanted = "pretrained weights and " if pretrained else ""
        raise ConfigError(
            f"timm could not build {name} with {wanted}{num_classes} classes for {in_channels}x{image_size}x"
            f"{image_size} images ({type(error).__name__}: {error}){remedy}"
        ) from error
    return model


def _pretrained_config(name: str) -> Any:
    """timm's configuration of `timm:NAME`: input size, normalisation, whether the image size is fixed."""
    timm = _timm()
    tagged = name.removeprefix(PREFIX)
    architecture, _, tag = tagged.partition(".")
    names = timm.list_models()
    if architecture not in names:
        # timm has more than a thousand names: list only the closest.
        close = difflib.get_close_matches(architecture, names, n=5, cutoff=0.5)
        known = f"timm.list_models() names the {len(names)} that timm knows"
        if close:
            suggestion = did_you_mean(name.partition(".")[0], [f"{PREFIX}{one}" for one in close])
            known = f"{suggestion} and {len(names) - len(close)} more, see timm.list_models()"
        raise ConfigError(f"unknown network '{name}': {known}")
    tags = timm.models.get_arch_pretrained_cfgs(architecture)
    if tag and tagged not in tags:
        suggestion = did_you_mean(name, [f"{PREFIX}{known}" for known in tags])
        raise ConfigError(f"unknown weights '{tag}' of network '{name}': {suggestion}")
    return timm.models.get_pretrained_cfg(tagged)


def _timm() -> Any:
    require("timm")
    import timm

    return timm


def _check_fit(model: nn.Module, name: str, *, num_classes: int, image_shape: tuple[int, int, int]) -> None:
    """Run one black image through a copy of the network, to fail early if the image size does not fit."""
    first = next(model.parameters())
    image = torch.zeros(1, *image_shape, device=first.device, dtype=first.dtype)
    # The copy protects buffers and modes of the network; it shares the parameters, which evaluation does not change.
    trial = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()}).eval()
    subject = f"{name} does not take images of {'x'.join(str(length) for length in image_shape)}"
    remedy = f"it was made for {input_size_of(name)}x{input_size_of(name)}: choose another network or resize the images"
    with torch.random.fork_rng(devices=[first.device] if first.is_cuda else []), torch.no_grad():
        try:
            scores = trial(image)
        except Exception as error:
            raise ConfigError(f"{subject} ({type(error).__name__}: {error}); {remedy}") from error
    expected = (1, num_classes, *(image_shape[1:] if name == "unet" else ()))
    if tuple(getattr(scores, "shape", ())) != expected:
        found = tuple(scores.shape) if hasattr(scores, "shape") else type(scores).__name__
        raise ConfigError(f"{subject}: one gives {found}, expected scores of shape {expected}; {remedy}")
