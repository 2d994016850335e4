"""One GPU's reading as a JSON object, and back: what the wire carries, and captures keep."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

from gpumap.agent.nvml_worker import fields
from gpumap.agent.nvml_worker.fields import Fields
from gpumap.model.readings import Activity, DeviceMemory, GpuProcess, GpuReading, MigInstance, ProcessSample, Uuid

T = TypeVar("T")
_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)

# --- out --------------------------------------------------------------------------------------------------------------


def gpu_object(gpu: GpuReading) -> dict[str, object]:
    """A reading as a JSON object. Processes and samples are rows, in the order of their classes' fields."""
    plain = _gpu_but_processes(gpu)
    if gpu.processes is not None:
        plain["processes"] = [_process_row(process) for process in gpu.processes]
    return plain


def _gpu_but_processes(gpu: GpuReading) -> dict[str, object]:
    plain: dict[str, object] = {name: value for name, blank in _BLANK_VALUES if (value := getattr(gpu, name)) != blank}
    if gpu.memory:
        plain["memory"] = _memory_row(gpu.memory)
    if gpu.instances:
        plain["instances"] = [_instance_object(instance) for instance in gpu.instances]
    if gpu.samples is not None:
        plain["samples"] = gpu.samples  # each a tuple, and so a row
    return plain


_BLANK = GpuReading(index=-1)
_BLANK_VALUES = tuple(
    (name, getattr(_BLANK, name)) for name in GpuReading._fields if name not in ("processes", "samples")
)


def _instance_object(instance: MigInstance) -> dict[str, object]:
    return {
        "uuid": instance.uuid,
        "gpu_instance_id": instance.gpu_instance_id,
        "compute_instance_id": instance.compute_instance_id,
        "profile": instance.profile,
        "compute_slices": instance.compute_slices,
        "memory": _memory_row(instance.memory) if instance.memory else None,
        "processes": None if instance.processes is None else [_process_row(process) for process in instance.processes],
        **{name: value for name, blank in _BLANK_OF_INSTANCE if (value := getattr(instance, name)) != blank},
    }


_BLANK_OF_INSTANCE = tuple(MigInstance._field_defaults.items())
"""Left out where they have their default, as readings from before they were there have it."""


def _memory_row(memory: DeviceMemory) -> tuple[int | None, ...]:
    return memory.total_bytes, memory.used_bytes, memory.free_bytes, memory.reserved_bytes


def _process_row(process: GpuProcess) -> tuple[object, ...]:
    return process.pid, process.used_memory_bytes, process.types


class GpuText:
    """The JSON of one GPU's readings: the text of its processes is made once a change."""

    def __init__(self) -> None:
        self._processes: tuple[GpuProcess, ...] = ()
        self._text = "[]"

    def __call__(self, gpu: GpuReading) -> str:
        if not gpu.processes:
            return _JSON.encode(gpu_object(gpu))
        if gpu.processes is not self._processes:
            self._processes = gpu.processes
            self._text = _JSON.encode([_process_row(process) for process in gpu.processes])
        rest = _JSON.encode(_gpu_but_processes(gpu))  # an object that is never empty: its index is in it
        return f'{rest[:-1]},"processes":{self._text}}}'


# --- in ---------------------------------------------------------------------------------------------------------------


class KnownRows:
    """The last rows of a GPU's line as JSON gave them, and what they were made into."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[object, tuple[Any, ...]]] = {}

    def each(self, name: str, parse: Callable[[object], T]) -> Callable[[object], tuple[T, ...]]:
        """`fields.each`; the same rows as the last time give the very same tuple."""

        def made(rows: object) -> tuple[T, ...]:
            before = self._made.get(name)
            if before is None or rows != before[0]:
                before = self._made[name] = rows, fields.each(parse)(rows)
            return before[1]

        return made


def gpu_from_object(value: object) -> GpuReading:
    """The inverse of `gpu_object`. Raises `ValueError`."""
    return read_gpu(Fields(value), KnownRows())


def read_gpu(gpu: Fields, known: KnownRows) -> GpuReading:
    """A reading's fields, rows that are `known` as the very same tuples. Raises `ValueError`."""
    uuid = gpu.optional("uuid", fields.text)
    return GpuReading(
        index=gpu.integer("index"),
        fault=gpu.optional("fault", fields.text),
        stuck_seconds=gpu.optional("stuck_seconds", fields.number) or 0.0,
        uuid=None if uuid is None else Uuid(uuid),
        minor=gpu.optional("minor", fields.integer),
        pci_bus_id=gpu.optional("pci_bus_id", fields.text) or "",
        model=gpu.optional("model", fields.text) or "",
        memory=gpu.optional("memory", _memory),
        partitioned=gpu.optional("partitioned", fields.flag) or False,
        max_mig_devices=gpu.optional("max_mig_devices", fields.integer),
        instances=gpu.optional("instances", fields.each(_instance)) or (),
        processes=gpu.optional("processes", known.each("processes", _process)),
        samples=gpu.optional("samples", known.each("samples", _sample)),
        sampled_seconds=gpu.optional("sampled_seconds", fields.number),
        utilization_ratio=gpu.optional("utilization_ratio", fields.number),
        memory_controller_ratio=gpu.optional("memory_controller_ratio", fields.number),
        encoder_ratio=gpu.optional("encoder_ratio", fields.number),
        decoder_ratio=gpu.optional("decoder_ratio", fields.number),
        temperatures_celsius=gpu.optional("temperatures_celsius", _NUMBERS) or (),
        power_watts=gpu.optional("power_watts", fields.number),
        power_limit_watts=gpu.optional("power_limit_watts", fields.number),
        energy_joules=gpu.optional("energy_joules", fields.number),
        clocks_hertz=gpu.optional("clocks_hertz", known.each("clocks_hertz", _word_and_number)) or (),
        clock_events=gpu.optional("clock_events", known.each("clock_events", _word_and_flag)) or (),
        clock_event_seconds=gpu.optional("clock_event_seconds", known.each("clock_event_seconds", _word_and_number))
        or (),
        performance_state=gpu.optional("performance_state", fields.integer),
        fan_ratios=gpu.optional("fan_ratios", _NUMBERS) or (),
        ecc_errors=gpu.optional("ecc_errors", known.each("ecc_errors", _ecc_errors)) or (),
        remapped_rows=gpu.optional("remapped_rows", known.each("remapped_rows", _word_and_count)) or (),
        row_remap_pending=gpu.optional("row_remap_pending", fields.flag),
        row_remap_failure=gpu.optional("row_remap_failure", fields.flag),
        retired_pages=gpu.optional("retired_pages", fields.each(_word_and_count)) or (),
        recovery_action=gpu.optional("recovery_action", fields.text),
        ecc_totals=gpu.optional("ecc_totals", known.each("ecc_totals", _ecc_errors)) or (),
        retired_pages_pending=gpu.optional("retired_pages_pending", fields.flag),
        compute_mode=gpu.optional("compute_mode", fields.text),
        power_limits_watts=gpu.optional("power_limits_watts", known.each("power_limits_watts", _word_and_number)) or (),
        max_clocks_hertz=gpu.optional("max_clocks_hertz", known.each("max_clocks_hertz", _word_and_number)) or (),
        vbios_version=gpu.optional("vbios_version", fields.text) or "",
        compute_capability=gpu.optional("compute_capability", fields.text) or "",
        pcie_transmit_bytes=gpu.optional("pcie_transmit_bytes", fields.integer),
        pcie_receive_bytes=gpu.optional("pcie_receive_bytes", fields.integer),
        nvlink_transmit_bytes=gpu.optional("nvlink_transmit_bytes", fields.integer),
        nvlink_receive_bytes=gpu.optional("nvlink_receive_bytes", fields.integer),
        pcie_replays=gpu.optional("pcie_replays", fields.integer),
        activity=gpu.optional("activity", _activity),
        refusals=gpu.optional("refusals", fields.each(_word_and_count)) or (),
    )


def _memory(value: object) -> DeviceMemory:
    total, used, free, reserved = fields.row(value, 4)[:4]
    return DeviceMemory(
        fields.integer(total), fields.integer(used), fields.integer(free), fields.optional_integer(reserved)
    )


def _process(value: object) -> GpuProcess:
    pid, used, types = fields.row(value, 3)[:3]
    return GpuProcess(fields.integer(pid), fields.optional_integer(used), fields.text(types))


def _sample(value: object) -> ProcessSample:
    pid, sm, controller, encoder, decoder = fields.row(value, 5)[:5]
    # How the worker writes each of a thousand of them; whatever else it may be costs more to find out.
    if (
        type(pid) is int
        and type(sm) is type(controller) is type(encoder) is type(decoder) is float
        and (0.0 <= sm <= 1.0 and 0.0 <= controller <= 1.0)
        and (0.0 <= encoder <= 1.0 and 0.0 <= decoder <= 1.0)
    ):
        return ProcessSample(pid, sm, controller, encoder, decoder)
    return ProcessSample(
        fields.integer(pid),
        fields.number(sm),
        fields.number(controller),
        fields.number(encoder),
        fields.number(decoder),
    )


def _word_and_number(value: object) -> tuple[str, float]:
    word, number = fields.row(value, 2)[:2]
    return fields.text(word), fields.number(number)


_NUMBERS = fields.each(_word_and_number)


def _word_and_count(value: object) -> tuple[str, int]:
    word, count = fields.row(value, 2)[:2]
    return fields.text(word), fields.integer(count)


def _word_and_flag(value: object) -> tuple[str, bool]:
    word, flag = fields.row(value, 2)[:2]
    return fields.text(word), fields.flag(flag)


def _ecc_errors(value: object) -> tuple[str, str, int]:
    kind, location, count = fields.row(value, 3)[:3]
    return fields.text(kind), fields.text(location), fields.integer(count)


def _activity(value: object) -> Activity:
    ratios = [None if one is None else fields.number(one) for one in fields.row(value, 4)[:4]]
    return Activity(*ratios)


def _instance(value: object) -> MigInstance:
    instance = Fields(value)
    return MigInstance(
        uuid=Uuid(instance.text("uuid")),
        gpu_instance_id=instance.integer("gpu_instance_id"),
        compute_instance_id=instance.integer("compute_instance_id"),
        profile=instance.text("profile"),
        compute_slices=instance.optional("compute_slices", fields.integer),
        memory=instance.optional("memory", _memory),
        processes=instance.optional("processes", fields.each(_process)),
        profile_id=instance.optional("profile_id", fields.integer),
        placement_start=instance.optional("placement_start", fields.integer),
        placement_size=instance.optional("placement_size", fields.integer),
        denied=instance.optional("denied", fields.flag) or False,
        activity=instance.optional("activity", _activity),
    )
