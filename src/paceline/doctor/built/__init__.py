"""A model that is made, walked once with inputs of given sizes, on the meta device: no arithmetic.

pkg.module:model --walk: sizes of each layer, what follows what--> ModelWalk --checks--> findings

walk        one forward and one backward pass; a layer that does not fit is mended in memory, so
            that what comes after it is seen, too
checks      what is wrong, or wastes; pure
tables      shown in lines
"""
