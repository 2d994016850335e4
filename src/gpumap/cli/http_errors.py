"""Why a server did not answer, in words of the user's, and not of the library that asked."""

from __future__ import annotations

import os

import aiohttp

from gpumap.model.text import cut_off

_REASON_CHARACTERS = 200


def connection_error(error: Exception, *, https: bool = False) -> str:
    """One clause for what the request raised, of an https:// URL or another."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its certificate is not trusted: {error.certificate_error}"
    if isinstance(error, aiohttp.ClientSSLError):
        return "it does not speak TLS as this machine does; is it http://?"
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno or 0
        return os.strerror(number).lower() if number > 0 else str(error.os_error.strerror or error.os_error)
    if isinstance(error, aiohttp.ClientResponseError):
        reason = error.message.strip().partition("\n")[0].rstrip(":")
        if "status line" in reason.lower() or "expected http/" in reason.lower():
            return "it does not speak HTTP; is it https://?"
        return f"its answer is not valid HTTP: {cut_off(reason, _REASON_CHARACTERS)}"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "its answer broke off"
    if isinstance(error, ConnectionError | aiohttp.ServerDisconnectedError):
        why = "does it ask for a client certificate, or not trust this one?" if https else "is it https://?"
        return f"it closed the connection; {why}"
    return str(error) or type(error).__name__
