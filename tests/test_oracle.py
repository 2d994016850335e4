"""The oracle of the laws: a true page and a true map break none, and each lie breaks the law that forbids it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from gpumap.model.terms import ContainerName
from tests import laws
from tests.exposed import Page
from tests.laws import Holding, Pod, Process, Span, Window
from tests.machine import MIB

BUSY, IDLE = ContainerName("ml", "train", "main"), ContainerName("ml", "train", "side")
SQUATTER = ContainerName("ml", "squatter", "main")
FREE, FIRST, SECOND, OTHER = (f"GPU-{number}" for number in range(4))
LONG_AGO, NOW = Span(1000.0, 1001.0), 2000.0
BASE = 64 * MIB


def window(**changes: Any) -> Window:
    """A pod with a busy and an idle container, and one that uses a GPU without an assignment, all since long ago."""
    train, squatter = Pod("ml", "train", "uid-1"), Pod("ml", "squatter", "uid-2")
    resource = {"nvidia.com/gpu": 1}
    found = Window(
        Span(NOW, NOW + 1),
        [train, squatter],
        [
            Holding(train, BUSY, FIRST, resource, 1.0, began=LONG_AGO),
            Holding(train, IDLE, SECOND, resource, 1.0, began=LONG_AGO),
        ],
        [
            Process(11, train, BUSY, {FIRST: 100 * MIB}, LONG_AGO),
            Process(12, train, BUSY, {FIRST: 200 * MIB}, LONG_AGO),
            Process(21, squatter, SQUATTER, {FREE: 70 * MIB}, LONG_AGO),
        ],
        {uuid: uuid for uuid in (FREE, FIRST, SECOND, OTHER)},
        dict.fromkeys((FREE, FIRST, SECOND, OTHER), BASE),
    )
    for process in found.processes:
        process.began = changes.pop(str(process.pid), process.began)
    for pod in found.pods:
        pod.ended = changes.pop(pod.name, pod.ended)
    return replace(found, **changes)


def true_page(at: Window) -> str:
    """The page of a gpumap that knows everything."""
    samples = {one: fact.value for one, fact in laws.facts(at).items()}
    for family, labels in list(samples):
        leaf = dict(labels).get("uuid", "")
        if family == laws.DEVICE_USED:
            samples[laws.key(laws.HOLDERS, uuid=leaf)] = int(leaf in (FIRST, SECOND))
        if family == laws.ALLOCATION:
            samples[laws.SHARE, labels] = 1.0
    samples[laws.key("gpumap_pod_info", namespace="ml", pod="train", uid="uid-1")] = 1
    samples[laws.key("pod_and_gpu_map_info", namespace="ml", pod_name="train", gpu_id=FIRST)] = 1
    families = {family for family, _ in samples}
    return "".join(
        f"# TYPE {family} gauge\n"
        + "".join(
            f"{name}{laws.text_of(labels)} {value}\n" for (name, labels), value in samples.items() if name == family
        )
        for family in sorted(families)
    )


def findings(page: str, at: Window | None = None) -> str:
    read, at = Page(page), at or window()
    return "\n".join([*laws.wrong(read, at), *laws.missing(read, at)])


TRUE_PAGE = true_page(window())


def changed(lines: str, pattern: str, new: str, page: str = TRUE_PAGE) -> str:
    """The page with other text in the lines that match; without them, if the new text is empty."""
    found = []
    count = 0
    for line in page.splitlines():
        if re.search(lines, line) and not line.startswith("#"):
            count += 1
            line = re.sub(pattern, new, line)
        found += [line] if line else []
    assert count, f"no line has {lines}"
    return "\n".join([*found, ""])


def test_a_true_page_is_right() -> None:
    assert findings(TRUE_PAGE) == ""


MEMORY, ZERO = f'{laws.USED}.*"main".*"train".*{FIRST}', f'{laws.USED}.*"side"'
VALUE = r" [\d.]+$"
LIES = {
    "a false zero": (MEMORY, VALUE, " 0", "L10"),
    "the device's memory": (MEMORY, VALUE, f" {364 * MIB}", "L4"),
    "one process too few": (MEMORY, VALUE, f" {100 * MIB}", "L4"),
    "another container's": (ZERO, VALUE, f" {300 * MIB}", "L10"),
    "a process too many": (f"{laws.PROCESSES}.*{FIRST}", VALUE, " 3", "L4"),
    "a false accusation": (laws.UNASSIGNED, "squatter", "train", "L10"),
    "accused on another device": (laws.UNASSIGNED, FREE, FIRST, "L10"),
    "a foreign holder": (f"{laws.ALLOCATION}.*side", "train", "other", "L6"),
    "another device": (f"{laws.ALLOCATION}.*side", SECOND, OTHER, "L6"),
    "slots of another device": (f"{laws.SLOTS}.*side", SECOND, OTHER, "L6"),
    "bytes of gone": (f"{laws.BY_OWNER}.*gone.*{FIRST}", VALUE, f" {100 * MIB}", "L1: gone"),
    "bytes of unassigned": (f"{laws.BY_OWNER}.*unassigned.*{FIRST}", VALUE, f" {300 * MIB}", "L1: unassigned"),
    "no holder": (f"{laws.HOLDERS}.*{FIRST}", VALUE, " 0", "L10"),
    "too many holders": (f"{laws.HOLDERS}.*{FIRST}", VALUE, " 2", "L10"),
    "a sum that is not the whole": (f"{laws.BY_OWNER}.*unaccounted", VALUE, " 7", "L1: the owners"),
    "memory of the past": (f"{laws.DEVICE_USED}.*{FIRST}", VALUE, f" {BASE}", "L6"),
    "a device that never was": (f"{laws.DEVICE_USED}.*{OTHER}", OTHER, "GPU-9", "L6"),
    "another share": (f"{laws.SHARE}.*side", VALUE, " 0.5", "L9"),
    "a GPU that is assigned twice": (f"{laws.SHARE}.*side", VALUE, " 1.5", "are allocated"),
    "another UID": ("gpumap_pod_info", "uid-1", "uid-2", "L4"),
    "a pod that does not exist": ("pod_and_gpu", "train", "other", "L6"),
    "a missing holder": (f"{laws.ALLOCATION}.*side", ".*", "", "L3"),
    "missing memory": (MEMORY, ".*", "", "L3"),
    "a missing zero": (ZERO, ".*", "", "L3"),
    "a missing GPU": (f"{laws.UP}.*{OTHER}", ".*", "", "L3"),
    "a process that is of nobody": (f'{laws.DEVICE_PROCESSES}.*"assigned".*{FIRST}', VALUE, " 1", "L5"),
    "an unknown process": (f"{laws.DEVICE_PROCESSES}.*unknown.*{FIRST}", VALUE, " 1", "L3"),
    "a squatter that is not reported": (laws.UNASSIGNED, ".*", "", "L3"),
    "a source that is down": ("source_up.*kubelet", VALUE, " 0", "L3"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_found(lie: str) -> None:
    """Each false number, and each number that is missing, breaks the law that it should."""
    lines, pattern, new, law = LIES[lie]
    assert law in findings(changed(lines, pattern, new))


@pytest.mark.parametrize(
    ("family", "labels", "value", "law"),
    [
        ("gpumap_container_gpu_memory_peak_bytes", laws.labels_of(SQUATTER, FIRST), 1, "L6"),
        ("gpumap_container_sm_seconds_total", laws.labels_of(SQUATTER, FIRST), 1, "L6"),
        ("gpumap_container_sm_utilization_ratio", laws.labels_of(BUSY, FIRST), 1.5, "L9"),
        ("gpumap_container_sm_utilization_ratio", laws.labels_of(BUSY, "MIG-1"), 0.5, "L3"),
        ("gpumap_collections_total", {}, -1, "L9"),
        ("gpumap_host_gpu_processes", {"uuid": FIRST}, 1, "L1"),
        (laws.UNMATCHED, laws.labels_of(ContainerName("ml", "x", "a"), "") | {"resource": "nvidia.com/gpu"}, 1, "L6"),
    ],
)
def test_another_lie_is_found(family: str, labels: dict[str, str], value: float, law: str) -> None:
    """A sample that a true page does not have: of a container that was never there, or that no node can have."""
    kind = "counter" if family.endswith("_total") else "gauge"
    line = f"{family}{laws.text_of(frozenset(labels.items()))} {value}"
    assert findings(f"{TRUE_PAGE}# TYPE {family} {kind}\n{line}\n", window(earlier=())).startswith(law)


@pytest.mark.parametrize(
    ("kind", "name", "uuid", "law"),
    [
        ("squatter", BUSY, FIRST, "L11: the squatters"),
        ("idle", SQUATTER, FREE, "is idle, and holds nothing"),
        ("idle", BUSY, FIRST, "are not used, and it has"),
    ],
)
def test_a_finding_that_contradicts_its_page_is_found(kind: str, name: ContainerName, uuid: str, law: str) -> None:
    """A squatter that uses nothing, an idle container that holds nothing, more unused memory than there is."""
    labels = {**laws.labels_of(name, uuid), "finding": kind, "reason": "any"}
    samples = [(laws.SINCE, labels, 1), (laws.WASTE, labels, 1 << 50), ("gpumap_finding_judged", {"finding": kind}, 1)]
    samples.append(("gpumap_gpu_memory_total_bytes", {"gpu_uuid": FIRST}, 1 << 30))
    lines = "".join(
        f"# TYPE {family} gauge\n{family}{laws.text_of(frozenset(of.items()))} {value}\n"
        for family, of, value in samples
    )
    assert law in findings(f"{TRUE_PAGE}{lines}")


def test_a_gpu_beside_its_parts_is_found() -> None:
    """L4: a leaf is a GPU or a part of one."""
    leaves = [laws.key(laws.DEVICE, uuid=leaf, gpu_uuid=FIRST)[1] for leaf in (FIRST, "MIG-1")]
    lines = [f"{laws.DEVICE}{laws.text_of(labels)} 1\n" for labels in leaves]
    assert findings(f"{TRUE_PAGE}# TYPE {laws.DEVICE} gauge\n{''.join(lines)}").startswith("L4")


def test_an_id_that_is_nowhere_is_found() -> None:
    """L5: each id of the List is on a device, or counts as unmatched."""
    page = Page(TRUE_PAGE)
    assert list(laws.lost(page, {(BUSY, "nvidia.com/gpu"): 1})) == []
    assert list(laws.lost(page, {(BUSY, "nvidia.com/gpu"): 2, (IDLE, "nvidia.com/gpu"): 1})) != []


def test_a_pod_that_ended_disappears() -> None:
    """The kubelet has some time for it; after that, its rows are false."""
    ended = {"train": Span(NOW - 60, NOW - 50), "11": Span(NOW - 90, NOW - 90)}
    late = window(**ended)
    for one in late.processes[:2]:
        one.ended = Span(NOW - 51, NOW - 50)
    rules = {one.partition(":")[0] for one in laws.wrong(Page(TRUE_PAGE), replace(late, earlier=()))}
    assert {"L4", "L6", "L10"} <= rules
    assert "does not hold" not in "".join(laws.wrong(Page(TRUE_PAGE), window(**ended, listed_since=NOW - 55)))


def test_a_process_that_outlives_its_pod_is_gone() -> None:
    """`gone` is true of it from when its pod was removed, and never before."""
    page = changed(f"{laws.BY_OWNER}.*gone.*{FIRST}", VALUE, f" {300 * MIB}")
    assert "L1: gone" in findings(page)
    assert "L1: gone" not in findings(page, window(train=Span(NOW - 1, NOW + 100)))


def test_a_pod_of_an_old_list_is_not_accused() -> None:
    """A deleted pod may keep its allocation while the kubelet is away. An accusation needs a List of now."""
    page = changed(laws.UNASSIGNED, "squatter", "squatter")
    ended = window(squatter=Span(NOW - 9, NOW - 8), listed_since=NOW - 20)
    assert "not guilty" in findings(page, ended)
    assert "without a List" in findings(page, window(down={"no kubelet"}))


def test_an_allocation_ends_with_its_list() -> None:
    """It may be on the page while the last List is young, and not longer (L6). An old List need not have it."""
    assert "young enough" not in findings(TRUE_PAGE, window(down={"no kubelet"}))
    assert "young enough" in findings(TRUE_PAGE, window(down={"no kubelet"}, has_list=False))
    assert "holders" not in findings(changed(laws.HOLDERS, VALUE, " 0"), window(listed_since=LONG_AGO.start))


def test_a_fault_excuses_its_own_part_only() -> None:
    """While a GPU is lost, its values may not be on the page, and those of the others must be (L7)."""
    lost = window(down={f"lost {FIRST}"}, touched={FIRST, f"lost {FIRST}"})
    assert "is lost" in findings(TRUE_PAGE, lost)
    page = changed(f"({laws.UP}|device|container_gpu).*{FIRST}", ".*", "")
    assert findings(page, lost) == ""
    assert f"{laws.UP}{laws.text_of(laws.key('', gpu_uuid=FIRST)[1])} is absent" in findings(page)
    assert OTHER in findings(changed(f"{laws.DEVICE_USED}.*{OTHER}", ".*", "", page), lost)


def test_sources_that_do_not_answer_are_down() -> None:
    """L6: `gpumap_source_up` shows a failure."""
    for part, source in (("no kubelet", "kubelet"), ("no nvml", "nvml"), ("no proc", "procfs")):
        assert f"L6: {source} is up" in findings(TRUE_PAGE, window(down={part}))


def test_what_is_measured_without_pids_is_found() -> None:
    """L2: without PID visibility nothing is known of a container's use, and no owner but `unknown`."""
    found = findings(TRUE_PAGE, window(down={"no PIDs"}))
    assert "without PIDs" in found
    assert "L2: assigned" in found


def process_on_map(**changes: object) -> dict[str, Any]:
    process = {"pid": 11, "owner": "assigned", "memory_bytes": 100 * MIB, **BUSY._asdict()}
    owners = [{"memory_bytes": 300 * MIB}, {"memory_bytes": 64 * MIB}]
    device: dict[str, Any] = {
        "uuid": FIRST,
        "processes": [process | changes],
        "containers": [BUSY._asdict() | {"grant": {}, "use": {"memory_bytes": 300 * MIB}}],
        "owners": owners,
        "memory": {"used_bytes": 364 * MIB},
    }
    return {"devices": [device], "pods": [{"namespace": "ml", "pod": "train", "uid": "uid-1"}]}


def test_a_true_map_is_right() -> None:
    for changes in ({}, {"owner": "unknown", "namespace": None, "pod": None, "container": None}):
        assert list(laws.wrong_map(process_on_map(**changes), window())) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"pid": 12345},
        {"pid": 12},
        {"owner": "unassigned"},
        {"owner": "gone"},
        {"owner": "host"},
        {"memory_bytes": 1},
        {"pod": "other"},
        {"container": "side"},
    ],
)
def test_a_false_map_is_found(changes: dict[str, object]) -> None:
    """A foreign PID, owner, memory, pod or container of a process."""
    assert list(laws.wrong_map(process_on_map(**changes), window())) != []


def test_a_process_that_is_missing_in_the_map_is_found() -> None:
    """Each process that ran all the time is in the map with its owner, unless a part of the node is broken."""
    found = list(laws.missing_in_map(process_on_map(), window()))
    assert [one.split()[2] for one in found] == ["12", "21"]
    assert list(laws.missing_in_map(process_on_map(), window(touched={"nvml"}))) == []


def test_page_and_map_that_differ_are_found() -> None:
    """They are of one snapshot, so that they have the same memory and the same holders."""
    page, document = Page(TRUE_PAGE), process_on_map()
    assert [one.partition(": map")[0] for one in laws.disagreement(page, document)] == [
        f"L11: {laws.USED}",
        f"L11: {laws.ALLOCATION}",
    ]
    names = {"namespace": "ml", "pod": "x", "container": "a", "uuid": FIRST}
    document["findings"] = [{**names, "finding": "idle", "reason": "no_process", "gpus": 1.0, "memory_bytes": 5}]
    assert "L11: findings: map" in "".join(laws.disagreement(page, document))
    document["devices"][0]["memory"]["used_bytes"] += 1
    assert "L1: the owners" in "".join(laws.disagreement(page, document))


def test_counters_that_fall_are_found() -> None:
    """A counter falls with its process, and a container's counter may begin again after it has expired."""

    def page(collections: int, seconds: float) -> Page:
        row = laws.text_of(frozenset(laws.labels_of(BUSY, FIRST).items()))
        return Page(
            f"# TYPE gpumap_collections_total counter\ngpumap_collections_total {collections}\n"
            f"# TYPE gpumap_container_sm_seconds_total counter\ngpumap_container_sm_seconds_total{row} {seconds}\n"
        )

    counters = laws.Counters(300.0)
    assert not [*counters.check(page(1, 5), NOW), *counters.check(page(2, 6), NOW + 5)]
    assert list(counters.check(page(3, 0), NOW + 10))
    assert list(counters.check(page(2, 1), NOW + 15))
    counters.restarted()
    assert not [*counters.check(page(1, 0), NOW + 20), *counters.check(page(2, 4), NOW + 25)]
    assert list(counters.check(page(3, 2), NOW + 400))
    assert not [*counters.check(page(4, 3), NOW + 405), *counters.check(page(5, 0), NOW + 800)]
