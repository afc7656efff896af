"""The page in headless Chromium without a network (Debian: chromium and chromium-driver)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.page_reports import EVIL, paper_report, time_row
from support.report_factory import make_finding
from support.verdict_factory import make_verdicts

from pytest_llmgpu.render.html import report as html_report
from pytest_llmgpu.report.result import Failure
from pytest_llmgpu.report.verdicts import Baseline, Candidate, Decided

webdriver = pytest.importorskip("selenium.webdriver", reason="the browser's tests need selenium")
By = pytest.importorskip("selenium.webdriver.common.by").By
Keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
Select = pytest.importorskip("selenium.webdriver.support.select").Select
WebDriverWait = pytest.importorskip("selenium.webdriver.support.wait").WebDriverWait
pytest.importorskip("jinja2", reason="the page needs the extra report")
pytest.importorskip("vl_convert", reason="the page needs the extra report")

pytestmark = pytest.mark.slow

_WAIT_S = 120
_DRAWN = "return document.documentElement.dataset[arguments[0]] === 'yes'"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the address of a page with every section, and with an id that looks like a script."""
    report = paper_report()
    report.cases[1].id = EVIL
    report.cases[0].findings = [
        make_finding("failure", text=f"{EVIL} is long " * 9),
        make_finding("warning"),
        *(make_finding("info", code=code) for code in ("small", "old")),
    ]
    report.cases[0].failure = Failure(phase="forward", message="x", log_tail=f"OutOfMemoryError: {'a_long_line ' * 50}")
    judged: tuple[Decided, ...] = ("REGRESSED", "MISSING", "IMPROVED", "OK")
    rows = [time_row(report, number, verdict) for number, verdict in enumerate(judged)]
    baseline = Baseline(commit="a" * 40)
    head = Candidate(created="", commit="b" * 40)
    report.verdicts = make_verdicts(*rows, baseline=baseline, head=head)
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(html_report.render(report, name=EVIL), encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def started() -> Iterator[Any]:
    """Start the browser once."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("these tests need Chromium: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    # Scroll bars take no width from the page. root cannot use the sandbox. /dev/shm is too small in containers.
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    session = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield session
    session.quit()


@pytest.fixture
def page(started: Any, address: str) -> Any:
    """Return the browser with the drawn page, 1280 pixels wide, in the light theme."""
    show(started, address)
    return started


def show(
    browser: Any, address: str, *, width: int = 1280, theme: str = "light", media: str = "screen", until: str = "whole"
) -> None:
    """Open the page and wait until its charts are drawn, or until it is ready."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    preferred = {"media": media, "features": [{"name": "prefers-color-scheme", "value": theme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", preferred)
    for log in ("browser", "performance"):
        browser.get_log(log)  # entries of earlier tests
    browser.get(address)
    WebDriverWait(browser, _WAIT_S).until(lambda it: it.execute_script(_DRAWN, until))


def test_every_chart_is_drawn(page: Any) -> None:
    """Every chart has marks, none failed, and each uses the width of its place."""
    drawn = page.execute_script(
        "return [...document.querySelectorAll('.chart')].map((place) => ({"
        " marks: place.querySelectorAll('svg path, svg text').length, failed: place.classList.contains('failed'),"
        " share: (place.querySelector('svg')?.getBoundingClientRect().width ?? 0) / place.clientWidth }))"
    )
    assert len(drawn) > 8
    assert all(chart["marks"] > 5 and not chart["failed"] for chart in drawn)
    assert all(0.5 < chart["share"] <= 1.01 for chart in drawn)


def test_the_console_has_no_error_and_no_request_leaves(page: Any) -> None:
    """The page itself is the only request."""
    page.find_element(By.ID, "theme").click()
    page.execute_script("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    assert [entry for entry in page.get_log("browser") if entry["level"] == "SEVERE"] == []
    events = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    asked = {event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"}
    assert {url for url in asked if not url.startswith("data:")} == {page.current_url}


def test_the_timelines_of_a_chosen_case_are_drawn_with_their_table(page: Any) -> None:
    """The first case is shown at first; another case replaces it; a table is made when it is opened."""
    place = page.find_element(By.ID, "case-charts")
    assert "mp-bs1" in place.text
    Select(page.find_element(By.ID, "case")).select_by_value("tp-bs8")
    figures = place.find_elements(By.TAG_NAME, "figure")
    WebDriverWait(page, _WAIT_S).until(lambda _: len(place.find_elements(By.CSS_SELECTOR, "svg")) == len(figures))
    assert "tp-bs8" in place.text
    assert "mp-bs1" not in place.text
    assert page.find_element(By.ID, "case-status").get_attribute("textContent") == f"{len(figures)} charts of tp-bs8"
    figures[0].find_element(By.TAG_NAME, "summary").click()
    WebDriverWait(page, _WAIT_S).until(lambda _: figures[0].find_elements(By.CSS_SELECTOR, "tbody tr"))
    assert "GPU 3" in figures[0].find_element(By.TAG_NAME, "thead").text


def test_a_filter_hides_other_cases_and_draws_the_charts_again(page: Any) -> None:
    """Tables, charts and the list of timelines have the chosen strategy and batch size only."""
    chart = page.find_element(By.CSS_SELECTOR, "[data-chart=time]")
    points = "return arguments[0].querySelectorAll('.mark-symbol.role-mark path').length"
    before = page.execute_script(points, chart)
    for name, value, expected in (("strategy", "tp", range(1, before)), ("batch", "8", range(1, 2))):
        Select(page.find_element(By.CSS_SELECTOR, f"[data-filter={name}]")).select_by_value(value)
        page.execute_script("arguments[0].scrollIntoView({block: 'center'})", chart)
        WebDriverWait(page, _WAIT_S).until(lambda it, expected=expected: it.execute_script(points, chart) in expected)
    shown = page.find_elements(By.CSS_SELECTOR, ".times tbody td:not([hidden])")
    assert len([cell for cell in shown if cell.is_displayed()]) == 1
    assert page.find_element(By.ID, "case").get_attribute("value") == "tp-bs8"
    assert page.find_element(By.ID, "filter-status").get_attribute("textContent") == "Only strategy tp, batch 8"


def test_the_charts_of_a_large_report_are_drawn_when_they_come_near(started: Any, tmp_path: Path) -> None:
    """The page is ready before, and a chart that was never near the screen is not drawn."""
    report = paper_report()
    cases = []
    for number in range(6):
        for result in report.cases:
            case = msgspec.structs.replace(result.case, model=f"model-{number}")
            cases.append(msgspec.structs.replace(result, id=f"{number}-{result.id}", case=case, key=case.key))
    report.cases = cases
    path = tmp_path / "page.html"
    path.write_text(html_report.render(report), encoding="utf-8")
    show(started, path.as_uri(), until="ready")
    drawn = "return document.querySelectorAll('.chart[data-drawn]').length"
    charts = started.execute_script("return document.querySelectorAll('.chart').length")
    assert charts > 40
    assert started.execute_script(drawn) < 10
    started.execute_script("[...document.querySelectorAll('.chart')].pop().scrollIntoView()")
    last = "return [...document.querySelectorAll('.chart')].pop().querySelector('svg') !== null"
    WebDriverWait(started, _WAIT_S).until(lambda it: it.execute_script(last))
    assert started.execute_script(drawn) < charts / 2


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_theme_follows_the_system_until_it_is_chosen(started: Any, address: str, theme: str) -> None:
    """The charts change their colours without being drawn again."""

    def colors() -> tuple[str, str]:
        ground, letters = started.execute_script(
            "return [getComputedStyle(document.body).backgroundColor,"
            " getComputedStyle(document.querySelector('.chart svg text')).fill]"
        )
        return ground, letters

    show(started, address, theme=theme)
    button = started.find_element(By.ID, "theme")
    before, label = colors(), button.text
    assert (before[0] == "rgb(255, 255, 255)") is (theme == "light")
    assert label == ("Dark theme" if theme == "light" else "Light theme")
    button.click()
    after = colors()
    assert before[0] != after[0]
    assert before[1] != after[1]
    button.click()
    assert (colors(), button.text) == (before, label)


@pytest.mark.parametrize("width", [320, 400, 768])
def test_a_narrow_screen_needs_no_scrolling_sideways(started: Any, address: str, width: int) -> None:
    """The page is as wide as the screen with all details open; wide tables scroll in their own region."""
    show(started, address, width=width)
    wide = "return document.documentElement.scrollWidth"
    assert started.execute_script(wide) == width
    started.execute_script("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    assert started.execute_script(wide) == width


def test_on_a_telephone_a_regression_has_its_metric_and_numbers_and_a_command_its_button(
    started: Any, address: str
) -> None:
    """Case, metric and verdict are one line, was, now and change the next one; the button copies the command."""
    show(started, address, width=400)
    cells = started.find_elements(By.CSS_SELECTOR, ".first .changes tbody tr:first-child > *")
    places = [(cell.rect["y"], cell.rect["x"]) for cell in cells]
    assert len({y for y, _ in places}) == 2
    assert [cell.text for _, cell in sorted(zip(places, cells, strict=True), key=lambda one: one[0])][1] == "time"
    assert all(cell.is_displayed() and cell.rect["x"] + cell.rect["width"] <= 400 for cell in cells)
    button = started.find_element(By.CSS_SELECTOR, ".next .copy")
    button.click()
    assert (button.text, started.execute_script("return getSelection().toString()")[:14]) == (
        "Copied",
        "llmgpu bisect ",
    )


def test_details_are_opened_for_printing(page: Any) -> None:
    """Tables of chart data stay closed, and after printing everything is as before."""
    closed = "return document.querySelectorAll('details:not([open], .data, .log)').length"
    before = page.execute_script(closed)
    assert before > 0
    page.execute_script("window.dispatchEvent(new Event('beforeprint'))")
    assert page.execute_script(closed) == 0
    assert page.execute_script("return document.querySelectorAll('details.data[open]').length") == 0
    page.execute_script("window.dispatchEvent(new Event('afterprint'))")
    assert page.execute_script(closed) == before


def test_the_page_works_with_the_keyboard(page: Any) -> None:
    """The first link skips the navigation, the focus has an outline, and a key changes the theme."""
    page.switch_to.active_element.send_keys(Keys.TAB)
    link = page.switch_to.active_element
    assert link.text == "Skip to the result"
    assert link.rect["x"] >= 0
    assert page.execute_script("return parseFloat(getComputedStyle(document.activeElement).outlineWidth)") >= 2
    link.send_keys(Keys.ENTER)
    assert page.switch_to.active_element.get_attribute("id") == "main"
    button = page.execute_script("document.getElementById('theme').focus(); return document.activeElement")
    button.send_keys(Keys.SPACE)
    assert page.execute_script("return document.documentElement.dataset.theme") == "dark"


def test_the_page_prints_dark_on_white(started: Any, address: str) -> None:
    """The printed page has charts, and no dark background, button or navigation, also in the dark theme."""
    show(started, address, theme="dark", media="print", width=794)
    shown = started.execute_script(
        "const shown = (name) => getComputedStyle(document.querySelector(name)).display !== 'none';"
        "return [getComputedStyle(document.body).backgroundColor, shown('nav'), shown('button'), shown('.chart svg')]"
    )
    assert shown == ["rgb(255, 255, 255)", False, False, True]
    assert started.execute_script("return document.documentElement.scrollWidth") == 794
