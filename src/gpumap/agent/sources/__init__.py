"""One file per source: each asks one thing and returns values of `gpumap.model`."""
