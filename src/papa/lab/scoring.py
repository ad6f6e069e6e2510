"""The networks of a finished run on other data: their scores, and their labels for single images."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from papa.data import Source
from papa.errors import DataError, RunError
from papa.evaluation import Evaluation
from papa.lab.config import AverageConfig, Config
from papa.lab.data import ImageSet
from papa.lab.data.folder import LARGEST_CACHED
from papa.lab.data.given_images import Decoder, GivenImages
from papa.lab.data.images import OWN
from papa.lab.data.text import TextSet
from papa.lab.recipes.build import TILES, build, images_for
from papa.lab.recipes.language import TEXT
from papa.lab.recipes.loading import (
    Card,
    LoadedNetwork,
    image_card,
    load,
    load_ensemble,
    load_language_model,
    opened_run,
)
from papa.process import find_device
from papa.training import Scores

PARTS = ("test", "validation")
"""The parts of a run's own data that its networks were not trained on."""


@dataclass(frozen=True)
class RunScores:
    """The scores of a run's networks on some data."""

    scores: Scores
    best_soup: Evaluation | None
    """The best average soup by validation, if it was kept."""
    num_examples: int
    higher_is_better: bool


def score_run(run: Path, data: str = "test", *, data_root: str | None = None, device: str = "auto") -> RunScores:
    """Score members, ensemble and soups of a finished run.

    Args:
        run: the run's directory.
        data: `test` or `validation` for these parts of the run's own data, or a folder of class folders.
        data_root: where the run's own data is, if it was moved.
        device: where to compute.
    """
    directory, config, card = opened_run(run)
    single = _one_network(config, data_root, device)
    images = images_for(single) if data in PARTS else _given(run, Path(data), single, image_card(directory, card))
    if isinstance(images, ImageSet) and tuple(image_card(directory, card)["classes"]) != images.classes:
        raise DataError(f"{single.data.root} has other classes than the data of {run}: give the folder as data instead")
    if isinstance(images, ImageSet) and data not in PARTS:
        batch_size = min(single.train.batch_size, len(images.test))
        single = replace(single, train=replace(single.train, batch_size=batch_size))
    training = build(single, None, images)
    source = training.data.validation if data == "validation" else training.data.test
    assert source is not None

    def evaluated(which: Sequence[str | int]) -> tuple[list[Evaluation], Evaluation]:
        networks = [_network(run, one, config) for one in which]
        placed = [network.to(training.device) for network in networks]
        if config.train.channels_last:
            placed = [network.to(memory_format=torch.channels_last) for network in placed]  # type: ignore[call-overload]
        return training.evaluate(placed, source)

    kept = [member for member in range(config.members) if (directory.members / f"{member:03d}.safetensors").is_file()]
    if not kept:
        raise RunError(f"{directory.members} holds no member, expected one file for each: it was altered")
    found, ensemble = evaluated(kept)
    members = dict(zip(kept, found, strict=True))
    nothing = Evaluation(math.nan, math.nan)
    soups = ["soup", "greedy", *(["best"] if directory.best_soup.is_file() else [])]
    average, greedy, *best = evaluated(soups)[0]
    scores = Scores(
        [members.get(member, nothing) for member in range(config.members)],
        ensemble,
        average,
        greedy,
        dropped=frozenset(range(config.members)) - members.keys(),
    )
    return RunScores(scores, best[0] if best else None, len(source), training.task.higher_is_better)


def _network(run: Path, which: str | int, config: Config) -> nn.Module:
    return (load_language_model(run, which) if config.data.name == TEXT else load(run, which)).network


def _one_network(config: Config, data_root: str | None, device: str) -> Config:
    """The config with one network that is not averaged, which keeps what decides about data and scores."""
    return Config(
        recipe=config.recipe,
        method="independent",
        members=1,
        seed=config.seed,
        device=device,
        data=config.data if data_root is None else replace(config.data, root=data_root),
        model=replace(config.model, pretrained=False, weights=None, frozen=0.0),
        gpt=config.gpt,
        train=replace(config.train, engine="loop", teacher=None),
        average=AverageConfig(ensemble=config.average.ensemble),
    )


def _given(run: Path, folder: Path, config: Config, card: Card) -> ImageSet | TextSet:
    """The images of class folders in place of a run's own."""
    if config.data.name in (*TILES, TEXT):
        raise DataError(f"{run} is no run on images with one class each, expected test or validation as its data")
    source: Source = GivenImages(folder, card["classes"], _decoder(config, card))
    return ImageSet(
        train=source,
        validation=source,
        test=source,
        classes=tuple(card["classes"]),
        channels=card["in_channels"],
        image_size=card["image_size"],
        mean=tuple(card["mean"]),
        std=tuple(card["std"]),
    )


def _decoder(config: Config, card: Card) -> Decoder:
    is_large = config.data.name in (*OWN, "imagenet") and card["image_size"] > LARGEST_CACHED
    return Decoder(image_size=card["image_size"], channels=card["in_channels"], is_large=is_large)


@dataclass(frozen=True)
class Label:
    """What a network says about an image."""

    path: str
    label: str
    """The name of the most probable class."""
    probability: float


BATCH_SIZE = 64


def label_images(
    run: Path, paths: Sequence[str], *, network: str | int = "soup", device: str = "auto"
) -> Iterator[Label | DataError]:
    """Label images with a network of a finished run, in order; an error in place of an image that cannot be decoded.

    Args:
        run: the run's directory.
        paths: image files.
        network: `soup`, `greedy`, `best`, `ensemble`, or the index of a member.
        device: where to compute.
    """
    directory, config, card = opened_run(run)
    if config.data.name in (*TILES, TEXT):
        raise RunError(f"{run} was trained on {config.data.name}, expected a run on images with one class each")
    description, where = image_card(directory, card), find_device(device, option="--device")
    loaded = load(run, "soup" if network == "ensemble" else network)
    model = (load_ensemble(run) if network == "ensemble" else loaded.network).to(where)
    decoder = _decoder(config, description)
    batches = (paths[start : start + BATCH_SIZE] for start in range(0, len(paths), BATCH_SIZE))
    return (label for batch in batches for label in _labelled(model, loaded, decoder, batch, where))


def _labelled(
    model: nn.Module, loaded: LoadedNetwork, decoder: Decoder, paths: Sequence[str], device: torch.device
) -> Iterator[Label | DataError]:
    try:
        images = decoder.decode(paths)
    except DataError as error:
        if len(paths) == 1:
            yield error
            return
        for path in paths:  # one by one, to find the damaged ones
            yield from _labelled(model, loaded, decoder, [path], device)
        return
    with torch.no_grad():
        probabilities, labels = model(loaded.prepare(images.to(device))).float().softmax(dim=1).max(dim=1)
    for path, label, probability in zip(paths, labels.tolist(), probabilities.tolist(), strict=True):
        yield Label(path, loaded.classes[label] if loaded.classes else str(label), probability)
