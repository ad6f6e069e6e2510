import csv
import io
import json
from pathlib import Path

import pytest

from papa.cli import main
from report_samples import FULL_METRICS, METRICS, make_full_result, make_result


def write_run(path: Path, result: dict | None, metrics: list) -> Path:
    path.mkdir(parents=True)
    config = {"recipe": "digits", "method": "papa", "seed": 7, "members": 2, "train": {"epochs": 20}}
    (path / "config.json").write_text(json.dumps({**config, **(result or {}).get("config", {})}))
    (path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in metrics))
    if result is not None:
        (path / "result.json").write_text(json.dumps(result))
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", make_full_result(), FULL_METRICS)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    directory = tmp_path / "runs"
    for method in ("papa-all", "independent", "papa"):
        for seed in (1, 2):
            write_run(directory / f"{method}-seed{seed}", make_result(method, seed, shift=seed), METRICS)
    return directory


def test_the_page_of_a_run_is_written_and_written_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main(["report", str(run)]) == 0
        assert f"report: {run / 'report.html'}" in capsys.readouterr().out
    assert '<figure id="change-by-merging">' in (run / "report.html").read_text()


def test_a_directory_of_runs_gets_one_page_over_all(runs: Path) -> None:
    assert main(["report", str(runs)]) == 0
    page = (runs / "report.html").read_text()
    assert "digits: 6 runs compared" in page
    assert page.index(">independent<") < page.index(">papa<") < page.index(">papa-all<")


def test_several_directories_are_compared(runs: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["report", str(run), str(runs / "papa-seed1")]
    assert main(arguments) == 2
    assert "got 2 directories: choose a file with --out" in capsys.readouterr().err
    out = runs.parent / "new" / "both.html"
    assert main([*arguments, "--out", str(out)]) == 0
    assert "2 runs compared" in out.read_text()


def test_pages_that_papa_did_not_write_are_not_replaced(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "report.html").write_text("mine")
    assert main(["report", str(run)]) == 2
    assert "already exists: choose another --out, or replace it with --overwrite" in capsys.readouterr().err
    assert (run / "report.html").read_text() == "mine"
    assert main(["report", str(run), "--overwrite"]) == 0
    assert (run / "report.html").read_text() != "mine"


@pytest.mark.parametrize(
    ("option", "check"),
    [
        ("--csv", lambda text: len(list(csv.DictReader(io.StringIO(text)))) == 12),
        ("--latex", lambda text: text.count(r"\\") == 4 and r"\toprule" in text),
    ],
)
def test_texts_go_to_the_terminal_or_to_a_file(
    option: str, check: object, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(runs), option]) == 0
    printed = capsys.readouterr().out
    assert callable(check)
    assert check(printed)
    out = runs.parent / "out"
    assert main(["report", str(runs), option, "--out", str(out)]) == 0
    assert out.read_text() == printed
    assert main(["report", str(runs), option, "--out", str(out)]) == 2
    assert sorted(path.name for path in runs.iterdir() if path.is_file()) == []


def test_figures_are_written_as_files(run: Path, runs: Path) -> None:
    assert main(["report", str(run), "--pdf"]) == 0
    assert len(list((run / "figures").glob("*.pdf"))) == 10
    first = run / "figures" / "similarity.pdf"
    first.write_text("mine")
    assert main(["report", str(run), "--pdf"]) == 2
    assert first.read_text() == "mine"
    assert main(["report", str(runs), "--pdf", "--out", str(run / "more")]) == 0
    assert (run / "more" / "members-to-soup.pdf").read_bytes().startswith(b"%PDF")


def test_missing_packages_are_named(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["report", str(run), "--pdf"]) == 2
    assert "matplotlib is not installed: pip install 'papa-torch[report]'" in capsys.readouterr().err
    assert main(["report", str(run), "--csv"]) == 0


def test_an_unfinished_run_is_reported_so_far(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", None, METRICS)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"event": "epoch", "epo')
    assert main(["report", str(run)]) == 0
    assert "is not finished: the report shows the epochs that are done" in capsys.readouterr().out
    assert "This run is not finished: 2 of 20 epochs are done." in (run / "report.html").read_text()
    assert main(["report", str(run), "--csv"]) == 0
    assert ",no," in capsys.readouterr().out


def test_reporting_again_gives_the_same_page(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    short = ["--train.epochs", "2", "--train.batch-size", "64", "--members", "2"]
    assert main(["run", "digits", *short, "--method", "papa-all", "--out", out]) == 0
    written = (tmp_path / "run" / "report.html").read_text()
    assert main(["report", out]) == 0
    assert (tmp_path / "run" / "report.html").read_text() == written


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[1]", "holds a list, expected an object"),
        ("[" * 100_000, "nested too deeply"),
        ("{}", "recipe is missing"),
    ],
)
def test_invalid_results_are_named(content: str, message: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "result.json").write_text(content)
    assert main(["report", str(run)]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown
    assert not (run / "report.html").exists()


@pytest.mark.parametrize("line", [b"\xff\xfe", b"[]", b"3", b'{"event": "epoch", "losses": 3}', b'{"step": 1}'])
def test_a_line_that_is_no_event_is_named(line: bytes, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "metrics.jsonl").write_bytes(json.dumps(METRICS[1]).encode() + b"\n" + line + b"\n")
    assert main(["report", str(run)]) == 2
    assert f"line 2 of {run / 'metrics.jsonl'} is no event of papa" in capsys.readouterr().err


def test_one_unreadable_run_among_many_is_named_and_left_out(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "papa-seed1" / "result.json").write_text('{"recipe": "digits", "method": "papa", "seed": "one"}')
    (runs / "papa-seed2" / "metrics.jsonl").write_text("[]\n")
    assert main(["report", str(runs)]) == 0
    shown = capsys.readouterr().err
    assert "papa-seed1/result.json is not a valid result of papa: seed is 'one', expected an integer" in shown
    assert "papa-seed2/metrics.jsonl is no event of papa" in shown
    assert "digits: 4 runs compared" in (runs / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "a directory is missing"),
        (["--csv"], "a directory is missing"),
        (["nowhere"], "there is no directory nowhere"),
        (["."], "neither . nor a directory in it is a run of papa"),
        (["run", "--csv", "--latex"], "got --csv and --latex: give one of them at a time"),
        (["run", "--csv", "--out", "run"], "run is a directory, expected a file"),
    ],
)
def test_wrong_arguments_get_one_readable_message(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "run" in arguments:
        write_run(tmp_path / "run", make_result(), METRICS)
    monkeypatch.chdir(tmp_path)
    assert main(["report", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["report", "--help"])
    shown = capsys.readouterr().out
    for option in ("--csv", "--latex", "--pdf", "--out", "--overwrite"):
        assert option in shown
