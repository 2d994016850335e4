"""The first screen of `/`: findings, numbers and a line for each GPU, and how they lead to each other; axe-core."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from axe_playwright_python.async_playwright import Axe
from msgspec import structs
from playwright.async_api import Browser, expect

from gpumap.model.snapshot import Snapshot
from gpumap.model.terms import FINDINGS
from tests.agent import run_agent
from tests.browser.browser import WATCHED, Site, tab
from tests.browser.test_page import SHARED, cards, failing, holder, hostile, partitioned, shared_card, show
from tests.browser.test_page import start_browser as start_browser  # the fixture `browser`
from tests.browser.test_page import start_site as start_site  # the fixture `site`
from tests.nodes import GIB, Gpu, Pod, Process, TestNode, gpu_uuid
from tests.snapshots import with_node

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCREEN = 900


def mixed(number: int) -> TestNode:
    """GPUs with a trainer, three notebooks, an idle server, a squatter beside a leftover, and no holder."""
    node = TestNode([Gpu(card) for card in range(number)], allocatable={
        SHARED: [f"{gpu_uuid(card)}::{slot}" for card in range(number) for slot in range(4)]})  # fmt: skip
    for card in range(number):
        uuid, pid = gpu_uuid(card), 1000 + 10 * card
        whole = {"main": {"nvidia.com/gpu": [str(uuid)]}}
        if card % 5 == 0:
            pods = [Pod("research", f"train-{card}", whole)]
            processes = [Process(pid, uuid, pods[0], memory=71 * GIB, sm=0.97)]
        elif card % 5 == 1:
            pods = [holder(f"notebook-{card}-{one}", one, "team-nlp", card) for one in range(3)]
            processes = [Process(pid + one, uuid, pods[one], memory=(6 + 9 * one) * GIB, sm=0.3) for one in range(2)]
        elif card % 5 == 2:
            pods = [Pod("vision", f"server-{card}", whole)]
            processes = [Process(pid, uuid, pods[0], memory=12 * GIB, sm=0.0)]
        elif card % 5 == 3:
            pods = [
                holder(f"shared-{card}", 0, "ops", card),
                Pod("other", f"squatter-{card}", {"main": {}}),
                Pod("other", f"leftover-{card}", {"main": {}}, listed=False),
            ]
            processes = [Process(pid + at, uuid, pod, memory=5 * GIB, sm=0.2) for at, pod in enumerate(pods)]
        else:
            continue
        node.pods += pods
        node.processes += processes
    return node


async def test_sixteen_gpus_fit_a_screen(site: Site, browser: Browser) -> None:
    """Findings, numbers and all sixteen lines are to be seen at once, and no GPU is open unasked."""
    site.collect(mixed(16), 30, 50.0)
    async with tab(browser, site.url) as one:
        await one.page.set_viewport_size({"width": 1280, "height": SCREEN})
        await expect(one.page.locator(".gpu")).to_have_count(16)
        await expect(one.page.locator("#attention ol li")).to_have_count(5)
        await expect(one.page.locator(".details")).to_have_count(0)
        box = await one.page.locator(".gpu").last.bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= SCREEN


CUT = """all => all.filter((one) => one.scrollWidth > one.clientWidth && getComputedStyle(one).display !== "inline")
  .map((one) => one.textContent)"""


@pytest.mark.parametrize("width", [400, 1280])
async def test_no_advice_is_cut(site: Site, browser: Browser, width: int) -> None:
    """Each finding says what to do, in full; equal advice of the next findings is not repeated."""
    site.collect(mixed(16), 30, 50.0)
    async with tab(browser, site.url, width=width) as one:
        await one.page.get_by_role("button", name="Show all").click()
        lines = one.page.locator("#attention ol li")
        texts = [text.split(". ", 1) for text in await one.texts("#attention .because")]
        findings = (await one.page.evaluate("fetch('api/v1/map').then(one => one.json())"))["findings"]
        assert len(texts) == len(findings)
        for before, finding, (_, *advice) in zip([None, *findings], findings, texts, strict=False):
            remedy = finding["remedy"].partition(". ")[2].replace("`", "")
            repeated = before is not None and before["remedy"] == finding["remedy"]
            assert advice == ([] if repeated else [remedy])
        assert await one.page.locator("#attention ol *").evaluate_all(CUT) == []
        boxes = [await lines.nth(at).bounding_box() for at in range(await lines.count())]
        assert all(box and box["x"] + box["width"] <= width for box in boxes)


LONG = "greedy-{}-with-a-name-of-a-deployment-7d9f88c5b-x7k2p"
LINES = """elements => elements.map((element) => {
  const {lineHeight, paddingTop, paddingBottom} = getComputedStyle(element);
  const text = element.clientHeight - parseFloat(paddingTop) - parseFloat(paddingBottom);
  return Math.round(text / parseFloat(lineHeight));
})"""


def long_names() -> TestNode:
    """Names of about 50 characters: a GPU with four pods, of which one has two containers, and MIG devices."""
    ids = [[f"{gpu_uuid(0)}::{slot}"] for slot in range(5)]
    pods = [Pod("research", LONG.format(slot), {"main": {SHARED: ids[slot]}}) for slot in range(4)]
    pods[0].ids["board"] = {SHARED: ids[4]}
    node = partitioned()
    node.pods += pods
    node.processes += [Process(70 + slot, gpu_uuid(0), pod, comm="tritonserver-15") for slot, pod in enumerate(pods)]
    return node


def long_node(snapshot: Snapshot) -> Snapshot:
    return with_node(snapshot, name=LONG.format("gke"))


@pytest.mark.parametrize("width", [400, 768, 1280])
async def test_long_names_are_cut_in_their_middle(site: Site, browser: Browser, width: int) -> None:
    """The line of a GPU counts each pod once, and keeps the ends of names and the number of others. The node's name has
    one line, and a process has at most three on a small screen."""
    show(site, long_names(), long_node)
    async with tab(browser, site.url, width=width) as one:
        names = one.page.locator(".gpu").first.locator(".names .cut")
        await expect(names).to_have_count(2)
        for end in await names.locator("span:last-child").all():
            await expect(end).to_be_in_viewport(ratio=1)
        await expect(one.page.locator(".more-names").first).to_have_text("+2")
        await expect(one.page.locator(".more-names").first).to_be_in_viewport(ratio=1)
        assert (await one.texts(".gpu .held"))[1].startswith("2 MIG: small")
        assert await one.page.locator(".node-name").evaluate_all(LINES) == [1]
        await one.page.goto(f"{site.url}#view=processes")
        assert max(await one.page.locator(".processes tbody tr").evaluate_all(LINES)) <= 3
        assert await one.width_over() <= 0


def other_model(snapshot: Snapshot) -> Snapshot:
    *same, last = snapshot.node.gpus
    return with_node(snapshot, gpus=(*same, structs.replace(last, model="NVIDIA Other")))


async def test_a_model_of_all_gpus_is_said_once(site: Site, browser: Browser) -> None:
    show(site, cards(3, 1))
    async with tab(browser, site.url) as one:
        await expect(one.page.locator("#node")).to_have_text("node-a 3 × Test")
        await expect(one.page.locator(".line .model")).to_have_count(0)
        show(site, cards(3, 1), other_model)
        await expect(one.page.locator(".gpu .line .model")).to_have_text(["Test", "Test", "Other"])
        await expect(one.page.locator("#node")).to_have_text("node-a")


FIRST_SCREEN = {
    "#q=pod:leftover-8": "tr:has-text('leftover-8')",
    "#q=pod:notebook-6-1": "tr:has-text('notebook-6-1')",
    "#q=gpu:3+finding:squatter": "tr:has-text('squatter-3')",
    "#q=finding:squatter": "tr:has-text('squatter-3')",
    "#view=processes&q=ns:other": "tbody tr",
    f"#{gpu_uuid(13)}": f"[id='{gpu_uuid(13)}'] h2",
    f"#{gpu_uuid(13)}&row=other%2Fsquatter-13%2Fmain": "tr[aria-current=true]",
}
"""A link, and the element that answers it."""


@pytest.mark.parametrize("address", FIRST_SCREEN)
async def test_a_link_is_answered_on_the_first_screen_of_a_phone(site: Site, browser: Browser, address: str) -> None:
    site.collect(mixed(16), 30, 50.0)
    async with tab(browser, "about:blank", width=400) as one:
        await one.page.set_viewport_size({"width": 400, "height": SCREEN})
        await one.page.goto(f"{site.url}{address}")
        answer = one.page.locator(FIRST_SCREEN[address]).first
        await expect(answer).to_be_in_viewport(ratio=1)
        assert await one.width_over() <= 0


async def test_on_a_phone_the_findings_come_first(site: Site, browser: Browser) -> None:
    site.collect(mixed(8), 30, 50.0)
    async with tab(browser, site.url, width=400) as one:
        await expect(one.page.locator(".gpu")).to_have_count(8)
        tops = [await one.page.locator(part).bounding_box() for part in ("#attention", "#overview", "#content")]
        assert [box["y"] for box in tops if box] == sorted(box["y"] for box in tops if box)
        assert await one.width_over() <= 0


async def test_a_finding_leads_to_its_row(site: Site, browser: Browser) -> None:
    """The GPU opens, the row is marked and says what to do; from there a link leads back to all findings."""
    site.collect(mixed(16), 30, 50.0)
    async with tab(browser, site.url) as one:
        await one.page.get_by_role("link", name="other/squatter-8 main").click()
        marked = one.page.locator("tr[aria-current=true]")
        await expect(marked).to_contain_text("other/squatter-8")
        await expect(marked).to_be_in_viewport()
        await expect(marked.locator(".remedy")).to_contain_text("Find how it gets access")
        await expect(one.page.locator(".details")).to_have_count(1)
        await expect(marked.get_by_role("link", name="squatter")).to_have_attribute("href", "#attention")
        address = one.page.url
        await one.page.go_back()
        await expect(one.page.locator(".details")).to_have_count(0)
    async with tab(browser, address) as one:
        await expect(one.page.locator("tr[aria-current=true]")).to_contain_text("other/squatter-8")


async def test_a_leftover_is_not_its_namesake(site: Site, browser: Browser) -> None:
    """The finding of a deleted pod leads to the row of what it left, not to the pod of that name."""
    old = holder("db-0", 0)
    node = TestNode([Gpu(0)], [old], [Process(41, gpu_uuid(0), old, memory=3 * GIB, comm="left")])
    node.collect()
    old.listed = old.in_checkpoint = False
    node.pods.append(Pod("team", "db-0", old.ids, generation=1))
    site.collect(node)
    async with tab(browser, site.url) as one:
        await one.page.locator("#attention li", has_text="leftover").get_by_role("link").click()
        await expect(one.page.locator("tr[aria-current=true]")).to_have_class("rest is-gone")


async def test_a_number_leads_to_its_rows(site: Site, browser: Browser) -> None:
    """A tile filters by its finding; what is 0 leads nowhere."""
    site.collect(mixed(8), 30, 50.0)
    async with tab(browser, site.url) as one:
        tile = one.page.locator(".tile", has_text="Leftover")
        await tile.get_by_role("link").click()
        await expect(one.page.locator("#filter")).to_have_value("finding:leftover")
        assert await one.texts(".gpu h2") == ["GPU 3"]
        assert [text.split()[0] for text in await one.texts("tbody tr")] == ["other/leftover-3"]
        await expect(one.page.locator(".tile", has_text="Fault").get_by_role("link")).to_have_count(0)


FOUND = {
    "gpu:3": ["squatter other/squatter-3", "leftover other/leftover-3"],
    "GPU 2": ["idle vision/server-2"],
    "finding:leftover": ["leftover other/leftover-3"],
    "pod:server": ["idle vision/server-2"],
    "owner:gone": ["leftover other/leftover-3"],
    "no activity": ["idle vision/server-2"],
    "ns:nobody": [],
}
"""What is typed, and the findings that are left."""


async def test_findings_are_filtered(site: Site, browser: Browser) -> None:
    """By their device, their row and their own words; a source that is down is always shown."""
    node = mixed(5)
    site.collect(node, 30, 50.0)
    async with tab(browser, site.url) as one:
        lines = one.page.locator("#attention ol li")
        for query, wanted in FOUND.items():
            await one.page.locator("#filter").fill(query)
            await expect(one.page.locator("#attention h2")).to_contain_text(f"{len(wanted)} of ")
            assert [" ".join(text.split()[:2]) for text in await one.texts("#attention ol li")] == wanted, query
        assert await one.texts("#attention .empty") == ["No finding matches the filter."]
        node.down = {"kubelet"}
        site.collect(node)
        await expect(lines).to_have_count(1)
        await expect(lines).to_contain_text("kubelet is down")


async def test_all_findings_are_shown_when_asked_for(site: Site, browser: Browser) -> None:
    site.collect(mixed(16), 30, 50.0)
    async with tab(browser, site.url) as one:
        await one.page.get_by_role("button", name="Show all").click()
        count = int((await one.texts("#attention h2 .of"))[0])
        await expect(one.page.locator("#attention ol li")).to_have_count(count)
        kinds = [text.split()[0] for text in await one.texts("#attention ol li")]
        order = list(FINDINGS)
        assert kinds == sorted(kinds, key=order.index), "worst first"


async def test_the_largest_waste_first(site: Site, browser: Browser) -> None:
    """The list can be sorted by waste; then the pod of the tile comes first, and unknown waste last."""
    site.collect(mixed(4), 30, 50.0)
    async with tab(browser, site.url) as one:
        first = one.page.locator("#attention ol li").first
        await expect(first).to_contain_text("other/squatter-3")
        await one.page.locator(".tile", has_text="Wastes most").get_by_role("link", name="server-2").click()
        await expect(first).to_contain_text("vision/server-2")
        assert one.page.url.endswith("#sort=-waste")
        await one.page.reload()
        await expect(first).to_contain_text("vision/server-2")
        await one.page.get_by_role("button", name="Worst first").click()
        await expect(first).to_contain_text("other/squatter-3")


async def test_tile_and_list_name_the_same_pod(browser: Browser) -> None:
    """The tile names the pod with the largest waste, and leads to the list that has it first."""
    arguments = ("--scenario", "sharing", "--interval", "1s", "--grace", "2s")
    async with (
        run_agent("demo", *arguments) as agent,
        tab(browser, agent.url, expected=lambda complaint: "503" in complaint) as one,
    ):
        link = one.page.locator(".tile", has_text="Wastes most").get_by_role("link")
        pod = await link.text_content()
        await link.click()
        await expect(one.page.locator("#attention li .pod").first).to_have_text(pod or "")


async def test_nothing_is_wrong(site: Site, browser: Browser) -> None:
    """It says so only where all was judged."""
    pod = Pod("team", "elsewhere", {"main": {}})
    site.collect(TestNode([Gpu(0)], [pod], allocatable={"nvidia.com/gpu": [str(gpu_uuid(0))]}), WATCHED)
    async with tab(browser, site.url) as one:
        assert await one.texts("#attention .empty") == ["No fault and no waste."]
        site.collect(cards(1, 2))
        await expect(one.page.locator("#attention .empty")).to_have_text("The known data shows no fault and no waste.")


async def test_gpus_that_no_container_can_be_assigned(site: Site, browser: Browser) -> None:
    """Each has a line with a mark and what to do. It leads to the GPU, which says the same."""
    node = cards(2, 2)
    node.allocatable = {"nvidia.com/gpu": [str(gpu_uuid(0)), str(gpu_uuid(1))]}
    site.collect(node)
    node.allocatable = {}
    site.collect(node, 8, 30.0)
    async with tab(browser, site.url) as one:
        lines = one.page.locator("#attention ol li", has_text="not offered")
        await expect(lines).to_have_count(2)
        await expect(lines.first).to_contain_text(
            "Is not offered: device plugin stopped or removed, for example for DRA."
        )
        await expect(lines.first).to_contain_text("Check the device plugin's pod")
        await lines.first.get_by_role("link").click()
        await expect(one.page.locator(".ills").first).to_contain_text("This GPU is not offered")


async def test_curves_begin_with_what_there_is(site: Site, browser: Browser) -> None:
    """After some minutes a curve fills its width, and says of how long it is; before that there is none."""
    node = shared_card()
    site.collect(node, 2, 30.0)
    async with tab(browser, site.url) as one:
        await expect(one.page.locator(".details")).to_have_count(1)
        await expect(one.page.locator(".curve")).to_have_count(0)
        site.collect(node, 8, 30.0)
        await one.page.reload()
        curve = one.page.locator(".side .of-memory")
        line = await curve.locator(".line").get_attribute("d")
        assert line is not None
        assert line.startswith("M0 ")
        label = await curve.get_attribute("aria-label")
        assert label is not None
        assert label.startswith("Memory, maximum of 30 s, last ")
        assert "hour" not in label


async def test_curves_are_fetched_when_they_are_seen(site: Site, browser: Browser) -> None:
    """The page does not ask for the history before a GPU is open."""
    node = mixed(8)
    node.gpus[3].utilization = 0.5
    site.collect(node, 8, 30.0)
    async with tab(browser, site.url) as one:
        await expect(one.page.locator(".gpu")).to_have_count(8)
        asked: list[str] = []
        one.page.on("request", lambda request: asked.append(request.url.removeprefix(site.url)))
        await one.page.wait_for_event("request")
        assert asked == ["api/v1/map"]
        async with one.page.expect_request("**/api/v1/history"):
            await one.page.get_by_role("button", name="GPU 3").click()
        await expect(one.page.locator(".side .of-memory")).to_have_count(1)
        assert await one.texts("figcaption") == ["memory, maximum of 30 s", "GPU busy, mean of 30 s"]


def half_judged() -> TestNode:
    """Many findings, and something that gpumap could not check."""
    node = mixed(16)
    node.processes.append(Process(5000, gpu_uuid(4), None, readable=False))
    return node


STATES: dict[str, tuple[Callable[[], TestNode], str]] = {
    "mixed": (lambda: mixed(16), ""),
    "a row": (lambda: mixed(4), f"#{gpu_uuid(3)}&row=other%2Fsquatter-3%2Fmain"),
    "filtered": (lambda: mixed(8), "#q=finding:idle"),
    "processes": (shared_card, "#view=processes"),
    "many findings": (half_judged, "#view=processes"),
    "partitioned": (partitioned, f"#{gpu_uuid(1)}"),
    "failing": (failing, ""),
    "hostile": (hostile, ""),
}


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_axe_finds_nothing(site: Site, browser: Browser, dark: bool, width: int) -> None:
    """No violation of axe-core's rules, of whatever node, in each view. What can be pressed has 24 pixels of room."""
    options = {"rules": {"target-size": {"enabled": True}}}
    for name, (make, address) in STATES.items():
        site.collect(make(), 30, 50.0)
        async with tab(browser, f"{site.url}{address}", width=width, dark=dark) as one:
            await expect(one.page.locator("#health li")).not_to_have_count(0)
            results = await Axe().run(one.page, options=options)
            assert results.violations_count == 0, f"{name}: {results.generate_report()}"
