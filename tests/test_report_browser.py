"""The report page as a browser draws it: charts, values on hover, widths, light and dark, and no request at all."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from html_pages import ATTACK, fleet, log
from made_up import H100, put, result
from precision_lab.report.compare import compare
from precision_lab.report.page import page
from precision_lab.report.read import read

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium (Debian package chromium)")
WIDTHS = (400, 1280)
# Put into a copy of the page: once the charts are drawn, move the pointer to the end of the first one and tell.
PROBE = """<script>
const seen = [];
addEventListener("error", event => seen.push(String(event.message)));
const wait = setInterval(() => {
  if (document.documentElement.dataset.drawn !== "yes") return;
  clearInterval(wait);
  const chart = document.querySelector(".chart svg");
  chart.scrollIntoView();
  const box = chart.getBoundingClientRect();
  const at = { bubbles: true, clientX: box.right - 12, clientY: box.top + box.height / 3 };
  const under = document.elementFromPoint(at.clientX, at.clientY);
  for (const kind of ["pointerover", "pointermove"]) under.dispatchEvent(new PointerEvent(kind, at));
  setTimeout(() => {
    const count = marks => document.querySelectorAll(".chart " + marks).length;
    const shown = document.getElementById("vg-tooltip-element");
    parent.postMessage({
      width: innerWidth,
      over: document.documentElement.scrollWidth - innerWidth,
      charts: count("svg.marks"), lines: count(".mark-line path"), bars: count(".mark-rect.role-mark path"),
      points: count(".mark-symbol path"),
      axes: [...document.querySelectorAll(".chart .role-axis-label text")].map(text => text.textContent),
      hover: shown && shown.classList.contains("visible") ? shown.innerText : "",
      ink: getComputedStyle(document.querySelector(".chart .role-axis-label text")).fill,
      paper: getComputedStyle(document.body).backgroundColor,
      requests: performance.getEntriesByType("resource").map(one => one.name),
      attacked: document.images.length, seen,
    }, "*");
  }, 100);
}, 10);
</script>"""
FRAMES = """<!doctype html><body><pre id="told"></pre>{frames}<script>
const told = [];
addEventListener("message", event => {{
  told.push(event.data);
  document.getElementById("told").textContent = JSON.stringify(told);
}});
</script></body>"""


def chromium(folder: Path, target: Path, *words: str) -> subprocess.CompletedProcess:
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={folder}/profile"]
    command += ["--enable-logging=stderr", "--v=0", "--virtual-time-budget=10000", *words, target.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with report.html of made-up results, one with a label that attacks."""
    folder = tmp_path_factory.mktemp("page")
    runs = fleet(folder / "runs")
    attacking = result(f"bf16[fp32_modules={ATTACK}]", machine=H100)
    attacking["config"]["precision"]["init_scale"] = 2.0
    log(put(runs / "attacking", attacking), [2.0, 1.5])
    found = read([runs])
    (folder / "report.html").write_text(page(compare(found), found), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def told(made):
    """What the page tells of itself, by width; it has no policy there that would hide a request."""
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", (made / "report.html").read_text())
    body, end, rest = text.rpartition("</body>")
    (made / "probe.html").write_text(body + PROBE + end + rest, encoding="utf-8")
    frames = "".join(
        f'<iframe src="probe.html" width="{width}" height="900" frameborder="0"></iframe>' for width in WIDTHS
    )
    (made / "frames.html").write_text(FRAMES.format(frames=frames))
    dom = chromium(made, made / "frames.html", "--dump-dom").stdout
    return {one["width"]: one for one in json.loads(html.unescape(re.search('id="told">(.*?)</pre>', dom)[1]))}


@pytest.mark.parametrize("width", WIDTHS)
def test_the_charts_are_drawn_and_the_page_is_no_wider_than_the_window(told, width):
    one = told[width]
    assert one["over"] <= 0
    assert one["charts"] == 14  # seven of each kind of hardware
    assert one["lines"] >= 30
    assert one["bars"] >= 30
    assert one["points"] >= 60
    assert {"fp32", "200", "0.5", "65,536"} <= {text.replace(" ", "") for text in one["axes"]}


@pytest.mark.parametrize("width", WIDTHS)
def test_the_values_of_all_lines_are_shown_on_hover(told, width):
    shown = dict(line.split("\t") for line in told[width]["hover"].splitlines())
    assert (shown["step"], shown["fp32"], shown["bf16"], shown["fp16"]) == ("200", "0.5", "0.51", "0.52")
    assert shown["fp16, seed 1, diverged"] == "-"


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_fetched_nothing_fails_and_no_label_is_run(told, width):
    assert told[width]["requests"] == []
    assert told[width]["seen"] == []
    assert told[width]["attacked"] == 0


# --blink-settings: 0 is dark, 1 is light
@pytest.mark.parametrize(("width", "scheme"), [(400, 0), (1280, 1)])
def test_a_screenshot_shows_the_page_in_light_and_in_dark(made, width, scheme):
    picture = made / f"{width}.png"
    words = [
        f"--window-size={width},3000",
        f"--screenshot={picture}",
        f"--blink-settings=preferredColorScheme={scheme}",
    ]
    done = chromium(made, made / "report.html", *words)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []  # no warning either
    with Image.open(picture) as opened:
        image = opened.convert("RGB")
    assert image.size == (width, 3000)
    colours = dict((colour, n) for n, colour in image.getcolors(1 << 24))
    paper = max(colours, key=colours.get)
    assert (sum(paper) > 3 * 128) is bool(scheme)
    assert len(colours) > 100
    for colour in ((0, 0x72, 0xB2), (0xD5, 0x5E, 0)):  # two arms' lines
        assert colours.get(colour, 0) > 20, colour
