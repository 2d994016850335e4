"""Who gets a page by a password; a guesser delays no other client."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path

import pytest

from tests.agent import until
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
        found = await asyncio.gather(*(site.curl("/metrics", *ALICE, scheme="http") for _ in range(20)))
        assert {one.status for one in found} == {200}


async def test_guesses_lock_no_user_out(folder: Path) -> None:
    """While guesses come from many connections, and more than may wait, one who was never seen before is let in."""
    stop = asyncio.Event()
    statuses: list[int] = []

    async def guess(port: int, address: str, number: int) -> None:
        while not stop.is_set():
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
            word = base64.b64encode(f"alice:{address}-{number}-{len(statuses)}".encode())
            writer.write(b"GET /metrics HTTP/1.0\r\nAuthorization: Basic " + word + b"\r\n\r\n")
            statuses.append(int((await reader.read()).split()[1]))
            writer.close()
            await asyncio.sleep(0.02)

    async with secured(folder, users(cost=6)) as site:
        guessing = [asyncio.create_task(guess(site.port, f"127.0.0.{2 + n % 4}", n)) for n in range(48)]
        await until(lambda: _value(statuses.count(429)), lambda count: count > 20, "no guess is turned away")
        assert (await site.curl("/metrics", *ALICE, scheme="http")).status == 200
        stop.set()
        await asyncio.gather(*guessing)
    assert set(statuses) == {401, 429}


async def _value(value: int) -> int:
    await asyncio.sleep(0.05)
    return value
