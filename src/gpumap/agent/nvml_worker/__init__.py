"""The process that alone loads the NVIDIA library. A foreign library may hang, crash or leak here, not in the service.

`wire` and `codes` are what both ends share; `parent` is the service's end of the pipe; the rest runs in the worker.
"""
