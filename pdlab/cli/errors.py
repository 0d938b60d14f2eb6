"""How a command fails: one line on stderr and an exit status, no traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

BAD_INPUT = 2
"""Exit status of a refused parameter, as for an option that does not exist."""
FAILED = 1
INTERRUPTED = 130
"""128 + SIGINT, as shells count."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn the errors a user can mend into a message and an exit status."""
    try:
        yield
    except ValueError as error:
        raise _exit(error, BAD_INPUT) from error
    except KeyboardInterrupt as error:
        raise _exit("interrupted", INTERRUPTED) from error
    except (OSError, RuntimeError) as error:
        if not _is_expected(error):
            raise
        raise _exit(error, FAILED) from error


def _is_expected(error: Exception) -> bool:
    """A full disk or an unreachable index is the user's to mend; any other is a bug of ours."""
    from pdlab.models import FetchError

    return isinstance(error, OSError | FetchError)


def _exit(message: object, status: int) -> typer.Exit:
    typer.echo(f"pdlab: {message}", err=True)
    return typer.Exit(status)
