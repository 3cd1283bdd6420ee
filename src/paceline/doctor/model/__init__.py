"""Layers, and what flows through them.

bias_before_norm             A layer has a bias right before a batch norm
comment_differs              The comment above says another number of features or classes than
                             the code has
feature_mismatch             A layer is given another number of features than it takes
forward_past_wrapper         ``forward()`` of a wrapped model is called directly
grown_by_cat                 A tensor grows by ``torch.cat`` in each turn of a loop
linear_chain                 Two linear layers follow each other with no activation between
nll_of_logits                A negative log likelihood is given raw scores
output_size                  The network makes pictures of another size than the targets have
sigmoid_at_end               A network ends in a Sigmoid, and the loss is not one of logits
sigmoid_into_logits_loss     A sigmoid goes into a loss of logits, which has one of its own
softmax_into_cross_entropy   A softmax goes into a cross entropy, which has one of its own
super_init_missing           A module's ``__init__`` sets layers and does not call that of
                             ``nn.Module``
target_range                 Targets drawn from a normal distribution, and an output that lies
                             between 0 and 1
unregistered_modules         Layers stand in a plain list or dict of a module
"""

from ..rule import rules_in

RULES = rules_in(__name__, __path__)
"""In the order of their names."""
