"""The base class of keyedopt's own errors, and the error of result files."""


class KeyedoptError(Exception):
    """An input, a target or the harness is wrong; the message says what to do. Exit code 2."""


class ResultError(KeyedoptError):
    """A result file cannot be read or written; the message says why and what to do."""
