"""Evaluation, and the model that is kept.

best_not_copied              The best weights are kept as a reference, not as a copy
evaluated_in_training_mode   A model with dropout or batch norm is evaluated in training mode
evaluated_with_gradients     An evaluation records a graph for every batch
mean_of_means                The loss of an evaluation is the mean of its batches' means
never_back_to_training       A model is put into evaluation mode each epoch, but never back into
                             training mode
"""

from ..rule import rules_in

RULES = rules_in(__name__, __path__)
"""The rules of this group, in the order of their names."""
