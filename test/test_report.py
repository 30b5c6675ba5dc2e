"""``python -m lycoris bench report``: a page that loads nothing and reads without JavaScript."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from html import escape, unescape
from html.parser import HTMLParser
from io import BytesIO, TextIOWrapper
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lycoris.__main__ import command, main
from lycoris.bench.chart import Mark, chart, styles
from lycoris.bench.records import load_all
from lycoris.bench.report import html, markdown

ROOT = Path(__file__).resolve().parents[1]
RECORD = [
    ROOT / "bench" / "results" / f"2026-11-30-h200-lora-{name}.json"
    for name in ("triton", "tilelang")
]
MATRIX = ROOT / "bench" / "results" / "2026-11-30-h200-matrix-llm.json"
VOID = {"meta", "input", "link", "br", "img", "hr"}
EVIL = "<script>alert(1)</script>\" onload='x' & | ${x}"


class Page(HTMLParser):
    """The elements of a page; fails where they are not nested."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[list[str]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            self.cells[-1][-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


@pytest.fixture(scope="module")
def page() -> str:
    return html(load_all(RECORD), "Results")


def test_it_parses_and_the_table_is_there_without_javascript(page: str) -> None:
    parsed = Page(page)
    head, *rows = parsed.cells
    assert head[:5] == ["op", "shape", "dtypes", "direction", "backend"]
    results = load_all(RECORD)
    assert len(rows) == len(results.rows)
    assert {len(cells) for cells in rows} == {len(head)}
    first = dict(zip(head, rows[0], strict=True))
    assert first["time us"] == "155.5"
    assert first["x floor"] == "1.61"
    assert first["bound"] == "24.0"
    assert first["parity"] == "pass"
    # What only scripts can serve is hidden until one runs.
    (controls,) = [a for a in parsed.all("div") if a.get("class") == "controls"]
    assert "hidden" in controls


def test_it_loads_nothing(page: str) -> None:
    parsed = Page(page)
    for tag, attributes in parsed.found:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form")
        assert not {"src", "href", "srcset", "xlink:href", "action"} & attributes.keys()
        assert not [name for name in attributes if name.startswith("on")]
    assert not re.search(r"url\(|@import|https?:|fetch\(|XMLHttp|import\(", page)
    policy = [a["content"] for a in parsed.all("meta") if "http-equiv" in a]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"]


def test_it_is_made_for_phones_and_both_schemes(page: str) -> None:
    metas = {a.get("name"): a.get("content") for a in Page(page).all("meta")}
    assert metas["viewport"] == "width=device-width, initial-scale=1"
    assert metas["color-scheme"] == "light dark"
    assert "prefers-color-scheme: dark" in page
    assert "@media (max-width: 44rem)" in page
    labels = [a["data-label"] for a in Page(page).all("td")]
    assert "x floor" in labels  # rows become cards there, each value with its name


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_colours_have_contrast_in_both_schemes(page: str) -> None:
    schemes = re.findall(r":root \{(.*?)\}", page, re.DOTALL)
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", scheme))
        paper = _luminance(colours["paper"])
        for name, least in [
            ("ink", 7),
            ("soft", 4.5),
            ("bad", 4.5),
            *((f"c{i}", 3) for i in range(6)),
        ]:
            low, high = sorted((paper, _luminance(colours[name])))
            assert (high + 0.05) / (low + 0.05) >= least, name


def test_every_timed_op_has_its_chart(page: str) -> None:
    parsed = Page(page)
    charts = [a for a in parsed.all("svg") if a.get("class") == "chart"]
    assert len(charts) == 2
    for name in ("triton", "tilelang", "eager"):
        assert f"</svg> {name}</span>" in page
    assert "triton: 155.5 us, 1.61 times the floor of 96.8 us" in page


def test_marks_stand_where_their_times_are() -> None:
    style = styles(["triton", "eager"])
    text = chart({"a": [Mark("triton", 1.0, 10, 10), Mark("eager", 10.0, 100, 10)]}, style)
    places = re.findall(r'<svg x="([\d.]+)%"', text)
    assert sorted(map(float, places)) == [3.0, 97.0]
    below = chart({"a": [Mark("triton", 0.9, 9, 10)]}, style)  # a beaten floor is not hidden
    (place,) = re.findall(r'<svg x="([\d.]+)%"', below)
    assert float(place) == 3.0


def test_every_backend_has_a_mark_of_its_own_the_same_on_a_whole_page(tmp_path: Path) -> None:
    data = json.loads(RECORD[0].read_text())
    first, names = data["rows"][0], ("zeta", "alpha", "triton", "beta")
    rows = [first | {"backend": name} for name in names]
    rows += [first | {"op": "another", "backend": "zeta"}]  # alone in that chart
    file = tmp_path / "results.json"
    file.write_text(json.dumps(data | {"rows": rows}))
    text = html(load_all([file]), "x")
    marks: dict[str, set[tuple[str, str]]] = {}
    for colour, name, shape in re.findall(
        r'class="(m\d)"><title>(\w+)(?:: [^<]*)?</title>(<[^>]*>)', text
    ):
        marks.setdefault(name, set()).add((colour, shape))
    assert marks.keys() == {*names, "eager"}
    assert len({mark for found in marks.values() for mark in found}) == len(marks)
    assert text.count("</svg> zeta</span>") == 2
    assert all(re.search(rf"\.{m} \{{ fill", text) for ((m, _),) in marks.values())


def test_a_long_label_takes_lines_that_a_phone_shows() -> None:
    name = "4x1280x32x32 k=3 factor 8 r=16 +base +w1 +w2_a +w2_b, bf16"
    marks = [Mark("triton", 2.0, 20, 10)]
    text = chart({name: marks, "short": marks}, styles(["triton"]))
    labels = re.findall(r'dx="6" y="(\d+)">(.*?)</text>', text)
    assert all(len(label) <= 46 for _, label in labels)
    assert (
        " ".join(label for _, label in sorted(labels[:2], key=lambda found: int(found[0]))) == name
    )
    places = sorted(int(y) for y, _ in labels)
    assert min(b - a for a, b in pairwise(places)) >= 15
    assert re.findall(r'width="100%" height="(\d+)"', text)[0] == str(34 + 2 * 46 + 15 + 8)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """Results with a failed row, and names that would be markup."""
    data = json.loads(RECORD[0].read_text())
    data["rows"] = data["rows"][:2]
    data["environment"]["name"] = EVIL
    first, second = data["rows"]
    first |= {"op": EVIL, "case": EVIL, "backend": EVIL}
    second |= {"pass": False, "why": f"out: {EVIL}", "time_us": None}
    second["parity"][0] |= {"pass": False, "why": EVIL, "ulp": None}
    file = tmp_path / "results.json"
    file.write_text(json.dumps(data))
    return file


def test_names_are_text_and_never_markup(hostile: Path) -> None:
    results = load_all([hostile])
    text = html(results, EVIL)
    parsed = Page(text)
    assert len(parsed.all("script")) == 1
    assert not [a for _, a in parsed.found if "onload" in a]
    assert EVIL in [cells[0] for cells in parsed.cells]
    page = markdown(results, EVIL)
    assert "<script" not in page
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    bars = {len(re.findall(r"(?<!\\)\|", line)) for line in lines}
    assert len(bars) == 2  # the environment's table and the rows': no cell is split


def test_a_failed_row_shows_no_speed_and_its_reason(hostile: Path) -> None:
    parsed = Page(html(load_all([hostile]), "x"))
    head, _, bad = parsed.cells
    shown = dict(zip(head, bad, strict=True))
    assert shown["parity"] == "FAIL"
    assert shown["time us"] == shown["speed-up"] == "-"
    assert [a for a in parsed.all("tr") if a.get("class") == "failed"]
    assert "1 failed their parity check" in markdown(load_all([hostile]), "x")


def test_a_layer_shows_what_peft_adds(tmp_path: Path) -> None:
    data = json.loads(RECORD[0].read_text())
    row = data["rows"][0] | {"kind": "layer", "base_us": 700.0, "time_us": 850.0, "added_us": 150.0}
    row |= {"peft_us": 1010.0, "peft_wall_us": 1234.0, "peft_peak_bytes": 3 * 2**20}
    file = tmp_path / "results.json"
    file.write_text(json.dumps(data | {"rows": [row, data["rows"][1]]}))
    results = load_all([file])
    head, layer, op = Page(html(results, "x")).cells
    expected = {"PEFT us": "1010.0", "PEFT adds us": "310.0", "added us": "150.0"}
    expected |= {"PEFT wall us": "1234.0", "PEFT peak MiB": "3.00"}
    shown = dict(zip(head, layer, strict=True))
    assert {name: shown[name] for name in expected} == expected
    assert dict(zip(head, op, strict=True))["PEFT us"] == "-"
    text = markdown(results, "x")
    assert "| PEFT adds (us) |" in text
    assert "| 310.0 |" in text
    assert "PEFT" not in html(load_all(RECORD), "x")


def test_the_command_writes_both_formats(tmp_path: Path, capsys: Any) -> None:
    names = [str(file) for file in RECORD]
    target = tmp_path / "report.html"
    assert main(["bench", "report", *names, "-o", str(target)]) == 0
    assert target.read_text().startswith("<!doctype html>")
    assert "rows in" in capsys.readouterr().out
    assert main(["bench", "report", *names, "-o", str(tmp_path / "report.md")]) == 0
    assert (tmp_path / "report.md").read_text().startswith("# lycoris-kernels on NVIDIA H200")
    capsys.readouterr()
    assert main(["bench", "report", *names, "--format", "markdown"]) == 0
    assert "| lora_apply | 8192x4096x4096 r=16 | bf16 |" in capsys.readouterr().out
    assert main(["bench", "report", *names, "-o", str(tmp_path / "no" / "r.html")]) == 2
    assert main(["bench", "report", str(tmp_path / "gone.json")]) == 2


def test_files_of_two_devices_make_no_page(hostile: Path, capsys: Any) -> None:
    assert main(["bench", "report", str(hostile), str(RECORD[0])]) == 2
    assert "results of different devices" in capsys.readouterr().err


CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)


CHROME = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: apt install chromium")
#: What a page is asked once it has loaded; ``act`` fills ``found``.
PROBE = """<!doctype html><body style="margin:0">
<iframe {sandbox} style="border:0" width="{width}" height="1500" srcdoc="{page}"></iframe>
<pre id="found"></pre><script>
document.querySelector("iframe").onload = event => {{
  const page = event.target.contentDocument, found = {{}};
  const root = page.documentElement, all = query => [...page.querySelectorAll(query)];
  const seen = element => element.getClientRects().length > 0;
  found.overflow = root.scrollWidth - root.clientWidth;
  found.clipped = all(".chart text").filter(
    t => t.getBoundingClientRect().right > root.clientWidth).map(t => t.textContent);
  found.controls = seen(page.querySelector(".controls"));
  found.rows = all("tbody tr").filter(seen).length;
  found.paper = getComputedStyle(page.body).backgroundColor;
  {act}
  document.getElementById("found").textContent = JSON.stringify(found);
}};
</script>"""


def in_chromium(page: str, folder: Path, width: int, act: str = "", **options: str) -> Any:
    """What the page says of itself in a frame of that width: a window is never below 500 pixels."""
    file = folder / "probe.html"
    given = {"width": width, "act": act, "sandbox": options.get("sandbox", "")}
    file.write_text(PROBE.format(page=escape(page), **given))
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={folder / 'profile'}", "--window-size=1280,1600"]
    dark = options.get("scheme") == "dark"
    command += [f"--blink-settings=preferredColorScheme={'0' if dark else '1'}", "--dump-dom"]
    done = subprocess.run(
        [*command, file.as_uri()], check=True, capture_output=True, text=True, timeout=120
    )
    return json.loads(unescape(done.stdout.split('<pre id="found">')[1].split("</pre>")[0]))


@CHROME
@pytest.mark.parametrize(
    ("width", "scheme", "paper"),
    [
        (1280, "light", "rgb(253, 253, 251)"),
        (1280, "dark", "rgb(20, 24, 27)"),
        (390, "light", "rgb(253, 253, 251)"),
    ],
)
def test_it_fits_its_window(tmp_path: Path, width: int, scheme: str, paper: str) -> None:
    results = load_all([*RECORD, MATRIX])
    found = in_chromium(html(results, "Results"), tmp_path, width, scheme=scheme)
    assert found["overflow"] == 0
    assert found["clipped"] == []
    assert found["controls"]
    assert found["rows"] == len(results.rows)
    assert found["paper"] == paper


@CHROME
def test_without_scripts_there_are_rows_and_no_dead_controls(page: str, tmp_path: Path) -> None:
    found = in_chromium(page, tmp_path, 1280, sandbox='sandbox="allow-same-origin"')
    assert found["rows"] == len(load_all(RECORD).rows)
    assert not found["controls"]


@CHROME
def test_it_sorts_and_filters(page: str, tmp_path: Path) -> None:
    act = """
    const at = name => all("thead th").findIndex(th => th.dataset.name === name);
    const column = name => all("tbody tr").filter(seen).map(r => r.cells[at(name)].textContent);
    const press = name => all("thead th")[at(name)].querySelector("button").click();
    press("time"); found.up = column("time");
    press("time"); found.down = column("time");
    found.heading = all("thead th")[at("time")].textContent;
    found.order = all("thead th")[at("time")].getAttribute("aria-sort");
    press("op"); found.ops = column("op");
    const put = (query, value) => {
      const e = page.querySelector(query); e.value = value; e.dispatchEvent(new Event("input")); };
    put("#words", "R=128 lora"); found.words = column("case"); put("#words", "");
    put("select[data-column=backend]", "tilelang"); found.backends = column("backend");
    found.count = page.getElementById("count").value;
    found.menus = all("select").filter(seen).map(m => m.dataset.column);
    """
    found = in_chromium(page, tmp_path, 1280, act)
    results = load_all(RECORD)
    times = [float(t) for t in found["up"]]
    assert times == sorted(times)
    assert times[0] < 20 < 100 < times[-1]  # as numbers: "17.5" comes before "155.5"
    assert found["down"] == found["up"][::-1]
    assert found["heading"] == "time us"
    assert found["order"] == "descending"
    assert found["ops"] == sorted(found["ops"])
    assert found["words"] == ["8192x4096x4096 r=128"] * 2
    assert found["backends"] == ["tilelang"] * len(results.only("tilelang").rows)
    assert found["count"] == f"{len(found['backends'])} of {len(results.rows)} rows"
    # One direction, and no failure: nothing to choose.
    assert found["menus"] == ["op", "backend", "dtypes"]


def test_names_beyond_the_terminals_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = json.loads(RECORD[0].read_text())
    rows = [data["rows"][0] | {"case": "\u65e5\u672c"}]
    file = tmp_path / "results.json"
    file.write_text(json.dumps(data | {"rows": rows}, ensure_ascii=False), encoding="utf-8")
    printed = BytesIO()
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(printed, encoding="ascii"))
    monkeypatch.setattr(sys, "argv", ["x", "bench", "report", str(file), "--format", "markdown"])
    assert command() == 0
    assert rb"| \u65e5\u672c |" in printed.getvalue()
