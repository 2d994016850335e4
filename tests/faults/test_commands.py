"""Commands: mistakes in flags and files, and servers that answer what no gpumap and no Prometheus would."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.command import one_line, run_command_in_loop
from tests.faults.connections import Connections
from tests.faults.expected import matches
from tests.faults.matrix import Refusal

FLAGS, SERVER = "Configuration", "Servers that commands ask"

# --- configuration ----------------------------------------------------------------------------------------------------


def mistake(fault: str, *arguments: str, says: str) -> Refusal:
    return Refusal(FLAGS, fault, ("serve", "--listen", "127.0.0.1:0", *arguments), 2, says)


MISTAKES = (
    mistake("an unknown flag", "--no-such-flag", says="unknown flag --no-such-flag"),
    mistake("an interval of zero", "--interval", "0s", says="--interval 0s: …longer than zero"),
    mistake("an interval without a unit", "--interval", "5", says='--interval 5: "5" is not a duration such as'),
    mistake(
        "an age limit below the interval", "--stale-after", "1s", says="--stale-after 1s: must be at least --interval"
    ),
    mistake("a resource that is no expression", "--resource", "nvidia(", says="--resource nvidia(: "),
    mistake("an unknown dialect", "--dialect", "dcgm50", says='--dialect: unknown value "dcgm50"'),
    mistake("two dialects with the same names", "--dialect", "dcgm,dcgm49", says="--dialect"),
    mistake("a file as the log root", "--pod-log-root", "DIR/file", says="--pod-log-root DIR/file: "),
    mistake("a directory as the kubelet's socket", "--kubelet-socket", "DIR", says="--kubelet-socket DIR: "),
    mistake(
        "a web configuration that is missing", "--web-config", "DIR/none", says="--web-config DIR/none: No such file"
    ),
    mistake(
        "a web configuration with an unknown key", "--web-config", "DIR/web.yml", says="--web-config DIR/web.yml: …"
    ),
    mistake("an address of another machine", "--listen", "192.0.2.1:9401", says="--listen 192.0.2.1:9401: "),
)

# --- servers ----------------------------------------------------------------------------------------------------------


def http(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    head = "".join(f"{line}\r\n" for line in (f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers))
    return head.encode() + b"\r\n" + body


def agent(fault: str, says: str, answer: bytes, *, is_endless: bool = False) -> Refusal:
    return Refusal(SERVER, f"--url: {fault}", ("map", "--url", "URL"), 1, f"URL/api/v1/map {says}", answer, is_endless)


def prometheus(fault: str, says: str, answer: bytes, *, is_endless: bool = False) -> Refusal:
    arguments = ("map", "--prometheus", "URL", *(("--timeout", "3s") if is_endless else ()))
    return Refusal(SERVER, f"--prometheus: {fault}", arguments, 1, f"URL {says}", answer, is_endless)


HEAD = b"HTTP/1.1 200 OK\r\n"
BOMB = http(gzip.compress(bytes(32 << 20)), "Content-Encoding: gzip")
PAGE = http(b"<html>log in</html>", "Content-Type: text/html")
CONTROLS = http(b'{"status":"error","error":"\\u001b[2Jno"}', status="500 No\x1b[2J")
SERVERS = (
    agent("the answer never ends", "answered with more than 16 MiB", HEAD + b"\r\n" + b"[0," * 20_000, is_endless=True),
    agent("the header never ends", "answered with more than 16 MiB", HEAD + b"A: b\r\n" * 10_000, is_endless=True),
    agent("32 MiB in gzip", "answered with more than 16 MiB", BOMB),
    agent("an HTML page", "did not answer with JSON", PAGE),
    agent("half an answer", "did not answer: its answer is incomplete", HEAD + b"Content-Length: 9\r\n\r\n{"),
    agent("lists nested 200,000 deep", "did not answer with a map of this version", http(b"[" * 200_000)),
    agent("terminal control characters in the status", "answered 500 No?[2J", CONTROLS),
    agent("it hangs up", "did not answer: it closed the connection", b""),
    prometheus("the answer never ends", "did not answer within 3 s", HEAD + b"\r\n[0,", is_endless=True),
    prometheus("an HTML page", "answered without JSON (an HTML page, perhaps a login)", PAGE),
    prometheus("half an answer", "did not answer: its answer is incomplete", HEAD + b"Content-Length: 9\r\n\r\n{"),
    prometheus(
        "a redirect elsewhere",
        "redirects to http://127.0.0.2:1/elsewhere.",
        http(b"", "Location: http://127.0.0.2:1/elsewhere", status="302 Found"),
    ),
    prometheus("terminal control characters in an error", "answered 500 No?[2J: ?[2Jno", CONTROLS),
)


@contextlib.asynccontextmanager
async def sending(row: Refusal) -> AsyncIterator[str]:
    """A server that sends the answer of a row. Gives its URL."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(row.answer)
        await writer.drain()
        while row.is_endless:
            writer.write(row.answer.removeprefix(HEAD))
            await writer.drain()

    connections = Connections(talk)
    server = await asyncio.start_server(connections.serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await connections.end()


@pytest.mark.parametrize("row", [*MISTAKES, *SERVERS], ids=str)
async def test_commands(row: Refusal, tmp_path: Path) -> None:
    """One printable line with the reason, the exit code, and nothing else."""
    (tmp_path / "file").touch()
    (tmp_path / "web.yml").write_text("no_such_key: 1\n")
    os.chmod(tmp_path / "web.yml", 0o600)
    async with sending(row) as url:

        def filled(text: str) -> str:
            return text.replace("URL", url).replace("DIR", str(tmp_path))

        message = one_line(await run_command_in_loop(*map(filled, row.arguments)), row.code)
    assert message.isprintable()
    assert matches(filled(row.says), message), message
