"""The comparison of a page with the truth: a true page has no finding, and each false number has the right one."""

from __future__ import annotations

import json
import re

import pytest

from tests.cluster import layout
from tests.cluster.device_plugin import Allocations
from tests.cluster.page_check import ALL, Comparison, Window, check_complete, check_map, check_page, read_page
from tests.cluster.truth import NEVER, Container, Holding, Process, Span, Truth
from tests.node import MIB

FREE = layout.FREE_GPU
FIRST, SECOND = layout.WHOLE_GPUS[:2]
BUSY, IDLE = Container("ml", "train", "main"), Container("ml", "train", "side")
SQUATTER = Container("ml", "squatter", "main")
LONG_AGO, NOW = 1000.0, 2000.0

MEMORY_USED = "gpumap_container_gpu_memory_used_bytes"
TRUE_PAGE = "".join(
    f"{line}\n"
    for line in (
        'gpumap_source_up{source="kubelet"} 1',
        'gpumap_source_up{source="nvml"} 1',
        f'gpumap_allocation_info{{namespace="ml",pod="train",container="main",uuid="{FIRST}"}} 1',
        f'gpumap_allocation_info{{namespace="ml",pod="train",container="side",uuid="{SECOND}"}} 1',
        f'gpumap_container_allocated_gpus{{namespace="ml",pod="train",container="main",uuid="{FIRST}"}} 1.0',
        f'gpumap_container_allocated_gpus{{namespace="ml",pod="train",container="side",uuid="{SECOND}"}} 1.0',
        f'{MEMORY_USED}{{namespace="ml",pod="train",container="main",uuid="{FIRST}"}} {300 * MIB}',
        f'{MEMORY_USED}{{namespace="ml",pod="train",container="side",uuid="{SECOND}"}} 0',
        f'{MEMORY_USED}{{namespace="ml",pod="squatter",container="main",uuid="{FREE}"}} {70 * MIB}',
        f'gpumap_container_gpu_processes{{namespace="ml",pod="train",container="main",uuid="{FIRST}"}} 2',
        f'gpumap_container_unassigned_use{{namespace="ml",pod="squatter",container="main",uuid="{FREE}"}} 1',
        f'gpumap_device_memory_used_bytes{{uuid="{FIRST}"}} {364 * MIB}',
        f'gpumap_device_memory_used_bytes{{uuid="{FREE}"}} {134 * MIB}',
        f'gpumap_device_memory_used_by_owner_bytes{{uuid="{FIRST}",owner="assigned"}} {300 * MIB}',
        f'gpumap_device_memory_used_by_owner_bytes{{uuid="{FIRST}",owner="unassigned"}} 0',
        f'gpumap_device_memory_used_by_owner_bytes{{uuid="{FIRST}",owner="gone"}} 0',
        f'gpumap_device_memory_used_by_owner_bytes{{uuid="{FIRST}",owner="unknown"}} 0',
        f'gpumap_device_memory_used_by_owner_bytes{{uuid="{FIRST}",owner="unaccounted"}} {64 * MIB}',
        f'gpumap_device_processes{{uuid="{FIRST}",owner="unknown"}} 0',
        f'gpumap_device_processes{{uuid="{FREE}",owner="unknown"}} 0',
        f'gpumap_device_holders{{uuid="{FIRST}"}} 1',
        f'gpumap_device_holders{{uuid="{SECOND}"}} 1',
        'gpumap_pod_info{namespace="ml",pod="train",uid="uid-1"} 1',
        f'pod_and_gpu_map_info{{gpu_id="{FIRST}",gpu_model="A100",namespace="ml",node="n",pod_name="train"}} 1',
    )
)


def truth() -> Truth:
    """A pod with a busy and an idle container, and one that uses a GPU without an assignment, all since long ago."""
    allocations = Allocations()
    found = Truth(allocations, uids={"train.1": "uid-1", "squatter.1": "uid-2"})
    for container, uuid in ((BUSY, FIRST), (IDLE, SECOND)):
        made = allocations.add(layout.WHOLE, [uuid], [uuid])
        made = type(made)(made.number, made.resource, made.ids, made.leaves, LONG_AGO)
        found.holdings[made.number] = Holding(container, "train.1", made, LONG_AGO)
    began = Span(LONG_AGO, LONG_AGO + 1)
    found.processes = [
        Process(11, BUSY, "train.1", {FIRST: 100 * MIB}, True, began),
        Process(12, BUSY, "train.1", {FIRST: 200 * MIB}, True, began),
        Process(21, SQUATTER, "squatter.1", {FREE: 70 * MIB}, True, began),
    ]
    return found


def comparison(found: Truth, start: float = NOW, end: float = NOW + 1) -> Comparison:
    return Comparison(found, Window(Span(start, end), start - 20))


def findings(page: str, found: Truth | None = None) -> list[str]:
    """The rules that a page breaks."""
    one = comparison(found or truth())
    read = read_page(page, carefully=True)
    return [
        finding.rule for finding in [*check_page(read, one), *check_complete(read, one, Span(NOW - 10, NOW + 1), ALL)]
    ]


def test_a_true_page_is_right() -> None:
    """Nothing is found where everything is as it was."""
    assert findings(TRUE_PAGE) == []


MEMORY = r"(gpumap_container_gpu_memory_used_bytes.*)"
FALSE_PAGES = {
    "a false zero": (MEMORY + r'("train",container="main".*) \d+', r"\1\2 0", "container_memory"),
    "the device's memory": (MEMORY + r'("train",container="main".*) \d+', rf"\1\2 {364 * MIB}", "container_memory"),
    "one process too few": (MEMORY + r'("train",container="main".*) \d+', rf"\1\2 {100 * MIB}", "container_memory"),
    "another container's": (MEMORY + r'("train",container="side".*) 0', rf"\1\2 {300 * MIB}", "container_memory"),
    "a false accusation": (r'(unassigned_use.*)"squatter"(.*)', r'\1"train"\2', "accusations"),
    "accused on another device": (rf"(unassigned_use.*){FREE}", rf"\g<1>{FIRST}", "accusations"),
    "a foreign holder": (r'(allocation_info.*)"train",container="side"', r'\1"other",container="side"', "allocations"),
    "another device": (rf"(allocation_info.*){SECOND}", rf"\g<1>{layout.WHOLE_GPUS[2]}", "allocations"),
    "bytes of `gone`": (r'(owner_bytes.*"gone"}) 0', rf"\1 {100 * MIB}", "owners"),
    "bytes of `unassigned`": (r'(owner_bytes.*"unassigned"}) 0', rf"\1 {300 * MIB}", "owners"),
    "no holder": (r"(device_holders.*) 1", r"\1 0", "holders"),
    "too many holders": (r"(device_holders.*) 1", r"\1 2", "holders"),
    "a sum that is not the whole": (r'(owner_bytes.*"unaccounted"}) \d+', r"\1 0", "devices"),
    "memory of the past": (rf"(device_memory_used_bytes.*{FIRST}.*) \d+", rf"\1 {64 * MIB}", "devices"),
    "another share": (r"(allocated_gpus.*side.*) 1.0", r"\1 0.5", "grants"),
    "another UID": (r"uid-1", "uid-2", "pods"),
    "a pod that does not exist": (r'(pod_and_gpu.*)"train"', r'\1"other"', "other_rows"),
    "a missing holder": (r"gpumap_allocation_info.*\n", "", "complete"),
    "missing memory": (MEMORY + r'"train",container="main".*\n', "", "complete"),
    "a missing zero": (MEMORY + r'"train",container="side".*\n', "", "complete"),
    "an unknown process": (r'(device_processes.*"unknown"}) 0', r"\1 1", "complete"),
    "a squatter that is not reported": (r"gpumap_container_unassigned_use.*\n", "", "complete"),
    "a source that is down": (r'(source_up{source="kubelet"}) 1', r"\1 0", "complete"),
}


@pytest.mark.parametrize("name", FALSE_PAGES)
def test_a_false_page_is_found(name: str) -> None:
    """Each false number, and each number that is missing, breaks the rule that it should."""
    pattern, replacement, rule = FALSE_PAGES[name]
    page, count = re.subn(pattern, replacement, TRUE_PAGE)
    assert count
    assert rule in findings(page)


def test_rows_of_a_pod_that_never_had_the_device_are_found() -> None:
    """Any series of a container, and counters too."""
    for family in ("gpumap_container_gpu_memory_peak_bytes", "gpumap_container_sm_seconds_total"):
        row = f'{family}{{namespace="ml",pod="squatter",container="main",uuid="{FIRST}"}} 1\n'
        assert findings(TRUE_PAGE + row) == ["other_rows"]


def test_a_process_that_comes_may_be_missing() -> None:
    """While a process begins or ends, its container may have its memory or not, and nothing else."""
    found = truth()
    found.processes[1].began = Span(NOW + 0.2, NOW + 0.3)
    page = re.sub(MEMORY + r'("train",container="main".*) \d+', rf"\1\2 {100 * MIB}", TRUE_PAGE)
    assert "container_memory" not in findings(page, found)
    assert "container_memory" not in findings(TRUE_PAGE, found)
    wrong = re.sub(MEMORY + r'("train",container="main".*) \d+', rf"\1\2 {200 * MIB}", TRUE_PAGE)
    assert "container_memory" in findings(wrong, found)


def test_a_zero_needs_a_moment_without_a_process() -> None:
    """A container may show 0 if its process began in the window, not if its process was there all the time."""
    found = truth()
    for process in found.processes[:2]:
        process.began = Span(NOW + 0.2, NOW + 0.3)
    page = re.sub(MEMORY + r'("train",container="main".*) \d+', r"\1\2 0", TRUE_PAGE)
    assert "container_memory" not in findings(page, found)


def test_a_pod_that_ended_disappears() -> None:
    """The kubelet has some time for it; after that, its rows are false."""
    found = truth()
    found.deleted["train.1"] = NOW - 60
    found.emptied["train.1"] = NOW - 50
    for process in found.processes[:2]:
        process.ended = Span(NOW - 51, NOW - 50)
    rules = findings(TRUE_PAGE, found)
    assert {"allocations", "container_memory", "other_rows", "pods"} <= set(rules)
    found.emptied["train.1"] = NOW - 10
    found.deleted["train.1"] = NOW - 10
    assert "allocations" not in findings(TRUE_PAGE, found)


def test_a_process_that_outlives_its_pod_is_gone() -> None:
    """`gone` is true of it from when its pod was removed, and never before."""
    found = truth()
    page = re.sub(r'(owner_bytes.*"gone"}) 0', rf"\1 {300 * MIB}", TRUE_PAGE)
    assert "owners" in findings(page, found)
    found.deleted["train.1"] = NOW - 1
    assert "owners" not in findings(page, found)


def process_on_map(**changes: object) -> str:
    process = {
        "pid": 11,
        "owner": "assigned",
        "memory_bytes": 100 * MIB,
        "namespace": "ml",
        "pod": "train",
        "container": "main",
    }
    holder = {"namespace": "ml", "pod": "train", "container": "main"}
    device = {"uuid": FIRST, "processes": [process | changes], "holders": [holder]}
    return json.dumps({"devices": [device], "pods": [{"namespace": "ml", "pod": "train", "uid": "uid-1"}]})


def test_a_true_map_is_right() -> None:
    """A process is what it is, or unknown."""
    for changes in ({}, {"owner": "unknown", "namespace": None, "pod": None, "container": None}):
        assert check_map(process_on_map(**changes), comparison(truth())) == []


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
    assert check_map(process_on_map(**changes), comparison(truth())) != []


def test_ended_needs_the_last_process() -> None:
    """An instance has ended when it was removed and nothing of it runs."""
    found = truth()
    assert found.ended("train.1") == NEVER
    found.deleted["train.1"] = NOW
    assert found.ended("train.1") == NEVER
    for process in found.processes[:2]:
        process.ended = Span(NOW + 1, NOW + 2)
    found.emptied["train.1"] = NOW + 2
    assert found.ended("train.1") == NOW + 2


@pytest.mark.parametrize(("size_mib", "is_right"), [(300, True), (50, True), (350, False), (0, False)])
def test_a_name_of_two_instances_is_that_of_either(size_mib: int, is_right: bool) -> None:
    """A pod that ends slowly, and its successor of the same name: their memory is never added up."""
    found = truth()
    began = Span(LONG_AGO, LONG_AGO + 1)
    found.processes.append(Process(31, BUSY, "train.2", {FIRST: 50 * MIB}, True, began))
    page = TRUE_PAGE.replace(
        f'container="main",uuid="{FIRST}"}} {300 * MIB}', f'container="main",uuid="{FIRST}"}} {size_mib * MIB}'
    )
    page = page.replace(
        f'{{namespace="ml",pod="train",container="main",uuid="{FIRST}"}} 2',
        f'{{namespace="ml",pod="train",container="main",uuid="{FIRST}"}} 1',
    )
    wrong = [
        one
        for one in check_page(read_page(page), comparison(found))
        if MEMORY_USED in one.what and one.rule == "container_memory"
    ]
    assert (wrong == []) is is_right
