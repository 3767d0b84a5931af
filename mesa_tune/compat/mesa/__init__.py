"""Mesa (arXiv 2111.11124) as its users write it: `import mesa_tune.compat.mesa as ms`.

Layers compress nothing until a policy is deployed (`ms.policy.deploy_on_init`), and only in training.
"""

from mesa_tune.compat.mesa import policy
from mesa_tune.compat.mesa.layers import GELU, BatchNorm2d, Conv2d, LayerNorm, Linear, MatMul, ReLU, Softmax

__all__ = ["GELU", "BatchNorm2d", "Conv2d", "LayerNorm", "Linear", "MatMul", "ReLU", "Softmax", "policy"]
