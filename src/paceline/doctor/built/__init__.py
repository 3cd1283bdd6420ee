"""Check an instantiated model by one walk with inputs of given sizes, on the meta device.

pkg.module:model --walk: sizes of each layer, which follows which--> ModelWalk --checks--> findings

walk        one forward and one backward pass, without arithmetic; a layer that does not fit is
            mended in memory, so that the layers after it are seen, too
checks      what is wrong or wasteful; pure
tables      the findings and layers as lines
"""
