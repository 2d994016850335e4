"""A real Prometheus scrapes a running `gpumap demo`, in both formats, and answers what its users would ask.

Prometheus always prefers OpenMetrics. The text format reaches it through a relay that asks gpumap for text.
"""

import re
import urllib.parse
from collections.abc import Iterator

import pytest

from gpumap.agent.dialects import DIALECTS
from gpumap.agent.exposition import OPENMETRICS_TYPE, TEXT_TYPE, Exposition
from gpumap.agent.metrics import GROUPS, native, self_families
from gpumap.model.families import Family, Series
from tests.demo_process import demo, fetch
from tests.dialect_pages import documented_lints, lints
from tests.pages import Page, serving_pages
from tests.prometheus import Prometheus, each_second, eventually, prometheus, settled
from tests.snapshots import empty_node
from tests.test_exposition import AWKWARD

MIB = 1 << 20
GIB = 1 << 30
PAGES = ("openmetrics", "text")
"""The jobs that scrape /metrics."""
JOBS = (*PAGES, "nodes", "awkward-openmetrics", "awkward-text")


def awkward_page(*, openmetrics: bool) -> bytes:
    series = [Series((name, value), number) for number, (name, value) in enumerate(AWKWARD.items())]
    series.append(Series(("what UTF-8 cannot carry", "\udcff"), len(series)))
    family = Family("awkward", "gauge", 'What is "hard"\\to write.', ("name", "value"), lambda snapshot: series)
    return Exposition([family], openmetrics=openmetrics).render(empty_node())


@pytest.fixture(name="relay", scope="module")
def run_relay(gpumap: str) -> Iterator[str]:
    """Serves gpumap's page in the text format, and the awkward label values in both."""

    def relay(path: str) -> Page:
        if path == "/text":
            page, content_type = fetch(f"{gpumap}/metrics", accept="text/plain")
            return Page(page.encode(), content_type)
        openmetrics = path == "/awkward-openmetrics"
        return Page(awkward_page(openmetrics=openmetrics), OPENMETRICS_TYPE if openmetrics else TEXT_TYPE)

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
def test_promtool_says_only_what_the_docs_list(gpumap: str, path: str) -> None:
    """`promtool check metrics` reads the pages as they are served, with process_* and every dialect, and is silent but
    for what docs/reference/dialects.md lists of a dialect's names."""
    text, _ = fetch(f"{gpumap}{path}")
    listed = [lint for name, dialect in DIALECTS.items() for lint in documented_lints(name, dialect.families)]
    assert set(lints(text)) <= set(listed)


each_format = pytest.mark.parametrize("job", PAGES)


def test_every_scrape_succeeds(prometheus: Prometheus) -> None:
    """Each target is up in several scrapes one after the other, and has no error to report. A busy machine may be too
    slow for one of a second."""
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
    told = prometheus.api("targets/metadata", match_target=f'{{job="{job}"}}')
    known = {row["metric"]: (row["type"], row["help"]) for row in told if row["metric"].startswith("gpumap_")}
    meant = {}
    of_dialects = [one for dialect in DIALECTS.values() for one in dialect.families if isinstance(one, Family)]
    for one in (*native(GROUPS, process_metrics=True), *self_families("1", "2"), *of_dialects):
        counter = one.kind == "counter" and job == "openmetrics"
        meant[one.name.removesuffix("_total") if counter else one.name] = (one.kind, one.help)
    assert known.items() <= meant.items()
    assert len(known) > 40


@each_format
def test_the_law_of_conservation_is_a_query(prometheus: Prometheus, job: str) -> None:
    """On each leaf the owners' bytes sum up to the device's used bytes, exactly."""
    leaves = prometheus.value(f'count(gpumap_device_memory_used_bytes{{job="{job}"}})')
    assert leaves == 10
    agree = (
        f'count(sum by (uuid) (gpumap_device_memory_used_by_owner_bytes{{job="{job}"}})'
        f' == on(uuid) gpumap_device_memory_used_bytes{{job="{job}"}})'
    )
    assert prometheus.value(agree) == leaves


@each_format
def test_no_gpu_is_given_out_more_than_once(prometheus: Prometheus, job: str) -> None:
    """The shares that containers were given of one physical GPU sum up to one where all is given, and never to more."""
    shares = prometheus.by(
        "gpu_uuid",
        f'sum by (gpu_uuid) (gpumap_container_allocated_gpus{{job="{job}"}}'
        f' * on(uuid) group_left(gpu_uuid) gpumap_device_info{{job="{job}"}})',
    )
    assert max(shares.values()) <= 1
    assert list(shares.values()).count(1) >= 3


@each_format
def test_the_pods_on_a_shared_card_have_their_own_bytes(prometheus: Prometheus, job: str) -> None:
    """Three pods share a card: each shows what it uses, the idle one 0, and none the card's own number."""
    shared = f'gpumap_device_holders{{job="{job}"}} > 2'
    ((labels, holders),) = prometheus.ask(shared)
    uuid = labels["uuid"]
    assert holders == 4
    used = prometheus.by(
        "pod",
        f'sum by (pod) (gpumap_container_gpu_memory_used_bytes{{job="{job}"}}'
        f' * on(uuid, namespace, pod, container) group_left gpumap_allocation_info{{job="{job}", uuid="{uuid}"}})',
    )
    assert used == {"greedy": 46 * GIB, "notebook-pair": 3 * GIB + 700 * MIB, "notebook-idle": 0}


@each_format
def test_allocations_join_with_devices(prometheus: Prometheus, job: str) -> None:
    """gpumap_allocation_info takes model and profile from gpumap_device_info, one row for each holder and no more."""
    join = (
        f'gpumap_allocation_info{{job="{job}"}}'
        f' * on(uuid) group_left(model, mig_profile) gpumap_device_info{{job="{job}"}}'
    )
    assert prometheus.value(f'count({join}) - count(gpumap_allocation_info{{job="{job}"}})') == 0
    joined = prometheus.ask(join)
    assert {labels["model"] for labels, _ in joined} == {"NVIDIA H100 80GB HBM3"}
    profiles = {labels["pod"]: labels.get("mig_profile", "") for labels, _ in joined}
    assert profiles["mig-large"] == "3g.40gb"
    assert profiles["trainer"] == ""


@each_format
def test_counters_can_be_rated(prometheus: Prometheus, job: str) -> None:
    """Counters count on from scrape to scrape; a source's mean time is the quotient of two rates."""
    collections = f'gpumap_collections_total{{job="{job}", trigger="interval"}}'
    eventually(lambda: prometheus.value(f"increase({collections}[10s])") > 0)
    mean = prometheus.by(
        "source",
        f'rate(gpumap_source_duration_seconds_sum{{job="{job}"}}[10s])'
        f' / rate(gpumap_source_duration_seconds_count{{job="{job}"}}[10s])',
    )
    assert set(mean) == {"kubelet", "nvml", "procfs", "pod_identity"}
    assert all(0 < seconds < 5 for seconds in mean.values())
    energy = prometheus.by("gpu_uuid", f'rate(gpumap_gpu_energy_joules_total{{job="{job}"}}[10s])')
    assert len(energy) == 8
    assert min(energy.values()) > 0


def test_the_nodes_page_is_a_job_of_its_own(prometheus: Prometheus) -> None:
    """/metrics/nodes gives the rows of pod_and_gpu_map_info under the node's own name."""

    def rows(series: str) -> set[tuple[str, ...]]:
        found = prometheus.ask(series)
        assert {value for _, value in found} == {1}
        return {
            tuple(labels[name] for name in ("gpu_id", "gpu_model", "namespace", "node", "pod_name"))
            for labels, _ in found
        }

    eventually(lambda: len(rows("demo_node_info")) >= 9)
    eventually(lambda: rows("demo_node_info") == rows('pod_and_gpu_map_info{job="openmetrics"}'))


def test_the_node_and_its_address_are_told(prometheus: Prometheus) -> None:
    """gpumap_node_info says which node it is."""
    ((labels, value),) = prometheus.ask('gpumap_node_info{job="text"}')
    assert (labels["node"], labels["internal_ip"], value) == ("demo-node", "10.0.0.7", 1)


@pytest.mark.parametrize("job", ["awkward-openmetrics", "awkward-text"])
def test_awkward_label_values_arrive(prometheus: Prometheus, job: str) -> None:
    """Prometheus stores each awkward label value exactly as it was, in both formats."""
    stored = {labels["name"]: labels.get("value", "") for labels, _ in prometheus.ask(f'awkward{{job="{job}"}}')}
    assert stored == {**AWKWARD, "what UTF-8 cannot carry": "\\udcff"}
