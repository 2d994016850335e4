"""The TLS part of a web configuration: the context for new connections.

Each change makes a new context: a context never drops an authority.
"""

from __future__ import annotations

import contextlib
import os
import re
import ssl
from collections.abc import Iterator, Mapping

from gpumap.agent.web.config.schema import AUTHORITIES, CERTIFICATE, NONE, PRIVATE_KEY, TlsConfig, WebConfigError

_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}


def make_context(tls: TlsConfig, pems: Mapping[str, bytes]) -> ssl.SSLContext:
    """Make the context. Raises WebConfigError. `pems` has the bytes of the files, by key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version, context.maximum_version = _VERSIONS[tls.least], _VERSIONS[tls.most]
    context.set_alpn_protocols(["http/1.1"])
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    _load_certificate(context, tls, pems)
    if tls.client_auth != NONE:
        # Optional also if a certificate is required: probes have none. A client without one is refused at other pages.
        # An invalid certificate ends the handshake in any case.
        context.verify_mode = ssl.CERT_OPTIONAL
        # As in Go, each certificate in the file is trusted by itself, also an intermediate authority.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        _load_authorities(context, tls, pems)
        # A resumed session verifies nothing: an authority may have expired since then.
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET
    return context


def _load_certificate(context: ssl.SSLContext, tls: TlsConfig, pems: Mapping[str, bytes]) -> None:
    certificate, key = pems[CERTIFICATE], pems[PRIVATE_KEY]
    if not re.search(rb"-----BEGIN CERTIFICATE-----", certificate):
        raise WebConfigError(f"{tls.place(CERTIFICATE)}: does not contain a certificate in PEM format")
    if not re.search(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----", key):
        raise WebConfigError(f"{tls.place(PRIVATE_KEY)}: does not contain a private key in PEM format")

    def refuse() -> str:
        raise WebConfigError(f"{tls.place(PRIVATE_KEY)}: is encrypted; use a key without a password")

    try:
        with _as_file(certificate) as certificate_file, _as_file(key) as key_file:
            context.load_cert_chain(certificate_file, key_file, password=refuse)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise WebConfigError(f"{tls.place(PRIVATE_KEY)}: is not the key of {tls.place(CERTIFICATE)}") from error
        both = f"{tls.place(CERTIFICATE)} and {tls.place(PRIVATE_KEY)}"
        reason = (error.reason or "OpenSSL cannot read it").lower().replace("_", " ")
        raise WebConfigError(f"{both}: are not usable: {reason}") from error


def _load_authorities(context: ssl.SSLContext, tls: TlsConfig, pems: Mapping[str, bytes]) -> None:
    try:
        with _as_file(pems[AUTHORITIES]) as file:
            context.load_verify_locations(cafile=file)
    except ssl.SSLError as error:
        raise WebConfigError(f"{tls.place(AUTHORITIES)}: does not contain certificates in PEM format") from error


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
