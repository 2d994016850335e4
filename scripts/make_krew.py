"""Builds what krew installs: an archive of `kubectl gpumap` in pure Python, and its manifest: `make krew`.

The archive holds gpumap without what runs on a node, and the packages that it needs, of the versions and hashes in
requirements.lock, without their compiled parts. The same inputs make the same bytes.
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
ON_THE_NODE = (
    *("_proto", "capture", "collect.py", "demo", "dialects", "join", "metrics", "nvml_worker", "service.py"),
    *("settings.py", "sources", "state.py", "web"),
)
"""Parts of gpumap that look at a node, serve what they see, or play one. `kubectl gpumap` imports none of them, by a
contract of pyproject.toml."""
COMPILED = (".so", ".pyd", ".pyx", ".pxd", ".pxi", ".c", ".h", ".hash", ".pyc")

LAUNCHER = '''\
#!/usr/bin/env python3
"""Starts gpumap, which lies beside this file, with a Python that is new enough."""
import os
import sys

if sys.version_info < (3, 11):
    for name in ("python3.14", "python3.13", "python3.12", "python3.11"):
        try:
            os.execvp(name, [name] + sys.argv)
        except OSError:
            pass
    sys.exit("gpumap: needs Python 3.11 or later, and python3 is %d.%d" % sys.version_info[:2])
sys.path.insert(0, os.path.join(os.path.dirname(os.path.realpath(__file__)), "lib"))
from gpumap.cli.kubectl.cli import main

sys.exit(main())
'''


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--into", type=Path, default=ROOT / "dist" / "krew", help="folder of the results (dist/krew)")
    parser.add_argument("--uri", help="where the archive will be published; without it the manifest names no address")
    given = parser.parse_args()
    if given.uri is not None and not given.uri.startswith(("https://", "http://")):
        parser.error(f"--uri {given.uri}: does not start with https:// or http://")
    given.into.mkdir(parents=True, exist_ok=True)
    archive = given.into / f"kubectl-gpumap-v{__version__}.tar.gz"
    archive.write_bytes(packed({**plugin_files(), **dependency_files()}))
    uri = given.uri or f"https://not-published.invalid/{archive.name}"
    manifest = given.into / "gpumap.yaml"
    manifest.write_text(filled(MANIFEST.read_text(), uri, hashlib.sha256(archive.read_bytes()).hexdigest()))
    print(f"kubectl krew install --manifest={manifest} --archive={archive}")
    return 0


def filled(template: str, uri: str, sha256: str) -> str:
    """The manifest, without the template's own comment."""
    text = "".join(line for line in template.splitlines(keepends=True) if not line.startswith("#"))
    return string.Template(text).substitute(version=f"v{__version__}", uri=uri, sha256=sha256)


def plugin_files() -> dict[str, bytes]:
    """The launcher, the licence, and gpumap without what runs on a node."""
    files = {"kubectl-gpumap": LAUNCHER.encode(), "LICENSE": (ROOT / "LICENSE").read_bytes()}
    package = ROOT / "src" / "gpumap"
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package)
        if name.parts[0] not in ON_THE_NODE:
            files[f"lib/gpumap/{name}"] = path.read_bytes()
    return files


def dependency_files() -> dict[str, bytes]:
    """The packages' modules and licences, from wheels whose hashes are in the lock."""
    with tempfile.TemporaryDirectory(prefix="gpumap-krew-") as folder:
        wheels = [
            *download(PURE, Path(folder) / "pure", ("any",)),
            *download(HALF, Path(folder) / "half", HALF_PLATFORMS),
        ]
        return dict(file for wheel in wheels for file in wheel_files(wheel))


def download(packages: Iterable[str], into: Path, platforms: Iterable[str]) -> list[Path]:
    """The packages' wheels for the oldest Python that gpumap runs on, and for platforms."""
    into.mkdir()
    requirements = into / "requirements.txt"
    lock = (ROOT / "requirements.lock").read_text()
    requirements.write_text("".join(locked(lock, package) for package in packages))
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download")
    where = [word for platform in platforms for word in ("--platform", platform)]
    only = ("--no-deps", "--only-binary=:all:", "--python-version=3.11", "--implementation=cp", "--require-hashes")
    command = [*pip, *only, *where, "--dest", str(into), "--requirement", str(requirements)]
    subprocess.run(command, check=True)
    return sorted(into.glob("*.whl"))


def locked(lock: str, package: str) -> str:
    """A package's lines in the lock: its version, and the hashes of all its files."""
    found = re.search(rf"^{re.escape(package)}==.*(?:\n    --hash=.*)+\n", lock, re.MULTILINE)
    if found is None:
        sys.exit(f"make_krew.py: requirements.lock has no {package}")
    return found[0]


def wheel_files(wheel: Path) -> Iterator[tuple[str, bytes]]:
    """Modules, and of the package's papers its licence."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            is_paper = ".dist-info/" in name
            wanted = "/licenses/" in name or "LICENSE" in name if is_paper else not name.endswith(COMPILED)
            if wanted and not name.endswith("/") and not name.startswith("_yaml"):
                yield f"lib/{name}", archive.read(name)


def packed(files: dict[str, bytes]) -> bytes:
    """A .tar.gz of files that belong to nobody and are of no time."""
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
