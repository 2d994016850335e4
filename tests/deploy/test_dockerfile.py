"""What is known of the image without building it: pinned bases, wheels for each platform, labels' defaults."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpumap import __version__
from tests.demo_process import environment
from tests.tools import tool

ROOT = Path(__file__).resolve().parents[2]
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
    """The builder sees only the Dockerfile's COPYs: no key or note in a clone can get in."""
    copied = set()
    for line in re.findall(r"^COPY (?!--)(.+)$", DOCKERFILE, re.MULTILINE):
        copied |= set(line.split()[:-1])
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert "*" in ignored
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == copied
    assert all((ROOT / name).exists() for name in copied)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("lock", "python"),
    [("requirements.lock", "3.11"), ("requirements.lock", "3.13"), ("requirements-image.lock", "3.13")],
)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_each_platform_has_its_wheels(platform: str, lock: str, python: str, tmp_path: Path) -> None:
    """All of the image, and of an installation by the lock, is a wheel with the lock's hash: no compiler is needed."""
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
    command += ["--ignore-installed", "--only-binary", ":all:", "--implementation", "cp", "--python-version", python]
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
    """`make image` gives the builder the commit's time, version, platforms and name, and pushes on demand."""
    words = ["--image", "r.example/gpumap:1", "--platforms", "linux/amd64,linux/arm64", "--push"]
    play_builders(tmp_path, "podman", "docker")
    told = {name: make_image(tmp_path, "--builder", name, *words).stdout.splitlines() for name in ("podman", "docker")}
    for line in (told["podman"][0], told["docker"][0]):
        assert f"--build-arg VERSION={__version__} " in line
        assert "--build-arg CREATED=1970-01-02T00:00:00Z --build-arg SOURCE_DATE_EPOCH=86400 " in line
        assert "--platform linux/amd64,linux/arm64 " in line
    assert told["podman"][0].endswith(" --timestamp 86400 --manifest r.example/gpumap:1 .")
    assert told["podman"][1] == "podman manifest push --all r.example/gpumap:1"
    assert told["docker"][0].endswith(" --tag r.example/gpumap:1 --push .")


def test_a_docker_without_buildx_is_passed_over(tmp_path: Path) -> None:
    """The next builder on PATH builds, and where there is none a line says so."""
    play_builders(tmp_path, "docker", without_buildx=True)
    done = make_image(tmp_path)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2,
        "build_image.py: error: no docker with buildx, podman or buildah is on PATH",
    )
    play_builders(tmp_path, "buildah")
    assert make_image(tmp_path).stdout.startswith("buildah build ")


def test_a_builder_without_a_signature_policy_says_what_will_do(tmp_path: Path) -> None:
    """buildah as `make tools` unpacks it has no policy.json, and would end in words about a file."""
    if Path("/etc/containers/policy.json").exists():
        pytest.skip("this machine has a policy")
    play_builders(tmp_path, "buildah")
    shutil.rmtree(tmp_path / ".config")
    done = make_image(tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("buildah pulls nothing without a signature policy, and none is here.")


def play_builders(folder: Path, *names: str, without_buildx: bool = False) -> None:
    """Programs of those names that print their arguments, in a home that has a signature policy."""
    for name in names:
        played = folder / name
        refusal = '[ "$1" = buildx ] && exit 1\n' if without_buildx else ""
        played.write_text(f'#!/bin/sh\n{refusal}echo "{name} $*"\n')
        played.chmod(0o755)
    (folder / ".config/containers").mkdir(parents=True, exist_ok=True)
    (folder / ".config/containers/policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')


def make_image(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """What the script does where nothing but those programs is on PATH."""
    variables = {"PATH": str(folder), "HOME": str(folder), "SOURCE_DATE_EPOCH": "86400"}
    command: tuple[str | Path, ...] = (sys.executable, ROOT / "scripts/build_image.py", *words)
    return subprocess.run(command, env=environment(**variables), capture_output=True, text=True, check=False)


def test_the_tools_that_build_it_run() -> None:
    """buildah and runc, by which `make e2e` builds and starts the image, are there."""
    for name in ("buildah", "runc"):
        done = subprocess.run([tool(name), "--version"], capture_output=True, text=True, check=True)
        assert name in done.stdout
