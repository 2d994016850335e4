"""Builds what krew installs: an archive of `kubectl gpumap`, and its manifest: `make krew`.

The archive holds the rooms `cli` and `model`, and the packages that they need, of the versions and hashes in
requirements.lock. One archive serves all platforms: the packages have no compiled parts, except msgspec, which has its
compiled module for each platform and Python. The same inputs make the same bytes.
"""

import argparse
import gzip
import hashlib
import io
import re
import string
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from gpumap import __version__

ROOT = Path(__file__).resolve().parent.parent
MANIFEST = ROOT / "deploy" / "krew" / "gpumap.yaml"

PURE = (
    "aiohappyeyeballs",
    "aiosignal",
    "attrs",
    "frozenlist",
    "idna",
    "multidict",
    "propcache",
    "typing-extensions",
    "yarl",
)
"""These publish a wheel without compiled parts."""
HALF = ("aiohttp", "pyyaml")
"""These do not. Their modules do without the compiled ones where those cannot be imported (aiohttp: http_parser.py,
http_writer.py, _websocket/reader.py; PyYAML: __init__.py), so that any platform's wheel will do."""
HALF_PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_28_x86_64", "manylinux_2_17_x86_64")
NATIVE = ("msgspec",)
"""These do not run without their compiled module."""
NATIVE_PLATFORMS = {
    "linux-x86_64": ("manylinux2014_x86_64",),
    "linux-aarch64": ("manylinux2014_aarch64",),
    "darwin-x86_64": ("macosx_10_9_x86_64", "macosx_10_13_x86_64", "macosx_10_15_x86_64"),
    "darwin-arm64": ("macosx_11_0_arm64",),
}
"""Platforms of wheels, by folder: Python's `sys.platform` and the machine's name. On macOS the modules of both machines
have the same names, so each platform has its own folder."""
OLDEST, NEWEST = 11, 14
"""Python 3.x: the oldest that gpumap runs on, the newest that NATIVE has modules for."""
ROOMS = ("cli", "model")
"""The rest of gpumap runs on a node. Only cli/sources/this_node.py imports it, and the plugin does not import that."""
LEFT_OUT = (".so", ".pyd", ".pyx", ".pxd", ".pxi", ".c", ".h", ".hash", ".pyc", ".pyi")

LAUNCHER = f'''\
#!/usr/bin/env python3
"""Starts gpumap, which lies beside this file, with a Python that it runs on."""
import os
import sys

if not (3, {OLDEST}) <= sys.version_info[:2] <= (3, {NEWEST}):
    for minor in range({NEWEST}, {OLDEST} - 1, -1):
        name = "python3.%d" % minor
        try:
            os.execvp(name, [name] + sys.argv)
        except OSError:
            pass
    sys.exit("gpumap: needs Python 3.{OLDEST} to 3.{NEWEST}, and python3 is %d.%d" % sys.version_info[:2])

from importlib.machinery import EXTENSION_SUFFIXES

lib = os.path.join(os.path.dirname(os.path.realpath(__file__)), "lib")
platform = "%s-%s" % (sys.platform, os.uname()[4])
native = os.path.join(lib, "native", platform)
if not any(os.path.exists(os.path.join(native, "msgspec", "_core" + suffix)) for suffix in EXTENSION_SUFFIXES):
    sys.exit("gpumap: has no compiled module for this Python on %s (%s)" % (platform, EXTENSION_SUFFIXES[0]))
sys.path[:0] = [lib, native]
from gpumap.cli.kubectl.cli import main

sys.exit(main())
'''


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--into", type=Path, default=ROOT / "dist" / "krew", help="folder of the results (dist/krew)")
    parser.add_argument("--uri", help="where the archive will be published; without it the manifest names no address")
    args = parser.parse_args()
    if args.uri is not None and not args.uri.startswith(("https://", "http://")):
        parser.error(f"--uri {args.uri}: does not start with https:// or http://")
    args.into.mkdir(parents=True, exist_ok=True)
    archive = args.into / f"kubectl-gpumap-v{__version__}.tar.gz"
    archive.write_bytes(packed({**plugin_files(), **dependency_files()}))
    uri = args.uri or f"https://not-published.invalid/{archive.name}"
    manifest = args.into / "gpumap.yaml"
    manifest.write_text(filled(MANIFEST.read_text(), uri, hashlib.sha256(archive.read_bytes()).hexdigest()))
    print(f"kubectl krew install --manifest={manifest} --archive={archive}")
    return 0


def filled(template: str, uri: str, sha256: str) -> str:
    """The manifest, without the template's own comment."""
    text = "".join(line for line in template.splitlines(keepends=True) if not line.startswith("#"))
    return string.Template(text).substitute(version=f"v{__version__}", uri=uri, sha256=sha256)


def plugin_files() -> dict[str, bytes]:
    """Return the launcher, the licence, and gpumap's rooms."""
    files = {"kubectl-gpumap": LAUNCHER.encode(), "LICENSE": (ROOT / "LICENSE").read_bytes()}
    package = ROOT / "src" / "gpumap"
    for path in (package / "__init__.py", *(path for room in ROOMS for path in (package / room).rglob("*.py"))):
        files[f"lib/gpumap/{path.relative_to(package)}"] = path.read_bytes()
    return files


def dependency_files() -> dict[str, bytes]:
    """Return the packages' modules and licences, from wheels whose hashes are in the lock."""
    files: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory(prefix="gpumap-krew-") as folder:
        for wheel in (
            *download(PURE, Path(folder) / "pure", ("any",)),
            *download(HALF, Path(folder) / "half", HALF_PLATFORMS),
        ):
            files.update(wheel_files(wheel))
        for name, platforms in NATIVE_PLATFORMS.items():
            for minor in range(OLDEST, NEWEST + 1):
                for wheel in download(NATIVE, Path(folder) / f"{name}-{minor}", platforms, minor):
                    files.update(native_files(wheel, name))
    return files


def download(packages: Iterable[str], into: Path, platforms: Iterable[str], minor: int = OLDEST) -> list[Path]:
    """Download the packages' wheels for Python 3.`minor` and for platforms."""
    into.mkdir()
    requirements = into / "requirements.txt"
    lock = (ROOT / "requirements.lock").read_text()
    requirements.write_text("".join(locked(lock, package) for package in packages))
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download")
    where = [word for platform in platforms for word in ("--platform", platform)]
    only = ("--no-deps", "--only-binary=:all:", f"--python-version=3.{minor}", "--implementation=cp")
    command = [*pip, *only, *where, "--require-hashes", "--dest", str(into), "--requirement", str(requirements)]
    subprocess.run(command, check=True)
    return sorted(into.glob("*.whl"))


def locked(lock: str, package: str) -> str:
    """A package's lines in the lock: its version, and the hashes of all its files."""
    found = re.search(rf"^{re.escape(package)}==.*(?:\n    --hash=.*)+\n", lock, re.MULTILINE)
    if found is None:
        sys.exit(f"make_krew.py: requirements.lock has no {package}")
    return found[0]


def wheel_files(wheel: Path) -> Iterator[tuple[str, bytes]]:
    """Return the modules that are not compiled, and the package's licence."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            wanted = is_licence(name) if ".dist-info/" in name else not name.endswith(LEFT_OUT)
            if wanted and not name.endswith("/") and not name.startswith("_yaml"):
                yield f"lib/{name}", archive.read(name)


def native_files(wheel: Path, platform: str) -> Iterator[tuple[str, bytes]]:
    """Return the modules for a platform, and the package's licence."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if ".dist-info/" in name and is_licence(name):
                yield f"lib/{name}", archive.read(name)
            elif name.endswith((".py", ".so")):
                yield f"lib/native/{platform}/{name}", archive.read(name)


def is_licence(name: str) -> bool:
    """Whether a file of a wheel's papers is to be in the archive."""
    return ("/licenses/" in name or "LICENSE" in name) and not name.endswith("/")


def packed(files: dict[str, bytes]) -> bytes:
    """Write a .tar.gz whose files have no owner and no time."""
    tarred = io.BytesIO()
    with tarfile.open(fileobj=tarred, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            entry.mode = 0o755 if name == "kubectl-gpumap" else 0o644
            archive.addfile(entry, io.BytesIO(content))
    return gzip.compress(tarred.getvalue(), mtime=0)


if __name__ == "__main__":
    sys.exit(main())
