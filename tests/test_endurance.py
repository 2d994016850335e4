"""The long run: a node whose pods come and go without end costs no more memory and no more descriptors at its end."""

import re
import time
from pathlib import Path

import pytest

from tests.demo_process import demo, fetch

SECONDS = 120.0
CHURN = """
node: churn
repeat: 4s
gpus:
  - {model: NVIDIA Test, memory: 40GiB, replicas: 8, resource: nvidia.com/gpu.shared}
  - {model: NVIDIA Test, memory: 40GiB}
pods:
"""
POD = """
  - namespace: ml
    name: job-{n}
    from: {start}ms
    until: {end}ms
    leaks: {leaks}
    containers:
      - name: main
        slots: {{gpu: 0, count: 1}}
        processes: [{{gpu: 0, memory: 1GiB, sm: 10%, from: {first}ms{outlives}}}]
"""


def scenario(path: Path) -> Path:
    """Six pods that come and go within four seconds, again and again, some of whose processes outlive them."""
    pods = []
    for n in range(6):
        start, end, leaks = 200 + 300 * n, 1700 + 300 * n, n % 2 == 1
        outlives = f", until: {end + 300}ms" if leaks else ""
        pods.append(
            POD.format(n=n, start=start, end=end, first=start + 100, leaks=str(leaks).lower(), outlives=outlives)
        )
    path.write_text(CHURN + "".join(pods))
    return path


@pytest.mark.e2e
def test_churn_leaves_nothing_behind(tmp_path: Path) -> None:
    """Over a thousand collections and hundreds of pods: memory and open files stay what they were after the start."""
    with demo(tmp_path, "--scenario", str(scenario(tmp_path / "churn.yaml")), "--interval", "100ms") as url:
        time.sleep(SECONDS / 4)
        early = usage(url)
        time.sleep(SECONDS)
        late = usage(url)
    assert late["collections"] - early["collections"] > 500
    assert late["open_fds"] <= early["open_fds"] + 4
    assert late["resident_memory_bytes"] <= early["resident_memory_bytes"] * 1.1
    assert late["lines"] <= early["lines"] * 1.5


def usage(url: str) -> dict[str, float]:
    """What the page tells of the process, and how long it is."""
    page, _ = fetch(f"{url}/metrics")
    found = {name: float(value) for name, value in re.findall(r"^process_(\w+) (\S+)$", page, re.MULTILINE)}
    collections = re.search(r'^gpumap_collections_total\{trigger="interval"\} (\d+)$', page, re.MULTILINE)
    assert collections is not None
    return {**found, "collections": float(collections[1]), "lines": float(page.count("\n"))}
