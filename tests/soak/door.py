"""The web configuration of an agent, and clients that know it: TLS and a password, both replaced while it runs."""

from __future__ import annotations

import ssl
from base64 import b64encode
from pathlib import Path

from tests.certificates import make_certificate, make_signed_certificate
from tests.secured import TLS, users

CERTIFICATES = ("server", "server2")


class Door:
    """What `folder` asks clients for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._number = 0
        folder.mkdir()
        make_certificate(folder, "ca")
        for name in CERTIFICATES:
            make_signed_certificate(folder, name, "ca")
        self.tls = ssl.create_default_context(cafile=folder / "ca.crt")
        self.replace()

    def replace(self) -> None:
        """Ask for another password from now on, with the other certificate."""
        self._number += 1
        tls = TLS.replace("server.", f"{CERTIFICATES[self._number % 2]}.")
        (self.folder / "new").write_text(tls + users(password=f"word {self._number}"))
        (self.folder / "new").rename(self.folder / "web.yml")

    @property
    def flags(self) -> tuple[str, str]:
        return "--web-config", str(self.folder / "web.yml")

    def authorization(self, *, before: bool = False) -> str:
        """The header with the password, or with the one before it."""
        return "Basic " + b64encode(f"alice:word {self._number - before}".encode()).decode()
