"""The one error that a user's input may raise, and the nearest valid name for a mistyped one."""

import difflib
import errno
from collections.abc import Iterable

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # numbers of an OSError: a full disk, a quota, a limit on files


class InputError(ValueError):
    """Bad configuration or input: one line that says what, where and what would be valid. Exit code 2."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """' (did you mean X?)' for the closest valid name, else the valid names."""
    valid = sorted(valid)
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else f" (valid: {', '.join(valid)})"


class StoppedElsewhere(Exception):
    """Another rank has bad input and says so; this one ends silently with the same exit code, 2."""


def first_line(error: Exception) -> str:
    """The first line of a message, which in Hydra and OmegaConf is the one that tells."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
