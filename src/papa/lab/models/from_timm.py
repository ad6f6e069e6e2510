"""Networks of timm, which is imported only when used."""

from __future__ import annotations

import difflib
from typing import Any

from torch import nn

from papa.errors import ConfigError, did_you_mean
from papa.packages import require

PREFIX = "timm:"


def build(name: str, *, num_classes: int, in_channels: int, image_size: int, pretrained: bool) -> nn.Module:
    """Build the network `timm:NAME`, with its published weights if `pretrained`."""
    # Networks without a fixed input size do not accept `img_size`.
    options = {"img_size": image_size} if pretrained_config(name).fixed_input_size else {}
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


def pretrained_config(name: str) -> Any:
    """timm's configuration of `timm:NAME`: input size, normalisation, whether the image size is fixed."""
    timm = _timm()
    tagged = name.removeprefix(PREFIX)
    architecture, _, tag = tagged.partition(".")
    names = timm.list_models()
    if architecture not in names:
        raise ConfigError(f"unknown network '{name}': {_closest(architecture, names)}")
    tags = timm.models.get_arch_pretrained_cfgs(architecture)
    if tag and tagged not in tags:
        known = [f"{PREFIX}{known}" for known in tags]
        raise ConfigError(f"unknown weights '{tag}' of network '{name}': {did_you_mean(name, known)}")
    return timm.models.get_pretrained_cfg(tagged)


def _timm() -> Any:
    require("timm")
    import timm

    return timm


def _closest(architecture: str, names: list[str]) -> str:
    # timm has more than a thousand names: list only the closest.
    close = difflib.get_close_matches(architecture, names, n=5, cutoff=0.5)
    if not close:
        return f"timm.list_models() names the {len(names)} that timm knows"
    suggestion = did_you_mean(f"{PREFIX}{architecture}", [f"{PREFIX}{name}" for name in close])
    return f"{suggestion} and {len(names) - len(close)} more, see timm.list_models()"
