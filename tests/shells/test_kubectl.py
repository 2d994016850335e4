"""`kubectl gpumap` as its users run it: by the real kubectl, against a server that plays the Kubernetes API."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gpumap import __version__
from gpumap.cli.sources.kubectl import RULE, proxying
from gpumap.cli.sources.kubectl_agents import agents_of
from tests.demo_process import GPUMAP, demo, environment, fetch
from tests.shells.api_server import JANE, JOHN, ApiServer, PlayedPod, listed, map_of
from tests.test_watch import HOME, let_hangups_count, on_terminal
from tests.tools import tool

__all__ = ["let_hangups_count"]
PLUGIN = GPUMAP.with_name("kubectl-gpumap")
PATIENCE_SECONDS = 60.0


@pytest.fixture(name="demos", scope="module")
def run_demos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Two running agents: their URLs by their nodes' names."""
    with contextlib.ExitStack() as stack:
        yield {
            node: stack.enter_context(demo(tmp_path_factory.mktemp(node), "--node-name", node, "--interval", "300ms"))
            for node in ("gpu-1", "gpu-2")
        }


@pytest.fixture(name="cluster")
async def play_cluster(demos: dict[str, str], directory: Path) -> AsyncIterator[Cluster]:
    """A cluster of those two nodes, as two contexts know it: jane's with a namespace, and john's without."""
    api = ApiServer(directory)
    api.pods = [PlayedPod(node, f"gpumap-{node}", url) for node, url in demos.items()]
    async with api.running():
        api.write_kubeconfig(jane=(JANE, "ml-team", ""), john=(JOHN, "", ""))
        yield Cluster(api, directory)


class Cluster:
    """The played API server, and kubectl before it."""

    def __init__(self, api: ApiServer, folder: Path) -> None:
        self.api = api
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.home = folder / "home"
        self.home.mkdir()

    def environment(self, **variables: str) -> dict[str, str]:
        places = {"HOME": str(self.home), "TMPDIR": str(self.temporary), "KUBECONFIG": str(self.api.kubeconfig)}
        path = os.pathsep.join([str(tool("kubectl").parent), str(PLUGIN.parent), os.environ["PATH"]])
        return environment(**places, PATH=path) | variables

    async def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run `kubectl gpumap …` to its end. It writes no traceback, and leaves neither a process nor a file."""
        done = await asyncio.to_thread(
            subprocess.run,
            [str(tool("kubectl")), "gpumap", *words],
            env=self.environment(**variables),
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        assert self.left_over() == []
        return done

    async def fails(self, *words: str, code: int = 1, **variables: str) -> str:
        """Run what fails, and give the single line that it says."""
        done = await self.run(*words, **variables)
        assert (done.returncode, done.stdout) == (code, ""), done
        assert done.stderr.startswith("gpumap: ")
        assert done.stderr.count("\n") == 1, done.stderr
        return done.stderr.removeprefix("gpumap: ").rstrip("\n")

    async def json(self, *words: str) -> Any:
        """What a command says in JSON."""
        done = await self.run(*words, "-o", "json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def left_over(self) -> list[str]:
        """Proxies that still run, and files that still lie there."""
        lines = [_command_line(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
        return [line for line in lines if f"--unix-socket={self.temporary}" in line] + os.listdir(self.temporary)


def _command_line(path: Path) -> str:
    try:
        return path.read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""


async def _until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.05)


# --- as kubectl's users expect it -------------------------------------------------------------------------------------


async def test_kubectl_finds_the_plugin(cluster: Cluster) -> None:
    """`kubectl plugin list` names it, and `kubectl gpumap --version` is the package's."""
    done = await asyncio.to_thread(
        subprocess.run,
        [str(tool("kubectl")), "plugin", "list"],
        env=cluster.environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert str(PLUGIN) in done.stdout
    answer = await cluster.run("--version")
    assert (answer.returncode, answer.stdout) == (0, f"kubectl gpumap {__version__}\n")


async def test_a_table_of_the_whole_cluster(cluster: Cluster) -> None:
    """Rows of both nodes and of every namespace, each with its node, only through kubectl and the API server."""
    done = await cluster.run("top", "-A")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert "NODE" in lines[0].split()
    assert "NAMESPACE" in lines[0].split()
    assert {"gpu-1", "gpu-2"} <= {word for line in lines[1:] for word in line.split()}
    assert {"ml-team", "research"} <= {word for line in lines[1:] for word in line.split()}


@pytest.mark.parametrize(
    ("words", "namespaces"),
    [
        ((), {"ml-team"}),
        (("-n", "research"), {"research"}),
        (("--namespace=serving",), {"serving"}),
        (("--context", "john"), set()),
    ],
)
async def test_workloads_are_of_one_namespace(cluster: Cluster, words: tuple[str, ...], namespaces: set[str]) -> None:
    """-n's, else the context's, else `default`, which has no rows here."""
    answer = await cluster.json("top", *words)
    assert {row["namespace"] for row in answer["rows"]} == namespaces


async def test_the_pods_by_their_names(cluster: Cluster) -> None:
    """`-o name` is what `xargs kubectl` takes: a line for each pod, once, with its namespace if there are several."""
    done = await cluster.run("top", "-o", "name")
    assert done.stdout == "pod/trainer\n"
    done = await cluster.run("top", "-A", "-o", "name")
    assert "-n ml-team pod/trainer" in done.stdout.splitlines()


async def test_one_node_alone(cluster: Cluster) -> None:
    for words in (("gpu-2",), ("--node", "gpu-2"), ("gpu-2", "--node=gpu-2")):
        shown = await cluster.json("map", "-A", *words)
        assert shown["name"] == "gpu-2"
    shown = await cluster.json("map", "gpu-2", "-A", "gpu:1")
    assert {device["index"] for device in shown["devices"]} == {1}
    assert not [one for one in cluster.api.asked if "gpumap-gpu-1" in one]
    assert "To select rows, write pod:gpu-9" in await cluster.fails("map", "-A", "gpu-9")
    assert "set only one" in await cluster.fails("map", "gpu-1", "--node", "gpu-2", code=2)


async def test_without_a_command_it_is_the_map(cluster: Cluster) -> None:
    """Also if flags come first: their values are not taken for commands."""
    plain = await cluster.run("map", "--context", "jane", "-A")
    bare = await cluster.run("--context", "jane", "-A")
    assert (plain.returncode, bare.returncode) == (0, 0)
    assert plain.stdout.split()[:4] == bare.stdout.split()[:4]


async def test_the_tables_of_inspect(cluster: Cluster) -> None:
    done = await cluster.run("inspect")
    assert done.returncode == 0
    assert {"gpu-1", "gpu-2"} <= set(done.stdout.split())
    details = await cluster.run("inspect", "gpu-2", "-d")
    assert details.returncode == 0
    assert "gpu-2" in details.stdout
    assert "gpu-1" not in details.stdout
    assert "trainer" in details.stdout


async def test_flags_are_passed_on_to_kubectl(cluster: Cluster) -> None:
    cluster.api.forbidden.add(("carol", "list pods", ""))
    assert 'User "carol"' in await cluster.fails("top", "-A", "--as=carol", "--as-group", "ml")
    server = f"https://127.0.0.1:{cluster.api.port}"
    empty = cluster.home / "none"
    done = await cluster.run(
        *("top", "-A", "-s", server, "--token", JOHN, "--certificate-authority", str(cluster.api.certificate)),
        KUBECONFIG=str(empty),
    )
    assert (done.returncode, done.stderr) == (0, "")
    words = ("top", "-A", "--server", server, "--token", JOHN, "--insecure-skip-tls-verify=true")
    assert (await cluster.run(*words, KUBECONFIG=str(empty))).returncode == 0


# --- what is missing is said ------------------------------------------------------------------------------------------


async def test_nodes_that_cannot_be_seen_are_named(cluster: Cluster, demos: dict[str, str]) -> None:
    """With the reason, and for one that is forbidden with the rule to ask for; the others are shown, and 1 is given."""
    pods = cluster.api.pods
    found = json.loads(fetch(f"{demos['gpu-1']}/api/v1/map")[0])
    pods += [
        PlayedPod("gpu-3", "gpumap-away"),
        PlayedPod("gpu-4", "gpumap-crashing", waiting="CrashLoopBackOff"),
        PlayedPod("gpu-5", "gpumap-begins", (503, "the first collection is not finished\n")),
        PlayedPod("gpu-6", "gpumap-other", b'{"hello": "world"}'),
        PlayedPod("gpu-7", "gpumap-slow", hangs=True),
        PlayedPod("gpu-8", "gpumap-closed", (401, "this page requires a user and a password\n")),
        PlayedPod("gpu-9", "gpumap-certified", (403, "this page requires a client certificate\n")),
        PlayedPod("odd", "gpumap-odd", map_of({**found, "devices": [1]}, "odd")),
    ]
    cluster.api.forbidden.add(("jane", "get pods/proxy", "gpu-2"))
    done = await cluster.run("top", "-A", "--request-timeout=3s")
    assert done.returncode == 1
    assert "gpu-1" in done.stdout
    message = " ".join(done.stdout.split())
    for sentence in (
        f'node gpu-2: User "jane" cannot get resource "pods/proxy" in API group "" in the namespace "gpumap"; a role '
        f"needs the rule {RULE}",
        "node gpu-3: the API server cannot reach its agent: dial tcp 10.0.0.7:9401: connect: connection refused",
        "node gpu-4: its agent is not running (CrashLoopBackOff)",
        "node gpu-5: its agent answered 503: the first collection is not finished",
        "node gpu-6: its agent did not answer with a map of this version of gpumap: ",
        "node gpu-7: its agent did not answer within 3 s",
        "node gpu-8: its agent requires a password, which the API server does not forward: use `kubectl",
        "node gpu-9: its agent requires a client certificate, which the API server does not forward: use",
        "node odd: its agent did not answer with a map of this version of gpumap: Expected `object`, got `int`",
    ):
        assert sentence in message
    answer = await cluster.run("top", "-A", "--request-timeout", "3s", "-o", "json")
    assert answer.returncode == 1
    assert len(json.loads(answer.stdout)["missing"]) == 9
    assert answer.stderr.count("missing: node ") == 9


async def test_no_agent_answers(cluster: Cluster) -> None:
    """One line with the reason, and every node it is the reason of."""
    cluster.api.forbidden.add(("jane", "get pods/proxy", ""))
    line = await cluster.fails("waste", "-A")
    assert line.startswith('no agent answered: 2 nodes, gpu-1, gpu-2: User "jane" cannot get resource "pods/proxy"')
    cluster.api.pods.clear()
    assert "no pod has the label app.kubernetes.io/name=gpumap" in await cluster.fails("waste", "-A")


async def test_pods_may_be_listed_in_one_namespace_alone(cluster: Cluster) -> None:
    cluster.api.forbidden.add(("jane", "list pods", ""))
    line = await cluster.fails("top", "-A")
    assert line.startswith('User "jane" cannot list resource "pods" in API group "" at the cluster scope; --agent-')
    cluster.api.asked.clear()
    assert (await cluster.run("top", "-A", "--agent-namespace", "gpumap")).returncode == 0
    assert "GET /api/v1/namespaces/gpumap/pods" in cluster.api.asked
    assert "GET /api/v1/pods" not in cluster.api.asked


async def test_two_agents_on_a_node(cluster: Cluster) -> None:
    """The newest is asked, and the other one named; what is leaving is not asked, and not named."""
    url = cluster.api.pods[0].agent
    cluster.api.pods += [
        PlayedPod("gpu-1", "gpumap-newer", url, created="2026-06-01T00:00:00Z"),
        PlayedPod("gpu-2", "gpumap-leaving", (500, "leaving"), created="2026-06-01T00:00:00Z", leaving=True),
        PlayedPod("gpu-2", "gpumap-evicted", phase="Failed", created="2026-07-01T00:00:00Z"),
    ]
    done = await cluster.run("top", "-A")
    assert done.stderr == "gpumap: node gpu-1 has 2 agents: gpumap asked gpumap-newer, not gpumap-gpu-1\n"
    assert done.returncode == 0


async def test_a_tenants_pod_with_the_agents_label(cluster: Cluster, demos: dict[str, str]) -> None:
    """Any user may create a pod with this label."""
    lie = map_of(json.loads(fetch(demos["gpu-1"] + "/api/v1/map")[0]), "gpu-1")
    forged = PlayedPod("gpu-1", "forged", lie, "tenant", created="2027-01-01T00:00:00Z")
    cluster.api.pods += [forged, PlayedPod("gpu-9", "forged-too", lie, "tenant", phase="Pending")]
    done = await cluster.run("map", "-A")
    assert (done.returncode, done.stderr) == (
        0,
        "gpumap: not asked: 2 pods of namespace tenant, forged, forged-too. The agents are of gpumap; "
        "--agent-namespace chooses another one\n",
    )
    assert not [path for path in cluster.api.asked if "/forged" in path]
    line = await cluster.fails("map", "-A", "--node", "gpu-1")
    assert line.endswith("is not certain: pods of the namespaces gpumap, tenant have its label; set --agent-namespace")
    done = await cluster.run("map", "-A", "--agent-namespace", "gpumap", "--node", "gpu-1")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("name", "shown"),
    [("gpu-1", "another node, gpu-1"), ("", "no node"), ("\x1b[2J" + "x" * 99, f"another node, ?[2J{'x' * 56}…")],
)
async def test_an_answer_counts_for_its_pods_node(
    cluster: Cluster, demos: dict[str, str], name: str, shown: str
) -> None:
    """A pod on gpu-3 that answers for another node, or for none, is named, and adds no row."""
    lie = map_of(json.loads(fetch(demos["gpu-1"] + "/api/v1/map")[0]), name)
    cluster.api.pods.append(PlayedPod("gpu-3", "forged", lie))
    done = await cluster.run("map", "-A", "-o", "json")
    assert done.returncode == 1
    sentence = f"node gpu-3: the answer of pod gpumap/forged does not count: it names {shown}"
    assert done.stderr == f"gpumap: missing: {sentence}\n"
    assert [node["name"] for node in json.loads(done.stdout)["nodes"]] == ["gpu-1", "gpu-2"]


async def test_an_answer_that_steers_a_terminal(cluster: Cluster) -> None:
    """What a pod with the agents' label answers instead of a map is one line of printable characters."""
    cluster.api.pods[0].agent = 500, "\x1b]0;owned\x07\u202e\r\nnode gpu-2: forged\x1b[2J"
    done = await cluster.run("map", "-A")
    assert done.returncode == 1
    lines = (done.stdout + done.stderr).split("\n")
    assert all(line.isprintable() for line in lines)
    assert [line[:12] for line in lines if "forged" in line] == ["node gpu-1: "]


async def test_the_api_server_refuses(cluster: Cluster) -> None:
    """One line with kubectl's own reason: unknown user, closed port, foreign certificate, no context, no kubectl."""
    server = f"https://127.0.0.1:{cluster.api.port}"
    assert await cluster.fails("top", "--token=wrong") == "the API server does not accept the user: Unauthorized"
    assert "connection refused" in await cluster.fails("top", "-s", "https://127.0.0.1:1", "-A")
    none = str(cluster.home / "none")
    assert "x509" in await cluster.fails("top", "-s", server, "--token", JANE, KUBECONFIG=none)
    assert "no user for this server" in await cluster.fails("top", "-s", server, KUBECONFIG=none)
    line = await cluster.fails("top", KUBECONFIG=none)
    assert line.endswith("(kubectl has no current context)")
    assert await cluster.fails("top", "--context", "prod") == 'kubectl: context "prod" does not exist'
    alone = await asyncio.to_thread(
        subprocess.run, [str(PLUGIN), "top"], env=cluster.environment(PATH="/nowhere"), capture_output=True, check=False
    )
    assert alone.returncode == 1
    assert alone.stderr.startswith(b"gpumap: kubectl is not on PATH")


async def test_mistakes_in_the_command_line(cluster: Cluster) -> None:
    assert "did you mean waste?; see kubectl gpumap --help" in await cluster.fails("wast", code=2)
    assert "see kubectl gpumap top --help" in await cluster.fails("top", "--contxt=x", code=2)
    assert await cluster.fails("top", "--request-timeout=soon", code=2)
    helped = await cluster.run("top", "--help")
    assert helped.stdout.startswith("usage: kubectl gpumap top [NODE] [WORD ...] [flags]")


# --- watching ---------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def watching(cluster: Cluster, *words: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, Path]]:
    """A watch that has shown something, and the file of what it shows; ended after the block if it still runs."""
    shown = cluster.home / "shown"
    with shown.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(str(tool("kubectl")), "gpumap", *words, "-w", "--interval", "200ms"),
            env=cluster.environment(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
        )
    try:
        await _until(lambda: shown.stat().st_size > 0 or process.returncode is not None, "it shows nothing")
        assert process.returncode is None, shown.read_text()
        yield process, shown
    finally:
        if process.returncode is None:
            process.terminate()
            async with asyncio.timeout(PATIENCE_SECONDS):
                await process.wait()
    assert cluster.left_over() == []
    assert "Traceback" not in shown.read_text()


@pytest.mark.usefixtures("hangups_count")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
async def test_a_watch_that_is_ended_leaves_nothing(cluster: Cluster, number: signal.Signals) -> None:
    """By Ctrl-C, by another process, or because its terminal is closed: no proxy, no file; and 0."""
    async with watching(cluster, "top", "-A") as (process, _):
        assert len(cluster.left_over()) == 2, "the proxy and its folder"
        process.send_signal(number)
        async with asyncio.timeout(PATIENCE_SECONDS):
            killed = number == signal.SIGKILL
            assert await process.wait() == (-number if killed else 0)
        if killed:
            await _until(lambda: cluster.left_over() == [], "the proxy or its folder is left")
        assert cluster.left_over() == []


async def test_top_ends_if_no_proxy_starts(cluster: Cluster) -> None:
    """On a terminal, too: one line with kubectl's reason."""
    command = (str(tool("kubectl")), "gpumap", "top", "--context", "prod")
    with on_terminal(command, cluster.environment()) as screen:
        assert (await screen.end()).endswith('\x1b[?1049lgpumap: kubectl: context "prod" does not exist\n')
    assert screen.process.returncode == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("waste", "gpu-1", "--context", "john"), "waste gpu-1 -n default --context john"),
        (("map", "--sort-by", "sm"), "map -n ml-team --sort-by sm"),
        (("-A",), "map -A"),
        (("inspect", "--node", "gpu-2"), "inspect gpu-2"),
    ],
)
async def test_a_watch_shows_its_query(cluster: Cluster, words: tuple[str, ...], expected: str) -> None:
    """The plugin's name, the node, the namespace and the context are above its table."""
    command = (str(tool("kubectl")), "gpumap", *words, "-w", "--interval", "200ms")
    with on_terminal(command, cluster.environment()) as screen:
        await screen.until(lambda said: HOME in said and "\n" in said, "it shows nothing")
        assert re.search(rf"kubectl gpumap {expected}   every 0.2s   \d\d:\d\d:\d\d", screen.frames[0])
        assert await screen.interrupt() == 0


async def test_a_watch_outlives_the_api_server_and_the_proxy(cluster: Cluster) -> None:
    """What fails is reported once, and asked on; a proxy that ended is started again."""
    async with watching(cluster, "top", "-A", "-o", "json") as (_, shown):
        pods, cluster.api.pods = cluster.api.pods, []
        await _until(lambda: "no pod has the label" in shown.read_text(), "the failure is not reported")
        cluster.api.pods = pods
        (proxy,) = _proxies(cluster)
        os.kill(proxy, signal.SIGKILL)
        await _until(lambda: _proxies(cluster) not in ([], [proxy]), "no other proxy is started")
        size = shown.stat().st_size
        await _until(lambda: shown.stat().st_size > size, "it shows nothing more")
        assert shown.read_text().count("no pod has the label") == 1


def _proxies(cluster: Cluster) -> list[int]:
    lines = {int(path.parent.name): _command_line(path) for path in Path("/proc").glob("[0-9]*/cmdline")}
    return [pid for pid, line in lines.items() if f"--unix-socket={cluster.temporary}" in line]


# --- many, and the proxy itself ---------------------------------------------------------------------------------------


async def test_a_cluster_of_many_nodes(cluster: Cluster, demos: dict[str, str]) -> None:
    """Pods are listed a page at a time, and every node is in the answer."""
    found = json.loads(fetch(f"{demos['gpu-1']}/api/v1/map")[0])
    names = [f"node-{number:04}" for number in range(600)]
    cluster.api.pods = [PlayedPod(name, f"gpumap-{name}", map_of(found, name)) for name in names]
    answer = await cluster.json("top", "-A")
    assert {row["node"] for row in answer["rows"]} == set(names)
    assert cluster.api.asked.count("GET /api/v1/pods") == 2


async def test_the_proxy_passes_only_its_own_requests(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """It carries the user's rights: other paths, and what would change something, are refused. Its socket is ours."""
    for name, value in cluster.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tempfile.tempdir", str(cluster.temporary))
    async with proxying(()) as proxy:
        assert proxy.path.parent.stat().st_mode & 0o777 == 0o700
        connector = aiohttp.UnixConnector(str(proxy.path), force_close=True)
        async with aiohttp.ClientSession("http://localhost", connector=connector) as session:
            for method, path, status in (
                ("GET", "/api/v1/pods", 200),
                ("GET", "/api/v1/namespaces/gpumap/pods/gpumap-gpu-1:9401/proxy/api/v1/map", 200),
                ("GET", "/api/v1/namespaces/gpumap/secrets", 403),
                ("GET", "/api/v1/namespaces/gpumap/pods/gpumap-gpu-1:9401/proxy/metrics", 403),
                ("DELETE", "/api/v1/pods", 403),
                ("POST", "/api/v1/namespaces/gpumap/pods", 403),
            ):
                async with session.request(method, path) as answer:
                    assert answer.status == status, path
    assert cluster.left_over() == []


# --- which pod is asked -----------------------------------------------------------------------------------------------


def test_the_agent_of_a_pod() -> None:
    """Its port is the one that is called metrics, over TLS where its probe says so; without one the default."""
    pod = PlayedPod("n", "a", port=9500).as_json()
    assert [agent.path for agent in agents_of(listed(pod))] == [
        "/api/v1/namespaces/gpumap/pods/a:9500/proxy/api/v1/map"
    ]
    pod["spec"]["containers"][0]["readinessProbe"] = {"httpGet": {"scheme": "HTTPS"}}
    assert agents_of(listed(pod))[0].path == "/api/v1/namespaces/gpumap/pods/https:a:9500/proxy/api/v1/map"
    pod["spec"]["containers"][0]["ports"] = []
    assert agents_of(listed(pod))[0].path == "/api/v1/namespaces/gpumap/pods/a:9401/proxy/api/v1/map"


def test_a_pod_that_is_not_there_yet_or_no_longer() -> None:
    """One that is over, on its way out, or on no node is no agent; one that waits says what for."""
    over = PlayedPod("n", "a", phase="Failed").as_json()
    leaving = PlayedPod("n", "a", leaving=True).as_json()
    nowhere = PlayedPod("", "a", phase="Pending").as_json()
    waits = PlayedPod("n", "a", phase="Pending", waiting="ImagePullBackOff").as_json()
    assert agents_of(listed(over, leaving, nowhere)) == []
    assert [agent.why_not for agent in agents_of(listed(waits))] == ["is not running (ImagePullBackOff)"]
    waits["status"] = {"phase": "Pending"}
    assert [agent.why_not for agent in agents_of(listed(waits))] == ["is not running (Pending)"]
