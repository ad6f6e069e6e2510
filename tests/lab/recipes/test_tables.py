"""Every table and figure of the paper that shows results has rows here, and every row is a configuration."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, ClassVar

import pytest

from papa.errors import ConfigError
from papa.lab.config import Config, changed
from papa.lab.recipes import RECIPES
from papa.lab.recipes.build import make_schedule
from papa.lab.recipes.recipe import translated
from papa.lab.recipes.tables import TABLES, Row, Table, find_table, number
from papa.lab.reproduce import Entry, Request, config_of, jobs_for

PAPERS_TABLES = (
    *("summary_table", "summary_table2", "comparing_long", "dart_replication", "cosine", "comparing2", "cifar100_swa"),
    *("cifar100_gradual", "cifar100_res_gradual", "cifar10_gradual", "cifar10_res_gradual"),
    *("ablation", "ablation1", "ablation2", "ablation_gradual"),
    *("image_seg1", "image_seg2"),
)
"""The labels of the paper's tables of results."""


def test_every_table_and_figure_of_results_is_there() -> None:
    assert {f"table:{label}" for label in PAPERS_TABLES} <= set(TABLES)
    assert "figure:papa_acc1" in TABLES


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_rows_have_unique_names_and_numbers_under_the_columns(table: Table) -> None:
    names = [row.name for row in table.rows]
    assert len(set(names)) == len(names)
    for row in table.rows:
        assert set(row.paper) <= set(table.columns)
        assert set(row.spread) <= set(row.paper)
        assert row.recipe is not None or row.paper


@pytest.mark.parametrize("budget", ["full", "mini", "smoke"])
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_row_is_a_configuration(table: Table, budget: str) -> None:
    for row in table.rows:
        if row.recipe is not None:  # else it is quoted from others
            config = config_of(row, table, budget=budget)
            assert config.recipe == row.recipe


def test_rows_of_the_full_setting_are_the_recipe_and_its_changes() -> None:
    table = find_table("table:ablation1")
    rows = {row.name: config_of(row, table) for row in table.rows}
    base = RECIPES["cifar100-resnet18-ablation"].config("full")
    assert rows["papa-all"] == dataclasses.replace(base, method="papa-all")
    window = rows["epochs-75-300"].average
    assert (window.start, window.stop) == (75.0, None)
    assert rows["no-repair"].average.repair == 0


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_no_two_rows_are_the_same_experiment(table: Table) -> None:
    """Schedule, cadence or strength differ in the full setting."""
    rows = [row for row in table.rows if row.recipe is not None]
    built = {}
    for row in rows:
        config = config_of(row, table)
        rates = tuple(round(make_schedule(config)(step, 4500), 9) for step in range(0, 4500, 25))
        plain = dataclasses.replace(config, train=Config().train, trajectory=Config().trajectory)
        built[row.name] = (json.dumps(plain.to_json()), config.train.epochs, rates)
    assert len(set(built.values())) == len(rows)


def test_the_paper_has_three_seeds_where_it_gives_a_standard_deviation_and_else_one() -> None:
    for table in TABLES.values():
        for row in table.rows:
            expected = 10 if table.label == "logistic" else 3 if row.spread else 1
            assert row.seeds == tuple(range(1, expected + 1))
    single = {row.name for row in find_table("summary_table").rows if row.seeds == (1,)}
    assert single == {f"imagenet-resnet50-{method}" for method in ("independent", "papa", "papa-all", "papa-2")}
    single = {row.name for row in find_table("comparing_long").rows if row.seeds == (1,)}
    networks, methods = ("cifar100-vgg16", "cifar100-resnet18"), ("papa", "papa-all", "papa-2")
    assert single == {f"{network}-none-{method}" for network in networks for method in methods}


def test_a_request_runs_each_row_with_its_own_seeds(tmp_path: Path) -> None:
    table = find_table("summary_table")
    rows = table.pick(["cifar10-vgg11-papa", "imagenet-resnet50-papa"])

    def seeds(**changes: Any) -> list[tuple[str, int]]:
        jobs = jobs_for(Request(table=table, rows=rows, **changes), tmp_path)
        return [(job.config.data.name, job.config.seed) for job in jobs]

    assert seeds() == [("cifar10", 1), ("cifar10", 2), ("cifar10", 3), ("imagenet", 1)]
    assert seeds(budget="mini") == [("cifar10", 1), ("imagenet", 1)]
    assert seeds(seeds=(4,)) == [("cifar10", 4), ("imagenet", 4)]


class TestChanged:
    def test_values_are_replaced_by_dotted_names(self) -> None:
        config = changed(Config(), {"members": 2, "average.alpha": 0.5, "average.repair": 3})
        assert (config.members, config.average.alpha, config.average.repair) == (2, 0.5, 3)
        assert config.train == Config().train

    def test_unknown_names_are_refused_with_the_closest_match(self) -> None:
        with pytest.raises(ConfigError, match=r"config.average.alhpa is not known: did you mean alpha"):
            changed(Config(), {"average.alhpa": 0.5})


class TestTranslated:
    full: ClassVar[Config] = RECIPES["cifar100-resnet18-ablation"].config("full")
    mini: ClassVar[Config] = RECIPES["cifar100-resnet18-ablation"].config("mini")

    def test_epochs_keep_their_share_of_training(self) -> None:
        found = translated({"average.start": 75.0, "average.stop": 150.0}, self.full, self.mini)
        assert found["average.start"] / self.mini.train.epochs == pytest.approx(75 / 300)
        assert found["average.stop"] / self.mini.train.epochs == pytest.approx(150 / 300)

    def test_a_cadence_keeps_its_ratio(self) -> None:
        found = translated({"average.every_epochs": 10.0}, self.full, self.mini)
        assert found["average.every_epochs"] == 2 * self.mini.average.every_epochs

    @pytest.mark.parametrize("every_steps", [1, 10, 50])
    @pytest.mark.parametrize("alpha", [0.9999, 0.99, 0.5])
    def test_a_half_life_keeps_its_ratio(self, alpha: float, every_steps: int) -> None:
        found = translated({"average.alpha": alpha, "average.every_steps": every_steps}, self.full, self.mini)
        ratio = (every_steps / math.log(alpha)) / (10 / math.log(0.99))
        assert self.mini.average.half_life is not None
        assert found["average.half_life"] == pytest.approx(ratio * self.mini.average.half_life)
        assert found["average.alpha"] is None
        assert found["average.every_steps"] == every_steps

    def test_other_changes_stay_the_same(self) -> None:
        changes = {"method": "papa-2", "diversity.same_init": True, "members": 10}
        assert translated(changes, self.full, self.mini) == changes


RESULT = {
    "test": {"mean": 70.0, "min": 69.0, "average_soup": 10.0, "greedy_soup": 71.0},
    "aligned": {"test": {"average_soup": 60.0, "greedy_soup": 72.0}, "greedy_members": [0, 2]},
    "repaired": None,
    "trajectory": {
        "test": {"mean": 75.0, "average_soup": 20.0, "details": {"mean": {"F1 cars": 1.0}}},
        "greedy_as_it_is": {"test": 74.0, "members": [0]},
        "aligned": {"test": {"average_soup": 65.0, "details": {"average_soup": {"F1 cars": 2.0}}}},
    },
    "greedy_members": [1],
    "similarity": {"members": [0.5, 0.25], "soup": [0.75, 0.5], "plain": {"members": [0.125], "soup": [0.25]}},
}


class TestNumber:
    @pytest.mark.parametrize(
        ("part", "column", "expected"),
        [
            ("test", "mean", 70.0),
            ("test", "average_soup", 10.0),
            ("aligned", "average_soup", 60.0),
            ("aligned", "mean", 70.0),
            ("test", "greedy_size", 1.0),
            ("aligned", "greedy_size", 2.0),
            ("test", "members.2", 25.0),
            ("test", "soup.1", 75.0),
            ("test", "soup.3", None),
            ("test", "ensemble", None),
            ("test", "details.average_soup.F1 cars", None),
            ("repaired", "mean", 70.0),
            ("repaired", "average_soup", None),  # never a soup of another kind
            ("repaired", "greedy_size", None),
            ("trajectory", "mean", 75.0),
            ("trajectory", "average_soup", 20.0),
            ("trajectory", "min", None),
            ("trajectory", "greedy_as_it_is", 74.0),
            ("trajectory.aligned", "mean", 75.0),
            ("trajectory.aligned", "average_soup", 65.0),
            ("trajectory.aligned", "details.mean.F1 cars", 1.0),
            ("trajectory.aligned", "details.average_soup.F1 cars", 2.0),
            ("plain", "members.1", 12.5),
            ("plain", "soup.1", 25.0),
            ("plain", "mean", 70.0),
        ],
    )
    def test_columns_are_found_where_they_are(self, part: str, column: str, expected: float | None) -> None:
        row = Row(name="row", title="row", recipe="digits", part=part)
        assert number(RESULT, row, column) == expected


def test_unknown_tables_and_rows_are_refused_with_the_closest_match() -> None:
    with pytest.raises(ConfigError, match="there is no table or figure table:ablaton1: did you mean table:ablation1"):
        find_table("table:ablaton1")
    with pytest.raises(ConfigError, match="table:ablation1 has no row papaall: did you mean papa-all"):
        find_table("ablation1").pick(["papaall"])


def test_an_entry_has_mean_spread_and_difference() -> None:
    row = Row(name="row", title="row", recipe="digits")
    entry = Entry(row=row, column="mean", paper=80.0, paper_spread=None, ours=(79.0, 81.0, 80.5))
    assert entry.mean == pytest.approx(80.1666, abs=1e-3)
    assert entry.spread == pytest.approx(1.0408, abs=1e-3)
    assert entry.difference == pytest.approx(0.1666, abs=1e-3)
    empty = Entry(row=row, column="mean", paper=80.0, paper_spread=None, ours=())
    assert (empty.mean, empty.spread, empty.difference) == (None, None, None)
