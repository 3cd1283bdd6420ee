"""What a run is put through: how slow its workers are made, and later how they fail.

It must not know who waits for it: given a random generator it answers with seconds.
"""
