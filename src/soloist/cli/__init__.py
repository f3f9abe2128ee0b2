"""The `soloist` command: what people type, and how errors reach them.

Data goes to stdout, everything else to stderr. Nothing heavy is imported before a command needs it,
so that `--help` is quick.
"""

import gc
import sys
from typing import NoReturn

from soloist.errors import SoloistError
from soloist.settings import read_settings

# Imports make a third of a million objects, all of which stay: looking for garbage among them takes
# a tenth of a second.
_OBJECTS_WHILE_STARTING = 1_000_000

_EXIT_INTERNAL, _EXIT_INTERRUPTED = 1, 130


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run one command and exit.

    Status: 0 success, 1 bug in Soloist, 2 invalid input, 3 the machine cannot run it or the engine
    failed, 4 the engine got stuck, 5 a server that had to be ended by force, 130 Ctrl-C.

    `--debug` may stand anywhere and shows tracebacks instead of one-paragraph errors.
    """
    given = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in given
    given = [word for word in given if word != "--debug"]
    gc.set_threshold(_OBJECTS_WHILE_STARTING, 20, 20)
    try:
        debug = read_settings().debug or debug
        from soloist.cli.app import app

        app(args=given, prog_name="soloist")
    except SoloistError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        sys.exit(_EXIT_INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has gone; there is nobody left to tell.
        sys.stderr.close()
        sys.exit(0)
    except Exception as error:
        if debug:
            raise
        print(
            f"internal error: {type(error).__name__}: {error}\n\n"
            "hint: this is a bug in Soloist; run the command with --debug and report the output",
            file=sys.stderr,
        )
        sys.exit(_EXIT_INTERNAL)
    sys.exit(0)
