"""Simulated nodes and captures: the demo, record and replay.

In come scenarios (YAML) and captures (folders); out goes a node that the agent's own sources read: a real gRPC socket,
files, and a stand-in for the NVML worker. Nothing here runs on a GPU node, except `record`.

Start with `demo/scenario` and `demo/run`, then `capture/format` and `capture/replay`.
"""
