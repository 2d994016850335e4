"""What the kernel says of its NVIDIA driver, which NVML does not: whose GPUs it drives, and whether we hold any."""

import os

BOUND = "/sys/bus/pci/drivers/nvidia"
"""A link for each device that the module drives (nv-pci.c: the pci_driver's name is the module's)."""
DEVICES = "/dev/nvidia"
"""How the names of the driver's devices begin: nvidiactl, nvidia0, nvidia-uvm, nvidia-caps/…"""


def bound_devices() -> frozenset[str]:
    """PCI addresses of what the driver drives; none where sysfs does not tell.

    A GPU that is to be unbound is missing as soon as that begins (kernel, drivers/base/dd.c, __device_release_driver),
    and is unbound when nobody holds it any more (nv-pci.c, nv_pci_remove_helper, which waits for that).
    """
    try:
        names = os.listdir(BOUND)
    except OSError:
        return frozenset()
    return frozenset(name for name in names if ":" in name)


def holds_devices() -> bool:
    """Whether this process has a device of the driver open, or mapped, which keeps it open."""
    return any(_link(name).startswith(DEVICES) for name in os.listdir("/proc/self/fd")) or _maps_devices()


def _link(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""  # that of the listing itself


def _maps_devices() -> bool:
    with open("/proc/self/maps", errors="replace") as maps:
        return any(line.rpartition(" ")[2].startswith(DEVICES) for line in maps)
