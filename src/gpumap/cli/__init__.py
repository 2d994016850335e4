"""What people run: map, top, waste, inspect, bill, doctor, check, and the kubectl plugin.

Input: maps of agents (over HTTP, or through the API server), series of a Prometheus, or two collections on this node.
Output: tables and JSON on a terminal. It uses only `model`. One file, `this_node`, imports the agent.

Start with `commands` (the commands), then `where` (their sources), then `tables/` (their output).
"""
