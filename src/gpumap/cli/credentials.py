"""The flags for the URL, credentials and certificates of a server or an agent, and what they mean.

A mistake in them is one line, which never repeats a possible secret.
"""

from __future__ import annotations

import argparse
import base64
import os
import re
import select
import stat
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from gpumap.model.errors import UsageError

if TYPE_CHECKING:
    import ssl

    from yarl import URL

CREDENTIALS = ("header", "token_file", "user", "password_file", "ca_file", "cert_file", "key_file", "server_name")
_FROM_ENVIRONMENT = CREDENTIALS[1:]
_AUTHORIZE = ("token_file", "user", "password_file")
_SECURE = ("ca_file", "cert_file", "key_file", "server_name")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", re.ASCII)
_SECRET_BYTES_MAX = 1 << 16
_FIFO_SECONDS = 5.0


class Credentials(NamedTuple):
    """What each request is sent with. `tls` is None to trust the system's certificates and show none of ours.

    `server_name` is None if the certificate must have the name in the URL.
    """

    headers: Mapping[str, str]
    tls: ssl.SSLContext | None
    server_name: str | None


def is_host(name: str | None) -> bool:
    """Whether a host can have this name: the parts of a DNS name have 1 to 63 characters, as DNS writes them."""
    try:
        return bool(name) and str(name).encode("idna").decode().isprintable()
    except UnicodeError:
        return False


def add_credentials(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--header", metavar="TEXT", action="append", help="'Name: value', sent with each request; repeatable."
    )
    for name, metavar, says in (
        ("--token-file", "FILE", "File with a bearer token."),
        ("--user", "NAME", "User for basic auth."),
        ("--password-file", "FILE", "File with the password of --user."),
        ("--ca-file", "FILE", "CA certificates (PEM) for https, instead of those of the system."),
        ("--cert-file", "FILE", "Client certificate (PEM)."),
        ("--key-file", "FILE", "Key of --cert-file, if that file does not contain it."),
        ("--server-name", "NAME", "Name in the server's certificate, if it is not the host of the URL."),
    ):
        group.add_argument(name, metavar=metavar, help=f"{says} (${_variable(name)})")


def credentials_of(args: argparse.Namespace, environment: Mapping[str, str], flag: str, address: URL) -> Credentials:
    """Read the flags and their files, for the URL of `flag`. Raises UsageError.

    A variable is used unless a flag or the URL gives the same.
    """
    in_url = None if address.user is None and address.password is None else (address.user or "", address.password or "")
    headers = _headers(args.header or ())
    has_authorization = in_url is not None or any(name.lower() == "authorization" for name in headers)
    args = argparse.Namespace(**{name: getattr(args, name) for name in CREDENTIALS})
    has_authorization |= any(getattr(args, name) is not None for name in _AUTHORIZE)
    ignored = (*(_AUTHORIZE if has_authorization else ()), *(_SECURE if address.scheme != "https" else ()))
    for name in _FROM_ENVIRONMENT:
        if getattr(args, name) is None and name not in ignored:
            setattr(args, name, environment.get(_variable(name)) or None)
    return Credentials(_authorized_headers(args, headers, in_url, flag), _tls(args, address), args.server_name)


def _variable(name: str) -> str:
    return "GPUMAP_" + name.removeprefix("--").upper().replace("-", "_")


URL_VARIABLE = "GPUMAP_URL"
"""The agent to ask without --url. The chart sets it in the agent's pod."""
VARIABLES = (URL_VARIABLE, *map(_variable, _FROM_ENVIRONMENT))


def _headers(texts: Sequence[str]) -> dict[str, str]:
    """Read `Name: value`, each once. Raises UsageError, which does not repeat the value: it may be a secret."""
    headers: dict[str, str] = {}
    for text in texts:
        name, colon, value = text.partition(":")
        if not colon or not _HEADER_NAME.fullmatch(name) or not value.strip() or not value.strip().isprintable():
            raise UsageError('--header: must have the form "Name: value"')
        if name.lower() in map(str.lower, headers):
            raise UsageError(f"--header: {name} is set twice")
        if name.lower() in ("content-length", "transfer-encoding"):
            raise UsageError(f"--header: {name} must be that of the request, which gpumap sets")
        headers[name] = value.strip()
    return headers


def _authorized_headers(
    args: argparse.Namespace, headers: Mapping[str, str], user_and_password: tuple[str, str] | None, flag: str
) -> dict[str, str]:
    """Return the headers with the credentials. There are four ways to give them; only one may be used."""
    ways = {
        "--header 'Authorization: …'": any(name.lower() == "authorization" for name in headers),
        "--token-file": args.token_file is not None,
        "--user": args.user is not None,
        f"a user in {flag}'s URL": user_and_password is not None,
    }
    used = [way for way, is_used in ways.items() if is_used]
    if len(used) > 1:
        raise UsageError(f"{used[1]}: cannot be combined with {used[0]}")
    if args.password_file is not None and args.user is None:
        raise UsageError("--password-file requires --user")
    if args.token_file is not None:
        return {**headers, "Authorization": f"Bearer {_token(args.token_file)}"}
    if args.user is not None:
        user_and_password = _name(args.user), _password(args.password_file)
    if user_and_password is not None:
        encoded = base64.b64encode(":".join(user_and_password).encode()).decode()
        return {**headers, "Authorization": f"Basic {encoded}"}
    return dict(headers)


def _token(path: str) -> str:
    token = _read("--token-file", path).strip()
    if not token.isascii() or not token.isprintable() or " " in token or not token:
        raise UsageError(f"--token-file {path}: does not contain a token")
    return token


def _name(user: str) -> str:
    if not user or ":" in user or not user.isprintable():
        raise UsageError("--user: must be a name without a colon (the password belongs in --password-file)")
    return user


def _password(path: str | None) -> str:
    if path is None:
        raise UsageError("--user requires --password-file FILE")
    password = _read("--password-file", path).removesuffix("\n").removesuffix("\r")
    if not password or not password.isprintable():
        raise UsageError(f"--password-file {path}: does not contain a password in one line")
    return password


def _read(flag: str, path: str) -> str:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            # The shell's <(command) is a FIFO. One that no command writes to would block for ever.
            if stat.S_ISFIFO(os.fstat(file).st_mode) and not select.select([file], [], [], _FIFO_SECONDS)[0]:
                raise UsageError(f"{flag} {path}: is a FIFO, and no process wrote to it")
            return os.read(file, _SECRET_BYTES_MAX).decode()
        finally:
            os.close(file)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not text"
        raise UsageError(f"{flag} {path}: {reason}") from error


def _tls(args: argparse.Namespace, address: URL) -> ssl.SSLContext | None:
    used = [name for name in _SECURE if getattr(args, name) is not None]
    if not used:
        return None
    if address.scheme != "https":
        raise UsageError(f"--{used[0].replace('_', '-')} requires an https:// URL")
    for name in ("ca_file", "cert_file", "key_file"):
        if getattr(args, name) is not None:
            _refuse_unreadable(f"--{name.replace('_', '-')}", getattr(args, name))
    if args.server_name is not None and not is_host(args.server_name):
        raise UsageError(f"--server-name {args.server_name}: is not the name of a host")
    import ssl

    try:
        context = ssl.create_default_context(cafile=args.ca_file)
    except ssl.SSLError as error:
        raise UsageError(f"--ca-file {args.ca_file}: does not contain certificates in PEM format") from error
    if args.cert_file is not None:
        _show(context, args.cert_file, args.key_file)
    elif args.key_file is not None:
        raise UsageError("--key-file requires --cert-file")
    return context


def _refuse_unreadable(flag: str, path: str) -> None:
    """Raise UsageError for a file that OpenSSL cannot read, or would wait for."""
    try:
        if stat.S_ISFIFO(os.stat(path).st_mode):
            raise UsageError(f"{flag} {path}: is a FIFO; use a regular file")
        with open(path, "rb") as file:
            file.read(1)
    except (OSError, ValueError) as error:
        raise UsageError(f"{flag} {path}: {getattr(error, 'strerror', None) or 'is not a path'}") from error


def _show(context: ssl.SSLContext, certificate: str, key: str | None) -> None:
    """Load a client certificate into the context."""
    import ssl

    def refuse() -> str:
        raise UsageError(f"--key-file {key or certificate}: is encrypted; use a key without a password")

    try:
        context.load_cert_chain(certificate, key, password=refuse)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise UsageError(f"--key-file {key or certificate}: is not the key of {certificate}") from error
        where = f"--cert-file {certificate}" + (f" and --key-file {key}" if key else "")
        raise UsageError(f"{where}: do not contain a certificate and its key in PEM format") from error


# --- URLs -------------------------------------------------------------------------------------------------------------


def hide_password(url: str) -> str:
    """Return a URL for messages. Remove everything before the last @: the user and the password."""
    return re.sub(r"\A(\w+://)?.*@", r"\1", url, flags=re.DOTALL)


def url_of(args: argparse.Namespace) -> tuple[str, str]:
    """Return the flag or variable that names the agent to ask, and the URL; an empty one for this node."""
    if args.url is not None:
        return "--url", args.url
    return f"${URL_VARIABLE}", os.environ.get(URL_VARIABLE, "")


def address_of(flag: str, url: str) -> URL:
    """Return the URL of a flag. Raises UsageError."""
    from yarl import URL  # importing it takes long

    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{flag} {hide_password(url)}: must start with http:// or https://")
    reason = "is not a URL with the name or address of a host"
    try:
        address = URL(url)
        if is_host(address.raw_host):
            return address
    except ValueError as error:
        reason = str(error)
    if "@" in url:  # the reason may repeat a password
        reason = "is not a URL (in a password, write %2F for / and %40 for @)"
    raise UsageError(f"{flag} {hide_password(url)}: {reason}")
