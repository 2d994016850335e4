"""The programs of the tests, as `make tools` gets them."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.debian_packages import ToolUnavailableError, unpack_debian_tree


def test_a_package_that_the_machine_has_is_unpacked(tmp_path: Path) -> None:
    """A tool may be installed here while another one of its folder is not: runc without buildah."""
    if not Path("/var/lib/dpkg/info/hostname.list").is_file():
        pytest.skip("this machine has no Debian package hostname")
    try:
        unpack_debian_tree(tmp_path, "hostname")
    except ToolUnavailableError as error:
        pytest.skip(str(error))
    assert (tmp_path / "bin/hostname").exists() or (tmp_path / "usr/bin/hostname").exists()
