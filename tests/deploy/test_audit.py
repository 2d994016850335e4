"""`make audit`: what it asks of a vulnerability database, and that an audit of nothing is a failure."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from scripts.audit import LOCKS, VULNERABLE, locked_packages
from tests.demo_process import environment

ROOT = Path(__file__).resolve().parents[2]
Answer = Callable[[list[dict[str, Any]]], object]
Results = list[dict[str, Any]]


class Database:
    """A server with OSV's API that returns `answer` of each batch of queries."""

    def __init__(self) -> None:
        self.answer: Answer = known({VULNERABLE.name: ["GHSA-old"]})
        self.asked: list[dict[str, Any]] = []
        self.status = 200
        database = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/querybatch"
                database.asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
                body = json.dumps(database.answer(database.asked)).encode()
                self.send_response(database.status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Be silent."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


def known(vulnerable: dict[str, list[str]]) -> Answer:
    """A database that knows these ids, by name or by name and version. The old release is always among them."""

    def answer(queries: list[dict[str, Any]]) -> object:
        results: Results = []
        for query in queries:
            name, version = query["package"]["name"], query["version"]
            old = vulnerable.get(name, []) if (name, version) == VULNERABLE else []
            ids = old or vulnerable.get(f"{name}=={version}", [])
            results.append({"vulns": [{"id": one} for one in ids]} if ids else {})
        return {"results": results}

    return answer


@pytest.fixture(name="database")
def serve_database() -> Iterator[Database]:
    database = Database()
    thread = threading.Thread(target=database.server.serve_forever)
    thread.start()
    yield database
    database.server.shutdown()
    thread.join()
    database.server.server_close()


def audit(service: str, *locks: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/audit.py"), "--service", service, *locks]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)


def test_every_package_of_every_lock_is_asked_for(database: Database) -> None:
    """One request names each locked release once, after the one that proves the database."""
    done = audit(database.url)
    assert (done.returncode, done.stderr) == (0, "")
    asked = [(query["package"]["name"], query["version"]) for query in database.asked]
    assert asked[0] == VULNERABLE
    assert asked[1:] == sorted({one for lock in LOCKS for one in locked_packages((ROOT / lock).read_text())})
    assert {query["package"]["ecosystem"] for query in database.asked} == {"PyPI"}
    for lock in LOCKS:
        # Each requirement of a lock has hashes, and a line of its own that begins with its name.
        entries = (ROOT / lock).read_text().replace("\\\n", "").splitlines()
        assert len(locked_packages((ROOT / lock).read_text())) == len(entries)
        assert f"{lock} ({LOCKS[lock]}): {len(entries)} packages\n" in done.stdout
    assert {str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.lock"), *ROOT.glob("bench/*.lock")]} == {*LOCKS}


def test_a_vulnerable_package_is_named(database: Database) -> None:
    """The audit fails, and names the lock, the release and the vulnerability."""
    (first, *_) = locked_packages((ROOT / "requirements.lock").read_text())
    database.answer = known({VULNERABLE.name: ["GHSA-old"], f"{first.name}=={first.version}": ["GHSA-b", "GHSA-a"]})
    done = audit(database.url, "requirements.lock")
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert lines[1].startswith(f"  {first.name} {first.version}: GHSA-a, https://osv.dev/GHSA-a")
    assert lines[2].startswith(f"  {first.name} {first.version}: GHSA-b, ")
    assert lines[3:] == ["A package is vulnerable."]


NO_ANSWERS: dict[str, tuple[int, Answer, str]] = {
    "an empty database": (200, known({}), "does not know the vulnerabilities of aiohttp 3.9.0: it has none at all"),
    "not found": (404, lambda _: {}, "does not answer: Not Found"),
    "another format": (200, lambda _: ["none"], "does not answer in OSV's format"),
    "fewer answers": (200, lambda _: {"results": [{"vulns": [{"id": "GHSA-old"}]}]}, "answers for 1 of "),
}


@pytest.mark.parametrize("case", NO_ANSWERS)
def test_nothing_audited_is_a_failure(database: Database, case: str) -> None:
    """A database that cannot vouch for the packages gives no good news."""
    database.status, database.answer, reason = NO_ANSWERS[case]
    done = audit(database.url)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"Nothing was audited: {database.url} ")
    assert reason in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_no_database_is_a_failure() -> None:
    """Nothing listens there, as on a machine without a network."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        done = audit(f"http://127.0.0.1:{free.getsockname()[1]}")
    assert (done.returncode, done.stdout) == (2, "")
    assert "does not answer: [Errno 111] Connection refused." in done.stderr
