"""Layers, and what flows through them.

comment_differs    The comment above says another number of features or classes than the code
                   has
feature_mismatch   A layer is given another number of features than it takes
linear_chain       Two linear layers follow each other with no activation between
output_size        The network makes pictures of another size than the targets have
sigmoid_at_end     A network ends in a Sigmoid, and the loss is not one of logits
target_range       Targets drawn from a normal distribution, and an output that lies between 0
                   and 1
"""

from . import (
    comment_differs,
    feature_mismatch,
    linear_chain,
    output_size,
    sigmoid_at_end,
    target_range,
)

_FILES = (
    comment_differs,
    feature_mismatch,
    linear_chain,
    output_size,
    sigmoid_at_end,
    target_range,
)
RULES = tuple(one.RULE for one in _FILES)
"""In the order of their names."""
