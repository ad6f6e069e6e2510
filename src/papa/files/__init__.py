"""Checkpoints that lie in files: averaging them into one, comparing two of them, without loading any."""

from papa.files.diff import Curve, Difference, FileDiff, diff_files
from papa.files.digests import digest_of
from papa.files.evaluation_context import EvaluationContext, evaluation_context_of
from papa.files.soup import FileSoup, Ingredient, soup_files
from papa.files.sources import Checkpoint, open_checkpoint, open_checkpoints

__all__ = [
    "Checkpoint",
    "Curve",
    "Difference",
    "EvaluationContext",
    "FileDiff",
    "FileSoup",
    "Ingredient",
    "diff_files",
    "digest_of",
    "evaluation_context_of",
    "open_checkpoint",
    "open_checkpoints",
    "soup_files",
]
