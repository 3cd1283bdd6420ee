"""The loop that trains, and what stands beside it.

accumulation_not_divided   Gradients of several batches are added up, and the losses are not divided
accumulation_wiped         Gradients are set to zero in every turn, and the step comes every so many
                           turns
anomaly_detection          Anomaly detection is on
average_by_parameter       An average of the weights is updated parameter by parameter
clip_misplaced             Gradients are clipped where no step follows that uses them
copy_dropped               A tensor is moved, and the result is dropped
device_gpu                 A device is called ``gpu``
epoch_schedule_per_batch   A schedule that is as long as the number of epochs is advanced with each
                           batch
loaded_result_kept         The result of ``load_state_dict`` is taken for the model
moved_each_turn            A model is put on its device anew in a loop around its training
not_called                 A method is named and not called
one_cycle_per_epoch        A schedule that counts steps is advanced once an epoch
optimizer_made_in_loop     The optimizer is made anew in a loop that trains one model
plateau_without_metric     ``ReduceLROnPlateau`` steps without a metric
scheduler_before_step      The scheduler steps before the optimizer does
scheduler_unused           A scheduler is made and never steps
step_missing               Gradients are computed, and no optimizer ever steps
step_outside_loop          Each batch sets the gradients to zero, and the step stands behind the
                           loop over batches
zero_grad_before_step      Gradients are set to zero between backward() and step()
zero_grad_missing          Gradients are never set to zero
"""

from ..rule import rules_in

RULES = rules_in(__name__, __path__)
"""The rules of this group, in the order of their names."""
