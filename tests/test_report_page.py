"""The report page: what stands in it, that it is safe to open, and the script that writes it. Not its charts."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from html_pages import ATTACK, Page, fleet, written
from made_up import H100, XEON, benchmark, put, put_benchmark, result
from precision_lab.config import ROOT, as_values
from precision_lab.report import files, render
from precision_lab.report.compare import compare
from precision_lab.report.page import commands, page
from precision_lab.report.read import read
from precision_lab.report.reading import reading
from precision_lab.report.timed import how_timed
from precision_lab.report.verdict import verdict_of
from precision_lab.report.warnings import warnings_of
from precision_lab.settings import BenchmarkConfig, own_settings
from typed_scripts import run

pytestmark = pytest.mark.usefixtures("no_vega")


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


def test_beside_a_benchmark_the_speed_table_says_which_of_its_figures_are_of_runs_in_turn(of_fleet, tmp_path):
    assert render.IN_TURN in render.LEGEND
    assert render.IN_TURN not in of_fleet[0].texts("p")  # no ratio there that they could contradict
    put_benchmark(fleet(tmp_path) / "benchmark", benchmark(H100, bf16=(1.5, 1.48, 1.52)))
    text = page(compare(found := read([tmp_path])), found)
    speed, memory = (text.index(f"<caption><span>{name}</span>") for name in ("Speed", "Memory"))
    assert speed < text.index(f'<p class="faint">{render.IN_TURN}</p>') < memory


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


def test_the_benchmark_is_reproduced_with_its_settings_and_the_experiment_s_overrides(tmp_path):
    made = result("bf16", machine=H100) | {"overrides": ["model.hidden=[8,8]", "precision=bf16", "seed=0"]}
    put(tmp_path / "bf16", made)
    put(tmp_path / "fp32", result(machine=H100) | {"finished": 1.0})
    assert written(tmp_path)[0].texts("code")[-1].startswith("python train.py")
    timed = benchmark(H100, bf16=(1.5, 1.48, 1.52))
    timed["settings"] |= {"data": True, "compiled": False, "processes": None, "budget_s": 90.0}
    put_benchmark(tmp_path / "benchmark", timed)
    shown, (comparison,) = written(tmp_path)
    told = (
        "python scripts/benchmark.py 'model.hidden=[8,8]' arms=fp32,bf16 reference=fp32 budget_s=90.0 half_width=0.01 "
        "data=true compiled=false processes=null"
    )
    assert shown.texts("code")[-1] == told
    settings, others = own_settings(shlex.split(told)[2:], BenchmarkConfig, "benchmark.yaml")
    assert (as_values(settings), others) == (timed["settings"], ["model.hidden=[8,8]"])  # it is taken as it stands
    assert how_timed(comparison).replace("[", "\\[") in files.markdown([comparison], read([tmp_path]))


def test_a_price_gives_the_cost_of_a_run_and_of_reaching_the_target(tmp_path):
    for arm, seed, seconds, losses in (
        ("fp32", 0, 7200.0, [1.0, 0.6, 0.5]), ("fp32", 1, 3600.0, [1.0, 0.6, 0.5]), ("bf16", 0, 3600.0, [1.0, 0.5, 0.4])
    ):  # fmt: skip
        made = result(arm, seed, machine=H100)
        made["curve"] = {"step": [1, 100, 200], "train_s": [1.0, seconds / 2, seconds], "val_loss_fp32": losses}
        put(tmp_path / f"{arm}-{seed}", made)
    made = result("fp16", machine=H100) | {"curve": {}}
    put(tmp_path / "fp16", made)
    shown, _ = written(tmp_path, price=2.5)
    caption, header, rows = next(one for one in shown.tables() if one[0].startswith("Cost"))
    assert caption == (
        "Cost of training, at 2.5 an hour, in the price's currency: the mean of the runs (smallest to largest), and to "
        "the target that of the median run. The runs were timed one after the other, a hint only"
    )
    assert header == ["arm", "runs", "s a run", "cost a run", "s to target", "cost to target"]
    assert rows == [
        ["fp32", "2", "5,400 (3,600 to 7,200)", "3.75 (2.5 to 5)", "3,600", "2.5"],
        ["bf16", "1", "3,600", "2.5", "1,800", "1.25"], ["fp16", "0", "-", "-", "-", "-"],
    ]  # fmt: skip
    free, _ = written(tmp_path, price=0.0)
    assert [row[3] for row in next(one for one in free.tables() if one[0].startswith("Cost"))[2]] == [
        "0 (0 to 0)",
        "0",
        "-",
    ]
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
        (["--html", "{file}/x/y.html"], "{file}/x/y.html cannot be written to (Not a directory); name another file"),
        (["--html", "{runs}"], "{runs} cannot be written to (Is a directory); name another file with --html."),
        (["--html", "x.html", "--price-per-hour", "-1"], "--price-per-hour -1 is no price; write a number such as"),
        (["--html", "x.html", "--price-per-hour", "inf"], "--price-per-hour inf is no price; write a number such as"),
        (["--html", "x.html", "--price-per-hour", "2,5"], "--price-per-hour 2,5 is no price; write a number such as"),
        (["--html", ""], "--html '' is no file of a page; end its name in .html or .htm."),
        (["--price-per-hour", "2"], "--price-per-hour is told on the page: name its file with --html."),
    ],
)  # fmt: skip
def test_the_script_refuses_in_one_sentence(tmp_path, words, sentence):
    places: dict[str, Path] = {"runs": tmp_path / "runs.html", "file": tmp_path / "file"}
    put(places["runs"] / "0", machine=XEON)
    places["file"].touch()
    done = run("compare.py", places["runs"], *(word.format(**places) for word in words))
    assert done.returncode == 2
    assert done.stderr.startswith(f"precision-lab: {sentence.format(**places)}")
    assert "Traceback" not in done.stderr


def test_no_run_s_own_file_is_written_over_by_a_page(tmp_path):
    result_file = put(tmp_path / "0") / "result.json"
    before = result_file.read_bytes()
    done = run("compare.py", tmp_path, "--html", result_file)
    assert done.returncode == 2
    assert done.stderr == (
        f"precision-lab: --html {result_file} is no file of a page; end its name in .html or .htm.\n"
    )
    assert result_file.read_bytes() == before
    assert not (tmp_path / "comparison.md").exists()  # nothing was read or written
