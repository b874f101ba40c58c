"""Save a view of a W&B project that compares precisions: loss, speed, memory, scaler health, the comparison's table.

python scripts/publish.py --project precision-lab --entity team [--group demo-1405e615]

Without a login it prints what the view holds. With one it saves it, and prints its address; with --view ADDRESS it is
saved over that one.
"""

import argparse
import os
import sys

from precision_lab.config import WandbConfig, WandbMode
from precision_lab.entry import exit_code, print_what_can_be
from precision_lab.redaction import redact, secrets_in
from precision_lab.tracking.view import save, structure


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description="A saved view of a W&B project.")
    parser.add_argument("--project", metavar="NAME", help="default: WANDB_PROJECT, else precision-lab")
    parser.add_argument("--entity", metavar="NAME", help="user or team (default: WANDB_ENTITY, else the login's own)")
    parser.add_argument("--group", metavar="NAME", help="of one experiment's runs alone, as W&B names their group")
    parser.add_argument("--view", metavar="ADDRESS", help="save over this one, which was saved before")
    parser.add_argument("--dry-run", action="store_true", help="save nothing, whatever the login")
    return exit_code(lambda: publish(parser.parse_args(words)))


def publish(asked: argparse.Namespace) -> int:
    named = os.environ.get("WANDB_PROJECT") or "precision-lab" if asked.project is None else asked.project
    project = redact(named, secrets_in(os.environ, words=sys.argv))
    WandbConfig(WandbMode.online, project, None, [])  # which says what is wrong with it
    print("\n".join(structure(asked.group)))
    address = None if asked.dry_run else save(asked.entity, project, asked.group, asked.view)
    if address:
        print(f"\nsaved: {address}")
    elif not asked.dry_run:
        print("\nnot saved: there is no W&B login here. Run `wandb login`, or set WANDB_API_KEY.")
    return 0


if __name__ == "__main__":
    print_what_can_be()
    sys.exit(main(sys.argv[1:]))
