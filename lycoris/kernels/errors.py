"""The errors this package raises beside TypeError and ValueError."""

from __future__ import annotations


class BackendError(RuntimeError):
    """A named backend can't serve a call; the message says why and what could."""


class KernelBuildError(RuntimeError):
    """A kernel failed to build (compile, lower or load) for this call."""
