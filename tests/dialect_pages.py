"""What tests of dialects share: nodes as the reference documents show them, pages, golden pages, promtool's words."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from gpumap.agent.exposition import Exposition
from gpumap.model.families import Family, NumberedFamilies
from gpumap.model.names import Owner
from gpumap.model.node import ContainerOnDevice, Device, Driver, Gpu, Grant, Process, Use
from gpumap.model.readings import DeviceMemory, MigInstance, Uuid
from gpumap.model.snapshot import Snapshot
from tests.promtool import promtool
from tests.snapshots import empty_node, gpu, with_containers, with_node

GOLDEN = Path(__file__).parent / "dialects"
DOCS = Path(__file__).parent.parent / "docs" / "reference" / "dialects.md"
MIB = 1 << 20
GIB = 1 << 30
WHOLE, GPUSHARE = {"nvidia.com/gpu": 1}, {"aliyun.com/gpu-mem": 4}
"""Slots by resource."""

Rows = dict[tuple[str, ...], float]


def page(families: Iterable[Family | NumberedFamilies], snapshot: Snapshot) -> str:
    return Exposition(families).render(snapshot).decode()


def golden(name: str) -> str:
    return (GOLDEN / f"{name}.prom").read_text(encoding="utf-8")


def rows(families: Iterable[Family | NumberedFamilies], snapshot: Snapshot, name: str, *labels: str) -> Rows:
    """The samples of one family by the values of `labels`, read by Prometheus's own parser; none may be there twice."""
    found: Rows = {}
    seen: set[tuple[tuple[str, str], ...]] = set()
    for family in text_string_to_metric_families(page(families, snapshot)):
        for sample in family.samples:
            key = (("", sample.name), *sorted(sample.labels.items()))
            assert key not in seen, f"{key} is there twice"
            seen.add(key)
            if sample.name == name:
                found[tuple(sample.labels[label] for label in labels)] = sample.value
    return found


def lints(text: str) -> list[str]:
    """What `promtool check metrics` says of a page that it can read, each word once."""
    done = promtool("check", "metrics", page=text)
    assert done.returncode in (0, 3), done.stderr
    return sorted(set(done.stderr.splitlines()))


def documented_lints(dialect: str, families: Iterable[Family | NumberedFamilies]) -> list[str]:
    """Return what promtool reports on a dialect by docs/reference/dialects.md: rows of a table in its section."""
    section = DOCS.read_text(encoding="utf-8").split(f"\n## {dialect}\n")[1].split("\n## ")[0]
    table = section.partition("| `promtool check metrics` reports | of |")[2]
    families = list(families)
    named = {
        "every family": [family.name for family in families],
        "every counter": [one.name for one in families if isinstance(one, Family) and one.kind == "counter"],
    }
    return sorted(
        f"{name} {lint}"
        for lint, of in re.findall(r"^\| `([^`]+)` \| (.+) \|$", table, re.MULTILINE)
        for name in named.get(of, re.findall(r"`(\w+)`", of))
    )


def shuffled(snapshot: Snapshot) -> Snapshot:
    """The same node in another order."""
    node = structs.replace(snapshot.node, gpus=snapshot.node.gpus[::-1], devices=snapshot.node.devices[::-1])
    return replace(snapshot, node=node, containers=snapshot.containers[::-1], processes=snapshot.processes[::-1])


def card(index: int, uuid: str, model: str, total_mib: int = 16160, *, instances: tuple[MigInstance, ...] = ()) -> Gpu:
    """A card that reports its memory. With `instances` it is partitioned."""
    made = gpu(index, partitioned=bool(instances))
    assert made.reading is not None
    memory = DeviceMemory(total_mib * MIB, 0, total_mib * MIB)
    reading = structs.replace(made.reading, uuid=Uuid(uuid), memory=memory, instances=instances)
    return structs.replace(made, uuid=Uuid(uuid), model=model, reading=reading)


def devices(on: Gpu) -> tuple[Device, ...]:
    """A card's MIG devices, or the card."""
    if on.reading is None or not on.partitioned:
        return (Device(on.uuid, on.uuid, on.index, memory=on.reading.memory if on.reading else None),)
    return tuple(
        Device(one.uuid, on.uuid, on.index, mig=one, memory=one.memory, activity=one.activity)
        for one in on.reading.instances
    )


def instance(number: int, gpu_instance: int | None = None) -> MigInstance:
    """A MIG device; those of one GPU instance are compute instances that share its memory."""
    uuid = Uuid(f"MIG-00000000-0000-0000-0000-{number:012d}")
    memory = DeviceMemory(9728 * MIB, 0, 9728 * MIB)
    return MigInstance(uuid, number if gpu_instance is None else gpu_instance, number, "1g.10gb", 1, memory, None)


def used(memory_mib: int | None, sm: float | None = 0.0, processes: int = 1) -> Use:
    memory = None if memory_mib is None else memory_mib * MIB
    return Use(memory, memory, processes, sm, sm, sm, sm)


def holder(
    name: tuple[str, str, str],
    uuid: str,
    use: Use | None = None,
    *,
    slots: dict[str, int] = WHOLE,
    gpus: float | None = 1.0,
    memory_mib: int | None = 16160,
) -> ContainerOnDevice:
    memory = None if memory_mib is None else memory_mib * MIB
    return ContainerOnDevice(*name, Uuid(uuid), grant=Grant(slots, gpus, memory), use=use)


def user(name: tuple[str, str, str], uuid: str, use: Use, owner: Owner = Owner.ASSIGNED) -> ContainerOnDevice:
    return ContainerOnDevice(*name, Uuid(uuid), owner, use=use)


def process(
    pid: int,
    uuid: str,
    memory_mib: int | None,
    name: tuple[str, str, str] | None = None,
    comm: str = "python",
    sm: float | None = 0.25,
    owner: Owner = Owner.ASSIGNED,
) -> Process:
    """A process: of a container that holds its card, if nothing else is said, or of the host."""
    owner = owner if name is not None or owner is not Owner.ASSIGNED else Owner.HOST
    memory = None if memory_mib is None else memory_mib * MIB
    times = (sm, sm and sm / 2, 0.0 if sm is not None else None, 0.0 if sm is not None else None)
    namespace, pod, container = name or (None, None, None)
    return Process(pid, Uuid(uuid), "C", comm, owner, namespace, pod, container, None, memory, *times)


def node(
    name: str,
    cards: Iterable[Gpu],
    containers: Iterable[ContainerOnDevice] = (),
    processes: Iterable[Process] = (),
    *,
    visible: bool = True,
) -> Snapshot:
    """A node with a current List, sorted as the step sorts it."""
    gpus = {one.uuid: one for one in cards}
    leaves = {device.uuid: device for one in gpus.values() for device in devices(one)}
    held = [row.uuid for row in containers if row.holds]
    for uuid in sorted({*held} - leaves.keys()):
        leaves[uuid] = Device(uuid, uuid if uuid in gpus else None, partitioned=uuid in gpus)
    counted = (structs.replace(one, holders=held.count(one.uuid)) for one in leaves.values())
    return with_node(
        replace(empty_node(name), processes=tuple(sorted(processes, key=lambda one: (one.uuid, one.pid)))),
        capabilities={"pid_visibility": visible},
        driver=Driver("418.87.01", "10.1", "10.418.87.01"),
        gpus=tuple(sorted(gpus.values(), key=lambda one: one.index)),
        devices=with_containers(counted, containers),
    )


# --- the node of reference 000: eight TITAN V, on two of which two processes share a card -----------------------------

TITAN = tuple(f"GPU-{index:08d}-78d6-4296-8254-ef3939ec35ec" for index in range(8))
MAIN = ("speech", "recognise-0", "main")
TRAIN, SERVE = ("vision", "train-0", "main"), ("vision", "serve-0", "main")
WEB, BATCH = ("nlp", "web-0", "main"), ("nlp", "batch-0", "main")


def titans() -> Snapshot:
    """The `nvidia-smi` table of reference 000, and the pods that its processes might have been in."""
    cards = [card(index, uuid, "TITAN V", 12066) for index, uuid in enumerate(TITAN)]

    def share(name: tuple[str, str, str], index: int, use: Use | None) -> ContainerOnDevice:
        return holder(name, TITAN[index], use, slots=GPUSHARE, gpus=4 / 11, memory_mib=4096)

    return node(
        "192.168.3.4",
        cards,
        [
            share(MAIN, 0, used(2635)),
            share(TRAIN, 2, used(5133, 0.01)),
            share(SERVE, 2, used(3565)),
            share(WEB, 6, used(3887, 0.09)),
            share(BATCH, 6, used(3887, 0.07)),
            share(("nlp", "idle-0", "main"), 3, used(0, processes=0)),
        ],
        [
            process(159584, TITAN[0], 2635, MAIN, "main", 0.0),
            process(41728, TITAN[2], 5133, TRAIN, "python", 0.01),
            process(152095, TITAN[2], 3565, SERVE, "main", 0.0),
            process(3148, TITAN[6], 3887, WEB, "python3.6", 0.09),
            process(11020, TITAN[6], 3887, BATCH, "python3.6", 0.07),
        ],
    )


# --- nodes of which little is known -----------------------------------------------------------------------------------

HARD = ("team", "pod", "main")
ESCAPED = ("na\\me", 'po"d', "con\ntainer")


def blind() -> Snapshot:
    """A holder without PID visibility: NVML lists a process, of whichever PID namespace."""
    one = card(0, TITAN[0], "TITAN V", 12066)
    seen = process(7, TITAN[0], 700, owner=Owner.UNKNOWN, sm=None)
    return node("n", [one], [holder(HARD, TITAN[0], memory_mib=12066)], [seen], visible=False)


def without_nvml() -> Snapshot:
    """A holder of a whole card while NVML is down: its share is known, its memory is not."""
    return node("n", [], [holder(HARD, TITAN[0], memory_mib=None)])


PARENT = "GPU-aaaaaaaa-0000-0000-0000-000000000000"
SHARED_1, SHARED_2, ALONE = instance(1, 1), instance(2, 1), instance(3)


def partitioned(containers: Iterable[ContainerOnDevice], processes: Iterable[Process] = ()) -> Snapshot:
    """A partitioned card: two compute instances that share a GPU instance's memory, and a MIG device of its own."""
    parent = card(0, PARENT, "A100", 81920, instances=(SHARED_1, SHARED_2, ALONE))
    return node("n", [parent], containers, processes)
