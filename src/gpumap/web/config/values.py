"""What a web configuration says; nothing of it is read or checked here."""

from __future__ import annotations

from dataclasses import dataclass, field

REQUIRED = "RequireAndVerifyClientCert"
IF_GIVEN = "VerifyClientCertIfGiven"
NONE = "NoClientCert"


class WebConfigError(ValueError):
    """What is wrong with the configuration, in one line that holds no secret."""


@dataclass(frozen=True, slots=True)
class Pem:
    """Certificates or a key: in a file, whose path is as it was written, or else in the configuration itself."""

    key: str
    """The configuration's name for it, such as `tls_server_config.cert_file`."""
    file: str = ""
    text: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Tls:
    certificate: Pem
    private_key: Pem
    client_ca: Pem | None = None
    client_auth: str = NONE
    client_allowed_sans: tuple[str, ...] = ()
    min_version: str = "TLS12"
    max_version: str = "TLS13"
    cipher_suites: tuple[str, ...] = ()
    """By IANA's names; empty: those of this machine's OpenSSL."""
    prefer_server_cipher_suites: bool = True
    curve: str = ""
    """The only one for key exchange, by Go's name; empty: OpenSSL's choice."""

    @property
    def files(self) -> tuple[Pem, ...]:
        """Those that are read from files."""
        return tuple(one for one in (self.certificate, self.private_key, self.client_ca) if one and one.file)


@dataclass(frozen=True, slots=True)
class RateLimit:
    interval_seconds: float
    burst: int


@dataclass(frozen=True, slots=True)
class WebConfig:
    """`tls` is None for plain HTTP; without `users` nobody is asked for a password."""

    tls: Tls | None = None
    users: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Names and bcrypt hashes."""
    headers: tuple[tuple[str, str], ...] = ()
    rate_limit: RateLimit | None = None
