"""A real Prometheus joins gpumap's owners with the series of a dcgm-exporter: each join gives the rows expected.

The queries are those of replace/dcgm-exporter.md. The exporter is as before and after its 4.9, with virtual GPUs,
with and without `honorLabels`; each of these setups is an hour in one Prometheus.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpumap.agent.dialects.small import DCGM_JOIN
from gpumap.agent.exposition import Exposition
from gpumap.agent.metrics import GROUPS, native
from gpumap.model.names import ContainerName
from gpumap.model.readings import Uuid
from gpumap.model.snapshot import Snapshot
from tests import dcgm_exporter
from tests.dcgm_exporter import MIB
from tests.dcgm_nodes import CARD, P1, P2, PARTITIONED, SHARED, TRAINER, card, holder, node, sample_node, use
from tests.fences import read_blocks
from tests.fleet import BESIDE_DCGM
from tests.prometheus import Prometheus, prometheus
from tests.scraped import Samples, kept, labels, store
from tests.snapshots import with_node

GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "replace" / "dcgm-exporter.md"
FREE = "GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e55"
LONE = Uuid("GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e56")
"""A card of which one container has a part, and no other container has one."""
P3 = ContainerName("ml", "p3", "a")
START, HOUR = 1_800_000_000, 3600


class Setup(NamedTuple):
    since_4_9: bool
    honored: bool
    """dcgm-exporter's labels, in its scrape."""
    gpumap_honored: bool
    number: int

    @property
    def moment(self) -> int:
        return START + self.number * HOUR


_TRUTHS = (False, True)
SETUPS = [Setup(*of, number) for number, of in enumerate(product(_TRUTHS, _TRUTHS, _TRUTHS))]
in_each_setup = pytest.mark.parametrize(
    "setup",
    SETUPS,
    ids=lambda setup: (
        f"{'since' if setup.since_4_9 else 'before'} 4.9, honorLabels {setup.honored}, gpumap's {setup.gpumap_honored}"
    ),
)


class Device(NamedTuple):
    """What dcgm-exporter has series of. `slots` are who holds it, once a slot, and what each uses in MiB."""

    uuid: str
    instance: str
    used_mib: int
    slots: tuple[tuple[ContainerName, int], ...]


DEVICES = (
    Device(CARD, "", 4096, ((TRAINER, 4096),)),
    Device(SHARED, "", 4000, ((P1, 1024), (P1, 1024), (P2, 2048))),
    Device(PARTITIONED, "3", 2048, ((TRAINER, 2048),)),
    Device(PARTITIONED, "5", 16, ()),
    Device(FREE, "", 8, ()),
    Device(LONE, "", 100, ((P3, 100),)),
)
POWER = {CARD: 700, SHARED: 400, PARTITIONED: 300, FREE: 70, LONE: 50}
XID = {CARD: 0, SHARED: 31, PARTITIONED: 79, FREE: 0, LONE: 0}
SM_ACTIVE = {
    (CARD, ""): "0.75",
    (SHARED, ""): "0.5",
    (PARTITIONED, "3"): "0.25",
    (PARTITIONED, "5"): "0",
    (FREE, ""): "0",
    (LONE, ""): "0.125",
}


def dcgm_rows(device: Device, *, since_4_9: bool) -> Iterator[tuple[str, Mapping[str, str], Decimal]]:
    """As by KUBERNETES_VIRTUAL_GPUS: every value once a slot, memory as the device's and as each slot's."""
    known = {"gpu": str(DEVICES.index(device)), "UUID": device.uuid, "modelName": "NVIDIA H200"}
    if device.instance:
        known |= {"GPU_I_PROFILE": "1g.10gb", "GPU_I_ID": device.instance}
    if since_4_9:
        known["DCGM_FI_SYSTEM_DRIVER_VERSION"] = "570"
    values = {
        "DCGM_FI_PROF_SM_ACTIVE": Decimal(SM_ACTIVE[device.uuid, device.instance]),
        "DCGM_FI_DEV_POWER_USAGE": Decimal(POWER[device.uuid]),
        "DCGM_FI_DEV_XID_ERRORS": Decimal(XID[device.uuid]),
        "DCGM_FI_DEV_FB_USED": Decimal(device.used_mib),
    }
    slots = (
        dcgm_exporter.Slot(
            {"container": name.container, "namespace": name.namespace, "pod": name.pod},
            {"DCGM_FI_DEV_FB_USED": Decimal(used)},
        )
        for name, used in device.slots
    )
    return dcgm_exporter.rows(dcgm_exporter.Device(known, values, tuple(slots)), "node1", since_4_9=since_4_9)


def whole_node() -> Snapshot:
    """The node of the dialect's own tests, and the card with the lone sharer."""
    sample, more = sample_node(), node(holder(P3, LONE, use(100 * MIB), gpus=0.25), gpus=(card(4, LONE),))
    return with_node(sample, gpus=sample.node.gpus + more.node.gpus, devices=sample.node.devices + more.node.devices)


def gpumap_rows() -> Iterator[tuple[str, dict[str, str], Decimal]]:
    text = Exposition((*native(GROUPS, process_metrics=False), *DCGM_JOIN)).render(whole_node()).decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            yield sample.name, sample.labels, Decimal(sample.value)


def fill() -> Samples:
    samples = Samples()
    for setup in SETUPS:
        target = {"job": "dcgm-exporter", "namespace": "monitoring", "pod": "dcgm-exporter-x7", "container": "exporter"}
        for name, of, value in (row for one in DEVICES for row in dcgm_rows(one, since_4_9=setup.since_4_9)):
            stored = labels(**kept(of, target, honored=setup.honored))
            samples.scrape(name, stored, [setup.moment], lambda _, value=value: value)  # type: ignore[misc]
        target = {
            "job": "gpumap",
            "instance": "10.0.0.7:9401",
            "namespace": "gpumap",
            "pod": "gpumap-5",
            "container": "g",
        }
        for name, of, value in gpumap_rows():
            stored = labels(**kept(of, target, honored=setup.gpumap_honored))
            samples.scrape(name, stored, [setup.moment], lambda _, value=value: value)  # type: ignore[misc]
    return samples


@pytest.fixture(name="server", scope="module")
def run_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("joins")
    with prometheus(folder, data=store(fill(), folder)) as server:
        yield server


def queries(heading: str) -> list[str]:
    """The queries of a part of the guide that ask both exporters."""
    part = GUIDE.read_text().split(f"\n### {heading}\n", 1)[1].split("\n## ", 1)[0].split("\n### ", 1)[0]
    return [block.body for block in read_blocks(part, "promql") if block.words & {*BESIDE_DCGM}]


def translated(query: str, setup: Setup) -> str:
    """The query as it is written since 4.9, where the guide has it as before."""
    if setup.since_4_9:
        query = query.replace("(DCGM_FI_DEV_FB_USED) * 1048576", "(DCGM_FI_DEV_FB_USED_BYTES)")
        for old, (new, _) in dcgm_exporter.RENAMED.items():
            query = re.sub(rf"\b{old}\b", new, query)
    if not setup.gpumap_honored:
        query = query.replace("group_left (namespace, pod, container)", f"group_left ({', '.join(spelled(setup))})")
        query = query.replace("sum by (namespace)", "sum by (exported_namespace)")
    return query


def spelled(setup: Setup) -> tuple[str, str, str]:
    """How gpumap's labels of a container are called in Prometheus."""
    prefix = "" if setup.gpumap_honored else "exported_"
    return f"{prefix}namespace", f"{prefix}pod", f"{prefix}container"


Rows = dict[tuple[str, ...], float]


def ask(server: Prometheus, setup: Setup, query: str, *by: str) -> Rows:
    found: Rows = {}
    for row in server.api("query", query=query, time=str(setup.moment))["result"]:
        key = tuple(row["metric"].get(label, "") for label in by)
        assert key not in found, "two rows of one owner"
        found[key] = float(row["value"][1])
    return found


def owned(values: Mapping[tuple[str, str], float]) -> Rows:
    """Each owner with its device's value."""
    return {
        (device.uuid, device.instance, *holder): values[device.uuid, device.instance]
        for device in DEVICES
        for holder, _ in device.slots
    }


@in_each_setup
def test_each_owner_has_its_devices_value(server: Prometheus, setup: Setup) -> None:
    """One row an owner, exclusive, shared and MIG, whatever copies the exporter has; no row without a holder."""
    key = ("UUID", "GPU_I_ID", *spelled(setup))
    plain, rescaled, _ = queries("A device's value for each owner")
    expected = owned({entity: float(value) for entity, value in SM_ACTIVE.items()})
    assert ask(server, setup, translated(plain, setup), *key) == expected
    used = owned({(device.uuid, device.instance): device.used_mib * MIB for device in DEVICES})
    assert ask(server, setup, rescaled, *key) == used, "the device's memory, and neither a slot's nor a sum"


@in_each_setup
def test_exclusive_devices_have_their_owners_name(server: Prometheus, setup: Setup) -> None:
    """A shared device is left out, instead of being given to one of its holders, also while it has but one."""
    (query,) = queries("Exclusive devices only")
    assert ask(server, setup, translated(query, setup), "UUID", "GPU_I_ID", *spelled(setup)) == {
        (CARD, "", *TRAINER): 700,
        (PARTITIONED, "3", *TRAINER): 300,
    }


@in_each_setup
def test_a_sum_counts_each_card_once(server: Prometheus, setup: Setup) -> None:
    """The shared card's power is shared out; what each namespace has adds up to the cards that are held."""
    (query,) = queries("Power by namespace")
    assert ask(server, setup, translated(query, setup), spelled(setup)[0]) == {("ml",): 700 + 400 + 50}


@in_each_setup
def test_a_cards_value_reaches_the_owners_of_its_instances(server: Prometheus, setup: Setup) -> None:
    """An XID error of the card is on all containers on it."""
    *_, query = queries("A device's value for each owner")
    assert ask(server, setup, translated(query, setup), "UUID", "GPU_I_ID", *spelled(setup)) == owned(
        {(device.uuid, device.instance): XID[device.uuid] for device in DEVICES}
    )


UNITS: dict[str, int | Decimal] = {
    "": 1,
    "MHz": 10**6,
    "mJ": Decimal("0.001"),
    "%": Decimal("0.01"),
    "MiB": MIB,
    "MB/s": 10**6,
}


def names_in(cell: str) -> list[str]:
    """The fields that a cell of the guide's table names, those in braces and those without their beginning too."""
    names: list[str] = []
    for name in re.findall(r"`([A-Z_{},0-9]+)`", cell):
        whole = name if name.startswith("DCGM_") else "_".join(names[0].split("_")[:3]) + name
        head, _, rest = whole.partition("{")
        choices, _, tail = rest.partition("}")
        names += [f"{head}{choice}{tail}" for choice in choices.split(",")]
    return names


def test_the_guide_has_the_renames_that_the_worlds_have() -> None:
    """Its table says of each field the name since 4.9, and by its old unit what the value is multiplied by."""
    table = GUIDE.read_text().split("| before 4.9 |", 1)[1].split("\n\n", 1)[0]
    said: dict[str, tuple[str, int | Decimal]] = {}
    for line in table.splitlines()[2:]:
        _, before, since, *_ = line.split("|")
        if before.startswith((" label", " labels")) or since.strip() == "as before":
            continue
        unit = re.search(r"\(([^;)]+)", before)
        factor = UNITS[unit[1] if unit else ""]
        said |= {old: (new, factor) for old, new in zip(names_in(before), names_in(since), strict=True)}
    assert said == dcgm_exporter.RENAMED
