"""Looks at the built pages in a browser: ``make screenshots``, or ``python docs/screenshots.py PAGE ...``.

Writes ``runs/screenshots/PAGE-WIDTH-MODE.png`` for widths of 1440 and 400 pixels, light and dark, and fails if a page
scrolls sideways or a signature is taller than a screen. It needs Chromium: ``apt-get install chromium``.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
HTML = ROOT / "docs" / "_build" / "html"
WIDTHS = {1440: 900, 400: 800}
NAMES = ("chromium", "chromium-browser", "google-chrome")
SHOWN = (
    *("index", "start/notebook", "start/hugging_face", "guides/wrapping", "guides/coming_from/fsdp1"),
    *("reference/api/wrapper", "reference/compatibility", "reference/errors", "how_it_works/schedule"),
    *("how_it_works/layouts", "how_it_works/streams", "notes/benchmarks"),
)

# Opens every page at every width in a frame and notes what is too wide or too tall.
MEASURE = """
<pre id="found"></pre>
<script>
const pages = %s, widths = %s, found = [];
async function look() {
  for (const width of Object.keys(widths)) for (const page of pages) {
    const frame = document.createElement("iframe");
    frame.style.cssText = `width:${width}px; height:${widths[width]}px; border:0`;
    frame.src = page;
    const loaded = new Promise(done => { frame.onload = done; });
    document.body.appendChild(frame);
    await loaded;
    const root = frame.contentDocument.documentElement;
    const name = page.replace(/.*_build.html.|.html$/g, "");
    if (root.scrollWidth > Number(width)) found.push(`${name}: scrolls sideways at ${width} pixels`);
    for (const sig of frame.contentDocument.querySelectorAll("dt.sig"))
      if (sig.getBoundingClientRect().height > widths[width])
        found.push(`${name}: the signature of ${sig.id} is taller than a screen at ${width} pixels`);
    frame.remove();
  }
  document.getElementById("found").textContent = JSON.stringify({done: pages.length, found});
}
look();
</script>
"""


def browser() -> str:
    """The path of a Chromium."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    sys.exit("make screenshots needs Chromium, but none is installed. Run: apt-get install chromium")


def run(*arguments: str, mode: str = "light", seconds: float = 60.0) -> str:
    """The output of the browser."""
    dark = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if mode == "dark" else []
    command = [browser(), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *dark, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds).stdout


def problems(pages: list[Path]) -> list[str]:
    """Pages and signatures that do not fit."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "measure.html")
        path.write_text(MEASURE % (json.dumps([page.as_uri() for page in pages]), json.dumps(WIDTHS)))
        # the page reads the frames of other files
        flags = ("--allow-file-access-from-files", "--disable-web-security", "--disable-site-isolation-trials")
        printed = run(*flags, "--virtual-time-budget=600000", "--dump-dom", path.as_uri(), seconds=400)
    text = re.search(r'<pre id="found">(.*?)</pre>', printed, re.DOTALL)
    if text is None or not text[1]:
        sys.exit("The browser measured no page. Run again, or look at the pages by hand.")
    return list(json.loads(html.unescape(text[1]))["found"])


def show(page: Path, out: Path, size: tuple[int, int], mode: str) -> None:
    """Write a picture of the page. It is in a frame, because Chromium has no window narrower than 500 pixels."""
    width, height = size
    with tempfile.TemporaryDirectory() as folder:
        frame = Path(folder, "frame.html")
        style = f"width:{width}px; height:{height}px; border:0"
        frame.write_text(f'<body style="margin:0"><iframe style="{style}" src="{page.as_uri()}"></iframe></body>')
        arguments = (f"--window-size={max(width, 500)},{height}", f"--screenshot={out}", "--virtual-time-budget=3000")
        run(*arguments, frame.as_uri(), mode=mode)


def main() -> None:
    """Write the pictures, print the problems."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", help="pages to show, such as guides/wrapping; a choice if left out")
    parser.add_argument("--html", type=Path, default=HTML, help="the built pages")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "screenshots")
    options = parser.parse_args()
    folder = options.html.resolve()
    made = ("genindex", "search", "py-modindex")
    all_pages = [page for page in sorted(folder.rglob("*.html")) if page.stem not in made]
    found = problems(all_pages)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.pages or SHOWN:
        for width, height in WIDTHS.items():
            for mode in ("light", "dark"):
                out = options.out / f"{name.replace('/', '-')}-{width}-{mode}.png"
                show(folder / f"{name}.html", out, (width, height), mode)
    print(f"{len(all_pages)} pages measured; pictures are in {options.out}")
    for problem in found:
        print(problem)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
