"""A run made again from its folder, bit for bit.

repeatable   whether it can be, and if not the one reason why
replay       its task, its trace, the model that it left
"""
