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
from results import make
from results.make import FILLED, ROOT, collect
from results.page import Results
from results.record import FOLDER, read_file, runs_of, write_records

RESULTS = Results()
PAGES = {name: ROOT / ("RESULTS.md" if name == "RESULTS" else f"docs/results/{name}.md") for name in RESULTS.pages}
COMMANDS = RESULTS.commands()
MAX_WORDS = 1500
LARGEST = 20_000
"""The largest size of a record, in bytes."""


@pytest.mark.parametrize("name", PAGES)
def test_a_page_agrees_with_the_records(name: str) -> None:
    page = PAGES[name].read_text()
    assert RESULTS.page(name) == page, f"{PAGES[name]} is written from results/: run `make results`"
    assert not re.findall(r"\{[^}]*\}", page), "every number is filled in"
    assert name != "RESULTS" or len(page.split()) <= MAX_WORDS


@pytest.mark.parametrize("name", FILLED)
def test_the_tables_of_other_pages_agree_with_the_records(name: str) -> None:
    page = (ROOT / name).read_text()
    assert FILLED[name](page) == page, "run `make results`"


def test_the_readmes_table_and_figure_agree_with_the_records() -> None:
    """The figure's text alternative has all its numbers; the drawing may differ between versions of matplotlib."""
    readme = (ROOT / "README.md").read_text()
    assert RESULTS.readme(readme) == readme, "the README's first table is written from results/: `make results`"
    for name, chart in RESULTS.pictures().items():
        picture = (ROOT / f"docs/assets/{name}.svg").read_text()
        assert f'aria-label="{html.escape(chart.alt)}"' in picture, "figures are written from results/: `make results`"
        assert f"<title>{html.escape(chart.title)}</title>" in picture
        assert not re.search(r"https?:(?!//www.w3.org)|url\((?!#)|href=(?!\"#)|<script|<image", picture)


def test_a_study_has_the_same_precision_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes choose the faster one, and records would no longer belong to their commands."""

    def precisions(faster: str) -> dict[str, str]:
        for module in (recipe, own):
            monkeypatch.setattr(module, "fast_precision", lambda: faster)
        runs = {
            name: config for command in COMMANDS[::5] for name, config in runs_of.__wrapped__(command).items()
        }  # fmt: skip
        return {name: config.train.precision for name, config in runs.items()}

    found = precisions("bfloat16")
    assert set(found.values()) == {"bfloat16", "float32"}
    assert found == precisions("float32")


def test_every_command_is_valid_and_no_two_write_to_one_place() -> None:
    """Its recipe, every option and every value; nothing is trained."""
    configs = {command: runs_of(command) for command in COMMANDS}
    assert all(configs.values())
    names = [name for runs in configs.values() for name in runs]
    assert len(set(names)) == len(names)
    assert set(COMMANDS) == {
        line for page in PAGES.values() for line in page.read_text().splitlines() if line.startswith("papa compare")
    }


def test_records_are_small_sorted_and_name_no_machine() -> None:
    for path in FOLDER.glob("*.jsonl"):
        lines = path.read_text().splitlines()
        assert list(read_file(path)) == sorted(read_file(path)), path
        assert max(map(len, lines)) <= LARGEST, path
        assert not any(re.search(r'"/|home/|root/|"command"|"finished"', line) for line in lines), path


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A small command of a page, run with the smoke budget on tiny data: the directory of its runs, and the command."""
    folder = tmp_path_factory.mktemp("smoke")
    for part in ("train", "test"):
        write_images(folder / "cifar10" / part, num_classes=10, images_per_class=5, size=32)
    (small,) = (command for command in COMMANDS if "runs/repair/none" in command)
    small = small.replace("--budget mini", "--budget smoke")
    typed = small.replace("DATA", str(folder)).replace("--out ", f"--out {folder}/")
    assert typed != small
    assert main(shlex.split(typed)[1:]) == 0
    return folder / "runs", small


def results_with(command: str, folder: Path) -> Results:
    """A study of one table, without records."""
    folder.mkdir(exist_ok=True)
    words = f"## Without REPAIR\n{{study repair}}\n\n### PAPA-all\n\n```console\n{command}\n```\n\n{{table papa-all}}\n"
    (folder / "short.md").write_text(words)
    return Results(folder, folder / "records")


def test_a_command_of_a_page_runs_and_becomes_a_table(
    smoke: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, command = smoke
    results = results_with(command, tmp_path)
    assert "Not run yet." in results.page("short")
    assert collect(runs, results) == 0
    assert "repair: 3 of 3 runs" in capsys.readouterr().out
    page = results_with(command, tmp_path).page("short")
    assert "Budget smoke; seeds 1, 2, 3; papa " in page
    assert len(re.findall(r"^\| papa-all \| [123] \|", page, re.MULTILINE)) == 3
    texts = (tmp_path / "records/repair.jsonl").read_text().splitlines()
    assert len(texts) == 3
    for written in texts:
        assert '"root":"DATA"' in written
        assert '"average":{"alpha":0.99' in written
        for secret in (str(runs), str(tmp_path.parent), "--out", platform.node()):
            assert secret not in written


def test_a_run_with_other_options_than_its_command_is_refused(smoke: tuple[Path, str], tmp_path: Path) -> None:
    runs, command = smoke
    other = command.replace("--average.repair 0", "--average.repair 3")
    with pytest.raises(RunError, match=r"average.repair is 0, its command says 3\. Run the command again"):
        collect(runs, results_with(other, tmp_path))
    assert not (tmp_path / "records").exists()
    collect(runs, results_with(command, tmp_path))
    with pytest.raises(RunError, match="the record repair/none/papa-all-seed1 differs from its command"):
        results_with(other, tmp_path).page("short")


def test_unfinished_runs_are_left_out_and_counted(
    smoke: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, command = smoke
    only = tmp_path / "runs/repair/none/papa-all-seed2"
    only.mkdir(parents=True)
    for name in ("config.json", "metrics.jsonl", "result.json"):
        (only / name).write_bytes((runs / "repair/none/papa-all-seed2" / name).read_bytes())
    begun = tmp_path / "runs/repair/none/papa-all-seed1"
    begun.mkdir()
    (begun / "config.json").write_bytes((only / "config.json").read_bytes())
    collect(tmp_path / "runs", results_with(command, tmp_path))
    assert "repair: 1 of 3 runs" in capsys.readouterr().out
    assert "2 of 3 runs are missing." in results_with(command, tmp_path).page("short")


def test_a_record_that_no_command_makes_is_refused(smoke: tuple[Path, str], tmp_path: Path) -> None:
    write_records("stray", {"stray": {}}, tmp_path / "records")
    with pytest.raises(RunError, match=r"no command of results/pages/ makes stray: remove these records"):
        results_with(smoke[1], tmp_path).page("short")


def test_an_unknown_study_is_an_error_that_suggests_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunError, match="there is no study claim: did you mean claims"):
        make.run("data", ["claim"], RESULTS)
    assert make.main(["strange"]) == 2
    assert "usage: python -m results.make run DATA" in capsys.readouterr().err
