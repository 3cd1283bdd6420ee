"""A member's side of a run: the same verbs whatever carries the bytes.

    base            the contract
    solo            one worker: the user's optimizer on the user's parameters
    through_store   every order comes from the coordinator: every protocol
    peers           between peers in shared memory, two barriers a round: full-sync and local-sgd
    distributed     the same through ``torch.distributed``, one accelerator a worker

Their parts: model_copy (what leaves a member and comes back), carrier (of words and bytes between
members), inbox (what a member hears, its jobs), rounds and shares (between peers), turns (what the
main one does first), evaluation, snapshot, unedited. None of them knows protocols.
"""
