"""The dashboard in Chromium: every view, live runs, hostile text, screens, themes and keys."""

import json
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chat_model import make_chat_model
from project import Command
from synthetic_run import make_run, metrics_row

playwright = pytest.importorskip(
    "playwright.sync_api", reason="needs playwright; run by `make test-dashboard`"
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]
VIEWS = (
    "overview",
    "flow",
    "timeline",
    "batch",
    "episodes",
    "tokens",
    "ledger",
    "compare",
    "logs",
    "chat",
)
EVIL = '<script>window.pwned = 1</script><img src=x onerror="window.pwned = 1">'
HOSTILE = f"{EVIL}\x1b[31mred \u202eright-to-left \ud7ff"


class Viewer:
    """A page of a dashboard over run directories; every message of the console is an error."""

    def __init__(self, browser, url: str, **options) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.page.on("console", lambda message: self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(url)
        self.page.wait_for_selector(".view")

    def show(self, view: str, **params: str) -> str:
        """Open a view; returns its text."""
        query = "&".join(f"{key}={value}" for key, value in params.items())
        self.page.evaluate("hash => { location.hash = hash }", f"#/{view}?{query}")
        self.page.wait_for_selector(f".view.{view}")
        self.page.wait_for_timeout(150)
        return self.page.inner_text("main")

    def wait(self, condition: str, *, s: float = 30) -> None:
        """Until the expression is true. Playwright's own function would need `unsafe-eval`."""
        deadline = time.monotonic() + s
        while not self.page.evaluate(condition):
            assert time.monotonic() < deadline, condition
            self.page.wait_for_timeout(50)

    def close(self) -> None:
        self.context.close()
        assert self.errors == []


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with playwright.sync_playwright() as found:
        browser = found.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def watch(browser, tmp_path) -> Iterator:
    """Start a dashboard and open its page: watch(RUN_DIR..., color_scheme="dark")."""
    commands: list[Command] = []
    viewers: list[Viewer] = []

    def start(*paths: Path, **options) -> Viewer:
        command = Command("dashboard", *paths, "--port", "0", folder=tmp_path)
        commands.append(command)
        assert command.process.stdout is not None
        found = re.search(r"http://\S+", command.process.stdout.readline())
        assert found is not None, command.finish()
        viewers.append(Viewer(browser, found[0], **options))
        return viewers[-1]

    yield start
    for viewer in viewers:
        viewer.close()
    for command in commands:
        command.process.terminate()
        code, _, stderr = command.finish()
        assert (code, stderr) == (0, "")  # as services end


def test_every_view_shows_a_run(watch, tmp_path):
    run_dir = make_run(tmp_path / "run", steps=60)
    (run_dir.logs / "engine-0.log").write_text("loaded the model\n")
    viewer = watch(run_dir.path)

    texts = {view: viewer.show(view) for view in VIEWS}

    assert "limits the run" in texts["overview"]
    assert "Samples/s" in texts["overview"]
    assert "Who waits for whom" in texts["flow"]
    assert "engine-0" in texts["timeline"]
    assert "waits: buffer full" in texts["timeline"]
    assert "loaded the model" in texts["logs"]
    assert viewer.page.locator("canvas").count() == 0  # of the timeline, which was closed
    assert "token" not in viewer.page.url


def test_views_of_episodes_show_groups_tokens_and_their_numbers(watch, write_run, tmp_path):
    viewer = watch(write_run(tmp_path / "run", steps=5, spans=500).path)

    assert "8 groups" in viewer.show("batch", step="4")
    assert "Prompt and columns" in viewer.show("episodes", step="4")
    assert "trained" in viewer.show("ledger")
    text = viewer.show("tokens", step="4", place="1")
    assert "mismatch" in text
    before = viewer.page.inner_text(".token-panel")
    viewer.page.focus(".token-text")
    viewer.page.keyboard.press("ArrowRight")
    assert viewer.page.inner_text(".token-panel") != before
    colourings = viewer.page.locator(".view.tokens select[aria-label=Colour] option").all()
    assert len(colourings) >= 6
    for option in colourings:
        viewer.page.select_option("select[aria-label=Colour]", option.get_attribute("value"))
    # Links lead from the ledger to the batch, and from an episode to its tokens.
    viewer.show("episodes", step="4")
    viewer.page.click(".card a")
    viewer.page.wait_for_selector(".view.tokens .token")


def test_a_long_run_opens(watch, write_run, tmp_path):
    path = write_run(tmp_path / "run", steps=1000, spans=100_000).path
    began = time.monotonic()
    viewer = watch(path)
    viewer.page.wait_for_selector(".chart canvas")
    print(f"drawn after {time.monotonic() - began:.1f} s, with start", file=sys.stderr)
    assert "1 000 of" in viewer.page.inner_text("header").replace("\u2009", " ")


def test_timeline_zooms_to_single_spans(watch, tmp_path):
    viewer = watch(make_run(tmp_path / "run", steps=2000).path)
    viewer.show("timeline")
    viewer.page.focus("canvas")
    for _ in range(12):
        viewer.page.keyboard.press("+")
    viewer.page.wait_for_timeout(500)

    assert re.search(r"\d\.\d{2}", viewer.page.inner_text(".range"))  # parts of a second
    box = viewer.page.locator("canvas").bounding_box()
    viewer.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40)
    viewer.wait("document.querySelector('.detail').textContent.includes('·')")
    frames = viewer.page.evaluate(
        "performance.getEntriesByName('timeline-frame').map(e => e.duration)"
    )
    assert len(frames) >= 12
    print(f"script per frame: median {sorted(frames)[len(frames) // 2]:.1f} ms", file=sys.stderr)


def test_a_live_run_appears_without_a_reload(watch, tmp_path):
    viewer = watch(tmp_path / "later")
    assert "no run yet" in viewer.page.inner_text("header")
    run_dir = make_run(tmp_path / "later", steps=3, finished=False)
    run_dir.metrics.write_text("".join(json.dumps(metrics_row(n)) + "\n" for n in range(1, 8)))

    viewer.wait("document.body.innerText.includes('step 7')")

    with run_dir.metrics.open("a") as file:
        file.write(json.dumps(metrics_row(8)) + "\n")
    viewer.wait("document.body.innerText.includes('step 8')")


def test_hostile_text_is_only_text(watch, write_run, tmp_path):
    path = tmp_path / "<img src=x onerror=alert(1)>"
    run_dir = write_run(path, steps=5, spans=100)
    row = metrics_row(6) | {f"dropped/{EVIL}": 3, f"scorer/{EVIL}/busy": 0.5}
    with run_dir.metrics.open("a") as file:
        file.write(json.dumps(row) + "\n")
    log = run_dir.logs / "engine-0.log"
    log.write_text(f"{HOSTILE}\n{'x' * 1_000_000}\nend\n", errors="surrogateescape")
    viewer = watch(path)

    for view in (*VIEWS, *VIEWS):
        viewer.show(view, step="2")
        assert viewer.page.evaluate("window.pwned") is None
        assert "owned" not in viewer.page.title()
        assert viewer.page.locator("main img, main script").count() == 0
    assert "end" in viewer.show("logs", name="engine-0.log")
    viewer.show("episodes", step="2")
    for row in viewer.page.locator(".episode-row").all():
        row.click()
    assert "⟨202E⟩" in viewer.page.inner_text(".episode-list")
    for place in range(5):
        viewer.show("tokens", step="2", place=str(place))
    assert viewer.page.evaluate("window.pwned") is None


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1900])
def test_views_fit_the_screen(watch, write_run, tmp_path, scheme, width):
    viewer = watch(
        write_run(tmp_path / "run", steps=30, spans=300).path,
        color_scheme=scheme,
        viewport={"width": width, "height": 800},
    )
    for view in VIEWS:
        viewer.show(view)
        overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert viewer.page.evaluate(overflow) <= 0, view
    background = viewer.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    is_dark = sum(map(int, re.findall(r"\d+", background)[:3])) < 3 * 128
    assert is_dark == (scheme == "dark")


def test_keys_choose_views_and_runs(watch, tmp_path):
    viewer = watch(make_run(tmp_path / "a").path, make_run(tmp_path / "b").path)

    viewer.page.keyboard.press("3")
    viewer.page.wait_for_selector(".view.timeline")
    assert viewer.page.inner_text("nav a[aria-current=page]") == "Timeline"
    viewer.page.keyboard.press("]")
    viewer.wait("document.getElementById('run').selectedIndex === 1")
    viewer.page.keyboard.press("Tab")
    assert viewer.page.evaluate("document.activeElement !== document.body")


@pytest.mark.timeout(400)
def test_chat_streams_the_reply_of_a_checkpoint_as_text(watch, tmp_path):
    run_dir = make_run(tmp_path / "run")
    (run_dir.checkpoints / "step_40").rmdir()
    viewer = watch(run_dir.path)
    assert "no checkpoint" in viewer.show("chat")

    make_chat_model(run_dir.checkpoints / "step_40")
    viewer.page.fill("input[aria-label='Tokens at most']", "12")
    viewer.page.fill("textarea", EVIL)
    viewer.page.keyboard.press("Enter")
    viewer.wait("document.querySelector('.said.assistant .text')?.textContent.length > 0", s=280)
    viewer.wait("document.querySelector('.compose button').textContent === 'Send'")

    assert EVIL in viewer.page.inner_text(".said.user")
    assert viewer.page.evaluate("window.pwned") is None
    assert viewer.page.locator("main img, main script").count() == 0
    viewer.page.focus("textarea")
    viewer.page.keyboard.press("3")  # is text here, and no key of a view
    assert viewer.page.locator(".view.chat").count() == 1
