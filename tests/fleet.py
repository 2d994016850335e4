"""A small cluster for queries: simulated nodes that serve every dialect, other exporters' pages made to fit them, and
real Prometheus servers that scrape all of it as the field does.

The questions of docs/how-to/replace/ and of the field's dashboards are asked here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests import neighbours
from tests.demo_process import demo, fetch
from tests.pages import Page, serving_pages
from tests.prometheus import Prometheus, chart_job, each_second, eventually, prometheus

SCENARIOS = {
    "demo-node": "default",
    "sharing-node": "sharing",
    "older-node": str(Path(__file__).with_name("older-node.yaml")),
    "broken-node": str(Path(__file__).with_name("broken-node.yaml")),
}
BESIDE_DCGM = ("with-dcgm", "with-dcgm-honored")
SERVERS = ("dialects", "relabeled", *BESIDE_DCGM)
"""`dialects`: gpumap in the place of all; `relabeled`: the same, its scrape changed as guides advise; `with-dcgm` and
`with-dcgm-honored`: gpumap in its own names, beside a dcgm-exporter that stays."""
OWN_NAMES = "gpumap_.*|process_.*"
"""Its own names, and those of the dialect `dcgm-join`."""
HAPPENS = ("gpumap_container_xid_errors_total", 'gpumap_gpu_fault_info{node="broken-node"}')
SCRAPES = 8
PATIENCE_SECONDS = 180.0

Relabeling = Mapping[str, object]
"""One of Prometheus's metric_relabel_configs."""


@dataclass(frozen=True)
class Fleet:
    servers: Mapping[str, Prometheus]

    def __getitem__(self, server: str) -> Prometheus:
        return self.servers[server]


@contextlib.contextmanager
def running_nodes(folder: Path, *flags: str) -> Iterator[Mapping[str, str]]:
    """Run the nodes, and give their URLs by name once each knows its holders."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as threads:

        def run_node(name: str) -> str:
            (folder / name).mkdir()
            chosen = ("--scenario", SCENARIOS[name], "--interval", "1s", "--node-ip", "10.0.0.7")
            return stack.enter_context(demo(folder / name, *chosen, *flags))

        nodes = dict(zip(SCENARIOS, threads.map(run_node, SCENARIOS), strict=True))
        held = "\ngpumap_allocation_info{"
        eventually(lambda: all(held in fetch(f"{url}/metrics")[0] for url in nodes.values()), PATIENCE_SECONDS)
        yield nodes


@contextlib.contextmanager
def running_fleet(folder: Path, *servers: str, relabelings: Sequence[Relabeling] = ()) -> Iterator[Fleet]:
    """Run the nodes and a Prometheus for each of these servers. Gives them once all have some scrapes."""
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(running_nodes(folder, "--collect", "all", "--dialect", "all", "--process-metrics"))
        with ThreadPoolExecutor() as threads:
            pages = {f"/{name}": Page(page(nodes).encode()) for name, page in neighbours.PAGES.items()}
            others = stack.enter_context(serving_pages(pages.__getitem__))

            def run_server(name: str) -> Prometheus:
                home = folder / name
                home.mkdir()
                config = scraping(name, nodes, others, relabelings)
                return stack.enter_context(prometheus(home, config=config))

            running = dict(zip(servers, threads.map(run_server, servers), strict=True))
        for server in running.values():
            wait_for_scrapes(server, nodes=len(nodes))
        yield Fleet(running)


def scraping(
    server: str, nodes: Mapping[str, str], others: str, relabelings: Sequence[Relabeling]
) -> dict[str, object]:
    """What Prometheus is configured to scrape."""
    chosen: Mapping[str, Sequence[Relabeling]] = {"dialects": (), "relabeled": relabelings}
    keep_own = {"source_labels": ["__name__"], "regex": OWN_NAMES, "action": "keep"}
    jobs = [
        chart_job(nodes) | {"metric_relabel_configs": [*chosen.get(server, (keep_own,))]},
        other_job("kube-state-metrics", others, honor=True),
    ]
    if server in BESIDE_DCGM:
        jobs.append(other_job("dcgm-exporter", others, honor=server == "with-dcgm-honored"))
    else:
        jobs.append(chart_job(nodes, name="gpumap-nodes", path="/metrics/nodes"))
    return each_second(*jobs)


def other_job(name: str, address: str, *, honor: bool) -> dict[str, object]:
    labels = {"namespace": "monitoring", "pod": f"{name}-x7k2p", "container": name}
    return {
        "job_name": name,
        "metrics_path": f"/{name}",
        "honor_labels": honor,
        "static_configs": [{"targets": [address], "labels": labels}],
    }


def wait_for_scrapes(server: Prometheus, nodes: int) -> None:
    """Until a rate has something to go by on each node, an XID error has been reported, and a card was lost."""

    def scraped() -> bool:
        often = server.by("node", "max by (node) (count_over_time(gpumap_build_info[5m]))")
        happened = all(server.ask(f"{what} offset 3s") for what in HAPPENS)
        return len(often) == nodes and min(often.values()) >= SCRAPES and happened and not server.ask("up == 0")

    eventually(scraped, PATIENCE_SECONDS, about=lambda: server.api("targets"))
