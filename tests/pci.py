"""PCI functions below a /sys of plain files."""

from __future__ import annotations

from pathlib import Path

H100 = "0x2330"


def add_function(sys: Path, address: str, driver: str = "nvidia", physfn: str = "", **files: str) -> None:
    """Add a function as the kernel shows it: by default a 3D controller of NVIDIA's."""
    device, link = sys / "devices" / address, sys / "bus/pci/devices" / address
    device.mkdir(parents=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    values = {"vendor": "0x10de", "device": H100, "class": "0x030200", "driver_override": "(null)", **files}
    for name, value in values.items():
        (device / name).write_text(f"{value}\n")
    for name, target in {"driver": driver, "physfn": physfn}.items():
        if target:
            (device / name).symlink_to(f"../../bus/pci/drivers/{target}")
    link.symlink_to(device)
