"""The guarantees of docs/threats.md for files that come from strangers, one test for each."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from alterations import refused
from helpers import execute, small_config
from papa.cli import main
from papa.errors import DataError, PapaError, RunError
from papa.files import open_all, soup_files
from papa.lab.data.files import read_image, resize_and_crop
from papa.lab.models.weights import read_state_dict
from papa.lab.report.page import compare_page, run_page
from papa.lab.runs import RunDirectory
from papa.storage import parse_json
from report_samples import make_full_result

HOSTILE = '"><script>alert(1)</script>'
ESCAPE = "\x1b]0;owned\x07"


class Touch:
    """What a hostile pickle does when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("name", ["net.pt", "net.bin", "net.ckpt", "net.safetensors"])
def test_no_code_runs(name: str, tmp_path: Path) -> None:
    mark, file = tmp_path / "ran", tmp_path / name
    content = {"state_dict": {"weight": torch.zeros(2)}, "hook": Touch(mark)}
    torch.save(content, file)
    for read in (lambda: open_all([file]), lambda: soup_files([file], tmp_path / "out")):
        assert refused(read)
    file.write_bytes(pickle.dumps(content))
    assert refused(lambda: read_state_dict(file))
    assert not mark.exists()


def png(width: int, height: int) -> bytes:
    """The beginning of an image of this size: few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000)))


def test_memory_and_time_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "huge.png").write_bytes(png(100_000, 100_000))
    with pytest.raises(DataError, match=r"cannot be decoded \(DecompressionBomb"):
        read_image(tmp_path / "huge.png")
    with pytest.raises(ValueError, match="too narrow to be resized to 224 x 11200000"):
        resize_and_crop(Image.new("RGB", (1, 50_000)), shorter_side=224, size=224, resample=3)
    deep = b"[" * 1_000_000
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(deep)
    large = tmp_path / "config.json"
    with large.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(RunError, match="expected at most"):
        RunDirectory(tmp_path).read_config()


@pytest.mark.parametrize("name", ["members", "checkpoint", "metrics.jsonl", "tensorboard"])
def test_nothing_is_written_outside_the_given_directory(name: str, tmp_path: Path) -> None:
    run, elsewhere = RunDirectory(tmp_path / "run"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "000.safetensors").write_text("mine")
    run.path.mkdir()
    run.config.write_text(json.dumps(small_config().to_json()))
    (run.path / name).symlink_to(elsewhere)
    for options in ({"resume": True}, {"overwrite": True}):
        with pytest.raises(RunError, match="is a symbolic link, expected none in a run"):
            execute(small_config(), run.path, workers=1, **options)
    assert [file.read_text() for file in elsewhere.iterdir()] == ["mine"]


def hostile_result() -> dict[str, Any]:
    result = make_full_result()
    result.update(recipe=HOSTILE, method=HOSTILE, config={HOSTILE: HOSTILE}, environment={HOSTILE: [HOSTILE]})
    result["network"] = {HOSTILE: HOSTILE}
    return result


def test_nothing_reaches_a_page_unescaped() -> None:
    result = hostile_result()
    for page in (run_page(result, [{"event": HOSTILE, "step": 1, "text": HOSTILE}]), compare_page([result, result])):
        assert "alert(1)" in page
        assert "<script" not in page
        assert HOSTILE not in page


def test_nothing_reaches_a_terminal_unescaped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create(small_config().to_json())
    run.result.write_text(json.dumps({**make_full_result(), "method": ESCAPE}))
    with pytest.raises(PapaError, match="control characters"):
        run.read_result()
    run.metrics.write_text(json.dumps({"event": "epoch", "text": ESCAPE}) + "\n")
    with pytest.raises(PapaError, match="control characters"):
        list(run.read_metrics())
    for number, names in enumerate([("a", ESCAPE), ("a", "b" + ESCAPE)]):
        save_file({name: torch.ones(2) for name in names}, tmp_path / f"{number}.safetensors")
    files = [str(tmp_path / f"{number}.safetensors") for number in range(2)]
    assert main(["diff", *files]) == 0
    assert main(["diff", files[0], files[0]]) == 0
    assert main(["soup", *files, "-o", str(tmp_path / "soup.safetensors")]) == 2
    assert main(["report", str(run.path)]) == 2
    shown = "".join(capfd.readouterr())
    assert shown.count("\\x1b]0;owned\\x07") >= 3
    assert not set("\x1b\x07") & set(shown)
