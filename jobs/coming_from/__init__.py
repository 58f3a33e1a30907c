"""The measured sections of docs/coming_from.md: other libraries beside this one, by their own rules."""
