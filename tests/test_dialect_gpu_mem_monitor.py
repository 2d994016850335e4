"""The dialect gpu-mem-monitor: each process's own memory, also where several share a card."""

import pytest
from hypothesis import given
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from gpumap.agent.dialects.gpu_mem_monitor import FAMILIES
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import Owner
from tests.dialect_pages import (
    HARD,
    MAIN,
    MIB,
    SERVE,
    SHARED_1,
    SHARED_2,
    TITAN,
    TRAIN,
    Rows,
    blind,
    card,
    holder,
    node,
    partitioned,
    process,
    rows,
    squatted,
    titans,
    without_nvml,
)
from tests.generated import nodes
from tests.nodes import TestNode

NAME = "pod_used_gpu_mem_MB"
GTX = "GPU-78d64296-8254-ef39-35ec-cb35bd6e6192"
SAMPLE = (
    'pod_used_gpu_mem_MB{app="nvidia-gpu-mem-monitor",app_pid="31563",gpu_name="GeForce GTX 1080 Ti",'
    'gpu_uuid="GPU-78d64296-8254-ef39-35ec-cb35bd6e6192",instance="10.244.19.248:80",job="nvidia-gpu-mem-monitor",'
    'kubernetes_name="nvidia-gpu-mem-monitor",kubernetes_namespace="devops",'
    'pod_name="xmcvt-speech-speed-detect-77b7bbdb96-sjjdq",pod_namespace="xmcvt"} 1267\n'
)
"""Of reference 000, with the value of the original's own readme; what is not below is added by Prometheus."""
OWN_LABELS = ("app_pid", "gpu_name", "gpu_uuid", "pod_name", "pod_namespace")


def told(snapshot: Snapshot, *labels: str) -> Rows:
    return rows(FAMILIES, snapshot, NAME, *(labels or ("app_pid", "pod_namespace", "pod_name")))


def test_the_sample_of_the_original() -> None:
    """The original's own series is the same here: name, labels and value."""
    pod = ("xmcvt", "xmcvt-speech-speed-detect-77b7bbdb96-sjjdq", "main")
    snapshot = node(
        "n", [card(0, GTX, "GeForce GTX 1080 Ti", 11178)], [holder(pod, GTX)], [process(31563, GTX, 1267, pod)]
    )
    (sample,) = next(iter(text_string_to_metric_families(SAMPLE))).samples
    assert told(snapshot, *OWN_LABELS) == {tuple(sample.labels[label] for label in OWN_LABELS): sample.value}


def test_two_pods_on_one_card_have_their_own() -> None:
    """What the original was written for: nobody has the card's value."""
    assert {key[1:]: value for key, value in told(titans()).items() if key[1] == "vision"} == {
        TRAIN[:2]: 5133,
        SERVE[:2]: 3565,
    }


def test_mib_are_cut_off() -> None:
    """As nvidia-smi cuts them off: a byte less than two MiB is one."""
    one = structs.replace(process(7, TITAN[0], None, HARD), memory_bytes=2 * MIB - 1)
    assert list(told(node("n", [card(0, TITAN[0], "TITAN V")], [], [one])).values()) == [1]


@pytest.mark.parametrize("owner", [Owner.HOST, Owner.UNKNOWN, Owner.MPS_SERVER])
def test_a_process_in_no_pod_is_there_without_a_name(owner: Owner) -> None:
    """Memory that no pod uses is seen, under the empty name."""
    snapshot = node("n", [card(0, TITAN[0], "TITAN V")], [], [process(7, TITAN[0], 700, owner=owner)])
    assert told(snapshot) == {("7", "", ""): 700}


def test_who_uses_what_he_was_not_given_is_there_by_name() -> None:
    """A squatter has its own memory; an idle holder has no process, and so no series."""
    assert told(squatted()) == {("7", *MAIN[:2]): 700}


def test_memory_that_is_not_told_is_absent() -> None:
    """Never 0 for unknown."""
    snapshot = node("n", [card(0, TITAN[0], "TITAN V")], [], [process(7, TITAN[0], None, HARD)])
    assert told(snapshot) == {}


def test_nothing_without_pid_visibility_or_nvml() -> None:
    """A PID of another PID namespace is nobody's here."""
    assert told(blind()) == told(without_nvml()) == {}


def test_compute_instances_have_their_own_processes() -> None:
    """A process on two of them is a row on each, with what it has there; no process is shown for its sibling."""
    both = [process(7, SHARED_1.uuid, 100, HARD), process(7, SHARED_2.uuid, 20, HARD), process(8, SHARED_2.uuid, 3)]
    assert told(partitioned([], both), "app_pid", "gpu_uuid", "gpu_name") == {
        ("7", SHARED_1.uuid, "A100"): 100,
        ("7", SHARED_2.uuid, "A100"): 20,
        ("8", SHARED_2.uuid, "A100"): 3,
    }


@given(nodes())
def test_every_process_that_tells_its_memory_is_there_once(truth: TestNode) -> None:
    """On generated nodes: as many rows as processes, nothing added and nothing lost."""
    snapshot = truth.collect()
    seen = snapshot.node.capabilities["pid_visibility"]
    assert told(snapshot, "app_pid", "gpu_uuid") == {
        (str(one.pid), one.uuid): one.memory_bytes >> 20
        for one in snapshot.processes
        if seen and one.memory_bytes is not None
    }
