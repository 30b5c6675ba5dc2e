"""The in-tree backends, imported through :mod:`lycoris.kernels.registry`, never directly."""
