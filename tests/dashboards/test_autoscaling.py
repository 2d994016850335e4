"""The autoscaling rules and what asks them, against a real Prometheus: whole windows of known use, and the demo."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.dashboards.autoscaled import (
    ADAPTER,
    CLUSTER,
    GIB,
    SCALED_OBJECT,
    blocks,
    expand,
    scraped_before,
    serve,
    with_rules,
)
from tests.demo_process import demo
from tests.prometheus import Prometheus, chart_job, settled
from tests.promtool import accepted

RECORDED = '{__name__=~"namespace.*:gpumap.*"}'
USAGE = "namespace_pod:gpumap_container_sm_seconds:rate2m"
QUERY = SCALED_OBJECT["spec"]["triggers"][0]["metadata"]["query"]
LLM = tuple(f"llm-7c9d8b5f6d-{suffix}" for suffix in ("x2x4k", "b5c6d", "zzzzz", "wwwww"))
EMBEDDER = ("embedder-5d4f8c7b9-bbbbb", "embedder-5d4f8c7b9-ccccc")
JOBS = ("llm-train-x7k2p", "llm-gpt-x2x4z", "llm-7b-x2x4z")
RANKER = ("ranker-8f7d6c5b4-fffff", "ranker-8f7d6c5b4-ggggg")
SERVING = tuple(sorted({held.pod for held in CLUSTER if held.namespace == "serving"}))
CUSTOM: dict[str, dict[str, float]] = {
    "container_gpu_usage": {
        **dict(zip(LLM, (0.9, 0.5, 0.0), strict=False)),
        **dict(zip(EMBEDDER, (0.5, 0.0), strict=True)),
        "llm-chat-66b4c9d5f-24567": 1.0,
        **dict.fromkeys(JOBS, 1.0),
        "trainer-0": 1.2,
        RANKER[0]: 0.75,
    },
    "pod_gpu_utilization": {
        **dict(zip(LLM, (0.9, 0.5, 0.0), strict=False)),
        **dict(zip(EMBEDDER, (2.0, 0.0), strict=True)),
        "llm-chat-66b4c9d5f-24567": 1.0,
        **dict.fromkeys(JOBS, 1.0),
        "trainer-0": 0.6,
        RANKER[0]: 0.75,
    },
    "pod_gpu_memory_used_bytes": {
        **dict(zip(LLM, (72 * GIB, 40 * GIB, 0), strict=False)),
        **dict(zip(EMBEDDER, (20 * GIB, 4 * GIB), strict=True)),
        "llm-chat-66b4c9d5f-24567": 80 * GIB,
        **dict.fromkeys(JOBS, 80 * GIB),
        "trainer-0": 100 * GIB,
        RANKER[0]: 40 * GIB,
        RANKER[1]: 40 * GIB,
        "infer-0": 20 * GIB,
    },
    "pod_gpu_memory_granted_ratio": {
        **dict(zip(LLM, (0.9, 0.5, 0.0), strict=False)),
        "llm-chat-66b4c9d5f-24567": 1.0,
        **dict.fromkeys(JOBS, 1.0),
        "trainer-0": 0.625,
        RANKER[0]: 0.5,
        RANKER[1]: 0.5,
        "infer-0": 0.25,
    },
    "pod_gpu_memory_device_ratio": {
        **dict(zip(LLM, (0.9, 0.5, 0.0), strict=False)),
        **dict(zip(EMBEDDER, (0.25, 0.05), strict=True)),
        "llm-chat-66b4c9d5f-24567": 1.0,
        **dict.fromkeys(JOBS, 1.0),
        "trainer-0": 0.625,
        RANKER[0]: 0.5,
        RANKER[1]: 0.25,
        "infer-0": 0.25,
    },
}
"""What the custom metrics API has to say of the namespace `serving`. No SM of MIG, and of a pod that also uses a card
without SM; nothing of the pod on a lost GPU, and of the one with a slot on no known device."""
EXTERNAL = {
    ("workload_gpu_utilization", "llm"): 1.4 / 3,
    ("workload_gpu_utilization", "embedder"): 1.0,
    ("workload_gpu_utilization", "trainer"): 0.6,
    ("workload_gpu_utilization", "ranker"): 0.75,
    ("workload_gpu_memory_device_ratio", "llm"): 1.4 / 3,
    ("workload_gpu_memory_device_ratio", "infer"): 0.25,
}


def near(expected: Any) -> Any:
    """About that: a page is made a little after its scrape began."""
    return pytest.approx(expected, rel=0.02, abs=0.01)


def relabelled() -> dict[str, Any]:
    """The remedy of docs/how-to/autoscale.md where honorLabels cannot be true."""
    (found,) = (text for text in blocks("yaml") if "metric_relabel_configs" in text)
    rules: dict[str, Any] = yaml.safe_load(found)
    return rules


@pytest.fixture(name="scraped", scope="module", params=["honorLabels", "relabelled"])
def run_scraped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has scraped the cluster for more than a window."""
    now = int(time.time())
    born = now - 3600
    job = {"honor_labels": True} if request.param == "honorLabels" else {"honor_labels": False, **relabelled()}
    before = scraped_before(born, now)
    known = 1 + len(CUSTOM["container_gpu_usage"])  # one in another namespace
    by_workload = known + 1 + len(CUSTOM["pod_gpu_memory_device_ratio"])
    all_there = f'count({{__name__=~"namespace_workload.*"}}) >= {by_workload} and on () count({USAGE}) == {known}'
    with (
        serve(born) as page,
        with_rules(tmp_path_factory.mktemp("scraped"), page, all_there, before=before, **job) as found,
    ):
        yield found


def serving(rule: dict[str, Any], scraped: Prometheus, pods: tuple[str, ...]) -> dict[str, float]:
    """Answer as the adapter does of these pods: find the series, make the query, go by the pod's label."""
    (name,) = {row["__name__"] for row in scraped.api("series", **{"match[]": rule["seriesQuery"]})}
    answers = scraped.ask(expand(rule, name, "serving", pods=pods))
    assert all(set(labels) == {"pod"} for labels, _ in answers)
    return {labels["pod"]: value for labels, value in answers}


def external(rule: dict[str, Any], scraped: Prometheus, workload: str) -> list[float]:
    (name,) = {row["__name__"] for row in scraped.api("series", **{"match[]": rule["seriesQuery"]})}
    return [value for _, value in scraped.ask(expand(rule, name, "serving", workload=workload))]


def test_the_rules_hold_their_unit_tests() -> None:
    """They are correct for what is idle, shared, known in part, gone, restarted, not scraped, or scraped twice."""
    tests = Path(__file__).with_name("autoscaling.rules-test.yaml")
    accepted("test", "rules", tests)


def test_the_adapter_serves_what_is_expected_and_no_more() -> None:
    assert sorted(rule["name"]["as"] for rule in ADAPTER["custom"]) == sorted(CUSTOM)
    assert {rule["name"]["as"] for rule in ADAPTER["external"]} == {name for name, _ in EXTERNAL}
    assert len(ADAPTER["external"]) == 2


@pytest.mark.parametrize("rule", ADAPTER["custom"], ids=lambda rule: rule["name"]["as"])
def test_custom_metrics_tell_each_pod_its_own(scraped: Prometheus, rule: dict[str, Any]) -> None:
    expected = CUSTOM[rule["name"]["as"]]
    everyone = near(expected)
    assert settled(lambda: serving(rule, scraped, SERVING), everyone) == everyone
    for pod in SERVING:
        alone = near({pod: expected[pod]} if pod in expected else {})
        assert settled(partial(serving, rule, scraped, (pod,)), alone) == alone


@pytest.mark.parametrize(("name", "workload"), EXTERNAL)
def test_external_metrics_are_one_mean_of_a_workload(scraped: Prometheus, name: str, workload: str) -> None:
    """The mean over the pods that are known, of this workload only, as one value."""
    (rule,) = (rule for rule in ADAPTER["external"] if rule["name"]["as"] == name)
    mean = near([EXTERNAL[name, workload]])
    assert settled(lambda: external(rule, scraped, workload), mean) == mean


@pytest.mark.parametrize("workload", ["infer", "llm-train", "llm-gpt", "nobody"])
def test_external_metrics_say_nothing_of_what_is_unknown(scraped: Prometheus, workload: str) -> None:
    """SM use of MIG, Jobs, and a workload without pods have no answer: replicas then stay as they are."""
    (rule,) = (rule for rule in ADAPTER["external"] if rule["name"]["as"] == "workload_gpu_utilization")
    assert external(rule, scraped, workload) == []


@pytest.mark.parametrize(
    ("workload", "expected"),
    [
        ("llm", [1.4 / 3]),
        ("embedder", [1.0]),
        ("llm-chat", [1.0]),
        ("ranker", [0.75]),
        ("infer", []),
        ("llm-train", []),
        ("llm-gpt", []),
        ("nobody", []),
    ],
)
def test_keda_asks_what_the_rules_answer(scraped: Prometheus, workload: str, expected: list[float]) -> None:
    """KEDA's query, and the docs' on the rules, give the same mean of a Deployment's known pods as one element."""
    (on_rules,) = (query for query in blocks("promql") if "namespace_workload_pod" in query)
    queries = (QUERY.replace("llm-", f"{workload}-"), on_rules.replace('"llm"', f'"{workload}"'))
    for query in queries:
        assert query != QUERY or workload == "llm"
        mean = near(expected)
        assert settled(partial(values, scraped, query), mean) == mean


def values(scraped: Prometheus, query: str) -> list[float]:
    return [value for _, value in scraped.ask(query)]


@pytest.mark.parametrize("query", blocks("promql"))
def test_the_queries_of_the_docs_have_answers(scraped: Prometheus, query: str) -> None:
    """Each PromQL block of docs/how-to/autoscale.md is answered."""
    assert settled(lambda: bool(scraped.ask(query)), expected=True)


def test_gpumap_itself_is_credited_with_nothing(tmp_path: Path) -> None:
    """With honorLabels false and nothing relabelled the rules keep silent."""
    waited = 'count_over_time(gpumap_container_sm_seconds_total{exported_pod="trainer-0"}[1m]) > 3'
    with serve(int(time.time()) - 3600) as page, with_rules(tmp_path, page, waited, honor_labels=False) as scraped:
        credited = "sum by (pod) (rate(gpumap_container_sm_seconds_total[1m]))"
        assert [labels for labels, _ in scraped.ask(credited)] == [{"pod": "gpumap-k2p4x"}]
        assert scraped.ask(RECORDED) == []


def test_the_demo_is_told_by_the_rules(tmp_path: Path) -> None:
    """Of a running gpumap: idle holders at 0, users above it, also on MIG devices, memory of both."""
    node = tmp_path / "node"
    node.mkdir()
    (folder := tmp_path / "prometheus").mkdir()
    with demo(node, "--interval", "500ms") as url:
        ready = f'{USAGE}{{pod="recommender"}} > 0.001 and on () {USAGE}{{pod="trainer"}} > 0.01'
        with with_rules(folder, "", ready, window="20s", **chart_job({"demo-node": url})) as scraped:
            usage = {labels["pod"]: value for labels, value in scraped.ask(USAGE)}
            memory = "namespace_pod:gpumap_container_gpu_memory_used_bytes:sum"
            used = {labels["pod"]: value for labels, value in scraped.ask(memory)}
            of_devices = "namespace_pod:gpumap_container_gpu_memory_used_per_device:ratio"
            assert settled(lambda: {labels["pod"] for labels, _ in scraped.ask(of_devices)}, used.keys()) == used.keys()
            assert all(0 <= value <= 1 for _, value in scraped.ask(of_devices))
    assert usage["notebook-idle"] == used["notebook-idle"] == 0
    assert min(usage[pod] for pod in ("trainer", "greedy", "recommender", "ranker", "squatter")) > 0
    assert usage["mig-idle"] == 0
    assert min(usage["mig-small"], usage["mig-large"]) > 0
    assert {pod: used[pod] for pod in ("mig-small", "mig-idle", "mig-large")} == {
        "mig-small": 6 * GIB,
        "mig-idle": 0,
        "mig-large": 25 * GIB,
    }
    assert usage.keys() <= used.keys()
