"""A web configuration's text to values. Pure: files that it names are read elsewhere.

Keys and defaults are exporter-toolkit's (web/tls_config.go, type Config and getConfig, July 2026). What OpenSSL by way
of Python cannot do as Go does is refused; nothing is taken in a weaker sense than it was written.
"""

from __future__ import annotations

import re

from gpumap.agent.web.config.values import IF_GIVEN, NONE, REQUIRED, Pem, RateLimit, Tls, WebConfig
from gpumap.agent.web.config.yaml_nodes import Section, compose
from gpumap.model.units import parse_duration

_TOP = ("tls_server_config", "http_server_config", "basic_auth_users", "rate_limit")
_TLS = (
    "cert",
    "key",
    "client_ca",
    "cert_file",
    "key_file",
    "client_auth_type",
    "client_ca_file",
    "client_allowed_sans",
    "min_version",
    "max_version",
    "cipher_suites",
    "prefer_server_cipher_suites",
    "curve_preferences",
)
_VERSIONS = ("TLS12", "TLS13")
_CURVES = ("CurveP256", "CurveP384", "CurveP521", "X25519")
_HEADERS: dict[str, tuple[str, ...]] = {
    "Content-Security-Policy": (),
    "Strict-Transport-Security": (),
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": (),
}
"""Those that may be set, and to what alone (web/handler.go, extraHTTPHeaders)."""
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
"""In Go, and so in the toolkit, these may be named and are always spoken."""
_BCRYPT = re.compile(r"\$2[aby]\$(\d\d)\$[./A-Za-z0-9]{21}[.Oeu][./A-Za-z0-9]{31}", re.ASCII)
_COSTS = range(4, 19)
"""bcrypt's least; and 18 takes some 15 s of CPU time, which is asked for each time gpumap starts."""


def parse(text: str) -> WebConfig:
    """Raises WebConfigError."""
    top = Section(compose(text), "", _TOP)
    return WebConfig(
        tls=_tls(top.section("tls_server_config", _TLS)),
        users=_users(top.section("basic_auth_users", None)),
        headers=_headers(top.section("http_server_config", ("http2", "headers"))),
        rate_limit=_rate_limit(top.section("rate_limit", ("interval", "burst"))),
        says_nothing=not any(map(top.has, _TOP)),
    )


def _tls(section: Section) -> Tls | None:
    """None where nothing is said of it. Whoever says anything of TLS wants it: the toolkit would serve without."""
    if not section:
        return None
    section.boolean("prefer_server_cipher_suites", default=True)  # not heeded, as in Go since 1.17
    certificate, key = _pem(section, "cert"), _pem(section, "key")
    if certificate is None:
        raise section.wrong("cert_file", "is missing, as is cert: with neither there is no TLS")
    if key is None:
        raise section.wrong("key_file", "is missing, as is key: with neither there is no TLS")
    authority, policy = _pem(section, "client_ca"), _client_auth(section)
    if authority is None and policy != NONE:
        raise section.wrong("client_ca_file", f"is missing: {policy} needs an authority to ask")
    if authority is not None and policy == NONE:
        raise section.wrong(
            "client_auth_type", "is missing: with client_ca_file it is to be RequireAndVerifyClientCert"
        )
    names = section.words("client_allowed_sans")
    if section.has("client_allowed_sans") and not all(names or ("",)):
        raise section.wrong("client_allowed_sans", "has no name, or an empty one: leave it out to let in any client")
    if names and policy == NONE:
        raise section.wrong("client_allowed_sans", "is of use with client_auth_type RequireAndVerifyClientCert")
    least, most = _version(section, "min_version", "TLS12"), _version(section, "max_version", "TLS13")
    if least > most:
        raise section.wrong("min_version", "is above max_version")
    return Tls(
        certificate=certificate,
        private_key=key,
        client_ca=authority,
        client_auth=policy,
        client_allowed_sans=names,
        min_version=least,
        max_version=most,
        cipher_suites=_suites(section, most),
        curve=_curve(section),
    )


def _pem(section: Section, name: str) -> Pem | None:
    """What may stand in the configuration, or in a file that it names: in one of both."""
    inline, file = section.text(name), section.text(f"{name}_file")
    if inline and file:
        raise section.wrong(name, f"cannot stand together with {name}_file")
    if file.lstrip().startswith("-----BEGIN"):
        raise section.wrong(f"{name}_file", f"is no path, but what belongs to {name}")
    if not file.isprintable():
        raise section.wrong(f"{name}_file", "is no path")
    if inline:
        return Pem(f"{section.place}.{name}", text=inline)
    return Pem(f"{section.place}.{name}_file", file=file) if file else None


def _client_auth(section: Section) -> str:
    policy = section.text("client_auth_type") or NONE
    if policy in ("RequestClientCert", "RequireAnyClientCert", "RequireClientCert"):
        raise section.wrong(
            "client_auth_type",
            f"{policy} takes certificates without verifying them, which gpumap does not: {REQUIRED}?",
        )
    if policy not in (NONE, IF_GIVEN, REQUIRED):
        raise section.wrong("client_auth_type", f"is not {NONE}, {IF_GIVEN} or {REQUIRED}")
    return policy


def _version(section: Section, key: str, default: str) -> str:
    version = section.text(key) or default
    if version in ("TLS10", "TLS11"):
        raise section.wrong(key, f"{version} is not spoken: the oldest is TLS12")
    if version not in _VERSIONS:
        raise section.wrong(key, f"is not {' or '.join(_VERSIONS)}")
    return version


def _suites(section: Section, max_version: str) -> tuple[str, ...]:
    names = section.words("cipher_suites")
    if any(name not in TLS12_SUITES and name not in TLS13_SUITES for name in names):
        known = ", ".join((*TLS12_SUITES, *TLS13_SUITES))
        raise section.wrong("cipher_suites", f"has one that is not known; known are {known}")
    if names and max_version == "TLS12" and not any(name in TLS12_SUITES for name in names):
        raise section.wrong("cipher_suites", "has none of TLS12, which max_version asks for")
    return names


def _curve(section: Section) -> str:
    curves = section.words("curve_preferences")
    if any(curve not in _CURVES for curve in curves):
        raise section.wrong("curve_preferences", f"has one that is not known; known are {', '.join(_CURVES)}")
    if len(curves) > 1:
        raise section.wrong(
            "curve_preferences", "can be one curve here, or be left out: Python's OpenSSL takes no list with an order"
        )
    return curves[0] if curves else ""


def _users(section: Section) -> tuple[tuple[str, str], ...]:
    users = tuple(section.entries())
    for name, hashed in users:
        found = _BCRYPT.fullmatch(hashed)
        if found is None:
            raise section.wrong(name, "is no bcrypt hash (`htpasswd -nBC 10 NAME` makes one)")
        if int(found[1]) not in _COSTS:
            raise section.wrong(name, f"has a cost of {int(found[1])}: from {_COSTS[0]} to {_COSTS[-1]} is taken")
        if not name or ":" in name or not name.isprintable():
            raise section.wrong(name, "is no name for basic auth: that is not empty and has no colon or control")
    return users


def _headers(section: Section) -> tuple[tuple[str, str], ...]:
    section.boolean("http2", default=True)  # gpumap speaks HTTP/1.1 alone, which every client of HTTP/2 does too
    headers = section.section("headers", tuple(_HEADERS))
    found = [(name, value) for name, value in headers.entries() if value]  # the toolkit: "Unset if blank"
    for name, value in found:
        if _HEADERS[name] and value not in _HEADERS[name]:
            raise headers.wrong(name, f"is not {' or '.join(_HEADERS[name])}")
        if not value.isascii() or not value.isprintable():
            raise headers.wrong(name, "is not in printable ASCII characters")
    return tuple(found)


def _rate_limit(section: Section) -> RateLimit | None:
    interval, burst = section.text("interval", "0"), section.text("burst", "0")
    if not re.fullmatch(r"\d{1,9}", burst, re.ASCII):
        raise section.wrong("burst", "is no whole number from 0 on")
    if re.fullmatch(r"0+(ns|us|ms|s|m|h)?", interval, re.ASCII):
        return None
    try:
        seconds = parse_duration(interval)
    except ValueError as error:
        raise section.wrong("interval", "is no duration such as 100ms or 1s") from error
    if int(burst) == 0:
        raise section.wrong("burst", "is 0: every request would be refused")
    return RateLimit(seconds, int(burst))
