"""Every recipe builds and takes steps under the smoke budget, on tiny data of the same form."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from helpers import execute, write_images
from papa.lab.config import Config
from papa.lab.models import head_of, make_model
from papa.lab.recipes import RECIPES, paper_scores, paper_soups
from papa.lab.recipes.build import build, callbacks_for
from papa.lab.recipes.recipe import Recipe
from papa.training import Callback, Training
from texts import sample_text


@pytest.fixture(scope="module")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    write_data(root)
    return root


def write_data(root: Path) -> None:
    """Tiny data for every recipe."""
    for part in ("train", "test"):
        write_images(root / "cifar10" / part, num_classes=10, images_per_class=5, size=32)
        write_images(root / "cifar100" / part, num_classes=100, images_per_class=1, size=32)
    write_images(root / "images", num_classes=3, images_per_class=20, size=40)
    for part in ("train", "val"):
        write_images(root / "imagenet" / part, num_classes=3, images_per_class=6, size=120)
    write_mnist(root / "FashionMNIST" / "raw")
    write_tiles(root / "tiles")
    write_tiles(root / "vaihingen")
    write_optdigits(root)
    write_table(root / "table")
    (root / "text").mkdir()
    (root / "text" / "sample.txt").write_text(sample_text(3000))


def write_mnist(folder: Path) -> None:
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for part, count in (("train", 60), ("t10k", 20)):
        pixels = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">iiii", 2051, count, 28, 28) + pixels.tobytes())
        labels = np.arange(count, dtype=np.uint8) % 10
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">ii", 2049, count) + labels.tobytes())


def write_tiles(root: Path) -> None:
    """Images of six sizes; a pixel's brightness gives its class, and label 255 stands for no class."""
    generator = torch.Generator().manual_seed(0)
    for folder in ("images", "labels"):
        (root / folder).mkdir(parents=True)
    for number in range(6):
        labels = torch.randint(6, (40 + number, 50 - number), generator=generator, dtype=torch.uint8)
        images = (40 * labels)[..., None].repeat(1, 1, 3)
        labels[0] = 255
        Image.fromarray(images.numpy()).save(root / "images" / f"area{number}.png")
        Image.fromarray(labels.numpy()).save(root / "labels" / f"area{number}.png")
    split = {"train": ["area0", "area1"], "validation": ["area2", "area3"], "test": ["area4", "area5"]}
    (root / "splits.json").write_text(json.dumps(split))


def write_table(path: Path) -> None:
    random = np.random.default_rng(0)
    rows = [
        f"{x:.3f},{'red' if x > y else 'blue'},{y:.3f},{'yes' if x + y > 0 else 'no'}"
        for x, y in random.normal(size=(80, 2))
    ]
    path.write_text("\n".join(["width,colour,height,kind", *rows]))


def write_optdigits(root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for name, count in (("optdigits.tra", 80), ("optdigits.tes", 40)):
        table = np.column_stack([random.integers(0, 17, (count, 64)), np.arange(count) % 10])
        np.savetxt(root / name, table, fmt="%d", delimiter=",")


@pytest.fixture(scope="module")
def weights_of(tmp_path_factory: pytest.TempPathFactory) -> object:
    folder = tmp_path_factory.mktemp("weights")

    def make(config: Config) -> str:
        path = folder / f"{config.model.name.removeprefix('timm:')}.safetensors"
        image_size = config.data.image_size or 224
        save_file(make_model(config.model.name, num_classes=7, image_size=image_size).state_dict(), path)
        return str(path)

    return make


def smoke_data_config(recipe: Recipe, data_root: Path) -> Config:
    """The smoke budget of a recipe, on data that `write_data` wrote."""
    config = recipe.config("smoke")
    has_folder = config.data.name in ("images", "imagenet", "tiles", "vaihingen", "text", "table")
    root = data_root / config.data.name if has_folder else data_root
    return replace(config, data=replace(config.data, root=str(root)))


def smoke_config(recipe: Recipe, data_root: Path, weights_of: object) -> Config:
    config = smoke_data_config(recipe, data_root)
    if "finetune" in recipe.name:
        config = replace(config, model=replace(config.model, weights=weights_of(config)))  # type: ignore[operator]
    return config


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_runs(name: str, data_root: Path, weights_of: object, tmp_path: Path) -> None:
    config = smoke_config(RECIPES[name], data_root, weights_of)
    result = execute(config, tmp_path / "run", workers=1)
    assert len(result["test"]["members"]) == config.members
    assert all(loss is not None for loss in result["test"]["loss"]["members"])


@pytest.mark.parametrize("method", ["independent", "papa-all", "papa-2"])
def test_every_method_runs_on_images(method: str, data_root: Path, weights_of: object, tmp_path: Path) -> None:
    config = replace(smoke_config(RECIPES["cifar10-vgg11"], data_root, weights_of), method=method)
    assert execute(config, tmp_path / "run", workers=1)["method"] == method


def test_the_body_is_frozen_first_and_then_trained(data_root: Path, weights_of: object) -> None:
    config = smoke_config(RECIPES["cifar10-vgg11"], data_root, weights_of)
    config = replace(config, method="independent", members=1, model=replace(config.model, frozen=0.5))
    training = build(config)
    start = {name: value.clone() for name, value in training.population[0].named_parameters()}
    head = {id(parameter) for parameter in head_of(training.population[0]).parameters()}
    moved: list[set[bool]] = []

    class Look(Callback):
        def on_step_complete(self, training: Training) -> None:
            named = training.population[0].named_parameters()
            body = [not torch.equal(value, start[name]) for name, value in named if id(value) not in head]
            moved.append(set(body))

    training.run([*callbacks_for(config, print), Look()])
    half = training.length.num_steps // 2
    assert moved[half - 1] == {False}
    assert any(moved[-1])


def test_logistic_regression_is_the_papers() -> None:
    recipe = RECIPES["optdigits-logistic"]
    config = recipe.config()
    train = config.train
    assert (config.members, train.epochs, train.batch_size, train.lr, train.schedule) == (10, 10, 1, 0.1, "constant")
    assert (train.momentum, train.weight_decay, config.average.repair, config.average.every_epochs) == (0, 0, 0, 1)
    assert paper_scores(config) == {"mean": 91.34, "average_soup": 90.37}
    assert paper_scores(replace(config, method="independent")) == {"mean": 92.76, "average_soup": 93.62}


def test_recipes_belong_to_the_papers_tables_and_know_its_numbers() -> None:
    vgg = RECIPES["cifar100-vgg16"]
    assert vgg.table == "cifar100_gradual, comparing_long"
    config = vgg.config()
    assert paper_scores(config) == {"ensemble": 79.88, "average_soup": 79.65, "greedy_soup": 79.08}
    assert paper_scores(replace(config, members=4)) is None
    baseline = replace(RECIPES["imagenet-resnet50"].config(), method="independent")
    assert paper_scores(baseline) == {"ensemble": 78.7, "greedy_soup": 76.8}
    longer = replace(config, method="longer", diversity=replace(config.diversity, per_batch=True)).settled
    assert paper_scores(longer) == {"mean": 77.44}
    assert longer.train.epochs == 3000
    assert paper_scores(replace(RECIPES["cifar10-vgg11"].config(), method="longer").settled) is None


def test_recipes_of_ablations_and_comparisons_have_the_papers_numbers() -> None:
    ablation = RECIPES["cifar100-resnet18-ablation"].config()
    assert paper_scores(ablation) == {
        "mean": 79.85,
        "min": 78.71,
        "max": 80.46,
        "average_soup": 80.30,
        "greedy_soup": 80.20,
    }
    assert (paper_scores(replace(ablation, method="many-75")) or {})["mean"] == 68.62
    assert paper_soups(replace(ablation, method="independent")) == "aligned"
    dart = RECIPES["cifar100-resnet18-dart"].config()
    assert paper_scores(replace(dart, method="papa-all")) == {"average_soup": 82.59}
    esgd = RECIPES["cifar10-resnet20-esgd"].config()
    assert paper_scores(replace(esgd, members=3)) == {"mean": 92.57, "min": 92.22, "max": 92.99}
    # The paper's numbers are of averages along trajectories, which `papa reproduce` compares.
    assert paper_scores(RECIPES["cifar100-resnet18-swa"].config()) is None


@pytest.mark.parametrize("name", ["cifar10-vgg11", "text-gpt-mini", "fashion-mnist-1k", "digits-150"])
@pytest.mark.parametrize("budget", ["full", "mini", "smoke"])
def test_a_control_has_the_compute_of_the_population(name: str, budget: str) -> None:
    population = RECIPES[name].config(budget)
    longer, larger = (replace(population, method=method).settled for method in ("longer", "larger-batches"))
    assert longer.members == larger.members == 1
    assert longer.train.epochs == larger.train.epochs == population.members * population.train.epochs
    assert longer.train.lr == population.train.lr
    assert larger.train.batch_size == population.members * population.train.batch_size
    given = population.train.larger_batch_lr
    assert larger.train.lr == pytest.approx(given or population.train.lr * population.members**0.5)
    assert (longer.data, longer.model, longer.settled) == (population.data, population.model, longer)
