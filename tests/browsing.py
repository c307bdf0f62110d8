"""One headless Chromium for the tests of pages; without them, selenium is not imported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from selenium import webdriver

SWITCHES = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1280,900"
)


class Browser:
    """A page in Chromium, asked through JavaScript."""

    def __init__(self, driver: webdriver.Chrome, folder: Path) -> None:
        self.driver = driver
        self._place = folder / "page.html"
        self._file: Path | None = None  # that was last put there

    def open(self, page: Path | str) -> None:
        """An address, or a file that stands alone.

        Files are shown under one address: of a page there Chromium keeps what it has compiled, and the next one with
        the same scripts is there in a third of the time.
        """
        from selenium.webdriver.support.ui import WebDriverWait

        self.messages(), self.requests()
        if isinstance(page, Path):
            self._file = page
            shutil.copyfile(page, self._place)
            page = self._place.as_uri()
        self.driver.get(page)
        # Chromium's driver may return from a local file of some megabytes before its scripts have run.
        WebDriverWait(self.driver, 30).until(
            lambda driver: driver.execute_script("return document.readyState") == "complete"
        )

    def shows(self, page: Path) -> bool:
        """Whether this file is open."""
        return self._file == page and self.driver.current_url == self._place.as_uri()

    def unfold(self) -> None:
        """Unfold all there is, and wait for the charts in it."""
        from selenium.webdriver.support.ui import WebDriverWait

        self.run("for (const part of document.querySelectorAll('details')) part.open = true")
        missing = "[...document.querySelectorAll('.chart:not(.maps), .maps > div')].every(box => box.data)"
        WebDriverWait(self.driver, 30).until(lambda driver: driver.execute_script(f"return {missing}"))

    @contextmanager
    def width(self, pixels: int) -> Iterator[None]:
        """A window this narrow, which Chromium itself does not offer."""
        size = {"width": pixels, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        try:
            yield
        finally:
            self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def click(self, selector: str) -> None:
        self.run("document.querySelector(arguments[0]).click()", selector)

    def choose(self, selector: str, value: str) -> None:
        self.run(
            "const menu = document.querySelector(arguments[0]); menu.value = arguments[1];"
            "menu.dispatchEvent(new Event('change'))",
            selector,
            value,
        )

    def traces(self, chart: str) -> list[dict[str, Any]]:
        """Name, kind and values of every trace; `kind` is median, band, seed, guide or None."""
        return self.run(
            "return document.querySelector(`[data-chart='${arguments[0]}']`).data"
            ".map(t => ({name: t.name, kind: t.meta ?? null, x: t.x, y: t.y}))",
            chart,
        )

    def axis(self, chart: str, which: str) -> tuple[str, str]:
        """Title and type of an axis, as drawn."""
        title, kind = self.run(
            "const axis = document.querySelector(`[data-chart='${arguments[0]}']`)._fullLayout[arguments[1]];"
            "return [axis.title.text, axis.type]",
            chart,
            which,
        )
        return title, kind

    def texts(self, selector: str) -> list[str]:
        return self.run("return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", selector)

    def messages(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """What the page asked for since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    chromium, driver_path = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver_path is None:
        pytest.fail("the report is tested in a real browser: apt install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for switch in [*SWITCHES.split(), f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"]:
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(driver_path))
    try:
        yield Browser(driver, tmp_path_factory.mktemp("page"))
    finally:
        driver.quit()
