"""Why a server did not answer, in words of the user's, and not of the library that asked."""

from __future__ import annotations

import os

import aiohttp

from gpumap.model.shown import cut_off

_REASON_CHARACTERS = 200


def connection_error(error: Exception, *, https: bool = False) -> str:
    """Return one clause for an error of a request."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its certificate is not trusted: {error.certificate_error}"
    if isinstance(error, aiohttp.ClientSSLError):
        return "it does not support TLS like this machine; try http://"
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno or 0
        return os.strerror(number).lower() if number > 0 else str(error.os_error.strerror or error.os_error)
    if isinstance(error, aiohttp.ClientResponseError):
        reason = error.message.strip().partition("\n")[0].rstrip(":")
        if "status line" in reason.lower() or "expected http/" in reason.lower():
            return "it does not support HTTP; try https://"
        return f"its answer is not valid HTTP: {cut_off(reason, _REASON_CHARACTERS)}"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "its answer is incomplete"
    if isinstance(error, ConnectionError | aiohttp.ServerDisconnectedError):
        why = "it may require a client certificate, or not trust this one" if https else "try https://"
        return f"it closed the connection; {why}"
    return str(error) or type(error).__name__
