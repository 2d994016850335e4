"""What happens on the live node: each case changes it, and waits until gpumap's page shows what is true then.

The cases of a group run at once, and the groups one after another. While they run, every page is recorded, and judged
afterwards: a case needs to look only for what must appear.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.cluster import layout
from tests.cluster.gpu_node import GpuNode, values
from tests.cluster.layout import GPUSHARE, MIG, SHARED, WHOLE
from tests.cluster.workloads import IDLE, Work, Workload, use
from tests.machine import MIB

FULL = ("gpumap", "gpumap-fast")
"""The gpumaps that may see everything."""
FAST = "gpumap-fast"
MEMORY = "gpumap_container_gpu_memory_used_bytes"
ONE_GPU = {WHOLE: 1}


@dataclass(frozen=True)
class Case:
    """A change of the node. `proves` says what the page must show, for the report."""

    name: str
    proves: str
    run: Callable[[GpuNode], None]


def show(live: GpuNode, workload: Workload, memory: Mapping[str, Sequence[int]], agents: Sequence[str] = FULL) -> None:
    """Wait until the page has the memory of each container (MiB on each device), and nothing else of the pod."""

    def holds(text: str) -> bool:
        found = {
            name: sorted(values(text, MEMORY, namespace=workload.namespace, pod=workload.full_name, container=name))
            for name in workload.containers
        }
        return found == {name: sorted(size * MIB for size in memory.get(name, ())) for name in workload.containers}

    for agent in agents:
        live.until(agent, holds, f"{workload.name} with {dict(memory)} MiB")


def vanish(live: GpuNode, workload: Workload) -> None:
    """Wait until the page has no gauge of the pod."""
    for agent in FULL:
        live.until(
            agent,
            lambda text: (
                not values(text, "gpumap_allocation_info", pod=workload.full_name)
                and not values(text, MEMORY, pod=workload.full_name)
            ),
            f"end of {workload.name}",
        )


# --- pods that come, run and go ---

STEADY: Mapping[Workload, Mapping[str, Sequence[int]]] = {}


def steady(workload: Workload, memory: Mapping[str, Sequence[int]]) -> Callable[[GpuNode], None]:
    """A pod that stays until the end of all cases."""

    def run(live: GpuNode) -> None:
        live.apply(workload)
        show(live, workload, memory)

    return run


def pod(name: str, **containers: Work) -> Workload:
    return Workload(name, containers)


TWO_PROCESSES = f"env {layout.MEMORY_MIB}=100 sleep 100000 & {use(200)}"

STEADY_CASES = {
    "several containers": (
        pod("several", a=Work(use(300), ONE_GPU), b=Work(TWO_PROCESSES, ONE_GPU), c=Work(IDLE)),
        {"a": [300], "b": [300]},
        "each container has its own device and memory, the third has no row",
    ),
    "host network": (
        Workload("hostnet", {"main": Work(use(310), ONE_GPU)}, {"hostNetwork": True}, static=True),
        {"main": [310]},
        "its memory",
    ),
    "host PIDs": (
        Workload("hostpid", {"main": Work(use(320), ONE_GPU)}, {"hostPID": True}, static=True),
        {"main": [320]},
        "its memory",
    ),
    "shared process namespace": (
        Workload(
            "sharepid", {"a": Work(use(330), ONE_GPU), "b": Work(use(40), {SHARED: 1})}, {"shareProcessNamespace": True}
        ),
        {"a": [330], "b": [40]},
        "each process belongs to its own container",
    ),
    "holder without a process": (pod("idle", main=Work(IDLE, ONE_GPU)), {"main": [0]}, "0 bytes"),
    "time-slicing, one replica": (pod("slice-a", main=Work(use(50), {SHARED: 1})), {"main": [50]}, "its own memory"),
    "time-slicing, two replicas": (
        pod("slice-b", main=Work(use(60), {SHARED: 2})),
        {"main": [60]},
        "one row, half a GPU",
    ),
    "MIG": (
        pod("mig", a=Work(use(70), {MIG: 1}), b=Work(use(80), {MIG: 1})),
        {"a": [70], "b": [80]},
        "own MIG devices",
    ),
    "gpushare": (
        pod("gpushare", a=Work(use(90), {GPUSHARE: 4}), b=Work(use(95), {GPUSHARE: 8})),
        {"a": [90], "b": [95]},
        "the card of the plugin's answer, not of the ids",
    ),
    "use without an assignment": (
        pod("squatter", main=Work(use(110, device=layout.FREE_GPU))),
        {"main": [110]},
        "`unassigned`",
    ),
    "use of a shared card without an assignment": (
        pod("intruder", main=Work(use(120, device=layout.SHARED_GPU))),
        {"main": [120]},
        "`unassigned`, beside holders of the card",
    ),
}


def init_container(live: GpuNode) -> None:
    workload = pod("init", init=Work(use(130, seconds=6), ONE_GPU), main=Work(use(140), ONE_GPU))
    with live.running(workload):
        live.until(
            FAST,
            lambda text: values(text, MEMORY, pod=workload.full_name, container="init") == [130 * MIB],
            "memory of the init container",
        )
        show(live, workload, {"main": [140]})
    vanish(live, workload)


def crash_loop(live: GpuNode) -> None:
    workload = pod("crashing", main=Work(f"{use(150, seconds=3)}", ONE_GPU))
    pid = process_of(live, workload)
    with live.running(workload):
        for _ in range(2):
            show(live, workload, {"main": [150]}, [FAST])
            show(live, workload, {"main": [0]}, [FAST])
    assert pid is None
    vanish(live, workload)


def process_of(live: GpuNode, workload: Workload) -> int | None:
    """The PID of the pod's process that uses a device."""
    with live.watch.lock:
        for one in live.watch.truth.processes:
            if one.name and one.name.pod == workload.full_name and one.uses and one.ended.start > time.time():
                return one.pid
    return None


def killed_container(live: GpuNode) -> None:
    workload = pod("killed", main=Work(use(160), ONE_GPU))
    with live.running(workload):
        show(live, workload, {"main": [160]})
        first = live.container(workload, "main")
        live.node.signal(first.pid, "KILL")
        live.until(FAST, lambda _: process_of(live, workload) not in (None, first.pid), "new process")
        show(live, workload, {"main": [160]})
    vanish(live, workload)


def out_of_memory(live: GpuNode) -> None:
    command = f"(sleep 4; tail /dev/zero) & {use(170)}"
    limits = {"limits": {WHOLE: "1", "memory": "32Mi"}, "requests": {"memory": "32Mi"}}
    workload = pod("oom", main=Work(command, ONE_GPU, {"resources": limits}))
    with live.running(workload):
        show(live, workload, {"main": [170]}, [FAST])
        time.sleep(6)
        show(live, workload, {"main": [170]}, [FAST])
    vanish(live, workload)


def job(live: GpuNode) -> None:
    workload = Workload("job", {"main": Work(use(180, seconds=8), ONE_GPU)}, {"restartPolicy": "Never"})
    instance = live.apply(workload, ends=True)
    show(live, workload, {"main": [180]}, [FAST])
    vanish(live, workload)
    live.delete(workload, instance)


def same_name(live: GpuNode) -> None:
    """Each instance has another memory, and may get another device."""
    first = pod("again", main=Work(use(190), ONE_GPU))
    instance = live.apply(first)
    show(live, first, {"main": [190]})
    for size in (191, 192):
        workload = pod("again", main=Work(use(size), ONE_GPU))
        instance = live.replace(workload, instance)
        show(live, workload, {"main": [size]}, [FAST])
    live.delete(first, instance)
    live.node.wait_gone(first.name, first.namespace)
    instance = live.apply(first)
    show(live, first, {"main": [190]})
    live.delete(first, instance)
    vanish(live, first)


def leftover(live: GpuNode) -> None:
    """A frozen process does not die with its pod, as one that hangs in the driver does not."""
    workload = pod("leftover", main=Work(use(200), ONE_GPU))
    instance = live.apply(workload)
    show(live, workload, {"main": [200]})
    pid = process_of(live, workload)
    assert pid is not None
    group = next(
        line.split(":", 2)[2]
        for line in live.node.run("cat", f"/proc/{pid}/cgroup").splitlines()
        if ":freezer:" in line
    )
    inner = live.node.path(f"/sys/fs/cgroup/freezer{group}/left")
    live.node.run("mkdir", f"/sys/fs/cgroup/freezer{group}/left")
    live.node.run("sh", "-c", f"echo {pid} >/sys/fs/cgroup/freezer{group}/left/cgroup.procs")
    (inner / "freezer.state").write_text("FROZEN")
    try:
        live.delete(workload, instance)
        live.until(
            FAST,
            lambda text: 200 * MIB in values(text, "gpumap_device_memory_used_by_owner_bytes", owner="gone"),
            "leftover",
        )
    finally:
        (inner / "freezer.state").write_text("THAWED")  # the kubelet has killed it meanwhile
    vanish(live, workload)
    live.node.wait_gone(workload.name, workload.namespace)


def host_process(live: GpuNode) -> None:
    variables = {layout.INSTANCE: "host", layout.MEMORY_MIB: "210", layout.DEVICE: layout.FREE_GPU}
    process = live.node.popen("env", *(f"{name}={value}" for name, value in variables.items()), "sleep", "100000")
    try:
        for agent in FULL:
            live.until(
                agent,
                lambda text: 210 * MIB in values(text, "gpumap_device_memory_used_by_owner_bytes", owner="host"),
                "memory of the host's process",
            )
    finally:
        live.node.end(process)


def steady_cases() -> Iterator[Case]:
    for name, (workload, memory, proves) in STEADY_CASES.items():
        yield Case(name, proves, steady(workload, memory))


COMING_AND_GOING = (
    *steady_cases(),
    Case("init container", "its memory while it runs; the container after it holds the device", init_container),
    Case("crash loop", "its memory, and 0 between two starts; never a foreign process", crash_loop),
    Case("killed container", "its new process", killed_container),
    Case("out of memory", "the process that follows the killed one", out_of_memory),
    Case("job that ends", "its memory, and no row after its end", job),
    Case("re-created under the same name", "each instance's own memory and device", same_name),
    Case("process that outlives its pod", "`gone`", leftover),
    Case("process of the host", "`host`", host_process),
)


# --- what is taken away ---


def still_right(live: GpuNode) -> None:
    """Wait until the page shows every steady pod."""
    for workload, memory, _ in STEADY_CASES.values():
        show(live, workload, memory)


QUIET_SECONDS = 18.0
"""After a disturbance: the judge then checks that pages are complete."""
LONG_QUIET_SECONDS = 35.0
"""The same for a gpumap with the chart's interval."""


def restart_kubelet(live: GpuNode) -> None:
    with live.disturbed("kubelet restarts", lists_old=True):
        live.node.restart_kubelet()
        still_right(live)


def kubelet_away(live: GpuNode) -> None:
    with live.disturbed("kubelet away", lists_old=True):
        with live.node.kubelet_away():
            time.sleep(30)
        still_right(live)


def restart_containerd(live: GpuNode) -> None:
    with live.disturbed("containerd restarts"):
        live.node.restart_containerd()
        still_right(live)


def plugin_away(live: GpuNode) -> None:
    plugin = live.plugins[WHOLE]
    with live.disturbed("plugin away"):
        plugin.stop()
        time.sleep(8)
        plugin.start()
        still_right(live)


def unhealthy(live: GpuNode) -> None:
    plugin = live.plugins[SHARED]
    with live.disturbed("devices unhealthy"):
        plugin.set_unhealthy(*plugin.resource.ids)
        time.sleep(8)
        plugin.set_unhealthy()
        still_right(live)


def everything_killed(live: GpuNode) -> None:
    with live.disturbed("everything killed", lists_old=True):
        live.node.stop_kubelet()
        pids = " ".join(str(one.pid) for one in live.node.containers())
        live.node.run("sh", "-c", f"kill -KILL {pids} || true")  # some end with others
        live.node.restart_containerd()
        live.node.start_kubelet()
        still_right(live)


DISTURBANCES = (
    Case("kubelet restarts", "all of it again", restart_kubelet),
    Case("kubelet away for 30 s", "nothing false; all of it again", kubelet_away),
    Case("containerd restarts", "all of it", restart_containerd),
    Case("device plugin away", "all of it", plugin_away),
    Case("devices unhealthy", "all of it", unhealthy),
    Case("everything killed at once", "all of it again", everything_killed),
)
