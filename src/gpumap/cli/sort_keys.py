"""The keys of --sort-by and the help of the commands that show tables. The first key is the default.

The keys are declared by the columns of `gpumap.cli.tables`, and repeated here because --help must not import tables.
tests/test_tables.py compares both.
"""

MAP_ORDERS = ("namespace", "memory", "sm", "peak", "granted", "gpus", "processes")
TOP_ORDERS = (
    *("memory", "sm", "peak", "granted", "processes"),
    *("device", "namespace", "pod", "container", "owner", "pid", "node"),
)
WASTE_ORDERS = (
    *("severity", "waste", "gpus", "granted", "used", "for"),
    *("device", "namespace", "pod", "container", "node"),
)
BY_NAME = "name"
BILL_ORDERS = ("held", "cost", "used", "idle", "kwh", "memory", BY_NAME)
SUMS_BY = ("namespace", "node")
"""What --by adds up by."""
