"""Variables that boards have in common, and the ways from a row of one board to another."""

from __future__ import annotations

from boards import queries as q
from boards.panels import Key, Link, Variable

CLUSTERED = (Variable("cluster", "Cluster", f"label_values(gpumap_build_info{{{q.JOBS}}}, cluster)"),)
NODES = Variable("node", "Node", f"label_values(gpumap_build_info{{{q.JOBS}, {q.CLUSTER}}}, node)")
UUIDS = Variable("uuid", "Device", f"label_values(gpumap_device_info{{{q.JOBS}, {q.NODE}}}, uuid)")


def namespace_and_pod(name: str, where: str) -> tuple[Variable, Variable]:
    """Variables for the namespaces and pods of a family."""
    in_namespace = f'{where}, namespace=~"$namespace"'
    return (
        Variable("namespace", "Namespace", f"label_values({q.series(name, where)}, namespace)"),
        Variable("pod", "Pod", f"label_values({q.series(name, in_namespace)}, pod)"),
    )


_IN_NAMESPACE = (("namespace", "namespace"),)
_ON_NODE = (("node", "node"),)
TO_NAMESPACE = Link("This namespace in GPU App", "gpumap-app", _IN_NAMESPACE)
TO_POD = Link("This pod in GPU App", "gpumap-app", (*_IN_NAMESPACE, ("pod", "pod")))
TO_NODE = Link("This node in GPU Node", "gpumap-node", _ON_NODE)
TO_CARD = Link("This device in GPU Node", "gpumap-node", (*_ON_NODE, ("uuid", "uuid")))
TO_HEALTH = Link("This GPU in GPU Health", "gpumap-health", (*_ON_NODE, ("gpu", "gpu_uuid")))
NODE_KEY = Key("node", "Node", TO_NODE)
CONTAINER_KEYS = (
    Key("cluster", "Cluster"),
    Key("namespace", "Namespace"),
    Key("pod", "Pod", TO_POD),
    Key("container", "Container"),
    NODE_KEY,
)
"""The columns that say which container a row is of."""
