"""Simulated nodes and captures: the demo, record and replay.

Input: scenarios (YAML) and captures (folders). Output: a node that the agent's own sources read, with a real gRPC
socket, files, and a fake of the NVML worker. Nothing here runs on a GPU node, except `record`.

Start with the docstrings of `demo` and `capture`. Both give frames: the answers of a node's sources at a moment. `node`
plays frames, and runs the service over them. `node_files` makes its files appear and disappear as on a real node, and
`driver` takes the place of the NVML worker. `decoding` makes declared types of YAML and JSON, with readable errors.
"""
