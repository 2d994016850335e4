"""The format of a web configuration, and how its text becomes values. Other modules read the files that it names.
Pure.

Keys and defaults are exporter-toolkit's (web/tls_config.go, type Config and getConfig, July 2026). gpumap refuses what
Python's OpenSSL cannot do as Go does; it never applies a weaker rule than written. An error is one line that names the
key. It repeats no value, which may be a secret.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import yaml

from gpumap.model.text import cut_off, printable
from gpumap.model.units import parse_duration

REQUIRED = "RequireAndVerifyClientCert"
IF_GIVEN = "VerifyClientCertIfGiven"
NONE = "NoClientCert"
_UNVERIFIED = ("RequestClientCert", "RequireAnyClientCert", "RequireClientCert")
_VERSIONS = ("TLS12", "TLS13")
_CURVES = ("CurveP256", "CurveP384", "CurveP521", "X25519")
TLS12_SUITES = {
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA": "ECDHE-ECDSA-AES128-SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA": "ECDHE-ECDSA-AES256-SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA": "ECDHE-RSA-AES256-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
}
"""Go's crypto/tls.CipherSuites for TLS 1.2, with OpenSSL's names."""
TLS13_SUITES = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")
"""In Go, and so in the toolkit, these may be named and are always active."""
_BCRYPT = re.compile(r"\$2[aby]\$(\d\d)\$[./A-Za-z0-9]{21}[.Oeu][./A-Za-z0-9]{31}", re.ASCII)
_COSTS = range(4, 19)
"""bcrypt's minimum; and 18 takes about 15 s of CPU time, at each start of gpumap."""
_BOOLEANS = ("true", "false", "yes", "no", "on", "off")
_NULLS = ("", "~", "null", "Null", "NULL")
_QUOTED = re.compile(r"""(?<!\S)(['"])[^'"<]{2,}\1(?!\S)""")
_SHOWN_CHARACTERS = 200


CLIENT_AUTH, ALLOWED_SANS = "client_auth_type", "client_allowed_sans"
REMOVED_BY = {
    "tls_server_config": "write `tls_server_config: {}`",
    CLIENT_AUTH: f"write `{CLIENT_AUTH}: {NONE}`",
    ALLOWED_SANS: "restart gpumap",
    "basic_auth_users": "write `basic_auth_users: {}`",
    "http_server_config": "write `http_server_config: {}`",
    "rate_limit": "write `rate_limit: {}`",
}
"""How a running gpumap learns that something is removed, and not cut off."""


class WebConfigError(ValueError):
    """The error of the configuration, in one line without secrets."""


class Pem(NamedTuple):
    """Certificates or a key: in a file, with its path as written, or in the configuration itself."""

    key: str
    """Its name in the configuration, such as `tls_server_config.cert_file`."""
    file: str = ""
    text: str = ""

    @property
    def place(self) -> str:
        return f"{self.key} {self.file}" if self.file else self.key


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the file. YAML's null is `None`; every other scalar is a text, as it is written."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(…)"  # it may contain a key


class TlsConfig(_Section, frozen=True):
    cert: str | None = None
    key: str | None = None
    client_ca: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    client_ca_file: str | None = None
    client_auth_type: str | None = None
    client_allowed_sans: tuple[str, ...] | None = None
    min_version: str | None = None
    max_version: str | None = None
    cipher_suites: tuple[str, ...] | None = None
    """By IANA's names; empty: those of this machine's OpenSSL."""
    prefer_server_cipher_suites: str | None = None
    curve_preferences: tuple[str, ...] | None = None
    """One, by Go's name; empty: OpenSSL's choice."""

    def __post_init__(self) -> None:
        """Check the keys together. If one of them is set, the user wants TLS: the toolkit would serve without it."""
        _check_boolean("prefer_server_cipher_suites", self.prefer_server_cipher_suites)  # unused, as in Go since 1.17
        if _pem("cert", self.cert, self.cert_file) is None:
            raise WebConfigError("cert_file: is missing; TLS requires cert_file or cert")
        if _pem("key", self.key, self.key_file) is None:
            raise WebConfigError("key_file: is missing; TLS requires key_file or key")
        self._check_clients()
        _check_version("min_version", self.least)
        _check_version("max_version", self.most)
        if self.least > self.most:
            raise WebConfigError("min_version: is above max_version")
        suites = self.cipher_suites or ()
        if any(name not in TLS12_SUITES and name not in TLS13_SUITES for name in suites):
            known = ", ".join((*TLS12_SUITES, *TLS13_SUITES))
            raise WebConfigError(f"cipher_suites: has an unknown value; valid values: {known}")
        if suites and self.most == "TLS12" and not any(name in TLS12_SUITES for name in suites):
            raise WebConfigError("cipher_suites: has no suite of TLS12, but max_version is TLS12")
        curves = self.curve_preferences or ()
        if any(curve not in _CURVES for curve in curves):
            raise WebConfigError(f"curve_preferences: has an unknown value; valid values: {', '.join(_CURVES)}")
        if len(curves) > 1:
            raise WebConfigError(
                "curve_preferences: must be one curve, or absent: Python's OpenSSL accepts no ordered list"
            )

    def _check_clients(self) -> None:
        policy, authority = self.client_auth, _pem("client_ca", self.client_ca, self.client_ca_file)
        if policy in _UNVERIFIED:
            raise WebConfigError(
                f"client_auth_type: {policy} does not verify certificates, and gpumap does not support that; use "
                f"{REQUIRED}"
            )
        if policy not in (NONE, IF_GIVEN, REQUIRED):
            raise WebConfigError(f"client_auth_type: must be {NONE}, {IF_GIVEN} or {REQUIRED}")
        if authority is None and policy != NONE:
            raise WebConfigError(f"client_ca_file: is missing: {policy} requires it")
        if authority is not None and policy == NONE:
            raise WebConfigError(f"client_auth_type: is missing: client_ca_file requires {REQUIRED}")
        names = self.client_allowed_sans
        if names is not None and not all(names or ("",)):
            raise WebConfigError("client_allowed_sans: has no name or an empty name; remove it to accept any client")
        if names and policy == NONE:
            raise WebConfigError(f"client_allowed_sans: requires client_auth_type {REQUIRED}")

    @property
    def certificate(self) -> Pem:
        return _pem("cert", self.cert, self.cert_file) or Pem("")

    @property
    def private_key(self) -> Pem:
        return _pem("key", self.key, self.key_file) or Pem("")

    @property
    def authorities(self) -> Pem | None:
        return _pem("client_ca", self.client_ca, self.client_ca_file)

    @property
    def files(self) -> tuple[Pem, ...]:
        """Return those that are read from files."""
        return tuple(one for one in (self.certificate, self.private_key, self.authorities) if one and one.file)

    @property
    def client_auth(self) -> str:
        return self.client_auth_type or NONE

    @property
    def least(self) -> str:
        return self.min_version or "TLS12"

    @property
    def most(self) -> str:
        return self.max_version or "TLS13"


class _Headers(_Section, frozen=True):
    """Headers that may be set (web/handler.go, extraHTTPHeaders)."""

    content_security_policy: str | None = msgspec.field(name="Content-Security-Policy", default=None)
    strict_transport_security: str | None = msgspec.field(name="Strict-Transport-Security", default=None)
    x_content_type_options: str | None = msgspec.field(name="X-Content-Type-Options", default=None)
    x_frame_options: str | None = msgspec.field(name="X-Frame-Options", default=None)
    x_xss_protection: str | None = msgspec.field(name="X-XSS-Protection", default=None)

    def __post_init__(self) -> None:
        if self.x_content_type_options not in (None, "", "nosniff"):
            raise WebConfigError("X-Content-Type-Options: must be nosniff")
        if self.x_frame_options not in (None, "", "deny", "sameorigin"):
            raise WebConfigError("X-Frame-Options: must be deny or sameorigin")
        for name, value in self.given():
            if not value.isascii() or not value.isprintable():
                raise WebConfigError(f"{name}: must be printable ASCII")

    def given(self) -> tuple[tuple[str, str], ...]:
        """Names and values. An empty value sets no header."""
        values = {one.encode_name: getattr(self, one.name) for one in msgspec.structs.fields(self)}
        return tuple((name, value) for name, value in values.items() if value)


class _Http(_Section, frozen=True):
    http2: str | None = None
    headers: _Headers | None = None

    def __post_init__(self) -> None:
        _check_boolean("http2", self.http2)  # gpumap speaks only HTTP/1.1, which every client of HTTP/2 also does


class RateLimit(NamedTuple):
    interval_seconds: float
    burst: int


class _RateLimit(_Section, frozen=True):
    interval: str | None = None
    burst: str | None = None

    def __post_init__(self) -> None:
        self.limit()

    def limit(self) -> RateLimit | None:
        """`None` if the interval is 0: gpumap accepts every request."""
        interval, burst = self.interval or "0", self.burst or "0"
        if not re.fullmatch(r"\d{1,9}", burst, re.ASCII):
            raise WebConfigError("burst: must be a whole number of at least 0")
        if re.fullmatch(r"0+(ns|us|ms|s|m|h)?", interval, re.ASCII):
            return None
        try:
            seconds = parse_duration(interval)
        except ValueError as error:
            raise WebConfigError("interval: must be a duration such as 100ms or 1s") from error
        if int(burst) == 0:
            raise WebConfigError("burst: must not be 0: gpumap would refuse every request")
        return RateLimit(seconds, int(burst))


class _File(_Section, frozen=True):
    tls_server_config: TlsConfig | None = None
    http_server_config: _Http | None = None
    basic_auth_users: dict[str, object] | None = None
    rate_limit: _RateLimit | None = None


@dataclass(frozen=True, slots=True)
class WebConfig:
    """`tls` is None for plain HTTP. Without `users` no password is required."""

    tls: TlsConfig | None = None
    users: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Names and bcrypt hashes."""
    headers: tuple[tuple[str, str], ...] = ()
    rate_limit: RateLimit | None = None
    mentions: frozenset[str] = field(default=frozenset(), compare=False)
    """The sections that have any content, also `{}`, and the keys of `REMOVED_BY` that are set."""

    def leaves_out(self, before: WebConfig) -> str | None:
        """Return what `before` required and this one does not even mention, if anything: the file may be cut off."""
        tls = before.tls if self.tls is not None else None
        verifies = self.tls is not None and self.tls.client_auth != NONE
        required = {
            "tls_server_config": before.tls is not None,
            CLIENT_AUTH: tls is not None and tls.client_auth != NONE,
            ALLOWED_SANS: verifies and tls is not None and bool(tls.client_allowed_sans),
            "basic_auth_users": bool(before.users),
            "http_server_config": bool(before.headers),
            "rate_limit": before.rate_limit is not None,
        }
        return next((key for key, is_required in required.items() if is_required and key not in self.mentions), None)

    @property
    def asks(self) -> tuple[str, ...]:
        """Return what clients must send, or get, in words for the log."""
        tls = self.tls
        asked = {
            "TLS": tls is not None,
            "TLS 1.3": tls is not None and tls.least == "TLS13",
            "cipher_suites": tls is not None and bool(tls.cipher_suites),
            "certificates of clients": tls is not None and tls.client_auth != NONE,
            "a certificate of each client": tls is not None and tls.client_auth == REQUIRED,
            "client_allowed_sans": tls is not None and bool(tls.client_allowed_sans),
            "basic_auth_users": bool(self.users),
            "rate_limit": self.rate_limit is not None,
        }
        return (*(name for name, is_asked in asked.items() if is_asked), *(name for name, _ in self.headers))


def parse(text: str) -> WebConfig:
    """Read the configuration. Raises WebConfigError."""
    document = _load(text)
    sections = document if isinstance(document, dict) else {}
    mentions = {section for section, content in sections.items() if content is not None}
    if sections.get("tls_server_config") == {}:
        sections["tls_server_config"] = None  # it sets nothing
    try:
        file = msgspec.convert({} if document is None else document, _File)
    except msgspec.ValidationError as error:
        raise _mistake(error) from error
    headers = file.http_server_config.headers if file.http_server_config else None
    tls = file.tls_server_config
    mentions |= {key for key in (CLIENT_AUTH, ALLOWED_SANS) if tls is not None and getattr(tls, key) is not None}
    return WebConfig(
        tls=tls,
        users=_users(file.basic_auth_users or {}),
        headers=headers.given() if headers else (),
        rate_limit=file.rate_limit.limit() if file.rate_limit else None,
        mentions=frozenset(mentions),
    )


def _mistake(error: msgspec.ValidationError) -> WebConfigError:
    """Return one line of msgspec's or gpumap's words, after their key."""
    why, _, path = str(error).partition(" - at `")
    path = re.sub(r"[`$]\.?", "", path)
    if isinstance(error.__cause__, WebConfigError):
        line = f"{path}.{error.__cause__}"
    else:
        line = f"{path or 'the file'}: {why}"
    return WebConfigError(cut_off(printable(line), 4 * _SHOWN_CHARACTERS))


def _pem(name: str, text: str | None, file: str | None) -> Pem | None:
    """Return the content, which may be in the configuration or in a file that it names, not in both."""
    if text and file:
        raise WebConfigError(f"{name}: cannot be combined with {name}_file")
    if text:
        return Pem(f"tls_server_config.{name}", text=text)
    if not file:
        return None
    if file.lstrip().startswith("-----BEGIN"):
        raise WebConfigError(f"{name}_file: is the content, not a path; use {name} for it")
    if not file.isprintable():
        raise WebConfigError(f"{name}_file: is not a path")
    return Pem(f"tls_server_config.{name}_file", file=file)


def _check_version(key: str, version: str) -> None:
    if version in ("TLS10", "TLS11"):
        raise WebConfigError(f"{key}: gpumap does not support {version}; the oldest version is TLS12")
    if version not in _VERSIONS:
        raise WebConfigError(f"{key}: must be {' or '.join(_VERSIONS)}")


def _check_boolean(key: str, value: str | None) -> None:
    if value is not None and value.lower() not in _BOOLEANS:
        raise WebConfigError(f"{key}: must be true or false")


def _users(users: dict[str, object]) -> tuple[tuple[str, str], ...]:
    found = []
    for name, hashed in users.items():
        place = f"basic_auth_users.{cut_off(printable(name), _SHOWN_CHARACTERS)}"
        match = _BCRYPT.fullmatch(hashed) if isinstance(hashed, str) else None
        if match is None:
            raise WebConfigError(f"{place}: must be a bcrypt hash (`htpasswd -nBC 10 NAME` makes one)")
        if int(match[1]) not in _COSTS:
            raise WebConfigError(f"{place}: has a cost of {int(match[1])}; it must be from {_COSTS[0]} to {_COSTS[-1]}")
        if not name or ":" in name or not name.isprintable():
            raise WebConfigError(f"{place}: is not a user name (not empty, without colons and control characters)")
        found.append((name, match[0]))
    return tuple(found)


# --- YAML -------------------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Scalars stay the written text, whatever their tag: a number may be a name. Only null is no text."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        if not isinstance(node, yaml.ScalarNode):
            return super().construct_object(node, deep)
        if any(
            "\ud800" <= character <= "\udfff" for character in node.value
        ):  # YAML's escapes can make halves of a character
            raise WebConfigError(f"line {node.start_mark.line + 1}: has an invalid character")
        return None if not node.style and node.value in _NULLS else str(node.value)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        keys: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode):
                if key.value in keys:
                    name = cut_off(printable(key.value), _SHOWN_CHARACTERS)
                    raise WebConfigError(f"line {key.start_mark.line + 1}: {name}: is set twice")
                keys.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {}


def _load(text: str) -> object:
    """Return the single document of a text; None if it is empty. Raises WebConfigError."""
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 # it is a SafeLoader
    except WebConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}: " if mark else ""
        # The problem quotes characters, kinds of tokens and names, which may be passwords: a * begins an alias.
        problem = _QUOTED.sub("(not shown)", printable(error.problem or "it ends too early"))
        raise WebConfigError(f"{place}is not YAML: {problem}") from error
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        is_deep = isinstance(error, RecursionError)
        why = "it has too many nested levels" if is_deep else printable(str(error).partition("\n")[0])
        raise WebConfigError(f"is not YAML: {why}") from error
