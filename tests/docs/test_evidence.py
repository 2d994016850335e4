"""docs/dev/evidence.md: what each missing source does to each statement is what gpumap does on a node."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import yaml

from gpumap.model.observations import PluginAnswer
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import FINDINGS, Owner
from tests.nodes import GIB, Gpu, Pod, Process, TestNode, gpu_uuid, row

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "dev" / "evidence.md"
RULES = ROOT / "charts" / "gpumap" / "rules" / "alerts.yaml"
IDLE, BUSY, FREE, CROWDED, RESERVED = (gpu_uuid(number) for number in range(5))
HOLDER, TRAINER, NOTEBOOK, SQUATTER, GONE, SHARER = (
    Pod("ml", "holder", {"main": {"nvidia.com/gpu": [IDLE]}}),
    Pod("ml", "trainer", {"main": {"nvidia.com/gpu": [BUSY]}}),
    Pod("ml", "notebook", {"main": {"nvidia.com/gpu": [f"{BUSY}::1"]}}),
    Pod("ml", "squatter", {"main": {}}),
    Pod("ml", "gone", {"main": {}}, listed=False, in_checkpoint=False),
    Pod(
        "ml",
        "sharer",
        {"main": {"aliyun.com/gpu-mem": [f"{CROWDED}-_-{number}" for number in range(8)]}},
        answers={("main", "aliyun.com/gpu-mem"): PluginAnswer(envs=(("NVIDIA_VISIBLE_DEVICES", "3"),))},
    ),
)
KEEPER = Pod("runai-reservation", "keeper", {"main": {"nvidia.com/gpu": [RESERVED]}})
STRANGER = Pod("ml", "stranger", {"main": {}}, listed=False, in_checkpoint=False, has_tree=False, has_links=False)
ODD = Pod("ml", "odd", {"main": {"nvidia.com/gpu": [gpu_uuid(99)]}})
PROCESSES = {
    Owner.ASSIGNED: Process(10, BUSY, TRAINER, memory=40 * GIB, sm=0.5),
    Owner.UNASSIGNED: Process(11, BUSY, SQUATTER),
    Owner.GONE: Process(12, BUSY, GONE),
    Owner.SCHEDULED: Process(17, RESERVED, SQUATTER),
    Owner.HOST: Process(13, BUSY, None),
    Owner.UNKNOWN: Process(14, BUSY, STRANGER, sm=0.1),
    Owner.MPS_SERVER: Process(15, CROWDED, None, comm="nvidia-cuda-mps-server"[:15]),
}
CLIENT = Process(16, CROWDED, SHARER, memory=60 * GIB, types="M+C")
LOST: Mapping[str, Callable[[TestNode], object]] = {
    "List": lambda node: node.down.add("kubelet"),
    "Device checkpoint": lambda node: setattr(node, "checkpoint_readable", False),
    "Log directories": lambda node: setattr(node, "logs_readable", False),
    "Both files": lambda node: node.down.add("pod_identity"),
    "/proc": lambda node: node.down.add("procfs"),
}
"""By the columns of the table. The source is missing since gpumap started."""


def lived(lose: Callable[[TestNode], object]) -> Snapshot:
    """A node with every owner and every finding, without one source."""
    pods = [HOLDER, TRAINER, NOTEBOOK, SQUATTER, GONE, SHARER, ODD, KEEPER]
    gpus = [*map(Gpu, range(5)), Gpu(5, overhead=GIB)]  # the last one has memory without a process
    node = TestNode(gpus, pods, [*PROCESSES.values(), CLIENT])
    node.allocatable = {
        "nvidia.com/gpu": [str(uuid) for uuid in (IDLE, BUSY, FREE, RESERVED)],
        "aliyun.com/gpu-mem": [f"{CROWDED}-_-{number}" for number in range(80)],
    }
    node.rules = replace(node.rules, idle_after_seconds=60.0)
    lose(node)
    for _ in range(5):
        node.collect(50.0)
    return node.collect()


def of_process(owner: Owner) -> Callable[[Snapshot], str]:
    def effect(snapshot: Snapshot) -> str:
        found = [one.owner for one in snapshot.processes if one.pid == PROCESSES[owner].pid]
        return "stays" if found == [owner] else "`unknown`" if found == [Owner.UNKNOWN] else "absent"

    return effect


def if_true(says: Callable[[Snapshot], bool]) -> Callable[[Snapshot], str]:
    return lambda snapshot: "stays" if says(snapshot) else "absent"


def has_zero(snapshot: Snapshot) -> bool:
    found = row(snapshot, HOLDER.full(), IDLE)
    return found is not None and found.use is not None and found.use.memory_bytes == 0


def holders(count: int) -> Callable[[Snapshot], bool]:
    return lambda snapshot: any(
        leaf.uuid == (FREE if count == 0 else IDLE) and leaf.holders == count and not leaf.may_have_more
        for leaf in snapshot.node.devices
    )


def finds(kind: str) -> Callable[[Snapshot], bool]:
    return lambda snapshot: any(one.finding == kind for one in snapshot.node.findings or ())


STATEMENTS: Mapping[str, Callable[[Snapshot], str]] = {
    **{f"owner `{owner}`": of_process(owner) for owner in PROCESSES},
    "owner `unaccounted`": if_true(
        lambda snapshot: any(one.owner is Owner.UNACCOUNTED for leaf in snapshot.node.devices for one in leaf.owners)
    ),
    "`gpumap_container_unassigned_use`": if_true(
        lambda snapshot: any(one.owner is Owner.UNASSIGNED for one in snapshot.containers)
    ),
    "zero of an idle holder": if_true(has_zero),
    "`gpumap_device_holders` 0": if_true(holders(0)),
    "`gpumap_device_holders` 1 and more": if_true(holders(1)),
    **{f"waste: {kind}": if_true(finds(kind)) for kind in FINDINGS[1:] if kind != "stalled"},
}


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without its head."""
    section = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_each_missing_source_has_the_effect_that_the_table_says() -> None:
    """Taken away one after the other, from a node on which every statement is true."""
    whole = lived(lambda _: None)
    assert {name: says(whole) for name, says in STATEMENTS.items()} == dict.fromkeys(STATEMENTS, "stays")
    without = {name: lived(lose) for name, lose in LOST.items()}
    head, _, *table = rows("What each statement needs")
    assert head[2:] == list(LOST)
    effects = {name: [says(snapshot) for snapshot in without.values()] for name, says in STATEMENTS.items()}
    assert {line[0]: [cell or "stays" for cell in line[2:]] for line in table} == {
        name: found for name, found in effects.items() if set(found) != {"stays"}
    }


def test_without_nvml_only_what_the_kubelet_lists_remains() -> None:
    """The page names these statements in a sentence, not in the table."""
    snapshot = lived(lambda node: node.down.add("nvml"))
    assert {name for name, says in STATEMENTS.items() if says(snapshot) != "absent"} == {
        "`gpumap_device_holders` 0",
        "`gpumap_device_holders` 1 and more",
        "waste: unmatched",
    }
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert "Without NVML, only `gpumap_device_holders` and `waste: unmatched` remain." in text


def test_each_alert_that_accuses_is_based_on_a_series_of_the_table() -> None:
    """Each alert about somebody's use is on the page with the series that it needs to be present."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    alerts = {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"] if "alert" in rule}
    _, _, *table = rows("Alerts that accuse")
    for alert, series in (line[:2] for line in table):
        missing = [name for name in re.findall(r"`(gpumap_\w+)`", series) if name not in alerts[alert.strip("`")]]
        assert missing == [], alert
    assert {line[0].strip("`") for line in table} >= {
        alert for alert in alerts if re.search(r"Leftover|Idle|OverGrant|Unassigned|Busy|ContainerXid", alert)
    }
