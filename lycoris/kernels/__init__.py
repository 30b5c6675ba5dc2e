"""Core: contracts, precision, selection and autograd. No kernel and no backend's name is here."""
