"""Reads one GPU. A refused call costs its own value; one that says that the GPU is gone, the GPU: its `fault`.

One thread at a time asks a `GpuReader`; it may hang in a call of it for ever.
"""

from typing import NamedTuple

from gpumap.nvml_worker.asking import Asking
from gpumap.nvml_worker.codes import fault
from gpumap.nvml_worker.library import Handle, Library, RefusedError
from gpumap.nvml_worker.lists import Lists
from gpumap.nvml_worker.mig import MigDevices
from gpumap.nvml_worker.processes import ProcessesOfGpu, Sampler
from gpumap.readings import DeviceMemory, GpuReading, Uuid


class Epoch(NamedTuple):
    """Handles are good within one; with another count an index may be another GPU."""

    initialised: int
    gpus: int


class Identity(NamedTuple):
    uuid: Uuid
    minor: int | None
    pci_bus_id: str
    model: str


class _Device:
    """What one handle is good for; dropped with it."""

    def __init__(self, handle: Handle, uuid: str, lists: Lists, mig_devices: MigDevices) -> None:
        self.handle = handle
        self.uuid = uuid
        self.lists = lists
        self.mig_devices = mig_devices
        self.identity: Identity | None = None


class GpuReader:
    """Reads the GPU at one index. `refused_with` is the code that the last reading failed with, 0 if it did not."""

    def __init__(self, library: Library, index: int) -> None:
        self.refused_with = 0
        self._library = library
        self._index = index
        self._asking = Asking()
        self._processes = ProcessesOfGpu()
        self._sampler = Sampler()
        self._epoch = Epoch(0, 0)
        self._device: _Device | None = None
        self._known: Identity | None = None
        self._partitioned = False

    def read(self, epoch: Epoch, interval_seconds: float) -> GpuReading:
        if epoch != self._epoch:
            self._drop_device()
            if epoch.gpus != self._epoch.gpus:
                self._known = None
            self._epoch = epoch
        try:
            reading = self._ask_all(interval_seconds)
        except RefusedError as refused:
            self.refused_with = refused.code
            self._drop_device()
            return self._faulted(refused)
        self.refused_with = 0
        return reading

    def _drop_device(self) -> None:
        self._device = None
        self._asking.forget()

    def _faulted(self, refused: RefusedError) -> GpuReading:
        reason, refusals = fault(refused.code), ((refused.call, refused.code),)
        if self._known is None:
            return GpuReading(self._index, fault=reason, refusals=refusals)
        return GpuReading(self._index, fault=reason, refusals=refusals, **self._known._asdict())

    def _ask_all(self, interval_seconds: float) -> GpuReading:
        """Raises `RefusedError` where the GPU cannot be read at all."""
        self._asking.begin()
        device = self._device = self._device or self._find_device()
        identity = device.identity or self._identify(device)
        partitioned = self._is_partitioned(device)
        memory = self._asking.ask_newest((self._library.memory, self._library.memory_v1), device.handle)
        if partitioned:
            reading = self._partitioned_gpu(device, identity, memory)
        else:
            reading = self._whole_gpu(device, identity, memory, interval_seconds)
        if not self._asking.answered and self._asking.refusals:
            raise RefusedError(*self._asking.refusals[0])  # a stale handle, or a driver that has lost its GPUs
        if self._asking.learned and self._asking.ask(self._library.mig_enabled, device.handle) is (not partitioned):
            self._asking.forget()  # MIG was switched in the midst of it, and may be switched back by the next reading
        return reading

    def _find_device(self) -> _Device:
        assert self._library.loaded is not None  # noqa: S101 -- an epoch begins with an initialised library
        handle = self._library.handle(self._index)
        lists = Lists(self._library.loaded)
        mig_devices = MigDevices(self._library, self._asking, lists, handle)
        return _Device(handle, self._library.uuid(handle), lists, mig_devices)

    def _identify(self, device: _Device) -> Identity:
        """Kept with the handle once every part has been told, or is not supported."""
        identity = Identity(
            Uuid(device.uuid),
            self._asking.ask(self._library.minor, device.handle),
            self._asking.ask(self._library.pci_bus_id, device.handle) or "",
            self._asking.ask(self._library.model, device.handle) or "",
        )
        device.identity = None if self._asking.refusals else identity
        self._known = identity
        return identity

    def _is_partitioned(self, device: _Device) -> bool:
        # Cards that cannot be partitioned say "not supported"; any other refusal leaves what was known.
        enabled = self._asking.ask(self._library.mig_enabled, device.handle)
        if enabled is None:
            return self._partitioned
        if enabled != self._partitioned:
            self._asking.forget()  # much is not supported on one side of the switch alone
        self._partitioned = enabled
        return enabled

    def _partitioned_gpu(self, device: _Device, identity: Identity, memory: DeviceMemory | None) -> GpuReading:
        """NVML tells no utilisation of it and no samples, and its processes are its MIG devices'."""
        slots = self._asking.ask(self._library.max_mig_devices, device.handle)
        instances = device.mig_devices.read(slots or 0, memory)
        return GpuReading(
            self._index,
            **identity._asdict(),
            partitioned=True,
            max_mig_devices=slots,
            instances=instances,
            memory=memory,
            temperatures_celsius=self._temperatures(device.handle),
            power_watts=self._asking.ask(self._library.power_watts, device.handle),
            power_limit_watts=self._asking.ask(self._library.power_limit_watts, device.handle),
            energy_joules=self._asking.ask(self._library.energy_joules, device.handle),
            refusals=self._asking.refusals,
        )

    def _whole_gpu(
        self, device: _Device, identity: Identity, memory: DeviceMemory | None, interval_seconds: float
    ) -> GpuReading:
        ask, library, handle = self._asking.ask, self._library, device.handle
        processes = self._processes.read(self._asking, device.lists, handle)
        busy, controller_busy = ask(library.utilization_ratios, handle) or (None, None)
        samples = self._sampler.read(self._asking, device.lists, handle, interval_seconds, busy=bool(busy))
        return GpuReading(
            self._index,
            **identity._asdict(),
            memory=memory,
            processes=processes,
            samples=samples,
            utilization_ratio=busy,
            memory_controller_ratio=controller_busy,
            encoder_ratio=ask(library.encoder_ratio, handle),
            decoder_ratio=ask(library.decoder_ratio, handle),
            temperatures_celsius=self._temperatures(handle),
            power_watts=ask(library.power_watts, handle),
            power_limit_watts=ask(library.power_limit_watts, handle),
            energy_joules=ask(library.energy_joules, handle),
            refusals=self._asking.refusals,
        )

    def _temperatures(self, handle: Handle) -> tuple[tuple[str, float], ...]:
        gpu = self._asking.ask_newest((self._library.temperature, self._library.temperature_v1), handle)
        memory = self._asking.ask(self._library.memory_temperature, handle)
        return tuple((sensor, c) for sensor, c in (("gpu", gpu), ("memory", memory)) if c is not None)
