"""Data sets and loaders.

model_gets_loader   A model is called with the loader itself
ragged_last_batch   The last batch is smaller than the others
"""

from . import model_gets_loader, ragged_last_batch

_FILES = (
    model_gets_loader,
    ragged_last_batch,
)
RULES = tuple(one.RULE for one in _FILES)
"""In the order of their names."""
