"""The soak: gpumap for an hour on a node that never rests, at 20 times the speed of a clock.

`node` is the node and its truth, `plan` changes it, `laws` judge each page by it, `watch` runs and asks gpumap.
docs/dev/testing.md says what it shows.
"""
