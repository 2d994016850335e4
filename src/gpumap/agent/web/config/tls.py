"""The TLS part of a web configuration: the context for new connections, and the names in a client's certificate.

Each change makes a new context: a context never drops an authority.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import ssl
from collections.abc import Collection, Iterator, Mapping

from gpumap.agent.web.config.schema import NONE, TLS12_SUITES, Pem, TlsConfig, WebConfigError

_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_CURVES = {"CurveP256": "prime256v1", "CurveP384": "secp384r1", "CurveP521": "secp521r1", "X25519": "X25519"}
_SAN_KINDS = ("DNS", "IP Address", "email", "URI")
"""As ssl.SSLSocket.getpeercert calls the four kinds of name that the toolkit compares."""


def make_context(tls: TlsConfig, pems: Mapping[str, bytes]) -> ssl.SSLContext:
    """Make the context. Raises WebConfigError. `pems` has the bytes of the files, by key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _speak(context, tls)
    _load_certificate(context, tls, pems)
    if tls.authorities is not None and tls.client_auth != NONE:
        # Optional also if a certificate is required: probes have none. A client without one is refused at other pages.
        # An invalid certificate ends the handshake in any case.
        context.verify_mode = ssl.CERT_OPTIONAL
        # As in Go, each certificate in the file is trusted by itself, also an intermediate authority.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        _load_authorities(context, tls.authorities, pems)
        # A resumed session verifies nothing: an authority may have expired since then.
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET
    return context


def has_allowed_name(certificate: Mapping[str, object], allowed: Collection[str]) -> bool:
    """Return whether a verified certificate (from getpeercert) has one of these names, of any kind."""
    found = certificate.get("subjectAltName", ())
    names = found if isinstance(found, tuple) else ()
    return any(_plain(kind, name) in allowed for kind, name, *_ in names if kind in _SAN_KINDS)


def _plain(kind: str, name: str) -> str:
    """Return a name as Go writes it: an IP address in its shortest form."""
    if kind != "IP Address":
        return name
    try:
        return str(ipaddress.ip_address(name.strip()))
    except ValueError:
        return name


def _speak(context: ssl.SSLContext, tls: TlsConfig) -> None:
    context.minimum_version, context.maximum_version = _VERSIONS[tls.least], _VERSIONS[tls.most]
    context.set_alpn_protocols(["http/1.1"])
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    named = tls.cipher_suites or ()
    suites = [TLS12_SUITES[name] for name in named if name in TLS12_SUITES]
    try:
        if suites:
            context.set_ciphers(":".join(suites))
        elif named:
            context.minimum_version = ssl.TLSVersion.TLSv1_3  # no suite is left for TLS 1.2
        for curve in tls.curve_preferences or ():
            context.set_ecdh_curve(_CURVES[curve])
    except (ssl.SSLError, ValueError) as error:
        raise WebConfigError("tls_server_config: OpenSSL here supports none of the cipher suites or curves") from error


def _load_certificate(context: ssl.SSLContext, tls: TlsConfig, pems: Mapping[str, bytes]) -> None:
    certificate, key = _bytes(tls.certificate, pems), _bytes(tls.private_key, pems)
    if not re.search(rb"-----BEGIN CERTIFICATE-----", certificate):
        raise WebConfigError(f"{tls.certificate.place}: does not contain a certificate in PEM format")
    if not re.search(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----", key):
        raise WebConfigError(f"{tls.private_key.place}: does not contain a private key in PEM format")

    def refuse() -> str:
        raise WebConfigError(f"{tls.private_key.place}: is encrypted; use a key without a password")

    try:
        with _as_file(certificate) as certificate_file, _as_file(key) as key_file:
            context.load_cert_chain(certificate_file, key_file, password=refuse)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise WebConfigError(f"{tls.private_key.place}: is not the key of {tls.certificate.place}") from error
        both = f"{tls.certificate.place} and {tls.private_key.place}"
        raise WebConfigError(f"{both}: are not usable: {_reason(error)}") from error


def _load_authorities(context: ssl.SSLContext, authorities: Pem, pems: Mapping[str, bytes]) -> None:
    try:
        with _as_file(_bytes(authorities, pems)) as file:
            context.load_verify_locations(cafile=file)
    except ssl.SSLError as error:
        raise WebConfigError(f"{authorities.place}: does not contain certificates in PEM format") from error


@contextlib.contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    """Return a path below which OpenSSL finds these bytes: the root is read-only, and a key must not be on a disk."""
    try:
        number = os.memfd_create("gpumap-pem", os.MFD_CLOEXEC)
        with open(number, "wb") as file:
            file.write(data)
            file.flush()
            yield f"/proc/self/fd/{number}"
    except ssl.SSLError:
        raise
    except OSError as error:
        raise WebConfigError(f"cannot be passed to OpenSSL: {error.strerror or type(error).__name__}") from error


def _bytes(pem: Pem, pems: Mapping[str, bytes]) -> bytes:
    return pems[pem.key] if pem.file else pem.text.encode()


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or "OpenSSL cannot read it").lower().replace("_", " ")
