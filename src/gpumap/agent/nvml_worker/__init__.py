"""The process that loads the NVIDIA library, the only one. A foreign library may hang, crash or leak here.

In come requests on stdin, out go readings on stdout (`wire`, which the service and the lab use too, with `codes`).
Start at `__main__`, `read_scheduler` (which thread reads which GPU) and `reading` (one GPU). The service's end of the
pipe is `gpumap.agent.sources.nvml`.
"""
