"""The local chat: first paint, and what the page adds to the engine; twenty visitors at once.

    python benchmarks/ui.py [--model apollo-nano]

Figures are ratios of runs on the same machine at the same time. The toy answers sooner than any
page could show it, so what the page adds is told in milliseconds besides, and as a share of the
second that a model of use takes. Needs Chromium at /usr/bin/chromium.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from playwright.sync_api import Page, sync_playwright

from apollo_cli.config import GenerationOptions, ReadingOptions, SamplingOptions
from apollo_cli.conversation import Conversation
from apollo_cli.ui.server import Site
from apollo_cli.ui.visit import Visit
from tests.ui.made import draw_videos
from tests.ui.serving import chatting

CHROMIUM = "/usr/bin/chromium"
QUESTIONS = ("What is shown?", "What colour is it?", "What comes then?", "And at the end?", "Why?")
ANSWER = GenerationOptions(max_new_tokens=8)


@contextmanager
def open_page(address: str) -> Iterator[Page]:
    """A page in a browser of its own; prints how long its first paint took."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-quic"]
        )
        page = browser.new_page()
        begin = time.perf_counter()
        page.goto(address, wait_until="commit")
        page.wait_for_selector("#question textarea")
        print(f"page there                      {time.perf_counter() - begin:8.2f} s   wanted: 2")
        yield page
        browser.close()


def first_words(page: Page, site: Site, video: Path) -> None:
    """Seconds from Enter to the first word of a follow-up, in the page and in the engine."""
    page.wait_for_selector("#model .chip:not(.busy)", timeout=300_000)
    page.fill("#path input", video.name)
    page.press("#path input", "Enter")
    page.wait_for_selector(".strip", timeout=300_000)
    shown = [_first_word(page, question, number) for number, question in enumerate(QUESTIONS)]
    apollo = site.desk.apollo
    assert apollo is not None
    talk = Conversation(apollo, ANSWER)
    talk.watch([str(video)])
    alone = []
    for question in QUESTIONS:
        begin = time.perf_counter()
        pieces = talk.ask(question)
        next(pieces)
        alone.append(time.perf_counter() - begin)
        for _ in pieces:
            pass
    in_page, engine = statistics.median(shown[1:]), statistics.median(alone[1:])
    print(f"first word of a follow-up       {in_page:8.3f} s   engine alone {engine:.3f} s")
    print(f"  page / engine                 {in_page / engine:8.2f}")
    print(f"  what the page adds            {(in_page - engine) * 1000:8.0f} ms")
    print(f"  share of a second             {1 + in_page - engine:8.2f}     wanted: 1.1")


def _first_word(page: Page, question: str, before: int) -> float:
    """Measured inside of the browser, so that the way to this program does not count."""
    page.fill("#question textarea", question)
    page.evaluate(
        """(before) => {
          const begin = performance.now();
          window.firstWord = new Promise((resolve) => {
            const watcher = new MutationObserver(() => {
              const answer = document.querySelector("#now .answer");
              const isWriting = answer && !answer.querySelector(".dots");
              // A quick answer may be whole when it is shown first.
              const isWhole = document.querySelectorAll("#told .turn").length > before;
              if (!isWriting && !isWhole) return;
              watcher.disconnect();
              resolve((performance.now() - begin) / 1000);
            });
            watcher.observe(document.body, {childList: true, subtree: true});
          });
          document.querySelector("#ask").click();
        }""",
        before,
    )
    seconds = page.evaluate("window.firstWord")
    page.wait_for_selector(f"#told .turn:nth-child({before + 1})", timeout=300_000)
    page.wait_for_selector("#ask", timeout=300_000)
    return seconds


def crowd(site: Site, videos: list[Path], visitors: int = 20) -> None:
    """Twenty visitors with five questions each at once, against one after the other."""
    desk, peaks = site.desk, list[int]()
    apollo = desk.apollo
    assert apollo is not None

    def talk(number: int) -> int:
        visit = desk.visit(None, SamplingOptions(), ReadingOptions(), ANSWER)
        desk.open(visit, [videos[number % len(videos)]])
        _rest(visit)
        for question in QUESTIONS:
            desk.ask(visit, question)
            _rest(visit)
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        return sum(told.is_kept for told in visit.told)

    begin = time.perf_counter()
    with ThreadPoolExecutor(visitors) as pool:
        answered = sum(pool.map(talk, range(visitors)))
    together = time.perf_counter() - begin
    begin = time.perf_counter()
    talk(0)
    alone = (time.perf_counter() - begin) * visitors
    grown = (peaks[5 * visitors - 1] - peaks[visitors]) / 1000
    print(f"answers to {visitors} visitors         {answered:8d}     wanted: {5 * visitors}")
    print(f"  together / one by one         {together / alone:8.2f}")
    print(f"  memory after the first round  {grown:+8.1f} MB")


def _rest(visit: Visit) -> None:
    while visit.task is not None:
        time.sleep(0.005)


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="apollo-nano")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "videos"
        videos = draw_videos(place, 2)
        flags = dict.fromkeys(("dtype", "quant", "template")) | {
            "model": chosen.model,
            "device": None,
        }
        with chatting(place, model=flags, generation=ANSWER) as (address, site):
            with open_page(address) as page:
                first_words(page, site, videos[0])
            crowd(site, videos)


if __name__ == "__main__":
    main()
