"""The model, batch and loss that mesa-tune measures. Replace the bodies by your own; the file runs as it is.

mesa-tune profile model.py
mesa-tune search --budget 40%
mesa-tune verify
"""

import torch
import torch.nn.functional as F
from torch import nn

# Number of samples in one training step. --batch-size overrides it.
BATCH_SIZE = 1024

# Uncomment to train under torch.autocast. --autocast overrides it.
# AUTOCAST = "bfloat16"

# Uncomment what your training step does: batches whose gradients are added before the optimizer's step, the
# largest norm of the gradient, a GradScaler, gradients that are set to zero instead of freed.
# ACCUMULATION = 4
# CLIP_NORM = 1.0
# SCALER = True
# SET_TO_NONE = False

# Uncomment to measure gradient errors at several points of training, too: files of weights (state_dicts).
# CHECKPOINTS = ["step20.pt", "step300.pt"]

# Uncomment to take training steps before errors are measured. Without it, they are taken only while some
# weights have gradients of exactly zero, as LoRA's have before its first step.
# STEPS_BEFORE = 100


def model():
    """Return the model, ready for training. mesa-tune moves it to the device."""
    hidden = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU())]
    return nn.Sequential(nn.Linear(64, 256), *hidden, nn.Linear(256, 10))


def batch(batch_size):
    """Return one batch of training data: tensors, alone or in tuples, lists, dicts or dataclasses.

    Use real data: the bytes that a layer saves depend on shapes, but the error of rounding depends on values.
    Choose samples at random: the generators of torch, NumPy and Python are seeded before each call, with the
    same seed for the same batch again, and another seed for another batch. mesa-tune moves the tensors to the
    device.
    """
    images = torch.randn(batch_size, 64)
    labels = torch.randint(0, 10, (batch_size,))
    return images, labels


def loss(model, batch):
    """Return the loss to minimize, a scalar tensor."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


# Optional, if the constants above do not say what your training step does: the whole step, taken as it is.
# It may call backward several times, and must call optimizer.step(). Then loss() is not needed, and the
# constants and AUTOCAST are left out: use torch.autocast here.
# def step(model, batch, optimizer):
#     optimizer.zero_grad()
#     for images, labels in zip(*(tensor.chunk(4) for tensor in batch)):
#         (F.cross_entropy(model(images), labels) / 4).backward()
#     torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
#     optimizer.step()

# Optional; the default is AdamW. The optimizer's state is part of the memory of a step.
# def optimizer(parameters):
#     return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
