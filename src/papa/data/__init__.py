"""Data sets, as things that hand out whole batches."""

from papa.data.digits import load_digits
from papa.data.source import Arrays, Data, Examples, Source, Subset, as_source, batches_of, hold_out

__all__ = ["Arrays", "Data", "Examples", "Source", "Subset", "as_source", "batches_of", "hold_out", "load_digits"]
