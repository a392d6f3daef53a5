"""The page at ``/`` in a real browser: two equal texts, with a keyboard alone, in the dark, on a phone, with keys.

A browser is found by what Debian's ``chromium`` and ``chromium-driver`` install.
"""

import importlib.util
import re
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.live_server import PATIENCE, LiveServer, PausableEngine, bundled_engine, until

from forerun.server import calls
from forerun.server.admission import SchedulerLimits

MISSING = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
MISSING += [] if importlib.util.find_spec("selenium") else ["selenium"]
pytestmark = [
    pytest.mark.matrix,  # a browser's start costs as much as twenty tests
    pytest.mark.skipif(bool(MISSING), reason=f"there is no {', '.join(MISSING)} to open the page with"),
]

PROMPT = "one two three four five six\n" * 4
LENGTH = 40


@pytest.fixture(scope="module")
def held() -> PausableEngine:
    return PausableEngine(bundled_engine())


@pytest.fixture(scope="module")
def server(held: PausableEngine) -> Iterator[LiveServer]:
    with LiveServer(held, SchedulerLimits(1 << 30), drafter="trie") as built:
        yield built
        held.gate.set()


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--no-first-run"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    opened.set_script_timeout(PATIENCE)
    yield opened
    opened.quit()


class Page:
    """The page, opened anew; its elements by id."""

    def __init__(self, driver: Any, server: LiveServer, width: int = 1280) -> None:
        self.driver = driver
        self.tell("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        driver.get(f"http://127.0.0.1:{server.port}/")

    def __getitem__(self, name: str) -> Any:
        return self.driver.find_element("id", name)

    def tell(self, command: str, **told: Any) -> Any:
        return self.driver.execute_cdp_cmd(command, told)

    def run(self, script: str, *given: Any) -> Any:
        return self.driver.execute_script(f"return {script}", *given)

    def text(self, column: str) -> str:
        return str(self.run(f"document.querySelector('#{column} .answer').textContent"))

    def figure(self, column: str, name: str) -> str:
        return str(self.run(f"document.querySelector('#{column} [data-figure={name}]').textContent"))

    def fill(self, prompt: str, chat: bool = False, **values: Any) -> None:
        self.greeted()
        self.run("document.getElementById(arguments[0]).click()", "chat" if chat else "continue")
        for name, value in {"prompt": prompt, "length": LENGTH, **values}.items():
            self.run("document.getElementById(arguments[0]).value = arguments[1]", name, value)

    def greeted(self) -> None:
        until(lambda: bool(self["served"].text))

    def keys(self, *pressed: str) -> None:
        """Press keys by their names, and write everything else."""
        from selenium.webdriver import ActionChains, Keys

        ActionChains(self.driver).send_keys(*(getattr(Keys, each, each) for each in pressed)).perform()

    def ctrl_enter(self) -> None:
        from selenium.webdriver import ActionChains, Keys

        ActionChains(self.driver).key_down(Keys.CONTROL).send_keys(Keys.ENTER).key_up(Keys.CONTROL).perform()

    @property
    def running(self) -> bool:
        return bool(self["start"].get_attribute("aria-disabled") == "true")

    def show(self, *prompt: str, **told: Any) -> str:
        """Fill in what is told, if anything; start, and wait for the end."""
        if prompt:
            self.fill(*prompt, **told)
        self["start"].click()
        return self.ended()

    def again_without_earlier(self) -> None:
        """Run again without what earlier runs answered."""
        self["without"].click()
        until(lambda: not self["earlier"].is_selected() and not self.running)
        self.ended()

    def turns(self) -> list[str]:
        return list(self.run("[...document.querySelectorAll('#turns li')].map((e) => e.textContent)"))

    def ended(self) -> str:
        """Wait for the end; what was concluded."""
        until(lambda: not self.running and bool(self["status"].get_attribute("textContent")))
        assert not self["error"].is_displayed(), self["error"].text
        return str(self["verdict-title"].text)

    def complaint(self) -> str:
        until(lambda: self["error"].is_displayed())
        return str(self["error"].text)


@pytest.fixture
def page(driver: Any, server: LiveServer) -> Iterator[Page]:
    driver.get_log("browser")
    yield Page(driver, server)
    server.wait_idle()
    assert [line for line in driver.get_log("browser") if line["level"] == "SEVERE"] == []


def alone(held: PausableEngine, prompt: str, **options: Any) -> str:
    return str(held.generate(prompt, namespace="alone", **{"max_new_tokens": LENGTH, **options}).texts[0])


def test_both_columns_fill_with_the_engines_text(held, page):
    assert page.show(PROMPT) == "Both texts are equal, token for token."
    assert page.text("plain") == page.text("fast") == alone(held, PROMPT)
    assert re.fullmatch(r"\d+\.\d\d times as fast|\d+ % slower|The plain run was disturbed", page["verdict-times"].text)
    assert "equal" in page["status"].get_attribute("textContent")  # a screen reader is told
    assert (page.figure("plain", "stride"), page.figure("plain", "acceptance")) == ("1.00", "–")
    assert float(page.figure("fast", "stride")) > 1.5 and page.figure("fast", "acceptance").endswith(" %")
    assert float(page.figure("plain", "speed")) > 0 and float(page.figure("fast", "speed")) > 0
    assert page.figure("plain", "summary").startswith(f"{LENGTH} tokens in {LENGTH} steps · prompt of ")


def test_drafted_tokens_are_tinted_by_their_source_and_the_legend_counts_them(page):
    script = "[...document.querySelectorAll('#{} .answer span')].map((e) => [e.className, getComputedStyle(e).{}])"
    page.fill(PROMPT)
    for source in ("text", "earlier"):  # run again, all of it is known from the first text
        page.show()
        assert {name for name, _ in page.run(script.format("plain", "color"))} == {"target"}
        tints = dict(page.run(script.format("fast", "backgroundColor")))
        lines = dict(page.run(script.format("fast", "textDecorationLine")))
        assert tints["target"] == "rgba(0, 0, 0, 0)" != tints[source] and lines[source] == "underline"
        counted = page.run("[...document.querySelectorAll('#legend b')].map((e) => parseInt(e.textContent) || 0)")
        assert sum(counted) == LENGTH
        assert page.run(f"document.querySelector('#legend [data-source={source}] b').textContent")


def test_counters_move_while_a_text_grows_and_escape_frees_the_server(held, server, page):
    page.fill("Once upon a time", length=4000, temperature=1)
    page["start"].click()
    until(lambda: len(page.text("plain")) > 20)
    before = page.figure("plain", "summary")
    until(lambda: page.figure("plain", "summary") != before)
    held.gate.clear()
    assert server.scheduler.running == 1 and server.scheduler.usage > 0
    assert page.run("document.querySelector('#plain .answer').ariaBusy") == "true"
    page.keys("ESCAPE")
    until(lambda: page["status"].text == "Stopped.")
    held.gate.set()
    server.wait_idle()
    assert not page.running and page.text("fast") == ""
    assert "equal" in page.show("Once upon a time", length=5)


def test_a_fast_server_is_drawn_once_a_frame(page):
    """To lay the text out for every token held the page up for twenty seconds at a stretch."""
    page.greeted()
    page.tell("Performance.enable")
    before, tokens, after = layouts(page), page.run(f"({FLOOD})()"), layouts(page)
    assert tokens == 1000 and after - before < 100
    until(lambda: len(page.text("plain")) == 5000)
    assert page.figure("plain", "summary").startswith("1000 tokens in 500 steps")


FLOOD = """async () => {
  const { Column } = await import("/page/column.js");
  const column = new Column(document.getElementById("plain"));
  const tokens = ["text", "target"].map((source, id) => ({ id, text: "word ", source }));
  const step = { tokens, drafted: 1, accepted: 1, seconds: 0.001 };
  for (let place = 0; place < 500; place++) column.take({ choices: [], forerun: step });
  return column.ids.length;
}"""
"""A thousand tokens that come within one frame."""


def layouts(page: Page) -> int:
    told = page.tell("Performance.getMetrics")["metrics"]
    return int(next(each["value"] for each in told if each["name"] == "LayoutCount"))


def test_a_keyboard_is_enough(driver, server, page):
    page.greeted()
    found = []
    for _ in range(11):
        page.keys("TAB")
        at = page.driver.switch_to.active_element
        found.append(at.get_attribute("id") or at.tag_name)
        assert at.accessible_name, found[-1]
        assert page.run("getComputedStyle(document.activeElement).outlineStyle") != "none", found[-1]
    assert found == [
        "chat", "example", "prompt", "length", "temperature", "start", "stop", "summary", "div", "div", "summary",
    ]  # fmt: skip
    page = Page(driver, server)
    page.greeted()
    page.keys("TAB", "TAB", "TAB", "The sun", "TAB", "12", "TAB", "0.5")
    assert page["prompt"].get_attribute("value") == "The sun"
    page.ctrl_enter()
    assert "equal" in page.ended()
    page.run("document.querySelector('#prompt').value = 'More'")
    page.run("document.querySelector('#length').value = 0")
    page.ctrl_enter()
    assert not page.running  # the browser says what is wrong with it
    assert page.run("document.activeElement.id") == "length"


def test_wide_and_narrow_light_and_dark_all_can_be_read(driver, server, page):
    grounds = set()
    for scheme in ("dark", "light"):
        page.tell("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        grounds.add(page.run("getComputedStyle(document.body).backgroundColor"))
        assert page.run(f"({CONTRASTS})()") >= 4.5, scheme
    assert len(grounds) == 2
    narrow = Page(driver, server, width=390)
    narrow.fill("x" * 300, length=8)
    narrow.run("document.querySelector('details').open = true")
    assert "equal" in narrow.show()
    assert narrow.run("innerWidth") == 390
    assert narrow.run("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    until(lambda: 0 <= narrow.run("document.getElementById('verdict').getBoundingClientRect().top") < 100)


CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const light = (colour) => {
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const part = (value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4);
    const [red, green, blue] = canvas.getImageData(0, 0, 1, 1).data;
    return 0.2126 * part(red) + 0.7152 * part(green) + 0.0722 * part(blue);
  };
  const ground = (element) => {
    const own = getComputedStyle(element).backgroundColor;
    return own === "rgba(0, 0, 0, 0)" ? ground(element.parentElement) : own;
  };
  for (const item of document.querySelectorAll("[hidden]")) item.hidden = false;
  const all = [...document.querySelectorAll("h1, h2, p, label, dt, dd, button, select, textarea, .swatch, summary")];
  const ratios = all.filter((each) => each.ariaDisabled !== "true").map((element) => {
    const [ink, paper] = [light(getComputedStyle(element).color), light(ground(element))];
    return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
  });
  return Math.min(...ratios);
}"""
"""The least contrast between a text and what it stands on, as WCAG defines it."""


def test_a_chat_goes_on_from_its_turns(held, page):
    page.show("Hi", chat=True, length=8)
    first = alone(held, "user: Hi\nassistant:", max_new_tokens=8)
    assert page.text("fast") == first and page["prompt"].get_attribute("value") == ""
    assert "equal" in page.show("And?", chat=True, length=8, order="together")
    assert "shared passes" in page["verdict-note"].text
    second = alone(held, f"user: Hi\nassistant: {first}\nuser: And?\nassistant:", max_new_tokens=8)
    assert page.text("fast") == page.text("plain") == second
    assert page.turns() == ["YouHi", f"Model{first}", "YouAnd?", f"Model{second}"]
    assert page["turns-count"].text == "The conversation so far: 4 messages"
    page["fresh"].click()
    assert not page["conversation"].is_displayed()


def test_what_is_changed_while_a_text_grows_is_for_the_next_one(held, page, monkeypatch):
    """And a silent server is waited for."""
    monkeypatch.setattr(calls, "PING_SECONDS", 0.05)
    page.fill("Hi", length=8)
    held.gate.clear()
    page["start"].click()
    page["chat"].click()
    time.sleep(0.2)  # some pings
    held.gate.set()
    assert "equal" in page.ended() and not page["conversation"].is_displayed()
    held.gate.clear()
    page["start"].click()
    page.run("document.getElementById('prompt').value = 'And?'")
    held.gate.set()
    assert "equal" in page.ended() and page["prompt"].get_attribute("value") == "And?"
    said = alone(held, "user: Hi\nassistant:", max_new_tokens=8)
    assert page.turns() == ["YouHi", f"Model{said}"]
    held.gate.clear()
    page["start"].click()
    page["fresh"].click()
    held.gate.set()
    assert "equal" in page.ended() and page.turns() == []


def test_two_starts_before_the_server_answered_are_one(held, driver):
    with LiveServer(held, SchedulerLimits(1 << 30), drafter="trie", api_keys=("key-of-a",)) as one:
        page = Page(driver, one)
        until(lambda: page["key"].is_displayed())
        page.run("document.getElementById('key').value = 'key-of-a'")
        page.run("document.getElementById('prompt').value = 'Hi'")
        assert page.run("document.getElementById('continue').checked")
        page.run("[1, 2].forEach(() => document.getElementById('form').requestSubmit())")
        assert "equal" in page.ended()
        assert page.text("plain") == page.text("fast") == alone(held, "Hi", max_new_tokens=160)
        assert page.run("parseFloat(document.getElementById('time-plain').textContent)") > 0


def test_who_drafted_is_not_told_where_tenants_share(held, driver):
    with LiveServer(held, SchedulerLimits(1 << 30), drafter="trie", share=True) as one:
        page = Page(driver, one)
        assert "equal" in page.show(PROMPT) and page.text("plain") == page.text("fast")
        assert page.run("document.querySelector('#legend [data-source=untold] b').textContent") == f"{LENGTH} tokens"
        assert page.run("document.querySelectorAll('#fast .answer span').length") == 1


def test_a_seed_names_the_text_and_no_drafts_means_none(held, page):
    assert "equal" in page.show(PROMPT, temperature=0.9, seed=7, drafter="none")
    wanted = alone(held, PROMPT, do_sample=True, temperature=0.9, top_k=0, seed=7)
    assert page.text("fast") == wanted and page.figure("fast", "stride") == "1.00"


def test_what_came_from_earlier_runs_is_said_and_can_be_left_out(held, page):
    page.fill("The river was named after the man who")
    for _ in range(2):
        page.show()
    said = rf"(\d+) of its {LENGTH} tokens came from answers of earlier runs\."
    told = re.fullmatch(said, page["earlier-count"].text)
    assert int(told[1]) > LENGTH // 2
    assert told[0] in page["status"].get_attribute("textContent")
    page.again_without_earlier()
    assert not page["verdict-earlier"].is_displayed()
    assert page.text("fast") == page.text("plain") == alone(held, "The river was named after the man who")


def test_a_chat_is_run_again_from_where_it_was(page):
    for _ in range(2):
        page.fill("Hi", chat=True, length=16)
        page.run("document.getElementById('fresh').click()")
        page.show()
    turns, said = page.turns(), page.text("fast")
    page.again_without_earlier()
    assert page.text("fast") == said and page.turns() == turns


def test_a_slowdown_is_neither_green_nor_called_fast(page):
    page.greeted()
    found = [page.run(f"({CONCLUSION})({ratio}, 3)") for ratio in (0.73, 0.999, 2.5, 3.5)]
    said = ["27 % slower", "1.00 times as fast", "2.50 times as fast", "The plain run was disturbed"]
    assert [times for times, _ in found] == said
    assert found[0][1] == found[1][1] == found[3][1] != found[2][1]


CONCLUSION = """async (ratio, passes) => {
  const { outcome } = await import("/page/verdict.js");
  const { kind, times } = outcome(true, ratio, passes);
  const verdict = document.getElementById("verdict");
  verdict.className = `verdict ${kind}`;
  return [times, getComputedStyle(verdict).borderTopColor];
}"""
"""What is said of two equal texts by the ratios of speeds and passes, and the colour of its frame."""


def test_both_texts_stand_in_the_first_screen_and_no_line_is_cut(page):
    page.tell("Emulation.setDeviceMetricsOverride", width=1280, height=720, deviceScaleFactor=1, mobile=False)
    page.greeted()
    assert "appears here" in page.run("getComputedStyle(document.querySelector('#plain .answer'), '::before').content")
    assert not page["drafter"].is_displayed() and not page["budget"].is_displayed() and not page["seed"].is_displayed()
    page.show("one word on each line\n" * 4, length=160)
    for column in ("plain", "fast"):
        box, line = page.run(f"(({BOX})('{column}'))")
        assert box["top"] + 3 * line <= 720 and box["height"] % line == 0
        assert page.run(f"document.querySelector('#{column} .answer').scrollTop") % line == 0


BOX = """(column) => {
  const answer = document.querySelector(`#${column} .answer`);
  const { top, height } = answer.getBoundingClientRect();
  return [{ top, height }, parseFloat(getComputedStyle(answer).lineHeight)];
}"""


def test_an_error_leaves_the_last_result_and_says_where_a_folded_setting_is_wrong(page):
    page.show(PROMPT, length=8)
    before = page.text("plain"), page.text("fast"), page["verdict-times"].text
    page.run("document.getElementById('length').max = 100000")
    page.fill("x", length=90000)
    page["start"].click()
    assert "max_tokens" in page.complaint()
    assert (page.text("plain"), page.text("fast"), page["verdict-times"].text) == before
    page.fill(PROMPT, length=8, seed=-1)
    page["start"].click()
    assert page["seed"].is_displayed() and page.run("document.activeElement.id") == "seed"
    assert ["400" in line["message"] for line in page.driver.get_log("browser")] == [True]


def test_a_wrong_key_is_told_in_words_and_no_key_is_kept(held, driver, monkeypatch):
    with LiveServer(held, SchedulerLimits(1 << 30), api_keys=("key-of-a",), request_bytes=5000) as one:
        page = Page(driver, one)
        until(lambda: page["key"].is_displayed())
        assert not page["error"].is_displayed()
        page["prompt"].send_keys("Hi")
        page["start"].click()
        assert "API key is missing or wrong" in page.complaint()
        page["key"].send_keys("key-of-b")
        page.ctrl_enter()
        assert "API key is missing or wrong" in page.complaint()
        page["key"].clear()
        page["key"].send_keys("key-of-a")
        page["prompt"].click()
        page.fill("x" * 5000, length=4)
        page.ctrl_enter()
        until(lambda: "the body has" in page.complaint())
        page.fill("Hi", length=4)
        page.ctrl_enter()
        assert "equal" in page.ended()
        monkeypatch.setattr(held, "broken", True)
        page.ctrl_enter()
        assert "failed in the server" in page.complaint()
        stored = page.run("[localStorage.length, sessionStorage.length, document.cookie, location.href]")
        assert stored == [0, 0, "", f"http://127.0.0.1:{one.port}/"]
    page.ctrl_enter()
    assert page.complaint() == "The server cannot be reached."
