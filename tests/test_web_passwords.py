"""Who gets a page by a password; what guesses delay."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpumap.agent.web import guard
from tests.secured import ALICE, CLIENTS, SHOWN, make_certificates, secured, users


@pytest.fixture(name="folder", scope="module")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


async def test_passwords(folder: Path) -> None:
    """The right one of a known user, and nothing else, opens every page but the probes'; the answer says how to ask."""
    async with secured(folder, users()) as site:
        http = {"scheme": "http"}
        assert (await site.curl("/metrics", *ALICE, **http)).status == 200
        for flags in (
            (),
            ("--user", "alice:hunter2"),
            ("--user", "alice:"),
            ("--user", "bob:hunter2é"),
            ("-H", "Authorization: Bearer x"),
            ("-H", "Authorization: Basic x"),
            ("-H", "Authorization: Basic /////w=="),
            ("-H", "Authorization: Basic YWxpY2U="),
        ):
            answer = await site.curl("/metrics", *flags, **http)
            assert answer.status == 401, flags
            assert 'WWW-Authenticate: Basic realm="gpumap"' in answer.head
        for path in ("/", "/page/feed.js", "/api/v1/map", "/nothing"):
            assert (await site.curl(path, **http)).status == 401
        for path in ("/healthz", "/readyz"):
            assert (await site.curl(path, **http)).status == 200


async def test_a_certificate_and_a_password(folder: Path) -> None:
    async with secured(folder, CLIENTS + users()) as site:
        requests = [(*SHOWN, *ALICE), SHOWN, ALICE, ()]
        assert [await site.status("/metrics", *flags) for flags in requests] == [200, 401, 403, 403]


async def test_the_same_question_is_checked_once(folder: Path) -> None:
    """A page's twenty requests at once, with one password, are one check: none is turned away."""
    async with secured(folder, users(cost=10)) as site:
        answers = await asyncio.gather(*(site.curl("/metrics", *ALICE, scheme="http") for _ in range(20)))
        assert {answer.status for answer in answers} == {200}


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def connections(port: int, count: int) -> AsyncIterator[list[Connection]]:
    """Open connections that the server has accepted."""
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    try:
        for connection in opened:
            await answer_status(connection, "/healthz")
        yield [*opened]
    finally:
        for _, writer in opened:
            writer.close()


async def status(connection: Connection, user: str, password: str) -> int:
    """Ask for a page on an open connection, with a password."""
    word = base64.b64encode(f"{user}:{password}".encode()).decode()
    return await answer_status(connection, "/api/v1/check", f"Authorization: Basic {word}\r\n")


async def answer_status(connection: Connection, path: str, header: str = "") -> int:
    reader, writer = connection
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{header}\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
    return int(head.split()[1])


@pytest.fixture(name="checked")
def record_checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The passwords that were checked, in the order of their checks."""
    checked: list[str] = []
    matches = guard._matches

    def check(password: str, hashed: str) -> bool:
        checked.append(password)
        return matches(password, hashed)

    monkeypatch.setattr(guard, "_matches", check)
    return checked


async def test_a_guesser_at_the_same_address_keeps_no_scraper_out(folder: Path, checked: list[str]) -> None:
    """Guesses come on one connection, one after the other. A new scraper waits for at most one more of them."""
    names = [f"scraper{number}" for number in range(20)]
    config = users(name="alice") + "".join(users(name=name).partition("\n")[2] for name in names)

    async def guess(connection: Connection) -> None:
        for number in itertools.count():
            await status(connection, "alice", f"guess {number}")

    async with secured(folder, config) as site, asyncio.timeout(60), connections(site.port, 21) as opened:
        guessing = asyncio.create_task(guess(opened.pop()))
        for name, connection in zip(names, opened, strict=True):
            checked_before = len(checked)
            assert await status(connection, name, "hunter2é") == 200
            assert "hunter2é" in checked[checked_before : checked_before + 2]
        guessing.cancel()
    assert len(checked) >= 30


async def test_waiting_guesses(folder: Path, checked: list[str]) -> None:
    """A password that was right before waits for no check, and the guesses of clients that are gone are not checked."""
    async with secured(folder, users(cost=8)) as site, asyncio.timeout(60), connections(site.port, 31) as opened:
        known = opened.pop()
        assert await status(known, "alice", "hunter2é") == 200
        guesses = [
            asyncio.create_task(status(guesser, "bob", f"guess {number}")) for number, guesser in enumerate(opened)
        ]
        assert await guesses[0] == 401
        assert await status(known, "alice", "hunter2é") == 200
        for guess, (_, writer) in zip(guesses, opened, strict=True):
            guess.cancel()
            writer.close()
        assert await status(known, "alice", "wrong") == 401
    assert "guess 29" not in checked
