"""ActNN (arXiv 2104.14129) as its users write it: `import mesa_tune.compat.actnn as actnn`. On any device."""

from mesa_tune.compat.actnn import dataloader, ops
from mesa_tune.compat.actnn.conf import QuantizationConfig, config, set_optimization_level
from mesa_tune.compat.actnn.dataloader import DataLoader
from mesa_tune.compat.actnn.layers import (
    QAvgPool2d,
    QBatchNorm1d,
    QBatchNorm2d,
    QBatchNorm3d,
    QConv1d,
    QConv2d,
    QConv3d,
    QConvTranspose1d,
    QConvTranspose2d,
    QConvTranspose3d,
    QDropout,
    QLinear,
    QMaxPool2d,
    QReLU,
    QSyncBatchNorm,
)
from mesa_tune.compat.actnn.module import QModule
from mesa_tune.compat.actnn.scheme import QBNScheme, QScheme
from mesa_tune.compat.actnn.utils import compute_tensor_bytes, exp_recorder, get_memory_usage

__all__ = [
    "DataLoader",
    "QAvgPool2d",
    "QBNScheme",
    "QBatchNorm1d",
    "QBatchNorm2d",
    "QBatchNorm3d",
    "QConv1d",
    "QConv2d",
    "QConv3d",
    "QConvTranspose1d",
    "QConvTranspose2d",
    "QConvTranspose3d",
    "QDropout",
    "QLinear",
    "QMaxPool2d",
    "QModule",
    "QReLU",
    "QScheme",
    "QSyncBatchNorm",
    "QuantizationConfig",
    "compute_tensor_bytes",
    "config",
    "dataloader",
    "exp_recorder",
    "get_memory_usage",
    "ops",
    "set_optimization_level",
]
