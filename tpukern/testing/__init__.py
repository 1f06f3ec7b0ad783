"""Proof: what a kernel author runs before any TPU time is spent.

The parts, from the bottom: `values` (inputs), `ulp` (the one error metric), `reference` (what should come out), `jaxprs`
(rewriting of traced programs), `arithmetic` (what the chip's units compute), `watching` and `semantics` (what its memory
does).
"""
