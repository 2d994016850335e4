"""`gpumap bill`: what of the GPUs was held and used in a window, as a Prometheus-compatible server has it."""
