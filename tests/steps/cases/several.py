"""Several models, views, losses or backwards."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from tests.steps.cases.common import (
    CLASSES,
    TOKENS,
    WIDTH,
    Batch,
    Net,
    Step,
    supervised,
    through,
)


def contrastive(model: Any, batch: Batch) -> Any:
    views = (F.normalize(model(batch[0] + 0.1 * torch.randn_like(batch[0])), dim=-1) for _ in range(2))
    first, second = views
    return F.cross_entropy(first @ second.T / 0.1, torch.arange(len(first)))


def triplet(model: Any, batch: Batch) -> Any:
    x = batch[0]
    return F.triplet_margin_loss(model(x), model(x + 0.1), model(x.flip(0)))


def distilled(model: Any, batch: Batch) -> Any:
    with torch.no_grad():
        wanted = model.teacher(batch[0]).softmax(-1)
    return F.kl_div(model(batch[0]).log_softmax(-1), wanted, reduction="batchmean")


def with_teacher() -> nn.Module:
    return Net(teacher=Net().eval().requires_grad_(False))


def bootstrapped(model: Any, batch: Batch) -> Any:
    """BYOL: a teacher that follows the student, inside the step."""
    with torch.no_grad():
        for slow, fast in zip(model.teacher.parameters(), model.parameters(), strict=False):
            slow.lerp_(fast, 0.01)
        wanted = F.normalize(model.teacher(batch[0]), dim=-1)
    return (F.normalize(model(batch[0].flip(1)), dim=-1) - wanted).square().sum(-1).mean()


def adversarial(model: Any, batch: Batch) -> Any:
    """FGSM: the gradient of the input, then a loss on what it makes worse."""
    x = batch[0].clone().requires_grad_()
    (grad,) = torch.autograd.grad(supervised(model, (x, batch[1])), x)
    return supervised(model, (batch[0] + 0.1 * grad.sign(), batch[1]))


def with_critic() -> nn.Module:
    return Net(critic=nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 1)))


def gan(model: Any, batch: Batch) -> Any:
    """Both steps of a GAN; the discriminator's gradients of the second are dropped."""
    fake = model.features(batch[0])
    ones, zeros = torch.ones(len(fake), TOKENS, 1), torch.zeros(len(fake), TOKENS, 1)
    real = F.binary_cross_entropy_with_logits(model.critic(model.embed(batch[0]).detach()), ones)
    critic = real + F.binary_cross_entropy_with_logits(model.critic(fake.detach()), zeros)
    critic.backward()
    kept = [parameter.grad for parameter in model.critic.parameters()]
    for parameter in model.critic.parameters():
        parameter.grad = None
    loss = F.binary_cross_entropy_with_logits(model.critic(fake), ones)
    loss.backward()
    for parameter, grad in zip(model.critic.parameters(), kept, strict=True):
        parameter.grad = grad
    return critic.detach() + loss.detach()


def twice(model: Any, batch: Batch) -> Any:
    """Two losses of one forward, each with a backward of its own."""
    logits = model(batch[0])
    first, second = F.cross_entropy(logits, batch[1]), logits.square().mean()
    first.backward(retain_graph=True)
    second.backward()
    return (first + second).detach()


def accumulated(model: Any, batch: Batch) -> Any:
    total = torch.zeros(())
    for x, y in zip(batch[0].chunk(4), batch[1].chunk(4), strict=True):
        loss = supervised(model, (x, y)) / 4
        loss.backward()
        total += loss.detach()
    return total


def clipped(model: Any, batch: Batch) -> Any:
    loss = supervised(model, batch)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return loss.detach()


def given_gradient(model: Any, batch: Batch) -> Any:
    logits = model(batch[0])
    logits.backward(gradient=logits.detach().softmax(-1) - F.one_hot(batch[1], CLASSES))
    return logits.detach().sum()


def two_steps(model: Any, batch: Batch) -> Any:
    """SAM: a gradient, a climb, the gradient there."""
    supervised(model, batch).backward()
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
    climbs = [0.05 * parameter.grad / norm for parameter in parameters]
    with torch.no_grad():
        for parameter, climb in zip(parameters, climbs, strict=True):
            parameter.add_(climb)
            parameter.grad = None
    loss = supervised(model, batch)
    loss.backward()
    with torch.no_grad():
        for parameter, climb in zip(parameters, climbs, strict=True):
            parameter.sub_(climb)
    return loss.detach()


def cached_gradients(model: Any, batch: Batch) -> Any:
    """GradCache: features first, their gradients in a second forward."""
    chunks = batch[0].chunk(4)
    state = torch.get_rng_state()
    with torch.no_grad():
        features = torch.cat([model(x) for x in chunks]).requires_grad_()
    loss = F.cross_entropy(features @ features.T, torch.arange(len(features)))
    (wanted,) = torch.autograd.grad(loss, features)
    torch.set_rng_state(state)
    for x, grad in zip(chunks, wanted.chunk(4), strict=True):
        model(x).backward(gradient=grad)
    return loss.detach()


def gradient_penalty(model: Any, batch: Batch) -> Any:
    x = batch[0].clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return supervised(model, batch) + grad.square().sum((1, 2)).mean()


def inner_step(model: Any, batch: Batch) -> Any:
    """First-order MAML: a step on half of the batch, the loss of the other half there."""
    weights = dict(model.named_parameters())
    grads = torch.autograd.grad(supervised(model, (batch[0][:4], batch[1][:4])), list(weights.values()))
    moved = {k: w - 0.1 * g for (k, w), g in zip(weights.items(), grads, strict=True)}
    return F.cross_entropy(functional_call(model, moved, (batch[0][4:],)), batch[1][4:])


def fixed_point(m: Any, h: Tensor) -> Any:
    """A deep equilibrium: no gradient until the last run of the block."""
    z = torch.zeros_like(h)
    with torch.no_grad():
        for _ in range(4):
            z = 0.5 * m.blocks[0](z) + h
    return m.blocks[1](0.5 * m.blocks[0](z) + h)


def with_lstm() -> nn.Module:
    return Net(lstm=nn.LSTM(WIDTH, WIDTH, batch_first=True))


def truncated(model: Any, batch: Batch) -> Any:
    """Backpropagation through time in two windows, the state detached between them."""
    state, total = None, torch.zeros(())
    for x in model.features(batch[0]).detach().chunk(2, dim=1):
        out, state = model.lstm(x, state)
        loss = F.cross_entropy(model.head(out.mean(1)), batch[1])
        loss.backward()
        state = tuple(each.detach() for each in state)
        total += loss.detach()
    return total


def connectionist(model: Any, batch: Batch) -> Any:
    logits = model.head(model.features(batch[0])).log_softmax(-1).transpose(0, 1)
    targets = batch[1].clamp(min=1).unsqueeze(1).expand(-1, 3)
    sizes = torch.full((len(batch[1]),), TOKENS), torch.full((len(batch[1]),), 3)
    return F.ctc_loss(logits, targets, *sizes)


def scaled(model: Any, batch: Batch, dtype: torch.dtype = torch.float16) -> Any:
    with torch.autocast("cpu", dtype):
        loss = supervised(model, batch)
    (loss * 1024).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= 1024
    return loss.detach()


def in_bfloat16(model: Any, batch: Batch) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return supervised(model, batch)


def mixed_up(model: Any, batch: Batch) -> Any:
    weight, order = random.betavariate(0.4, 0.4), np.random.permutation(len(batch[0]))
    logits = model(weight * batch[0] + (1 - weight) * batch[0][order])
    losses = (F.cross_entropy(logits, y) for y in (batch[1], batch[1][order]))
    first, second = losses
    return weight * first + (1 - weight) * second


def focal(model: Any, batch: Batch) -> Any:
    log_p = model(batch[0]).log_softmax(-1).gather(1, batch[1][:, None])
    return (-((1 - log_p.exp()) ** 2) * log_p).mean()


def policy_gradient(model: Any, batch: Batch) -> Any:
    """PPO's clipped ratio of sampled actions, with a bonus for entropy."""
    chosen = torch.distributions.Categorical(logits=model(batch[0]))
    actions = chosen.sample()
    ratio = (chosen.log_prob(actions) - chosen.log_prob(actions).detach()).exp()
    reward = (actions == batch[1]).float() - 0.5
    surrogate = torch.minimum(ratio * reward, ratio.clamp(0.8, 1.2) * reward)
    return -surrogate.mean() - 0.01 * chosen.entropy().mean()


def reparametrized(model: Any, batch: Batch) -> Any:
    """A variational autoencoder: a sample of a normal distribution, and its divergence."""
    mean, spread = model.features(batch[0]).chunk(2, dim=-1)
    posterior = torch.distributions.Normal(mean, F.softplus(spread) + 1e-3)
    sample = posterior.rsample()
    prior = torch.distributions.kl_divergence(posterior, torch.distributions.Normal(0.0, 1.0))
    return F.mse_loss(model.decoder(sample), batch[0]) + 0.01 * prior.mean()


SEVERAL = {
    "contrastive": Step(Net, contrastive),
    "triplets": Step(Net, triplet),
    "distillation": Step(with_teacher, distilled),
    "a teacher that follows (BYOL)": Step(with_teacher, bootstrapped),
    "adversarial examples": Step(Net, adversarial, changes=True),
    "a GAN": Step(
        lambda: Net(critic=nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 1))),
        gan,
        profiled=False,
    ),
    "two backwards of one forward": Step(Net, twice, profiled=False),
    "accumulation": Step(Net, accumulated, profiled=False),
    "clipped gradients": Step(Net, clipped, profiled=False),
    "backward of a given gradient": Step(Net, given_gradient, profiled=False),
    "sharpness-aware (SAM)": Step(Net, two_steps, changes=True, profiled=False),
    "cached gradients (GradCache)": Step(Net, cached_gradients, profiled=False),
    "gradient penalty": Step(Net, gradient_penalty, refused="create_graph"),
    "first-order MAML": Step(Net, inner_step, changes=True),
    "a deep equilibrium": Step(through(fixed_point)),
    "truncated backpropagation": Step(
        lambda: Net(lstm=nn.LSTM(WIDTH, WIDTH, batch_first=True)), truncated, profiled=False
    ),
    "CTC": Step(Net, connectionist),
    "float16, scaled": Step(Net, scaled, profiled=False),
    "bfloat16": Step(Net, in_bfloat16),
    "mixup": Step(Net, mixed_up),
    "focal loss": Step(Net, focal),
    "PPO": Step(Net, policy_gradient),
    "a variational autoencoder": Step(lambda: Net(decoder=nn.Linear(WIDTH // 2, 16)), reparametrized),
}
