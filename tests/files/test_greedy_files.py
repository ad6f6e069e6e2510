"""Greedy soups of files: the same choice as of networks, by any command."""

from __future__ import annotations

import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import papa
from papa.errors import ConfigError, SoupError
from papa.files.score_command import last_number

TARGET = 2.0
VALUES = [1.0, 3.5, 2.5, 10.0, 1.0]
"""Five networks of one number; the score says how near it is to the target."""


def score_of(file: Path) -> float:
    return -abs(float(load_file(file)["w"]) - TARGET)


def make_files(folder: Path) -> list[Path]:
    files = [folder / f"{index}.safetensors" for index in range(len(VALUES))]
    for file, value in zip(files, VALUES, strict=True):
        save_file({"w": torch.tensor(value)}, file)
    return files


# Reads the number without torch, and counts how often it ran.
SCRIPT = """
import struct, sys
content = open(sys.argv[1], "rb").read()
open(sys.argv[2], "a").write("x")
print("epoch 3 of 7")
print(f"score: {-abs(struct.unpack('<f', content[-4:])[0] - 2.0):.9f}")
"""


def command(folder: Path, script: str = SCRIPT) -> str:
    (folder / "score it.py").write_text(script)
    return shlex.join([sys.executable, str(folder / "score it.py"), "{}", str(folder / "count")])


def num_runs(folder: Path) -> int:
    return len((folder / "count").read_text())


def test_files_are_chosen_as_networks_are(tmp_path: Path) -> None:
    files = make_files(tmp_path)
    soup = papa.soup_files(files, tmp_path / "soup.safetensors", greedy=True, score=score_of)
    twin = papa.greedy_soup(
        [{"w": torch.tensor(value)} for value in VALUES], lambda state: -abs(float(state["w"]) - TARGET)
    )
    assert soup.trials == twin.trials
    assert soup.score == twin.score
    assert tuple(one.score for one in soup.members) == twin.member_scores
    assert [index for index, weight in enumerate(soup.weights) if weight] == sorted(twin.members)
    assert torch.equal(load_file(soup.path)["w"], twin.network["w"])
    record = json.loads((tmp_path / "soup.safetensors.json").read_text())["greedy"]
    assert record["members"] == [str(files[index]) for index in twin.members]
    assert [trial["kept"] for trial in record["trials"]] == [trial.kept for trial in twin.trials]


def test_any_command_scores(tmp_path: Path) -> None:
    files, reported = make_files(tmp_path), []
    soup = papa.soup_files(
        files,
        tmp_path / "soup.safetensors",
        greedy=True,
        score=command(tmp_path),
        on_score=lambda used, score: reported.append((len(used), score)),
    )
    by_function = papa.soup_files(files, tmp_path / "other.safetensors", greedy=True, score=score_of)
    assert soup.weights == by_function.weights
    assert num_runs(tmp_path) == len(reported) == len(VALUES) + len(soup.trials)
    assert [score for size, score in reported if size == 1] == [one.score for one in soup.members]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("import sys; sys.exit('no such data')", "ended with code 1:\n  no such data"),
        ("print('all is well')", "printed no number at the end, expected a score:\n  all is well"),
        ("print('accuracy 91.2 after 12s')", "printed no number at the end"),
        ("", r"printed no number.*\n  \(it printed nothing\)"),
    ],
)
def test_a_command_that_fails_or_says_nothing_is_told(script: str, message: str, tmp_path: Path) -> None:
    files, score = make_files(tmp_path), command(tmp_path, script)
    before = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(SoupError, match=message) as caught:
        papa.soup_files(files, tmp_path / "soup.safetensors", greedy=True, score=score)
    assert str(caught.value).startswith(f"{files[0]} could not be scored: ")
    assert {path.name for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("score", "error", "message"),
    [
        ("python eval.py", ConfigError, "has no {}, which stands for the file"),
        ("python 'eval.py {}", ConfigError, "cannot be read: No closing quotation"),
        ("./nowhere {}", SoupError, "cannot be run: No such file"),
        (lambda _: math.nan, SoupError, "every member scored NaN"),
    ],
)
def test_a_score_that_is_none_is_refused(score: Any, error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        papa.soup_files(make_files(tmp_path), tmp_path / "soup.safetensors", greedy=True, score=score)


def test_an_error_of_ones_own_score_comes_through_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        papa.soup_files(
            make_files(tmp_path),
            tmp_path / "soup.safetensors",
            greedy=True,
            score=lambda _: float(Path("no").read_text()),
        )
    assert "soup.safetensors" not in {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("97", 97.0),
        ("acc 1.5e-3\n", 1.5e-3),
        ("loss=-0.25, top1=.5;", 0.5),
        ("97.5%", 97.5),
        ("resnet18 v2.0.1", None),
        ("score: 3.\n", 3.0),
        ("1e999", None),
        ("1000 images: accuracy nan", math.nan),
        ("500 batches: -inf", -math.inf),
        ("500 batches: inf", None),
        ("Evaluated 1000 images, accuracy 91.25.", 91.25),
        ("tensor(0.9123, device='cuda:0')", 0.9123),
        ("top1 1,234.5", None),
        ("accuracy 91.2\ndone", 91.2),
        ("accuracy 91.2 in 12s", None),
    ],
)
def test_the_last_number_counts(text: str, number: float | None) -> None:
    assert last_number(text) == (pytest.approx(number, nan_ok=True) if number is not None else None)
