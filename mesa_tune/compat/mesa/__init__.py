"""Mesa (arXiv 2111.11124) as its users write it: `import mesa_tune.compat.mesa as ms`.

Layers compress only in training mode, and only after a policy is deployed (`ms.policy.deploy_on_init`).
"""

from mesa_tune.compat.mesa import policy
from mesa_tune.compat.mesa.layers import GELU, BatchNorm2d, Conv2d, LayerNorm, Linear, MatMul, ReLU, Softmax
from mesa_tune.compat.missing import unsupported

__all__ = [
    "GELU",
    "BatchNorm2d",
    "Conv2d",
    "LayerNorm",
    "Linear",
    "MatMul",
    "ReLU",
    "Softmax",
    "policy",
    "version",
]

version = 1.0
"""Version of Mesa."""

__getattr__ = unsupported(
    __name__,
    {
        "custom_quant": "a layer is a Quantizer itself; mesa_tune.ops.quantize packs a tensor",
        "packbit": "mesa_tune.ops.pack_bits packs masks, mesa_tune.ops.quantize any number of bits",
        "cc": "its convolution is ms.Conv2d",
    },
)
