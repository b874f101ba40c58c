"""The single entrypoint: compose, check, run. `python train.py --help` lists what can be set."""

import os
import signal
import sys

# Ctrl-C while Hydra loads ends the process as it is, and prints no stack.
ctrl_c = signal.getsignal(signal.SIGINT)
if ctrl_c is signal.default_int_handler:  # one that is ignored stays so
    signal.signal(signal.SIGINT, signal.SIG_DFL)

os.environ["HYDRA_FULL_ERROR"] = "1"  # hands composition errors to us whole, so that we can word them

import hydra  # noqa: E402
from hydra.core.hydra_config import HydraConfig  # noqa: E402
from hydra.types import RunMode  # noqa: E402

from precision_lab import config  # noqa: E402
from precision_lab.entry import exit_code, print_what_can_be, refuse  # noqa: E402
from precision_lab.errors import Ended, InputError  # noqa: E402
from precision_lab.folders import check_named  # noqa: E402
from precision_lab.stops import end_at_once, ignore_checkpoint_signal, ignore_signals_at_exit  # noqa: E402
from precision_lab.wording import is_composing, word  # noqa: E402


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(composed) -> None:
    """One run; in a sweep (-m) the function that a launcher other than `isolated` calls for each job."""
    sweep = HydraConfig.get().mode is RunMode.MULTIRUN
    code = exit_code(lambda: train(composed, HydraConfig.get().runtime.choices.get("experiment"), sweep))
    if not sweep:
        sys.exit(code)
    if code:  # for Hydra to go on with the other jobs
        raise Ended(code)


def train(composed, experiment, sweep) -> int:
    asked = config.typed(composed, experiment)
    if not sweep:
        check_named(asked)
    if ctrl_c is signal.default_int_handler:  # a library that loads may swallow what Ctrl-C raises
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from precision_lab.run import run  # torch comes in here: wrong input is answered before

    signal.signal(signal.SIGINT, ctrl_c)
    return run(asked, sweep)


if __name__ == "__main__":
    ignore_signals_at_exit()
    print_what_can_be()
    config.register()
    ignore_checkpoint_signal()
    try:
        signal.signal(signal.SIGINT, ctrl_c)
        config.check_options(sys.argv[1:])
        main()
    except SystemExit as end:
        end_at_once(end.code or 0)
        raise
    except Ended as end:
        sys.exit(end.code)
    except InputError as error:  # a sweep's, before its first job
        sys.exit(refuse(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if not is_composing(error):
            raise
        sys.exit(refuse(word(error, sys.argv[1:], config.Config, config.CONF)))
