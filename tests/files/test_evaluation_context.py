"""Scoring checkpoints, and estimating their BatchNorm statistics, in a network."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import papa
from helpers import assert_close
from papa.errors import ConfigError, DataError, SoupError
from papa.evaluation.scores import Evaluation
from papa.files import EvaluationContext, evaluation_context_of
from papa.lab.loading import recipe_evaluation
from papa.lab.recipes import find

BATCHES = [(torch.randn(64, 6, generator=torch.Generator().manual_seed(n)), torch.arange(64) % 3) for n in range(3)]


def make_net(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3)
        )


def make() -> tuple[nn.Module, list[Any]]:
    return make_net(99), BATCHES


def save_nets(nets: list[nn.Module], folder: Path) -> list[Path]:
    files = [folder / f"{index}.safetensors" for index in range(len(nets))]
    for net, file in zip(nets, files, strict=True):
        save_file(net.state_dict(), file)
    return files


def test_batch_norm_is_estimated_again(tmp_path: Path) -> None:
    nets = [make_net(seed) for seed in range(2)]
    soup = papa.soup_files(
        save_nets(nets, tmp_path), tmp_path / "soup.safetensors", reset_batch_norm=True, evaluation_context=make
    )
    twin = papa.average_soup(nets)
    papa.reset_batch_norm_(twin, BATCHES)
    assert_close(load_file(soup.path)["1.running_mean"], twin.get_buffer("1.running_mean").double())
    assert_close(load_file(soup.path)["0.weight"], twin.get_parameter("0.weight").detach().double())


def test_a_greedy_soup_is_scored_in_the_evaluation_context(tmp_path: Path) -> None:
    nets = [make_net(seed) for seed in range(4)]
    soup = papa.soup_files(
        save_nets(nets, tmp_path), tmp_path / "soup.safetensors", greedy=True, evaluation_context=make
    )
    twin = papa.greedy_soup(nets, lambda net: papa.evaluate(net, BATCHES))
    assert [trial.members for trial in soup.trials] == [trial.members for trial in twin.trials]
    assert soup.score == pytest.approx(twin.score)


def test_files_that_do_not_fit_the_network_are_refused(tmp_path: Path) -> None:
    save_file({"0.weight": torch.zeros(2, 2)}, tmp_path / "a.safetensors")
    with pytest.raises(SoupError, match=r"does not fit the network Sequential; it has\n  no '0.bias'"):
        papa.soup_files(
            [tmp_path / "a.safetensors"], tmp_path / "soup.safetensors", reset_batch_norm=True, evaluation_context=make
        )
    assert {path.name for path in tmp_path.iterdir()} == {"a.safetensors"}


@pytest.mark.parametrize(
    ("factory", "error", "message"),
    [
        ("nothing", ConfigError, "expected package.module:function"),
        ("no.such.module:make", ConfigError, "cannot be found: No module named 'no'"),
        ("papa.files:nothing", ConfigError, "cannot be found: module 'papa.files' has no attribute 'nothing'"),
        ("papa:__version__", ConfigError, "is a str, expected a function"),
        (lambda: 3, ConfigError, r"returned int, expected \(network, batches\)"),
        (lambda: (nn.Linear(1, 1), []), DataError, "gave no batch"),
        (3, ConfigError, "the factory int is a int, expected a function"),
        (
            lambda: nn.Linear(2, 2)(torch.zeros(3)),
            ConfigError,
            r"RuntimeError: .* \(.*_context\.py, line \d+\)",
        ),
        (lambda: (nn.Linear(1, 1), (1 / 0 for _ in range(2))), ConfigError, "failed with ZeroDivisionError"),
        (partial(json.loads, "{"), ConfigError, r"the factory loads failed with JSONDecodeError"),
        (
            lambda: {}["weights"],
            ConfigError,
            r"failed with KeyError: 'weights' \(.*_context\.py, line \d+\)",
        ),
    ],
)
def test_a_factory_that_gives_no_context_is_refused(factory: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        evaluation_context_of(factory)


def test_an_evaluation_context_uses_its_score() -> None:
    net = nn.Linear(1, 1)
    assert evaluation_context_of(lambda: (net, BATCHES, lambda _: (3.0, 0.5))).evaluate(net) == Evaluation(3.0, 0.5)
    assert evaluation_context_of(lambda: (net, BATCHES, lambda _: 3.0)).evaluate(net).score == 3.0
    with pytest.raises(DataError, match="the batches hold only inputs"):
        EvaluationContext(net, [torch.zeros(2, 1)]).evaluate(net)
    with pytest.raises(SoupError, match="the score is NaN"):
        EvaluationContext(net, BATCHES, lambda _: float("nan")).evaluate(net)


def test_a_recipe_scores_on_its_validation_data() -> None:
    config = replace(find("digits").config("smoke"), seed=3)
    evaluation_context = recipe_evaluation(config)
    assert evaluation_context.batches[0].shape[1:] == (1, 8, 8)
    assert {batch.shape for batch in evaluation_context.batches} == {evaluation_context.batches[0].shape}
    found = evaluation_context.evaluate(evaluation_context.network)
    score, loss = found.score, found.loss
    assert 0 <= score <= 100
    assert loss > 0
    assert evaluation_context.name != recipe_evaluation(replace(config, seed=4)).name
