"""Digests of what a plugin does."""

import hashlib
import io
import uuid
from types import CodeType
from typing import Any

import cloudpickle

from cfl_ray.plugins.calling import file_of
from cfl_ray.plugins.imported import imported_beside


def content_of_files(part: Any) -> str:
    """The sha256 of the file that defines a part, with those that it imports from beside it; empty without a file."""
    file = file_of(part)
    if file is None or not file.is_file():
        return ""
    digests = [hashlib.sha256(each.read_bytes()).hexdigest() for each in (file, *sorted(imported_beside(file)))]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def content_of_object(part: Any) -> str:
    """A digest of a function or object made in Python: of its files, its code, and the values that it refers to.

    It tells apart lambdas, closures, functions with bound options, and versions of a cell of a notebook. Equal parts
    have the same digest in one process, and mostly in another one; one that cannot be pickled has a new one each time.
    """
    pickled = io.BytesIO()
    try:
        _ByValue(pickled).dump(part)
    except Exception:  # of a value that the part refers to
        return uuid.uuid4().hex
    return hashlib.sha256(content_of_files(part).encode() + pickled.getvalue()).hexdigest()


class _ByValue(cloudpickle.Pickler):
    """Pickles functions without the place of their definition, which differs between two sessions of a notebook."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, CodeType):
            # the order of a set of strings differs between processes
            constants = [sorted(map(repr, each)) if isinstance(each, frozenset) else each for each in obj.co_consts]
            return tuple, ([obj.co_code, constants, obj.co_names, obj.co_varnames],)
        return super().reducer_override(obj)
