"""Simulated nodes and captures: the demo, record and replay.

Input: scenarios (YAML) and captures (folders). Output: a node that the agent's own sources read, with a real gRPC
socket, files, and a fake of the NVML worker. Nothing here runs on a GPU node, except `record`.

Start with the docstrings of `demo` and `capture`. Both use `decoding` (declared types from YAML and JSON, with
readable errors) and `node_files` (files that appear and disappear as on a real node).
"""
