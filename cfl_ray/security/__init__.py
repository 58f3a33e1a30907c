"""Signatures of run directories, and the credentials that their files do not hold."""
