"""What a sweep shows: figures as known, nothing wider or taller than the terminal, no secret, each thing once."""

import io
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console

from precision_lab import config
from precision_lab.sweep import lead as lead_module
from precision_lab.sweep import view as view_module
from precision_lab.sweep.plan import Answer, Job, titles
from precision_lab.sweep.view import View, clock, figures, sentence

SECRET = "wandb-0123456789abcdef"
LINE = {
    "train/step": 40,
    "perf/elapsed_s": 20.0,
    "perf/step_ms_p50": 23.5678,
    "train/loss": 1.23456,
    "val/loss_fp32": 0.98765,
}
KNOWN = {"step": "40/100", "step_ms": "23.57", "train_loss": "1.235", "val_loss": "0.9877", "time": "~30 s"}
RESULT = {
    "step": 400,
    "summary": {"final/perf_step_ms_p50": 1.4211, "final/train_loss": 0.0471, "final/val_loss_fp32": 0.11432},
}


@cache
def composed(*overrides):
    return config.compose(list(overrides))


def job(folder, title="seed=0", status="completed", **more):
    folder.mkdir(parents=True, exist_ok=True)
    return Job(title.split(), title, composed(), folder, status=status, **more)


def write(one, result=None, status=None, lines=None):
    for name, values in (("result", result), ("status", status)):
        if values is not None:
            (one.folder / f"{name}.json").write_text(json.dumps(values))
    if lines is not None:
        (one.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return one


def running(folder, title="seed=0", lines=(LINE,), total=100, **more):
    return write(job(folder, title, "running", **more), status={"status": "running", "total_steps": total}, lines=lines)


def console(width=200, height=50, terminal=False):
    return Console(
        *(), file=io.StringIO(), width=width, height=height, force_terminal=terminal, color_system=None, highlight=False
    )


def said(view):
    return view._console.file.getvalue()


def frames(view):
    """What the live table drew, one text a drawing: what lies between two movements of the cursor."""
    return [text for text in re.split(r"\x1b\[[0-9;?]*[A-Za-z]", said(view)) if text.strip()]


def summary(jobs, secrets=(), **size):
    view = View(jobs, list(secrets), console=console(**size))
    view.summary()
    return said(view)


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(view_module, "REFRESH_S", 0)


# --- words -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (0.6, "1 s"),
        (99.4, "99 s"),
        (99.5, "2 min"),
        (240, "4 min"),
        (99 * 60, "99 min"),
        (100 * 60, "1 h 40 min"),
        (7500, "2 h 05 min"),
        (7199, "2 h 00 min"),
        (100 * 3600, "100 h 00 min"),
    ],
)
def test_a_time_is_told_in_the_unit_that_fits(seconds, words):
    assert clock(seconds) == words


def test_how_a_job_stands_is_a_sentence(tmp_path):
    one = write(job(tmp_path, seconds=6.2), result=RESULT)
    assert sentence(one) == "completed: step 400, 1.421 ms a step, val loss 0.1143, 6 s"
    assert sentence(replace(one, before=True, seconds=None)).startswith("completed, before: step 400, ")
    assert sentence(job(tmp_path / "none")) == "completed"
    assert sentence(replace(one, status="diverged", reason="loss is nan")) == "diverged (loss is nan)"
    assert sentence(replace(one, status="failed", reason="no")) == f"failed (no; see {tmp_path}/train.log)"
    assert sentence(replace(one, status="interrupted", reason="")).startswith("interrupted: step 400")


# --- figures ---------------------------------------------------------------------------------


def test_the_figures_of_a_running_job_are_its_last_line_s(tmp_path):
    lines = [{**LINE, "train/step": step} for step in range(1, 40)] + [LINE]  # more than is read of it
    one = running(tmp_path, lines=lines)
    assert (tmp_path / "metrics.jsonl").stat().st_size > view_module.TAIL_BYTES
    assert figures(one) == KNOWN


@pytest.mark.parametrize("half", ["{", '{"train/step": 99, "train/lo', "\n", '"a', "\0\0"])
def test_a_line_half_written_is_not_taken_for_a_whole_one(tmp_path, half):
    one = running(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(half)
    assert figures(one) in ({}, KNOWN)


def test_what_is_not_known_yet_is_left_out_and_a_nan_is_not(tmp_path):
    assert figures(job(tmp_path, status="running")) == {}
    assert figures(running(tmp_path, lines=())) == {}
    losses = {"train/loss": None, "val/loss_fp32": None, "nonfinite": {"train/loss": "nan"}}
    known = figures(running(tmp_path, lines=[{**LINE, **losses}]))
    assert set(known) == {"step", "step_ms", "time", "train_loss"}
    assert known["train_loss"] == "nan"
    assert figures(running(tmp_path, total=None))["step"] == "40"
    assert "time" not in figures(running(tmp_path, total=None))


def test_a_running_job_shows_nothing_of_an_earlier_attempt(tmp_path):
    """Until its process has taken the folder over, which takes as long as it takes to load torch."""
    one = running(tmp_path, seconds=1.0, pid=7)
    write(one, status={"status": "completed", "total_steps": 100, "pid": 6})
    assert figures(one) == {}
    write(one, status={"status": "running", "total_steps": 100, "pid": 7})
    assert figures(one)["step"] == "40/100"


@pytest.mark.parametrize("status", ["completed", "diverged", "out_of_memory", "failed", "interrupted"])
def test_the_figures_of_a_job_that_has_ended_are_its_result_s(tmp_path, status):
    one = write(job(tmp_path, status=status, seconds=240.0), result=RESULT, lines=[LINE])
    figures_of_it = {"step": "400", "step_ms": "1.421", "train_loss": "0.0471", "val_loss": "0.1143"}
    assert figures(one) == {**figures_of_it, "time": "4 min"}
    assert figures(replace(one, before=True, seconds=None)) == {**figures_of_it, "time": "before"}


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"summary": null}', "{}"])
def test_a_damaged_result_has_no_figures(tmp_path, text):
    (tmp_path / "result.json").write_text(text)
    assert figures(job(tmp_path)) == {}


@pytest.mark.parametrize("status", ["waiting", "unsupported", "same", "not run", "checked", "elsewhere"])
def test_a_job_that_did_not_run_has_no_figures_of_another_call_s(tmp_path, status):
    assert figures(write(job(tmp_path, status=status), result=RESULT, lines=[LINE])) == {}


# --- the table -------------------------------------------------------------------------------

TITLES = ["model.hidden=[16,32] precision=fp16_unscaled seed=0", "precision=bf16 seed=1", "x" * 90]


def cells_under(text, header):
    """The words of the table's first column, put together again."""
    lines = text.split("\n")
    top = next(n for n, line in enumerate(lines) if header in line)
    edge = lines[top].index(header)
    rows = [line for line in lines[top + 1 :] if line.startswith(" ") or re.search(r"\S", line[:edge])]
    return "".join(line[:edge] for line in rows[: rows.index(next(r for r in rows if r.startswith("1 completed")))])


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("scale", [1, 1000])
def test_the_table_fits_and_every_title_and_figure_can_be_read(tmp_path, width, scale):
    line = {**LINE, "train/step": 41 * scale, "perf/elapsed_s": 20.0 * scale}
    jobs = [
        write(job(tmp_path / "0", TITLES[0], seconds=7.5 * scale), result={**RESULT, "step": 400 * scale}),
        running(tmp_path / "1", TITLES[1], [line], 150 * scale, seconds=3.0),
        write(job(tmp_path / "2", TITLES[2], "diverged", before=True), result=RESULT),
    ]
    text = summary(jobs, width=width)
    assert max(map(len, text.split("\n"))) <= width
    assert "…" not in text
    words = ["status", "ms/step", "train loss", "val loss", "diverged", "before", f"{41 * scale}/{150 * scale}"]
    words += [f"{400 * scale}", clock(7.5 * scale), f"~{clock(20.0 * scale / 41 * 109)}", "0.1143"]
    assert [word for word in words if word not in text] == []
    assert cells_under(text, "status").replace(" ", "") == "".join(TITLES).replace(" ", "")


def test_the_table_says_how_many_stand_how_and_what_time_is_left(tmp_path):
    states = ["completed", "completed", "failed", "running", "waiting", "waiting"]
    jobs = [job(tmp_path / str(n), f"seed={n}", state) for n, state in enumerate(states)]
    for one, seconds in zip(jobs, (100, 110, 120, 50), strict=False):
        one.seconds = seconds
    for places, left in ((1, "5 min"), (2, "2 min")):  # 60 s of the running one, 110 s for each that waits
        view = View(jobs, [], places, console())
        view.summary()
        assert f"2 completed, 1 failed, 1 running, 2 waiting; about {left} left" in said(view)


def test_a_bracket_is_no_markup(tmp_path):
    titles = ["model.hidden=[16,32]", "name=[red]", "x=[/bold]", "y=[link=http://a]b"]
    jobs = [job(tmp_path / "0", titles[0], "failed", reason="[Errno 2] no [/such] file")]
    jobs += [job(tmp_path / str(n), title) for n, title in enumerate(titles[1:], start=1)]
    jobs.append(job(tmp_path / "9", "z=[9]", "unsupported", reason="needs [bold]"))
    view = View(jobs, [], console=console())
    view.begin(["cpu: [red]"])
    view.summary()
    text = said(view)
    assert "cpu: [red]\nskipped: z=[9] (needs [bold])\n" in text
    table = text.partition("\njob")[2]
    assert all(title in table for title in titles)
    assert f"model.hidden=[16,32]: failed ([Errno 2] no [/such] file; see {tmp_path}/0/train.log)" in text


# --- live ------------------------------------------------------------------------------------


def many(tmp_path, now, title="seed={}", count=30):
    """`count` jobs, of which number `now` runs: all are over where that is `count`."""
    states = ["completed"] * now + (["running"] + ["waiting"] * (count - now - 1) if now < count else [])
    return [job(tmp_path / str(n), title.format(n), state) for n, state in enumerate(states)]


def shown_at(view):
    """The last frame of a live table drawn once; every frame must fit the terminal."""
    with view:
        view.update()
    for frame in frames(view):
        lines = frame.strip().split("\n")
        assert max(len(line.strip("\r")) for line in lines) <= view._console.width
        assert len(lines) <= view._console.height
    return frames(view)[-1]


@pytest.mark.parametrize("now", [0, 1, 14, 28, 29, 30])
@pytest.mark.parametrize("height", [5, 12, 24, 60])
def test_of_more_jobs_than_rows_those_around_the_running_one_are_shown(tmp_path, at_once, now, height):
    frame = shown_at(View(many(tmp_path, now), [], console=console(80, height, terminal=True)))
    shown = [int(n) for n in re.findall(r"seed=(\d+)", frame)]
    assert min(now, 29) in shown
    assert shown == list(range(shown[0], shown[-1] + 1))
    assert len(shown) >= min(30, height - 8)  # the room is used


@pytest.mark.parametrize("now", [0, 14, 29])
@pytest.mark.parametrize("height", [12, 24])
def test_the_running_one_is_shown_where_titles_take_several_rows(tmp_path, at_once, now, height):
    title = "model.hidden=[16,32] precision=fp16_unscaled trainer.steps=900 seed={}"
    frame = shown_at(View(many(tmp_path, now, title), [], console=console(80, height, terminal=True)))
    assert re.search(rf"seed={now}\b", frame)


def test_two_that_run_are_both_shown(tmp_path, at_once):
    jobs = many(tmp_path, 10)
    jobs[11].status = "running"
    view = View(jobs, [], 2, console(80, 12, terminal=True))
    assert len(re.findall(r"seed=1[01] +running", shown_at(view))) == 2


def test_the_live_table_is_drawn_at_most_once_a_second(tmp_path, monkeypatch):
    drawn = []
    view = View(many(tmp_path, 0, count=3), [], console=console(terminal=True))
    monkeypatch.setattr(view, "_table", lambda jobs: drawn.append(len(jobs)) or "table")
    for _ in range(5):
        view.update()
    assert drawn == [3]
    view.ended(view.jobs[0])  # is shown without delay
    view.update()
    assert drawn == [3, 3]


def test_on_a_terminal_the_table_tells_and_a_failure_is_told_at_once_as_well(tmp_path):
    view = View(many(tmp_path, 3, count=3), [], console=console(terminal=True))
    view.jobs[1].status, view.jobs[1].reason = "failed", "no"
    for one in view.jobs:
        view.ended(one)
    assert said(view) == f"[3/3] seed=1: failed (no; see {tmp_path}/1/train.log)\n"


def test_elsewhere_each_end_is_a_line_and_nothing_moves_the_cursor(tmp_path, at_once):
    view = View(many(tmp_path, 1, count=3), [], console=console(width=40))
    write(view.jobs[0], result=RESULT)
    with view:
        view.update()
        view.ended(view.jobs[0])
        view.update()
    assert said(view) == "[1/3] seed=0: completed: step 400, 1.421 ms a step, val loss 0.1143\n"  # not broken at 40


@pytest.mark.parametrize(("count", "words"), [(1, "1 job that is"), (2, "2 jobs that are")])
def test_jobs_that_are_run_elsewhere_are_in_the_table_or_else_in_a_line(tmp_path, at_once, count, words):
    for terminal in (False, True):
        jobs = many(tmp_path, 30)
        for number in range(count):
            jobs[number].status, jobs[number].reason = "elsewhere", f"pid {number}"
        view = View(jobs, [], console=console(80, 12, terminal=terminal))
        view.waits_for(jobs[:count])
        who = "; ".join(f"pid {number}" for number in range(count))
        assert said(view) == ("" if terminal else f"waiting for {words} run elsewhere ({who})\n")
    assert re.search(r"seed=0 +elsewhere", shown_at(view))
    jobs[20].status = "running"
    assert re.search(r"seed=20 +running", shown_at(View(jobs, [], console=console(80, 12, terminal=True))))


# --- once ------------------------------------------------------------------------------------


@pytest.mark.parametrize("terminal", [True, False])
def test_what_was_told_is_not_told_again(tmp_path, terminal):
    states = ["failed", "interrupted", "diverged", "failed", "not run", "unsupported", "same", "unsupported"]
    jobs = [job(tmp_path / str(n), f"seed={n}", state, reason=f"why {n}") for n, state in enumerate(states)]
    jobs[3].before = True
    jobs[7].reason = jobs[5].reason
    view = View(jobs, [], console=console(terminal=terminal))
    view.begin(["a note"])
    for one in jobs[:3]:
        view.ended(one)
    view.summary()
    text = said(view)
    assert [text.count(word) for word in ("a note", *(f"why {n}" for n in range(7)))] == [1] * 8
    assert "skipped: seed=5, seed=7 (why 5)\n" in text


def test_a_reason_that_many_jobs_share_is_told_once(tmp_path):
    jobs = many(tmp_path, 30)
    for one in jobs[5:]:
        one.status, one.reason = "not run", "interrupted before it began"
    assert summary(jobs).count("interrupted before it began") == 1


def test_what_to_do_next_is_told_where_there_is_something(tmp_path):
    jobs = many(tmp_path, 3, count=3)
    assert "The same command" not in summary(jobs)
    jobs[0].status, jobs[1].before = "failed", True
    write(jobs[0], status={"status": "running"})  # it was killed, and could not tell
    assert "1 of 3 jobs are left; the same command runs them." in summary(jobs)
    write(jobs[0], status={"status": "failed"})
    text = summary(jobs)
    assert "The same command with rerun=failed runs the failed ones again." in text
    assert "1 of 3 jobs had been run before and were left as they are." in text
    jobs[1].status, jobs[2].status = "not run", "interrupted"
    assert "2 of 3 jobs are left; the same command runs them." in summary(jobs)


@pytest.fixture
def led(monkeypatch, tmp_path):
    """Leads a sweep of two seeds whose jobs end as told; returns the exit code and what was written first."""

    def lead(statuses, *overrides):
        order = []
        words = [[f"seed={n}", f"paths.outputs={tmp_path}", "precision=fp32", *overrides] for n in (0, 1)]
        jobs = [(replace(composed(*w), model={"_target_": "mine.Net", "api_key": SECRET}), w) for w in words]

        def run_jobs(jobs, places, view):
            order.append("run")
            for one, status in zip(jobs, statuses, strict=True):
                one.status = status
                view.ended(one)
            return 7

        answer = Answer(precision=jobs[0][0].precision, device="cpu", notes=("a note",))
        monkeypatch.setattr(lead_module, "survey", lambda asked, try_input: [answer] * len(asked))
        monkeypatch.setattr(lead_module, "run_jobs", run_jobs)
        return lead_module.lead(jobs, lambda folder, secrets: order.append(secrets)), order

    return lead


def test_a_sweep_writes_its_command_first_and_tells_everything_once(led, capsys, tmp_path):
    assert led(["completed", "not run"], "name=n") == (7, [[SECRET] * 2, "run"])
    out = capsys.readouterr().out
    for line in ("a note\n", "seed=0: completed", "1 of 2 jobs are left", f"compare.py {tmp_path}/sweeps/n\n"):
        assert out.count(line) == 1, line


def test_a_check_writes_no_command_and_compares_nothing(led, capsys):
    assert led(["checked", "checked"], "check=true") == (7, ["run"])
    assert "compare" not in capsys.readouterr().out


# --- secrets ---------------------------------------------------------------------------------


@pytest.mark.parametrize("terminal", [True, False])
def test_no_secret_is_shown(tmp_path, monkeypatch, at_once, terminal):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    jobs = [
        job(tmp_path / "0", f"seed=0 +model.url=s3://{SECRET}/x", "failed", reason=f"401 for {SECRET} hf_abcdefgh"),
        job(tmp_path / "1", f"seed=1 {SECRET}", "running"),
        job(tmp_path / "2", f"seed=2 {SECRET}", "unsupported", reason="hf_abcdefgh"),
    ]
    view = View(jobs, [SECRET], console=console(terminal=terminal))
    view.begin([f"note of {SECRET}"])
    with view:
        view.update()
        view.ended(jobs[0])
    view.summary()
    text = said(view)
    assert SECRET not in text
    assert "hf_abcdefgh" not in text
    assert "note of [redacted]" in text
    assert "seed=1 [redacted]" in text
    assert "(401 for [redacted] [redacted]; see " in text


@pytest.mark.parametrize("title", ["model.password=abc seed=1", "seed=1 model.password=abc"])
def test_a_value_under_a_secret_key_is_not_shown_and_what_stands_beside_it_is(tmp_path, title):
    """As in environment.json, where each override is by itself."""
    shown, _ = titles([title.split(), ["seed=2"]])
    text = summary([job(tmp_path, shown, "diverged", reason="loss is nan")])
    assert "abc" not in text
    assert text.count("seed=1") == text.count("model.password=[redacted]") == 2
    assert "loss is nan" in text


def test_the_folder_of_a_job_is_told_as_it_is(tmp_path):
    one = job(tmp_path / "a [b] c", status="failed", reason="no")
    assert str(Path(tmp_path / "a [b] c" / "train.log")) in summary([one], width=30)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_reader_that_has_gone_is_no_reason_to_end_a_sweep(tmp_path, monkeypatch, at_once, terminal):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

        def isatty(self):
            return terminal

    monkeypatch.setattr("sys.stdout", Gone())
    view = View([job(tmp_path, status="failed", reason="no")], [])
    view.begin(["a note"])
    with view:
        view.update()
        view.ended(view.jobs[0])
    view.summary()
    assert view._console.quiet


@pytest.mark.parametrize("width", [40, 46, 58, 68, 79, 80])
def test_a_narrow_terminal_shows_which_job_stands_how(tmp_path, width):
    jobs = [write(job(tmp_path / str(n), f"precision=bf16 seed={n}", seconds=7.5), result=RESULT) for n in range(3)]
    text = summary(jobs, width=width)
    assert max(map(len, text.split("\n")[:12])) <= width
    assert "…" not in text
    assert text.count("completed") == 4
    first = "".join(line[: text.split("\n")[1].index("status")] for line in text.split("\n")[2:])
    assert first.replace(" ", "").count("precision=bf16seed=") == 3
    assert [name in text for name in ("train loss", "ms/step", "val loss", "time")] == [
        width >= 80,
        width >= 68,
        width >= 58,
        width >= 46,
    ]
