"""What the guides say to type is what the chart, helm and kubectl take: values, flags, manifests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import kubernetes_validate
import pytest
import yaml

from tests.deploy.chart import CHART, container_of, helm, host_paths, is_hook, pod_of, render, settings
from tests.fences import read_blocks
from tests.promtool import assert_parses
from tests.shells.shell import Command, known_flags, read_commands

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
INSTALL = sorted((DOCS / "how-to" / "install").glob("*.md"))
OPERATORS = [
    ROOT / "README.md",
    *INSTALL,
    *sorted((DOCS / "tutorial").glob("*.md")),
    *(
        DOCS / f"how-to/{name}.md"
        for name in ("pass-admission", "schedulers", "secure-the-port", "troubleshoot", "upgrade")
    ),
    *(DOCS / name for name in ("reference/endpoints.md", "explanation/security.md")),
]
"""The documents that operators type from."""
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
ADMISSION = ROOT / "deploy" / "admission"
POLICY = (ADMISSION / "policy.yaml").read_text(encoding="utf-8")
ANY_NAME = object()
"""What is in a value that takes names of the user's own: labels, annotations, a pod's own fields."""


class Fence(NamedTuple):
    place: str
    body: str


def read_fences(word: str) -> Iterator[Fence]:
    for document in (*OPERATORS, DOCS / "how-to" / "replace" / "dcgm-exporter.md"):
        for block in read_blocks(document.read_text(encoding="utf-8"), "yaml"):
            if block.words == {word}:
                yield Fence(f"{document.name}:{block.line}", block.body)


FENCES = list(read_fences("values"))
MANIFESTS = list(read_fences("manifest"))
FILES = [
    Fence(file, (ROOT / "deploy" / file).read_text(encoding="utf-8"))
    for file in ("admission/policy.yaml", "gke/claim.yaml", "gke/quota.yaml", "reclaim-notebooks.yaml")
]
TYPED_FROM = [
    ROOT / "README.md",
    *(ROOT / place / "README.md" for place in ("charts/gpumap", "deploy")),
    *DOCS.rglob("*.md"),
]
COMMANDS = [command for document in sorted(TYPED_FROM) for command in read_commands(document)]
CHECKED = [one for one in COMMANDS if one.program in ("helm", "kubectl") and one.verb != ("gpumap",)]
"""kubectl gpumap is gpumap's own plugin: tests/shells/test_kubectl.py."""


def look_up(path: str) -> object:
    """The default of a value such as `serviceMonitor.labels.release`; KeyError where there is no such value."""
    found: object = VALUES
    for name in re.sub(r"\[\d+\]", "", path).replace(r"\.", "").split("."):
        if found == {} or found == [] or found is ANY_NAME:
            return ANY_NAME
        if not isinstance(found, dict):
            raise KeyError(path)
        found = found[name]
    return found


def test_the_pages_are_there() -> None:
    """Each page of docs/how-to/install is in its README's table, with a values file of its own."""
    index = (DOCS / "how-to" / "install" / "README.md").read_text(encoding="utf-8")
    for page in INSTALL:
        assert page.name == "README.md" or f"]({page.name})" in index, page.name
        (first, *_) = [fence for fence in FENCES if fence.place.startswith(f"{page.name}:")]
        assert page.name == "README.md" or "image:" in first.body, page.name


def made_by(fence: Fence, folder: Path) -> dict[str, Any]:
    """Return the objects that helm makes of a values file, by kind.

    A block without an image is a part: helm adds it to the page's first file. README.md has parts only.
    """
    page = fence.place.partition(":")[0]
    first = next(one for one in FENCES if one.place.startswith(f"{page}:"))
    image: Iterable[str] = settings(()) if page == "README.md" else ()
    files = [fence] if "image" in yaml.safe_load(fence.body) or image else [first, fence]
    for number, one in enumerate(files):
        (folder / f"{number}.yaml").write_text(one.body, encoding="utf-8")
    given = [word for number in range(len(files)) for word in ("--values", str(folder / f"{number}.yaml"))]
    done = helm("template", "gpumap", CHART, "--namespace", "gpumap", *given, *image)
    assert done.returncode == 0, done.stderr
    return {one["kind"]: one for one in yaml.safe_load_all(done.stdout) if one and not is_hook(one)}


@pytest.mark.parametrize("fence", FENCES, ids=lambda fence: fence.place)
def test_a_values_file_renders(fence: Fence, tmp_path: Path) -> None:
    """The chart takes it: no name is unknown, no value of the wrong shape; it makes an agent."""
    by_kind = made_by(fence, tmp_path)
    assert container_of(by_kind)["name"] == "gpumap"
    if "serviceMonitor" in yaml.safe_load(fence.body):
        assert "ServiceMonitor" in by_kind


@pytest.mark.parametrize("fence", [*MANIFESTS, *FILES], ids=lambda fence: fence.place)
def test_a_manifest_fits_its_schema(fence: Fence) -> None:
    """Kubernetes' own schema takes it, and knows each of its fields."""
    for manifest in yaml.safe_load_all(fence.body):
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def test_admission_policies_allow_what_the_chart_mounts() -> None:
    """The policies in deploy/admission name the node's folders that the chart mounts by default, and no other."""
    mounted = {*host_paths(render())}
    constraint = yaml.safe_load((ADMISSION / "gatekeeper.yaml").read_text(encoding="utf-8"))
    allowed = constraint["spec"]["parameters"]["allowedHostPaths"]
    assert {one["pathPrefix"] for one in allowed} == mounted
    assert all(one["readOnly"] for one in allowed)
    assert {*re.findall(r"'(/[a-z/-]+)'", POLICY)} == mounted


def test_admission_policies_tell_what_else_the_chart_can_mount() -> None:
    """pass-admission.md names the folder that each optional value adds, and for none of them leaves its row out."""
    page = (DOCS / "how-to" / "pass-admission.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([A-Za-z.]+)` \| `(?:readable|writable)` \| (.+) \|$", page, re.MULTILINE))
    given = {
        "privileges.dra": "true",
        "privileges.podsApi": "true",
        "privileges.gpuFractioning": "true",
        "nvml.hostPath": "/opt/nvidia/lib",
    }
    assert {*rows} == {*given, "kubelet.rootDir"}
    for name, value in given.items():
        (added,) = {*host_paths(render(f"{name}={value}"))} - {*host_paths(render())}
        assert rows[name] == ("its value" if added == value else f"`{added}`")
    root = "/var/lib/k0s/kubelet"
    moved = {*host_paths(render(f"kubelet.rootDir={root}"))} - {"/var/log/pods", "/var/log/containers"}
    assert moved == {f"{root}/pod-resources", f"{root}/device-plugins", "/var/lib/kubelet/device-plugins"}


def rendered(page: str, number: int, tmp_path: Path) -> dict[str, Any]:
    """What a page's values file, by its place on the page, makes of each kind."""
    return made_by([one for one in FENCES if one.place.startswith(f"{page}:")][number], tmp_path)


def test_platforms_get_what_their_pages_say(tmp_path: Path) -> None:
    """A mount asks for all GPUs, a claim reaches the container, a label keeps the pod off the node."""
    mounted = rendered("README.md", 0, tmp_path)
    assert host_paths(mounted)["/dev/null"] == "/var/run/nvidia-container-devices/all"
    claims = rendered("gke.md", 1, tmp_path)
    assert pod_of(claims)["resourceClaims"][0]["resourceClaimTemplateName"] == "all-gpus"
    assert container_of(claims)["resources"]["claims"] == [{"name": "gpus"}]
    waited_for = rendered("gpu-operator.md", 1, tmp_path)
    assert pod_of(waited_for)["nodeSelector"].items() >= {("nvidia.com/gpu.deploy.client", "true")}
    assert "nvidia.com/gpu.deploy.client" in str(pod_of(rendered("gpu-operator.md", 0, tmp_path))["affinity"])
    followed = pod_of(rendered("gpu-operator.md", 2, tmp_path))["nodeSelector"]
    assert followed.items() >= {("nvidia.com/gpu.deploy.dcgm-exporter", "true")}


PLATFORMS = re.findall(
    r"^\| ([^|]+) \| (`[^|]+`) \|", (DOCS / "how-to/install/README.md").read_text(encoding="utf-8"), re.MULTILINE
)


@pytest.mark.parametrize(("platform", "cell"), PLATFORMS, ids=lambda text: text.partition("`")[0])
def test_a_row_of_platforms_has_values(platform: str, cell: str) -> None:
    """Each assignment of the second column is one of the chart; a root is mounted, a class is the pod's."""
    given = dict(text.split("=", 1) for text in re.findall("`([^`]+)`", cell))
    made = render(*(f"{name}={value}" for name, value in given.items()))
    assert pod_of(made)["runtimeClassName"] == given["runtimeClassName"], platform
    if root := given.get("kubelet.rootDir"):
        assert f"{root}/pod-resources" in host_paths(made)


def test_platforms_are_found() -> None:
    """Those with a root of their own are among them."""
    assert sum("kubelet.rootDir" in cell for _, cell in PLATFORMS) == 2


def test_the_page_of_the_gpu_operator_has_one_complete_file(tmp_path: Path) -> None:
    """Its first values file: monitor and rules with the stack's label, boards for Grafana, NVIDIA's runtime class."""
    manifests = rendered("gpu-operator.md", 0, tmp_path)
    for kind in ("ServiceMonitor", "PrometheusRule"):
        assert manifests[kind]["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    assert manifests["PrometheusRule"]["spec"]["groups"]
    assert manifests["ConfigMap"]["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert pod_of(manifests)["runtimeClassName"] == "nvidia"


def test_openshift_gets_what_its_page_says(tmp_path: Path) -> None:
    """A constraint that is no wider than the pod, and the SELinux type that each of the two ways names."""
    manifests = rendered("openshift.md", 0, tmp_path)
    constraints = manifests["SecurityContextConstraints"]
    assert not constraints["allowPrivilegedContainer"]
    assert not constraints["allowHostNetwork"]
    assert "ALL" in constraints["requiredDropCapabilities"]
    assert selinux_type(manifests) == "spc_t"
    least = rendered("openshift.md", 1, tmp_path)
    assert selinux_type(least) == "container_device_plugin_t"
    assert not pod_of(least)["hostPID"]
    assert {*host_paths(least)} == {"/var/lib/kubelet/pod-resources"}


def selinux_type(manifests: dict[str, Any]) -> str:
    options = [
        one.get("securityContext", {}).get("seLinuxOptions") for one in (pod_of(manifests), container_of(manifests))
    ]
    (found,) = [one["type"] for one in options if one]
    return str(found)


def test_commands_are_found() -> None:
    assert len(CHECKED) > 20
    assert any(command.place.startswith("README.md") and command.program == "helm" for command in CHECKED)


@pytest.mark.parametrize("command", CHECKED, ids=lambda command: f"{command.place} {' '.join(command.verb)}")
def test_a_command_has_the_flags_that_it_is_given(command: Command) -> None:
    """helm and kubectl name each flag in their own help."""
    unknown = set(command.flags) - known_flags(command.program, command.verb)
    assert not unknown, f"{command.place}: {command.program} {' '.join(command.verb)} has no {sorted(unknown)}"


@pytest.mark.parametrize(
    "command", [one for one in CHECKED if one.program == "helm"], ids=lambda command: command.place
)
def test_a_command_sets_values_that_there_are(command: Command) -> None:
    """Each `--set` names a value of the chart, and the chart that is named is there."""
    for assignment in (*command.given("--set"), *command.given("--set-string")):
        for part in re.sub(r"\{[^}]*\}", "", assignment).split(","):
            look_up(part.partition("=")[0])
    for word in command.own:
        if word.startswith("charts/"):
            assert (ROOT / word / "Chart.yaml").is_file()


@pytest.mark.parametrize("document", OPERATORS, ids=lambda document: document.stem)
def test_values_named_in_the_text_are_there(document: Path) -> None:
    """Inline code that begins with the name of a group of values is a value, if it is not the name of a file."""
    groups = {name for name, value in VALUES.items() if isinstance(value, dict) and value}
    text = re.sub(r"^ *```.*?^ *```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for name in re.findall(r"`([A-Za-z]+(?:\.[A-Za-z]+)+)(?:=[^`]*)?`", text):
        if name.partition(".")[0] in groups and not name.endswith(".sock"):
            look_up(name)


@pytest.mark.parametrize("document", OPERATORS, ids=lambda document: document.stem)
def test_metrics_named_in_the_text_are_there(document: Path) -> None:
    """What begins with gpumap_ is a metric of docs/reference/metrics.md, or the beginning of some, with three dots."""
    known = set(
        re.findall(r"^\| `(gpumap_\w+)`", (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8"), re.MULTILINE)
    )
    for name, dots in re.findall(r"\b(gpumap_\w+)(…?)", document.read_text(encoding="utf-8")):
        assert name in known or (dots and any(one.startswith(name) for one in known)), name


@pytest.mark.parametrize("document", OPERATORS, ids=lambda document: document.stem)
def test_queries_parse(document: Path, tmp_path: Path) -> None:
    """promtool reads each query; in a block with a comment on each line, each line is one."""
    queries: list[str] = []
    for block in read_blocks(document.read_text(encoding="utf-8"), "promql"):
        lines = block.body.splitlines()
        queries += lines if all(" #" in line for line in lines) else [block.body]
    assert_parses(queries, tmp_path)


def test_the_first_number_takes_the_commands_that_are_counted() -> None:
    """docs/how-to/install/README.md counts its own way: three commands to the first number."""
    page = (DOCS / "how-to" / "install" / "README.md").read_text(encoding="utf-8")
    way = page.partition("## The common way")[2].partition("## ")[0]
    (block,) = list(read_blocks(way, "console"))
    assert page.count("three commands") == 1
    assert [line.split()[1] for line in block.body.splitlines() if line.startswith("$ ")] == [
        "docker",
        "helm",
        "kubectl",
    ]


def test_the_readme_is_short() -> None:
    """README.md: what it is, a page in one minute, install, where to read on; at most 140 lines."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 140
