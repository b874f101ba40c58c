"""The report page: what stands in it, that it is safe to open, and the script that writes it. Not how it is drawn."""

import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from made_up import H100, V100, XEON, benchmark, column, put, put_benchmark, result
from precision_lab.config import ROOT
from precision_lab.ratios import MARGIN
from precision_lab.report import curves, drawing, render
from precision_lab.report.compare import compare
from precision_lab.report.page import commands, page
from precision_lab.report.read import read
from precision_lab.report.reading import reading
from precision_lab.report.verdict import verdict_of
from precision_lab.report.warnings import warnings_of
from typed_scripts import run

VOID = {"meta", "link", "img", "br", "input", "hr", "line", "path"}
ATTACK = "\"><img src=x onerror=alert(1)></script><script>alert(2)</script>{{ 7 * 7 }}'"


class Page(HTMLParser):
    """The elements of a page: (name, attributes, text), in order, with the text of those within."""

    def __init__(self, text: str):
        super().__init__()
        self.elements, self._open = [], []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        element = [tag, dict(attrs), ""]
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.elements.append([tag, dict(attrs), ""])

    def handle_endtag(self, tag):
        assert self._open.pop()[0] == tag

    def handle_data(self, data):
        for element in self._open:
            element[2] += data

    def all(self, tag, **attributes):
        known = {name.rstrip("_"): value for name, value in attributes.items()}
        return [one for one in self.elements if one[0] == tag and known.items() <= one[1].items()]

    def texts(self, tag, **attributes):
        return [one[2].strip() for one in self.all(tag, **attributes)]

    def tables(self):
        """(caption, header, rows), in order."""
        made = []
        for tag, attributes, text in self.elements:
            if tag == "caption":
                made.append((text.strip(), [], []))
            elif tag == "th" and attributes["scope"] == "col":
                made[-1][1].append(text.strip())
            elif tag == "tr" and made and made[-1][1]:
                made[-1][2].append([])
            elif tag in ("td", "th") and made[-1][2]:
                made[-1][2][-1].append(text.strip())
        return made

    def specs(self):
        return json.loads(self.texts("script", id="specs")[0])


@pytest.fixture(autouse=True, scope="module")
def no_vega():
    """The script that draws is a megabyte, and takes seconds to put together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "javascript", lambda: "/* Vega */")
        yield


def written(folder, price=None, **words):
    found = read([folder])
    comparisons = compare(found, **words)
    return Page(page(comparisons, found, price)), comparisons


def log(folder, losses, scales=None):
    """A metrics.jsonl with these training losses from step 1 on."""
    lines = []
    for step, loss in enumerate(losses, 1):
        line = {"train/step": step, "train/loss": loss}
        if scales:
            line |= {"amp/loss_scale": scales[step - 1], "amp/skipped_steps": step - 1}
        lines.append(json.dumps(line))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def of_fleet(tmp_path_factory):
    """(the page of a fleet, its comparisons)"""
    return written(fleet(tmp_path_factory.mktemp("fleet")))


def fleet(folder):
    """Made-up results of three arms on two kinds of hardware, one run diverged."""
    for n, machine in enumerate((H100, V100)):
        for arm, step_ms, lower in (("fp32", 4.0, 0.0), ("bf16", 2.0, 0.01), ("fp16", 1.9, 0.02)):
            for seed in range(2):
                made = result(arm, seed, machine, step_ms_p50=step_ms * (1 + n + 0.1 * seed), val_loss_fp32=0.5 + lower)
                made["curve"] = {
                    "step": [50, 100, 200], "train_s": [0.1, 0.2, 0.4], "val_loss_fp32": [2.0 + seed, 1.0, 0.5 + lower]
                }  # fmt: skip
                if arm == "fp16" and seed:
                    made |= {"status": "diverged", "reason": "loss scale 0.5 fell below precision.min_scale=1"}
                    made["curve"] = {"step": [50, 100], "train_s": [0.1, 0.2], "val_loss_fp32": [3.0, None]}
                made["overrides"] = ["model=mlp", f"precision={arm}", f"seed={seed}"]
                log(put(folder / f"{n}-{arm}-{seed}", made), [2.0 + seed, 1.0, 0.5], [65536.0, 32768.0, 16384.0])
    return folder


def chart(shown, heading):
    """(its specification, its table, its caption) of the first comparison."""
    headings = shown.texts("h4")
    place = headings.index(heading)
    tables = [one for one in shown.tables() if one[0] in headings]
    return shown.specs()[f"comparison1-chart{place + 1}"], tables[place], shown.texts("figcaption")[place]


# --- what stands in it --------------------------------------------------------------------------------------------


def test_it_holds_verdict_tables_warnings_and_sentences_of_every_comparison(of_fleet):
    shown, comparisons = of_fleet
    assert len(comparisons) == 2
    tables = shown.tables()
    for comparison in comparisons:
        verdict = verdict_of(comparison)
        assert verdict.headline in shown.texts("h3", class_="headline")
        assert set(verdict.sentences + reading(comparison)) <= set(shown.texts("p"))
        assert verdict.command in shown.texts("code")
        for _, text in warnings_of(comparison):
            assert text in shown.texts("li")
        for columns in render.blocks(comparison):
            assert list(render.cells_of(columns, comparison.rows)) in [[header, rows] for _, header, rows in tables]
    for caption, cells in render.across_blocks(comparisons):
        assert (caption[0].upper() + caption[1:], *cells) in tables
    first = shown.texts("section", class_="comparison")[0]
    order = [verdict_of(comparisons[0]).headline, "Speed", "Validation loss", "Speed ratio to fp32",
             "Memory at the peak", "Loss scale", "Warnings", "What the figures say", "Environment",
             "To reproduce"]  # fmt: skip
    places = [first.index(f"\n{word}") if word != order[0] else first.index(word) for word in order]
    assert places == sorted(places)
    environment = dict(zip(shown.texts("dt"), shown.texts("dd"), strict=True))
    assert environment["torch"] == "2.14.1"
    assert environment["git"] == "abcdef0123456789"
    assert environment["bfloat16 units"] == "emulated"  # of the last one


def test_several_comparisons_have_a_table_of_contents_with_each_verdict(of_fleet):
    shown, comparisons = of_fleet
    entries = [text for text in shown.texts("li") if text.startswith("night (01234567) on")]
    assert entries == [
        f"night (01234567) on {name}: {verdict_of(one).headline}"
        for name, one in zip(("Made-up H100, 80 GiB", "Made-up V100, 16 GiB"), comparisons, strict=True)
    ]
    ids = {one[1]["id"] for one in shown.elements if "id" in one[1]}
    assert {link[1]["href"].removeprefix("#") for link in shown.all("a")} <= ids


def test_a_curve_is_the_mean_over_seeds_with_a_band_and_a_diverged_run_is_a_line_of_its_own(of_fleet):
    shown, _ = of_fleet
    spec, (_, header, rows), caption = chart(shown, "Validation loss")
    points = [point for point in spec["datasets"]["values"] if point["line"] == "line0"]
    assert points == [
        {"line": "line0", "step": 50, "mean": 2.5, "low": 2.0, "high": 3.0},
        {"line": "line0", "step": 100, "mean": 1.0, "low": 1.0, "high": 1.0},
        {"line": "line0", "step": 200, "mean": 0.5, "low": 0.5, "high": 0.5},
    ]
    assert header == ["step", "fp32", "bf16", "fp16", "fp16, seed 1, diverged"]
    assert rows == [
        ["50", "2.5 (2 to 3)", "2.5 (2 to 3)", "2", "3"], ["100", "1", "1", "1", "-"],
        ["200", "0.5", "0.51", "0.52", "-"],
    ]  # fmt: skip
    assert spec["datasets"]["ends"] == [{"line": "line3", "step": 50, "mean": 3.0}]
    assert "At step 200: fp32 0.5, bf16 0.51 (2 runs each). At step 200: fp16 0.52 (1 run)." in caption
    told = spec["datasets"]["told"]
    assert [row["step"] for row in told] == [50, 100, 200]
    assert [told[0][name] for name in ("line0", "line2", "line3")] == ["2.5 (2 to 3)", "2", "3"]
    assert [(row["from"], row["to"]) for row in told] == [(49, 75), (75, 150), (150, 200)]


def test_the_difference_from_the_reference_is_formed_seed_by_seed(tmp_path):
    for seed in (0, 1):
        for arm, apart in (("fp32", 0.0), ("bf16", 0.125 * (1 + seed))):
            made = result(arm, seed, H100)
            made["curve"]["val_loss_fp32"] = [5.0 * (1 + seed) + apart, 4.0]
            put(tmp_path / f"{arm}{seed}", made)
    _, (_, header, rows), _ = chart(written(tmp_path)[0], "Validation loss minus fp32's")
    assert header == ["step", "bf16"]
    assert rows == [["100", "+0.19 (+0.12 to +0.25)"], ["200", "+0"]]


def test_training_loss_scale_and_skipped_steps_are_of_the_logs(of_fleet):
    shown, _ = of_fleet
    _, (_, header, rows), _ = chart(shown, "Training loss")
    assert header == ["step", "fp32", "bf16", "fp16", "fp16, seed 1, diverged"]
    assert rows[0] == ["1", "2.5 (2 to 3)", "2.5 (2 to 3)", "2", "3"]
    spec, (_, header, rows), _ = chart(shown, "Loss scale")
    assert header == ["step", "fp16", "fp16, seed 1, diverged"]  # the arm with a scaler
    assert [row[1] for row in rows] == ["65,536", "32,768", "16,384"]
    assert spec["layer"][1]["encoding"]["y"]["scale"]["type"] == "log"
    assert [row[1] for row in chart(shown, "Skipped steps")[1][2]] == ["0", "1", "2"]


def test_a_long_log_is_thinned_and_keeps_its_ends(tmp_path):
    log(put(tmp_path / "0"), [1.0 + step for step in range(1000)])
    _, (_, _, rows), _ = chart(written(tmp_path)[0], "Training loss")
    assert len(rows) == curves.POINTS
    assert (rows[0], rows[-1]) == (["1", "1"], ["1000", "1,000"])


def test_a_log_that_is_missing_or_damaged_is_left_out_and_named(tmp_path):
    for arm, text in (("fp32", '{"train/step": 1, "train/loss": 2.0}\n'), ("bf16", '{"train/st'), ("fp16", None)):
        folder = put(tmp_path / arm, arm=arm)
        if text:
            (folder / "metrics.jsonl").write_text(text)
    shown, _ = written(tmp_path)
    assert chart(shown, "Training loss")[1][1] == ["step", "fp32"]
    assert f"Not in the charts: metrics.jsonl is damaged: {tmp_path}/bf16." in shown.texts("p")
    missing = f"Not in the charts: metrics.jsonl cannot be read (No such file or directory): {tmp_path}/fp16."
    assert missing in shown.texts("p")


def test_a_ratio_timed_in_turn_is_called_a_hint(of_fleet):
    spec, (_, header, rows), caption = chart(of_fleet[0], "Speed ratio to fp32")
    assert header == ["arm", "how", "verdict", "speed ratio", "from", "to", "pairs"]
    assert rows[0] == ["bf16", "timed in turn, a hint only", "-", "2.00", "2.00", "2.00", "2"]
    assert rows[1] == ["fp16", "timed in turn, a hint only", "-", "2.11", "-", "-", "1"]
    assert "Timed in turn, a hint only: bf16 2.00 [2.00, 2.00]; fp16 2.11." in caption
    assert spec["datasets"]["values"][0]["value"] == pytest.approx(2.0)
    assert spec["datasets"]["margin"] == [{"value": 1 - MARGIN, "high": 1 + MARGIN}]
    assert spec["datasets"]["even"] == [{"value": 1}]


def test_ratios_of_a_benchmark_stand_with_their_words(tmp_path):
    fleet(tmp_path)
    made = benchmark(H100, bf16=(1.482, 1.47, 1.495), fp16=(1.01, 0.9, 1.2))
    again = column("fp32", (1.0, 0.99, 1.01), again=True, with_data=True)
    made["columns"] += [again, column("bf16", (1.1, 1.05, 1.15), with_data=True)]
    put_benchmark(tmp_path / "benchmark", made)
    spec, (_, _, rows), caption = chart(written(tmp_path)[0], "Speed ratio to fp32")
    assert rows == [
        ["bf16, computing alone", "timed in alternation", "faster", "1.482", "1.470", "1.495", "120"],
        ["bf16, end to end", "timed in alternation", "faster", "1.100", "1.050", "1.150", "120"],
        ["fp16, computing alone", "timed in alternation", "not resolved", "1.010", "0.900", "1.200", "120"],
    ]
    assert "hint" not in caption
    drawn = [(one["value"], one["low"], one["high"]) for one in spec["datasets"]["values"]]
    assert drawn == [(1.482, 1.47, 1.495), (1.1, 1.05, 1.15), (1.01, 0.9, 1.2)]


def test_memory_is_stacked_by_kind_with_the_phase_of_the_peak(tmp_path):
    made = result("bf16", machine=H100)
    made["memory"] |= {"phase": "optimizer", "by_kind": {"parameters": 2**30, "gradients": 2**29, "batch": 0}}
    put(tmp_path / "bf16", made)
    put(tmp_path / "fp32", machine=H100)
    spec, (_, header, rows), caption = chart(written(tmp_path)[0], "Memory at the peak, by kind")
    assert header == [
        "arm", "phase of the peak", "peak GiB", "parameters", "gradients", "optimizer state", "saved activations",
        "batch", "temporaries",
    ]  # fmt: skip
    assert rows == [
        ["fp32", "backward pass", "4", "1", "0.5", "2", "0.25", "0.0625", "0.1875"],
        ["bf16", "optimizer step", "1.5", "1", "0.5", "0", "0", "0", "0"],
    ]
    assert "fp32 4 GiB, in the backward pass; bf16 1.5 GiB, in the optimizer step." in caption
    parts = [part for part in spec["datasets"]["values"] if part["arm"] == "fp32"]
    assert [(part["start"], part["end"]) for part in parts[:3]] == [(0, 1), (1, 1.5), (1.5, 3.5)]
    assert [part["number"] for part in parts] == ["1", "2", "3", "4", "", ""]  # the last two are too short for one


def test_an_arm_keeps_its_colour_dash_and_shape_in_all_charts(of_fleet):
    shown, _ = of_fleet
    of_lines = chart(shown, "Training loss")[0]["layer"][1]["encoding"]
    of_scale = chart(shown, "Loss scale")[0]["layer"][1]["encoding"]
    of_speed = chart(shown, "Speed ratio to fp32")[0]["layer"][-1]["encoding"]
    colours = of_lines["color"]["scale"]["range"]
    assert len(set(colours[:3])) == 3
    assert of_speed["color"]["scale"]["range"] == colours[1:3]
    assert of_scale["color"]["scale"]["range"] == [colours[2]] * 2
    dashes = of_lines["strokeDash"]["scale"]["range"]
    assert len(set(map(tuple, dashes[:3]))) == 3
    legend = [one[1]["stroke"] for one in shown.all("line")]
    assert legend == colours[:3] * 2


def test_an_arm_has_one_colour_on_all_hardware(tmp_path):
    for arm, machine in (("fp32", H100), ("tf32", H100), ("bf16", H100), ("fp32", V100), ("bf16", V100)):
        put(tmp_path / f"{arm}-{machine['model']}", result(arm, machine=machine))
    shown, _ = written(tmp_path)
    names = [
        name for ul in shown.texts("ul", class_="legend") for name in ul.split() if name in ("fp32", "tf32", "bf16")
    ]
    colours = [one[1]["stroke"] for one in shown.all("line")]
    assert names == ["fp32", "tf32", "bf16", "fp32", "bf16"]
    assert (colours[0], colours[2]) == (colours[3], colours[4])
    drawn = [spec["layer"][1]["encoding"]["color"]["scale"]["range"] for spec in shown.specs().values()
             if spec["datasets"].get("told") and len(spec["datasets"]["values"]) > 4]  # fmt: skip
    assert drawn[0] == colours[:3]


def test_more_arms_than_colours_still_look_different():
    looks = {(key.colour, key.dash, key.shape) for key in (drawing.arm_key(n, "") for n in range(30))}
    assert len(looks) == 30


# --- odd sets of results -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "headings"),
    [
        ([result()], ["Validation loss", "Memory at the peak, by kind"]),
        ([result("bf16"), result("bf16", 1)], ["Validation loss", "Memory at the peak, by kind"]),
        ([result() | {"memory": None, "curve": {}}], []),
        ([result(status="failed", reason="no") | {"memory": None, "curve": {}, "summary": {}}], []),
        ([result(), result("bf16") | {"memory": None, "curve": {}}],
         ["Validation loss", "Speed ratio to fp32", "Memory at the peak, by kind"]),
    ],
)  # fmt: skip
def test_what_there_is_nothing_of_is_left_out(tmp_path, made, headings):
    for n, one in enumerate(made):
        put(tmp_path / str(n), one)
    shown, (comparison,) = written(tmp_path)
    assert shown.texts("h4") == headings
    assert len(shown.all("figure")) == len(headings)
    assert shown.texts("h3", class_="headline") == [verdict_of(comparison).headline]
    assert not shown.all("nav")


def test_many_comparisons_are_left_to_the_files(tmp_path):
    for number in range(render.SHOWN + 2):
        put(tmp_path / str(number), result(experiment_signature=f"{number:08x}") | {"curve": {}, "memory": None})
    shown, _ = written(tmp_path)
    assert len(shown.all("section", class_="comparison")) == render.SHOWN
    assert any(text.startswith("2 more comparisons are in comparison.md") for text in shown.texts("p"))


# --- safe and readable ------------------------------------------------------------------------------------------


def test_text_of_the_user_s_never_becomes_markup(tmp_path):
    put(tmp_path / "a")
    made = result(f"fp16[fp32_modules={ATTACK}]", status="diverged", reason=f"no {ATTACK}", host=ATTACK)
    made["config"]["name"] = f"night {ATTACK}"
    made["memory"]["by_kind"][ATTACK] = 2**30
    made["overrides"] = [f"name={ATTACK}"]
    put(tmp_path / "b<i>", made)
    (tmp_path / "c<i>").mkdir()
    (tmp_path / "c<i>" / "result.json").write_text("{")
    text = page(compare(found := read([tmp_path])), found)
    shown = Page(text)
    assert len(shown.all("script")) == 3
    assert not shown.all("img") + shown.all("i")
    assert any(ATTACK in heading for heading in shown.texts("h2"))
    assert ATTACK in dict(zip(shown.texts("dt"), shown.texts("dd"), strict=True))["host"]
    assert any(ATTACK in line[0] for _, _, rows in shown.tables() for line in rows)
    assert any(f"no {ATTACK}" in text for text in shown.texts("p"))
    assert any("c<i>" in text for text in shown.texts("li"))
    assert "onerror" not in [name for _, attributes, _ in shown.elements for name in attributes]
    assert "49" not in shown.texts("h2")[0]
    assert not [one for spec in shown.specs().values() if "</script>" in (one := json.dumps(spec)) and one in text]


def test_it_asks_for_nothing_from_elsewhere(of_fleet):
    shown, _ = of_fleet
    targets = [
        attributes.get(name) for _, attributes, _ in shown.elements for name in ("src", "href", "srcset", "data")
    ]
    assert all(target.startswith("#") for target in targets if target is not None)
    assert not shown.all("link")
    style = shown.texts("style")[0]
    assert "url(" not in style
    assert "@import" not in style
    assert "https://" not in shown.texts("script", id="specs")[0]
    policy = next(one[1]["content"] for one in shown.all("meta") if one[1].get("http-equiv"))
    assert policy.startswith("default-src 'none'")


def test_it_is_built_for_screen_readers_and_keyboards(of_fleet):
    shown, _ = of_fleet
    levels = [int(tag[1]) for tag, _, _ in shown.elements if tag in ("h1", "h2", "h3", "h4")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False))
    assert shown.all("html")[0][1]["lang"] == "en"
    assert [len(shown.all(tag)) for tag in ("header", "nav", "main", "footer")] == [1, 1, 1, 1]
    assert shown.all("a", class_="skip", href="#main")
    assert len(shown.all("table")) == len(shown.texts("caption")) > 10
    assert all(header and all(len(row) == len(header) for row in rows) for _, header, rows in shown.tables())
    ids = [one[1]["id"] for one in shown.elements if "id" in one[1]]
    assert len(ids) == len(set(ids))
    assert {one[1]["aria-labelledby"] for one in shown.all("section")} <= set(ids)
    assert len(shown.all("figure")) == len(shown.all("figcaption")) == len(shown.all("details")) > 5
    assert all(spec["description"] in shown.texts("figcaption") for spec in shown.specs().values())


# --- commands and cost -----------------------------------------------------------------------------------------


def runs(tmp_path, *overrides):
    for n, words in enumerate(overrides):
        put(tmp_path / str(n), result(seed=n) | {"overrides": words})
    return read([tmp_path]).runs


def test_runs_of_a_grid_are_reproduced_by_one_command(tmp_path):
    grid = [["model.hidden=[8,8]", f"precision={arm}", f"seed={seed}"] for seed in (0, 1) for arm in ("fp32", "bf16")]
    told = commands(runs(tmp_path, *grid))
    assert told == "python train.py -m 'model.hidden=[8,8]' precision=fp32,bf16 seed=0,1"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([["seed=0"]], "python train.py seed=0"),
        ([[]], "python train.py"),
        ([["seed=0"], ["seed=1", "precision=bf16"]], "python train.py seed=0\npython train.py seed=1 precision=bf16"),
        ([["a=1", "seed=0"], ["a=2", "seed=1"]], "python train.py a=1 seed=0\npython train.py a=2 seed=1"),
        ([["a=[1,2]"], ["a=[3]"]], "python train.py 'a=[1,2]'\npython train.py 'a=[3]'"),
        ([["~a", "seed=0"], ["~a", "seed=1"]], "python train.py '~a' seed=0\npython train.py '~a' seed=1"),
    ],
)  # fmt: skip
def test_other_runs_are_reproduced_one_by_one(tmp_path, overrides, told):
    assert commands(runs(tmp_path, *overrides)) == told


def test_a_price_gives_the_cost_of_a_run_and_of_reaching_the_target(tmp_path):
    for arm, seconds, losses in (("fp32", 7200.0, [1.0, 0.6, 0.5]), ("bf16", 3600.0, [1.0, 0.5, 0.4])):
        made = result(arm, machine=H100)
        made["curve"] = {"step": [1, 100, 200], "train_s": [1.0, seconds / 2, seconds], "val_loss_fp32": losses}
        put(tmp_path / arm, made)
    made = result("fp16", machine=H100) | {"curve": {}}
    put(tmp_path / "fp16", made)
    shown, _ = written(tmp_path, price=2.5)
    caption, header, rows = next(one for one in shown.tables() if one[0].startswith("Cost"))
    assert caption == "Cost of training, at 2.5 an hour, in the price's currency"
    assert header == ["arm", "runs", "s a run", "cost a run", "s to target", "cost to target"]
    assert rows == [
        ["fp32", "1", "7,200", "5", "7,200", "5"], ["bf16", "1", "3,600", "2.5", "1,800", "1.25"],
        ["fp16", "0", "-", "-", "-", "-"],
    ]  # fmt: skip
    free, _ = written(tmp_path, price=0.0)
    assert [row[3] for row in next(one for one in free.tables() if one[0].startswith("Cost"))[2]] == ["0", "0", "-"]
    without, _ = written(tmp_path)
    assert not [one for one in without.tables() if one[0].startswith("Cost")]


# --- the script ----------------------------------------------------------------------------------------------------


def test_the_script_writes_the_page_and_says_where(tmp_path):
    put(tmp_path / "runs" / "0")
    made = tmp_path / "new" / "report.html"
    done = run("compare.py", tmp_path / "runs", "--html", made, "--price-per-hour", "2.5")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(f"\nthe page: {made}\n")
    text = made.read_text(encoding="utf-8")
    assert "at 2.5 an hour" in text
    assert "vegaEmbed" in text
    assert len(text) < 2e6


def test_without_a_page_nothing_of_its_libraries_is_loaded(tmp_path):
    put(tmp_path / "0")
    code = f"import sys, runpy; sys.argv = ['compare.py', {str(tmp_path)!r}]\n"
    code += f"try: runpy.run_path({str(ROOT / 'scripts' / 'compare.py')!r}, run_name='__main__')\n"
    code += "except SystemExit: pass\n"
    code += "assert not {'altair', 'jinja2', 'vl_convert'} & set(sys.modules); sys.exit(7)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 7, done.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--html", "{file}/x/y"], "{file}/x/y cannot be written to (Not a directory); name another file with"),
        (["--html", "{runs}"], "{runs} cannot be written to (Is a directory); name another file with --html."),
        (["--html", "{runs}/x", "--price-per-hour", "-1"], "--price-per-hour -1 is no price; write a number such as"),
        (["--html", "{runs}/x", "--price-per-hour", "inf"], "--price-per-hour inf is no price; write a number such as"),
        (["--html", "{runs}/x", "--price-per-hour", "2,5"], "--price-per-hour 2,5 is no price; write a number such as"),
        (["--price-per-hour", "2"], "--price-per-hour is told on the page: name its file with --html."),
    ],
)  # fmt: skip
def test_the_script_refuses_in_one_sentence(tmp_path, words, sentence):
    places: dict[str, Path] = {"runs": tmp_path / "runs", "file": tmp_path / "file"}
    put(places["runs"] / "0", machine=XEON)
    places["file"].touch()
    done = run("compare.py", places["runs"], *(word.format(**places) for word in words))
    assert done.returncode == 2
    assert done.stderr.startswith(f"precision-lab: {sentence.format(**places)}")
    assert "Traceback" not in done.stderr
