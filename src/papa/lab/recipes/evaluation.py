"""An evaluation context made of a recipe: its network, training data and validation score."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

from papa.files.evaluation_context import EvaluationContext
from papa.lab.config import Config
from papa.lab.recipes.build import build
from papa.storage import json_text

NUM_EXAMPLES = 512
"""The number of training examples for alignment, REPAIR and BatchNorm."""


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
    return EvaluationContext(
        training.population[0],
        [batch for batch in batches if batch.shape == batches[0].shape],  # alignment takes batches of one shape
        lambda network: tuple(training.evaluate([network], training.data.validation)[0][0]),
        f"validation data of {config.recipe}, seed {config.seed}, config {_short_digest(single)}",
        higher_is_better=training.task.higher_is_better,
    )


def _short_digest(config: Config) -> str:
    return hashlib.sha256(json_text(config.to_json()).encode()).hexdigest()[:8]
