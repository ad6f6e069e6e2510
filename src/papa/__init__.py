"""papa: train a population of networks, keep their weights together, and get one network.

Use `papa.Population`, `papa.Averager` and a rule such as `papa.Push` in your own training loop, or `papa.train`. The
packages `papa.lab` (recipes, data sets, reports) and `papa.cli` (the command `papa`) are built on this library.

Names are in `__init__.pyi`. Each is imported when it is first used, so that the help of the command needs no PyTorch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
