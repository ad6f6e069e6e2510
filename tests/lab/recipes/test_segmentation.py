"""Segmentation from a folder to a result: the same bits however it runs, and scores by class."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from helpers import execute, killed_after
from papa.cli import main
from papa.errors import ConfigError, DataError
from papa.lab.config import Config
from papa.lab.recipes import find, paper_details, paper_scores
from papa.lab.recipes.build import build
from papa.lab.recipes.tables import find_table
from papa.lab.runs import RunDirectory
from papa.storage import read_json

CLASSES = ["dark", "bright"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiles of three sizes; a pixel is bright where its class is 1, and noisy."""
    root = tmp_path_factory.mktemp("tiles")
    generator = torch.Generator().manual_seed(0)
    for folder in ("images", "labels"):
        (root / folder).mkdir()
    for area in "abcde":
        height, width = 36 + 4 * ord(area) % 9, 40
        labels = (torch.rand(height // 4 + 1, width // 4, generator=generator) > 0.5).byte()
        labels = labels.repeat_interleave(4, 0).repeat_interleave(4, 1)[:height]
        images = 60 + 120 * labels + torch.randint(40, (height, width), generator=generator, dtype=torch.uint8)
        labels[:, 0] = 255
        Image.fromarray(images[..., None].repeat(1, 1, 3).numpy()).save(root / "images" / f"{area}.png")
        Image.fromarray(labels.numpy()).save(root / "labels" / f"{area}.png")
    (root / "classes.json").write_text(json.dumps({"classes": CLASSES}))
    return root


def small_config(root: Path, **changes: object) -> Config:
    config = replace(find("aerial-unet").config("smoke"), members=3, **changes)  # type: ignore[arg-type]
    return replace(config, data=replace(config.data, root=str(root), patches_per_epoch=6))


def networks_of(path: Path) -> dict[str, torch.Tensor]:
    files = [path / "soup.safetensors", *sorted((path / "members").iterdir())]
    return {f"{file.name}/{name}": tensor for file in files for name, tensor in load_file(file).items()}


def assert_same_run(first: Path, second: Path) -> None:
    ours, theirs = networks_of(first), networks_of(second)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    ours, theirs = (
        [{**event, "bytes": None, "seconds": None} for event in RunDirectory(path).read_metrics()]
        for path in (first, second)
    )
    assert ours == theirs
    assert read_json(first / "result.json")["test"] == read_json(second / "result.json")["test"]
    assert (first / "prediction.png").read_bytes() == (second / "prediction.png").read_bytes()


class Killed(BaseException):
    pass


def test_workers_and_interruptions_change_no_bit(root: Path, tmp_path: Path) -> None:
    config = small_config(root, method="papa-all")
    execute(config, tmp_path / "one", workers=1)
    execute(config, tmp_path / "two", workers=2)
    assert_same_run(tmp_path / "one", tmp_path / "two")
    with killed_after(4):
        execute(config, tmp_path / "broken", workers=1)
    execute(config, tmp_path / "broken", workers=1, resume=True)
    assert_same_run(tmp_path / "one", tmp_path / "broken")


def test_a_finished_run_of_independent_members_is_taken_as_it_is(root: Path, tmp_path: Path) -> None:
    config = small_config(root, method="independent")
    result = execute(config, tmp_path, workers=1)
    assert "F1 dark" in result["repaired"]["test"]["details"]["average_soup"]
    assert execute(config, tmp_path, workers=1, resume=True) == read_json(tmp_path / "result.json")


def test_the_result_tells_scores_by_class(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--data.root", str(root), "--workers", "1", "--out", str(tmp_path / "run")]
    assert main(["run", "aerial-unet", "--budget", "smoke", *options]) == 0
    run = RunDirectory(tmp_path / "run")
    assert all(file.exists() for file in run.files if file not in (run.best_soup, run.tokenizer))
    test = read_json(run.result)["test"]
    details = test["details"]
    assert len(details["members"]) == len(test["members"])
    for what in ("ensemble", "average_soup", "greedy_soup", "mean"):
        assert details[what].keys() == {"accuracy", "average F1", "F1 dark", "F1 bright"}
        assert details[what]["average F1"] == pytest.approx(test[what])
        assert details[what]["average F1"] == pytest.approx((details[what]["F1 dark"] + details[what]["F1 bright"]) / 2)
    printed = capsys.readouterr().out
    assert "average F1" in printed
    assert "papa: average soup" in printed
    assert "prediction.png" in printed
    assert "F1 bright" in run.report.read_text()


def test_a_network_learns_what_pixels_show(root: Path) -> None:
    config = small_config(root, method="independent")
    config = replace(
        config,
        members=1,
        data=replace(config.data, patches_per_epoch=64),
        model=replace(config.model, width=4),
        train=replace(config.train, epochs=2, batch_size=4, lr=0.05),
    )
    training = build(config)
    training.run()
    assert training.data.test is not None
    (member,), _ = training.evaluate_population(training.data.test)
    assert member.score > 90


def test_a_mistyped_data_set_finds_tiles_too(root: Path) -> None:
    config = small_config(root)
    with pytest.raises(ConfigError, match=r"--data.name is tile: did you mean tiles\?.*images, tiles, vaihingen"):
        build(replace(config, data=replace(config.data, name="tile")))


def test_networks_for_whole_images_are_refused(root: Path) -> None:
    config = small_config(root)
    training = build(replace(config, model=replace(config.model, name="resnet18")))
    with pytest.raises(DataError, match="F1 got outputs of shape"):
        training.run()


def test_the_papers_rows_average_their_classes() -> None:
    rows = [row for label in ("image_seg1", "image_seg2") for row in find_table(label).rows if row.paper]
    assert len(rows) == 6
    for row in rows:
        numbers = list(row.paper.values())
        for start in (0, 7, 14):  # six classes and their average, of members, average soup and greedy soup
            assert sum(numbers[start : start + 6]) / 6 == pytest.approx(numbers[start + 6], abs=0.011)
    config = find("vaihingen-unet").config()
    assert config.members == 8
    scores = paper_scores(replace(config, method="papa-2"))
    assert scores == {"mean": 75.63, "average_soup": 75.75, "greedy_soup": 75.91}
    plain = replace(config, method="papa-all", diversity=replace(config.diversity, grid="none"))
    assert paper_scores(plain) == {"mean": 76.21, "average_soup": 76.23, "greedy_soup": 76.27}
    assert paper_scores(config) is None  # papa itself is not in these tables
    details = paper_details(plain)
    assert details is not None
    assert (details["mean"]["F1 clutter"], details["average_soup"]["average F1"]) == (29.89, 76.23)
    assert paper_details(config) is None
