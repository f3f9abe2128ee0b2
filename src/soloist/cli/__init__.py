"""The `soloist` command: what people type, and how errors reach them.

Data goes to stdout, everything else to stderr. Nothing heavy is imported before a command needs it,
so that `--help` is quick.
"""

import errno
import gc
import sys
from typing import NoReturn

from soloist.errors import NotWritten, SoloistError
from soloist.settings import read_settings

# Imports make a third of a million objects, all of which stay: looking for garbage among them takes
# a tenth of a second.
_OBJECTS_WHILE_STARTING = 1_000_000

# What an operating system says of a place that takes no more bytes.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)

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
        _run(given)
    except SoloistError as error:
        if debug:
            raise
        _tell(error)
    except KeyboardInterrupt:
        sys.exit(_EXIT_INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has gone; there is nobody left to tell.
        sys.stderr.close()
        sys.exit(0)
    except Exception as error:
        if debug:
            raise
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            _tell(NotWritten(error.filename or "the output", error.strerror or str(error)))
        print(
            f"internal error: {type(error).__name__}: {error}\n\n"
            "hint: this is a bug in Soloist; run the command with --debug and report the output",
            file=sys.stderr,
        )
        sys.exit(_EXIT_INTERNAL)
    sys.exit(0)


def _run(given: list[str]) -> None:
    """One command, with all of its output written."""
    from soloist.cli.app import app

    try:
        app(given[0] if given else "")(args=given, prog_name="soloist")
    finally:
        _flush()


def _flush() -> None:
    """Write what stdout still holds; where that fails, drop it, so that Python does not retry."""
    try:
        sys.stdout.flush()
    except OSError:
        sys.stdout = None
        raise


def _tell(error: SoloistError) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_status)
