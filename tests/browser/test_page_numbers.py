"""What the page counts and how it judges: as `gpumap top` and `gpumap waste` do, only of what is known."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from playwright.async_api import Browser, expect

from gpumap.cli.table import Shape
from gpumap.model.node import Node, Workload, encode
from gpumap.model.observations import Moment
from gpumap.model.snapshot import Snapshot
from tests import golden
from tests.browser.browser import WATCHED, Site, Tab, tab
from tests.browser.test_page import SHARED, UUID, cards, holder, partitioned, row, shared_card
from tests.browser.test_page import start_browser as start_browser  # the fixture `browser`
from tests.browser.test_page import start_site as start_site  # the fixture `site`
from tests.filter_cases import CASES, filter_node
from tests.generated import answer, runs
from tests.nodes import GIB, Gpu, Pod, Process, TestNode, gpu_uuid
from tests.shown import top_values, waste_values

Document = dict[str, Any]
pytestmark = pytest.mark.asyncio(loop_scope="module")


async def tiles(one: Tab) -> dict[str, str]:
    """What each tile of the overview shows."""
    return dict(zip(await one.texts(".tile dt"), await one.texts(".tile dd"), strict=True))


def namesake() -> TestNode:
    """A pod that came back under its name, with a process, while one of the former pod's is left over."""
    old = holder("db-0", 0)
    node = TestNode([Gpu(0)], [old], [Process(41, UUID, old, memory=3 * GIB, comm="leftover")])
    node.collect()
    new = Pod("team", "db-0", old.ids, generation=1)
    old.listed = old.in_checkpoint = False
    node.pods = [old, new]
    node.processes.append(Process(42, UUID, new, memory=GIB))
    return node


def held_whole() -> TestNode:
    """A partitioned GPU that the kubelet gave out as a whole, and computes on one of its two instances."""
    gpu = Gpu(0, mig=[(1, 0, 3), (2, 0, 3)])
    pod = Pod("team", "whole", {"main": {"nvidia.com/gpu": [str(gpu.uuid)]}})
    return TestNode([gpu], [pod], [Process(43, gpu.leaves[0], pod, memory=2 * GIB)])


def half_judged() -> TestNode:
    """A holder of a whole partitioned GPU with no visible process, and one on an instance without a name."""
    node = held_whole()
    node.processes = [Process(49, node.gpus[0].leaves[1], None, readable=False)]
    return node


def compute_instances() -> TestNode:
    """Two compute instances that share one GPU instance's memory, one of them held."""
    gpu = Gpu(0, mig=[(1, 0, 1), (1, 1, 1)])
    pod = Pod("team", "small", {"main": {"nvidia.com/mig-1c.3g.40gb": [str(gpu.leaves[0])]}})
    return TestNode([gpu], [pod], [Process(44, gpu.leaves[0], pod, memory=2 * GIB)])


def idle_instance() -> TestNode:
    """A MIG device with a holder that has no process."""
    node = partitioned()
    node.processes = []
    return node


def shared_pages() -> TestNode:
    """Two GPUs: on one processes share memory, and their sum exceeds what is used; on the other some is unaccounted."""
    node = cards(2, 1)
    node.gpus[0].overhead, node.gpus[1].overhead = -2 * GIB, 3 * GIB
    node.processes[0].memory = 4 * GIB
    return node


def half_untold() -> TestNode:
    """Processes of the host: one has neither memory nor SM, and two have more SM time than the card has."""
    client = Process(46, UUID, None, memory=None, types="M+C")
    busy = [Process(pid, gpu_uuid(1), None, memory=GIB, sm=0.75) for pid in (47, 48)]
    return TestNode([Gpu(0), Gpu(1)], [], [Process(45, UUID, None, memory=GIB, sm=0.5), client, *busy])


def used_by_its_pod(sm: float) -> TestNode:
    """A holder without a process; on its card a sidecar computes, or has rested for long."""
    pod = Pod("team", "served", {"main": {"nvidia.com/gpu": [str(UUID)]}, "sidecar": {}})
    node = TestNode([Gpu(0)], [pod], [Process(50, UUID, pod, container="sidecar", sm=0.5)])
    node.collect()
    node.collect()
    node.processes[0].sm = sm
    for _ in range(9):
        node.collect(seconds=50)
    return node


def busy_for_nobody() -> TestNode:
    """A holder without a process on a card that is busy, and no process is known to compute there."""
    pod = Pod("team", "hidden", {"main": {"nvidia.com/gpu": [str(UUID)]}})
    node = TestNode([Gpu(0, utilization=0.9)], [pod])
    node.collect()
    return node


def blind(node: TestNode) -> TestNode:
    node.visible = False
    return node


def without(node: TestNode, *sources: str) -> TestNode:
    """The node after sources went away that had answered."""
    node.collect()
    node.collect()
    node.down = set(sources)
    return node


async def test_a_partitioned_gpu_held_whole(site: Site, browser: Browser) -> None:
    """Its instances are held, by name, and it is no device more; its holder is judged by what it uses of all."""
    site.collect(held_whole(), WATCHED)
    async with tab(browser, site.url) as one:
        shown = await tiles(one)
        assert (shown["GPUs"], shown["Held"]) == ("2 MIG devices", "2 of 2 0 free")
        assert shown["Idle"] == "–"
        assert await one.texts("#content h2, #content h3") == [
            "GPU 0", "GPU 0 whole", "GPU 0 MIG 1/0", "GPU 0 MIG 2/0",
        ]  # fmt: skip
        assert await one.texts(".why") == ["Held with the whole GPU by team/whole main."] * 2
        assert await one.undated(row(one, "team/whole")) == [
            "team/whole main unused · peak so far 2.0GiB 1 1 80.0 GiB – – – –",
            "team/whole main whole – – 2.0 GiB 2.0 GiB – –",
            "team/whole main whole – – 0 0 – 5 min",
        ]
        assert "free 7.9 GiB, granted to whole" in (await one.texts(".part .facts"))[0]
        titles = await one.page.locator(".part").nth(1).locator("tbody .unknown").evaluate_all(
            "all => all.map(one => one.title)"
        )  # fmt: skip
        assert titles[:2] == ["It holds the whole GPU: see the row of the GPU"] * 2
        ids = await one.page.locator("[id]").evaluate_all("all => all.map(one => one.id)")
        assert len(ids) == len(set(ids))


OVERVIEWS: dict[str, tuple[Callable[[], TestNode], dict[str, str]]] = {
    "nobody is visible": (
        lambda: blind(shared_card()),
        {"Idle": "–", "Squatter": "–", "Held": "1 of 1 0 free", "Fault": "0"},
    ),
    "NVML is down": (
        lambda: without(shared_card(), "nvml"),
        {"GPUs": "– 1 device", "Memory used": "–", "Wastes most": "–", "Idle": "–", "Leftover": "–"},
    ),
    "a GPU is hung": (
        lambda: TestNode([Gpu(0)], [holder("busy", 0)]),
        {"GPUs": "1", "Idle": "–", "Memory used": "–", "Fault": "1"},
    ),
    "MIG reports no SM": (idle_instance, {"Idle": "1 holder 0.14 GPUs", "GPUs": "1 GPU + 2 MIG devices"}),
    "memory is shared": (compute_instances, {"Memory used": "2.1 GiB of 80.0 GiB, 100 MiB unattributed"}),
    "a remainder is negative": (shared_pages, {"Memory used": "5.5 GiB of 160 GiB, 3.0 GiB unattributed"}),
}
"""A node, and how its tiles begin."""


@pytest.mark.parametrize("name", OVERVIEWS)
async def test_the_overview_counts_what_is_known(site: Site, browser: Browser, name: str) -> None:
    """Unknown is a dash with its reason, never 0; memory counts once, and no remainder hides another."""
    make, wanted = OVERVIEWS[name]
    node = make()
    site.collect(node, WATCHED)
    if name == "a GPU is hung":
        node.gpus[0].fault = "hung"
        site.collect(node, 1)
    async with tab(browser, site.url) as one:
        shown = await tiles(one)
        assert {
            term: text for term, text in shown.items() if term in wanted and not text.startswith(wanted[term])
        } == {}
        titles = await one.page.locator(".tile .unknown").evaluate_all("all => all.map(one => one.title)")
        assert all(titles)
        assert len(titles) >= sum(text.startswith("–") for text in wanted.values())


async def test_a_gpu_that_never_told_its_uuid(site: Site, browser: Browser) -> None:
    """It counts as a GPU and as a fault, and is above with its remedy, also if it is the only GPU."""
    node = cards(1, 1)
    node.gpus.append(Gpu(1, fault="hung"))
    site.collect(node)
    async with tab(browser, site.url) as one:
        notice = one.page.locator("#attention .fault")
        await expect(notice).to_contain_text("1 GPU: hangs (index 1).")
        await expect(notice.locator(".remedy")).to_contain_text("reset the GPU")
        shown = await tiles(one)
        assert (shown["GPUs"], shown["Fault"]) == ("2", "1")
        site.collect(TestNode([Gpu(0, fault="lost")]))
        await expect(one.page.locator(".gpu")).to_have_count(0)
        shown = await tiles(one)
        assert (shown["GPUs"], shown["Fault"]) == ("1", "1")
        await expect(one.page.locator("#attention")).not_to_contain_text("NVML lists no GPU")


async def test_a_gpu_is_free_if_a_new_pod_could_be_given_it(site: Site, browser: Browser) -> None:
    """Otherwise it is not held, with the finding's word or the owner of its memory."""
    squatter, slots = Pod("other", "squatter", {"main": {}}), [f"{gpu_uuid(3)}::{number}" for number in range(4)]
    docker = Process(52, gpu_uuid(1), None, memory=70 * GIB, work=Workload("docker", "4f1c9e0b7a2d"))
    node = TestNode(
        [Gpu(0), Gpu(1), Gpu(2), Gpu(3)],
        [squatter, Pod("team", "replica", {"main": {SHARED: slots[:1]}})],
        [Process(51, UUID, squatter, memory=GIB), docker],
        allocatable={"nvidia.com/gpu": [str(gpu_uuid(card)) for card in range(3)], SHARED: slots},
    )
    site.collect(node)
    async with tab(browser, site.url) as one:
        assert await one.texts(".held > .of") == ["not held, squatter", "not held, used by host", "free", "75 % free"]
        assert (await tiles(one))["Held"] == "1 of 4 1 free, 1 partly"
        await one.page.get_by_role("button", name="GPU 0").click()
        await one.page.get_by_role("button", name="GPU 3").click()
        facts = await one.texts(".side .facts")
        assert "free 78.9 GiB unaccounted" in facts[0]
        assert "free 79.9 GiB, granted to replica" in facts[1]


async def test_a_machine_without_a_kubelet(site: Site, browser: Browser) -> None:
    """Nothing is assigned there: no number of holders or waste, and no source that does not answer."""
    gpus = [Gpu(0), Gpu(1), Gpu(2)]
    processes = [
        Process(51, UUID, None, memory=GIB),
        *(
            Process(60 + n, gpus[2].uuid, None, memory=n * GIB, work=Workload("user", word))
            for n, word in enumerate(("dan", "cleo", "bob", "alice"), start=1)
        ),
    ]
    site.collect(TestNode(gpus, [], processes, has_kubelet=False))
    async with tab(browser, site.url) as one:
        assert (await one.texts(".head span"))[-1] == "Used by"
        assert await one.texts(".held > .of") == ["in use", "not in use"]
        assert await one.texts(".held .names") == ["user/alice user/bob user/cleo"]
        assert await one.texts(".held .more-names") == ["+1"]
        assert list(await tiles(one)) == ["GPUs", "Memory used", "Fault"]
        assert await one.texts("#health li b") == ["nvml", "procfs", *await one.texts("#health ul + ul li b")]
        assert "kubelet does not answer" not in await one.page.inner_text("body")


async def test_a_gpu_that_shares_the_machines_memory(site: Site, browser: Browser) -> None:
    """It does not report its memory: the sum of its processes is shown, and its use is known."""
    snapshot = (await asyncio.to_thread(golden.snapshots, golden.CAPTURES / "gb10"))[-1]
    site.pages.publish(replace(snapshot, at=Moment(site.clock, time.time())))
    async with tab(browser, site.url) as one:
        assert (await tiles(one))["Memory used"] == "39.7 GiB"
        assert await one.texts(".used") == ["39.7 GiB"]
        await expect(one.page.locator(".facts").first).to_contain_text("used by processes")


@pytest.mark.parametrize("count", [0, 1])
async def test_memory_and_load_that_no_source_reports_are_not_0(site: Site, browser: Browser, count: int) -> None:
    """A device without its memory and utilization; its process, if there is one, has no memory either."""
    pod = Pod("team", "train", {"main": {"nvidia.com/gpu": [str(UUID)]}})
    processes = [Process(10, UUID, pod, memory=None)][:count]
    site.collect(TestNode([Gpu(0, values={"memory": None})], [pod], processes))
    async with tab(browser, site.url) as one:
        shown = await tiles(one)
        assert (shown["GPUs"], shown["Memory used"]) == ("1", "–")
        assert await one.texts(".used") == ["–"]
        assert "0 busy" not in await one.page.locator(".tiles").inner_text()


async def test_no_more_is_granted_than_there_is(site: Site, browser: Browser) -> None:
    """A device that its plugin oversubscribes is not granted twice over."""
    said = answer(NVIDIA_VISIBLE_DEVICES=UUID, CUDA_DEVICE_MEMORY_LIMIT_0="60000m", CUDA_DEVICE_SM_LIMIT="0")
    pods = [
        Pod("team", name, {"main": {"nvidia.com/gpu": [f"{UUID}-{n}"]}}, answers={("main", "nvidia.com/gpu"): said})
        for n, name in enumerate(("a", "b"))
    ]
    site.collect(TestNode([Gpu(0)], pods))
    async with tab(browser, site.url) as one:
        await expect(one.page.locator(".bar")).to_have_attribute(
            "aria-label", "Memory: 100 MiB of 80.0 GiB used, all granted, to several containers"
        )


async def test_slots_of_several_resources_are_not_added_up(site: Site, browser: Browser) -> None:
    """They are of different units; each number is separate, and the hint names its resource."""
    ids = {"nvidia.com/gpu": [str(UUID)], "nvidia.com/gpu.shared": [f"{UUID}::0", f"{UUID}::1"]}
    site.collect(TestNode([Gpu(0)], [Pod("team", "twice", {"main": ids})]))
    async with tab(browser, site.url) as one:
        slots = one.page.locator(row(one, "team/twice")).locator("td").first
        await expect(slots).to_have_text("1+2")
        await expect(slots.locator("span")).to_have_attribute("title", "1 × nvidia.com/gpu, 2 × nvidia.com/gpu.shared")


def generated() -> list[TestNode]:
    """Nodes that have been through something, always the same ones."""
    found: list[TestNode] = []

    @settings(max_examples=40, derandomize=True, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(runs())
    def gather(run: list[Snapshot | TestNode]) -> None:
        found.extend(one for one in run if isinstance(one, TestNode))

    gather()
    return found


FILTERED = """async ([address, map, queries]) => {
  const {devicesOf, filtered} = await import(address + "page/model.js");
  const rowsOf = ({rows}) => rows.filter((row) => row.owner !== "unaccounted");
  const nameOf = (row) => [row.namespace, row.pod, row.container].filter(Boolean).join("/") || row.work;
  const placeOf = ({index, mig}) => mig ? `${index}/${mig.gpu_instance_id}/${mig.compute_instance_id}` : index;
  const namesOf = (device) => rowsOf(device).length ? rowsOf(device).map(nameOf) : [""];
  const labelsOf = (device) => namesOf(device).map((name) => `${placeOf(device)} ${name}`);
  return queries.map((query) => filtered(devicesOf(map), query).flatMap(labelsOf));
}"""


async def test_the_filter_has_the_cases_of_the_commands(site: Site, browser: Browser) -> None:
    """A filter of the page selects the rows that the same WORDs select for `map`, `top` and `waste`."""
    site.collect(TestNode([Gpu(0)], []))
    async with tab(browser, site.url) as one:
        document = json.loads(encode(filter_node()))
        selected = await one.page.evaluate(FILTERED, [site.url, document, [*CASES]])
    assert dict(zip(CASES, map(set, selected), strict=True)) == CASES


VERDICTS = """async (address) => {
  const {devicesOf} = await import(address + "page/model.js");
  const {totals} = await import(address + "page/totals.js");
  const map = await (await fetch(address + "api/v1/map")).json();
  const devices = devicesOf(map);
  const rows = devices.flatMap((device) => device.rows.map((row) => ({
    uuid: device.uuid, owner: row.owner, namespace: row.namespace, pod: row.pod, container: row.container,
    memory_bytes: row.used, sm_ratio: row.sm, granted_bytes: row.granted ?? null, memory_peak_bytes: row.peak ?? null,
    last_active: row.last ?? null, finding: row.finding?.finding ?? null,
  })));
  return {map, rows, free: totals(map, devices).free};
}"""
NAMES = ("uuid", "owner", "namespace", "pod", "container")
NUMBERS = ("memory_bytes", "sm_ratio", "granted_bytes", "memory_peak_bytes", "last_active")


def lines(rows: Iterable[Document]) -> list[tuple[object, ...]]:
    """Rows that can be compared, in an order."""
    return sorted(
        (*(one[name] or "" for name in NAMES), *(one[name] and round(one[name], 6) for name in NUMBERS)) for one in rows
    )


async def test_the_page_judges_as_the_commands_do(site: Site, browser: Browser) -> None:
    """Of any node its rows are those of `gpumap top`, and its verdicts are those of `gpumap waste`."""
    made = [
        namesake(),
        held_whole(),
        half_judged(),
        compute_instances(),
        idle_instance(),
        shared_pages(),
        half_untold(),
        shared_card(),
        used_by_its_pod(sm=0.5),
        used_by_its_pod(sm=0.0),
        busy_for_nobody(),
    ]
    downs = [without(shared_card(), source) for source in ("nvml", "kubelet", "procfs", "pod_identity")]
    async with tab(browser, site.url, expected=lambda said: "503" in said) as one:
        for node in (*made, blind(shared_card()), blind(TestNode([Gpu(0)])), *downs, *generated()):
            site.collect(node, 2)
            page = await one.page.evaluate(VERDICTS, site.url)
            found = msgspec.convert(page["map"], Node)
            assert lines(page["rows"]) == lines(map(with_activity, top_values(found, Shape())["rows"]))
            leaves = [device for device in found.devices if device.is_leaf]
            ratios = [device.free_ratio for device in leaves if device.free_ratio is not None]
            assert page["free"] == (ratios.count(1) if ratios else None)
            shown = {key_of(row) for row in page["rows"] if row["finding"]}
            judged = [row for row in waste_values(found, Shape())["findings"] if row["uuid"]]
            assert shown == {key_of(row) for row in judged}, "each finding has its row, and no other row has one"


def with_activity(row: Document) -> Document:
    """The page shows the activity of a MIG device, which has no SM time."""
    return row | {"sm_ratio": row["sm_activity_ratio"] if row["sm_ratio"] is None else row["sm_ratio"]}


def key_of(row: Document) -> tuple[object, ...]:
    return tuple(row[name] or "" for name in ("uuid", "finding", "namespace", "pod", "container"))
