"""How many series a page has, and of what: by group of --collect, by dialect, and by what each is a series of.

The bench counts it on the nodes below, which `gpumap demo` plays; `make docs` writes it into sizing.md and
cost.md.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpumap.agent.dialects import DIALECTS
from gpumap.agent.flags import ALL_DIALECTS
from gpumap.agent.metrics import GROUPS, PROCESSES
from gpumap.lab.demo.scenario import default_scenario
from gpumap.model.families import Family, NumberedFamilies
from tests.demo_process import demo, fetch
from tests.prometheus import eventually

CONTAINER = ("namespace", "pod", "container", "uuid")
BY_CODE = re.compile(r"gpumap_container_xid_errors_total|gpumap_gpu_xid_errors_by_code_total")
"""Beyond every budget: as many as there are codes."""
GPUS = 8
H100 = default_scenario().gpus[0]
CARD = {"model": H100.model, "memory": "81559MiB", "values": H100.values, "growth": H100.growth}
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
        "gpus": [{**CARD, "growth": {}, "mig": ["1g.10gb"] * 7}] * GPUS,
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


EVERYTHING = ("--collect", "all", "--dialect", "all", "--process-metrics")
SECONDS, BYTES_A_SAMPLE, LOG_BYTES_A_SAMPLE, BYTES_A_SERIES = 15, 2.23, 5.7, 4600
"""Of a scrape; and what Prometheus needs, measured with `make bench ARGS=S1`."""
Passages = Mapping[str, Sequence[str | float]]
"""A passage with {} for each number, and the numbers."""


@functools.cache
def pages() -> Mapping[tuple[str, bool], str]:
    """The page of each node, as it is by default (False) and with everything (True)."""
    wanted = [(node, whole) for node in NODES for whole in (False, True)]

    def page(one: tuple[str, bool]) -> str:
        node, whole = one
        with (
            tempfile.TemporaryDirectory() as folder,
            playing(Path(folder), node, *(EVERYTHING if whole else ())) as url,
        ):
            return fetch(f"{url}/metrics")[0]

    with ThreadPoolExecutor(2) as threads:
        return dict(zip(wanted, threads.map(page, wanted), strict=True))


def by_default(node: str) -> int:
    """How many series a node has by default."""
    return len(list(series(pages()[node, False])))


def each(node: str) -> Mapping[str, int]:
    """How many series one of each thing of a node has by default."""
    page = pages()[node, False]
    counted = by_bearer(page)
    return {of: counted[of] // number for of, number in bearers(page).items()}


def choices() -> Mapping[str, Sequence[int]]:
    """The series of each node, by part, and by what cost.md switches off."""
    parts = {node: by_part(pages()[node, True]) for node in NODES}
    rows = {part: [parts[node][part] for node in NODES] for part in ("agent", *(part for part, _ in _parts()))}
    rows["default"] = [by_default(node) for node in NODES]
    rows["everything"] = [parts[node].total() for node in NODES]
    rows["least"] = [sum(some) for some in zip(rows["agent"], rows["allocation"], rows["use"], strict=True)]
    for name, less in (("no health", rows["health"]), ("no gpm", rows["gpm"])):
        rows[name] = [all_ - few for all_, few in zip(rows["default"], less, strict=True)]
    return rows


def sizing() -> Passages:
    """The series of a node."""
    whole, shared, mig, rows = each("whole"), each("shared"), each("mig"), choices()
    titles = {"agent": "the agent itself", "default": "**by default**", "everything": "**everything**"}
    titles["dcgm-join"] = "`dcgm-join`: each"
    groups = (part for part in GROUPS if part != "host")  # these nodes have no process outside pods
    parts = ["agent", *groups, "dcgm-join", "cadvisor", "gpu-manager", "nvidia-smi", "dcgm", "arms"]
    passages: dict[str, Sequence[str | float]] = {
        "at most {} + {} × GPUs + {} × devices + {} × holdings + {} × pods series": tuple(whole.values()),
        "| the agent | {} |": [whole["agent"]],
        "| each GPU | {} |": [whole["GPU"]],
        "| each partitioned GPU | {} |": [mig["GPU"]],
        "| each device | {} |": [whole["device"]],
        "| each holding, of a whole GPU | {} |": [whole["holding"]],
        "| each holding, of a time-sliced GPU | {} |": [shared["holding"]],
        "| each holding, of a MIG device | {} |": [mig["holding"]],
    }
    for part in parts:
        passages[f"{titles.get(part, f'`{part}`')} | {{}} | {{}} | {{}} |"] = rows[part]
    for part in ("default", "everything"):
        passages[f"{titles[part]} | **{{}}** | **{{}}** | **{{}}** |"] = rows[part]
    return passages


def cost() -> Passages:
    """What a fleet costs, made of a node's series."""
    rows = choices()
    series_of = dict(zip(NODES, rows["default"], strict=True))
    titles = {"whole": "one pod", "shared": "four pods, time-sliced", "mig": "seven MIG devices"}
    table: dict[str, Sequence[str | float]] = {
        f"| {titles[node]} | {{}} | {{}} | {{}} GB | {{}} GB |": _of_prometheus(10_000 * series_of[node])
        for node in NODES
    }
    all_ = 10_000 * series_of["whole"]
    _, _, disk, memory = _of_prometheus(all_)
    log = [round(all_ / SECONDS * hours * 3600 * LOG_BYTES_A_SAMPLE / 1e9) for hours in (2, 3)]
    a_pod = sum(of.get("pod") == "job-0" for _, of in series(pages()["whole", False]))
    hourly = 10_000 * GPUS * a_pod * 3
    saved = [round(100 - 100 * rows[name][0] / rows["default"][0]) for name in ("no health", "least")]
    return {
        **table,
        "of eight GPUs have {} million series. They need two Prometheus with {} GB of memory each, and {} GB of disk": [
            f"{all_ / 1e6:.1f}",
            round(float(memory) / 2),
            round(float(disk)),
        ],
        "saves {} % of the series; the [smallest choice](#what-to-switch-off) saves {} %": saved,
        "{} bytes of disk for a sample and {} kB of memory for a series": [BYTES_A_SAMPLE, BYTES_A_SERIES / 1000],
        "write-ahead log: {} to {} GB": log,
        "30 days are {} TB of object storage, and {} TB with Thanos' downsampling": [
            f"{float(disk) * 30 / 1000:.1f}",
            f"{float(disk) * 90 / 1000:.1f}",
        ],
        "A new pod on one GPU adds {} series": [a_pod],
        "these add {} series; if it runs for a day, {}": [_spaced(hourly), _spaced(hourly // 24)],
        "| `--collect allocation --collect use` | {}; {}; {} |": rows["least"],
        "| `--collect` without `health` | {}; {}; {} |": rows["no health"],
        "| `--collect` without `gpm` | {}; {}; {} |": rows["no gpm"],
        "| 150 000, which are {} nodes": [150_000 // series_of["whole"]],
    }


def _of_prometheus(number: int) -> tuple[str, str, str, str]:
    samples = number // SECONDS
    disk, memory = samples * 86400 * BYTES_A_SAMPLE / 1e9, number * BYTES_A_SERIES / 1e9
    return _spaced(number), _spaced(samples), f"{disk:.1f}", f"{memory:.1f}"


def _spaced(number: int) -> str:
    return f"{number:,}".replace(",", " ") if number >= 1000 else str(number)
