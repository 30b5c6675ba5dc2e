"""Triton and TileLang kernels for the LyCORIS family of adapters."""

from . import functional
from ._version import __version__
from .kernels.errors import BackendError, KernelBuildError
from .kernels.registry import use_backend

__all__ = ["BackendError", "KernelBuildError", "__version__", "functional", "use_backend"]
