"""A run made again from its folder, bit for bit.

replay       whether it can be; its task, its trace, the model that it left
"""
