"""The manifest of a checkpoint, its JSON file: what it says, and the tensors of the state put together from the files that it names."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from cfl_ray.core.errors import RunError
from cfl_ray.runtime.entries import EntryFile, as_rows, opened, rows_in, writing
from cfl_ray.tracking.files import write_json

FORMAT = 2
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool
)}  # fmt: skip


class Shape(BaseModel):
    """Shape and type of a tensor."""

    model_config = ConfigDict(strict=True, extra="forbid")
    dtype: str = Field(pattern=f"^({'|'.join(_DTYPES)})$")
    shape: list[int]

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        return cls(dtype=str(tensor.dtype).removeprefix("torch."), shape=list(tensor.shape))

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=_DTYPES[self.dtype])


class Manifest(BaseModel):
    """Everything in the file but its own checksum."""

    model_config = ConfigDict(strict=True, extra="forbid")
    format: int
    round: int
    config_hash: str
    method: str
    files: list[EntryFile]  # later ones override earlier ones
    tensors: dict[str, Shape]
    largest_owned: int = Field(ge=0)  # bytes of the largest thing that a client ever owned
    values: dict[str, Any]

    def write(self, file: Path) -> None:
        """Replaces the file in one step. Raises RunError where it cannot."""
        values = self.model_dump()
        with writing(file):
            write_json(file, values | {"sha256": _digest(values)})

    @classmethod
    def read(cls, file: Path, **expected: object) -> Self:
        """What the file says. Raises RunError for anything but a manifest of what is expected."""
        if not file.exists() and file.with_suffix("").is_dir():
            raise RunError(f"{file.with_suffix('')} is a folder, as format 1 had it; this version reads format {FORMAT}")
        try:
            values = json.loads(file.read_text())
        except (ValueError, RecursionError) as error:
            raise RunError(f"{file} is no JSON ({error})") from error
        if not isinstance(values, dict) or "format" not in values:
            raise RunError(f"{file} is no checkpoint")
        if values.pop("sha256", None) != _digest(values):
            raise RunError(f"{file} was altered")
        if values["format"] != FORMAT:
            raise RunError(f"{file} has format {values['format']}, this version reads {FORMAT}")
        try:
            found = cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            raise RunError(f"{file} is no checkpoint: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        for name, here in expected.items():
            if (there := getattr(found, name)) != here:
                raise RunError(f"{file} belongs to {name} {there}, not {here}")
        return found

    def state(self, folder: Path) -> dict[str, Tensor]:
        """The tensors of the state, put together from all files. Raises RunError unless every row is there."""
        room = sum(file.bytes for file in self.files)
        if large := [name for name, shape in self.tensors.items() if shape.bytes > room]:
            raise RunError(f"{large[0]} has shape {self.tensors[large[0]].shape}, more than {room} bytes of files can hold")
        tensors = {name: shape.empty() for name, shape in self.tensors.items()}
        rows = {name: as_rows(tensor) for name, tensor in tensors.items() if tensor.numel()}
        there = {name: torch.zeros(len(tensor), dtype=torch.bool) for name, tensor in rows.items()}
        for file in self.files:
            with opened(folder, file) as entries:
                for name, row_R, entry in rows_in(entries):
                    values = entries.get_tensor(entry)
                    if name in rows and (values.shape[1:], values.dtype) == (rows[name].shape[1:], rows[name].dtype):
                        fits_R = row_R < len(rows[name])
                        rows[name][row_R[fits_R]] = values[fits_R]
                        there[name][row_R[fits_R]] = True
        if lacking := [name for name, there_R in there.items() if not there_R.all()]:
            raise RunError(f"rows of {lacking[0]} are in none of its files")
        return tensors


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
