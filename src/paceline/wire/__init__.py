"""The messages between members and the coordinator, and their transport.

    messages   the message types, with named fields
    codec      encodes and decodes them, the same for every engine
    channel    carries them between two processes

It must not know what a message leads to.
"""
