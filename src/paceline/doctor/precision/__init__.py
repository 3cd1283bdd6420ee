"""Mixed precision, and what tensor cores want.

no_mixed_precision   A network computes in 32 bits: there is no autocast
tensor_core_sizes    Sizes of layers that are no multiple of 8
"""

from . import no_mixed_precision, tensor_core_sizes

_FILES = (
    no_mixed_precision,
    tensor_core_sizes,
)
RULES = tuple(one.RULE for one in _FILES)
"""In the order of their names."""
