"""`gpumap bill`: the GPU time that containers held and used in a window, from the samples of a Prometheus.

`command.py` reads the flags. `promql.py` has the rule. `query.py` asks for the
increases of counters, and `pod_labels.py` for a label of
the pods. `counting.py` makes the lines, and `table.py` prints them.
"""

BY_NAME = "name"
BILL_ORDERS = ("held", "cost", "used", "idle", "kwh", "memory", BY_NAME)
"""The keys of --sort-by. The help must not import the tables."""
