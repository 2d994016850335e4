"""Device ids of every plugin: which plugin made them, what they name, what names the GPU, and which are not known."""

import re

import pytest

from gpumap.model.device_ids import (
    ByIndex,
    ByMinor,
    ByPlacement,
    ByUuid,
    DeviceRef,
    EveryGpu,
    MigPlace,
    mig_place,
    parse,
    parse_dra,
)
from gpumap.model.observations import DeviceId, PluginAnswer
from gpumap.model.plugins import DRA, Limit, family, limit_of, named_devices, recognise, recognise_dra
from gpumap.model.readings import Uuid
from gpumap.model.terms import DEFAULT_RESOURCE_PATTERN

GPU = "GPU-b1028956-cfa2-0990-bf4a-5da9abb51763"
OTHER = "GPU-aaaaaaaa-cfa2-0990-bf4a-5da9abb51763"
MIG = "MIG-7b2f9c84-0e5d-5a1b-b3c4-d5e6f7a8b9c0"
BY_UUID = ByUuid(Uuid(GPU))


@pytest.mark.parametrize(
    ("resource", "device_id", "plugin", "device"),
    [
        ("nvidia.com/gpu", GPU, "nvidia", BY_UUID),
        ("example.com/renamed", GPU, "nvidia", BY_UUID),
        ("nvidia.com/mig-1g.5gb", MIG, "nvidia", ByUuid(Uuid(MIG))),
        ("nvidia.com/mig-1g.5gb", f"MIG-{GPU}/3/0", "nvidia", ByUuid(Uuid(f"MIG-{GPU}/3/0"))),
        ("nvidia.com/gpu.shared", f"{GPU}::3", "nvidia-replicas", BY_UUID),
        ("nvidia.com/mig-1g.5gb.shared", f"{MIG}::7", "nvidia-replicas", ByUuid(Uuid(MIG))),
        ("nvidia.com/mig-1g.5gb", f"MIG-{GPU}/3/0::11", "nvidia-replicas", ByUuid(Uuid(f"MIG-{GPU}/3/0"))),
        ("nvidia.com/gpu", "all", "nvidia-wsl", EveryGpu()),
        ("nvidia.com/gpu", "all::2", "nvidia-wsl-replicas", EveryGpu()),
        ("nvidia.com/gpu", "tegra", "nvidia-tegra", None),
        ("nvidia.com/gpu", "nvidia12", "gke", ByMinor(12)),
        ("nvidia.com/gpu", "nvidia0/gi3", "gke", ByMinor(0, 3)),
        ("nvidia.com/gpu", "nvidia0/vgpu1", "gke-sharing", ByMinor(0)),
        ("nvidia.com/gpu", "nvidia0/gi3/vgpu1", "gke-sharing", ByMinor(0, 3)),
        ("aliyun.com/gpu-mem", f"{GPU}-_-14", "gpushare", BY_UUID),
        ("nvidia.com/gpu", f"{GPU}-9", "hami", BY_UUID),
        ("tencent.com/vcuda-core", "tencent.com/vcuda-core-7", "vcuda-core", None),
        ("tencent.com/vcuda-memory", "tencent.com/vcuda-memory-268435456-30", "vcuda-memory", None),
        ("volcano.sh/gpu-memory", "1-123", "volcano-gpu-memory", ByIndex(1)),
        ("volcano.sh/gpu-number", "0-0", "volcano-gpu-number", ByIndex(0)),
        ("volcano.sh/vgpu-number", f"{GPU}-3", "volcano-vgpu-number", BY_UUID),
        ("volcano.sh/vgpu-memory", f"{GPU}-memory-12", "volcano-vgpu-memory", BY_UUID),
        ("volcano.sh/vgpu-cores", f"{GPU}-core-7", "volcano-vgpu-cores", BY_UUID),
        ("k8s.amazonaws.com/vgpu", f"{GPU}-7", "aws-vgpu", BY_UUID),
        ("nvidia.com/GA102GL_A10", "0000:3b:00.0", "passed-through", None),
        ("nvidia.com/GA102GL_A10", "42", "passed-through", None),
        ("nvidia.com/GRID_A10", "c0b26072-dd1b-4f2e-8a5a-111111111111", "passed-through", None),
        ("nvidia.com/odd", "0-12", "unlisted", ByIndex(0)),
    ],
)
def test_ids_of_every_plugin(resource: str, device_id: str, plugin: str, device: DeviceRef | None) -> None:
    """Each plugin's ids are recognised as its own, with the device that they name, trusted or not."""
    recognised = recognise(resource, DeviceId(device_id))
    assert recognised is not None
    assert (recognised.plugin.name, recognised.device) == (plugin, device)
    renamed = recognise("example.com/renamed", DeviceId(device_id))
    assert renamed is not None
    assert renamed.device == device


@pytest.mark.parametrize(
    "device_id",
    [
        "",
        "::",
        "9" * 300,
        f"{GPU}::",
        f"{GPU}::3::4",
        f" {GPU}",
        f"{GPU}\n",
        f"{GPU}::٣",
        "nvidia",
        "nvidia0/gi",
        "gpu-0",
        "0-",
    ],
)
def test_ids_of_no_plugin(device_id: str) -> None:
    """What no plugin is known to make is not recognised, however near it is."""
    assert recognise("nvidia.com/gpu", DeviceId(device_id)) is None


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("gpu-3", ByMinor(3)),
        ("gpu-0-mig-19-4-1", ByPlacement(0, 19, 4)),
        ("gpu-0-mig-1g5gb-19-4", ByPlacement(0, 19, 4)),
        ("gpu-1-mig-1g5gb-me-20-0", ByPlacement(1, 20, 0)),
        ("gpu-vfio-0", None),
    ],
)
def test_names_of_nvidias_dra_driver(name: str, device: DeviceRef | None) -> None:
    """Whole GPUs by minor, MIG devices by placement in both forms, and what is passed through."""
    recognised, meaning = recognise_dra("gpu.nvidia.com", name), parse_dra(name)
    assert recognised is not None
    assert meaning is not None
    assert (recognised.plugin.name, recognised.device) == ("nvidia-dra", device)
    assert meaning.shape in DRA.shapes


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("compute-domain.nvidia.com", "channel-0"),
        ("compute-domain.nvidia.com", "gpu-0"),
        ("gpu.nvidia.com", "gpu-x"),
        ("gpu.nvidia.com", "gpu-0-mig-"),
        ("gpu.nvidia.com", ""),
    ],
)
def test_names_of_no_gpu(driver: str, name: str) -> None:
    """Devices of other drivers, and names that NVIDIA's does not give."""
    assert recognise_dra(driver, name) is None


@pytest.mark.parametrize(
    ("resource", "limit"),
    [
        ("aliyun.com/gpu-mem", Limit.MEMORY),
        ("tencent.com/vcuda-core", Limit.COMPUTE),
        ("tencent.com/vcuda-memory", Limit.MEMORY),
        ("volcano.sh/gpu-memory", Limit.MEMORY),
        ("volcano.sh/vgpu-number", Limit.MEMORY),
        ("volcano.sh/vgpu-memory", Limit.MEMORY),
        ("volcano.sh/vgpu-cores", None),
        ("nvidia.com/gpu", None),
    ],
)
def test_what_a_slot_limits(resource: str, limit: Limit | None) -> None:
    """Slots of these resources limit the memory or the compute of their holder; other slots have no known limit."""
    assert limit_of(resource) == limit


@pytest.mark.parametrize(
    ("resource", "prefix"),
    [
        ("volcano.sh/vgpu-number", "volcano.sh/vgpu-"),
        ("volcano.sh/vgpu-cores", "volcano.sh/vgpu-"),
        ("tencent.com/vcuda-memory", "tencent.com/vcuda-"),
        ("volcano.sh/gpu-memory", ""),
        ("nvidia.com/gpu", ""),
    ],
)
def test_resources_that_share_an_answer(resource: str, prefix: str) -> None:
    assert family(resource) == prefix


def _envs(**envs: str) -> PluginAnswer:
    return PluginAnswer(envs=tuple(sorted(envs.items())))


@pytest.mark.parametrize(
    ("answer", "devices"),
    [
        (_envs(NVIDIA_VISIBLE_DEVICES=f"{GPU},{OTHER}"), (BY_UUID, ByUuid(Uuid(OTHER)))),
        (_envs(NVIDIA_VISIBLE_DEVICES=f"{GPU},{GPU}"), (BY_UUID,)),
        (_envs(NVIDIA_VISIBLE_DEVICES=f"MIG-{GPU}/3/0"), (ByUuid(Uuid(f"MIG-{GPU}/3/0")),)),
        (_envs(NVIDIA_VISIBLE_DEVICES="1, 0"), (ByIndex(1), ByIndex(0))),
        (_envs(NVIDIA_VISIBLE_DEVICES="all"), (EveryGpu(),)),
        (_envs(NVIDIA_VISIBLE_DEVICES=f"nvidia.com/gpu={GPU}"), (BY_UUID,)),
        (_envs(NVIDIA_VISIBLE_DEVICES="void"), ()),
        (_envs(NVIDIA_VISIBLE_DEVICES="none"), ()),
        (_envs(NVIDIA_VISIBLE_DEVICES=""), ()),
        (_envs(NVIDIA_VISIBLE_DEVICES="no-gpu-has-4GiB-to-run", ALIYUN_COM_GPU_MEM_IDX="-1"), ()),
        (_envs(NVIDIA_VISIBLE_DEVICES="1", ALIYUN_COM_GPU_MEM_IDX="0"), (ByIndex(1),)),
        (_envs(ALIYUN_COM_GPU_MEM_IDX="0"), (ByMinor(0),)),
        (PluginAnswer(cdi_devices=(f"k8s.device-plugin.nvidia.com/gpu={GPU}",)), (BY_UUID,)),
        (PluginAnswer(cdi_devices=("management.nvidia.com/gpu=0",)), (ByIndex(0),)),
        (
            PluginAnswer(
                annotations=(
                    ("cdi.k8s.io/nvidia-device-plugin_x", f"k8s.device-plugin.nvidia.com/gpu={GPU},a.com/b=c"),
                )
            ),
            (BY_UUID,),
        ),
        (PluginAnswer(mount_paths=(f"/var/run/nvidia-container-devices/{GPU}",)), (BY_UUID,)),
        (PluginAnswer(mount_paths=("/var/run/nvidia-container-devices/imex/0",)), ()),
        (PluginAnswer(cdi_devices=("k8s.device-plugin.nvidia.com/imex-channel=0", "nvidia.com/gds=all")), ()),
        (PluginAnswer(annotations=(("my.cdi.k8s.io/x", f"nvidia.com/gpu={GPU}"),)), (BY_UUID,)),
        (
            PluginAnswer(annotations=(("tencent.com/vcuda-device", "/dev/nvidia2,/dev/nvidia0"),)),
            (ByMinor(2), ByMinor(0)),
        ),
        (
            PluginAnswer(
                envs=(("NVIDIA_VISIBLE_DEVICES", "0"),), annotations=(("tencent.com/vcuda-device", "/dev/nvidia2"),)
            ),
            (ByMinor(2),),
        ),
        (PluginAnswer(annotations=(("example.com/devices", "0"),)), ()),
        (PluginAnswer(device_paths=("/dev/nvidiactl", "/dev/nvidia3")), (ByMinor(3),)),
        (PluginAnswer(envs=(("NVIDIA_VISIBLE_DEVICES", "0"),), device_paths=("/dev/nvidia3",)), (ByIndex(0),)),
        (PluginAnswer(), ()),
    ],
)
def test_devices_that_an_answer_names(answer: PluginAnswer, devices: tuple[DeviceRef, ...]) -> None:
    """Each way in which a plugin names a GPU to the container runtime; uuids before places."""
    assert named_devices(answer) == devices


def test_place_of_an_old_mig_name() -> None:
    """The older form holds its GPU, GPU instance and compute instance; the newer one holds none."""
    assert mig_place(Uuid(f"MIG-{GPU}/12/3")) == MigPlace(Uuid(GPU), 12, 3)
    assert mig_place(Uuid(MIG)) is None


@pytest.mark.parametrize(
    ("resource", "counts"),
    [
        ("nvidia.com/gpu", True),
        ("nvidia.com/mig-1g.10gb.shared", True),
        ("nvidia.com/GA102GL_A10", True),
        ("aliyun.com/gpu-mem", True),
        ("tencent.com/vcuda-memory", True),
        ("volcano.sh/vgpu-cores", True),
        ("k8s.amazonaws.com/vgpu", True),
        ("gpu.nvidia.com", True),
        ("nvidia.com/mps-control-daemon", False),
        ("nvidia.com/imex-channel", False),
        ("compute-domain.nvidia.com", False),
        ("aliyun.com/gpu-count", False),
        ("intel.com/gpu", False),
        ("xnvidia.com/gpu", False),
        ("nvidia.com/", False),
    ],
)
def test_default_resources(resource: str, counts: bool) -> None:
    """The default pattern takes the GPU resources of every known plugin, whole, and no other."""
    assert (re.fullmatch(DEFAULT_RESOURCE_PATTERN, resource) is not None) is counts


@pytest.mark.parametrize(("length", "known"), [(253, True), (254, False)])
def test_an_id_is_as_long_as_a_name_of_kubernetes(length: int, known: bool) -> None:
    """Longer ids and names match no pattern, however right their form is."""
    device_id, device_name = "0" * length, f"gpu-0-mig-{'x' * (length - 15)}-19-4"
    assert len(device_id) == len(device_name) == length
    assert (parse(DeviceId(device_id)) is not None) is known
    assert (parse_dra(device_name) is not None) is known
