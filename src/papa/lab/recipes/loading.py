"""From the directory of a run to a network that can be used."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from papa.errors import RunError
from papa.lab.config import Config
from papa.lab.data import ImageSet
from papa.lab.models import make_model
from papa.lab.recipes.build import pipeline_for, wanted_image_size
from papa.lab.recipes.pipeline import prepared
from papa.lab.runs import RunDirectory


@dataclass(frozen=True)
class Ready:
    """A network of a run, and what it needs to be used."""

    network: nn.Module
    """In evaluation mode, on the CPU."""
    prepare: Callable[[Tensor], Tensor]
    """From images as the data set has them, uint8 `(N, channels, height, width)`, to what the network takes."""
    classes: tuple[str, ...]
    """What its scores are of, where the data set names its classes."""


def card_for(config: Config, images: ImageSet) -> dict[str, Any]:
    """What must be known of the data to make a run's network again; a JSON value."""
    pipeline = pipeline_for(config, images)
    return {
        "num_classes": images.num_classes,
        "in_channels": images.channels,
        "image_size": wanted_image_size(config) or images.image_size,
        "mean": list(pipeline.mean),
        "std": list(pipeline.std),
        "resize": pipeline.resize,
        "classes": list(images.classes),
    }


def load(run: str | os.PathLike[str], which: str | int = "soup") -> Ready:
    """A network of a run of `papa run`, ready to be used; the run's data is not needed.

    Args:
        run: the run's directory.
        which: `soup` for the average soup, `greedy` for the greedy soup, or the number of a member.
    """
    directory = RunDirectory(Path(run))
    config = Config.from_json(directory.read_config())
    if not directory.is_finished:
        raise RunError(f"{run} holds an unfinished run: finish it with papa resume {run}")
    card: Any = directory.read_result().get("network")
    try:
        num_classes, in_channels, image_size = (
            int(card[name]) for name in ("num_classes", "in_channels", "image_size")
        )
        mean, std = (tuple(map(float, card[name])) for name in ("mean", "std"))
        resize = None if card["resize"] is None else int(card["resize"])
        classes = tuple(map(str, card["classes"]))
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{directory.result} does not say what its network is: it was altered, or is too old") from error
    file = _file_of(directory, which)
    network = make_model(
        config.model.name,
        num_classes=num_classes,
        in_channels=in_channels,
        image_size=image_size,
        width=config.model.width,
        weights=file,
    ).eval()
    return Ready(network, partial(prepared, mean=mean, std=std, resize=resize), classes)


def _file_of(run: RunDirectory, which: str | int) -> Path:
    soups = {"soup": run.average_soup, "greedy": run.greedy_soup}
    if isinstance(which, int):
        file = run.members / f"{which:03d}.safetensors"
        if not file.is_file():
            there = ", ".join(str(int(path.stem)) for path in sorted(run.members.glob("[0-9]*.safetensors")))
            raise RunError(f"{run.path} has no member {which}, it has {there or 'none'}")
        return file
    if which not in soups:
        raise RunError(f"which is {which!r}, expected soup, greedy or the number of a member")
    return soups[which]
