"""A simulated GPU node: the embedded default of `gpumap demo`, and the fake kubelet of the tests.

It feeds the real pipeline through the real interfaces (a socket, files, the NVML worker's protocol), and knows nothing
of what the pipeline makes of it.
"""
