"""Asks a Prometheus that scrapes gpumap, for the findings of all nodes or for sums."""
