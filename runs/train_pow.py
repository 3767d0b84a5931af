
import torch
from torch import nn
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
optimizer = torch.optim.Adam(model.parameters())
for _ in range(40):
    x, y = torch.randn(16, 32), torch.randn(16, 8)
    loss = -torch.distributions.Normal(model(x), 1.0).log_prob(y).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
