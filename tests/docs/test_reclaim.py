"""The recipe for idle notebooks: its objects fit together, and its script changes nothing unless it is asked to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.pages import running
from tests.promtool import assert_answers

FILE = Path(__file__).parents[2] / "deploy" / "reclaim-notebooks.yaml"


def objects() -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all(FILE.read_text(encoding="utf-8"))}


@contextmanager
def playing(replicas: int, owners: list[Any], changed: list[Any], asked: list[str]) -> Iterator[str]:
    """A Prometheus with one idle pod of a notebook, and an API server."""

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.startswith("/api/v1/query"):
                asked.append(urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)["query"][0])
                self.answer({"data": {"result": [{"metric": {"owner_name": "anna"}, "value": [0, "1"]}]}})
            else:
                self.answer({"metadata": {"ownerReferences": owners}, "spec": {"replicas": replicas}})

        def do_PATCH(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            changed.append((self.path, self.headers["Authorization"], self.headers["Content-Type"], body))
            self.answer({})

        def answer(self, document: object) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(document).encode())

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with running(Server) as address:
        yield f"http://{address}"


def test_the_objects_fit_together() -> None:
    """The job has the account that the role is bound to, mounts the script, and prints only."""
    found = objects()
    (name,) = {one["metadata"]["name"] for one in found.values()}
    pod = found["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["serviceAccountName"] == found["RoleBinding"]["roleRef"]["name"] == name
    assert (
        container["command"][-1]
        == f"{container['volumeMounts'][0]['mountPath']}/{next(iter(found['ConfigMap']['data']))}"
    )
    assert {"name": "STOP", "value": "false"} in container["env"]
    assert {(*rule["resources"], *rule["verbs"]) for rule in found["Role"]["rules"]} == {
        ("statefulsets", "get"),
        ("statefulsets/scale", "patch"),
        ("notebooks", "patch"),
    }


KUBEFLOW = {"apiVersion": "kubeflow.org/v1", "kind": "Notebook", "name": "annas"}
SCALE = "/apis/apps/v1/namespaces/notebooks/statefulsets/anna/scale"
NOTEBOOK = "/apis/kubeflow.org/v1/namespaces/notebooks/notebooks/annas"


@pytest.mark.parametrize(
    ("flag", "replicas", "owners", "expected", "patched"),
    [
        ("false", 1, [], "idle, would be stopped", None),
        ("true", 1, [], "idle, stopped", SCALE),
        ("true", 1, [KUBEFLOW], "idle, stopped", NOTEBOOK),
        (
            "true",
            1,
            [KUBEFLOW | {"kind": "Server"}],
            "idle, not changed: stop the object that owns its StatefulSet",
            None,
        ),
        ("true", 2, [KUBEFLOW], "1 of 2 replicas are idle, not changed", None),
    ],
)
def test_the_script(
    tmp_path: Path, flag: str, replicas: int, owners: list[Any], expected: str, patched: str | None
) -> None:
    """It stops a notebook if it is asked to, and if all replicas are idle: the Notebook of Kubeflow, which would scale
    its StatefulSet up again, or a StatefulSet without an owner."""
    (tmp_path / "token").write_text("secret\n")
    changed: list[Any] = []
    asked: list[str] = []
    (script,) = objects()["ConfigMap"]["data"].values()
    with playing(replicas, owners, changed, asked) as url:
        variables = {"NAMESPACE": "notebooks", "PROMETHEUS": url, "API": url, "SECRETS": str(tmp_path), "STOP": flag}
        done = subprocess.run(
            [sys.executable, "-c", script], env=os.environ | variables, capture_output=True, text=True, check=False
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"notebooks/anna: {expected}\n", "")
    assert [change[:3] for change in changed] == (
        [(patched, "Bearer secret", "application/merge-patch+json")] if patched else []
    )
    for *_, body in changed:
        if patched == SCALE:
            assert body == {"spec": {"replicas": 0}}
        else:
            assert datetime.fromisoformat(body["metadata"]["annotations"]["kubeflow-resource-stopped"])
    check_query(tmp_path, asked[0])


def check_query(folder: Path, query: str) -> None:
    """A pod counts if the alert fires for all of its devices and none is unknown. An alert of a tenant counts for
    nothing."""

    def series(name: str, pod: str, uuid: str, **more: str) -> str:
        of = {"namespace": "notebooks", "pod": pod, "container": "main", "uuid": uuid, **more}
        shown = ",".join(f'{key}="{one}"' for key, one in of.items())
        return f"{name}{{{shown}}}"

    alert = {"alertname": "GpumapGpuIdle", "alertstate": "firing"}
    held = [("anna-0", "0"), ("both-0", "1"), ("both-0", "2"), ("tom-0", "3"), ("eva-0", "4")]
    given = [series("gpumap_allocation_info", *one, job="gpumap") for one in held]
    given += [series("ALERTS", *one, **alert) for one in held[:2]]
    given += [series("ALERTS", *held[3], **alert, job="tenant")]
    given += [series("ALERTS", *held[4], **alert), series("gpumap_unmatched_slots", "eva-0", "", job="gpumap")]
    for pod in ("anna", "both", "tom", "eva"):
        owner = {"owner_kind": "StatefulSet", "owner_name": pod, "job": "kube-state-metrics"}
        given += [series("kube_pod_owner", f"{pod}-0", "", **owner)]
    assert_answers(folder, dict.fromkeys(given, "1x10"), (query, "5m", {'{owner_name="anna"}': 1}))
