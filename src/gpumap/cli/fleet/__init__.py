"""A whole cluster, by the series that a Prometheus has of it.

In: the answers of a server. Out: `NodeMaps`, as the agents themselves would answer. Start with `source.py`. Then read
`queries.py` (what is asked), `values.py` (an answer), `targets.py` (the node of a row) and `joins.py` (the nodes).
"""
