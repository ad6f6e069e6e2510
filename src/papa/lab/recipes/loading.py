"""Networks loaded from the directories of finished runs."""

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
from papa.lab.data.text import TextSet
from papa.lab.models import make_model
from papa.lab.recipes.build import pipeline_for, wanted_image_size
from papa.lab.recipes.pipeline import prepared
from papa.lab.runs import RunDirectory


@dataclass(frozen=True)
class LoadedNetwork:
    """A network of a run, with its preprocessing and the names of its classes."""

    network: nn.Module
    """In evaluation mode, on the CPU."""
    prepare: Callable[[Tensor], Tensor]
    """From uint8 images `(N, channels, height, width)` to the network's inputs."""
    classes: tuple[str, ...]
    """The names of the classes, in the order of the network's outputs; empty when the data set has none."""


def card_for(config: Config, images: ImageSet | TextSet) -> dict[str, Any]:
    """What `load` needs to know about the data to build a run's network without it, as a JSON value."""
    if isinstance(images, TextSet):
        return {"vocab_size": images.tokenizer.vocab_size}
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


def load(run: str | os.PathLike[str], which: str | int = "soup") -> LoadedNetwork:
    """Load a network of a finished run, ready to be used; the run's data is not needed.

    Args:
        run: the run's directory.
        which: `soup` for the average soup, `greedy` for the greedy soup, or the index of a member.
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
        raise RunError(
            f"{directory.result} does not describe its network: it was edited, or written by an older version"
        ) from error
    file = _file_of(directory, which)
    network = make_model(
        config.model.name,
        num_classes=num_classes,
        in_channels=in_channels,
        image_size=image_size,
        width=config.model.width,
        weights=file,
    ).eval()
    return LoadedNetwork(network, partial(prepared, mean=mean, std=std, resize=resize), classes)


def _file_of(run: RunDirectory, which: str | int) -> Path:
    soups = {"soup": run.average_soup, "greedy": run.greedy_soup, "best": run.best_soup}
    if isinstance(which, int):
        file = run.members / f"{which:03d}.safetensors"
        if not file.is_file():
            known = ", ".join(str(int(path.stem)) for path in sorted(run.members.glob("[0-9]*.safetensors")))
            raise RunError(f"{run.path} has no member {which}, it has {known or 'none'}")
        return file
    if which not in soups:
        raise RunError(f"which is {which!r}, expected soup, greedy or the index of a member")
    return soups[which]
