"""`papa eval`, `papa predict`, `papa runs` and `papa run --config`: what can be done with runs that are there."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from helpers import networks_of, small_config
from papa.cli import main
from papa.lab.config import Config
from papa.lab.data import load_images
from papa.lab.recipes import find
from papa.lab.runs import RunDirectory
from report_samples import make_epoch


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test images of the digits as files, in class folders."""
    folder = tmp_path_factory.mktemp("digits")
    test = load_images("digits").test
    images, labels = test.batch(torch.arange(len(test)))
    for number, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
        (folder / str(label)).mkdir(exist_ok=True)
        Image.fromarray(image[0].numpy()).save(folder / str(label) / f"{number}.png")
    return folder


def result_of(run: Path) -> dict[str, dict[str, object]]:
    return json.loads((run / "result.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("part", ["test", "validation"])
def test_eval_gives_the_scores_of_the_run(part: str, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(whole), "--data", part, "--json"]) == 0
    found, expected = json.loads(capsys.readouterr().out), result_of(whole)[part]
    for key in ("members", "mean", "ensemble", "average_soup", "greedy_soup"):
        assert found[key] == expected[key], key
    assert found["loss"]["members"] == pytest.approx(expected["loss"]["members"], rel=1e-5)  # type: ignore[index]


def test_eval_scores_images_in_class_folders(whole: Path, digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(whole), "--data", str(digits), "--json"]) == 0
    found, expected = json.loads(capsys.readouterr().out), result_of(whole)["test"]
    assert found["examples"] == sum(1 for _ in digits.rglob("*.png"))
    for key in ("members", "ensemble", "average_soup", "greedy_soup"):
        assert found[key] == pytest.approx(expected[key], abs=1e-9), key


def test_eval_prints_a_table(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(whole)]) == 0
    shown = capsys.readouterr().out
    soup = result_of(whole)["test"]["average_soup"]
    assert "test, 1,497 examples" in shown
    for part in ("member 0", "member 2", "ensemble", f"average soup          {soup:.2f}", "greedy soup", "accuracy, %"):
        assert part in shown


def test_predict_labels_as_the_soup_does(
    whole: Path, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(whole), str(digits)]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    right = sum(row["label"] == Path(row["path"]).parent.name for row in rows)
    assert 100.0 * right / len(rows) == pytest.approx(result_of(whole)["test"]["average_soup"])
    assert all(0.1 <= float(row["probability"]) <= 1.0 for row in rows)
    out = tmp_path / "new" / "labels.jsonl"
    assert main(["predict", str(whole), str(digits), "--network", "ensemble", "-o", str(out)]) == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    right = sum(one["label"] == Path(one["path"]).parent.name for one in found)
    assert 100.0 * right / len(found) == pytest.approx(result_of(whole)["test"]["ensemble"])
    assert main(["predict", str(whole), str(digits), "-o", str(out)]) == 2
    assert "already exists: choose another --out, or replace it with --overwrite" in capsys.readouterr().err


def test_predict_leaves_damaged_images_out_and_escapes_names(
    whole: Path, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new"
    folder.mkdir()
    image = Image.open(next(digits.rglob("*.png")))
    for name in ("plain.png", "red \x1b[31m.png", os.fsdecode(b"bytes \xff.png")):
        image.resize((30, 20)).convert("RGB").save(folder / name)
    (folder / "damaged.png").write_bytes(b"nothing")
    (folder / "notes.txt").write_text("no image")
    assert main(["predict", str(whole), str(folder), "--network", "1"]) == 2
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 4
    assert r"red \x1b[31m.png" in shown.out
    assert r"bytes \udcff.png" in shown.out
    assert "\x1b" not in shown.out + shown.err
    assert "damaged.png cannot be decoded" in shown.err
    out = tmp_path / "labels.csv"
    assert main(["predict", str(whole), str(folder), "--out", str(out)]) == 2
    assert b"red \x1b[31m.png" in out.read_bytes()
    assert b"bytes \xff.png" in out.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "none"], "none holds no run of papa"),
        (
            ["eval", "RUN", "--data", "none"],
            "there is no folder none: expected test, validation, or a folder of class",
        ),
        (["eval", "RUN", "--data", "other"], "other has the classes cat, which the run does not have"),
        (["eval", "RUN", "--device", "cuda:7"], "--device is cuda:7, which cannot be used here"),
        (["eval", "UNFINISHED"], "UNFINISHED holds an unfinished run: finish it with papa resume"),
        (["predict", "RUN"], "no image was named, expected folders or files"),
        (["predict", "RUN", "none"], "there is no file or folder none"),
        (["predict", "RUN", "empty"], "the folder empty has no image, expected files that end in .jpg"),
        (["predict", "RUN", "other", "--network", "greddy"], "--network is greddy: did you mean greedy?"),
        (["predict", "RUN", "other", "--network", "7"], "has no member 7, it has 0, 1, 2"),
        (["predict", "RUN", "other", "--network", "best"], "has no best soup"),
        (["predict", "RUN", "other", "-o", "other"], "other is a directory, expected a file"),
        (["runs", "none"], "there is no directory none"),
        (["run", "--config", "none.json"], "cannot read none.json: No such file"),
        (["run", "--config", "list.json"], "list.json holds a list, expected an object"),
        (["run", "--config", "RUN", "--budget", "mini"], "--budget and --config both set the defaults"),
        (["run", "cifar10-vgg11", "--config", "RUN"], "is a configuration of digits, found the recipe cifar10-vgg11"),
        (["run", "--config"], "--config needs a value, the file of a configuration such as config.json"),
        (["run", "--config", "RUN", "--members", "0"], "--members is 0, expected at least 1"),
    ],
)
def test_wrong_usage_gets_one_readable_message(
    arguments: list[str],
    message: str,
    whole: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("other/cat", "empty"):
        Path(name).mkdir(parents=True)
    Image.new("L", (8, 8)).save("other/cat/1.png")
    Path("list.json").write_text("[]")
    RunDirectory(Path("UNFINISHED")).create(small_config().to_json())
    before = sorted(tmp_path.rglob("*"))
    assert main([str(whole) if word == "RUN" else word for word in arguments]) == 2
    shown = capsys.readouterr()
    assert message in " ".join(shown.err.split())
    assert shown.out == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_a_config_gives_the_same_run_again(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = tmp_path / "again"
    assert main(["run", "--config", str(whole / "config.json"), "-o", str(again)]) == 0
    first, second = networks_of(whole), networks_of(again)
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert result_of(whole)["config"] == result_of(again)["config"]
    assert main(["run", "--config", str(whole), "--resume", "--out", str(again)]) == 0
    assert main(["run", "digits", "--config", str(whole), "--resume", "--members", "2", "--out", str(again)]) == 2
    assert "--members is 3 in the run, and 2 here" in capsys.readouterr().err


def test_a_part_of_a_config_is_completed_by_its_recipe(tmp_path: Path) -> None:
    from papa.cli.run import parse_run, take_recipe_or_file

    file = tmp_path / "part.json"
    file.write_text(json.dumps({"recipe": "digits", "seed": 4, "train": {"epochs": 7}}))
    config = parse_run(["--config", str(file), "--seed", "5"])[0].config
    usual = find("digits").config()
    assert config == replace(usual, seed=5, train=replace(usual.train, epochs=7))
    file.write_text(json.dumps({"members": 2}))
    assert take_recipe_or_file(["--config", str(file)])[0].config() == Config(members=2)


def test_everything_wrong_in_a_config_is_reported_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"recipe": "../outside", "members": "two", "train": {"epoch": 3, "lr": -1.0}}))
    assert main(["run", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    for part in (
        "config.json is no configuration:",
        "config.recipe is '../outside': known: digits",
        "config.members is 'two', expected int",
        "config.train.epoch is not known: did you mean epochs?",
        "--train.lr is -1.0, expected more than 0",
    ):
        assert part in error


def test_runs_lists_finished_running_and_stopped_ones(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", str(tmp_path / "finished" / "members")]) == 0
    assert "there are no runs in" in capsys.readouterr().out
    config = {"recipe": "digits", "method": "papa-all", "seed": 7, "train": {"epochs": 4}}
    stopped = RunDirectory(tmp_path / "deep" / "red \x1b[31m" / "stopped")
    stopped.create(config)
    with stopped.metrics.open("a") as file:
        file.write(json.dumps(make_epoch(1)) + "\n" + json.dumps(make_epoch(2)) + "\n")
    os.utime(stopped.metrics, (1e9, 1e9))
    broken = RunDirectory(tmp_path / "broken")
    broken.create({**config, "seed": "one"})
    (tmp_path / "loop").symlink_to(tmp_path)
    running = RunDirectory(tmp_path / "running")
    code = (
        "import sys; from pathlib import Path; from papa.lab.runs import RunDirectory\n"
        "run = RunDirectory(Path(sys.argv[1]))\n"
        "with run.lock(): print('locked', flush=True); sys.stdin.read()"
    )
    job = subprocess.Popen([sys.executable, "-c", code, running.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == b"locked\n"
        running.create({**config, "seed": 8})
        assert main(["runs", str(tmp_path), "--json"]) == 0
        shown = capsys.readouterr()
        found = {Path(run["run"]).name: run for run in json.loads(shown.out)}
        assert main(["runs", str(tmp_path)]) == 0
        table = capsys.readouterr().out
    finally:
        job.communicate()
    assert {name: run["state"] for name, run in found.items()} == {
        "finished": "finished",
        "running": "running",
        "stopped": "stopped",
    }
    assert list(found)[-1] == "stopped", "the newest first"
    assert (found["stopped"]["epoch"], found["stopped"]["epochs"], found["stopped"]["when"][:4]) == (2, 4, "2001")
    assert found["finished"]["scores"]["average_soup"] == result_of(finished)["test"]["average_soup"]
    assert "\x1b" not in shown.out + shown.err + table, "names of directories are escaped"
    assert "left out: " in shown.err
    assert "broken" in shown.err
    assert "stopped, epoch 2/4" in table
    assert f"{result_of(finished)['test']['average_soup']:.2f}" in table
