"""The format of a web configuration, and how its text becomes values. Other modules read the files that it names.
Pure.

Keys and defaults are exporter-toolkit's (web/tls_config.go, type Config and getConfig, July 2026). gpumap knows a
part of them and refuses the others; it never applies a weaker rule than written. An error is one line that names the
key. It repeats no value, which may be a secret.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass, field

import msgspec
import yaml

from gpumap.model.shown import cut_off, printable

REQUIRED = "RequireAndVerifyClientCert"
IF_GIVEN = "VerifyClientCertIfGiven"
NONE = "NoClientCert"
_UNVERIFIED = ("RequestClientCert", "RequireAnyClientCert", "RequireClientCert")
_VERSIONS = ("TLS12", "TLS13")
_BCRYPT = re.compile(r"\$2[aby]\$(\d\d)\$[./A-Za-z0-9]{21}[.Oeu][./A-Za-z0-9]{31}", re.ASCII)
_COSTS = range(4, 19)
"""bcrypt's minimum; and 18 takes about 15 s of CPU time, at each start of gpumap."""
_NULLS = ("", "~", "null", "Null", "NULL")
_QUOTED = re.compile(r"""(?<!\S)(['"])[^'"<]{2,}\1(?!\S)""")
_SHOWN_CHARACTERS = 200
PEM_KEYS = CERTIFICATE, PRIVATE_KEY, AUTHORITIES = "cert_file", "key_file", "client_ca_file"
CLIENT_AUTH = "client_auth_type"
REMOVED_BY = {
    "tls_server_config": "write `tls_server_config: {}`",
    CLIENT_AUTH: f"write `{CLIENT_AUTH}: {NONE}`",
    "basic_auth_users": "write `basic_auth_users: {}`",
}
"""How a running gpumap learns that something is removed, and not cut off."""


class WebConfigError(ValueError):
    """The error of the configuration, in one line without secrets."""


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the file. YAML's null is `None`; every other scalar is a text, as it is written."""


class TlsConfig(_Section, frozen=True):
    """Paths are as written."""

    cert_file: str | None = None
    key_file: str | None = None
    client_ca_file: str | None = None
    client_auth_type: str | None = None
    min_version: str | None = None
    max_version: str | None = None

    def __post_init__(self) -> None:
        """Check the keys together. If one of them is set, the user wants TLS: the toolkit would serve without it."""
        for key in PEM_KEYS:
            path = getattr(self, key) or ""
            if path.lstrip().startswith("-----BEGIN"):
                raise WebConfigError(f"{key}: is the content, not a path")
            if not path.isprintable():
                raise WebConfigError(f"{key}: is not a path")
            if not path and key != AUTHORITIES:
                raise WebConfigError(f"{key}: is missing; TLS requires it")
        self._check_clients()
        _check_version("min_version", self.least)
        _check_version("max_version", self.most)
        if self.least > self.most:
            raise WebConfigError("min_version: is above max_version")

    def _check_clients(self) -> None:
        policy = self.client_auth
        if policy in _UNVERIFIED:
            raise WebConfigError(
                f"client_auth_type: {policy} does not verify certificates, and gpumap does not support that; use "
                f"{REQUIRED}"
            )
        if policy not in (NONE, IF_GIVEN, REQUIRED):
            raise WebConfigError(f"client_auth_type: must be {NONE}, {IF_GIVEN} or {REQUIRED}")
        if not self.client_ca_file and policy != NONE:
            raise WebConfigError(f"client_ca_file: is missing: {policy} requires it")
        if self.client_ca_file and policy == NONE:
            raise WebConfigError(f"client_auth_type: is missing: client_ca_file requires {REQUIRED}")

    @property
    def files(self) -> dict[str, str]:
        """Return the path of each file, by key."""
        return {key: path for key in PEM_KEYS if (path := getattr(self, key))}

    def place(self, key: str) -> str:
        """Return a file in words, for an error."""
        return f"tls_server_config.{key} {cut_off(printable(self.files[key]), _SHOWN_CHARACTERS)}"

    @property
    def client_auth(self) -> str:
        return self.client_auth_type or NONE

    @property
    def least(self) -> str:
        return self.min_version or "TLS12"

    @property
    def most(self) -> str:
        return self.max_version or "TLS13"


class _File(_Section, frozen=True):
    tls_server_config: TlsConfig | None = None
    basic_auth_users: dict[str, object] | None = None


@dataclass(frozen=True, slots=True)
class WebConfig:
    """`tls` is None for plain HTTP. Without `users` no password is required."""

    tls: TlsConfig | None = None
    users: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Names and bcrypt hashes."""
    mentions: frozenset[str] = field(default=frozenset(), compare=False)
    """The sections that have any content, also `{}`, and the keys of `REMOVED_BY` that are set."""

    def leaves_out(self, before: WebConfig) -> str | None:
        """Return what `before` required and this one does not even mention, if anything: the file may be cut off."""
        required = {
            "tls_server_config": before.tls is not None,
            CLIENT_AUTH: self.tls is not None and before.tls is not None and before.tls.client_auth != NONE,
            "basic_auth_users": bool(before.users),
        }
        return next((key for key, is_required in required.items() if is_required and key not in self.mentions), None)

    @property
    def asks(self) -> tuple[str, ...]:
        """Return what clients must send, in words for the log."""
        tls = self.tls
        asked = {
            "TLS": tls is not None,
            "TLS 1.3": tls is not None and tls.least == "TLS13",
            "certificates of clients": tls is not None and tls.client_auth != NONE,
            "a certificate of each client": tls is not None and tls.client_auth == REQUIRED,
            "basic_auth_users": bool(self.users),
        }
        return tuple(name for name, is_asked in asked.items() if is_asked)


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
    tls = file.tls_server_config
    if tls is not None and tls.client_auth_type is not None:
        mentions.add(CLIENT_AUTH)
    return WebConfig(tls, _users(file.basic_auth_users or {}), frozenset(mentions))


def _mistake(error: msgspec.ValidationError) -> WebConfigError:
    """Return one line of msgspec's or gpumap's words, after their key."""
    why, _, path = str(error).partition(" - at `")
    path = re.sub(r"[`$]\.?", "", path)
    if isinstance(error.__cause__, WebConfigError):
        line = f"{path}.{error.__cause__}"
    else:
        line = f"{path or 'the file'}: {why}"
    return WebConfigError(cut_off(printable(line), 4 * _SHOWN_CHARACTERS))


def _check_version(key: str, version: str) -> None:
    if version in ("TLS10", "TLS11"):
        raise WebConfigError(f"{key}: gpumap does not support {version}; the oldest version is TLS12")
    if version not in _VERSIONS:
        raise WebConfigError(f"{key}: must be {' or '.join(_VERSIONS)}")


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
        # YAML's escapes can make halves of a character.
        if any("\ud800" <= character <= "\udfff" for character in node.value):
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
