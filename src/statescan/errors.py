# SPDX-License-Identifier: Apache-2.0
"""Every exception that statescan raises, and nothing that raises them.

    StatescanError
    ├── ArgumentError            (ValueError)    a value that is not one of the allowed
    │   ├── ShapeError                           a tensor has the wrong rank or size
    │   └── DeviceError                          tensors lie on different devices
    ├── DtypeError               (TypeError)     an argument has the wrong type or dtype
    ├── SlotIndexError           (IndexError)    a slot outside the pool, or written twice
    ├── BackendUnavailableError  (RuntimeError)  the backend asked for cannot run this call
    ├── GradientError            (RuntimeError)  a derivative that the op does not offer
    ├── NotServedError           (NotImplementedError) a name of others without a body here
    ├── CheckpointError          (RuntimeError)  a checkpoint is missing, damaged or of another kind
    └── MissingExtraError        (ImportError)   a library of an optional extra is not installed

The CUDA driver's and compiler's own, DriverError and CompileError, are RuntimeErrors beside their
callers in ``backends/cuda``.

A message has three parts: what was given, what is needed, what to do next.
"""


class StatescanError(Exception):
    """Base of every error that statescan raises on purpose."""


class ArgumentError(StatescanError, ValueError):
    """An argument has a value outside the allowed ones."""


class ShapeError(ArgumentError):
    """A tensor's rank or one of its sizes does not fit the others."""


class DeviceError(ArgumentError):
    """Tensors of one call lie on different devices."""


class DtypeError(StatescanError, TypeError):
    """An argument has the wrong Python type or tensor dtype."""


class SlotIndexError(StatescanError, IndexError):
    """A state index lies outside the pool of states, or two rows write one slot."""


class BackendUnavailableError(StatescanError, RuntimeError):
    """The backend asked for cannot run this call; the message says why."""


class GradientError(StatescanError, RuntimeError):
    """This kind of differentiation is not offered; a silent wrong gradient is worse."""


class NotServedError(StatescanError, NotImplementedError):
    """A name of the originals that is importable from statescan and not implemented by it."""


class CheckpointError(StatescanError, RuntimeError):
    """A checkpoint is missing, damaged, or of a layout that cannot be read."""


class MissingExtraError(StatescanError, ImportError):
    """A library of an optional extra is needed and not installed."""
