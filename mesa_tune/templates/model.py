"""What mesa-tune is to look at. Replace the bodies by your own; it runs as it is.

mesa-tune profile model.py
mesa-tune search --budget 40%
mesa-tune verify
"""

import torch
import torch.nn.functional as F
from torch import nn

# How many samples a training step has. --batch-size overrides it.
BATCH_SIZE = 1024

# Uncomment to train under torch.autocast. --autocast overrides it.
# AUTOCAST = "bfloat16"


def model():
    """Returns the model, ready for training. Moving it to the device is done for you."""
    hidden = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU())]
    return nn.Sequential(nn.Linear(64, 256), *hidden, nn.Linear(256, 10))


def batch(batch_size):
    """Returns one batch of training data: tensors, alone or in tuples, lists, dicts or dataclasses.

    Real data measures best: what a layer keeps depends on shapes, but what rounding does depends on values.
    Torch's, NumPy's and Python's random generators are seeded before each call: with the same seed for the
    same batch once more, with another one for another batch. So choose samples at random. Tensors are moved
    to the device for you.
    """
    images = torch.randn(batch_size, 64)
    labels = torch.randint(0, 10, (batch_size,))
    return images, labels


def loss(model, batch):
    """Returns the loss to minimize, a scalar tensor."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


# Optional; without it AdamW is used. Its state is part of the memory of a step.
# def optimizer(parameters):
#     return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
