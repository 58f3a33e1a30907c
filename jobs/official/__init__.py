"""Methods beside the code of their authors; see __main__."""
