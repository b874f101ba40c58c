"""The single entrypoint: compose, check, run. `python train.py --help` lists what can be set."""

import os
import sys
import traceback

os.environ["HYDRA_FULL_ERROR"] = "1"  # hands composition errors to us whole, so that we can word them

import hydra  # noqa: E402
from hydra.core.hydra_config import HydraConfig  # noqa: E402
from hydra.types import RunMode  # noqa: E402

from precision_lab import config  # noqa: E402
from precision_lab.errors import InputError  # noqa: E402
from precision_lab.recorder import redact, secrets_in  # noqa: E402
from precision_lab.wording import word  # noqa: E402

NO_SWEEP = (
    "-m would run all jobs in one process, where backend flags and memory peaks leak from one "
    "to the next; run the commands one by one."
)


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(composed) -> None:
    try:
        if HydraConfig.get().mode is RunMode.MULTIRUN:
            raise InputError(NO_SWEEP)
        asked = config.typed(composed)
        from precision_lab.run import run  # torch comes in here: wrong input is answered before

        code = run(asked)
    except InputError as error:
        code = refuse(error)
    except KeyboardInterrupt:  # before the run had a folder to say so in
        code = 130
    except Exception:  # ours to mend, not the user's: shown whole
        traceback.print_exc()
        code = 1
    sys.exit(code)


def refuse(sentence: object) -> int:
    print(redact(f"precision-lab: {sentence}", secrets_in(os.environ)), file=sys.stderr)
    return 2


if __name__ == "__main__":
    if sys.stdout is not None:  # a folder's name may hold what the terminal's encoding does not
        sys.stdout.reconfigure(errors="backslashreplace")
    if {"-m", "--multirun", "hydra.mode=MULTIRUN"} & set(sys.argv):  # before Hydra makes a folder for the jobs
        sys.exit(refuse(NO_SWEEP))
    config.register()
    try:
        main()
    except config.COMPOSITION_ERRORS as error:
        sys.exit(refuse(word(error, sys.argv[1:], config.Config, config.CONF)))
