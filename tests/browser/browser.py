"""A real Chromium for the tests of the page, and the application as it is served, with snapshots made by hand.

What a browser complains of (errors of scripts, of the console, of the policy) is collected, and fails the test.
"""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from aiohttp import web
from playwright.async_api import Browser, Page, async_playwright

from gpumap.agent.metrics import self_families
from gpumap.agent.web.app import application
from gpumap.agent.web.pages import Pages
from gpumap.agent.web.port import open_port
from tests.nodes import TestNode
from tests.tools import tool

PATIENCE_MS = 60_000
STALE_AFTER_SECONDS = 60.0
WATCHED = 65
"""Collections of 5 s after which gpumap judges who is idle."""
WALL_OF_NODES = 1.7e9
"""A TestNode's wall clock is its own clock and this."""

ARGUMENTS = (
    "--no-sandbox",  # it shows our own page only, and as root there is no sandbox
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
)


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """A Chromium without a window."""
    program = tool("chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        try:
            yield browser
        finally:
            await browser.close()


@dataclass
class Site:
    """The application on a port of its own. Its clock is a TestNode's, so that what a node says is of now."""

    port: int = 0
    prefix: str = "/"
    ahead_seconds: float = 0.0
    interval_seconds: float = 5.0
    pages: Pages = field(init=False)

    def __post_init__(self) -> None:
        families = self_families("1.2.3", "3.11")
        self.pages = Pages((), families, {}, STALE_AFTER_SECONDS, lambda: self.clock, self.interval_seconds)

    @property
    def clock(self) -> float:
        return time.time() - WALL_OF_NODES + self.ahead_seconds

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}{self.prefix}"

    def collect(self, node: TestNode, collections: int = 3, seconds: float = 5.0) -> None:
        """Publish some collections of a node, the last of them now."""
        node.clock = self.clock - collections * seconds
        for _ in range(collections):
            self.pages.publish(node.collect(seconds))

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve; again, on the same port."""
        app = application(self.pages)
        if self.prefix != "/":
            app, inner = web.Application(), app
            app.add_subapp(self.prefix, inner)
        with socket.create_server(("127.0.0.1", self.port)) as listener:
            self.port = listener.getsockname()[1]
            async with open_port(app, listener):
                yield


@dataclass
class Tab:
    """A page of the browser. `complaints` must be empty at the end of a test that wants none."""

    page: Page
    complaints: list[str] = field(default_factory=list)

    async def texts(self, selector: str) -> list[str]:
        """What each element shows, its white space joined, as soon as there is data."""
        await self.page.wait_for_selector("#health li", state="attached")
        return [" ".join(text.split()) for text in await self.page.locator(selector).all_inner_texts()]

    async def undated(self, selector: str) -> list[str]:
        """The same without the times since when findings hold."""
        return [re.sub(r", since \d\d:\d\d UTC", "", text) for text in await self.texts(selector)]

    async def width_over(self) -> int:
        """By how many pixels the page is wider than its window."""
        over: int = await self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        return over


@contextlib.asynccontextmanager
async def tab(
    browser: Browser,
    url: str,
    *,
    width: int = 1280,
    dark: bool = False,
    scripts: bool = True,
    expected: Callable[[str], bool] = lambda complaint: False,
    before: str = "",
) -> AsyncIterator[Tab]:
    """Open a page; at the end nothing was complained of but what was expected. `before` is a script to run first."""
    context = await browser.new_context(
        viewport={"width": width, "height": 800},
        color_scheme="dark" if dark else "light",
        java_script_enabled=scripts,
    )
    try:
        page = await context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        one = Tab(page)
        page.on("pageerror", lambda error: one.complaints.append(f"error: {error}"))
        page.on(
            "console",
            lambda message: one.complaints.append(message.text) if message.type in ("error", "warning") else None,
        )
        if before:
            await page.add_init_script(before)
        await page.goto(url)
        yield one
        assert [complaint for complaint in one.complaints if not expected(complaint)] == []
    finally:
        await context.close()
