"""What of the image can be told without building it: pinned bases, wheels for each platform, labels' defaults."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpumap import __version__
from tests.demo_process import environment
from tests.tools import tool

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text()
ARGUMENTS = dict(re.findall(r"^ARG (\w+)=(.+)$", DOCKERFILE, re.MULTILINE))
PLATFORMS = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}
COMMAND_SECONDS = 300.0


@pytest.mark.parametrize("base", ["BUILD", "RUNTIME"])
def test_bases_are_pinned(base: str) -> None:
    """A base is named by registry, tag and digest, so that a build a year later begins with the same files."""
    assert re.fullmatch(r"[a-z.]+\.(io|dev)/[a-z0-9/-]+:[a-z0-9.-]+@sha256:[0-9a-f]{64}", ARGUMENTS[base])
    assert "debug" not in ARGUMENTS[base]


def test_both_bases_have_one_python() -> None:
    """Byte code and wheels are made for one minor version; what is copied and what is started name the same."""
    assert set(re.findall(r"python(3\.\d+)", DOCKERFILE)) == {"3.13"}
    assert ":3.13-slim-trixie@" in ARGUMENTS["BUILD"]  # Debian 13's Python is 3.13
    assert "-debian13:" in ARGUMENTS["RUNTIME"]


def test_the_versions_default_is_gpumaps() -> None:
    """A plain `docker build` labels the image with gpumap's version."""
    assert ARGUMENTS["VERSION"] == __version__


def test_only_what_is_copied_goes_to_the_builder() -> None:
    """The builder sees the Dockerfile's COPYs and no more: no key or note that lies in a clone can get in."""
    copied = set()
    for line in re.findall(r"^COPY (?!--)(.+)$", DOCKERFILE, re.MULTILINE):
        copied |= set(line.split()[:-1])
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert "*" in ignored
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == copied
    assert all((ROOT / name).exists() for name in copied)


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements-image.lock"])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_each_platform_has_its_wheels(platform: str, lock: str, tmp_path: Path) -> None:
    """Whatever the image is made of is a wheel for that platform's Python 3.13, by the lock's hashes: no compiler."""
    report = tmp_path / "report.json"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--dry-run",
        "--no-deps",
    ]
    command += ["--ignore-installed", "--only-binary", ":all:", "--implementation", "cp", "--python-version", "3.13"]
    # Debian 13 has glibc 2.41; nothing in the lock asks for more than 2.28.
    for floor in ("manylinux2014", "manylinux_2_17", "manylinux_2_28"):
        command += ["--platform", f"{floor}_{PLATFORMS[platform]}"]
    command += ["--target", str(tmp_path / "none"), "--report", str(report)]
    command += ["--require-hashes", "--requirement", str(ROOT / lock)]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    found = [one["download_info"]["url"] for one in json.loads(report.read_text())["install"]]
    assert len(found) > 10
    assert all(url.endswith(".whl") for url in found)


def test_the_builder_is_told_what_is_asked(tmp_path: Path) -> None:
    """`make image` gives the builder the commit's time, version, platforms and name, and pushes when told to."""
    for name in ("podman", "docker"):
        played = tmp_path / name
        played.write_text('#!/bin/sh\necho "$(basename "$0") $*"\n')
        played.chmod(0o755)
    words = ["--image", "r.example/gpumap:1", "--platforms", "linux/amd64,linux/arm64", "--push"]
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SOURCE_DATE_EPOCH": "86400"}
    told = {}
    for builder in ("podman", "docker"):
        command = [sys.executable, ROOT / "scripts/build_image.py", "--builder", builder, *words]
        done = subprocess.run(command, env=environment(**variables), capture_output=True, text=True, check=True)
        told[builder] = done.stdout.splitlines()
    for line in (told["podman"][0], told["docker"][0]):
        assert f"--build-arg VERSION={__version__} " in line
        assert "--build-arg CREATED=1970-01-02T00:00:00Z --build-arg SOURCE_DATE_EPOCH=86400 " in line
        assert "--platform linux/amd64,linux/arm64 " in line
    assert told["podman"][0].endswith(" --timestamp 86400 --manifest r.example/gpumap:1 .")
    assert told["podman"][1] == "podman manifest push --all r.example/gpumap:1"
    assert told["docker"][0].endswith(" --tag r.example/gpumap:1 --push .")


def test_the_tools_that_build_it_run() -> None:
    """buildah and runc, by which `make e2e` builds and starts the image, are there."""
    for name in ("buildah", "runc"):
        done = subprocess.run([tool(name), "--version"], capture_output=True, text=True, check=True)
        assert name in done.stdout
