"""Take the pictures of docs/: the page of the demo in a real Chromium, light and dark: `make pictures`.

The demo runs for some minutes first, so that the curves have something to show.
"""

import asyncio
import tempfile
from pathlib import Path
from typing import Literal

from playwright.async_api import Browser

from tests.browser.browser import chromium
from tests.demo_process import demo

DOCS = Path(__file__).resolve().parent.parent / "docs"
WIDTH, HEIGHT = 1280, 1000
SECONDS = 240.0
"""How long the demo runs first."""


async def take(url: str) -> None:
    """Wait until the demo has a past, and photograph it."""
    async with chromium() as browser:
        await asyncio.sleep(SECONDS)
        await _photograph(browser, url, "light", DOCS / "pictures" / "page.png")
        await _photograph(browser, url, "dark", DOCS / "pictures" / "page-dark.png")


async def _photograph(browser: Browser, url: str, scheme: Literal["light", "dark"], file: Path) -> None:
    context = await browser.new_context(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme)
    page = await context.new_page()
    await page.goto(url)
    await page.wait_for_selector("#attention ol li")
    await page.screenshot(path=file)
    await context.close()
    print(file)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="gpumap-picture-") as folder:
        place = Path(folder) / "demo"
        place.mkdir()
        with demo(place) as url:
            asyncio.run(take(url))


if __name__ == "__main__":
    main()
