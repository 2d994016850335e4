"""`python -m bench.loop_sweeper PORT INTERVAL`: asks NVML on its event loop, as the obvious exporter does.

Reads what gpumap reads by default of each GPU, through pynvml. Each call that waits keeps every scrape waiting.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import pynvml
from aiohttp import web

from gpumap.agent.exposition import TEXT_TYPE
from gpumap.agent.flags import DEFAULT_GROUPS
from gpumap.agent.nvml_worker.gpm import METRICS
from gpumap.agent.nvml_worker.health import LINK_FIELDS
from gpumap.agent.nvml_worker.reading import field_numbers
from gpumap.agent.service import asked_groups

ALL_LINKS = 0xFFFF_FFFF
CLOCKS = pynvml.NVML_CLOCK_GRAPHICS, pynvml.NVML_CLOCK_SM, pynvml.NVML_CLOCK_MEM, pynvml.NVML_CLOCK_VIDEO
GPM = *METRICS, pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC, pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC
GROUPS = asked_groups(DEFAULT_GROUPS, ())
Values = dict[str, Any]


class Card:
    """A GPU. What it does not support is asked once, as gpumap does."""

    def __init__(self, index: int) -> None:
        self._device = pynvml.nvmlDeviceGetHandleByIndex(index)
        link_fields = {field.number for field in LINK_FIELDS}
        wanted = [(number, ALL_LINKS if number in link_fields else 0) for number in field_numbers(GROUPS)]
        answers = pynvml.nvmlDeviceGetFieldValues(self._device, wanted)
        self._fields = [one for one, answer in zip(wanted, answers, strict=True) if not answer.nvmlReturn]
        self._ecc = [(kind, place) for kind in (0, 1) for place in range(8) if self._counts(kind, place)]
        self._older, self._newer = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
        pynvml.nvmlGpmSampleGet(self._device, self._older)

    def _counts(self, kind: int, place: int) -> bool:
        try:
            pynvml.nvmlDeviceGetMemoryErrorCounter(self._device, kind, pynvml.NVML_AGGREGATE_ECC, place)
        except pynvml.NVMLError:
            return False
        return True

    def read(self) -> Values:
        device = self._device
        memory = pynvml.nvmlDeviceGetMemoryInfo(device, pynvml.nvmlMemory_v2)
        fields = pynvml.nvmlDeviceGetFieldValues(device, self._fields)
        utilization = pynvml.nvmlDeviceGetUtilizationRates(device)
        kept = pynvml.NVML_AGGREGATE_ECC
        lists = (
            pynvml.nvmlDeviceGetComputeRunningProcesses(device),
            pynvml.nvmlDeviceGetGraphicsRunningProcesses(device),
            pynvml.nvmlDeviceGetMPSComputeRunningProcesses(device),
        )
        samples = pynvml.nvmlDeviceGetProcessUtilization(device, 0)
        return {
            "memory": (memory.total, memory.used, memory.free, memory.reserved),
            "utilization": utilization.gpu / 100,
            "controller": utilization.memory / 100,
            "temperature": pynvml.nvmlDeviceGetTemperatureV(device, 0),
            "power": pynvml.nvmlDeviceGetPowerUsage(device) / 1000,
            "power_limit": pynvml.nvmlDeviceGetEnforcedPowerLimit(device) / 1000,
            "energy": pynvml.nvmlDeviceGetTotalEnergyConsumption(device) / 1000,
            "clocks": [pynvml.nvmlDeviceGetClockInfo(device, domain) * 1e6 for domain in CLOCKS],
            "clock_events": pynvml.nvmlDeviceGetCurrentClocksEventReasons(device),
            "performance_state": pynvml.nvmlDeviceGetPerformanceState(device),
            "ecc": [pynvml.nvmlDeviceGetMemoryErrorCounter(device, kind, kept, place) for kind, place in self._ecc],
            "fields": {one.fieldId: one.value.ullVal for one in fields},
            "activity": self._activity(),
            "processes": {one.pid: one.usedGpuMemory for rows in lists for one in rows},
            "samples": {one.pid: (one.smUtil / 100, one.memUtil / 100) for one in samples},
        }

    def _activity(self) -> list[float | None]:
        pynvml.nvmlGpmSampleGet(self._device, self._newer)
        get = pynvml.c_nvmlGpmMetricsGet_t(version=pynvml.NVML_GPM_METRICS_GET_VERSION, numMetrics=len(GPM))
        for metric, wanted in zip(get.metrics, GPM, strict=False):
            metric.metricId = wanted
        get.sample1, get.sample2 = self._older, self._newer
        pynvml.nvmlGpmMetricsGet(get)
        self._older, self._newer = self._newer, self._older
        return [None if one.nvmlReturn else one.value / 100 for one in get.metrics[: len(METRICS)]]


def main(port: int, interval_seconds: float) -> None:
    page = ""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=page.encode(), headers={"Content-Type": TEXT_TYPE})

    async def collect() -> None:
        nonlocal page
        cards = [Card(index) for index in range(pynvml.nvmlDeviceGetCount())]
        while True:
            await asyncio.sleep(interval_seconds)
            page = "".join(f'gpu_power{{index="{index}"}} {card.read()["power"]}\n' for index, card in enumerate(cards))

    async def collecting(_: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(collect())
        yield
        task.cancel()

    pynvml.nvmlInit()
    application = web.Application()
    application.router.add_get("/metrics", metrics)
    application.cleanup_ctx.append(collecting)
    web.run_app(application, host="127.0.0.1", port=port, access_log=None, print=None)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
