"""Print facts that only a real driver can show, as JSON (docs/dev/driver-facts.md). It needs only nvidia-ml-py.

kubectl exec -i --namespace gpumap POD -- python3 - < scripts/driver_facts.py > driver-facts.json

It only reads, for at most 3 minutes. A process of its own reads each fact: a driver that crashes or hangs affects only
that fact. The output has no PIDs, UUIDs, serial numbers and names of pods and hosts, so a user can publish it.
"""

import ctypes
import json
import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from ctypes import byref, c_uint, c_ulonglong
from typing import Any

import pynvml

LIMIT_SECONDS = float(os.environ.get("DRIVER_FACTS_LIMIT_SECONDS", "25"))
"""For one fact. Without persistence mode NVML needs one to three seconds for each GPU to start."""
LIBRARY = os.environ.get("GPUMAP_NVML_LIBRARY", "")
"""As for the agent: the chart sets the variable if the loader does not find the library."""
PAUSE_SECONDS = 3.0
"""Time between two reads of a counter."""
ALL_LINKS = 0xFFFF_FFFF
FIELDS = {
    "memory_temperature": (pynvml.NVML_FI_DEV_MEMORY_TEMP, 0),
    "nvlink_transmit_kib": (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, ALL_LINKS),
    "nvlink_receive_kib": (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, ALL_LINKS),
    "nvlink_replay_errors": (pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL, 0),
    "nvlink_crc_flit_errors": (pynvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL, 0),
}
VALUE_FIELDS = [name for name, _ in pynvml.c_nvmlValue_t._fields_]
"""Fields of the union by nvmlValueType_t, in its order."""
GPM_METRICS = (*range(1, 14), 20, 21, 60, 61, *range(248, 261))
LISTS = {
    "compute": "nvmlDeviceGetComputeRunningProcesses_v3",
    "graphics": "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "mps": "nvmlDeviceGetMPSComputeRunningProcesses_v3",
}
SLOTS, MIG_SLOTS, MOST_ROWS = 4096, 8, 20
NOT_AVAILABLE = pynvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value
WORDS = {code: name[11:].lower() for name, code in vars(pynvml).items() if name.startswith("NVML_ERROR_")}

Fact = dict[str, object]


def call(name: str, *arguments: object) -> str:
    """Call NVML. Return the name of its return code."""
    try:
        code = pynvml._nvmlGetFunctionPointer(name)(*arguments)
    except pynvml.NVMLError as error:
        code = error.value
    return WORDS.get(code, f"code_{code}") if code else "success"


def ask(function: Callable[..., Any], *arguments: object) -> Any:
    """Return the answer of a function of pynvml, or the name of the code that refuses it."""
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        return WORDS.get(error.value, f"code_{error.value}")


def of_each_gpu(look: Callable[[Any], Any]) -> list[tuple[int, Any]]:
    """Return index and answer of each GPU that has a handle."""
    handles = ((index, ask(pynvml.nvmlDeviceGetHandleByIndex, index)) for index in range(pynvml.nvmlDeviceGetCount()))
    return [(index, look(gpu)) for index, gpu in handles if not isinstance(gpu, str)]


def of_gpus(look: Callable[[Any], object]) -> list[Fact]:
    return [{"gpu": index, "answer": answer} for index, answer in of_each_gpu(look)]


def twice(look: Callable[[Any], object]) -> Fact:
    first = of_gpus(look)
    time.sleep(PAUSE_SECONDS)
    return {"seconds_between": PAUSE_SECONDS, "first": first, "later": of_gpus(look)}


def mig_devices(gpu: Any) -> list[Any]:
    devices = (ask(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu, slot) for slot in range(MIG_SLOTS))
    return [device for device in devices if not isinstance(device, str)]


def finite(value: float) -> float | str:
    """Return a number that JSON supports, else its name."""
    return value if math.isfinite(value) else str(value)


# --- the facts --------------------------------------------------------------------------------------------------------


def versions() -> Fact:
    def card(gpu: Any) -> Fact:
        return {
            "model": ask(pynvml.nvmlDeviceGetName, gpu),
            "compute_capability": ask(pynvml.nvmlDeviceGetCudaComputeCapability, gpu),
            "mig_mode": ask(pynvml.nvmlDeviceGetMigMode, gpu),
        }

    return {
        "driver": ask(pynvml.nvmlSystemGetDriverVersion),
        "nvml": ask(pynvml.nvmlSystemGetNVMLVersion),
        "cuda": ask(pynvml.nvmlSystemGetCudaDriverVersion_v2),
        "nvidia_ml_py_gpm_metrics": pynvml.NVML_GPM_METRIC_MAX,
        "gpus": of_gpus(card),
    }


def samples(gpu: Any) -> Fact:
    """Return the answer of a sizing call, and the rows since the beginning and of the last seconds."""
    name, count = "nvmlDeviceGetProcessUtilization", c_uint(0)
    code = call(name, gpu, None, byref(count), c_ulonglong(0))
    listed = {row.pid for kind in LISTS.values() for row in process_rows(kind, gpu)[2]}
    fact: Fact = {"sizing": {"code": code, "count": count.value}, "listed_processes": len(listed)}
    for part, seconds in (("all", None), ("last_5_s", 5.0), ("future", -5.0)):
        now = time.time_ns() // 1000
        since = 0 if seconds is None else now - int(seconds * 1e6)
        buffer, count = (pynvml.c_nvmlProcessUtilizationSample_t * SLOTS)(), c_uint(SLOTS)
        code = call(name, gpu, buffer, byref(count), c_ulonglong(since))
        rows = buffer[: min(count.value, SLOTS) if code == "success" else 0]
        values = [(row.smUtil, row.memUtil, row.encUtil, row.decUtil) for row in rows]
        filled = [row.pid or row.timeStamp or any(ratios) for row, ratios in zip(rows, values, strict=True)]
        fact[part] = {
            "code": code,
            "count": count.value,
            "rows_above_100_percent": sum(max(ratios) > 100 for ratios in values),
            "rows_not_newer_than_asked": sum(row.timeStamp <= since for row in rows),
            "rows_of_no_listed_process": sum(row.pid not in listed for row in rows),
            "empty_rows": sum(not is_filled for is_filled in filled),
            "rows": [
                {
                    "listed": row.pid in listed,
                    "age_seconds": round((now - row.timeStamp) / 1e6, 3),
                    **dict(zip(("sm", "memory", "encoder", "decoder"), ratios, strict=True)),
                }
                for row, ratios in list(zip(rows, values, strict=True))[:MOST_ROWS]
            ],
        }
    return fact


def field_values(gpu: Any) -> object:
    rows = ask(pynvml.nvmlDeviceGetFieldValues, gpu, list(FIELDS.values()))
    return rows if isinstance(rows, str) else {name: field_row(row) for name, row in zip(FIELDS, rows, strict=True)}


def field_row(row: Any) -> Fact:
    if row.nvmlReturn:
        return {"code": WORDS.get(row.nvmlReturn, f"code_{row.nvmlReturn}")}
    kind = VALUE_FIELDS[row.valueType] if row.valueType < len(VALUE_FIELDS) else None
    value = finite(getattr(row.value, kind)) if kind else None
    return {"code": "success", "type": kind or row.valueType, "value": value, "timestamp_us": row.timestamp}


def event_wait(gpu: Any) -> Fact:
    """Return the wait times of an event set. `gpu` is None for an empty set."""
    events, types = ask(pynvml.nvmlEventSetCreate), c_ulonglong()
    if isinstance(events, str):
        return {"created": events}
    code = call("nvmlDeviceGetSupportedEventTypes", gpu, byref(types)) if gpu else "success"
    xids = c_ulonglong(pynvml.nvmlEventTypeXidCriticalError)
    registered = call("nvmlDeviceRegisterEvents", gpu, xids, events) if gpu else None
    waits = []
    for milliseconds in (0, 0, 0, 100):
        began = time.monotonic()
        waited = call("nvmlEventSetWait_v2", events, byref(pynvml.c_nvmlEventData_t()), milliseconds)
        waits.append({"milliseconds": milliseconds, "code": waited, "seconds": round(time.monotonic() - began, 6)})
    ask(pynvml.nvmlEventSetFree, events)
    return {"types": hex(types.value) if code == "success" else code, "registered": registered, "waits": waits}


def process_rows(name: str, device: Any) -> tuple[str, int, list[Any]]:
    """Return the code, the number of processes and the rows."""
    buffer, count = (pynvml.c_nvmlProcessInfo_v2_t * SLOTS)(), c_uint(SLOTS)
    code = call(name, device, byref(count), buffer)
    return code, count.value, buffer[: min(count.value, SLOTS) if code == "success" else 0]


def lists(device: Any) -> Fact:
    memory = ask(pynvml.nvmlDeviceGetMemoryInfo, device)
    fact: Fact = {"memory_used": memory if isinstance(memory, str) else memory.used}
    for kind, name in LISTS.items():
        code, count, rows = process_rows(name, device)
        known = [row.usedGpuMemory for row in rows if row.usedGpuMemory != NOT_AVAILABLE]
        fact[kind] = {
            "code": code,
            "count": count,
            "without_memory": len(rows) - len(known),
            "memory_sum": sum(known),
            "instances": sorted({f"{id_of(row.gpuInstanceId)}/{id_of(row.computeInstanceId)}" for row in rows}),
        }
    return fact


def id_of(number: int) -> str:
    return "none" if number == 0xFFFF_FFFF else str(number)


def gpm_scales() -> Fact:
    """Measure each GPU as a whole, and each GPU instance."""
    first = dict(of_each_gpu(gpm_samples))
    time.sleep(1.0)

    def measure(index: int, gpu: Any) -> Fact:
        rates, later = ask(pynvml.nvmlDeviceGetUtilizationRates, gpu), gpm_samples(gpu)
        return {
            "gpu": index,
            "utilization_percent": rates if isinstance(rates, str) else [rates.gpu, rates.memory],
            "measured": {name: metrics(first.get(index, {}).get(name), sample) for name, sample in later.items()},
        }

    return {"gpus": [measure(index, gpu) for index, gpu in of_each_gpu(lambda gpu: gpu)]}


def gpm_samples(gpu: Any) -> dict[str, Any]:
    """Return a sample, or the name of the code that refuses it. The process ends soon and frees them."""
    samples = {"gpu": gpm_sample("nvmlGpmSampleGet", gpu)}
    for device in mig_devices(gpu):
        instance = ask(pynvml.nvmlDeviceGetGpuInstanceId, device)
        if isinstance(instance, int):
            samples[f"gpu_instance_{instance}"] = gpm_sample("nvmlGpmMigSampleGet", gpu, instance)
    return samples


def gpm_sample(name: str, *of: object) -> Any:
    sample = ask(pynvml.nvmlGpmSampleAlloc)
    code = "success" if isinstance(sample, str) else call(name, *of, sample)
    return sample if code == "success" else code


def metrics(older: Any, newer: Any) -> object:
    """Return the values by metric id. A refused one has the name of its code."""
    for sample in (older, newer):
        if sample is None or isinstance(sample, str):
            return sample
    get = pynvml.c_nvmlGpmMetricsGet_t(pynvml.NVML_GPM_METRICS_GET_VERSION, len(GPM_METRICS))
    get.sample1, get.sample2 = older, newer
    for metric, wanted in zip(get.metrics, GPM_METRICS, strict=False):
        metric.metricId = wanted
    code = call("nvmlGpmMetricsGet", byref(get))
    if code != "success":
        return code
    rows = get.metrics[: len(GPM_METRICS)]
    return {str(row.metricId): WORDS.get(row.nvmlReturn) if row.nvmlReturn else finite(row.value) for row in rows}


FACTS: dict[str, tuple[str, Callable[[], Fact]]] = {
    "versions": ("Which driver, NVML and GPUs gave these answers?", versions),
    "process_samples": (
        "Which rows does nvmlDeviceGetProcessUtilization return? How old are they? Which are impossible?",
        lambda: twice(samples),
    ),
    "field_values": (
        "Which types do the byte counters of NVLink have? How fast do they grow? Is the memory temperature 0 on cards "
        "without that sensor?",
        lambda: twice(field_values),
    ),
    "event_wait": (
        "Does nvmlEventSetWait_v2 with 0 ms return at once with `timeout`?",
        lambda: {"gpus": of_gpus(event_wait), "empty_set": event_wait(None)},
    ),
    "process_lists": (
        "Which rows and instance ids do the process lists of a GPU and of its MIG devices have?",
        lambda: {"gpus": of_gpus(lambda gpu: {"gpu": lists(gpu), "mig_devices": [*map(lists, mig_devices(gpu))]})},
    ),
    "gpm_scales": (
        "Which GPM metrics answer, also on a partitioned GPU, with which unit and scale?",
        gpm_scales,
    ),
}


# --- processes --------------------------------------------------------------------------------------------------------


def read(fact: Callable[[], Fact]) -> Fact:
    """Load the library and return the fact."""
    try:
        if LIBRARY:
            pynvml.nvmlLib = ctypes.CDLL(LIBRARY)
        pynvml.nvmlInit()
        return {"answer": fact()}
    except pynvml.NVMLError as error:
        return {"error": WORDS.get(error.value, f"code_{error.value}")}
    except OSError:
        return {"error": "library_not_found"}


def in_child(fact: Callable[[], Fact]) -> Fact:
    """Read a fact in a process of its own, and end it after its time."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        with open(writer, "w") as file:
            json.dump(read(fact), file, allow_nan=False)
        os._exit(0)
    os.close(writer)
    text, until = b"", time.monotonic() + LIMIT_SECONDS
    while select.select([reader], [], [], max(until - time.monotonic(), 0.0))[0]:
        piece = os.read(reader, 1 << 16)
        if not piece:
            _, status = os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(status)
            return json.loads(text) if not code else {"error": f"the process ended with {code}"}
        text += piece
    os.kill(child, signal.SIGKILL)  # it may hang in the driver for ever: nothing waits for it
    return {"error": f"no answer within {LIMIT_SECONDS:g} s"}


def main() -> int:
    """Print every fact. Return 1 if the driver answers none."""
    facts = [{"fact": name, "question": question, **in_child(fact)} for name, (question, fact) in FACTS.items()]
    print(json.dumps({"facts": facts}, indent=2), flush=True)
    return 0 if any("answer" in fact for fact in facts) else 1


if __name__ == "__main__":
    sys.exit(main())
