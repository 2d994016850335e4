"""MIG devices as the worker reports them, also of a GPU that is partitioned again in the midst of a reading."""

from pathlib import Path

import pytest

from gpumap.model.readings import DeviceMemory, GpuProcess, MigInstance, Uuid
from tests import standin
from tests.standin import Attributes, Code, Driver, Gpu, Placement, Process, Sample
from tests.worker import Start

A, B, C = (f"GPU-00000000-0000-0000-0000-00000000000{letter}" for letter in "abc")
MIG_A, MIG_B, MIG_C = (f"MIG-00000000-0000-0000-0000-00000000001{letter}" for letter in "abc")
GIB = 1 << 30


def test_mig_devices_are_reported_beyond_a_hole(start: Start) -> None:
    """A partitioned GPU reports each MIG device with its own memory and processes, and no utilisation or samples."""
    first = standin.MigInstance(MIG_A, gi=7, memory_used_bytes=GIB, processes=[Process(10)])
    second = standin.MigInstance(MIG_B, gi=9, processes=[])
    gpu = Gpu(A, instances=[first, None, second], samples=[Sample(10, 50)], utilization_gpu=50)
    reading = start().read_one(Driver(gpus=[gpu]))
    assert (reading.partitioned, reading.max_mig_devices) == (True, 7)
    assert reading.refusals == {}
    assert (reading.processes, reading.samples, reading.utilization_ratio) == (None, None, None)
    assert (reading.power_watts, reading.temperatures_celsius["gpu"]) == (60.0, 40.0)
    assert [instance.uuid for instance in reading.instances] == [MIG_A, MIG_B]
    assert reading.instances[0] == MigInstance(
        uuid=Uuid(MIG_A),
        gpu_instance_id=7,
        compute_instance_id=0,
        profile="1g.10gb",
        compute_slices=1,
        memory=DeviceMemory(9728 << 20, GIB, (9728 << 20) - GIB, 0),
        processes=(GpuProcess(10, GIB, "C"),),
    )
    assert reading.instances[1].processes == ()


def test_compute_instances_of_one_gpu_instance_keep_their_own_processes(start: Start) -> None:
    """A list that is the whole GPU instance's is cut down to the compute instance by its ids."""
    attributes = Attributes(gpu_instance_slice_count=3, compute_instance_slice_count=1, memory_size_mib=40192)
    rows = [Process(10, gi=1, ci=0), Process(11, gi=1, ci=1)]
    siblings: list[standin.MigInstance | None] = [
        standin.MigInstance(uuid, gi=1, ci=ci, name="NVIDIA A100-SXM4-80GB", attributes=attributes, processes=rows)
        for ci, uuid in enumerate((MIG_A, MIG_B))
    ]
    first, second = start().read_one(Driver(gpus=[Gpu(A, instances=siblings)])).instances
    assert (first.processes, second.processes) == ((GpuProcess(10, GIB, "C"),), (GpuProcess(11, GIB, "C"),))
    assert (first.profile, first.compute_slices) == ("1c.3g.40gb", 1)


def test_processes_of_mig_devices_come_from_the_list_of_the_gpu(start: Start) -> None:
    """Where MIG handles have no lists, the GPU's own are sorted by their ids; without ids nothing is reported."""
    worker = start()
    instance = standin.MigInstance(MIG_A, gi=1, processes=None)
    gpu = Gpu(A, instances=[instance], processes=[Process(10, gi=1, ci=0), Process(11, gi=2, ci=0)])
    driver = Driver(gpus=[gpu])
    assert worker.read_one(driver).instances[0].processes == (GpuProcess(10, GIB, "C"),)
    gpu.processes = [Process(10), Process(11, gi=1, ci=0)]
    assert worker.read_one(driver).instances[0].processes is None


def test_mig_changes_are_seen_in_the_next_reading(start: Start) -> None:
    """Partitioning, another layout and its end each show at once, though handles and refusals are kept."""
    worker = start()
    gpu = Gpu(A, mig_mode=False)
    driver = Driver(gpus=[gpu])
    assert worker.read_one(driver).utilization_ratio == 0.0
    gpu.mig_mode, gpu.instances = True, [standin.MigInstance(MIG_A)]
    assert [instance.uuid for instance in worker.read_one(driver).instances] == [MIG_A]
    gpu.instances = [None, standin.MigInstance(MIG_B, gi=2, name=None)]
    reading = worker.read_one(driver)
    assert [(instance.uuid, instance.profile) for instance in reading.instances] == [(MIG_B, "1g.10gb")]
    gpu.mig_mode = False
    reading = worker.read_one(driver)
    assert (reading.partitioned, reading.instances, reading.utilization_ratio) == (False, (), 0.0)


def test_a_gpu_instance_reports_its_profile_and_place(start: Start) -> None:
    """Profile number, first memory slice and their count, once for all compute instances of a GPU instance."""
    place = Placement(profile_id=9, start=4, size=4)
    siblings: list[standin.MigInstance | None] = [
        standin.MigInstance(uuid, gi=2, ci=ci, placement=place) for ci, uuid in enumerate((MIG_A, MIG_B))
    ]
    found = start().read_one(Driver(gpus=[Gpu(A, instances=siblings)])).instances
    assert {(one.profile_id, one.placement_start, one.placement_size) for one in found} == {(9, 4, 4)}


def test_a_place_that_is_kept_back_is_absent_without_complaint(start: Start, tmp_path: Path) -> None:
    """Who may not look at GPU instances has no place of theirs, all else of them, and does not ask for it again."""
    calls = tmp_path / "calls"
    worker = start(STANDIN_CALLS=str(calls))
    gpu = Gpu(A, instances=[standin.MigInstance(MIG_A, placement=Placement())])
    driver = Driver(gpus=[gpu], fail={("nvmlDeviceGetGpuInstanceById", 0): Code.NO_PERMISSION})
    for _ in range(4):
        reading = worker.read_one(driver)
        assert reading.refusals == {}
        (instance,) = reading.instances
        assert (instance.profile_id, instance.placement_start, instance.profile) == (None, None, "1g.10gb")
        assert instance.memory is not None
    driver.fail = {("nvmlDeviceGetCount_v2", "*"): Code.UNKNOWN}  # makes it shut down, which writes the calls
    worker.refusal(driver)
    assert standin.read_calls(calls)["nvmlDeviceGetGpuInstanceById"] <= 2


def test_a_device_that_comes_back_under_its_uuid_is_reported_as_it_is_now(start: Start) -> None:
    """Nothing is kept by uuid: profile, slices, ids and place are those of the instance that has it in each reading."""
    worker = start()
    gpu = Gpu(A, instances=[standin.MigInstance(MIG_A, gi=7, placement=Placement(19, 2, 1))])
    driver = Driver(gpus=[gpu])
    worker.read_one(driver)
    half = Attributes(gpu_instance_slice_count=3, compute_instance_slice_count=2, memory_size_mib=40192)
    gpu.instances = [
        standin.MigInstance(
            MIG_A,
            gi=1,
            ci=4,
            name="NVIDIA A100-SXM4-80GB MIG 2c.3g.40gb",
            attributes=half,
            memory_total_bytes=40192 << 20,
            placement=Placement(9, 4, 4),
        )
    ]
    (found,) = worker.read_one(driver).instances
    assert found == MigInstance(
        uuid=Uuid(MIG_A),
        gpu_instance_id=1,
        compute_instance_id=4,
        profile="2c.3g.40gb",
        compute_slices=2,
        memory=DeviceMemory(40192 << 20, 0, 40192 << 20, 0),
        processes=(),
        profile_id=9,
        placement_start=4,
        placement_size=4,
    )


MIG_CALLS = [
    "nvmlDeviceGetMigDeviceHandleByIndex",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetGpuInstanceId",
    "nvmlDeviceGetComputeInstanceId",
    "nvmlDeviceGetName",
    "nvmlDeviceGetAttributes_v2",
    "nvmlGpuInstanceGetInfo",
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3",
]


def half_of(uuid: str, gi: int, used_bytes: int, pid: int, handle: int | None) -> standin.MigInstance:
    return standin.MigInstance(
        uuid,
        gi=gi,
        memory_used_bytes=used_bytes,
        processes=[Process(pid)],
        handle=handle,
        placement=Placement(9, gi, 4),
    )


@pytest.mark.parametrize("handle", [None, 7], ids=["stale", "recycled"])
@pytest.mark.parametrize("call", MIG_CALLS)
def test_no_instance_has_values_of_another_one(start: Start, call: str, handle: int | None) -> None:
    """Whichever call a GPU is partitioned again before: what is reported of a uuid is its own."""
    worker = start()
    second = half_of(MIG_C, 3, 3, 12, None)
    before = Driver(gpus=[Gpu(A, instances=[half_of(MIG_A, 1, 1, 10, handle), second])])
    after = Driver(gpus=[Gpu(A, instances=[half_of(MIG_B, 2, 2, 11, handle), second])])
    worker.read(before)
    before.then = (call, "0.gpu" if call == MIG_CALLS[0] else "0.0"), after
    own = {MIG_A: (1, 1, 10), MIG_B: (2, 2, 11), MIG_C: (3, 3, 12)}
    for expected in ({MIG_C}, {MIG_B, MIG_C}):
        reading = worker.read_one(before) if expected == {MIG_C} else worker.read().gpus[0]
        assert (reading.fault, reading.refusals) == (None, {})
        for one in reading.instances:
            assert one.memory is not None
            assert one.processes is not None
            measured = (one.gpu_instance_id, one.memory.used_bytes, one.processes[0].pid)
            assert (measured, one.placement_start) == (own[one.uuid], own[one.uuid][0])
        assert expected <= {one.uuid for one in reading.instances}


@pytest.mark.parametrize("code", [Code.GPU_IS_LOST, Code.RESET_REQUIRED, Code.INVALID_ARGUMENT, Code.NOT_FOUND])
def test_a_reset_of_a_partitioned_gpu_passes(start: Start, code: int) -> None:
    """While a GPU is reset its calls fail in any way: no reading of its devices then, and the new ones after it."""
    worker = start()
    gpu = Gpu(A, instances=[standin.MigInstance(MIG_A)])
    driver = Driver(gpus=[gpu, Gpu(B, memory_used_bytes=GIB)])
    worker.read(driver)
    driver.fail = {("*", "0.mig"): code}
    during = worker.read(driver).gpus
    assert during[0].instances == ()
    assert during[1].memory is not None
    gpu.instances, driver.fail = [standin.MigInstance(MIG_B, gi=2)], {}
    assert [one.uuid for one in worker.read(driver).gpus[0].instances] == [MIG_B]


def test_an_instance_without_device_nodes_is_denied(start: Start) -> None:
    """Memory that is not permitted makes an instance `denied`; that of its neighbour is reported."""
    gpu = Gpu(A, instances=[standin.MigInstance(MIG_A), standin.MigInstance(MIG_B, gi=2)])
    driver = Driver(gpus=[gpu], fail={("nvmlDeviceGetMemoryInfo_v2", "0.1"): Code.NO_PERMISSION})
    first, second = start().read_one(driver).instances
    assert (first.denied, first.memory is None) == (False, False)
    assert (second.denied, second.memory) == (True, None)


def test_a_process_on_two_compute_instances_is_on_each(start: Start) -> None:
    """The kernel sums memory by the instance that it was opened on, so that each row is a part of its own."""
    siblings: list[standin.MigInstance | None] = [
        standin.MigInstance(uuid, gi=1, ci=ci, processes=[Process(10, GIB * (ci + 1))])
        for ci, uuid in enumerate((MIG_A, MIG_B))
    ]
    first, second = start().read_one(Driver(gpus=[Gpu(A, instances=siblings)])).instances
    assert (first.processes, second.processes) == ((GpuProcess(10, GIB, "C"),), (GpuProcess(10, 2 * GIB, "C"),))


def test_rows_without_ids_in_lists_of_several_compute_instances_are_unattributed(start: Start) -> None:
    """A PID without ids in the lists of two compute instances runs in an unknown one: neither reports processes."""
    nowhere = 0xFFFFFFFF

    def device(uuid: str, gi: int, ci: int, *pids: int) -> standin.MigInstance:
        rows = [Process(pid, GIB, gi=nowhere, ci=nowhere) for pid in pids]
        return standin.MigInstance(uuid, gi=gi, ci=ci, processes=rows)

    worker = start()
    gpu = Gpu(A, instances=[device(MIG_A, 1, 0, 10), device(MIG_B, 1, 1, 10, 11), device(MIG_C, 2, 0, 10)])
    driver = Driver(gpus=[gpu])
    assert [one.processes for one in worker.read_one(driver).instances] == [None, None, (GpuProcess(10, GIB, "C"),)]
    gpu.instances = [device(MIG_A, 1, 0, 10), device(MIG_B, 1, 1, 11)]
    found = [one.processes for one in worker.read_one(driver).instances]
    assert found == [(GpuProcess(10, GIB, "C"),), (GpuProcess(11, GIB, "C"),)]
