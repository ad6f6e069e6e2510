"""Weights in files: averaging many files into one, and comparing two of them, without loading any."""

from papa.files.diff import Difference, FileDiff, diff_files
from papa.files.evaluation_context import EvaluationContext, evaluation_context_of
from papa.files.record import FileSoup, SoupMember, digest_of
from papa.files.soup import soup_files
from papa.files.weights import WeightsFile, open_all, open_weights

__all__ = [
    "Difference",
    "EvaluationContext",
    "FileDiff",
    "FileSoup",
    "SoupMember",
    "WeightsFile",
    "diff_files",
    "digest_of",
    "evaluation_context_of",
    "open_all",
    "open_weights",
    "soup_files",
]
