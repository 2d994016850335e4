"""Captures: what the sources of a node said, as a folder that can be recorded, anonymized, replayed and played.

docs/dev/captures.md tells the format. A capture is a demo's node and a regression test alike, and holds nothing secret.
"""
