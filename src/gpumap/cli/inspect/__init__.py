"""`gpumap inspect`: the tables of `kubectl inspect gpushare` and `cgpu`, counted from the maps of nodes.

Start with `grants` (a node), then `gpu_grants` (a GPU). `table` prints them.
"""
