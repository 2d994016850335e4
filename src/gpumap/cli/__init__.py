"""What people run: map, top, waste, inspect, bill, doctor, check, and the kubectl plugin.

Input: maps of agents (over HTTP, or through the API server), series of a Prometheus, or two collections on this node.
Output: tables and JSON on a terminal. It uses only `model`. One file, `sources/this_node`, imports the agent.

Start with `commands/waste` (a command is a file), then `rows` and `table` (what it is made of), then `sources/` (where
nodes come from) and `screen` (how it is printed). `gpumap` and `kubectl` are the programs that have the commands.
"""
