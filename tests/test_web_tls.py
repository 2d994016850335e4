"""Who gets a page behind a web configuration, asked by curl and Prometheus; and what happens when its files change."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpumap.web.config.tls import has_allowed_name
from tests.agent import run_agent, until
from tests.command import gpumap_in_loop, one_line
from tests.prometheus import each_second, prometheus, settled
from tests.secured import ALICE, CLIENTS, SHOWN, TLS, Secured, make_certificates, secured, users


@pytest.fixture(name="folder", scope="module")
def make_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(name="own")
def make_own_folder(folder: Path, tmp_path: Path) -> Path:
    """A folder of certificates that a test may change."""
    return Path(shutil.copytree(folder, tmp_path / "own"))


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
    """Where they are required, one of the authority's is let in, none is 403, another one ends the handshake, which the
    log tells, and not each time; a probe has none and is answered."""
    caplog.set_level(logging.INFO, "gpumap.web.port")
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


@pytest.mark.parametrize(
    ("allowed", "status"),
    [
        ("prometheus.example", 200),
        ("2001:db8::1", 200),
        ("a@b.example", 200),
        ("spiffe://x/y", 200),
        ("example", 403),
        ("client", 403),
    ],
)
async def test_names_of_clients(folder: Path, allowed: str, status: int) -> None:
    """Any of the four kinds of alternate names may be the one that is allowed, whole; the common name is none."""
    async with secured(folder, f"{CLIENTS}  client_allowed_sans: [x, '{allowed}']\n") as site:
        assert await site.status("/metrics", *SHOWN) == status
        assert await site.status("/healthz", *SHOWN) == 200


def test_other_kinds_of_names() -> None:
    """What is none of the four kinds allows nobody."""
    assert not has_allowed_name({"subjectAltName": (("Registered ID", "1.2"), ("othername", "<unsupported>"))}, ["1.2"])
    assert not has_allowed_name({}, ["a"])


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


async def test_what_is_spoken(folder: Path) -> None:
    """Versions, suites and the curve are those of the configuration."""
    suite = "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384"
    spoken = f"{TLS}  max_version: TLS12\n  cipher_suites: [{suite}]\n"
    async with secured(folder, spoken) as site:
        assert await site.status("/healthz") == 200
        assert await site.status("/healthz", "--tlsv1.3") == 0
        assert await site.status("/healthz", "--ciphers", "ECDHE-ECDSA-AES128-GCM-SHA256") == 0
    async with secured(folder, f"{TLS}  curve_preferences: [CurveP384]\n") as site:
        assert [await site.status("/healthz", "--curves", curve) for curve in ("X25519", "P-384")] == [0, 200]
    async with secured(folder, f"{TLS}  cipher_suites: [TLS_AES_128_GCM_SHA256]\n") as site:
        assert [await site.status("/healthz", "--tls-max", version) for version in ("1.2", "1.3")] == [0, 200]


async def test_a_rate_limit(folder: Path) -> None:
    """So many requests at once and no more are answered; probes are, always."""
    async with secured(folder, "rate_limit: {interval: 1h, burst: 2}") as site:
        found = [(await site.curl("/metrics", scheme="http")).status for _ in range(4)]
        assert found == [200, 200, 429, 429]
        assert (await site.curl("/healthz", scheme="http")).status == 200


# --- who would hold it up ---------------------------------------------------------------------------------------------


async def test_wrong_passwords_keep_nobody_waiting(folder: Path) -> None:
    """While many guess, a scrape whose password was seen before is answered at once, and most guesses are turned away
    unchecked; when they have ended a new user is let in."""
    stop = asyncio.Event()
    said: list[int] = []

    async def guess(site: Secured, number: int) -> None:
        while not stop.is_set():
            said.append((await site.curl("/metrics", "--user", f"bob:{number}-{len(said)}", scheme="http")).status)

    async with secured(folder, users(cost=9)) as site:
        await site.curl("/metrics", *ALICE, scheme="http")
        guessing = [asyncio.create_task(guess(site, number)) for number in range(12)]
        await until(lambda: _value(said.count(429)), lambda count: count > 5, "no guess is turned away")
        checked = said.count(401)
        for _ in range(5):
            assert (await site.curl("/metrics", *ALICE, scheme="http")).status == 200
        assert said.count(401) - checked < said.count(429)
        stop.set()
        await asyncio.gather(*guessing)
        site.write(users(name="carol"))
        await until(
            lambda: site.curl("/metrics", "--user", "carol:hunter2é", scheme="http"),
            lambda answer: answer.status == 200,
            "carol is not let in",
        )
    assert set(said) <= {401, 429}


async def _value(value: int) -> int:
    await asyncio.sleep(0.05)
    return value


async def test_the_same_question_is_checked_once(folder: Path) -> None:
    """A page's twenty requests at once, with one password, are one check: none is turned away."""
    async with secured(folder, users(cost=10)) as site:
        found = await asyncio.gather(*(site.curl("/metrics", *ALICE, scheme="http") for _ in range(20)))
        assert {one.status for one in found} == {200}


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


async def test_clients_that_take_nothing(folder: Path) -> None:
    """Over TLS too, who asks for pages and reads none of them is let go."""
    async with secured(folder, TLS, patience_seconds=0.5) as site:
        context = ssl.create_default_context(cafile=folder / "ca.crt")
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port, ssl=context, limit=1)
        with contextlib.suppress(ConnectionError):
            for _ in range(2000):
                writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            reader._transport.pause_reading()  # type: ignore[attr-defined] # else asyncio takes some for itself
            started = time.monotonic()
            while not writer.is_closing() and time.monotonic() - started < 15:
                writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
                await asyncio.sleep(0.05)
        assert writer.is_closing()
        writer.transport.abort()
        assert await site.status("/healthz") == 200


# --- what changes -----------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def following(own: Path, config: str, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Secured]:
    caplog.set_level(logging.INFO, "gpumap.web.config")
    async with secured(own, config) as site:
        yield site


async def test_a_renewed_certificate(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    """New connections get the new one, those of before are ended after their answer; a pair of which only one half is
    there yet is not taken, and said at most once."""
    async with following(own, TLS, caplog) as site:
        before = ssl.create_default_context(cafile=own / "ca.crt")
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port, ssl=before)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await asyncio.wait_for(reader.readuntil(b"ok\n"), 10)
        shutil.copy(own / "other.crt", own / "server.crt")
        await until(lambda: _logged(caplog), lambda text: "is not the key of" in text, "half a pair is not told")
        await asyncio.sleep(0.3)
        assert caplog.text.count("is not taken") == 1
        assert await site.status("/healthz") == 200
        shutil.copy(own / "other.key", own / "server.key")
        await until(
            lambda: site.curl("/healthz", ca="other.crt"), lambda one: one.status == 200, "the new one is not there"
        )
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
        assert await site.status("/healthz") == 0
        assert (caplog.text.count("is not taken"), caplog.text.count("is taken anew")) == (1, 1)


async def test_a_change_cuts_no_answer_off(own: Path) -> None:
    """What was being sent when it came is sent to its end, and then the connection is closed."""
    async with secured(own, TLS, gpus=600) as site:
        context = ssl.create_default_context(cafile=own / "ca.crt")
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port, ssl=context, limit=1 << 12)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        assert length > 8 << 20, "a page that the sockets' buffers take whole proves nothing"
        serial = await _serial(site)
        site.swap("server", by="server2")
        await until(lambda: _serial(site), lambda found: found != serial, "the change is not taken")
        body = await asyncio.wait_for(reader.readexactly(length), 30)
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
    """Whom it vouched for is no longer let in, also by a session of before; who has the new one's word is."""
    stranger = ("--cert", "stranger.crt", "--key", "stranger.key")
    shutil.copy(own / "ca.crt", own / "trusted.crt")
    async with following(own, CLIENTS.replace("ca.crt", "trusted.crt"), caplog) as site:
        assert [await site.status("/metrics", *flags) for flags in (SHOWN, stranger)] == [200, 0]
        shutil.copy(own / "other.crt", own / "trusted.crt")
        await site.until_status(200, "/metrics", *stranger)
        assert await site.status("/metrics", *SHOWN) == 0


async def test_what_is_spoken_and_asked_changes(own: Path, caplog: pytest.LogCaptureFixture) -> None:
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
    ("broken", "says"),
    [
        ("", "TLS can be given up by a restart alone"),
        ("x: 1", "line 1: x: is not known"),
        (CLIENTS, "basic_auth_users can be given up by a restart alone"),
        (TLS + users(), "client certificates can be given up by a restart alone"),
        (None, "No such file or directory"),
    ],
)
async def test_a_change_that_is_not_taken(
    own: Path, caplog: pytest.LogCaptureFixture, broken: str | None, says: str
) -> None:
    """What was in force stays, one line says why, and what comes next is taken: nothing is opened by a broken file."""
    good = CLIENTS + users()
    async with following(own, good, caplog) as site:
        if broken is None:
            os.unlink(own / "web.yml")
        else:
            site.write(broken)
        await until(lambda: _logged(caplog), lambda text: says in text, "it is not told")
        await asyncio.sleep(0.3)
        assert caplog.text.count("is not taken") == 1
        assert [await site.status("/metrics", *flags) for flags in ((*SHOWN, *ALICE), SHOWN, ())] == [200, 401, 403]
        site.write(CLIENTS + users(password="new"))
        await site.until_status(200, "/metrics", "--user", "alice:new", *SHOWN)


# --- with its neighbours ----------------------------------------------------------------------------------------------


async def test_the_service_scraped_and_looked_at(own: Path) -> None:
    """`gpumap demo` with certificates and passwords: a real Prometheus scrapes it, `gpumap map --url` shows it."""
    (own / "web.yml").write_text(CLIENTS + users())
    (own / "password").write_text("hunter2é\n")
    async with run_agent("demo", "--web-config", str(own / "web.yml")) as agent:
        url = agent.url.replace("http:", "https:")
        address = url.removeprefix("https://")
        assert "web config file=" in agent.log
        tls = {name: str(own / file) for name, file in _FILES.items()}
        jobs = [
            {"job_name": "right", "basic_auth": {"username": "alice", "password": "hunter2é"}},
            {"job_name": "wrong", "basic_auth": {"username": "alice", "password": "x"}},
            {"job_name": "bare", "tls_config": {"ca_file": tls["ca_file"]}},
        ]
        where = {"scheme": "https", "tls_config": tls, "static_configs": [{"targets": [address]}]}
        config = each_second(*({**where, **job} for job in jobs))

        def scraped() -> dict[str, float]:
            with prometheus(own, config=config) as server:
                expected = {"right": 1.0, "wrong": 0.0, "bare": 0.0}
                return settled(lambda: server.by("job", "up"), expected)

        assert await asyncio.to_thread(scraped) == {"right": 1.0, "wrong": 0.0, "bare": 0.0}
        shown = [word for name, file in tls.items() for word in (f"--{name.replace('_', '-')}", file)]
        known = ("--user", "alice", "--password-file", str(own / "password"))
        for command in ("map", "top", "waste", "inspect", "doctor"):
            done = await gpumap_in_loop(command, "--url", url, *shown, *known)
            assert done.returncode == 0, done.stderr
            assert len(done.stdout.splitlines()) > 2
        variables = {f"GPUMAP_{name.upper()}": file for name, file in tls.items()}
        variables |= {"GPUMAP_USER": "alice", "GPUMAP_PASSWORD_FILE": str(own / "password")}
        assert (await gpumap_in_loop("map", "--url", url, **variables)).returncode == 0
        named = url.replace("127.0.0.1", "localhost")
        assert one_line(await gpumap_in_loop("map", "--url", named, *shown, *known), 1).startswith(f"{named}/api")
        assert (
            await gpumap_in_loop("map", "--url", named, *shown, *known, "--server-name", "127.0.0.1")
        ).returncode == 0
        for flags, says in (
            (shown, f"{url}/api/v1/map answered 401 Unauthorized: who is asking? see --user and --password-file"),
            (shown[:2], f"{url}/api/v1/map answered 403 Forbidden: it refuses; does it ask for --cert-file?"),
            ((), f"{url}/api/v1/map did not answer: its certificate is not trusted: "),
        ):
            assert one_line(await gpumap_in_loop("map", "--url", url, *flags), 1).startswith(says)
        plain = one_line(await gpumap_in_loop("map", "--url", agent.url), 1)
        assert plain.endswith("it closed the connection; is it https://?")


_FILES = {"ca_file": "ca.crt", "cert_file": "client.crt", "key_file": "client.key"}
