"""The flags of commands that ask a Prometheus: which one, as whom, whose certificate is trusted, which series.

What is wrong with them is said in one line, which never repeats what may be a secret.
"""

from __future__ import annotations

import argparse
import base64
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gpumap.errors import UsageError
from gpumap.units import parse_duration

if TYPE_CHECKING:
    import ssl

    from yarl import URL

    from gpumap.look.prometheus import Server

_MATCHER = r"""[a-zA-Z_][a-zA-Z0-9_]*\s*(=~|!~|!=|=)\s*("([^"\\]|\\.)*"|'([^'\\]|\\.)*')"""
_MATCH = re.compile(rf"\s*{_MATCHER}(\s*,\s*{_MATCHER})*\s*,?\s*", re.ASCII)
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", re.ASCII)
_TIMEOUT = "1m"
_SECRET_BYTES_MAX = 1 << 16
NO_URL = "is not a URL (in a password, / is written %2F, and @ %40)"
_DETAILS = ("header", "token_file", "user", "password_file", "ca_file", "match", "timeout")
"""What is of use with --prometheus alone."""


def add_server_flags(group: argparse._ArgumentGroup, *, required: bool = False) -> None:
    """Add them to a command. Without `required` the command has other places to look at."""
    only = "" if required else " instead: the whole cluster, from a Prometheus that scrapes it"
    group.add_argument(
        "--prometheus",
        metavar="URL",
        required=required,
        help=f"the server{only}, with the path before /api/v1 if it has one",
    )
    group.add_argument("--match", metavar="MATCH", help="only series with these labels, as in PromQL")
    group.add_argument("--header", metavar="TEXT", action="append", help="'Name: value' for each request; repeatable")
    group.add_argument("--token-file", metavar="FILE", help="a bearer token to send")
    group.add_argument("--user", metavar="NAME", help="basic auth: who asks")
    group.add_argument("--password-file", metavar="FILE", help="basic auth: the password of --user")
    group.add_argument("--ca-file", metavar="FILE", help="certificates (PEM) to trust for https, and no others")
    group.add_argument("--timeout", metavar="DURATION", help=f"for each request (default: {_TIMEOUT})")


def server_of(given: argparse.Namespace) -> Server:
    """Read what was given, files included. Raises UsageError. --prometheus must be there."""
    from gpumap.look.prometheus import Server

    address = _address(given.prometheus)
    url = str(address.with_user(None))
    in_url = None if address.user is None and address.password is None else (address.user or "", address.password or "")
    return Server(
        url=url,
        headers=_with_authorization(given, _headers(given.header or ()), in_url),
        tls=_trusted(given.ca_file, url),
        timeout_seconds=seconds_of("--timeout", given.timeout or _TIMEOUT),
    )


def refuse_details(given: argparse.Namespace) -> None:
    """Raise UsageError where a flag is about a server, and none is asked."""
    for name in _DETAILS:
        if getattr(given, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')}: is of use with --prometheus")


def matchers_of(flag: str, text: str) -> str:
    """Matchers of labels without their braces. Raises UsageError."""
    bare = text.strip()
    bare = bare[1:-1] if bare.startswith("{") and bare.endswith("}") else bare
    if bare.strip() and not _MATCH.fullmatch(bare):
        raise UsageError(f'{flag} {text}: is not of the form \'cluster="a"\' or \'cluster="a",region=~"eu-.*"\'')
    return bare.strip().rstrip(",").strip()


def seconds_of(flag: str, text: str) -> float:
    """A duration. Raises UsageError."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise UsageError(f"{flag} {text}: {error}") from error


def without_password(url: str) -> str:
    """As a URL may be shown, whatever it is: the user and the password, all before the last @, are for the server."""
    return re.sub(r"\A(\w+://)?.*@", r"\1", url, flags=re.DOTALL)


def _address(url: str) -> URL:
    """The URL below which /api/v1 is. Raises UsageError."""
    from yarl import URL

    shown = without_password(url)
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--prometheus {shown}: does not start with http:// or https://")
    try:
        given = URL(url)
        known = bool(given.host) and given.port is not None
    except ValueError:
        known = False
    if not known:
        raise UsageError(f"--prometheus {shown}: {NO_URL}")
    path = re.sub(r"(/api/v1(/query)?)?/*$", "", given.path)
    return given.with_path(path, keep_query=True)


def _headers(given: Sequence[str]) -> dict[str, str]:
    """Read `Name: value`, each once. Raises UsageError, which does not repeat the value: it may be a secret."""
    headers: dict[str, str] = {}
    for text in given:
        name, colon, value = text.partition(":")
        if not colon or not _HEADER_NAME.fullmatch(name) or not value.strip() or not value.strip().isprintable():
            raise UsageError('--header: is not of the form "Name: value"')
        if name.lower() in map(str.lower, headers):
            raise UsageError(f"--header: {name} is given twice")
        headers[name] = value.strip()
    return headers


def _with_authorization(
    given: argparse.Namespace, headers: Mapping[str, str], in_url: tuple[str, str] | None
) -> dict[str, str]:
    """The headers, with who asks. It can be said in four ways, and in one at a time."""
    ways = {
        "--header 'Authorization: …'": any(name.lower() == "authorization" for name in headers),
        "--token-file": given.token_file is not None,
        "--user": given.user is not None,
        "a user in --prometheus's URL": in_url is not None,
    }
    said = [way for way, there in ways.items() if there]
    if len(said) > 1:
        raise UsageError(f"{said[1]}: cannot be sent together with {said[0]}")
    if given.password_file is not None and given.user is None:
        raise UsageError("--password-file: is of use with --user")
    if given.token_file is not None:
        return {**headers, "Authorization": f"Bearer {_token(given.token_file)}"}
    if given.user is not None:
        return {**headers, "Authorization": _basic(_name(given.user), _password(given.password_file))}
    if in_url is not None:
        return {**headers, "Authorization": _basic(*in_url)}
    return dict(headers)


def _token(path: str) -> str:
    token = _read("--token-file", path).strip()
    if not token.isascii() or not token.isprintable() or " " in token or not token:
        raise UsageError(f"--token-file {path}: does not hold a token")
    return token


def _name(user: str) -> str:
    if not user or ":" in user or not user.isprintable():
        raise UsageError("--user: is not a name (a password belongs in --password-file)")
    return user


def _password(path: str | None) -> str:
    if path is None:
        raise UsageError("--user: needs --password-file FILE")
    password = _read("--password-file", path).removesuffix("\n").removesuffix("\r")
    if not password or not password.isprintable():
        raise UsageError(f"--password-file {path}: does not hold a password in one line")
    return password


def _basic(user: str, password: str) -> str:
    return f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"


def _read(flag: str, path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(_SECRET_BYTES_MAX)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not text"
        raise UsageError(f"{flag} {path}: {reason}") from error


def _trusted(path: str | None, url: str) -> ssl.SSLContext | None:
    if path is None:
        return None
    import ssl

    if not url.startswith("https://"):
        raise UsageError("--ca-file: is of use with an https:// URL")
    try:
        return ssl.create_default_context(cafile=os.fspath(path))
    except ssl.SSLError as error:
        raise UsageError(f"--ca-file {path}: does not hold certificates in PEM form") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"--ca-file {path}: {getattr(error, 'strerror', None) or 'is no path'}") from error
