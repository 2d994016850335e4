"""`python -m gpumap.agent.nvml_worker.facts NAME [--library PATH]`: one fact of the driver as a line of JSON on
stdout.

These are facts that only a real driver can show (docs/dev/driver-facts.md). It only reads, for a few seconds. A fact
has no PIDs, UUIDs, serial numbers or names of pods and hosts, so a user can publish it.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from ctypes import byref, c_uint, c_ulonglong
from typing import Any

import pynvml

from gpumap.agent.nvml_worker.codes import word
from gpumap.agent.nvml_worker.field_values import field_rows, finite
from gpumap.agent.nvml_worker.library import Handle, Library, LibraryError, RefusedError
from gpumap.agent.nvml_worker.listener import Events
from gpumap.agent.nvml_worker.processes import NO_ID, NOT_TOLD, SAMPLE, Lists

Fact = dict[str, object]

_PAUSE_SECONDS = 3.0
"""Time between two reads of a counter."""
_GPM_PAUSE_SECONDS = 1.0
_WAIT_MILLISECONDS = (0, 0, 0, 100)
_SLOTS = 4096
_MOST_ROWS = 20
_MIG_SLOTS = 8
_FIELDS = {
    "memory_temperature": pynvml.NVML_FI_DEV_MEMORY_TEMP,
    "nvlink_transmit_kib": pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
    "nvlink_receive_kib": pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
}
_GPM_METRICS = (*range(1, 14), 20, 21, 60, 61, *range(248, 261))
_LISTS = {
    "compute": "nvmlDeviceGetComputeRunningProcesses_v3",
    "graphics": "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "mps": "nvmlDeviceGetMPSComputeRunningProcesses_v3",
}


class _Driver:
    """NVML, initialized, with the handles of its GPUs by index. GPUs without a handle are left out."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.gpus: dict[int, Handle] = {}
        for index in range(library.count()):
            code = self.code("nvmlDeviceGetHandleByIndex_v2", index, byref(pynvml.c_nvmlDevice_t()))
            if not code:
                self.gpus[index] = library.handle(index)

    def code(self, call: str, *arguments: object) -> int:
        """Return NVML's return code."""
        try:
            self.library.ask(call, *arguments)
        except RefusedError as refused:
            return refused.code
        return 0

    def mig_devices(self, gpu: Handle) -> list[Handle]:
        found = []
        for slot in range(_MIG_SLOTS):
            handle = pynvml.c_nvmlDevice_t()
            if not self.code("nvmlDeviceGetMigDeviceHandleByIndex", gpu, slot, byref(handle)):
                found.append(Handle(handle))
        return found

    def or_word(self, ask: Callable[..., object], *arguments: object) -> object:
        """Return the answer, or the word of the code that refuses it."""
        try:
            return ask(*arguments)
        except RefusedError as refused:
            return word(refused.code)

    def of_gpus(self, look: Callable[[Handle], object]) -> list[Fact]:
        return [{"gpu": index, "answer": look(gpu)} for index, gpu in self.gpus.items()]


# --- the facts --------------------------------------------------------------------------------------------------------


def _versions(driver: _Driver) -> Fact:
    library = driver.library

    def card(gpu: Handle) -> Fact:
        return {
            "model": driver.or_word(library.model(gpu).once),
            "compute_capability": driver.or_word(library.compute_capability(gpu).once),
            "mig_enabled": driver.or_word(library.mig_enabled(gpu).once),
        }

    return {
        "driver": driver.or_word(library.driver_version),
        "nvml": driver.or_word(library.nvml_version),
        "cuda": driver.or_word(library.cuda_version),
        "nvidia_ml_py_gpm_metrics": pynvml.NVML_GPM_METRIC_MAX,
        "gpus": driver.of_gpus(card),
    }


def _process_samples(driver: _Driver) -> Fact:
    first = driver.of_gpus(lambda gpu: _samples(driver, gpu))
    time.sleep(_PAUSE_SECONDS)
    return {"first": first, "later": driver.of_gpus(lambda gpu: _samples(driver, gpu))}


def _samples(driver: _Driver, gpu: Handle) -> Fact:
    """Return the answer of a sizing call, and the rows since the beginning and of the last seconds."""
    call, count = "nvmlDeviceGetProcessUtilization", c_uint(0)
    code = driver.code(call, gpu, None, byref(count), c_ulonglong(0))
    listed = _listed_pids(driver, gpu)
    fact: Fact = {"sizing": {"code": word(code), "count": count.value}, "listed_processes": len(listed)}
    for name, seconds in (("all", None), ("last_5_s", 5.0), ("future", -5.0)):
        now = time.time_ns() // 1000
        since = 0 if seconds is None else now - int(seconds * 1e6)
        rows = (pynvml.c_nvmlProcessUtilizationSample_t * _SLOTS)()
        count = c_uint(_SLOTS)
        code = driver.code(call, gpu, rows, byref(count), c_ulonglong(since))
        samples = list(SAMPLE.iter_unpack(bytes(rows)))[: 0 if code else min(count.value, _SLOTS)]
        fact[name] = {
            "code": word(code),
            "count": count.value,
            "rows_above_100_percent": sum(max(row[2:]) > 100 for row in samples),
            "rows_not_newer_than_asked": sum(row[1] <= since for row in samples),
            "rows_of_no_listed_process": sum(row[0] not in listed for row in samples),
            "empty_rows": sum(not any(row) for row in samples),
            "rows": [
                {
                    "listed": pid in listed,
                    "age_seconds": round((now - stamp) / 1e6, 3),
                    "sm": sm,
                    "memory": memory,
                    "encoder": encoder,
                    "decoder": decoder,
                }
                for pid, stamp, sm, memory, encoder, decoder in samples[:_MOST_ROWS]
            ],
        }
    return fact


def _listed_pids(driver: _Driver, gpu: Handle) -> set[int]:
    pids: set[int] = set()
    for call in Lists(driver.library).of(gpu):
        try:
            pids.update(row.pid for row in call.once().rows())
        except RefusedError:
            pass
    return pids


def _field_values(driver: _Driver) -> Fact:
    """Return the type of each value, and its increase."""

    def look() -> dict[int, dict[str, dict[str, object]]]:
        return {
            index: dict(zip(_FIELDS, field_rows(driver.library, gpu, tuple(_FIELDS.values())), strict=True))
            for index, gpu in driver.gpus.items()
        }

    first = look()
    time.sleep(_PAUSE_SECONDS)
    return {"seconds_between": _PAUSE_SECONDS, "first": _by_index(first), "later": _by_index(look())}


def _by_index(found: dict[int, dict[str, dict[str, object]]]) -> list[Fact]:
    return [{"gpu": index, "fields": fields} for index, fields in found.items()]


def _event_wait(driver: _Driver) -> Fact:
    """Return the wait times of an event set for each GPU, and of an empty set."""
    return {"gpus": driver.of_gpus(lambda gpu: _waits(driver, gpu)), "empty_set": _waits(driver, None)}


def _waits(driver: _Driver, gpu: Handle | None) -> Fact:
    events = Events(driver.library)
    event_set = events.create()
    try:
        types = c_ulonglong()
        code = driver.code("nvmlDeviceGetSupportedEventTypes", gpu, byref(types)) if gpu else 0
        registered = driver.or_word(events.register, gpu, event_set) if gpu else None
        waits = []
        for milliseconds in _WAIT_MILLISECONDS:
            event, began = pynvml.c_nvmlEventData_t(), time.monotonic()
            waited = driver.code("nvmlEventSetWait_v2", event_set, byref(event), milliseconds)
            seconds = round(time.monotonic() - began, 6)
            waits.append({"milliseconds": milliseconds, "code": word(waited), "seconds": seconds})
        return {
            "types": word(code) if code else hex(types.value),
            "registered": registered or "success",
            "waits": waits,
        }
    finally:
        events.free(event_set)


def _process_lists(driver: _Driver) -> Fact:
    def look(gpu: Handle) -> Fact:
        mig = [_lists_of(driver, handle) for handle in driver.mig_devices(gpu)]
        return {"gpu": _lists_of(driver, gpu), "mig_devices": mig}

    return {"gpus": driver.of_gpus(look)}


def _used_bytes(driver: _Driver, device: Handle) -> int | None:
    memory = driver.library.memory(device)[0].once()
    return memory.used_bytes if memory else None


def _lists_of(driver: _Driver, device: Handle) -> Fact:
    fact: Fact = {"memory_used": driver.or_word(lambda: _used_bytes(driver, device))}
    for kind, call in _LISTS.items():
        rows, count = (pynvml.c_nvmlProcessInfo_v2_t * _SLOTS)(), c_uint(_SLOTS)
        code = driver.code(call, device, byref(count), rows)
        used = rows[: 0 if code else min(count.value, _SLOTS)]
        known = [row.usedGpuMemory for row in used if row.usedGpuMemory != NOT_TOLD]
        fact[kind] = {
            "code": word(code),
            "count": count.value,
            "without_memory": len(used) - len(known),
            "memory_sum": sum(known),
            "instances": sorted({f"{_id(row.gpuInstanceId)}/{_id(row.computeInstanceId)}" for row in used}),
        }
    return fact


def _id(number: int) -> str:
    return "none" if number == NO_ID else str(number)


def _gpm_scales(driver: _Driver) -> Fact:
    samples = {index: _gpm_samples(driver, gpu) for index, gpu in driver.gpus.items()}
    time.sleep(_GPM_PAUSE_SECONDS)
    gpus = []
    for index, gpu in driver.gpus.items():
        later = _gpm_samples(driver, gpu)
        measured = {name: _metrics(driver, samples[index].get(name), sample) for name, sample in later.items()}
        for sample in (*samples[index].values(), *later.values()):
            if not isinstance(sample, str):
                driver.code("nvmlGpmSampleFree", sample)
        busy = driver.or_word(driver.library.utilization_ratios(gpu).once)
        gpus.append({"gpu": index, "utilization_ratios": busy, "measured": measured})
    return {"seconds_between": _GPM_PAUSE_SECONDS, "gpus": gpus}


def _gpm_samples(driver: _Driver, gpu: Handle) -> dict[str, Any]:
    """For the GPU and for each GPU instance: return a sample, or the word of the code that refuses it."""
    found = {"gpu": _gpm_sample(driver, "nvmlGpmSampleGet", gpu)}
    for device in driver.mig_devices(gpu):
        instance = driver.or_word(driver.library.gpu_instance_id(device).once)
        if isinstance(instance, int):
            found[f"gpu_instance_{instance}"] = _gpm_sample(driver, "nvmlGpmMigSampleGet", gpu, instance)
    return found


def _gpm_sample(driver: _Driver, call: str, *of: object) -> Any:
    sample = pynvml.c_nvmlGpmSample_t()
    code = driver.code("nvmlGpmSampleAlloc", byref(sample))
    if code:
        return word(code)
    code = driver.code(call, *of, sample)
    if code:
        driver.code("nvmlGpmSampleFree", sample)
        return word(code)
    return sample


def _metrics(driver: _Driver, older: Any, newer: Any) -> object:
    """Return the values by metric id. A refused one has the word of its code."""
    if older is None or isinstance(older, str) or isinstance(newer, str):
        return newer if isinstance(newer, str) else older
    get = pynvml.c_nvmlGpmMetricsGet_t(pynvml.NVML_GPM_METRICS_GET_VERSION, len(_GPM_METRICS))
    get.sample1, get.sample2 = older, newer
    for metric, wanted in zip(get.metrics, _GPM_METRICS, strict=False):
        metric.metricId = wanted
    code = driver.code("nvmlGpmMetricsGet", byref(get))
    if code:
        return word(code)
    metrics = get.metrics[: len(_GPM_METRICS)]
    return {str(one.metricId): word(one.nvmlReturn) if one.nvmlReturn else finite(one.value) for one in metrics}


FACTS: dict[str, Callable[[_Driver], Fact]] = {
    "versions": _versions,
    "process_samples": _process_samples,
    "field_values": _field_values,
    "event_wait": _event_wait,
    "process_lists": _process_lists,
    "gpm_scales": _gpm_scales,
}


def read_fact(name: str, path: str | None) -> Fact:
    """Print the fact, or why there is none."""
    library = Library(path)
    try:
        library.open()
        return FACTS[name](_Driver(library))
    except LibraryError as error:
        return {"refused": error.reason}
    except RefusedError as refused:
        return {"refused": f"{refused.call}: {word(refused.code)}"}


def main(arguments: Sequence[str]) -> None:
    match arguments:
        case [name]:
            fact = read_fact(name, None)
        case [name, "--library", path]:
            fact = read_fact(name, path)
        case _:
            raise SystemExit(f"usage: facts {_one_of(FACTS)} [--library PATH]")
    print(json.dumps(fact, allow_nan=False), flush=True)


def _one_of(names: Iterable[str]) -> str:
    return "|".join(names)


if __name__ == "__main__":
    main(sys.argv[1:])
