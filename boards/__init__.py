"""gpumap's Grafana boards as data: the queries of each panel, and their reasons. `python -m boards` writes Grafana's
JSON.

Each board has a module of its name with its queries. `queries` has their common parts. Only `grafana` knows the format
of Grafana's JSON.
"""
