from dataclasses import replace

import pytest

from papa.errors import ConfigError
from papa.lab.config import (
    AverageConfig,
    Config,
    DataConfig,
    DiversityConfig,
    TrainConfig,
)
from papa.lab.recipes import BUDGETS, RECIPES


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("budget", BUDGETS)
def test_every_recipes_config_is_sound_and_survives_json(name: str, budget: str) -> None:
    config = RECIPES[name].config(budget)
    assert Config.from_json(config.to_json()) == config


def test_every_problem_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Config(
            method="pappa",
            members=0,
            data=DataConfig(validation=1.5, test_share=0.0),
            train=TrainConfig(epochs=0, lr=-1.0, schedule="cosin"),
            average=AverageConfig(
                alpha=2.0,
                every_steps=0,
                start=5,
                stop=1,
                repair_policy="mine",
                repair_scope="batchnorm",
                align="weight",
                align_every_epochs=0.0,
                align_batches=0,
                probe_steps=0,
                repair_soups=-1,
            ),
            diversity=DiversityConfig(grid="dart", per_batch=True),
        )
    message = str(caught.value)
    for part in (
        "--method is pappa: did you mean papa?",
        "--members is 0, expected at least 1",
        "--data.validation is 1.5",
        "--data.test-share is 0.0, expected more than 0 and below 1",
        "--data.validation and --data.test-share are 1.5 together, expected less than 1",
        "--train.epochs is 0",
        "--train.lr is -1.0",
        "--train.schedule is cosin: did you mean cosine?",
        "--average.alpha is 2.0",
        "--average.every-steps is 0",
        "--average.repair-policy is mine",
        "--average.repair-scope is batchnorm: did you mean batch-norm?",
        "--average.align is weight: did you mean weights?",
        "--average.align-every-epochs is 0.0, expected more than 0",
        "--average.align-batches is 0, expected at least 1",
        "--average.probe-steps is 0, expected at least 1",
        "--average.repair-soups is -1, expected at least 0",
        "--diversity.grid is dart, which has one policy per member: leave out --diversity.per-batch",
        "--average.stop is 1, expected at least --average.start (5)",
    ):
        assert part in message


def test_unknown_fields_are_named_with_the_closest() -> None:
    value = Config().to_json()
    value["train"]["epoch"] = 3
    with pytest.raises(ConfigError, match=r"config\.train\.epoch is not known: did you mean epochs\?"):
        Config.from_json(value)
    with pytest.raises(ConfigError, match=r"config\.data is 3, expected an object"):
        Config.from_json({"data": 3})


def test_everything_wrong_in_a_file_is_reported_at_once() -> None:
    value = {"memebrs": 3, "members": "three", "train": {"epoch": 3, "lr": -1.0}, "data": {"root": 4}}
    with pytest.raises(ConfigError) as caught:
        Config.from_json(value)
    for problem in (
        "config.memebrs is not known: did you mean members?",
        "config.members is 'three', expected int",
        "config.train.epoch is not known: did you mean epochs?",
        "config.data.root is 4, expected str",
        "--train.lr is -1.0, expected more than 0 and finite",
    ):
        assert problem in str(caught.value)


def test_missing_entries_have_the_values_of_the_base() -> None:
    base = RECIPES["digits"].config()
    assert Config.from_json({"train": {"epochs": 3}}, base) == replace(base, train=replace(base.train, epochs=3))


def test_a_config_cannot_be_changed_by_accident() -> None:
    config = Config()
    with pytest.raises(AttributeError):
        config.members = 3  # type: ignore[misc]
    assert replace(config, members=3).members == 3
