"""Device ids of every plugin: which name a device, which cannot be trusted, which are not known."""

import re

import pytest

from gpumap.device_ids import DEFAULT_RESOURCE_PATTERN, MigPlace, NamedDevice, Unnamed, mig_place, parse
from gpumap.model import DeviceId, Uuid

GPU = "GPU-b1028956-cfa2-0990-bf4a-5da9abb51763"
MIG = "MIG-7b2f9c84-0e5d-5a1b-b3c4-d5e6f7a8b9c0"


@pytest.mark.parametrize(
    ("resource", "device_id", "uuid", "shared"),
    [
        ("nvidia.com/gpu", GPU, GPU, False),
        ("nvidia.com/gpu.shared", f"{GPU}::3", GPU, True),
        ("nvidia.com/mig-1g.5gb", MIG, MIG, False),
        ("nvidia.com/mig-1g.5gb.shared", f"{MIG}::7", MIG, True),
        ("nvidia.com/mig-1g.5gb", f"MIG-{GPU}/3/0", f"MIG-{GPU}/3/0", False),
        ("nvidia.com/mig-1g.5gb", f"MIG-{GPU}/3/0::11", f"MIG-{GPU}/3/0", True),
        ("example.com/renamed", GPU, GPU, False),
    ],
)
def test_ids_that_name_a_device(resource: str, device_id: str, uuid: str, shared: bool) -> None:
    """UUIDs of GPUs and MIG devices, both forms, and their replicas."""
    assert parse(resource, DeviceId(device_id)) == NamedDevice(Uuid(uuid), shared)


@pytest.mark.parametrize(
    ("resource", "device_id", "reason"),
    [
        ("aliyun.com/gpu-mem", f"{GPU}-_-14", "untrusted_id"),
        ("tencent.com/vcuda-core", "tencent.com/vcuda-core-7", "untrusted_id"),
        ("tencent.com/vcuda-memory", "tencent.com/vcuda-memory-268435456-30", "untrusted_id"),
        ("volcano.sh/gpu-memory", "0-123", "untrusted_id"),
        ("volcano.sh/vgpu-number", f"{GPU}-3", "untrusted_id"),
        ("volcano.sh/vgpu-memory", GPU, "untrusted_id"),
        ("nvidia.com/GA102GL_A10", "0000:3b:00.0", "not_in_nvml"),
        ("nvidia.com/GRID_A10", "c0b26072-dd1b-4f2e-8a5a-111111111111", "not_in_nvml"),
        ("nvidia.com/gpu", "nvidia0", "unparsed"),
        ("nvidia.com/gpu", "nvidia0/gi3/vgpu1", "unparsed"),
        ("nvidia.com/gpu", "all", "unparsed"),
        ("nvidia.com/gpu", f"{GPU}-9", "unparsed"),
        ("gpu.nvidia.com", "gpu-0-mig-1g5gb-19-0", "unparsed"),
        ("nvidia.com/gpu", "", "unparsed"),
        ("nvidia.com/gpu", "::", "unparsed"),
        ("nvidia.com/gpu", f"{GPU}::", "unparsed"),
        ("nvidia.com/gpu", f"{GPU}::3::4", "unparsed"),
        ("nvidia.com/gpu", f" {GPU}", "unparsed"),
        ("nvidia.com/gpu", f"{GPU}\n", "unparsed"),
        ("nvidia.com/gpu", f"{GPU}::٣", "unparsed"),
    ],
)
def test_ids_that_name_none(resource: str, device_id: str, reason: str) -> None:
    """Ids whose GPU the kubelet does not know, that NVML does not drive, or that no plugin is known to make."""
    assert parse(resource, DeviceId(device_id)) == Unnamed(reason)


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
