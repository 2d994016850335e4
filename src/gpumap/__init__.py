"""gpumap: which container holds which GPU, and what it really uses."""

__version__ = "0.1.0"
