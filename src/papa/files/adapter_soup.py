"""Soups of LoRA adapters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from papa.errors import ConfigError, SoupError
from papa.files.adapters import CONFIG_NAME, AdapterAverage, open_adapters
from papa.files.builder import SoupSteps, stored_blocks
from papa.files.hub import CARD
from papa.files.output import Output
from papa.files.record import SoupMember, digest_of, soup_notes, soup_record
from papa.files.settings import Setting, checked_weights
from papa.files.storage import json_text
from papa.files.weights import PathLike, WeightsFile
from papa.files.writing import FileSoup, Writing


def soup_of_adapters(
    files: Sequence[WeightsFile],
    out: PathLike,
    weights: Sequence[Setting] | None,
    *,
    normalize: bool,
    dtype: torch.dtype | None,
    rank: int | None,
    writing: Writing,
) -> FileSoup:
    """A soup of LoRA adapters, as a directory that PEFT loads."""
    output = Output(out, stem="adapter_model")
    if not output.is_directory:
        raise SoupError(f"the output is {out}, expected a directory: an adapter has a config beside its weights")
    if rank is not None and rank < 1:
        raise ConfigError(f"the rank is {rank}, expected at least 1")
    adapters = open_adapters(files)
    row = checked_weights(weights, len(files), normalize=normalize)
    average = AdapterAverage(adapters, row, rank)
    tensors = average.tensors(dtype)
    notes = soup_notes(files, dtype)
    output.add({CONFIG_NAME: (json_text(average.config(), indent=2) + "\n").encode(), CARD: b""})
    output.prepare(overwrite=writing.overwrite)
    try:
        digests = [digest_of(file, full=writing.full_digests) for file in files]
        members = tuple(
            SoupMember(file.path, digest, weight, None, None)
            for file, digest, weight in zip(files, digests, row, strict=True)
        )
        record = soup_record(members, tensors, dtype, SoupSteps())
        record["method"] = {"name": "linear, of the products of LoRA's factors", "rank": average.rank}
        written = writing(output, tensors, stored_blocks(average, tensors), members, record, notes, library="peft")
    finally:
        output.clean_up()
    return FileSoup(written[-1], tuple(written), members, None, (), tuple(notes))
