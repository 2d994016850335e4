"""A roll-out, seen by a real Prometheus: one agent ends, its successor serves the same node at another address.

Targets have the labels of the chart's monitors, and are in files, which Prometheus follows as it follows
Kubernetes: some seconds late. docs/how-to/scrape.md says what follows from it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.demo_process import demo
from tests.docs.sized import NODES
from tests.prometheus import Prometheus, eventually, prometheus

pytestmark = pytest.mark.e2e

INTERVAL_SECONDS = 15
"""The chart's. Discovery takes up to ten seconds: with a shorter one each roll-out would cost a scrape."""
PATIENCE_SECONDS = 90.0
GPUS = len(NODES["whole"]["gpus"])  # type: ignore[arg-type]
HELD = "gpumap_container_allocated_gpu_seconds_total"


@dataclass(frozen=True)
class Rollout:
    """When the first agent's last scrape was, and when all was over."""

    last_scrape: float
    over: float


@dataclass(frozen=True)
class Scraper:
    """A Prometheus, and the file with a node's targets."""

    server: Prometheus
    folder: Path

    def point(self, node: str, *urls: str) -> None:
        """The node's agents are at these addresses from now on."""
        labels = {"node": node, "instance": node}
        targets = [{"targets": [url.removeprefix("http://")], "labels": labels} for url in urls]
        written = self.folder / f"{node}.new"
        written.write_text(json.dumps(targets))
        written.rename(self.folder / f"{node}.json")

    def targets(self, url: str) -> list[Mapping[str, Any]]:
        found = self.server.api("targets", state="active")["activeTargets"]
        return [target for target in found if url.removeprefix("http://") in target["scrapeUrl"]]

    def scraped(self, url: str, times: int, *, health: str = "up") -> str:
        """Wait until the address was scraped so often. Gives the time of the last scrape."""
        seen: set[str] = set()

        def often() -> bool:
            seen.update(one["lastScrape"] for one in self.targets(url) if one["health"] == health)
            return len(seen) >= times

        eventually(often, PATIENCE_SECONDS, about=lambda: (url, self.targets(url)))
        return max(seen)


def agent(folder: Path, name: str) -> contextlib.AbstractContextManager[str]:
    """gpumap on a node of eight GPUs, a pod on each, which is always the same."""
    (home := folder / name).mkdir()
    scenario = home / "node.yaml"
    scenario.write_text(json.dumps(NODES["whole"]))  # JSON is YAML
    return demo(home, "--scenario", str(scenario), "--interval", "1s")


def replace_agent(scraper: Scraper, node: str) -> Rollout:
    """The first agent ends right after a scrape, and the second one starts. Of the node "failed", the first one is
    scraped once more when it is gone."""
    with agent(scraper.folder, f"{node}-1") as url:
        scraper.point(node, url)
        scraper.scraped(url, 3)
        last = time.time()
    if node == "failed":
        scraper.scraped(url, 1, health="down")
    with agent(scraper.folder, f"{node}-2") as url:
        scraper.point(node, url)
        scraper.scraped(url, 3)
        return Rollout(last, time.time())


def run_two(scraper: Scraper, node: str) -> Rollout:
    """The second agent starts before the first one ends, as with a surge, and both are scraped for some time."""
    with agent(scraper.folder, f"{node}-1") as one:
        scraper.point(node, one)
        scraper.scraped(one, 2)
        with agent(scraper.folder, f"{node}-2") as other:
            scraper.point(node, one, other)
            last = time.time()
            scraper.scraped(other, 4)
            return Rollout(last, time.time())


@dataclass(frozen=True)
class Seen:
    server: Prometheus
    rollouts: Mapping[str, Rollout]

    def known(self, node: str) -> list[tuple[float, int]]:
        """How many of the node's GPUs have a value, each second from before its roll-out to after it."""
        rollout = self.rollouts[node]
        asked = {
            "query": f'count(gpumap_device_info{{node="{node}"}}) or vector(0)',
            "start": str(rollout.last_scrape),
            "end": str(rollout.over),
            "step": "1",
        }
        (found,) = self.server.api("query_range", **asked)["result"]
        return [(float(moment), int(value)) for moment, value in found["values"]]

    def counters(self, node: str) -> list[list[float]]:
        """All samples of the counters of GPU-seconds."""
        found = self.server.api("query", query=f'{HELD}{{node="{node}"}}[15m]')["result"]
        return [[float(value) for _, value in row["values"]] for row in found]


@pytest.fixture(name="seen", scope="module")
def run_rollouts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """Three nodes, each rolled out in its own way, at the same time."""
    folder = tmp_path_factory.mktemp("rollout")
    (targets := folder / "targets").mkdir()
    job = {"job_name": "gpumap", "honor_labels": True, "file_sd_configs": [{"files": [f"{targets}/*.json"]}]}
    times = {"scrape_interval": f"{INTERVAL_SECONDS}s", "scrape_timeout": "10s"}
    with (
        prometheus(folder, config={"global": times, "scrape_configs": [job]}) as server,
        ThreadPoolExecutor() as threads,
    ):
        scraper = Scraper(server, targets)
        ways = {"replaced": replace_agent, "failed": replace_agent, "surge": run_two}
        begun = {node: threads.submit(roll_out, scraper, node) for node, roll_out in ways.items()}
        yield Seen(server, {node: one.result() for node, one in begun.items()})


def test_a_roll_out_leaves_no_gap(seen: Seen) -> None:
    """At each second every GPU has a value: no stale marker, though the first agent's target is gone."""
    assert {count for _, count in seen.known("replaced")} == {GPUS}


@pytest.mark.parametrize("node", ["replaced", "failed", "surge"])
def test_a_roll_out_makes_no_new_series(seen: Seen, node: str) -> None:
    """A device has one series before and after, and so has each container on it, whatever the agent's address."""
    for family in ("gpumap_device_info", "gpumap_gpu_power_watts", HELD):
        assert len(seen.server.api("series", **{"match[]": f'{family}{{node="{node}"}}'})) == GPUS


def test_a_scrape_that_fails_leaves_the_gap_until_the_next_one(seen: Seen) -> None:
    """Where Prometheus scrapes the old address once more, the node has no value from then until its successor's first
    scrape: a matter of two intervals, and of the same series."""
    rollout = seen.rollouts["failed"]
    missing = [moment for moment, count in seen.known("failed") if count == 0]
    assert missing
    assert max(missing) - min(missing) + 1 == len(missing), "one gap"
    assert rollout.last_scrape < min(missing)
    assert seen.known("failed")[-1][1] == GPUS


@pytest.mark.parametrize("node", ["replaced", "failed"])
def test_nothing_is_charged_twice(seen: Seen, node: str) -> None:
    """A counter restarts at most once, with less than it had, and its increase is within the time that passed."""
    for values in seen.counters(node):
        assert sum(later < earlier for earlier, later in pairwise(values)) <= 1
        assert _increase(values) <= _seconds(seen, node) + 2.0


def test_two_agents_at_once_are_charged_twice(seen: Seen) -> None:
    """This is why maxSurge is 0: two processes' counters in one series look like restart after restart."""
    assert min(value for _, value in seen.server.ask(f'resets({HELD}{{node="surge"}}[15m])')) > 1
    for values in seen.counters("surge"):
        assert _increase(values) > 1.2 * _seconds(seen, "surge")


def _increase(values: Sequence[float]) -> float:
    """As increase() takes it: where a counter went back it began at 0."""
    return sum(later - earlier if later >= earlier else later for earlier, later in pairwise(values))


def _seconds(seen: Seen, node: str) -> float:
    """Between the node's first scrape and its last."""
    found = seen.server.api("query", query=f'up{{node="{node}"}}[15m]')["result"]
    times = [float(moment) for row in found for moment, _ in row["values"]]
    return max(times) - min(times)
