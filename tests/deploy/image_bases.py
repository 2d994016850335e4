"""The bases of the image's tests, unpacked from Debian's packages; no registry is needed.

They are what the Dockerfile's own bases are made of, taken from the archive that this machine's apt is configured for.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.debian_packages import release_apt
from tests.demo_process import environment

COMMAND_SECONDS = 600.0
RELEASE = "trixie"

# What a build stage must have, with all that these depend on.
BUILD = (
    *("base-files", "libc-bin", "dash", "coreutils", "sed", "findutils", "tar", "grep"),
    *("ca-certificates", "libstdc++6", "python3", "python3-pip"),
)
# What gcr.io/distroless/python3-debian13 is made of, by its project's base/ and python3/; certificates come below.
RUNTIME = (
    *("base-files", "media-types", "netbase", "tzdata", "libc6", "libgcc-s1", "libstdc++6", "libssl3t64", "libzstd1"),
    *(
        "gcc-14-base",
        "libbz2-1.0",
        "libdb5.3t64",
        "libexpat1",
        "libffi8",
        "liblzma5",
        "libncursesw6",
        "libreadline8t64",
    ),
    *("libsqlite3-0", "libtinfo6", "libuuid1", "zlib1g"),
    *("libpython3.13-minimal", "libpython3.13-stdlib", "python3.13-minimal"),
)


def run(*command: str | Path, cwd: Path | None = None, variables: Mapping[str, str] | None = None) -> str:
    """Run a command and give what it says on standard output; a failure shows it all."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        cwd=cwd,
        env=environment(**(variables or {})),
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def unpack_base(folder: Path, packages: Sequence[str], *, with_dependencies: bool) -> Path:
    """A root file system of Debian's packages. Their scripts did not run. No file of it is this machine's, but one."""
    apt = release_apt(folder / "apt", RELEASE)
    (folder / "debs").mkdir()
    if with_dependencies:
        options = ("-o", f"Dir::Cache::Archives={folder / 'debs'}", "--download-only", "--no-install-recommends", "-y")
        (folder / "debs" / "partial").mkdir()
        run(*apt, *options, "install", *packages)
    else:
        run(*apt, "download", *packages, cwd=folder / "debs")
    root = folder / "root"
    for package in sorted((folder / "debs").glob("*.deb")):
        run("dpkg-deb", "-x", package, root)
    for name in ("python3", "python"):  # as the image's makers do, where no package has it
        with contextlib.suppress(FileExistsError):
            (root / "usr/bin" / name).symlink_to("python3.13")
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/sbin/nologin\n")
    # What the package's own script would do; this machine's, since what it trusts is how it reaches an index.
    (root / "etc/ssl/certs").mkdir(parents=True, exist_ok=True)
    shutil.copy("/etc/ssl/certs/ca-certificates.crt", root / "etc/ssl/certs")
    return root
