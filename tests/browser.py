"""A headless browser, and helpers to query a page written by `crosshead inspect`."""

import shutil
from contextlib import contextmanager

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
SWITCHES = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


@contextmanager
def running(profile):
    """Start a headless browser with a fresh profile; quit it at the end."""
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for switch in (*SWITCHES, f"--user-data-dir={profile}"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


@contextmanager
def opened(browser, page, width=1280, scheme="light"):
    """Open a page and wait until it is drawn; at the end, assert that no error was shown or logged."""
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.get_log("browser")
    browser.get(page.as_uri())
    until(browser, lambda: browser.execute_script("return document.documentElement.dataset.ready"))
    yield Page(browser)
    assert not browser.find_elements(By.CSS_SELECTOR, ".problem[role=alert]")
    assert browser.get_log("browser") == []


def until(browser, condition):
    WebDriverWait(browser, 20, poll_frequency=0.02).until(lambda _: condition())


class Page:
    """Queries and inputs for the open page."""

    def __init__(self, browser):
        self.browser = browser

    def one(self, selector):
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector):
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def press(self, *keys):
        for key in keys:
            self.browser.switch_to.active_element.send_keys(key)

    def focused(self, name):
        return self.browser.switch_to.active_element.get_attribute(name)

    def title(self, section):
        return self.one(f"#{section}-title").text

    def rows(self, kind, column=1):
        """Return (token, displayed weight) for each row of a list of attention weights."""
        table = self.all(f"#inspector .column:nth-child({column}) .weights.{kind} tbody tr")
        return [
            (int(row.get_attribute("data-token")), row.find_element(By.CSS_SELECTOR, ".number").text) for row in table
        ]

    def option(self, token, column=1):
        return self.one(f"#inspector .column:nth-child({column}) .text [data-token='{token}']")

    def background(self):
        return self.browser.execute_script("return getComputedStyle(document.body).backgroundColor")

    def picture(self, selector):
        return self.browser.execute_script(f"return document.querySelector({selector!r}).toDataURL()")
