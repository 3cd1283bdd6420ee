"""The path of gradients.

advantage_with_graph         The advantage that weighs a policy's log-probabilities still has a
                             gradient
argmax_into_loss             A loss gets the predicted class instead of the scores
graph_cut                    A new loss tensor is created with ``requires_grad=True`` before
                             backward()
graph_retained               The graph is kept after the only backward() of an iteration
hidden_not_detached          A hidden state is carried from one batch to the next with its graph
loss_keeps_graph             Losses are summed or stored with their graphs
loss_through_other_network   A loss goes back through a network that its step does not update
network_not_optimized        A network takes part in the loss, but no optimizer has its parameters
old_probability_with_graph   The log-probabilities of the old policy are stored with their graph
parameters_given_twice       An optimizer gets the parameters of one network twice
penalty_without_graph        A gradient penalty is computed without the graph of that gradient
target_with_gradient         The target of a Q-network is computed with its gradient
threshold_in_loss            A loss is computed from an output that was rounded to 0 and 1
"""

from ..rule import rules_in

RULES = rules_in(__name__, __path__)
"""The rules of this group, in the order of their names."""
