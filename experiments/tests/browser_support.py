"""A real browser, and the report in it."""

import os
import re
import shutil
import time

import pytest

REQUIRED = os.environ.get("DEEPPCR_BROWSER") == "required"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def missing(what):
    message = f"{what} is missing: apt-get install chromium chromium-driver, pip install selenium"
    if REQUIRED:
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


def start():
    """Chromium, headless; the test is skipped, or fails, where it is missing."""
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    except ImportError:
        missing("selenium")
    program = next(filter(None, map(shutil.which, CHROMIUM)), None)
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        missing("Chromium" if program is None else "chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    # Containers lack the sandbox and a large /dev/shm; the page is our own.
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(driver))
    return browser


class Page:
    """The page in the browser, at some width."""

    def __init__(self, browser, path):
        self.browser, self.path = browser, path

    def open(self, width=1280, scheme="light"):
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.media(scheme)
        self.browser.get(self.path.as_uri())
        until = time.monotonic() + 60  # on a busy machine the browser says too early that it is there
        while not self.run(
            "return location.href.startsWith(arguments[0]) && document.readyState == 'complete'", self.path.as_uri()
        ):
            assert time.monotonic() < until, f"{self.path} does not load"
            time.sleep(0.05)
        return self

    def media(self, scheme="light", medium=""):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": medium, "features": features})

    def run(self, code, *arguments):
        return self.browser.execute_script(code, *arguments)

    def find(self, selector):
        return self.browser.find_element("css selector", selector)

    def all(self, selector):
        return self.browser.find_elements("css selector", selector)

    def choose(self, **choices):
        for name, value in choices.items():
            self.find(f"#map-{name} option[value='{value}']").click()

    def click(self, depth, width):
        cell = self.find(f".map-cell[data-depth='{depth}'][data-width='{width}']")
        self.run("arguments[0].scrollIntoView({block: 'center'})", cell)
        cell.click()
        return cell

    def readout(self):
        """What the readout says: the speed-up, and for every column its cells."""
        rows = {
            row.get_attribute("data-column"): row.find_elements("css selector", "td")
            for row in self.all("#map-readout tr[data-column]")
        }
        return {
            "title": self.find("#map-readout h3").text,
            "verdict": self.find("#map-speedup").text,
            "columns": {name: [cell.text for cell in cells] for name, cells in rows.items()},
        }

    def severe(self):
        return [entry for entry in self.browser.get_log("browser") if entry["level"] == "SEVERE"]


def contrast(one, other):
    def luminance(colour):
        parts = [float(part) / 255 for part in re.findall(r"[\d.]+", colour)[:3]]
        return sum(
            weight * (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4)
            for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True)
        )

    bright, dim = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def seconds_of(text):
    value, unit = text.replace(",", "").split()
    return float(value) * {"s": 1, "ms": 1e-3, "µs": 1e-6}[unit]
