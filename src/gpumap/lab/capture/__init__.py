"""Captures: the answers of a node's sources, as a folder that can be recorded, anonymized, replayed and played.

docs/dev/captures.md describes the format. A capture is a demo's node and a regression test, and holds nothing secret.
Read in this order: `format` and `contents` (what a folder holds), `record` with `recorders` and `anonymize` (how it is
made), `replay` (its page), and `run`, the commands. `gpumap.lab.node` plays it.
"""
