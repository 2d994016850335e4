"""The files that publish a release: each fits its reader's schema, and they agree with each other and with the code.

Nothing here is published: docs/dev/release.md says what was never run.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import gpumap
from gpumap.agent.flags import add_flags
from gpumap.agent.settings import resolve
from scripts import set_owner
from tests.deploy.chart import CHART, helm, is_hook
from tests.deploy.test_chart_schemas import VERSIONS
from tests.promtool import accepted
from tests.tools import tool

ROOT = CHART.parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").iterdir())
SCHEMAS = {
    **{f".github/workflows/{path.name}": "vendor.github-workflows" for path in WORKFLOWS},
    ".github/ISSUE_TEMPLATE/bug.yml": "vendor.github-issue-forms",
    ".github/ISSUE_TEMPLATE/feature.yml": "vendor.github-issue-forms",
    ".github/ISSUE_TEMPLATE/config.yml": "vendor.github-issue-config",
    "renovate.json": "vendor.renovate",
    "compose.yaml": "vendor.compose-spec",
    "deploy/compose/machine.yaml": "vendor.compose-spec",
}
"""Each file, and the schema that check-jsonschema carries of it."""
PINNED = re.compile(r"@[0-9a-f]{40}$|^pypa/gh-action-pypi-publish@release/v1$")
CHART_FIELDS = {
    "apiVersion": str,
    "name": str,
    "version": str,
    "appVersion": str,
    "description": str,
    "type": str,
    "home": str,
    "icon": str,
    "kubeVersion": str,
    "keywords": list,
    "sources": list,
    "maintainers": list,
    "annotations": dict,
}
"""What `ct lint` permits in Chart.yaml, as far as the chart uses it (chart-testing 3.14, etc/chart_schema.yaml)."""
YAMLLINT = {
    "extends": "default",
    "rules": {
        "braces": {"max-spaces-inside": 0},
        "brackets": {"max-spaces-inside": 0},
        "document-start": "disable",
        "indentation": {"spaces": "consistent", "indent-sequences": "whatever"},
        "line-length": "disable",
    },
}
"""At least as strict as that of `ct lint` (chart-testing 3.14, etc/lintconf.yaml)."""


def read(name: str) -> Any:
    text = (ROOT / name).read_text(encoding="utf-8")
    return json.loads(text) if name.endswith(".json") else yaml.safe_load(text)


def check(*command: str | Path) -> str:
    """Run a tool, which must succeed."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_file_fits_its_schema(name: str) -> None:
    """The schema comes with check-jsonschema, so nothing is fetched."""
    check(sys.executable, "-m", "check_jsonschema", "--builtin-schema", SCHEMAS[name], name)


def test_every_issue_form_and_workflow_is_checked() -> None:
    forms = {f".github/ISSUE_TEMPLATE/{path.name}" for path in (ROOT / ".github" / "ISSUE_TEMPLATE").iterdir()}
    assert forms <= SCHEMAS.keys()


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_careful(workflow: Path) -> None:
    """Each action has a commit, each job a deadline and its own rights; no expression is pasted into a script."""
    document = read(str(workflow.relative_to(ROOT)))
    assert document["permissions"] in ({}, {"contents": "read"})
    for name, job in document["jobs"].items():
        if "uses" in job:
            continue
        assert job["timeout-minutes"] <= 90, name
        for step in job["steps"]:
            assert "uses" not in step or PINNED.search(step["uses"]), step
            assert "${{" not in step.get("run", ""), step
            subprocess.run(["bash", "-n"], input=step.get("run", ""), text=True, timeout=10, check=True)


def steps(job: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read(".github/workflows/release.yaml")["jobs"][job]["steps"]
    return found


def test_a_release_has_one_version() -> None:
    """The release stops if the tag, the package and the chart disagree."""
    (script,) = [step["run"] for step in steps("build") if step.get("id") == "version"]
    script = script.replace('>> "$GITHUB_OUTPUT"', "")
    for tag, accepted_ in ((f"v{gpumap.__version__}", True), ("v9.9.9", False)):
        done = subprocess.run(
            ["bash", "-e", "-c", script], cwd=ROOT, env={"GITHUB_REF_NAME": tag}, check=False, timeout=10
        )
        assert (done.returncode == 0) is accepted_


def test_the_published_chart_names_the_published_image(tmp_path: Path) -> None:
    """The release writes the image and its digest into the chart's values, and packages it."""
    (script,) = [step["run"] for step in steps("chart") if "helm package" in step.get("run", "")]
    shutil.copytree(CHART, tmp_path / "charts" / "gpumap")
    digest = "sha256:" + 64 * "a"
    script = "\n".join(line for line in script.splitlines() if not line.startswith("helm"))
    environment = {"REGISTRY": "ghcr.io", "OWNER": "Acme", "DIGEST": digest, "PATH": "/usr/bin:/bin"}
    subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, env=environment, check=True, timeout=10)
    done = helm("template", "gpumap", tmp_path / "charts" / "gpumap")
    assert done.returncode == 0, done.stderr
    images = re.findall(r"^ +image: (.*)$", done.stdout, re.MULTILINE)
    assert {*images} == {f'"ghcr.io/acme/gpumap@{digest}"'}


def test_the_image_gets_every_argument_of_the_dockerfile() -> None:
    """Version, commit, source and times are in the labels of the published image."""
    (build,) = [step["with"] for step in steps("image") if "build-push" in step.get("uses", "")]
    given = {line.partition("=")[0] for line in build["build-args"].splitlines()}
    declared = re.findall(r"^ARG (\w+)", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert given == {*declared} - {"BUILD", "RUNTIME"}


def test_the_owner_is_one_name_in_one_place(tmp_path: Path) -> None:
    """release.env has it; the script writes it into each file that names it, and no other file does."""
    old = set_owner.owner()
    named = check("git", "grep", "--untracked", "-lF", old, "--", ".", ":!tests", ":!scripts").split()
    assert {*named} == {*set_owner.FILES}
    for name in set_owner.FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    set_owner.set_owner("Acme-Inc", tmp_path)
    for name in set_owner.FILES:
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert old not in text, name
        assert "Acme-Inc" in text or "acme-inc" in text, name
    assert "ghcr.io/acme-inc/" in (tmp_path / "charts" / "gpumap" / "Chart.yaml").read_text(encoding="utf-8")
    set_owner.set_owner(old, tmp_path)
    for name in set_owner.FILES:
        assert (tmp_path / name).read_bytes() == (ROOT / name).read_bytes(), name


def test_the_package_links_to_the_owners_repository() -> None:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    assert {"Homepage", "Documentation", "Changelog", "Issues"} == urls.keys()
    assert all(url.startswith(f"https://github.com/{set_owner.owner()}/gpumap") for url in urls.values())


def test_chart_yaml_is_such_as_ct_lint_takes() -> None:
    """Known fields of their types, maintainers that are accounts of the sources' host, and annotations of strings."""
    chart = read("charts/gpumap/Chart.yaml")
    assert {name: type(value) for name, value in chart.items()} == CHART_FIELDS
    for maintainer in chart["maintainers"]:
        assert maintainer.keys() <= {"name", "email", "url"}
        assert maintainer["url"] == f"https://github.com/{maintainer['name']}"
    assert all(isinstance(one, str) for one in (*chart["annotations"].values(), *chart["keywords"], *chart["sources"]))
    assert re.fullmatch(r"\d+\.\d+\.\d+", chart["version"])
    assert chart["kubeVersion"] == f">={VERSIONS[0]}.0-0"


def test_artifact_hubs_annotations_are_its_own() -> None:
    """Those with YAML as their value can be read, and have the fields that Artifact Hub knows (its docs, v1.22)."""
    annotations = read("charts/gpumap/Chart.yaml")["annotations"]
    assert annotations["artifacthub.io/category"] == "monitoring-logging"
    assert annotations["artifacthub.io/prerelease"] in ("true", "false")
    (image,) = yaml.safe_load(annotations["artifacthub.io/images"])
    assert image["image"].endswith(f"/gpumap:{gpumap.__version__}")
    assert image["platforms"] == ["linux/amd64", "linux/arm64"]
    kinds = {"added", "changed", "deprecated", "removed", "fixed", "security"}
    changes = yaml.safe_load(annotations["artifacthub.io/changes"])
    assert all(one.keys() <= {"kind", "description", "links"} and one["kind"] in kinds for one in changes)
    links = yaml.safe_load(annotations["artifacthub.io/links"])
    assert "support" in {one["name"] for one in links}
    repository = read("artifacthub-repo.yml")
    assert repository.keys() == {"repositoryID", "owners"}


def test_yamllint_has_nothing_to_say() -> None:
    """On the chart's own YAML, as `ct lint` checks it, and on the kit's."""
    files = ["charts/gpumap/Chart.yaml", "charts/gpumap/values.yaml", "compose.yaml", "artifacthub-repo.yml"]
    folders = ["charts/gpumap/ci", "deploy/compose"]
    check(sys.executable, "-m", "yamllint", "--strict", "-d", json.dumps(YAMLLINT), *files, *folders)


@pytest.mark.parametrize("values", sorted((CHART / "ci").iterdir()), ids=lambda path: path.stem)
def test_ct_lints_values_install(values: Path) -> None:
    """`ct lint` runs `helm lint` with each file of ci/."""
    done = helm("lint", "--strict", CHART, "--values", values)
    assert done.returncode == 0, done.stdout
    done = helm("template", "gpumap", CHART, "--values", values)
    assert done.returncode == 0, done.stderr
    made = [one for one in yaml.safe_load_all(done.stdout) if one and not is_hook(one)]
    release = read(str(values.relative_to(ROOT))).get("serviceMonitor", {}).get("labels", {}).get("release")
    selected = {one["kind"] for one in made if one["metadata"]["labels"].get("release")}
    assert selected == ({"ServiceMonitor", "PrometheusRule"} if release else set())


def test_compose_runs_the_demo_with_every_rule_and_board(tmp_path: Path) -> None:
    """Each mounted file exists, and Prometheus takes its configuration with the rules of the chart."""
    compose = read("compose.yaml")
    mounts = [mount.split(":") for service in compose["services"].values() for mount in service.get("volumes", ())]
    assert all((ROOT / source).exists() and mode == "ro" for source, _, mode in mounts)
    places = {target: ROOT / source for source, target, _ in mounts}
    shutil.copy(places["/etc/prometheus/prometheus.yml"], tmp_path)
    shutil.copytree(places["/etc/prometheus/rules"], tmp_path / "rules")
    said = accepted("check", "config", tmp_path / "prometheus.yml").stdout
    assert f"SUCCESS: {len([*(tmp_path / 'rules').iterdir()])} rule files found" in said
    (target,) = read("deploy/compose/prometheus.yml")["scrape_configs"][0]["static_configs"]
    assert target["targets"] == ["gpumap:9401"]
    assert compose["services"]["gpumap"]["command"] == ["demo", "--listen", ":9401"]
    (provider,) = read("deploy/compose/grafana/boards.yaml")["providers"]
    assert places[provider["options"]["path"]] == CHART / "dashboards"
    (source,) = read("deploy/compose/grafana/datasource.yaml")["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """Every directive is known, and the unit is hardened, as `systemd-analyze` rates it."""
    analyze = tool("systemd-analyze")
    text = (ROOT / "deploy" / "systemd" / "gpumap.service").read_text(encoding="utf-8")
    unit = tmp_path / "gpumap.service"
    unit.write_text(text.replace("/opt/gpumap/bin/gpumap", sys.executable), encoding="utf-8")
    done = subprocess.run((analyze, "verify", unit), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    check(analyze, "security", "--offline=true", "--threshold=25", unit)


def test_the_units_command_is_one_of_gpumaps() -> None:
    """With the flags that it has today."""
    text = (ROOT / "deploy" / "systemd" / "gpumap.service").read_text(encoding="utf-8")
    (arguments,) = re.findall(r"^ExecStart=/opt/gpumap/bin/gpumap serve (.*)$", text, re.MULTILINE)
    known = check(sys.executable, "-m", "gpumap", "serve", "--help")
    assert all(word.partition("=")[0] in known for word in arguments.split())
    assert "--no-kubelet" in arguments.split()


def test_compose_runs_gpumap_on_a_machine() -> None:
    """With what PID visibility needs, and without any right; its command is one of gpumap's."""
    compose = read("deploy/compose/machine.yaml")
    (gpumap,) = compose["services"].values()
    assert (gpumap["pid"], gpumap["cgroup"], gpumap["uts"]) == ("host", "private", "host")
    assert (gpumap["cap_drop"], gpumap["read_only"], "privileged" in gpumap) == (["ALL"], True, False)
    command, *arguments = gpumap["command"]
    parser = argparse.ArgumentParser()
    add_flags(parser)
    settings = resolve(parser.parse_args(arguments), {})
    assert (command, settings.has_kubelet, settings.listen.port) == ("serve", False, 9401)
    assert (ROOT / "deploy" / "compose" / gpumap["build"] / "Dockerfile").exists()


def test_precommits_hooks_are_those_of_make_check() -> None:
    """Local programs, so that a hook and `make check` never disagree."""
    (repository,) = read(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("$(BIN)", ".venv/bin")
    for hook in repository["hooks"]:
        assert hook["entry"] in makefile, hook["id"]


def test_renovate_reads_every_lock() -> None:
    (pattern,) = read("renovate.json")["pip_requirements"]["managerFilePatterns"]
    locks = check("git", "ls-files", "*.lock").split()
    assert len(locks) == 4
    assert all(re.search(pattern.strip("/"), lock) for lock in locks)
    assert not any(re.search(pattern.strip("/"), name) for name in ("uv.lock", "requirements.txt"))


def test_no_default_image_is_published_yet() -> None:
    assert read("charts/gpumap/values.yaml")["image"]["repository"] == ""
