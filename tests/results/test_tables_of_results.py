"""Tables of results, made from made-up records of all runs of all studies."""

from __future__ import annotations

import copy
import shlex
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from papa.cli.compare import jobs_of, parse_compare
from papa.errors import RunError
from papa.lab.config import METHODS, Config
from papa.lab.recipes import find
from papa.lab.report.conclusion import Difference
from papa.lab.report.draw import standalone_svg
from results import couplings, evidence, tables
from results.page import PAGES, Results
from results.record import Record, runs_of, write_records

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
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("records")
    found = Results(records=folder)
    for study in found.studies:
        runs = {name: config for command in found.commands([study]) for name, config in runs_of(command).items()}
        write_records(study, {name: invented(config) for name, config in runs.items()}, folder)
    return found


def copied(results: Results, study: str, place: int = -1) -> list[dict[str, Any]]:
    """The runs of a table, to be changed."""
    return [copy.deepcopy(dict(record)) for record in results.runs_of(study, place)]


def rows_of(page: str, start: str) -> list[list[str]]:
    lines = [line for line in page.splitlines() if line.startswith(f"| {start}")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_study_becomes_tables_with_command_budget_seeds_and_versions(results: Results) -> None:
    page = "\n".join(results.page(name) for name in results.pages)
    assert "Not run yet" not in page
    assert "are missing" not in page
    for study, found in results.studies.items():
        for table in found:
            part = page.split(f"## {results.titles[study]}\n")[-1].split(f"### {table.title}\n")[1].split("\n##")[0]
            assert all(command in part for command in table.commands)
            has_budget = any("--budget mini" in command for command in table.commands)
            assert not has_budget or "\nBudget mini; seeds 1" in part
            assert "papa 1.2.3; PyTorch 9.8.7; Python 3.12; device cpu." in part
            assert "\n|---|" in part


@pytest.mark.parametrize(
    "command", [tables[-1].commands[-1] for tables in Results().studies.values() if tables[-1].commands]
)
def test_the_options_of_a_command_are_those_that_it_understands(command: str) -> None:
    _, _, recipe, *arguments = shlex.split(command)
    options, out = parse_compare(find(recipe), arguments)
    assert dict(runs_of(command)) == {str(path.relative_to("runs")): config for config, path in jobs_of(options, out)}


def test_the_main_table_has_means_gap_every_run_and_paired_differences(results: Results) -> None:
    runs = results.runs_of("main", 0)
    page = tables.main_tables(runs)
    row, first, *_ = rows_of(page, "papa |")
    soups = [57.0 + seed - run["config"]["average"]["half_life"] for seed, run in zip((1, 2, 3), runs, strict=False)]
    assert row[3] == f"{fmean(soups):.2f} ({stdev(soups):.2f})"
    assert row[5] == f"{100 * (fmean(soups) - 56) / 4:.0f}%"
    assert first[:2] == ["papa", "1"]
    assert first[-1] == "10.0"
    (gain,) = rows_of(page, "papa: average soup less mean of independent members")
    assert gain[1:] == ["+3.00, +3.00, +3.00", "+3.00", "0.00", "yes, above"]
    (best,) = rows_of(page, "papa: average soup less best of independent members, by test score")
    assert best[1:] == ["-1.50, -0.50, +0.50", "-0.50", "1.00", "no"]
    names = [row[0].partition(" less ")[2] for row in rows_of(page, "papa-2: average soup")]
    assert names[3:] == [
        "greedy soup of independent members",
        "greedy soup of independent members, aligned and repaired",
    ]
    same = copied(results, "main", 0)
    for record in same:
        if "aligned" in record:
            record["aligned"] = {"test": {"average_soup": 40.0, "greedy_soup": record["test"]["greedy_soup"]}}
    assert len(rows_of(tables.main_tables(same), "papa: average soup less greedy soup")) == 1


def test_a_failed_seed_is_not_left_out_of_the_statistics(results: Results) -> None:
    runs = copied(results, "main", 0)
    failed = next(record for record in runs if record["method"] == "papa" and record["seed"] == 2)
    failed["test"]["average_soup"] = None
    (gain,) = rows_of(tables.main_tables(runs), "papa: average soup less mean of independent members")
    assert gain[1:] == ["+3.00, not finite, +3.00", "", "", "not finite"]


def test_half_lives_are_shown_as_shares_steps_and_alpha_for_the_seeds_that_all_have(results: Results) -> None:
    runs = results.runs_of("half-life")
    page = tables.half_lives(runs)
    row = next(row for row in rows_of(page, "20 |") if row[2] == "0.02")
    half_life = 0.02 * 20 * 61
    assert row[:5] == ["20", "1220", "0.02", f"{half_life:.3g}", f"{0.5 ** (2 / half_life):.3g}"]
    assert row[-1] == f"{100 * (58 - 0.02 - 55) / 4:.0f}%"
    assert [row[2] for row in rows_of(page, "5 |")][-2:] == ["0.1", "never pushed"]
    assert "- 5 epochs: best average soup with a half-life of 0.002 of training, the shortest tried." in page
    (never,) = (one for one in runs if one["method"] == "independent" and one["config"]["train"]["epochs"] == 20)
    other = copy.deepcopy({**never, "seed": 2})
    other["test"]["average_soup"] = 99.0
    assert tables.half_lives([*runs, other]) == page


def test_other_studies_show_their_runs(results: Results) -> None:
    page = results.page("short")
    part = {name: page.split(f"## {title}\n")[-1].split("\n## ")[0] for name, title in results.titles.items()}
    members = {f"papa, members {members}" for members in (2, 3, 5)}
    assert members <= {row[0] for row in rows_of(part["sizes"], "papa")}
    assert {row[0] for row in rows_of(part["repair"], "papa-all")} == {
        "papa-all, REPAIR as in the paper",
        "papa-all, REPAIR on the same images for all",
        "papa-all, BatchNorm reset alone",
        "papa-all, no REPAIR",
        "papa-all",
    }
    assert len(rows_of(part["repair"], "papa: average soup less that of papa-all")) == 1
    (longer,) = rows_of(part["long"], "papa: average soup less one network, trained longer")
    assert longer[1] == "+3.00, +3.00, +3.00"
    (between,) = {tuple(row[1:]) for row in rows_of(part["alike"], "papa, between two members |")}
    assert between == ("0.50 (0.00)", "0.25 (0.00)")
    line = ["papa", "plain", "51.00 (0.00)", "43.00 (1.00)", "43.00 (1.00)", "0.50 (0.00)"]
    assert line in rows_of(part["alike"], "papa | plain")
    aerial = results.page("data-limited").split(f"## {results.titles['aerial']}\n")[1]
    assert "| papa: average soup | 81.25 (0.00) | 71.50 (0.00) |" in aerial


def test_every_control_has_a_row_and_what_the_soups_of_papa_gain_over_it(results: Results) -> None:
    runs = results.runs_of("cifar10-2k")
    page = evidence.controls(runs)
    found = {row[0]: row[1:] for row in rows_of(page, "")[1:]}
    share = runs[0]["config"]["average"]["half_life"]
    gain, ema = 57.0 - share, 58.5

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
    (longer,) = rows_of(evidence.evidence(runs), "PAPA less one network, p times longer")
    assert longer[1:] == [", ".join([f"{gain - 54:+.2f}"] * 3), f"{gain - 54:+.2f}", "0.00", "yes, above"]
    aerial = results.runs_of("aerial")
    (row,) = rows_of(evidence.controls(aerial), "one network, 3 times longer")
    assert row[1] == "56.00 (1.00)"


def test_a_gap_to_the_ensemble_that_is_lost_in_noise_is_not_closed(results: Results) -> None:
    runs = copied(results, "cifar10-2k")
    for run in runs:
        run["test"]["ensemble"] = run["test"]["mean"] + 4 * (run["seed"] - 2)
    assert "PAPA closes" not in evidence.controls(runs)
    for run in runs:
        run["test"]["ensemble"] = run["test"]["mean"] + 0.01
        run["test"]["average_soup"] = 10.0
    assert "PAPA closes" not in evidence.controls(runs)


def test_members_with_the_same_initial_weights_have_rows_of_their_own(results: Results) -> None:
    runs = results.runs_of("cifar10-2k")
    same = [run for run in copied(results, "cifar10-2k") if run["method"] == "papa"]
    for run in same:
        run["config"]["diversity"]["same_init"] = True
        run["test"]["average_soup"] += 0.5
    page = evidence.controls([*runs, *same])
    assert rows_of(page, "**PAPA, average soup**") == rows_of(evidence.controls(runs), "**PAPA, average soup**")
    (row,) = rows_of(page, "PAPA, same initial weights, average soup")
    assert row[2] == "-0.50 (0.00)"
    share = (57.5 - runs[0]["config"]["average"]["half_life"] - 54) / 4
    assert page.endswith(f"; from the same initial weights {100 * share:.0f}%, with EMA {100 * 4.5 / 4:.0f}%.")


def test_the_member_that_is_best_on_validation_data_is_shown_by_its_test_score(results: Results) -> None:
    runs = copied(results, "cifar10-2k")
    for run in runs:
        run["validation"]["members"] = [50.0, 70.0, None, 60.0][: len(run["test"]["members"])]
        run["test"]["members"] = [99.0, 61.0, None, 98.0][: len(run["test"]["members"])]
    (row,) = rows_of(evidence.controls(runs), "the best of 4 by validation")
    assert row[1] == "61.00 (0.00)"


def test_a_search_has_the_best_on_validation_data_first(results: Results) -> None:
    runs = copied(results, "cifar10-2k", 0)
    runs[2]["validation"]["mean"] = 77.0
    train = runs[2]["config"]["train"]
    assert (
        tables.tuned_options(runs).splitlines()[2].startswith(f"| {train['lr']:g} | {train['weight_decay']:g} | 77.00")
    )
    strengths = tables.tuned_strengths(results.runs_of("cifar10-2k", 2)).splitlines()[2:]
    assert [line.split(" | ")[0] for line in strengths] == ["| 0.5%", "| 1.5%", "| 5%"]


def test_where_averaging_pays_has_a_row_and_a_point_for_each_size_and_length(results: Results) -> None:
    runs = copied(results, "pays")
    rows = rows_of(evidence.pays(runs), "75")
    lengths = ["12", "20", "40", "80", "160", "320"]
    assert [row[1] for row in rows] == lengths
    gain = 57.0 - runs[0]["config"]["average"]["half_life"] - 54.0
    assert rows[0][-2:] == [f"{gain:.2f} (0.00)", f"{100 * gain / 4:.0f}%"]
    chart = evidence.picture_of_gains(runs)
    head, numbers = chart.numbers
    assert head == ["epochs over the data", "75 images", "300 images"]
    assert [row[0] for row in numbers if row[1]] == lengths
    assert all(float(cell) == pytest.approx(gain, rel=1e-3) for row in numbers for cell in row[1:] if cell)
    assert "<svg" in standalone_svg(chart)
    for run in runs:
        if run["method"] == "papa" and run["config"]["train"]["epochs"] == 12:
            run["test"]["average_soup"] = 10.0 + run["seed"]
    far = {row[0]: row[1] for row in evidence.picture_of_gains(runs).numbers[1]}
    assert float(far["12"]) == evidence.LOWEST_GAIN, "what is far below is drawn at the lowest height"
    assert float(far["20"]) > 0


def test_claims_have_scores_difference_and_verdict(results: Results) -> None:
    runs = results.runs_of("claims")
    rows = {row[1]: row for row in rows_of(evidence.claims(runs), "")[1:]}
    assert set(rows) >= {claim.compared for claim in evidence.CLAIMS}
    assert rows["PAPA, PAPA-all"][-2:] == ["1.00 (0.00)", "**shows**"]
    assert rows["8 members, 2 members"][-2:] == ["0.00 (0.00)", "cannot be told"]
    assert tables.shows(Difference({1: -2.0, 2: -2.1})) == "**the opposite shows**"
    eight = evidence.runs_at(runs, "8-members/papa")
    assert {record["config"]["members"] for record in eight} == {8}
    assert "not run yet" in evidence.claims(eight)


def test_couplings_are_compared_with_what_they_send(results: Results) -> None:
    runs = results.runs_of("couplings")
    rows = rows_of(couplings.couplings(runs), "")[1:]
    assert {row[0] for row in rows} == {"independent", *couplings.COUPLINGS}
    own = {run["method"]: run for run in runs}
    assert rows[0][0] == "papa"
    assert rows[0][5:7] == [f"{57.0 - couplings.option_value(own['papa']) - 54.0:.2f} (0.00)", "**shows**"]
    ratio = couplings.megabytes(own["sparta"]) / couplings.megabytes(own["papa"])
    assert ratio == pytest.approx(couplings.option_value(own["sparta"]) * 5)
    assert "<svg" in standalone_svg(couplings.picture(runs))


def test_the_chosen_options_of_couplings_are_the_best_on_validation_data(results: Results) -> None:
    real = Results()
    tried = tables.grouped(real.runs_of("couplings", 0), lambda record: record["method"])
    for method, runs in tables.grouped(real.runs_of("couplings"), lambda record: record["method"]).items():
        if method in tried:
            assert couplings.best_tried(tried[method]) == couplings.option_value(runs[0]), method
    sparta = [run for run in copied(results, "couplings", 0) if run["method"] == "sparta"]
    for run in sparta:
        if couplings.option_value(run) == 0.06:
            run["validation"]["average_soup"] = 99.0
    assert couplings.best_tried(sparta) == 0.06
    assert "**0.06: 99.00 (0.00)**" in couplings.coupling_trials(sparta)


def test_marks_in_a_page_are_filled_from_records(results: Results, tmp_path: Path) -> None:
    for path in PAGES.glob("*.md"):
        (tmp_path / path.name).write_text(path.read_text())

    def filled(words: str) -> str:
        (tmp_path / "RESULTS.md").write_text(words)
        return Results(tmp_path, results.folder).page("RESULTS")

    page = filled("before\n\n{controls cifar10-2k}\n\nafter")
    controls = rows_of(evidence.controls(results.runs_of("cifar10-2k")), "**PAPA, average soup**")
    assert rows_of(page, "**PAPA, average soup**") == [controls[0][:3]]
    assert "| test accuracy | PAPA less this |" in page
    seconds = sum(sum(one["seconds"].values()) for one in results.records.values())
    assert filled("{hours} hours") == f"{seconds / 3600:.0f} hours"
    page = filled("{claims}")
    assert rows_of(page, "PAPA is better than its variants | PAPA, PAPA-2")[0][2:] == ["2.00 (0.00)", "**shows**"]
    assert "Cannot be told:\n\n- more members help: 8 members, 2 members 0.00 (0.00); 5 members, 3 members" in page
    assert filled("papa {main/cifar10-vgg11/papa average_soup}, {curly}") == "papa 59.00 (1.00), {curly}"
    assert filled("{main/cifar10-vgg11/independent aligned.greedy_soup}") == "56.50 (1.00)"
    assert filled("{main/cifar10-vgg11/papa\n  average_soup}") == "59.00 (1.00)"
    for words, error in (
        ("{controls cifar11}", "names the study cifar11, and there is none of that name"),
        ("{main/cifar10-vgg11/pappa average_soup}", r"RESULTS.md needs \{main/cifar10-vgg11/pappa average_soup\}, of"),
    ):
        with pytest.raises(RunError, match=error):
            filled(words)


def test_the_readme_gets_the_main_study(results: Results, tmp_path: Path) -> None:
    readme = "before\n<!-- results -->\nold\n<!-- end of results -->\nafter\n"
    filled = results.readme(readme)
    assert filled.startswith("before\n<!-- results -->\n|  | networks at inference | test accuracy, % |")
    assert filled.endswith("(standard deviations).\n<!-- end of results -->\nafter\n")
    assert "old" not in filled
    assert len([line for line in filled.splitlines() if line.startswith("| ")]) == 1 + 8
    assert "| **PAPA, average soup** | **1** |" in filled
    assert "4 members; seeds 1, 2, 3" in " ".join(filled.split())
    assert results.readme(filled) == filled
    assert Results(records=tmp_path).readme(readme) == readme
    assert Results(records=tmp_path).pictures() == {}
    with pytest.raises(RunError, match=r"README\.md has no block"):
        results.readme("no block")


def test_invalid_commands_are_refused() -> None:
    with pytest.raises(RunError, match="expected a command that begins with papa compare"):
        runs_of("papa run digits --out runs/a")
    with pytest.raises(RunError, match="expected an --out below runs/"):
        runs_of("papa compare digits --out elsewhere/a")


def test_a_difference_is_clear_above_two_deviations_and_never_with_one_seed() -> None:
    for shift, verdict in ((0.0, "no"), (0.01, "yes, above"), (-4.01, "yes, below")):
        table = tables.difference_table([("a", Difference({seed: seed + shift for seed in (1, 2, 3)}))])
        assert table.endswith(f"| {verdict} |")
    assert tables.difference_table([("a", Difference({1: 5.0}))]).endswith("| a | +5.00 | +5.00 |  | one seed |")


def test_losses_have_more_digits_and_their_best_is_the_lowest() -> None:
    config = find("text-gpt-tiny").config()
    runs: list[Record] = [invented(replace(config, method=method)) for method in ("independent", "papa")]
    runs[1] = {**runs[1], "test": {**runs[1]["test"], "average_soup": 52.5}}
    found = tables.differences(runs)
    assert "| papa: average soup less best of independent members, by test score | -0.5000 | -0.5000 |" in found
