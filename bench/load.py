"""`python -m bench.load`: a separate process that scrapes servers over raw sockets and measures the time of each
answer.

Reads one JSON object on stdin, `{"targets": [{"port", "path", "headers", "requests"}], "rounds", "connections",
"pace"}`. It visits the targets in turn, to and fro, so that noise affects all alike. It writes a list for each target:
seconds by request, or with several `connections` requests per second by round. With `pace` a request is due at fixed
times, and the time of a late one counts from then.
"""

import json
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BUFFER_BYTES = 8 << 20


@dataclass(frozen=True)
class Target:
    port: int
    path: str = "/metrics"
    headers: str = ""
    requests: int = 100

    @property
    def request(self) -> bytes:
        return f"GET {self.path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{self.headers}\r\n".encode()


class Connection:
    """Keeps a connection as long as the server does."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._socket: socket.socket | None = None
        self._buffer = bytearray(BUFFER_BYTES)

    def renew(self) -> None:
        """A server closes a connection that was idle while others had their turn."""
        if self._socket is not None:
            self._socket.close()
        self._socket = socket.create_connection(("127.0.0.1", self._port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, request: bytes) -> None:
        if self._socket is None:
            self.renew()
        assert self._socket is not None
        self._socket.sendall(request)

    def receive(self) -> bytes:
        """The whole answer, head and body. Raises where it is not a 200."""
        assert self._socket is not None
        view, got, wanted = memoryview(self._buffer), 0, -1
        while wanted < 0 or got < wanted:
            count = self._socket.recv_into(view[got:])
            if not count:
                break
            got += count
            if wanted < 0 and (end := self._buffer.find(b"\r\n\r\n", 0, got)) >= 0:
                head = bytes(self._buffer[:end]).lower()
                length = head.partition(b"content-length:")[2].partition(b"\r\n")[0].strip()
                wanted = end + 4 + int(length) if length else BUFFER_BYTES
        answer = bytes(self._buffer[:got])
        if not answer.startswith((b"HTTP/1.1 200", b"HTTP/1.0 200")):
            raise RuntimeError(f"port {self._port} answered {answer[:100]!r}")
        if answer.startswith(b"HTTP/1.0") or got < wanted:
            self._socket.close()
            self._socket = None
        return answer


def latencies(connection: Connection, target: Target, pace: float) -> list[float]:
    request, found = target.request, []
    due = time.perf_counter()
    for _ in range(target.requests):
        if pace:
            due += pace
            time.sleep(max(0.0, due - time.perf_counter()))
        started = due if pace else time.perf_counter()
        connection.send(request)
        connection.receive()
        found.append(time.perf_counter() - started)
    return found


def throughput(connections: Sequence[Connection], target: Target) -> float:
    """Requests per second, with one under way on each connection."""
    request = target.request
    started = time.perf_counter()
    for connection in connections:
        connection.send(request)
    rest = target.requests - len(connections)
    for number in range(target.requests):
        connection = connections[number % len(connections)]
        connection.receive()
        if number < rest:
            connection.send(request)
    return target.requests / (time.perf_counter() - started)


def measure(order: Mapping[str, object], targets: Sequence[Target]) -> list[list[float]]:
    rounds, count, pace = int(str(order["rounds"])), int(str(order["connections"])), float(str(order["pace"]))
    open_connections = [[Connection(target.port) for _ in range(count)] for target in targets]
    for connections, target in zip(open_connections, targets, strict=True):
        latencies(connections[0], Target(target.port, target.path, target.headers, 3), 0.0)  # whatever is made at first
    found: list[list[float]] = [[] for _ in targets]
    for turn in range(rounds):
        order_of_turn = list(enumerate(targets))
        for number, target in reversed(order_of_turn) if turn % 2 else order_of_turn:  # no target is always the first
            for connection in open_connections[number]:
                connection.renew()
            if count > 1:
                found[number].append(throughput(open_connections[number], target))
            else:
                found[number] += latencies(open_connections[number][0], target, pace)
    return found


if __name__ == "__main__":
    given = json.load(sys.stdin)
    json.dump(measure(given, [Target(**target) for target in given["targets"]]), sys.stdout)
