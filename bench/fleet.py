"""F1 and P16: 5 000 nodes with 8 GPUs each, scraped by a real Prometheus without rules, and what a look at them takes.

The nodes are pages that one process serves, the snapshot's time apart always the same; Prometheus scrapes each of them.
"""

from __future__ import annotations

import random
import resource
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from bench.figures import Figure, median, noise
from bench.pages import filled, name_node, serve, serving
from gpumap.model.names import FINDINGS
from tests.tools import BIN

NODES, GPUS = 5_000, 8
SCRAPE_SECONDS = 60
COMMANDS = (
    *(("waste",), ("waste", "--by", "node"), ("waste", "-n", "team-7"), ("waste", "-o", "json")),
    *(("map",), ("top",), ("top", "--by", "node"), ("top", "-n", "team-7"), ("map", "--node", "gpu-0007")),
    ("top", "--all"),
)
"""No server of F1 has recording rules."""
_CARD_BYTES = 85_520_809_984
_SOURCES = ("kubelet", "nvml", "procfs", "pod_identity")
_CAPABILITIES = ("pid_visibility", "device_checkpoint", "pod_logs", "push", "process_utilization", "gpm", "xid_events")
_OWNERS = ("assigned", "unassigned", "gone", "host", "unknown")


def fleet(wanted: frozenset[str]) -> Iterator[Figure]:
    """Fill a Prometheus, then run each command once. P16 is one of them, several times."""
    if not (BIN / "prometheus").exists():
        yield Figure("F1", "a look at 5 000 nodes", None, None, "prometheus is missing: run `make tools`")
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        serving("bench.fleet") as url,
        filled(Path(folder), url, NODES, SCRAPE_SECONDS) as server,
    ):
        count = int(server.api("status/tsdb")["headStats"]["numSeries"])
        if "P16" in wanted:
            yield from _goal(server.url)
        for command in COMMANDS if "F1" in wanted else ():
            yield _look(server.url, command, count)


def _goal(url: str) -> Iterator[Figure]:
    """P16."""
    looks = [_run(url, ("top",)) for _ in range(6)]
    times, spent = [look[0] for look in looks], [look[1] for look in looks]
    what, said = f"top : {NODES} nodes × {GPUS} GPUs", f"slowest {max(times):.1f} s"
    apart = noise((median(times[::2]), median(times[1::2])))
    yield Figure("P16", what, median(times), 3.0, said, noise=apart, unit=" s")
    apart = noise((median(spent[::2]), median(spent[1::2])))
    yield Figure("P16", f"CPU of the command, {what}", median(spent), 1.0, "", noise=apart, unit=" s")


def _look(url: str, command: tuple[str, ...], series: int) -> Figure:
    took, spent, done = _run(url, command)
    lines = done.stdout.count(b"\n")
    said = f"{took:.1f} s ({spent:.1f} s of CPU here), {lines} lines, of {series} series"
    what = f"{' '.join(command)} : {NODES} nodes × {GPUS} GPUs"
    return Figure("F1", what, None, None, said if done.returncode == 0 else f"failed: {done.stderr.decode().strip()}")


def _run(url: str, command: tuple[str, ...]) -> tuple[float, float, subprocess.CompletedProcess[bytes]]:
    """Seconds, CPU seconds of the command, and what it said."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    arguments = (sys.executable, "-m", "gpumap", *command, "--prometheus", url)
    done = subprocess.run(arguments, capture_output=True, check=False)
    took = time.monotonic() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return took, spent, done


# --- the nodes --------------------------------------------------------------------------------------------------------


_NOW, _LONG_AGO = "@now@", "@long ago@"
"""The time stamps in a stored page. A server that rendered each page again would take a core from Prometheus."""


@cache
def _kept(number: int) -> bytes:
    return ("\n".join(_page(number, _NOW)) + "\n").encode()


def _fresh(number: int) -> bytes:
    now = time.time()
    return _kept(number).replace(_NOW.encode(), b"%f" % now).replace(_LONG_AGO.encode(), b"%f" % (now - 4000))


def _page(number: int, now: str) -> Iterator[str]:
    """A node's page, as far as the commands need it: two pods on every other GPU. One pod of ten is idle, two are
    unused."""
    draw = random.Random(number)
    yield f"gpumap_snapshot_timestamp_seconds {now}"
    yield f'gpumap_node_info{{node="{name_node(number)}",internal_ip="10.9.{number >> 8}.{number & 255}"}} 1'
    yield from (f'gpumap_source_up{{source="{one}"}} 1' for one in _SOURCES)
    yield from (f'gpumap_source_last_success_timestamp_seconds{{source="{one}"}} {now}' for one in _SOURCES)
    yield 'gpumap_driver_info{driver_version="580.95.05",cuda_version="13.0",nvml_version="13.580.95.05"} 1'
    yield from (f'gpumap_capability{{capability="{one}"}} 1' for one in _CAPABILITIES)
    yield from (f'gpumap_finding_judged{{finding="{kind}"}} 1' for kind in FINDINGS if kind != "maybe_idle")
    for index in range(GPUS):
        card = f"GPU-{uuid.UUID(int=draw.getrandbits(128))}"
        yield from _device(card, index, number, now, draw)


def _device(card: str, index: int, number: int, now: str, draw: random.Random) -> Iterator[str]:
    of_card = f'uuid="{card}"'
    count = 1 + index % 2
    yield (
        f'gpumap_device_info{{{of_card},gpu_uuid="{card}",index="{index}",minor="{index}",pci_bus_id="0000:{index:02}",'
        'model="NVIDIA H100 80GB HBM3",mig_profile="",gpu_instance_id="",compute_instance_id=""} 1'
    )
    yield f"gpumap_gpu_up{{gpu_{of_card}}} 1"
    yield f"gpumap_gpu_utilization_ratio{{gpu_{of_card}}} 0.5"
    yield f'gpumap_device_slots_allocatable{{{of_card},resource="nvidia.com/gpu"}} {count}'
    yield f"gpumap_device_holders{{{of_card}}} {count}"
    used = 0
    for slot in range(count):
        granted, kind = _CARD_BYTES // count, draw.choices(("idle", "unused", ""), (1, 2, 7))[0]
        memory = {"idle": 0, "unused": granted // 3}.get(kind, granted * 9 // 10)
        used += memory
        name = f'namespace="team-{number % 50}",pod="job-{number}-{index}-{slot}",container="main",{of_card}'
        pod = name.partition(",container=")[0]
        yield f'gpumap_pod_info{{{pod},uid="{card[4:]}-{slot}"}} 1'
        yield f"gpumap_allocation_info{{{name}}} 1"
        yield f'gpumap_allocation_slots{{{name},resource="nvidia.com/gpu"}} 1'
        yield f"gpumap_container_allocated_gpus{{{name}}} {1 / count}"
        yield f"gpumap_container_allocated_gpu_memory_bytes{{{name}}} {granted}"
        yield f"gpumap_container_gpu_memory_used_bytes{{{name}}} {memory}"
        yield f"gpumap_container_gpu_memory_peak_bytes{{{name}}} {memory}"
        yield f"gpumap_container_gpu_processes{{{name}}} {int(memory > 0)}"
        yield f"gpumap_container_sm_utilization_ratio{{{name}}} {0.4 if memory else 0}"
        yield f"gpumap_container_last_active_timestamp_seconds{{{name}}} {now if memory else _LONG_AGO}"
        if kind:
            reason = {"idle": "no_process", "unused": "peak_below_grant"}[kind]
            finding = f'finding="{kind}",reason="{reason}",{name}'
            yield f"gpumap_finding_since_timestamp_seconds{{{finding}}} {_LONG_AGO}"
            yield f"gpumap_finding_gpus{{{finding}}} {1 / count}"
            yield f"gpumap_finding_memory_bytes{{{finding}}} {granted - memory}"
    kept, rest = 400 << 20, 500 << 20
    yield f"gpumap_device_memory_total_bytes{{{of_card}}} {_CARD_BYTES}"
    yield f"gpumap_device_memory_used_bytes{{{of_card}}} {used + rest}"
    yield f"gpumap_device_memory_reserved_bytes{{{of_card}}} {kept}"
    yield f"gpumap_device_memory_free_bytes{{{of_card}}} {_CARD_BYTES - used - rest - kept}"
    for owner in _OWNERS:
        assigned = owner == "assigned"
        yield f'gpumap_device_memory_used_by_owner_bytes{{{of_card},owner="{owner}"}} {used if assigned else 0}'
        yield f'gpumap_device_processes{{{of_card},owner="{owner}"}} {count if assigned else 0}'
    yield f'gpumap_device_memory_used_by_owner_bytes{{{of_card},owner="unaccounted"}} {rest}'


if __name__ == "__main__":
    serve(_fresh)
