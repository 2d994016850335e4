"""The dialect of nvidia-gpu-mem-monitor: memory by process, whole MiB (the name says MB), a series per PID.

Where the original put words into `pod_name` for processes in no pod, this leaves it empty.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpumap.agent.dialects.common import gpus_by_uuid, mib, sees_processes
from gpumap.model.families import Family, Series
from gpumap.model.snapshot import Snapshot

_LABELS = ("app_pid", "gpu_name", "gpu_uuid", "pod_name", "pod_namespace")


def _rows(snapshot: Snapshot) -> Iterator[Series]:
    if not sees_processes(snapshot):
        return  # the PIDs may be of another PID namespace
    gpus = gpus_by_uuid(snapshot)
    for process in sorted(snapshot.processes, key=lambda one: (one.uuid, one.pid)):
        if process.memory_bytes is not None:
            gpu = gpus.get(process.uuid)
            namespace, pod = process.name.pod_name if process.name is not None else ("", "")
            labels = (str(process.pid), gpu.model if gpu is not None else "", process.uuid, pod, namespace)
            yield Series(labels, mib(process.memory_bytes))


FAMILIES = (Family("pod_used_gpu_mem_MB", "gauge", ". Pod使用的GPU显存大小", _LABELS, _rows),)
