"""`gpumap bill`: the GPU time that containers held and used in a window, from the samples of a Prometheus.

`promql.py` has the rule. `query.py` asks for the increases of counters, and `pod_labels.py` for a label of the pods.
`counting.py` makes the lines, and `table.py` prints them. The command itself is `commands/bill.py`.
"""
