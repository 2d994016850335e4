"""Who gets a page by a password; who guesses holds nobody up."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gpumap.agent.web.config.passwords import Passwords, host_of
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
    """Both are asked for."""
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
    message: list[int] = []

    async def guess(port: int, address: str, number: int) -> None:
        while not stop.is_set():
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
            word = base64.b64encode(f"alice:{address}-{number}-{len(message)}".encode())
            writer.write(b"GET /metrics HTTP/1.0\r\nAuthorization: Basic " + word + b"\r\n\r\n")
            message.append(int((await reader.read()).split()[1]))
            writer.close()
            await asyncio.sleep(0.02)

    async with secured(folder, users(cost=6)) as site:
        guessing = [asyncio.create_task(guess(site.port, f"127.0.0.{2 + n % 4}", n)) for n in range(48)]
        await until(lambda: _value(message.count(429)), lambda count: count > 20, "no guess is turned away")
        assert (await site.curl("/metrics", *ALICE, scheme="http")).status == 200
        stop.set()
        await asyncio.gather(*guessing)
    assert set(message) == {401, 429}


async def _value(value: int) -> int:
    await asyncio.sleep(0.05)
    return value


class Gate:
    """A check in the place of bcrypt's: while the gate is shut, none ends."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()

    def check(self, password: bytes, hashed: bytes) -> bool:
        assert self._open.wait(60)
        return password == hashed

    @contextlib.contextmanager
    def shut(self) -> Iterator[None]:
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()


@pytest.fixture(name="gate")
def make_gate() -> Gate:
    return Gate()


@pytest.fixture(name="passwords")
async def make_passwords(gate: Gate) -> AsyncIterator[Passwords]:
    """Alice's password is `right`; three checks may be there at once."""
    passwords = Passwords(places=3, check=gate.check)
    passwords.users = {"alice": "right"}
    yield passwords
    passwords.close()


async def asking(passwords: Passwords, *asked: tuple[str, str]) -> list[asyncio.Task[bool | None]]:
    """Ask with these passwords from these addresses, one after the other."""
    tasks = []
    for address, password in asked:
        tasks.append(asyncio.create_task(passwords.are_right("alice", password, address)))
        await asyncio.sleep(0)
    return tasks


async def answer_at_once(passwords: Passwords, password: str) -> bool | None:
    """What is answered without any check."""
    (task,) = await asking(passwords, ("10.0.0.99", password))
    await asyncio.sleep(0)
    assert task.done()
    return task.result()


async def test_order_of_waiting_password_checks(passwords: Passwords, gate: Gate) -> None:
    """One check for each address; who has guessed most is refused first, and who has guessed least is next."""
    for address, guesses in (("10.0.0.1", 2), ("10.0.0.2", 1)):
        for number in range(guesses):
            assert await passwords.are_right("alice", f"{address}-{number}", address) is False
    ended: list[str] = []
    requests = [("10.0.0.3", "x"), ("10.0.0.1", "a"), ("10.0.0.1", "b"), ("10.0.0.2", "c"), ("10.0.0.4", "right")]
    with gate.shut():
        tasks = await asking(passwords, *requests)
        for (_, password), task in zip(requests, tasks, strict=True):
            task.set_name(password)
            task.add_done_callback(lambda task: ended.append(task.get_name()))
    assert [await task for task in tasks] == [False, None, None, False, True]
    assert ended[2:] == ["x", "right", "c"], "the newcomer comes before who has guessed"
    with gate.shut():  # all that wait have guessed less: who comes has to go
        tasks = await asking(passwords, ("10.0.0.4", "d"), ("10.0.0.5", "e"), ("10.0.0.6", "f"), ("10.0.0.1", "g"))
    assert [await task for task in tasks] == [False, False, False, None]


async def test_results_are_remembered(passwords: Passwords, gate: Gate) -> None:
    """Right or wrong, the same question needs no second check, from wherever it comes."""
    assert await passwords.are_right("alice", "right", "a") is True
    assert await passwords.are_right("alice", "wrong", "b") is False
    with gate.shut():
        (other,) = await asking(passwords, ("c", "another"))
        assert await answer_at_once(passwords, "right") is True
        assert await answer_at_once(passwords, "wrong") is False
        assert not other.done()
    assert await other is False


async def test_a_name_that_becomes_known(passwords: Passwords) -> None:
    """What was wrong because nobody had this name is checked again, whatever its hash."""
    assert await passwords.are_right("bob", "right", "a") is False
    passwords.users = {**passwords.users, "bob": passwords.users["alice"]}
    assert await passwords.are_right("bob", "right", "a") is True


async def test_guesses_do_not_displace_a_correct_password(passwords: Passwords, gate: Gate) -> None:
    """However many wrong passwords were checked, or wait, the right one is answered at once."""
    assert await passwords.are_right("alice", "right", "a") is True
    for number in range(120):
        assert await passwords.are_right("alice", f"guess-{number}", f"10.0.0.{number}") is False
    with gate.shut():
        guesses = await asking(passwords, *((f"10.0.1.{number}", f"x{number}") for number in range(40)))
        assert await answer_at_once(passwords, "right") is True
    assert [await one for one in guesses] == [False] * 3 + [None] * 37


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:0:1:2::3", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_hosts(address: str, host: str) -> None:
    """A host may have any address of an IPv6 network, and one of IPv4."""
    assert host_of(address) == host
