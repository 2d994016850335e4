"""What containers are charged for, by the example: time held, SM time, memory and energy; gaps, and what is left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumap.agent.join.settings import LATE_SECONDS
from gpumap.model.node import ContainerAccount, GpuAccount
from gpumap.model.readings import Uuid
from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import ContainerName
from tests.nodes import GIB, RULES, Gpu, Pod, Process, TestNode, gpu_uuid, mig_uuid

GPU = gpu_uuid(0)


def holder(name: str = "a", uuid: str = GPU, resource: str = "nvidia.com/gpu") -> Pod:
    """A pod with one container, main, which holds a device."""
    return Pod("ml", name, {"main": {resource: [uuid]}})


def one_gpu(*pods: Pod, millijoules: int | None = 1000) -> TestNode:
    shared = [f"{GPU}::{n}" for n in range(4)]
    return TestNode([Gpu(0, millijoules=millijoules)], list(pods), registered={"nvidia.com/gpu.shared": shared})


def found(snapshot: Snapshot, name: ContainerName, uuid: Uuid = GPU) -> ContainerAccount | None:
    return next((one for one in snapshot.node.accounts if (one.name, one.uuid) == (name, uuid)), None)


def account(snapshot: Snapshot, name: ContainerName, uuid: Uuid = GPU) -> ContainerAccount:
    one = found(snapshot, name, uuid)
    assert one is not None
    return one


def gpu_account(snapshot: Snapshot, uuid: Uuid = GPU) -> GpuAccount:
    return next(one for one in snapshot.node.gpu_accounts if one.uuid == uuid)


def test_counters_begin_at_0() -> None:
    """A container's counters are 0 when it is first seen: increase() sees all that comes."""
    pod = holder()
    snapshot = one_gpu(pod).collect()
    assert account(snapshot, pod.full()) == ContainerAccount(*pod.full(), GPU, 0.0, 0.0, 0.0, 0.0)
    assert gpu_account(snapshot) == GpuAccount(GPU, 0.0, 0.0)


def test_what_is_charged_in_real_time() -> None:
    """Time held and memory as they were last read, SM time as it was measured, over the seconds that truly passed."""
    pod = holder()
    node = one_gpu(pod)
    node.processes.append(Process(100, GPU, pod, memory=GIB, sm=0.25))
    node.collect()
    node.processes[0].sm = 0.5
    node.processes[0].memory = 3 * GIB
    node.gpus[0].millijoules = 4000
    charged = account(node.collect(7.5), pod.full())
    assert charged == ContainerAccount(*pod.full(), GPU, 7.5, 3.75, 7.5 * GIB, 3.0)
    again = account(node.collect(2.0), pod.full())
    assert again == ContainerAccount(*pod.full(), GPU, 9.5, 4.75, 13.5 * GIB, 3.0)


def test_the_idle_part_is_unattributed_while_sm_is_unknown() -> None:
    """An MPS client without a sample may compute. The busy part that is known is shared all the same."""
    a, b = (holder(name, f"{GPU}::{n}", "nvidia.com/gpu.shared") for n, name in enumerate("ab"))
    node = one_gpu(a, b, millijoules=0)
    node.processes += [Process(100, GPU, None, types="M+C"), Process(101, GPU, b, sm=0.25)]
    node.collect()
    node.gpus[0].millijoules = 1_000_000
    snapshot = node.collect()
    assert account(snapshot, b.full()).energy_joules == 250.0
    assert account(snapshot, a.full()).energy_joules == 0.0


_PARTS = st.lists(st.sampled_from([0.0, 0.01, 0.2, 0.5, 0.9, 1.0]), min_size=3, max_size=3)


@given(_PARTS, st.integers(0, 2), st.integers(0, 10**7))
def test_energy_is_busy_and_idle(sm: list[float], holders: int, millijoules: int) -> None:
    """Each container pays its part of the busy time, and its share of the idle time. Nothing is lost."""
    pods = [holder(name, f"{GPU}::{n}", "nvidia.com/gpu.shared") for n, name in enumerate("ab"[:holders])]
    node = one_gpu(*pods, millijoules=0)
    node.allocatable = {"nvidia.com/gpu.shared": [f"{GPU}::{n}" for n in range(4)]}
    owners: list[Pod | None] = [*pods, *[None] * (3 - holders)]
    node.processes += [Process(100 + n, GPU, pod, sm=sm[n]) for n, pod in enumerate(owners)]
    node.collect()
    node.gpus[0].millijoules = millijoules
    snapshot = node.collect()
    busy = min(sum(sm), 1.0)
    charged = 0.0
    for n, pod in enumerate(pods):
        of_busy = busy * sm[n] / sum(sm) if sum(sm) else 0.0
        joules = account(snapshot, pod.full()).energy_joules or 0.0
        assert joules == pytest.approx(millijoules * (of_busy + (1 - busy) * 0.25) / 1000, abs=0.0011)
        charged += joules
    assert (gpu_account(snapshot).energy_unattributed_joules or 0.0) + charged == pytest.approx(millijoules / 1000)


def test_sm_beyond_1_counts_whole_for_energy() -> None:
    """A container with processes that add up to more than 1 has at most 1 second a second, and its part of energy."""
    a, b = (holder(name, f"{GPU}::{n}", "nvidia.com/gpu.shared") for n, name in enumerate("ab"))
    node = one_gpu(a, b)
    node.processes += [Process(100 + n, GPU, a, sm=0.75) for n in range(2)]
    node.processes.append(Process(110, GPU, b, sm=0.5))
    node.collect()
    node.gpus[0].millijoules = 5000
    snapshot = node.collect(4.0)
    assert account(snapshot, a.full()).sm_seconds == 4.0
    assert [account(snapshot, pod.full()).energy_joules for pod in (a, b)] == [3.0, 1.0]


def test_a_counter_exists_while_its_measure_is_lost() -> None:
    """Without PID visibility, charges remain, and only the time held grows."""
    pod = holder()
    node = one_gpu(pod)
    node.processes.append(Process(100, GPU, pod, memory=GIB, sm=1.0))
    node.collect()
    before = account(node.collect(), pod.full())
    node.visible = False
    node.gpus[0].millijoules = 9000
    node.collect()
    after = account(node.collect(), pod.full())
    assert (after.sm_seconds, after.energy_joules) == (before.sm_seconds, before.energy_joules)
    assert after.memory_byte_seconds == 10.0 * GIB, "the memory as last read, for one stretch more"
    assert after.allocated_gpu_seconds == 15.0


def test_mig_devices_are_charged_for_time_and_memory() -> None:
    """A MIG device has its share of the GPU's time; its energy is not distinguished."""
    leaf = mig_uuid(0, 1, 0)
    pod = holder("a", leaf, "nvidia.com/mig-3g.40gb")
    node = TestNode([Gpu(0, mig=[(1, 0, 3), (2, 0, 4)], millijoules=0)], [pod])
    node.processes.append(Process(100, leaf, pod, memory=GIB))
    node.collect()
    node.gpus[0].millijoules = 500
    snapshot = node.collect(7.0)
    charged = account(snapshot, pod.full(), leaf)
    assert charged == ContainerAccount(*pod.full(), leaf, 7.0 * (3 / 7), None, 7.0 * GIB, None)
    assert gpu_account(snapshot).energy_unattributed_joules == 0.5


@pytest.mark.parametrize("fault", ["lost", "hung"])
def test_a_fault_is_a_gap(fault: str) -> None:
    """From the last good reading of a GPU to the next nothing is charged; the gap grows while it lasts."""
    pod = holder()
    node = one_gpu(pod)
    node.processes.append(Process(100, GPU, pod, memory=GIB, sm=1.0))
    node.collect()
    before = account(node.collect(), pod.full())
    node.gpus[0].fault = fault
    assert gpu_account(node.collect(3.0)).gap_seconds == 3.0
    assert gpu_account(node.collect(2.0)).gap_seconds == 5.0
    node.gpus[0].fault, node.gpus[0].millijoules = None, 7000
    snapshot = node.collect(1.0)
    assert account(snapshot, pod.full()) == before
    assert gpu_account(snapshot) == GpuAccount(GPU, 6.0, 6.0)
    assert account(node.collect(), pod.full()).allocated_gpu_seconds == 10.0


def test_time_that_no_samples_covered_before_a_gap_is_not_charged_after_it() -> None:
    """Samples of later work would count for it: the SM time of that second is lost."""
    pod = holder()
    node = one_gpu(pod)
    node.processes.append(Process(100, GPU, pod, sm=1.0))
    node.collect()
    node.gpus[0].sampled_seconds = 0.0
    assert account(node.collect(1.0), pod.full()).sm_seconds == 0.0
    node.gpus[0].fault = "lost"
    node.collect(2.0)
    node.gpus[0].fault, node.gpus[0].sampled_seconds = None, 10.0
    node.collect(2.0)
    assert account(node.collect(2.0), pod.full()).sm_seconds == 2.0


def test_sleep_is_a_gap() -> None:
    """The time for which the machine was suspended, and what passed around it, is not charged."""
    pod = holder()
    node = one_gpu(pod)
    node.collect()
    node.asleep += 3600.0
    snapshot = node.collect(2.0)
    assert account(snapshot, pod.full()).allocated_gpu_seconds == 0.0
    assert gpu_account(snapshot).gap_seconds == 3602.0


def test_a_long_silence_is_a_gap() -> None:
    """Two readings that are farther apart than --stale-after, and a little, say too little of the time between."""
    pod = holder()
    node = one_gpu(pod)
    node.collect()
    assert account(node.collect(RULES.stale_after_seconds), pod.full()).allocated_gpu_seconds == 60.0
    snapshot = node.collect(RULES.stale_after_seconds + LATE_SECONDS + 0.5)
    assert account(snapshot, pod.full()).allocated_gpu_seconds == 60.0
    assert gpu_account(snapshot).gap_seconds == 65.5


def test_energy_of_a_reloaded_driver() -> None:
    """A counter that went back counts from 0, as Prometheus's increase() does; that first part is unattributed."""
    pod = holder()
    node = one_gpu(pod)
    node.processes.append(Process(100, GPU, pod, sm=0.5))
    node.collect()
    node.gpus[0].millijoules = 300
    snapshot = node.collect()
    assert account(snapshot, pod.full()).energy_joules == 0.0
    assert gpu_account(snapshot).energy_unattributed_joules == 0.3
    node.gpus[0].millijoules = 800
    assert account(node.collect(), pod.full()).energy_joules == 0.5


@pytest.mark.parametrize(
    ("enforced", "limits"), [(700.0, {}), (None, {"default": 700.0, "min": 200.0}), (300.0, {"max": 700.0})]
)
def test_a_gpu_may_exceed_its_power_limit_for_a_moment(enforced: float | None, limits: dict[str, float]) -> None:
    """Peaks, and readings that come early or late, are charged; more than twice the largest known limit is not."""
    pod = holder()
    node = one_gpu(pod, millijoules=0)
    node.gpus[0].watts_max, node.gpus[0].watts_limits = enforced, limits
    node.collect()
    most = 1_400_000 * (5 + int(LATE_SECONDS))
    node.gpus[0].millijoules = most
    assert account(node.collect(), pod.full()).energy_joules == 14000.0
    node.gpus[0].millijoules += most + 1
    assert account(node.collect(), pod.full()).energy_joules == 14000.0


@pytest.mark.parametrize(("utilization", "joules"), [(None, 2.0), (0.0, 2.0), (0.25, None)])
def test_a_gpu_that_is_busy_is_not_idle(utilization: float | None, joules: float | None) -> None:
    """If the GPU computes and no sample names a process, its energy is unattributed: SM time was never known."""
    pod = holder("a", f"{GPU}::0", "nvidia.com/gpu.shared")
    node = one_gpu(pod)
    node.gpus[0].utilization = utilization
    node.collect()
    node.gpus[0].millijoules = 9000
    assert account(node.collect(), pod.full()).energy_joules == joules


def test_energy_of_a_time_without_readings_is_unattributed() -> None:
    """Energy of a time without the counter is charged to no container: their SM time of then is unknown."""
    pod = holder()
    node = one_gpu(pod)
    node.collect()
    node.gpus[0].millijoules = None
    node.collect()
    node.gpus[0].millijoules = 5000
    snapshot = node.collect()
    assert account(snapshot, pod.full()).energy_joules == 0.0
    assert gpu_account(snapshot).energy_unattributed_joules == 4.0


def test_counters_exist_for_five_minutes_after_the_container() -> None:
    """The last increase of a container that is gone can still be scraped; then its counters go."""
    pod = holder()
    node = one_gpu(pod)
    node.collect()
    node.pods.clear()
    assert account(node.collect(), pod.full()).allocated_gpu_seconds == 5.0, "it held the GPU until this reading"
    for _ in range(5):
        assert account(node.collect(55.0), pod.full()).allocated_gpu_seconds == 5.0
    assert found(node.collect(55.0), pod.full()) is None


def test_a_holder_that_the_list_has_no_more_expires_without_nvml() -> None:
    """While NVML is down, the List still shows which container released a GPU."""
    pod = holder()
    node = one_gpu(pod)
    node.collect()
    node.down = {"nvml"}
    node.pods.clear()
    for _ in range(5):
        assert account(node.collect(55.0), pod.full())
    assert found(node.collect(55.0), pod.full()) is None


def test_a_user_without_a_grant_is_kept_for_an_hour_without_nvml() -> None:
    """Its process cannot be seen then; after an hour its counters go all the same."""
    pod = holder("a", f"{GPU}::0", "nvidia.com/gpu.shared")
    other = Pod("ml", "b", {"main": {}})
    node = one_gpu(pod)
    node.pods.append(other)
    node.processes.append(Process(100, GPU, other, sm=0.5))
    node.collect()
    node.down = {"nvml"}
    for _ in range(59):
        assert account(node.collect(60.0), other.full())
    assert found(node.collect(60.0), other.full()) is None


@pytest.mark.parametrize("source", ["kubelet", "nvml"])
def test_counters_do_not_expire_while_ends_are_unknown(source: str) -> None:
    """Counters of a container stand for as long as the kubelet's List or NVML is missing."""
    pod = holder()
    node = one_gpu(pod)
    node.collect()
    node.down = {source}
    for _ in range(12):
        snapshot = node.collect(55.0)
    assert account(snapshot, pod.full()).allocated_gpu_seconds is not None


def test_a_successor_goes_on_from_the_sum() -> None:
    """A pod of the same name, whatever its UID, has the series, and so the sum; time without either is not charged."""
    pod = holder()
    node = one_gpu(pod)
    node.collect()
    node.pods.clear()
    node.collect()
    node.collect()
    pod.generation += 1
    node.pods.append(pod)
    assert account(node.collect(), pod.full()).allocated_gpu_seconds == 5.0
    assert account(node.collect(), pod.full()).allocated_gpu_seconds == 10.0


def test_a_gpu_that_was_taken_away_goes_on_when_it_is_back() -> None:
    """A GPU that left NVML is not reported."""
    node = one_gpu()
    gpu = node.gpus[0]
    node.collect()
    node.gpus.clear()
    assert node.collect().node.gpu_accounts == ()
    node.gpus.append(gpu)
    gpu.millijoules = 4000
    assert gpu_account(node.collect()) == GpuAccount(GPU, 3.0, 0.0)


def test_a_returning_container_has_no_energy_of_its_absence() -> None:
    """A container that was not there at the last collection gets nothing of what was used since, though it computes."""
    pod = holder()
    node = one_gpu(pod)
    node.processes.append(Process(100, GPU, pod, sm=1.0))
    node.collect()
    node.pods, node.processes = [], []
    node.collect()
    node.pods, node.processes = [pod], [Process(101, GPU, pod, sm=1.0)]
    node.gpus[0].millijoules = 6000
    snapshot = node.collect()
    assert account(snapshot, pod.full()).energy_joules == 0.0
    assert gpu_account(snapshot).energy_unattributed_joules == 5.0


def test_the_example_of_the_documentation() -> None:
    """docs/explanation/accounting.md's example: A holds three quarters of a GPU, B one; then no container computes."""
    quarters = [f"{GPU}::{n}" for n in range(4)]
    a = Pod("ml", "a", {"main": {"nvidia.com/gpu.shared": quarters[:3]}})
    b = Pod("ml", "b", {"main": {"nvidia.com/gpu.shared": quarters[3:]}})
    node = one_gpu(a, b, millijoules=0)
    node.processes += [Process(100, GPU, a, sm=0.6), Process(101, GPU, b, sm=0.2), Process(102, GPU, None, sm=0.2)]
    node.collect()
    node.gpus[0].millijoules = 3_000_000
    snapshot = node.collect(10.0)
    charged = [account(snapshot, pod.full()) for pod in (a, b)]
    assert [one.allocated_gpu_seconds for one in charged] == [7.5, 2.5]
    assert [one.sm_seconds for one in charged] == [6.0, 2.0]
    assert [one.energy_joules for one in charged] == pytest.approx([1800.0, 600.0], abs=0.001)
    assert gpu_account(snapshot).energy_unattributed_joules == pytest.approx(600.0, abs=0.002)
    for process in node.processes:
        process.sm = 0.0
    node.gpus[0].millijoules = 3_700_000
    idle = node.collect(10.0)
    more = [
        (account(idle, pod.full()).energy_joules or 0) - (old.energy_joules or 0)
        for pod, old in zip((a, b), charged, strict=True)
    ]
    assert more == pytest.approx([525.0, 175.0])
