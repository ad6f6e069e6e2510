"""Populations in Lightning: a callback for one member per process, a module of several members, a strategy for ranks.

Needs `pip install 'papa-torch[lightning]'`.
"""

from papa.integrations.lightning.callback import PopulationAveraging
from papa.integrations.lightning.module import PopulationModule
from papa.integrations.lightning.strategy import MemberPerRank

__all__ = ["MemberPerRank", "PopulationAveraging", "PopulationModule"]
