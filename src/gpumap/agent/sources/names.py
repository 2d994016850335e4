"""Makes names that are not valid in Kubernetes safe for a label, a log and a complaint. Pure."""

from __future__ import annotations

import hashlib

CHARACTERS_MAX = 4096
"""A longer text is cut. Kubernetes allows 253 characters for a pod, and no plugin has such ids."""
_KEPT_CHARACTERS = 253
_SHOWN_CHARACTERS = 80


def fit(text: str) -> str:
    """Return a text unchanged, or the beginning of a longer one with its length and a digest, so two stay different.

    Otherwise every page would contain it once for each series.
    """
    if len(text) <= CHARACTERS_MAX:
        return text
    return _cut(text[:_KEPT_CHARACTERS], f"{len(text)} characters", text.encode(errors="surrogatepass"))


def spell_out(data: bytes) -> str:
    r"""Return bytes as a text that fits. Bytes that are not UTF-8 are escaped (`\xff`), so two stay different."""
    if len(data) <= CHARACTERS_MAX:
        return data.decode(errors="backslashreplace")
    return _cut(data[:_KEPT_CHARACTERS].decode(errors="backslashreplace"), f"{len(data)} bytes", data)


def show(name: str) -> str:
    """Return a name for one line of a log: strange characters are escaped, and it is cut."""
    begin = name[: _SHOWN_CHARACTERS + 1]
    spelled = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in begin)
    return spelled if len(spelled) <= _SHOWN_CHARACTERS else f"{spelled[:_SHOWN_CHARACTERS]}…"


def _cut(begin: str, size: str, data: bytes) -> str:
    return f"{begin}… ({size}, {hashlib.blake2b(data, digest_size=8).hexdigest()})"
