"""Weights in files: averaging many files into one, and comparing two of them, without loading any."""

from papa.files.diff import Difference, FileDiff, diff_files
from papa.files.evaluation_context import EvaluationContext, evaluation_context_of
from papa.files.merge_config import MergeConfig, merge_config
from papa.files.methods import DareLinear, DareTies, Linear, MergeMethod, ModelStock, Slerp, TaskArithmetic, Ties
from papa.files.opening import open_all, open_weights
from papa.files.record import SoupMember, digest_of
from papa.files.soup import soup_files
from papa.files.weights import WeightsFile
from papa.files.writing import FileSoup

__all__ = [
    "DareLinear",
    "DareTies",
    "Difference",
    "EvaluationContext",
    "FileDiff",
    "FileSoup",
    "Linear",
    "MergeConfig",
    "MergeMethod",
    "ModelStock",
    "Slerp",
    "SoupMember",
    "TaskArithmetic",
    "Ties",
    "WeightsFile",
    "diff_files",
    "digest_of",
    "evaluation_context_of",
    "merge_config",
    "open_all",
    "open_weights",
    "soup_files",
]
