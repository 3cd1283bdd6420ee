"""Layers, and what flows through them.

attention_mask_missing       Padded texts are passed to a transformer without their attention mask
bce_of_logits                A binary cross entropy gets raw scores
bias_before_norm             A layer has a bias right before a batch norm
broadcast_in_loss            A loss gets a column and a row: outputs (B, 1), targets (B,)
comment_differs              A comment states a different number of features or classes than the
                             code
dropout_always_on            ``F.dropout`` in a module does not get the training flag
feature_mismatch             A layer gets a different number of features than it takes
forward_by_name              ``forward()`` of a model is called directly
frozen_without_effect        Layers should be frozen, but are not
grown_by_cat                 A tensor grows by ``torch.cat`` in each iteration of a loop
kl_of_probabilities          A Kullback-Leibler divergence gets probabilities as its first argument
linear_chain                 Two linear layers follow each other without an activation in between
nll_of_logits                A negative log likelihood gets raw scores
output_size                  The network outputs images of a different size than the targets
relu_at_end                  A regression to one number ends in a ReLU
relu_into_logits_loss        There is a ReLU between the last layer and a loss on logits
sequence_axis                A recurrent layer with time as its first dimension is read as if the
                             batch came first
sigmoid_at_end               A network ends in a Sigmoid, and its loss is not one on logits
sigmoid_into_logits_loss     The output of a sigmoid is passed to a loss that applies one itself
softmax_into_cross_entropy   The output of a softmax is passed to a cross entropy, which applies one
                             itself
super_init_missing           The ``__init__`` of a module sets layers but does not call that of
                             ``nn.Module``
target_range                 Targets come from a normal distribution, but the output lies between 0
                             and 1
unregistered_modules         A module keeps layers in a plain list or dict
"""

from ..rule import rules_in

RULES = rules_in(__name__, __path__)
"""The rules of this group, in the order of their names."""
