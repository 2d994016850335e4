"""The only process that loads the NVIDIA library, because a foreign library may hang, crash or leak.

Input: requests on stdin. Output: readings on stdout (`wire`, which the service and the lab also use).
Start at `__main__`, `read_scheduler` (which thread reads which GPU) and `reading` (one GPU). The service's end of the
pipe is `gpumap.agent.sources.nvml`.
"""
