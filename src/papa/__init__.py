"""papa: train a population of networks, keep pulling their weights together, hand back one network.

See `papa.Population`, `papa.Averager` and the rules for your own loop, `papa.train` for ours, and the command `papa`.
"""

from papa._version import __version__
from papa.align import AlignMerges, align_, align_all_, aligned_soups, symmetries
from papa.averager import Averager, Averaging
from papa.ensemble import Ensemble
from papa.errors import PapaError
from papa.evaluation import Evaluation, evaluate
from papa.files import soup_files
from papa.interpolation import interpolate
from papa.population import Population
from papa.repair import RepairMerges, repair_, reset_batch_norm_
from papa.rules import AveragingContext, Independent, MergeAll, MergeMany, MergePairs, Mix, Push, Rule
from papa.similarity import feature_similarity
from papa.soup import GreedySoup, average_soup, greedy_soup
from papa.training import Outcome, train

__all__ = [
    "AlignMerges",
    "Averager",
    "Averaging",
    "AveragingContext",
    "Ensemble",
    "Evaluation",
    "GreedySoup",
    "Independent",
    "MergeAll",
    "MergeMany",
    "MergePairs",
    "Mix",
    "Outcome",
    "PapaError",
    "Population",
    "Push",
    "RepairMerges",
    "Rule",
    "__version__",
    "align_",
    "align_all_",
    "aligned_soups",
    "average_soup",
    "evaluate",
    "feature_similarity",
    "greedy_soup",
    "interpolate",
    "repair_",
    "reset_batch_norm_",
    "soup_files",
    "symmetries",
    "train",
]
