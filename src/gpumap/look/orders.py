"""What tables can be sorted by, in words: for the flags, which need no table. The first is the default. Pure."""

MAP_ORDERS = ("namespace", "memory", "sm", "peak", "granted", "gpus", "processes")
TOP_ORDERS = (
    *("memory", "sm", "peak", "granted", "processes"),
    *("device", "namespace", "pod", "container", "owner", "pid", "node"),
)
WASTE_ORDERS = (
    *("severity", "waste", "gpus", "granted", "used", "idle"),
    *("device", "namespace", "pod", "container", "node"),
)
