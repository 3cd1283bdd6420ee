"""The training loop, and the code around it.

accumulation_not_divided   Gradients of several batches are accumulated, but the losses are not
                           divided
accumulation_wiped         Gradients are set to zero every iteration, but the step comes only every
                           few iterations
anomaly_detection          Anomaly detection is on
average_by_parameter       An average of the weights is updated parameter by parameter
clip_misplaced             Gradients are clipped where no step uses the result
copy_dropped               A tensor is moved, but the result is not used
device_gpu                 A device is named ``gpu``
epoch_schedule_per_batch   A schedule with one step for each epoch is advanced with each batch
loaded_result_kept         The result of ``load_state_dict`` is used as the model
moved_each_turn            A model is moved to its device again in every iteration of a loop around
                           its training
not_called                 A method is named but not called
one_cycle_per_epoch        A schedule that counts steps is advanced once an epoch
optimizer_made_in_loop     The optimizer is created again in a loop that trains one model
plateau_without_metric     ``ReduceLROnPlateau`` steps without a metric
scheduler_before_step      The scheduler steps before the optimizer does
scheduler_unused           A scheduler is created but never steps
step_missing               Gradients are computed, but no optimizer ever steps
step_outside_loop          Each batch sets the gradients to zero, but the step comes after the loop
                           over batches
zero_grad_before_step      Gradients are set to zero between backward() and step()
zero_grad_missing          Gradients are never set to zero
"""

from ..rule import rules_in

RULES = rules_in(__name__, __path__)
"""The rules of this group, in the order of their names."""
