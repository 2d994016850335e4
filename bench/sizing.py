"""S1: what a fleet costs the Prometheus that scrapes it, beside what is computed. S2: the agent's own memory.

The nodes are the demo's page of eight cards, made each its own, that one process serves (explanation/cost.md).
"""

from __future__ import annotations

import gzip
import re
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

from bench import usage
from bench.contestants import ROOT, gpumap
from bench.figures import Figure
from bench.node import LARGE, SMALL, node
from bench.pages import filled, serve, serving
from bench.usage import MIB
from tests.demo_process import fetch
from tests.docs import sized
from tests.prometheus import Prometheus, chart_job, each_second, eventually, prometheus
from tests.tools import BIN

NODES, NAMESPACES = 500, 50
SCRAPE_SECONDS = 15
SETTLED_SECONDS = 150.0
"""Two evaluations of the rules, and a scrape of each node between them."""
OF_A_SCRAPE = 5
"""`up` and scrape_*: Prometheus makes them for each target."""
APPENDED = 'prometheus_tsdb_head_samples_appended_total{type="float"}'
SAMPLES = 150
"""More than one chunk of a series has."""
RULES = ROOT / "rules" / "fleet.yaml"


def fleet(_: frozenset[str]) -> Iterator[Figure]:
    """Fill a Prometheus that evaluates the rules, and compare it with what one page leads to expect."""
    what = f"Prometheus : {NODES} nodes × {sized.GPUS} GPUs × 4 pods"
    if not (BIN / "prometheus").exists():
        yield Figure("S1", what, None, None, "prometheus is missing: run `make tools`")
        return
    with tempfile.TemporaryDirectory() as name:
        (page := (folder := Path(name)) / "page.prom").write_text(demo_page(folder, "shared"))
        with (
            serving("bench.sizing", page, str(NODES)) as url,
            filled(folder, url, NODES, SCRAPE_SECONDS, RULES) as server,
        ):
            yield from _cost(what, folder, server, page.read_text())
    yield _bytes_a_sample()


def _cost(what: str, folder: Path, server: Prometheus, page: str) -> Iterator[Figure]:
    """Found : computed for series and samples, then memory, CPU, log and network."""
    before, started = own(server), time.monotonic()
    time.sleep(SETTLED_SECONDS)
    after, took = own(server), time.monotonic() - started
    of_a_node = len(list(sized.series(page))) + OF_A_SCRAPE
    recorded = server.value("count({__name__=~'cluster.*:gpumap_.*'})")
    memory, series = after["process_resident_memory_bytes"], after["prometheus_tsdb_head_series"]
    computed = NODES * of_a_node + recorded
    yield Figure("S1", f"series found : computed, {what}", series / computed, None, f"{series:.0f} series")
    rate = (after[APPENDED] - before[APPENDED]) / took
    computed = NODES * of_a_node / SCRAPE_SECONDS + recorded / 60
    yield Figure("S1", f"samples a second found : computed, {what}", rate / computed, None, f"{rate:.0f}")
    cpu = (after["process_cpu_seconds_total"] - before["process_cpu_seconds_total"]) / took
    said = f"{memory / MIB:.0f} MiB, {memory / series / 1000:.1f} kB a series, {cpu:.2f} cores, {recorded:.0f} recorded"
    yield Figure("S1", what, None, None, said)
    log = sum(file.stat().st_size for file in (folder / "data" / "wal").rglob("*") if file.is_file())
    packed = len(gzip.compress(page.encode(), 1))  # as the agent does
    said = (
        f"{log / after[APPENDED]:.1f} bytes a sample in the log with the labels, {len(page) / 1000:.0f} kB a page,"
        f" {packed / 1000:.0f} kB compressed"
    )
    yield Figure("S1", "log and network", None, None, said)


def own(server: Prometheus) -> dict[str, float]:
    """Return the self-metrics of Prometheus by their names with their labels."""
    page = fetch(f"{server.url}/metrics", timeout_seconds=60.0)[0]
    return {match[1]: float(match[2]) for match in re.finditer(r"^(\w+(?:\{.*\})?) (\S+)$", page, re.MULTILINE)}


def demo_page(folder: Path, node: str) -> str:
    (home := folder / "demo").mkdir()
    with sized.playing(home, node) as url:
        return fetch(f"{url}/metrics")[0]


def _bytes_a_sample() -> Figure:
    """The demo's page, whose values change as a node's do, scraped each second, and written as a block."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (home := folder / "demo").mkdir()
        with sized.playing(home, "shared", "--interval", "1s") as url:
            config = each_second(chart_job({"demo-node": url}))
            with prometheus(folder, "--web.enable-admin-api", config=config) as server:
                eventually(
                    lambda: bool(server.ask(f"count_over_time(gpumap_snapshot_timestamp_seconds[1h]) >= {SAMPLES}")),
                    4.0 * SAMPLES,
                )
                asked = urllib.request.Request(f"{server.url}/api/v1/admin/tsdb/snapshot", method="POST")
                urllib.request.urlopen(asked).close()
                samples = server.value("sum(sum_over_time(scrape_samples_scraped[1h]))")
                series = own(server)["prometheus_tsdb_head_series"]
        files = [*folder.glob("data/snapshots/*/*/chunks/*")]
        chunks = sum(file.stat().st_size for file in files) / samples
        index = sum(file.stat().st_size for file in folder.glob("data/snapshots/*/*/index")) / series
    said = f"{chunks:.2f} bytes a sample, and {index:.0f} bytes a series and block"
    return Figure("S1", f"a block of {SAMPLES} scrapes : the demo", None, None, said)


def memory(_: frozenset[str]) -> Iterator[Figure]:
    """S2: the agent with every dialect, every group and a series by process; and as it is by default."""
    everything = ("--collect", "all", "--dialect", "all", "--process-metrics")
    for shape in (SMALL, LARGE):
        with node(shape) as made:
            for name, flags in (("by default", ()), ("everything", everything)):
                with gpumap(made, "5s", *flags) as ours:
                    sizes = []
                    spent, started = usage.cpu_seconds(ours.pids), time.monotonic()
                    while time.monotonic() - started < 30.0:
                        page = ours.page()  # a scrape a second
                        sizes.append(usage.memory_bytes(ours.pids))
                        time.sleep(1.0)
                    spent = (usage.cpu_seconds(ours.pids) - spent) / (time.monotonic() - started)
                said = f"{max(sizes) / MIB:.1f} MiB, {spent * 1000:.0f} m of a core, {len(page) / 1000:.0f} kB a page"
                yield Figure("S2", f"gpumap {name}, {shape}", None, None, said)


# --- the nodes --------------------------------------------------------------------------------------------------------


_GROWS = re.compile(
    r"^(gpumap_container_\w+_total|gpumap_gpu_(?:energy|clock_event|pcie|nvlink)\w*_total|gpumap_source_duration_\w+)"
    r"(\{.*\})? \S+$",
    re.MULTILINE,
)
_IS_NOW = re.compile(r"^(gpumap_\w+_timestamp_seconds)(\{.*\})? \S+$", re.MULTILINE)
_GROWN, _NOW = b"@grown@", b"@now@"
"""In a stored page. A server that rendered each page again would take a core from Prometheus."""


def own_page(page: str, number: int) -> str:
    """A node's own: its devices, pods and namespace."""
    for device in sorted(set(re.findall(r'uuid="((?:GPU|MIG)-[^"]+)"', page))):
        page = page.replace(device, f"{device[:4]}{uuid.uuid5(uuid.NAMESPACE_OID, f'{number}/{device}')}")
    page = page.replace('namespace="ml"', f'namespace="team-{number % NAMESPACES}"')
    return page.replace('pod="job-', f'pod="job-{number}-')


def _moving(page: str) -> bytes:
    """The same with marks for what changes with time."""
    page = _GROWS.sub(rf"\1\2 {_GROWN.decode()}", page)
    return _IS_NOW.sub(rf"\1\2 {_NOW.decode()}", page).encode()


if __name__ == "__main__":
    page, nodes = Path(sys.argv[1]).read_text(), int(sys.argv[2])
    pages = [_moving(own_page(page, number)) for number in range(nodes)]
    started = time.time()

    def at_once(number: int) -> bytes:
        now = time.time()
        return pages[number].replace(_GROWN, b"%.3f" % (0.2 * (now - started))).replace(_NOW, b"%.3f" % now)

    serve(at_once)
