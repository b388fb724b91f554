"""Proof that a setting holds: the switchback of a trial, the probation of what is kept."""
