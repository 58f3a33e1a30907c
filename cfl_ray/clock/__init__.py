"""Virtual time: the devices of clients, the clock of a run, and rounds that do not wait."""
