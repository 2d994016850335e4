"""Addresses of PCI functions. NVML and the kernel write them differently. Pure."""

from __future__ import annotations

import re

_ADDRESS = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE | re.ASCII)


def pci_address(text: str) -> str:
    """Return an address as the kernel names it: `0000:3b:00.0` for NVML's `00000000:3B:00.0`; empty if it is none."""
    match = _ADDRESS.fullmatch(text)
    return f"{int(match[1], 16):04x}:{match[2]}:{match[3]}.{match[4]}".lower() if match else ""
