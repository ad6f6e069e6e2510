"""Options have one spelling in all commands, are found by their ending, and are named as they are typed."""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from papa.cli import main
from papa.cli.main import COMMANDS
from papa.cli.option_names import as_typed, complete_names, option_names
from papa.errors import ConfigError
from papa.lab.config import Config

NAMES = list(option_names(Config))


def options_of(command: str) -> type[Any] | None:
    """The dataclass of a command's options."""
    module = importlib.import_module(f"papa.cli.{command}")
    own = [
        value
        for name, value in vars(module).items()
        if isinstance(value, type) and dataclasses.is_dataclass(value) and name.lower() == f"{command}options"
    ]
    return own[0] if own else getattr(module, "Plan", None)


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in ("ls", "show")])
def test_a_command_spells_its_options_as_all_others_do(command: str) -> None:
    options = options_of(command)
    assert options is not None
    own = set(option_names(options))
    assert "--data-root" not in own
    dashed = {name.replace(".", "-"): name for name in NAMES if "." in name}
    assert not own & dashed.keys(), "an option of recipes is written with a dot"
    for name in ("soup", "output", "output_dir", "force", "num_members", "number_of_members"):
        assert f"--{name}" not in own


@pytest.mark.parametrize("command", ["run", "compare", "reproduce", "report", "soup", "predict"])
def test_every_out_may_be_shortened(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = {"run": ["digits"], "compare": ["digits"], "reproduce": ["table:ablation1"]}.get(command, [])
    with pytest.raises(SystemExit):
        main([command, *recipe, "--help"])
    assert re.search(r"-o \S+, --out ", capsys.readouterr().out)


def test_the_ending_of_one_option_is_enough() -> None:
    assert complete_names(["--epochs", "3", "--batch_size=8", "x", "-o", "y", "--no-measure"], Config) == [
        *("--train.epochs", "3", "--train.batch-size=8", "x", "-o", "y", "--average.no-measure")
    ]


@pytest.mark.parametrize("name", NAMES)
def test_whole_names_stay_as_they_are(name: str) -> None:
    assert complete_names([name, f"{name}=1"], Config) == [name, f"{name}=1"]
    assert complete_names([name.replace("-", "_").replace("__", "--", 1)], Config)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--lr", "there is no option --lr: did you mean --train.lr or --trajectory.lr?"),
        ("--alpha=0.9", "there is no option --alpha: did you mean --average.alpha or --coupling.alpha?"),
        ("--epochz", "there is no option --epochz: did you mean --train.epochs?"),
        ("--life", "there is no option --life: did you mean --average.half-life?"),
        ("--epoch", "there is no option --epoch: did you mean --train.epochs?"),
        ("--train.epoch", "there is no option --train.epoch: did you mean --train.epochs?"),
        ("--warm", "there is no option --warm: did you mean --train.warmup-epochs?"),
    ],
)
def test_other_endings_are_suggested(argument: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        complete_names([argument], Config)
    assert str(caught.value) == message
    assert main(["run", "digits", argument, "1"]) == 2
    assert message in capsys.readouterr().err


def test_what_is_like_no_option_and_what_is_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["run", "digits", "--foo", "3"], "there is no option --foo: papa run digits --help lists all"),
        (["soup", "--foo", "a", "b"], "there is no option --foo: papa soup --help lists all"),
        (["run", "digits", "--epochs", "two"], "--train.epochs is two, expected a whole number"),
        (["run", "digits", "--half-life=short"], "--average.half-life is short, expected a number"),
        (
            ["run", "digits", "--no-average.measure"],
            "there is no option --no-average.measure: did you mean --average.no-measure?",
        ),
        (
            ["run", "digits", "--half-life", "690"],
            "the configuration of digits cannot run:\n"
            "  --average.half-life is 690.0, expected more than 0 and at most 1",
        ),
    ):
        assert main(arguments) == 2
        assert capsys.readouterr().err == f"papa: {message}\n"


def test_numbers_of_all_kinds_are_understood() -> None:
    given = ["--average.half-life", "None", "--train.lr=1e-3", "--seed", "-1"]
    assert complete_names(given, Config) == given


def test_messages_name_options_as_they_are_typed() -> None:
    message = "max_train is 0 in /data/max_train/x_y, expected `make_model()`; set test_share or every_steps"
    assert as_typed(message, NAMES) == (
        "--data.max-train is 0 in /data/max_train/x_y, expected `make_model()`; set --data.test-share or every_steps"
    )


def test_an_error_of_the_library_reaches_the_user_with_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from helpers import write_images

    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "photos", num_classes=2, images_per_class=3, size=8)
    command = ["run", "images", "--data.root", "photos", "--workers", "1"]
    assert main([*command, "--data.name", "folder"]) == 2
    assert "set --data.test-share, such as 0.2" in capsys.readouterr().err
    assert main(["run", "images", "--workers", "1"]) == 2
    assert "--data.root is images, and there is no such folder" in capsys.readouterr().err
    assert main([*command, "--test-share", "2"]) == 2
    assert "--data.test-share is 2.0, expected a share between 0 and 1" in capsys.readouterr().err
