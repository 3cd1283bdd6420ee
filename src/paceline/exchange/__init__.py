"""A member's side of a run: the same verbs whatever carries the bytes.

    base            the contract
    solo            one worker: the user's optimizer on the user's parameters
    through_store   every order comes from the coordinator: every protocol
    peers           its part while an epoch runs among peers, two barriers a round: full-sync and
                    local-sgd, with an averaging:

    averaging       how peers come to a mean and step on it: the contract
    shares          in shared memory, each on its share of the parameters
    distributed     through ``torch.distributed``, one accelerator a worker

Their parts: member (what a member has, and its carrier of words and bytes), model_copy (what leaves
it and comes back), inbox (what it hears, its jobs), rounds (where peers meet), turns (what the main
one does first), evaluation, snapshot, unedited. None of them knows protocols.
"""
