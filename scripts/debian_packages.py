"""Packages of the machine's Debian, downloaded and unpacked, and what that takes: nothing is installed."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

TOOLS = Path(__file__).resolve().parent.parent / ".tools"
COMMAND_TIMEOUT_SECONDS = 300.0
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


class ToolUnavailableError(Exception):
    """A tool could not be had; the text says why, in a few words."""


def unpack_debian_tree(tree: Path, *packages: str) -> None:
    """Packages, also if the machine has them, and those of their dependencies that it lacks. Nothing is installed."""
    with scratch() as downloads:
        # Without its lock, because nothing is installed: apt only works out what is missing and downloads that.
        options = ("--download-only", "--reinstall", "--no-install-recommends", "-y", "-o", "Debug::NoLocking=1")
        apt_get(downloads, "install", *options, *packages)
        for package in sorted((downloads / "cache/archives").glob("*.deb")):
            run("dpkg-deb", "-x", package, tree)


def apt_get(downloads: Path, *command: str) -> None:
    """Runs apt-get in `downloads`: with the system's package lists, else with fresh ones of our own."""
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise ToolUnavailableError(f"no {program} here")
    try:
        run(*private_apt(downloads, system_lists=True), *command, cwd=downloads)
    except ToolUnavailableError:  # no package lists here, or older than the archive
        apt = private_apt(downloads, system_lists=False)
        run(*apt, "update", cwd=downloads)
        run(*apt, *command, cwd=downloads)


def private_apt(folder: Path, *, system_lists: bool) -> tuple[str | Path, ...]:
    """Run apt-get so that it writes only below `folder`: its cache and package lists, without the hooks of the
    system."""
    for part in ("cache/archives/partial", "lists/partial"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    lines = [
        f'Dir::Cache "{folder}/cache";',
        # As root apt would fetch as user _apt, who may not be allowed into the clone.
        'APT::Sandbox::User "root";',
        'Acquire::Languages "none";',
        'Acquire::Retries "2";',
        'Acquire::http::Timeout "30";',
        'Acquire::https::Timeout "30";',
        "#clear APT::Update::Pre-Invoke;",
        "#clear APT::Update::Post-Invoke;",
        "#clear APT::Update::Post-Invoke-Success;",
    ]
    if not system_lists:
        lines.append(f'Dir::State::Lists "{folder}/lists";')
    config = folder / "apt.conf"
    config.write_text("\n".join(lines) + "\n")
    return ("apt-get", "-qq", "-c", config)


def release_apt(folder: Path, release: str, *, sources: bool = False) -> tuple[str | Path, ...]:
    """apt-get that knows one release of Debian and nothing of what is installed here, and writes only below `folder`.

    It takes that release from each archive of Debian's that this machine's apt is configured for.
    """
    for name in ("lists/partial", "cache/archives/partial", "empty"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    kinds = ("deb", "deb-src") if sources else ("deb",)
    lines = (f"{kind} [signed-by={KEYRING}] {uri} {release} main\n" for uri in archives(folder) for kind in kinds)
    (folder / "sources.list").write_text("".join(lines))
    options = {
        "Dir::Cache": folder / "cache",
        "Dir::State::Lists": folder / "lists",
        "Dir::State::status": folder / "status",
        "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": folder / "empty",
        "Dir::Etc::preferencesparts": folder / "empty",
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "Acquire::Retries": "2",
        "Debug::NoLocking": "1",
    }
    apt = ("apt-get", "-qq", *(word for name, value in options.items() for word in ("-o", f"{name}={value}")))
    run(*apt, "update")
    return apt


def archives(folder: Path) -> list[str]:
    """Each archive of Debian's that this machine's apt is configured for."""
    asked = ("apt-get", "indextargets", "--format", "$(SITE) $(REPO_URI) $(RELEASE)", "Created-By: Packages")
    if not (listed := run(*asked)):  # apt was never updated here
        (folder / "system/partial").mkdir(parents=True)
        lists = ("-o", f"Dir::State::Lists={folder / 'system'}", "-o", "APT::Sandbox::User=root")
        run("apt-get", "-qq", *lists, "update")
        listed = run(*asked, *lists)
    found = {uri for _, uri, release in map(str.split, listed.splitlines()) if "-" not in release}
    if not found:
        raise ToolUnavailableError("apt is not configured for an archive of Debian's")
    return sorted(found)


def run(
    *command: str | Path,
    cwd: Path | None = None,
    variables: Mapping[str, str] | None = None,
    seconds: float = COMMAND_TIMEOUT_SECONDS,
) -> str:
    """Run a command and return its standard output. For a failure, report the last line that looks like an error."""
    words = [str(word) for word in command]
    program = "pip" if words[1:3] == ["-m", "pip"] else Path(words[0]).name
    try:
        done = subprocess.run(
            words,
            cwd=cwd,
            env={**os.environ, "LC_ALL": "C", **(variables or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ToolUnavailableError(f"{program} gave no answer in {seconds:.0f} s") from None
    except OSError as error:
        raise ToolUnavailableError(f"{program} does not run here ({error.strerror})") from error
    if done.returncode:
        lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith(("E:", "ERROR", "dpkg-deb:"))] or lines
        raise ToolUnavailableError(f"{program} failed ({errors[-1] if errors else f'exit {done.returncode}'})")
    return done.stdout


def only(folder: Path, pattern: str) -> Path:
    """The one file of that pattern."""
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise ToolUnavailableError(f"expected one {pattern} to be downloaded, found {len(found)}")
    return found[0]


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A temporary folder inside .tools, on the file system of its final place, so that a rename is atomic."""
    TOOLS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tmp-", dir=TOOLS) as folder:
        yield Path(folder)
