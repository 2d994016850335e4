"""Builds the image with what is here, docker buildx, podman or buildah, and says how large it is.

`build_image.py --image REGISTRY/gpumap:0.1.0 --push`. What follows `--` goes to the builder as it is, such as
`-- --secret id=pip.conf,src=pip.conf` or `-- --build-arg RUNTIME=…`. Nothing but Python is needed: the machine's own,
from 3.9 on, not that of .venv.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILDERS = ("docker", "podman", "buildah")
POLICIES = (Path.home() / ".config/containers/policy.json", Path("/etc/containers/policy.json"))
NO_POLICY = """{} pulls nothing without a signature policy, and none is here.
The bases are checked by digest, so this will do:
  mkdir -p ~/.config/containers
  echo '{{"default": [{{"type": "insecureAcceptAnything"}}]}}' >~/.config/containers/policy.json"""


def main() -> int:
    version = read_version()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--image", default=f"gpumap:{version}", help="its name and tag (%(default)s)")
    parser.add_argument("--platforms", default="", help="such as linux/amd64,linux/arm64; else this machine's")
    parser.add_argument("--push", action="store_true", help="push it to the registry that its name begins with")
    parser.add_argument("--builder", choices=BUILDERS, help="else the first of these that can build here")
    parser.add_argument("extra", nargs="*", metavar="-- ARGUMENT", help="to the builder's build command")
    args = parser.parse_args()
    builder = args.builder or next((name for name in BUILDERS if can_build(name)), None)
    if builder is None:
        parser.error("no docker with buildx, podman or buildah is on PATH")
    # Packages of distributions bring a policy; a buildah that was merely unpacked, as by `make tools`, has none.
    if builder != "docker" and not any(map(Path.exists, POLICIES)) and "--signature-policy" not in args.extra:
        parser.exit(1, NO_POLICY.format(builder) + "\n")
    several = "," in args.platforms
    if several and builder == "docker" and not args.push:
        parser.error("docker keeps no image of several platforms: say --push, or build one platform")
    epoch = commit_time()
    described = {
        "VERSION": version,
        "REVISION": ask("git", "rev-parse", "HEAD") or "unknown",
        "CREATED": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch)),
        "SOURCE_DATE_EPOCH": str(epoch),
    }
    if source := ask("git", "remote", "get-url", "origin"):
        described["SOURCE"] = re.sub(r"//[^/@]*@", "//", source)  # no password in a label
    arguments = [word for name, value in described.items() for word in ("--build-arg", f"{name}={value}")]
    if args.platforms:
        arguments += ["--platform", args.platforms]
    for command in commands(builder, args.image, [*arguments, *args.extra], epoch, several=several, push=args.push):
        done = subprocess.run(command, cwd=ROOT, check=False, env={**os.environ, "SOURCE_DATE_EPOCH": str(epoch)})
        if done.returncode:
            return done.returncode
    if not several:
        print(f"{args.image}: {size(builder, args.image)}, made by {builder}")
    return 0


def commands(
    builder: str, image: str, arguments: list[str], epoch: int, *, several: bool, push: bool
) -> list[list[str]]:
    """What is run, one after the other."""
    if builder == "docker":
        return [["docker", "buildx", "build", *arguments, "--tag", image, "--push" if push else "--load", "."]]
    # These two put the same time on every file, whatever COPY did. Images of several platforms are a manifest.
    name = "--manifest" if several else "--tag"
    made = [[builder, "build", *arguments, "--timestamp", str(epoch), name, image, "."]]
    if push:
        made.append([builder, "manifest", "push", "--all", image] if several else [builder, "push", image])
    return made


def can_build(builder: str) -> bool:
    """Whether it is on PATH; docker's buildx is a plugin that may be missing."""
    return bool(shutil.which(builder)) and (builder != "docker" or bool(ask("docker", "buildx", "version")))


def size(builder: str, image: str) -> str:
    """Return the size from the builder: uncompressed. A registry stores about two fifths of it."""
    listed = ask(builder, "images", "--format", "{{.Size}}", image)
    return listed.splitlines()[0] if listed else "pushed"


def commit_time() -> int:
    """SOURCE_DATE_EPOCH, else the last commit's time, else 0: the same source gives the same image."""
    return int(os.environ.get("SOURCE_DATE_EPOCH") or ask("git", "log", "-1", "--format=%ct") or 0)


def read_version() -> str:
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "src/gpumap/__init__.py").read_text(), re.MULTILINE)
    assert found is not None, "gpumap has a version"
    return found[1]


def ask(*command: str) -> str:
    """What a program says, or nothing."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


if __name__ == "__main__":
    sys.exit(main())
