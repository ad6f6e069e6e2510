"""`papa diff` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from papa.cli import main
from papa.lab.loading import recipe_evaluation
from papa.lab.recipes import find


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"w": torch.tensor([3.0, 4.0]), "same": torch.ones(2), "gone": torch.zeros(1)}, "a.safetensors")
    save_file({"w": torch.tensor([4.0, 3.0]), "same": torch.ones(2)}, "b.safetensors")


def test_diff_lists_the_largest_differences_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "a.safetensors", "b.safetensors", "--top", "1"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in (
        "1.414 0.2828 0.960000 2 w",
        "2 tensors in both, 1 of them equal, 1 not shown (--top 0 shows all)",
        "compared with A, B has no 'gone' float32 [1]",
    ):
        assert part in shown
    assert main(["diff", "a.safetensors", "b.safetensors", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["tensors"][0]["name"] == "w"
    assert value["unlike"] == ["no 'gone' float32 [1]"]


def test_diff_says_whether_two_are_in_one_basin(capsys: pytest.CaptureFixture[str]) -> None:
    state = recipe_evaluation(find("digits").config("smoke")).network.state_dict()
    state = {name: value.contiguous().clone() for name, value in state.items()}
    save_file(state, "one.safetensors")
    near = {name: value + 1e-6 if value.is_floating_point() else value for name, value in state.items()}
    save_file(near, "two.safetensors")
    assert main(["diff", "one.safetensors", "two.safetensors", "--recipe", "digits", "--budget", "smoke"]) == 0
    shown = capsys.readouterr().out
    assert "they seem to be in one basin: the loss rises" in shown
    curve = shown.split("A to B")[1].splitlines()
    assert [line[:3] for line in curve[1:12]] == [f"{index / 10:.1f}" for index in range(11)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.safetensors", "c.safetensors"], "there is no file c.safetensors"),
        (
            ["a.safetensors", "b.safetensors", "--recipe", "digits"],
            "b.safetensors cannot be averaged with a.safetensors",
        ),
        (["a.safetensors", "b.safetensors", "--factory", "a:b"], "the factory a:b cannot be found"),
        (["a.safetensors", "b.safetensors", "--top", "-3"], "--top is -3, expected the number of tensors to list"),
    ],
)
def test_mistakes_get_one_readable_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_files_with_nothing_in_common_are_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"other": torch.ones(2)}, "c.safetensors")
    assert main(["diff", "a.safetensors", "c.safetensors"]) == 2
    assert "0 tensors in both" in capsys.readouterr().out
