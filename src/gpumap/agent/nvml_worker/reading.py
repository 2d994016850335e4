"""Reads one GPU. A refused call affects its own value; if it means that the GPU is gone, it becomes the GPU's `fault`.

One thread at a time uses a `GpuReader`. It may hang in a call for ever.
"""

import contextlib
from collections.abc import Callable
from ctypes import c_ulonglong
from typing import Any, NamedTuple

import pynvml
from msgspec import structs

from gpumap.agent.nvml_worker.calls import UNSUPPORTED, NvmlCalls
from gpumap.agent.nvml_worker.field_values import FieldValues, ask_field
from gpumap.agent.nvml_worker.gpm import WHOLE_GPU, Activities
from gpumap.agent.nvml_worker.health import (
    CARD_FIELDS,
    HEALTH_FIELDS,
    LINK_FIELDS,
    SLOW_HEALTH_FIELDS,
    SLOW_LINK_FIELDS,
    CardReader,
    HealthReader,
    convert_fields,
    fabric,
    known_values,
    recovery_word,
    watts,
    word_of,
)
from gpumap.agent.nvml_worker.library import Handle, Library, RefusedError, key_of, layout, ratio
from gpumap.agent.nvml_worker.mig import MigDevices
from gpumap.agent.nvml_worker.processes import GpuProcesses, Lists, Sampler
from gpumap.agent.nvml_worker.slow_values import SlowValues
from gpumap.agent.nvml_worker.wire import fault_word
from gpumap.model.readings import (
    CARD,
    RECOVERY_ACTIONS,
    SAMPLES_NEW,
    SAMPLES_OLD,
    VIRTUALIZATION_MODES,
    DeviceMemory,
    GpuReading,
    Uuid,
)

_TEMPERATURE = layout(pynvml.c_nvmlTemperature_v1_t)
_COLDEST, _HOTTEST = -50.0, 150.0
"""A value outside is not of a sensor."""
_FIELDS = {"health": HEALTH_FIELDS + SLOW_HEALTH_FIELDS, "links": LINK_FIELDS + SLOW_LINK_FIELDS, CARD: CARD_FIELDS}
_SLOW_NUMBERS = frozenset([field.number for field in SLOW_HEALTH_FIELDS + SLOW_LINK_FIELDS + CARD_FIELDS])


def field_numbers(groups: tuple[str, ...]) -> tuple[int, ...]:
    """Return the field values of these groups, and the memory's temperature, which every reading has."""
    return pynvml.NVML_FI_DEV_MEMORY_TEMP, *(field.number for group in groups for field in _FIELDS.get(group, ()))


class HandleGeneration(NamedTuple):
    """Handles are valid within one generation. With another count, an index may be another GPU."""

    initialised: int
    gpus: int


class _Device:
    """Data that is valid for one handle, and dropped with it: prepared calls and their answers that do not change."""

    def __init__(self, library: Library, calls: NvmlCalls, handle: Handle) -> None:
        number = library.number
        self.handle = handle
        self.uuid = library.uuid(handle).once()
        if not self.uuid:
            raise RefusedError("nvmlDeviceGetUUID", pynvml.NVML_ERROR_UNKNOWN)
        self.minor = number("nvmlDeviceGetMinorNumber", handle, read=int)
        self.pci_bus_id = library.pci_bus_id(handle)
        self.model = library.model(handle)
        self.virtualization = number(
            "nvmlDeviceGetVirtualizationMode", handle, read=lambda mode: word_of(VIRTUALIZATION_MODES, mode)
        )
        self.numa_node = number("nvmlDeviceGetNumaNodeId", handle, read=int)
        self.identified_after = -1  # `NvmlCalls.forgotten` when its identity was complete
        self.mig_enabled = library.mig_enabled(handle)
        self.max_mig_devices = number("nvmlDeviceGetMaxMigDeviceCount", handle, read=int, subject="mig")
        self.memory = library.memory(handle)
        self.utilization_ratios = library.utilization_ratios(handle)
        self.codec = [
            library.pair(name, handle, lambda percent, _: ratio(percent))
            for name in ("nvmlDeviceGetEncoderUtilization", "nvmlDeviceGetDecoderUtilization")
        ]
        self.temperature = (
            library.structure(
                "nvmlDeviceGetTemperatureV",
                handle,
                out=pynvml.c_nvmlTemperature_v1_t(pynvml.nvmlTemperature_v1),
                # nvml.h: -1 is NVML_VALUE_NOT_AVAILABLE.
                read=lambda info: None if (celsius := _TEMPERATURE.unpack_from(info)[2]) == -1 else float(celsius),
            ),
            # Deprecated: before driver 565 the only one, removed in CUDA 14.
            number("nvmlDeviceGetTemperature", handle, pynvml.NVML_TEMPERATURE_GPU, read=float),
        )
        self.power = number("nvmlDeviceGetPowerUsage", handle, read=watts)
        self.power_limit = number("nvmlDeviceGetEnforcedPowerLimit", handle, read=watts)
        self.energy = number(
            "nvmlDeviceGetTotalEnergyConsumption", handle, read=lambda millijoules: millijoules / 1000, kind=c_ulonglong
        )
        lists = Lists(library)
        self.lists = lists.prepare(handle)
        self.samples = lists.samples(calls, handle)
        self.mig_devices = MigDevices(library, calls, lists, handle)
        self.field_values, self.slow_field_values = (FieldValues(library, calls, handle) for _ in range(2))
        self.slow_values = SlowValues(calls)
        self.health = HealthReader(library, calls, handle)
        self.fabric = fabric(library, handle)
        self.card = CardReader(library, calls, handle)
        self.activities = Activities(library, calls, handle)


class GpuReader:
    """Reads the GPU at one index. `refused_with` is the code of the last failed reading; 0 if it did not fail.

    `count_xids` returns how many XID errors of a GPU were received so far.
    """

    def __init__(self, library: Library, index: int, count_xids: Callable[[Uuid], int]) -> None:
        self.index = index
        self.busy = False
        """From the beginning of a sweep until it is read; for ever if a call on it hangs."""
        self.refused_with = 0
        self._count_xids = count_xids
        self._library = library
        self._calls = NvmlCalls()
        self._processes = GpuProcesses()
        self._sampler = Sampler()
        self._generation = HandleGeneration(0, 0)
        self._device: _Device | None = None
        self._identity = GpuReading(index)
        self._partitioned: bool | None = None  # not reported yet
        self._groups: tuple[str, ...] = ()
        self._fields: tuple[int, ...] = field_numbers(())
        self._slow_fields: tuple[int, ...] = ()

    @property
    def handle(self) -> Handle | None:
        """Return the handle of the last reading; `None` if there was none."""
        return self._device.handle if self._device else None

    def read(
        self,
        generation: HandleGeneration,
        interval_seconds: float,
        groups: tuple[str, ...] = (),
        hold_seconds: float = 0.0,
    ) -> GpuReading:
        """Read the GPU with the calls of these `groups`. Slow values may be `hold_seconds` old."""
        if groups != self._groups:
            self._groups, numbers = groups, field_numbers(groups)
            self._fields = tuple(number for number in numbers if number not in _SLOW_NUMBERS)
            self._slow_fields = tuple(number for number in numbers if number in _SLOW_NUMBERS)
        if generation != self._generation:
            self.drop_device()
            if generation.gpus != self._generation.gpus:
                self._identity, self._partitioned = GpuReading(self.index), None
            self._generation = generation
        try:
            reading = self._ask_all(interval_seconds, hold_seconds)
        except RefusedError as refused:
            self.refused_with = refused.code
            reading = self._faulted(refused)
            self.drop_device()
            return reading
        self.refused_with = 0
        return reading

    def keep_samples(self) -> None:
        """Take process samples that the driver would drop before the next reading. That reading reports refusals."""
        if self._device is not None and not self._partitioned:
            with contextlib.suppress(RefusedError):
                self._sampler.keep(self._device.samples)

    def drop_device(self) -> None:
        """Free what NVML allocated. Call it before NVML is shut down, from a thread that may use this reader."""
        if self._device is not None:
            self._device.activities.free()
        self._device = None
        self._calls.forget()

    def _faulted(self, refused: RefusedError) -> GpuReading:
        return structs.replace(
            self._identity,
            fault=fault_word(refused.code),
            refusals={refused.call: refused.code},
            recovery_action=self._recovery_action() if refused.code == pynvml.NVML_ERROR_RESET_REQUIRED else None,
        )

    def _recovery_action(self) -> str | None:
        """Release a GPU that waits for it. A lost GPU gets no call: its calls may hang."""
        if "health" not in self._groups:
            return None
        try:
            handle = self._device.handle if self._device else self._library.handle(self.index)
            return recovery_word(ask_field(self._library, handle, pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION))
        except RefusedError:
            return None

    def _ask_all(self, interval_seconds: float, hold_seconds: float) -> GpuReading:
        """Return the reading. Raises `RefusedError` if the GPU cannot be read at all."""
        self._calls.begin()
        if self._device is None:
            self._device = _Device(self._library, self._calls, self._library.handle(self.index))
        device = self._device
        if device.identified_after != self._calls.forgotten:
            self._identify(device)
        partitioned = self._is_partitioned(device)
        mode_unknown = self._partitioned is None
        memory = self._calls.ask_first(device.memory)
        if partitioned:
            fields = self._read_partitioned(device, memory)
        else:
            fields = self._read_whole(device, memory, interval_seconds)
        reading = structs.replace(
            self._identity,
            memory=memory,
            mig_unknown=not device.mig_devices.complete if partitioned else mode_unknown,
            **fields,
            **self._read_values(device, interval_seconds, hold_seconds),
            refusals=self._calls.refusals,
        )
        device.activities.free_unused()
        if not self._calls.answered and reading.refusals:
            call, code = next(iter(reading.refusals.items()))
            raise RefusedError(call, code)  # a stale handle, or a driver that has lost its GPUs
        if self._calls.learned and self._calls.ask(device.mig_enabled) is (not partitioned):
            # MIG was switched during the reading, and may be switched back by the next one.
            self._calls.forget()
            return structs.replace(reading, refusals={})
        return reading

    def _identify(self, device: _Device) -> None:
        """Ask for the identity: again with the next reading if a part of it is refused for now."""
        incomplete = self._calls.incomplete
        self._identity = GpuReading(
            self.index,
            uuid=Uuid(device.uuid),
            minor=self._calls.ask(device.minor),
            pci_bus_id=self._calls.ask(device.pci_bus_id) or "",
            model=self._calls.ask(device.model) or "",
            virtualization=self._calls.ask(device.virtualization),
            numa_node=self._calls.ask(device.numa_node),
        )
        if self._calls.incomplete == incomplete:
            device.identified_after = self._calls.forgotten

    def _is_partitioned(self, device: _Device) -> bool:
        # Cards without MIG return "not supported". Any other refusal keeps the known mode.
        enabled = self._calls.ask(device.mig_enabled)
        if enabled is None:
            if self._partitioned is None and self._calls.refused_with in UNSUPPORTED:
                self._partitioned = False
            return bool(self._partitioned)
        if enabled != bool(self._partitioned):
            self._calls.forget()  # many values are supported only in one of the two modes
        self._partitioned = enabled
        return enabled

    def _read_partitioned(self, device: _Device, memory: DeviceMemory | None) -> dict[str, Any]:
        """A partitioned GPU has neither utilization nor samples. Its MIG devices have its processes."""
        slots = self._calls.ask(device.max_mig_devices)
        activities = device.activities if "gpm" in self._groups else None
        instances = device.mig_devices.read(slots, memory, activities)
        return {"partitioned": True, "max_mig_devices": slots, "instances": instances}

    def _read_whole(self, device: _Device, memory: DeviceMemory | None, interval_seconds: float) -> dict[str, Any]:
        ask = self._calls.ask
        processes = self._processes.read(self._calls, device.lists, memory)
        busy, controller_busy = ask(device.utilization_ratios) or (None, None)
        sampled = self._sampler.read(device.samples, interval_seconds, busy=bool(busy))
        encoder, decoder = [ask(call) for call in device.codec] if "codec" in self._groups else (None, None)
        return {
            "processes": processes,
            "samples": sampled.samples,
            "samples_from": SAMPLES_OLD if self._calls.is_supported(key_of(SAMPLES_OLD, "gpu")) else SAMPLES_NEW,
            "sampled_seconds": sampled.seconds,
            "unsampled": sampled.unsampled,
            "utilization_ratio": busy,
            "memory_controller_busy_ratio": controller_busy,
            "encoder_ratio": encoder,
            "decoder_ratio": decoder,
            **self._read_gpm(device),
        }

    def _read_gpm(self, device: _Device) -> dict[str, Any]:
        """Return the fields of a whole GPU that GPM measures, of two groups."""
        if "gpm" not in self._groups and "links" not in self._groups:
            return {}
        measured = device.activities.read(WHOLE_GPU)
        fields: dict[str, Any] = {"activity": measured.activity} if "gpm" in self._groups else {}
        if "links" in self._groups and measured.traffic:
            fields |= measured.traffic._asdict()
        return fields

    def _read_values(self, device: _Device, interval_seconds: float, hold_seconds: float) -> dict[str, Any]:
        """Return the values of a GPU, partitioned or not."""
        ask = self._calls.ask
        values = device.field_values.read(self._fields)
        # Drivers return 0 for the memory of cards without its sensor (T4, GeForce).
        memory = values.get(pynvml.NVML_FI_DEV_MEMORY_TEMP)
        memory_celsius = float(memory) if memory else None
        temperatures = known_values([("gpu", self._calls.ask_first(device.temperature)), ("memory", memory_celsius)])
        fields = {
            "temperatures_celsius": {
                sensor: celsius for sensor, celsius in temperatures.items() if _COLDEST <= celsius <= _HOTTEST
            },
            "power_watts": ask(device.power),
            "energy_joules": ask(device.energy),
            **(device.health.read(values) if "health" in self._groups else {}),
            **(convert_fields(LINK_FIELDS, values) if "links" in self._groups else {}),
        }
        action = fields.get("recovery_action")
        slow = device.slow_values.read(
            lambda: self._read_slow_values(device),
            key=(self._groups, self._calls.forgotten),
            signs=(self._count_xids(Uuid(device.uuid)), action),
            fault_near=action not in (None, RECOVERY_ACTIONS[0]) or self.refused_with != 0,
            interval_seconds=interval_seconds,
            hold_seconds=hold_seconds,
        )
        return fields | slow

    def _read_slow_values(self, device: _Device) -> dict[str, Any]:
        ask, values = self._calls.ask, device.slow_field_values.read(self._slow_fields)
        links = convert_fields(SLOW_LINK_FIELDS, values) if "links" in self._groups else {}
        return {
            "power_limit_watts": ask(device.power_limit),
            **links,
            **({"fabric": ask(device.fabric)} if "links" in self._groups else {}),
            **(device.health.read_slow(values) if "health" in self._groups else {}),
            **(device.card.read(values) if CARD in self._groups else {}),
        }
