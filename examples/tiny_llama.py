"""A small Llama-style language model over bytes, trained on English text that ships with Python. Plain PyTorch.

    y = x + attention(rms_norm(x));  y + down(silu(gate(h)) * up(h)) with h = rms_norm(y);  three such blocks, rotary positions,
    two key/value heads for four query heads, the embedding reused as output layer.

Run it on any device: `python tiny_llama.py --device cpu`. The initial weights and the batches are drawn on the CPU from one
seed, so that runs on two devices can be compared step by step: `--save FILE` keeps a run's losses, `--beside FILE` prints
them next to its own.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Activation = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the model and of a batch."""

    vocabulary: int = 256
    width: int = 256
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 512
    length: int = 128
    batch: int = 4

    @property
    def head_width(self) -> int:
        return self.width // self.heads


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (x[i], x[i + half]) of the last axis by their position's angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q = nn.Linear(shape.width, shape.heads * shape.head_width, bias=False)
        self.k = nn.Linear(shape.width, shape.kv_heads * shape.head_width, bias=False)
        self.v = nn.Linear(shape.width, shape.kv_heads * shape.head_width, bias=False)
        self.out = nn.Linear(shape.heads * shape.head_width, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def split(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, self.shape.head_width)).transpose(1, 2)

        q, k, v = rotate(split(self.q(x)), cos, sin), rotate(split(self.k(x)), cos, sin), split(self.v(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, shape: Shape, activation: Activation) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x), self.up(x)))


class Block(nn.Module):
    def __init__(self, shape: Shape, activation: Activation) -> None:
        super().__init__()
        self.before_attention, self.attention = RMSNorm(shape.width), Attention(shape)
        self.before_mlp, self.mlp = RMSNorm(shape.width), MLP(shape, activation)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x), cos, sin)
        return x + self.mlp(self.before_mlp(x))


class TinyLlama(nn.Module):
    """Bytes (batch, length) int64 to logits (batch, length, vocabulary)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, activation: Activation = silu_times) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape, activation) for _ in range(shape.layers))
        self.last = RMSNorm(shape.width)
        half = shape.head_width // 2
        angle = torch.outer(torch.arange(shape.length).float(), 10_000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())
        for name, weight in self.named_parameters():
            if weight.dim() == 2:  # layers that add to the residual stream start smaller, as there are 2 * layers of them
                scale = math.sqrt(2 * shape.layers) if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(weight, std=0.5 / math.sqrt(weight.shape[1]) / scale)

    def forward(self, bytes_in: Tensor) -> Tensor:
        x = self.embedding(bytes_in)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.linear(self.last(x), self.embedding.weight)


def corpus() -> Tensor:
    """The Python language reference as bytes, about 400,000 of them, without its line breaks and indents."""
    text = " ".join(" ".join(topics[name].split()) for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def learning_rate(step: int, steps: int, peak: float = 2e-3) -> float:
    """Linear for 20 steps, then half a cosine down to a tenth."""
    return peak * min((step + 1) / 20, 0.55 + 0.45 * math.cos(math.pi * step / steps))


class Curve:
    """Losses of a run, printed every ten steps, next to a reference's where there is one."""

    def __init__(self, device: str, beside: list[float] | None) -> None:
        self.losses: list[float] = []
        self.beside, self.started = beside, time.monotonic()
        print(f"{'step':>6} {device:>10}" + (f" {'reference':>10} {'difference':>11}" if beside else "") + f" {'seconds':>8}")

    def add(self, losses: list[float]) -> None:
        self.losses += losses
        step, loss = len(self.losses), self.losses[-1]
        row = f"{step:6d} {loss:10.5f}"
        if self.beside:
            reference = self.beside[step - 1]
            row += f" {reference:10.5f} {loss - reference:+11.1e}"
        print(f"{row} {time.monotonic() - self.started:8.1f}", flush=True)


def train(
    model: nn.Module, shape: Shape, device: str, steps: int, *, compiled: bool, beside: list[float] | None
) -> list[float]:
    """Trains `model` on `device` and returns the loss of every step."""
    text, draw = corpus(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate(0, steps), betas=(0.9, 0.95), weight_decay=0.1)

    def loss_of(bytes_in: Tensor, bytes_out: Tensor) -> Tensor:
        return F.cross_entropy(model(bytes_in).flatten(0, 1), bytes_out.flatten())

    loss_now = torch.compile(loss_of) if compiled else loss_of
    curve, unread = Curve(device, beside), []
    for step in range(steps):
        starts = torch.randint(len(text) - shape.length - 1, (shape.batch, 1), generator=draw)
        window = text[starts + torch.arange(shape.length + 1)].long()
        loss = loss_now(window[:, :-1].contiguous().to(device), window[:, 1:].contiguous().to(device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        optimizer.step()
        unread.append(loss.detach())
        if len(unread) == 10 or step == steps - 1:  # reading a loss waits for the device
            curve.add([loss.item() for loss in unread])
            unread = []
    return curve.losses


@torch.no_grad()
def sample(model: nn.Module, shape: Shape, device: str, prompt: str, count: int, *, compiled: bool) -> str:
    """Continues `prompt` by `count` bytes, or up to the model's length.

    Bytes after the last one are padding, which causal attention cannot see.
    """
    logits_of = torch.compile(model) if compiled else model
    draw, written = torch.Generator().manual_seed(2), list(prompt.encode())
    for _ in range(min(count, shape.length - len(written))):
        padded = torch.tensor([written + [0] * (shape.length - len(written))])
        logits = logits_of(padded.to(device))[0].cpu()[len(written) - 1]
        written.append(int(torch.multinomial((logits / 0.6).softmax(-1), 1, generator=draw)))
    return bytes(written).decode(errors="replace")


def main(activation: Activation = silu_times) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="tpu")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--eager", action="store_true", help="do not compile (the cpu device never does)")
    parser.add_argument("--sample", type=int, default=100, help="bytes of text to write at the end (default: 100)")
    parser.add_argument("--save", type=Path, help="write the losses and the sample here, as JSON")
    parser.add_argument("--beside", type=Path, help="a file written by --save, to print next to this run")
    options = parser.parse_args()

    torch.set_num_threads(1)  # an XLA device on the CPU has threads of its own; two pools fight over the cores
    torch.manual_seed(0)
    shape = Shape()
    model = TinyLlama(shape, activation).to(options.device)
    compiled = not options.eager and options.device != "cpu"
    count = sum(weight.numel() for weight in model.parameters())
    print(f"{count / 1e6:.1f}M parameters on {options.device}, {'compiled' if compiled else 'eager'}, {options.steps} steps")

    beside = json.loads(options.beside.read_text())["losses"] if options.beside else None
    losses = train(model, shape, options.device, options.steps, compiled=compiled, beside=beside)
    text = sample(model, shape, options.device, "The statement", options.sample, compiled=compiled)
    print("\nIt writes:\n  " + text.replace("\n", "\n  "))
    if options.save:
        options.save.write_text(json.dumps({"device": options.device, "losses": losses, "sample": text}) + "\n")


if __name__ == "__main__":
    main()
