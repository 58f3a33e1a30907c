"""Plugins: functions and classes that users provide, as `file.py:Name` or from installed packages."""
