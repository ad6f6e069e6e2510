"""Tables of results, made from made-up records of all runs of all studies."""

from __future__ import annotations

import copy
import shlex
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from papa.cli.compare import jobs_of, parse_compare
from papa.core.half_life import HALF_LIFE
from papa.errors import RunError
from papa.lab.config import METHODS, Config
from papa.lab.recipes import find
from papa.lab.report.draw import standalone_svg
from results import claims, couplings, pays, tables
from results.controls import controls, verdicts
from results.evidence import CIFAR10, EVIDENCE
from results.page import detail_page, prose_of, readme_with_headline
from results.record import read_records, runs_of, write_records
from results.short import MAIN_CIFAR10, SHORT
from results.studies import PAGES, STUDIES
from results.study import Study
from results.tables import Difference, paired

SOUPS = dict.fromkeys(METHODS, 50.0) | {"independent": 10.0, "papa": 57.0, "papa-all": 56.0, "papa-2": 55.0}


def invented(config: Config) -> dict[str, Any]:
    """A record of a run with that configuration; its numbers depend on method, seed and half-life."""
    seed, share = config.seed, config.average.half_life or 0.0
    scores: dict[str, Any] = {"members": [54.0 + seed] * config.members, "mean": 54.0 + seed, "min": 53.0, "max": 59.5}
    scores |= {"ensemble": 58.0 + seed, "average_soup": SOUPS[config.method] + seed - share, "greedy_soup": 55.0 + seed}
    if config.data.name == "tiles":
        scores["details"] = {"average_soup": {"accuracy": 81.25, "F1 road": 71.5}}
    steps = config.train.epochs * 61
    aligned = {"test": {"average_soup": 40.0, "greedy_soup": 54.5 + seed}}
    heights = [50.0, 45.0 - seed, 52.0]
    curve = {"coefficients": [0, 0.5, 1], "score": heights, "loss": [1.0, 1.5, 1.0], "barrier": 0.5}
    alike = {"layers": ["one", "two"], "members": [0.9, 0.8], "soup": [0.95, 0.85], "matched": True}
    return {
        "recipe": config.recipe,
        "method": config.method,
        "seed": seed,
        "config": config.to_json(),
        "test": scores,
        "validation": {**scores, "mean": 53.5},
        **({"aligned": aligned} if config.method == "independent" and config.members > 1 else {}),
        **(
            {
                "similarity": {**alike, "plain": {"members": [0.5, 0.25], "soup": [0.75, 0.125]}},
                "interpolation": {"pair": [0, 1], "curves": [{"name": "plain", **curve}]},
            }
            if config.analysis
            else {}
        ),
        "seconds": {"train": 540.0, "evaluate": 60.0},
        "environment": {"papa": "1.2.3", "torch": "9.8.7", "python": "3.12", "device": "cpu", "processors": 2},
        "best_soup": {"epoch": 3, "validation": {"score": 60.0}, "test": {"score": 57.5 + seed}},
        "trajectory": {"test": {"mean": 56.5 + seed, "average_soup": 58.5 + seed}},
        "epochs": [{"epoch": config.train.epochs, "step": steps, "loss": 0.01, "distance": 2.5}],
    }


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    for study in STUDIES:
        runs = {name: config for command in study.commands for name, config in runs_of(command).items()}
        write_records(study.name, {name: invented(config) for name, config in runs.items()}, folder)
    return folder


def rows_of(page: str, start: str) -> list[list[str]]:
    lines = [line for line in page.splitlines() if line.startswith(f"| {start}")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_study_becomes_tables_with_command_budget_seeds_and_versions(records: Path) -> None:
    page = "\n".join(detail_page(name, records) for name in PAGES)
    assert "Not run yet" not in page
    assert "are missing" not in page
    for study in STUDIES:
        assert f"## {study.title}\n" in page
        for table in study.tables:
            section = page.split(f"## {study.title}\n")[1].split(f"### {table.title}\n")[1].split("\n##")[0]
            assert all(command in section for command in table.commands)
            has_budget = any("--budget mini" in command for command in table.all_commands)
            assert ("\nBudget mini; seeds 1" if has_budget else "\nSeeds 1") in section
            assert "papa 1.2.3; PyTorch 9.8.7; Python 3.12; device cpu." in section
            assert "\n|---|" in section


@pytest.mark.parametrize("study", [study for study in STUDIES if study.commands], ids=lambda study: study.name)
def test_the_options_of_a_study_are_those_that_its_commands_understand(study: Study) -> None:
    command = study.commands[-1]
    _, _, recipe, *arguments = shlex.split(command)
    options, out = parse_compare(find(recipe), arguments)
    assert dict(runs_of(command)) == {str(path.relative_to("runs")): config for config, path in jobs_of(options, out)}


def test_the_main_table_has_means_gap_every_run_and_paired_differences(records: Path) -> None:
    page = tables.main_tables(list(read_records([MAIN_CIFAR10], records).values()))
    row, first, *_ = rows_of(page, "papa |")
    soups = [57.0 + seed - HALF_LIFE for seed in (1, 2, 3)]
    assert row[3] == f"{fmean(soups):.2f} ({stdev(soups):.2f})"
    assert row[5] == f"{100 * (fmean(soups) - 56) / 4:.0f}%"
    assert first[:2] == ["papa", "1"]
    assert first[-1] == "10.0"
    (gain,) = rows_of(page, "papa: average soup less mean of independent members")
    assert gain[1:] == ["+3.00, +3.00, +3.00", "+3.00", "0.00", "yes, above"]
    (best,) = rows_of(page, "papa: average soup less best of independent members, by test score")
    assert best[1:] == ["-1.50, -0.50, +0.50", "-0.50", "1.00", "no"]
    names = [row[0].partition(" less ")[2] for row in rows_of(page, "papa-2: average soup")]
    assert names == [
        "mean of independent members",
        "best of independent members, by test score",
        "ensemble of independent members",
        "greedy soup of independent members",
        "greedy soup of independent members, aligned and repaired",
    ]


def test_a_failed_seed_is_not_left_out_of_the_statistics(records: Path) -> None:
    runs = [dict(record) for record in read_records([MAIN_CIFAR10], records).values()]
    failed = next(record for record in runs if record["method"] == "papa" and record["seed"] == 2)
    failed["test"] = {**failed["test"], "average_soup": None}
    (gain,) = rows_of(tables.main_tables(runs), "papa: average soup less mean of independent members")
    assert gain[1:] == ["+3.00, not finite, +3.00", "", "", "not finite"]


def test_soups_that_are_the_same_have_one_row(records: Path) -> None:
    runs = [dict(record) for record in read_records([MAIN_CIFAR10], records).values()]
    for record in runs:
        if "aligned" in record:
            record["aligned"] = {"test": {"average_soup": 40.0, "greedy_soup": record["test"]["greedy_soup"]}}
    assert len(rows_of(tables.main_tables(runs), "papa: average soup less greedy soup")) == 1


def test_half_lives_are_shown_as_shares_steps_and_alpha_and_the_best_is_named(records: Path) -> None:
    (study,) = (study for study in STUDIES if study.name == "half-life")
    page = tables.half_lives(list(read_records(study.commands, records).values()))
    row = next(row for row in rows_of(page, "20 |") if row[2] == "0.02")
    half_life = 0.02 * 20 * 61
    assert row[:5] == ["20", "1220", "0.02", f"{half_life:.3g}", f"{0.5 ** (2 / half_life):.3g}"]
    assert row[-1] == f"{100 * (58 - 0.02 - 55) / 4:.0f}%"
    assert [row[2] for row in rows_of(page, "5 |")] == [
        "0.002",
        "0.005",
        "0.01",
        "0.02",
        "0.05",
        "0.1",
        "never pushed",
    ]
    assert "- 5 epochs: best average soup with a half-life of 0.002 of training, the shortest tried." in page


def test_half_lives_are_compared_for_the_seeds_that_all_were_run_with(records: Path) -> None:
    (study,) = (study for study in STUDIES if study.name == "half-life")
    (table,) = study.tables
    found = list(read_records(table.all_commands, records).values())
    page = table.render(found)
    (never,) = (one for one in found if one["method"] == "independent" and one["config"]["train"]["epochs"] == 20)
    other = copy.deepcopy({**never, "seed": 2})
    other["test"]["average_soup"] = 99.0
    assert table.render([*found, other]) == page


def test_other_studies_show_their_runs(records: Path) -> None:
    page = detail_page("short", records)
    sections = {study.name: page.split(f"## {study.title}\n")[1].split("\n## ")[0] for study in SHORT}
    assert {f"papa, members {members}" for members in (2, 3, 5)} <= {
        row[0] for row in rows_of(sections["sizes"], "papa")
    }
    assert {row[0] for row in rows_of(sections["repair"], "papa-all")} == {
        "papa-all, REPAIR as in the paper",
        "papa-all, REPAIR on the same images for all",
        "papa-all, BatchNorm reset alone",
        "papa-all, no REPAIR",
        "papa-all",
    }
    assert len(rows_of(sections["repair"], "papa: average soup less that of papa-all")) == 1
    (longer,) = rows_of(sections["long"], "papa: average soup less one network, trained longer")
    assert longer[1] == "+3.00, +3.00, +3.00"
    (between,) = {tuple(row[1:]) for row in rows_of(sections["alike"], "papa, between two members |")}
    assert between == ("0.50 (0.00)", "0.25 (0.00)")
    assert ("papa", "plain", "51.00 (0.00)", "43.00 (1.00)", "43.00 (1.00)", "0.50 (0.00)") in {
        tuple(row) for row in rows_of(sections["alike"], "papa | plain")
    }


def test_segmentation_has_the_scores_of_each_class(records: Path) -> None:
    study = next(study for study in EVIDENCE if study.name == "aerial")
    section = detail_page("data-limited", records).split(f"## {study.title}\n")[1]
    assert "| papa: average soup | 81.25 (0.00) | 71.50 (0.00) |" in section


def test_every_control_has_a_row_and_what_the_soups_of_papa_gain_over_it(records: Path) -> None:
    study = EVIDENCE[0]
    runs = list(read_records(study.tables[-1].commands, records).values())
    page = controls(runs)
    found = {row[0]: row[1:] for row in rows_of(page, "")[1:]}
    share = runs[0]["config"]["average"]["half_life"]
    gain = 57.0 - share
    ema = 58.5

    def less(level: float) -> list[str]:
        return [f"{own - level:+.2f} (0.00)" for own in (gain, ema)]

    assert found == {
        "one network (mean of 4)": ["56.00 (1.00)", *less(54)],
        "... with EMA (mean of 4)": ["58.50 (1.00)", *less(56.5)],
        "the best of 4 by validation": ["56.00 (1.00)", *less(54)],
        "greedy soup of 4 independent networks": ["57.00 (1.00)", *less(55)],
        "one network, 4 times longer": ["56.00 (1.00)", *less(54)],
        "... with early stopping": ["59.50 (1.00)", *less(57.5)],
        "... with EMA": ["58.50 (1.00)", *less(56.5)],
        "one network, batches 4 times larger": ["56.00 (1.00)", *less(54)],
        "PAPA-2, average soup": [f"{57 - share:.2f} (1.00)", *less(gain - 2)],
        "PAPA-all, average soup": [f"{58 - share:.2f} (1.00)", *less(gain - 1)],
        "**PAPA, average soup**": [f"{59 - share:.2f} (1.00)", "", less(gain)[1]],
        "PAPA with EMA, average soup": ["60.50 (1.00)", less(ema)[0], ""],
        "ensemble of 4 networks, all at inference": ["60.00 (1.00)", *less(58)],
    }
    shares = [f"{100 * (own - 54) / 4:.0f}%" for own in (gain, ema)]
    assert page.endswith(f"\n\nPAPA closes {shares[0]} of the gap to the ensemble, with EMA {shares[1]}.")
    little_to_gain = [{**run, "test": {**run["test"], "ensemble": run["test"]["mean"] + 0.01}} for run in runs]
    far_below = [
        {**run, "test": {**run["test"], "average_soup": 10.0}} if run["method"] == "papa" else run
        for run in little_to_gain
    ]
    assert "PAPA closes" not in controls(far_below)
    by_chance = [
        {**run, "test": {**run["test"], "ensemble": run["test"]["mean"] + 4 * (run["seed"] - 2)}} for run in runs
    ]
    assert "PAPA closes" not in controls(by_chance)
    (longer,) = rows_of(verdicts(runs), "PAPA less one network, p times longer")
    assert longer[1:] == [", ".join([f"{gain - 54:+.2f}"] * 3), f"{gain - 54:+.2f}", "0.00", "yes, above"]


def test_the_control_that_trains_longer_is_a_recipe_or_a_method(records: Path) -> None:
    study = next(study for study in EVIDENCE if study.name == "aerial")
    runs = list(read_records(study.tables[-1].commands, records).values())
    assert {run["method"] for run in runs} == {"independent", "longer", "papa", "papa-all"}
    (row,) = rows_of(controls(runs), "one network, 3 times longer")
    assert row[1] == "56.00 (1.00)"


def test_members_with_the_same_initial_weights_have_rows_of_their_own(records: Path) -> None:
    runs = list(read_records(EVIDENCE[0].tables[-1].commands, records).values())
    same = [copy.deepcopy(dict(run)) for run in runs if run["method"] == "papa"]
    for run in same:
        run["config"]["diversity"]["same_init"] = True
        run["test"]["average_soup"] += 0.5
    page = controls([*runs, *same])
    assert rows_of(page, "**PAPA, average soup**") == rows_of(controls(runs), "**PAPA, average soup**")
    (row,) = rows_of(page, "PAPA, same initial weights, average soup")
    assert row[2] == "-0.50 (0.00)"
    share = (57.5 - runs[0]["config"]["average"]["half_life"] - 54) / 4
    assert page.endswith(f"; from the same initial weights {100 * share:.0f}%, with EMA {100 * 4.5 / 4:.0f}%.")


def test_the_member_that_is_best_on_validation_data_is_shown_by_its_test_score(records: Path) -> None:
    runs = [copy.deepcopy(dict(record)) for record in read_records(EVIDENCE[0].tables[-1].commands, records).values()]
    for run in runs:
        run["validation"]["members"] = [50.0, 70.0, None, 60.0][: len(run["test"]["members"])]
        run["test"]["members"] = [99.0, 61.0, None, 98.0][: len(run["test"]["members"])]
    (row,) = rows_of(controls(runs), "the best of 4 by validation")
    assert row[1] == "61.00 (0.00)"


def test_the_search_for_options_has_the_best_on_validation_data_first(records: Path) -> None:
    runs = [dict(record) for record in read_records(EVIDENCE[0].tables[0].commands, records).values()]
    runs[2] = {**runs[2], "validation": {**runs[2]["validation"], "mean": 77.0}}
    first = tables.tuned_options(runs).splitlines()[2]
    assert first.startswith(
        f"| {runs[2]['config']['train']['lr']:g} | {runs[2]['config']['train']['weight_decay']:g} | 77.00"
    )


def test_the_search_for_the_strength_has_the_best_soup_on_validation_data_first(records: Path) -> None:
    runs = list(
        read_records([command for command in EVIDENCE[0].commands if "half-life-" in command], records).values()
    )
    assert [line.split(" | ")[0] for line in tables.tuned_strengths(runs).splitlines()[2:]] == [
        *("| 0.5%", "| 1.5%", "| 5%")
    ]


def test_where_averaging_pays_has_a_row_and_two_points_for_each_size_and_length(records: Path) -> None:
    runs = list(read_records(pays.STUDY.commands, records).values())
    rows = rows_of(pays.table(runs), "75")
    assert [row[1] for row in rows] == [f"{epochs}" for epochs in pays.EPOCHS[75]]
    soup, longer = 57.0 - find(pays.RECIPE).config().average.half_life, 54.0
    assert rows[0][-2:] == [f"{soup - longer:.2f} (0.00)", f"{100 * (soup - longer) / 4:.0f}%"]
    gain = soup - longer
    for chart, height in ((pays.picture_of_gains(runs), gain), (pays.picture_of_shares(runs), 100 * gain / 4)):
        head, numbers = chart.numbers
        assert head == ["epochs over the data", "75 images", "300 images"]
        assert [int(row[0]) for row in numbers if row[1]] == list(pays.EPOCHS[75])
        assert all(float(cell) == pytest.approx(height, rel=1e-3) for row in numbers for cell in row[1:] if cell)
        assert "<svg" in standalone_svg(chart)


def test_what_is_far_below_is_drawn_at_the_lowest_height(records: Path) -> None:
    runs = [copy.deepcopy(record) for record in read_records(pays.STUDY.commands, records).values()]
    for run in runs:
        if run["method"] == "papa" and run["config"]["train"]["epochs"] == pays.EPOCHS[75][0]:
            run["test"]["average_soup"] = 10.0 + run["seed"]
    rows = {row[0]: row[1] for row in pays.picture_of_gains(runs).numbers[1]}
    assert float(rows[f"{pays.EPOCHS[75][0]}"]) == pays.LOWEST_GAIN
    assert float(rows[f"{pays.EPOCHS[75][1]}"]) > 0


def test_claims_have_scores_difference_and_verdict(records: Path) -> None:
    table = claims.STUDY.tables[0]
    runs = list(read_records(table.all_commands, records).values())
    rows = [line.strip("| ").split(" | ") for line in claims.claims(runs).splitlines()[2:]]
    assert len(rows) == len(claims.CLAIMS)
    by_words = {row[1]: row for row in rows}
    assert by_words["PAPA, PAPA-all"][-2:] == ["1.00 (0.00)", "**shows**"]
    assert by_words["8 members, 2 members"][-2:] == ["0.00 (0.00)", "cannot be told"]
    # The 95% interval of three values with a standard deviation of 1 reaches 2.48 to each side of their mean.
    for mean, expected in ((2.5, "**shows**"), (2.4, "cannot be told"), (-2.5, "**the opposite shows**")):
        assert tables.shows(Difference({seed: mean + seed - 2 for seed in (1, 2, 3)})) == expected
    own = list(read_records([claims.EIGHT.command], records).values())
    assert {record["config"]["members"] for record in claims.EIGHT.of(runs)} == {8}
    assert claims.EIGHT.of(runs) == own
    assert "not run yet" in claims.claims(own)


def test_couplings_are_compared_with_what_they_send(records: Path) -> None:
    runs = list(read_records(couplings.STUDY.tables[-1].commands, records).values())
    rows = [line.split(" | ") for line in couplings.comparison(runs).splitlines()[2:]]
    assert {row[0].strip("| ") for row in rows} == {"independent", *couplings.BY_METHOD}
    assert rows[0][0] == "| papa"
    assert rows[0][5:7] == [f"{57.0 - couplings.BY_METHOD['papa'].chosen - 54.0:.2f} (0.00)", "**shows**"]
    sparta, push = (next(record for record in runs if record["method"] == name) for name in ("sparta", "papa"))
    ratio = couplings.megabytes(couplings.BY_METHOD["sparta"], sparta) / couplings.megabytes(
        couplings.BY_METHOD["papa"], push
    )
    assert ratio == pytest.approx(couplings.BY_METHOD["sparta"].chosen * 5)
    assert "<svg" in standalone_svg(couplings.picture(runs))


def test_a_page_with_one_study_of_its_name_has_its_words_once(records: Path) -> None:
    page = detail_page("couplings", records)
    assert page.count("# Couplings compared") == 1
    assert page.count("*Megabytes sent* is") == 1


def test_the_chosen_options_of_couplings_are_the_best_on_validation_data() -> None:
    runs = list(read_records(couplings.STUDY.tables[0].commands).values())
    for coupling in couplings.COUPLINGS:
        assert couplings.best_tried(runs, coupling) in (None, coupling.chosen), coupling.method


def test_a_coupling_is_chosen_by_the_soup_on_validation_data(records: Path) -> None:
    coupling = couplings.BY_METHOD["sparta"]
    by_value = [list(read_records([command], records).values()) for command in coupling.trials]
    by_value[2] = [{**run, "validation": {**run["validation"], "average_soup": 99.0}} for run in by_value[2]]
    runs = [run for some in by_value for run in some]
    assert couplings.best_tried(runs, coupling) == coupling.tried[2]
    assert couplings.best_tried([run for some in by_value[:2] for run in some], coupling) is None
    assert "99.00" in couplings.trials(runs)


def test_tables_in_prose_come_from_records(records: Path, tmp_path: Path) -> None:
    (tmp_path / "opening.md").write_text("before\n\n{controls cifar10-2k}\n\nafter")
    page = prose_of("opening", records, tmp_path)
    found = list(read_records(CIFAR10.study.tables[-1].commands, records).values())
    assert rows_of(page, "**PAPA, average soup**") == [rows_of(controls(found), "**PAPA, average soup**")[0][:3]]
    assert "| test accuracy | PAPA less this |" in page
    assert "Not run yet." in prose_of("opening", tmp_path, tmp_path)
    (tmp_path / "opening.md").write_text("{controls cifar11}")
    (tmp_path / "time.md").write_text("{hours} hours")
    all_commands = [command for study in STUDIES for command in study.commands]
    seconds = sum(sum(one["seconds"].values()) for one in read_records(all_commands, records).values())
    assert prose_of("time", records, tmp_path) == f"{seconds / 3600:.0f} hours"
    assert prose_of("time", tmp_path, tmp_path) == "0 hours"
    (tmp_path / "claims.md").write_text("{claims}")
    page = prose_of("claims", records, tmp_path)
    assert rows_of(page, "PAPA is better than its variants | PAPA, PAPA-2")[0][2:] == ["2.00 (0.00)", "**shows**"]
    assert "Cannot be told:\n\n- more members help: 8 members, 2 members 0.00 (0.00); 5 members, 3 members" in page
    assert prose_of("claims", tmp_path, tmp_path) == "Not run yet."
    with pytest.raises(RunError, match=r"opening.md needs \{controls cifar11\}, and there is no study of that name"):
        prose_of("opening", records, tmp_path)


def test_the_readme_gets_the_main_study(records: Path, tmp_path: Path) -> None:
    readme = "before\n<!-- results -->\nold\n<!-- end of results -->\nafter\n"
    filled = readme_with_headline(readme, records)
    assert filled.startswith("before\n<!-- results -->\n|  | networks at inference | test accuracy, % |")
    assert filled.endswith("(standard deviations).\n<!-- end of results -->\nafter\n")
    assert "old" not in filled
    table = [line for line in filled.splitlines() if line.startswith("| ")]
    assert len(table) == 1 + 8
    assert "| **PAPA, average soup** | **1** |" in filled
    assert "4 members; seeds 1, 2, 3" in " ".join(filled.split())
    assert readme_with_headline(filled, records) == filled
    assert readme_with_headline(readme, tmp_path) == readme
    with pytest.raises(RunError, match=r"README\.md has no block"):
        readme_with_headline("no block", records)


def test_numbers_in_prose_come_from_records(records: Path, tmp_path: Path) -> None:
    (tmp_path / "main.md").write_text("papa {main/cifar10-vgg11/papa average_soup}, {curly}")
    assert prose_of("main", records, tmp_path) == "papa 59.00 (1.00), {curly}"
    (tmp_path / "main.md").write_text("{main/cifar10-vgg11/independent aligned.greedy_soup}")
    assert prose_of("main", records, tmp_path) == "56.50 (1.00)"
    (tmp_path / "main.md").write_text("{main/cifar10-vgg11/papa\n  average_soup}")
    assert prose_of("main", records, tmp_path) == "59.00 (1.00)"
    (tmp_path / "main.md").write_text("{main/cifar10-vgg11/pappa average_soup}")
    with pytest.raises(
        RunError, match=r"main.md needs \{main/cifar10-vgg11/pappa average_soup\}, of which there is no"
    ):
        prose_of("main", records, tmp_path)


def test_invalid_commands_are_refused() -> None:
    with pytest.raises(RunError, match="expected a command that begins with papa compare"):
        runs_of("papa run digits --out runs/a")
    with pytest.raises(RunError, match="expected an --out below runs/"):
        runs_of("papa compare digits --out elsewhere/a")


class TestPaired:
    scores = st.dictionaries(st.integers(1, 5), st.floats(0, 100), min_size=1)

    @given(ours=scores, theirs=scores)
    def test_only_seeds_that_both_have_count_and_sides_can_be_swapped(
        self, ours: dict[int, float], theirs: dict[int, float]
    ) -> None:
        found, swapped = paired(ours, theirs), paired(theirs, ours)
        common = set(ours) & set(theirs)
        if not common:
            assert found is swapped is None
        else:
            assert found is not None
            assert swapped is not None
            assert len(found.by_seed) == len(common)
            assert found.mean is not None
            assert swapped.mean == pytest.approx(-found.mean, abs=1e-9)

    def test_a_difference_is_clear_above_two_deviations(self) -> None:
        values = {1: 1.0, 2: 2.0, 3: 3.0}
        assert Difference(values).deviation == 1.0
        assert Difference(values).verdict == "no"
        assert Difference({seed: value + 0.01 for seed, value in values.items()}).verdict == "yes, above"
        assert Difference({seed: -value - 9 for seed, value in values.items()}).verdict == "yes, below"

    def test_one_seed_is_never_clear(self) -> None:
        assert Difference({1: 5.0}).deviation is None
        assert tables.difference_table([("a", Difference({1: 5.0}))]).endswith("| a | +5.00 | +5.00 |  | one seed |")


def test_losses_have_more_digits_and_their_best_is_the_lowest() -> None:
    config = find("text-gpt-tiny").config()
    independent, papa = (invented(replace(config, method=method)) for method in ("independent", "papa"))
    papa["test"].update(average_soup=52.5)
    found = tables.differences([independent, papa])
    assert "| papa: average soup less best of independent members, by test score | -0.5000 | -0.5000 |" in found
    assert tables.prose_number([papa], "average_soup") == "52.5000"
