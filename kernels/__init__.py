"""Kernels that ship with tpukern."""
