"""The chart's ServiceMonitor and PodMonitor, tried with a real Prometheus: which labels a series has, and how it asks.

What Prometheus' operator makes of a monitor is played: its own relabelings, and then the monitor's.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import bcrypt
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpumap.cli.args import OWN_JOBS
from tests.certificates import make_certificate
from tests.demo_process import GPUMAP, demo, fetch, listening, running
from tests.deploy.chart import render, render_all
from tests.deploy.chart_variations import PASSWORD_SENT, of
from tests.prometheus import Prometheus, each_second, eventually, prometheus, target_labels
from tests.promtool import accepted

META = "__meta_kubernetes_"
TARGET = {
    "namespace": "monitoring",
    "service_name": "prod-gpumap",
    "pod_name": "prod-gpumap-x7k2p",
    "pod_node_name": "gpu-1",
    "pod_container_name": "gpumap",
    "endpoint_address_target_kind": "Pod",
    "endpoint_address_target_name": "prod-gpumap-x7k2p",
}
"""What Prometheus discovers of an agent's pod."""
Relabeling = Mapping[str, object]
OPERATOR: dict[str, tuple[Relabeling, ...]] = {
    "ServiceMonitor": (
        {
            "source_labels": [f"{META}endpoint_address_target_kind", f"{META}endpoint_address_target_name"],
            "regex": "Pod;(.*)",
            "target_label": "pod",
        },
        {"source_labels": [f"{META}namespace"], "target_label": "namespace"},
        {"source_labels": [f"{META}service_name"], "target_label": "service"},
        {"source_labels": [f"{META}pod_name"], "target_label": "pod"},
        {"source_labels": [f"{META}pod_container_name"], "target_label": "container"},
        {"source_labels": [f"{META}service_name"], "target_label": "job"},
        {"target_label": "endpoint", "replacement": "metrics"},
    ),
    "PodMonitor": (
        {"source_labels": [f"{META}namespace"], "target_label": "namespace"},
        {"source_labels": [f"{META}pod_container_name"], "target_label": "container"},
        {"source_labels": [f"{META}pod_name"], "target_label": "pod"},
        {"target_label": "job", "replacement": "monitoring/prod-gpumap"},
        {"target_label": "endpoint", "replacement": "metrics"},
    ),
}
"""prometheus-operator, pkg/prometheus/promcfg.go: generateServiceMonitorConfig and generatePodMonitorConfig."""
ENDPOINTS = {"ServiceMonitor": "endpoints", "PodMonitor": "podMetricsEndpoints"}
JOBS = {"ServiceMonitor": "gpumap", "PodMonitor": "blue-gpumap"}
"""One target's labels are the same by either monitor: only those of two jobs are two targets."""
SHARDING: tuple[Relabeling, ...] = (
    {"source_labels": ["__address__", "__tmp_hash"], "regex": "(.+);", "target_label": "__tmp_hash"},
    {"source_labels": ["__tmp_hash"], "modulus": 4, "target_label": "shard", "action": "hashmod"},
)
"""prometheus-operator, generateAddressShardingRelabelingRules, with a label that can be seen."""
SNAKE = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
"""As Prometheus calls what the operator's fields are called."""
PASSWORD = "not a secret"
HASH = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(4)).decode()


def endpoint(kind: str, *values: str, release: str = "prod") -> dict[str, Any]:
    switch = f"{kind[0].lower()}{kind[1:]}.enabled=true"
    found: dict[str, Any]
    (found,) = render(switch, *values, release=release)[kind]["spec"][ENDPOINTS[kind]]
    return found


def scrape(
    kind: str, address: str, *values: str, target: Mapping[str, str] = TARGET, release: str = "prod", **more: object
) -> dict[str, object]:
    """The job that the operator makes of the chart's monitor, for an agent at this address."""
    told = endpoint(kind, *values, release=release)
    own = [{SNAKE.get(key, key): value for key, value in one.items()} for one in told["relabelings"]]
    labels = {f"{META}{name}": value for name, value in target.items()}
    return {
        "job_name": f"{kind}/{address}",
        "honor_labels": told["honorLabels"],
        "metrics_path": told["path"],
        "scheme": told.get("scheme", "http"),
        "relabel_configs": [*OPERATOR[kind], *own],
        "static_configs": [{"targets": [address], "labels": labels}],
        **more,
    }


def labels_of_targets(folder: Path, job: Mapping[str, object]) -> list[dict[str, str]]:
    """Those that promtool finds the targets of a job to have."""
    config = folder / "prometheus.yml"
    config.write_text(json.dumps({"scrape_configs": [job]}))
    # It waits for all of this time, and targets that are listed come at once.
    done = accepted("check", "service-discovery", "--timeout=300ms", config, str(job["job_name"]))
    found = [one["labels"] for one in json.loads(done.stdout[done.stdout.index("[") :])]
    return [{name: value for name, value in one.items() if not name.startswith("__")} for one in found]


@pytest.mark.parametrize("kind", OPERATOR)
def test_a_target_is_its_node(kind: str, tmp_path: Path) -> None:
    """`node` and `instance` are the node, `job` is gpumap, and no label names the agent's own pod."""
    (labels,) = labels_of_targets(tmp_path, scrape(kind, "10.0.0.1:9401"))
    assert labels == {"job": "gpumap", **target_labels("gpu-1")}


NAMES: tuple[tuple[str, tuple[str, ...], str, str], ...] = (
    ("gpumap", (), "gpumap", OWN_JOBS),
    ("foo", (), "gpumap", OWN_JOBS),
    ("foo", ("nameOverride=agents",), "gpumap", OWN_JOBS),
    ("foo", ("fullnameOverride=gpu-exporter",), "gpumap", OWN_JOBS),
    ("foo", (f"fullnameOverride={'a' * 63}",), "gpumap", OWN_JOBS),
    ("foo", ("job=blue-gpumap",), "blue-gpumap", OWN_JOBS),
    ("foo", ("job=gpu_agents",), "gpu_agents", 'job=~"gpu_agents"'),
    ("foo", ("job=monitoring/123",), "monitoring/123", 'job=~"monitoring/123"'),
)
"""Release, values, the job of its targets, and by what its rules and boards find them."""
JOB_MATCHER = re.compile(r'(\bjob=~?\\?"[^"%]*")')


@pytest.mark.parametrize(("release", "values", "job", "own"), NAMES)
@pytest.mark.parametrize("kind", OPERATOR)
def test_the_rules_match_the_job_of_every_release(
    kind: str, release: str, values: tuple[str, ...], job: str, own: str, tmp_path: Path
) -> None:
    """Names are free (contract §8): the rules and boards read the targets of each release, of any name and job."""
    (labels,) = labels_of_targets(tmp_path, scrape(kind, "10.0.0.1:9401", *values, release=release))
    assert labels["job"] == job
    switches = (f"prometheusRule.{one}=true" for one in ("enabled", "autoscaling", "opencost"))
    rules = render(*switches, *values, release=release)
    matchers = {found.replace("\\", "") for found in JOB_MATCHER.findall(json.dumps(rules["PrometheusRule"]))}
    assert matchers == {own, 'job=""'}  # the second one is of what rules record
    assert re.fullmatch(own.removeprefix('job=~"').removesuffix('"'), job)
    boards = json.dumps([one.get("data") for one in render_all("dashboards.enabled=true", *values, release=release)])
    matchers = {*JOB_MATCHER.findall(boards.replace("\\", ""))}
    assert {own, own.replace('"', '"|', 1)} <= matchers
    assert own == OWN_JOBS or ".*gpumap.*" not in boards


@pytest.mark.parametrize("kind", OPERATOR)
def test_a_roll_out_makes_no_new_series(kind: str, tmp_path: Path) -> None:
    """The pod that comes after another one on its node, at another address, has that one's labels."""
    after = TARGET | {"pod_name": "prod-gpumap-9qwrt", "endpoint_address_target_name": "prod-gpumap-9qwrt"}
    found = [
        labels_of_targets(tmp_path, job)
        for job in (scrape(kind, "10.0.0.1:9401"), scrape(kind, "10.0.0.2:9401", target=after))
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", OPERATOR)
def test_a_node_stays_in_its_shard(kind: str, tmp_path: Path) -> None:
    """Where Prometheus is sharded, the node decides who scrapes it, and not the address, which a new pod changes."""
    job = scrape(kind, "10.0.0.1:9401")
    configs = job["relabel_configs"]
    assert isinstance(configs, list)
    nodes = [
        {f"{META}{name}": value for name, value in (TARGET | {"pod_node_name": f"gpu-{number}"}).items()}
        for number in range(12)
    ]
    found = []
    for network in ("10.0.0", "10.0.1"):
        targets = [{"targets": [f"{network}.{at}:9401"], "labels": labels} for at, labels in enumerate(nodes)]
        more = {"relabel_configs": [*configs, *SHARDING], "static_configs": targets}
        found.append({one["node"]: one["shard"] for one in labels_of_targets(tmp_path, job | more)})
    assert found[0] == found[1]
    assert len(found[0]) == len(nodes)
    assert len(set(found[0].values())) > 1


def test_a_pod_that_ends_is_a_target_no_more(tmp_path: Path) -> None:
    """Also where targets come from EndpointSlices, which go on naming it: no scrape is to find it dead."""
    ending = TARGET | {"endpointslice_endpoint_conditions_terminating": "true"}
    assert labels_of_targets(tmp_path, scrape("ServiceMonitor", "10.0.0.1:9401", target=ending)) == [{}]
    staying = TARGET | {"endpointslice_endpoint_conditions_terminating": "false"}
    assert labels_of_targets(tmp_path, scrape("ServiceMonitor", "10.0.0.1:9401", target=staying)) != [{}]


@pytest.mark.parametrize("kind", OPERATOR)
def test_ones_own_relabelings_come_last(kind: str, tmp_path: Path) -> None:
    """They see the chart's labels, and can take them away or add to them."""
    name = f"{kind[0].lower()}{kind[1:]}"
    values = (
        f"{name}.relabelings[0].targetLabel=region",
        f"{name}.relabelings[0].replacement=eu",
        f"{name}.relabelings[1].action=labeldrop",
        f"{name}.relabelings[1].regex=endpoint|service",
    )
    (labels,) = labels_of_targets(tmp_path, scrape(kind, "10.0.0.1:9401", *values))
    assert labels == {"job": "gpumap", "node": "gpu-1", "instance": "gpu-1", "region": "eu"}


@pytest.mark.parametrize("kind", OPERATOR)
def test_the_certificate_is_checked(kind: str) -> None:
    """By TLS the server must have the Service's name, vouched for by ca.crt of its own Secret, until one says more."""
    name = f"{kind[0].lower()}{kind[1:]}"
    tls = "tls.secretName=certificate"
    own = {"serverName": "prod-gpumap.monitoring.svc", "ca": {"secret": {"name": "certificate", "key": "ca.crt"}}}
    assert endpoint(kind, tls)["tlsConfig"] == own
    assert endpoint(kind, tls, f"{name}.tlsConfig.serverName=a")["tlsConfig"] == own | {"serverName": "a"}
    given = (f"{name}.tlsConfig.ca.configMap.name=authorities", f"{name}.tlsConfig.ca.configMap.key=ca")
    other = {"configMap": {"name": "authorities", "key": "ca"}}
    assert endpoint(kind, tls, *given)["tlsConfig"] == own | {"ca": other}
    unchecked = endpoint(kind, tls, f"{name}.tlsConfig.insecureSkipVerify=true")["tlsConfig"]
    assert unchecked == {"serverName": own["serverName"], "insecureSkipVerify": True}


@pytest.fixture(name="servers", scope="module")
def run_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Prometheus]]:
    """The URL of an agent, and a Prometheus that scrapes it by monitors of two jobs, one of each kind; and a second
    agent, that serves by TLS and wants a password, as the chart's values have it."""
    folder = tmp_path_factory.mktemp("monitors")
    for name in ("plain", "secured", "tls"):
        (folder / name).mkdir()
    tls = folder / "tls"
    make_certificate(tls, "tls", "subjectAltName=DNS:prod-gpumap.monitoring.svc")
    secured = ("tls.secretName=certificate", f"basicAuth.users.prometheus={HASH}", *of("serviceMonitor", PASSWORD_SENT))
    config = folder / "web-config.yml"
    text = render(*secured, release="prod")["Secret"]["stringData"]["web-config.yml"]
    config.write_text(text.replace("/etc/gpumap/tls", str(tls)))
    with (
        demo(folder / "plain", "--interval", "1s", "--node-name", "gpu-1") as url,
        secured_demo(folder / "secured", "--node-name", "gpu-2", "--web-config", str(config)) as address,
    ):
        asks = endpoint("ServiceMonitor", *secured)
        more: dict[str, Any] = {
            "tls_config": {"ca_file": str(tls / "tls.crt"), "server_name": asks["tlsConfig"]["serverName"]},
            "basic_auth": {"username": "prometheus", "password": PASSWORD},
        }
        second = TARGET | {"pod_node_name": "gpu-2", "pod_name": "prod-gpumap-2"}
        jobs = (
            *(scrape(kind, url.removeprefix("http://"), f"job={job}") for kind, job in JOBS.items()),
            scrape("ServiceMonitor", address, *secured, target=second, **more),
        )
        with prometheus(folder, config=each_second(*jobs)) as server:
            eventually(lambda: len(server.ask("up == 1")) == len(jobs), about=lambda: server.api("targets"))
            yield url, server


@contextlib.contextmanager
def secured_demo(folder: Path, *arguments: str) -> Iterator[str]:
    """Run an agent that does not let us in. Gives its address once it listens."""
    log = folder.parent / f"{folder.name}.log"
    with running((GPUMAP, "demo", "--listen", "127.0.0.1:0", *arguments), log, folder) as process:
        yield listening(process, log)


def test_no_series_is_stamped_with_the_agents_pod(servers: tuple[str, Prometheus]) -> None:
    """What is said of a GPU, of the node or of gpumap itself names no pod; every series names the node."""
    _, server = servers
    own = 'namespace="monitoring"', 'pod=~"prod-gpumap.*"', 'container="gpumap"', 'exported_pod!=""'
    assert [server.ask(f"{{job=~'.*gpumap',{label}}}") for label in own] == [[], [], [], []]
    of_the_node = '__name__=~"up|process_.*|gpumap_(gpu|node|source|device)_.*"'
    assert server.ask(f"{{{of_the_node}}}")
    assert server.ask(f'{{{of_the_node},pod!=""}}') == []
    targets = server.ask('count by (node, instance, job) ({__name__=~".+"})')
    found = {(one["node"], one["instance"], one["job"]) for one, _ in targets}
    jobs = {("gpu-1", "gpumap"), ("gpu-1", "blue-gpumap"), ("gpu-2", "gpumap")}
    assert found == {(node, node, job) for node, job in jobs}


def test_containers_keep_their_own_labels(servers: tuple[str, Prometheus]) -> None:
    """The namespace, pod and container of a holder arrive as the agent reports them."""
    url, server = servers
    name = "gpumap_allocation_info"

    def served() -> set[tuple[str, ...]]:
        families = text_string_to_metric_families(fetch(f"{url}/metrics")[0])
        samples = [sample.labels for family in families for sample in family.samples if sample.name == name]
        return {tuple(labels[key] for key in ("namespace", "pod", "container", "uuid")) for labels in samples}

    def scraped() -> set[tuple[str, ...]]:
        rows = server.ask(f'{name}{{node="gpu-1"}}')
        return {tuple(labels[key] for key in ("namespace", "pod", "container", "uuid")) for labels, _ in rows}

    eventually(lambda: len(scraped()) > 3 and scraped() == served(), about=lambda: scraped() ^ served())


def test_prometheus_gets_in_as_the_monitor_says(servers: tuple[str, Prometheus]) -> None:
    """By the certificate's name and authority, and with the password: a page comes back."""
    _, server = servers
    eventually(lambda: bool(server.ask('gpumap_node_info{node="gpu-2"}')), about=lambda: server.api("targets"))
