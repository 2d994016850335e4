"""Who gets a page over TLS, asked by curl and Prometheus; and what those cost who get none."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import ssl
from pathlib import Path

import pytest

from tests.agent import run_agent, until
from tests.command import one_line, run_command_in_loop
from tests.prometheus import each_second, prometheus, settled
from tests.secured import CLIENTS, SHOWN, TLS, make_certificates, make_short_certificate, secured, users


@pytest.fixture(name="folder", scope="module")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


# --- who gets a page --------------------------------------------------------------------------------------------------


async def test_tls_alone(folder: Path) -> None:
    """The page is had over TLS 1.2 and 1.3 by whoever trusts its certificate, and not in the clear."""
    async with secured(folder, TLS) as site:
        for version in ("1.2", "1.3"):
            answer = await site.curl("/metrics", "--tlsv1.2", "--tls-max", version)
            assert (answer.status, answer.failed) == (200, 0)
            assert answer.body.startswith("# HELP ")
        assert (await site.curl("/metrics", ca="other.crt")).failed == 60
        assert (await site.curl("/metrics", scheme="http")).status == 0
        assert (await site.curl("/metrics", "--tls-max", "1.1", "--ciphers", "DEFAULT@SECLEVEL=0")).status == 0


async def test_client_certificates(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where they are required, one of the authority's is let in, none is 403, and another ends the handshake."""
    caplog.set_level(logging.INFO, "gpumap.agent.web.port")
    async with secured(folder, CLIENTS) as site:
        assert await site.status("/metrics", *SHOWN) == 200
        for path in ("/metrics", "/", "/page/feed.js", "/api/v1/map", "/nothing", "/healthz/", "//healthz"):
            assert await site.status(path, "--path-as-is") == 403
        assert await site.status("/metrics", "--cert", "stranger.crt", "--key", "stranger.key") == 0
        assert await site.status("/metrics", "--cert", "stranger.crt", "--key", "stranger.key", "--tls-max", "1.2") == 0
        assert [await site.status(path) for path in ("/healthz", "/readyz")] == [200, 200]
    assert caplog.text.count("tls handshake failed client=127.0.0.1 reason=certificate_verify_failed") == 1
    given = CLIENTS.replace("RequireAndVerifyClientCert", "VerifyClientCertIfGiven")
    async with secured(folder, given) as site:
        assert [await site.status("/metrics", *flags) for flags in ((), SHOWN)] == [200, 200]
        assert await site.status("/metrics", "--cert", "stranger.crt", "--key", "stranger.key") == 0


async def test_what_is_spoken(folder: Path) -> None:
    async with secured(folder, f"{TLS}  max_version: TLS12\n") as site:
        assert await site.status("/healthz") == 200
        assert await site.status("/healthz", "--tlsv1.3") == 0
    async with secured(folder, f"{TLS}  min_version: TLS13\n") as site:
        assert [await site.status("/healthz", "--tls-max", version) for version in ("1.2", "1.3")] == [0, 200]


# --- who would hold it up ---------------------------------------------------------------------------------------------


async def test_clients_that_stop_in_a_handshake(folder: Path) -> None:
    """Who connects and says nothing, or half of a handshake, is let go, and makes room for others before that."""
    hello = bytes.fromhex("16030100a5010000a10303")
    async with secured(folder, TLS, patience_seconds=0.5, max_connections=4) as site:
        silent = [await asyncio.open_connection("127.0.0.1", site.port) for _ in range(6)]
        for _, writer in silent:
            writer.write(hello)
        assert await site.status("/healthz") == 200
        for reader, writer in silent:
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()
        assert await site.status("/healthz") == 200


def _resident_mib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) >> 10


async def test_what_failed_leaves_no_memory_behind(folder: Path) -> None:
    """However many handshakes fail, and requests that are none, in rounds: the process does not grow with them."""
    junk = (b"GET / HTTP/1.0\r\n\r\n", b"\x16\x03\x01")
    trusting = ssl.create_default_context(cafile=folder / "ca.crt")
    bodies = b"GET /metrics HTTP/1.1\r\nX: " + b"a" * 8000, b"\r\nContent-Length: 100000000\r\n\r\n" + b"a" * 100_000

    async def fail(port: int, number: int) -> None:
        secured = number % 3 == 2
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=trusting if secured else None, local_addr=(f"127.0.0.{2 + number % 3}", 0)
        )
        with contextlib.suppress(OSError):
            for piece in bodies if secured else (junk[number % 3],):
                writer.write(piece)
                await writer.drain()
            if number % 3 != 1:
                await asyncio.wait_for(reader.read(), 20)
        writer.transport.abort()

    (folder / "web.yml").write_text(TLS)
    async with run_agent("demo", "--web-config", str(folder / "web.yml")) as agent:
        port, found = int(agent.url.rpartition(":")[2]), []
        for _ in range(9):
            for _ in range(3):
                await asyncio.gather(*(fail(port, number) for number in range(60)))
            found.append(_resident_mib(agent.pid))
    assert found[-1] - found[2] < 24, found


async def test_a_client_certificate_that_expires(folder: Path) -> None:
    """Who showed it on a connection that goes on is refused from that second on."""
    make_short_certificate(folder, "short", "ca", seconds=4)
    context = ssl.create_default_context(cafile=folder / "ca.crt")
    context.load_cert_chain(folder / "short.crt", folder / "short.key")
    async with secured(folder, CLIENTS) as site:
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port, ssl=context)

        async def status() -> int:
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]))
            return int(head.split()[1])

        assert await status() == 200
        await until(status, lambda found: found == 403, "it is let in for ever")
        writer.close()


# --- with its neighbours ----------------------------------------------------------------------------------------------


async def test_the_service_scraped_and_looked_at(folder: Path) -> None:
    """`gpumap demo` with certificates and passwords: a real Prometheus scrapes it, `gpumap map --url` shows it."""
    (folder / "web.yml").write_text(CLIENTS + users())
    (folder / "password").write_text("hunter2é\n")
    async with run_agent("demo", "--web-config", str(folder / "web.yml")) as agent:
        url = agent.url.replace("http:", "https:")
        address = url.removeprefix("https://")

        async def log() -> str:
            return agent.log

        await until(log, lambda text: "web config file=" in text, "it does not name its configuration")
        tls = {name: str(folder / file) for name, file in _FILES.items()}
        jobs = [
            {"job_name": "right", "basic_auth": {"username": "alice", "password": "hunter2é"}},
            {"job_name": "wrong", "basic_auth": {"username": "alice", "password": "x"}},
            {"job_name": "bare", "tls_config": {"ca_file": tls["ca_file"]}},
        ]
        where = {"scheme": "https", "tls_config": tls, "static_configs": [{"targets": [address]}]}
        config = each_second(*({**where, **job} for job in jobs))

        def scraped() -> dict[str, float]:
            with prometheus(folder, config=config) as server:
                expected = {"right": 1.0, "wrong": 0.0, "bare": 0.0}
                return settled(lambda: server.by("job", "up"), expected)

        assert await asyncio.to_thread(scraped) == {"right": 1.0, "wrong": 0.0, "bare": 0.0}
        shown = [word for name, file in tls.items() for word in (f"--{name.replace('_', '-')}", file)]
        known = ("--user", "alice", "--password-file", str(folder / "password"))
        for command in ("map", "top", "waste", "inspect", "doctor"):
            done = await run_command_in_loop(command, "--url", url, *shown, *known)
            assert done.returncode == 0, done.stderr
            assert len(done.stdout.splitlines()) > 2
        variables = {f"GPUMAP_{name.upper()}": file for name, file in tls.items()}
        variables |= {"GPUMAP_USER": "alice", "GPUMAP_PASSWORD_FILE": str(folder / "password")}
        assert (await run_command_in_loop("map", "--url", url, **variables)).returncode == 0
        named = url.replace("127.0.0.1", "localhost")
        assert one_line(await run_command_in_loop("map", "--url", named, *shown, *known), 1).startswith(f"{named}/api")
        assert (
            await run_command_in_loop("map", "--url", named, *shown, *known, "--server-name", "127.0.0.1")
        ).returncode == 0
        for flags, message in (
            (shown, f"{url}/api/v1/map answered 401 Unauthorized. Set --user and --password-file"),
            (shown[:2], f"{url}/api/v1/map answered 403 Forbidden. It refuses the request and may require --cert-file"),
            ((), f"{url}/api/v1/map did not answer: its certificate is not trusted: "),
        ):
            assert one_line(await run_command_in_loop("map", "--url", url, *flags), 1).startswith(message)
        plain = one_line(await run_command_in_loop("map", "--url", agent.url), 1)
        assert plain.endswith("it closed the connection; try https://")


_FILES = {"ca_file": "ca.crt", "cert_file": "client.crt", "key_file": "client.key"}
