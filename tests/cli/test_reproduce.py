from __future__ import annotations

import html
import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

from helpers import write_images
from papa.cli import main
from papa.cli.main import STOPPED
from papa.errors import ConfigError
from papa.lab.recipes.tables import TABLES, find_table
from papa.lab.reproduce import Request, jobs_for


@pytest.fixture(scope="module")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    for part in ("train", "test"):
        write_images(root / "cifar10" / part, num_classes=10, images_per_class=5, size=32)
        write_images(root / "cifar100" / part, num_classes=100, images_per_class=1, size=32)
    return root


def reproduce(table: str, rows: str, data_root: Path, out: Path, *more: str) -> int:
    return main(
        [
            "reproduce",
            table,
            "--budget",
            "smoke",
            "--rows",
            rows,
            "--data.root",
            str(data_root),
            "--out",
            str(out),
            *more,
        ]
    )


def results_in(out: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted(out.glob("runs/*/seed*/result.json"))]


def rows_of_every_kind() -> list[tuple[str, str]]:
    """One row for each set of changed options and each part of a result; `tests/every_row.py` runs all rows."""
    found: dict[tuple[frozenset[str], str], list[tuple[str, str]]] = {}
    for table in TABLES.values():
        for row in table.rows:
            is_here = row.recipe is not None and row.recipe.startswith("cifar")
            if is_here and (row.change["method"] != "independent" or row.part != "test"):
                changes = frozenset({*table.options, *row.change} - {"method", "members"})
                found.setdefault((changes, row.part), []).append((table.name, row.name))
    # EfficientNetV2 is four times as large as the other networks that are fine-tuned.
    return [next(name for name in names if "effnetv2s" not in name[1]) for names in found.values()]


@pytest.mark.parametrize(("table", "row"), rows_of_every_kind())
def test_rows_of_every_kind_run(
    table: str, row: str, data_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproduce(table, row, data_root, tmp_path) == 0
    shown = capsys.readouterr().out
    (result,) = results_in(tmp_path)
    found = find_table(table)
    (picked,) = found.pick([row])
    lines = [line for line in shown.splitlines() if line.startswith(picked.title)]
    assert len(lines) == len(found.columns)
    differences = [line.split()[-1] for line in lines if line.split()[-1][0] in "+-"]
    assert len(differences) == len(picked.paper), "each number of the paper has one of ours"
    assert result["method"] == picked.change["method"]
    (report,) = tmp_path.glob("*.html")
    page = report.read_text()
    assert picked.title in page
    assert all(html.escape(line.split()[-1]) in page for line in lines)
    drawn = set(re.findall(r'<figure id="compare-([^"]+)"', page))
    curves = {"validation-members", "training-loss", "distance-to-mean"}
    changes = {"change-after", "change-later"} if result["method"] != "papa" else set()
    assert drawn >= curves | changes if found.kind == "figure" else not drawn
    assert page.count("<svg") == len(drawn)


def test_rows_and_tables_share_runs_and_finished_runs_are_not_run_again(
    data_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproduce("table:ablation", "papa-all,papa-2", data_root, tmp_path, "--seeds", "1,2") == 0
    first = capsys.readouterr().out
    assert "(" in first  # a standard deviation
    files = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/seed*/result.json")}
    assert len(files) == 4
    assert reproduce("table:ablation", "papa-all,papa-2", data_root, tmp_path, "--seeds", "1,2") == 0
    assert capsys.readouterr().out == first
    assert reproduce("table:ablation1", "papa-all", data_root, tmp_path) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/seed*/result.json")} == files


def test_parallel_rows_give_the_same_result_as_sequential_ones(
    data_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ("table:comparing2", "papa-none-p3,papa-all-none-p3")
    assert reproduce(*rows, data_root, tmp_path / "one") == 0
    one = capsys.readouterr().out
    assert reproduce(*rows, data_root, tmp_path / "two", "--parallel", "2") == 0
    assert capsys.readouterr().out == one.replace(str(tmp_path / "one"), str(tmp_path / "two"))


def test_a_failed_row_is_named_and_the_others_are_shown(
    data_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = find_table("comparing2")
    rows = table.pick(["papa-none-p3", "papa-all-none-p3"])
    request = Request(table=table, rows=rows, budget="smoke", data_root=str(data_root))
    first, second = jobs_for(request, tmp_path)
    (first.path / "checkpoint").mkdir(parents=True)
    (first.path / "soup.safetensors").write_text("not from papa")
    arguments = ("table:comparing2", "papa-none-p3,papa-all-none-p3", data_root, tmp_path)
    assert reproduce(*arguments) == 2
    shown = capsys.readouterr()
    assert "1 of 2 runs failed" in shown.err
    assert str(first.path) in " ".join(shown.err.split())
    assert any(line.startswith(second.row.title) and line.split()[-1][0] in "+-" for line in shown.out.splitlines())
    done = (second.path / "result.json").stat().st_mtime_ns
    (first.path / "soup.safetensors").unlink()
    (first.path / "checkpoint").rmdir()
    assert reproduce(*arguments) == 0
    assert (second.path / "result.json").stat().st_mtime_ns == done


@pytest.mark.parametrize("command", ["compare", "reproduce"])
def test_a_signal_saves_and_the_same_command_continues(
    command: str, data_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = {
        "compare": ["digits", "--train.epochs", "2", "--members", "2", "--methods", "independent,papa"],
        "reproduce": ["table:comparing2", "--budget", "smoke", "--rows", "papa-none-p3,papa-all-none-p3"],
    }[command]
    arguments = [command, *arguments, "--seeds", "1,2", "--out", str(tmp_path), "--keep", "1"]
    if command == "reproduce":
        arguments += ["--data.root", str(data_root)]

    def send_signal_when_one_trains() -> None:
        while not any(file.stat().st_size for file in tmp_path.rglob("metrics.jsonl")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=send_signal_when_one_trains, daemon=True)
    sender.start()
    assert main(arguments) == STOPPED
    sender.join()
    assert "of 4 runs done; continue with the same command, without --overwrite" in capsys.readouterr().err
    assert main(arguments) == 0
    assert len(list(tmp_path.rglob("result.json"))) == 4
    assert all(len(list(path.iterdir())) == 1 for path in tmp_path.rglob("checkpoint"))


def test_quoted_rows_need_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce("table:comparing2", "quoted-esgd", tmp_path, tmp_path) == 0
    assert "92.48" in capsys.readouterr().out


def test_without_a_table_all_tables_and_figures_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce"]) == 0
    shown = capsys.readouterr().out
    assert "table:ablation_gradual" in shown
    assert "figure:papa_acc1" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table:ablaton"], "did you mean table:ablation"),
        (["table:ablation", "--rows", "papa-3"], "did you mean papa-2"),
        (["table:ablation", "--budget", "tiny"], "--budget is tiny"),
        (["table:ablation", "--seeds", "one"], "--seeds is 'one'"),
        (["--rows", "papa"], "begins with a table or figure"),
        (["table:comparing2", "--rows", "quoted-esgd", "--parallel", "0"], "--parallel is 0, expected at least 1"),
        (["table:comparing2", "--rows", "quoted-esgd", "--parallel", "2", "--workers", "2"], "expected one of them"),
        (["table:comparing2", "--rows", "quoted-esgd", "--keep", "0"], "--keep is 0, expected at least 1"),
    ],
)
def test_wrong_usage_gets_one_readable_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_missing_data_is_an_error_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce("table:image_seg1", "papa-all", tmp_path / "nowhere", tmp_path / "out") == 2
    assert "nowhere" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_different_configurations_have_different_directories(tmp_path: Path) -> None:
    table = find_table("ablation_gradual")
    jobs = jobs_for(Request(table=table, rows=table.rows), tmp_path)
    assert len({job.path for job in jobs}) == len(table.rows)
    mini = jobs_for(Request(table=table, rows=table.rows, budget="mini"), tmp_path)
    assert not {job.path for job in jobs} & {job.path for job in mini}


def test_a_table_is_found_by_its_label() -> None:
    assert find_table("ablation1") is find_table("table:ablation1") is find_table("tab:ablation1")
    with pytest.raises(ConfigError):
        find_table("")
