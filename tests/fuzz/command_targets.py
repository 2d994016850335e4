"""What servers answer to the commands: an agent's map, Prometheus's API, the API server through kubectl proxy.

The commands run as a user runs them, in this process: their exit code is known, and no line is an unexpected failure.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
import signal
import socket
import threading
from collections.abc import Iterator
from http.client import HTTPException
from typing import NamedTuple

import aiohttp
from yarl import URL

from gpumap.__main__ import main
from gpumap.agent.published import published
from gpumap.cli.bill.window import window_of
from gpumap.cli.commands import map as map_command
from gpumap.cli.commands import top, waste
from gpumap.cli.commands.inspect import inspect_report
from gpumap.cli.rows import NodeMaps
from gpumap.cli.sources import agent as agent_source
from gpumap.cli.sources import prometheus
from gpumap.cli.sources.agent import map_in
from gpumap.cli.sources.kubectl import _no_list, _no_map
from gpumap.cli.sources.kubectl_agents import agents_of, one_for_each_node, pod_list
from gpumap.cli.table import Shape
from gpumap.cli.terminal import Screen, is_printable
from gpumap.model.check import check
from gpumap.model.errors import FatalError, UsageError
from gpumap.model.node import encode
from tests.fuzz.mutators import Mutate, mutate_json, mutate_raw, mutate_text, of_files, pack, unpack
from tests.fuzz.target import Target
from tests.golden import captures, snapshots
from tests.snapshots import busy_node

# --- an agent's map ---------------------------------------------------------------------------------------------------

_SHAPES = (Shape(wide=True), Shape(processes=True, screen=Screen(columns=60)))


def _read_map(data: bytes) -> object:
    """The body of /api/v1/map, and every table of it. Raises FatalError of one line."""
    maps = NodeMaps((map_in(data, "http://agent"),), fleet=True)
    texts = [check(maps.maps[0], ())[1], check(maps.maps[0], ("xid",))[1]]
    reports = [map_command.REPORT, top.REPORT, waste.REPORT, inspect_report(details=True, used=True)]
    for report in reports:
        texts += [report.table(maps, shape) for shape in _SHAPES]
        report.values(maps, Shape())
        report.names(maps, Shape())
    for text in texts:
        assert is_printable(text), f"controls of a terminal: {text[:300]!r}"
    assert all(len(one.encode("ascii", "replace")) <= 80 for one in texts[:2]), texts[:2]
    return texts


def _map_seeds() -> Iterator[bytes]:
    yield encode(published(busy_node(4, 2)))
    for capture in captures():
        if capture.name in (
            "mig",
            "mps",
            "owners",
            "health",
            "hami",
            "kubelet-restart",
            "dra-shared-claim",
            "slurm-v2",
        ):
            yield encode(published(snapshots(capture)[-1]))


# --- Prometheus -------------------------------------------------------------------------------------------------------


class _Session:
    def __init__(self) -> None:
        self.headers = {"Authorization": "Bearer secret-word"}


class _Got(NamedTuple):
    status: int
    reason: str
    headers: dict[str, str]


def _read_prometheus(data: bytes) -> object:
    """The body of an answer of Prometheus's API, of any call and status. Raises FatalError of one line."""
    session: aiohttp.ClientSession = _Session()  # type: ignore[assignment]
    server = prometheus.Prometheus(session, URL("http://prometheus"), 5.0, None)
    got: aiohttp.ClientResponse = _Got(503, "Busy", {})  # type: ignore[assignment]
    refusal = str(server._refusal(got, data))
    assert "secret-word" not in refusal, refusal
    answer = server._data(data)
    found: list[object] = []
    for read in (
        lambda: server._rows(answer, "vector", prometheus._VECTOR),
        lambda: server._rows(answer, "matrix", prometheus._MATRIX),
    ):
        try:
            found.append(read())
        except FatalError as error:
            found.append(str(error))
    return found


_LABELS = {
    "cluster": "a",
    "node": "gpu-1",
    "instance": "10.0.0.1:9401",
    "job": "gpumap",
    "namespace": "ml",
    "pod": "trainer",
    "container": "main",
    "uuid": "GPU-00000000-0000-4000-8000-000000000000",
    "resource": "nvidia.com/gpu",
    "gpu_uuid": "GPU-00000000-0000-4000-8000-000000000000",
    "index": "0",
    "minor": "0",
    "model": "NVIDIA A100",
    "pci_bus_id": "00000000:3B:00.0",
    "source": "nvml",
    "owner": "assigned",
    "reason": "lost",
    "internal_ip": "10.0.0.1",
    "version": "1",
    "capability": "pid_visibility",
    "pod_uid": "u",
    "kind": "user",
    "name": "ana",
    "quantity": "gpus",
    "owner_kind": "ReplicaSet",
    "owner_name": "web-1",
    "label_team": "vision",
    "mig_profile": "",
}


def _answers(number: int = 3) -> dict[str, object]:
    rows = [{**_LABELS, "pod": f"trainer-{one}", "__name__": "gpumap_allocation_info"} for one in range(number)]
    points = [[1_700_000_000 + 60 * minute, str(minute)] for minute in range(12)]
    return {
        "query": {"resultType": "vector", "result": [{"metric": row, "value": [1.7e9, "1"]} for row in rows]},
        "query_range": {"resultType": "matrix", "result": [{"metric": row, "values": points} for row in rows]},
        "series": rows,
    }


def _prometheus_seeds() -> Iterator[bytes]:
    for data in _answers().values():
        yield json.dumps({"status": "success", "data": data, "warnings": ["w"], "isPartial": False}).encode()
        yield json.dumps({"status": "success", "data": data}).encode()
    yield b'{"status":"error","errorType":"bad_data","error":"parse error: \xc3\xa4 secret-word"}'
    yield b"<html><title>login</title>"


# --- the API server ---------------------------------------------------------------------------------------------------


def _read_pods(data: bytes) -> object:
    """The API server's list of pods, its Status, and what a proxy puts in their place. Raises ValueError."""
    texts = [_no_list(403, data, of_all_namespaces=True), _no_map(403, data), _no_map(500, data), _no_map(401, data)]
    try:
        page = pod_list(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    agents, sentences = one_for_each_node(agents_of(page.items or ()))
    for agent in agents:
        assert re.fullmatch(r"[!-~]+", agent.path), agent.path
    return texts, agents, sentences, page.next_page


def _pods_seeds() -> Iterator[bytes]:
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    states = [{"name": "gpumap", "state": {"waiting": {"reason": "ImagePullBackOff"}}}]
    probe = {"httpGet": {"scheme": "HTTPS", "path": "/healthz"}}
    ports = [{"name": "metrics", "containerPort": 9401}]
    pod = {
        "metadata": {"name": "gpumap-x", "namespace": "gpumap", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"nodeName": "gpu-1", "containers": [{"name": "gpumap", "ports": ports, "readinessProbe": probe}]},
        "status": status,
    }
    waiting = {**pod, "status": {**status, "phase": "Pending", "containerStatuses": states}}
    yield json.dumps({"kind": "PodList", "metadata": {"continue": "abc"}, "items": [pod, waiting, pod]}).encode()
    yield b'{"kind":"Status","message":"pods \\"a\\" is forbidden: User \\"jane\\" cannot list","reason":"Forbidden"}'


# --- HTTP -------------------------------------------------------------------------------------------------------------


def _read_answer(data: bytes) -> object:
    """The bytes of a server's answer to `gpumap map --url`. Raises HTTPException, OSError and FatalError."""
    try:
        return agent_source._read_answer(data, "http://agent")
    except HTTPException as error:
        raise OSError(agent_source.no_answer(error)) from error


def _answer_seeds() -> Iterator[bytes]:
    import gzip

    body = b'{"version":1}'
    packed = gzip.compress(body * 50)
    yield b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    yield b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nd\r\n%b\r\n0\r\n\r\n" % body
    yield b"HTTP/1.0 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%b" % (len(packed), packed)
    yield b"HTTP/1.1 302 Found\r\nLocation: https://agent/api/v1/map\r\n\r\n"
    yield b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 Not Found\r\n\r\nno"


# --- the commands -----------------------------------------------------------------------------------------------------

COMMANDS = (
    ("map", "--url", "URL"),
    ("map", "--url", "URL", "-o", "json"),
    ("map", "--url", "URL", "-o", "yaml"),
    ("map", "--url", "URL", "-o", "name"),
    ("top", "--url", "URL", "--processes"),
    ("waste", "--url", "URL"),
    ("inspect", "--url", "URL", "-d"),
    ("check", "--url", "URL"),
    ("map", "--prometheus", "URL", "-o", "wide"),
    ("map", "--prometheus", "URL"),
    ("map", "--prometheus", "URL", "--by", "namespace"),
    ("waste", "--prometheus", "URL"),
    ("bill", "--prometheus", "URL", "--from", "1700000000", "--to", "1700007200"),
    ("bill", "--prometheus", "URL", "--from", "1700000000", "--to", "1700007200", "--by", "workload", "-o", "json"),
    ("bill", "--prometheus", "URL", "--from", "1700000000", "--to", "1700007200", "--by", "user", "-o", "csv"),
)


class _Played(NamedTuple):
    url: str
    answers: dict[str, bytes]
    """By the last part of the path. "raw" takes the place of a whole answer, with its head."""


@functools.cache
def _played() -> _Played:
    """Start a server that gives each call the bytes that were put into `answers`, once for a process."""
    answers: dict[str, bytes] = {}
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.settimeout(5.0)
                _answer_one(connection, answers)

    threading.Thread(target=serve, daemon=True).start()
    return _Played(f"http://127.0.0.1:{listener.getsockname()[1]}", answers)


def _answer_one(connection: socket.socket, answers: dict[str, bytes]) -> None:
    received = b""
    while b"\r\n\r\n" not in received and (piece := connection.recv(1 << 16)):
        received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: *([0-9]+)", head)
    while length and len(body) < int(length[1]) and (piece := connection.recv(1 << 16)):
        body += piece
    if "raw" in answers:
        connection.sendall(answers["raw"])
        return
    call = head.split(b" ")[1].partition(b"?")[0].rpartition(b"/")[2].decode() if b" " in head else ""
    data = answers.get(call, b"")
    connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))


def _run_command(data: bytes) -> object:
    """A command of gpumap. Its server answers with these bytes. Raises nothing.

    It ends with 0, 1 or 2, prints no traceback, and reports each failure in one line that names what is wrong.
    """
    files = unpack(data)
    server = _played()
    server.answers.clear()
    server.answers.update({name: text for name, text in files.items() if name != "command"})
    number = int.from_bytes(files.get("command", b"\0")[:1]) % len(COMMANDS)
    words = [server.url if word == "URL" else word for word in COMMANDS[number]]
    out, err = io.StringIO(), io.StringIO()
    handlers = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(words)
    finally:
        for one, handler in handlers.items():
            signal.signal(one, handler)
    shown, expected = out.getvalue(), err.getvalue()
    assert code in (0, 1, 2), code
    assert "Traceback" not in expected, expected
    assert "gpumap: internal error" not in expected, f"{words}: {expected}"
    assert all(line.startswith("gpumap: ") for line in expected.splitlines()), expected
    assert is_printable(shown), f"controls of a terminal: {shown[:300]!r}"
    if code == 0 and "json" in words:
        json.loads(shown)
    return code


def _command_seeds() -> Iterator[bytes]:
    bodies = {call: json.dumps({"status": "success", "data": data}).encode() for call, data in _answers().items()}
    document = encode(published(busy_node(4, 1)))
    for number in range(len(COMMANDS)):
        yield pack({"command": bytes([number]), "map": document, **bodies})
    yield pack({"command": b"\0", "raw": next(_answer_seeds())})


def _command_kind(path: str) -> Mutate | None:
    return {"command": mutate_raw, "raw": mutate_text}.get(path, mutate_json)


def _read_time(data: bytes) -> object:
    """The times of `gpumap bill`, a line each: --from, --to and --resolution. Raises UsageError."""
    start, end, resolution, *_ = [*data.decode(errors="replace").split("\n"), "", "", ""]
    return window_of(start, end, resolution, 1_700_000_000.0)


TARGETS = (
    Target(
        "agent-map",
        _read_map,
        _map_seeds,
        mutate_json,
        (
            "gpumap.model.node",
            "gpumap.model.check",
            "gpumap.cli.sources.agent",
            "gpumap.cli.terminal",
            "gpumap.cli.commands.inspect_table",
        ),
        (FatalError,),
        lines_per_byte=600,
    ),
    Target(
        "prometheus-api",
        _read_prometheus,
        _prometheus_seeds,
        mutate_json,
        ("gpumap.cli.sources.prometheus",),
        (FatalError,),
    ),
    Target(
        "kubernetes-pods",
        _read_pods,
        _pods_seeds,
        mutate_json,
        ("gpumap.cli.sources.kubectl_agents", "gpumap.cli.sources.kubectl"),
    ),
    Target(
        "bill-times",
        _read_time,
        lambda: [b"30d\nnow\n1m", b"2023-01-01T08:00:00+01:00\n2023-02-01\n5m", b"1690000000.5\n1d\n1m30s"],
        mutate_text,
        ("gpumap.cli.bill.window", "gpumap.model.formatting"),
        (UsageError,),
    ),
    Target(
        "http-answer", _read_answer, _answer_seeds, mutate_text, ("gpumap.cli.sources.agent",), (OSError, FatalError)
    ),
    Target(
        "commands",
        _run_command,
        _command_seeds,
        of_files(_command_kind),
        (
            "gpumap.cli.sources.scraped_nodes",
            "gpumap.cli.bill.query",
            "gpumap.cli.bill.counting",
            "gpumap.cli.kube_state",
        ),
        (),
        slow=True,
        repeatable=False,
    ),
)
