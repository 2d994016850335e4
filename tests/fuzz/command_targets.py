"""What servers answer to the commands: an agent's map, Prometheus's API, the API server through kubectl proxy.

The commands run as a user runs them, in this process: their exit code is known, and no line is an unexpected failure.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import logging
import re
import signal
import tempfile
import threading
from collections.abc import Iterator
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

from yarl import URL

from gpumap.__main__ import main
from gpumap.agent.published import published
from gpumap.cli.bill.window import window_of
from gpumap.cli.commands import map as map_command
from gpumap.cli.commands import top, waste
from gpumap.cli.commands.inspect import inspect_report
from gpumap.cli.credentials import Credentials
from gpumap.cli.rows import NodeMaps
from gpumap.cli.sources import http_client, prometheus
from gpumap.cli.sources.agent import map_in
from gpumap.cli.sources.kubectl import _no_list, _no_map
from gpumap.cli.sources.kubectl_agents import agents_of, one_for_each_node, pod_list
from gpumap.cli.table import Shape
from gpumap.cli.terminal import Screen, is_printable
from gpumap.model.check import check
from gpumap.model.errors import FatalError, UsageError
from gpumap.model.node import encode
from tests.fuzz.changes import changed_files, changed_json, edited, pack, unpack
from tests.fuzz.target import target
from tests.golden import CAPTURES, snapshots
from tests.snapshots import busy_node

# --- an agent's map ---------------------------------------------------------------------------------------------------

_SHAPES = (Shape(wide=True), Shape(processes=True, screen=Screen(columns=60)))


def _map_examples() -> Iterator[bytes]:
    yield encode(published(busy_node(4, 2)))
    for name in ("mig", "mps", "owners", "health", "hami", "kubelet-restart", "dra-shared-claim", "slurm-v2"):
        yield encode(published(snapshots(CAPTURES / name)[-1]))


@target(_map_examples, changed_json, FatalError, lines_per_byte=600)
def read_agent_map(data: bytes) -> object:
    """The body of /api/v1/map, and every table of it."""
    maps = NodeMaps((map_in(data, "http://agent"),), fleet=True)
    texts = [check(maps.maps[0], ())[1], check(maps.maps[0], ("xid",))[1]]
    reports = [map_command.REPORT, top.REPORT, waste.REPORT, inspect_report(details=True, used=True)]
    for report in reports:
        texts += [report.table(maps, shape) for shape in _SHAPES]
        report.values(maps, Shape())
        report.names(maps, Shape())
    for text in texts:
        assert is_printable(text), f"controls of a terminal: {text[:300]!r}"
    assert all(len(text.encode("ascii", "replace")) <= 80 for text in texts[:2]), texts[:2]
    return texts


# --- Prometheus -------------------------------------------------------------------------------------------------------


def _prometheus_examples() -> Iterator[bytes]:
    for data in _answers().values():
        yield json.dumps({"status": "success", "data": data, "warnings": ["w"], "isPartial": False}).encode()
        yield json.dumps({"status": "success", "data": data}).encode()
    yield b'{"status":"error","errorType":"bad_data","error":"parse error: \xc3\xa4 secret-word"}'
    yield b"<html><title>login</title>"


@target(_prometheus_examples, changed_json, FatalError)
def read_prometheus_api(data: bytes) -> object:
    """The body of an answer of Prometheus's API, of any call and status."""
    who = Credentials({"Authorization": "Bearer secret-word"}, None, None)
    server = prometheus.Prometheus(URL("http://prometheus"), who, 5.0)
    refusal = str(server._refusal(http_client.HttpAnswer(503, "Busy", "", data)))
    assert "secret-word" not in refusal, refusal
    answer = server._data(data)
    with contextlib.suppress(FatalError):
        return server._rows(answer, "vector", prometheus._VECTOR)
    return server._rows(answer, "matrix", prometheus._MATRIX)


_UUID = "GPU-00000000-0000-4000-8000-000000000000"
_LABELS = {
    **{"cluster": "a", "node": "gpu-1", "instance": "10.0.0.1:9401", "job": "gpumap", "internal_ip": "10.0.0.1"},
    **{"namespace": "ml", "pod": "trainer", "pod_uid": "u", "container": "main", "label_team": "vision"},
    **{"resource": "nvidia.com/gpu", "uuid": _UUID, "gpu_uuid": _UUID, "pci_bus_id": "00000000:3B:00.0"},
    **{"index": "0", "minor": "0", "model": "NVIDIA A100", "mig_profile": "", "source": "nvml", "version": "1"},
    **{"owner": "assigned", "reason": "lost", "capability": "pid_visibility", "kind": "user", "name": "ana"},
    **{"quantity": "gpus", "owner_kind": "ReplicaSet", "owner_name": "web-1"},
}


def _answers() -> dict[str, object]:
    rows = [{**_LABELS, "pod": f"trainer-{index}", "__name__": "gpumap_allocation_info"} for index in range(3)]
    points = [[1_700_000_040 + 60 * minute, str(minute)] for minute in range(1, 13)]
    return {
        "query": {"resultType": "vector", "result": [{"metric": row, "value": [1.7e9, "1"]} for row in rows]},
        "query_range": {"resultType": "matrix", "result": [{"metric": row, "values": points} for row in rows]},
        "series": rows,
    }


# --- the API server ---------------------------------------------------------------------------------------------------


def _pods_examples() -> Iterator[bytes]:
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


@target(_pods_examples, changed_json, ValueError)
def read_kubernetes_pods(data: bytes) -> object:
    """The API server's list of pods, its Status, and what a proxy puts in their place."""
    texts = [_no_list(403, data, of_all_namespaces=True), _no_map(403, data), _no_map(500, data), _no_map(401, data)]
    try:
        page = pod_list(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    agents, sentences = one_for_each_node(agents_of(page.items or ()))
    for agent in agents:
        assert re.fullmatch(r"[!-~]+", agent.path), agent.path
    return texts, agents, sentences, page.next_page


# --- HTTP -------------------------------------------------------------------------------------------------------------


def _answer_examples() -> Iterator[bytes]:
    body = b'{"version":1}'
    packed = gzip.compress(body * 50)
    yield b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    yield b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nd\r\n%b\r\n0\r\n\r\n" % body
    yield b"HTTP/1.0 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%b" % (len(packed), packed)
    yield b"HTTP/1.1 302 Found\r\nLocation: https://agent/api/v1/map\r\n\r\n"
    yield b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 Not Found\r\n\r\nno"


@target(_answer_examples, edited, OSError, FatalError)
def read_http_answer(data: bytes) -> object:
    """The bytes of a server's answer to `gpumap map --url`."""
    try:
        return http_client._read_answer(data, "http://agent", http_client.ANSWER_BYTES_MAX)
    except HTTPException as error:
        raise OSError(http_client.no_answer(error)) from error


# --- the commands -----------------------------------------------------------------------------------------------------

_TWO_HOURS = "bill --prometheus URL --from 1700000040 --to 1700007240"
COMMANDS = [
    command.split()
    for command in (
        "map --url URL",
        "map --url URL -o json",
        "map --url URL -o yaml",
        "map --url URL -o name",
        "top --url URL --processes",
        "waste --url URL",
        "inspect --url URL -d",
        "check --url URL",
        "map --prometheus URL -o wide",
        "map --prometheus URL",
        "map --prometheus URL --by namespace",
        "waste --prometheus URL",
        _TWO_HOURS,
        f"{_TWO_HOURS} --by workload -o json",
        f"{_TWO_HOURS} --by user -o csv",
    )
]


class _Handler(BaseHTTPRequestHandler):
    """Answers each call by the last part of its path. "raw" takes the place of a whole answer, with its head."""

    answers: ClassVar[dict[str, bytes]] = {}

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        data = self.answers.get(self.path.partition("?")[0].rpartition("/")[2], b"")
        head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(data)
        with contextlib.suppress(OSError):
            self.wfile.write(self.answers.get("raw", head + data))

    do_POST = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@functools.cache
def _server_url() -> str:
    """Start a server, once for a process."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def _command_examples() -> Iterator[bytes]:
    bodies = {call: json.dumps({"status": "success", "data": data}).encode() for call, data in _answers().items()}
    document = encode(published(busy_node(4, 1)))
    for index in range(len(COMMANDS)):
        yield pack({"command": bytes([index]), "map": document, **bodies})
    yield pack({"command": b"\0", "raw": next(_answer_examples())})


@target(
    _command_examples, changed_files(lambda path: edited if path in ("command", "raw") else changed_json), slow=True
)
def read_commands(data: bytes) -> object:
    """A command of gpumap. Its server answers with these bytes. Raises nothing.

    It ends with 0, 1 or 2, prints no traceback, and reports each failure in one line that names what is wrong.
    """
    _Handler.answers = unpack(data)
    index = int.from_bytes(_Handler.answers.pop("command", b"\0")[:1]) % len(COMMANDS)
    words = [_server_url() if word == "URL" else word for word in COMMANDS[index]]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    root, log = logging.getLogger(), logging.getLogger("gpumap")
    log_handlers, levels = [*root.handlers], (root.level, log.level)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = main(words)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            root.handlers[:] = log_handlers
            root.setLevel(levels[0])
            log.setLevel(levels[1])
        for file in (out, err):
            file.seek(0)
        output, errors = out.read(), err.read()
    assert code in (0, 1, 2), code
    assert "Traceback" not in errors, errors
    assert "gpumap: internal error" not in errors, f"{words}: {errors}"
    assert all(line.startswith("gpumap: ") for line in errors.splitlines()), errors
    assert is_printable(output), f"controls of a terminal: {output[:300]!r}"
    if code == 0 and "json" in words:
        json.loads(output)
    return code


@target(
    lambda: [b"30d\nnow\n1m", b"2023-01-01T08:00:00+01:00\n2023-02-01\n5m", b"1690000000.5\n1d\n1m30s"],
    edited,
    UsageError,
)
def read_bill_times(data: bytes) -> object:
    """The times of `gpumap bill`, a line each: --from, --to and --resolution."""
    start, end, resolution, *_ = [*data.decode(errors="replace").split("\n"), "", "", ""]
    return window_of(start, end, resolution, 1_700_000_000.0)
