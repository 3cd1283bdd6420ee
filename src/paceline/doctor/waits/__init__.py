"""Needless waits for the device, and needless copies.

branch_on_tensor          A branch depends on a device tensor in each iteration
cache_emptied_each_turn   Memory is freed, or garbage collected, in each iteration
item_in_loop              A number is read from the device in each iteration
made_then_moved           A tensor is created on the host in each iteration and then moved
mask_as_index             A boolean mask on the device is used as an index in each iteration
non_blocking_at_once      A non_blocking copy from memory that is not pinned is used on the next
                          line
numpy_in_loop             A device tensor is copied to the host in each iteration
pinned_by_hand            A tensor is pinned right before it is moved
print_in_loop             A device tensor is printed in each iteration
read_before_copied        A copy to the host is read before it has finished
saved_each_turn           A checkpoint is written in each iteration
synchronized_each_turn    The host synchronizes with the device in each iteration
"""

from ..rule import rules_in

RULES = rules_in(__name__, __path__)
"""The rules of this group, in the order of their names."""
