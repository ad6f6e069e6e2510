"""Networks of finished runs, and of recipes for checkpoint files."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor, nn

from papa.core.soups import Ensemble
from papa.errors import RunError
from papa.files.evaluation_context import EvaluationContext
from papa.lab.config import Config
from papa.lab.data.table import TABLES
from papa.lab.data.text import Characters, read_tokenizer
from papa.lab.domains import COMBINE, TEXT, make_language_model
from papa.lab.domains.pipeline import ImagePipeline
from papa.lab.domains.table import make_mlp
from papa.lab.models import make_model
from papa.lab.recipes.build import build
from papa.lab.runs import RunDirectory
from papa.lab.tasks.language import TOKEN_COMBINE
from papa.storage import json_text, validated


@dataclass(frozen=True)
class LoadedNetwork:
    """A network of a run, with its preprocessing and the names of its classes."""

    network: nn.Module
    """In evaluation mode, on the CPU."""
    prepare: Callable[[Tensor], Tensor]
    """From uint8 images `(N, channels, height, width)`, or rows of a table, to the network's inputs."""
    classes: tuple[str, ...]
    """The names of the classes, in the order of the network's outputs; empty when the data set has none."""


class Card(TypedDict):
    """What `load` needs to know about images to build a run's network without them; a part of `result.json`."""

    num_classes: int
    in_channels: int
    image_size: int
    mean: list[float]
    std: list[float]
    resize: int | None
    classes: list[str]


class TableCard(TypedDict):
    """The same for tables: how features are scaled."""

    mean: list[float]
    std: list[float]
    classes: list[str]


def load(run: str | os.PathLike[str], which: str | int = "soup") -> LoadedNetwork:
    """Load a network of a finished run, ready to be used; the run's data is not needed.

    Args:
        run: the run's directory.
        which: `soup` for the average soup, `greedy` for the greedy soup, `best` for the best average soup by validation
            if it was kept, or the index of a member.
    """
    directory, config, found = opened_run(run)
    if config.data.name == TEXT:
        raise RunError(f"{run} holds language models: load them with load_language_model")
    file = _file_of(directory, which)
    if config.data.name in TABLES:
        table = checked_card(found, TableCard, directory)
        mean, std, classes = torch.tensor(table["mean"]), torch.tensor(table["std"]), tuple(table["classes"])
        config = replace(config, model=replace(config.model, weights=str(file)))
        return LoadedNetwork(
            make_mlp(config, len(mean), len(classes)).eval(), lambda rows: (rows - mean) / std, classes
        )
    card = checked_card(found, Card, directory)
    network = make_model(
        config.model.name,
        num_classes=card["num_classes"],
        in_channels=card["in_channels"],
        image_size=card["image_size"],
        width=config.model.width,
        weights=file,
    ).eval()
    pipeline = ImagePipeline(
        num_classes=card["num_classes"], mean=tuple(card["mean"]), std=tuple(card["std"]), resize=card["resize"]
    )
    return LoadedNetwork(network, pipeline.prepare, tuple(card["classes"]))


CardKind = TypeVar("CardKind")


def checked_card(found: Any, kind: type[CardKind], directory: RunDirectory) -> CardKind:
    """What the result of a run says about its network."""
    try:
        return validated(found, kind)
    except ValueError as error:
        raise RunError(
            f"{directory.result} does not describe its network: it was edited, or written by an older version"
        ) from error


@dataclass(frozen=True)
class LanguageModel:
    """A language model of a run, and its tokenizer."""

    network: nn.Module
    """In evaluation mode, on the CPU; from `(batch, time)` tokens to `(batch, time, vocabulary)` logits."""
    tokenizer: Characters
    """From text to tokens and back."""
    context: int
    """The number of tokens it was trained on at a time."""


def load_language_model(run: str | os.PathLike[str], which: str | int = "soup") -> LanguageModel:
    """Load a language model of a finished run; the run's text is not needed.

    Args:
        run: the run's directory.
        which: `soup` for the average soup, `greedy` for the greedy soup, or the index of a member.
    """
    directory, config, card = opened_run(run)
    if config.data.name != TEXT:
        raise RunError(f"{run} holds networks for {config.data.name}, expected language models")
    try:
        vocab_size = int(card["vocab_size"])
        tokenizer = read_tokenizer(directory.tokenizer.read_text(encoding="utf-8"), str(directory.tokenizer))
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise RunError(f"{run} does not describe its language models: a file was edited or removed") from error
    weights = str(_file_of(directory, which))
    network = make_language_model(replace(config, model=replace(config.model, weights=weights)), vocab_size)
    return LanguageModel(network.eval(), tokenizer, config.data.context)


def load_ensemble(run: str | os.PathLike[str]) -> Ensemble:
    """The ensemble of all members of a finished run, in evaluation mode, combined as the run combined them."""
    directory, config, _ = opened_run(run)
    members = [int(path.stem) for path in sorted(directory.members.glob("[0-9]*.safetensors"))]
    is_text = config.data.name == TEXT
    networks = [(load_language_model(run, one) if is_text else load(run, one)).network for one in members]
    combine = (TOKEN_COMBINE if is_text else COMBINE)[config.average.ensemble]
    return Ensemble(networks, combine=combine).eval()


def opened_run(run: str | os.PathLike[str]) -> tuple[RunDirectory, Config, Any]:
    """The files, the config and the description of the network of a finished run."""
    directory = RunDirectory(Path(run))
    config = Config.from_json(directory.read_config())
    if not directory.is_finished:
        raise RunError(f"{run} holds an unfinished run: finish it with papa resume {run}")
    return directory, config, directory.read_result().get("network")


def _file_of(run: RunDirectory, which: str | int) -> Path:
    soups = {"soup": run.average_soup, "greedy": run.greedy_soup, "best": run.best_soup}
    if isinstance(which, int):
        file = run.members / f"{which:03d}.safetensors"
        if not file.is_file():
            known = ", ".join(str(int(path.stem)) for path in sorted(run.members.glob("[0-9]*.safetensors")))
            raise RunError(f"{run.path} has no member {which}, it has {known or 'none'}")
        return file
    if which not in soups:
        raise RunError(f"which is {which!r}, expected soup, greedy, best or the index of a member")
    if which == "best" and not run.best_soup.is_file():
        raise RunError(f"{run.path} has no best soup: it was trained without keep_best_soup")
    return soups[which]


NUM_EXAMPLES = 512
"""The number of training examples for BatchNorm statistics."""


def recipe_evaluation(config: Config) -> EvaluationContext:
    """A recipe's network, some of its training data, and scores on its validation data."""
    num_batches = math.ceil(NUM_EXAMPLES / config.train.batch_size)
    single = replace(
        config,
        method="independent",
        members=1,
        model=replace(config.model, pretrained=False, weights=None),
        average=replace(config.average, repair=num_batches),
    )
    training = build(single)
    batches = training.batches.plain_repair()
    digest = hashlib.sha256(json_text(single.to_json()).encode()).hexdigest()[:8]
    return EvaluationContext(
        training.population[0],
        [batch for batch in batches if batch.shape == batches[0].shape],
        training.score,
        f"validation data of {config.recipe}, seed {config.seed}, config {digest}",
        higher_is_better=training.task.higher_is_better,
    )
