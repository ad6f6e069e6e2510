"""The networks of a finished run on other data: their scores, and their labels for single images."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from papa.errors import DataError, RunError
from papa.evaluation.scores import Evaluation
from papa.lab.config import AverageConfig, Config
from papa.lab.data import ImageSet
from papa.lab.data.files import Pixels, decode_files
from papa.lab.data.images import FOLDERS, IMAGE_SETS, LARGEST_CACHED
from papa.lab.data.large import GivenImages
from papa.lab.domains import TEXT, Domain, ImageDomain, load_domain
from papa.lab.loading import (
    Card,
    LoadedNetwork,
    checked_card,
    load,
    load_ensemble,
    load_language_model,
    opened_run,
)
from papa.lab.recipes.build import build
from papa.lab.runs import RunDirectory
from papa.process import find_device
from papa.training import Scores, Training
from papa.training.data import Source

PARTS = ("test", "validation")
"""The parts of a run's own data that its networks were not trained on."""


@dataclass(frozen=True)
class RunScores:
    """The scores of a run's networks on some data."""

    scores: Scores
    best_soup: Evaluation | None
    """The best average soup by validation, if it was kept."""
    num_examples: int


def score_run(run: Path, data: str = "test", *, data_root: str | None = None, device: str = "auto") -> RunScores:
    """Score members, ensemble and soups of a finished run.

    `data` is `test` or `validation` for these parts of the run's own data, which may be in another `data_root` now, or
    a folder of class folders.
    """
    directory, config, card = opened_run(run)
    single = _one_network(config, data_root, device)
    if data in PARTS:
        domain = load_domain(single)
        if domain.card().get("classes") != (card or {}).get("classes"):
            raise DataError(f"{single.data.root} has other classes than the data of {run}, expected the same data")
    elif not Path(data).is_dir():
        raise DataError(f"there is no folder {data}: expected {', '.join(PARTS)}, or a folder of class folders")
    else:
        domain = _given(run, Path(data), single, card)
    training = build(domain.config, None, domain)
    source = training.data.validation if data == "validation" else training.data.test
    if source is None:
        raise DataError(f"{run} has no test data: choose validation, or a folder")
    scores = _scores(directory, config, training, source)
    best = _evaluated(directory, config, training, source, ["best"])[0][0] if directory.best_soup.is_file() else None
    return RunScores(scores, best, len(source))


def _scores(run: RunDirectory, config: Config, training: Training, source: Source) -> Scores:
    kept = [member for member in range(config.members) if (run.members / f"{member:03d}.safetensors").is_file()]
    if not kept:
        raise RunError(f"{run.members} holds no member, expected a file for each: it was altered")
    found, ensemble = _evaluated(run, config, training, source, kept)
    members = dict(zip(kept, found, strict=True))
    nothing = Evaluation(math.nan, math.nan)
    average, greedy = _evaluated(run, config, training, source, ["soup", "greedy"])[0]
    return Scores(
        [members.get(member, nothing) for member in range(config.members)],
        ensemble,
        average,
        greedy,
        dropped=frozenset(range(config.members)) - members.keys(),
    )


def _evaluated(
    run: RunDirectory, config: Config, training: Training, source: Source, which: Sequence[str | int]
) -> tuple[list[Evaluation], Evaluation]:
    """The scores of some networks of a run, and of their ensemble."""
    networks = [_network(run.path, one, config).to(training.device) for one in which]
    if config.train.channels_last:
        networks = [network.to(memory_format=torch.channels_last) for network in networks]
    return training.evaluate(networks, source)


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


def _given(run: Path, folder: Path, config: Config, card: Any) -> Domain:
    """The images of class folders in place of a run's own."""
    _check_images(run, config)
    known = checked_card(card, Card, RunDirectory(run))
    source = GivenImages(folder, known["classes"], _decoder(config, known))
    images = ImageSet(
        train=source,
        validation=source,
        test=source,
        classes=tuple(known["classes"]),
        channels=known["in_channels"],
        image_size=known["image_size"],
        mean=tuple(known["mean"]),
        std=tuple(known["std"]),
    )
    batch_size = min(config.train.batch_size, len(source))
    return ImageDomain(replace(config, train=replace(config.train, batch_size=batch_size)), images)


def _check_images(run: Path, config: Config) -> None:
    if config.data.name not in IMAGE_SETS:
        raise RunError(f"{run} was trained on {config.data.name}, expected a run on images with one class each")


def _decoder(config: Config, card: Card) -> Callable[[Sequence[str]], Pixels]:
    """From image files to pixels as the run's own were."""
    is_large = config.data.name in FOLDERS and card["image_size"] > LARGEST_CACHED
    return partial(decode_files, image_size=card["image_size"], channels=card["in_channels"], is_large=is_large)


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

    The network is `soup`, `greedy`, `best`, `ensemble`, or the index of a member.
    """
    directory, config, card = opened_run(run)
    _check_images(run, config)
    description, where = checked_card(card, Card, directory), find_device(device, option="--device")
    loaded = load(run, "soup" if network == "ensemble" else network)
    model = (load_ensemble(run) if network == "ensemble" else loaded.network).to(where)
    decode = _decoder(config, description)
    batches = (paths[start : start + BATCH_SIZE] for start in range(0, len(paths), BATCH_SIZE))
    return (label for batch in batches for label in _labelled(model, loaded, decode, batch, where))


def _labelled(
    model: nn.Module,
    loaded: LoadedNetwork,
    decode: Callable[[Sequence[str]], Pixels],
    paths: Sequence[str],
    device: torch.device,
) -> Iterator[Label | DataError]:
    try:
        images = torch.from_numpy(decode(paths))
    except DataError as error:
        if len(paths) == 1:
            yield error
            return
        for path in paths:  # one by one, to find the damaged ones
            yield from _labelled(model, loaded, decode, [path], device)
        return
    with torch.no_grad():
        probabilities, labels = model(loaded.prepare(images.to(device))).float().softmax(dim=1).max(dim=1)
    for path, label, probability in zip(paths, labels.tolist(), probabilities.tolist(), strict=True):
        yield Label(path, loaded.classes[label] if loaded.classes else str(label), probability)
