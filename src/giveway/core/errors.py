"""Every exception of GiveWay.

    GiveWayError
    ├── InvalidRequestError         the caller's request is wrong; nobody else is affected
    │   └── RequestTooLargeError    it could never fit, however long it waited
    ├── ConfigError                 a setting, or a combination of settings, is wrong
    ├── MissingDependencyError      an optional package is needed and absent
    ├── ModelError                  a model cannot be used
    │   ├── ModelNotFoundError      nothing at that path or name
    │   ├── ModelFileError          truncated, malformed or inconsistent file
    │   ├── TensorMismatchError     a tensor is missing or has another shape than the configuration says
    │   └── UnsupportedModelError   well-formed, but an architecture, encoding or option we do not implement
    ├── KVCacheFullError            the control policy `none` ran out of KV blocks: the batch is lost
    ├── RequestFailedError          one request ended with a fault of its own (raised to its caller only)
    ├── OutputFileError             results cannot be written (full disk, no permission)
    ├── TargetServerError           the server that `giveway bench serve` measures cannot be used
    ├── DeviceFaultError            a forward pass or a copy failed on the device
    └── InvariantError              our own bug: the state is inconsistent, and going on would corrupt answers

"No room right now" is never an exception: it is a value, a `Deferral` with a named reason.
A message names the thing, the value, the limit and the remedy.
"""


class GiveWayError(Exception):
    """Base of everything that GiveWay raises on purpose."""


class InvalidRequestError(GiveWayError, ValueError):
    """The caller's request is wrong; the message says which field and what would be right."""


class RequestTooLargeError(InvalidRequestError):
    """The request could never fit into the model's context or the KV pool."""


class ConfigError(GiveWayError, ValueError):
    """A setting, or a combination of settings, is wrong."""


class MissingDependencyError(GiveWayError, ImportError):
    """An optional package is needed for what was asked; the message holds the command that installs it."""


class ModelError(GiveWayError):
    """A model cannot be used."""


class ModelNotFoundError(ModelError, FileNotFoundError):
    """There is nothing at the given path or name."""

    def __str__(self) -> str:
        """Return the message alone: FileNotFoundError would print an errno."""
        return str(self.args[0]) if self.args else ""


class ModelFileError(ModelError):
    """A model file is truncated, malformed or inconsistent."""


class TensorMismatchError(ModelError):
    """A tensor is missing, or its shape is not the one that the model's configuration asks for."""


class UnsupportedModelError(ModelError):
    """The file is well-formed but names an architecture, encoding or option that is not implemented."""


class KVCacheFullError(GiveWayError):
    """The control policy `none` ran out of KV blocks; every other policy makes room instead."""


class RequestFailedError(GiveWayError):
    """One request ended with a fault of its own, for example NaN logits; its neighbours went on."""


class OutputFileError(GiveWayError):
    """Results cannot be written; what was written before stays valid."""


class TargetServerError(GiveWayError):
    """The server that is measured does not answer, or refuses what every request needs."""


class DeviceFaultError(GiveWayError):
    """A forward pass or a copy failed on the device."""


class InvariantError(GiveWayError, AssertionError):
    """Our own bug: state is inconsistent, so going on would corrupt answers."""
