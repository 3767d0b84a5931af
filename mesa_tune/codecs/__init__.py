"""The ways to store a tensor, one file a codec. To add one: its file, and its line in `CODECS`."""

from mesa_tune.codecs import quantize
from mesa_tune.codecs.spec import Codec, Memory, Spec

CODECS: dict[str, Codec] = {"quantize": quantize}

__all__ = ["CODECS", "Codec", "Memory", "Spec"]
