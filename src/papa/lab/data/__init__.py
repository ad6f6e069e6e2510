"""Data sets of the lab: image sets by name, class folders, and tiles with a class per pixel."""

from papa.lab.data.digits import load_digits, load_optdigits
from papa.lab.data.images import ImageSet, load_images
from papa.lab.data.large import DecodedFolder
from papa.lab.data.tiles import Patches, Tiles, load_tiles, load_vaihingen

__all__ = [
    "DecodedFolder",
    "ImageSet",
    "Patches",
    "Tiles",
    "load_digits",
    "load_images",
    "load_optdigits",
    "load_tiles",
    "load_vaihingen",
]
