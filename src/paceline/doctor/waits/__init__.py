"""What makes the host wait for the device, or copies where it need not.

branch_on_tensor          A branch asks a tensor of the device in each turn
cache_emptied_each_turn   Memory is given back, or garbage collected, in each turn
item_in_loop              A number is read from the device in each turn
made_then_moved           A tensor is made on the host in each turn, and then moved
mask_as_index             A boolean mask of the device is an index in each turn
non_blocking_at_once      A copy is not to block, of memory that is not pinned, and the next line
                          uses it
numpy_in_loop             A tensor of the device is copied to the host in each turn
pinned_by_hand            A tensor is pinned right before it is moved
print_in_loop             A tensor of the device is printed in each turn
read_before_copied        A copy to the host is read before it has ended
saved_each_turn           A checkpoint is written in each turn
synchronized_each_turn    The host waits for the device in each turn by a call
"""

from ..rule import rules_in

RULES = rules_in(__name__, __path__)
"""The rules of this group, in the order of their names."""
