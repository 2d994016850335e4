"""The image: built by buildah as `make image` does, and run by runc as the chart's pod runs. No registry is needed."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.deploy.image_bases import RELEASE, run, unpack_base
from tests.tools import tool

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "localhost/gpumap-test"
EPOCH = 1_700_000_000
INDEX_OPTIONS = {"index-url", "extra-index-url", "find-links", "trusted-host", "proxy", "cert", "timeout"}

Json = dict[str, Any]


def copy_source(into: Path) -> Path:
    """What the image is made of, and its script: a build of it does not mind what else changes meanwhile."""
    shutil.copytree(ROOT / "src", into / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    (into / "scripts").mkdir()
    others = ("pyproject.toml", "README.md", "LICENSE", "requirements.lock", "requirements-image.lock")
    for name in ("Dockerfile", ".dockerignore", "scripts/build_image.py", *others):
        shutil.copy(ROOT / name, into / name)
    return into


def needs_root() -> None:
    """Building and running need a user who may mount; under CI there must be one."""
    if os.geteuid() == 0:
        return
    if os.environ.get("CI"):
        pytest.fail("the image's tests need root")
    pytest.skip("the image's tests need root")


# --- building ---


@dataclass(frozen=True, slots=True)
class Builder:
    """buildah, with a store of its own below `folder`."""

    folder: Path

    @property
    def variables(self) -> dict[str, str]:
        store = self.folder / "storage.conf"
        if not store.exists():
            (self.folder / "registries.conf").touch()
            (self.folder / "policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
            store.write_text(
                f'[storage]\ndriver = "vfs"\ngraphroot = "{self.folder}/images"\nrunroot = "{self.folder}/run"\n'
            )
        return {
            "CONTAINERS_STORAGE_CONF": str(store),
            "CONTAINERS_REGISTRIES_CONF": str(self.folder / "registries.conf"),
            "CONTAINERS_CONF": "/dev/null",
            "BUILDAH_ISOLATION": "oci",
            "BUILDAH_RUNTIME": str(tool("runc")),
            "PATH": f"{tool('buildah').parent}:{os.environ['PATH']}",
        }

    def buildah(self, *command: str | Path) -> str:
        return run(tool("buildah"), *command, variables=self.variables)

    @property
    def policy(self) -> tuple[str | Path, ...]:
        return "--signature-policy", self.folder / "policy.json"

    def make_base(self, name: str, packages: Sequence[str], *, with_dependencies: bool) -> str:
        """An image of one layer."""
        folder = self.folder / name
        folder.mkdir()
        unpack_base(folder, packages, with_dependencies=with_dependencies)
        image = f"{IMAGE}/{name}:{RELEASE}"
        (folder / "Containerfile").write_text("FROM scratch\nADD root /\n")
        self.buildah("build", *self.policy, "--quiet", "--tag", image, "--file", folder / "Containerfile", folder)
        shutil.rmtree(folder)
        return image

    def build(self, source: Path, image: str, build: str, runtime: str) -> str:
        """The image of a Dockerfile, by the script of `make image` beside it. Gives what that says."""
        settings, folders = index_settings()
        pip_conf = self.folder / "pip.conf"
        pip_conf.write_text(settings)
        extra = ["--network", "host", "--layers=false", *self.policy, "--secret", f"id=pip.conf,src={pip_conf}"]
        extra += ["--build-arg", f"BUILD={build}", "--build-arg", f"RUNTIME={runtime}"]
        extra += [word for folder in folders for word in ("--volume", f"{folder}:{folder}:ro")]
        script = (sys.executable, source / "scripts/build_image.py", "--builder", "buildah", "--image", image)
        return run(*script, "--", *extra, variables=self.variables | {"SOURCE_DATE_EPOCH": str(EPOCH)})

    @contextlib.contextmanager
    def mounted(self, image: str) -> Iterator[Path]:
        """The image's files in a container's own copy."""
        container = self.buildah("from", *self.policy, "--pull-never", image).strip()
        try:
            yield Path(self.buildah("mount", container).strip())
        finally:
            self.buildah("rm", container)

    def describe(self, image: str) -> Json:
        described: Json = json.loads(self.buildah("inspect", "--type", "image", image))["OCIv1"]
        return described


def index_settings() -> tuple[str, list[Path]]:
    """A pip.conf with the index that this machine's pip is configured for, and the places here that it names."""
    settings: dict[str, str] = {}
    places = set()
    for told in run(sys.executable, "-m", "pip", "config", "list").splitlines():
        name, _, quoted = told.partition("=")
        option, value = name.rpartition(".")[2], str(ast.literal_eval(quoted))
        # The environment's come first, and win.
        if option not in INDEX_OPTIONS or option in settings:
            continue
        settings[option] = " ".join(value.split())
        for word in value.split():
            path = Path(urlsplit(word).path if word.startswith("file:") else word)
            if path.is_absolute() and path.exists():
                # An index of files has its files beside it.
                places.add(path.parent if word.startswith("file:") else path)
    return "\n".join(["[global]", *(f"{option} = {value}" for option, value in settings.items()), ""]), sorted(places)


# --- running ---


def mount(source: Path, at: str | Path | None = None, *, read_only: bool = True) -> Json:
    """What a hostPath is to the runtime."""
    options = ["rbind", "ro" if read_only else "rw"]
    return {"destination": str(at or source), "source": str(source), "type": "bind", "options": options}


def bundle(
    folder: Path,
    root: Path,
    described: Json,
    arguments: Sequence[str],
    *,
    mounts: Sequence[Json] = (),
    hooks: Mapping[str, Sequence[Json]] | None = None,
    **variables: str,
) -> list[str | Path]:
    """The command that runs a container as the chart's pod runs: no capability, read-only, seccomp, the host's PIDs."""
    folder.mkdir()
    run(tool("runc"), "spec", cwd=folder)
    spec: Json = json.loads((folder / "config.json").read_text())
    config = described["config"]
    user, group = map(int, config["User"].split(":"))
    spec["root"] = {"path": str(root), "readonly": True}
    spec["process"] |= {
        "terminal": False,
        "user": {"uid": user, "gid": group},
        "args": [*config["Entrypoint"], *(arguments or config["Cmd"])],
        "env": [*config["Env"], *(f"{name}={value}" for name, value in variables.items())],
        "cwd": config["WorkingDir"] or "/",
        "noNewPrivileges": True,
        "capabilities": {kind: [] for kind in ("bounding", "effective", "permitted", "inheritable", "ambient")},
    }
    tmp = {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev"]}
    spec["mounts"] += [tmp, *mounts]
    spec["hooks"] = hooks or {}
    spec["linux"]["namespaces"] = [{"type": "mount"}, {"type": "ipc"}]
    spec["linux"]["seccomp"] = runtime_default()
    del spec["hostname"]
    (folder / "config.json").write_text(json.dumps(spec))
    return [tool("runc"), "--root", folder / "state", "run", "--bundle", folder, f"gpumap-{folder.name}-{os.getpid()}"]


def runtime_default() -> Json:
    """The system calls that a container without capabilities may make, as container engines have it."""
    places = [Path("/usr/share/containers"), *tool("runc").resolve().parent.glob("tree/usr/share/containers")]
    path = next(place / "seccomp.json" for place in reversed(places) if (place / "seccomp.json").exists())
    profile = json.loads(path.read_text())
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
    rules = []
    for rule in profile["syscalls"]:
        includes = rule.get("includes") or {}
        if "caps" in includes or machine not in includes.get("arches", [machine]):
            continue
        rules.append({key: rule[key] for key in ("names", "action", "args", "errnoRet") if rule.get(key) is not None})
    return {"defaultAction": profile["defaultAction"], "defaultErrnoRet": profile["defaultErrnoRet"], "syscalls": rules}


def locked_versions() -> dict[str, str]:
    """Names, in PyPI's own way, and versions of the run-time lock, for Python 3.13 on Linux."""
    lines = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)(?: ;.*)?(?: \\)?$", (ROOT / "requirements.lock").read_text(), re.M)
    return {canonical(name): version for name, version in lines}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
