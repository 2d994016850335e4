"""S3: what each group of rules costs a Prometheus that scrapes 1 000 nodes, with the past hour that rules look back on.

Prometheus reports how long an evaluation took. On a busy machine that is several times its CPU. So the bench then stops
the scrapes and asks each rule's expression again, of one moment.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from bench import past
from bench.contestants import ROOT
from bench.figures import Figure
from bench.pages import PATIENCE_SECONDS, all_scraped, fleet_job, serving
from bench.sizing import SCRAPE_SECONDS, demo_page, own, own_page
from bench.usage import MIB
from tests.docs import sized
from tests.prometheus import Prometheus, eventually, prometheus
from tests.tools import BIN

NODES, NODE = 1_000, "whole"
PAST_SECONDS, PASSES = 75 * 60, 3
"""Rules compare with an hour ago. Prometheus takes samples that are an hour older than its newest: so three passes."""
SETTLED_SECONDS = 200.0
"""Each group of one minute was evaluated."""
ROUNDS = 3
FILES = [ROOT / "rules" / f"{name}.yaml" for name in ("fleet", "alerts", "autoscaling", "opencost")]
ADDED_UP = (
    "sum by (namespace) (gpumap_container_allocated_gpus)",
    "sum by (namespace) (cluster_namespace:gpumap_container_allocated_gpus:sum)",
)
_SELECTOR = re.compile(r"(\w+)?\{([^{}]*)\}\s*(?:\[(\d+[smhd])\])?\s*(offset)?")
_FLAGS = ("--web.enable-remote-write-receiver", "--web.enable-lifecycle", "--query.timeout=5m")


@dataclass(frozen=True)
class Cost:
    """Of one evaluation."""

    cpu_seconds: float
    read: int
    peak: int


def rules(_: frozenset[str]) -> Iterator[Figure]:
    """Fill a Prometheus, let it evaluate the rules, then ask it each of them."""
    if not (BIN / "prometheus").exists():
        yield Figure("S3", f"rules at {NODES} nodes", None, None, "prometheus is missing: run `make tools`")
        return
    with tempfile.TemporaryDirectory() as name:
        (page := (folder := Path(name)) / "page.prom").write_text(demo_page(folder, NODE))
        with (
            serving("bench.sizing", page, str(NODES)) as url,
            prometheus(folder, *_FLAGS, config={}) as running,
        ):
            server, job = replace(running, timeout_seconds=300.0), fleet_job(url, NODES)
            _write_past(server, job, page.read_text())
            every = {"scrape_interval": f"{SCRAPE_SECONDS}s", "scrape_timeout": f"{SCRAPE_SECONDS}s"}
            _reload(folder, server, {"global": every, "scrape_configs": [job], "rule_files": [*map(str, FILES)]})
            eventually(all_scraped(server, NODES), PATIENCE_SECONDS)
            time.sleep(SETTLED_SECONDS)
            moment, took = time.time() - 1, _took(server)
            memory, series = (
                own(server)[one] for one in ("process_resident_memory_bytes", "prometheus_tsdb_head_series")
            )
            _reload(folder, server, {})
            what = f"rules : {NODES} nodes × {sized.GPUS} GPUs"
            yield Figure("S3", what, None, None, f"{memory / MIB:.0f} MiB, {series:.0f} series with the records")
            yield from _groups(server, moment, took)
            for query in ADDED_UP:
                yield Figure("S3", query, None, None, _said(_cost(server, query, moment)))


def _groups(server: Prometheus, moment: float, took: Mapping[str, float]) -> Iterator[Figure]:
    for file in FILES:
        for group in yaml.safe_load(file.read_text())["groups"]:
            costs = {_name(rule): _cost(server, f"count({rule['expr']})", moment) for rule in group["rules"]}
            whole = Cost(
                sum(one.cpu_seconds for one in costs.values()),
                sum(one.read for one in costs.values()),
                max(one.peak for one in costs.values()),
            )
            dearest = max(costs, key=lambda name: costs[name].cpu_seconds)
            said = f"{_said(whole)}, every {group['interval']}; last took {took[group['name']]:.1f} s; dearest: "
            yield Figure("S3", group["name"], None, None, f"{said}{dearest} {costs[dearest].cpu_seconds:.2f} s")


def _name(rule: Mapping[str, Any]) -> str:
    return str(rule.get("record") or rule["alert"])


def _said(cost: Cost) -> str:
    return f"{cost.cpu_seconds:.2f} s of CPU, {cost.read} samples read, {cost.peak} at once"


def _cost(server: Prometheus, query: str, moment: float) -> Cost:
    before = own(server)["process_cpu_seconds_total"]
    for _ in range(ROUNDS):
        counted = server.api("query", query=query, time=str(moment), stats="all")["stats"]["samples"]
    spent = own(server)["process_cpu_seconds_total"] - before
    return Cost(spent / ROUNDS, counted["totalQueryableSamples"], counted["peakSamples"])


def _took(server: Prometheus) -> dict[str, float]:
    """How long the last evaluation of each group took, by the server's clock."""
    of_group = re.compile(r'prometheus_rule_group_last_duration_seconds\{rule_group="[^;]+;(.+)"\}')
    return {found[1]: seconds for name, seconds in own(server).items() if (found := of_group.fullmatch(name))}


def _reload(folder: Path, server: Prometheus, config: Mapping[str, object]) -> None:
    (folder / "prometheus.yml").write_text(json.dumps(config))
    asked = urllib.request.Request(f"{server.url}/-/reload", method="POST")
    urllib.request.urlopen(asked, timeout=120.0).close()


# --- the past ---------------------------------------------------------------------------------------------------------


def _long_ago() -> re.Pattern[str]:
    """The families that some rule reads from an hour ago or more."""
    names = set()
    for rule in (
        rule for file in FILES for group in yaml.safe_load(file.read_text())["groups"] for rule in group["rules"]
    ):
        for name, matchers, window, offset in _SELECTOR.findall(rule["expr"]):
            if offset or window[-1:] in ("h", "d"):
                names.add(name or re.findall(r'__name__=~"([^"]+)"', matchers)[0])
    return re.compile("|".join(f"(?:{name})" for name in sorted(names)))


def _write_past(server: Prometheus, job: Mapping[str, Any], page: str) -> None:
    wanted = _long_ago()
    lines = (line for line in page.splitlines() if wanted.fullmatch(re.split("[ {]", line, maxsplit=1)[0]))
    kept = "\n".join(lines) + "\n"
    times = [time.time() - PAST_SECONDS + after for after in range(0, PAST_SECONDS, SCRAPE_SECONDS)]
    length = len(times) // PASSES
    for first in range(0, len(times), length):
        past.write(server.url, _series(job, kept, times[first : first + length]))


def _series(job: Mapping[str, Any], page: str, times: Sequence[float]) -> Iterator[bytes]:
    """All nodes' series with a sample at each time. Counters of containers grow."""
    still, growing = past.samples(times, 0.0), past.samples(times, 0.2)
    for number, target in enumerate(job["static_configs"]):
        of_target = {name: value for name, value in target["labels"].items() if not name.startswith("__")}
        of_target["job"] = job["job_name"]
        yield past.series("up", of_target, still)
        for name, labels in sized.series(own_page(page, number)):
            grows = name.startswith("gpumap_container_") and name.endswith("_total")
            yield past.series(name, {**of_target, **labels}, growing if grows else still)
