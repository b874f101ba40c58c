"""Report pages as a test reads them, and made-up results to write them of."""

import json
from html.parser import HTMLParser

from made_up import H100, V100, put, result
from precision_lab.report.compare import compare
from precision_lab.report.page import page
from precision_lab.report.read import read

ATTACK = "\"><img src=x onerror=alert(1)></script><script>alert(2)</script>{{ 7 * 7 }}'"
VOID = {"meta", "link", "img", "br", "input", "hr", "line", "path"}


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
