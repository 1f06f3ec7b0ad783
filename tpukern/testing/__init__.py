"""Proof: what a kernel author runs before any TPU time is spent.

The parts, from the bottom: `values` (inputs), `ulp` (the one error metric), `jaxprs` (rewriting of traced programs),
`arithmetic` (what the chip's units compute) and `semantics` (what its memory does).
"""
