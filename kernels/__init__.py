"""Kernels that ship with tpukern. Those of the Helion frontend load Helion when they are used."""

from tpukern.kernels.add_rms_norm import add_rms_norm
from tpukern.kernels.cross_entropy import cross_entropy
from tpukern.kernels.embedding import embedding
from tpukern.kernels.flash_attention import flash_attention
from tpukern.kernels.gelu import geglu, gelu_tanh
from tpukern.kernels.layer_norm import layer_norm
from tpukern.kernels.linear_helion import linear_helion
from tpukern.kernels.matmul import linear, matmul, matmul_nt, matmul_tn
from tpukern.kernels.reductions import row_mean, row_sum
from tpukern.kernels.rms_norm import rms_norm
from tpukern.kernels.rotary import rotary
from tpukern.kernels.softmax import log_softmax, softmax
from tpukern.kernels.swiglu import swiglu

__all__ = [
    "add_rms_norm",
    "cross_entropy",
    "embedding",
    "flash_attention",
    "geglu",
    "gelu_tanh",
    "layer_norm",
    "linear",
    "linear_helion",
    "log_softmax",
    "matmul",
    "matmul_nt",
    "matmul_tn",
    "rms_norm",
    "rotary",
    "row_mean",
    "row_sum",
    "softmax",
    "swiglu",
]
