"""Building networks by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from papa.errors import ConfigError, did_you_mean
from papa.lab.models import from_timm
from papa.lab.models.networks import VGG, DigitsCNN, Linear, UNet, resnet18, resnet20
from papa.lab.models.weights import FilePath, load_weights_


@dataclass(frozen=True)
class _Entry:
    description: str
    build: Callable[..., nn.Module]
    image_size: int = 32
    per_pixel: bool = False
    """Whether it returns scores for every pixel instead of for the whole image."""
    is_flat: bool = False
    """Whether it takes `image_size` instead of `width`."""


_NETWORKS = {
    "digits-cnn": _Entry("three convolutions for 8x8 digits, 14 thousand parameters", DigitsCNN, image_size=8),
    "vgg11": _Entry("VGG-11 with BatchNorm for 32x32 images, 9.2 million parameters", partial(VGG, 11)),
    "vgg13": _Entry("VGG-13 with BatchNorm for 32x32 images, 9.4 million parameters", partial(VGG, 13)),
    "vgg16": _Entry("VGG-16 with BatchNorm for 32x32 images, 14.7 million parameters", partial(VGG, 16)),
    "vgg19": _Entry("VGG-19 with BatchNorm for 32x32 images, 20.0 million parameters", partial(VGG, 19)),
    "resnet18": _Entry("ResNet-18 with a stem for 32x32 images, 11.2 million parameters", resnet18),
    "resnet20": _Entry("ResNet-20 for 32x32 images, 0.27 million parameters", resnet20),
    "unet": _Entry("UNet with BatchNorm, a class per pixel, 31 million parameters", UNet, 256, per_pixel=True),
    "linear": _Entry("logistic regression on all pixels, 650 parameters for 8x8 digits", Linear, 8, is_flat=True),
}


def model_names() -> dict[str, str]:
    """The names of all networks with a short description; `timm:NAME` is any network of timm."""
    return {name: entry.description for name, entry in _NETWORKS.items()}


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
        name: one of `model_names()`, or `timm:NAME` with or without a tag, such as `timm:convit_tiny.fb_in1k`.
        width: channels of the first stage; None for the published number. Not for timm, nor for `linear`.
        pretrained: whether to download the weights that timm publishes. The classifier is new if they have another
            number of classes.
    """
    counts = {"num_classes": num_classes, "in_channels": in_channels, "image_size": image_size, "width": width}
    problems = _problems(name, counts, pretrained=pretrained, has_file=weights is not None)
    if problems:
        raise ConfigError(f"{name}: {'; '.join(problems)}")
    options: dict[str, Any] = {"num_classes": num_classes, "in_channels": in_channels}
    if name.startswith(from_timm.PREFIX):
        model = from_timm.build(name, **options, image_size=image_size, pretrained=pretrained)
    else:
        if _entry(name).is_flat:
            options["image_size"] = image_size
        elif width is not None:
            options["width"] = width
        model = _entry(name).build(**options)
    _check_fit(model, name, num_classes=num_classes, image_shape=(in_channels, image_size, image_size))
    if weights is not None:
        load_weights_(model, weights)
    return model


def input_size_of(model_name: str) -> int:
    """The height and width of the images that a network was designed for."""
    if model_name.startswith(from_timm.PREFIX):
        return int(from_timm.pretrained_config(model_name).input_size[1])
    return _entry(model_name).image_size


def normalization_of(model_name: str) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Mean and standard deviation per channel that a timm network was pretrained with; None for other networks."""
    if not model_name.startswith(from_timm.PREFIX):
        _entry(model_name)
        return None
    config = from_timm.pretrained_config(model_name)
    return tuple(config.mean), tuple(config.std)


def _entry(name: str) -> _Entry:
    if name not in _NETWORKS:
        known = [*_NETWORKS, f"{from_timm.PREFIX}NAME"]
        raise ConfigError(f"unknown network '{name}': {did_you_mean(name, known)} (any network of timm)")
    return _NETWORKS[name]


def _problems(name: str, counts: dict[str, int | None], *, pretrained: bool, has_file: bool) -> list[str]:
    width, is_timm = counts["width"], name.startswith(from_timm.PREFIX)
    problems = [
        f"{option} is {count!r}, expected a whole number of at least 1"
        for option, count in counts.items()
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1)
    ]
    if is_timm and width is not None:
        problems.append(f"width is {width!r}, but timm's networks have their width in their name: leave it out")
    if width is not None and name in _NETWORKS and _NETWORKS[name].is_flat:
        problems.append(f"width is {width!r}, but one layer on all pixels has none: leave it out")
    if pretrained and not is_timm:
        problems.append("pretrained is for networks of timm (timm:NAME): give a file as `weights` instead")
    if pretrained and has_file:
        problems.append("pretrained and weights both say where the weights come from: give one of the two")
    return problems


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
    per_pixel = not name.startswith(from_timm.PREFIX) and _entry(name).per_pixel
    expected = (1, num_classes, *(image_shape[1:] if per_pixel else ()))
    if tuple(getattr(scores, "shape", ())) != expected:
        found = tuple(scores.shape) if hasattr(scores, "shape") else type(scores).__name__
        raise ConfigError(f"{subject}: one gives {found}, expected scores of shape {expected}; {remedy}")
