"""`gpumap doctor`: the map of a node and facts about the process in, one result with a remedy per check out.

Start with the lists in `checks`; `gpu_checks` has those of each GPU.
"""
