"""Networks of finished runs, loaded to be used without the run's data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers import execute
from papa.errors import RunError
from papa.lab.data import load_images
from papa.lab.loading import load
from papa.lab.recipes import find
from papa.lab.recipes.build import build
from papa.lab.runs import RunDirectory


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "digits"
    execute(find("digits").config("smoke"), path, workers=1)
    return path


def test_a_soup_scores_as_in_its_run(run: Path) -> None:
    config = find("digits").config("smoke")
    result = json.loads((run / "result.json").read_text())
    training, images = build(config), load_images("digits", max_train=config.data.max_train)
    for which, name in (("soup", "average_soup"), ("greedy", "greedy_soup")):
        loaded = load(run, which)
        assert not loaded.network.training
        assert loaded.classes == images.classes
        _, found = training.evaluate([loaded.network], training.data.test)
        assert found.score == pytest.approx(result["test"][name])
        batch, _ = images.test.batch(torch.arange(4))
        assert torch.equal(loaded.prepare(batch), training.batches.prepare(batch))
    member = load(run, 1).network.state_dict()
    for name, tensor in load_file(run / "members" / "001.safetensors").items():
        assert torch.equal(member[name], tensor)


def test_missing_networks_are_reported(run: Path, tmp_path: Path) -> None:
    for which, message in ((7, "has no member 7, it has 0, 1"), ("soop", "expected soup, greedy, best or the index")):
        with pytest.raises(RunError, match=message):
            load(run, which)
    with pytest.raises(RunError, match="holds no run of papa"):
        load(tmp_path)
    unfinished = RunDirectory(tmp_path / "unfinished")
    unfinished.create(replace(find("digits").config("smoke"), seed=2).to_json())
    with pytest.raises(RunError, match="holds an unfinished run: finish it with papa resume"):
        load(unfinished.path)


def test_results_without_a_description_of_the_network_are_refused(run: Path, tmp_path: Path) -> None:
    copy = RunDirectory(tmp_path / "copy")
    copy.create(json.loads((run / "config.json").read_text()))
    result = json.loads((run / "result.json").read_text())
    for network in (None, {}, {**result["network"], "num_classes": "many"}, {**result["network"], "mean": 3}):
        copy.result.write_text(json.dumps({**result, "network": network}))
        with pytest.raises(RunError, match="does not describe its network: it was edited, or written by an"):
            load(copy.path)
