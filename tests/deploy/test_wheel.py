"""What users install: the wheel, with nothing but its run-time dependencies, runs from anywhere."""

import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import gpumap
from tests.demo_process import demo, environment, fetch

ROOT = Path(__file__).resolve().parents[2]
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input")
COMMAND_SECONDS = 300.0
NOT_IN_THE_WHEEL = ("tests/", "scripts/", "protos/", "docs/", "charts/")


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command and give its output; a failure shows it all."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
    )
    assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(name="wheel", scope="module")
def build_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make wheel` does, from a copy of what the build needs: a build leaves things behind."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    into = tmp_path_factory.mktemp("dist")
    run(sys.executable, *PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", into, source, cwd=into)
    (wheel,) = into.glob("*.whl")
    return wheel


@pytest.fixture(name="installed", scope="module")
def install(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with only the run-time lock and the wheel. Gives the folder of its commands."""
    home = tmp_path_factory.mktemp("installed")
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    pip = (sys.executable, *PIP, "--python", python, "install")
    run(*pip, "--require-hashes", "-r", ROOT / "requirements.lock", cwd=home)
    run(*pip, "--no-deps", wheel, cwd=home)
    return home / "bin"


@pytest.fixture(name="empty")
def make_empty_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


def test_the_wheel_has_all_that_gpumap_needs(wheel: Path) -> None:
    """Every module, generated ones too, type marker, default scenario and licence are in it, and no test or script."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    sources = (path for path in (ROOT / "src").rglob("*.py*") if path.suffix in (".py", ".pyi"))
    assert {str(path.relative_to(ROOT / "src")) for path in sources} <= names
    assert {"gpumap/py.typed", "gpumap/lab/demo/default.yaml", "gpumap/agent/_proto/podresources/v1_pb2.py"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert [name for name in names if name.startswith(NOT_IN_THE_WHEEL) or name.endswith((".pyc", ".proto"))] == []


def test_every_run_time_dependency_is_in_the_lock(wheel: Path) -> None:
    """What the wheel asks pip for is in requirements.lock, which is what the image installs."""
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(path).decode()
    asked = {name.lower() for name in re.findall(r"^Requires-Dist: ([\w.-]+)", metadata, re.MULTILINE)}
    locked = set(re.findall(r"^([\w.-]+)==", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    assert asked
    assert asked <= locked
    assert f"\nVersion: {gpumap.__version__}\n" in metadata


def test_pip_finds_nothing_missing(installed: Path) -> None:
    """The environment of the lock and the wheel is complete and without conflict."""
    run(sys.executable, *PIP, "--python", installed / "python", "check", cwd=installed)


def test_the_command_tells_its_version(installed: Path, empty: Path) -> None:
    """`gpumap --version` and `python -m gpumap --version` say the package's version."""
    assert run(installed / "gpumap", "--version", cwd=empty) == f"gpumap {gpumap.__version__}\n"
    assert run(installed / "python", "-m", "gpumap", "--version", cwd=empty) == f"gpumap {gpumap.__version__}\n"


def test_every_module_imports_without_a_warning(installed: Path, empty: Path) -> None:
    """Each module imports with only the run-time dependencies, and with warnings as errors."""
    program = """
import importlib, pkgutil, gpumap
for module in pkgutil.walk_packages(gpumap.__path__, "gpumap."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""
    assert run(installed / "python", "-W", "error", "-c", program, cwd=empty) == ""


def test_no_development_dependency_is_there(installed: Path, empty: Path) -> None:
    """The tests above would not notice a development dependency in use if it were installed."""
    program = "import importlib.util as u; print([n for n in ('pytest', 'grpc_tools', 'mypy') if u.find_spec(n)])"
    assert run(installed / "python", "-c", program, cwd=empty) == "[]\n"


def test_the_demo_runs_from_an_empty_folder(installed: Path, empty: Path) -> None:
    """`gpumap demo` serves its default scenario wherever it is started, and leaves nothing there."""
    with demo(empty, gpumap=[installed / "gpumap"]) as url:
        page, content_type = fetch(f"{url}/metrics")
    assert content_type.startswith("text/plain; version=0.0.4")
    assert re.search(r'^gpumap_allocation_info\{namespace="ml-team",pod="trainer",', page, re.MULTILINE)
    assert f'gpumap_build_info{{version="{gpumap.__version__}",' in page
    assert list(empty.iterdir()) == []
