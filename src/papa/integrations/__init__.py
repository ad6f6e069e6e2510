"""Adapters for other libraries, each imported only by those who use it, and each behind the extra of its name.

Example: `from papa.integrations.lightning import PopulationAveraging` needs `pip install 'papa-torch[lightning]'`.
"""
