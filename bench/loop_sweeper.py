"""`python -m bench.loop_sweeper PORT INTERVAL`: asks NVML on its event loop, as the obvious exporter does.

Reads about what gpumap reads of each GPU, through pynvml. Each call that waits keeps every scrape waiting.
"""

import asyncio
import sys
from collections.abc import AsyncIterator

import pynvml
from aiohttp import web

from gpumap.agent.exposition import TEXT_TYPE


def sweep() -> str:
    lines = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        device = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory = pynvml.nvmlDeviceGetMemoryInfo(device, pynvml.nvmlMemory_v2)
        values = {
            "memory_used": memory.used,
            "utilization": pynvml.nvmlDeviceGetUtilizationRates(device).gpu,
            "encoder": pynvml.nvmlDeviceGetEncoderUtilization(device)[0],
            "decoder": pynvml.nvmlDeviceGetDecoderUtilization(device)[0],
            "temperature": pynvml.nvmlDeviceGetTemperatureV(device, 0),
            "memory_temperature": pynvml.nvmlDeviceGetFieldValues(device, [82])[0].value.uiVal,
            "power": pynvml.nvmlDeviceGetPowerUsage(device),
            "power_limit": pynvml.nvmlDeviceGetEnforcedPowerLimit(device),
            "energy": pynvml.nvmlDeviceGetTotalEnergyConsumption(device),
        }
        lines += [f'gpu_{name}{{index="{index}"}} {value}\n' for name, value in values.items()]
        for listed in (
            pynvml.nvmlDeviceGetComputeRunningProcesses(device),
            pynvml.nvmlDeviceGetGraphicsRunningProcesses(device),
            pynvml.nvmlDeviceGetMPSComputeRunningProcesses(device),
        ):
            for process in listed:
                lines.append(f'gpu_process_memory{{index="{index}",pid="{process.pid}"}} {process.usedGpuMemory}\n')
        for sample in pynvml.nvmlDeviceGetProcessUtilization(device, 0):
            lines.append(f'gpu_process_sm{{index="{index}",pid="{sample.pid}"}} {sample.smUtil}\n')
    return "".join(lines)


def main(port: int, interval_seconds: float) -> None:
    page = ""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=page.encode(), headers={"Content-Type": TEXT_TYPE})

    async def collect() -> None:
        nonlocal page
        while True:
            page = sweep()
            await asyncio.sleep(interval_seconds)

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
