"""The one error of the library."""

from collections.abc import Iterable

_LONGEST = 300


class DiffLoRAError(ValueError):
    """An input that cannot be honoured.

    The text says what was given, what was expected and what to do, and names the file and up to four of its keys.
    Nothing has been changed when it is raised.
    """


def some(names: Iterable[object], limit: int = 4) -> str:
    """The first `limit` of an iterable of names, comma separated, and how many more there are."""
    listed = [text if len(text := str(name)) <= _LONGEST else f"{text[:_LONGEST]}..." for name in names]
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more
