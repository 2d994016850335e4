"""Who gets a page by a password; who guesses holds nobody up."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from pathlib import Path

import pytest

from gpumap.agent.web.config.fair_queue import Turns, network_of
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


async def test_what_bcrypt_reads_of_a_password(folder: Path) -> None:
    """72 bytes, as everywhere; a longer password is no failure."""
    long = "x" * 72
    async with secured(folder, users(password=long)) as site:
        for word, status in ((long, 200), (long + "y", 200), (long[1:], 401)):
            assert (await site.curl("/metrics", "--user", f"alice:{word}", scheme="http")).status == status


async def test_all_together_with_headers(folder: Path) -> None:
    """A certificate and a password are both asked for; headers are on every answer, a refusal and a probe too."""
    headers = "http_server_config: {headers: {Strict-Transport-Security: max-age=3, X-Frame-Options: deny}}\n"
    async with secured(folder, CLIENTS + users() + headers) as site:
        asked = [(*SHOWN, *ALICE), SHOWN, ALICE, ()]
        answers = [await site.curl("/metrics", *flags) for flags in asked]
        assert [one.status for one in answers] == [200, 401, 403, 403]
        for one in (*answers, await site.curl("/healthz")):
            assert "Strict-Transport-Security: max-age=3" in one.head
            assert "X-Frame-Options: deny" in one.head


async def test_a_rate_limit(folder: Path) -> None:
    """So many requests at once and no more are answered; probes are, always; who is not let in uses none up."""
    async with secured(folder, "rate_limit: {interval: 1h, burst: 2}") as site:
        found = [(await site.curl("/metrics", scheme="http")).status for _ in range(4)]
        assert found == [200, 200, 429, 429]
        assert (await site.curl("/healthz", scheme="http")).status == 200
    async with secured(folder, "rate_limit: {interval: 1h, burst: 1}\n" + users()) as site:
        asked = (), ("--user", "alice:x"), ALICE, ALICE
        assert [(await site.curl("/metrics", *one, scheme="http")).status for one in asked] == [401, 401, 200, 429]


async def test_the_same_question_is_checked_once(folder: Path) -> None:
    """A page's twenty requests at once, with one password, are one check: none is turned away."""
    async with secured(folder, users(cost=10)) as site:
        found = await asyncio.gather(*(site.curl("/metrics", *ALICE, scheme="http") for _ in range(20)))
        assert {one.status for one in found} == {200}


async def test_who_guesses_locks_nobody_out(folder: Path) -> None:
    """While guesses come from many connections, and more than may wait, one who was never seen before is let in."""
    stop = asyncio.Event()
    said: list[int] = []

    async def guess(port: int, address: str, number: int) -> None:
        while not stop.is_set():
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
            word = base64.b64encode(f"alice:{address}-{number}-{len(said)}".encode())
            writer.write(b"GET /metrics HTTP/1.0\r\nAuthorization: Basic " + word + b"\r\n\r\n")
            said.append(int((await reader.read()).split()[1]))
            writer.close()
            await asyncio.sleep(0.02)

    async with secured(folder, users(cost=6)) as site:
        guessing = [asyncio.create_task(guess(site.port, f"127.0.0.{2 + n % 4}", n)) for n in range(48)]
        await until(lambda: _value(said.count(429)), lambda count: count > 20, "no guess is turned away")
        assert (await site.curl("/metrics", *ALICE, scheme="http")).status == 200
        stop.set()
        await asyncio.gather(*guessing)
    assert set(said) == {401, 429}


async def _value(value: int) -> int:
    await asyncio.sleep(0.05)
    return value


async def test_rules_that_change_while_a_password_is_checked(folder: Path) -> None:
    """What was asked under rules of before is not answered by them."""
    async with secured(folder, users(cost=13)) as site:
        guard = site.watch.guard
        asking = asyncio.create_task(site.curl("/metrics", *ALICE, scheme="http"))
        await until(lambda: _value(len(guard.busy)), bool, "nobody asks")
        guard.take(replace(guard.rules, users={"bob": guard.rules.users["alice"]}))
        assert (await asking).status == 503
        assert (await site.curl("/metrics", *ALICE, scheme="http")).status == 401


async def test_a_password_in_other_bytes(folder: Path) -> None:
    """It need not be UTF-8: bcrypt takes bytes."""
    async with secured(folder, users(password=b"caf\xe9")) as site:
        word = base64.b64encode(b"alice:caf\xe9").decode()
        assert (await site.curl("/metrics", "-H", f"Authorization: Basic {word}", scheme="http")).status == 200


async def _waiting(turns: Turns, *networks: str) -> tuple[list[str], list[asyncio.Task[None]]]:
    """Let these come one after the other. Gives what becomes of them, in order: a name, or one with `-` before it."""
    told: list[str] = []

    async def come(name: str) -> None:
        told.append(name if await turns.take(name[0]) else f"-{name}")

    tasks = []
    for network in networks:
        tasks.append(asyncio.create_task(come(network)))
        await asyncio.sleep(0)
    return told, tasks


async def test_turns() -> None:
    """Each network in its turn; when no place is left the newest of the one that has most goes, or who comes."""
    turns = Turns(places=4)
    told, tasks = await _waiting(turns, "x", "a1", "a2", "a3", "a4", "b1", "c1", "d1", "e1", "a5")
    await asyncio.sleep(0)
    assert told == ["x", "-a4", "-a3", "-a2", "-e1", "-a5"]
    tasks[5].cancel()
    for _ in range(4):
        turns.pass_on()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert told[6:] == ["a1", "c1", "d1"]
    told, _ = await _waiting(turns, "a1", "a2", "a3", "b1")
    for _ in range(4):
        turns.pass_on()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert told == ["a1", "a2", "b1", "a3"]


async def test_a_turn_given_to_one_who_has_gone() -> None:
    """It is the next one's."""
    turns = Turns()
    told, tasks = await _waiting(turns, "a", "b", "c")
    turns.pass_on()
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert told == ["a", "c"]


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:0:1:2::3", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_networks(address: str, network: str) -> None:
    """A host may have any address of an IPv6 network, and one of IPv4."""
    assert network_of(address) == network
