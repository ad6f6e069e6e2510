"""Tables from CSV files and from scikit-learn: what is read, how rows are split and scaled, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers import execute
from papa.errors import ConfigError, DataError
from papa.lab.config import Config, DataConfig, DiversityConfig, ModelConfig
from papa.lab.data.table import load_table, read_csv
from papa.lab.domains import load_domain
from papa.lab.loading import load
from papa.lab.recipes import find

CSV = "size,colour,kind\n1.5,red,b\n2,blue,a\n-3,red,b\n"


def test_columns_of_numbers_and_of_words_become_features(tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    file.write_text(CSV)
    features, targets, classes = read_csv(file)
    assert classes == ("a", "b")
    assert targets.tolist() == [1, 0, 1]
    assert features.tolist() == [[1.5, 0.0, 1.0], [2.0, 1.0, 0.0], [-3.0, 0.0, 1.0]]  # size, blue, red


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has 0 columns and 0 rows, expected at least two of each"),
        ("a,b\n1,x\n", "has 2 columns and 1 rows"),
        ("a,b\n1,x\n2\n", "has 1 values in line 3, expected 2 as in its header"),
        ("a,b\n1,x\n,y\n", "has no value in line 3, column 'a': fill it in"),
        ("a,b\n1,x\ninf,y\n", "column 'a' has a value that is not finite"),
        (
            "a,b\n" + "".join(f"w{i},x\n" for i in range(101)),
            "101 different words, expected numbers or at most",
        ),
    ],
)
def test_a_table_that_cannot_be_used_is_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    file.write_text(text)
    with pytest.raises(DataError, match=message):
        read_csv(file)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    file.write_bytes(b"\xff\xfe\x00")
    for path in (file, tmp_path):
        with pytest.raises(DataError, match=r"cannot be read as a table.*Expected a CSV file in UTF-8"):
            read_csv(path)
    with pytest.raises(
        DataError, match=r"--data.root is .*missing.csv, and there is no such file: expected a CSV file"
    ):
        read_csv(tmp_path / "missing.csv")


def test_rows_are_split_by_the_seed_and_scaled_by_the_training_rows() -> None:
    table = load_table("breast-cancer")
    data, mean, std = table.split(0.15, 0.25, seed=3)
    parts = [data.train, data.validation, data.test]
    assert sum(len(part) for part in parts) == len(table.targets)
    assert [round(len(part) / len(table.targets), 2) for part in parts] == [0.6, 0.15, 0.25]
    inputs, _ = data.train.batch(torch.arange(len(data.train)))
    torch.testing.assert_close(inputs.mean(0), torch.zeros(30), atol=1e-4, rtol=0)
    torch.testing.assert_close(inputs.std(0, correction=0), torch.ones(30), atol=1e-4, rtol=0)
    rows = torch.cat([part.batch(torch.arange(len(part)))[0] for part in parts]) * std + mean
    assert torch.allclose(rows.sort(0).values, table.features.sort(0).values, rtol=1e-4)  # every row once
    again, other = (table.split(0.15, 0.25, seed=seed)[0].test.targets for seed in (3, 4))
    assert torch.equal(again, data.test.targets)
    assert not torch.equal(other, data.test.targets)


TABLE = Config(data=DataConfig(name="wine", validation=0.2), model=ModelConfig(name="mlp"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(TABLE, model=ModelConfig(name="vgg11")), "--model.name is vgg11 with --data.name wine, expected mlp"),
        (replace(TABLE, model=ModelConfig(name="mlp", pretrained=True)), "--model.pretrained is for networks of timm"),
        (replace(TABLE, diversity=DiversityConfig(grid="default")), "--diversity.grid is default, which is for images"),
    ],
)
def test_what_does_not_suit_a_table_is_refused(config: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_domain(config)


def test_a_network_of_a_run_is_loaded_with_the_scaling_of_its_rows(tmp_path: Path) -> None:
    config = find("wine-mlp").config("smoke")
    result = execute(config, tmp_path / "run", workers=1)
    domain = load_domain(config)
    table = load_table("wine")
    loaded = load(tmp_path / "run")
    assert loaded.classes == table.classes
    with torch.no_grad():
        outputs = loaded.network(loaded.prepare(table.features))
    held_out = domain.split().test.batch(torch.arange(len(domain.split().test)))[0]
    rows = [int((loaded.prepare(table.features) - row).abs().sum(1).argmin()) for row in held_out]
    accuracy = (outputs.argmax(1) == table.targets)[rows].float().mean().item() * 100
    assert accuracy == pytest.approx(result["test"]["average_soup"], abs=1e-3)
