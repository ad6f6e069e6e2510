"""The pages of results and the README's table and figure agree with the committed records; commands are valid."""

from __future__ import annotations

import html
import platform
import re
import shlex
from pathlib import Path

import pytest

from helpers import write_images
from papa.cli import main
from papa.errors import RunError
from papa.lab.recipes import own, recipe
from results.make import PICTURE, collect
from results.page import detail_page, headline_plot, readme_with_headline, results_page
from results.record import FOLDER, read_file, read_records, runs_of, write_records
from results.studies import HEADLINE, PAGES, STUDIES
from results.study import Study, Table

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "RESULTS.md").read_text()
DETAILS = {name: (ROOT / "docs/results" / f"{name}.md").read_text() for name in PAGES}
COMMANDS = [line for page in DETAILS.values() for line in page.splitlines() if line.startswith("papa ")]
MAX_WORDS = 1500
LARGEST = 20_000
"""The largest size of a record, in bytes."""


def test_the_page_agrees_with_the_records() -> None:
    assert results_page() == PAGE, "RESULTS.md is written from results/: run `make results`"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_details_agrees_with_the_records(name: str) -> None:
    assert detail_page(name) == DETAILS[name], f"docs/results/{name}.md is written from results/: run `make results`"


def test_a_study_has_the_same_precision_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes choose the faster one, and records would no longer belong to their commands."""

    def precisions(faster: str) -> dict[str, str]:
        for module in (recipe, own):
            monkeypatch.setattr(module, "fast_precision", lambda: faster)
        return {
            f"{command}: {name}": config.train.precision
            for study in STUDIES
            for command in study.commands
            for name, config in runs_of.__wrapped__(command).items()
        }

    found = precisions("bfloat16")
    assert set(found.values()) == {"bfloat16", "float32"}
    assert found == precisions("float32")


def test_the_first_page_is_short() -> None:
    assert len(PAGE.split()) <= MAX_WORDS


def test_the_readmes_first_table_agrees_with_the_records() -> None:
    readme = (ROOT / "README.md").read_text()
    assert readme_with_headline(readme) == readme, "the README's first table is written from results/: `make results`"


def test_the_readmes_figure_agrees_with_the_records() -> None:
    """Its text alternative has all its numbers; the drawing itself may differ between versions of matplotlib."""
    chart = headline_plot()
    methods = [record["method"] for record in read_records([HEADLINE[1]]).values()]
    expected = [name for name in ("independent", "papa", "papa-all", "papa-2") if name in methods]
    assert [row[0] for row in chart.numbers[1]] == expected
    picture = PICTURE.read_text()
    assert f'aria-label="{html.escape(chart.alt)}"' in picture, (
        "the README's figure is written from results/: `make results`"
    )
    assert f"<title>{html.escape(chart.title)}</title>" in picture
    assert not re.search(r"https?:(?!//www.w3.org)|url\((?!#)|href=(?!\"#)|<script|<image", picture)


def test_every_number_of_the_page_is_filled_in() -> None:
    assert not any(re.findall(r"\{[^}]*\}", page) for page in (PAGE, *DETAILS.values()))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_is_valid(command: str) -> None:
    """Its recipe, every option and every value; nothing is trained."""
    runs = runs_of(command)
    assert runs
    assert runs


def test_every_command_of_a_study_is_on_the_page_and_no_two_write_to_one_place() -> None:
    commands = [command for study in STUDIES for command in study.commands]
    assert commands == COMMANDS
    names = [name for command in commands for name in runs_of(command)]
    assert len(set(names)) == len(names)
    assert {command for study in STUDIES for table in study.tables for command in table.shown_with} <= set(commands)


def test_records_are_small_sorted_and_name_no_machine() -> None:
    for path in FOLDER.glob("*.jsonl"):
        lines = path.read_text().splitlines()
        assert list(read_file(path)) == sorted(read_file(path)), path
        assert max(map(len, lines)) <= LARGEST, path
        assert not any(re.search(r'"/|home/|root/|"command"|"finished"', line) for line in lines), path


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Study]:
    """A small command of the page, run with the smoke budget on tiny data: the directory of its runs, and its study."""
    folder = tmp_path_factory.mktemp("smoke")
    for part in ("train", "test"):
        write_images(folder / "cifar10" / part, num_classes=10, images_per_class=5, size=32)
    (small,) = (command for command in COMMANDS if "runs/repair/none" in command)
    small = small.replace("--budget mini", "--budget smoke")
    typed = small.replace("DATA", str(folder)).replace("--out ", f"--out {folder}/")
    assert typed != small
    assert main(shlex.split(typed)[1:]) == 0
    table = Table(title="PAPA-all", commands=(small,))
    return folder / "runs", Study(name="repair", title="Without REPAIR", tables=(table,))


def test_a_command_of_the_page_runs_and_becomes_a_table(
    smoke: tuple[Path, Study], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, study = smoke
    assert "Not run yet." in detail_page("short", tmp_path, tmp_path, {"short": [study]})
    assert collect(runs, tmp_path, [study]) == 0
    assert "repair: 3 of 3 runs" in capsys.readouterr().out
    page = detail_page("short", tmp_path, tmp_path, {"short": [study]})
    assert "Budget smoke; seeds 1, 2, 3; papa " in page
    assert len(re.findall(r"^\| papa-all \| [123] \|", page, re.MULTILINE)) == 3
    (path,) = tmp_path.iterdir()
    texts = path.read_text().splitlines()
    assert len(texts) == 3
    for written in texts:
        assert '"root":"DATA"' in written
        assert '"average":{"alpha":0.99' in written
        for secret in (str(runs), str(tmp_path.parent), "--out", platform.node()):
            assert secret not in written


def test_a_run_with_other_options_than_its_smallis_refused(smoke: tuple[Path, Study], tmp_path: Path) -> None:
    runs, study = smoke
    other = study.commands[0].replace("--average.repair 0", "--average.repair 3")
    changed = Study(name="repair", title="", tables=(Table(title="", commands=(other,)),))
    with pytest.raises(RunError, match=r"average.repair is 0, its command says 3\. Run the command again"):
        collect(runs, tmp_path, [changed])
    assert not list(tmp_path.iterdir())
    collect(runs, tmp_path, [study])
    with pytest.raises(RunError, match="the record repair/none/papa-all-seed1 differs from its command"):
        detail_page("short", tmp_path, tmp_path, {"short": [changed]})


def test_unfinished_runs_are_left_out_and_counted(
    smoke: tuple[Path, Study], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, study = smoke
    only = tmp_path / "runs/repair/none/papa-all-seed2"
    only.mkdir(parents=True)
    for name in ("config.json", "metrics.jsonl", "result.json"):
        (only / name).write_bytes((runs / "repair/none/papa-all-seed2" / name).read_bytes())
    begun = tmp_path / "runs/repair/none/papa-all-seed1"
    begun.mkdir()
    (begun / "config.json").write_bytes((only / "config.json").read_bytes())
    collect(tmp_path / "runs", tmp_path / "records", [study])
    assert "repair: 1 of 3 runs" in capsys.readouterr().out
    page = detail_page("short", tmp_path / "records", tmp_path, {"short": [study]})
    assert "2 of 3 runs are missing." in page


def test_a_record_that_no_smallmakes_is_refused(smoke: tuple[Path, Study], tmp_path: Path) -> None:
    runs, study = smoke
    collect(runs, tmp_path, [study])
    write_records("stray", {"stray": {}}, tmp_path)
    with pytest.raises(RunError, match=r"no command of results/studies.py makes stray: remove these records"):
        detail_page("short", tmp_path, tmp_path, {"short": [study]})
