"""Reads one GPU. A refused call affects its own value; if it means that the GPU is gone, it becomes the GPU's `fault`.

One thread at a time uses a `GpuReader`. It may hang in a call for ever.
"""

import contextlib
from typing import Any, NamedTuple

import pynvml

from gpumap.agent.nvml_worker.calls import UNSUPPORTED, NvmlCalls
from gpumap.agent.nvml_worker.card import CARD_FIELDS, CardOfGpu
from gpumap.agent.nvml_worker.codes import fault
from gpumap.agent.nvml_worker.field_values import FieldValues, ask_field
from gpumap.agent.nvml_worker.gpm import WHOLE_GPU, Activities
from gpumap.agent.nvml_worker.health import HEALTH_FIELDS, LINK_FIELDS, HealthOfGpu, recovery_word, with_links
from gpumap.agent.nvml_worker.library import Handle, Library, RefusedError
from gpumap.agent.nvml_worker.mig import MigDevices
from gpumap.agent.nvml_worker.processes import Lists, ProcessesOfGpu, Sampler
from gpumap.model.readings import CARD, DeviceMemory, GpuReading, Uuid

_FIELDS = {"health": HEALTH_FIELDS, "links": LINK_FIELDS, CARD: CARD_FIELDS}


def fields_of(groups: tuple[str, ...]) -> tuple[int, ...]:
    """The field values of these groups, and the memory's temperature, which every reading has."""
    return pynvml.NVML_FI_DEV_MEMORY_TEMP, *(field for group in groups for field in _FIELDS.get(group, ()))


class HandleGeneration(NamedTuple):
    """Handles are valid within one generation. With another count, an index may be another GPU."""

    initialised: int
    gpus: int


class _Device:
    """Data that is valid for one handle, and dropped with it."""

    def __init__(self, library: Library, calls: NvmlCalls, handle: Handle, uuid: str) -> None:
        self.handle = handle
        self.uuid = uuid
        self.lists = Lists(library)
        self.mig_devices = MigDevices(library, calls, self.lists, handle)
        self.field_values = FieldValues(library, calls, handle)
        self.health = HealthOfGpu(library, calls, handle)
        self.card = CardOfGpu(library, calls, handle)
        self.activities = Activities(library, calls, handle)
        self.identity: GpuReading | None = None
        self.identified = -1  # `NvmlCalls.forgotten` at that time


class GpuReader:
    """Reads the GPU at one index. `refused_with` is the code of the last failed reading; 0 if it did not fail."""

    def __init__(self, library: Library, index: int) -> None:
        self.refused_with = 0
        self._library = library
        self._index = index
        self._calls = NvmlCalls()
        self._processes = ProcessesOfGpu()
        self._sampler = Sampler()
        self._generation = HandleGeneration(0, 0)
        self._device: _Device | None = None
        self._identity = GpuReading(index)
        self._partitioned: bool | None = None  # not reported yet
        self._groups: tuple[str, ...] = ()
        self._fields = fields_of(())

    @property
    def handle(self) -> Handle | None:
        """Return the uuid of the last reading; `None` if there was none."""
        return self._device.handle if self._device else None

    def read(self, generation: HandleGeneration, interval_seconds: float, groups: tuple[str, ...] = ()) -> GpuReading:
        """Read the GPU. `groups` are those of the wire whose calls are made."""
        if groups != self._groups:
            self._groups, self._fields = groups, fields_of(groups)
        if generation != self._generation:
            self._drop_device()
            if generation.gpus != self._generation.gpus:
                self._identity, self._partitioned = GpuReading(self._index), None
            self._generation = generation
        try:
            reading = self._ask_all(interval_seconds)
        except RefusedError as refused:
            self.refused_with = refused.code
            reading = self._faulted(refused)
            self._drop_device()
            return reading
        self.refused_with = 0
        return reading

    def keep_samples(self) -> None:
        """Take process samples that the driver would drop before the next reading. That reading reports refusals."""
        if self._device is not None and not self._partitioned:
            with contextlib.suppress(RefusedError):
                self._sampler.keep(self._calls, self._device.lists, self._device.handle)

    def close(self) -> None:
        """Free what NVML allocated. Call it before NVML is shut down, from a thread that may use this reader."""
        self._drop_device()

    def _drop_device(self) -> None:
        if self._device is not None:
            self._device.activities.free()
        self._device = None
        self._calls.forget()

    def _faulted(self, refused: RefusedError) -> GpuReading:
        return self._identity._replace(
            fault=fault(refused.code),
            refusals=((refused.call, refused.code),),
            recovery_action=self._recovery_action() if refused.code == pynvml.NVML_ERROR_RESET_REQUIRED else None,
        )

    def _recovery_action(self) -> str | None:
        """Release a GPU that waits for it. A lost GPU gets no call: its calls may hang."""
        if "health" not in self._groups:
            return None
        try:
            handle = self._device.handle if self._device else self._library.handle(self._index)
            return recovery_word(ask_field(self._library, handle, pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION))
        except RefusedError:
            return None

    def _ask_all(self, interval_seconds: float) -> GpuReading:
        """Return the reading. Raises `RefusedError` if the GPU cannot be read at all."""
        self._calls.begin()
        device = self._device = self._device or self._find_device()
        known = device.identity if device.identified == self._calls.forgotten else None
        identity = known or self._identify(device)
        partitioned = self._is_partitioned(device)
        mode_unknown = self._partitioned is None
        memory = self._calls.ask_newest((self._library.memory, self._library.memory_v1), device.handle)
        if partitioned:
            reading = self._partitioned_gpu(device, identity, memory)
        else:
            reading = self._whole_gpu(device, identity, memory, interval_seconds)
        reading = self._with_card(device, reading)._replace(
            mig_unknown=not device.mig_devices.complete if partitioned else mode_unknown
        )
        device.activities.free_unused()
        if not self._calls.answered and self._calls.refusals:
            raise RefusedError(*self._calls.refusals[0])  # a stale handle, or a driver that has lost its GPUs
        if self._calls.learned and self._calls.ask(self._library.mig_enabled, device.handle) is (not partitioned):
            # MIG was switched during the reading, and may be switched back by the next one.
            self._calls.forget()
            return reading._replace(refusals=())
        return reading

    def _find_device(self) -> _Device:
        handle = self._library.handle(self._index)
        return _Device(self._library, self._calls, handle, self._library.uuid(handle))

    def _identify(self, device: _Device) -> GpuReading:
        """Return a reading with only the identity. It is kept with the handle after NVML has answered for every part
        of it."""
        identity = GpuReading(
            self._index,
            uuid=Uuid(device.uuid),
            minor=self._calls.ask(self._library.minor, device.handle),
            pci_bus_id=self._calls.ask(self._library.pci_bus_id, device.handle) or "",
            model=self._calls.ask(self._library.model, device.handle) or "",
        )
        device.identity, device.identified = None if self._calls.refusals else identity, self._calls.forgotten
        self._identity = identity
        return identity

    def _is_partitioned(self, device: _Device) -> bool:
        # Cards without MIG return "not supported". Any other refusal keeps the known mode.
        enabled = self._calls.ask(self._library.mig_enabled, device.handle)
        if enabled is None:
            if self._partitioned is None and self._calls.refused_with in UNSUPPORTED:
                self._partitioned = False
            return bool(self._partitioned)
        if enabled != bool(self._partitioned):
            self._calls.forget()  # many values are supported only in one of the two modes
        self._partitioned = enabled
        return enabled

    def _partitioned_gpu(self, device: _Device, identity: GpuReading, memory: DeviceMemory | None) -> GpuReading:
        """Read a partitioned GPU. NVML reports no utilization and no samples for it. Its MIG devices have its
        processes."""
        slots = self._calls.ask(self._library.max_mig_devices, device.handle, on="mig")
        activities = device.activities if "gpm" in self._groups else None
        instances = device.mig_devices.read(slots, memory, activities)
        return identity._replace(memory=memory, partitioned=True, max_mig_devices=slots, instances=instances)

    def _whole_gpu(
        self, device: _Device, identity: GpuReading, memory: DeviceMemory | None, interval_seconds: float
    ) -> GpuReading:
        ask, library, handle = self._calls.ask, self._library, device.handle
        processes = self._processes.read(self._calls, device.lists, handle, memory)
        busy, controller_busy = ask(library.utilization_ratios, handle) or (None, None)
        sampled = self._sampler.read(self._calls, device.lists, handle, interval_seconds, busy=bool(busy))
        codec = "codec" in self._groups
        return identity._replace(
            memory=memory,
            processes=processes,
            samples=sampled.samples,
            sampled_seconds=sampled.seconds,
            unsampled=sampled.unsampled,
            utilization_ratio=busy,
            memory_controller_ratio=controller_busy,
            encoder_ratio=ask(library.encoder_ratio, handle) if codec else None,
            decoder_ratio=ask(library.decoder_ratio, handle) if codec else None,
            **self._gpm(device),
        )

    def _gpm(self, device: _Device) -> dict[str, Any]:
        """Return the fields of a whole GPU that GPM measures, of two groups."""
        if not {"gpm", "links"} & set(self._groups):
            return {}
        measured = device.activities.read(WHOLE_GPU)
        fields: dict[str, Any] = {"activity": measured.activity} if "gpm" in self._groups else {}
        if "links" in self._groups and (traffic := measured.traffic):
            fields["pcie_source"] = traffic.source
            fields["pcie_transmit_bytes"], fields["pcie_receive_bytes"] = traffic.transmit_bytes, traffic.receive_bytes
        return fields

    def _with_card(self, device: _Device, reading: GpuReading) -> GpuReading:
        """Return the reading with the values of the card, partitioned or not."""
        ask, library, handle = self._calls.ask, self._library, device.handle
        values = device.field_values.read(self._fields)
        celsius = self._calls.ask_newest((library.temperature, library.temperature_v1), handle)
        if "health" in self._groups:
            reading = device.health.add_to(reading, values)
        if "links" in self._groups:
            reading = with_links(reading, values)
        if CARD in self._groups:
            reading = device.card.add_to(reading, values)
        return reading._replace(
            temperatures_celsius=_temperatures(celsius, values.get(pynvml.NVML_FI_DEV_MEMORY_TEMP)),
            power_watts=ask(library.power_watts, handle),
            power_limit_watts=ask(library.power_limit_watts, handle),
            energy_joules=ask(library.energy_joules, handle),
            refusals=self._calls.refusals,  # all calls are made
        )


def _temperatures(gpu: float | None, memory: float | None) -> tuple[tuple[str, float], ...]:
    """Return temperatures by sensor. Drivers return 0 for the memory of cards without its sensor (T4, GeForce)."""
    memory = memory or None
    return tuple([(sensor, float(c)) for sensor, c in (("gpu", gpu), ("memory", memory)) if c is not None])
