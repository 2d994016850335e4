"""The chart as a package and as releases: what is in it, what two releases share, what an upgrade cannot change."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shutil
import tarfile
from pathlib import Path

import pytest
import yaml

from scripts.chart_values import read
from tests.deploy.chart import CHART, IMAGE, Manifest, helm, is_hook, render, render_all, settings
from tests.deploy.chart_variations import EVERYTHING, VARIATIONS

ALIASES = ("gpumap-old", "gpumap-new")
GARBAGE = (".git", ".values.yaml.swp", "values.yaml~", "values.yaml.orig", "dashboards/.new.json.tmp")


def package(chart: Path, folder: Path) -> Path:
    """What `helm package` makes of it."""
    done = helm("package", chart, "--destination", folder)
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("*.tgz")
    return made


@pytest.fixture(name="packaged", scope="module")
def make_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart as `helm package` makes it, of a folder in which somebody has worked."""
    folder = tmp_path_factory.mktemp("chart")
    shutil.copytree(CHART, folder / "gpumap", symlinks=True)
    for name in GARBAGE:
        (folder / "gpumap" / name).write_text("of an editor\n")
    return package(folder / "gpumap", folder)


def test_the_package_is_whole(packaged: Path) -> None:
    """Templates, rules, boards, README and schema are in it, as they are; nothing else, and no link out of it."""
    with tarfile.open(packaged) as archive:
        members = archive.getmembers()
        assert all(one.isfile() for one in members)
        names = {one.name.removeprefix("gpumap/") for one in members}
        for one in members:
            name = one.name.removeprefix("gpumap/")
            content = archive.extractfile(one)
            assert content is not None
            if name != "Chart.yaml":  # helm writes it again
                assert content.read() == (CHART / name).read_bytes(), name
    whole = {str(one.relative_to(CHART)) for one in CHART.rglob("*") if one.is_file()}
    values = {str(one.relative_to(CHART)) for one in (CHART / "ci").iterdir()}
    assert names == whole - {".helmignore", "dashboards/kustomization.yaml"} - values
    assert names > {"Chart.yaml", "README.md", "values.yaml", "values.schema.json", "templates/NOTES.txt"}
    for part in ("rules/*.yaml", "dashboards/*.json"):
        files = {str(one.relative_to(CHART)) for one in CHART.glob(part)}
        assert files
        assert files <= names
    assert not any(one.is_symlink() for one in CHART.rglob("*"))


@pytest.mark.parametrize("variation", ["defaults", "everything"])
def test_the_package_makes_what_the_folder_makes(packaged: Path, variation: str) -> None:
    """A chart from a registry is the one of the repository, rules and boards included."""
    values = VARIATIONS[variation]
    assert render_all(*values, chart=packaged) == render_all(*values)


def identity(manifest: Manifest) -> tuple[str, str | None, str]:
    """What two objects of a cluster cannot have in common."""
    metadata = manifest["metadata"]
    return manifest["kind"], metadata.get("namespace"), metadata["name"]


@pytest.mark.parametrize(
    ("release", "namespace"),
    [("blue", "monitoring"), ("gpumap", "elsewhere"), ("gpumap-2", "monitoring"), ("my-gpumap", "monitoring")],
)
@pytest.mark.parametrize("values", [EVERYTHING, VARIATIONS["TLS"]], ids=["everything", "TLS"])
def test_two_releases_share_no_object(release: str, namespace: str, values: tuple[str, ...]) -> None:
    """With everything on, a release called gpumap has no object in common with another one, in its namespace or out."""
    one = {identity(manifest) for manifest in render_all(*values)}
    other = {identity(manifest) for manifest in render_all(*values, release=release, namespace=namespace)}
    assert one & other == set()


def test_a_monitor_finds_its_service_whatever_argo_writes() -> None:
    """Argo CD may replace app.kubernetes.io/instance on the Service; another release's monitor does not find it."""
    made = {release: {one["kind"]: one for one in render_all(*EVERYTHING, release=release)} for release in ("a", "b")}
    wanted = made["a"]["ServiceMonitor"]["spec"]["selector"]["matchLabels"].items()
    services = {release: kinds["Service"]["metadata"]["labels"] for release, kinds in made.items()}
    assert wanted <= (services["a"] | {"app.kubernetes.io/instance": "an-application"}).items()
    assert not wanted <= services["b"].items()
    common = "commonLabels.gpumap/release=other", "service.labels.gpumap/release=other"
    assert (
        wanted <= render("serviceMonitor.enabled=true", *common, release="a")["Service"]["metadata"]["labels"].items()
    )


@pytest.mark.parametrize("values", [(), EVERYTHING], ids=["defaults", "everything"])
def test_one_releases_objects_select_their_own_pods(values: tuple[str, ...]) -> None:
    """Beside another release in the namespace, what selects pods or Services finds only those of its own release."""
    for manifest in render_all(*values, release="blue"):
        for found in re.finditer(r'"app.kubernetes.io/instance": "([^"]+)"', json.dumps(manifest)):
            assert found[1] == "blue", manifest["kind"]


@pytest.fixture(name="parent", scope="module")
def make_parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chart that has gpumap three times, twice by an alias."""
    folder = tmp_path_factory.mktemp("parent")
    shutil.copytree(CHART, folder / "charts" / "gpumap")
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
    parts = [{"name": "gpumap", "version": version, **alias} for alias in ({}, *({"alias": one} for one in ALIASES))]
    (folder / "Chart.yaml").write_text(
        yaml.safe_dump({"apiVersion": "v2", "name": "parent", "version": "0.1.0", "dependencies": parts})
    )
    return folder


def test_aliases_are_agents_apart(parent: Path) -> None:
    """Each is found by `kubectl gpumap`, has objects of its own, and none selects the pods of another."""
    made = [
        one
        for one in render_all(*(f"{name}.{IMAGE}" for name in ("gpumap", *ALIASES)), chart=parent)
        if not is_hook(one)
    ]
    assert len({identity(one) for one in made}) == len(made)
    agents = [one["spec"] for one in made if one["kind"] == "DaemonSet"]
    assert len(agents) == 1 + len(ALIASES)
    pods = [one["template"]["metadata"]["labels"] for one in agents]
    assert {labels["app.kubernetes.io/name"] for labels in pods} == {"gpumap"}
    selectors = [one["selector"]["matchLabels"] for one in agents]
    selectors += [one["spec"]["selector"] for one in made if one["kind"] == "Service"]
    for selector in selectors:
        assert len([labels for labels in pods if selector.items() <= labels.items()]) == 1


def test_no_value_and_no_version_changes_a_selector(tmp_path: Path) -> None:
    """The API refuses an upgrade that changes a DaemonSet's selector: it depends only on the release's name."""
    newer = tmp_path / "gpumap"
    shutil.copytree(CHART, newer)
    (newer / "Chart.yaml").write_text(
        re.sub(r"^(version|appVersion): .*$", r"\1: 9.9.9", (CHART / "Chart.yaml").read_text(), flags=re.MULTILINE)
    )
    selector = {"app.kubernetes.io/name": "gpumap", "app.kubernetes.io/instance": "gpumap"}
    for made in [*(render_all(*values) for values in VARIATIONS.values()), render_all(chart=newer)]:
        (agents,) = [one for one in made if one["kind"] == "DaemonSet"]
        assert agents["spec"]["selector"] == {"matchLabels": selector}
        assert [one["spec"]["selector"] for one in made if one["kind"] == "Service"] in ([selector], [])
    assert "9.9.9" in json.dumps(agents)


def test_the_defaults_can_be_given() -> None:
    """values.yaml, copied to begin a file of one's own, installs what no file installs."""
    done = helm(
        "template", "gpumap", CHART, "--namespace", "monitoring", "--values", CHART / "values.yaml", *settings(())
    )
    assert done.returncode == 0, done.stderr
    assert tuple(one for one in yaml.safe_load_all(done.stdout) if one) == render_all()


def test_every_value_is_tried() -> None:
    values = read((CHART / "values.yaml").read_text(), json.loads((CHART / "values.schema.json").read_text()))
    tried = {re.split(r"[=\[]", one)[0] for variation in VARIATIONS.values() for one in variation}
    untried = [
        value.name
        for value in values
        if value.type and not any(f"{one}.".startswith(f"{value.name}.") for one in tried)
    ]
    assert untried == []


def test_a_release_fits_in_its_secret(packaged: Path) -> None:
    """Helm keeps the chart and what it made, packed, in a Secret, which holds 1 MiB: half of it is left to grow."""
    made = json.dumps(render_all(*EVERYTHING)).encode()
    kept = base64.b64encode(packaged.read_bytes() + gzip.compress(made))
    assert len(kept) < 512 << 10
