"""A loader that compiles a user's file at each import."""

from importlib.machinery import SourceFileLoader
from types import CodeType


class FromSource(SourceFileLoader):
    """Compiles a file at each import.

    Python's cached bytecode counts as that of a file with the same size and the same second of its last change, so a
    script that writes a file, runs it, and writes it again would run the first version twice.
    """

    def get_code(self, fullname: str) -> CodeType:
        file = self.get_filename(fullname)
        return self.source_to_code(self.get_data(file), file)
