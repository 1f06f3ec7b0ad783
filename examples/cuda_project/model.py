"""One layer of a language model as it is often written for CUDA: what `tpukern port examples/cuda_project` is shown on."""

import torch
from flash_attn import flash_attn_func
from liger_kernel.transformers import LigerRMSNorm
from torch import nn


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, window: int) -> None:
        super().__init__()
        self.norm = LigerRMSNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width, device="cuda")
        self.heads, self.window = heads, window

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_cuda:
            x = x.cuda()
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        whole = flash_attn_func(q, k, v, causal=True)
        near = flash_attn_func(q, k, v, causal=True, window_size=(self.window, 0))
        return (whole + near).flatten(2)


if __name__ == "__main__":
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    print(Layer(256, 4, 64).to(device)(torch.randn(2, 128, 256, device=device)).shape)
