"""NVIDIA's own binding (nvidia-ml-py) asked for the same GPUs: a second opinion on what gpumap's worker reads.

gpumap asks the library through prototypes of its own, which are small. Whether they fit this node's driver is checked
by `doctor` alone, in a process that ends: `python -m gpumap.agent.second_opinion [LIBRARY]` prints one JSON object.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import sys
from importlib import metadata

from gpumap.model.node_facts import Opinion

DEADLINE_SECONDS = 5.0
END_SECONDS = 1.0


async def ask(library: str) -> Opinion:
    """Never later than the deadline: a driver that hangs keeps the other process, not this one."""
    command = [sys.executable, "-P", "-m", "gpumap.agent.second_opinion", *([library] if library else [])]
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError as error:
        return Opinion(failure=f"cannot start {command[0]}: {error.strerror}")
    try:
        said, _ = await asyncio.wait_for(process.communicate(), DEADLINE_SECONDS)
    except TimeoutError:
        return Opinion(failure=f"no answer within {DEADLINE_SECONDS:g} s")
    finally:
        if process.returncode is None:
            process.kill()
            with contextlib.suppress(TimeoutError):  # it may be in the driver's hands
                await asyncio.wait_for(process.wait(), END_SECONDS)
    try:
        found = json.loads(said)
        gpus = tuple(sorted((str(uuid), int(total)) for uuid, total in found["gpus"]))
        return Opinion(str(found["binding"]), gpus, str(found["failure"]))
    except (ValueError, KeyError, TypeError):
        return Opinion(failure=f"it ended with {process.returncode}")


def main(library: str) -> None:
    """In the other process. What a library prints is none of the answer."""
    out = os.dup(1)
    os.dup2(2, 1)
    try:
        binding, gpus = _look(library)
        answer: dict[str, object] = {"binding": binding, "gpus": gpus, "failure": ""}
    except Exception as error:
        answer = {"binding": "", "gpus": [], "failure": f"{type(error).__name__}: {error}"}
    with open(out, "w", encoding="utf-8") as pipe:
        pipe.write(json.dumps(answer))


def _look(library: str) -> tuple[str, list[tuple[str, int]]]:
    """The binding's name, and uuid and memory of each GPU that tells them."""
    if library:
        ctypes.CDLL(library)  # the loader then knows it by its name, which is all that the binding asks for
    import pynvml

    gpus: list[tuple[str, int]] = []
    pynvml.nvmlInit()
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            device = pynvml.nvmlDeviceGetHandleByIndex(index)
            gpus.append((pynvml.nvmlDeviceGetUUID(device), pynvml.nvmlDeviceGetMemoryInfo(device).total))
        except pynvml.NVMLError:
            continue  # it is down; what gpumap says of it stands in a line of its own
    return f"nvidia-ml-py {metadata.version('nvidia-ml-py')}", gpus


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
