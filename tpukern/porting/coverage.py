"""What the packages of hand-written CUDA kernels offer, and what does the same on the `tpu` device.

Signatures as in the packages' public sources of autumn 2026.
"""

import ast
import dataclasses
import functools
from typing import Final

PACKAGES: Final = frozenset((
    "apex", "bitsandbytes", "causal_conv1d", "cut_cross_entropy", "deep_gemm", "fla", "flash_attn", "flash_attn_interface",
    "flashinfer", "grouped_gemm", "liger_kernel", "mamba_ssm", "megablocks", "mslk", "natten", "quack", "sageattention",
    "scattermoe", "transformer_engine", "triton", "unsloth", "vllm", "xformers",
))  # fmt: skip

FLASH: Final = (
    "F.scaled_dot_product_attention on (batch, heads, length, dim), enable_gqa=True: kernel flash_attention. Its is_causal "
    "aligns the first query with the first key, this function the last with the last: the same only if both are equally long"
)
_WINDOW: Final = "no kernel for windows"
_SOFTCAP: Final = "no kernel for capped scores"
_ALIBI: Final = "no kernel for ALiBi; a mask of one's own goes to PyTorch's attention"
_LSE: Final = "scaled_dot_product_attention returns no log-sum-exp"
_FLASH_LIMITS: Final = {
    "window_size": _WINDOW,
    "softcap": _SOFTCAP,
    "alibi_slopes": _ALIBI,
    "return_attn_probs": _LSE,
    "dropout_p": "no kernel for dropout; PyTorch's attention has it, with another mask",
}
_FLASH_TAIL: Final = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
_NORM_LIMITS: Final = {
    "residual": "write tpukern.kernels.add_rms_norm(x, residual, weight)",
    "x1": "no second branch",
    "weight1": "no second weight",
    "bias1": "no second bias",
    "dropout_p": "apply F.dropout first",
    "rowscale": "multiply first",
    "prenorm": "write tpukern.kernels.add_rms_norm, which returns the sum too",
    "residual_in_fp32": "the sum has the dtype of its terms",
    "zero_centered_weight": "pass 1 + weight",
    "return_dropout_mask": "apply F.dropout first",
    "out": "no out argument",
    "residual_out": "no out argument",
}


@dataclasses.dataclass(frozen=True)
class Covered:
    """One function or class of a package.

    Attributes:
        signature: Its parameters, as in a `def`.
        instead: What does the same on the `tpu` device; empty if nothing does.
        limits: Why an argument that is not at its default is not covered, by parameter.
    """

    signature: str
    instead: str = ""
    limits: dict[str, str] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def defaults(self) -> dict[str, str | None]:
        """The parameters in order, each with the text of its default, or None."""
        function = ast.parse(f"def f({self.signature}): ...").body[0]
        assert isinstance(function, ast.FunctionDef)
        arguments = function.args
        names = [a.arg for a in arguments.args]
        values: list[str | None] = [None] * (len(names) - len(arguments.defaults))
        values += [ast.unparse(d) for d in arguments.defaults]
        keyword = {
            a.arg: None if d is None else ast.unparse(d)
            for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        }
        return dict(zip(names, values, strict=True)) | keyword


COVERAGE: Final[dict[tuple[str, str], Covered]] = {
    ("flash_attn", "flash_attn_func"): Covered(f"q, k, v, {_FLASH_TAIL}", FLASH, _FLASH_LIMITS),
    ("flash_attn", "flash_attn_kvpacked_func"): Covered(f"q, kv, {_FLASH_TAIL}", f"kv.unbind(2), then {FLASH}", _FLASH_LIMITS),
    ("flash_attn", "flash_attn_qkvpacked_func"): Covered(f"qkv, {_FLASH_TAIL}", f"qkv.unbind(2), then {FLASH}", _FLASH_LIMITS),
    ("flash_attn", "apply_rotary_emb"): Covered(
        "x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None",
        "tpukern.kernels.rotary(x.unflatten(-1, (2, -1)), cos.unsqueeze(1), sin.unsqueeze(1)).flatten(-2): "
        "halves of whole heads, cos and sin in float32",
        {
            "interleaved": "pairs of neighbours are not covered",
            "inplace": "the result is a new tensor",
            "seqlen_offsets": "slice cos and sin first",
            "cu_seqlens": "no packed sequences",
        },
    ),
    ("flash_attn", "rms_norm_fn"): Covered(
        "x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-06, dropout_p=0.0, rowscale=None, "
        "prenorm=False, residual_in_fp32=False, zero_centered_weight=False, return_dropout_mask=False, out_dtype=None, "
        "out=None, residual_out=None",
        "F.rms_norm(x, weight.shape, weight, eps): kernel rms_norm",
        _NORM_LIMITS,
    ),
    ("flash_attn_interface", "flash_attn_func"): Covered(
        "q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, "
        "window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
        "sm_margin=0, return_attn_probs=False",
        FLASH,
        {
            "window_size": _WINDOW,
            "softcap": _SOFTCAP,
            "return_attn_probs": _LSE,
            "qv": "no second value",
            "q_descale": "no 8-bit attention",
            "k_descale": "no 8-bit attention",
            "v_descale": "no 8-bit attention",
            "attention_chunk": "no chunked attention",
        },
    ),
    ("xformers", "memory_efficient_attention"): Covered(
        "query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None",
        "F.scaled_dot_product_attention on (batch, heads, length, dim): kernel flash_attention",
        {
            "attn_bias": "no kernel for biases; LowerTriangularMask is is_causal=True, a tensor goes to PyTorch's attention",
            "p": "no kernel for dropout; PyTorch's attention has it, with another mask",
            "output_dtype": "cast the result",
        },
    ),
    ("liger_kernel", "LigerRMSNorm"): Covered(
        "hidden_size, eps=1e-06, offset=0.0, casting_mode='llama', init_fn='ones', in_place=True, row_mode=None, "
        "elementwise_affine=True",
        "torch.nn.RMSNorm(hidden_size, eps): kernel rms_norm, which rounds once, at the end",
        {"offset": "add it to the weight", "casting_mode": "arithmetic is in float32 whatever the mode"},
    ),
    ("liger_kernel", "liger_rms_norm"): Covered(
        "X, W, eps, offset=0.0, casting_mode='llama', in_place=True",
        "F.rms_norm(X, W.shape, W, eps): kernel rms_norm, which rounds once, at the end",
        {"offset": "add it to the weight", "casting_mode": "arithmetic is in float32 whatever the mode"},
    ),
    ("liger_kernel", "liger_swiglu"): Covered("a, b", "tpukern.kernels.swiglu(a, b)"),
    ("liger_kernel", "liger_geglu"): Covered("a, b", "tpukern.kernels.geglu(a, b)"),
    ("liger_kernel", "LigerCrossEntropyLoss"): Covered(
        "weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction='mean', softcap=None, "
        "return_z_loss=False, return_token_accuracy=False, return_predicted_tokens=False",
        "torch.nn.CrossEntropyLoss, PyTorch's own",
        {
            "lse_square_scale": "add lse_square_scale * torch.logsumexp(logits, -1) ** 2",
            "softcap": "pass softcap * torch.tanh(logits / softcap)",
            "return_z_loss": "compute it from torch.logsumexp",
            "return_token_accuracy": "compute it from the logits",
            "return_predicted_tokens": "compute them from the logits",
        },
    ),
    ("apex", "FusedRMSNorm"): Covered(
        "normalized_shape, eps=1e-05, elementwise_affine=True, memory_efficient=False",
        "torch.nn.RMSNorm(normalized_shape, eps): kernel rms_norm, for one axis",
    ),
    ("apex", "FusedLayerNorm"): Covered(
        "normalized_shape, eps=1e-05, elementwise_affine=True, memory_efficient=False",
        "torch.nn.LayerNorm(normalized_shape, eps)",
    ),
    ("apex", "FusedAdam"): Covered(
        "params, lr=0.001, bias_correction=True, betas=(0.9, 0.999), eps=1e-08, adam_w_mode=True, weight_decay=0.0, "
        "amsgrad=False, set_grad_none=True, capturable=False, master_weights=False",
        "torch.optim.AdamW, PyTorch's own; its weight_decay is 0.01 unless given",
        {
            "bias_correction": "torch.optim.AdamW always corrects",
            "adam_w_mode": "torch.optim.Adam adds the decay to the gradient",
            "master_weights": "keep float32 parameters and use autocast",
        },
    ),
    ("vllm", "rms_norm"): Covered(
        "out, input, weight, epsilon", "out.copy_(F.rms_norm(input, weight.shape, weight, epsilon)): kernel rms_norm"
    ),
    ("vllm", "fused_add_rms_norm"): Covered(
        "input, residual, weight, epsilon", "tpukern.kernels.add_rms_norm(input, residual, weight), which returns both results"
    ),
}


def covered(dotted: str) -> Covered | None:
    """Returns what is known of a name, found by its package and its last part: packages export a name at several places."""
    return COVERAGE.get((dotted.split(".")[0], dotted.split(".")[-1]))
