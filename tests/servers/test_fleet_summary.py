"""The summary of a cluster is the sum of its rows, added up by a real Prometheus or by its recording rules."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpumap.agent.exposition import Exposition
from gpumap.cli.fleet.quantities import QUANTITIES
from gpumap.model.formatting import reason_sentences
from tests import golden
from tests.command import one_line, run_command
from tests.pages import Page, serving_pages
from tests.prometheus import Prometheus, chart_job, eventually, prometheus, settled
from tests.test_fleet import PAGE, named

RULES = Path(__file__).parents[2] / "rules" / "fleet.yaml"
SNAPSHOT = re.compile(r"^gpumap_snapshot_timestamp_seconds (\S+)$", re.MULTILINE)
TIME = re.compile(r"^(gpumap_\w*timestamp_seconds(?:{.*})?) (\S+)$", re.MULTILINE)
DOWN = "node gone: Prometheus cannot scrape its gpumap (up is 0)"
Values = dict[str, dict[str, float]]
"""By node or namespace, then by quantity."""
Document = dict[str, Any]
Pages = dict[str, Callable[[], Page]]
"""By path."""


def capture_pages() -> Pages:
    """A node for each capture, which has always collected just now; its devices are no other one's."""
    return {f"/{capture.name}": collected_now(capture) for capture in golden.captures()}


def collected_now(capture: Path) -> Callable[[], Page]:
    message = Exposition(PAGE).render(named(golden.snapshots(capture)[-1], capture.name)).decode()
    message = re.sub(r'uuid="((?:GPU|MIG)[^"]*)', rf'uuid="\1@{capture.name}', message)
    (collected,) = map(float, SNAPSHOT.findall(message))

    def page() -> Page:
        later = time.time() - collected
        return Page(TIME.sub(lambda one: f"{one[1]} {float(one[2]) + later}", message).encode())

    return page


@pytest.fixture(name="server", scope="module")
def run_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with the recording rules that scrapes all captures, and a node that does not answer."""
    pages = capture_pages()
    folder, pods = tmp_path_factory.mktemp("prometheus"), pods_of(pages)
    (file := folder / "kube.prom").write_text(owners_page(pods))
    rules = RULES.read_text()
    with (
        serving_pages(lambda _: Page(file.read_bytes())) as kube,
        with_rules(folder, pages, rules, [kube_job(kube)], gone="http://127.0.0.1:9") as found,
    ):

        def recorded() -> bool:
            rules = found.ask(f"{RECORD} and on (namespace) {RECORD} offset 5s")
            namespaces = found.ask("count by (namespace) (gpumap_container_allocated_gpus offset 9s)")
            return len(rules) == len(namespaces)

        eventually(recorded)
        yield found.url


@contextlib.contextmanager
def with_rules(
    folder: Path, pages: Pages, rules: str, jobs: Sequence[Document] = (), **others: str
) -> Iterator[Prometheus]:
    """A server that scrapes these nodes, and evaluates the rules often. Given once it has scraped each page."""
    (file := folder / "rules.yaml").write_text(rules.replace("interval: 1m", "interval: 2s"))
    with serving_pages(lambda path: pages[path]()) as address:
        nodes = {path[1:]: f"http://{address}{path}" for path in pages} | others
        times = {"scrape_interval": "8s", "scrape_timeout": "8s"}
        config = {"global": times, "scrape_configs": [chart_job(nodes), *jobs], "rule_files": [str(file)]}
        with prometheus(folder, config=config) as found:
            eventually(lambda: len(found.ask("gpumap_snapshot_timestamp_seconds offset 5s")) == len(pages))
            yield found


RECORD = "cluster_namespace:gpumap_container_allocated_gpus:sum"
BY_NODE = "cluster_node:gpumap_gpu_up:sum"
FLAGS = {"sum by": ("--match", 'job="gpumap"'), "rules": ()}
"""Which sums are asked for: a matcher of a job cannot be asked of records."""


def asked(*words: str) -> Document:
    done = run_command(*words, "-o", "json")
    assert done.returncode in (0, 1), done.stderr
    found: Document = json.loads(done.stdout)
    return found


# --- the sums of rows -------------------------------------------------------------------------------------------------


@pytest.fixture(name="rows", scope="module")
def ask_rows(server: str) -> Document:
    found: list[Document] = []

    def is_whole() -> bool:
        found[:] = [asked("map", "--all", "--prometheus", server)]
        return len(found[0]["nodes"]) == len(golden.captures())

    eventually(is_whole)
    return found[0]


def containers(node: Document) -> Iterator[tuple[Document, int]]:
    """Each container on a device; and how many devices share its memory."""
    instances = Counter(map(memory_of, node["devices"]))
    for device in node["devices"]:
        for one in device["containers"]:
            yield one, instances[memory_of(device)]


# --- workloads --------------------------------------------------------------------------------------------------------

Pod = tuple[str, str]
OWNERS: tuple[tuple[str, str, str], ...] = (
    ("ReplicaSet", "Deployment", "web"),
    ("Job", "CronJob", "nightly"),
    ("StatefulSet", "", "db"),
    ("ReplicaSet", "", "alone"),
    ("", "", ""),
    ("", "unlisted", ""),
)
"""Kind of a pod's owner, kind of that one's owner, and a name; each pod has one of these."""


def pods_of(pages: Pages) -> list[Pod]:
    """The pods of all captures, in order."""
    text = b"".join(page().body for page in pages.values()).decode()
    return sorted({*re.findall(r'^gpumap_pod_info{namespace="([^"]+)",pod="([^"]+)"', text, re.MULTILINE)})


def owner_of(pods: Sequence[Pod], pod: Pod) -> tuple[str, str, str]:
    return OWNERS[pods.index(pod) % len(OWNERS)]


def workload_of(pods: Sequence[Pod], pod: Pod) -> str:
    kind, above, name = owner_of(pods, pod)
    return f"{above or kind}/{name}" if kind else f"Pod/{pod[1]}"


def owners_page(pods: Sequence[Pod]) -> str:
    """What kube-state-metrics reports of these pods: an owner that is no controller counts for nothing."""
    lines: set[str] = set()
    for pod in pods:
        kind, above, name = owner_of(pods, pod)
        if above == "unlisted":
            continue
        own = f"{name}-1" if above else name
        of_pod = f'namespace="{pod[0]}",pod="{pod[1]}"'
        lines.add(owner("kube_pod_owner", of_pod, kind, own))
        lines.add(owner("kube_pod_owner", of_pod, "Other", "other", controller="false"))
        if kind in ("ReplicaSet", "Job"):
            label = {"ReplicaSet": "replicaset", "Job": "job_name"}[kind]
            of_owner = f'namespace="{pod[0]}",{label}="{own}"'
            lines.add(owner(f"kube_{kind.lower()}_owner", of_owner, above, name if above else ""))
    return "\n".join([*sorted(lines), ""])


def owner(metric: str, of: str, kind: str, name: str, controller: str = "") -> str:
    is_controller = controller or ("true" if kind else "")
    return f'{metric}{{{of},owner_kind="{kind}",owner_name="{name}",owner_is_controller="{is_controller}"}} 1'


def kube_job(address: str) -> Document:
    """Scraped without honorLabels, as by default: the pods are in exported_pod."""
    target = {"targets": [address], "labels": {"namespace": "kube-system", "pod": "kube-state-metrics-0"}}
    return {"job_name": "kube-state-metrics", "static_configs": [target]}


def sums_of_rows(document: Document, by: str, known: Sequence[Pod] = ()) -> Values:
    """Add up what the maps of all nodes have, as the summaries mean it."""

    def group_of(node: str, one: Document) -> str:
        of_pod = f"{one['namespace']}/{workload_of(known, (one['namespace'], one['pod']))}" if known else ""
        return {"node": node, "namespace": str(one["namespace"]), "workload": of_pod}[by]

    sums: dict[str, defaultdict[str, float]] = {}
    pods: set[tuple[str, str, str]] = set()
    for node in document["nodes"]:
        name = node["name"]
        for one, shared in containers(node):
            group = group_of(name, one)
            of_group = sums.setdefault(group, defaultdict(float))
            pods.add((group, one["namespace"], one["pod"]))
            of_container(of_group, one, shared)
        for one in node["unmatched"]:
            group = group_of(name, one)
            sums.setdefault(group, defaultdict(float))
            pods.add((group, one["namespace"], one["pod"]))
    for group, _, _ in pods:
        sums[group]["pods"] += 1
    return {group: dict(values) for group, values in sums.items()}


def of_container(sums: defaultdict[str, float], one: Document, shared: int) -> None:
    holder, user = one["grant"], one["use"]
    if holder:
        sums["held_gpus"] += holder["gpus"] or 0
        sums["granted_bytes"] += (holder["memory_bytes"] or 0) / shared
    if user:
        sums["sm_gpus"] += user["sm_ratio"] or 0
        sums["used_bytes"] += user["memory_bytes"] or 0


Differences = dict[str, tuple[object, object]]


def compared(found: Document, rows: Values, quantities: Sequence[str]) -> Differences:
    """Where the summary and the rows differ: its values, and theirs. 0 and nothing are compared elsewhere."""
    by = ("namespace", "workload") if found["by"] == "workload" else (found["by"],)
    summary = {
        "/".join(row[one] for one in by): {one: row[one] for one in quantities if row[one]} for row in found["rows"]
    }
    of_rows = {
        group: {one: value for one in quantities if (value := values.get(one))} for group, values in rows.items()
    }
    groups = summary.keys() | of_rows.keys()
    pairs = {group: (summary.get(group, {}), of_rows.get(group, {})) for group in groups}
    return {group: pair for group, pair in pairs.items() if pair[0] != pytest.approx(pair[1], abs=6e-4)}


TOP = ("held_gpus", "sm_gpus", "used_bytes", "granted_bytes", "pods")


@pytest.mark.parametrize("sums", FLAGS)
@pytest.mark.parametrize("by", ["namespace", "node"])
def test_a_summary_is_the_sum_of_its_rows(server: str, rows: Document, sums: str, by: str) -> None:
    """By namespace and by node, from recording rules and from the server's own sums."""

    def differences() -> Differences:
        found = asked("top", "--by", by, "--prometheus", server, *FLAGS[sums])
        assert (found["recorded_seconds"] is not None) == (sums == "rules")
        return compared(found, sums_of_rows(rows, by), TOP)

    assert settled(differences, {}) == {}


def test_the_sums_of_workloads(server: str, rows: Document) -> None:
    """Pods add up to their Deployment, CronJob, StatefulSet or ReplicaSet. One without an owner is its own."""
    pods = pods_of(capture_pages())

    def differences() -> Differences:
        found = asked("top", "--by", "workload", "--prometheus", server)
        unlisted = {"/".join(pod) for pod in pods if owner_of(pods, pod)[1] == "unlisted"}
        (message,) = (one for one in found["unknown"] if one.startswith("kube-state-metrics"))
        assert any(pod in message for pod in unlisted)
        assert {row["workload"].partition("/")[0] for row in found["rows"]} >= {"Deployment", "CronJob", "Pod"}
        return compared(found, sums_of_rows(rows, "workload", pods), TOP)

    assert settled(differences, {}) == {}


def test_the_waste_of_workloads(server: str) -> None:
    """Each finding counts for the workload of its pod. A pod that is not listed is its own, and a sentence names it."""
    pods = pods_of(capture_pages())
    found = asked("waste", "--by", "workload", "--prometheus", server)
    expected: Counter[tuple[str, str]] = Counter()
    for one in found["findings"]:
        if one["finding"] == "squatter":
            workload = workload_of(pods, (one["namespace"], one["pod"]))
            expected[one["namespace"], workload.replace("/unlisted", f"/{one['pod']}")] += one["memory_bytes"]
    rows = {(row["namespace"], row["workload"]): row["squatter_bytes"] for row in found["by_workload"]}
    assert {name: value for name, value in rows.items() if value} == expected
    assert expected
    assert sum(row["unmatched"] or 0 for row in found["by_workload"]) == found["sums"]["unmatched"] > 0
    unlisted = {f"{namespace}/{name[4:]}" for namespace, name in rows if name and name.startswith("Pod/")}
    (message,) = (one for one in found["unjudged_sentences"] if one.startswith("kube-state-metrics does not list"))
    assert any(pod in message for pod in unlisted)
    table = run_command("waste", "--by", "workload", "-n", "ml", "--prometheus", server).stdout
    assert table.split()[:2] == ["NAMESPACE", "WORKLOAD"]


MAP = ("gpus", "gpus_up", "devices", "held_gpus", "memory_used_bytes", "memory_total_bytes")


def memory_of(device: Document) -> tuple[Any, ...]:
    """Which instance has the memory: compute instances share that of their GPU instance."""
    mig = device["mig"]
    return (device["gpu_uuid"], mig["gpu_instance_id"]) if mig else (device["uuid"],)


@pytest.mark.parametrize("sums", FLAGS)
def test_the_nodes_of_a_cluster(server: str, rows: Document, sums: str) -> None:
    """`map` has a row for each node: its GPUs, its devices and their memory, which compute instances share."""
    of_rows = sums_of_rows(rows, "node")
    for node in rows["nodes"]:
        values = of_rows.setdefault(node["name"], {})
        whole = {one["uuid"] for one in node["gpus"] if one["partitioned"]}
        values["devices"] = len({one["uuid"] for one in node["devices"] if one["gpu_uuid"]} - whole)
        measured = {memory_of(one): one for one in node["devices"] if one["memory"]}
        values["memory_used_bytes"] = sum(one["memory"]["used_bytes"] for one in measured.values())
        values["memory_total_bytes"] = sum(one["memory"]["total_bytes"] for one in measured.values())
        values["gpus"] = len(node["gpus"])
        values["gpus_up"] = sum(one["fault"] is None for one in node["gpus"])

    def differences() -> Differences:
        return compared(asked("map", "--prometheus", server, *FLAGS[sums]), of_rows, MAP)

    assert settled(differences, {}) == {}


# --- what the rules do not have yet -----------------------------------------------------------------------------------

FEW = ("mig", "time-slicing", "pod-deleted", "mps", "shared-card")
OWN_SERIES = 'job=~".*gpumap.*"'


@pytest.mark.parametrize("recorded", [FEW[1:], FEW[4:]], ids=["one node is late", "most nodes are late"])
def test_a_node_that_is_not_in_the_records_yet(tmp_path: Path, recorded: Sequence[str]) -> None:
    """The rules are evaluated after a node's first scrape: until then, the server adds up the series of this node."""
    some, pages = "|".join(recorded), capture_pages()
    rules = RULES.read_text().replace(OWN_SERIES, f'{OWN_SERIES},node=~"{some}"')
    with with_rules(tmp_path, {f"/{one}": pages[f"/{one}"] for one in FEW}, rules) as server:
        eventually(lambda: server.by("node", f"{BY_NODE} and {BY_NODE} offset 5s").keys() == {*recorded})
        of_rows = sums_of_rows(asked("map", "--all", "--prometheus", server.url), "node")

        def differences() -> Differences:
            found = asked("top", "--by", "node", "--prometheus", server.url)
            assert found["recorded_seconds"] is not None
            assert found["missing"] == []
            return compared(found, of_rows, TOP)

        assert settled(differences, {}) == {}
        by_rules, by_sums = (asked("map", "--prometheus", server.url, *FLAGS[one]) for one in FLAGS)
        assert by_rules["rows"] == by_sums["rows"]
        late = reason_sentences((name, "") for name in sorted({*FEW} - {*recorded}))[0].removesuffix(": ")
        message = asked("top", "--prometheus", server.url)["unknown"]
        assert message == [f"{late}: the recorded sums by namespace do not contain it yet"]


# --- what is shown ----------------------------------------------------------------------------------------------------


def lines_of(*words: str, code: int = 1) -> list[str]:
    done = run_command(*words)
    assert (done.returncode, done.stderr) == (code, "")
    return done.stdout.splitlines()


def test_a_screen_and_not_every_node(server: str) -> None:
    """The worst 40 rows, how many more there are, how to see them, what is missing, and the sums of all."""
    lines = lines_of("map", "--prometheus", server)
    nodes = len(golden.captures())
    down = "; 1 more node without current data; collected within the last "
    assert re.match(rf"{nodes} nodes, \d+ GPUs \(\d+ down\){down}\d+s; recording rules of \d+s ago\.$", lines[0])
    assert lines[2].split()[:3] == ["NODE", "GPUS", "DOWN"]
    assert lines[43:45] == ["", f"{nodes - 40} more nodes. Rows of containers: -n NAMESPACE, --node NODE or --all."]
    assert DOWN in lines
    assert lines[-1].startswith("Sum: ")
    assert len(lines) < 70
    assert [int(line.split()[2]) for line in lines[3:8]] == sorted(
        (int(one.split()[2]) for one in lines[3:8]), reverse=True
    )
    wide = lines_of("map", "--prometheus", server, "-o", "wide")
    assert sum(line.split()[:1] in ([one.name] for one in golden.captures()) for line in wide) == nodes


def test_unknown_is_no_zero(server: str) -> None:
    """A node with a driver or kubelet that does not answer, or without hostPID, has a dash; the reason is below."""
    found = asked("top", "--by", "node", "--prometheus", server)
    by_node = {row["node"]: row for row in found["rows"]}
    for node in ("nvml-down", "no-pid-visibility"):
        assert by_node.get(node, {"used_bytes": None})["used_bytes"] is None
    message = " ".join(found["unknown"])
    assert re.search(r"nvml-down\b.*: nvml is down", message)
    assert "no-pid-visibility" in message
    assert found["missing"][0] == DOWN


def test_findings_of_a_screen(server: str) -> None:
    lines = lines_of("waste", "--prometheus", server)
    whole = asked("waste", "--prometheus", server)
    assert lines[0].split()[:2] == ["NODE", "FINDING"]
    assert lines[len(whole["findings"]) + 1] == ""
    assert DOWN in lines
    assert any(re.search(r"idle, .*not known on \d+ of \d+ nodes: nvml down \(.*nvml-down", line) for line in lines)
    assert lines[-1].startswith("Sum of the findings: ")
    by_node = {row["node"]: row for row in whole["by_node"]}
    assert by_node["nvml-down"]["idle_gpus"] is by_node["no-pid-visibility"]["squatter_bytes"] is None
    names = run_command("waste", "--prometheus", server, "-o", "name").stdout.splitlines()
    assert names
    assert all(line.startswith("-n ") and " pod/" in line for line in names)


@pytest.mark.parametrize("command", ["map", "top"])
def test_json_rows_of_a_summary(server: str, command: str) -> None:
    for flags in (("-n", "ml"), ("--node", "owners"), ("--all",)):
        (head, *_) = lines_of(command, "--prometheus", server, *flags, code=0 if "--node" in flags else 1)
        assert {"POD", "UUID"} & {*head.split()}
    names = run_command(command, "--prometheus", server, "-o", "name").stdout.splitlines()
    assert names
    assert all(line.startswith("-n ") and " pod/" in line for line in names)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("top", "--by", "pod"), '--by: unknown value "pod"; valid values: namespace, node, workload'),
        (("top", "--by", "node", "--label-match", 'job="x"'), "--label-match requires --by workload"),
        (("top", "--by", "node", "--all"), "--by node: shows sums, but -n, --node, --all and -o name show rows"),
        (
            ("map", "--sort-by", "peak"),
            "--sort-by peak: sorts only rows (-n, --node or --all); valid values for sums by node: ",
        ),
        (("waste", "--node", ""), "--node: must not be empty"),
        (("waste", "--all"), "unknown flag --all"),
        (("waste", "--by", "node", "--sort-by", "gpus"), "--sort-by sorts findings, but --by prints no findings"),
    ],
)
def test_flags_that_do_not_fit(words: Sequence[str], expected: str) -> None:
    assert one_line(run_command(*words, "--prometheus", "http://127.0.0.1:9"), 2).startswith(expected)


def test_records_are_those_of_the_rules() -> None:
    """Each record that is asked for is in rules/fleet.yaml, by the labels that it is read by."""
    recorded = {rule["record"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}
    by_node = {one.by_node for one in QUANTITIES.values() if one.by_node}
    by_namespace = {one.by_namespace for one in QUANTITIES.values() if one.by_namespace}
    assert by_node | by_namespace <= recorded
    for by, records in (("node", by_node), ("namespace", by_namespace)):
        assert all({"cluster", by} <= {*one.partition(":")[0].split("_")} for one in records)
