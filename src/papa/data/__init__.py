"""Data sets, as things that hand out whole batches."""

from papa.data.cache import MappedImages
from papa.data.digits import load_digits
from papa.data.images import ImageSet, load_images
from papa.data.large import DecodedFolder
from papa.data.source import (
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

__all__ = [
    "Arrays",
    "Data",
    "DecodedFolder",
    "Examples",
    "ImageSet",
    "MappedImages",
    "Source",
    "Streaming",
    "Subset",
    "as_source",
    "batches_of",
    "hold_out",
    "load_digits",
    "load_images",
    "stream_batches",
]
