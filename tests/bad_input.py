"""Wrong input for train.py, made from a seed: each case with its kind and with what the answer must name.

Knows by itself which values a key takes, so that a range that is missing from the schema is found. What may be legal
after all (two equal words, an odd text) is composed first and left out if it can be: see `may_be_legal`.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from precision_lab.config import compose

LONG = "x" * 5000
DEEP = "[" * 200 + "1" + "]" * 200


@dataclass(frozen=True)
class Bad:
    """Words of a command line that cannot be run. One of `names` must stand in the sentence about them."""

    kind: str
    words: tuple[str, ...]
    names: tuple[str, ...]
    may_be_legal: bool = False


# --- what keys take ----------------------------------------------------------------------------------------------

WHOLE = {  # the first value below the range, and the first above it or None
    "seed": (-1, 2**32),
    "trainer.batch_size": (0, 2**31),
    "trainer.accumulation": (0, 2**31),
    "trainer.log_every": (0, 2**31),
    "trainer.workers": (-1, 10**6),
    "meter.warmup_steps": (-1, 2**31),
    "precision.growth_interval": (0, 2**31),
    "precision.max_consecutive_skips": (0, 2**31),
}
WHOLE_OR_NULL = {
    "trainer.steps": (0, 2**31),
    "trainer.eval_every": (0, 2**31),
    "trainer.checkpoint_every": (0, 2**31),
    "device.threads": (0, 10**6),
}
NUMBERS = {
    "verdict.loss_margin": ("0", "-0.1", "1", "2"),
    "precision.init_scale": ("0", "-1", "0.5", "1e39"),
    "precision.min_scale": ("0", "-1", "1e6"),
    "precision.weight_noise": ("-1e-9", "-1", "2"),
}
NUMBERS_OR_NULL = {
    "trainer.grad_clip": ("0", "-1"),
    "trainer.checkpoint_minutes": ("0", "-1"),
    "device.memory_budget_gib": ("0", "-1", "1e308"),
}
FLAGS = ("check", "precision.grad_scaling", "device.channels_last", "device.compile", "probe.memory")
CHOICES = (
    *("on_error", "on_unsupported", "rerun", "precision.param_dtype", "precision.float32_matmul"),
    *("precision.float32_conv", "device.type", "wandb.mode"),
)
CHOICES_OR_NULL = ("precision.autocast_dtype", "precision.emulate")
TEXTS = ("wandb.project", "paths.root", "paths.outputs", "paths.data", "precision.name")
TEXTS_OR_NULL = ("name", "wandb.group")
LISTS = ("tags", "precision.fp32_modules", "precision.fp32_ops")
GROUPS = ("precision", "model", "task", "dataset", "optimizer", "scheduler", "device", "trainer", "wandb")
CLOSED = ("precision", "device", "trainer", "wandb")  # groups whose keys are fixed
SECTIONS = ("meter", "verdict", "probe", "paths")
GPT = ("model=gpt", "dataset=synthetic_tokens")
TEXT = ("model=gpt", "dataset=stdlib_text")
IMAGES = ("model=cnn", "dataset=synthetic_images")

NOT_WHOLE = ("many", "1.5", "nan", "inf", "-inf", "1e400", "[1]", "{a:1}", "''", "true", "1e5", "'1 2'", "0x10")
NOT_A_NUMBER = ("much", "[0.5]", "{a:0.5}", "''", "true", "1.2.3", "'0,5'")
NOT_FINITE = ("nan", "inf", "-inf", "1e400", "-1e400", "1" + "0" * 400)
NOT_A_FLAG = ("maybe", "nan", "0.5", "[true]", "{a:true}", "''", "'true false'")
NOT_A_CHOICE = ("nope", "[nope]", "{a:b}", "''", "1.5", "nan", "true", "'ieee,tf32'")
NOT_TEXT = ("[a]", "{a:b}", "[]", "{}")
NOT_A_LIST = ("a", "5", "nan", "true", "{a:b}", "''", "'[a'", "[[a]]", "[{a:b}]")

# Arguments of what is shipped: (words that choose it, key, values it does not take)
_SIZE = ("0", "-1", "1.5", "many", "nan", "inf", "[4]", "{a:1}", "''", "true", "1" + "0" * 40)
_SIZE_NO_NULL = (*_SIZE, "null")
_SHARE = ("-0.1", "1.5", "much", "nan", "inf", "[0.1]", "''", "null", "true")
_INNER = ("0", "1", *_SHARE)  # neither all nor nothing
_FINITE = ("-0.1", "much", "nan", "inf", "[0.1]", "''", "null", "true", "1e400")
_FLAG = ("maybe", "2", "nan", "[true]", "''")
ARGUMENTS = (
    ((), "model.hidden", ("5", "null", "[0]", "[-1]", "[1.5]", "[a]", "[null]", "{a:1}", "nan", "[[64]]", "''")),
    (IMAGES, "model.widths", ("5", "null", "[]", "[0]", "[-1]", "[a]", "[1.5]", "{a:1}", "nan", "[[64]]")),
    *((GPT, f"model.{key}", _SIZE_NO_NULL) for key in ("layers", "heads", "width")),
    (GPT, "model.dropout", ("1", *_SHARE)),
    (GPT, "model.context", _SIZE),
    (GPT, "dataset.samples", ("4", *_SIZE_NO_NULL)),
    (GPT, "dataset.vocab_size", ("1", *_SIZE)),
    (GPT, "dataset.seed", ("-1", "1.5", "many", "nan", "null", "1" + "0" * 30)),
    ((), "dataset.train_fraction", _INNER),
    ((), "dataset.channels", _SIZE),
    ((), "dataset.image_size", _SIZE),
    ((), "model.num_classes", _SIZE),
    (IMAGES, "dataset.samples", ("4", *_SIZE_NO_NULL)),
    (IMAGES, "dataset.noise", _FINITE),
    (IMAGES, "dataset.num_classes", _SIZE_NO_NULL),
    (TEXT, "dataset.val_fraction", _INNER),
    (TEXT, "dataset.max_bytes", _SIZE_NO_NULL),
    (("dataset=mnist",), "dataset.download", _FLAG),
    (("dataset=mnist",), "dataset.name", ("SVHN", "null", "5", "[a]", "''", "{a:b}")),
    (("model=resnet18", "dataset=synthetic_images"), "model.name", ("null", "5", "[a]", "''", "{a:b}")),
    ((), "optimizer.lr", ("0", *_FINITE)),
    ((), "optimizer.eps", _FINITE),
    ((), "optimizer.weight_decay", _FINITE),
    ((), "optimizer.betas", ("0.9", "null", "[]", "[0.9]", "[0.9,1.0]", "[-0.1,0.9]", "[a,b]", "[0.9,0.9,0.9]", "nan")),
    ((), "optimizer.fused", _FLAG),
    (("optimizer=sgd",), "optimizer.momentum", _FINITE),
    (("optimizer=sgd",), "optimizer.lr", ("0", *_FINITE)),
    ((), "scheduler.warmup_steps", ("-1", "1.5", "many", "nan", "null", "[1]", "''", "inf")),
    ((), "scheduler.final_factor", _FINITE),
    (("scheduler=constant",), "scheduler.warmup_steps", ("-1", "1.5", "many", "nan", "null", "[1]", "''", "inf")),
    ((), "task.label_smoothing", _SHARE),
    ((), "task.aux_weight", _FINITE),
    *(
        ((), f"{group}._target_", ("null", "5", "''", "nodots", "a..b", "[a]", "'a b.c'"))
        for group in ("model", "task")
    ),
    *(((), f"{group}.kind", ("sounds", "5", "[images]", "''")) for group in ("model", "dataset", "task")),
)


def _closed() -> Iterator[tuple[str, str, str]]:
    """(kind, key, value) for every key of the closed sets."""
    for table, null in ((WHOLE, ("null",)), (WHOLE_OR_NULL, ())):
        for key, (below, above) in table.items():
            yield from (("wrong type", key, value) for value in (*NOT_WHOLE, *null))
            yield from (("out of range", key, str(value)) for value in (below, above, -(10**30), 10**400))
    for table, null in ((NUMBERS, ("null",)), (NUMBERS_OR_NULL, ())):
        for key, outside in table.items():
            yield from (("wrong type", key, value) for value in (*NOT_A_NUMBER, *null))
            yield from (("out of range", key, value) for value in (*outside, *NOT_FINITE))
    for key in FLAGS:
        yield from (("wrong type", key, value) for value in (*NOT_A_FLAG, "null"))
    for keys, null in ((CHOICES, ("null",)), (CHOICES_OR_NULL, ())):
        yield from (("unknown choice", key, value) for key in keys for value in (*NOT_A_CHOICE, *null))
    for keys, null in ((TEXTS, ("null", "''")), (TEXTS_OR_NULL, ())):
        yield from (("wrong type", key, value) for key in keys for value in (*NOT_TEXT, *null))
    yield from (("wrong type", key, value) for key in LISTS for value in (*NOT_A_LIST, "null"))
    yield from (("wrong type", key, v) for key in ("trainer.init_from", "trainer.resume") for v in NOT_TEXT)
    yield from (("out of range", "trainer.init_from", v) for v in ("nope.pt", "/", "''", "5", "nan"))
    yield from (("out of range", "trainer.resume", v) for v in ("nope", "''", "null", "true", "5", "/nowhere/at/all"))
    yield from (("out of range", "trainer.epochs", value) for value in ("0", "-1", "nan", "inf", "many", "[]"))


ON_FP16 = {"precision.init_scale", "precision.min_scale", "precision.growth_interval", "precision.fp32_modules"}
ON_FP16 |= {"precision.fp32_ops", "precision.emulate"}


def _fields() -> Iterator[Bad]:
    for kind, key, value in _closed():
        on = ("precision=fp16",) if key in ON_FP16 else ("precision=fp32",) if key.startswith("precision.") else ()
        yield Bad(kind, (*on, f"{key}={value}"), (key,))


def _arguments() -> Iterator[Bad]:
    for chosen, key, values in ARGUMENTS:
        yield from (Bad("an argument of what is shipped", (*chosen, f"{key}={v}"), (key,)) for v in values)


# --- keys and groups -----------------------------------------------------------------------------------------------


def _unknown() -> Iterator[Bad]:
    for group in (*CLOSED, *SECTIONS):
        for key in ("stepz", "Steps", "x.y", "_target_", "0", "größe", "a-b", "__class__"):
            known = f"{group}.{key.partition('.')[0]}"
            yield Bad("unknown key", (f"{group}.{key}=1",), (known,))
            yield Bad("unknown key", (f"+{group}.{key}=1",), (known,))
    for key in ("foo", "Seed", "seeed", "größe", "a.b.c", "trainer_steps", "_x", "SEED", "experiment.x"):
        for plus in ("", "+", "++"):
            yield Bad("unknown key", (f"{plus}{key}=1",), (key, key.partition(".")[0]))
    for group in GROUPS:
        for choice in ("nope", "5", "''", "Fp32", "größe", "a/b", "nan", "fp32.yaml"):
            yield Bad("unknown choice", (f"{group}={choice}",), (group,))
        for value in ("[a]", "{a:b}", "null", "[]"):
            yield Bad("unknown choice", (f"{group}={value}",), (group,), may_be_legal=True)
        yield Bad("unknown group", (f"{group}s={group}",), (f"{group}s",))
        yield Bad("unknown group", (f"{group}@other=custom",), (group,))
        yield Bad("unknown group", (f"+{group}/inner=custom",), (group,))
    for argument in ("nope", "größe", "device", "self", "_args_"):
        yield Bad("unknown key", (f"model.{argument}=1",), ("model",))
        yield Bad("unknown argument", (f"+model.{argument}=1",), ("model",))
        yield Bad("unknown argument", (f"+dataset.{argument}=1",), ("dataset",))
        yield Bad("unknown argument", (f"+scheduler.{argument}=1",), ("scheduler",))
        yield Bad("unknown argument", (f"+task.{argument}=1",), ("task",))


def _grammar() -> Iterator[Bad]:
    broken = (
        *(
            "name='abc",
            'name="abc',
            "tags=[a",
            "tags=a]",
            "tags=[a,",
            "tags={a",
            "tags={a:1",
            "name=a=b",
            "=3",
            "==",
            "=",
        ),
        *(
            "tags=[[a]",
            "name=(",
            "name=)",
            "tags=[a b",
            "name='a'b'",
            "name=a'",
            "'name'=a",
            "name",
            "trainer",
            "a b",
            "",
        ),
        *(
            "+",
            "~",
            "++",
            "+name",
            "++name",
            "-name=a",
            "--=a",
            "name==a",
            "name=,",
            "tags=[,]",
            "tags={:}",
            "{}",
            "[]",
        ),
        *(
            "name=${",
            "name=${}",
            "name=${a",
            "name=$}",
            "name=${a:",
            "tags=[${]",
            "\\",
            "name=\\",
            "'",
            '"',
            "name='\\'",
        ),
        *("*=1", "trainer.*=1", "trainer..steps=1", ".steps=1", "trainer.=1", "trainer.steps.=1", "trainer.steps.x=1"),
        *(
            "@=1",
            "model@=mlp",
            "@model=mlp",
            "model@a@b=mlp",
            "trainer:steps=5",
            "trainer/steps=5",
            "#",
            "name=#'",
            "%",
            "&",
        ),
        *(
            "name=a\tb='",
            "seed = = 1",
            "seed=1 2=",
            "seed=[1",
            "name='a' 'b'",
            "name=f(",
            "name=f(1",
            "name=nofunction(1)",
        ),
        *("seed=int(a)", "seed=int(", "name=str()", "seed=cast(1)", "tags=sort(", "name=json_str(", "seed=float([a])"),
    )
    for word in broken:
        key = word.lstrip("+~").partition("=")[0] or word
        names = (word or "''", key, key.rpartition(".")[0] or key)
        yield Bad("quotes and brackets", (word,), names, may_be_legal=True)


def _texts() -> Iterator[Bad]:
    strange = (
        *("\x1b[31mred", "a\x01b", "\x7f", "\r", "a\rb", "\x0b", "\u2028", "\u202e", "\ufeff", "\u200b"),
        *("ünïcode", "日本語", "🙂", "\udcff\udc80", "ｆｐ３２", "٣", "a\nb", "\n", "\x85", "－1", "½", "∞"),
    )
    for n, text in enumerate(strange):
        kind = "control characters" if n < 10 else "unicode"
        words = {f"model={text}": "model", f"{text}=1": "", f"trainer.{text}=1": "trainer"}
        for key in ("trainer.steps", "seed", "on_error", "trainer.grad_clip", "check"):
            words |= {f"{key}='{text}'": key, f"{key}={text}": key}
        yield from (Bad(kind, (word,), (name,), may_be_legal=True) for word, name in words.items())
    for value in (LONG, "9" * 5000, "'" + "a b " * 1500 + "'", "[" + "1," * 700 + "1]", DEEP, "0." + "1" * 3000 + "x"):
        for key in (
            "trainer.steps",
            "on_error",
            "precision.autocast_dtype",
            "device.threads",
            "optimizer.lr",
            "model",
            "rerun",
        ):
            yield Bad("very long", (f"{key}={value}",), (key,))
    for option in ("--precision=bf16", "--nope", "-x", "--seed", "--multirun=5", "--cfg=nope", "--config-name=nope"):
        yield Bad("unknown key", (option,), (option, option.partition("=")[0]))
    for word in (
        f"{LONG}=1",
        f"trainer.{LONG}=1",
        f"model={LONG}",
        f"name='{LONG}",
        f"+{LONG}=1",
        f"{LONG}",
        f"~{LONG}",
    ):
        yield Bad("very long", (word,), (LONG[:20], word[:20]))
    yield Bad("very long", (f"paths.outputs=/tmp/{LONG}",), ("paths.outputs",))
    yield Bad("very long", ("paths.outputs=" + "/a" * 3000,), ("paths.outputs",))
    yield Bad("very long", tuple(f"trainer.nope{n}=1" for n in range(300)), ("trainer.nope",))


def _forms() -> Iterator[Bad]:
    for key in (
        "trainer.steps",
        "seed",
        "precision.name",
        "paths.outputs",
        "tags",
        "device.threads",
        "check",
        "on_error",
    ):
        yield Bad("+, ~ and ++", (f"+{key}=5",), (key,), may_be_legal=True)
        yield Bad("+, ~ and ++", (f"~{key}",), (key,))
        yield Bad("+, ~ and ++", (f"~{key}=nope",), (key,))
        yield Bad("+, ~ and ++", (f"++{key}={{a:1}}",), (key,))
        yield Bad("+, ~ and ++", (f"~{key}.x",), (key,))
    for group in (*GROUPS, *SECTIONS):
        yield Bad("+, ~ and ++", (f"~{group}",), (group,))
        yield Bad("+, ~ and ++", (f"+{group}=nope",), (group,))
        yield Bad("+, ~ and ++", (f"++{group}=5",), (group,))
    for word in (
        "~nope",
        "~nope=1",
        "~trainer.nope",
        "~model.nope",
        "+model.hidden.x=1",
        "++trainer.stepz=1",
        "++a.b=1",
    ):
        yield Bad("+, ~ and ++", (word,), (word.lstrip("+~").partition("=")[0],))
    yield Bad("+, ~ and ++", ("~model._target_",), ("model._target_",))
    yield Bad("+, ~ and ++", ("~optimizer.lr",), ("optimizer.lr",))
    yield Bad("+, ~ and ++", ("~dataset.train_fraction",), ("dataset.train_fraction", "train_fraction"))
    yield Bad("+, ~ and ++", ("~model.hidden",), ("model.hidden", "hidden"))


def _interpolations() -> Iterator[Bad]:
    nowhere = (
        "${nope}",
        "${nope.deeper}",
        "${trainer.nope}",
        "${oc.env:NOPE}",
        "${no.resolver:1}",
        "${trainer}",
        "${}",
    )
    for key in (
        "trainer.steps",
        "name",
        "seed",
        "optimizer.lr",
        "paths.outputs",
        "model.hidden",
        "device.type",
        "trainer",
    ):
        yield from (Bad("interpolations", (f"{key}={text}",), (key, text, "nope")) for text in nowhere)
        yield Bad("interpolations", (f"{key}=${{{key}}}",), (key,))
    for text in ("${oc.decode:'['}", "${oc.select:}", "${oc.env:}", "${oc.create:5}", "${hydra.nope}", "${now}"):
        yield Bad("interpolations", (f"trainer.steps={text}",), ("trainer.steps",))
    yield Bad(
        "interpolations", ("trainer.steps=${trainer.log_every}", "trainer.log_every=${trainer.steps}"), ("trainer",)
    )
    yield Bad("interpolations", ("model=${nope}",), ("model", "nope"))
    yield Bad("interpolations", ("name=" + "${oc.env:" * 30 + "NOPE" + "}" * 30,), ("name", "NOPE"))


PAIRS = (
    (("trainer.steps=5", "trainer.epochs=1"), ("trainer.steps", "trainer.epochs")),
    (("trainer.steps=null",), ("trainer.steps", "trainer.epochs")),
    (("experiment=lesson", "trainer.steps=5"), ("trainer.steps", "trainer.epochs")),
    (("model=cnn", "dataset=synthetic_tokens"), ("model=cnn", "dataset=synthetic_tokens")),
    (("model=gpt",), ("model=gpt", "dataset=digits")),
    (("model=gpt", "dataset=synthetic_tokens", "task=classification"), ("task=classification", "model=gpt")),
    (("dataset=digits", "task=language_model"), ("task=language", "dataset=digits")),
    (("precision=bf16", "precision.grad_scaling=true"), ("precision.grad_scaling", "precision.autocast_dtype")),
    (("precision=fp32", "precision.grad_scaling=true"), ("precision.grad_scaling", "precision.autocast_dtype")),
    (("precision=fp16", "precision.autocast_dtype=null"), ("precision.grad_scaling", "precision.autocast_dtype")),
    (("precision=bf16", "precision.param_dtype=bfloat16"), ("precision.param_dtype", "precision.autocast_dtype")),
    (("precision=fp32", "precision.param_dtype=float16"), ("precision.param_dtype", "precision.autocast_dtype")),
    (("precision=fp32", "precision.fp32_modules=[head]"), ("precision.fp32_modules", "precision.autocast_dtype")),
    (("precision=fp32", "precision.fp32_ops=[softmax]"), ("precision.fp32_ops", "precision.autocast_dtype")),
    (("precision=fp32", "precision.emulate=cuda"), ("precision.emulate=cuda", "precision=fp32")),
    (("precision=tf32", "precision.emulate=cuda"), ("precision.emulate=cuda", "precision=tf32")),
    (("precision=bf16", "precision.emulate=cuda", "device=cuda"), ("precision.emulate", "device=cpu")),
    (("precision=bf16", "precision.emulate=mps", "device.compile=true"), ("precision.emulate", "device.compile")),
    (("precision=bf16", "precision.fp32_ops=[exp]", "device.compile=true"), ("precision.fp32_ops", "device.compile")),
    (("precision=auto", "precision.fp32_ops=[exp]"), ("precision",)),
    (
        ("precision=fp16", "precision.init_scale=1", "precision.min_scale=2"),
        ("precision.init_scale", "precision.min_scale"),
    ),
    (("precision=fp16", "precision.min_scale=1e5"), ("precision.init_scale", "precision.min_scale")),
    (("precision=auto", "precision.min_scale=2"), ("precision=auto",)),
    (("precision=auto", "precision.autocast_dtype=bfloat16"), ("precision=auto",)),
    ((*GPT, "model.heads=3"), ("model.heads", "model.width")),
    ((*GPT, "model.width=130"), ("model.heads", "model.width")),
    ((*GPT, "model.vocab_size=64", "dataset.vocab_size=65"), ("model.vocab_size", "dataset.vocab_size")),
    ((*GPT, "dataset.context=64"), ("model.context", "dataset.context")),
    ((*TEXT, "dataset.context=256"), ("model.context", "dataset.context")),
    ((*TEXT, "dataset.max_bytes=100"), ("dataset.max_bytes", "context")),
    ((*IMAGES, "model.num_classes=3"), ("model.num_classes", "dataset.num_classes")),
    ((*IMAGES, "model.channels=1", "dataset.channels=3"), ("model.channels", "dataset.channels")),
    (("model.image_size=16", "dataset.image_size=8"), ("model.image_size", "dataset.image_size")),
    (("model=resnet18", "model.channels=3", "dataset.channels=1"), ("model.channels", "dataset.channels")),
    (("dataset=image_folder", "dataset.root=/nowhere"), ("dataset.root",)),
    (("dataset=cifar10", "dataset.root=/nowhere"), ("dataset.root", "dataset.download")),
    ((*GPT[:1], "dataset=text_file"), ("dataset.path",)),
    (("dataset=image_folder", "dataset.root=/", "dataset.on_unreadable=perhaps"), ("dataset.on_unreadable",)),
)


def _contradictions() -> Iterator[Bad]:
    for words, names in PAIRS:
        yield Bad("contradictions", words, names[:1])
        yield Bad("contradictions", tuple(reversed(words)), names[-1:])
    for word in ("trainer.steps=5", "seed=1", "model=mlp", "precision=fp16", "name=a", "+tags=[a]"):
        yield Bad("duplicates", (word, word), (word.lstrip("+").partition("=")[0],), may_be_legal=True)
    for one, other in (("model=mlp", "model=cnn"), ("precision=fp16", "precision=bf16"), ("device=cpu", "device=auto")):
        yield Bad("duplicates", (one, other), (one.partition("=")[0],), may_be_legal=True)
        yield Bad("duplicates", (one, "~" + one), (one.partition("=")[0],), may_be_legal=True)
        yield Bad("duplicates", (one, "+" + other), (one.partition("=")[0],), may_be_legal=True)


# --- sweeps ----------------------------------------------------------------------------------------------------------


def _sweeps() -> Iterator[Bad]:
    """-m: one job that is wrong among right ones, and sweeps that are no sweeps."""
    right = {"seed": "1", "trainer.steps": "5", "optimizer.lr": "0.1", "precision": "fp32", "model": "mlp"}
    wrong = {
        "seed": ("-1", "many", "nan", "1.5", "null", "''", "[1]", "99999999999"),
        "trainer.steps": ("0", "many", "inf", "1.5", "''", "{a:1}"),
        "optimizer.lr": ("0", "nan", "abc", "null", "-1"),
        "precision": ("bf61", "''", "5", "null"),
        "model": ("nope", "gpt", "custom"),
    }
    for key, values in wrong.items():
        for value in values:
            yield Bad("sweep: one wrong job", ("-m", f"{key}={right[key]},{value}"), (key, value))
            yield Bad("sweep: one wrong job", ("-m", f"{key}=choice({right[key]},{value})"), (key, value))
            yield Bad(
                "sweep: one wrong job",
                ("-m", f"{key}={value}", "seed=3,4" if key != "seed" else "check=true"),
                (key, value),
            )
    for word in (
        *(
            "seed=range(0)",
            "seed=range(5,1)",
            "seed=range(1,5,-1)",
            "seed=range()",
            "seed=range(a)",
            "seed=range(0,1,0)",
        ),
        *(
            "seed=range(0,3,0.5)",
            "seed=range(-2,0)",
            "seed=choice()",
            "seed=choice(",
            "seed=choice(a,)",
            "seed=interval(0,1)",
        ),
        *(
            "seed=interval(1)",
            "seed=tag(x)",
            "seed=sort()",
            "seed=shuffle()",
            "precision=glob(nope*)",
            "precision=glob()",
        ),
        *(
            "precision=glob([)",
            "seed=glob(*)",
            "model=glob(*)",
            "seed=0,",
            "seed=,0",
            "seed=,",
            "seed=0,,1",
            "seed=range(1e9)",
        ),
        *(
            "seed=range(10000000000)",
            "seed=range(nan)",
            "seed=range(0,inf)",
            "seed=0,1,",
            "nope=1,2",
            "+nope=1,2",
            "~seed=1,2",
        ),
        *(
            "precision=fp32,fp32,nope",
            "precision=[fp32,nope]",
            "trainer.stepz=1,2",
            "name=${nope},a",
            "seed=${oc.env:NOPE},1",
        ),
        *("hydra/launcher=nope", "hydra/sweeper=nope", "hydra.launcher.x=1", "hydra/launcher=basic", "hydra.nope=1,2"),
        *(
            "optimizer=adamw,nope",
            "dataset=synthetic_tokens",
            "precision=choice(fp32,bf61)",
            "trainer.batch_size=range(0,3)",
        ),
        *(
            "trainer.steps=range(-1,2)",
            "seed=choice(1,2",
            "seed=1,'2",
            "tags=[a],b",
            "rerun=never,some",
            "on_error=,stop",
        ),
    ):
        key = word.lstrip("+~").partition("=")[0]
        yield Bad("sweep: no sweep", ("-m", word), (key, word, "sweep", word.rpartition("=")[2]))
        yield Bad("sweep: no sweep", ("-m", "precision=fp32,bf16", word), (key, word, "sweep", word.rpartition("=")[2]))
    yield Bad("sweep: no sweep", ("-m", "seed=range(3000)", "trainer.batch_size=range(1,3000)"), ("sweep", "jobs"))


# --- settings of a script's own ------------------------------------------------------------------------------------


def of_diagnose() -> Iterator[Bad]:
    """What scripts/diagnose.py takes beside the words of train.py; a value is YAML there."""
    not_whole = [value for value in NOT_WHOLE if value != "0x10"]  # which is 16
    for key, wrong in (
        ("steps", (*not_whole, "null", "-1", "1000001", "9" * 400)),
        ("budget_s", (*NOT_A_NUMBER, "null", "0", "-1", ".nan", ".inf", "nan", "-inf")),
        ("target", ("tpu", "CUDA", "5", "true", "[cuda]", "{a: b}", "cuda:0", "'a b'")),
        ("checkpoint", ("nope.pt", "/", "5", "nan", "[a]", "{a: b}", LONG, "a\x00b")),
    ):
        yield from (Bad("setting of a script", (f"{key}={value}",), (key,)) for value in wrong)
    yield from (Bad("quotes and brackets", (f"{key}=[a",), (key,)) for key in ("steps", "target", "checkpoint"))


SOURCES = (_fields, _arguments, _unknown, _grammar, _texts, _forms, _interpolations, _contradictions, _sweeps)


def all_bad() -> list[Bad]:
    """Every case there is."""
    return list(dict.fromkeys(bad for source in SOURCES for bad in source()))


def chosen(count: int, seed: int = 0) -> list[Bad]:
    """So many of them, of every kind about equally many; without what is legal after all."""
    generator = random.Random(seed)
    kinds: dict[str, list[Bad]] = {}
    for bad in all_bad():
        kinds.setdefault(bad.kind, []).append(bad)
    for cases in kinds.values():
        generator.shuffle(cases)
    taken: list[Bad] = []
    while len(taken) < count and any(kinds.values()):
        turn = [cases.pop() for cases in kinds.values() if cases]
        taken += [bad for bad in turn if not (bad.may_be_legal and is_legal(bad.words))]
    return taken[:count]


def is_legal(words: tuple[str, ...]) -> bool:
    """Whether train.py would run with them."""
    try:
        compose(list(words))
    except Exception:  # of whatever kind: what becomes of it is the test's to see
        return False
    return True
