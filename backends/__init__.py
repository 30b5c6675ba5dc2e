"""The in-tree backends, imported by name through :mod:`lycoris.kernels.registry`, never directly."""
