"""The manifest of a checkpoint, a JSON file: its fields, and the state tensors from the files that it names."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from cfl_ray.checkpoint.segments import EntryFile, as_rows, opened, rows_in, writing
from cfl_ray.errors import DataError, RunError
from cfl_ray.system.files import read_file, write_json

FORMAT = 5
_TYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _TYPES}


class TensorShape(BaseModel):
    """Shape and type of a state tensor."""

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


class CheckpointManifest(BaseModel):
    """The content of the manifest file, without its checksum."""

    model_config = ConfigDict(strict=True, extra="forbid")
    format: int
    round: int
    config_hash: str
    method: str
    files: list[EntryFile]  # later files override earlier files
    tensors: dict[str, TensorShape]
    largest_client_state: int = Field(ge=0)  # bytes of the largest client state so far
    values: dict[str, Any]
    pinned: list[
        int
    ] = []  # rounds before it whose checkpoints are kept as long as this one; left out of the file if empty

    def write(self, file: Path) -> None:
        """Writes the manifest, replacing the file in one step. Raises RunError if it cannot be written."""
        values = self.model_dump(exclude_defaults=True)
        with writing(file):
            write_json(file, values | {"sha256": _digest(values)})

    @classmethod
    def read(cls, file: Path, **expected: object) -> Self:
        """The manifest in the file. Raises RunError if there is none, or a field differs from `expected`."""
        try:
            content = read_file(file)
            if content is None:
                raise RunError(f"there is no {file}")
            values = json.loads(content)
        except DataError as error:
            raise RunError(str(error)) from error
        except (ValueError, RecursionError) as error:
            raise RunError(f"{file} is no JSON ({error})") from error
        if not isinstance(values, dict) or "format" not in values:
            raise RunError(f"{file} is no checkpoint")
        if values.pop("sha256", None) != _digest(values):
            raise RunError(f"{file} was altered")
        if values["format"] != FORMAT:
            raise RunError(f"{file} has format {values['format']}, this version reads format {FORMAT}")
        try:
            manifest = cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            raise RunError(f"{file} is no checkpoint: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        for name, value in expected.items():
            if getattr(manifest, name) != value:
                raise RunError(f"{file} belongs to {name} {getattr(manifest, name)}, not {value}")
        return manifest

    def state(self, folder: Path) -> dict[str, Tensor]:
        """The state tensors by name, put together from all files. Raises RunError if a row is in none of the files."""
        room = sum(file.bytes for file in self.files)
        if large := [name for name, shape in self.tensors.items() if shape.bytes > room]:
            shape = self.tensors[large[0]].shape
            raise RunError(f"{large[0]} has shape {shape}, more than {room} bytes of files can hold")
        tensors = {name: shape.empty() for name, shape in self.tensors.items()}
        rows = {name: as_rows(tensor) for name, tensor in tensors.items() if tensor.numel()}
        filled = {name: torch.zeros(len(tensor), dtype=torch.bool) for name, tensor in rows.items()}
        for file in self.files:
            with opened(folder, file) as entries:
                for name, row_R, entry in rows_in(entries):
                    values = entries.get_tensor(entry)
                    if name in rows and (values.shape[1:], values.dtype) == (rows[name].shape[1:], rows[name].dtype):
                        fits_R = row_R < len(rows[name])
                        rows[name][row_R[fits_R]] = values[fits_R]
                        filled[name][row_R[fits_R]] = True
        if incomplete := [name for name, filled_R in filled.items() if not filled_R.all()]:
            raise RunError(f"rows of {incomplete[0]} are in none of its files")
        return tensors


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
