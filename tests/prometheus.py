"""A real Prometheus for tests: on blocks of known samples, scraping pages, with rules; and how it is asked.

`tests.scraped` makes the blocks, `tests.pages` serves pages.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
import urllib.error
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.demo_process import fetch, running, wait_for
from tests.tools import tool

PATIENCE_SECONDS = 60.0
Row = tuple[dict[str, str], float]
"""Labels and value."""
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Prometheus:
    url: str
    timeout_seconds: float = 10.0

    def api(self, path: str, **parameters: str) -> Any:
        """Fails with what the server says of the request, where it refuses it."""
        try:
            request = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
            return json.loads(fetch(request, timeout_seconds=self.timeout_seconds)[0])["data"]
        except urllib.error.HTTPError as error:
            with error:
                pytest.fail(f"{parameters}: {error.read().decode()}")

    def ask(self, query: str, **parameters: str) -> list[Row]:
        """Answer an instant query, a row for each series."""
        found = self.api("query", query=query, **parameters)["result"]
        return [(row["metric"], float(row["value"][1])) for row in found]

    def value(self, query: str) -> float:
        ((_, value),) = self.ask(query)
        return value

    def last_whole(self, seconds_ago: float) -> float:
        """Return a moment, at least so long ago, at which the last scrape of every target had succeeded.

        On a busy machine a scrape may end at its timeout. Its target then has no series until the next one.
        """
        moments: list[float] = []

        def whole() -> bool:
            moments[:] = [time.time() - seconds_ago]
            return not self.ask("up == 0", time=str(moments[0]))

        eventually(whole)
        return moments[0]

    def by(self, label: str, query: str) -> dict[str, float]:
        return {labels[label]: value for labels, value in self.ask(query)}


@contextlib.contextmanager
def prometheus(
    folder: Path, *flags: str, data: Path | None = None, config: Mapping[str, object] | None = None
) -> Iterator[Prometheus]:
    """A Prometheus on these blocks, that scrapes nothing without a `config`. Given once it answers."""
    file, log = folder / "prometheus.yml", folder / "prometheus.log"
    file.write_text(json.dumps(config or {}))  # JSON is YAML
    command: tuple[str | Path, ...] = (
        tool("prometheus"),
        f"--config.file={file}",
        f"--storage.tsdb.path={data or folder / 'data'}",
        "--storage.tsdb.retention.time=100y",
        "--web.listen-address=127.0.0.1:0",
        *flags,
    )

    def address() -> str | None:
        match = re.search(r'msg="Listening on" address=(\S+)', log.read_text())
        return match and f"http://{match[1]}"

    def ready(url: str) -> str | None:
        with contextlib.suppress(OSError):  # it listens before it can answer
            return fetch(f"{url}/-/ready")[0]
        return None

    with running(command, log, folder) as process:
        url = wait_for("address", address, process, log)
        wait_for("answer", lambda: ready(url), process, log)
        yield Prometheus(url)


def each_second(*jobs: Mapping[str, object], **more: object) -> dict[str, object]:
    """A configuration with these jobs, all scraped each second."""
    return {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": list(jobs), **more}


def chart_job(
    nodes: Mapping[str, str], *, name: str = "gpumap", path: str = "/metrics", **labels: str
) -> dict[str, Any]:
    """Scrapes agents, URLs by node, as the chart's monitors do: tests/deploy/test_chart_monitors.py compares labels.

    A URL's own path comes before `path`. The labels are put on each target too.
    """
    targets = []
    for node, url in nodes.items():
        parts = urllib.parse.urlsplit(url)
        own = {"__metrics_path__": parts.path} if parts.path else {}
        targets.append({"targets": [parts.netloc], "labels": {**target_labels(node), **own, **labels}})
    return {"job_name": name, "metrics_path": path, "honor_labels": True, "static_configs": targets}


def target_labels(node: str) -> dict[str, str]:
    """What a target of the chart's monitors has beside its job: it is its node, and nothing is of the agent's pod."""
    return {"node": node, "instance": node, "endpoint": "metrics"}


def settled(answer: Callable[[], Answer], expected: object, seconds: float = PATIENCE_SECONDS) -> Answer:
    """The answer, asked again until it is as expected: under load a scrape may fail, and rules come late."""
    deadline = time.monotonic() + seconds
    while (found := answer()) != expected and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def eventually(
    holds: Callable[[], bool], seconds: float = PATIENCE_SECONDS, about: Callable[[], object] = lambda: ""
) -> None:
    """Poll: two scrapes are never of one moment, and the demo's pods come and go. A failure says what it is about."""
    assert settled(holds, expected=True, seconds=seconds), about()
