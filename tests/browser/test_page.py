"""The page `/` in a real Chromium: what it shows of a node, live, and how it is used by keyboard, link and phone."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
from msgspec import structs
from playwright.async_api import Browser, Route, expect

from gpumap.agent.judgement.judge import judge
from gpumap.model.devices import add_processes
from gpumap.model.node import ContainerXids, GpuXids, Workload
from gpumap.model.snapshot import Snapshot
from tests.browser.browser import PATIENCE_MS, STALE_AFTER_SECONDS, WATCHED, Site, Tab, chromium, tab
from tests.nodes import GIB, Gpu, Pod, Process, TestNode, gpu_uuid, mig_uuid
from tests.snapshots import gpu, with_node

pytestmark = pytest.mark.asyncio(loop_scope="module")

UUID = gpu_uuid(0)
EVIL = '<img src=x onerror="alert(1)">‮gnp.\0exe\n\'"&lt;<script>alert(2)</script>'
HEBREW, ARABIC = "שלום-עולם", "مرحبا"
SHARED = "nvidia.com/gpu.shared"

expect.set_options(timeout=PATIENCE_MS)


@pytest_asyncio.fixture(name="browser", scope="module", loop_scope="module")
async def start_browser() -> AsyncIterator[Browser]:
    async with chromium() as browser:
        yield browser


@pytest_asyncio.fixture(name="site", loop_scope="module")
async def start_site() -> AsyncIterator[Site]:
    """A site without a snapshot."""
    site = Site()
    async with site.serving():
        yield site
    site.pages.close()


def holder(name: str, number: int, namespace: str = "team", card: int = 0) -> Pod:
    return Pod(namespace, name, {"main": {SHARED: [f"{gpu_uuid(card)}::{number}"]}})


def shared_card() -> TestNode:
    """One GPU in ten slots: two holders, of which one is idle, a squatter, a leftover, the host, and a remainder."""
    busy, idle = holder("busy", 0), holder("idle", 1)
    squatter = Pod("other", "squatter", {"main": {}})
    leftover = Pod("other", "leftover", {"main": {}}, listed=False)
    return TestNode(
        gpus=[Gpu(0)],
        pods=[busy, idle, squatter, leftover],
        processes=[
            Process(11, UUID, busy, memory=20 * GIB, sm=0.5),
            Process(12, UUID, squatter, memory=5 * GIB, sm=0.25),
            Process(13, UUID, leftover, memory=3 * GIB, comm="trainer"),
            Process(14, UUID, None, memory=2 * GIB, comm="Xorg", types="G"),
        ],
        allocatable={SHARED: [f"{UUID}::{number}" for number in range(10)]},
    )


def cards(number: int, pods: int) -> TestNode:
    """A node where some pods share each GPU, each with a process."""
    held = [(card, holder(f"pod-{card}-{one}", one, card=card)) for card in range(number) for one in range(pods)]
    return TestNode(
        gpus=[Gpu(card) for card in range(number)],
        pods=[pod for _, pod in held],
        processes=[Process(100 + at, gpu_uuid(card), pod, memory=GIB // 2) for at, (card, pod) in enumerate(held)],
    )


def partitioned() -> TestNode:
    """A whole GPU, one with two MIG devices of which one is held, and one without any."""
    pod = Pod("team", "small", {"main": {"nvidia.com/mig-1g.10gb": [mig_uuid(1, 1, 0)]}})
    return TestNode(
        gpus=[Gpu(0), Gpu(1, mig=[(1, 0, 1), (2, 0, 1)]), Gpu(2, mig=[])],
        pods=[pod],
        processes=[Process(21, mig_uuid(1, 1, 0), pod, memory=4 * GIB)],
    )


def hostile() -> TestNode:
    """Names that no API server lets through, and long ones that it does."""
    evil = Pod(EVIL, "a" * 253, {EVIL: {SHARED: [f"{UUID}::0"]}})
    foreign = Pod(HEBREW, ARABIC, {HEBREW: {SHARED: [f"{UUID}::1"]}})
    stray = Pod("team", EVIL, {"main": {"nvidia.com/gpu": [f"{EVIL}"]}})
    return TestNode(
        gpus=[Gpu(0)],
        pods=[evil, foreign, stray],
        processes=[
            Process(31, UUID, evil, container=EVIL, memory=30 * GIB, comm=EVIL),
            Process(32, UUID, foreign, container=HEBREW, memory=20 * GIB, comm=ARABIC),
        ],
    )


def failing() -> TestNode:
    node = shared_card()
    node.down = {"nvml", "procfs", "pod_identity", "kubelet"}
    return node


def row(one: Tab, name: str) -> str:
    return f"tbody tr:has-text({name!r})"


async def test_a_shared_card(site: Site, browser: Browser) -> None:
    """Every holder and user is listed with what it holds and uses; squatter, leftover, host and remainder by name."""
    site.collect(shared_card())
    async with tab(browser, site.url) as one:
        await expect(one.page.locator(".gpu h2")).to_have_text("GPU 0")
        assert await one.texts(row(one, "team/busy")) == ["team/busy main 1 0.1 – 20.0 GiB 20.0 GiB 50 % now"]
        (idle,) = await one.texts(row(one, "team/idle"))
        assert idle.endswith("1 0.1 – 0 0 0 % 10 s")
        (squatter,) = await one.undated(row(one, "other/squatter"))
        assert squatter == (
            "other/squatter main squatter · uses a device that it does not hold: PID 12 python3 "
            "0 0 0 5.0 GiB 5.0 GiB 25 % now"
        )
        assert await one.undated(row(one, "other/leftover")) == [
            "other/leftover main leftover · its pod no longer exists, but left PID 13 trainer 3.0 GiB 0 %"
        ]
        assert await one.texts(row(one, "Xorg")) == ["host · 1 process: Xorg 2.0 GiB 0 %"]
        facts = (await one.texts(".gpu .facts"))[0]
        assert facts.startswith("model Test used 30.1 GiB / 80.0 GiB")
        assert "unaccounted 100 MiB" in facts
        assert "free 49.9 GiB, shared by 2 " in facts
        assert await one.texts(".gpu .names") == ["busy idle"]
        tiles = dict(zip(await one.texts(".tile dt"), await one.texts(".tile dd"), strict=True))
        assert tiles["GPUs"] == "1"
        assert tiles["Squatter"] == "5.0 GiB 1 pod"
        assert tiles["Leftover"] == "3.0 GiB 1 pod"
        names = await one.texts("tbody th")
        assert names[0].startswith("other/squatter"), "what needs attention comes first"
        assert await one.page.locator(".segment").evaluate_all("all => all.map(one => one.title)") == [
            "team/busy 20.0 GiB",
            "other/squatter 5.0 GiB",
            "other/leftover 3.0 GiB",
            "host 2.0 GiB",
            "unaccounted 100 MiB",
        ]
        assert await one.texts(".legend li") == [
            "holder (one colour each)",
            "squatter",
            "leftover",
            "host",
            "unaccounted",
        ]


async def test_work_outside_pods(site: Site, browser: Browser) -> None:
    """A row for each container, job and user of the host, also in the bar; what nothing names is the host."""
    docker, alice = Workload("docker", "4f1c9e0b7a2d"), Workload("user", "alice")
    works = [(docker, 20, 0.5), (docker, 10, 0.25), (alice, 5, 0.0), (None, 2, 0.0)]
    site.collect(
        TestNode(
            gpus=[Gpu(0)],
            processes=[
                Process(pid, UUID, None, memory=gib * GIB, sm=sm, work=work)
                for pid, (work, gib, sm) in enumerate(works, 11)
            ],
        )
    )
    async with tab(browser, site.url) as one:
        assert await one.texts(row(one, "docker/")) == ["docker/4f1c9e0b7a2d host · 2 processes: python3 30.0 GiB 75 %"]
        assert await one.texts(row(one, "alice")) == ["user/alice host · 1 process: python3 5.0 GiB 0 %"]
        titles = await one.page.locator(".segment").evaluate_all("all => all.map(one => one.title)")
        assert titles[:3] == ["docker/4f1c9e0b7a2d 30.0 GiB", "user/alice 5.0 GiB", "host 2.0 GiB"]
        assert "host" in await one.texts(".legend li")
        await one.page.goto(f"{site.url}#view=processes")
        assert await one.texts("tbody tr:has-text('alice')") == ["13 C python3 GPU 0 host user/alice 5.0 GiB 0 %"]


async def test_idle_holders_say_for_how_long(site: Site, browser: Browser) -> None:
    node = shared_card()
    node.clock = site.clock - 7300
    site.pages.publish(node.collect())
    node.processes[0].sm = 0.0
    for _ in range(145):
        site.pages.publish(node.collect(50))
    site.collect(node)
    async with tab(browser, site.url) as one:
        (text,) = await one.texts(row(one, "team/busy"))
        assert re.fullmatch(
            r"team/busy main idle · no activity seen for at least 2h1m, since \d\d:\d\d UTC "
            r"1 0.1 – 20.0 GiB 20.0 GiB 0 % 2 h",
            text,
        )
        tiles = dict(zip(await one.texts(".tile dt"), await one.texts(".tile dd"), strict=True))
        assert tiles["Idle"] == "2 holders 0.2 GPUs"


async def test_unknown_is_a_dash_with_its_reason(site: Site, browser: Browser) -> None:
    """Without PID visibility use by container is a dash that says why, nowhere 0, and the remedy is above."""
    node = shared_card()
    node.visible = False
    site.collect(node)
    async with tab(browser, site.url) as one:
        (text,) = await one.texts(row(one, "team/busy"))
        assert text == "team/busy main 1 0.1 – – – – –"
        titles = await one.page.locator(f"{row(one, 'team/busy')} .unknown").evaluate_all(
            "all => all.map(one => one.title)"
        )
        assert len(titles) == 5
        assert all(titles)
        assert sum("hostPID" in title for title in titles) == 4
        await expect(one.page.locator("#attention")).to_contain_text("hostPID")
        tiles = dict(zip(await one.texts(".tile dt"), await one.texts(".tile dd"), strict=True))
        assert tiles["Squatter"].startswith("–")
        assert tiles["Leftover"].startswith("–")


async def test_it_is_live(site: Site, browser: Browser) -> None:
    """A new snapshot is shown without reloading; the row that stays is the same element and keeps the focus."""
    node = shared_card()
    site.collect(node)
    async with tab(browser, site.url) as one:
        await one.page.locator("thead button", has_text="Peak").focus()
        await one.page.evaluate("window.before = document.querySelector('tbody tr.is-assigned')")
        node.processes[0].memory = 40 * GIB
        node.pods[2].listed = False
        site.collect(node)
        await expect(one.page.locator(row(one, "team/busy"))).to_contain_text("40.0 GiB")
        await expect(one.page.locator(row(one, "other/squatter"))).to_contain_text("leftover")
        assert await one.page.evaluate("window.before.isConnected")
        assert await one.page.evaluate("document.activeElement.textContent") == "Peak"


async def test_sorting(site: Site, browser: Browser) -> None:
    """A header sorts by its column, again the other way round, says so to screen readers, and is in the address."""
    site.collect(cards(1, 3))
    node = cards(1, 3)
    for process, gib in zip(node.processes, (2, 9, 4), strict=True):
        process.memory = gib * GIB
    site.collect(node)
    async with tab(browser, site.url) as one:
        names = ".is-assigned .pod"
        for order, wanted in (
            ("descending", ["pod-0-1", "pod-0-2", "pod-0-0"]),
            ("ascending", ["pod-0-0", "pod-0-2", "pod-0-1"]),
        ):
            await one.page.get_by_role("button", name="Used", exact=False).press("Enter")
            await expect(one.page.locator("th[aria-sort]")).to_have_attribute("aria-sort", order)
            assert await one.texts(names) == wanted
        assert one.page.url.endswith("#sort=used")
        await one.page.reload()
        await expect(one.page.locator("th[aria-sort]")).to_have_attribute("aria-sort", "ascending")


FILTERS = {
    "pod-1-1": (["GPU 1"], ["pod-1-1"]),
    "POD:pod-0 ns:team": (["GPU 0"], ["pod-0-0", "pod-0-1"]),
    str(gpu_uuid(1))[:14]: (["GPU 1"], ["pod-1-0", "pod-1-1"]),
    "owner:gone": ([], []),
    "GPU 1": (["GPU 1"], ["pod-1-0", "pod-1-1"]),
    "102": (["GPU 1"], ["pod-1-0"]),
    "finding:idle,over": ([], []),
    "test": (["GPU 0", "GPU 1"], ["pod-0-0", "pod-0-1", "pod-1-0", "pod-1-1"]),
}
"""What is typed, and the devices and pods that are left; "Test" is in the model's name."""


async def test_filter(site: Site, browser: Browser) -> None:
    """Words and fields narrow devices and rows; a device that matches by itself is shown whole; Esc shows all again."""
    site.collect(cards(2, 2))
    async with tab(browser, site.url) as one:
        await expect(one.page.locator(".gpu")).to_have_count(2)
        for query, (devices, rows) in FILTERS.items():
            await one.page.keyboard.press("/")
            await one.page.keyboard.type(query)
            await expect(one.page.locator("#found")).to_have_text(f"{len(devices)} of 2 devices")
            assert await one.texts(".gpu h2") == devices
            assert await one.texts(".is-assigned .pod") == rows
            assert "#q=" in one.page.url
            await one.page.keyboard.press("Escape")
            await expect(one.page.locator(".gpu")).to_have_count(2)
            assert "#" not in one.page.url


async def test_a_reason_opens_by_key_and_by_tap(site: Site, browser: Browser) -> None:
    """A dash is a button that opens its reason. Esc closes the reason, and leaves the filter."""
    site.collect(shared_card())
    async with tab(browser, f"{site.url}#q=busy", width=400) as one:
        dash, reason = one.page.locator("td .unknown").first, one.page.locator("#why")
        for opened in (dash.press("Enter"), dash.click()):
            await expect(reason).to_be_hidden()
            await opened
            await expect(reason).to_have_text(re.compile("This kind of sharing grants no memory"))
            await one.page.keyboard.press("Escape")
        await expect(reason).to_be_hidden()
        await expect(one.page.locator("#filter")).to_have_value("busy")


async def test_links_are_deep(site: Site, browser: Browser) -> None:
    """A link leads to a device and marks it; view, filter and order are in the address, and come from it."""
    site.collect(cards(8, 6))
    async with tab(browser, f"{site.url}#{gpu_uuid(5)}") as one:
        marked = one.page.locator(".gpu[aria-current=true]")
        await expect(marked.locator("h2")).to_have_text("GPU 5")
        await expect(marked.locator("h2")).to_be_in_viewport()
        await one.page.locator("h2 button", has_text="GPU 6").click()
        await expect(marked.locator("h2")).to_have_text("GPU 6")
        assert one.page.url.endswith(f"#{gpu_uuid(6)}")
    async with tab(browser, f"{site.url}#view=processes&q=pod-3-2&sort=pid") as one:
        await expect(one.page.locator(".processes tbody tr")).to_have_count(1)
        await expect(one.page.locator("th[aria-sort]")).to_have_text("PID")
        await expect(one.page.locator("#filter")).to_have_value("pod-3-2")
        await one.page.get_by_role("link", name="GPUs", exact=True).click()
        assert await one.texts(".gpu h2") == ["GPU 3"]
        assert one.page.url.endswith("#q=pod-3-2")


async def test_the_keyboard_is_enough(site: Site, browser: Browser) -> None:
    """Tab reaches everything that can be used, first a way past the header, and what has the focus shows it."""
    site.collect(shared_card())
    async with tab(browser, site.url) as one:
        await expect(one.page.locator(".gpu")).to_have_count(1)
        reached: list[str] = []
        while True:
            await one.page.keyboard.press("Tab")
            name, outline, ended = await one.page.evaluate(
                "(on => [on.textContent.trim() || on.id, getComputedStyle(on).outlineStyle, on === document.body])"
                "(document.activeElement)"
            )
            if ended:
                break
            assert outline != "none", name
            reached.append(name)
            assert len(reached) < 100
        assert reached[0] == "To the GPUs"
        assert {"GPUs", "Processes", "JSON", "metrics", "filter", "GPU 0", str(UUID), "Container", "Used", "SM"} <= set(
            reached
        )


async def test_the_uuid_can_be_copied(site: Site, browser: Browser) -> None:
    site.collect(shared_card())
    async with tab(browser, site.url) as one:
        await one.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        await one.page.get_by_role("button", name=str(UUID)).click()
        await expect(one.page.locator("#said")).to_have_text(f"Copied {UUID}")
        assert await one.page.evaluate("navigator.clipboard.readText()") == UUID


CONTRAST = """(selector) => {
  const light = (color) => {
    const [r, g, b] = color.match(/[\\d.]+/g).map(Number).map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const element = document.querySelector(selector);
  let behind = element;
  while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
  const [a, b] = [light(getComputedStyle(element).color), light(getComputedStyle(behind).backgroundColor)];
  return [b, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
}"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_colours_follow_the_reader(site: Site, browser: Browser, dark: bool) -> None:
    """Dark where the system is dark, light where it is light, and readable in both (WCAG AA)."""
    site.collect(shared_card())
    async with tab(browser, site.url, dark=dark) as one:
        await expect(one.page.locator(".gpu")).to_have_count(1)
        for selector in (
            "tbody .pod",
            "tbody .ns",
            "thead button",
            ".mark-finding.is-leftover",
            ".mark-finding.is-squatter",
            ".tile dt",
            "#age",
        ):
            behind, contrast = await one.page.evaluate(CONTRAST, selector)
            assert (behind < 0.2) == dark, selector
            assert contrast >= 4.5, selector


async def test_a_phone_is_wide_enough(site: Site, browser: Browser) -> None:
    """At 360 pixels nothing makes the page scroll sideways, in either view, whatever the node."""
    site.collect(shared_card())
    async with tab(browser, site.url, width=360) as one:
        for make in (shared_card, partitioned, hostile, failing):
            site.collect(make())
            for view in ("", "#view=processes"):
                await one.page.goto(f"{site.url}{view}")
                await one.page.reload()
                await expect(one.page.locator("#health li")).not_to_have_count(0)
                assert await one.width_over() <= 0, make


async def test_hostile_names_are_only_text(site: Site, browser: Browser) -> None:
    """Markup, direction marks, NUL and newlines in names are shown spelled out, and make no element."""
    site.collect(hostile())
    async with tab(browser, site.url) as one:
        await expect(one.page.locator("tbody tr").first).to_be_visible()
        for view in ("GPUs", "Processes"):
            await one.page.get_by_role("link", name=view, exact=True).click()
            shown = await one.page.locator("#content").inner_text()
            assert '<img src=x onerror="alert(1)">\\u202egnp.\\u0000exe\\u000a' in shown
            assert HEBREW in shown
            assert ARABIC in shown
            assert "a" * 253 in shown
            assert await one.page.locator("img, #main script").count() == 0
            assert await one.page.evaluate(
                "[...document.querySelectorAll('*')].every(one => !one.getAttributeNames().some(a => /^on/.test(a)))"
            )
            assert await one.width_over() <= 0
        await expect(one.page.locator("#attention")).to_contain_text("\\u202egnp.")


async def test_a_dead_agent_is_said_at_once(browser: Browser) -> None:
    """When the agent dies what is shown is greyed out with its age; when it is back the page goes on by itself."""
    site = Site()
    site.collect(shared_card())
    async with contextlib.AsyncExitStack() as stack:
        async with site.serving():
            one = await stack.enter_async_context(tab(browser, site.url, expected=lambda said: "ERR_" in said))
            await expect(one.page.locator("#feed")).to_have_attribute("data-state", "live")
        await expect(one.page.locator("#lost")).to_contain_text("The agent does not answer: no connection.")
        await expect(one.page.locator("#lost")).to_contain_text(" old. The page asks again every 2 s.")
        await expect(one.page.locator("body")).to_have_class("stale")
        assert float(await one.page.locator("#content").evaluate("one => getComputedStyle(one).opacity")) < 1
        await expect(one.page.locator(".gpu")).to_have_count(1)
        async with site.serving():
            site.collect(cards(2, 1))
            await expect(one.page.locator(".gpu")).to_have_count(2)
            await expect(one.page.locator("#lost")).to_be_hidden()
            await expect(one.page.locator("body")).not_to_have_class("stale")
    site.pages.close()


async def test_the_page_does_not_wait_longer_after_each_failure(browser: Browser) -> None:
    """However long the agent was away, the next try comes within 5 s. Here each wait takes a moment, and is noted."""
    hurry = """window.waits = []; const wait = window.setTimeout;
        window.setTimeout = (call, ms) => wait(call, waits.push(ms) && 10)"""
    site = Site()
    site.collect(shared_card())
    async with contextlib.AsyncExitStack() as stack:
        async with site.serving():
            one = await stack.enter_async_context(
                tab(browser, site.url, expected=lambda said: "ERR_" in said, before=hurry)
            )
            await expect(one.page.locator(".gpu")).to_have_count(1)
        await expect(one.page.locator("#feed")).to_have_attribute("data-state", "lost")
        await one.page.evaluate("waits.length = 0")
        await one.page.evaluate("new Promise((done) => setInterval(() => waits.length >= 20 && done(), 20))")
        async with site.serving():
            await expect(one.page.locator("#feed")).to_have_attribute("data-state", "live")
            waits = await one.page.evaluate("waits")
            assert max(waits) <= 5000
    site.pages.close()


async def test_an_agent_that_collects_no_more(site: Site, browser: Browser) -> None:
    """Old data is called old though the agent answers, and past --stale-after the page says why it is empty."""
    site.ahead_seconds = -30.0
    site.collect(shared_card())
    site.ahead_seconds = 0.0
    async with tab(browser, site.url) as one:
        await expect(one.page.locator("#lost")).to_contain_text("Old data")
        await expect(one.page.locator("body")).to_have_class("stale")
        await expect(one.page.locator(".gpu")).to_have_count(1)
        site.pages.why_late = lambda: "somebody asked for it"
        site.ahead_seconds = STALE_AFTER_SECONDS
        await expect(one.page.locator(".gpu")).to_have_count(0)
        await expect(one.page.locator("#attention")).to_contain_text("too old to show")
        await expect(one.page.locator("#attention")).to_contain_text("60 s: somebody asked for it.")
        await expect(one.page.locator("#attention")).not_to_contain_text("NVML lists no GPU")


async def test_when_data_is_old_is_told_by_the_agents_interval(site: Site, browser: Browser) -> None:
    """However long ago this tab saw the document before: it may have been hidden."""
    site.ahead_seconds = -55.0
    site.collect(cards(1, 1))
    site.ahead_seconds = 0.0
    async with tab(browser, site.url) as one:
        await expect(one.page.locator(".gpu")).to_have_count(1)
        site.ahead_seconds = -30.0
        site.collect(cards(2, 1))
        site.ahead_seconds = 0.0
        await expect(one.page.locator(".gpu")).to_have_count(2)
        async with one.page.expect_response("**/api/v1/map") as answer:
            pass
        assert (await answer.value).status == 304
        await expect(one.page.locator("#feed")).to_have_attribute("data-state", "late")
        assert (await one.page.evaluate("fetch('api/v1/map').then(one => one.json())"))["interval_seconds"] == 5


@pytest.mark.parametrize("body", ['{"version": 2}', "null", '{"version": 1'])
async def test_an_answer_that_is_refused_is_not_known(site: Site, browser: Browser, body: str) -> None:
    """After an answer that is no map the page says so, and asks for the whole document again."""

    async def tamper(route: Route) -> None:
        headers = {name: value for name, value in route.request.headers.items() if name != "if-none-match"}
        await route.fulfill(response=await route.fetch(headers=headers), body=body)

    site.collect(cards(1, 1))
    async with tab(browser, site.url) as one:
        await expect(one.page.locator(".gpu")).to_have_count(1)
        site.collect(cards(2, 1))
        await one.page.route("**/api/v1/map", tamper)
        site.collect(cards(3, 1))
        await expect(one.page.locator("#feed")).to_have_attribute("data-state", "lost")
        await one.page.unroute("**/api/v1/map", tamper)
        await expect(one.page.locator(".gpu")).to_have_count(3)
        await expect(one.page.locator("#feed")).to_have_attribute("data-state", "live")


async def test_before_the_first_collection(site: Site, browser: Browser) -> None:
    """The page says what it waits for, and goes on when it comes."""
    async with tab(browser, site.url, expected=lambda complaint: "503" in complaint) as one:
        await expect(one.page.locator("#content")).to_contain_text("the first collection is not finished")
        await expect(one.page.locator("#lost")).to_be_hidden()
        site.collect(shared_card())
        await expect(one.page.locator(".gpu")).to_have_count(1)


async def test_every_source_down(site: Site, browser: Browser) -> None:
    """The top of the page lists each source that is down with its reason; nothing is counted, and nothing is 0."""
    site.collect(failing())
    async with tab(browser, site.url) as one:
        await expect(one.page.locator(".fault")).to_have_count(5)
        notices = " ".join(await one.texts(".fault"))
        for word in ("No current data", "kubelet is down", "socket_missing", "nvml is down", "never answered"):
            assert word in notices
        await expect(one.page.locator(".tile")).to_have_count(0)
        await expect(one.page.locator("#health .fails")).to_have_count(4)


def ailing(**reading: object) -> Callable[[Snapshot], Snapshot]:
    """The node's first GPU with readings of its health, as a driver gives them, and their remedies."""

    def fall_ill(snapshot: Snapshot) -> Snapshot:
        first, *others = snapshot.node.gpus
        assert first.reading is not None
        read = structs.replace(first.reading, **reading)
        gpus = (structs.replace(first, reading=read), *others)
        device, *more = snapshot.node.devices
        return with_node(snapshot, gpus=gpus, devices=(structs.replace(device, activity=read.activity), *more))

    return fall_ill


def show(site: Site, node: TestNode, *changes: Callable[[Snapshot], Snapshot]) -> None:
    """Publish a node of now as it is after some changes, with its findings."""
    node.clock = site.clock - 10
    node.collect()
    snapshot = node.collect()
    for change in changes:
        snapshot = change(snapshot)
    findings, judged, unjudged = judge(add_processes(snapshot.node, snapshot.processes))
    site.pages.publish(with_node(snapshot, findings=findings, judged=judged, unjudged=unjudged))


async def test_a_healthy_gpu_is_calm(site: Site, browser: Browser) -> None:
    """A GPU that is well shows only what it measures, although it reports every state that could be wrong."""
    well = gpu(0).reading
    assert well is not None
    reported = {name: getattr(well, name) for name in well.__struct_fields__ if name not in ("index", "uuid", "memory")}
    show(site, shared_card(), ailing(**{**reported, "clock_events": {"gpu_idle": True, "sw_power_cap": False}}))
    async with tab(browser, site.url) as one:
        facts = (await one.texts(".gpu .facts"))[0]
        for fact in ("temp 61 °C", "power 507 W / 700", "clock 1980 MHz", "active SM 50 % · warps 25 % · tensor 13 %"):
            assert fact in facts
        assert "slowed" not in facts
        await expect(one.page.locator(".ills")).to_have_count(0)
        await expect(one.page.locator(".fault")).to_have_count(0)
        title = await one.page.locator(".facts span[title*=memory]").first.get_attribute("title")
        assert title is not None


async def test_what_is_wrong_with_a_gpu(site: Site, browser: Browser) -> None:
    """Its card lists its worst fault with what to do, memory errors and why it is slow; a cause hides its effect."""
    ill = ailing(
        clock_events={"gpu_idle": False, "hw_slowdown": True, "hw_thermal_slowdown": True, "sync_boost": True},
        ecc_errors={"corrected": {"dram": 7}, "uncorrected": {"dram": 2, "sram": 1}},
        row_remap_pending=True,
        row_remap_failure=True,
    )
    show(site, shared_card(), ill)
    async with tab(browser, site.url) as one:
        assert "slowed by heat (hardware)" in (await one.texts(".gpu .facts"))[0]
        failure, errors = await one.texts(".ills li")
        said = "This GPU has bad memory; also row remap pending. Drain the node, and run NVIDIA's field diagnostic."
        assert failure.startswith(said)
        assert errors == "3 memory errors over its life were not correctable: dram 2, sram 1."
        assert await one.texts(".marks") == ["fault squatter +1"]
        assert await one.width_over() <= 0


@pytest.mark.parametrize("width", [360, 1280])
async def test_what_the_driver_asks_for(site: Site, browser: Browser, width: int) -> None:
    """A GPU that answers and needs a reset is said above and on its card, in words. One that is down has one line."""

    def need(snapshot: Snapshot) -> Snapshot:
        first, second = snapshot.node.gpus
        asking = structs.replace(first, recovery_action="drain_and_reset")
        lost = structs.replace(second, fault="lost", reading=None, recovery_action="node_reboot")
        up, down = snapshot.node.devices
        return with_node(snapshot, gpus=(asking, lost), devices=(up, structs.replace(down, memory=None)))

    show(site, cards(2, 1), need)
    async with tab(browser, site.url, width=width) as one:
        notice = one.page.locator("li.fault", has_text="Has reduced capacity")
        await expect(notice).to_contain_text("Start no new work on it. When its work has ended, run")
        await expect(one.page.locator("#attention li.fault")).to_have_count(2)
        await expect(one.page.locator(".tile.is-fault dd")).to_have_text("2")
        up, down = await one.texts(".ills li")
        assert up.startswith("This GPU has reduced capacity. Start no new work on it.")
        assert down.startswith("This GPU fell off the bus; also recovery node reboot. Cordon the node, drain it and ")
        assert "<index>" not in up + down
        await expect(one.page.locator(".gpu.down")).to_contain_text("down: lost")
        assert await one.width_over() <= 0


async def test_xid_errors_name_whom_they_hit(site: Site, browser: Browser) -> None:
    """Each code is a line with the containers that held or used the GPU; those of a MIG device are with its GPU."""
    leaf = mig_uuid(1, 1, 0)

    def err(snapshot: Snapshot) -> Snapshot:
        now = snapshot.node.timestamp
        errors = GpuXids(
            gpu_uuid(1),
            {31: 2, 79: 1, 500: 3},
            0.0,
            79,
            {31: now - 240, 79: now - 9},
            {31: "bad access", 79: "off the bus"},
        )
        counts = tuple(errors if one.index == 1 else GpuXids(one.uuid, {}, 0.0) for one in snapshot.node.gpus)
        hit = [ContainerXids("team", f"pod-{one}", "main", leaf, 31, 1) for one in range(5)]
        hit.append(ContainerXids("team", EVIL, "main", gpu_uuid(0), 31, 1))
        return with_node(snapshot, xids=counts, container_xids=tuple(hit))

    show(site, partitioned(), err)
    async with tab(browser, f"{site.url}#{gpu_uuid(1)}") as one:
        assert await one.texts(".ills li") == [
            "This GPU had XID 79: GPU has fallen off the bus. Cordon the node, drain it and reboot it. If it happens "
            "again, check the hardware.",
            "XID 31: bad access, 2 times, last 4 min ago, while held or used by team/pod-0 main, team/pod-1 main, "
            "team/pod-2 main and 2 more.",
            "XID 79, 9 s ago.",
            "XID 500, 3 times.",
        ]
        assert await one.texts(f"[id='{gpu_uuid(1)}'] .marks") == ["fault XID 79 +2"]
        for query, devices in (("xid:79", ["GPU 1"]), ("off the bus", ["GPU 1"]), ("xid:7", [])):
            await one.page.locator("#filter").fill(query)
            await expect(one.page.locator(".gpu")).to_have_count(len(devices))
            assert await one.texts(".gpu h2") == devices


async def test_mig_devices_stand_below_their_gpu(site: Site, browser: Browser) -> None:
    """A partitioned GPU is a heading for its MIG devices; one without any says so; SM is unknown on them."""
    site.collect(partitioned(), WATCHED)
    async with tab(browser, site.url) as one:
        for name in ("GPU 1", "GPU 2"):
            await one.page.get_by_role("button", name=name, exact=True).click()
        await expect(one.page.locator(".part")).to_have_count(2)
        assert await one.texts("#content h2, #content h3") == [
            "GPU 0",
            "GPU 1",
            "GPU 1 MIG 1/0",
            "GPU 1 MIG 2/0",
            "GPU 2",
        ]
        (text,) = await one.undated(row(one, "team/small"))
        assert text == "team/small main unused · peak so far 4.0GiB 1 0.14 10.0 GiB 4.0 GiB 4.0 GiB – –"
        await expect(one.page.locator("#content")).to_contain_text("This GPU has no MIG device")


async def test_processes(site: Site, browser: Browser) -> None:
    """The view of processes has every one with its owner, and sorts."""
    site.collect(shared_card())
    async with tab(browser, f"{site.url}#view=processes") as one:
        await expect(one.page.locator("tbody tr")).to_have_count(4)
        assert (await one.texts("tbody tr"))[0] == "11 C python3 GPU 0 assigned team/busy main 20.0 GiB 50 %"
        assert await one.texts("tbody tr:has-text('Xorg')") == ["14 G Xorg GPU 0 host 2.0 GiB 0 %"]
        await one.page.get_by_role("button", name="SM", exact=True).click()
        assert [text.split()[0] for text in await one.texts("tbody tr")] == ["11", "12", "13", "14"]
        await one.page.get_by_role("button", name="Command").click()
        assert (await one.texts("tbody tr"))[0].startswith("14 G Xorg")


async def test_curves_have_gaps(site: Site, browser: Browser) -> None:
    """The last hour is drawn for devices and containers, with a gap where nothing was known, and says so in words."""
    node = shared_card()
    node.clock = site.clock - 118 * 30
    for at in range(118):
        node.down = {"nvml"} if 40 <= at < 50 else set()
        site.pages.publish(node.collect(30))
    site.collect(node)
    async with tab(browser, site.url) as one:
        curve = one.page.locator(f"{row(one, 'team/busy')} .of-memory")
        await expect(curve).to_have_count(1)
        line = await curve.locator(".line").get_attribute("d")
        assert line is not None
        assert line.count("M") == 2, line
        label = await curve.get_attribute("aria-label")
        assert label == "Memory, maximum of 30 s, last hour: highest 20.0 GiB, lowest 20.0 GiB, unknown for 5 min"
        await expect(one.page.locator(".side .of-memory")).to_have_count(1)


async def test_a_big_node(site: Site, browser: Browser) -> None:
    """Sixteen GPUs with a hundred pods each: the first of each are shown, all on request, and the filter finds any."""
    site.collect(cards(16, 100), 2)
    async with tab(browser, site.url) as one:
        await expect(one.page.locator(".gpu")).to_have_count(16)
        await one.page.locator("h2 button").first.press("Enter")
        rows = one.page.locator(".gpu").first.locator("tbody tr")
        await expect(rows).to_have_count(12)
        await one.page.get_by_role("button", name="Show all 100", exact=True).first.click()
        await expect(rows).to_have_count(100)
        await one.page.locator("#filter").fill("pod-9-77")
        await expect(one.page.locator(".is-assigned .pod")).to_have_text("pod-9-77")


async def test_a_hidden_page_rests(site: Site, browser: Browser) -> None:
    """While the page is hidden, it asks for nothing; when it is visible again, it asks at once."""
    site.collect(shared_card())
    hide = "window.away = false; Object.defineProperty(document, 'hidden', {get: () => window.away})"
    async with tab(browser, site.url, before=hide) as one:
        await expect(one.page.locator(".gpu")).to_have_count(1)
        await one.page.clock.install()
        await one.page.evaluate("window.away = true; document.dispatchEvent(new Event('visibilitychange'))")
        asked: list[str] = []
        one.page.on("request", lambda request: asked.append(request.url))
        await one.page.clock.run_for(120_000)
        assert asked == []
        async with one.page.expect_request("**/api/v1/map"):
            await one.page.evaluate("window.away = false; document.dispatchEvent(new Event('visibilitychange'))")


async def test_without_scripts(site: Site, browser: Browser) -> None:
    """Who allows no scripts is led to the same data."""
    async with tab(browser, site.url, scripts=False) as one:
        links = await one.page.locator("noscript a").evaluate_all("all => all.map(one => one.getAttribute('href'))")
        assert links == ["api/v1/map", "metrics"]


async def test_behind_a_proxy_path(browser: Browser) -> None:
    """Every address is relative: the page works below the path of the API server's proxy."""
    site = Site(prefix="/api/v1/namespaces/gpumap/services/gpumap:9401/proxy/")
    site.collect(shared_card())
    async with site.serving(), tab(browser, site.url) as one:
        await expect(one.page.locator(".gpu")).to_have_count(1)
    site.pages.close()
