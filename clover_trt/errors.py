"""The few kinds of error a user can meet. Each message says what is wrong, where, and what to do next."""


class CloverError(Exception):
    """Base of every error raised for something outside the program: input, files, machine.

    The command line prints the message alone and exits with code 2.
    """


class ConfigError(CloverError):
    """A configuration value is missing, unknown or out of range."""


class CheckpointError(CloverError):
    """A checkpoint folder or one of its files cannot be used."""


class EngineError(CloverError):
    """An engine package cannot be built, read or run."""


class RequestError(CloverError):
    """A generation request was refused before any work was done."""


class QueueFullError(RequestError):
    """The scheduler's queue is full; the request was not taken."""


class NumericsError(CloverError):
    """The model produced a value that is not a number; the affected row has no answer."""
