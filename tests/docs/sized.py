"""How many series a page has, and of what: by group of --collect, by dialect, and by what each is a series of.

sizing.md states it; `tests/docs/test_sizing.py` and the bench count it on the nodes below, which `gpumap demo`
plays.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from gpumap.agent.dialects import DIALECTS
from gpumap.agent.flags import ALL_DIALECTS
from gpumap.agent.metrics import GROUPS, PROCESSES
from gpumap.model.families import Family, NumberedFamilies
from tests.demo_process import demo, fetch
from tests.prometheus import eventually

CONTAINER = ("namespace", "pod", "container", "uuid")
BY_CODE = re.compile(r"gpumap_container_xid_errors_total|gpumap_gpu_xid_errors_by_code_total")
"""Beyond every budget: as many as there are codes."""
GPUS = 8
CARD = {"model": "NVIDIA H100 80GB HBM3", "memory": "81559MiB"}
_NATIVE = re.compile(r"(?:gpumap|process)_(?!dcgm_)")
_LINE = re.compile(r"^(\w+)(?:\{(.*)\})? \S+$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def _pod(name: str, **given: object) -> dict[str, object]:
    container = {"name": "main", **given}
    return {"namespace": "ml", "name": name, "containers": [container]}


def _busy(name: str, **given: object) -> dict[str, object]:
    return _pod(name, processes=[{"memory": "4GiB", "sm": "20%"}], **given)


NODES: Mapping[str, Mapping[str, object]] = {
    "whole": {
        "gpus": [CARD] * GPUS,
        "pods": [_busy(f"job-{gpu}", gpus=[gpu]) for gpu in range(GPUS)],
    },
    "shared": {
        "gpus": [{**CARD, "replicas": 4}] * GPUS,
        "pods": [_busy(f"job-{gpu}-{slot}", slots={"gpu": gpu}) for gpu in range(GPUS) for slot in range(4)],
    },
    "mig": {
        "gpus": [{**CARD, "mig": ["1g.10gb"] * 7}] * GPUS,
        "pods": [
            _busy(f"job-{gpu}-{slot}", mig={"gpu": gpu, "instance": slot}) for gpu in range(GPUS) for slot in range(7)
        ],
    },
}
"""Eight H100: a pod on each; four pods on each, time-sliced; seven MIG devices on each, a pod on each of these."""


@contextlib.contextmanager
def playing(folder: Path, node: str, *flags: str) -> Iterator[str]:
    """`gpumap demo` on one of the nodes, once it serves all that it ever will. Gives its URL."""
    scenario = folder / f"{node}.yaml"
    scenario.write_text(json.dumps(NODES[node]))  # JSON is YAML
    with demo(folder, "--scenario", str(scenario), "--interval", "500ms", "--node-ip", "10.0.0.7", *flags) as url:

        def known() -> bool:
            page = fetch(f"{url}/metrics")[0]
            ran = re.search(r'^gpumap_collections_total\{trigger="interval"\} (\d+)', page, re.MULTILINE)
            return ran is not None and int(ran[1]) >= 4

        eventually(known, 60.0, about=lambda: fetch(f"{url}/metrics")[0])
        yield url


def series(page: str) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Each series' name and labels."""
    for match in _LINE.finditer(page):
        yield match[1], dict(_LABEL.findall(match[2] or ""))


def bearer(name: str, labels: Mapping[str, str]) -> str:
    """What a series of gpumap's own is a series of."""
    if "pid" in labels:
        return "process"
    if BY_CODE.fullmatch(name):
        return "XID code"
    if labels.keys() >= set(CONTAINER):
        return "holding"
    if "gpu_uuid" in labels and "uuid" not in labels:
        return "GPU"
    if "uuid" in labels:
        return "device"
    return "pod" if "pod" in labels else "agent"


def _native(page: str) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Those of gpumap's own names, with process_*."""
    return ((name, of) for name, of in series(page) if _NATIVE.match(name))


def by_bearer(page: str) -> Counter[str]:
    return Counter(bearer(name, of) for name, of in _native(page))


def bearers(page: str) -> Counter[str]:
    """How many there are of what a page has series of."""
    found: dict[str, set[object]] = {kind: set() for kind in ("agent", "GPU", "device", "holding", "pod")}
    for name, of in _native(page):
        kind = bearer(name, of)
        if kind == "holding":
            found[kind].add(tuple(of[label] for label in CONTAINER))
            found["pod"].add((of["namespace"], of["pod"]))
        elif kind in ("GPU", "device"):
            found[kind].add(of["gpu_uuid" if kind == "GPU" else "uuid"])
        elif name == "gpumap_unmatched_slots":
            found[kind].add(tuple(sorted(of.items())))
        elif kind == "pod":
            found[kind].add((of["namespace"], of["pod"]))
    return Counter({"agent": 1, **{kind: len(ones) for kind, ones in found.items() if kind != "agent"}})


def by_part(page: str) -> Counter[str]:
    """By the group of --collect, the dialect, or the flag, without which the series would not be there."""
    parts = {family.name: part for part, families in _parts() for family in families}
    counts: Counter[str] = Counter()
    for name, _ in series(page):
        base = re.sub(r"_\d+$", "_<n>", name)
        counts[parts.get(name) or parts.get(base) or "agent"] += 1
    return counts


def _parts() -> Iterator[tuple[str, Sequence[Family | NumberedFamilies]]]:
    yield from GROUPS.items()
    yield "--process-metrics", PROCESSES
    for name in ALL_DIALECTS:
        yield name, DIALECTS[name].families
