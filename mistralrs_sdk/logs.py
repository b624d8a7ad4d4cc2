"""Sends the package's log to standard error when a builder asks for it."""

from __future__ import annotations

import logging
import os

_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
}


def configure_logging() -> None:
    """Send the "mistralrs_sdk" log to standard error, once; RUST_LOG sets its level."""
    logger = logging.getLogger("mistralrs_sdk")
    wanted = os.environ.get("RUST_LOG", "").strip() or "info"
    logger.setLevel(_LEVELS.get(wanted.lower(), logging.INFO))
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        handler = _StderrHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
    if wanted.lower() not in _LEVELS:
        logger.warning("RUST_LOG (%r) is not one of %s; using info", wanted, ", ".join(_LEVELS))


class _StderrHandler(logging.StreamHandler):
    """The handler that `configure_logging` adds; a class of its own so that it is added once."""
