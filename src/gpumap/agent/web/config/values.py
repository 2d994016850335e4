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
    says_nothing: bool = False
    """No section has anything in it, not even `{}`: an empty file, and one of which only the beginning was written."""

    @property
    def asks(self) -> tuple[str, ...]:
        """What clients are asked for, or told, in words for the log."""
        tls = self.tls or Tls(Pem(""), Pem(""))
        asked = {
            "TLS": self.tls is not None,
            "TLS 1.3": tls.min_version == "TLS13",
            "cipher_suites": bool(tls.cipher_suites),
            "certificates of clients": tls.client_auth != NONE,
            "a certificate of each client": tls.client_auth == REQUIRED,
            "client_allowed_sans": bool(tls.client_allowed_sans),
            "basic_auth_users": bool(self.users),
            "rate_limit": self.rate_limit is not None,
        }
        return (*(name for name, is_asked in asked.items() if is_asked), *(name for name, _ in self.headers))
