"""Refuse to pickle and copy clients."""

from __future__ import annotations

from typing import NoReturn


class NotCopied:
    """The base of clients. A copy would share the connections of the original, and close them."""

    def __reduce__(self) -> NoReturn:
        """Raise the error of `pickle`, `copy.copy` and `copy.deepcopy`."""
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied, because it has connections and threads of its own; "
            "create another one, in the process that uses it"
        )
