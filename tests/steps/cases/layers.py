"""Functions and layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import rnn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.builders import gpt2, llama
from tests.steps.cases.common import (
    CLASSES,
    TOKENS,
    WIDTH,
    Batch,
    Inside,
    Net,
    Step,
    inside,
    through,
)


class Rounded(torch.autograd.Function):
    """Round, straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x.mul(8).round().div(8)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class Swish(torch.autograd.Function):
    """A function of the user's own, which saves its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return grads[0] * s * (1 + x * (1 - s))


def custom(function: Any) -> Inside:
    return lambda m, h: function.apply(h)


def checkpointed(m: Any, h: Tensor, **options: Any) -> Any:
    for block in m.blocks:
        h = checkpoint(block, h, **options)
    return h


def selective() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


def hyper(m: Any, h: Tensor) -> Any:
    """A weight that another layer computes."""
    weight = m.maker(h.mean((0, 1))).view(64, 64)
    return h @ weight


def manual_norm(m: Any, h: Tensor) -> Any:
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)


def rotary(m: Any, h: Tensor) -> Any:
    angle = torch.arange(h.shape[-2])[:, None] / 10 ** (torch.arange(32) / 16)
    first, second = h.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def einsum_attention(m: Any, h: Tensor) -> Any:
    heads = h.unflatten(-1, (4, 16))
    weights = torch.einsum("bqhd,bkhd->bhqk", heads, heads).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, heads).flatten(2)


def causal(m: Any, h: Tensor) -> Any:
    heads = h.unflatten(-1, (4, 16)).transpose(1, 2)
    out = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1, is_causal=True)
    return out.transpose(1, 2).flatten(2)


def multihead(m: Any, h: Tensor) -> Any:
    out, _ = m.attention(h, h, h, need_weights=False, key_padding_mask=torch.zeros(h.shape[:2]).bool())
    return out


def in_place(m: Any, h: Tensor) -> Any:
    h = h * 2
    h += 1
    return F.relu(h, inplace=True)


def fourier(m: Any, h: Tensor) -> Any:
    return torch.fft.fft2(h).real


def graph(m: Any, h: Tensor) -> Any:
    """Messages along the edges of a ring."""
    n = h.shape[1]
    source, target = torch.arange(n), (torch.arange(n) + 1) % n
    return torch.zeros_like(h).index_add(1, target, h[:, source] * h[:, target])


def recurrent(kind: Any) -> Callable[[], nn.Module]:
    def forward(m: Any, h: Tensor) -> Any:
        packed = rnn.pack_padded_sequence(m.cell(h)[0], torch.full((len(h),), h.shape[1]), batch_first=True)
        return rnn.pad_packed_sequence(m.cell2(packed)[0], batch_first=True)[0]

    make = partial(kind, 64, 64, batch_first=True)
    return inside(forward, cell=make, cell2=make)


class UNet(nn.Module):
    """Down and up, with skips; `channels`: in the memory format of convolutions."""

    def __init__(self, channels_last: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU()) for _ in range(2)]
        )
        self.down, self.up = nn.Conv2d(16, 16, 2, 2), nn.ConvTranspose2d(16, 16, 2, 2)
        self.head = nn.Conv2d(32, 3, 1)
        if channels_last:
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Any:
        skip = self.blocks[0](self.stem(x))
        return self.head(torch.cat([self.up(self.blocks[1](self.down(skip))), skip], 1))


def pictures(n: int) -> Any:
    return torch.randn(n, 3, 16, 16)


def denoised(model: Any, x: Tensor) -> Any:
    noise = torch.randn_like(x)
    level = torch.rand(len(x), 1, 1, 1)
    return F.mse_loss(model(x * (1 - level) + noise * level), noise)


def warped(model: Any, x: Tensor) -> Any:
    shift = F.affine_grid(torch.eye(2, 3).expand(len(x), 2, 3) * 0.9, list(x.shape), align_corners=False)
    return F.mse_loss(F.grid_sample(model(x), shift, align_corners=False), x)


def upsampled(model: Any, x: Tensor) -> Any:
    return F.l1_loss(F.interpolate(model(F.avg_pool2d(x, 2)), scale_factor=2, mode="bilinear"), x)


class Words(Net):
    """Words from a table with sparse gradients, or one that is the head's weight, too."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(50, WIDTH, sparse=sparse)
        self.sparse = sparse

    def forward(self, x: Tensor) -> Any:
        h = self.words(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h.mean(1)) if self.sparse else F.linear(h, self.words.weight)


def words(n: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(50, (n, TOKENS))
    return ids, ids.roll(-1, 1)


def first_word(model: Any, batch: Batch) -> Any:
    return F.cross_entropy(model(batch[0]), batch[1][:, 0] % CLASSES)


def tied_loss(model: Any, batch: Batch) -> Any:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def language(model: Any, batch: Batch) -> Any:
    return model(input_ids=batch[0], labels=batch[0]).loss


def low_rank() -> nn.Module:
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(llama(32, 2), config)


def prompted(model: Any, batch: Batch) -> Any:
    embeddings = model.base.get_input_embeddings()(batch[0])
    h = torch.cat([model.prompt.expand(len(embeddings), -1, -1), embeddings], 1)
    labels = F.pad(batch[0], (len(model.prompt), 0), value=-100)
    return model.base(inputs_embeds=h, labels=labels).loss


class Prompted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = llama(32, 2).requires_grad_(False)
        self.prompt = nn.Parameter(torch.randn(4, 32))


def encoder() -> nn.Module:
    layers = (nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True) for _ in range(2))
    return Net(layers)


LAYERS = {
    "rounding straight through": Step(inside(custom(Rounded))),
    "a function of one's own": Step(inside(custom(Swish))),
    "checkpoints": Step(through(partial(checkpointed, use_reentrant=False))),
    "reentrant checkpoints": Step(through(partial(checkpointed, use_reentrant=True))),
    "selective checkpoints": Step(through(partial(checkpointed, use_reentrant=False, context_fn=selective))),
    "a weight that a layer computes": Step(inside(hyper, maker=lambda: nn.Linear(64, 64 * 64))),
    "RMSNorm by hand": Step(inside(manual_norm)),
    "rotary embeddings": Step(inside(rotary)),
    "attention by einsum": Step(inside(einsum_attention)),
    "causal attention with dropout": Step(inside(causal)),
    "MultiheadAttention with a mask": Step(
        inside(multihead, attention=partial(nn.MultiheadAttention, 64, 4, batch_first=True))
    ),
    "TransformerEncoder": Step(encoder, draws=True),
    "in place": Step(inside(in_place)),
    "Fourier mixing": Step(inside(fourier)),
    "a graph": Step(inside(graph)),
    "LSTM, packed": Step(recurrent(nn.LSTM)),
    "GRU, packed": Step(recurrent(nn.GRU)),
    "a UNet that denoises": Step(UNet, denoised, pictures),
    "a UNet in channels_last": Step(partial(UNet, channels_last=True), denoised, pictures),
    "a warped image": Step(UNet, warped, pictures),
    "a larger image": Step(UNet, upsampled, pictures),
    "sparse gradients": Step(partial(Words, sparse=True), first_word, words),
    "a tied head": Step(partial(Words, sparse=False), tied_loss, words),
    "GPT-2": Step(partial(gpt2, 32, 2), language, words, draws=True),
    "Llama": Step(partial(llama, 32, 2), language, words),
    "LoRA": Step(low_rank, language, words),
    "a learned prompt": Step(Prompted, prompted, words),
}
