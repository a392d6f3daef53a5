"""Tables for compiled code: numpy arrays of records, like arrays of C structs.

``table[row].column`` is one load or store in compiled code. In Python it costs a microsecond or two and
``table["column"]`` a tenth of that, so code in every step uses the latter.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt

RecordArray = npt.NDArray[np.record]


def records(*columns: str | tuple[Any, ...], floats: str = "") -> np.dtype[np.record]:
    """Return a record type. A string names int64 columns, separated by spaces; ``floats`` names float64 ones."""
    fields = list[tuple[Any, ...]]()
    for each in columns:
        fields += [(name, np.int64) for name in each.split()] if isinstance(each, str) else [each]
    return named(np.dtype(fields + [(name, np.float64) for name in floats.split()], align=True))


def named(columns: np.dtype[np.void]) -> np.dtype[np.record]:
    """Return these columns as a record type; raise ValueError for names that numpy's records use themselves."""
    taken = [name for name in columns.names or () if hasattr(np.record, name)]
    if taken:  # in Python, rows would return that attribute
        raise ValueError(f"columns are called {taken}, which are attributes of numpy's records")
    return cast("np.dtype[np.record]", np.dtype((np.record, columns)))
