"""Layers, and what flows through them.

attention_mask_missing       Padded texts go into a transformer without their attention mask
bce_of_logits                A binary cross entropy is given raw scores
bias_before_norm             A layer has a bias right before a batch norm
broadcast_in_loss            A loss is given a column and a row: outputs (B, 1), targets (B,)
comment_differs              The comment above says another number of features or classes than the
                             code has
dropout_always_on            ``F.dropout`` of a module is not told whether it is training
feature_mismatch             A layer is given another number of features than it takes
forward_by_name              ``forward()`` of a model is called directly
frozen_without_effect        Layers are to be frozen, and stay as they are
grown_by_cat                 A tensor grows by ``torch.cat`` in each turn of a loop
kl_of_probabilities          A Kullback-Leibler divergence is given probabilities as its first
                             argument
linear_chain                 Two linear layers follow each other with no activation between
nll_of_logits                A negative log likelihood is given raw scores
output_size                  The network makes pictures of another size than the targets have
relu_at_end                  A regression of one number ends in a ReLU
relu_into_logits_loss        A ReLU stands between the last layer and a loss of logits
sequence_axis                A recurrent layer that takes time first is read as if the batch came
                             first
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
"""The rules of this group, in the order of their names."""
