"""A whole cluster, by the series that a Prometheus has of it.

In: the answers of a server. Out: `NodeMaps`, as the agents themselves would answer. Start with `source.py`. Then
read `families.py` (what is asked), `targets.py` (which node a row belongs to), `values.py` and `cluster.py` (the
answers, grouped) and `node_map.py`.
"""
