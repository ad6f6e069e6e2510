"""Data sets, as things that hand out whole batches."""

from papa.data import (
    Arrays,
    Data,
    Examples,
    Source,
    Streaming,
    Subset,
    as_source,
    batches_of,
    hold_out,
    stream_batches,
)
from papa.lab.data.cache import MappedImages
from papa.lab.data.digits import load_digits
from papa.lab.data.images import ImageSet, load_images
from papa.lab.data.large import DecodedFolder
from papa.lab.data.optdigits import load_optdigits
from papa.lab.data.tiles import Patches, Tiles, load_tiles, load_vaihingen

__all__ = [
    "Arrays",
    "Data",
    "DecodedFolder",
    "Examples",
    "ImageSet",
    "MappedImages",
    "Patches",
    "Source",
    "Streaming",
    "Subset",
    "Tiles",
    "as_source",
    "batches_of",
    "hold_out",
    "load_digits",
    "load_images",
    "load_optdigits",
    "load_tiles",
    "load_vaihingen",
    "stream_batches",
]
