"""Kernels that ship with tpukern."""

from tpukern.kernels.flash_attention import flash_attention
from tpukern.kernels.matmul import linear, matmul, matmul_nt, matmul_tn
from tpukern.kernels.rms_norm import rms_norm
from tpukern.kernels.swiglu import swiglu

__all__ = ["flash_attention", "linear", "matmul", "matmul_nt", "matmul_tn", "rms_norm", "swiglu"]
