"""Certificates for servers of tests, made by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_HERE = "subjectAltName=IP:127.0.0.1"
# Python verifies strictly from 3.13 on: an authority says what its key is for, and who is signed by which key.
_AUTHORITY = "keyUsage=critical,digitalSignature,keyCertSign"
_SIGNED = "subjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid"


def make_certificate(folder: Path, name: str, names: str = _HERE) -> None:
    """One that vouches for itself at 127.0.0.1 or by other names, and for others as their authority.

    `name`.crt and `name`.key.
    """
    files = ("-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.crt")
    _openssl(
        "req", "-x509", "-days", "2", *_KEY, "-subj", f"/CN={name}", "-addext", names, "-addext", _AUTHORITY, *files
    )


def make_signed_certificate(folder: Path, name: str, authority: str, names: str = _HERE) -> None:
    """One that the folder's authority vouches for, at 127.0.0.1 or for other names."""
    request, extensions = folder / f"{name}.csr", folder / f"{name}.names"
    _openssl("req", *_KEY, "-subj", f"/CN={name}", "-out", str(request), "-keyout", f"{folder}/{name}.key")
    extensions.write_text(f"{names}\n{_SIGNED}\n")
    by = ("-CA", f"{folder}/{authority}.crt", "-CAkey", f"{folder}/{authority}.key", "-CAcreateserial")
    made = ("-in", str(request), "-extfile", str(extensions), "-out", f"{folder}/{name}.crt")
    _openssl("x509", "-req", "-days", "2", *by, *made)


def _openssl(*arguments: str) -> None:
    subprocess.run(("openssl", *arguments), check=True, capture_output=True, timeout=60)
