"""gpumap's Grafana boards as data: what each panel asks, and why. `python -m boards` writes them as Grafana's JSON.

A board's queries stand in a module of its own name; `queries` has the parts that they share, `grafana` alone knows what
Grafana's JSON looks like.
"""
