"""Functions and classes that users bring, as `file.py:Name` or from installed packages."""
