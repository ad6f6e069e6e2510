"""Kinds of data: images, text and tables, each with its task, networks and transforms."""

from __future__ import annotations

from papa.errors import ConfigError, did_you_mean
from papa.lab.config import Config
from papa.lab.data.images import IMAGE_SETS
from papa.lab.data.table import TABLES
from papa.lab.domains.base import COMBINE, Domain
from papa.lab.domains.images import TILES, ImageDomain, load_image_domain, policies_for
from papa.lab.domains.table import TableDomain, load_table_domain
from papa.lab.domains.text import TEXT, TextDomain, load_text_domain, make_language_model

__all__ = [
    "COMBINE",
    "TEXT",
    "TILES",
    "Domain",
    "ImageDomain",
    "TableDomain",
    "TextDomain",
    "load_domain",
    "make_language_model",
    "policies_for",
]

_LOADERS = {
    TEXT: load_text_domain,
    **dict.fromkeys(TABLES, load_table_domain),
    **dict.fromkeys((*IMAGE_SETS, *TILES), load_image_domain),
}


def load_domain(config: Config) -> Domain:
    """The data set that the config names, with what belongs to its kind."""
    name = config.data.name
    if name not in _LOADERS:
        raise ConfigError(f"--data.name is {name}: {did_you_mean(name, list(_LOADERS))}")
    load = _LOADERS[name]
    return load(config)
