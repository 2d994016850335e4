"""The file of `--web-config`, which is a part of exporter-toolkit's web-config.yml, and the TLS context that follows.

Keys and defaults are the toolkit's (web/tls_config.go, type Config and getConfig, July 2026). gpumap refuses the other
keys, and never applies a weaker rule than written. An error is one line that names the key. It repeats no value, which
may be a secret.
"""

from __future__ import annotations

import os
import re
import ssl
import stat
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import yaml

from gpumap.agent.executors import open_at_once
from gpumap.model.formatting import cut_off, printable

REQUIRED, IF_GIVEN, NONE = "RequireAndVerifyClientCert", "VerifyClientCertIfGiven", "NoClientCert"
_TLS, _CLIENT_AUTH, _USERS = "tls_server_config", "client_auth_type", "basic_auth_users"
_PEM_KINDS = {"cert_file": "CERTIFICATE", "key_file": "PRIVATE KEY", "client_ca_file": "CERTIFICATE"}
_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_BCRYPT = re.compile(r"\$2[aby]\$(\d\d)\$[./A-Za-z0-9]{21}[.Oeu][./A-Za-z0-9]{31}", re.ASCII)
_COSTS = range(4, 19)
"""bcrypt's minimum; and 18 takes about 15 s of CPU time, at each start of gpumap."""
_NULLS = ("", "~", "null", "Null", "NULL")
_SHOWN_CHARACTERS = 200
_TEXT_BYTES = 1 << 16
"""YAML of this size takes a second of CPU time."""
_PEM_BYTES = 1 << 20


class WebConfigError(ValueError):
    """The error of the configuration, in one line without secrets."""


class TlsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Paths are as written."""

    cert_file: str = ""
    key_file: str = ""
    client_ca_file: str = ""
    client_auth_type: str = NONE
    min_version: str = "TLS12"
    max_version: str = "TLS13"

    def __post_init__(self) -> None:
        """Check the keys together. If one of them is set, the user wants TLS: the toolkit would serve without it."""
        for key in _PEM_KINDS:
            path = getattr(self, key)
            if not path.isprintable() or path.startswith("-----BEGIN"):
                raise WebConfigError(f"{key}: must be a path")
        for key in ("cert_file", "key_file"):
            if not getattr(self, key):
                raise WebConfigError(f"{key}: is missing; TLS requires it")
        if self.client_auth_type not in (NONE, IF_GIVEN, REQUIRED):
            raise WebConfigError(
                f"{_CLIENT_AUTH}: must be {NONE}, or {IF_GIVEN} or {REQUIRED}, which verify certificates"
            )
        if self.client_auth_type != NONE and not self.client_ca_file:
            raise WebConfigError(f"client_ca_file: is missing: {self.client_auth_type} requires it")
        if self.client_auth_type == NONE and self.client_ca_file:
            raise WebConfigError(f"{_CLIENT_AUTH}: is missing: client_ca_file requires {REQUIRED}")
        for key in ("min_version", "max_version"):
            if getattr(self, key) not in _VERSIONS:
                raise WebConfigError(f"{key}: must be {' or '.join(_VERSIONS)}")
        if self.min_version > self.max_version:
            raise WebConfigError("min_version: is above max_version")

    def place(self, key: str) -> str:
        """Return a file in words, for an error."""
        return f"{_TLS}.{key} {cut_off(getattr(self, key), _SHOWN_CHARACTERS)}"


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tls_server_config: TlsConfig | None = None
    basic_auth_users: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class WebConfig:
    """`tls` is None for plain HTTP. Without `users` no password is required."""

    tls: TlsConfig | None = None
    users: dict[str, str] = field(default_factory=dict, repr=False)
    """Names and bcrypt hashes."""
    mentions: frozenset[str] = field(default=frozenset(), compare=False)
    """The sections that have any content, also `{}`, and `client_auth_type` if it is set."""

    def check_complete(self, active: WebConfig) -> None:
        """Raise WebConfigError if something that is active is not even mentioned: the file may be cut off."""
        clients = self.tls is not None and active.tls is not None and active.tls.client_auth_type != NONE
        for key, is_required, removal in (
            (_TLS, active.tls is not None, "{}"),
            (_CLIENT_AUTH, clients, NONE),
            (_USERS, bool(active.users), "{}"),
        ):
            if is_required and key not in self.mentions:
                raise WebConfigError(f"{key}: is missing, perhaps cut off; to remove it, write `{key}: {removal}`")

    def words(self) -> str:
        """Return what clients need, for the log."""
        policy = {REQUIRED: "required", IF_GIVEN: "if_given"}.get(self.tls.client_auth_type if self.tls else "", "no")
        return f"tls={'yes' if self.tls else 'no'} client_certificates={policy} users={len(self.users)}"


def parse(data: bytes) -> WebConfig:
    """Raises WebConfigError."""
    document = _load_yaml(data) or {}
    if not isinstance(document, dict):
        raise WebConfigError("the file: must have keys and values")
    sections = {key: content for key, content in document.items() if content not in _NULLS}
    mentions = frozenset(sections)
    if isinstance(tls := sections.get(_TLS), dict):
        tls = {key: value for key, value in tls.items() if value not in _NULLS}
        mentions |= {_CLIENT_AUTH} & tls.keys()
        sections[_TLS] = tls or None
    try:
        file = msgspec.convert(sections, _File)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `")
        path = re.sub(r"[`$]\.?", "", path)
        line = f"{path}.{reason}" if isinstance(error.__cause__, WebConfigError) else f"{path or 'the file'}: {reason}"
        raise WebConfigError(cut_off(printable(line), 4 * _SHOWN_CHARACTERS)) from error
    for name, hashed in file.basic_auth_users.items():
        _check_user(name, hashed)
    return WebConfig(file.tls_server_config, file.basic_auth_users, mentions)


def _check_user(name: str, hashed: str) -> None:
    if not name or ":" in name or not name.isprintable():
        raise WebConfigError(f"{_USERS}: a user name is empty, or has a colon or a control character")
    place = f"{_USERS}.{cut_off(name, _SHOWN_CHARACTERS)}"
    match = _BCRYPT.fullmatch(hashed)
    if match is None:
        raise WebConfigError(f"{place}: must be a bcrypt hash (`htpasswd -nBC 10 NAME` makes one)")
    if int(match[1]) not in _COSTS:
        raise WebConfigError(f"{place}: has a cost of {int(match[1])}; it must be from {_COSTS[0]} to {_COSTS[-1]}")


class _Loader(yaml.BaseLoader):
    """Each scalar stays the written text: a number may be a name. No key may be set twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in keys:
                    name = cut_off(printable(key.value), _SHOWN_CHARACTERS)
                    raise WebConfigError(f"line {key.start_mark.line + 1}: {name}: is set twice")
                keys.add(key.value)
        return super().construct_mapping(node, deep=True)


def _load_yaml(data: bytes) -> object:
    """Return the single document. An error does not say what it found, which may be a password."""
    try:
        return yaml.load(data.decode(), Loader=_Loader)  # noqa: S506 # its values are text, lists and mappings
    except UnicodeDecodeError as error:
        raise WebConfigError("is not text in UTF-8") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise WebConfigError(f"line {mark.line + 1}: is not YAML" if mark else "is not YAML") from error
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, WebConfigError):
            raise
        raise WebConfigError("is not YAML") from error


# --- files ------------------------------------------------------------------------------------------------------------


def read_text(path: Path) -> bytes:
    """Return the bytes of the configuration. Raises WebConfigError."""
    return _read_file(path, _TEXT_BYTES)


def read_pems(tls: TlsConfig, folder: Path) -> dict[str, bytes]:
    """Return the bytes of the files, by key. Paths are relative to `folder`. Raises WebConfigError."""
    pems = {}
    for key, kind in _PEM_KINDS.items():
        if path := getattr(tls, key):
            try:
                pems[key] = _read_file(folder / path, _PEM_BYTES)
            except WebConfigError as error:
                raise WebConfigError(f"{tls.place(key)}: {error}") from error
            if not re.search(rf"-----BEGIN [A-Z ]*{kind}-----".encode(), pems[key]):
                raise WebConfigError(f"{tls.place(key)}: contains no {kind.lower()} in PEM format")
    return pems


def _read_file(path: Path, max_bytes: int) -> bytes:
    """Read a regular file. Raises WebConfigError. Never waits: a pipe without a writer would block."""
    try:
        with open_at_once(path) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise WebConfigError("is not a file")
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise WebConfigError(error.strerror or type(error).__name__) from error
    if len(data) > max_bytes:
        raise WebConfigError(f"is larger than {max_bytes >> 10} KiB")
    return data


def make_context(tls: TlsConfig, folder: Path) -> ssl.SSLContext:
    """Make a new context after `read_pems`: a context never drops an authority. Raises WebConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version, context.maximum_version = _VERSIONS[tls.min_version], _VERSIONS[tls.max_version]
    context.set_alpn_protocols(["http/1.1"])
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    certificate, key = tls.place("cert_file"), tls.place("key_file")

    def refuse() -> str:
        raise WebConfigError(f"{key}: is encrypted; use a key without a password")

    try:
        context.load_cert_chain(folder / tls.cert_file, folder / tls.key_file, password=refuse)
    except OSError as error:
        reason = str(getattr(error, "reason", None) or error.strerror or "OpenSSL cannot read it")
        if reason == "KEY_VALUES_MISMATCH":
            raise WebConfigError(f"{key}: is not the key of {certificate}") from error
        raise WebConfigError(f"{certificate} and {key}: are not usable: {reason.lower().replace('_', ' ')}") from error
    if tls.client_auth_type != NONE:
        # Optional also if a certificate is required: probes have none. A client without one is refused at other pages.
        # An invalid certificate ends the handshake in any case.
        context.verify_mode = ssl.CERT_OPTIONAL
        # As in Go, each certificate in the file is trusted by itself, also an intermediate authority.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        try:
            context.load_verify_locations(cafile=folder / tls.client_ca_file)
        except OSError as error:
            raise WebConfigError(f"{tls.place('client_ca_file')}: is not usable") from error
        # A resumed session verifies nothing: an authority may have expired since then.
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET
    return context
