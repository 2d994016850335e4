"""A cluster whose use of GPUs is known, scraped by a real Prometheus with the rules, and asked as autoscalers ask.

What was scraped before stands in Prometheus's blocks, so that each window of the rules is full from the start.
"""

from __future__ import annotations

import contextlib
import json
import re
import textwrap
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from gpumap.exposition import TEXT_TYPE
from tests.demo_process import fetch, running, wait_for
from tests.scraped import Labels, Samples, labels, store
from tests.tools import tool

AUTOSCALING = Path(__file__).resolve().parent.parent / "autoscaling"
DOCS = AUTOSCALING.parent / "docs" / "autoscaling.md"
RULES = AUTOSCALING / "gpumap-autoscaling.rules.yaml"
ADAPTER = yaml.safe_load((AUTOSCALING / "prometheus-adapter.yaml").read_text())["rules"]
SCALED_OBJECT = yaml.safe_load((AUTOSCALING / "keda-scaledobject.yaml").read_text())
GIB = 1 << 30
Answer = TypeVar("Answer")
AGENT = {"namespace": "gpumap", "pod": "gpumap-k2p4x", "container": "gpumap", "instance": "node-1"}
"""The labels that discovery gives the agent's own pod."""
WINDOW_SECONDS = 180
"""More than that of any rate()."""
PATIENCE_SECONDS = 30.0


class Held(NamedTuple):
    """A container on a device of 80 GiB."""

    namespace: str
    pod: str
    uuid: str
    sm: str | None = None
    """SM time by second; `None` where it is not known."""
    memory: int | None = None
    gpus: str = "1"
    granted: int | None = 80 * GIB


CLUSTER = (
    Held("serving", "llm-7c9d8b5f6d-x2x4k", "GPU-0", "0.9", 72 * GIB),
    Held("serving", "llm-7c9d8b5f6d-b5c6d", "GPU-1", "0.5", 40 * GIB),
    Held("serving", "llm-7c9d8b5f6d-zzzzz", "GPU-2", "0", 0),
    Held("serving", "llm-7c9d8b5f6d-wwwww", "GPU-3"),  # its GPU is lost
    Held("serving", "llm-chat-66b4c-24567", "GPU-4", "1", 80 * GIB),
    Held("serving", "embedder-5d4f-bbbbb", "GPU-5", "0.5", 20 * GIB, gpus="0.25", granted=None),
    Held("serving", "embedder-5d4f-ccccc", "GPU-5", "0", 4 * GIB, gpus="0.25", granted=None),
    Held("serving", "trainer-0", "GPU-6", "0.8", 40 * GIB),
    Held("serving", "trainer-0", "GPU-7", "0.4", 60 * GIB),
    Held("serving", "infer-0", "MIG-0", None, 20 * GIB, gpus="0.5"),
    Held("service", "classifier-6c7-ddddd", "GPU-8", "0.25", 8 * GIB),
)


def blocks(language: str) -> list[str]:
    """The docs' blocks of a language, those in lists too."""
    found = re.findall(rf"^ *```{language}\n(.*?)^ *```$", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for block in found]


def series(born: float, now: float) -> Iterator[tuple[str, Labels, Decimal | int]]:
    """What the agents tell at that moment of containers that were born at another."""
    for held in CLUSTER:
        of = labels(namespace=held.namespace, pod=held.pod, container="main", uuid=held.uuid)
        yield "gpumap_allocation_info", of, 1
        yield "gpumap_container_allocated_gpus", of, Decimal(held.gpus)
        if held.granted is not None:
            yield "gpumap_container_allocated_gpu_memory_bytes", of, held.granted
        if held.memory is not None:
            yield "gpumap_container_gpu_processes", of, 1 if held.memory else 0
            yield "gpumap_container_gpu_memory_used_bytes", of, held.memory
        if held.sm is not None:
            yield "gpumap_container_sm_utilization_ratio", of, Decimal(held.sm)
            yield "gpumap_container_sm_seconds_total", of, Decimal(held.sm) * Decimal(now - born)
        elif held.memory is None:  # what it computed before its GPU was lost
            yield "gpumap_container_sm_seconds_total", of, 4711
    for uuid in sorted({held.uuid for held in CLUSTER}):
        yield "gpumap_device_memory_total_bytes", labels(uuid=uuid), 80 * GIB
        yield "gpumap_accounting_gap_seconds_total", labels(uuid=uuid), 0


def scraped_before(born: int, now: int) -> Samples:
    """The last minutes' scrapes, a second apart like those to come, under the labels that honorLabels leaves."""
    samples = Samples()
    for moment in range(now - WINDOW_SECONDS, now):
        for name, of, value in series(born, moment):
            all_of_it = tuple(sorted(({**AGENT, "job": "gpumap"} | dict(of)).items()))
            samples.scrape(name, all_of_it, [moment], lambda _, value=value: Decimal(value))  # type: ignore[misc]
    return samples


@contextlib.contextmanager
def serve(born: int) -> Iterator[str]:
    """The agents' page. Gives its address."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            lines = []
            for name, of, value in series(born, time.time()):
                shown = ",".join(f'{key}="{text}"' for key, text in of)
                lines.append(f"{name}{{{shown}}} {value}\n")
            body = "".join(lines).encode()
            self.send_response(200)
            self.send_header("Content-Type", TEXT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class Prometheus(NamedTuple):
    url: str

    def api(self, path: str, **parameters: str) -> Any:
        return json.loads(fetch(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}")[0])["data"]

    def ask(self, query: str) -> list[tuple[dict[str, str], float]]:
        return [(row["metric"], float(row["value"][1])) for row in self.api("query", query=query)["result"]]


def settled(answer: Callable[[], Answer], expected: object) -> Answer:
    """The answer, asked again until it is as expected: under load a scrape may fail, and rules come late."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (found := answer()) != expected and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


@contextlib.contextmanager
def prometheus(
    folder: Path, target: str, ready: str, *, before: Samples | None = None, **job: Any
) -> Iterator[Prometheus]:
    """A Prometheus that scrapes the target and evaluates the rules each second. Given once `ready` has an answer."""
    data = store(before, folder) if before else folder / "data"
    rules, config, log = folder / RULES.name, folder / "prometheus.yml", folder / "prometheus.log"
    text, number = re.subn(r"\n    interval: 15s\n", "\n    interval: 1s\n", RULES.read_text())
    assert number == 1
    rules.write_text(text)
    scrape = {"job_name": "gpumap", "static_configs": [{"targets": [target], "labels": AGENT}], **job}
    config.write_text(
        json.dumps(
            {
                "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
                "rule_files": [str(rules)],
                "scrape_configs": [scrape],
            }
        )
    )
    command = (
        tool("prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={data}",
        "--web.listen-address=127.0.0.1:0",
    )

    def address() -> str | None:
        match = re.search(r'msg="Listening on" address=(\S+)', log.read_text())
        return match and f"http://{match[1]}"

    with running(command, log, folder) as process:
        found = Prometheus(wait_for("address", address, process, log))

        def answers() -> str | None:
            with contextlib.suppress(OSError):
                return "yes" if found.ask(ready) else None
            return None

        wait_for(ready, answers, process, log)
        yield found


def expand(rule: Mapping[str, Any], name: str, namespace: str, *, pods: tuple[str, ...] = (), **selector: str) -> str:
    """The query that prometheus-adapter makes of a rule.

    As in its pkg/naming/metrics_query.go: the selector's labels, the namespace, then the resource, by `=` for one
    name and by `=~` for several; External metrics have no resource, and an empty GroupBy.
    """
    of = {override["resource"]: label for label, override in rule["resources"]["overrides"].items()}
    matchers = [f'{label}="{value}"' for label, value in selector.items()]
    matchers.append(f'{of["namespace"]}="{namespace}"')
    if pods:
        matchers.append(f'{of["pod"]}{"=~" if len(pods) > 1 else "="}"{"|".join(pods)}"')
    given = {"Series": name, "LabelMatchers": ",".join(matchers), "GroupBy": of["pod"] if pods else ""}
    return re.sub(r"<<\s*\.(\w+)\s*>>", lambda match: given[match[1]], str(rule["metricsQuery"]))
