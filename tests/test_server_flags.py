"""Credentials for a Prometheus, and the certificate that it must have: the same for `bill`, `map`, `top`, `waste`."""

from __future__ import annotations

import base64
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from tests.certificates import make_certificate, make_signed_certificate
from tests.command import one_line, run_command, run_command_in_loop
from tests.played_prometheus import answering, api, serving

COMMANDS = (("map",), ("bill", "--from", "1d"))


@pytest.fixture(name="files")
def make_files(tmp_path: Path) -> Path:
    """Files that flags name."""
    (tmp_path / "token").write_text("abc.def\n")
    (tmp_path / "password").write_text("hunter 2é\n")
    (tmp_path / "lines").write_text("one\ntwo\n")
    (tmp_path / "empty").write_text("\n")
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "sent"),
    [
        (("--token-file", "token"), "Bearer abc.def"),
        (
            ("--user", "me", "--password-file", "password"),
            "Basic " + base64.b64encode("me:hunter 2é".encode()).decode(),
        ),
        (("--header", "Authorization: Custom x"), "Custom x"),
    ],
)
async def test_credentials_of_flags(files: Path, flags: tuple[str, ...], sent: str) -> None:
    """A bearer token, basic auth, or what a header says; in each request."""
    asked: list[web.Request] = []
    named = [str(files / one) if (files / one).exists() else one for one in flags]
    async with serving(api(asked=asked)) as url:
        await run_command_in_loop("map", "--prometheus", url, *named, "--header", "X-Scope-OrgID: ml")
    assert {(one.headers["Authorization"], one.headers["X-Scope-OrgID"]) for one in asked} == {(sent, "ml")}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--token-file", "no"), "--token-file {files}/no: No such file or directory"),
        (("--token-file", "lines"), "--token-file {files}/lines: does not contain a token"),
        (("--user", "me"), "--user requires --password-file FILE"),
        (("--user", "me:secret"), "--user: must be a name without a colon (the password belongs in --password-file)"),
        (("--password-file", "password"), "--password-file requires --user"),
        (
            ("--user", "me", "--password-file", "lines"),
            "--password-file {files}/lines: does not contain a password in one",
        ),
        (
            ("--user", "me", "--password-file", "empty"),
            "--password-file {files}/empty: does not contain a password in one",
        ),
        (("--token-file", "token", "--user", "me"), "--user: cannot be combined with --token-file"),
        (
            ("--header", "Authorization: x", "--token-file", "token"),
            "--token-file: cannot be combined with --header 'Authorization: …'",
        ),
        (("--ca-file", "token"), "--ca-file {files}/token: does not contain certificates in PEM format"),
        (("--cert-file", "no"), "--cert-file {files}/no: No such file or directory"),
        (("--cert-file", "token"), "--cert-file {files}/token: do not contain a certificate and its key in PEM format"),
        (("--cert-file", "token", "--key-file", "no"), "--key-file {files}/no: No such file or directory"),
        (("--key-file", "token"), "--key-file requires --cert-file"),
        (("--ca-file", "no"), "--ca-file {files}/no: No such file or directory"),
        (("--header", "secret"), '--header: must have the form "Name: value"'),
        (("--timeout", "soon"), "--timeout soon: "),
        (("--match", "x"), "--match x: must have the form"),
        (("--match", "a='b'" + " " * 100_000 + "x"), "--match a='b' "),  # an expression must not try each blank again
        (("--header", "Content-Length: 5"), "--header: Content-Length must be that of the request, which gpumap sets"),
        (("--server-name", ""), "--server-name : is not the name of a host"),
        (("--server-name", "a..b"), "--server-name a..b: is not the name of a host"),
        (("--server-name", "a" * 64), "--server-name aaaa"),
        (("--server-name", "ä" * 60), "--server-name ää"),
        (("--server-name", "a\0b\x1b\u202e"), "--server-name a?b??: is not the name of a host"),
        (("--server-name", "\udcff"), "--server-name ?: is not the name of a host"),
    ],
)
@pytest.mark.parametrize("command", COMMANDS)
def test_mistakes(files: Path, command: tuple[str, ...], flags: tuple[str, ...], expected: str) -> None:
    """One line, exit code 2, and never a secret in it."""
    takes_file = ("--token-file", "--password-file", "--ca-file", "--cert-file", "--key-file")
    named = [
        str(files / one) if before in takes_file else one for before, one in zip(("", *flags), flags, strict=False)
    ]
    message = one_line(run_command(*command, "--prometheus", "https://127.0.0.1:9", *named), 2)
    assert message.startswith(expected.format(files=files))
    assert "secret" not in message


def test_two_kinds_of_credentials(files: Path) -> None:
    """A user in the URL is one of them, and its password is not repeated."""
    where = ("--prometheus", "http://me:secret@127.0.0.1:9")
    message = one_line(run_command("map", *where, "--token-file", str(files / "token")), 2)
    assert message == "a user in --prometheus's URL: cannot be combined with --token-file"
    assert one_line(run_command("map", *where, "--ca-file", "x"), 2) == "--ca-file requires an https:// URL"


@contextlib.asynccontextmanager
async def https(folder: Path) -> AsyncIterator[str]:
    """A server with a certificate of an authority of its own, in the file `ca.crt` of the folder."""
    for name in ("ca", "other"):
        make_certificate(folder, name)
    make_signed_certificate(folder, "prometheus", "ca")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "prometheus.crt", folder / "prometheus.key")
    async with serving(answering("", 403), tls=context) as url:
        yield url


@pytest.mark.parametrize("command", COMMANDS)
async def test_an_authority_of_ones_own(tmp_path: Path, command: tuple[str, ...]) -> None:
    """With --ca-file its servers are trusted, with another one's or without none: one line says so."""
    async with https(tmp_path) as url:
        where = (*command, "--prometheus", url)
        message = one_line(await run_command_in_loop(*where, "--ca-file", str(tmp_path / "ca.crt")), 1)
        assert message.startswith(f"{url} answered 403 Forbidden")
        for flags in ((), ("--ca-file", str(tmp_path / "other.crt"))):
            message = one_line(await run_command_in_loop(*where, *flags), 1)
            assert message.startswith(f"{url} did not answer: its certificate is not trusted: ")


async def test_credentials_from_the_environment(files: Path) -> None:
    """Where no flag and no user in the URL does; what is of https is not heeded for http://."""
    asked: list[web.Request] = []
    known = {"GPUMAP_USER": "me", "GPUMAP_PASSWORD_FILE": str(files / "password"), "GPUMAP_CA_FILE": "no"}
    async with serving(api(asked=asked)) as url:
        for flags in ((), ("--token-file", str(files / "token")), ("--header", "Authorization: x")):
            await run_command_in_loop("map", "--prometheus", url, *flags, **known)
        await run_command_in_loop("map", "--prometheus", url.replace("://", "://you:there@"), **known)
    sent = dict.fromkeys(one.headers["Authorization"] for one in asked)
    words = (base64.b64encode(one.encode()).decode() for one in ("me:hunter 2é", "you:there"))
    first, last = (f"Basic {word}" for word in words)
    assert list(sent) == [first, "Bearer abc.def", "x", last]
    message = one_line(await run_command_in_loop("map", "--url", "https://127.0.0.1:9", GPUMAP_CA_FILE="no"), 2)
    assert message == "--ca-file no: No such file or directory"


@pytest.mark.parametrize("flag", ["--prometheus", "--url"])
@pytest.mark.parametrize(
    "url",
    [
        "bob:s3cr3t@127.0.0.1:9090",
        "http://bob:s3c/r3t@127.0.0.1:1",
        "http://bob:s3@r3t@127.0.0.1:99999/",
        "http://bob:s3cr3t@127.0.0.1:1",
    ],
)
def test_a_password_in_a_url_is_never_shown(flag: str, url: str) -> None:
    """Whatever is wrong with the URL, or with the server behind it: neither the user nor the password is said."""
    done = run_command("map", flag, url)
    expected = done.stdout + done.stderr
    assert done.returncode in (1, 2)
    assert "127.0.0.1" in one_line(done, done.returncode)
    assert not any(secret in expected for secret in ("bob", "s3c", "r3t", "s3@"))


async def test_a_refusal_does_not_repeat_the_token(files: Path) -> None:
    """Some servers answer a refusal with what they were sent: a token is not shown for that."""

    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=401, text=f"no {request.headers['Authorization']} here")

    async with serving(refuse) as url:
        done = await run_command_in_loop("map", "--prometheus", url, "--token-file", str(files / "token"))
    assert one_line(done, 1).endswith("answered 401 Unauthorized: no Bearer … here")
