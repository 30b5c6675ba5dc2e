"""Maps the import package ``lycoris.backends`` onto the top-level folder ``backends/``.

The packages are discovered, never listed: a new backend folder ships without anyone remembering it.
"""

from setuptools import find_packages, setup

# In a source tree lycoris/backends is only a shim that points at backends/; it never ships.
core = [p for p in find_packages(include=["lycoris", "lycoris.*"]) if p != "lycoris.backends"]
backends = ["lycoris.backends"] + [f"lycoris.backends.{p}" for p in find_packages("backends")]

setup(
    packages=core + backends,
    package_dir={"lycoris": "lycoris", "lycoris.backends": "backends"},
    # True, the default, would copy what MANIFEST.in grafts: the shim, over backends/__init__.py.
    include_package_data=False,
    package_data={"lycoris": ["py.typed", "bench/*.j2"], "lycoris.backends": ["**/*.h"]},
)
