"""What happens on the live node: each case changes it, and waits until gpumap's page shows what is true then.

The cases of a group run at once, and the groups one after another. While they run, every page is recorded, and judged
afterwards: a case needs to look only for what must appear.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.cluster import layout
from tests.cluster.layout import GPUSHARE, MIG, SHARED, WHOLE
from tests.cluster.workloads import IDLE, Work, Workload, use
from tests.cluster.world import World, values
from tests.node import MIB

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
    run: Callable[[World], None]


def show(world: World, workload: Workload, memory: Mapping[str, Sequence[int]], agents: Sequence[str] = FULL) -> None:
    """Wait until the page has the memory of each container (MiB on each device), and nothing else of the pod."""

    def holds(text: str) -> bool:
        found = {
            name: sorted(values(text, MEMORY, namespace=workload.namespace, pod=workload.full_name, container=name))
            for name in workload.containers
        }
        return found == {name: sorted(size * MIB for size in memory.get(name, ())) for name in workload.containers}

    for agent in agents:
        world.until(agent, holds, f"{workload.name} with {dict(memory)} MiB")


def vanish(world: World, workload: Workload) -> None:
    """Wait until the page has no gauge of the pod."""
    for agent in FULL:
        world.until(
            agent,
            lambda text: (
                not values(text, "gpumap_allocation_info", pod=workload.full_name)
                and not values(text, MEMORY, pod=workload.full_name)
            ),
            f"end of {workload.name}",
        )


# --- pods that come, run and go ---

STEADY: Mapping[Workload, Mapping[str, Sequence[int]]] = {}


def steady(workload: Workload, memory: Mapping[str, Sequence[int]]) -> Callable[[World], None]:
    """A pod that stays until the end of all cases."""

    def run(world: World) -> None:
        world.apply(workload)
        show(world, workload, memory)

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


def init_container(world: World) -> None:
    workload = pod("init", init=Work(use(130, seconds=6), ONE_GPU), main=Work(use(140), ONE_GPU))
    with world.running(workload):
        world.until(
            FAST,
            lambda text: values(text, MEMORY, pod=workload.full_name, container="init") == [130 * MIB],
            "memory of the init container",
        )
        show(world, workload, {"main": [140]})
    vanish(world, workload)


def crash_loop(world: World) -> None:
    workload = pod("crashing", main=Work(f"{use(150, seconds=3)}", ONE_GPU))
    pid = process_of(world, workload)
    with world.running(workload):
        for _ in range(2):
            show(world, workload, {"main": [150]}, [FAST])
            show(world, workload, {"main": [0]}, [FAST])
    assert pid is None
    vanish(world, workload)


def process_of(world: World, workload: Workload) -> int | None:
    """The PID of the pod's process that uses a device."""
    with world.watch.lock:
        for one in world.watch.truth.processes:
            if one.name and one.name.pod == workload.full_name and one.uses and one.ended.start > time.time():
                return one.pid
    return None


def killed_container(world: World) -> None:
    workload = pod("killed", main=Work(use(160), ONE_GPU))
    with world.running(workload):
        show(world, workload, {"main": [160]})
        first = world.container(workload, "main")
        world.node.signal(first.pid, "KILL")
        world.until(FAST, lambda _: process_of(world, workload) not in (None, first.pid), "new process")
        show(world, workload, {"main": [160]})
    vanish(world, workload)


def out_of_memory(world: World) -> None:
    command = f"(sleep 4; tail /dev/zero) & {use(170)}"
    limits = {"limits": {WHOLE: "1", "memory": "32Mi"}, "requests": {"memory": "32Mi"}}
    workload = pod("oom", main=Work(command, ONE_GPU, {"resources": limits}))
    with world.running(workload):
        show(world, workload, {"main": [170]}, [FAST])
        time.sleep(6)
        show(world, workload, {"main": [170]}, [FAST])
    vanish(world, workload)


def job(world: World) -> None:
    workload = Workload("job", {"main": Work(use(180, seconds=8), ONE_GPU)}, {"restartPolicy": "Never"})
    instance = world.apply(workload, ends=True)
    show(world, workload, {"main": [180]}, [FAST])
    vanish(world, workload)
    world.delete(workload, instance)


def same_name(world: World) -> None:
    """Each instance has another memory, and may get another device."""
    first = pod("again", main=Work(use(190), ONE_GPU))
    instance = world.apply(first)
    show(world, first, {"main": [190]})
    for size in (191, 192):
        workload = pod("again", main=Work(use(size), ONE_GPU))
        instance = world.replace(workload, instance)
        show(world, workload, {"main": [size]}, [FAST])
    world.delete(first, instance)
    world.node.wait_gone(first.name, first.namespace)
    instance = world.apply(first)
    show(world, first, {"main": [190]})
    world.delete(first, instance)
    vanish(world, first)


def leftover(world: World) -> None:
    """A frozen process does not die with its pod, as one that hangs in the driver does not."""
    workload = pod("leftover", main=Work(use(200), ONE_GPU))
    instance = world.apply(workload)
    show(world, workload, {"main": [200]})
    pid = process_of(world, workload)
    assert pid is not None
    group = next(
        line.split(":", 2)[2]
        for line in world.node.run("cat", f"/proc/{pid}/cgroup").splitlines()
        if ":freezer:" in line
    )
    inner = world.node.path(f"/sys/fs/cgroup/freezer{group}/left")
    world.node.run("mkdir", f"/sys/fs/cgroup/freezer{group}/left")
    world.node.run("sh", "-c", f"echo {pid} >/sys/fs/cgroup/freezer{group}/left/cgroup.procs")
    (inner / "freezer.state").write_text("FROZEN")
    try:
        world.delete(workload, instance)
        world.until(
            FAST,
            lambda text: 200 * MIB in values(text, "gpumap_device_memory_used_by_owner_bytes", owner="gone"),
            "leftover",
        )
    finally:
        (inner / "freezer.state").write_text("THAWED")  # the kubelet has killed it meanwhile
    vanish(world, workload)
    world.node.wait_gone(workload.name, workload.namespace)


def host_process(world: World) -> None:
    variables = {layout.INSTANCE: "host", layout.MEMORY_MIB: "210", layout.DEVICE: layout.FREE_GPU}
    process = world.node.popen("env", *(f"{name}={value}" for name, value in variables.items()), "sleep", "100000")
    try:
        for agent in FULL:
            world.until(
                agent,
                lambda text: 210 * MIB in values(text, "gpumap_device_memory_used_by_owner_bytes", owner="host"),
                "memory of the host's process",
            )
    finally:
        world.node.end(process)


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


def still_right(world: World) -> None:
    """Wait until the page shows every steady pod."""
    for workload, memory, _ in STEADY_CASES.values():
        show(world, workload, memory)


QUIET_SECONDS = 18.0
"""After a disturbance: the judge then checks that pages are complete."""
LONG_QUIET_SECONDS = 35.0
"""The same for a gpumap with the chart's interval."""


def restart_kubelet(world: World) -> None:
    with world.disturbed("kubelet restarts", lists_old=True):
        world.node.restart_kubelet()
        still_right(world)


def kubelet_away(world: World) -> None:
    with world.disturbed("kubelet away", lists_old=True):
        with world.node.kubelet_away():
            time.sleep(30)
        still_right(world)


def restart_containerd(world: World) -> None:
    with world.disturbed("containerd restarts"):
        world.node.restart_containerd()
        still_right(world)


def plugin_away(world: World) -> None:
    plugin = world.plugins[WHOLE]
    with world.disturbed("plugin away"):
        plugin.stop()
        time.sleep(8)
        plugin.start()
        still_right(world)


def unhealthy(world: World) -> None:
    plugin = world.plugins[SHARED]
    with world.disturbed("devices unhealthy"):
        plugin.set_unhealthy(*plugin.resource.ids)
        time.sleep(8)
        plugin.set_unhealthy()
        still_right(world)


def everything_killed(world: World) -> None:
    with world.disturbed("everything killed", lists_old=True):
        world.node.stop_kubelet()
        pids = " ".join(str(one.pid) for one in world.node.containers())
        world.node.run("sh", "-c", f"kill -KILL {pids} || true")  # some end with others
        world.node.restart_containerd()
        world.node.start_kubelet()
        still_right(world)


DISTURBANCES = (
    Case("kubelet restarts", "all of it again", restart_kubelet),
    Case("kubelet away for 30 s", "nothing false; all of it again", kubelet_away),
    Case("containerd restarts", "all of it", restart_containerd),
    Case("device plugin away", "all of it", plugin_away),
    Case("devices unhealthy", "all of it", unhealthy),
    Case("everything killed at once", "all of it again", everything_killed),
)
