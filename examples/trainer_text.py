"""A small BERT that fills in masked bytes of Python's standard library, trained by transformers' Trainer.

mesa-tune profile examples/trainer_text.py
python examples/trainer_text.py                        plain training
python examples/trainer_text.py --policy policy.txt    training with a searched policy
"""

from __future__ import annotations

import argparse
import tempfile

import gpt2_text
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainerCallback, TrainingArguments

BATCH_SIZE = 16
LENGTH = 128
MASK, NOT_MASKED = 256, -100
STEPS = 200

Sample = dict[str, Tensor]


def model() -> nn.Module:
    config = BertConfig(
        vocab_size=MASK + 1,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=LENGTH,
    )
    return BertForMaskedLM(config)


def batch(batch_size: int) -> Sample:
    """Return pieces of text in which 15 % of the bytes are masked; labels are these bytes alone."""
    text = gpt2_text.text()
    starts = torch.randint(len(text) - LENGTH, (batch_size, 1))
    labels = text[starts + torch.arange(LENGTH)].long()
    masked = torch.rand(labels.shape) < 0.15
    return {"input_ids": labels.masked_fill(masked, MASK), "labels": labels.masked_fill(~masked, NOT_MASKED)}


def loss(model: nn.Module, batch: Sample) -> Tensor:
    return model(**batch).loss


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def train(policy: str | None = None, steps: int = STEPS) -> float:
    """Train from scratch, and return the mean loss of the training."""
    torch.manual_seed(0)
    callbacks: list[TrainerCallback] = []
    if policy is not None:
        from mesa_tune.integrations.transformers import MesaTuneCallback

        callbacks = [MesaTuneCallback(policy)]
    network = model()
    samples = [{name: tensor[0] for name, tensor in batch(1).items()} for _ in range(steps * BATCH_SIZE)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=BATCH_SIZE,
            learning_rate=1e-3,
            save_strategy="no",
            report_to=[],
        )
        trainer = Trainer(network, arguments, train_dataset=samples, callbacks=callbacks)
        return trainer.train().training_loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small BERT on the text of the standard library.")
    parser.add_argument("--policy", help="store activations as this policy.txt says")
    print(f"mean loss {train(parser.parse_args().policy):.4f}")
