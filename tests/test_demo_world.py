"""The simulated node is the same for everyone who looks at the same moment, and obeys what real nodes obey."""

import base64
import json
import re

import pytest

from gpumap.agent.sources.checkpoint import parse_plugin_answer
from gpumap.agent.sources.dra import parse_prepared
from gpumap.lab.demo.scenario import Scenario, default_scenario, parse_scenario
from gpumap.lab.demo.world import World, world
from gpumap.model.observations import DeviceId, PluginAnswer, PreparedDevice
from gpumap.model.readings import GpuProcess, GpuReading, MigInstance

GPUS = """
repeat: 100s
gpus:
  - {model: H100, memory: 80GiB}
  - {model: H100, memory: 80GiB, mig: [{profile: 3g.40gb, compute: [1c.3g.40gb, 2c.3g.40gb]}]}
"""
JOB = """
pods:
  - name: job
    from: 10s
    until: 40s
    containers:
      - {name: warm, init: true, gpus: [0]}
      - {name: main, gpus: [0], processes: [{memory: {from: 1GiB, to: 3GiB, over: 20s}, sm: 50%}]}
"""


@pytest.fixture(scope="module", name="default")
def load_default() -> Scenario:
    return default_scenario()


def listed(now: World) -> set[str]:
    return {pod.name for pod in now.pods}


def leaves(now: World) -> list[GpuReading | MigInstance]:
    """Every GPU and MIG device."""
    return [*now.gpus, *(instance for gpu in now.gpus for instance in gpu.instances)]


def processes(now: World) -> list[GpuProcess]:
    return [row for leaf in leaves(now) for row in leaf.processes or ()]


def trees_of(now: World) -> list[str]:
    """The log directories of pods."""
    return [entry.path for entry in now.logs if re.fullmatch(r"var/log/pods/[^/]+", entry.path)]


def test_processes_never_use_more_than_their_device(default: Scenario) -> None:
    """On each leaf the processes' memory fits in what is used, and used, reserved and free make up the total."""
    for second in range(0, 330, 3):
        now = world(default, second)
        for leaf in leaves(now):
            if (memory := leaf.memory) is None:
                assert isinstance(leaf, GpuReading)
                assert leaf.fault
                continue
            assert sum(row.used_memory_bytes or 0 for row in leaf.processes or ()) <= memory.used_bytes
            assert memory.used_bytes + memory.free_bytes + (memory.reserved_bytes or 0) == memory.total_bytes
            assert memory.free_bytes >= 0


def test_every_gpu_process_is_in_proc(default: Scenario) -> None:
    """Whatever NVML lists has an entry in /proc, before, while and after, and no PID is there twice."""
    for tenth in range(0, 6200, 7):
        now = world(default, tenth / 10)
        pids = [pid for pid, _, _ in now.procs]
        assert len(set(pids)) == len(pids)
        assert {row.pid for row in processes(now)} <= set(pids)


def test_a_pod_comes_and_goes() -> None:
    """It is listed first, then has a log tree, then processes; it goes the other way round; next time it is another."""
    scenario = parse_scenario(GPUS + JOB)
    story = [
        (9.9, False, 0, 0),
        (10.1, True, 0, 0),
        (10.6, True, 1, 0),
        (13.0, True, 1, 1),
        (38.9, True, 1, 1),
        (39.6, True, 1, 0),
        (41.0, False, 1, 0),
        (43.5, False, 0, 0),
    ]
    for seconds, is_listed, trees, users in story:
        now = world(scenario, seconds)
        assert (bool(now.pods), len(trees_of(now)), len(processes(now))) == (is_listed, trees, users), seconds
    first, second = world(scenario, 20.0), world(scenario, 120.0)
    assert trees_of(first) != trees_of(second)
    assert processes(first)[0].pid != processes(second)[0].pid
    assert processes(world(scenario, 21.0))[0].pid == processes(first)[0].pid


def test_a_lost_gpu_reports_only_its_identity(default: Scenario) -> None:
    """While it is lost nothing is measured and its plugin does not offer it; afterwards it is as before."""
    uuid = default.gpus[6].uuid

    def offered(now: World) -> bool:
        return any(DeviceId(uuid) in devices.ids for devices in now.allocatable)

    before, lost, after = (world(default, at) for at in (110.0, 130.0, 165.0))
    assert (lost.gpus[6].fault, lost.gpus[6].uuid, lost.gpus[6].memory) == ("lost", uuid, None)
    assert before.gpus[6].fault is None
    assert after.gpus[6].fault is None
    broken = world(default, 155.0).gpus[6]
    assert (lost.gpus[6].recovery_action, broken.fault, broken.recovery_action) == (None, "reset_required", "gpu_reset")
    assert after.gpus[6].recovery_action == "none"
    assert [offered(now) for now in (before, lost, after)] == [True, False, True]


def test_a_kubelet_lists_only_static_pods_after_a_restart(default: Scenario) -> None:
    """It is down, then up with only static pods and nothing allocatable, then complete."""
    down, fresh, complete = (world(default, at) for at in (185.0, 192.0, 196.0))
    assert not down.kubelet_up
    assert fresh.kubelet_up
    assert listed(fresh) == {"embedder-demo-node"}
    assert fresh.allocatable == ()
    assert len(complete.pods) > 8
    assert complete.allocatable


OFFERS = """
gpus:
  - {model: H100, memory: 80GiB, resource: none, minor: 1, faults: [{kind: lost, from: 10s, until: 20s}]}
  - {model: H100, memory: 80GiB, resource: none, minor: 11}
kubelet: {offers: {aliyun.com/gpu-mem: ["{0}-_-[0-2]", "{1}-_-[0-1]"], nvidia.com/gpu: ["nvidia1/vgpu0", nvidia11]}}
pods:
  - name: a
    containers:
      - {name: c, ids: {aliyun.com/gpu-mem: ["{0}-_-7"], x.io/y: [any-0]}}
"""


def test_other_plugins_offer_what_is_written_and_what_is_held() -> None:
    """All of it, but for the ids of a card with a fault; ids that name no card stay."""
    scenario = parse_scenario(OFFERS)
    first, second = (gpu.uuid for gpu in scenario.gpus)

    def offered(at: float) -> dict[str, set[str]]:
        return {entry.resource: set(entry.ids) for entry in world(scenario, at).allocatable}

    lasting = {
        "aliyun.com/gpu-mem": {f"{second}-_-0", f"{second}-_-1"},
        "nvidia.com/gpu": {"nvidia11"},
        "x.io/y": {"any-0"},
    }
    assert offered(15.0) == lasting
    assert (
        offered(5.0)
        == offered(25.0)
        == {
            **lasting,
            "aliyun.com/gpu-mem": lasting["aliyun.com/gpu-mem"] | {f"{first}-_-{n}" for n in (0, 1, 2, 7)},
            "nvidia.com/gpu": {"nvidia11", "nvidia1/vgpu0"},
        }
    )
    registered = json.loads(world(scenario, 5.0).checkpoint)["Data"]["RegisteredDevices"]
    assert {resource: set(ids) for resource, ids in registered.items()} == offered(5.0)


def test_answers_are_as_plugins_write_them() -> None:
    """Each part of an answer is in its field of AllocResp, where gpumap's own reader finds it."""
    answer = """{envs: {CUDA_MPS_PIPE_DIRECTORY: /mps}, devices: [/dev/nvidia0], cdi: ["nvidia.com/gpu={0}"],
      annotations: {cdi.k8s.io/nvidia-device-plugin_x: "nvidia.com/gpu={0}"},
      mounts: [/var/run/nvidia-container-devices/0]}"""
    text = f"{GPUS}pods: [{{name: a, containers: [{{name: c, gpus: [0], answer: {answer}}}]}}]"
    scenario = parse_scenario(text)
    (row,) = json.loads(world(scenario, 0.0).checkpoint)["Data"]["PodDeviceEntries"]
    name = f"nvidia.com/gpu={scenario.gpus[0].uuid}"
    assert parse_plugin_answer(base64.b64decode(row["AllocResp"])) == PluginAnswer(
        envs=(("CUDA_MPS_PIPE_DIRECTORY", "/mps"),),
        annotations=(("cdi.k8s.io/nvidia-device-plugin_x", name),),
        device_paths=("/dev/nvidia0",),
        mount_paths=("/var/run/nvidia-container-devices/0",),
        cdi_devices=(name,),
    )


def test_the_dra_driver_writes_down_what_it_prepared() -> None:
    """Its notes list the claims of pods that exist, in a form that gpumap's own reader reads."""
    pod = "{{name: {0}, {1}containers: [{{name: c, claims: [{{claim: {0}, device: {2}, share_id: s, notes: {3}}}]}}]}}"
    pods = [
        pod.format("a", "", "gpu-0", "{uuid: '{0}', memory: 20GiB}"),
        pod.format("b", "from: 10s, until: 20s, ", "gpu-1-mig-9-0-4", "{uuid: '{1.1}', admin_access: true}"),
    ]
    scenario = parse_scenario(f"{GPUS}pods: [{', '.join(pods)}]")
    first = PreparedDevice("default", "a", "gpu-0", "s", scenario.gpus[0].uuid, False, 20 << 30)
    second = PreparedDevice("default", "b", "gpu-1-mig-9-0-4", "s", scenario.gpus[1].devices[1].uuid, True, None)
    assert parse_prepared(world(scenario, 5.0).notes) == ((first,), 0)
    assert parse_prepared(world(scenario, 15.0).notes) == ((first, second), 0)
    assert world(parse_scenario(GPUS), 5.0).notes == b""
