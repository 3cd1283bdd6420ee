"""What members and the coordinator say to each other, and how it travels.

    messages   the types: who says what, with named fields
    codec      bytes of them and back, the same for every engine
    channel    a way for them between two processes

It must not know what a message leads to.
"""
