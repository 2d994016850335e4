"""A cluster whose use of GPUs is known, scraped by a real Prometheus with the rules, and asked as autoscalers ask.

Prometheus's blocks have what was scraped before. Each window of the rules is full from the start.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.fences import read_blocks
from tests.pages import Page, serving_pages
from tests.prometheus import Prometheus, each_second, eventually, prometheus
from tests.scraped import Labels, Samples, labels, store

AUTOSCALING = Path(__file__).resolve().parents[2] / "autoscaling"
DOCS = AUTOSCALING.parent / "docs" / "how-to" / "autoscale.md"
RULES = AUTOSCALING / "gpumap-autoscaling.rules.yaml"
ADAPTER = yaml.safe_load((AUTOSCALING / "prometheus-adapter.yaml").read_text())["rules"]
SCALED_OBJECT = yaml.safe_load((AUTOSCALING / "keda-scaledobject.yaml").read_text())
GIB = 1 << 30
AGENT = {"namespace": "gpumap", "pod": "gpumap-k2p4x", "container": "gpumap", "instance": "node-1"}
"""The labels that discovery gives the agent's own pod."""
WINDOW_SECONDS = 180
"""More than that of any rate()."""


class Held(NamedTuple):
    """A container on a device of 80 GiB."""

    namespace: str
    pod: str
    uuid: str
    sm: str | None = None
    """SM time by second; `None` where it is not known."""
    memory: int | None = None
    gpus: str | None = "1"
    """`None` where it uses what it does not hold."""
    granted: int | None = 80 * GIB
    unmatched: int = 0
    """Slots more, on no known device."""
    container: str = "main"


CLUSTER = (
    Held("serving", "llm-7c9d8b5f6d-x2x4k", "GPU-0", "0.9", 72 * GIB),
    Held("serving", "llm-7c9d8b5f6d-b5c6d", "GPU-1", "0.5", 40 * GIB),
    Held("serving", "llm-7c9d8b5f6d-zzzzz", "GPU-2", "0", 0),
    Held("serving", "llm-7c9d8b5f6d-wwwww", "GPU-3"),  # its GPU is lost
    Held("serving", "llm-7c9d8b5f6d-vvvvv", "GPU-9", "1", 80 * GIB, unmatched=1),
    Held("serving", "llm-chat-66b4c9d5f-24567", "GPU-4", "1", 80 * GIB),
    # Of Jobs with names near the Deployment's.
    Held("serving", "llm-train-x7k2p", "GPU-10", "1", 80 * GIB),
    Held("serving", "llm-gpt-x2x4z", "GPU-11", "1", 80 * GIB),
    Held("serving", "llm-7b-x2x4z", "GPU-12", "1", 80 * GIB),
    Held("serving", "embedder-5d4f8c7b9-bbbbb", "GPU-5", "0.5", 20 * GIB, gpus="0.25", granted=None),
    Held("serving", "embedder-5d4f8c7b9-ccccc", "GPU-5", "0", 4 * GIB, gpus="0.25", granted=None),
    Held("serving", "ranker-8f7d6c5b4-fffff", "GPU-13", "0.5", 30 * GIB),
    Held("serving", "ranker-8f7d6c5b4-fffff", "GPU-13", "0.25", 10 * GIB, gpus=None, container="side"),
    Held("serving", "ranker-8f7d6c5b4-ggggg", "GPU-14", "0.5", 30 * GIB),
    Held("serving", "ranker-8f7d6c5b4-ggggg", "GPU-3", None, 10 * GIB, gpus=None, container="side"),  # SM not known
    Held("serving", "trainer-0", "GPU-6", "0.8", 40 * GIB),
    Held("serving", "trainer-0", "GPU-7", "0.4", 60 * GIB),
    Held("serving", "infer-0", "MIG-0", None, 20 * GIB, gpus="0.5"),
    Held("service", "classifier-6c7d4f9b5-ddddd", "GPU-8", "0.25", 8 * GIB),
)


def blocks(language: str) -> list[str]:
    """The docs' blocks of a language, those in lists too."""
    return [block.body for block in read_blocks(DOCS.read_text(), language) if not block.words]


def series(born: float, now: float) -> Iterator[tuple[str, Labels, Decimal | int]]:
    """What the agents report at that moment of containers that started at another."""
    for held in CLUSTER:
        container = {"namespace": held.namespace, "pod": held.pod, "container": held.container}
        of = labels(**container, uuid=held.uuid)
        if held.gpus is not None:
            yield "gpumap_allocation_info", of, 1
            yield "gpumap_container_allocated_gpus", of, Decimal(held.gpus)
        if held.gpus is not None and held.granted is not None:
            yield "gpumap_container_allocated_gpu_memory_bytes", of, held.granted
        if held.unmatched:
            of_slots = labels(**container, resource="nvidia.com/gpu", reason="not_in_nvml")
            yield "gpumap_unmatched_slots", of_slots, held.unmatched
        if held.memory is not None:
            yield "gpumap_container_gpu_processes", of, 1 if held.memory else 0
            yield "gpumap_container_gpu_memory_used_bytes", of, held.memory
        if held.sm is not None:
            yield "gpumap_container_sm_utilization_ratio", of, Decimal(held.sm)
            yield "gpumap_container_sm_seconds_total", of, Decimal(held.sm) * Decimal(now - born)
        elif held.memory is None:  # what it computed before its GPU was lost
            yield "gpumap_container_sm_seconds_total", of, 4711
    for uuid in sorted({held.uuid for held in CLUSTER}):
        yield "gpumap_device_info", labels(uuid=uuid, gpu_uuid=uuid, gpu_instance_id=""), 1
        yield "gpumap_device_memory_total_bytes", labels(uuid=uuid), 80 * GIB
        yield "gpumap_accounting_gap_seconds_total", labels(gpu_uuid=uuid), 0


def scraped_before(born: int, now: int) -> Samples:
    """The last minutes' scrapes, a second apart like those to come, under the labels that honorLabels leaves.

    A second job scraped the same agents, and has just ended: its counters are left, only inside of windows.
    """
    samples = Samples()
    for moment in range(now - WINDOW_SECONDS, now):
        for name, of, value in series(born, moment):
            jobs = ("gpumap", "gpumap-ended") if name.endswith("_seconds_total") else ("gpumap",)
            for job in jobs:
                all_of_it = tuple(sorted(({**AGENT, "job": job} | dict(of)).items()))
                samples.scrape(name, all_of_it, [moment], lambda _, value=value: Decimal(value))  # type: ignore[misc]
    return samples


@contextlib.contextmanager
def serve(born: int) -> Iterator[str]:
    """The agents' page. Gives its address."""

    def page(_: str) -> Page:
        lines = []
        for name, of, value in series(born, time.time()):
            shown = ",".join(f'{key}="{text}"' for key, text in of)
            lines.append(f"{name}{{{shown}}} {value}\n")
        return Page("".join(lines).encode())

    with serving_pages(page) as address:
        yield address


@contextlib.contextmanager
def with_rules(
    folder: Path, target: str, ready: str, *, before: Samples | None = None, window: str = "2m", **job: Any
) -> Iterator[Prometheus]:
    """A Prometheus that scrapes the target and evaluates the rules each second. Given once `ready` has an answer.

    `window` replaces that of the rules. A test then does not wait for two minutes.
    """
    data, rules = store(before, folder) if before else None, folder / RULES.name
    text, number = re.subn(r"\n    interval: 15s\n", "\n    interval: 1s\n", RULES.read_text())
    assert number == 1
    rules.write_text(re.sub(r"(\[|offset )2m\b", rf"\g<1>{window}", text))
    scrape = {"job_name": "gpumap", "static_configs": [{"targets": [target], "labels": AGENT}], **job}
    with prometheus(folder, data=data, config=each_second(scrape, rule_files=[str(rules)])) as found:
        eventually(lambda: bool(found.ask(ready)), about=lambda: ready)
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
