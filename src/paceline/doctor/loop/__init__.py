"""The loop that trains, and what stands beside it.

accumulation_not_divided     Gradients of several batches are added up, and the losses are not
                             divided
anomaly_detection            Anomaly detection is on
argmax_into_loss             A loss is given the class that was chosen, not the scores
copy_dropped                 A tensor is moved, and the result is dropped
device_gpu                   A device is called ``gpu``
evaluated_in_training_mode   A model with dropout or batch norm is evaluated in training mode
evaluated_with_gradients     An evaluation records a graph for every batch
graph_cut                    A loss is made anew with ``requires_grad=True`` before backward()
graph_retained               The graph is kept after the only backward() of a turn
loss_keeps_graph             Losses are added up, or kept, with their graphs
never_back_to_training       A model is put into evaluation mode each epoch, and never back
one_cycle_per_epoch          A schedule that counts steps is advanced once an epoch
optimizer_made_in_loop       The optimizer is made anew in a loop that trains one model
plateau_without_metric       ``ReduceLROnPlateau`` steps without a metric
scheduler_before_step        The scheduler steps before the optimizer does
scheduler_unused             A scheduler is made and never steps
step_missing                 Gradients are computed, and no optimizer ever steps
zero_grad_before_step        Gradients are set to zero between backward() and step()
zero_grad_missing            Gradients are never set to zero
"""

from ..rule import rules_in

RULES = rules_in(__name__, __path__)
"""In the order of their names."""
