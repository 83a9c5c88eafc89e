"""The dashboard's page in Chromium: first paint, curves of a long run, frames of the timeline.

    python benchmarks/generated_run.py runs/long --steps 10000 --spans 1000000
    python benchmarks/dashboard_page.py runs/long

Needs playwright and Chromium (see `make test-dashboard`). Frames are those of 60 turns of the
wheel, from the whole run to milliseconds, and 40 moves; their time is that of the page's script.
"""

import argparse
import re
import shutil
import statistics
import subprocess
import sys
import time

from playwright.sync_api import (  # pyright: ignore[reportMissingImports]
    Page,
    sync_playwright,
)

PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
FRAMES = "performance.getEntriesByName('timeline-frame').map(entry => entry.duration)"


def open_page(page: Page, url: str) -> None:
    began = time.monotonic()
    page.goto(url)
    page.wait_for_selector(".chart canvas")
    drawn_s = time.monotonic() - began
    print(f"first paint {page.evaluate(PAINT) / 1000:.2f} s, curves drawn after {drawn_s:.2f} s")


def zoom_timeline(page: Page) -> None:
    began = time.monotonic()
    page.evaluate("location.hash = '#/timeline'")
    page.wait_for_selector(".view.timeline canvas", timeout=120_000)
    print(f"timeline opened after {time.monotonic() - began:.1f} s")
    page.wait_for_timeout(1000)
    box = page.locator("canvas").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
    for _ in range(60):
        page.mouse.wheel(0, -120)
        page.wait_for_timeout(40)
    page.focus("canvas")
    for _ in range(40):
        page.keyboard.press("ArrowRight")
        page.wait_for_timeout(40)
    frames = sorted(page.evaluate(FRAMES))
    slow = frames[len(frames) * 95 // 100]
    print(f"now at {page.inner_text('.range')}")
    print(
        f"script per frame: median {statistics.median(frames):.1f} ms, 95 % {slow:.1f} ms,"
        f" most {frames[-1]:.1f} ms, of {len(frames)} frames"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run_dir")
    args = parser.parse_args()
    command = [sys.executable, "-m", "millrace", "dashboard", args.run_dir, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = re.search(r"http://\S+", process.stdout.readline())
    assert found is not None, "the dashboard did not start"
    try:
        with sync_playwright() as playwright:
            path = shutil.which("chromium")
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1400, "height": 900})
            for _ in range(5):
                open_page(page, found[0])
            zoom_timeline(page)
            browser.close()
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
