"""A real Prometheus scrapes a running `gpumap demo`, in both formats, and answers what its users would ask.

Prometheus always prefers OpenMetrics. The text format reaches it through a relay that asks gpumap for text.
"""

import re
import urllib.parse
from collections.abc import Iterator

import pytest

from gpumap.agent.dialects import DIALECTS
from gpumap.agent.metrics import GROUPS, native, self_families
from gpumap.model.families import Family
from tests.demo_process import demo, fetch
from tests.dialect_pages import documented_lints, lints
from tests.pages import Page, serving_pages
from tests.prometheus import Prometheus, each_second, eventually, prometheus, settled

PAGES = ("openmetrics", "text")
"""The jobs that scrape /metrics."""
JOBS = (*PAGES, "nodes")


@pytest.fixture(name="relay", scope="module")
def run_relay(gpumap: str) -> Iterator[str]:
    """Serves gpumap's page in the text format."""

    def relay(_: str) -> Page:
        page, content_type = fetch(f"{gpumap}/metrics", accept="text/plain")
        return Page(page.encode(), content_type)

    with serving_pages(relay) as address:
        yield f"http://{address}"


@pytest.fixture(name="gpumap", scope="module")
def run_gpumap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The demo with all that can be served."""
    all_of_it = ("--collect", "all", "--dialect", "all", "--process-metrics")
    with demo(tmp_path_factory.mktemp("demo"), "--interval", "1s", "--node-ip", "10.0.0.7", *all_of_it) as url:
        yield url


@pytest.fixture(name="prometheus", scope="module")
def run_prometheus(gpumap: str, relay: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has scraped every job a few times."""
    folder = tmp_path_factory.mktemp("prometheus")
    urls = {"openmetrics": f"{gpumap}/metrics", "nodes": f"{gpumap}/metrics/nodes"}
    jobs = [scrape(job, urls.get(job, f"{relay}/{job}")) for job in JOBS]
    with prometheus(folder, config=each_second(*jobs)) as server:

        def scraped() -> bool:
            counts = server.by("job", "count_over_time(up[1m])")
            return set(counts) == set(JOBS) and min(counts.values()) >= 3

        eventually(scraped)
        yield server


def scrape(job: str, url: str) -> dict[str, object]:
    parts = urllib.parse.urlsplit(url)
    return {"job_name": job, "metrics_path": parts.path, "static_configs": [{"targets": [parts.netloc]}]}


@pytest.mark.parametrize("path", ["/metrics", "/metrics/nodes"])
def test_promtool_reports_only_what_the_docs_list(gpumap: str, path: str) -> None:
    """`promtool check metrics` reads the served pages, and reports only what docs/reference/dialects.md lists."""
    text, _ = fetch(f"{gpumap}{path}")
    listed = [lint for name, dialect in DIALECTS.items() for lint in documented_lints(name, dialect.families)]
    assert set(lints(text)) <= set(listed)


each_format = pytest.mark.parametrize("job", PAGES)


def test_every_scrape_succeeds(prometheus: Prometheus) -> None:
    """Each target is up in several scrapes one after the other, and has no error to report."""
    everywhere = dict.fromkeys(JOBS, 1)
    assert settled(lambda: prometheus.by("job", "min_over_time(up[5s])"), everywhere) == everywhere
    healthy = dict.fromkeys(JOBS, ("up", ""))
    assert settled(lambda: _health(prometheus), healthy) == healthy


def _health(prometheus: Prometheus) -> dict[str, tuple[str, str]]:
    targets = prometheus.api("targets", state="active")["activeTargets"]
    return {target["labels"]["job"]: (target["health"], target["lastError"]) for target in targets}


def test_no_sample_is_refused(prometheus: Prometheus) -> None:
    """What was scraped was stored: no duplicate, nothing out of order or out of bounds, over all scrapes."""
    kept = "scrape_samples_scraped == on(job) scrape_samples_post_metric_relabeling"
    stored = """scrape_samples_scraped == on(job) count by (job) ({job!="", __name__!~"up|scrape_.*"})"""
    assert set(prometheus.by("job", kept)) == set(prometheus.by("job", stored)) == set(JOBS)
    own, _ = fetch(f"{prometheus.url}/metrics")
    refused = re.findall(r"^(prometheus_target_scrapes_sample_\w+_total) (\S+)$", own, re.MULTILINE)
    assert len(refused) >= 3
    assert {number for _, number in refused} == {"0"}


def test_both_formats_have_the_same_samples(prometheus: Prometheus) -> None:
    """Whichever format Prometheus is given, it ends up with the same series."""

    def series(job: str) -> set[frozenset[tuple[str, str]]]:
        found = prometheus.ask(f'{{job="{job}", __name__!~"scrape_.*"}}')
        return {frozenset(labels.items() - {("job", job), ("instance", labels["instance"])}) for labels, _ in found}

    eventually(lambda: len(series("text")) > 300 and series("text") == series("openmetrics"))


@each_format
def test_prometheus_knows_types_and_help(prometheus: Prometheus, job: str) -> None:
    """Prometheus takes each family's type and help from the page as they are meant."""
    answer = prometheus.api("targets/metadata", match_target=f'{{job="{job}"}}')
    known = {row["metric"]: (row["type"], row["help"]) for row in answer if row["metric"].startswith("gpumap_")}
    meant = {}
    of_dialects = [one for dialect in DIALECTS.values() for one in dialect.families if isinstance(one, Family)]
    for one in (*native(GROUPS, process_metrics=True), *self_families("1", "2"), *of_dialects):
        counter = one.kind == "counter" and job == "openmetrics"
        meant[one.name.removesuffix("_total") if counter else one.name] = (one.kind, one.help)
    assert known.items() <= meant.items()
    assert len(known) > 40
