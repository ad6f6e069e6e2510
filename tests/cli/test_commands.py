import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from papa.cli import main
from papa.cli.main import COMMANDS
from papa.cli.run import config_to_resume, file_to_take
from papa.lab.config import Config
from papa.lab.recipes import RECIPES, find
from papa.lab.runs import RunDirectory
from report_samples import make_result

SHORT = ["--train.epochs", "1", "--train.batch-size", "64", "--members", "2"]


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "papa compare digits" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("papa 0.")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main([command, "--help"])
    except SystemExit as error:  # of tyro
        code = error.code
    assert code == 0
    shown = capsys.readouterr().out
    assert f"usage: papa {command}" in shown
    assert f"  papa {command}" in shown.replace("│", "").split("examples:")[1]


def test_the_help_of_a_recipe_lists_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "digits", "--help"]) == 0
    short = capsys.readouterr().out
    assert "--half-life" in short
    assert len(short.splitlines()) <= 24
    assert max(map(len, short.splitlines())) <= 80
    with pytest.raises(SystemExit) as caught:
        main(["run", "digits", "--help-all"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert "--average.half-life" in shown
    assert "--resume" in shown


def test_ls_names_every_recipe_and_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls"]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 24
    assert max(map(len, shown.splitlines())) <= 80
    assert all(name in shown for name in RECIPES)
    assert main(["ls", "recipes"]) == 0
    assert "cifar100_res_gradual" in capsys.readouterr().out
    assert main(["ls", "methods"]) == 0
    assert all(method in capsys.readouterr().out for method in ("larger-batches",))


def test_show_prints_a_config_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "cifar100-resnet18"]) == 0
    full = json.loads(capsys.readouterr().out)
    assert (full["members"], full["train"]["epochs"], full["average"]["alpha"]) == (10, 300, 0.99)
    assert main(["show", "cifar100-resnet18", "--budget", "mini"]) == 0
    assert json.loads(capsys.readouterr().out)["train"]["epochs"] < 300


def test_run_prints_a_table_and_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(["run", "digits", *SHORT, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    for part in (
        "mean [min, max]",
        "ensemble",
        "average soup",
        "greedy soup",
        "test",
        f"report: {out / 'report.html'}",
    ):
        assert part in shown
    verdict = json.loads((out / "result.json").read_text())["verdict"]
    assert verdict["advice"] in shown
    assert shown.splitlines()[-1].startswith(f"take: {out}")
    assert main(["run", "digits", "--out", str(out), "--resume"]) == 0
    assert "mean [min, max]" in capsys.readouterr().out
    assert main(["resume", str(out)]) == 0
    assert "mean [min, max]" in capsys.readouterr().out
    usual = find("digits").config().members
    for options, difference in (
        (["digits", "--members", "3"], "members is 2 in the run, and 3 here"),
        (["digits", "--members", str(usual)], f"members is 2 in the run, and {usual} here"),
        (["cifar10-vgg11"], "recipe is 'digits' in the run, and 'cifar10-vgg11' here"),
    ):
        assert main(["run", *options, "--out", str(out), "--resume"]) == 2
        assert difference in capsys.readouterr().err
    assert main(["run", "digits", "--members", "2", "--out", str(out), "--resume"]) == 0


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        *(("helps", "soup.safetensors"), ("too close", "soup.safetensors"), (None, "soup.safetensors")),
        *(("too far", "members/001.safetensors"), ("nothing to gain", "members/001.safetensors")),
    ],
)
def test_the_network_to_take_is_the_soup_unless_a_member_is_as_good(
    kind: str | None, file: str, tmp_path: Path
) -> None:
    result = {**make_result(), "verdict": kind and {"kind": kind}}
    said = file_to_take(result, RunDirectory(tmp_path))
    assert said.startswith(str(tmp_path / file))
    assert ("ensemble" in said) == file.startswith("members")


def test_resume_keeps_the_options_of_the_run_that_are_not_given(tmp_path: Path) -> None:
    recipe = find("cifar10-vgg11")
    mini = recipe.config("mini")
    there = replace(mini, seed=7)
    RunDirectory(tmp_path).create(there.to_json())

    def asked(*arguments: str) -> Config:
        return config_to_resume(recipe.config(), [recipe.name, *arguments], tmp_path)

    assert asked() == asked("--seed", "7") == there
    assert asked("--members", "3") == replace(there, members=3)


def test_compare_skips_finished_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compare", "digits", *SHORT, "--methods", "independent,papa", "--out", str(tmp_path)]
    assert main([*arguments, "--seeds", "1"]) == 0
    first = (tmp_path / "papa-seed1" / "result.json").stat().st_mtime_ns
    assert main([*arguments, "--seeds", "1,2"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("gap closed") == 2
    assert (tmp_path / "papa-seed1" / "result.json").stat().st_mtime_ns == first
    assert (tmp_path / "papa-seed2" / "result.json").exists()
    assert "papa, seed 2" in (tmp_path / "report.html").read_text()


def test_one_network_trained_longer_is_a_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compare", "digits", *SHORT, "--methods", "longer,papa", "--out", str(tmp_path)]
    assert main(arguments) == 0
    assert "longer" in capsys.readouterr().out
    result = json.loads((tmp_path / "longer-seed1" / "result.json").read_text())
    assert (result["method"], result["config"]["members"], result["config"]["train"]["epochs"]) == ("longer", 1, 2)
    one = ["run", "digits", *SHORT, "--members", "1", "--method", "independent", "--train.epochs", "2"]
    assert main([*one, "--average.repair", "1", "--out", str(tmp_path / "one")]) == 0
    alone = json.loads((tmp_path / "one" / "result.json").read_text())
    assert alone["test"] == result["test"]
    assert alone["repaired"] is None  # a single network is its own soup
    again = ["run", "digits", *SHORT, "--method", "longer", "--out", str(tmp_path / "longer-seed1"), "--resume"]
    assert main(again) == 0


def test_parallel_runs_give_the_same_result_as_sequential_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["compare", "digits", *SHORT, "--methods", "independent,papa-all", "--seeds", "1"]
    assert main([*arguments, "--out", str(tmp_path / "one")]) == 0
    one = capsys.readouterr().out
    assert main([*arguments, "--out", str(tmp_path / "two"), "--parallel", "2"]) == 0
    assert capsys.readouterr().out == one.replace(str(tmp_path / "one"), str(tmp_path / "two"))
    with pytest.raises(SystemExit):
        main(["run", "digits", "--parallel", "2"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rnu"], "there is no command rnu: did you mean run?"),
        (["run", "digit"], "there is no recipe digit: did you mean digits? `papa ls` lists all"),
        (["run"], "a recipe is missing"),
        (["run", "--members", "3"], "the recipe comes first, found --members"),
        (["run", "digits", "--method", "papa-al"], "did you mean papa-all?"),
        (["run", "digits", "--budget", "mni"], "--budget is mni: did you mean mini?"),
        (["run", "digits", "--data.name", "digts"], "did you mean digits?"),
        (["run", "digits", "--diversity.grid", "defalt"], "did you mean default?"),
        (["run", "digits", "--model.name", "resnet19"], "did you mean resnet18?"),
        (["compare", "digits", "--methods", "papa,paap"], "did you mean papa?"),
        (["compare", "digits", "--seeds", "one"], "expected whole numbers such as 1,2,3"),
        (["compare", "digits", "--seed", "7"], "papa compare takes --methods and --seeds"),
        (["run", "cifar10-vgg11", "--average.half-life", "0.02"], "expected one of the two"),
        (["run", "digits", "--train.clip-norm", "-1"], "--train.clip-norm is -1.0, expected more than 0"),
        (["compare", "digits", "--parallel", "0"], "--parallel is 0, expected at least 1"),
        (
            ["compare", "digits", "--parallel", "2", "--workers", "2"],
            "--workers and --parallel are both set, expected one of",
        ),
        (["show", "digits", "more"], "takes a recipe and a budget"),
        (["ls", "methds"], "did you mean methods?"),
        (["resume", "nowhere"], "nowhere holds no run of papa"),
        (["run", "digits", "--keep", "0"], "--keep is 0, expected at least 1"),
        (["compare", "digits", "--keep", "0"], "--keep is 0, expected at least 1"),
        (["compare", "digits", "--checkpoint-minutes", "0"], "--checkpoint-minutes is 0.0, expected more than 0"),
        (["compare", "digits", "--workers", "99"], "--workers is 99, expected 1 to 5"),
        (["run", "digits", "--device", "cuda:7"], "--device is cuda:7, which cannot be used here"),
        (["run", "digits", "--out", ""], "--out is empty: is a variable not set?"),
        (["run", "digits", "--overwrite", "--resume"], "--overwrite removes the run that --resume would continue"),
        (["run", "digits", "--train.lr", "inf"], "--train.lr is inf, expected more than 0 and finite"),
        (["run", "digits", "--train.lr", "nan"], "--train.lr is nan, expected more than 0 and finite"),
        (["compare", "digits", "--method", "papa"], "papa compare takes --methods and --seeds, found --method"),
        (["compare", "digits", "--seed=1"], "papa compare takes --methods and --seeds, found --seed=1"),
        (["run", "digits", "--out="], "--out is empty: is a variable not set?"),
    ],
)
def test_wrong_usage_gets_one_readable_message_and_code_2(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert message in " ".join(shown.err.split())
    assert "Traceback" not in shown.err
    assert list(tmp_path.iterdir()) == []


def test_options_that_a_method_does_not_use_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    smoke = ["--budget", "smoke", "--out", str(tmp_path / "run")]
    given = ["--average.half-life", "0.5", "--average.every-epochs", "1"]
    assert main(["run", "digits", *smoke, "--method", "papa-all", *given]) == 0
    said = "papa: --average.half-life: without effect, as papa-all does not use it\n"
    assert said in capsys.readouterr().err
    assert main(["compare", "digits", *smoke[:3], str(tmp_path), "--methods", "papa,papa-all", *given]) == 0
    assert "without effect" not in capsys.readouterr().err


def test_a_warning_of_papa_is_one_line() -> None:
    code = "import sys, warnings; from papa.cli import main; from papa.errors import PapaWarning; "
    code += "sys.argv = ['papa', '-V']; main(); warnings.warn('push more', PapaWarning); "
    code += "warnings.warn('old', DeprecationWarning)"
    done = subprocess.run([sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "papa: push more\n<string>:1: DeprecationWarning: old\n"


def test_resume_needs_a_directory(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["resume"])
    assert caught.value.code == 2
    assert "RUN" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train.epoch", "3"], "--train.epochs"),
        (["--lr", "3"], "--trajectory.lr"),
        (["--epochs", "two"], "Error parsing --train.epochs"),
        (["--foo", "3"], "papa run digits --help"),
    ],
)
def test_an_unknown_option_suggests_the_closest(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", "digits", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_comparison_continues_with_options_that_its_runs_do_not_use(tmp_path: Path) -> None:
    asked = ["compare", "digits", "--train.epochs", "1", "--members", "2", "--workers", "1", "--out", str(tmp_path)]
    assert main([*asked, "--methods", "independent"]) == 0
    before = (tmp_path / "independent-seed1" / "result.json").read_bytes()
    assert main([*asked, "--methods", "independent,papa", "--average.every-steps", "7"]) == 0
    assert (tmp_path / "papa-seed1" / "result.json").exists()
    assert (tmp_path / "independent-seed1" / "result.json").read_bytes() == before, (
        "independent does not use that option"
    )
    elsewhere = [*asked, "--methods", "independent", "--seeds", "1,2", "--data.root", str(tmp_path / "moved")]
    assert main(elsewhere) == 2, "the directory of the data is part of the configuration"
    assert (tmp_path / "independent-seed2" / "result.json").exists(), "but the other runs continue"


def test_a_comparison_refuses_runs_of_another_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["compare", "digits", "--methods", "papa", "--train.epochs", "1", "--workers", "1", "--out", str(tmp_path)]
    assert main([*asked, "--members", "2"]) == 0
    assert main([*asked, "--members", "3", "--seeds", "2,1"]) == 2
    error = capsys.readouterr().err
    assert "members is 2 in the run, and 3 here" in error
    assert "choose another --out, or replace all runs with --overwrite" in error
    assert not (tmp_path / "papa-seed2").exists()


def test_a_comparison_does_not_use_the_directory_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = ["--members", "2", "--train.epochs", "1", "--workers", "1", "--out", str(tmp_path)]
    assert main(["run", "digits", "--average.every-steps", "500", *short]) == 0
    assert "training ended before the first averaging was due" in capsys.readouterr().out
    before = (tmp_path / "report.html").read_bytes()
    assert main(["compare", "digits", *short]) == 2
    assert "is the directory of a single run: choose another --out for a comparison" in capsys.readouterr().err
    assert (tmp_path / "report.html").read_bytes() == before


def test_a_tilde_after_an_equals_sign_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    short = ["--members", "2", "--train.epochs", "1", "--workers", "1", "--out=~/runs/mine"]
    assert main(["run", "digits", *short]) == 0
    assert (tmp_path / "runs" / "mine" / "result.json").exists()
    assert not (tmp_path / "~").exists()
