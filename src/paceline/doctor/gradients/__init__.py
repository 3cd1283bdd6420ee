"""What a gradient goes back through.

advantage_with_graph         The advantage that weighs a policy's log-probabilities has a gradient
                             of its own
argmax_into_loss             A loss is given the class that was chosen, not the scores
graph_cut                    A loss is made anew with ``requires_grad=True`` before backward()
graph_retained               The graph is kept after the only backward() of a turn
hidden_not_detached          A hidden state goes from one batch to the next with its graph
loss_keeps_graph             Losses are added up, or kept, with their graphs
loss_through_other_network   A loss goes back through a network that its step does not change
network_not_optimized        A network takes part in the loss, and no optimizer has its parameters
old_probability_with_graph   The log-probabilities of the old policy are kept with their graph
parameters_given_twice       An optimizer is given the parameters of one network twice
penalty_without_graph        A penalty on a gradient is made without the graph of that gradient
target_with_gradient         The target of a Q-network is computed with its gradient
threshold_in_loss            A loss is computed of an output that was rounded to 0 and 1
"""

from ..rule import rules_in

RULES = rules_in(__name__, __path__)
"""The rules of this group, in the order of their names."""
