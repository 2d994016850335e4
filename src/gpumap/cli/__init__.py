"""What people run: map, top, waste, inspect, bill, doctor, completion, and the kubectl plugin.

In come the maps of agents (over HTTP, or through the API server), series of a Prometheus, or two collections on this
node; out go tables and JSON on a terminal. Works on `model` only. One file, `this_node`, imports the agent.

Start with `commands` (what can be asked), then `where` (who is asked), then `tables/` (what is shown).
"""
