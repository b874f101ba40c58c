"""A comparison from W&B: its project through a server on loopback, its local files through the inspector."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from made_up import H100, V100, benchmark, put, put_benchmark, result
from precision_lab.config import ROOT
from precision_lab.errors import InputError
from precision_lab.report import sources
from precision_lab.report.compare import compare
from precision_lab.report.curves import Logs
from precision_lab.report.read import read
from precision_lab.tracking import inspector, server
from precision_lab.tracking.runs import Kept, Told, told_of
from typed_scripts import run
from wandb_project import in_full, node, recorded, serving

TESTS = Path(__file__).parent
FASTER = (1.5, 1.48, 1.52)
NOT_YET = "no result yet: still running, or killed"


def told(run_id, made=None, file="result.json", replaces=(), problem=""):
    text = None if made is None else json.dumps(made)
    return Told(f"wandb:team/project/{run_id}", run_id, file, text, list(replaces), problem)


@pytest.fixture
def project(monkeypatch):
    """What W&B tells: a list to fill."""
    runs = []
    monkeypatch.setattr(server, "runs_of", lambda asked, kept: runs)
    return runs


# --- what is read, of whatever W&B tells -------------------------------------------------------------------------


def test_a_project_s_runs_and_benchmarks_are_compared_as_those_of_folders(tmp_path, project):
    for arm in ("fp32", "bf16"):
        project.append(told(arm, made := result(arm, machine=H100)))
        put(tmp_path / arm, made)
    project.append(told("b", benchmark(H100, bf16=FASTER), "benchmark.json"))
    put_benchmark(tmp_path / "b", benchmark(H100, bf16=FASTER))
    of_wandb, of_folders = read(["wandb:team/project"]), read([tmp_path])
    assert [run.folder for run in of_wandb.runs] == ["wandb:team/project/fp32", "wandb:team/project/bf16"]
    assert of_wandb.benchmarks[0].folder == "wandb:team/project/b"
    assert of_wandb.sources == ["wandb:team/project"]
    logs = Logs(compare(of_wandb)[0])
    reason = "read from W&B, which tells the result alone, and no metrics.jsonl"
    assert logs.problems == [(f"wandb:team/project/{arm}", reason) for arm in ("fp32", "bf16")]
    rows = [compare(found)[0].rows for found in (of_wandb, of_folders)]
    assert [row.figures for row in rows[0]] == [row.figures for row in rows[1]]
    assert rows[0][1].timing.ratio.value == 1.5


def test_what_has_no_record_is_named_and_other_job_types_are_passed_over(project):
    project += [told("good", result()), told("killed", problem=NOT_YET), told("diagnosis", file=None, problem=NOT_YET)]
    project += [told("bad", {"schema": 1}), told("nonsense", {}, "benchmark.json")]
    found = read(["wandb:team/project"])
    assert [run.folder for run in found.runs] == ["wandb:team/project/good"]
    place = "wandb:team/project"
    assert found.skipped[0] == (f"{place}/killed", NOT_YET)
    assert [folder for folder, _ in found.skipped] == [f"{place}/killed", f"{place}/bad", f"{place}/nonsense"]


def test_a_run_that_another_took_the_place_of_counts_in_neither_way(project):
    project += [told("first", problem=NOT_YET), told("second", result(), replaces=["zero"])]
    project += [told("third", result() | {"finished": 5.0}, replaces=["first", "second"])]
    found = read(["wandb:team/project"])
    assert ([run.folder for run in found.runs], found.skipped) == (["wandb:team/project/third"], [])


def test_the_same_run_in_a_folder_and_in_wandb_counts_once_and_the_first_source_wins(tmp_path, project):
    put(tmp_path / "a", made := result())
    put_benchmark(tmp_path / "b", timed := benchmark(bf16=FASTER))
    project += [told("a", made), told("b", timed, "benchmark.json"), told("other", result(seed=1))]
    found = read([tmp_path, "wandb:team/project"])
    assert [os.path.basename(run.folder) for run in found.runs] == ["a", "other"]
    assert not found.runs[0].folder.startswith("wandb:")
    assert len(found.benchmarks) == 1
    turned = read(["wandb:team/project", tmp_path])
    assert [run.folder for run in turned.runs] == ["wandb:team/project/a", "wandb:team/project/other"]
    assert len(turned.benchmarks) == 1


@pytest.mark.parametrize(
    "change", [{"host": "there"}, {"finished": 7.0}, {"experiment_signature": "76543210"}, {"seed": 3}, {"arm": "x"}]
)
def test_a_run_that_differs_is_another_one(project, change):
    project += [told("a", result()), told("b", result() | change)]
    assert len(read(["wandb:team/project"]).runs) == 2


def test_a_copy_of_a_folder_still_counts_as_a_run(tmp_path):
    put(tmp_path / "a")
    put(tmp_path / "b")
    assert len(read([tmp_path]).runs) == 2


def test_conditions_choose_among_wandb_s_runs(project):
    project += [told(str(seed), result(seed=seed)) for seed in range(3)]
    assert [run.seed for run in read(["wandb:team/project"], ["seed=1,2"]).runs] == [1, 2]


@pytest.mark.parametrize(
    ("config", "summary", "expected"),
    [
        ({}, {}, (None, [], NOT_YET)),
        ({"replaces": ["a", 5]}, {"result_json": "{}"}, ("{}", ["a"], "")),
        ({"replaces": "abc"}, {"result_json": {"a": 1}}, (None, [], NOT_YET)),
    ],
)
def test_nothing_in_wandb_s_words_is_taken_on_trust(config, summary, expected):
    made = told_of("place", "id", "train", config, summary)
    assert (made.text, made.replaces, made.problem) == expected


@pytest.mark.parametrize(
    ("job_type", "file"), [("train", "result.json"), ("benchmark", "benchmark.json"), ("compare", None), (["x"], None)]
)
def test_a_job_type_says_which_file_it_is(job_type, file):
    assert told_of("place", "id", job_type, {}, {}).file == file


# --- how sources are written -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "conditions"),
    [
        ("", []),
        ("?precision=bf16,fp16", [{"config.precision": {"$in": ["bf16", "fp16"]}}]),
        ("?seed=0", [{"config.seed": {"$in": [0, "0"]}}]),
        ("?compile=false", [{"config.compile": {"$in": [False, "false"]}}]),
        ("?emulate=null", [{"config.emulate": {"$in": [None, "null"]}}]),
        ("?torch_version=2.14.1+cu128", [{"config.torch_version": {"$in": ["2.14.1+cu128"]}}]),
        ("?config.trainer.steps=200", [{"config.config.trainer.steps": {"$in": [200, "200"]}}]),
        ("?state=finished&group=night", [{"state": {"$in": ["finished"]}}, {"group": {"$in": ["night"]}}]),
        ("?tag=a&tags=0", [{"tags": {"$in": ["a"]}}, {"tags": {"$in": ["0"]}}]),
        ("?display_name=a%2Cb%26c=d", [{"display_name": {"$in": ["a,b&c=d"]}}]),
        ("?host=NaN,1e999,[1]", [{"config.host": {"$in": ["NaN", "1e999", "[1]"]}}]),
    ],
)  # fmt: skip
def test_filters_become_mongodb_s(query, conditions):
    asked = server.project_of(f"wandb:team/my project{query}")
    assert (asked.entity, asked.project) == ("team", "my project")
    assert asked.filters == ({"$and": conditions} if conditions else {})
    json.dumps(asked.filters, allow_nan=False)


HOW = "write wandb:entity/project, or wandb:entity/project?precision=bf16&seed=0,1 to choose among its runs."


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("wandb:foo", f"wandb:foo names no W&B project; {HOW}"),
        ("wandb:", f"wandb: names no W&B project; {HOW}"),
        ("wandb:a/b/c", f"wandb:a/b/c names no W&B project; {HOW}"),
        ("wandb:a/b#c", f"wandb:a/b#c names no W&B project; {HOW}"),
        ("wandb:a/b?", f"wandb:a/b?: nothing is no filter; {HOW}"),
        ("wandb:a/b?seed", f"wandb:a/b?seed: seed is no filter; {HOW}"),
        ("wandb:a/b?seed=", f"wandb:a/b?seed=: seed= is no filter; {HOW}"),
        ("wandb:a/b?seed=0,,1", f"wandb:a/b?seed=0,,1: seed=0,,1 is no filter; {HOW}"),
        ("wandb:a/b?=0", f"wandb:a/b?=0: =0 is no filter; {HOW}"),
        ("s3://bucket", f"s3://bucket is not a folder; {sources.KINDS}."),
        ("wandb-offline:",
         "wandb-offline: names no folder; write wandb-offline:DIR, such as wandb-offline:outputs/wandb."),
        ("wandb-offline:~no one/x",
         "wandb-offline:~no one/x is not a folder; name one of W&B's files, such as outputs/wandb."),
        ("wandb-offline:/no", "wandb-offline:/no is not a folder; name one of W&B's files, such as outputs/wandb."),
        ("wandb-offline:{empty}",
         "wandb-offline:{empty} holds no W&B file; name a folder that does, such as outputs/wandb."),
    ],
)  # fmt: skip
def test_a_source_that_is_none_is_refused_before_any_is_read(tmp_path, monkeypatch, source, sentence):
    monkeypatch.setattr(server, "runs_of", lambda *_: pytest.fail("read"))
    with pytest.raises(InputError) as refused:
        read(["wandb:team/project", source.format(empty=tmp_path)])
    assert str(refused.value) == sentence.format(empty=tmp_path)


def test_a_local_wandb_folder_is_found_by_its_own_name_or_the_one_above_and_a_link_counts_once(tmp_path):
    for name in ("offline-run-20261101_000000-a", "run-20261101_000001-b", "other-run-1"):
        (tmp_path / "wandb" / name).mkdir(parents=True)
        (tmp_path / "wandb" / name / f"run-{name[-1]}.wandb").touch()
    (tmp_path / "wandb" / "latest-run").symlink_to("run-20261101_000001-b")
    (tmp_path / "wandb" / "run-20261101_000002-c").symlink_to("run-20261101_000001-b")
    names = ["run-a.wandb", "run-b.wandb"]
    assert [file.name for file in inspector.files_in(tmp_path)] == names
    assert [file.name for file in inspector.files_in(tmp_path / "wandb")] == names
    assert [file.name for file in inspector.files_in(tmp_path / "wandb" / "run-20261101_000001-b")] == names[1:]


def test_a_tilde_after_the_colon_is_home(tmp_path, monkeypatch):
    (tmp_path / "w" / "offline-run-20261101_000000-a").mkdir(parents=True)
    (tmp_path / "w" / "offline-run-20261101_000000-a" / "run-a.wandb").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sources.source_of("wandb-offline:~/w").folder == tmp_path / "w"


# --- what is kept ------------------------------------------------------------------------------------------------


def test_what_was_told_is_found_again_under_its_key_and_stamp_alone(tmp_path):
    kept, one = Kept(tmp_path / "cache"), told("a", result(), replaces=["b"])
    assert kept.find(one.place, "key", [1]) is None
    kept.keep(one, "key", [1])
    assert Kept(tmp_path / "cache").find(one.place, "key", [1]) == one
    assert kept.find("elsewhere", "key", [1]).place == "elsewhere"
    assert kept.find(one.place, "key", [2]) is None
    assert kept.find(one.place, "another", [1]) is None
    assert Kept(None).find(one.place, "key", [1]) is None


@pytest.mark.parametrize("key", ["../../x", "wandb:a/b/..", "\ud800", "x" * 5000])
def test_no_key_leads_out_of_the_cache(tmp_path, key):
    Kept(tmp_path / "cache").keep(told("a"), key, [])
    assert [path.parent for path in tmp_path.rglob("*.json")] == [tmp_path / "cache"]


@pytest.mark.parametrize("change", ["cut", "other key", "text", "replaces", "file", "more", "list", "empty"])
def test_what_is_damaged_counts_as_not_kept(tmp_path, change):
    kept, one = Kept(tmp_path), told("a", result())
    kept.keep(one, "key", [1])
    (file,) = tmp_path.iterdir()
    values = json.loads(file.read_text())
    match change:
        case "other key":
            values["key"] = "yek"
        case "more":
            values["told"]["more"] = 1
        case "list":
            values["told"] = [1]
        case "text" | "replaces" | "file":
            values["told"][change] = 5
    text = json.dumps(values)
    file.write_text({"cut": text[: len(text) // 2], "empty": ""}.get(change, text))
    assert kept.find(one.place, "key", [1]) is None
    kept.keep(one, "key", [1])
    assert kept.find(one.place, "key", [1]) == one


def test_a_cache_that_cannot_be_written_is_no_trouble(tmp_path):
    (tmp_path / "cache").write_text("a file")
    Kept(tmp_path / "cache").keep(told("a"), "key", [1])
    assert (tmp_path / "cache").read_text() == "a file"


# --- the command, as a person runs it ----------------------------------------------------------------------------

COMPARE = """
import sys
from pathlib import Path
from typed_scripts import module
compare = module("compare.py")
compare.ROOT = Path(sys.argv[1])  # where the cache and the default folder are
sys.exit(compare.main(sys.argv[2:]))
"""


def python(code, *words, limit_s=120, **variables):
    """The finished process, with nothing of W&B's in its environment but `variables`."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    path = {"PYTHONPATH": f"{ROOT / 'src'}:{TESTS}", "COLUMNS": "10000", "OMP_NUM_THREADS": "1"}
    command, environment = [sys.executable, "-c", code, *map(str, words)], inherited | path | variables
    return subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s
    )


def compared(root, *words, **variables):
    """What is printed and written, file by file."""
    into = root / "compared"
    done = python(COMPARE, root, *words, "--into", into, **variables)
    assert (done.returncode, done.stderr) == (0, "")
    said = {name: (into / f"comparison.{name}").read_text() for name in ("md", "csv", "json")}
    return said | {"terminal": done.stdout}


def of_project(count, **words):
    """Runs of one project as the API has them."""
    records = [json.dumps(result(seed=n)) for n in range(count)]
    return [in_full(f"run{n}", {"seed": n}, {"result_json": text}, **words) for n, text in enumerate(records)]


def seeds(said):
    return [arm["seeds"] for one in json.loads(said["json"])["comparisons"] for arm in one["arms"]]


def test_a_project_is_read_in_pages_once_and_then_only_what_is_new(tmp_path):
    others = [node(f"other{n}", jobType="diagnose") for n in range(20)]
    going = in_full("going", {}, {}, state="running")
    with serving([*of_project(100), *others, going]) as project:
        first = compared(tmp_path, "wandb:team/project", **project.environment)
        assert seeds(first) == [list(range(100))]
        assert f"left out, {NOT_YET}: wandb:team/project/going" in first["terminal"]
        assert [kind for kind, _ in project.asked] == ["light"] * 3 + ["full"] * 3
        assert [asked["perPage"] for _, asked in project.asked] == [50] * 6
        names = [json.loads(asked["filters"])["name"]["$in"] for kind, asked in project.asked if kind == "full"]
        assert [len(one) for one in names] == [50, 50, 1]

        project.asked.clear()
        second = compared(tmp_path, "wandb:team/project", **project.environment)
        assert second == first
        asked_in_full = [json.loads(asked["filters"]) for kind, asked in project.asked if kind == "full"]
        assert asked_in_full == [{"name": {"$in": ["going"]}}]  # which may have come to its end

        project.asked.clear()
        project.nodes[-1] = in_full("going", {}, {"result_json": json.dumps(result(seed=100))})
        project.nodes[7] |= {"heartbeatAt": "2026-11-02T00:00:00"}
        kept = (tmp_path / "outputs" / "cache" / "wandb").iterdir()
        (damaged,) = [file for file in kept if '/run9"' in file.read_text()]
        damaged.write_text("{")
        third = compared(tmp_path, "wandb:team/project", **project.environment)
        assert seeds(third) == [list(range(101))]
        (again,) = [json.loads(asked["filters"])["name"]["$in"] for kind, asked in project.asked if kind == "full"]
        assert again == ["run7", "run9", "going"]


def test_filters_reach_the_server_and_choose_there(tmp_path):
    runs = of_project(4)
    runs[1] |= {"tags": ["night", "cuda"]}
    runs[2] |= {"tags": ["night"], "state": "failed"}
    with serving(runs) as project:
        said = compared(tmp_path, "wandb:team/project?tag=night&seed=0,1,2&state=finished", **project.environment)
        assert seeds(said) == [[1]]
        assert json.loads(project.asked[0][1]["filters"]) == {"$and": [
            {"tags": {"$in": ["night"]}}, {"config.seed": {"$in": [0, "0", 1, "1", 2, "2"]}},
            {"state": {"$in": ["finished"]}},
        ]}  # fmt: skip
        done = python(COMPARE, tmp_path, "wandb:team/project?sead=0", **project.environment)
    assert done.returncode == 2
    assert "wandb:team/project?sead=0 fits no run of the project; keys are state, group, tag" in done.stderr
    assert list((tmp_path / "outputs").iterdir()) == [tmp_path / "outputs" / "cache"]


def test_the_files_of_a_project_alone_go_to_a_folder_of_its_own(tmp_path):
    with serving(of_project(2)) as project:
        done = python(COMPARE, tmp_path, "wandb:team/project", **project.environment)
        two = python(COMPARE, tmp_path, "wandb:team/project", "wandb:team/other", **project.environment)
        put(tmp_path / "here" / "a", seed=5)
        beside = python(COMPARE, tmp_path, "wandb:team/project", tmp_path / "here", **project.environment)
    assert done.returncode == 0
    place = tmp_path / "outputs" / "comparisons" / "team_project"
    assert sorted(file.name for file in place.iterdir()) == [f"comparison.{name}" for name in ("csv", "json", "md")]
    assert two.returncode == 2
    assert "wandb:team/project, wandb:team/other: name a folder for the files with --into." in two.stderr
    assert beside.returncode == 0
    assert (tmp_path / "here" / "comparison.md").is_file()


READ_EACH = """
import os, sys, time
from precision_lab.errors import InputError
from precision_lab.report.read import read
for word in sys.argv[1:]:
    os.environ["WANDB_BASE_URL"] = f"http://127.0.0.1:{word}" if word.isdigit() else word
    start = time.monotonic()
    try:
        print("read", read(["wandb:team/project"]).sources)
    except InputError as error:
        print(f"{time.monotonic() - start:.1f} {error}")
assert "WANDB_DIR" not in os.environ
"""


def said_of(faults, more, folder, **variables):
    """What is said of each faulty server, and after how many seconds; one process asks them all."""
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(serving(of_project(1), fault)) for name, fault in faults.items()}
        words = {name: str(one.server_address[1]) for name, one in servers.items()} | more
        done = python(READ_EACH, *words.values(), WANDB_API_KEY="0123456789" * 4, TMPDIR=str(folder), **variables)
    assert done.stderr == ""
    assert list(folder.iterdir()) == []  # W&B's empty folders are gone
    lines = [line.split(" ", 1) for line in done.stdout.splitlines()]
    return {name: (float(seconds), text) for name, (seconds, text) in zip(words, lines, strict=True)}


def twice(handler, answer):
    answer["project"]["runs"]["edges"] *= 2
    handler.send({"data": answer})


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """Of servers that answer."""
    answers = {
        "error": lambda handler, _: handler.send({"errors": [{"message": "permission denied"}]}),
        "forbidden": lambda handler, _: handler.send({"errors": [{"message": "permission denied"}]}, 403),
        "unknown": lambda handler, _: handler.send({"data": {"project": None}}),
        "nothing": lambda handler, _: handler.send({"data": None}),
        "list": lambda handler, _: handler.send([1]),
        "page": lambda handler, _: handler.send(b"<html>Welcome</html>"),
        "odd": lambda handler, _: handler.send({"data": {"project": {"runs": 5}}}),
        "no names": lambda handler, _: handler.send({"data": {"project": {"runs": {"edges": [{"node": {}}]}}}}),
        "twice": twice,
    }
    return said_of(answers, {"no address": "nonsense"}, tmp_path_factory.mktemp("tmp"))


@pytest.fixture(scope="module")
def silences(tmp_path_factory):
    """Of servers that do not, asked with little patience."""
    faults = {
        "down": lambda handler, _: handler.send({}, 503),
        "silent": lambda *_: time.sleep(30),
    }
    return said_of(faults, {"refuses": "9"}, tmp_path_factory.mktemp("tmp"), WANDB_HTTP_TIMEOUT="1")


SILENT = "its server does not answer. WANDB_BASE_URL says which one it is, WANDB_HTTP_TIMEOUT how long to wait."
UNKNOWN = "its server knows no project team/project, or does not show it to this login."


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("error", "permission denied."),
        ("forbidden", "permission denied."),
        ("unknown", UNKNOWN),
        ("nothing", UNKNOWN),
        ("list", "json: cannot unmarshal array into Go value of type graphql.Response."),
        ("page", "invalid character '<' looking for beginning of value."),
        ("odd", "its server's answer is none of W&B's (AttributeError: 'int' object has no attribute 'get')."),
        ("no names", "its server's answer is none of W&B's (KeyError: 'name')."),
        ("twice", "its server sends the same run twice."),
        ("no address", "W&B's own settings are wrong (base_url: Input should be a valid URL, relative URL without"),
    ],
)  # fmt: skip
def test_a_server_s_fault_is_one_sentence(refusals, fault, sentence):
    assert refusals[fault][1].startswith(f"wandb:team/project cannot be read: {sentence}")


@pytest.mark.parametrize("fault", ["down", "silent", "refuses"])
def test_a_server_that_does_not_answer_is_waited_for_as_long_as_wandb_is_told_to(silences, fault):
    assert silences[fault][1] == f"wandb:team/project cannot be read: {SILENT}"


@pytest.mark.slow  # of a time
def test_no_silence_costs_much_more_than_that(silences):
    assert max(seconds for seconds, _ in silences.values()) < 6


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({}, "there is no W&B login here. Run `wandb login`, or set WANDB_API_KEY."),
        ({"WANDB_API_KEY": "0123"}, "WANDB_API_KEY invalid: API key must have 40+ characters, has 4."),
    ],
)
def test_without_a_login_nothing_is_asked(tmp_path, variables, sentence):
    with serving([]) as project:
        server_alone = {"WANDB_BASE_URL": project.environment["WANDB_BASE_URL"], "NETRC": str(tmp_path / "netrc")}
        done = python(COMPARE, tmp_path, "wandb:team/project", **server_alone | variables)
        assert project.asked == []
    assert (done.returncode, done.stderr) == (2, f"precision-lab: wandb:team/project cannot be read: {sentence}\n")


def test_a_bad_source_is_refused_by_the_command_without_loading_wandb(tmp_path):
    done = run("compare.py", "wandb:foo")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("precision-lab: wandb:foo names no W&B project; write wandb:entity/project")


# --- the same comparison three times -----------------------------------------------------------------------------

NOT_RECORDED = """
import os, sys
from pathlib import Path
from precision_lab.config import WandbConfig, WandbMode
from precision_lab.tracking.mirror import Mirror
from precision_lab.tracking.of_folder import FolderMirror
outputs, asked = Path(sys.argv[1]), WandbConfig(WandbMode.offline, "project", None, [])
place, words = outputs / "sweeps" / "night" / "a_killed", {"job_type": "train", "config": {}}
killed = FolderMirror(place, outputs, asked, name="a_killed", **words)
killed.abandon("interrupted", "killed")
Mirror(asked, outputs, name="diagnosis", job_type="diagnose", config={"seed": 0}).finish("completed", None, {})
"""


def fleet(outputs, arms, count):
    """Made-up runs on two machines, some of which went wrong, and a benchmark; the last one is older than its twin."""
    night = outputs / "sweeps" / "night"
    (night / "a_killed").mkdir(parents=True)
    (night / "a_killed" / "status.json").write_text('{"status": "running"}')
    finished = 1_000_000.0
    for place, machine in (("here", H100), ("there", V100)):
        for n, arm in enumerate(arms):
            for seed in range(count):
                finished += 1.25
                figures = {"step_ms_p50": 2.0 / (n + 1) + seed / 7e3, "val_loss_fp32": 0.5 + n * 1e-4 + seed * 1e-2 / 3}
                if (seed, arm) == (1, "fp16"):
                    figures = {"status": "diverged", "reason": "the loss is not finite", "val_loss_fp32": None}
                if (seed, arm) == (1, "tf32") or (place, seed, arm) == ("there", 1, "bf16"):
                    figures = {"status": "out_of_memory", "reason": "asked for 2 GiB", "samples_per_s": None}
                made = result(arm, seed, machine, **figures) | {"host": place, "finished": finished}
                put(night / f"{place}_{arm}_s{seed}", made)
    put(night / "there_older", result("fp32", 0, V100, step_ms_p50=9.0) | {"host": "there", "finished": 5.0})
    put(night / "z_infinite", result("fp32", 90, V100, samples_per_s=float("inf")) | {"host": "there"})
    timed = benchmark(H100, bf16=FASTER) | {"host": "here"}
    timed["config"] |= {"precision": timed["arms"]["fp32"]["precision"]}
    put_benchmark(outputs / "benchmarks" / "2026-11-01" / "night", timed)


def thrice(folder, arms, count, again=False):
    """What is said of the same runs, read from their folders, from W&B's files and from its server; what was asked.

    `again`: W&B's a second time, from what was kept.
    """
    outputs = folder / "outputs"
    fleet(outputs, arms, count)
    done = python(NOT_RECORDED, outputs)
    assert (done.returncode, done.stderr) == (0, "")
    mirrored = subprocess.run(
        [sys.executable, ROOT / "scripts" / "mirror.py", outputs / "sweeps", outputs / "benchmarks"], text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "WANDB_MODE": "offline"}, capture_output=True, timeout=600,
    )  # fmt: skip
    results = 2 * len(arms) * count + 3
    assert f"{results} mirrored" in mirrored.stdout, mirrored.stdout + mirrored.stderr
    said = [compared(folder, outputs / "sweeps", outputs / "benchmarks")]
    said += [compared(folder, f"wandb-offline:{outputs}") for _ in range(1 + again)]
    with serving(recorded(outputs / "wandb")) as project:
        said += [compared(folder, "wandb:team/project", **project.environment) for _ in range(1 + again)]
        asked = project.asked
    return [{name: with_places_made_equal(outputs, text) for name, text in one.items()} for one in said], asked


def with_places_made_equal(outputs, text):
    """A run's folder, its .wandb file's and its place in W&B become the name that all three have in them."""
    text = text.replace("\\", "")  # of Markdown
    for place in (r"/sweeps/night/(\w+)", r"/wandb/offline-run-\d+_\d+-(\w+)-[0-9a-f]{15}"):
        text = re.sub(re.escape(str(outputs)) + place, r"<\1>", text)
    return re.sub(r"wandb:team/project/(\w+)-[0-9a-f]{15}", r"<\1>", text)


def check(said, arms, count):
    results = 2 * len(arms) * count + 3  # with the older one, the infinite one and the benchmark
    for one in said[1:]:
        assert one == said[0]
    made = json.loads(said[0]["json"])
    assert [(one["fingerprint"]["model"], len(one["arms"])) for one in made["comparisons"]] == [
        ("Made-up H100", len(arms)), ("Made-up V100", len(arms))
    ]  # fmt: skip
    places = [place for one in made["comparisons"] for arm in one["arms"] for place in arm["folders"]]
    assert len(places) == results - 2
    assert all(re.fullmatch(r"<\w+>", place) for place in places)
    (bf16,) = [arm for arm in made["comparisons"][0]["arms"] if arm["arm"] == "bf16"]
    assert bf16["against_reference"]["speed_ratio"]["mean"] == bf16["timing"]["ratio"]["value"] == 1.5
    assert made["skipped"] == [
        {"folder": "<a_killed>", "reason": NOT_YET},
        {"folder": "<z_infinite>", "reason": "result.json is damaged: no JSON"},
    ]
    assert all(status in said[0]["terminal"] for status in ("diverged", "out_of_memory", "completed"))


def test_folders_wandb_s_files_and_its_server_give_the_same_tables(tmp_path):
    arms = ["fp32", "bf16", "fp16"]
    said, _ = thrice(tmp_path, arms, 2)
    check(said, arms, 2)


@pytest.mark.slow
def test_so_do_250_runs_in_pages(tmp_path):
    arms = ["fp32", "tf32", "bf16", "fp16", "bf16_pure"]
    said, asked = thrice(tmp_path, arms, 25, again=True)
    check(said, arms, 25)
    assert [kind for kind, _ in asked] == ["light"] * 6 + ["full"] * 6 + ["light"] * 6  # 250, and five beside them


def test_what_the_inspector_cannot_read_is_named_and_so_is_what_was_killed_at_once(tmp_path):
    for name, text in (("a", b""), ("b", b"no W&B file at all" * 100)):
        (tmp_path / f"offline-run-20261101_000000-{name}").mkdir()
        (tmp_path / f"offline-run-20261101_000000-{name}" / f"run-{name}.wandb").write_bytes(text)
    found = read([f"wandb-offline:{tmp_path}"], cache=tmp_path / "cache")
    place = f"{tmp_path}/offline-run-20261101_000000"
    assert found.skipped[0] == (f"{place}-a", NOT_YET)
    folder, reason = found.skipped[1]
    assert folder == f"{place}-b"
    assert re.match(r"W&B's inspector cannot read its file \(transactionlog: bad header: .*\)$", reason)
    assert len(list((tmp_path / "cache").iterdir())) == 1  # an unread one is asked for again


@pytest.mark.parametrize(
    ("program", "reason"), [("raise SystemExit('broken')", "broken"), ("import time; time.sleep(30)", "no answer")]
)
def test_an_inspector_that_does_not_work_is_told_of_and_not_waited_for(tmp_path, monkeypatch, program, reason):
    monkeypatch.setattr(inspector, "_TELL_EACH", program)
    monkeypatch.setattr(inspector, "PATIENCE_S", 1)
    assert inspector._inspected([tmp_path / "a", tmp_path / "b"]) == [reason, "no answer"]


def test_only_files_that_have_changed_are_inspected_again(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / f"offline-run-20261101_000000-{name}").mkdir()
        (tmp_path / f"offline-run-20261101_000000-{name}" / f"run-{name}.wandb").touch()
    seen = []

    def inspected(files):
        seen.extend(file.name for file in files)
        text = {"result_json": json.dumps(result(seed=len(seen)))}
        return [{"config": {"job_type": "train"}, "summary": text} for _ in files]

    monkeypatch.setattr(inspector, "_inspected", inspected)
    for _ in range(2):
        assert len(inspector.runs_in(tmp_path, Kept(tmp_path / "cache"))) == 2
    assert sorted(seen) == ["run-a.wandb", "run-b.wandb"]
    seen.clear()
    (tmp_path / "offline-run-20261101_000000-b" / "run-b.wandb").write_text("more")
    inspector.runs_in(tmp_path, Kept(tmp_path / "cache"))
    assert seen == ["run-b.wandb"]
