"""S1: what a fleet costs the Prometheus that scrapes it, and what its recording rules cost. S2: the agent's own memory.

The nodes are the demo's page of eight shared cards, made each its own, that one process serves (reference/sizing.md).
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import yaml

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
ROUNDS = 3
SAMPLES = 150
"""More than one chunk of a series has."""
RULES = ROOT / "rules" / "fleet.yaml"


def fleet(_: frozenset[str]) -> Iterator[Figure]:
    """Fill a Prometheus that evaluates the rules, and ask it what that took."""
    what = f"Prometheus : {NODES} nodes × {sized.GPUS} GPUs × 4 pods"
    if not (BIN / "prometheus").exists():
        yield Figure("S1", what, None, None, "prometheus is missing: run `make tools`")
        return
    with tempfile.TemporaryDirectory() as folder:
        (page := Path(folder, "page.prom")).write_text(_demo_page(Path(folder)))
        with (
            serving("bench.sizing", page) as url,
            filled(Path(folder), url, NODES, SCRAPE_SECONDS, RULES) as server,
        ):
            yield from _cost(what, server)
    yield _bytes_a_sample()


def _cost(what: str, server: Prometheus) -> Iterator[Figure]:
    before, started = _own(server), time.monotonic()
    time.sleep(SETTLED_SECONDS)
    after, took = _own(server), time.monotonic() - started
    gpumaps = server.value("count({__name__=~'gpumap_.+|process_.+|pod_and.+'})")
    memory, series = after["process_resident_memory_bytes"], after["prometheus_tsdb_head_series"]
    cpu = (after["process_cpu_seconds_total"] - before["process_cpu_seconds_total"]) / took
    said = f"{memory / MIB:.0f} MiB, {cpu:.2f} cores at {SCRAPE_SECONDS} s, {series:.0f} series, {gpumaps:.0f} gpumap's"
    yield Figure("S1", what, None, None, said)
    recorded = server.value("count({__name__=~'cluster.*:gpumap_.*'})")
    spent, holdings = _spent_on_rules(server, cpu), server.value("count(gpumap_allocation_info)")
    said = f"{spent:.1f} s of CPU an evaluation, {holdings:.0f} holdings, {recorded:.0f} series recorded"
    yield Figure("S1", f"rules/fleet.yaml : {NODES} nodes, {NAMESPACES} namespaces", None, None, said)


def _spent_on_rules(server: Prometheus, cores: float) -> float:
    """Return the CPU seconds of one evaluation: the time of all expressions, minus the constant load of Prometheus.

    The time that Prometheus itself reports is wall time, which is several times as long on a busy machine.
    """
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    before, started = _own(server), time.monotonic()
    for _ in range(ROUNDS):
        for rule in rules:
            server.ask(f"count({rule['expr']})")
    spent = _own(server)["process_cpu_seconds_total"] - before["process_cpu_seconds_total"]
    return (spent - cores * (time.monotonic() - started)) / ROUNDS


def _own(server: Prometheus) -> dict[str, float]:
    """Return a self-metric of Prometheus."""
    page = fetch(f"{server.url}/metrics", timeout_seconds=30.0)[0]
    return {match[1]: float(match[2]) for match in re.finditer(r"^(\w+) (\S+)$", page, re.MULTILINE)}


def _demo_page(folder: Path) -> str:
    (home := folder / "demo").mkdir()
    with sized.playing(home, "shared") as url:
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
                series = _own(server)["prometheus_tsdb_head_series"]
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


def _own_page(page: str, number: int) -> bytes:
    """A node's own: its devices, pods and namespace."""
    for card in sorted(set(re.findall(r'uuid="(GPU-[^"]+)"', page))):
        page = page.replace(card, f"GPU-{uuid.uuid5(uuid.NAMESPACE_OID, f'{number}/{card}')}")
    page = page.replace('namespace="ml"', f'namespace="team-{number % NAMESPACES}"')
    return page.replace('pod="job-', f'pod="job-{number}-').encode()


if __name__ == "__main__":
    told = Path(sys.argv[1]).read_text()
    serve([_own_page(told, number) for number in range(NODES)].__getitem__)
