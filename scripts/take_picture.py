"""Take the pictures of docs/: the page of the demo in a real Chromium, light and dark: `make pictures`.

The demo runs for a few minutes first, so that the curves have something to show.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Literal

from playwright.async_api import Browser

from tests.browser import chromium
from tests.demo_process import demo

DOCS = Path(__file__).resolve().parent.parent / "docs"
WIDTH, HEIGHT = 1280, 1000
MINUTES = 4.0


async def take(url: str, minutes: float, folder: Path) -> None:
    """Wait until the demo has a past, and photograph it."""
    async with chromium() as browser:
        await asyncio.sleep(minutes * 60)
        await _photograph(browser, url, "light", folder / "page.png")
        await _photograph(browser, url, "dark", folder / "page-dark.png")


async def _photograph(browser: Browser, url: str, scheme: Literal["light", "dark"], file: Path) -> None:
    context = await browser.new_context(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme)
    page = await context.new_page()
    await page.goto(url)
    await page.wait_for_selector(".device tbody tr")
    await page.wait_for_selector(".device svg path")
    await page.screenshot(path=file)
    await context.close()
    print(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=MINUTES, help="how long the demo runs first (%(default)g)")
    parser.add_argument("--into", type=Path, default=DOCS, help="the folder for them (docs)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpumap-picture-") as folder:
        place = Path(folder) / "demo"
        place.mkdir()
        with demo(place) as url:
            asyncio.run(take(url, given.minutes, given.into))


if __name__ == "__main__":
    main()
