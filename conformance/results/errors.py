"""The base class of keyedopt's own errors, which the command line reports in one line."""


class KeyedoptError(Exception):
    """An input, a target or the harness is wrong; the message says what to do. Exit code 2."""
