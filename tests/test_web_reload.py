"""What happens when a web configuration or one of its files changes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.agent import until
from tests.secured import ALICE, CLIENTS, SHOWN, TLS, Secured, make_certificates, secured, users

NO_TLS, NO_USERS = "tls_server_config: {}\n", "basic_auth_users: {}\n"


@pytest.fixture(name="folder", scope="module")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(name="own")
def make_own_folder(folder: Path, tmp_path: Path) -> Path:
    """A folder of certificates that a test may change."""
    return Path(shutil.copytree(folder, tmp_path / "own"))


@contextlib.asynccontextmanager
async def following(own: Path, config: str, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Secured]:
    caplog.set_level(logging.INFO, "gpumap.agent.web.guard")
    async with secured(own, config) as site:
        yield site


async def test_a_renewed_certificate(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    """New connections get the new one, old ones end after their answer; half a pair is not taken."""
    async with following(own, TLS, caplog) as site:
        before = ssl.create_default_context(cafile=own / "ca.crt")
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port, ssl=before)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await asyncio.wait_for(reader.readuntil(b"ok\n"), 10)
        shutil.copy(own / "other.crt", own / "server.crt")
        await until(lambda: _logged(caplog), lambda text: "is not the key of" in text, "half a pair is not reported")
        await asyncio.sleep(0.3)
        assert caplog.text.count("not loaded, the previous one stays active") == 1
        assert await site.status("/healthz") == 200
        shutil.copy(own / "other.key", own / "server.key")
        await until(
            lambda: site.curl("/healthz", ca="other.crt"), lambda one: one.status == 200, "the new one is not there"
        )
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
        assert await site.status("/healthz") == 0
        assert (
            caplog.text.count("not loaded, the previous one stays active"),
            caplog.text.count("web config loaded again"),
        ) == (1, 1)


async def test_a_change_cuts_no_answer_off(own: Path) -> None:
    """What was being sent when it came is sent to its end, and then the connection is closed."""
    async with secured(own, TLS, gpus=120) as site:
        context = ssl.create_default_context(cafile=own / "ca.crt")
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port, ssl=context, limit=1 << 12)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        assert length > 8 << 20, "a page that the sockets' buffers take whole proves nothing"
        serial = await _serial(site)
        site.swap("server", by="server2")
        await until(lambda: _serial(site), lambda found: found != serial, "the change is not taken")
        body = await asyncio.wait_for(reader.readexactly(length), 120)
        assert body.endswith(b"\n")
        assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()


async def _logged(caplog: pytest.LogCaptureFixture) -> str:
    return caplog.text


async def test_a_secrets_volume(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A kubelet's way to change files, by a link to a folder above them, is seen."""
    volume = own / "volume"
    for number, name in enumerate(("server", "server2"), 1):
        (volume / f"..{number}").mkdir(parents=True)
        for end in ("crt", "key"):
            shutil.copy(own / f"{name}.{end}", volume / f"..{number}/tls.{end}")
    (volume / "..data").symlink_to("..1")
    for end in ("crt", "key"):
        (volume / f"tls.{end}").symlink_to(f"..data/tls.{end}")
    config = "tls_server_config: {cert_file: volume/tls.crt, key_file: volume/tls.key}\n"
    async with following(own, config, caplog) as site:
        first = await _serial(site)
        (volume / "..tmp").symlink_to("..2")
        (volume / "..tmp").rename(volume / "..data")
        await until(lambda: _serial(site), lambda found: found != first, "the new certificate is not there")


async def _serial(site: Secured) -> str:
    context = ssl.create_default_context(cafile=site.folder / "ca.crt")
    _, writer = await asyncio.open_connection("127.0.0.1", site.port, ssl=context)
    writer.close()
    return str(writer.get_extra_info("peercert")["serialNumber"])


async def test_an_authority_that_is_taken_away(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A client with its certificate is no longer let in, also by an older session; one with the new CA's is."""
    stranger = ("--cert", "stranger.crt", "--key", "stranger.key")
    shutil.copy(own / "ca.crt", own / "trusted.crt")
    async with following(own, CLIENTS.replace("ca.crt", "trusted.crt"), caplog) as site:
        assert [await site.status("/metrics", *flags) for flags in (SHOWN, stranger)] == [200, 0]
        shutil.copy(own / "other.crt", own / "trusted.crt")
        await site.until_status(200, "/metrics", *stranger)
        assert await site.status("/metrics", *SHOWN) == 0


async def test_tls_versions_and_requirements_change(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A higher least version, certificates that are now required, another password: from the next request on."""
    async with following(own, TLS + users(), caplog) as site:
        assert await site.status("/metrics", *ALICE, "--tls-max", "1.2") == 200
        site.write(f"{TLS}  min_version: TLS13\n{users()}")
        await site.until_status(0, "/healthz", "--tls-max", "1.2")
        site.write(CLIENTS + users())
        await site.until_status(403, "/metrics", *ALICE)
        site.write(CLIENTS + users(password="new"))
        await site.until_status(401, "/metrics", *ALICE, *SHOWN)
        assert await site.status("/metrics", "--user", "alice:new", *SHOWN) == 200


async def test_tls_that_is_switched_on(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Asking for more needs no restart."""
    async with following(own, "", caplog) as site:
        assert (await site.curl("/metrics", scheme="http")).status == 200
        site.write(TLS)
        await site.until_status(200, "/metrics")
        assert (await site.curl("/metrics", scheme="http")).status == 0


@pytest.mark.parametrize(
    ("fewer", "words"),
    [
        (TLS + "  client_auth_type: NoClientCert\n" + users(), "tls=yes client_certificates=no users=1"),
        (CLIENTS + NO_USERS, "tls=yes client_certificates=required users=0"),
        (NO_TLS + users(), "tls=no client_certificates=no users=1"),
        (NO_TLS + NO_USERS, "tls=no client_certificates=no users=0"),
    ],
    ids=["no certificates", "no passwords", "no TLS", "nothing"],
)
async def test_a_change_that_requires_less(own: Path, caplog: pytest.LogCaptureFixture, fewer: str, words: str) -> None:
    """It is taken, as it says so; the log says what was required and what is, and what that means."""
    async with following(own, CLIENTS + users(), caplog) as site:
        site.write(fewer)
        logged = f"web.yml {words} (before: tls=yes client_certificates=required users=1)"
        await until(lambda: _logged(caplog), lambda text: logged in text, "it is not reported")
        scheme = "http" if NO_TLS in fewer else "https"
        flags = (*(SHOWN if fewer.startswith(CLIENTS) else ()), *(ALICE if "alice" in fewer else ()))
        assert (await site.curl("/metrics", *flags, scheme=scheme)).status == 200
    assert ("clients send passwords unencrypted" in caplog.text) == (scheme == "http" and "alice" in fewer)
    assert ("web config requires nothing" in caplog.text) == (fewer == NO_TLS + NO_USERS)


async def test_a_certificate_renewed_beside_a_mistake(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is in force gets its new certificate, whatever is wrong with the file meanwhile."""
    async with following(own, TLS + users(), caplog) as site:
        first = await _serial(site)
        site.write("")
        await until(
            lambda: _logged(caplog),
            lambda text: "not loaded, the previous one stays active" in text,
            "it is not reported",
        )
        site.swap("server", by="server2")
        await until(lambda: _serial(site), lambda found: found != first, "the new certificate is not there")
        assert [await site.status("/metrics", *flags) for flags in ((), ALICE)] == [401, 200]
