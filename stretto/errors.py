"""The exceptions that Stretto raises on purpose. Everything else that escapes is a bug."""


class StrettoError(Exception):
    """Base of every error that Stretto raises on purpose."""


class InvalidRequest(StrettoError, ValueError):
    """Bad user input: says what was given, what is allowed, and how to fix it."""


class ModelLoadError(StrettoError):
    """A model cannot be found or loaded: names the file or tensor."""


class NotSupported(StrettoError, NotImplementedError):
    """A feature that is not built, or cannot work in this combination."""


class EngineBroken(StrettoError):
    """The engine cannot go on; a new one can be made."""


class Overloaded(StrettoError):
    """The queue is full: says how full, and what was allowed. The request can be sent again later."""


class PagesExhausted(StrettoError):
    """Fewer KV pages are free than were asked for; nothing was taken."""
