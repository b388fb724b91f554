"""Keeps transformers' progress bars and advice out of our commands' output."""

from transformers.utils import logging


def quiet() -> None:
    """For the rest of the process: errors only, no progress bars."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
