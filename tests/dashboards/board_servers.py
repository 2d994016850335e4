"""Simulated nodes and real Prometheus servers for gpumap's own boards, scraped as the chart's ServiceMonitor does."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests import neighbours
from tests.fleet import running_nodes, wait_for_scrapes
from tests.pages import Page, serving_pages
from tests.prometheus import Prometheus, chart_job, each_second, prometheus

RECORDS = Path(__file__).resolve().parents[2] / "charts" / "gpumap" / "rules" / "fleet.yaml"
SOON = ("--idle-after", "3s", "--grace", "2s")
CLUSTER = "east"
RANGE = "600s"
TIMES = {"__rate_interval": "30s", "__range": RANGE}
WRITTEN = {"price": "2.5", "label": "label_team"}
OWN_POD = {"namespace": "monitoring", "pod": "gpumap-x7k2p", "container": "gpumap"}
"""gpumap's own, which no panel may show."""

OTHER_NAMES = [
    {
        "source_labels": ["__name__", label],
        "regex": "gpumap_(?:device|gpu_without_device)_info;(.+)",
        "target_label": label,
        "replacement": "9$1",
    }
    for label in ("index", "model")
]


@dataclass(frozen=True)
class Servers:
    plain: Prometheus
    """One cluster, without a label for it, and with the records for fleets."""
    twice: Prometheus
    """With the label `cluster`, and no records. Three jobs scrape each node: the second reports other indexes and
    models of the same GPUs, the third has no honorLabels."""


@contextlib.contextmanager
def running_servers(folder: Path) -> Iterator[Servers]:
    """Nodes with gpumap's default flags, kube-state-metrics, and both servers. Gives them once all has happened."""
    with running_nodes(folder, *SOON) as nodes, contextlib.ExitStack() as stack:
        others = stack.enter_context(serving_pages(lambda _: Page(neighbours.kube_state_metrics(nodes).encode())))
        cluster = {"cluster": CLUSTER}
        jobs = (
            chart_job(nodes, **cluster),
            chart_job(nodes, name="b-gpumap", **cluster) | {"metric_relabel_configs": OTHER_NAMES},
            chart_job(nodes, name="c-gpumap", **cluster, **OWN_POD) | {"honor_labels": False},
        )
        configs = {
            "plain": each_second(chart_job(nodes), pods_job(others, {}), rule_files=[str(often_recorded(folder))]),
            "twice": each_second(*jobs, pods_job(others, cluster)),
        }
        servers = {}
        for name, config in configs.items():
            (folder / name).mkdir()
            servers[name] = stack.enter_context(prometheus(folder / name, config=config))
        for server in servers.values():
            wait_for_scrapes(server, len(nodes))
        yield Servers(**servers)


def often_recorded(folder: Path) -> Path:
    """rules/fleet.yaml, with shorter intervals for a test."""
    rules = yaml.safe_load(RECORDS.read_text(encoding="utf-8"))
    for group in rules["groups"]:
        group["interval"] = "3s"
    file = folder / "fleet.json"
    file.write_text(json.dumps(rules), encoding="utf-8")  # JSON is YAML
    return file


def pods_job(address: str, more: Mapping[str, str]) -> dict[str, object]:
    """Not each second: the page is made of all nodes' pages."""
    targets = [{"targets": [address], "labels": dict(more)}]
    slowly = {"scrape_interval": "3s", "scrape_timeout": "3s"}
    return {"job_name": "kube-state-metrics", "honor_labels": True, "static_configs": targets, **slowly}


def fill_in(query: str, chosen: Mapping[str, str]) -> str:
    """The query as Grafana sends it: "All" where nothing is chosen, which is `.*` on these boards."""
    values = {**TIMES, **WRITTEN, **chosen}
    return re.sub(r"\$([a-z_]+)\b", lambda match: values.get(match[1], ".*"), query)
