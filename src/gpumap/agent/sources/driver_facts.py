"""Asks a real driver for facts, for `gpumap doctor --driver-facts`.

A separate process reads each fact: a driver that crashes or hangs affects only that fact.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys

from gpumap.agent.sources.nvml_process import Worker

QUESTIONS = {
    "versions": "Which driver, NVML and GPUs gave these answers?",
    "process_samples": "Which rows does nvmlDeviceGetProcessUtilization return? How old are they? Which are "
    "impossible?",
    "field_values": "Which types do the byte counters of NVLink have? How fast do they grow? Is the memory "
    "temperature 0 on cards without that sensor?",
    "event_wait": "Does nvmlEventSetWait_v2 with 0 ms return at once with `timeout`?",
    "process_lists": "Which rows and instance ids do the process lists of a GPU and of its MIG devices have?",
    "gpm_scales": "Which GPM metrics answer, also on a partitioned GPU, with which unit and scale?",
}
"""By the name of a fact (`nvml_worker.facts`)."""
LIMIT_SECONDS = 25.0
"""For one fact. Without persistence mode NVML needs one to three seconds for each GPU to start."""


async def read_driver_facts(library: str | None) -> list[dict[str, object]]:
    """Return each fact with its question, and its answer or error."""
    return [
        {"fact": name, "question": question} | await read_fact(name, library) for name, question in QUESTIONS.items()
    ]


async def read_fact(name: str, library: str | None, limit_seconds: float = LIMIT_SECONDS) -> dict[str, object]:
    """Return the answer, or the error."""
    command = [sys.executable, "-P", "-m", "gpumap.agent.nvml_worker.facts", name]
    worker = await Worker.start(command if library is None else [*command, "--library", library])
    try:
        async with asyncio.timeout(limit_seconds):
            line = await worker.line()
        if line is None:
            return {"error": (await worker.obituary()).detail}
        answer: object = json.loads(line)
        return {"answer": answer}
    except TimeoutError:
        return {"error": f"no answer within {limit_seconds:g} s"}
    except ValueError as error:
        return {"error": f"not an answer: {error}"}
    finally:
        worker.kill()
        await worker.last_lines()
        worker.end()
        with contextlib.suppress(TimeoutError):  # it may hang in the driver for ever
            await asyncio.wait_for(worker.ended(), 1.0)
