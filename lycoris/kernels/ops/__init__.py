"""One file a family: its OpSpecs and formulas, nothing of any backend. Found, never listed."""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
