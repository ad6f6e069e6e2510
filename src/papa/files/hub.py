"""What belongs beside weights in a directory: config and tokenizer files, and a card that says what it is."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from papa._version import __version__
from papa.errors import SoupError
from papa.files.record import SoupMember
from papa.files.weights import WeightsFile
from papa.storage import parse_json, read_file

CONFIG = "config.json"
COPIED = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "source.spm"),
    *("target.spm", "sentencepiece.bpe.model", "chat_template.jinja", "chat_template.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)
"""What is copied from the folder of the first network. No code is."""
CARD = "README.md"


def companions(files: Sequence[WeightsFile], dtype: str | None) -> tuple[dict[str, bytes], list[str]]:
    """The files that belong beside the weights, from the folder of the first network, and notes about them."""
    folders = [file.files[0].parent for file in files if file.files]
    if not folders or not (folders[0] / CONFIG).is_file():
        return {}, []
    found = {name: read_file(folders[0] / name, error=SoupError) for name in COPIED if (folders[0] / name).is_file()}
    notes = []
    different = [name for name in found if any(_differs(folder / name, found[name]) for folder in folders[1:])]
    if different:
        notes.append(f"{', '.join(different)} differ between the folders: those of the first were copied")
    code = sorted(path.name for path in folders[0].glob("*.py"))
    if code:
        notes.append(f"code is not copied, such as {code[0]}: copy it yourself if the model needs it")
    return {CONFIG: _config(folders[0] / CONFIG, dtype), **found}, notes


def _differs(path: Path, content: bytes) -> bool:
    return path.is_file() and read_file(path, error=SoupError) != content


def _config(path: Path, dtype: str | None) -> bytes:
    """The config, with the dtype of the soup if it was chosen."""
    content = read_file(path, error=SoupError)
    try:
        value = parse_json(content, allow_control=True)
    except ValueError as error:
        raise SoupError(f"{path} is not valid JSON: {error}") from error
    keys = [key for key in ("dtype", "torch_dtype") if isinstance(value, dict) and key in value]
    if dtype is None or not keys:
        return content
    return (json.dumps({**value, **dict.fromkeys(keys, dtype)}, indent=2) + "\n").encode()


def card(members: Sequence[SoupMember], record: Mapping[str, Any], library: str) -> str:
    """A model card: the networks that a soup was made of, how, and the command's settings."""
    method = record.get("method", {"name": "greedy soup" if "greedy" in record else "linear"})
    settings = ", ".join(f"{key} {json.dumps(value)}" for key, value in method.items() if key != "name")
    rows = [f"| {member.weight:.6g} | {_name(member.path)} | `{member.digest}` |" for member in members]
    base = record.get("base")
    if base is not None:
        rows.append(f"| base | {_name(Path(base['path']))} | `{base['digest']}` |")
    front = ["---", f"library_name: {library}", "tags:", "- merge", "- papa", "---"]
    return "\n".join(
        [
            *front,
            "",
            f"# A soup of {len(members)} networks",
            "",
            f"Made with papa {__version__}, method {method['name']}{f' ({settings})' if settings else ''}.",
            "",
            "| weight | network | digest |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def _name(path: Path) -> str:
    """The file, with its folder if files of all networks are called alike, without the place on this machine."""
    generic = re.match(r"(model|pytorch_model|adapter_model)([-_.].*)?\.(safetensors|bin|json)", path.name)
    name = f"{path.absolute().parent.name}/{path.name}" if generic else path.name
    return re.sub(r"[^\w.:+=@/ -]", "_", name)
